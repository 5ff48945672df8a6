/* Draws where a request wants nothing but a temperature: what outrider/engine/sampling/transforms.py does then, element for
 * element. Knows no other parameter. And what a grammar forbids, before any of that.
 *
 * A score that is NaN or +inf leaves a NaN in its row, so that the draw refuses the row. */
#include "kernels.h"
#include "lanes.h"

#include <math.h>

/* Tokens that are searched together. */
#define BLOCK 64

typedef struct {
    const float *logits;
    const double *temperatures;
    float *scores;
    int64_t num_logits, num_tokens;
} temperature_job;

static int has_fault(const float *logits, int64_t count) {
    ints fault = {0};
    int64_t token = 0;
    for (; token + WIDTH <= count; token += WIDTH) fault |= ~(load(logits + token) < INFINITY);
    int found = 0;
    for (int lane = 0; lane < WIDTH; lane++) found |= fault[lane];
    for (; token < count; token++) found |= !(logits[token] < INFINITY);
    return found;
}

/* Score 0 for the lowest id among the best, -inf for all others. */
static void argmax_mask(const float *logits, float highest, float *scores, int64_t count) {
    int64_t best = 0;
    while (best + BLOCK < count && greatest_float(logits + best, BLOCK) < highest) best += BLOCK;
    while (best < count - 1 && !(logits[best] == highest)) best++;
    for (int64_t token = 0; token < count; token++) scores[token] = -INFINITY;
    scores[best] = has_fault(logits, count) ? NAN : highest - highest;
}

static void temperature_row(const void *argument, uint32_t row) {
    const temperature_job *job = argument;
    const int64_t count = job->num_tokens;
    const float *logits = job->logits + row * job->num_logits;
    float *scores = job->scores + row * count;
    const double temperature = job->temperatures[row];
    if (temperature == 1.0) {
        memcpy(scores, logits, (size_t)count * sizeof(float));
        return;
    }
    const float highest = greatest_float(logits, count), divisor = (float)temperature;
    if (temperature == 0.0) argmax_mask(logits, highest, scores, count);
    else
        for (int64_t token = 0; token < count; token++) scores[token] = (logits[token] - highest) / divisor;
}

/* logits [num_rows, num_logits], of which the first num_tokens count; temperatures and keys [num_rows]; scores
 * [num_rows, num_tokens], best and ids as in outrider_draw, whose result is returned. */
int64_t outrider_choose(pool *threads, const float *logits, const double *temperatures, const int64_t *keys,
                        float *scores, double *best, int64_t *ids, int64_t num_rows, int64_t num_logits,
                        int64_t num_tokens, int64_t stretches) {
    const temperature_job job = {logits, temperatures, scores, num_logits, num_tokens};
    pool_run_costing(threads, temperature_row, &job, (uint32_t)num_rows, 2.0 * (double)(num_rows * num_tokens));
    return outrider_draw(threads, scores, keys, best, ids, num_rows, num_tokens, stretches);
}

typedef struct {
    const float *logits;
    const uint32_t *bits;
    float *masked;
    int64_t num_logits, num_words;
} mask_job;

static void mask_row(const void *argument, uint32_t row) {
    const mask_job *job = argument;
    const float *logits = job->logits + row * job->num_logits;
    const uint32_t *bits = job->bits + row * job->num_words;
    float *masked = job->masked + row * job->num_logits;
    const int64_t count = job->num_logits;
    for (int64_t first = 0; first < count; first += 32) {
        const int64_t length = count - first < 32 ? count - first : 32;
        const uint32_t word = first / 32 < job->num_words ? bits[first / 32] : 0;
        /* Nearly all words of a strict grammar have no bit, and of a loose one all of them. */
        if (word == UINT32_MAX) memcpy(masked + first, logits + first, (size_t)length * sizeof(float));
        else
            for (int64_t lane = 0; lane < length; lane++)
                masked[first + lane] = word >> lane & 1 ? logits[first + lane] : -INFINITY;
    }
}

/* logits and masked [num_rows, num_logits]; bits [num_rows, num_words], the lowest bit of a word first. */
void outrider_mask(pool *threads, const float *logits, const uint32_t *bits, float *masked, int64_t num_rows,
                   int64_t num_logits, int64_t num_words) {
    const mask_job job = {logits, bits, masked, num_logits, num_words};
    pool_run_costing(threads, mask_row, &job, (uint32_t)num_rows, 0.5 * (double)(num_rows * num_logits));
}
