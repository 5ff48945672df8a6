/* A whole forward in one call: the operations of outrider/engine/models/transformer.py in the same order, by the same kernels, and so
 * with the same bits. Not another model: what differs from Python is only that nothing happens between two operations.
 *
 * All arguments are described by plain structures, whose twins stand in outrider/engine/ops/library.py. */
#include "kernels.h"
#include "lanes.h"

typedef struct {
    /* Null where a family has none. The last two are of what attention and MLP give, before it is added. */
    const float *input_norm, *query_norm, *key_norm, *post_norm, *attended_norm, *mlp_norm;
    /* Tables of the layer's rotary embedding. */
    const float *cos, *sin;
    matrix qkv, output, gate_up, down;
    /* In place of gate_up and down, which have no weight then; or null. */
    const experts *experts;
    /* Which of the forward's plans its attention reads: 0, or one whose lists are cut to the layer's window. */
    int64_t plan;
    /* Of attention; null where a family has none. */
    const float *sinks;
} layer;

typedef struct {
    matrix embedding, head;
    const float *norm;
    const layer *layers;
    /* is_gelu: of the gate, which is a silu elsewhere. */
    int64_t num_layers, num_heads, num_groups, head_dim, num_turning, is_gelu;
    /* Of the caches of keys and values. */
    int64_t cache_format;
    float epsilon, scale, embedding_scale;
} decoder;

typedef struct {
    const int64_t *token_ids, *positions, *slots;
    const int32_t *key_slots;
    const int64_t *key_starts;
    const int32_t *key_counts;
    const int64_t *wanted;
    int64_t num_rows, max_key_count, num_wanted;
} row_plan;

/* Rows that are each below one of a plan, whose list goes on with their slots; `plan` sees whole lists. */
typedef struct {
    int64_t *token_ids, *positions, *slots, *starts, *wanted;
    int32_t *counts;
    row_plan plan;
} rows_below;

/* What of every row is stored beside its key and value: boundary b is the residual that enters layer b, and the number of
 * layers stands for what leaves the final norm. A slot has num_taps times the hidden size of floats. */
typedef struct {
    const int64_t *boundaries;
    float *features;
    int64_t num_taps;
} taps;

/* Activations of all rows, in one piece of memory that the caller keeps. */
typedef struct {
    float *x, *normed, *qkv, *query, *attended, *gate_up, *gated, *product;
    /* What a product needs beside its rows, and what experts do. */
    float *scratch, *experts;
} activations;

typedef struct {
    const decoder *model;
    const layer *layer;
    float *qkv;
} head_norm_job;

/* A drafting head, of which outrider/engine/heads/feature_head.py says what it computes. The decoder has its one layer,
 * and matrices of its own or the target's; a null norm is none, and a null fuse makes the attention read both parts. */
typedef struct {
    const decoder *model;
    const float *embedding_norm, *state_norm;
    matrix fuse;
    /* For each output of the head's matrix the id that it stands for; null: its number. */
    const int64_t *target_ids;
    int64_t vocab_size, is_reversed, has_normed_residual, feeds_normed;
} feature_head;

static int64_t hidden_size(const decoder *model) { return model->embedding.num_inputs; }

static int64_t query_size(const decoder *model) { return model->num_heads * model->head_dim; }

static int64_t mlp_size(const decoder *model) {
    int64_t size = 0;
    for (int64_t index = 0; index < model->num_layers; index++) {
        const layer *each = &model->layers[index];
        if (each->experts == 0 && each->down.num_inputs > size) size = each->down.num_inputs;
    }
    return size;
}

/* Of the layer whose experts need the most. */
static int64_t expert_floats(const decoder *model, int64_t num_rows) {
    int64_t most = 0;
    for (int64_t index = 0; index < model->num_layers; index++) {
        const experts *each = model->layers[index].experts;
        const int64_t needed = each == 0 ? 0 : outrider_experts_floats(each, num_rows);
        most = needed > most ? needed : most;
    }
    return most;
}

static int64_t qkv_size(const decoder *model) { return (model->num_heads + 2 * model->num_groups) * model->head_dim; }

/* Floats a row of what the largest product may need beside its rows. */
static int64_t scratch_floats(const decoder *model, int64_t normed) {
    const int64_t widths[] = {hidden_size(model), normed, query_size(model), mlp_size(model)};
    int64_t widest = 0;
    for (int each = 0; each < 4; each++) widest = widths[each] > widest ? widths[each] : widest;
    return outrider_linear_scratch(1, widest) / (int64_t)sizeof(float);
}

/* Cuts `floats` into the activations of num_rows rows, of which `normed` has so many columns; returns how many floats
 * they take. */
static int64_t lay_out(const decoder *model, int64_t normed, int64_t num_rows, float *floats, activations *parts) {
    const int64_t hidden = hidden_size(model), mlp = mlp_size(model), query = query_size(model);
    const int64_t sizes[] = {hidden, normed, qkv_size(model), query, query, 2 * mlp, mlp, hidden, scratch_floats(model, normed)};
    float **const places[] = {&parts->x,     &parts->normed,  &parts->qkv,   &parts->query,  &parts->attended,
                              &parts->gate_up, &parts->gated, &parts->product, &parts->scratch};
    int64_t used = 0;
    for (int part = 0; part < 9; part++) {
        *places[part] = floats == 0 ? 0 : floats + used;
        used += num_rows * sizes[part];
    }
    parts->experts = floats == 0 ? 0 : floats + used;
    return used + expert_floats(model, num_rows);
}

int64_t outrider_forward_floats(const decoder *model, int64_t num_rows) {
    activations parts;
    return lay_out(model, hidden_size(model), num_rows, 0, &parts);
}

static void embed(const decoder *model, const row_plan *plan, float *x) {
    const matrix *m = &model->embedding;
    outrider_embed(m->weight, m->format, plan->token_ids, x, plan->num_rows, m->num_inputs);
}

static void multiply(pool *threads, const matrix *m, const float *x, float *output, int64_t num_rows, void *scratch) {
    outrider_linear(threads, x, m->weight, m->format, m->bias, output, num_rows, m->num_inputs, m->num_outputs,
                    scratch);
}

static void add(float *x, const float *addend, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] += addend[i];
}

static void norm_heads(const void *argument, uint32_t row) {
    const head_norm_job *job = argument;
    const decoder *model = job->model;
    float *head = job->qkv + row * qkv_size(model);
    for (int64_t index = 0; index < model->num_heads + model->num_groups; index++, head += model->head_dim) {
        const float *weight = index < model->num_heads ? job->layer->query_norm : job->layer->key_norm;
        norm_one(head, weight, head, model->head_dim, model->epsilon);
    }
}

static void attend(pool *threads, const decoder *model, const layer *layer, const row_plan *plan,
                   const activations *at, void *keys, void *values) {
    const int64_t head_dim = model->head_dim, row = qkv_size(model), num_rows = plan->num_rows;
    const int64_t strides[] = {row, head_dim, row, head_dim, row, head_dim};
    float *key = at->qkv + query_size(model), *value = key + model->num_groups * head_dim;
    if (layer->query_norm != 0) {
        const head_norm_job job = {model, layer, at->qkv};
        pool_run_costing(threads, norm_heads, &job, (uint32_t)num_rows, (double)(num_rows * row));
    }
    outrider_rotate_and_store(threads, at->qkv, key, value, strides, plan->positions, plan->slots, layer->cos,
                              layer->sin, at->query, keys, values, model->cache_format, num_rows, model->num_heads, model->num_groups,
                              head_dim, model->num_turning);
    outrider_attention(threads, at->query, keys, values, model->cache_format, plan->key_slots, plan->key_starts, plan->key_counts,
                       layer->sinks, at->attended, num_rows, model->num_heads, model->num_groups, head_dim, plan->max_key_count,
                       model->scale);
}

static void add_product(pool *threads, const decoder *model, const float *norm, const activations *at,
                        int64_t num_rows) {
    const int64_t hidden = hidden_size(model);
    if (norm != 0) outrider_rms_norm(threads, at->product, norm, at->product, num_rows, hidden, model->epsilon);
    add(at->x, at->product, num_rows * hidden);
}

/* What a layer does with what its input norm has left in `normed`; adds it to x. */
static void run_behind_norm(pool *threads, const decoder *model, const layer *layer, const row_plan *plan,
                            const activations *at, void *keys, void *values) {
    const int64_t hidden = hidden_size(model), num_rows = plan->num_rows;
    multiply(threads, &layer->qkv, at->normed, at->qkv, num_rows, at->scratch);
    attend(threads, model, layer, plan, at, keys, values);
    multiply(threads, &layer->output, at->attended, at->product, num_rows, at->scratch);
    add_product(threads, model, layer->attended_norm, at, num_rows);
    outrider_rms_norm(threads, at->x, layer->post_norm, at->normed, num_rows, hidden, model->epsilon);
    if (layer->experts != 0) {
        outrider_experts(threads, layer->experts, at->normed, at->product, num_rows, at->experts);
    } else {
        multiply(threads, &layer->gate_up, at->normed, at->gate_up, num_rows, at->scratch);
        outrider_gate_multiply(threads, at->gate_up, at->gated, num_rows, layer->down.num_inputs, model->is_gelu);
        multiply(threads, &layer->down, at->gated, at->product, num_rows, at->scratch);
    }
    add_product(threads, model, layer->mlp_norm, at, num_rows);
}

static void run_layer(pool *threads, const decoder *model, const layer *layer, const row_plan *plan,
                      const activations *at, void *keys, void *values) {
    outrider_rms_norm(threads, at->x, layer->input_norm, at->normed, plan->num_rows, hidden_size(model),
                      model->epsilon);
    run_behind_norm(threads, model, layer, plan, at, keys, values);
}

static void load_tap(const decoder *model, const taps *taps, const row_plan *plan, int64_t boundary, float *x) {
    const int64_t hidden = hidden_size(model);
    int64_t tap = 0;
    while (taps->boundaries[tap] != boundary) tap++;
    for (int64_t row = 0; row < plan->num_rows; row++)
        memcpy(x + row * hidden, taps->features + (plan->slots[row] * taps->num_taps + tap) * hidden,
               (size_t)hidden * sizeof(float));
}

static void store_taps(const decoder *model, const taps *taps, const row_plan *plan, int64_t boundary, const float *x) {
    const int64_t hidden = hidden_size(model);
    for (int64_t tap = 0; tap < taps->num_taps; tap++) {
        if (taps->boundaries[tap] != boundary) continue;
        for (int64_t row = 0; row < plan->num_rows; row++) {
            float *place = taps->features + (plan->slots[row] * taps->num_taps + tap) * hidden;
            if (boundary == model->num_layers)
                norm_one(x + row * hidden, model->norm, place, hidden, model->epsilon);
            else
                memcpy(place, x + row * hidden, (size_t)hidden * sizeof(float));
        }
    }
}

/* Layers [first, last) for plans of the same rows, which differ in the keys that a row sees. Where first is not 0, rows
 * begin with what is tapped there, which must be; logits are what norm and head make of what leaves layer last - 1.
 * keys and values [num_layers] point to caches [slots, num_groups, head_dim]; scratch holds as many floats as
 * outrider_forward_floats says; logits [num_wanted, vocabulary]. */
void outrider_forward(pool *threads, const decoder *model, const row_plan *plans, void *const *keys,
                      void *const *values, const taps *taps, int64_t first, int64_t last, float *scratch,
                      float *logits) {
    const row_plan *plan = &plans[0];
    const int64_t hidden = hidden_size(model);
    activations at;
    lay_out(model, hidden, plan->num_rows, scratch, &at);
    if (first == 0) {
        embed(model, plan, at.x);
        for (int64_t i = 0; i < plan->num_rows * hidden; i++) at.x[i] *= model->embedding_scale;
    } else {
        load_tap(model, taps, plan, first, at.x);
    }
    for (int64_t index = first; index < last; index++) {
        const layer *each = &model->layers[index];
        store_taps(model, taps, plan, index, at.x);
        run_layer(threads, model, each, &plans[each->plan], &at, keys[index], values[index]);
    }
    store_taps(model, taps, plan, last, at.x);
    for (int64_t row = 0; row < plan->num_wanted; row++)
        memcpy(at.product + row * hidden, at.x + plan->wanted[row] * hidden, (size_t)hidden * sizeof(float));
    outrider_rms_norm(threads, at.product, model->norm, at.normed, plan->num_wanted, hidden, model->epsilon);
    multiply(threads, &model->head, at.normed, logits, plan->num_wanted, at.scratch);
}

/* Begins with the wanted rows of a plan themselves. longs has room for 5 numbers a row, counts for one. */
static rows_below below_wanted(const row_plan *first, int64_t *longs, int32_t *counts) {
    const int64_t num_rows = first->num_wanted;
    rows_below below = {longs, longs + num_rows, longs + 2 * num_rows, longs + 3 * num_rows, longs + 4 * num_rows, counts, *first};
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t of = first->wanted[row];
        below.positions[row] = first->positions[of], below.starts[row] = first->key_starts[of];
        counts[row] = first->key_counts[of];
        below.wanted[row] = row;
    }
    below.plan.token_ids = below.token_ids, below.plan.positions = below.positions, below.plan.slots = below.slots;
    below.plan.key_starts = below.starts, below.plan.key_counts = counts, below.plan.wanted = below.wanted;
    below.plan.num_rows = num_rows;
    return below;
}

/* Goes one row down everywhere, where these tokens are, `stride` apart. */
static void go_down(rows_below *below, const int64_t *token_ids, int64_t stride) {
    for (int64_t row = 0; row < below->plan.num_rows; row++) {
        below->token_ids[row] = token_ids[row * stride];
        below->slots[row] = below->plan.key_slots[below->starts[row] + below->counts[row]];
        below->positions[row]++, below->counts[row]++;
    }
    below->plan.max_key_count++;
}

/* The same rows, of which each sees the last `window` keys of its list; 0: all. starts and counts are room for them. */
static row_plan windowed(const row_plan *whole, int64_t window, int64_t *starts, int32_t *counts) {
    row_plan plan = *whole;
    if (window == 0 || plan.max_key_count <= window) return plan;
    for (int64_t row = 0; row < plan.num_rows; row++) {
        const int64_t hidden = whole->key_counts[row] > window ? whole->key_counts[row] - window : 0;
        starts[row] = whole->key_starts[row] + hidden, counts[row] = (int32_t)(whole->key_counts[row] - hidden);
    }
    plan.key_starts = starts, plan.key_counts = counts, plan.max_key_count = window;
    return plan;
}

/* `depth` steps of a model: one of the plans, and then rows below their wanted ones, each of the token of the step before.
 * The plans are num_plans of the same rows, each of the keys in one of the windows, of which the first is 0, for all. ids
 * [depth, num_wanted] are what outrider_choose finds after each step, with the noise of keys [depth, num_wanted]. The lists
 * of the wanted rows go on with the slots of those below them. logits [num_wanted, vocabulary] is room for a step's, all else
 * as for outrider_forward. Returns the number of steps, which ends before a step in which a row has nothing to draw. */
int64_t outrider_forward_line(pool *threads, const decoder *model, const row_plan *plans, const int64_t *windows, int64_t num_plans,
                              void *const *keys, void *const *values, const taps *taps, float *scratch, float *logits,
                              const double *temperatures, const int64_t *noise, int64_t *ids, int64_t depth,
                              int64_t num_tokens) {
    const int64_t num_rows = plans[0].num_wanted, stretch = outrider_draw_stretch();
    const int64_t stretches = (num_tokens + stretch - 1) / stretch;
    int64_t longs[5 * num_rows], starts[num_plans * num_rows], found[num_rows * stretches];
    int32_t counts[num_rows], seen[num_plans * num_rows];
    float highest[num_rows];
    double best[num_rows * stretches];
    rows_below below = below_wanted(&plans[0], longs, counts);
    row_plan own[num_plans];
    for (int64_t step = 0; step < depth; step++, ids += num_rows) {
        outrider_forward(threads, model, plans, keys, values, taps, 0, model->num_layers, scratch, logits);
        if (outrider_choose(threads, logits, temperatures, noise + step * num_rows, highest, best, found, num_rows,
                            model->head.num_outputs, num_tokens, stretches))
            return step;
        memcpy(ids, found, (size_t)num_rows * sizeof(int64_t));
        if (step + 1 == depth) break;
        go_down(&below, ids, 1);
        for (int64_t each = 0; each < num_plans; each++)
            own[each] = windowed(&below.plan, windows[each], starts + each * num_rows, seen + each * num_rows);
        plans = own;
    }
    return depth;
}

/* Activations of the head, and before them lists of keys without the first token of a text. */
static int64_t lay_out_head(const feature_head *head, int64_t num_rows, float *floats, activations *parts) {
    const int64_t ints = 4 * num_rows, normed = 2 * hidden_size(head->model);
    return ints + lay_out(head->model, normed, num_rows, floats == 0 ? 0 : floats + ints, parts);
}

/* Those of a step, and scores of the ids that the head knows. */
int64_t outrider_head_floats(const feature_head *head, int64_t num_rows, int64_t num_wanted) {
    activations parts;
    return lay_out_head(head, num_rows, 0, &parts) + num_wanted * head->model->head.num_outputs;
}

static void norm_or_copy(const float *x, const float *weight, float *output, int64_t width, float epsilon) {
    if (weight != 0)
        norm_one(x, weight, output, width, epsilon);
    else
        memcpy(output, x, (size_t)width * sizeof(float));
}

/* Leaves in x what the layer's output is added to, and in `normed` what its attention reads. */
static void enter_head(pool *threads, const feature_head *head, const row_plan *plan, const float *features,
                       const activations *at) {
    const decoder *model = head->model;
    const int64_t hidden = hidden_size(model), is_wide = head->fuse.weight == 0;
    embed(model, plan, at->product);
    for (int64_t row = 0; row < plan->num_rows; row++) {
        float *pair = at->normed + row * 2 * hidden, *x = at->x + row * hidden;
        float *embedded = pair + (head->is_reversed ? hidden : 0), *state = pair + (head->is_reversed ? 0 : hidden);
        norm_or_copy(at->product + row * hidden, head->embedding_norm, embedded, hidden, model->epsilon);
        if (plan->key_counts[row] > 1) {
            const int64_t before = plan->key_slots[plan->key_starts[row] + plan->key_counts[row] - 2];
            memcpy(x, features + before * (hidden + 1), (size_t)hidden * sizeof(float));
        } else {
            memset(x, 0, (size_t)hidden * sizeof(float));
        }
        norm_or_copy(x, head->state_norm, state, hidden, model->epsilon);
        if (is_wide && head->has_normed_residual) memcpy(x, state, (size_t)hidden * sizeof(float));
    }
    if (is_wide) return;
    multiply(threads, &head->fuse, at->normed, at->x, plan->num_rows, at->scratch);
    for (int64_t row = 0; row < plan->num_rows; row++)
        norm_or_copy(at->x + row * hidden, model->layers[0].input_norm, at->normed + row * hidden, hidden,
                     model->epsilon);
}

/* One step of a head whose states, and behind each the number of guesses that it stands on, are the features [slots,
 * hidden + 1] of its cache: reads those before all rows, and writes those behind the wanted ones. Returns scores
 * [num_wanted, num_outputs] of the ids that it knows: there, or in scratch where that is nowhere. */
static float *step_head(pool *threads, const feature_head *head, const row_plan *whole, float *keys, float *values,
                        float *features, float *scratch, float *scores) {
    const decoder *model = head->model;
    const int64_t hidden = hidden_size(model), num_rows = whole->num_rows, num_wanted = whole->num_wanted;
    activations at;
    float *own = scratch + lay_out_head(head, num_rows, scratch, &at);
    if (scores == 0) scores = own;
    enter_head(threads, head, whole, features, &at);
    int64_t *starts = (int64_t *)scratch;
    int32_t *counts = (int32_t *)(scratch + 2 * num_rows);
    row_plan plan = *whole;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t is_later = whole->key_counts[row] > 1;
        starts[row] = whole->key_starts[row] + is_later;
        counts[row] = (int32_t)(whole->key_counts[row] - is_later);
    }
    plan.key_starts = starts, plan.key_counts = counts;
    run_behind_norm(threads, model, &model->layers[0], &plan, &at, keys, values);
    for (int64_t index = 0; index < num_wanted; index++) {
        const int64_t row = whole->wanted[index];
        const float *x = at.x + row * hidden;
        float *output = at.product + index * hidden;
        norm_or_copy(x, model->norm, output, hidden, model->epsilon);
        float depth = 1;
        if (whole->key_counts[row] > 1) {
            const int64_t before = whole->key_slots[whole->key_starts[row] + whole->key_counts[row] - 2];
            depth += features[before * (hidden + 1) + hidden];
        }
        float *behind = features + whole->slots[row] * (hidden + 1);
        memcpy(behind, head->feeds_normed ? output : x, (size_t)hidden * sizeof(float));
        behind[hidden] = depth;
    }
    multiply(threads, &model->head, at.product, scores, num_wanted, at.scratch);
    return scores;
}

/* A step of a head, see step_head; logits [num_wanted, vocab_size] are -inf for ids that it does not know. scratch holds as
 * many floats as outrider_head_floats says, at the beginning of a cache line. */
void outrider_head_forward(pool *threads, const feature_head *head, const row_plan *plan, float *keys, float *values,
                           float *features, float *scratch, float *logits) {
    const int64_t num_known = head->model->head.num_outputs, knows_all = head->target_ids == 0;
    const float *scores = step_head(threads, head, plan, keys, values, features, scratch, knows_all ? logits : 0);
    if (knows_all) return;
    for (int64_t index = 0; index < plan->num_wanted; index++) {
        float *row = logits + index * head->vocab_size;
        for (int64_t id = 0; id < head->vocab_size; id++) row[id] = -INFINITY;
        for (int64_t id = 0; id < num_known; id++) row[head->target_ids[id]] = scores[index * num_known + id];
    }
}

/* `depth` steps of a head: one of the plan, and then rows below its wanted ones, each of the best token of the step before.
 * ids and shares [depth, num_wanted, count] are what outrider_rank finds after each step, by temperatures, plus the noise of
 * keys [depth, num_wanted] where there are some. The lists of the wanted rows go on with the slots of those below them. sums
 * [num_wanted, num_outputs] and faults are for outrider_rank. Returns the number of steps, which ends where no next row is
 * likelier than all beside the rows above it, and before a step in which a row has nothing to draw. */
int64_t outrider_head_line(pool *threads, const feature_head *head, const row_plan *first, float *keys, float *values,
                           float *features, float *scratch, const double *temperatures, const int64_t *noise,
                           const double *scales, double *sums, int64_t *ids, double *shares, int32_t *faults,
                           int64_t depth, int64_t count) {
    const int64_t num_rows = first->num_wanted, num_known = head->model->head.num_outputs;
    int64_t longs[5 * num_rows];
    int32_t counts[num_rows];
    double chances[num_rows], others[num_rows];
    for (int64_t row = 0; row < num_rows; row++) chances[row] = 1, others[row] = 0;
    rows_below below = below_wanted(first, longs, counts);
    for (int64_t step = 0; step < depth; step++, ids += num_rows * count, shares += num_rows * count) {
        float *scores = step_head(threads, head, step == 0 ? first : &below.plan, keys, values, features, scratch, 0);
        for (int64_t row = 0; row < num_rows; row++)
            divide_scores(scores + row * num_known, num_known, temperatures[row]);
        outrider_rank(threads, scores, head->target_ids, noise == 0 ? 0 : noise + step * num_rows, scales, sums, ids, shares,
                      faults, num_rows, num_known, count);
        int is_wanted = 0;
        for (int64_t row = 0; row < num_rows; row++) {
            if (faults[row]) return step;
            /* Is there a likelier row beside the line, that one is wanted next. */
            const double *found = shares + row * count, beside = count > 1 ? chances[row] * found[1] : 0;
            others[row] = beside > others[row] ? beside : others[row];
            chances[row] *= found[0];
            is_wanted |= chances[row] > others[row];
        }
        if (!is_wanted) return step + 1;
        if (step + 1 < depth) go_down(&below, ids, count);
    }
    return depth;
}

/* States of committed tokens, made of a target's features [slots, width]: a product with m, or the features themselves
 * where it has no weight. Row r goes from source_slots[r] to the state in slots[r] of a head's cache, and stands on no
 * guess. scratch holds num_rows times width and hidden floats, and behind them what the product needs. */
void outrider_head_states(pool *threads, const matrix *m, int64_t width, const float *source,
                          const int64_t *source_slots, float *features, const int64_t *slots, int64_t num_rows,
                          float *scratch) {
    const int64_t hidden = m->weight == 0 ? width : m->num_outputs;
    float *states = m->weight == 0 ? scratch : scratch + num_rows * width;
    for (int64_t row = 0; row < num_rows; row++)
        memcpy(scratch + row * width, source + source_slots[row] * width, (size_t)width * sizeof(float));
    if (m->weight != 0) multiply(threads, m, scratch, states, num_rows, scratch + num_rows * (width + hidden));
    for (int64_t row = 0; row < num_rows; row++) {
        float *place = features + slots[row] * (hidden + 1);
        memcpy(place, states + row * hidden, (size_t)hidden * sizeof(float));
        place[hidden] = 0;
    }
}
