/* Expert choice, and the way of the rows to their experts and back. */
#include <math.h>

#include "kernels/host.h"
#include "kernels/ref/ref.h"

/* The best of `count` values not yet taken; the lowest index on a tie. Takes it. */
static size_t take_best(const double *values, bool *taken, size_t count)
{
    size_t best = count;
    for (size_t i = 0; i < count; i++) {
        if (!taken[i] && (best == count || values[i] > values[best])) {
            best = i;
        }
    }
    SL_ASSERT(best < count);
    taken[best] = true;
    return best;
}

static void score_experts(const sl_route_t *p, const float *logits, double *scores)
{
    double max = -INFINITY, sum = 0;
    for (size_t e = 0; e < p->experts; e++) {
        max = logits[e] > max ? logits[e] : max;
    }
    for (size_t e = 0; e < p->experts; e++) {
        if (p->scoring == SL_SCORE_SIGMOID) {
            scores[e] = 1 / (1 + exp(-(double)logits[e]));
        } else {
            scores[e] = exp(logits[e] - max);
            sum += scores[e];
        }
    }
    for (size_t e = 0; p->scoring == SL_SCORE_SOFTMAX && e < p->experts; e++) {
        scores[e] /= sum;
    }
}

/* Marks as taken every expert outside the topk_group best groups of `choice` values. */
static void exclude_groups(const sl_route_t *p, const double *choice, double *group_score,
                           bool *group_in, bool *taken)
{
    size_t size = p->experts / p->n_group;
    for (size_t g = 0; g < p->n_group; g++) {
        double best = -INFINITY, second = -INFINITY;
        for (size_t e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > best) {
                second = best;
                best = choice[e];
            } else if (choice[e] > second) {
                second = choice[e];
            }
        }
        bool pair = p->method == SL_TOPK_NOAUX_TC && size > 1;
        group_score[g] = pair ? best + second : best;
        group_in[g] = false;
    }
    for (size_t j = 0; j < p->topk_group; j++) {
        take_best(group_score, group_in, p->n_group);
    }
    for (size_t e = 0; e < p->experts; e++) {
        taken[e] = !group_in[e / size];
    }
}

static void route_row(const sl_route_t *p, const float *logits, int32_t *ids, float *weights,
                      double *scratch, bool *flags)
{
    double *scores = scratch, *choice = scratch + p->experts;
    bool *taken = flags;
    score_experts(p, logits, scores);
    for (size_t e = 0; e < p->experts; e++) {
        choice[e] = p->method == SL_TOPK_NOAUX_TC ? scores[e] + p->bias[e] : scores[e];
        taken[e] = false;
    }
    if (p->method != SL_TOPK_GREEDY) {
        exclude_groups(p, choice, scratch + 2 * (size_t)p->experts, flags + p->experts, taken);
    }
    double sum = 0;
    for (size_t j = 0; j < p->top_k; j++) {
        ids[j] = (int32_t)take_best(choice, taken, p->experts);
        sum += scores[ids[j]];
    }
    bool normalise = p->norm_topk_prob && p->top_k > 1;
    bool scale = p->method == SL_TOPK_NOAUX_TC || !normalise;
    for (size_t j = 0; j < p->top_k; j++) {
        double weight = scores[ids[j]];
        weight = normalise ? weight / (sum + 1e-20) : weight;
        weights[j] = (float)(scale ? weight * p->scaling : weight);
    }
}

sl_status_t sl_ref_route(sl_device_t *device, sl_stream_t *stream, const sl_route_t *p)
{
    (void)device, (void)stream;
    size_t groups = p->method == SL_TOPK_GREEDY ? 0 : p->n_group;
    SL_ASSERT(groups == 0 || (p->experts % groups == 0 && p->topk_group <= groups &&
                              p->top_k <= p->topk_group * (p->experts / groups)));
    SL_ASSERT(p->top_k <= p->experts);
    double *scratch = malloc((2 * p->experts + groups + 1) * sizeof(double));
    bool *flags = malloc((p->experts + groups + 1) * sizeof(bool));
    sl_status_t status = SL_OK;
    if (scratch == NULL || flags == NULL) {
        status = sl_error(SL_ERR_NO_MEMORY, "ref route: %u experts", p->experts);
    }
    for (size_t t = 0; status == SL_OK && t < p->rows; t++) {
        int32_t *ids = p->ids + t * p->top_k;
        float *weights = p->weights + t * p->top_k;
        if (p->row_valid == NULL || p->row_valid[t]) {
            route_row(p, p->logits + t * p->experts, ids, weights, scratch, flags);
            continue;
        }
        for (size_t j = 0; j < p->top_k; j++) {
            ids[j] = -1;
            weights[j] = 0;
        }
    }
    free(scratch);
    free(flags);
    return status;
}

sl_status_t sl_ref_moe_permute(sl_device_t *device, sl_stream_t *stream, const sl_moe_permute_t *p)
{
    (void)device, (void)stream;
    size_t pairs = (size_t)p->rows * p->top_k;
    int32_t next = 0;
    for (size_t i = 0; i < pairs; i++) {
        SL_ASSERT(p->ids[i] < (int32_t)p->experts);
        p->sorted_row[i] = -1;
    }
    for (int32_t e = 0; e < (int32_t)p->experts; e++) {
        p->expert_begin[e] = next;
        for (size_t i = 0; i < pairs; i++) {
            if (p->ids[i] != e) {
                continue;
            }
            p->sorted_row[i] = next;
            memcpy((float *)p->x_sorted + (size_t)next * p->width,
                   (const float *)p->x + i / p->top_k * p->width, p->width * sizeof(float));
            next++;
        }
    }
    p->expert_begin[p->experts] = next;
    return SL_OK;
}

sl_status_t sl_ref_moe_combine(sl_device_t *device, sl_stream_t *stream, const sl_moe_combine_t *p)
{
    (void)device, (void)stream;
    const float *y = p->y, *shared = p->shared;
    float *out = p->out;
    for (size_t t = 0; t < p->rows; t++) {
        for (size_t c = 0; c < p->width; c++) {
            double sum = 0;
            for (size_t j = 0; j < p->top_k; j++) {
                int32_t row = p->sorted_row[t * p->top_k + j];
                if (row >= 0) {
                    sum += (double)p->weights[t * p->top_k + j] * y[(size_t)row * p->width + c];
                }
            }
            sum += shared != NULL ? shared[t * p->width + c] : 0;
            out[t * p->width + c] = (float)sum;
        }
    }
    return SL_OK;
}
