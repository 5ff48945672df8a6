/* The operations as the forward and Python call them; each is described where it is defined. */
#ifndef OUTRIDER_KERNELS_H
#define OUTRIDER_KERNELS_H

#include "blocks.h"
#include "pool.h"

#define MAX_HEAD_DIM 512

void outrider_linear(pool *threads, const float *x, const void *weight, int64_t format, const float *bias, float *output,
                     int64_t num_rows, int64_t num_inputs, int64_t num_outputs, void *scratch);

int64_t outrider_linear_scratch(int64_t num_rows, int64_t num_inputs);

void linear_blocks(pool *threads, const float *x, const matrix_parts *weights, const float *bias, float *output,
                   int64_t num_rows, int64_t num_inputs, int64_t stride, void *scratch);

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
                        const int32_t *key_slots, const int64_t *key_starts, const int32_t *key_counts, float *output,
                        int64_t num_rows, int64_t num_heads, int64_t num_groups, int64_t head_dim,
                        int64_t max_key_count, float scale);

void outrider_gate_multiply(pool *threads, const float *gate_up, float *output, int64_t num_rows, int64_t width,
                            int64_t is_gelu);

int64_t outrider_draw(pool *threads, const float *scores, const int64_t *keys, double *best, int64_t *ids,
                      int64_t num_rows, int64_t num_tokens, int64_t stretches);

#endif
