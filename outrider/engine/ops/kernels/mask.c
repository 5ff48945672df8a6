/* What a grammar forbids, before a token is chosen. */
#include "kernels.h"

#include <math.h>
#include <string.h>

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
