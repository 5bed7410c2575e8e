/*
 * Choice of a token, as kernels/ops.h defines it, with what it leaves open:
 *   - a NaN logit counts as -inf; ids to mask that are outside the vocabulary mask nothing;
 *   - order is by logit, then by lower id: top_k keeps exactly k, top_p the shortest prefix of that
 *     order whose probability reaches top_p (at least one token), min_p those of at least
 *     min_p times the best one's probability;
 *   - the draw is the first kept id, in id order, whose running sum exceeds uniform * total, with
 *     the uniform number of kernels/philox.h;
 *   - a best logit of +inf or -inf has no softmax: the choice is greedy, and where every logit is
 *     -inf it is the lowest id that is not masked (0 if all are).
 */
#include <math.h>

#include "kernels/host.h"
#include "kernels/philox.h"
#include "kernels/ref/ref.h"

typedef struct {
    int32_t id;
    bool kept;
    double logit, weight; /* weight: exp((logit - max) / temperature) */
} candidate_t;

static double ordered(float logit)
{
    return isnan(logit) ? -INFINITY : logit;
}

static double log_sum_exp(const float *logits, uint32_t vocab)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        max = logits[i] > max ? logits[i] : max;
    }
    for (uint32_t i = 0; i < vocab; i++) {
        sum += exp(logits[i] - max);
    }
    return max + log(sum);
}

static sl_status_t logprobs_of(const float *logits, uint32_t vocab, int32_t token,
                               uint32_t top_count, sl_logprobs_t *out)
{
    double lse = log_sum_exp(logits, vocab);
    bool *taken = calloc(vocab, sizeof(bool));
    if (taken == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "ref logprobs: vocabulary %u", vocab);
    }
    out->logprob = (float)(logits[token] - lse);
    top_count = top_count < SL_TOP_LOGPROBS_MAX ? top_count : SL_TOP_LOGPROBS_MAX;
    out->top_count = top_count < vocab ? top_count : vocab;
    for (uint32_t j = 0; j < out->top_count; j++) {
        uint32_t best = vocab;
        for (uint32_t i = 0; i < vocab; i++) {
            if (!taken[i] && (best == vocab || ordered(logits[i]) > ordered(logits[best]))) {
                best = i;
            }
        }
        taken[best] = true;
        out->top_ids[j] = (int32_t)best;
        out->top_logprobs[j] = (float)(logits[best] - lse);
    }
    free(taken);
    return SL_OK;
}

static bool is_masked(const sl_sample_row_t *rule, int32_t id)
{
    for (uint32_t i = 0; i < rule->masked_count; i++) {
        if (rule->masked[i] == id) {
            return true;
        }
    }
    return false;
}

/* Descending by logit, then ascending by id. */
static int compare(const void *a_p, const void *b_p)
{
    const candidate_t *a = a_p, *b = b_p;
    if (a->logit != b->logit) {
        return a->logit > b->logit ? -1 : 1;
    }
    return a->id < b->id ? -1 : a->id > b->id;
}

/* Candidates come sorted. */
static void keep(const sl_sample_row_t *rule, candidate_t *candidates, uint32_t count)
{
    uint32_t kept = rule->top_k > 0 && rule->top_k < count ? rule->top_k : count;
    double total = 0, sum = 0;
    for (uint32_t i = 0; i < kept; i++) {
        total += candidates[i].weight;
    }
    for (uint32_t i = 0; i < kept; i++) {
        bool inside_top_p = i == 0 || rule->top_p >= 1 || sum < rule->top_p * total;
        bool inside_min_p = candidates[i].weight >= rule->min_p * candidates[0].weight;
        candidates[i].kept = inside_top_p && inside_min_p;
        sum += candidates[i].weight;
    }
}

static int32_t draw(const sl_sample_row_t *rule, const candidate_t *candidates, uint32_t count,
                    double *weight_of, uint32_t vocab)
{
    double total = 0, sum = 0;
    memset(weight_of, 0, vocab * sizeof(double));
    for (uint32_t i = 0; i < count; i++) {
        if (candidates[i].kept) {
            weight_of[candidates[i].id] = candidates[i].weight;
        }
    }
    for (uint32_t id = 0; id < vocab; id++) {
        total += weight_of[id];
    }
    double target = sl_philox_uniform(rule->seed, rule->position) * total;
    int32_t last = candidates[0].id;
    for (uint32_t id = 0; id < vocab; id++) {
        sum += weight_of[id];
        last = weight_of[id] > 0 ? (int32_t)id : last;
        if (sum > target) {
            break;
        }
    }
    return last;
}

static int32_t choose(const sl_sample_row_t *rule, const float *logits, uint32_t vocab,
                      candidate_t *candidates, double *weight_of)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (!is_masked(rule, (int32_t)i)) {
            candidates[count++] =
                (candidate_t){.id = (int32_t)i, .kept = false, .logit = ordered(logits[i])};
        }
    }
    if (count == 0) {
        return 0;
    }
    qsort(candidates, count, sizeof(*candidates), compare);
    double max = candidates[0].logit;
    if (rule->temperature == 0 || isinf(max)) {
        return candidates[0].id;
    }
    for (uint32_t i = 0; i < count; i++) {
        candidates[i].weight = exp((candidates[i].logit - max) / rule->temperature);
    }
    keep(rule, candidates, count);
    return draw(rule, candidates, count, weight_of, vocab);
}

sl_status_t sl_ref_sample(sl_device_t *device, sl_stream_t *stream, const sl_sample_t *p)
{
    (void)device, (void)stream;
    sl_status_t status = SL_OK;
    candidate_t *candidates = malloc((p->vocab + 1) * sizeof(*candidates));
    double *weight_of = malloc((p->vocab + 1) * sizeof(*weight_of));
    if (candidates == NULL || weight_of == NULL) {
        status = sl_error(SL_ERR_NO_MEMORY, "ref sample: vocabulary %u", p->vocab);
    }
    for (size_t t = 0; status == SL_OK && t < p->rows; t++) {
        const float *logits = p->logits + t * p->vocab;
        const sl_sample_row_t *rule = &p->rules[t];
        p->tokens[t] = choose(rule, logits, p->vocab, candidates, weight_of);
        if (p->logprobs != NULL && rule->logprobs >= 0) {
            status = logprobs_of(logits, p->vocab, p->tokens[t], (uint32_t)rule->logprobs,
                                 &p->logprobs[t]);
        }
    }
    free(candidates);
    free(weight_of);
    return status;
}

sl_status_t sl_ref_token_logprobs(sl_device_t *device, sl_stream_t *stream,
                                  const sl_token_logprobs_t *p)
{
    (void)device, (void)stream;
    for (size_t t = 0; t < p->rows; t++) {
        SL_ASSERT(p->targets[t] >= 0 && (uint32_t)p->targets[t] < p->vocab);
        SL_TRY(logprobs_of(p->logits + t * p->vocab, p->vocab, p->targets[t], p->top_count,
                           &p->out[t]));
    }
    return SL_OK;
}
