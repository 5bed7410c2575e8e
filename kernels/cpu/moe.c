/* Expert choice, and the way of the rows to their experts and back. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

/* Working memory of one row's choice. */
typedef struct {
    float *scores; /* [experts] softmax or sigmoid */
    float *choice; /* [experts] what the choice goes by */
    float *groups; /* [n_group] */
    uint8_t *expert_taken, *group_taken;
} route_scratch_t;

/* The best of `count` values not yet taken; the lowest index on a tie. Takes it. */
static size_t take_best(const float *values, uint8_t *taken, size_t count)
{
    size_t best = count;
    for (size_t i = 0; i < count; i++) {
        if (!taken[i] && (best == count || values[i] > values[best])) {
            best = i;
        }
    }
    SL_ASSERT(best < count);
    taken[best] = 1;
    return best;
}

static void score_experts(const sl_isa_t *isa, const sl_route_t *p, const float *logits,
                          float *scores)
{
    if (p->scoring == SL_SCORE_SIGMOID) {
        for (size_t e = 0; e < p->experts; e++) {
            scores[e] = 1 / (1 + expf(-logits[e]));
        }
        return;
    }
    memcpy(scores, logits, p->experts * sizeof(float));
    float max = isa->scale_max(scores, p->experts, 1);
    float sum = isa->exp_sum(scores, scores, p->experts, max, 1);
    for (size_t e = 0; e < p->experts; e++) {
        scores[e] /= sum;
    }
}

/* Marks as taken every expert outside the topk_group best groups. */
static void exclude_groups(const sl_route_t *p, const route_scratch_t *s)
{
    size_t size = p->experts / p->n_group;
    for (size_t g = 0; g < p->n_group; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (size_t e = g * size; e < (g + 1) * size; e++) {
            float value = s->choice[e];
            second = value > best ? best : value > second ? value : second;
            best = value > best ? value : best;
        }
        bool pair = p->method == SL_TOPK_NOAUX_TC && size > 1;
        s->groups[g] = pair ? best + second : best;
    }
    memset(s->group_taken, 0, p->n_group);
    for (size_t j = 0; j < p->topk_group; j++) {
        take_best(s->groups, s->group_taken, p->n_group);
    }
    for (size_t e = 0; e < p->experts; e++) {
        s->expert_taken[e] = !s->group_taken[e / size];
    }
}

static void route_row(const sl_isa_t *isa, const sl_route_t *p, const float *logits, int32_t *ids,
                      float *weights, const route_scratch_t *s)
{
    score_experts(isa, p, logits, s->scores);
    memcpy(s->choice, s->scores, p->experts * sizeof(float));
    memset(s->expert_taken, 0, p->experts);
    if (p->method == SL_TOPK_NOAUX_TC) {
        isa->add_scaled(s->choice, p->bias, 1, p->experts);
    }
    if (p->method != SL_TOPK_GREEDY) {
        exclude_groups(p, s);
    }
    float sum = 0;
    for (size_t j = 0; j < p->top_k; j++) {
        ids[j] = (int32_t)take_best(s->choice, s->expert_taken, p->experts);
        weights[j] = s->scores[ids[j]];
        sum += weights[j];
    }
    bool normalise = p->norm_topk_prob && p->top_k > 1;
    bool scale = p->method == SL_TOPK_NOAUX_TC || !normalise;
    for (size_t j = 0; j < p->top_k; j++) {
        weights[j] = normalise ? weights[j] / (sum + 1e-20f) : weights[j];
        weights[j] *= scale ? p->scaling : 1;
    }
}

sl_status_t sl_cpu_route(sl_device_t *device, sl_stream_t *stream, const sl_route_t *p)
{
    (void)stream;
    size_t experts = p->experts, groups = p->method == SL_TOPK_GREEDY ? 0 : p->n_group;
    SL_ASSERT(p->top_k <= experts);
    SL_ASSERT(groups == 0 || (experts % groups == 0 && p->topk_group <= groups &&
                              p->top_k <= p->topk_group * (experts / groups)));
    void *memory;
    SL_TRY(sl_cpu_scratch(device, (2 * experts + groups) * sizeof(float) + experts + groups,
                          "expert choice", &memory));
    float *floats = memory;
    uint8_t *flags = (uint8_t *)(floats + 2 * experts + groups);
    route_scratch_t scratch = {.scores = floats,
                               .choice = floats + experts,
                               .groups = floats + 2 * experts,
                               .expert_taken = flags,
                               .group_taken = flags + experts};
    for (size_t t = 0; t < p->rows; t++) {
        int32_t *ids = p->ids + t * p->top_k;
        float *weights = p->weights + t * p->top_k;
        if (p->row_valid == NULL || p->row_valid[t]) {
            route_row(device->isa, p, p->logits + t * experts, ids, weights, &scratch);
            continue;
        }
        for (size_t j = 0; j < p->top_k; j++) {
            ids[j] = -1;
            weights[j] = 0;
        }
    }
    return SL_OK;
}

/* A counting sort. While pairs are placed, begin[e] is where the next row of expert e goes; it ends
 * up at the expert's end, which is the begin of the next. */
sl_status_t sl_cpu_moe_permute(sl_device_t *device, sl_stream_t *stream, const sl_moe_permute_t *p)
{
    (void)device, (void)stream;
    size_t pairs = (size_t)p->rows * p->top_k;
    int32_t *begin = p->expert_begin;
    memset(begin, 0, (p->experts + 1) * sizeof(*begin));
    for (size_t i = 0; i < pairs; i++) {
        SL_ASSERT(p->ids[i] < (int32_t)p->experts);
        if (p->ids[i] >= 0) {
            begin[p->ids[i] + 1]++;
        }
    }
    for (size_t e = 0; e < p->experts; e++) {
        begin[e + 1] += begin[e];
    }
    for (size_t i = 0; i < pairs; i++) {
        p->sorted_row[i] = p->ids[i] >= 0 ? begin[p->ids[i]]++ : -1;
        if (p->ids[i] >= 0) {
            memcpy((float *)p->x_sorted + (size_t)p->sorted_row[i] * p->width,
                   (const float *)p->x + i / p->top_k * p->width, p->width * sizeof(float));
        }
    }
    for (size_t e = p->experts; e > 0; e--) {
        begin[e] = begin[e - 1];
    }
    begin[0] = 0;
    return SL_OK;
}

sl_status_t sl_cpu_moe_combine(sl_device_t *device, sl_stream_t *stream, const sl_moe_combine_t *p)
{
    (void)stream;
    for (size_t t = 0; t < p->rows; t++) {
        float *out = (float *)p->out + t * p->width;
        if (p->shared == NULL) {
            memset(out, 0, p->width * sizeof(float));
        } else if (p->shared != p->out) {
            memcpy(out, (const float *)p->shared + t * p->width, p->width * sizeof(float));
        }
        for (size_t j = 0; j < p->top_k; j++) {
            int32_t row = p->sorted_row[t * p->top_k + j];
            if (row >= 0) {
                device->isa->add_scaled(out, (const float *)p->y + (size_t)row * p->width,
                                        p->weights[t * p->top_k + j], p->width);
            }
        }
    }
    return SL_OK;
}
