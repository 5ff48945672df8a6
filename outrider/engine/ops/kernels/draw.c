/* Choosing a token: float64 probabilities, and the argmax of scores plus counter-based Gumbel noise. Knows no
 * parameter but a temperature, whose scores are those of outrider/engine/ops/temperature.py, element for element.
 *
 * The noise is that of outrider/engine/noise.py: word = mix(key + G * (token + 1)), u = ((word >> 12) + 0.5) * 2^-52,
 * gumbel = -log(-log(u)). The finaliser is that of splitmix64 (Steele, Lea and Flood, 2014). */
#include "kernels.h"
#include "lanes.h"

#include <math.h>

/* Doubles in a register. */
#define DWIDTH (WIDTH / 2)
/* Tokens of one item: enough work to share, and a row of a large vocabulary is shared between threads. */
#define STRETCH 8192
/* Partial sums of a softmax, whatever the length of a register. */
#define SUM_LANES 8
/* Tokens that are skipped together when none of them can win. */
#define BLOCK 64
/* Tokens of a row that are gathered at a time; whole blocks. */
#define GATHERED 1024
#define LN2 0.693147180559945309417
/* Far more than the rounding of a score plus noise, far less than the gaps it decides about. */
#define MARGIN 1e-6
/* Above every noise: the largest uniform is 1 - 2^-53, whose noise is 36.74. */
#define MOST_NOISE 37.0

/* Rows lie row_length apart. Without temperatures they are scores; `highest` is what stands in each row then. */
typedef struct {
    const float *scores;
    const int64_t *keys;
    int64_t row_length, num_tokens, stretches;
    double *best;
    int64_t *ids;
    const double *temperatures;
    float *highest;
} draw_job;

typedef struct {
    const float *scores;
    double *probs;
    int64_t num_tokens;
    int32_t *faults;
} softmax_job;

/* Past the end of the row stands -inf, which wins nothing and weighs nothing. */
INLINE doubles load_scores(const float *from, int64_t left) {
    doubles wide;
    if (left >= DWIDTH) {
        for (int lane = 0; lane < DWIDTH; lane++) wide[lane] = from[lane];
    } else {
        for (int lane = 0; lane < DWIDTH; lane++) wide[lane] = lane < left ? from[lane] : -INFINITY;
    }
    return wide;
}

INLINE long_words mix(long_words z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniforms in (0, 1) of some tokens. Exact: 52 bits become a double by way of its exponent. */
INLINE doubles uniforms_of(uint64_t key, long_words tokens) {
    const long_words words = mix((tokens + 1) * 0x9E3779B97F4A7C15u + key);
    const doubles whole = (doubles)((words >> 12) | 0x4330000000000000u) - 0x1p52;
    return (whole + 0.5) * 0x1p-52;
}

/* Those of the tokens first, first + 1, ... */
INLINE doubles uniforms_from(uint64_t key, int64_t first) {
    long_words tokens;
    for (int lane = 0; lane < DWIDTH; lane++) tokens[lane] = (uint64_t)(first + lane);
    return uniforms_of(key, tokens);
}

/* log(x) within 1 ulp for positive normal x; the method and the coefficients are those of Sun's fdlibm (e_log.c). */
INLINE doubles logarithm(doubles x) {
    static const double even[] = {1.531383769920937332e-01, 2.222219843214978396e-01, 3.999999999940941908e-01};
    static const double odd[] = {1.479819860511658591e-01, 1.818357216161805012e-01, 2.857142874366239149e-01,
                                 6.666666666666735130e-01};
    const long_words shifted = (long_words)x + (0x3FF0000000000000u - 0x3FE6A09E00000000u);
    const doubles exponent = (doubles)((shifted >> 52) | 0x4330000000000000u) - (0x1p52 + 1023.0);
    const doubles f = (doubles)((shifted & 0x000FFFFFFFFFFFFFu) + 0x3FE6A09E00000000u) - 1.0;
    const doubles s = f / (f + 2.0), z = s * s, w = z * z;
    const doubles series = w * polynomial_double(w, even, 3) + z * polynomial_double(w, odd, 4);
    const doubles half_square = f * f * 0.5;
    const doubles small = fused_double(exponent, splat_double(1.90821492927058770002e-10), s * (half_square + series));
    return fused_double(exponent, splat_double(6.93147180369123816490e-01), f - (half_square - small));
}

INLINE doubles gumbel(doubles uniform) { return -logarithm(-logarithm(uniform)); }

/* At least gumbel(u), cheaply: gumbel <= -log(1 - u), because -log(u) >= 1 - u; and 1 - u >= 2^exponent. */
INLINE doubles gumbel_bound(doubles uniform) {
    const long_words exponent = (long_words)(1.0 - uniform) >> 52;
    return (1023.0 - ((doubles)(exponent | 0x4330000000000000u) - 0x1p52)) * LN2;
}

INLINE double greatest(doubles values) {
    double greatest = values[0];
    for (int lane = 1; lane < DWIDTH; lane++) greatest = values[lane] > greatest ? values[lane] : greatest;
    return greatest;
}

/* Tokens in ascending order and a strict comparison: ties go to the lowest id. */
INLINE void consider(const double *sums, int64_t first, int count, double *best, int64_t *id) {
    for (int lane = 0; lane < count; lane++) {
        if (sums[lane] > *best) {
            *best = sums[lane];
            *id = first + lane;
        }
    }
}

/* scores are those from the token first on. */
static void draw_block(const float *scores, uint64_t key, int64_t first, int64_t left, double *best, int64_t *id) {
    if (greatest_float(scores, left < BLOCK ? left : BLOCK) + MOST_NOISE <= *best) return;
    doubles uniforms[BLOCK / DWIDTH], widened[BLOCK / DWIDTH], bound = splat_double(-INFINITY);
    for (int part = 0; part < BLOCK / DWIDTH; part++) {
        widened[part] = load_scores(scores + part * DWIDTH, left - part * DWIDTH);
        uniforms[part] = uniforms_from(key, first + part * DWIDTH);
        const doubles sums = widened[part] + gumbel_bound(uniforms[part]);
        bound = pick_double(sums > bound, sums, bound);
    }
    if (greatest(bound) + MARGIN <= *best) return;
    for (int part = 0; part < BLOCK / DWIDTH; part++) {
        const doubles sums = widened[part] + gumbel(uniforms[part]);
        double lanes[DWIDTH];
        memcpy(lanes, &sums, sizeof sums);
        consider(lanes, first + part * DWIDTH, DWIDTH, best, id);
    }
}

/* Whether one of them is NaN or +inf. */
static int has_fault(const float *values, int64_t count) {
    ints fault = {0};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) fault |= ~(load(values + i) < INFINITY);
    int found = 0;
    for (int lane = 0; lane < WIDTH; lane++) found |= fault[lane];
    for (; i < count; i++) found |= !(values[i] < INFINITY);
    return found;
}

/* The lowest of the places where the greatest stands; -1 where all are -inf. */
static int64_t place_of_greatest(const float *values, int64_t count, float greatest) {
    if (greatest == -INFINITY) return -1;
    int64_t place = 0;
    while (place + BLOCK < count && greatest_float(values + place, BLOCK) < greatest) place += BLOCK;
    while (place < count - 1 && !(values[place] == greatest)) place++;
    return place;
}

/* Scores by a temperature, as temperature.py has them. */
static void divide(const float *scores, float *divided, int64_t count, float highest, float temperature) {
    for (int64_t i = 0; i < count; i++) divided[i] = (scores[i] - highest) / temperature;
}

void divide_scores(float *scores, int64_t num_tokens, double temperature) {
    if (temperature != 1.0)
        divide(scores, scores, num_tokens, greatest_float(scores, num_tokens), (float)temperature);
}

/* The id stays -1 where no score is finite, and becomes -2 where one is NaN or +inf. */
static void draw_stretch(const void *argument, uint32_t index) {
    const draw_job *job = argument;
    const int64_t row = index / job->stretches, from = index % job->stretches * STRETCH;
    const int64_t count = job->num_tokens - from < STRETCH ? job->num_tokens - from : STRETCH;
    const float *scores = job->scores + row * job->row_length + from;
    const double temperature = job->temperatures ? job->temperatures[row] : 1.0;
    const uint64_t key = (uint64_t)job->keys[row];
    float scaled[STRETCH];
    double best = -INFINITY;
    int64_t id = -1;
    const int is_faulty = has_fault(scores, count);
    if (temperature == 0.0) {
        best = greatest_float(scores, count);
        id = place_of_greatest(scores, count, (float)best);
        if (id >= 0) id += from;
    } else {
        if (temperature != 1.0) {
            divide(scores, scaled, count, job->highest[row], (float)temperature);
            scores = scaled;
        }
        for (int64_t i = 0; i < count; i += BLOCK) draw_block(scores + i, key, from + i, count - i, &best, &id);
    }
    job->best[index] = best;
    job->ids[index] = is_faulty ? -2 : id;
}

/* Leaves each row's winner in front of its stretches' and returns how many rows have none. */
static int64_t settle(const draw_job *job, int64_t num_rows) {
    int64_t faults = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        const double *best = job->best + row * job->stretches;
        const int64_t *ids = job->ids + row * job->stretches;
        int64_t winner = 0, fault = 0;
        for (int64_t stretch = 0; stretch < job->stretches; stretch++) {
            /* A strict comparison: ties between stretches go to the lowest id as well. */
            if (best[stretch] > best[winner]) winner = stretch;
            fault |= ids[stretch] == -2;
        }
        faults += fault || ids[winner] == -1;
        job->ids[row] = ids[winner];
    }
    return faults;
}

/* scores [num_rows, num_tokens], keys [num_rows]; best and ids [num_rows, stretches] are for the stretches' winners, and
 * afterwards ids begins with the winners of the rows. Returns the number of rows without a sound winner. */
int64_t outrider_draw(pool *threads, const float *scores, const int64_t *keys, double *best, int64_t *ids,
                      int64_t num_rows, int64_t num_tokens, int64_t stretches) {
    const draw_job job = {scores, keys, num_tokens, num_tokens, stretches, best, ids, NULL, NULL};
    pool_run_costing(threads, draw_stretch, &job, (uint32_t)(num_rows * stretches),
                     8.0 * (double)(num_rows * num_tokens));
    return settle(&job, num_rows);
}

static void find_highest(const void *argument, uint32_t row) {
    const draw_job *job = argument;
    const double temperature = job->temperatures[row];
    if (temperature == 0.0 || temperature == 1.0) return;
    job->highest[row] = greatest_float(job->scores + row * job->row_length, job->num_tokens);
}

/* logits [num_rows, num_logits], of which the first num_tokens count, and temperatures [num_rows]; highest [num_rows] is
 * room, all else as for outrider_draw. At temperature 0 no noise is computed: the lowest of the greatest wins. */
int64_t outrider_choose(pool *threads, const float *logits, const double *temperatures, const int64_t *keys,
                        float *highest, double *best, int64_t *ids, int64_t num_rows, int64_t num_logits,
                        int64_t num_tokens, int64_t stretches) {
    const draw_job job = {logits, keys, num_logits, num_tokens, stretches, best, ids, temperatures, highest};
    double cost = 0.0;
    int is_scaled = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        cost += (temperatures[row] == 0.0 ? 0.5 : 8.0) * (double)num_tokens;
        is_scaled |= temperatures[row] != 0.0 && temperatures[row] != 1.0;
    }
    if (is_scaled)
        pool_run_costing(threads, find_highest, &job, (uint32_t)num_rows, 0.5 * (double)(num_rows * num_tokens));
    pool_run_costing(threads, draw_stretch, &job, (uint32_t)(num_rows * stretches), cost);
    return settle(&job, num_rows);
}

int64_t outrider_draw_stretch(void) { return STRETCH; }

/* Stores and returns e^(score - highest). */
INLINE doubles weigh(const float *scores, double *probs, float highest, int64_t left) {
    const doubles weights = exponential_double(load_scores(scores, left) - (double)highest);
    if (left >= DWIDTH) memcpy(probs, &weights, sizeof weights);
    else if (left > 0) memcpy(probs, &weights, (size_t)left * sizeof(double));
    return weights;
}

static void softmax_row(const void *argument, uint32_t row) {
    const softmax_job *job = argument;
    const int64_t num_tokens = job->num_tokens;
    const float *scores = job->scores + row * num_tokens;
    double *probs = job->probs + row * num_tokens;
    float highest = -INFINITY;
    int faults = 0;
    for (int64_t token = 0; token < num_tokens; token++) {
        highest = scores[token] > highest ? scores[token] : highest;
        faults += !(scores[token] < INFINITY);
    }
    job->faults[row] = faults > 0 || highest == -INFINITY;
    if (job->faults[row]) return;
    doubles sums[SUM_LANES / DWIDTH] = {{0}};
    for (int64_t token = 0; token < num_tokens; token += SUM_LANES) {
        UNROLL
        for (int part = 0; part < SUM_LANES / DWIDTH; part++)
            sums[part] += weigh(scores + token + part * DWIDTH, probs + token + part * DWIDTH, highest,
                                num_tokens - token - part * DWIDTH);
    }
    double lanes[SUM_LANES], total = 0.0;
    memcpy(lanes, sums, sizeof lanes);
    for (int lane = 0; lane < SUM_LANES; lane++) total += lanes[lane];
    for (int64_t token = 0; token < num_tokens; token++) probs[token] /= total;
}

/* scores [num_rows, num_tokens]; faults [num_rows] is 1 where a row has no finite score, a NaN or +inf. */
void outrider_softmax(pool *threads, const float *scores, double *probs, int32_t *faults, int64_t num_rows,
                      int64_t num_tokens) {
    const softmax_job job = {scores, probs, num_tokens, faults};
    pool_run_costing(threads, softmax_row, &job, (uint32_t)num_rows, 16.0 * (double)(num_rows * num_tokens));
}

typedef struct {
    const float *scores;
    const int64_t *keys, *tokens;
    const double *scales;
    double *sums, *shares;
    int64_t *ids;
    int32_t *faults;
    int64_t num_tokens, count;
} rank_job;

/* Tokens of a row that have a score, some at a time and in order, with room for what a last vector holds past them. */
typedef struct {
    float scores[GATHERED + DWIDTH];
    int64_t ids[GATHERED + DWIDTH];
    int64_t count;
} gathered;

/* A head knows few of its target's ids: the others cost nothing from here on. */
static void gather(gathered *found, const float *scores, const int64_t *tokens, int64_t first, int64_t end) {
    int64_t count = 0;
    for (int64_t from = first; from < end; from += BLOCK) {
        const int64_t until = from + BLOCK < end ? from + BLOCK : end;
        if (greatest_float(scores + from, until - from) == -INFINITY) continue;
        for (int64_t place = from; place < until; place++) {
            found->scores[count] = scores[place];
            found->ids[count] = tokens ? tokens[place] : place;
            count += scores[place] > -INFINITY;
        }
    }
    found->count = count;
}

/* Puts what is greater than the least of the best into its place; of equal ones the first stays in front. */
INLINE void rank_sums(const double *sums, const int64_t *from, int64_t num_sums, double *best, int64_t *ids,
                      int64_t count) {
    for (int64_t i = 0; i < num_sums; i++) {
        if (!(sums[i] > best[count - 1])) continue;
        int64_t place = count - 1;
        for (; place > 0 && best[place - 1] < sums[i]; place--) {
            best[place] = best[place - 1];
            ids[place] = ids[place - 1];
        }
        best[place] = sums[i];
        ids[place] = from[i];
    }
}

/* The best sums of a row stand in its shares until all are known. */
static void rank_row(const void *argument, uint32_t row) {
    const rank_job *job = argument;
    const int64_t num_tokens = job->num_tokens, count = job->count;
    const float *scores = job->scores + row * num_tokens;
    double *sums = job->sums + row * num_tokens, *best = job->shares + row * count;
    int64_t *ids = job->ids + row * count, num_sums = 0;
    for (int64_t place = 0; place < count; place++) {
        best[place] = -INFINITY;
        ids[place] = -1;
    }
    gathered found;
    for (int64_t first = 0; first < num_tokens; first += GATHERED) {
        gather(&found, scores, job->tokens, first, first + GATHERED < num_tokens ? first + GATHERED : num_tokens);
        for (int64_t i = 0; i < found.count; i += DWIDTH) {
            const int64_t here = found.count - i < DWIDTH ? found.count - i : DWIDTH;
            doubles sum = load_scores(found.scores + i, here);
            if (job->keys) {
                long_words tokens;
                memcpy(&tokens, found.ids + i, sizeof tokens);
                sum += gumbel(uniforms_of((uint64_t)job->keys[row], tokens));
            }
            memcpy(sums + num_sums + i, &sum, (size_t)here * sizeof(double));
        }
        rank_sums(sums + num_sums, found.ids, found.count, best, ids, count);
        num_sums += found.count;
    }
    job->faults[row] = has_fault(scores, num_tokens) || ids[0] < 0;
    if (job->faults[row]) return;
    const double highest = best[0], steepness = 1.0 / job->scales[row];
    doubles parts[SUM_LANES / DWIDTH] = {{0}};
    for (int64_t first = 0; first < num_sums; first += SUM_LANES) {
        UNROLL
        for (int part = 0; part < SUM_LANES / DWIDTH; part++) {
            doubles own = splat_double(-INFINITY);
            const int64_t place = first + part * DWIDTH, left = num_sums - place;
            if (left > 0) memcpy(&own, sums + place, (size_t)(left < DWIDTH ? left : DWIDTH) * sizeof(double));
            parts[part] += exponential_double((own - highest) * steepness);
        }
    }
    double lanes[SUM_LANES], total = 0.0;
    memcpy(lanes, parts, sizeof lanes);
    for (int lane = 0; lane < SUM_LANES; lane++) total += lanes[lane];
    for (int64_t place = 0; place < count; place++) best[place] = exp((best[place] - highest) * steepness) / total;
}

/* scores [num_rows, num_tokens] of these tokens, whose ids rise, or of 0, 1 and so on where there are none; keys
 * [num_rows] or none for no noise, scales [num_rows]; sums [num_rows, num_tokens] is room to work in. ids and shares
 * [num_rows, count]: the tokens with the greatest sums, -1 where there are no more, and their parts of e^(sum / scale).
 * faults as in outrider_softmax. */
void outrider_rank(pool *threads, const float *scores, const int64_t *tokens, const int64_t *keys, const double *scales,
                   double *sums, int64_t *ids, double *shares, int32_t *faults, int64_t num_rows, int64_t num_tokens,
                   int64_t count) {
    const rank_job job = {scores, keys, tokens, scales, sums, shares, ids, faults, num_tokens, count};
    pool_run_costing(threads, rank_row, &job, (uint32_t)num_rows, 32.0 * (double)(num_rows * num_tokens));
}
