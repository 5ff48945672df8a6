/* The products, with inputs of one byte and of two, and all rows of one matrix in blocks, and the first rows of x in eight
 * and four bits, for a processor that is only emulated here:
 *
 *   KIND OUTPUTS INPUTS ROWS, and files: rows as GGUF has them, x, and where the results go. */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>

int64_t outrider_fill_blocks(pool *threads, int64_t kind, const uint8_t *rows, int64_t first_row, int64_t num_rows,
                             int64_t num_inputs, int64_t swap, uint8_t *blocks);

int64_t outrider_quantise(pool *threads, const void *rows, int64_t format, int64_t num_rows, int64_t num_inputs,
                          int64_t bits, float limit, uint8_t *blocks);

static void *contents(const char *path, long *size) {
    FILE *file = fopen(path, "rb");
    if (file == 0 || fseek(file, 0, SEEK_END) != 0) exit(2);
    *size = ftell(file);
    rewind(file);
    void *bytes = malloc((size_t)*size);
    if (bytes == 0 || fread(bytes, 1, (size_t)*size, file) != (size_t)*size) exit(2);
    fclose(file);
    return bytes;
}

int main(int count, char **words) {
    if (count != 8) return 2;
    const int64_t kind = atoi(words[1]), outputs = atoi(words[2]), inputs = atoi(words[3]), rows = atoi(words[4]);
    long size;
    const uint8_t *stored = contents(words[5], &size);
    const float *x = contents(words[6], &size);
    pool *threads = outrider_pool_create(2, 0);
    uint8_t *blocks = calloc((size_t)((outputs + LANES - 1) / LANES), (size_t)block_bytes(&block_kinds[kind], inputs));
    float *product = malloc((size_t)(outputs * (2 * rows + inputs)) * sizeof(float));
    void *scratch = malloc((size_t)outrider_linear_scratch(rows, inputs));
    int64_t *ids = malloc((size_t)outputs * sizeof *ids);
    for (int64_t id = 0; id < outputs; id++) ids[id] = id;
    outrider_fill_blocks(threads, kind, stored, 0, outputs, inputs, 0, blocks);
    outrider_linear(threads, x, blocks, FIRST_KIND + kind, 0, product, rows, inputs, outputs, scratch);
    outrider_linear(threads, x, blocks, FIRST_OF_TWO + kind, 0, product + outputs * rows, rows, inputs, outputs, scratch);
    outrider_embed(blocks, FIRST_OF_TWO + kind, ids, product + outputs * 2 * rows, outputs, inputs);
    FILE *file = fopen(words[7], "wb");
    const size_t numbers = (size_t)(outputs * (2 * rows + inputs));
    if (file == 0 || fwrite(product, sizeof(float), numbers, file) != numbers) return 2;
    for (int64_t bits = 8; bits >= 4; bits -= 4) {
        const size_t block = (size_t)block_bytes(&block_kinds[bits == 8 ? Q8_0 : Q4_0], inputs);
        uint8_t *made = malloc(block);
        outrider_quantise(threads, x, FORMAT_F32, 4, inputs, bits, 1e5f, made);
        if (fwrite(made, 1, block, file) != block) return 2;
    }
    return fclose(file) != 0 ? 2 : 0;
}
