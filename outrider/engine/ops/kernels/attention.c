/* Attention over a row's own list of cache slots. Knows no mask: a row sees its list and no more.
 *
 * Keys are taken in list order, in chunks of CHUNK counted from the start of the row's own list, with the online
 * softmax of Milakov and Gimelshein (2018). A row's result therefore depends on its list alone, never on the other
 * rows. */
#include "lanes.h"
#include "pool.h"

#include <math.h>

#define CHUNK 64
#define MAX_HEAD_DIM 512

typedef struct {
    const float *query;
    const float *keys, *values;
    const int32_t *key_slots;
    const int64_t *key_starts;
    const int32_t *key_counts;
    float *output;
    int64_t num_heads, num_groups, head_dim;
    float scale;
} attention_job;

INLINE floats4 dot4(const float *query, const float *const keys[4], int64_t head_dim) {
    const int64_t whole = head_dim / LANES * LANES;
    lanes16 sums[4] = {0};
    for (int64_t d = 0; d < whole; d += LANES) {
        UNROLL
        for (int key = 0; key < 4; key++) sums[key] = add_products(sums[key], query + d, keys[key] + d);
    }
    if (whole < head_dim) {
        UNROLL
        for (int key = 0; key < 4; key++)
            sums[key] = add_last_products(sums[key], query + whole, keys[key] + whole, head_dim - whole);
    }
    return sum4(sums[0], sums[1], sums[2], sums[3]);
}

/* Scores of `count` keys; the rest of the chunk becomes -inf, whose weight is exactly zero. */
INLINE void score_chunk(const attention_job *job, const float *query, const float *base, const int32_t *slots,
                        int count, float scores[CHUNK]) {
    const int64_t stride = job->num_groups * job->head_dim;
    for (int first = 0; first < count; first += 4) {
        const float *keys[4];
        for (int key = 0; key < 4; key++) {
            const int within = first + key < count ? first + key : count - 1;
            keys[key] = base + slots[within] * stride;
        }
        const floats4 dots = dot4(query, keys, job->head_dim) * job->scale;
        memcpy(scores + first, &dots, sizeof dots);
    }
    for (int key = count; key < CHUNK; key++) scores[key] = -INFINITY;
}

INLINE float highest_of(const float scores[CHUNK], float highest) {
    for (int key = 0; key < CHUNK; key++) highest = scores[key] > highest ? scores[key] : highest;
    return highest;
}

/* Turns scores into weights e^(score - highest) in place and returns their sum. */
INLINE float weigh(float scores[CHUNK], float highest) {
    lanes16 total = {0};
    for (int key = 0; key < CHUNK; key += LANES) {
        UNROLL
        for (int part = 0; part < PARTS; part++) {
            float *place = scores + key + part * WIDTH;
            const floats weights = exponential(load(place) - highest);
            store(place, weights);
            total.part[part] += weights;
        }
    }
    return sum(total);
}

/* total[d] = total[d] * keep + sum over keys of weight * value[d], keys in order, for four registers of elements. */
INLINE void add_values(float *total, float keep, const float weights[CHUNK], const float *base, const int32_t *slots,
                       int count, int64_t stride, int64_t left) {
    floats sums[4];
    UNROLL
    for (int part = 0; part < 4; part++) sums[part] = load(total + part * WIDTH) * keep;
    for (int key = 0; key < count; key++) {
        const float *value = base + slots[key] * stride;
        UNROLL
        for (int part = 0; part < 4; part++)
            sums[part] = fused(splat(weights[key]), load_upto(value + part * WIDTH, left - part * WIDTH), sums[part]);
    }
    UNROLL
    for (int part = 0; part < 4; part++) store(total + part * WIDTH, sums[part]);
}

/* The whole registers of a head first, with a constant that the loads above are simplified for. */
INLINE void add_heads_values(const attention_job *job, float *total, float keep, const float weights[CHUNK],
                             const float *base, const int32_t *slots, int count) {
    const int64_t stride = job->num_groups * job->head_dim;
    int64_t d = 0;
    for (; d + 4 * WIDTH <= job->head_dim; d += 4 * WIDTH)
        add_values(total + d, keep, weights, base + d, slots, count, stride, 4 * WIDTH);
    if (d < job->head_dim) add_values(total + d, keep, weights, base + d, slots, count, stride, job->head_dim - d);
}

static void attend(const void *argument, uint32_t index) {
    const attention_job *job = argument;
    const int64_t row = index / job->num_heads, head = index % job->num_heads, head_dim = job->head_dim;
    const int64_t offset = head / (job->num_heads / job->num_groups) * head_dim;
    const float *query = job->query + (row * job->num_heads + head) * head_dim;
    const int32_t *slots = job->key_slots + job->key_starts[row];
    float total[MAX_HEAD_DIM] = {0}, scores[CHUNK];
    float highest = -INFINITY, weight_sum = 0.0f;
    for (int64_t start = 0; start < job->key_counts[row]; start += CHUNK) {
        const int64_t left = job->key_counts[row] - start;
        const int count = left < CHUNK ? (int)left : CHUNK;
        score_chunk(job, query, job->keys + offset, slots + start, count, scores);
        const float before = highest;
        highest = highest_of(scores, before);
        const float keep = exponential(splat(before) - highest)[0];
        weight_sum = weight_sum * keep + weigh(scores, highest);
        add_heads_values(job, total, keep, scores, job->values + offset, slots + start, count);
    }
    float *output = job->output + (row * job->num_heads + head) * head_dim;
    for (int64_t d = 0; d < head_dim; d++) output[d] = total[d] / weight_sum;
}

/* query [num_rows, num_heads, head_dim], caches [slots, num_groups, head_dim], output like query. */
void outrider_attention(pool *threads, const float *query, const float *keys, const float *values,
                        const int32_t *key_slots, const int64_t *key_starts, const int32_t *key_counts, float *output,
                        int64_t num_rows, int64_t num_heads, int64_t num_groups, int64_t head_dim,
                        int64_t max_key_count, float scale) {
    const attention_job job = {query,     keys,       values,   key_slots, key_starts, key_counts, output,
                               num_heads, num_groups, head_dim, scale};
    const uint32_t num_items = (uint32_t)(num_rows * num_heads);
    pool_run_costing(threads, attend, &job, num_items, 2.0 * num_items * (double)(head_dim * max_key_count));
}
