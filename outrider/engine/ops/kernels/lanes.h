/* Vectors as long as the processor's registers, sums of sixteen lanes whatever that length is, and exponentials. Not a
 * portable math library: only what the kernels need, and nothing whose result depends on the length of a register.
 *
 * An elementwise step may take any number of elements at a time. A sum always has sixteen lanes, in as many registers
 * as they need. Products are fused into sums where `fused` says so and nowhere else: compiled with -ffp-contract=off,
 * because compilers contract one copy of an expression and not another. The tail of a row goes through the same vector
 * code as the rest, padded with zeros, so each element meets the same roundings in the same order. */
#ifndef OUTRIDER_LANES_H
#define OUTRIDER_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define REGISTER_BYTES 64
#elif defined(__AVX2__)
#define REGISTER_BYTES 32
#else
#define REGISTER_BYTES 16
#endif

#define LANES 16
#define WIDTH (REGISTER_BYTES / 4)
#define PARTS (LANES / WIDTH)
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* Wider vectors than the registers would be correct too, but compilers move them through memory at every step. */
typedef float floats __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t ints __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t words __attribute__((vector_size(REGISTER_BYTES)));
typedef uint16_t halves __attribute__((vector_size(REGISTER_BYTES / 2)));
typedef float floats8 __attribute__((vector_size(32)));
typedef float floats4 __attribute__((vector_size(16)));
typedef double doubles __attribute__((vector_size(REGISTER_BYTES)));
typedef int64_t longs __attribute__((vector_size(REGISTER_BYTES)));
typedef uint64_t long_words __attribute__((vector_size(REGISTER_BYTES)));

typedef struct {
    floats part[PARTS];
} lanes16;

#ifdef __clang__
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE16(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t ints4 __attribute__((vector_size(16)));
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (ints4){__VA_ARGS__})
#define SHUFFLE16(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* Loads and stores are copies of a known size: no alignment is asked of the caller, and none is lost. */
INLINE floats load(const float *from) {
    floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, floats value) { memcpy(to, &value, sizeof value); }

/* The same where only `left` elements of the row are left: past them a vector holds zeros, and no memory is touched. */
INLINE floats load_upto(const float *from, int64_t left) {
    if (left >= WIDTH) return load(from);
    floats value = {0};
    if (left > 0) memcpy(&value, from, (size_t)left * sizeof(float));
    return value;
}

INLINE void store_upto(float *to, floats value, int64_t left) {
    if (left >= WIDTH) store(to, value);
    else if (left > 0) memcpy(to, &value, (size_t)left * sizeof(float));
}

/* bfloat16 is the upper half of a float32. */
INLINE floats widen(halves raw) {
#if defined(__AVX512BW__)
    /* One instruction instead of two, which short sums of one row are waiting for: word j goes to word 2 j + 1. */
    const __m512i places = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0,  //
                                            7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    return (floats)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, places, _mm512_castsi256_si512((__m256i)raw));
#else
    words wide;
    for (int lane = 0; lane < WIDTH; lane++) wide[lane] = raw[lane];
    return (floats)(wide << 16);
#endif
}

INLINE floats load_bf16(const uint16_t *from) {
    halves raw;
    memcpy(&raw, from, sizeof raw);
    return widen(raw);
}

INLINE floats load_bf16_upto(const uint16_t *from, int64_t left) {
    if (left >= WIDTH) return load_bf16(from);
    halves raw = {0};
    if (left > 0) memcpy(&raw, from, (size_t)left * sizeof(uint16_t));
    return widen(raw);
}

INLINE floats splat(float value) { return value - (floats){0}; }

INLINE floats pick(ints where, floats yes, floats no) { return (floats)((where & (ints)yes) | (~where & (ints)no)); }

INLINE doubles splat_double(double value) { return value - (doubles){0}; }

INLINE doubles pick_double(longs where, doubles yes, doubles no) {
    return (doubles)((where & (longs)yes) | (~where & (longs)no));
}

/* Compilers add sixteen lanes one by one. */
INLINE int32_t sum_ints(ints values) {
#if REGISTER_BYTES == 64
    return _mm512_reduce_add_epi32((__m512i)values);
#else
    int32_t total = 0;
    for (int lane = 0; lane < WIDTH; lane++) total += values[lane];
    return total;
#endif
}

/* a * b + c with one rounding: the only operation that C has no portable spelling for. Contraction differs from copy to
 * copy of an expression, and a loop over lanes is sometimes left as sixteen scalar instructions. */
#if REGISTER_BYTES == 64
INLINE floats fused(floats a, floats b, floats c) { return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

INLINE doubles fused_double(doubles a, doubles b, doubles c) {
    return (doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif REGISTER_BYTES == 32
INLINE floats fused(floats a, floats b, floats c) { return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

INLINE doubles fused_double(doubles a, doubles b, doubles c) {
    return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#else
INLINE floats fused(floats a, floats b, floats c) {
    floats result;
    for (int lane = 0; lane < WIDTH; lane++) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return result;
}

INLINE doubles fused_double(doubles a, doubles b, doubles c) {
    doubles result;
    for (int lane = 0; lane < WIDTH / 2; lane++) result[lane] = __builtin_fma(a[lane], b[lane], c[lane]);
    return result;
}
#endif

/* A polynomial by Horner's scheme, coefficients from the highest power down. */
INLINE floats polynomial(floats x, const float *coefficients, int count) {
    floats value = splat(coefficients[0]);
    UNROLL
    for (int term = 1; term < count; term++) value = fused(value, x, splat(coefficients[term]));
    return value;
}

INLINE doubles polynomial_double(doubles x, const double *coefficients, int count) {
    doubles value = splat_double(coefficients[0]);
    UNROLL
    for (int term = 1; term < count; term++) value = fused_double(value, x, splat_double(coefficients[term]));
    return value;
}

/* lanes + a * b for the next sixteen elements of two rows. */
INLINE lanes16 add_products(lanes16 lanes, const float *a, const float *b) {
    UNROLL
    for (int part = 0; part < PARTS; part++)
        lanes.part[part] = fused(load(a + part * WIDTH), load(b + part * WIDTH), lanes.part[part]);
    return lanes;
}

/* The same for the last `left` elements, fewer than sixteen. */
INLINE lanes16 add_last_products(lanes16 lanes, const float *a, const float *b, int64_t left) {
    UNROLL
    for (int part = 0; part < PARTS; part++) {
        const int64_t here = part * WIDTH, rest = left - here;
        lanes.part[part] = fused(load_upto(a + here, rest), load_upto(b + here, rest), lanes.part[part]);
    }
    return lanes;
}

/* The one order in which sixteen lanes become one sum: lane i with i + 8, then i + 4, i + 2, i + 1. Four sums at a time
 * share the instructions of one and not a single addition, so a sum does not depend on its neighbours. */
#if PARTS == 1
INLINE floats4 sum4(lanes16 a, lanes16 b, lanes16 c, lanes16 d) {
    const floats ab = SHUFFLE16(a.part[0], b.part[0], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                      SHUFFLE16(a.part[0], b.part[0], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const floats cd = SHUFFLE16(c.part[0], d.part[0], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                      SHUFFLE16(c.part[0], d.part[0], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const floats fours = SHUFFLE16(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                         SHUFFLE16(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const floats twos = fours + SHUFFLE16(fours, fours, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    const floats ones = twos + SHUFFLE16(twos, twos, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return (floats4){ones[0], ones[4], ones[8], ones[12]};
}
#else
INLINE floats4 fold(lanes16 lanes) {
#if PARTS == 4
    return (lanes.part[0] + lanes.part[2]) + (lanes.part[1] + lanes.part[3]);
#else
    const floats8 eight = lanes.part[0] + lanes.part[1];
    floats4 fours[2];
    memcpy(fours, &eight, sizeof fours);
    return fours[0] + fours[1];
#endif
}

INLINE floats4 sum4(lanes16 a, lanes16 b, lanes16 c, lanes16 d) {
    const floats4 a4 = fold(a), b4 = fold(b), c4 = fold(c), d4 = fold(d);
    const floats4 ab = SHUFFLE4(a4, b4, 0, 1, 4, 5) + SHUFFLE4(a4, b4, 2, 3, 6, 7);
    const floats4 cd = SHUFFLE4(c4, d4, 0, 1, 4, 5) + SHUFFLE4(c4, d4, 2, 3, 6, 7);
    return SHUFFLE4(ab, cd, 0, 2, 4, 6) + SHUFFLE4(ab, cd, 1, 3, 5, 7);
}
#endif

/* Four sums of each row, at most four rows: the same additions for all of them at once. */
INLINE void sum4x4(const lanes16 sums[][4], int num_rows, floats4 totals[4]) {
#if PARTS == 1
    /* Each step halves the registers, and the sums of a row come to lie in a quarter of the last one. */
    if (num_rows > 2) {
        floats fours[4], twos[2], ones;
        UNROLL
        for (int column = 0; column < 4; column++) {
            floats pairs[2];
            UNROLL
            for (int pair = 0; pair < 2; pair++) {
                const int row = 2 * pair, next = row + 1 < num_rows ? row + 1 : row;
                const floats a = sums[row][column].part[0], b = sums[next][column].part[0];
                pairs[pair] = SHUFFLE16(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                              SHUFFLE16(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
            }
            fours[column] =
                SHUFFLE16(pairs[0], pairs[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                SHUFFLE16(pairs[0], pairs[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
        }
        UNROLL
        for (int half = 0; half < 2; half++) {
            const floats a = fours[2 * half], b = fours[2 * half + 1];
            twos[half] = SHUFFLE16(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                         SHUFFLE16(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
        ones = SHUFFLE16(twos[0], twos[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               SHUFFLE16(twos[0], twos[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
        memcpy(totals, &ones, sizeof ones);
        return;
    }
#endif
    UNROLL
    for (int row = 0; row < num_rows; row++)
        totals[row] = sum4(sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
}

INLINE float sum(lanes16 a) { return sum4(a, a, a, a)[0]; }

/* The greatest of `count` values, -inf of none; NaN is passed over. */
INLINE float greatest_float(const float *values, int64_t count) {
    floats greatest = splat(-INFINITY);
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const floats here = load(values + i);
        greatest = pick(here > greatest, here, greatest);
    }
    float result = -INFINITY;
    for (int lane = 0; lane < WIDTH; lane++) result = greatest[lane] > result ? greatest[lane] : result;
    for (; i < count; i++) result = values[i] > result ? values[i] : result;
    return result;
}

/* e^x within 2 ulp for -86 <= x <= 88; 0 below, e^88 above. Reduction by Cody and Waite, polynomial from Cephes. */
INLINE floats exponential(floats x) {
    static const float coefficients[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                         4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer and leaves it in the low bits. */
    const floats bounded = pick(x < -86.0f, splat(-86.0f), pick(x > 88.0f, splat(88.0f), x));
    const floats shifted = fused(bounded, splat(1.44269504088896341f), splat(magic));
    const floats power = shifted - magic;
    const floats coarse = fused(power, splat(-0.693359375f), bounded);
    const floats r = fused(power, splat(2.12194440e-4f), coarse);
    const floats value = fused(polynomial(r, coefficients, 6), r * r, r) + 1.0f;
    const floats scaled = (floats)((words)value + ((words)shifted << 23));
    return pick(x < -86.0f, splat(0.0f), scaled);
}

/* e^x within 1 ulp for -708 <= x <= 0; 0 below. Taylor's series to degree 13 errs by less than 2^-57. */
INLINE doubles exponential_double(doubles x) {
    static const double inverse_factorials[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                                                1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                                                1.0 / 120,        1.0 / 24,        1.0 / 6,        0.5,
                                                1.0,              1.0};
    const double magic = 6755399441055744.0; /* 1.5 * 2^52, as above. */
    const longs below = x < -708.0;
    const doubles bounded = pick_double(below, splat_double(-708.0), x);
    const doubles shifted = fused_double(bounded, splat_double(1.44269504088896338700), splat_double(magic));
    const doubles power = shifted - magic;
    const doubles coarse = fused_double(power, splat_double(-6.93147180369123816490e-01), bounded);
    const doubles r = fused_double(power, splat_double(-1.90821492927058770002e-10), coarse);
    const doubles series = polynomial_double(r, inverse_factorials, 14);
    return pick_double(below, splat_double(0.0), (doubles)((long_words)series + ((long_words)shifted << 52)));
}

#endif
