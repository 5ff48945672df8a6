/* The product of quantised rows and blocks of weights, once for each way to multiply integers and for inputs of one byte and
 * of two; linear_blocks.c includes this file with the names that it needs:
 *
 *   TARGET        the attribute of a function that may use these instructions, or nothing
 *   NAMED(name)   the name of a function in this copy
 *   dot(sums, weights, inputs, is_wide)
 *                 adds to each 32-bit sum the products of its four bytes of weights with the four of inputs; weights are
 *                 below 64 unless they are wide
 *   pairs(weights, inputs, is_wide), widen(sums)
 *                 in its place: products of two bytes each, added within 16 bits, of which most_pairs() fit, and 32-bit
 *                 sums of theirs
 *   dot_words(sums, weights, inputs, is_last), join(first, last)
 *                 in its place: adds products of both bytes at once, for two of each four outputs, in two sums each, and
 *                 what they are together
 *   IS_CENTRED    whether `dot` takes 128 from wide weights itself
 *   PLANES        bytes of an input
 *   MAX_ROWS      rows of a tile
 *
 * Integers are exact, so all copies have the same bits. */

/* Four inputs of WIDTH outputs: line `quad` of four, in one half of the group. */
TARGET INLINE bytes NAMED(load_weights)(const block_kind *kind, const uint8_t *lines, int part, int half, int quad) {
    const int bits = kind->bits;
    const uint8_t *at = lines + part * REGISTER_BYTES;
    if (bits == BITS_8) return load_bytes(at + (4 * half + quad) * LINE);
    const words line = (words)load_bytes(at + quad * LINE);
    const bytes nibbles = (bytes)((half ? line >> 4 : line) & 0x0f0f0f0f);
    if (bits == CHOSEN) return choose_bytes(nibbles, kind->table);
    if (bits == BITS_4) return nibbles;
    if (bits == BITS_5) {
        const words fifth = (words)load_bytes(at + 4 * LINE);
        return nibbles | (bytes)((half ? fifth >> quad : fifth << (4 - quad)) & 0x10101010);
    }
    const words pairs = (words)load_bytes(at + (4 + half) * LINE);
    return nibbles | (bytes)((quad < 3 ? pairs << (4 - 2 * quad) : pairs >> 2) & 0x30303030);
}

/* A group of all weights of a block: for each row a sum of integers, times both scales, onto the row's float32 sums. */
TARGET INLINE void NAMED(add_group)(const block_kind *kind, const uint8_t *head, const uint8_t *lines,
                                    const input_group *const rows[], int num_rows, floats sums[][PARTS]) {
    const int is_wide = kind->bits == BITS_8 || kind->bits == CHOSEN;
    const int offset = is_wide && IS_CENTRED ? kind->offset - 128 : kind->offset;
    const int is_halved = kind->scale == HALVES;
    const uint8_t *scales = lines + line_bytes(kind), *minima = scales + scale_bytes(kind);
#ifdef pairs
    /* Not further than the integers that a scale belongs to. */
    const int fitting = most_pairs(kind->bits), most = is_halved && fitting > 4 ? 4 : fitting;
#endif
    UNROLL
    for (int part = 0; part < PARTS; part++) {
        /* The inputs are read anew, because compilers would keep those of all parts in memory, for want of registers. */
        if (PARTS > 1) __asm__ volatile("" ::: "memory");
        const int outputs = part * WIDTH, width = kind->scale == FLOAT16 ? 2 : 1;
        ints products[MAX_ROWS][PLANES];
#ifdef pairs
        shorts narrow[MAX_ROWS][PLANES];
#endif
        UNROLL
        for (int half = 0; half < 2; half++) {
            if (half == 0 || is_halved) {
                UNROLL
                for (int r = 0; r < num_rows; r++) {
                    products[r][0] = splat_int(0);
#ifdef dot_words
                    products[r][1] = splat_int(0);
#else
                    products[r][PLANES - 1] = splat_int(-offset * sum_of(rows[r], is_halved, half));
#endif
                }
            }
            UNROLL
            for (int quad = 0; quad < 4; quad++) {
                const bytes weights = NAMED(load_weights)(kind, lines, part, half, quad);
                UNROLL
                for (int r = 0; r < num_rows; r++) {
                    UNROLL
                    for (int plane = 0; plane < PLANES; plane++) {
#if defined(dot_words)
                        const int64_t inputs = four_words(rows[r]->whole + GROUP / 2 * half + 4 * quad);
                        products[r][plane] = dot_words(products[r][plane], weights, inputs, plane);
#elif defined(pairs)
                        const int32_t inputs = four_bytes(rows[r]->inputs[plane] + GROUP / 2 * half + 4 * quad);
                        const int number = (4 * half + quad) % most;
                        const shorts found = pairs(weights, inputs, is_wide);
                        narrow[r][plane] = number == 0 ? found : narrow[r][plane] + found;
                        KEEP_IN_REGISTER(narrow[r][plane]);
                        if (number == most - 1) {
                            products[r][plane] += widen(narrow[r][plane]);
                            KEEP_IN_REGISTER(products[r][plane]);
                        }
#else
                        const int32_t inputs = four_bytes(rows[r]->inputs[plane] + GROUP / 2 * half + 4 * quad);
                        products[r][plane] = dot(products[r][plane], weights, inputs, is_wide);
#endif
                    }
                }
            }
            if (half == 0 && !is_halved) continue;
            const floats shared = load_scales(kind->scale, scales + outputs * width, head + 2 * outputs, half);
            UNROLL
            for (int r = 0; r < num_rows; r++) {
#ifdef dot_words
                const int32_t least = -offset * sum_of(rows[r], is_halved, half);
                const ints product = join(products[r][0], products[r][1]) + least;
#else
                const ints product = PLANES == 1 ? products[r][0] : (products[r][0] << LOW_BITS) + products[r][PLANES - 1];
#endif
                sums[r][part] = fused(__builtin_convertvector(product, floats), shared * rows[r]->scale, sums[r][part]);
            }
            if (kind->has_minimum) {
                const uint8_t *minimum_head = head + 2 * LANES + 2 * outputs;
                const floats least = load_scales(kind->scale, minima + outputs * width, minimum_head, half);
                UNROLL
                for (int r = 0; r < num_rows; r++) {
                    const float sum = is_halved ? rows[r]->scale * (float)rows[r]->sums[half] : rows[r]->scaled_sum;
                    sums[r][part] = fused(least, splat(sum), sums[r][part]);
                }
            }
        }
    }
}

/* num_rows and kind are constants at every call. */
TARGET INLINE void NAMED(block_tile)(const block_job *job, const block_part *part, int64_t row, int64_t block, int num_rows,
                                     const block_kind *kind) {
    const int in_head = head_bytes(kind), in_group = group_bytes(kind), in_span = in_head ? SPAN : INT32_MAX;
    const input_group *rows[MAX_ROWS];
    floats sums[MAX_ROWS][PARTS];
    UNROLL
    for (int r = 0; r < num_rows; r++) {
        rows[r] = job->rows + (job->places == 0 ? row + r : job->places[row + r]) * job->num_groups;
        UNROLL
        for (int each = 0; each < PARTS; each++) sums[r][each] = splat(0);
    }
    const uint8_t *head, *lines = part->blocks + block * part->bytes;
    for (int64_t left = job->num_groups; left > 0; left -= in_span) {
        head = lines, lines += in_head;
        _Pragma("GCC unroll 1")
        for (int64_t group = left < in_span ? left : in_span; group > 0; group--, lines += in_group) {
            for (int line = 0; line < in_group; line += LINE) __builtin_prefetch(lines + line + PREFETCH_BYTES, 0, 2);
            NAMED(add_group)(kind, head, lines, rows, num_rows, sums);
            UNROLL
            for (int r = 0; r < num_rows; r++) rows[r]++;
        }
    }
    /* A copy, because an array whose address leaves the function could not live in registers above. */
    floats copy[MAX_ROWS][PARTS];
    memcpy(copy, sums, sizeof copy);
    store_sums(job, part, row, block, num_rows, &copy[0][0]);
}

TARGET INLINE void NAMED(block_strip)(const block_job *job, const block_part *part, int64_t row, int64_t block,
                                      int64_t num_rows, const block_kind *kind) {
    switch (num_rows) {
#if MAX_ROWS > 8
    case 10: NAMED(block_tile)(job, part, row, block, 10, kind); break;
    case 9: NAMED(block_tile)(job, part, row, block, 9, kind); break;
#endif
#if MAX_ROWS > 5
    case 8: NAMED(block_tile)(job, part, row, block, 8, kind); break;
    case 7: NAMED(block_tile)(job, part, row, block, 7, kind); break;
    case 6: NAMED(block_tile)(job, part, row, block, 6, kind); break;
#endif
#if MAX_ROWS > 4
    case 5: NAMED(block_tile)(job, part, row, block, 5, kind); break;
#endif
#if MAX_ROWS > 2
    case 4: NAMED(block_tile)(job, part, row, block, 4, kind); break;
    case 3: NAMED(block_tile)(job, part, row, block, 3, kind); break;
#endif
    case 2: NAMED(block_tile)(job, part, row, block, 2, kind); break;
    default: NAMED(block_tile)(job, part, row, block, 1, kind); break;
    }
}

/* One function for each kind: compilers take far longer for one that has them all. */
#define STRIP(of)                                                                                                       \
    TARGET static __attribute__((noinline)) void NAMED(of)(const block_job *job, const block_part *part, int64_t row,    \
                                                           int64_t block, int64_t num_rows) {                           \
        NAMED(block_strip)(job, part, row, block, num_rows, &block_kinds[of]);                                          \
    }
FOR_KINDS(STRIP)
#undef STRIP

TARGET static void NAMED(block_item)(const void *argument, uint32_t number) {
#define ENTRY(of) NAMED(of),
    static const strip_function strips[] = {FOR_KINDS(ENTRY)};
#undef ENTRY
    const block_job *all = argument;
    const row_batch *batch = &all->batches[number / all->num_items];
    const uint32_t index = number % all->num_items;
    const block_part *whole = all->parts;
    while (whole + 1 < all->parts + all->num_parts && index >= whole[1].first_item) whole++;
    const block_part own = part_of(whole, batch->index), *part = &own;
    const block_job its = job_of(all, batch), *job = &its;
    const int64_t first = (index - part->first_item) * part->item_blocks, rest = part->num_blocks - first;
    const int64_t end = first + (rest < part->item_blocks ? rest : part->item_blocks);
    int64_t row = 0;
    for (int64_t stretches = job->num_stretches; stretches > 0; stretches--) {
        const int64_t stretch_end = row + (job->num_rows - row + stretches - 1) / stretches;
        for (int64_t block = first; block < end; block++) {
            for (int64_t at = row, left = (stretch_end - row + MAX_ROWS - 1) / MAX_ROWS; left > 0; left--) {
                const int64_t height = (stretch_end - at + left - 1) / left;
                strips[part->kind](job, part, at, block, height);
                at += height;
            }
        }
        row = stretch_end;
    }
}
