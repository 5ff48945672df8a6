/* Experts of a layer, of which each row takes a few (Shazeer et al., 2017, "Outrageously Large Neural Networks", arXiv
 * 1701.06538): a router's scores choose them, and their outputs are added with the shares that the scores give.
 *
 * Rows are put together by expert, so that the weights of one are read once for all its rows. A product's bits depend on
 * nothing but the row, and a row adds its experts in the order of their scores: so neither do those of the sum. */
#include "kernels.h"
#include "lanes.h"

/* What lies in the memory that the caller gives. A pair is a row with one of its experts; pairs are in the order of
 * experts, and within one in that of rows. */
typedef struct {
    /* Of rows [num_rows, num_experts]. */
    float *scores;
    /* Of rows [num_rows, num_chosen], the best first: the experts, their shares, and the place of each pair. */
    int32_t *ids, *places;
    float *shares;
    /* Of pairs: the row, and what is computed of it. */
    int32_t *rows;
    float *copies, *gate_up, *gated, *made;
    row_batch *batches;
    void *scratch;
} expert_room;

typedef struct {
    const experts *of;
    const expert_room *room;
    float *output;
} expert_job;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t floats_of(int64_t num_bytes) { return (num_bytes + (int64_t)sizeof(float) - 1) / (int64_t)sizeof(float); }

/* Cuts `floats` into the room of num_rows rows; returns how many floats it takes. */
static int64_t lay_out(const experts *of, int64_t num_rows, float *floats, expert_room *room) {
    const int64_t pairs = num_rows * of->num_chosen, width = of->down.num_inputs, hidden = of->router.num_inputs;
    const int64_t scratch = larger(outrider_linear_scratch(num_rows, hidden), outrider_linear_scratch(pairs, width));
    const int64_t sizes[] = {num_rows * of->num_experts, pairs, pairs, pairs, pairs, pairs * hidden, 2 * pairs * width,
                             pairs * width, pairs * hidden, floats_of(of->num_experts * (int64_t)sizeof(row_batch)),
                             floats_of(scratch)};
    void **const parts[] = {(void **)&room->scores,  (void **)&room->ids,    (void **)&room->places, (void **)&room->shares,
                            (void **)&room->rows,    (void **)&room->copies, (void **)&room->gate_up, (void **)&room->gated,
                            (void **)&room->made,    (void **)&room->batches, &room->scratch};
    int64_t used = 0;
    for (int part = 0; part < 11; part++) {
        *parts[part] = floats == 0 ? 0 : floats + used;
        used += sizes[part];
    }
    return used;
}

/* The experts with the greatest scores, the best first and of equal ones the lowest first, and their shares: e^score over
 * the sum of all, or over that of the chosen. */
static void choose_row(const void *argument, uint32_t row) {
    const expert_job *job = argument;
    const int64_t num_experts = job->of->num_experts, num_chosen = job->of->num_chosen;
    const float *scores = job->room->scores + row * num_experts;
    int32_t *ids = job->room->ids + row * num_chosen;
    float *shares = job->room->shares + row * num_chosen;
    int64_t count = 0;
    for (int64_t expert = 0; expert < num_experts; expert++) {
        if (count == num_chosen && !(scores[expert] > scores[ids[count - 1]])) continue;
        int64_t place = count < num_chosen ? count++ : count - 1;
        for (; place > 0 && scores[expert] > scores[ids[place - 1]]; place--) ids[place] = ids[place - 1];
        ids[place] = (int32_t)expert;
    }
    const double best = scores[ids[0]];
    double sum = 0;
    for (int64_t index = 0; index < (job->of->is_normalised ? num_chosen : num_experts); index++)
        sum += exponential_double(splat_double(scores[job->of->is_normalised ? ids[index] : index] - best))[0];
    for (int64_t rank = 0; rank < num_chosen; rank++)
        shares[rank] = (float)(exponential_double(splat_double(scores[ids[rank]] - best))[0] / sum);
}

/* Puts pairs into the order of experts, and says which of them have any. */
static row_batches batches_of(const experts *of, const expert_room *room, int64_t num_rows) {
    const int64_t pairs = num_rows * of->num_chosen;
    row_batch *batches = room->batches;
    for (int64_t expert = 0; expert < of->num_experts; expert++) batches[expert] = (row_batch){(int32_t)expert, 0, 0};
    for (int64_t pair = 0; pair < pairs; pair++) batches[room->ids[pair]].num_rows++;
    for (int64_t expert = 1; expert < of->num_experts; expert++)
        batches[expert].first_row = batches[expert - 1].first_row + batches[expert - 1].num_rows;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int32_t place = batches[room->ids[pair]].first_row++;
        room->places[pair] = place, room->rows[place] = (int32_t)(pair / of->num_chosen);
    }
    int64_t used = 0;
    for (int64_t expert = 0; expert < of->num_experts; expert++) {
        const row_batch each = batches[expert];
        if (each.num_rows == 0) continue;
        batches[used++] = (row_batch){each.index, each.first_row - each.num_rows, each.num_rows};
    }
    return (row_batches){batches, used, num_rows, pairs, room->rows, room->copies};
}

static void add_row(const void *argument, uint32_t row) {
    const expert_job *job = argument;
    const int64_t hidden = job->of->router.num_inputs, num_chosen = job->of->num_chosen;
    const int32_t *places = job->room->places + row * num_chosen;
    const float *shares = job->room->shares + row * num_chosen;
    for (int64_t i = 0; i < hidden; i += WIDTH) {
        const int64_t left = hidden - i;
        floats sum = load_upto(job->room->made + places[0] * hidden + i, left) * shares[0];
        for (int64_t rank = 1; rank < num_chosen; rank++)
            sum += load_upto(job->room->made + places[rank] * hidden + i, left) * shares[rank];
        store_upto(job->output + row * hidden + i, sum, left);
    }
}

/* The part of a matrix that one expert has. */
static matrix_part part_of(const matrix *m, int64_t num_experts) {
    return (matrix_part){m->weight, m->format, m->num_outputs / num_experts};
}

int64_t outrider_experts_floats(const experts *of, int64_t num_rows) {
    expert_room room;
    return lay_out(of, num_rows, 0, &room);
}

/* x and output [num_rows, hidden]; `memory` holds as many floats as outrider_experts_floats says. */
void outrider_experts(pool *threads, const experts *of, const float *x, float *output, int64_t num_rows, float *memory) {
    const int64_t hidden = of->router.num_inputs, width = of->down.num_inputs;
    if (num_rows == 0) return;
    expert_room room;
    lay_out(of, num_rows, memory, &room);
    const matrix *router = &of->router;
    outrider_linear(threads, x, router->weight, router->format, router->bias, room.scores, num_rows, hidden,
                    of->num_experts, room.scratch);
    const expert_job job = {of, &room, output};
    pool_run_costing(threads, choose_row, &job, (uint32_t)num_rows, 16.0 * (double)(num_rows * of->num_experts));
    const row_batches pairs = batches_of(of, &room, num_rows);
    const matrix_parts first = {2, {part_of(&of->gate, of->num_experts), part_of(&of->up, of->num_experts)}};
    multiply_batches(threads, x, &pairs, &first, of->gate.bias, room.gate_up, hidden, 2 * width, room.scratch);
    if (of->limit > 0)
        outrider_clamped_multiply(threads, room.gate_up, room.gated, pairs.num_rows, width, of->slope, of->limit);
    else
        outrider_gate_multiply(threads, room.gate_up, room.gated, pairs.num_rows, width, 0);
    row_batches in_order = pairs;
    in_order.places = 0, in_order.num_inputs_rows = pairs.num_rows;
    const matrix_parts second = {1, {part_of(&of->down, of->num_experts)}};
    multiply_batches(threads, room.gated, &in_order, &second, of->down.bias, room.made, width, hidden, room.scratch);
    pool_run_costing(threads, add_row, &job, (uint32_t)num_rows, (double)(pairs.num_rows * hidden));
}
