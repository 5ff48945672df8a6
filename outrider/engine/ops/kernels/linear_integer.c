/* x times the transpose of weights of 8 or 4 bits, plus bias: rows are quantised on the fly, products are integers.
 *
 * Weights come in groups along k, 64 of 8 bits or 32 of 4 bits, each group of each output with a scale of its own (as
 * Dettmers et al., 2022, "8-bit Optimizers", arXiv 2110.02861, quantise by blocks). A row of x is quantised to eight
 * bits by the same groups. A group's products are added as integers, which is exact in any order; float32 sums go from
 * group to group in one order. So a row's bits depend on nothing but the row, as those of linear.c.
 *
 * A block holds 16 outputs: for each group the weights, four of k at a time for all outputs, then the 16 scales in
 * bfloat16. Bytes are weights plus 128; of nibbles, plus 8, the low ones are the first half of a group. The last group
 * and the last block are filled up with zeros. outrider/engine/ops/packed.py writes this. */
#include "kernels.h"
#include "lanes.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#define LINE 64
#define GROUP(bits) ((bits) == 8 ? 64 : 32)
#define GROUP_BYTES(bits) ((bits) == 8 ? 16 * LINE + 32 : 4 * LINE + 32)
/* Two registers a row: its integer sums and its float32 sums. */
#if REGISTER_BYTES == 64
#define INTEGER_ROWS 10
#else
#define INTEGER_ROWS 3
#endif
/* Far enough that memory answers in time; hardware alone stops at each page. */
#define PREFETCH_BYTES 8192
#define ITEMS_PER_THREAD 16
#define MIN_ITEM_BYTES 16384
#define MAX_ITEM_BYTES 262144
/* Rows whose quantised inputs stay in the second-level cache while an item's weights pass. */
#define MAX_STRETCH_BYTES 262144

typedef uint8_t bytes __attribute__((vector_size(REGISTER_BYTES)));

typedef struct {
    const float *x;
    const uint8_t *weight;
    const float *bias;
    float *output;
    int8_t *rows;
    float *scales;
    int32_t *starts;
    int64_t num_rows, num_inputs, num_outputs, num_groups, num_blocks, block_bytes, item_blocks, num_stretches;
    int bits, offset;
} integer_job;

INLINE ints splat_int(int32_t value) { return value - (ints){0}; }

INLINE bytes load_bytes(const uint8_t *from) {
    bytes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE int32_t four_bytes(const int8_t *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE bytes high_nibbles(bytes both) { return (bytes)(((words)both >> 4) & 0x0f0f0f0f); }

/* Without special instructions: AVX2 multiplies bytes of one sign with bytes of two, and adds pairs within 16 bits;
 * weights of 8 bits keep within them when their signs move to the inputs. */
#if REGISTER_BYTES >= 32
INLINE __m256i dot_half(__m256i weights, __m256i inputs, int bits) {
    if (bits == 8) {
        const __m256i centred = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        weights = _mm256_abs_epi8(centred), inputs = _mm256_sign_epi8(inputs, centred);
    }
    return _mm256_madd_epi16(_mm256_maddubs_epi16(weights, inputs), _mm256_set1_epi16(1));
}

INLINE ints dot_plain(ints sums, bytes weights, int32_t four, int bits) {
    __m256i halves[REGISTER_BYTES / 32];
    memcpy(halves, &weights, sizeof halves);
    const __m256i inputs = _mm256_set1_epi32(four);
    UNROLL
    for (int half = 0; half < REGISTER_BYTES / 32; half++) halves[half] = dot_half(halves[half], inputs, bits);
    ints products;
    memcpy(&products, halves, sizeof products);
    return sums + products;
}
#define PLAIN_OFFSET(bits) ((bits) == 8 ? 0 : 8)
#else
INLINE ints dot_plain(ints sums, bytes weights, int32_t four, int bits) {
    (void)bits;
    UNROLL
    for (int byte = 0; byte < 4; byte++) {
        const int32_t input = (int8_t)((uint32_t)four >> 8 * byte);
        sums += (ints)((words)weights >> 8 * byte & 255) * input;
    }
    return sums;
}
#define PLAIN_OFFSET(bits) ((bits) == 8 ? 128 : 8)
#endif

#define TARGET
#define NAMED(name) name##_plain
#define dot dot_plain
#include "integer_rows.h"
#undef TARGET
#undef NAMED
#undef dot

#if REGISTER_BYTES == 64
#define HAS_FAST 1
#define TARGET __attribute__((target("avx512vnni")))
TARGET INLINE ints dot_fast(ints sums, bytes weights, int32_t four, int bits) {
    (void)bits;
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(four));
}
#define FAST_OFFSET(bits) ((bits) == 8 ? 128 : 8)
static int has_fast(void) { return __builtin_cpu_supports("avx512vnni"); }
#elif defined(__aarch64__)
#define HAS_FAST 1
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
TARGET INLINE ints dot_fast(ints sums, bytes weights, int32_t four, int bits) {
    const int8x16_t centred = bits == 8 ? vreinterpretq_s8_u8(veorq_u8((uint8x16_t)weights, vdupq_n_u8(128)))
                                        : vreinterpretq_s8_u8((uint8x16_t)weights);
    return (ints)vdotq_s32((int32x4_t)sums, centred, vreinterpretq_s8_s32(vdupq_n_s32(four)));
}
#define FAST_OFFSET(bits) ((bits) == 8 ? 0 : 8)
static int has_fast(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#endif

#ifdef HAS_FAST
#define NAMED(name) name##_fast
#define dot dot_fast
#include "integer_rows.h"
#undef TARGET
#undef NAMED
#undef dot
#endif

/* A group of x to eight bits, its scale, and what takes the weights' offset out of its products. A group with NaN or
 * infinity gets such a scale, and so do all its outputs. */
INLINE void quantise_group(const integer_job *job, const float *x, int64_t count, int group, int8_t *row, float *scale,
                           int32_t *start) {
    words greatest = {0};
    for (int64_t i = 0; i < group; i += WIDTH) {
        const words size = (words)load_upto(x + i, count - i) & 0x7fffffff;
        greatest = (words)pick((ints)(size > greatest), (floats)size, (floats)greatest);
    }
    uint32_t most = 0;
    for (int lane = 0; lane < WIDTH; lane++) most = greatest[lane] > most ? greatest[lane] : most;
    float largest;
    memcpy(&largest, &most, sizeof largest);
    /* Below 2^-100 the factor would be infinite, and the products too small to be missed. */
    const int is_usable = most >= 0x0d800000 && most < 0x7f800000;
    const float factor = is_usable ? 127.0f / largest : 0.0f, magic = 12582912.0f;
    ints sum = {0};
    for (int64_t i = 0; i < group; i += WIDTH) {
        const ints value = (ints)(load_upto(x + i, count - i) * factor + magic) - 0x4b400000;
        const ints kept = is_usable ? value : (ints){0};
        for (int lane = 0; lane < WIDTH; lane++) row[i + lane] = (int8_t)kept[lane];
        sum += kept;
    }
    int32_t total = 0;
    for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
    *scale = is_usable || most >= 0x7f800000 ? largest / 127.0f : 0.0f;
    *start = -job->offset * total;
}

static void quantise_row(const void *argument, uint32_t row) {
    const integer_job *job = argument;
    const int group = GROUP(job->bits);
    for (int64_t index = 0; index < job->num_groups; index++) {
        const int64_t place = row * job->num_groups + index, k = index * group;
        quantise_group(job, job->x + row * job->num_inputs + k, job->num_inputs - k, group, job->rows + place * group,
                       job->scales + place, job->starts + place);
    }
}

/* Bytes that outrider_linear needs beside its arguments, for weights of so many bits. */
int64_t outrider_linear_scratch(int64_t bits, int64_t num_rows, int64_t num_inputs) {
    if (bits > 8) return 0;
    const int64_t group = GROUP(bits), num_groups = (num_inputs + group - 1) / group;
    return num_rows * num_groups * (group + 8);
}

void linear_integer(pool *threads, const float *x, const void *weight, int bits, const float *bias, float *output,
                    int64_t num_rows, int64_t num_inputs, int64_t num_outputs, void *scratch) {
    const int64_t num_groups = (num_inputs + GROUP(bits) - 1) / GROUP(bits);
    item_function item = integer_item_plain;
    int offset = PLAIN_OFFSET(bits);
#ifdef HAS_FAST
    if (has_fast()) item = integer_item_fast, offset = FAST_OFFSET(bits);
#endif
    integer_job job = {.x = x, .weight = weight, .bias = bias, .output = output, .rows = scratch};
    job.num_rows = num_rows, job.num_inputs = num_inputs, job.num_outputs = num_outputs;
    job.num_groups = num_groups, job.bits = bits, job.offset = offset;
    job.scales = (float *)(job.rows + num_rows * num_groups * GROUP(bits));
    job.starts = (int32_t *)(job.scales + num_rows * num_groups);
    job.num_blocks = (num_outputs + LANES - 1) / LANES;
    job.block_bytes = num_groups * GROUP_BYTES(bits);
    const int64_t bytes = job.num_blocks * job.block_bytes / (ITEMS_PER_THREAD * pool_num_threads(threads));
    const int64_t fitting = bytes < MIN_ITEM_BYTES ? MIN_ITEM_BYTES : bytes > MAX_ITEM_BYTES ? MAX_ITEM_BYTES : bytes;
    job.item_blocks = fitting < job.block_bytes ? 1 : fitting / job.block_bytes;
    job.num_stretches = (num_rows * num_groups * GROUP(bits) + MAX_STRETCH_BYTES - 1) / MAX_STRETCH_BYTES;
    const double num_values = (double)num_rows * (double)num_inputs;
    pool_run_costing(threads, quantise_row, &job, (uint32_t)num_rows, num_values);
    pool_run_costing(threads, item, &job, (uint32_t)((job.num_blocks + job.item_blocks - 1) / job.item_blocks),
                     num_values * (double)num_outputs / 4);
}
