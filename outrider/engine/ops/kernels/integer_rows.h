/* The product of quantised rows and packed weights, once for each way to multiply integers; linear_integer.c includes
 * this file with the names that it needs:
 *
 *   TARGET        the attribute of a function that may use these instructions, or nothing
 *   NAMED(name)   the name of a function in this copy
 *   OFFSET(bits)  what `dot` leaves too much in a weight; rows carry what takes it out again
 *   dot(sums, weights, inputs, bits)
 *                 adds to each 32-bit sum the products of its four bytes of weights with the four of inputs
 *
 * Integers are exact, so all copies have the same bits. */

/* A group of all weights of a block: for each row a sum of integers, times both scales, onto the row's float32 sums. */
TARGET INLINE void NAMED(add_group)(const uint8_t *weights, const int8_t *const rows[], const float *const scales[],
                                    const int32_t *const starts[], int64_t group, int num_rows, int bits,
                                    floats sums[][PARTS]) {
    const int num_loads = bits == 8 ? 16 : 4;
    ints products[INTEGER_ROWS][PARTS];
    UNROLL
    for (int r = 0; r < num_rows; r++) {
        UNROLL
        for (int part = 0; part < PARTS; part++) products[r][part] = splat_int(starts[r][group]);
    }
    UNROLL
    for (int load = 0; load < num_loads; load++) {
        __builtin_prefetch(weights + load * LINE + PREFETCH_BYTES, 0, 2);
        UNROLL
        for (int part = 0; part < PARTS; part++) {
            const bytes here = load_bytes(weights + load * LINE + part * REGISTER_BYTES);
            UNROLL
            for (int r = 0; r < num_rows; r++) {
                if (bits == 8) {
                    const int32_t inputs = four_bytes(rows[r] + 4 * load);
                    products[r][part] = dot(products[r][part], here, inputs, 8);
                } else {
                    const int32_t low = four_bytes(rows[r] + 4 * load), high = four_bytes(rows[r] + 4 * (load + 4));
                    products[r][part] = dot(products[r][part], here & 15, low, 4);
                    products[r][part] = dot(products[r][part], high_nibbles(here), high, 4);
                }
            }
        }
    }
    const uint16_t *weight_scales = (const uint16_t *)(weights + num_loads * LINE);
    UNROLL
    for (int part = 0; part < PARTS; part++) {
        const floats shared = load_bf16(weight_scales + part * WIDTH);
        UNROLL
        for (int r = 0; r < num_rows; r++) {
            const floats scale = shared * scales[r][group];
            sums[r][part] = fused(__builtin_convertvector(products[r][part], floats), scale, sums[r][part]);
        }
    }
}

/* num_rows and bits are constants at every call. */
TARGET INLINE void NAMED(integer_tile)(const integer_job *job, int64_t row, int64_t block, int num_rows, int bits) {
    const int8_t *rows[INTEGER_ROWS];
    const float *scales[INTEGER_ROWS];
    const int32_t *starts[INTEGER_ROWS];
    floats sums[INTEGER_ROWS][PARTS];
    const uint8_t *weights = job->weight + block * job->block_bytes;
    UNROLL
    for (int r = 0; r < num_rows; r++) {
        rows[r] = job->rows + (row + r) * job->num_groups * GROUP(bits);
        scales[r] = job->scales + (row + r) * job->num_groups;
        starts[r] = job->starts + (row + r) * job->num_groups;
        UNROLL
        for (int part = 0; part < PARTS; part++) sums[r][part] = splat(0);
    }
    for (int64_t group = 0; group < job->num_groups; group++, weights += GROUP_BYTES(bits)) {
        NAMED(add_group)(weights, rows, scales, starts, group, num_rows, bits, sums);
        UNROLL
        for (int r = 0; r < num_rows; r++) rows[r] += GROUP(bits);
    }
    const int64_t first = block * LANES;
    UNROLL
    for (int r = 0; r < num_rows; r++) {
        float *output = job->output + (row + r) * job->num_outputs + first;
        UNROLL
        for (int part = 0; part < PARTS; part++) {
            const int64_t here = part * WIDTH, left = job->num_outputs - first - here;
            const floats bias = job->bias == 0 ? splat(0) : load_upto(job->bias + first + here, left);
            store_upto(output + here, job->bias == 0 ? sums[r][part] : sums[r][part] + bias, left);
        }
    }
}

TARGET INLINE void NAMED(integer_strip)(const integer_job *job, int64_t row, int64_t block, int64_t num_rows,
                                        int bits) {
    switch (num_rows) {
#if INTEGER_ROWS > 3
    case 10: NAMED(integer_tile)(job, row, block, 10, bits); break;
    case 9: NAMED(integer_tile)(job, row, block, 9, bits); break;
    case 8: NAMED(integer_tile)(job, row, block, 8, bits); break;
    case 7: NAMED(integer_tile)(job, row, block, 7, bits); break;
    case 6: NAMED(integer_tile)(job, row, block, 6, bits); break;
    case 5: NAMED(integer_tile)(job, row, block, 5, bits); break;
    case 4: NAMED(integer_tile)(job, row, block, 4, bits); break;
#endif
    case 3: NAMED(integer_tile)(job, row, block, 3, bits); break;
    case 2: NAMED(integer_tile)(job, row, block, 2, bits); break;
    default: NAMED(integer_tile)(job, row, block, 1, bits); break;
    }
}

TARGET static void NAMED(integer_item)(const void *argument, uint32_t index) {
    const integer_job *job = argument;
    const int64_t first = index * job->item_blocks, rest = job->num_blocks - first;
    const int64_t end = first + (rest < job->item_blocks ? rest : job->item_blocks);
    int64_t row = 0;
    for (int64_t stretches = job->num_stretches; stretches > 0; stretches--) {
        const int64_t stretch_end = row + (job->num_rows - row + stretches - 1) / stretches;
        for (int64_t block = first; block < end; block++) {
            for (int64_t at = row, left = (stretch_end - row + INTEGER_ROWS - 1) / INTEGER_ROWS; left > 0; left--) {
                const int64_t height = (stretch_end - at + left - 1) / left;
                if (job->bits == 8) NAMED(integer_strip)(job, at, block, height, 8);
                else NAMED(integer_strip)(job, at, block, height, 4);
                at += height;
            }
        }
        row = stretch_end;
    }
}
