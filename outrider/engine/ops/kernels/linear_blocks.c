/* x times the transpose of weights in blocks, plus bias: rows are quantised on the fly, products are integers.
 *
 * A row of x is quantised in groups of 32, each with a scale of its own (as Dettmers et al., 2022, "8-bit Optimizers",
 * arXiv 2110.02861, quantise by blocks), to eight bits or to fifteen. A group's products are added as integers, which is exact in any
 * order; float32 sums go from group to group in one order. So a row's bits depend on nothing but the row, as those of
 * linear.c. Weights are as blocks.h says, and none of them is rounded. */
#include "blocks.h"
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

/* An input is a byte, or so many times a high byte plus a low one; the largest of a group is this. */
#define LOW_BITS 7
#define MOST_OF_ONE 127.0f
#define MOST_OF_TWO 16319.0f
/* Far enough that memory answers in time; hardware alone stops at each page. */
#define PREFETCH_BYTES 8192
#define ITEMS_PER_THREAD 16
#define MIN_ITEM_BYTES 16384
#define MAX_ITEM_BYTES 262144
/* Rows whose quantised inputs stay in the second-level cache while an item's weights pass. */
#define MAX_STRETCH_BYTES 262144

typedef uint8_t bytes __attribute__((vector_size(REGISTER_BYTES)));

/* A group of a row: its integers as one byte each, as high and low ones, or as both in one, their scale, that times
 * their sum, and the sums of both halves. */
typedef struct {
    union {
        int8_t inputs[2][GROUP];
        int16_t whole[GROUP];
    };
    float scale, scaled_sum;
    int32_t sums[2];
} input_group;

typedef struct {
    const uint8_t *blocks;
    /* `skip`: outputs of the first block that belong to the matrix above. */
    int64_t kind, num_outputs, first_output, skip, num_blocks, bytes, item_blocks, first_item;
} block_part;

typedef struct {
    const float *x, *bias;
    float *output;
    input_group *rows;
    /* The quantised row for each row of the output; null: its own. */
    const int32_t *places;
    int64_t num_rows, num_inputs, num_groups, stride, num_stretches;
    int has_two_bytes, has_planes;
    const row_batch *batches;
    /* Of one batch. */
    uint32_t num_items;
    int num_parts;
    block_part parts[MAX_PARTS];
} block_job;

/* The sums of a block's outputs [num_rows, PARTS], plus bias. */
static __attribute__((noinline)) void store_sums(const block_job *job, const block_part *part, int64_t row, int64_t block,
                                                 int num_rows, const floats *sums) {
    const float *bias = job->bias == 0 ? 0 : job->bias + part->first_output;
    for (int r = 0; r < num_rows; r++) {
        float *output = job->output + (row + r) * job->stride + part->first_output;
        for (int each = 0; each < PARTS; each++) {
            const int64_t here = block * LANES - part->skip + each * WIDTH, left = part->num_outputs - here;
            const floats sum = sums[r * PARTS + each];
            if (here >= 0) {
                store_upto(output + here, bias == 0 ? sum : sum + load_upto(bias + here, left), left);
                continue;
            }
            for (int64_t lane = -here; lane < WIDTH && lane < left; lane++)
                output[here + lane] = bias == 0 ? sum[lane] : sum[lane] + bias[here + lane];
        }
    }
}

typedef void (*strip_function)(const block_job *, const block_part *, int64_t, int64_t, int64_t);

/* The job of one batch, and its part of a matrix. */
INLINE block_job job_of(const block_job *all, const row_batch *batch) {
    block_job job = *all;
    job.output += batch->first_row * job.stride;
    if (job.bias != 0) job.bias += batch->index * job.stride;
    if (job.places != 0) job.places += batch->first_row;
    else job.rows += batch->first_row * job.num_groups;
    job.num_rows = batch->num_rows;
    const int64_t row_bytes = job.num_groups * (int64_t)sizeof(input_group);
    job.num_stretches = (job.num_rows * row_bytes + MAX_STRETCH_BYTES - 1) / MAX_STRETCH_BYTES;
    return job;
}

INLINE block_part part_of(const block_part *all, int64_t index) {
    block_part part = *all;
    const int64_t first = index * part.num_outputs;
    part.skip = first % LANES, part.blocks += first / LANES * part.bytes;
    part.num_blocks = (part.skip + part.num_outputs + LANES - 1) / LANES;
    return part;
}

INLINE ints splat_int(int32_t value) { return value - (ints){0}; }

INLINE bytes load_bytes(const uint8_t *from) {
    bytes value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* The sum of the integers that a scale belongs to: all of a group, or one half of it. */
INLINE int32_t sum_of(const input_group *group, int is_halved, int half) {
    return is_halved ? group->sums[half] : group->sums[0] + group->sums[1];
}

INLINE int64_t four_words(const int16_t *from) {
    int64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE int32_t four_bytes(const int8_t *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Of each nibble the value that a table has for it. */
INLINE bytes choose_bytes(bytes nibbles, const uint8_t *table) {
#if REGISTER_BYTES == 64
    const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (bytes)_mm512_shuffle_epi8(values, (__m512i)nibbles);
#elif REGISTER_BYTES == 32
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (bytes)_mm256_shuffle_epi8(values, (__m256i)nibbles);
#elif defined(__aarch64__)
    return (bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)nibbles);
#else
    bytes chosen;
    for (int byte = 0; byte < REGISTER_BYTES; byte++) chosen[byte] = table[nibbles[byte]];
    return chosen;
#endif
}

/* Without special instructions AVX2 multiplies bytes of one sign with bytes of two, and adds pairs of products within 16
 * bits. Those of narrow weights have room there for more of them before they are widened, so that four bytes cost a
 * multiplication and an addition in place of two of both. Weights of 8 bits fit when their signs move to the inputs.
 * Inputs of two bytes are words, which it multiplies with words: no dearer than two multiplications of bytes. */
#if REGISTER_BYTES >= 32
#define NUM_HALVES (REGISTER_BYTES / 32)
#define HAS_WORDS 1
typedef int16_t shorts __attribute__((vector_size(REGISTER_BYTES)));

INLINE __m256i pairs_of_half(__m256i weights, __m256i inputs, int is_wide) {
    if (is_wide) {
        const __m256i centred = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        weights = _mm256_abs_epi8(centred), inputs = _mm256_sign_epi8(inputs, centred);
    }
    return _mm256_maddubs_epi16(weights, inputs);
}

INLINE shorts pairs_plain(bytes weights, int32_t four, int is_wide) {
    __m256i halves[NUM_HALVES];
    memcpy(halves, &weights, sizeof halves);
    const __m256i inputs = _mm256_set1_epi32(four);
    UNROLL
    for (int half = 0; half < NUM_HALVES; half++) halves[half] = pairs_of_half(halves[half], inputs, is_wide);
    shorts products;
    memcpy(&products, halves, sizeof products);
    return products;
}

INLINE ints widen_plain(shorts sums) {
    __m256i halves[NUM_HALVES];
    memcpy(halves, &sums, sizeof halves);
    UNROLL
    for (int half = 0; half < NUM_HALVES; half++) halves[half] = _mm256_madd_epi16(halves[half], _mm256_set1_epi16(1));
    ints products;
    memcpy(&products, halves, sizeof products);
    return products;
}

/* Compilers make a tree of a chain of integer additions, all of whose leaves they then keep in memory. */
#define KEEP_IN_REGISTER(value) __asm__("" : "+v"(value))

/* Pairs of such weights that fit: 8 * 2 * 127 * 15, 4 * 2 * 127 * 31 and 2 * 2 * 127 * 63 are below 32,768. */
INLINE int most_pairs(int bits) { return bits == BITS_4 ? 8 : bits == BITS_5 ? 4 : bits == BITS_6 ? 2 : 1; }

/* Of each four outputs the first two or the last two: products of their words, two in a sum. */
INLINE ints words_plain(ints sums, bytes weights, int64_t four, int is_last) {
    __m256i halves[NUM_HALVES];
    memcpy(halves, &weights, sizeof halves);
    const __m256i inputs = _mm256_set1_epi64x(four), zero = _mm256_setzero_si256();
    UNROLL
    for (int half = 0; half < NUM_HALVES; half++) {
        const __m256i wide = is_last ? _mm256_unpackhi_epi8(halves[half], zero) : _mm256_unpacklo_epi8(halves[half], zero);
        halves[half] = _mm256_madd_epi16(wide, inputs);
    }
    ints products;
    memcpy(&products, halves, sizeof products);
    sums += products;
    KEEP_IN_REGISTER(sums);
    return sums;
}

/* Both sums of each output, added. */
INLINE ints join_plain(ints first, ints last) {
    __m256i firsts[NUM_HALVES], lasts[NUM_HALVES];
    memcpy(firsts, &first, sizeof firsts), memcpy(lasts, &last, sizeof lasts);
    UNROLL
    for (int half = 0; half < NUM_HALVES; half++) firsts[half] = _mm256_hadd_epi32(firsts[half], lasts[half]);
    ints products;
    memcpy(&products, firsts, sizeof products);
    return products;
}
#define pairs pairs_plain
#define widen widen_plain
#define PLAIN_IS_CENTRED 1
#else
INLINE ints dot_plain(ints sums, bytes weights, int32_t four, int is_wide) {
    (void)is_wide;
    UNROLL
    for (int byte = 0; byte < 4; byte++) {
        const int32_t input = (int8_t)((uint32_t)four >> 8 * byte);
        sums += (ints)((words)weights >> 8 * byte & 255) * input;
    }
    return sums;
}
#define HAS_WORDS 0
#define dot dot_plain
#define PLAIN_IS_CENTRED 0
#endif

#define TARGET
/* Two bytes take twice the registers; and where they are short, compilers many minutes for more rows. */
#define ROWS_OF_TWO (REGISTER_BYTES == 16 ? 2 : 5)
#define IS_CENTRED PLAIN_IS_CENTRED
#define MAX_ROWS (PLANES == 1 ? 5 : ROWS_OF_TWO)
#define PLANES 1
#define NAMED(name) name##_plain
#include "block_rows.h"
#undef PLANES
#undef NAMED
#if HAS_WORDS
#undef IS_CENTRED
#undef pairs
#undef widen
#define IS_CENTRED 0
#define dot_words words_plain
#define join join_plain
#endif
#define PLANES 2
#define NAMED(name) name##_plain_of_two
#include "block_rows.h"
#undef PLANES
#undef NAMED
#undef TARGET
#undef dot
#undef dot_words
#undef join
#undef IS_CENTRED
#undef MAX_ROWS

/* Left out by tests alone, which compare what a processor without them computes. */
#if defined(WITHOUT_FAST)
#elif REGISTER_BYTES == 64
#define HAS_FAST 1
#define TARGET __attribute__((target("avx512vnni")))
TARGET INLINE ints dot_fast(ints sums, bytes weights, int32_t four, int is_wide) {
    (void)is_wide;
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(four));
}
#define MAX_ROWS (PLANES == 1 ? 10 : 8)
#define IS_CENTRED 0
static int has_fast(void) { return __builtin_cpu_supports("avx512vnni"); }
#elif REGISTER_BYTES == 32
#define HAS_FAST 1
#define TARGET __attribute__((target("avxvnni")))
TARGET INLINE ints dot_fast(ints sums, bytes weights, int32_t four, int is_wide) {
    (void)is_wide;
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(four));
}
#define MAX_ROWS (PLANES == 1 ? 5 : ROWS_OF_TWO)
#define IS_CENTRED 0
static int has_fast(void) { return __builtin_cpu_supports("avxvnni"); }
#elif defined(__aarch64__)
#define HAS_FAST 1
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
TARGET INLINE ints dot_fast(ints sums, bytes weights, int32_t four, int is_wide) {
    const int8x16_t centred = is_wide ? vreinterpretq_s8_u8(veorq_u8((uint8x16_t)weights, vdupq_n_u8(128)))
                                      : vreinterpretq_s8_u8((uint8x16_t)weights);
    return (ints)vdotq_s32((int32x4_t)sums, centred, vreinterpretq_s8_s32(vdupq_n_s32(four)));
}
#define MAX_ROWS (PLANES == 1 ? 5 : ROWS_OF_TWO)
#define IS_CENTRED 1
static int has_fast(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#endif

#ifdef HAS_FAST
#define dot dot_fast
#define PLANES 1
#define NAMED(name) name##_fast
#include "block_rows.h"
#undef PLANES
#undef NAMED
#define PLANES 2
#define NAMED(name) name##_fast_of_two
#include "block_rows.h"
#undef PLANES
#undef NAMED
#undef TARGET
#undef dot
#undef IS_CENTRED
#undef MAX_ROWS
#endif

/* A group of x to eight or fifteen bits. One with NaN or infinity gets such a scale, and so do all its outputs. */
INLINE void quantise_group(const float *x, int64_t count, int has_two_bytes, int has_planes, input_group *group) {
    words greatest = {0};
    UNROLL
    for (int i = 0; i < GROUP; i += WIDTH) {
        const words size = (words)load_upto(x + i, count - i) & 0x7fffffff;
        greatest = (words)pick((ints)(size > greatest), (floats)size, (floats)greatest);
    }
    uint32_t most = 0;
    for (int lane = 0; lane < WIDTH; lane++) most = greatest[lane] > most ? greatest[lane] : most;
    float largest;
    memcpy(&largest, &most, sizeof largest);
    /* Below 2^-100 the factor would be infinite, and the products too small to be missed. */
    const int is_usable = most >= 0x0d800000 && most < 0x7f800000;
    const float limit = has_two_bytes ? MOST_OF_TWO : MOST_OF_ONE;
    const float factor = is_usable ? limit / largest : 0.0f, magic = 12582912.0f;
    group->sums[0] = group->sums[1] = 0;
    for (int i = 0; i < GROUP; i += WIDTH) {
        const ints value = (ints)(load_upto(x + i, count - i) * factor + magic) - 0x4b400000;
        const ints kept = is_usable ? value : (ints){0};
        const ints high = has_two_bytes ? (kept + (1 << (LOW_BITS - 1))) >> LOW_BITS : kept;
        const ints low = kept - (high << LOW_BITS);
        if (has_two_bytes && !has_planes)
            for (int lane = 0; lane < WIDTH; lane++) group->whole[i + lane] = (int16_t)kept[lane];
        else
            for (int lane = 0; lane < WIDTH; lane++) group->inputs[0][i + lane] = (int8_t)high[lane];
        if (has_two_bytes && has_planes)
            for (int lane = 0; lane < WIDTH; lane++) group->inputs[1][i + lane] = (int8_t)low[lane];
        group->sums[i >= GROUP / 2] += sum_ints(kept);
    }
    group->scale = is_usable || most >= 0x7f800000 ? largest / limit : 0.0f;
    group->scaled_sum = group->scale * (float)(group->sums[0] + group->sums[1]);
}

static void quantise_row(const void *argument, uint32_t row) {
    const block_job *job = argument;
    const float *x = job->x + row * job->num_inputs;
    input_group *groups = job->rows + row * job->num_groups;
    for (int64_t index = 0; index < job->num_groups; index++)
        quantise_group(x + index * GROUP, job->num_inputs - index * GROUP, job->has_two_bytes, job->has_planes,
                       groups + index);
}

/* Bytes that outrider_linear needs beside its arguments for weights in blocks. */
int64_t outrider_linear_scratch(int64_t num_rows, int64_t num_inputs) {
    return num_rows * num_groups_of(num_inputs) * (int64_t)sizeof(input_group);
}

/* As multiply_batches; parts of other formats than blocks are passed over. */
void linear_blocks(pool *threads, const float *x, const row_batches *rows, const matrix_parts *weights, const float *bias,
                   float *output, int64_t num_inputs, int64_t stride, void *scratch) {
    block_job job = {.x = x, .bias = bias, .output = output, .rows = scratch, .places = rows->places};
    job.num_inputs = num_inputs, job.num_groups = num_groups_of(num_inputs), job.stride = stride;
    job.batches = rows->batches;
    int64_t first_output = 0, num_items = 0, num_outputs = 0;
    for (int64_t index = 0; index < weights->count; index++) {
        const matrix_part *each = &weights->parts[index];
        if (each->format >= FIRST_KIND) {
            block_part *part = &job.parts[job.num_parts++];
            part->blocks = each->weight, part->kind = kind_of(each->format);
            job.has_two_bytes = each->format >= FIRST_OF_TWO;
            part->num_outputs = each->num_outputs, part->first_output = first_output;
            /* With one more where some matrix begins in the middle of a block. */
            part->num_blocks = (each->num_outputs + LANES - 1) / LANES +
                               (rows->batches[rows->num_batches - 1].index > 0 && each->num_outputs % LANES);
            part->bytes = block_bytes(&block_kinds[part->kind], num_inputs);
            const int64_t all_bytes = rows->num_batches * part->num_blocks * part->bytes;
            const int64_t bytes = all_bytes / (ITEMS_PER_THREAD * pool_num_threads(threads));
            const int64_t size = bytes < MIN_ITEM_BYTES ? MIN_ITEM_BYTES : bytes > MAX_ITEM_BYTES ? MAX_ITEM_BYTES : bytes;
            part->item_blocks = size < part->bytes ? 1 : size / part->bytes;
            part->first_item = num_items;
            num_items += (part->num_blocks + part->item_blocks - 1) / part->item_blocks;
            num_outputs += each->num_outputs;
        }
        first_output += each->num_outputs;
    }
    job.num_items = (uint32_t)num_items;
    item_function item = job.has_two_bytes ? block_item_plain_of_two : block_item_plain;
    job.has_planes = !HAS_WORDS;
#ifdef HAS_FAST
    if (has_fast()) item = job.has_two_bytes ? block_item_fast_of_two : block_item_fast, job.has_planes = 1;
#endif
    pool_run_costing(threads, quantise_row, &job, (uint32_t)rows->num_inputs_rows,
                     (double)rows->num_inputs_rows * (double)num_inputs);
    pool_run_costing(threads, item, &job, (uint32_t)(num_items * rows->num_batches),
                     (double)rows->num_rows * (double)num_inputs * (double)num_outputs / 4);
}
