/* The operations as the forward and Python call them; each is described where it is defined. */
#ifndef OUTRIDER_KERNELS_H
#define OUTRIDER_KERNELS_H

#include "blocks.h"
#include "pool.h"

#define MAX_HEAD_DIM 512

typedef struct {
    const void *weight;
    const float *bias;
    int64_t num_inputs, num_outputs;
    /* As outrider_linear reads it. */
    int64_t format;
} matrix;

/* Rows of a product's output, from first_row on, that are multiplied with the same matrix: the one of this index among
 * equally large ones, whose rows stand below each other in one weight. */
typedef struct {
    int32_t index, first_row, num_rows;
} row_batch;

/* Which rows of x are multiplied with what. */
typedef struct {
    const row_batch *batches;
    int64_t num_batches, num_inputs_rows, num_rows;
    /* The row of x for each row of the output, of which a product with floats makes copies in `copies`; null: its own. */
    const int32_t *places;
    float *copies;
} row_batches;

void outrider_linear(pool *threads, const float *x, const void *weight, int64_t format, const float *bias, float *output,
                     int64_t num_rows, int64_t num_inputs, int64_t num_outputs, void *scratch);

int64_t outrider_linear_scratch(int64_t num_rows, int64_t num_inputs);

void multiply_batches(pool *threads, const float *x, const row_batches *rows, const matrix_parts *weights,
                      const float *bias, float *output, int64_t num_inputs, int64_t stride, void *scratch);

void linear_blocks(pool *threads, const float *x, const row_batches *rows, const matrix_parts *weights, const float *bias,
                   float *output, int64_t num_inputs, int64_t stride, void *scratch);

/* Rows of a matrix, looked up: token_ids [num_rows], output [num_rows, num_inputs]. */
void outrider_embed(const void *weight, int64_t format, const int64_t *token_ids, float *output, int64_t num_rows,
                    int64_t num_inputs);

void outrider_rms_norm(pool *threads, const float *x, const float *weight, float *output, int64_t num_rows,
                       int64_t width, float epsilon);

/* The same for one row, on the caller; output may be x itself. */
void norm_one(const float *x, const float *weight, float *output, int64_t width, float epsilon);

void outrider_rotate_and_store(pool *threads, const float *query, const float *key, const float *value,
                               const int64_t strides[6], const int64_t *positions, const int64_t *slots,
                               const float *cos, const float *sin, float *query_out, void *key_cache,
                               void *value_cache, int64_t format, int64_t num_rows, int64_t num_heads, int64_t num_groups,
                               int64_t head_dim, int64_t num_turning);

void outrider_attention(pool *threads, const float *query, const void *keys, const void *values, int64_t format,
                        const int32_t *key_slots, const int64_t *key_starts, const int32_t *key_counts,
                        const float *sinks, float *output, int64_t num_rows, int64_t num_heads, int64_t num_groups,
                        int64_t head_dim, int64_t max_key_count, float scale);

/* Experts of a layer: `num_chosen` of them for each row. Their matrices stand below each other in one weight; the bias of
 * gate is that of gate beside up [num_experts, 2 * width], that of down [num_experts, hidden]. */
typedef struct {
    matrix router, gate, up, down;
    /* is_normalised: shares are parts of the chosen ones' sum, and else of that of all. */
    int64_t num_experts, num_chosen, is_normalised;
    /* Of outrider_clamped_multiply; without a limit the gate is a silu. */
    float slope, limit;
} experts;

int64_t outrider_experts_floats(const experts *of, int64_t num_rows);

void outrider_experts(pool *threads, const experts *of, const float *x, float *output, int64_t num_rows, float *memory);

void divide_scores(float *scores, int64_t num_tokens, double temperature);

int64_t outrider_draw_stretch(void);

int64_t outrider_choose(pool *threads, const float *logits, const double *temperatures, const int64_t *keys,
                        float *highest, double *best, int64_t *ids, int64_t num_rows, int64_t num_logits,
                        int64_t num_tokens, int64_t stretches);

void outrider_rank(pool *threads, const float *scores, const int64_t *tokens, const int64_t *keys, const double *scales,
                   double *sums, int64_t *ids, double *shares, int32_t *faults, int64_t num_rows, int64_t num_tokens,
                   int64_t count);

void outrider_gate_multiply(pool *threads, const float *gate_up, float *output, int64_t num_rows, int64_t width,
                            int64_t is_gelu);

void outrider_clamped_multiply(pool *threads, const float *gate_up, float *output, int64_t num_rows, int64_t width,
                               float slope, float limit);

#endif
