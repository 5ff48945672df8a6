/* Weights as files of GGUF keep them, in blocks that are read in one stream.
 *
 * A block holds 16 outputs. Inputs come in groups of 32, and where a file scales 256 of them together, in spans of eight
 * groups. In the order in which they are read, a span has its scales of 16 outputs in float16, its minima in the same
 * way, and then its groups; a group has
 *
 *   lines of 64 bytes, four inputs of each output in a line: four of nibbles, the low ones inputs 0 to 15 and the high ones
 *     16 to 31, or eight of bytes;
 *   a line of fifth bits, of which bit j of a byte belongs to inputs 4 j to 4 j + 3, or two of fifth and sixth bits;
 *   its scales of 16 outputs, and its minima in the same way.
 *
 * outrider/engine/ops/blocks.py states the same for torch; the table below is compared with that of
 * outrider/model_files/gguf/types.py when the kernels are loaded. */
#ifndef OUTRIDER_BLOCKS_H
#define OUTRIDER_BLOCKS_H

#include "lanes.h"

#define LINE 64
#define GROUP 32
#define SPAN 8
#define MAX_PARTS 4

/* What a weight is made of: its bits, or a nibble that chooses from a table. */
enum { BITS_4 = 4, BITS_5 = 5, BITS_6 = 6, BITS_8 = 8, CHOSEN = 16 };
/* A scale: float16 for a group; a byte with a sign, times the span's float16, for a group or for each half of
 * it; a power of two for a group. */
enum { FLOAT16, BYTE, HALVES, POWER };

typedef struct {
    int bits, scale, has_minimum, offset;
    /* Sixteen values plus the offset, for what is chosen. */
    const uint8_t *table;
    /* What a file has of so many inputs, and in how many bytes. */
    int file_inputs, file_bytes;
} block_kind;

/* Numbers of weights' formats: floats by their bits, parts that each have a format of their own, kinds of blocks whose
 * products take inputs of one byte, and the same with two; all parts of a matrix take the same. */
enum { FORMAT_PARTS = 1, FORMAT_BF16 = 16, FORMAT_F32 = 32, FIRST_KIND = 256, FIRST_OF_TWO = 512 };
#define FOR_KINDS(X)                                                                                          \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4)
#define NAME(kind) kind,
enum { FOR_KINDS(NAME) NUM_KINDS };
#undef NAME

static const uint8_t nonlinear[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t fourth[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

static const block_kind block_kinds[NUM_KINDS] = {
    [Q4_0] = {BITS_4, FLOAT16, 0, 8, 0, 32, 18},
    [Q4_1] = {BITS_4, FLOAT16, 1, 0, 0, 32, 20},
    [Q5_0] = {BITS_5, FLOAT16, 0, 16, 0, 32, 22},
    [Q5_1] = {BITS_5, FLOAT16, 1, 0, 0, 32, 24},
    [Q8_0] = {BITS_8, FLOAT16, 0, 128, 0, 32, 34},
    [Q2_K] = {BITS_4, HALVES, 1, 0, 0, 256, 84},
    [Q3_K] = {BITS_4, HALVES, 0, 4, 0, 256, 110},
    [Q4_K] = {BITS_4, BYTE, 1, 0, 0, 256, 144},
    [Q5_K] = {BITS_5, BYTE, 1, 0, 0, 256, 176},
    [Q6_K] = {BITS_6, HALVES, 0, 32, 0, 256, 210},
    [IQ4_NL] = {CHOSEN, FLOAT16, 0, 128, nonlinear, 32, 18},
    [IQ4_XS] = {CHOSEN, BYTE, 0, 128, nonlinear, 256, 136},
    [MXFP4] = {CHOSEN, POWER, 0, 12, fourth, 32, 17},
};

static inline int64_t kind_of(int64_t format) { return format - (format < FIRST_OF_TWO ? FIRST_KIND : FIRST_OF_TWO); }

/* One of the matrices whose outputs stand side by side. */
typedef struct {
    const void *weight;
    int64_t format, num_outputs;
} matrix_part;

typedef struct {
    int64_t count;
    matrix_part parts[MAX_PARTS];
} matrix_parts;

static inline int line_bytes(const block_kind *kind) {
    static const uint8_t lines[] = {[BITS_4] = 4, [BITS_5] = 5, [BITS_6] = 6, [BITS_8] = 8, [CHOSEN] = 4};
    return lines[kind->bits] * LINE;
}

/* Bytes of a group's scales of 16 outputs. */
static inline int scale_bytes(const block_kind *kind) {
    return kind->scale == BYTE || kind->scale == POWER ? LANES : 2 * LANES;
}

static inline int group_bytes(const block_kind *kind) {
    return line_bytes(kind) + scale_bytes(kind) * (1 + kind->has_minimum);
}

static inline int has_spans(const block_kind *kind) { return kind->scale == BYTE || kind->scale == HALVES; }

/* Bytes of a span before its groups. */
static inline int head_bytes(const block_kind *kind) {
    return has_spans(kind) ? 2 * LANES * (1 + kind->has_minimum) : 0;
}

static inline int64_t num_groups_of(int64_t num_inputs) { return (num_inputs + GROUP - 1) / GROUP; }

static inline int64_t block_bytes(const block_kind *kind, int64_t num_inputs) {
    const int64_t groups = num_groups_of(num_inputs), spans = (groups + SPAN - 1) / SPAN;
    return groups * group_bytes(kind) + spans * head_bytes(kind);
}

/* float16 and powers of two as float32, exactly, also those below 2^-126. */
INLINE floats load_f16(const uint8_t *from) {
#if REGISTER_BYTES == 64
    __m256i raw;
    memcpy(&raw, from, sizeof raw);
    return (floats)_mm512_cvtph_ps(raw);
#elif REGISTER_BYTES == 32
    __m128i raw;
    memcpy(&raw, from, sizeof raw);
    return (floats)_mm256_cvtph_ps(raw);
#else
    halves raw;
    memcpy(&raw, from, sizeof raw);
    words wide;
    for (int lane = 0; lane < WIDTH; lane++) wide[lane] = raw[lane];
    /* Shifted into place its exponent is 112 too small, which a product sets right for subnormal numbers, too. */
    const floats sized = (floats)((wide & 0x7fff) << 13) * 0x1p112f;
    const floats whole = pick((ints)((wide & 0x7c00) == 0x7c00), (floats)((words)sized | 0x7f800000), sized);
    return (floats)((words)whole | (wide & 0x8000) << 16);
#endif
}

/* Bytes with a sign, as integers. */
INLINE ints load_signed_bytes(const uint8_t *from) {
#if REGISTER_BYTES == 64
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif REGISTER_BYTES == 32
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    ints wide = {0};
    for (int lane = 0; lane < WIDTH; lane++) wide[lane] = (int8_t)from[lane];
    return wide;
#endif
}

INLINE floats load_powers(const uint8_t *from) {
    const words power = (words)load_signed_bytes(from) & 255, tiny = (0x00200000 - (words){0}) << (power & 1);
    return pick((ints)(power > 1), (floats)((power - 1) << 23), (floats)tiny);
}

/* A group's scales of WIDTH outputs: `scales` are its own, `head` those of its span; `half` counts where each half has
 * its own. */
INLINE floats load_scales(int scale, const uint8_t *scales, const uint8_t *head, int half) {
    switch (scale) {
    case FLOAT16: return load_f16(scales);
    case BYTE: return __builtin_convertvector(load_signed_bytes(scales), floats) * load_f16(head);
    case HALVES: return __builtin_convertvector(load_signed_bytes(scales + half * LANES), floats) * load_f16(head);
    default: return load_powers(scales);
    }
}

#endif
