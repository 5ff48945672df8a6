/* Attention over a row's own list of cache slots. Knows no mask: a row sees its list and no more.
 *
 * Keys are taken in list order, in chunks of CHUNK counted from the start of the row's own list, with the online
 * softmax of Milakov and Gimelshein (2018). A row's result therefore depends on its list alone, never on the other
 * rows. */
#include "kernels.h"
#include "lanes.h"

#include <math.h>

#define CHUNK 64
/* Keys that are asked for ahead of their turn. Slots lie anywhere, so that no processor foresees the next: on a Xeon with
 * AVX-512 a step of 135M after 300 tokens took 4.5 ms without, 4.1 so, 4.4 with 4 and 4.3 with 16. */
#define KEYS_AHEAD 8
/* Heads that read the same keys and values advance together: alone, one waits for its own last addition, and reads for
 * itself what serves all. How many scores are summed together is up to the registers. */
#if REGISTER_BYTES == 64
#define TOGETHER 4
#define SCORED_TOGETHER 4
#else
#define TOGETHER 2
#define SCORED_TOGETHER 1
#endif

typedef struct {
    const float *query;
    /* float32 or bfloat16. */
    const void *keys, *values;
    const int32_t *key_slots;
    const int64_t *key_starts;
    const int32_t *key_counts;
    const float *sinks;
    float *output;
    int64_t num_rows, num_heads, num_groups, head_dim, items_of_a_group;
    float scale;
} attention_job;

/* What one head has gathered so far. */
typedef struct {
    float total[MAX_HEAD_DIM], scores[CHUNK];
    float highest, weight_sum, keep;
} head_state;

/* The next WIDTH numbers of a cache from place `index` on, of which only `left` are there. */
INLINE floats load_cached(const void *cache, int64_t index, int64_t left, int is_bf16) {
    return is_bf16 ? load_bf16_upto((const uint16_t *)cache + index, left) : load_upto((const float *)cache + index, left);
}

/* lanes + query * key for the next sixteen elements, of which only `left` are there. */
INLINE lanes16 add_key(lanes16 lanes, const float *query, const void *keys, int64_t key, int64_t left, int is_bf16) {
    UNROLL
    for (int part = 0; part < PARTS; part++) {
        const int64_t here = part * WIDTH, rest = left - here;
        const floats numbers = load_cached(keys, key + here, rest, is_bf16);
        lanes.part[part] = fused(load_upto(query + here, rest), numbers, lanes.part[part]);
    }
    return lanes;
}

/* Lets `count` numbers of a cache from place `index` on come nearer. */
INLINE void ask_for(const void *cache, int64_t index, int64_t count, int is_bf16) {
    const int64_t size = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    for (int64_t byte = 0; byte < count * size; byte += 64) __builtin_prefetch((const char *)cache + index * size + byte);
}

/* Scores of `count` keys for heads whose queries lie side by side; the rest of the chunk becomes -inf, whose weight is
 * exactly zero. */
INLINE void score_chunk(const attention_job *job, const float *query, int64_t offset, const int32_t *slots, int count,
                        head_state *heads, int num_heads, int is_bf16) {
    const int64_t head_dim = job->head_dim, whole = head_dim / LANES * LANES, stride = job->num_groups * head_dim;
    for (int first = 0; first < count; first += 4) {
        int64_t keys[4];
        lanes16 sums[4][4] = {0};
        for (int key = 0; key < 4; key++) {
            const int within = first + key < count ? first + key : count - 1;
            keys[key] = offset + slots[within] * stride;
            const int next = first + key + KEYS_AHEAD < count ? first + key + KEYS_AHEAD : count - 1;
            ask_for(job->keys, offset + slots[next] * stride, head_dim, is_bf16);
            /* Its values are read when the whole chunk has weights. */
            ask_for(job->values, keys[key], head_dim, is_bf16);
        }
        for (int64_t d = 0; d < whole; d += LANES) {
            UNROLL
            for (int key = 0; key < 4; key++) {
                UNROLL
                for (int head = 0; head < num_heads; head++)
                    sums[head][key] = add_key(sums[head][key], query + head * head_dim + d, job->keys, keys[key] + d,
                                              LANES, is_bf16);
            }
        }
        if (whole < head_dim) {
            UNROLL
            for (int key = 0; key < 4; key++) {
                UNROLL
                for (int head = 0; head < num_heads; head++)
                    sums[head][key] = add_key(sums[head][key], query + head * head_dim + whole, job->keys,
                                              keys[key] + whole, head_dim - whole, is_bf16);
            }
        }
        floats4 dots[4];
        sum4x4((const lanes16(*)[4])sums, num_heads, dots);
        UNROLL
        for (int head = 0; head < num_heads; head++) {
            dots[head] *= job->scale;
            memcpy(heads[head].scores + first, &dots[head], sizeof dots[head]);
        }
    }
    for (int head = 0; head < num_heads; head++)
        for (int key = count; key < CHUNK; key++) heads[head].scores[key] = -INFINITY;
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
INLINE void add_values(const attention_job *job, head_state *heads, int num_heads, int64_t d, int64_t offset,
                       const int32_t *slots, int count, int64_t left, int is_bf16) {
    const int64_t stride = job->num_groups * job->head_dim;
    floats sums[TOGETHER][4];
    UNROLL
    for (int head = 0; head < num_heads; head++) {
        UNROLL
        for (int part = 0; part < 4; part++)
            sums[head][part] = load(heads[head].total + d + part * WIDTH) * heads[head].keep;
    }
    for (int key = 0; key < count; key++) {
        const int64_t value = offset + d + slots[key] * stride;
        UNROLL
        for (int part = 0; part < 4; part++) {
            const int64_t here = part * WIDTH;
            const floats values = load_cached(job->values, value + here, left - here, is_bf16);
            UNROLL
            for (int head = 0; head < num_heads; head++)
                sums[head][part] = fused(splat(heads[head].scores[key]), values, sums[head][part]);
        }
    }
    UNROLL
    for (int head = 0; head < num_heads; head++) {
        UNROLL
        for (int part = 0; part < 4; part++) store(heads[head].total + d + part * WIDTH, sums[head][part]);
    }
}

/* The whole registers of a head first, with a constant that the loads above are simplified for. */
INLINE void add_heads_values(const attention_job *job, head_state *heads, int num_heads, int64_t offset,
                             const int32_t *slots, int count, int is_bf16) {
    int64_t d = 0;
    for (; d + 4 * WIDTH <= job->head_dim; d += 4 * WIDTH)
        add_values(job, heads, num_heads, d, offset, slots, count, 4 * WIDTH, is_bf16);
    if (d < job->head_dim) add_values(job, heads, num_heads, d, offset, slots, count, job->head_dim - d, is_bf16);
}

/* Turns the chunk's scores into weights, against the highest score so far. */
INLINE void weigh_chunk(head_state *head) {
    const float before = head->highest, highest = greatest_float(head->scores, CHUNK);
    head->highest = highest > before ? highest : before;
    head->keep = exponential(splat(before) - head->highest)[0];
    head->weight_sum = head->weight_sum * head->keep + weigh(head->scores, head->highest);
}

/* num_heads heads from `head` on, all of one group. */
INLINE void attend_heads(const attention_job *job, int64_t row, int64_t head, int num_heads, int is_bf16) {
    const int64_t head_dim = job->head_dim, place = (row * job->num_heads + head) * head_dim;
    const int64_t offset = head / (job->num_heads / job->num_groups) * head_dim;
    const int32_t *slots = job->key_slots + job->key_starts[row];
    head_state heads[TOGETHER];
    for (int each = 0; each < num_heads; each++) {
        memset(heads[each].total, 0, sizeof heads[each].total);
        /* A sink is a key before all others, whose value is zero. */
        heads[each].highest = job->sinks == 0 ? -INFINITY : job->sinks[head + each];
        heads[each].weight_sum = job->sinks == 0 ? 0.0f : 1.0f;
    }
    for (int64_t start = 0; start < job->key_counts[row]; start += CHUNK) {
        const int64_t left = job->key_counts[row] - start;
        const int count = left < CHUNK ? (int)left : CHUNK;
        UNROLL
        for (int each = 0; each < num_heads; each += SCORED_TOGETHER)
            score_chunk(job, job->query + place + each * head_dim, offset, slots + start, count, heads + each,
                        num_heads < SCORED_TOGETHER ? num_heads : SCORED_TOGETHER, is_bf16);
        for (int each = 0; each < num_heads; each++) weigh_chunk(&heads[each]);
        add_heads_values(job, heads, num_heads, offset, slots + start, count, is_bf16);
    }
    for (int each = 0; each < num_heads; each++) {
        float *output = job->output + place + each * head_dim;
        for (int64_t d = 0; d < head_dim; d += WIDTH)
            store_upto(output + d, load_upto(heads[each].total + d, head_dim - d) / heads[each].weight_sum, head_dim - d);
    }
}

/* Rows one after the other for the same heads: those of one session find keys and values in the cache. */
INLINE void attend(const attention_job *job, uint32_t index, int is_bf16) {
    const int64_t heads_of_a_group = job->num_heads / job->num_groups, items = job->items_of_a_group;
    const int64_t row = index % job->num_rows, item = index / job->num_rows % items;
    const int64_t first = heads_of_a_group * item / items, end = heads_of_a_group * (item + 1) / items;
    const int64_t head = index / job->num_rows / items * heads_of_a_group + first;
    switch (end - first) {
#if TOGETHER > 2
    case 4: attend_heads(job, row, head, 4, is_bf16); break;
    case 3: attend_heads(job, row, head, 3, is_bf16); break;
#endif
    case 2: attend_heads(job, row, head, 2, is_bf16); break;
    default: attend_heads(job, row, head, 1, is_bf16); break;
    }
}

static void attend_f32(const void *job, uint32_t index) { attend(job, index, 0); }

static void attend_bf16(const void *job, uint32_t index) { attend(job, index, 1); }

/* query [num_rows, num_heads, head_dim], caches [slots, num_groups, head_dim] of a format, sinks [num_heads] or null,
 * output like query. */
void outrider_attention(pool *threads, const float *query, const void *keys, const void *values, int64_t format,
                        const int32_t *key_slots, const int64_t *key_starts, const int32_t *key_counts,
                        const float *sinks, float *output, int64_t num_rows, int64_t num_heads, int64_t num_groups,
                        int64_t head_dim, int64_t max_key_count, float scale) {
    const int64_t heads_of_a_group = num_heads / num_groups;
    int64_t items = (heads_of_a_group + TOGETHER - 1) / TOGETHER;
    /* Few rows are cut finer, so that every thread has some. */
    while (num_rows * num_groups * items < pool_num_threads(threads) && items < heads_of_a_group) items++;
    const attention_job job = {query,    keys,      values,     key_slots, key_starts, key_counts, sinks,
                               output,   num_rows, num_heads, num_groups, head_dim,  items,      scale};
    pool_run_costing(threads, format == FORMAT_BF16 ? attend_bf16 : attend_f32, &job, (uint32_t)(num_rows * num_groups * items),
                     2.0 * (double)(num_rows * num_heads * head_dim * max_key_count));
}
