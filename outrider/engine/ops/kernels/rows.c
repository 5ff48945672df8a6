/* What happens to a row element by element: norm, rotation, gate. Each row by itself. */
#include "kernels.h"
#include "lanes.h"

#include <math.h>

typedef struct {
    const float *x, *weight;
    float *output;
    int64_t width;
    float epsilon;
} norm_job;

typedef struct {
    const float *query, *key, *value;
    const int64_t *positions, *slots;
    const float *cos, *sin;
    float *query_out;
    /* float32 or bfloat16. */
    void *key_cache, *value_cache;
    int64_t format;
    /* Strides of rows and heads, in floats. */
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t num_heads, num_groups, head_dim, num_turning;
} rotate_job;

typedef struct {
    const float *gate_up;
    float *output;
    int64_t width, is_gelu;
    float slope, limit;
} gate_job;

void norm_one(const float *x, const float *weight, float *output, int64_t width, float epsilon) {
    lanes16 squares = {{{0}}};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares = add_products(squares, x + i, x + i);
    if (i < width) squares = add_last_products(squares, x + i, x + i, width - i);
    const float scale = 1.0f / sqrtf(sum(squares) / (float)width + epsilon);
    for (i = 0; i < width; i += WIDTH) {
        const int64_t left = width - i;
        store_upto(output + i, load_upto(x + i, left) * scale * load_upto(weight + i, left), left);
    }
}

static void norm_row(const void *argument, uint32_t row) {
    const norm_job *job = argument;
    const int64_t offset = row * job->width;
    norm_one(job->x + offset, job->weight, job->output + offset, job->width, job->epsilon);
}

/* Pairs element i with i + half of those that turn, as Hugging Face's rotate_half does; those behind them stay. */
INLINE void rotate_head(const float *from, float *to, const float *cos, const float *sin, int64_t half,
                        int64_t head_dim) {
    for (int64_t i = 0; i < half; i += WIDTH) {
        const int64_t left = half - i;
        const floats c = load_upto(cos + i, left), s = load_upto(sin + i, left);
        const floats first = load_upto(from + i, left), second = load_upto(from + half + i, left);
        store_upto(to + i, fused(first, c, -(second * s)), left);
        store_upto(to + half + i, fused(second, c, first * s), left);
    }
    if (2 * half < head_dim) memcpy(to + 2 * half, from + 2 * half, (size_t)(head_dim - 2 * half) * sizeof(float));
}

/* The nearest bfloat16, of two equally near ones the even; NaN stays NaN. */
INLINE uint16_t rounded_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void rotate_row(const void *argument, uint32_t row) {
    const rotate_job *job = argument;
    const int64_t head_dim = job->head_dim, half = job->num_turning / 2;
    const float *cos = job->cos + job->positions[row] * half, *sin = job->sin + job->positions[row] * half;
    for (int64_t head = 0; head < job->num_heads; head++)
        rotate_head(job->query + row * job->query_row + head * job->query_head,
                    job->query_out + (row * job->num_heads + head) * head_dim, cos, sin, half, head_dim);
    for (int64_t group = 0; group < job->num_groups; group++) {
        const int64_t place = (job->slots[row] * job->num_groups + group) * head_dim;
        const float *key = job->key + row * job->key_row + group * job->key_head;
        const float *value = job->value + row * job->value_row + group * job->value_head;
        if (job->format == FORMAT_F32) {
            rotate_head(key, (float *)job->key_cache + place, cos, sin, half, head_dim);
            memcpy((float *)job->value_cache + place, value, (size_t)head_dim * sizeof(float));
            continue;
        }
        float rotated[MAX_HEAD_DIM];
        rotate_head(key, rotated, cos, sin, half, head_dim);
        for (int64_t i = 0; i < head_dim; i++) {
            ((uint16_t *)job->key_cache)[place + i] = rounded_bf16(rotated[i]);
            ((uint16_t *)job->value_cache)[place + i] = rounded_bf16(value[i]);
        }
    }
}

/* Of gelu, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016), the factor of x is
 * 1 / (1 + e^-2u). */
static void gate_row(const void *argument, uint32_t row) {
    const gate_job *job = argument;
    const float *gate = job->gate_up + 2 * row * job->width, *up = gate + job->width;
    const floats linear = splat(-1.5957691216057308f), cubic = splat(-0.07135481282553325f);
    for (int64_t i = 0; i < job->width; i += WIDTH) {
        const int64_t left = job->width - i;
        const floats x = load_upto(gate + i, left);
        const floats exponent = job->is_gelu ? x * fused(x * x, cubic, linear) : -x;
        const floats gated = x / (exponential(exponent) + 1.0f);
        store_upto(job->output + row * job->width + i, gated * load_upto(up + i, left), left);
    }
}

static void clamped_row(const void *argument, uint32_t row) {
    const gate_job *job = argument;
    const float *gate = job->gate_up + 2 * row * job->width, *up = gate + job->width;
    const floats most = splat(job->limit), least = -most;
    for (int64_t i = 0; i < job->width; i += WIDTH) {
        const int64_t left = job->width - i;
        floats x = load_upto(gate + i, left), y = load_upto(up + i, left);
        /* So that NaN stays NaN. */
        x = pick(x > most, most, x), y = pick(y > most, most, pick(y < least, least, y));
        store_upto(job->output + row * job->width + i, x / (exponential(-job->slope * x) + 1.0f) * (y + 1.0f), left);
    }
}

/* x and output [num_rows, width], weight [width]. */
void outrider_rms_norm(pool *threads, const float *x, const float *weight, float *output, int64_t num_rows,
                       int64_t width, float epsilon) {
    const norm_job job = {x, weight, output, width, epsilon};
    pool_run_costing(threads, norm_row, &job, (uint32_t)num_rows, (double)(num_rows * width));
}

/* Six strides, in floats: query row and head, key row and head, value row and head. Tables have half as many columns as
 * coordinates of a head turn, the first ones. */
void outrider_rotate_and_store(pool *threads, const float *query, const float *key, const float *value,
                               const int64_t strides[6], const int64_t *positions, const int64_t *slots,
                               const float *cos, const float *sin, float *query_out, void *key_cache,
                               void *value_cache, int64_t format, int64_t num_rows, int64_t num_heads, int64_t num_groups,
                               int64_t head_dim, int64_t num_turning) {
    const rotate_job job = {query,      key,        value,      positions,  slots,     cos,        sin,     query_out,
                            key_cache,  value_cache, format,     strides[0], strides[1], strides[2], strides[3], strides[4],
                            strides[5], num_heads,  num_groups, head_dim,   num_turning};
    pool_run_costing(threads, rotate_row, &job, (uint32_t)num_rows,
                     (double)(num_rows * (num_heads + num_groups) * head_dim));
}

/* gate_up [num_rows, 2 * width] holds gate beside up; output [num_rows, width]. The gate's function is gelu in its tanh
 * form, or silu. */
void outrider_gate_multiply(pool *threads, const float *gate_up, float *output, int64_t num_rows, int64_t width,
                            int64_t is_gelu) {
    const gate_job job = {gate_up, output, width, is_gelu, 0, 0};
    pool_run_costing(threads, gate_row, &job, (uint32_t)num_rows, 8.0 * (double)(num_rows * width));
}

/* The same with g / (1 + e^(-slope g)) (u + 1), of gates up to limit and what is beside them from -limit to limit. */
void outrider_clamped_multiply(pool *threads, const float *gate_up, float *output, int64_t num_rows, int64_t width,
                               float slope, float limit) {
    const gate_job job = {gate_up, output, width, 0, slope, limit};
    pool_run_costing(threads, clamped_row, &job, (uint32_t)num_rows, 8.0 * (double)(num_rows * width));
}
