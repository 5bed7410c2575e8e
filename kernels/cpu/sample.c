/*
 * Choice of a token, with the rules of kernels/ref/sample.c for what kernels/ops.h leaves open
 * (ties, NaN, infinite logits) and the uniform number of kernels/philox.h.
 *
 * top_k and top_p need the order of the logits, but only its head: candidates go into a heap in
 * linear time and leave it in order until enough are kept. The draw walks the weights in id order.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/philox.h"

/* Working memory of one row. */
typedef struct {
    float *logits; /* [vocab] masked and NaN ones at -inf */
    float *weight; /* [vocab] exp((logit - max) / temperature) */
    float *kept;   /* [vocab] weight of the kept ones, else 0 */
    int32_t *heap; /* [vocab] ids */
} sample_scratch_t;

/* Order of choice: the larger logit, then the lower id. */
static bool comes_first(const float *logits, int32_t a, int32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(int32_t *heap, size_t count, size_t at, const float *logits)
{
    int32_t id = heap[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= count) {
            break;
        }
        if (child + 1 < count && comes_first(logits, heap[child + 1], heap[child])) {
            child++;
        }
        if (!comes_first(logits, heap[child], id)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = id;
}

/* Removes and returns the first in order. */
static int32_t heap_pop(int32_t *heap, size_t *count, const float *logits)
{
    int32_t first = heap[0];
    heap[0] = heap[--*count];
    if (*count > 0) {
        sift_down(heap, *count, 0, logits);
    }
    return first;
}

/* Of the tokens that weigh more than `least`; returns how many. */
static size_t heap_fill(const sample_scratch_t *s, uint32_t vocab, double least)
{
    size_t count = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        s->heap[count] = (int32_t)i;
        count += s->weight[i] > least;
    }
    for (size_t i = count / 2; i-- > 0;) {
        sift_down(s->heap, count, i, s->logits);
    }
    return count;
}

/* Leaves in `kept` the weights of the shortest prefix of the order that reaches top_p. Tokens below
 * half of (1 - top_p) * total / vocab cannot be in it: all of them together are less than what it
 * leaves out. */
static void keep_top_p(const sl_sample_row_t *rule, const sample_scratch_t *s, uint32_t vocab)
{
    double total = 0, sum = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        total += s->weight[i];
    }
    size_t count = heap_fill(s, vocab, 0.5 * (1 - rule->top_p) * total / vocab);
    memset(s->kept, 0, vocab * sizeof(float));
    do {
        int32_t id = heap_pop(s->heap, &count, s->logits);
        s->kept[id] = s->weight[id];
        sum += s->weight[id];
    } while (count > 0 && sum < rule->top_p * total);
}

/* The same of the top_k first, top_p being a share of what they weigh together. Popped ids wait in
 * the places that the shrinking heap leaves behind, last first. */
static void keep_top_k(const sl_sample_row_t *rule, const sample_scratch_t *s, uint32_t vocab)
{
    size_t count = heap_fill(s, vocab, 0), end = count;
    size_t limit = rule->top_k < count ? rule->top_k : count;
    double total = 0, sum = 0;
    for (size_t i = 0; i < limit; i++) {
        int32_t id = heap_pop(s->heap, &count, s->logits);
        s->heap[count] = id;
        total += s->weight[id];
    }
    memset(s->kept, 0, vocab * sizeof(float));
    for (size_t i = 0; i < limit; i++) {
        int32_t id = s->heap[end - 1 - i];
        if (i == 0 || rule->top_p >= 1 || sum < rule->top_p * total) {
            s->kept[id] = s->weight[id];
        }
        sum += s->weight[id];
    }
}

static int32_t draw(const sl_sample_row_t *rule, const float *kept, uint32_t vocab)
{
    double total = 0, sum = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        total += kept[i];
    }
    double target = sl_philox_uniform(rule->seed, rule->position) * total;
    int32_t last = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        sum += kept[i];
        last = kept[i] > 0 ? (int32_t)i : last;
        if (sum > target) {
            break;
        }
    }
    return last;
}

/* Copies the logits, the forbidden ones as -inf; returns the largest of the allowed. */
static float mask_logits(const sl_isa_t *isa, const sl_sample_row_t *rule, const float *logits,
                         uint32_t vocab, float *out)
{
    float max = isa->clean_max(out, logits, vocab);
    bool masked_max = false;
    for (uint32_t i = 0; i < rule->masked_count; i++) {
        if (rule->masked[i] >= 0 && (uint32_t)rule->masked[i] < vocab) {
            masked_max = masked_max || out[rule->masked[i]] == max;
            out[rule->masked[i]] = -INFINITY;
        }
    }
    return masked_max ? isa->clean_max(out, out, vocab) : max;
}

static int32_t first_equal(const float *values, uint32_t count, float value)
{
    uint32_t i = 0;
    while (i + 1 < count && values[i] != value) {
        i++;
    }
    return (int32_t)i;
}

/* The lowest id that is not masked; 0 if all are. Where every allowed logit is -inf. */
static int32_t lowest_allowed(const sl_sample_row_t *rule, uint32_t vocab)
{
    for (uint32_t id = 0; id < vocab; id++) {
        bool masked = false;
        for (uint32_t i = 0; i < rule->masked_count && !masked; i++) {
            masked = rule->masked[i] == (int32_t)id;
        }
        if (!masked) {
            return (int32_t)id;
        }
    }
    return 0;
}

static int32_t choose(const sl_isa_t *isa, const sl_sample_row_t *rule, const float *logits,
                      uint32_t vocab, const sample_scratch_t *s)
{
    float max = mask_logits(isa, rule, logits, vocab, s->logits);
    if (max == -INFINITY) {
        return lowest_allowed(rule, vocab);
    }
    if (rule->temperature == 0 || max == INFINITY) {
        return first_equal(s->logits, vocab, max);
    }
    float scale = fminf(1 / rule->temperature, FLT_MAX); /* finite, so that 0 * scale is 0 */
    isa->exp_sum(s->weight, s->logits, vocab, max, scale);
    const float *kept = s->weight;
    if (rule->top_k > 0 && rule->top_k < vocab) {
        keep_top_k(rule, s, vocab);
        kept = s->kept;
    } else if (rule->top_p < 1) {
        keep_top_p(rule, s, vocab);
        kept = s->kept;
    }
    if (rule->min_p > 0) { /* the best one weighs 1 */
        for (uint32_t i = 0; i < vocab; i++) {
            s->kept[i] = s->weight[i] >= rule->min_p ? kept[i] : 0;
        }
        kept = s->kept;
    }
    return draw(rule, kept, vocab);
}

/* NaN counts as -inf in the order of the alternatives. */
static bool better(float a, float b)
{
    return a > b || (isnan(b) && !isnan(a) && a > -INFINITY);
}

/* Keeps the `top_count` best ids seen, best first, by insertion. */
static void logprobs_of(const sl_isa_t *isa, const float *logits, uint32_t vocab, int32_t token,
                        uint32_t top_count, sl_logprobs_t *out)
{
    uint32_t limit = top_count < SL_TOP_LOGPROBS_MAX ? top_count : SL_TOP_LOGPROBS_MAX, count = 0;
    float max = -INFINITY;
    for (uint32_t i = 0; i < vocab; i++) {
        max = logits[i] > max ? logits[i] : max;
        if (count == limit && (limit == 0 || !better(logits[i], logits[out->top_ids[limit - 1]]))) {
            continue;
        }
        uint32_t at = count < limit ? count++ : limit - 1;
        for (; at > 0 && better(logits[i], logits[out->top_ids[at - 1]]); at--) {
            out->top_ids[at] = out->top_ids[at - 1];
        }
        out->top_ids[at] = (int32_t)i;
    }
    float lse = max + logf(isa->exp_sum(NULL, logits, vocab, max, 1));
    out->logprob = logits[token] - lse;
    out->top_count = count;
    for (uint32_t j = 0; j < count; j++) {
        out->top_logprobs[j] = logits[out->top_ids[j]] - lse;
    }
}

sl_status_t sl_cpu_sample(sl_device_t *device, sl_stream_t *stream, const sl_sample_t *p)
{
    (void)stream;
    size_t vocab = p->vocab;
    void *memory;
    SL_TRY(sl_cpu_scratch(device, 4 * vocab * sizeof(float), "sampling", &memory));
    float *floats = memory;
    sample_scratch_t scratch = {.logits = floats,
                                .weight = floats + vocab,
                                .kept = floats + 2 * vocab,
                                .heap = (int32_t *)(floats + 3 * vocab)};
    for (size_t t = 0; t < p->rows; t++) {
        const float *logits = p->logits + t * vocab;
        const sl_sample_row_t *rule = &p->rules[t];
        p->tokens[t] = choose(device->isa, rule, logits, p->vocab, &scratch);
        if (p->logprobs != NULL && rule->logprobs >= 0) {
            logprobs_of(device->isa, logits, p->vocab, p->tokens[t], (uint32_t)rule->logprobs,
                        &p->logprobs[t]);
        }
    }
    return SL_OK;
}

sl_status_t sl_cpu_token_logprobs(sl_device_t *device, sl_stream_t *stream,
                                  const sl_token_logprobs_t *p)
{
    (void)stream;
    for (size_t t = 0; t < p->rows; t++) {
        SL_ASSERT(p->targets[t] >= 0 && (uint32_t)p->targets[t] < p->vocab);
        logprobs_of(device->isa, p->logits + t * p->vocab, p->vocab, p->targets[t], p->top_count,
                    &p->out[t]);
    }
    return SL_OK;
}
