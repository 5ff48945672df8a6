/* x times the transpose of weight, plus bias. Not a matrix library: rows are few, weights are read once from memory.
 *
 * Every output element is one dot product: sixteen partial sums, step sixteen along k, summed as sum4 does. Tiles only
 * decide how many dot products advance together, so the same bits come out for any number of rows, tile and thread. */
#include "blocks.h"
#include "kernels.h"

/* Sums of a tile, its weights and one x must fit the registers: 32 of 64 bytes with AVX-512, less elsewhere. */
#if REGISTER_BYTES == 64
#define TILE_OUTPUTS 4
#define TILE_ROWS 6
#else
#define TILE_OUTPUTS 2
#define TILE_ROWS 3
#endif
/* The first three quarters of the outputs come in large items, because reading starts anew with each one; the rest in
 * small ones, so that no thread waits long for the last. */
#define LARGE_ITEMS_PER_THREAD 4
#define SMALL_ITEMS_OF_A_LARGE 4
#define MIN_ITEM_BYTES 16384
#define MAX_ITEM_BYTES 1048576
/* Weights that all rows of a block pass before the next ones: two panels, the one in use and the one that is fetched
 * meanwhile, stay in the second-level cache. */
#define PANEL_BYTES 131072
/* Rows of a block, and bytes of their inputs, which stay there as well. More rows than a block has read an item's weights
 * again, which are then few enough to have stayed, too. */
#define MAX_BLOCK_ROWS 48
#define MAX_BLOCK_BYTES 524288
#define MAX_REREAD_ITEM_BYTES 262144
#define LINE_BYTES 64

typedef struct {
    const float *x;
    const void *weight;
    const float *bias;
    float *output;
    /* Floats between rows of the output. */
    int64_t stride;
    int64_t num_rows, num_inputs, num_outputs, num_threads, num_blocks, num_large, large_outputs, small_outputs;
    const row_batch *batches;
    /* Of one batch. */
    uint32_t num_items;
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

INLINE void finish(const linear_job *job, int64_t row, int64_t output, int num_rows, int num_outputs,
                   const lanes16 sums[][4]) {
    floats4 totals[4];
    sum4x4(sums, num_rows, totals);
    UNROLL
    for (int r = 0; r < num_rows; r++) {
        float *to = job->output + (row + r) * job->stride + output;
        UNROLL
        for (int o = 0; o < num_outputs; o++)
            to[o] = job->bias == 0 ? totals[r][o] : totals[r][o] + job->bias[output + o];
    }
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

/* A multiple of TILE_OUTPUTS, at least one tile. */
static int64_t whole_tiles(int64_t outputs) {
    return outputs < 2 * TILE_OUTPUTS ? TILE_OUTPUTS : outputs / TILE_OUTPUTS * TILE_OUTPUTS;
}

/* What tiles fetch for later ones: `bytes` each, from `next` on. */
typedef struct {
    const char *next;
    int64_t bytes;
} fetch;

/* num_rows, num_outputs, is_bf16 and alone are constants at every call, so the loops over them disappear. */
INLINE void tile(const linear_job *job, int64_t row, int64_t output, int num_rows, int num_outputs, int is_bf16,
                 int alone, fetch ahead) {
    const int64_t num_inputs = job->num_inputs, whole = num_inputs / LANES * LANES;
    const int step_bytes = TILE_OUTPUTS * LANES * (is_bf16 ? 2 : 4);
    const int pace = alone || step_bytes < 2 * LINE_BYTES ? step_bytes : step_bytes / 2;
    const float *x = job->x + row * num_inputs;
    const char *next = ahead.next, *end = next + ahead.bytes;
    lanes16 sums[TILE_ROWS][4];
    UNROLL
    for (int r = 0; r < num_rows; r++) {
        UNROLL
        for (int o = 0; o < 4; o++) sums[r][o] = (lanes16){0};
    }
    for (int64_t k = 0; k < whole; k += LANES) {
        if (alone || next < end) {
            for (int at = 0; at < pace; at += LINE_BYTES) __builtin_prefetch(next + at, 0, 2);
            next += pace;
        }
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
    for (int r = 0; r < num_rows; r += 4)
        finish(job, row + r, output, num_rows - r < 4 ? num_rows - r : 4, num_outputs, sums + r);
}

/* Returns what is left to be fetched after these tiles. */
INLINE fetch tiles(const linear_job *job, int64_t row, int64_t from, int64_t to, int num_rows, int is_bf16, int alone,
                   fetch ahead) {
    for (; from + TILE_OUTPUTS <= to; from += TILE_OUTPUTS) {
        tile(job, row, from, num_rows, TILE_OUTPUTS, is_bf16, alone, ahead);
        ahead.next += ahead.bytes;
    }
    for (; from < to; from++) tile(job, row, from, num_rows, 1, is_bf16, 0, (fetch){0, 0});
    return ahead;
}

INLINE fetch strip(const linear_job *job, int64_t row, int64_t from, int64_t to, int64_t num_rows, int is_bf16,
                   int alone, fetch ahead) {
    switch (num_rows) {
#if TILE_ROWS > 3
    case 6: return tiles(job, row, from, to, 6, is_bf16, alone, ahead);
    case 5: return tiles(job, row, from, to, 5, is_bf16, alone, ahead);
    case 4: return tiles(job, row, from, to, 4, is_bf16, alone, ahead);
#endif
    case 3: return tiles(job, row, from, to, 3, is_bf16, alone, ahead);
    case 2: return tiles(job, row, from, to, 2, is_bf16, alone, ahead);
    default: return tiles(job, row, from, to, 1, is_bf16, alone, ahead);
    }
}

/* Some rows, and the outputs from..to; `after` is the output at which this thread will probably go on.
 *
 * A single strip of rows reads each weight once, and fetches those of the next tile meanwhile in the order of memory:
 * hardware loses four short rows. More rows are cut into strips as equal as possible, since a low one would widen its
 * weights for few rows. They take turns on a panel, and each fetches an equal part of the next one: so memory is read
 * all the time, and not by the first strip alone while the others only compute. */
INLINE void block(const linear_job *job, int64_t row, int64_t num_rows, int64_t from, int64_t to, int64_t after,
                  int is_bf16) {
    const int64_t row_bytes = job->num_inputs * (is_bf16 ? 2 : 4), tile_bytes = TILE_OUTPUTS * row_bytes;
    const int64_t num_strips = (num_rows + TILE_ROWS - 1) / TILE_ROWS, panel = whole_tiles(PANEL_BYTES / row_bytes);
    if (num_strips == 1) {
        const fetch ahead = {weight_at(job, from + TILE_OUTPUTS, 0, is_bf16), tile_bytes};
        strip(job, row, from, to, num_rows, is_bf16, 1, ahead);
        return;
    }
    for (; from < to; from += panel) {
        const int64_t stop = from + panel < to ? from + panel : to, next = stop < to ? stop : after;
        fetch ahead = {weight_at(job, next, 0, is_bf16), next < job->num_outputs ? tile_bytes / num_strips : 0};
        for (int64_t at = row, left = num_strips; left > 0; left--) {
            const int64_t height = (row + num_rows - at + left - 1) / left;
            ahead = strip(job, at, from, stop, height, is_bf16, 0, ahead);
            at += height;
        }
    }
}

static int64_t item_start(const linear_job *job, int64_t index) {
    const int64_t num_small = index < job->num_large ? 0 : index - job->num_large;
    const int64_t start = (index - num_small) * job->large_outputs + num_small * job->small_outputs;
    return start < job->num_outputs ? start : job->num_outputs;
}

static int64_t num_blocks(int64_t num_rows, int64_t num_inputs) {
    const int64_t fitting = MAX_BLOCK_BYTES / (num_inputs * (int64_t)sizeof(float));
    const int64_t rows = fitting < TILE_ROWS ? TILE_ROWS : fitting < MAX_BLOCK_ROWS ? fitting : MAX_BLOCK_ROWS;
    return (num_rows + rows - 1) / rows;
}

/* The job of one batch. */
INLINE linear_job job_of(const linear_job *all, const row_batch *batch, int is_bf16) {
    linear_job job = *all;
    job.x += batch->first_row * job.num_inputs;
    job.output += batch->first_row * job.stride;
    job.weight = weight_at(&job, batch->index * job.num_outputs, 0, is_bf16);
    if (job.bias != 0) job.bias += batch->index * job.stride;
    job.num_rows = batch->num_rows;
    job.num_blocks = num_blocks(job.num_rows, job.num_inputs);
    return job;
}

INLINE void item(const linear_job *all, uint32_t number, int is_bf16) {
    const linear_job own = job_of(all, &all->batches[number / all->num_items], is_bf16), *job = &own;
    const uint32_t index = number % all->num_items;
    const int64_t from = item_start(job, index), to = item_start(job, (int64_t)index + 1);
    const int64_t after = item_start(job, (int64_t)index + job->num_threads);
    int64_t row = 0;
    for (int64_t left = job->num_blocks; left > 0; left--) {
        const int64_t num_rows = (job->num_rows - row + left - 1) / left;
        block(job, row, num_rows, from, to, left == 1 ? after : from, is_bf16);
        row += num_rows;
    }
}

static void item_bf16(const void *job, uint32_t index) { item(job, index, 1); }

static void item_f32(const void *job, uint32_t index) { item(job, index, 0); }

static int64_t outputs_of_a_large_item(const linear_job *job, int64_t num_batches, int64_t row_bytes) {
    const int64_t most = job->num_blocks > 1 ? MAX_REREAD_ITEM_BYTES : MAX_ITEM_BYTES;
    const int64_t bytes = num_batches * job->num_outputs * row_bytes / (LARGE_ITEMS_PER_THREAD * job->num_threads);
    return whole_tiles((bytes < MIN_ITEM_BYTES ? MIN_ITEM_BYTES : bytes > most ? most : bytes) / row_bytes);
}

static void linear_floats(pool *threads, const float *x, const row_batches *rows, const matrix_part *weight,
                          const float *bias, float *output, int64_t num_inputs, int64_t stride) {
    const int is_bf16 = weight->format == FORMAT_BF16;
    const int64_t num_outputs = weight->num_outputs;
    linear_job job = {.x = x, .weight = weight->weight, .bias = bias, .output = output, .stride = stride};
    job.batches = rows->batches, job.num_inputs = num_inputs, job.num_outputs = num_outputs;
    for (int64_t index = 0; index < rows->num_batches; index++)
        if (rows->batches[index].num_rows > job.num_rows) job.num_rows = rows->batches[index].num_rows;
    job.num_threads = pool_num_threads(threads);
    job.num_blocks = num_blocks(job.num_rows, num_inputs);
    job.large_outputs = outputs_of_a_large_item(&job, rows->num_batches, num_inputs * (is_bf16 ? 2 : 4));
    job.small_outputs = whole_tiles(job.large_outputs / SMALL_ITEMS_OF_A_LARGE);
    job.num_large = num_outputs * 3 / 4 / job.large_outputs;
    const int64_t rest = num_outputs - job.num_large * job.large_outputs;
    job.num_items = (uint32_t)(job.num_large + (rest + job.small_outputs - 1) / job.small_outputs);
    pool_run_costing(threads, is_bf16 ? item_bf16 : item_f32, &job, job.num_items * (uint32_t)rows->num_batches,
                     (double)rows->num_rows * (double)num_inputs * (double)num_outputs);
}

typedef struct {
    const float *x;
    const int32_t *places;
    float *copies;
    int64_t num_inputs;
} copy_job;

static void copy_row(const void *argument, uint32_t row) {
    const copy_job *job = argument;
    memcpy(job->copies + row * job->num_inputs, job->x + job->places[row] * job->num_inputs,
           (size_t)job->num_inputs * sizeof(float));
}

/* Batches of rows, each with the outputs of its own matrix. A part has num_outputs rows for each matrix, those of the first
 * one at the beginning; bias [matrices, stride] or NULL. The rest is as in outrider_linear, with scratch for all rows of
 * x. */
void multiply_batches(pool *threads, const float *x, const row_batches *rows, const matrix_parts *weights,
                      const float *bias, float *output, int64_t num_inputs, int64_t stride, void *scratch) {
    int64_t first = 0, has_blocks = 0, has_floats = 0;
    for (int64_t index = 0; index < weights->count; index++)
        if (weights->parts[index].format >= FIRST_KIND) has_blocks = 1;
        else has_floats = 1;
    if (has_floats && rows->places != 0) {
        const copy_job job = {x, rows->places, rows->copies, num_inputs};
        pool_run_costing(threads, copy_row, &job, (uint32_t)rows->num_rows, (double)(rows->num_rows * num_inputs));
    }
    const float *each = rows->places == 0 ? x : rows->copies;
    for (int64_t index = 0; index < weights->count; index++) {
        const matrix_part *part = &weights->parts[index];
        if (part->format < FIRST_KIND)
            linear_floats(threads, each, rows, part, bias == 0 ? 0 : bias + first, output + first, num_inputs, stride);
        first += part->num_outputs;
    }
    if (has_blocks) linear_blocks(threads, x, rows, weights, bias, output, num_inputs, stride, scratch);
}

/* x [num_rows, num_inputs], weight [num_outputs, num_inputs] of a format of blocks.h, of which all but floats need
 * outrider_linear_scratch bytes; bias [num_outputs] or NULL. */
void outrider_linear(pool *threads, const float *x, const void *weight, int64_t format, const float *bias, float *output,
                     int64_t num_rows, int64_t num_inputs, int64_t num_outputs, void *scratch) {
    const matrix_parts whole = {1, {{weight, format, num_outputs}}};
    const row_batch all = {0, 0, (int32_t)num_rows};
    const row_batches rows = {.batches = &all, .num_batches = 1, .num_inputs_rows = num_rows, .num_rows = num_rows};
    multiply_batches(threads, x, &rows, format == FORMAT_PARTS ? weight : &whole, bias, output, num_inputs, num_outputs,
                     scratch);
}
