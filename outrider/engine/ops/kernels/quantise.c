/* Blocks of Q8_0 and Q4_0 made of any weights, with the bits of `quantise` in outrider/engine/ops/blocks.py.
 *
 * Sixteen outputs of a group lie side by side, so what is summed over the inputs of one stays in its lane, and four inputs
 * are one line. */
#include "blocks.h"
#include "kernels.h"

#include <stdatomic.h>

/* Adding it rounds to an integer, of two equally near ones the even, and leaves it in the low bits. */
#define MAGIC 12582912.0f

/* A four-bit scale is the largest weight over one of these. */
static const float divisors[] = {8.0f, -8.0f, 7.0f, -7.0f, 6.5f, -6.5f, 9.0f, -9.0f};

typedef struct {
    const uint8_t *rows;
    int64_t format, num_rows, num_inputs;
    int bits;
    float limit;
    uint8_t *blocks;
    _Atomic int64_t *faults;
} quantise_job;

/* Inputs of the same outputs. */
typedef floats inputs_of[GROUP];

#if REGISTER_BYTES == 64
INLINE floats lesser(floats a, floats b) { return (floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE floats greater(floats a, floats b) { return (floats)_mm512_max_ps((__m512)a, (__m512)b); }
#elif REGISTER_BYTES == 32
INLINE floats lesser(floats a, floats b) { return (floats)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE floats greater(floats a, floats b) { return (floats)_mm256_max_ps((__m256)a, (__m256)b); }
#else
INLINE floats lesser(floats a, floats b) { return pick(a < b, a, b); }
INLINE floats greater(floats a, floats b) { return pick(a > b, a, b); }
#endif

/* The nearest float16, of two equally near ones the even, of numbers that are none too large for one. */
INLINE void store_f16(uint8_t *to, floats values) {
#if REGISTER_BYTES == 64
    const __m256i raw = _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
#elif REGISTER_BYTES == 32
    const __m128i raw = _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
#else
    const words bits = (words)values & 0x7fffffff;
    /* A sum with 1/2, whose last place is the least float16, rounds the numbers that have no place of their own. */
    const words tiny = (words)((floats)bits + 0.5f) - 0x3f000000;
    const words whole = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
    const words found = (words)pick((ints)(bits < 0x38800000), (floats)tiny, (floats)whole) | ((words)values >> 16 & 0x8000);
    halves raw;
    for (int lane = 0; lane < WIDTH; lane++) raw[lane] = (uint16_t)found[lane];
#endif
    memcpy(to, &raw, sizeof raw);
}

/* x / scale as a division rounds it: what is left over is exact, because a float16 has eleven bits. */
INLINE floats quotient(floats x, floats scale, floats inverse) {
    const floats near = x * inverse;
    return fused(fused(-near, scale, x), inverse, near);
}

/* A scale of zero belongs to a group of zeros. */
INLINE floats inverse_of(floats scale) { return 1.0f / pick(scale == 0.0f, splat(1.0f), scale); }

/* Integers from -below to above, in the low bits. */
INLINE floats rounded(floats x, floats scale, floats inverse, float below, float above) {
    return greater(lesser(quotient(x, scale, inverse) + MAGIC, splat(MAGIC + above)), splat(MAGIC - below));
}

/* The bytes `shift` bits up in each word, from four inputs. */
INLINE words line_of(const inputs_of x, int first, floats scale, floats inverse, int bits) {
    const int offset = bits == BITS_8 ? 128 : 8;
    words line = {0};
    UNROLL
    for (int i = 0; i < 4; i++) {
        const float below = bits == BITS_8 ? 127 : 8, above = bits == BITS_8 ? 127 : 7;
        const words number = (words)rounded(x[first + i], scale, inverse, below, above) + offset;
        line |= (number & (bits == BITS_8 ? 255 : 15)) << 8 * i;
    }
    return line;
}

/* The scale of those around the largest weight that leaves the least squared error. Errors are summed in four sums of
 * every fourth input. */
INLINE void search_scale(const inputs_of x, floats largest, uint8_t *to) {
    floats least = splat(INFINITY), best = {0};
    for (int index = 0; index < (int)(sizeof divisors / sizeof *divisors); index++) {
        uint8_t stored[2 * WIDTH];
        store_f16(stored, largest / divisors[index]);
        const floats scale = load_f16(stored), inverse = inverse_of(scale);
        floats sums[4] = {{0}};
        UNROLL
        for (int i = 0; i < GROUP; i++) {
            const floats error = (rounded(x[i], scale, inverse, 8, 7) - MAGIC) * scale - x[i];
            sums[i % 4] += error * error;
        }
        const floats error = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        best = pick(error < least, scale, best), least = lesser(error, least);
    }
    store_f16(to, best);
}

/* A group of WIDTH outputs, of which `at` is the first in the block; returns how many are too large or no numbers. */
INLINE int64_t write_group(const inputs_of x, uint8_t *to, int at, int bits, float limit) {
    floats largest = x[0];
    ints size = (ints)x[0] & 0x7fffffff;
    for (int i = 1; i < GROUP; i++) {
        /* As integers, so that NaN is larger than all others. */
        const ints other = (ints)x[i] & 0x7fffffff, is_larger = other > size;
        largest = pick(is_larger, x[i], largest), size = (ints)pick(is_larger, (floats)other, (floats)size);
    }
    const int num_lines = bits == BITS_8 ? SPAN : SPAN / 2;
    uint8_t *scales = to + num_lines * LINE + 2 * at;
    if (bits == BITS_8) store_f16(scales, (floats)size / 127.0f);
    else search_scale(x, largest, scales);
    const floats scale = load_f16(scales), inverse = inverse_of(scale);
    for (int quad = 0; quad < num_lines; quad++) {
        words line = line_of(x, 4 * quad, scale, inverse, bits);
        if (bits == BITS_4) line |= line_of(x, 4 * quad + GROUP / 2, scale, inverse, bits) << 4;
        memcpy(to + quad * LINE + 4 * at, &line, sizeof line);
    }
    const ints is_sound = (floats)size <= limit;
    int64_t faults = 0;
    for (int lane = 0; lane < WIDTH; lane++) faults += !is_sound[lane];
    return faults;
}

/* Sixteen rows from `row` on, the inputs of one group of each, turned so that outputs lie side by side; zeros where there
 * are no rows or inputs. */
INLINE void turn_group(const quantise_job *job, int64_t row, int64_t group, uint32_t turned[GROUP][LANES]) {
    const int item = job->format == FORMAT_BF16 ? 2 : 4, num_words = GROUP * item / 4;
    const int64_t left = job->num_inputs - group * GROUP, num_bytes = (left < GROUP ? left : GROUP) * item;
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t here[GROUP] = {0};
        const uint8_t *from = job->rows + ((row + lane) * job->num_inputs + group * GROUP) * item;
        if (row + lane < job->num_rows && left >= GROUP) memcpy(here, from, (size_t)num_words * 4);
        else if (row + lane < job->num_rows) memcpy(here, from, (size_t)num_bytes);
        UNROLL
        for (int word = 0; word < num_words; word++) turned[word][lane] = here[word];
    }
}

INLINE int64_t quantise_block(const quantise_job *job, int64_t block, int bits, int is_bf16) {
    const block_kind *kind = &block_kinds[bits == BITS_8 ? Q8_0 : Q4_0];
    const int64_t num_groups = num_groups_of(job->num_inputs);
    uint8_t *to = job->blocks + block * block_bytes(kind, job->num_inputs);
    int64_t faults = 0;
    for (int64_t group = 0; group < num_groups; group++, to += group_bytes(kind)) {
        uint32_t turned[GROUP][LANES];
        turn_group(job, block * LANES, group, turned);
        for (int at = 0; at < LANES; at += WIDTH) {
            inputs_of x;
            UNROLL
            for (int i = 0; i < GROUP; i++) {
                words raw;
                memcpy(&raw, &turned[is_bf16 ? i / 2 : i][at], sizeof raw);
                x[i] = (floats)(is_bf16 ? i % 2 ? raw & 0xffff0000 : raw << 16 : raw);
            }
            faults += write_group(x, to, at, bits, job->limit);
        }
    }
    return faults;
}

static void quantise_item(const void *argument, uint32_t item) {
    const quantise_job *job = argument;
    const int is_bf16 = job->format == FORMAT_BF16;
    int64_t faults;
    /* A copy for each number of bits and type, in which both are constant. */
    if (job->bits == BITS_8) faults = is_bf16 ? quantise_block(job, item, BITS_8, 1) : quantise_block(job, item, BITS_8, 0);
    else faults = is_bf16 ? quantise_block(job, item, BITS_4, 1) : quantise_block(job, item, BITS_4, 0);
    if (faults) atomic_fetch_add(job->faults, faults);
}

/* Rows [num_rows, num_inputs] in float32 or bfloat16 into as many blocks as they need, of 8 or 4 bits. Returns how many
 * groups hold NaN, or a weight beyond the limit. */
int64_t outrider_quantise(pool *threads, const void *rows, int64_t format, int64_t num_rows, int64_t num_inputs,
                          int64_t bits, float limit, uint8_t *blocks) {
    _Atomic int64_t faults = 0;
    const quantise_job job = {rows, format, num_rows, num_inputs, (int)bits, limit, blocks, &faults};
    const double cost = (double)num_rows * (double)num_inputs * (bits == BITS_8 ? 4 : 32);
    pool_run_costing(threads, quantise_item, &job, (uint32_t)((num_rows + LANES - 1) / LANES), cost);
    return atomic_load(&faults);
}
