/* x times the transpose of weight, plus bias. Not a matrix library: rows are few, weights are read once from memory.
 *
 * Every output element is one dot product: sixteen partial sums, step sixteen along k, summed by sum4. Tiles only
 * decide how many dot products advance together, so the same bits come out for any number of rows, tile and thread. */
#include "kernels.h"
#include "lanes.h"

/* Sums of a tile, its weights and one x must fit the registers: 32 of 64 bytes with AVX-512, less elsewhere. */
#if REGISTER_BYTES == 64
#define TILE_OUTPUTS 4
#define TILE_ROWS 5
#else
#define TILE_OUTPUTS 2
#define TILE_ROWS 3
#endif
/* The first three quarters of the outputs come in large items, because reading starts anew with each one; the rest in
 * small ones, so that no thread waits long for the last. Where the weights are read again for the next block of rows, an
 * item of them stays in the second-level cache. */
#define LARGE_ITEMS_PER_THREAD 4
#define SMALL_ITEMS_OF_A_LARGE 4
#define MIN_ITEM_BYTES 16384
#define MAX_ITEM_BYTES 1048576
#define MAX_REREAD_ITEM_BYTES 262144

typedef struct {
    const float *x;
    const void *weight;
    const float *bias;
    float *output;
    int64_t num_rows, num_inputs, num_outputs, num_large, large_outputs, small_outputs;
} linear_job;

INLINE const char *weight_at(const linear_job *job, int64_t output, int64_t k, int is_bf16) {
    return (const char *)job->weight + (output * job->num_inputs + k) * (is_bf16 ? 2 : 4);
}

INLINE floats load_weight(const char *from, int is_bf16) {
    return is_bf16 ? load_bf16((const uint16_t *)from) : load((const float *)from);
}

INLINE floats load_weight_upto(const char *from, int64_t left, int is_bf16) {
    return is_bf16 ? load_bf16_upto((const uint16_t *)from, left) : load_upto((const float *)from, left);
}

/* The last num_inputs % 16 products of each sum, padded with zeros to sixteen. */
static __attribute__((noinline)) void add_tails(const linear_job *job, int64_t row, int64_t output, int num_rows,
                                                int num_outputs, int is_bf16, lanes16 sums[TILE_ROWS][4]) {
    const int64_t whole = job->num_inputs / LANES * LANES, rest = job->num_inputs - whole;
    for (int o = 0; o < num_outputs; o++) {
        for (int part = 0; part < PARTS; part++) {
            const int64_t k = whole + part * WIDTH, left = rest - part * WIDTH;
            const floats weights = load_weight_upto(weight_at(job, output + o, k, is_bf16), left, is_bf16);
            for (int r = 0; r < num_rows; r++) {
                const floats inputs = load_upto(job->x + (row + r) * job->num_inputs + k, left);
                sums[r][o].part[part] = fused(weights, inputs, sums[r][o].part[part]);
            }
        }
    }
}

INLINE void finish(const linear_job *job, int64_t row, int64_t output, int num_outputs, const lanes16 sums[4]) {
    const floats4 totals = sum4(sums[0], sums[1], sums[2], sums[3]);
    float *to = job->output + row * job->num_outputs + output;
    UNROLL
    for (int o = 0; o < num_outputs; o++) to[o] = job->bias == 0 ? totals[o] : totals[o] + job->bias[output + o];
}

/* One register of weights for each output, multiplied with one register of each row. */
INLINE void step(const linear_job *job, const float *x, int64_t output, int64_t k, int part, int num_rows,
                 int num_outputs, int is_bf16, lanes16 sums[TILE_ROWS][4]) {
    floats weights[TILE_OUTPUTS];
    UNROLL
    for (int o = 0; o < num_outputs; o++)
        weights[o] = load_weight(weight_at(job, output + o, k, is_bf16), is_bf16);
    UNROLL
    for (int r = 0; r < num_rows; r++) {
        const floats inputs = load(x + r * job->num_inputs + k);
        UNROLL
        for (int o = 0; o < num_outputs; o++) sums[r][o].part[part] = fused(weights[o], inputs, sums[r][o].part[part]);
    }
}

/* num_rows, num_outputs and is_bf16 are constants at every call, so the loops over them disappear. */
INLINE void tile(const linear_job *job, int64_t row, int64_t output, int num_rows, int num_outputs, int is_bf16) {
    const int64_t num_inputs = job->num_inputs, whole = num_inputs / LANES * LANES;
    const int size = is_bf16 ? 2 : 4;
    const float *x = job->x + row * num_inputs;
    /* The next tile's weights are fetched meanwhile, in the order of memory: hardware loses four short rows. */
    const char *next = weight_at(job, output + num_outputs, 0, is_bf16);
    lanes16 sums[TILE_ROWS][4];
    UNROLL
    for (int r = 0; r < num_rows; r++) {
        UNROLL
        for (int o = 0; o < 4; o++) sums[r][o] = (lanes16){0};
    }
    for (int64_t k = 0; k < whole; k += LANES) {
        UNROLL
        for (int o = 0; o < num_outputs; o++)
            if (o * LANES * size % 64 == 0) __builtin_prefetch(next + (k * num_outputs + o * LANES) * size, 0, 2);
        UNROLL
        for (int part = 0; part < PARTS; part++)
            step(job, x, output, k + part * WIDTH, part, num_rows, num_outputs, is_bf16, sums);
    }
    if (whole < num_inputs) {
        /* A copy, because an array whose address leaves the function could not live in registers above. */
        lanes16 copy[TILE_ROWS][4];
        memcpy(copy, sums, sizeof copy);
        add_tails(job, row, output, num_rows, num_outputs, is_bf16, copy);
        memcpy(sums, copy, sizeof copy);
    }
    UNROLL
    for (int r = 0; r < num_rows; r++) finish(job, row + r, output, num_outputs, sums[r]);
}

INLINE void tiles(const linear_job *job, int64_t row, int64_t from, int64_t to, int num_rows, int is_bf16) {
    for (; from + TILE_OUTPUTS <= to; from += TILE_OUTPUTS) tile(job, row, from, num_rows, TILE_OUTPUTS, is_bf16);
    for (; from < to; from++) tile(job, row, from, num_rows, 1, is_bf16);
}

INLINE void item(const linear_job *job, uint32_t index, int is_bf16) {
    const int64_t num_small = index < job->num_large ? 0 : index - job->num_large;
    const int64_t size = index < job->num_large ? job->large_outputs : job->small_outputs;
    const int64_t from = (index - num_small) * job->large_outputs + num_small * job->small_outputs;
    const int64_t to = from + size < job->num_outputs ? from + size : job->num_outputs;
    int64_t row = 0;
    for (; row + TILE_ROWS <= job->num_rows; row += TILE_ROWS) tiles(job, row, from, to, TILE_ROWS, is_bf16);
    switch (job->num_rows - row) {
#if TILE_ROWS > 3
    case 4: tiles(job, row, from, to, 4, is_bf16); break;
    case 3: tiles(job, row, from, to, 3, is_bf16); break;
#endif
    case 2: tiles(job, row, from, to, 2, is_bf16); break;
    case 1: tiles(job, row, from, to, 1, is_bf16); break;
    default: break;
    }
}

static void item_bf16(const void *job, uint32_t index) { item(job, index, 1); }

static void item_f32(const void *job, uint32_t index) { item(job, index, 0); }

/* A multiple of TILE_OUTPUTS, at least one tile. */
static int64_t whole_tiles(int64_t outputs) {
    return outputs < 2 * TILE_OUTPUTS ? TILE_OUTPUTS : outputs / TILE_OUTPUTS * TILE_OUTPUTS;
}

static int64_t outputs_of_a_large_item(const pool *threads, const linear_job *job, int64_t row_bytes) {
    const int64_t most = job->num_rows > TILE_ROWS ? MAX_REREAD_ITEM_BYTES : MAX_ITEM_BYTES;
    const int64_t bytes = job->num_outputs * row_bytes / (LARGE_ITEMS_PER_THREAD * pool_num_threads(threads));
    return whole_tiles((bytes < MIN_ITEM_BYTES ? MIN_ITEM_BYTES : bytes > most ? most : bytes) / row_bytes);
}

/* x [num_rows, num_inputs], weight [num_outputs, num_inputs] bfloat16 or float32, bias [num_outputs] or NULL. */
void outrider_linear(pool *threads, const float *x, const void *weight, int is_bf16, const float *bias, float *output,
                     int64_t num_rows, int64_t num_inputs, int64_t num_outputs) {
    linear_job job = {x, weight, bias, output, num_rows, num_inputs, num_outputs, 0, 0, 0};
    job.large_outputs = outputs_of_a_large_item(threads, &job, num_inputs * (is_bf16 ? 2 : 4));
    job.small_outputs = whole_tiles(job.large_outputs / SMALL_ITEMS_OF_A_LARGE);
    job.num_large = num_outputs * 3 / 4 / job.large_outputs;
    const int64_t rest = num_outputs - job.num_large * job.large_outputs;
    const uint32_t num_items = (uint32_t)(job.num_large + (rest + job.small_outputs - 1) / job.small_outputs);
    pool_run_costing(threads, is_bf16 ? item_bf16 : item_f32, &job, num_items,
                     (double)num_rows * (double)num_inputs * (double)num_outputs);
}
