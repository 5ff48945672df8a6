/* Blocks of weights from the rows of a GGUF file, and single rows of them again. Nothing is rounded.
 *
 * How a file lays out a row is described with the types in ggml-common.h of the ggml project. */
#include "blocks.h"
#include "kernels.h"

#include <stdatomic.h>

/* Rows that a thread takes at a time: whole blocks. */
#define FILL_BLOCKS 4

/* A group of one row: its weights with their offset, one byte each and four to a word, and the bytes of its scales and
 * minima, of which some kinds have fewer. */
typedef struct {
    uint32_t words[SPAN];
    uint8_t scales[2], minima[2];
} file_group;

typedef struct {
    const uint8_t *rows;
    int64_t row_bytes, num_rows, num_inputs, first_row, num_outputs, swap;
    int kind;
    uint8_t *blocks;
    _Atomic int64_t *faults;
} fill_job;

INLINE uint32_t word_at(const uint8_t *from, int64_t index) {
    uint32_t word;
    memcpy(&word, from + 4 * index, sizeof word);
    return word;
}

static uint16_t half_at(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return half;
}

/* Sixteen bytes of nibbles: low ones are the first half of a group, high ones the other. */
INLINE void split_nibbles(const uint8_t *from, uint32_t words[SPAN]) {
    for (int quad = 0; quad < 4; quad++) {
        const uint32_t both = word_at(from, quad);
        words[quad] = both & 0x0f0f0f0f, words[quad + 4] = both >> 4 & 0x0f0f0f0f;
    }
}

/* Thirty-two bits, one for each weight, to the place `shift` of each byte. */
INLINE void add_bits(uint32_t bits, int shift, uint32_t words[SPAN]) {
    for (int quad = 0; quad < SPAN; quad++) {
        const uint32_t four = bits >> 4 * quad & 15;
        words[quad] |= ((four & 1) | (four & 2) << 7 | (four & 4) << 14 | (four & 8) << 21) << shift;
    }
}

/* Six bits of scale and of minimum, as Q4_K and Q5_K pack eight of each. */
INLINE void read_k_scales(const uint8_t *packed, int group, file_group *into) {
    if (group < 4) {
        into->scales[0] = packed[group] & 63, into->minima[0] = packed[group + 4] & 63;
        return;
    }
    into->scales[0] = (uint8_t)((packed[group + 4] & 15) | packed[group - 4] >> 6 << 4);
    into->minima[0] = (uint8_t)(packed[group + 4] >> 4 | packed[group] >> 6 << 4);
}

/* Group `group` of those that a file's block has. */
INLINE void read_group(int kind, const uint8_t *block, int group, file_group *into) {
    const int shift = 2 * (group & 3), pair = 32 * (group / 4), index = 2 * group;
    switch (kind) {
    case Q4_0:
    case IQ4_NL: split_nibbles(block + 2, into->words); break;
    case Q4_1: split_nibbles(block + 4, into->words); break;
    case MXFP4: split_nibbles(block + 1, into->words); break;
    case Q5_0: split_nibbles(block + 6, into->words), add_bits(word_at(block + 2, 0), 4, into->words); break;
    case Q5_1: split_nibbles(block + 8, into->words), add_bits(word_at(block + 4, 0), 4, into->words); break;
    case Q8_0:
        for (int quad = 0; quad < SPAN; quad++) into->words[quad] = word_at(block + 2, quad) ^ 0x80808080;
        break;
    case Q2_K:
        for (int quad = 0; quad < SPAN; quad++)
            into->words[quad] = word_at(block + 16 + pair, quad) >> shift & 0x03030303;
        for (int half = 0; half < 2; half++)
            into->scales[half] = block[index + half] & 15, into->minima[half] = block[index + half] >> 4;
        break;
    case Q3_K:
        for (int quad = 0; quad < SPAN; quad++)
            into->words[quad] = (word_at(block + 32 + pair, quad) >> shift & 0x03030303) |
                                (word_at(block, quad) >> group & 0x01010101) << 2;
        for (int each = index; each < index + 2; each++) {
            const int low = block[96 + each % 8] >> 4 * (each / 8) & 15, high = block[104 + each % 4] >> 2 * (each / 4) & 3;
            into->scales[each - index] = (uint8_t)((low | high << 4) - 32);
        }
        break;
    case Q4_K:
    case Q5_K:
        read_k_scales(block + 4, group, into);
        for (int quad = 0; quad < SPAN; quad++) {
            const uint32_t both = word_at(block + (kind == Q4_K ? 16 : 48) + 32 * (group / 2), quad);
            into->words[quad] = both >> 4 * (group & 1) & 0x0f0f0f0f;
            if (kind == Q5_K) into->words[quad] |= (word_at(block + 16, quad) >> group & 0x01010101) << 4;
        }
        break;
    case Q6_K:
        for (int quad = 0; quad < SPAN; quad++) {
            const uint32_t low = word_at(block + 2 * pair + 32 * (group & 1), quad);
            const uint32_t high = word_at(block + 128 + pair, quad) >> shift & 0x03030303;
            into->words[quad] = (low >> 4 * (group >> 1 & 1) & 0x0f0f0f0f) | high << 4;
        }
        memcpy(into->scales, block + 192 + index, 2);
        break;
    default: /* IQ4_XS */
        split_nibbles(block + 8 + 16 * group, into->words);
        into->scales[0] = (uint8_t)(((block[4 + group / 2] >> 4 * (group & 1) & 15) | (half_at(block + 2) >> index & 3) << 4) - 32);
    }
}

/* Where a file's block has its float16 scale and its minimum. */
static int scale_place(int kind) {
    switch (kind) {
    case Q2_K: return 80;
    case Q3_K: return 108;
    case Q6_K: return 208;
    default: return 0;
    }
}

static int is_infinite(uint16_t half) { return (half & 0x7c00) == 0x7c00; }

/* The float16 scale of a file's block, and its minimum as it is added. */
static int write_halves(int kind, const uint8_t *block, uint8_t *to, int lane) {
    const int is_subtracted = kind == Q2_K || kind == Q4_K || kind == Q5_K, place = scale_place(kind);
    const uint16_t scale = half_at(block + place);
    memcpy(to + 2 * lane, &scale, sizeof scale);
    if (!block_kinds[kind].has_minimum) return is_infinite(scale);
    const uint16_t minimum = half_at(block + place + 2) ^ (is_subtracted ? 0x8000 : 0);
    memcpy(to + 2 * LANES + 2 * lane, &minimum, sizeof minimum);
    return is_infinite(scale) || is_infinite(minimum);
}

INLINE void write_lines(const uint32_t words[SPAN], uint8_t *lines, int lane, int bits) {
    if (bits == BITS_8) {
        for (int quad = 0; quad < SPAN; quad++) memcpy(lines + quad * LINE + 4 * lane, words + quad, 4);
        return;
    }
    for (int quad = 0; quad < 4; quad++) {
        const uint32_t both = (words[quad] & 0x0f0f0f0f) | (words[quad + 4] & 0x0f0f0f0f) << 4;
        memcpy(lines + quad * LINE + 4 * lane, &both, 4);
    }
    uint32_t planes[2] = {0, 0};
    for (int quad = 0; quad < SPAN; quad++) {
        if (bits == BITS_5) planes[0] |= (words[quad] >> 4 & 0x01010101) << quad;
        if (bits == BITS_6) planes[quad / 4] |= (words[quad] >> 4 & 0x03030303) << 2 * (quad & 3);
    }
    if (bits == BITS_5) memcpy(lines + 4 * LINE + 4 * lane, planes, 4);
    if (bits == BITS_6)
        for (int plane = 0; plane < 2; plane++) memcpy(lines + (4 + plane) * LINE + 4 * lane, planes + plane, 4);
}

/* One row of a file into one output of a block; returns how many of its scales are no numbers. */
INLINE int64_t fill_row(int number, const uint8_t *row, int64_t num_groups, uint8_t *to, int lane) {
    const block_kind *kind = &block_kinds[number];
    const int groups_of_file = kind->file_inputs / GROUP, in_head = head_bytes(kind), in_group = group_bytes(kind);
    int64_t faults = 0;
    for (int64_t group = 0; group < num_groups; group++) {
        const int within = (int)(group % groups_of_file);
        const uint8_t *block = row + group / groups_of_file * kind->file_bytes;
        if (within == 0 && in_head) faults += write_halves(number, block, to, lane), to += in_head;
        file_group read;
        read_group(number, block, within, &read);
        write_lines(read.words, to, lane, kind->bits);
        uint8_t *scales = to + line_bytes(kind), *minima = scales + scale_bytes(kind);
        if (kind->scale == FLOAT16) {
            faults += write_halves(number, block, scales, lane);
        } else if (kind->scale == POWER) {
            /* Of the last powers not every multiple is a number. */
            scales[lane] = block[0], faults += block[0] > 252;
        } else {
            for (int half = 0; half < (kind->scale == HALVES ? 2 : 1); half++) {
                scales[half * LANES + lane] = read.scales[half];
                if (kind->has_minimum) minima[half * LANES + lane] = read.minima[half];
            }
        }
        to += in_group;
    }
    return faults;
}

/* The place among a head's rows that holds row `row` of a file of llama.cpp, which pairs neighbours where rotate_row pairs
 * halves; `swap` is the number of rows of a head, or 0. */
static int64_t row_of_file(int64_t row, int64_t swap) {
    if (swap == 0) return row;
    const int64_t within = row % swap, half = swap / 2;
    return row - within + (within < half ? 2 * within : 2 * (within - half) + 1);
}

static void fill_blocks(const void *argument, uint32_t item) {
    const fill_job *job = argument;
    const int64_t num_groups = num_groups_of(job->num_inputs);
    const int64_t size = block_bytes(&block_kinds[job->kind], job->num_inputs);
    const int64_t first = (int64_t)item * FILL_BLOCKS * LANES, stop = first + FILL_BLOCKS * LANES;
    int64_t faults = 0;
    for (int64_t row = first; row < stop && row < job->num_rows; row++) {
        const int lane = (int)((job->first_row + row) % LANES);
        const uint8_t *from = job->rows + row_of_file(row, job->swap) * job->row_bytes;
        uint8_t *to = job->blocks + (job->first_row + row) / LANES * size;
        /* A copy for each kind, in which all that depends on it is constant. */
        switch (job->kind) {
#define FILL(of) case of: faults += fill_row(of, from, num_groups, to, lane); break;
            FOR_KINDS(FILL)
#undef FILL
        default: break;
        }
    }
    if (faults) atomic_fetch_add(job->faults, faults);
}

/* Rows [first_row, first_row + num_rows) of a matrix [num_outputs, num_inputs] of a kind, from as many rows of a file one
 * behind the other: all rows of blocks, and of heads of `swap` rows whose order is llama.cpp's. Returns how many scales
 * are no numbers. */
int64_t outrider_fill_blocks(pool *threads, int64_t kind, const uint8_t *rows, int64_t first_row, int64_t num_rows,
                             int64_t num_inputs, int64_t swap, uint8_t *blocks) {
    _Atomic int64_t faults = 0;
    const block_kind *of = &block_kinds[kind];
    fill_job job = {.rows = rows, .row_bytes = num_inputs / of->file_inputs * of->file_bytes, .num_rows = num_rows};
    job.num_inputs = num_inputs, job.first_row = first_row, job.swap = swap, job.kind = (int)kind;
    job.blocks = blocks, job.faults = &faults;
    const int64_t items = (num_rows + FILL_BLOCKS * LANES - 1) / (FILL_BLOCKS * LANES);
    pool_run_costing(threads, fill_blocks, &job, (uint32_t)items, (double)num_rows * (double)num_inputs);
    return atomic_load(&faults);
}

/* What a kind is taken for here, to be compared with outrider/model_files/gguf/types.py: inputs and bytes of a file's block,
 * bits, number of the scale, whether there are minima, offset, and sixteen values or zeros. Returns how many kinds there are. */
int64_t outrider_describe_kind(int64_t number, int64_t facts[6 + 16]) {
    const block_kind *kind = &block_kinds[number];
    const int64_t first[6] = {kind->file_inputs, kind->file_bytes, line_bytes(kind) / LINE, kind->scale, kind->has_minimum,
                              kind->table ? 0 : kind->offset};
    memcpy(facts, first, sizeof first);
    for (int i = 0; i < 16; i++) facts[6 + i] = kind->table ? kind->table[i] - kind->offset : 0;
    return NUM_KINDS;
}

INLINE float scale_of(int scale, const uint8_t *scales, const uint8_t *head, int lane, int half) {
    const int part = lane / WIDTH * WIDTH, width = scale == FLOAT16 ? 2 : 1;
    return load_scales(scale, scales + part * width, head + 2 * part, half)[lane % WIDTH];
}

/* Row `row` of a matrix in blocks, exactly as a file's reader has it in float32. */
static void read_block_row(int64_t format, const uint8_t *blocks, int64_t row, int64_t num_inputs, float *to) {
    const block_kind *kind = &block_kinds[kind_of(format)];
    const int in_head = head_bytes(kind), in_group = group_bytes(kind), lane = (int)(row % LANES);
    const uint8_t *at = blocks + row / LANES * block_bytes(kind, num_inputs), *head = at;
    for (int64_t group = 0; group * GROUP < num_inputs; group++, at += in_group) {
        if (in_head && group % SPAN == 0) head = at, at += in_head;
        const uint8_t *scales = at + line_bytes(kind), *minima = scales + scale_bytes(kind);
        for (int half = 0; half < 2; half++) {
            const float scale = scale_of(kind->scale, scales, head, lane, half);
            const float least = kind->has_minimum ? scale_of(kind->scale, minima, head + 2 * LANES, lane, half) : 0;
            for (int i = 0; i < GROUP / 2 && group * GROUP + half * GROUP / 2 + i < num_inputs; i++) {
                const int quad = i / 4, byte = 4 * lane + i % 4;
                int value = kind->bits == BITS_8 ? at[(4 * half + quad) * LINE + byte] : at[quad * LINE + byte] >> 4 * half & 15;
                if (kind->bits == CHOSEN) value = kind->table[value];
                if (kind->bits == BITS_5) value |= (at[4 * LINE + byte] >> (4 * half + quad) & 1) << 4;
                if (kind->bits == BITS_6) value |= (at[(4 + half) * LINE + byte] >> 2 * quad & 3) << 4;
                const float product = scale * (float)(value - kind->offset);
                to[group * GROUP + half * GROUP / 2 + i] = kind->has_minimum ? product + least : product;
            }
        }
    }
}

void outrider_embed(const void *weight, int64_t format, const int64_t *token_ids, float *output, int64_t num_rows,
                    int64_t num_inputs) {
    for (int64_t row = 0; row < num_rows; row++, output += num_inputs) {
        if (format >= FIRST_KIND) {
            read_block_row(format, weight, token_ids[row], num_inputs, output);
            continue;
        }
        const float *floats_of = (const float *)weight + token_ids[row] * num_inputs;
        const uint16_t *halves_of = (const uint16_t *)weight + token_ids[row] * num_inputs;
        for (int64_t i = 0; i < num_inputs; i += WIDTH) {
            const int64_t left = num_inputs - i;
            const floats values = format == FORMAT_BF16 ? load_bf16_upto(halves_of + i, left) : load_upto(floats_of + i, left);
            store_upto(output + i, values, left);
        }
    }
}
