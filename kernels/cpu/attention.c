/*
 * Attention in blocks with a running softmax, so that memory is one block of scores whatever the
 * length: for each query the largest score so far (max) and the sum of exp(score - max); a block
 * that raises max scales what was summed before by exp(old - new). Division by the sum comes last.
 *
 * Prefill: blocks of QUERIES x KEYS of one sequence and head. Where causality cuts a block, each
 * query's weighted sum runs over its own visible keys only, since 0 times a NaN beyond would leak.
 * Absorbed: HEADS queries (heads of one row) by the cached tokens of one page; a token's latent is
 * key and value at once.
 *
 * The blocks of a sequence (of a row) begin at its own start, so that its result depends on nothing
 * else in the batch.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/host.h"

#define QUERIES 32
#define KEYS 128
#define HEADS 32
#define PAGE_KEYS 64

typedef struct {
    float max, sum;
} running_t;

/* Scores to weights in place, and the running pair; returns the factor for the sums so far. */
static float advance(const sl_isa_t *isa, running_t *running, float *scores, size_t count,
                     float scale)
{
    float best = isa->scale_max(scores, count, scale);
    float max = best > running->max ? best : running->max;
    float shift = max == -INFINITY ? 0 : max;
    float keep = expf(running->max - shift);
    running->sum = running->sum * keep + isa->exp_sum(scores, scores, count, shift, 1);
    running->max = max;
    return keep;
}

/* Divides by the sum; returns the log-sum-exp. */
static float finish(const sl_isa_t *isa, const running_t *running, float *out, size_t width)
{
    if (running->sum == 0) {
        return -INFINITY;
    }
    float factor = 1 / running->sum;
    isa->mix(&(sl_mix_t){.keep = &factor, .out = out, .rows = 1, .width = width});
    return running->max + logf(running->sum);
}

/* One sequence and head, as the inner loops see them. */
typedef struct {
    const float *q, *k, *k_pe, *v;
    float *out, *lse; /* lse may be NULL */
    size_t q_stride, kv_stride, k_pe_stride, out_stride, lse_stride;
    size_t queries, keys;
} prefill_head_t;

static size_t visible_keys(const sl_attn_prefill_t *p, const prefill_head_t *h, size_t query)
{
    if (!p->causal) {
        return h->keys;
    }
    size_t end = h->keys + query + 1;
    return end > h->queries ? end - h->queries : 0;
}

/* Weights of one block in `scores`, of `counts[i]` keys for query i, into the sums. */
static void mix_block(const sl_isa_t *isa, const sl_attn_prefill_t *p, const prefill_head_t *h,
                      size_t query, size_t rows, size_t key, size_t keys, float (*scores)[KEYS],
                      const size_t *counts, const float *keep)
{
    sl_mix_t mix = {
        .p = scores[0],
        .v = h->v + key * h->kv_stride,
        .keep = keep,
        .out = h->out + query * h->out_stride,
        .p_stride = KEYS,
        .v_stride = h->kv_stride,
        .out_stride = h->out_stride,
        .rows = rows,
        .k = keys,
        .width = p->v_dim,
    };
    if (counts[0] == keys) { /* the first query sees the least */
        isa->mix(&mix);
        return;
    }
    mix.rows = 1;
    for (size_t i = 0; i < rows; i++) {
        mix.k = counts[i];
        isa->mix(&mix);
        mix.p += KEYS;
        mix.out += h->out_stride;
        mix.keep = mix.keep != NULL ? mix.keep + 1 : NULL;
    }
}

static void prefill_block(const sl_isa_t *isa, const sl_attn_prefill_t *p, const prefill_head_t *h,
                          size_t query, size_t rows)
{
    float scores[QUERIES][KEYS], keep[QUERIES];
    size_t counts[QUERIES];
    running_t running[QUERIES];
    for (size_t i = 0; i < rows; i++) {
        running[i] = (running_t){.max = -INFINITY, .sum = 0};
    }
    size_t limit = visible_keys(p, h, query + rows - 1);
    size_t key = 0;
    do { /* once even without keys, to write zeros */
        size_t keys = limit - key < KEYS ? limit - key : KEYS;
        const float *q = h->q + query * h->q_stride;
        sl_dot_t dot = {
            .parts = {{q, h->k + key * h->kv_stride, h->q_stride, h->kv_stride, p->nope},
                      {q + p->nope, h->k_pe + key * h->k_pe_stride, h->q_stride, h->k_pe_stride,
                       p->rope}},
            .part_count = 2,
            .rows = rows,
            .n = keys,
            .out = scores[0],
            .out_stride = KEYS,
        };
        isa->dot(&dot);
        for (size_t i = 0; i < rows; i++) {
            size_t visible = visible_keys(p, h, query + i);
            counts[i] = visible <= key ? 0 : visible - key < keys ? visible - key : keys;
            keep[i] = advance(isa, &running[i], scores[i], counts[i], p->scale);
        }
        mix_block(isa, p, h, query, rows, key, keys, scores, counts, key > 0 ? keep : NULL);
        key += keys;
    } while (key < limit);
    for (size_t i = 0; i < rows; i++) {
        float lse = finish(isa, &running[i], h->out + (query + i) * h->out_stride, p->v_dim);
        if (h->lse != NULL) {
            h->lse[(query + i) * h->lse_stride] = lse;
        }
    }
}

typedef struct {
    const sl_isa_t *isa;
    const void *params;
} attention_job_t;

static void prefill_part(const void *job_p, size_t part, size_t parts)
{
    const attention_job_t *job = job_p;
    const sl_attn_prefill_t *p = job->params;
    size_t begin, end, q_width = p->nope + p->rope, kv_width = p->nope + p->v_dim;
    sl_pool_part(p->heads, 1, part, parts, &begin, &end);
    for (uint32_t s = 0; s < p->sequences; s++) {
        size_t q0 = (size_t)p->q_begin[s], k0 = (size_t)p->k_begin[s];
        SL_ASSERT(p->q_begin[s] <= p->q_begin[s + 1] && p->k_begin[s] <= p->k_begin[s + 1]);
        for (size_t i = begin; i < end; i++) {
            const float *kv = (const float *)p->kv + (k0 * p->heads + i) * kv_width;
            prefill_head_t head = {
                .q = (const float *)p->q + (q0 * p->heads + i) * q_width,
                .k = kv,
                .k_pe = (const float *)p->k_pe + k0 * p->k_pe_stride,
                .v = kv + p->nope,
                .out = (float *)p->out + (q0 * p->heads + i) * p->v_dim,
                .lse = p->lse != NULL ? p->lse + q0 * p->heads + i : NULL,
                .q_stride = p->heads * q_width,
                .kv_stride = p->heads * kv_width,
                .k_pe_stride = p->k_pe_stride,
                .out_stride = (size_t)p->heads * p->v_dim,
                .lse_stride = p->heads,
                .queries = (size_t)(p->q_begin[s + 1] - p->q_begin[s]),
                .keys = (size_t)(p->k_begin[s + 1] - p->k_begin[s]),
            };
            for (size_t q = 0; q < head.queries; q += QUERIES) {
                size_t rows = head.queries - q < QUERIES ? head.queries - q : QUERIES;
                prefill_block(job->isa, p, &head, q, rows);
            }
        }
    }
}

sl_status_t sl_cpu_attn_prefill(sl_device_t *device, sl_stream_t *stream,
                                const sl_attn_prefill_t *p)
{
    (void)stream;
    double pairs = 0;
    for (uint32_t s = 0; s < p->sequences; s++) {
        pairs += (double)(p->q_begin[s + 1] - p->q_begin[s]) * (p->k_begin[s + 1] - p->k_begin[s]);
    }
    attention_job_t job = {.isa = device->isa, .params = p};
    double work = pairs * p->heads * (p->nope + p->rope + p->v_dim);
    sl_pool_run(device->pool, work, prefill_part, &job);
    return SL_OK;
}

sl_status_t sl_cpu_attn_merge(sl_device_t *device, sl_stream_t *stream, const sl_attn_merge_t *p)
{
    (void)stream;
    for (size_t i = 0; i < (size_t)p->rows * p->heads; i++) {
        float a = p->lse[i], b = p->other_lse[i];
        if (b == -INFINITY) {
            continue; /* nothing to add; `other` is 0 there */
        }
        float max = a > b ? a : b;
        float weight_a = expf(a - max), weight_b = expf(b - max), sum = weight_a + weight_b;
        weight_a /= sum;
        weight_b /= sum;
        device->isa->mix(&(sl_mix_t){.p = &weight_b,
                                     .v = (const float *)p->other_out + i * p->v_dim,
                                     .keep = &weight_a,
                                     .out = (float *)p->out + i * p->v_dim,
                                     .rows = 1,
                                     .k = 1,
                                     .width = p->v_dim});
        p->lse[i] = max + logf(sum);
    }
    return SL_OK;
}

/* Heads [head, head + rows) of row t against `keys` cached tokens at `token`. */
static void absorbed_block(const sl_isa_t *isa, const sl_attn_absorbed_t *p, size_t t, size_t head,
                           size_t rows, const float *token, size_t keys, running_t *running,
                           bool first)
{
    float scores[HEADS][PAGE_KEYS], keep[HEADS];
    size_t width = p->cache.width;
    const float *latent = (const float *)p->q_latent + (t * p->heads + head) * p->kv_lora;
    const float *rope =
        (const float *)p->q_rope + t * p->q_rope_row_stride + head * p->q_rope_head_stride;
    sl_dot_t dot = {
        .parts = {{latent, token, p->kv_lora, width, p->kv_lora},
                  {rope, token + p->kv_lora, p->q_rope_head_stride, width, width - p->kv_lora}},
        .part_count = 2,
        .rows = rows,
        .n = keys,
        .out = scores[0],
        .out_stride = PAGE_KEYS,
    };
    isa->dot(&dot);
    for (size_t i = 0; i < rows; i++) {
        keep[i] = advance(isa, &running[i], scores[i], keys, p->scale);
    }
    sl_mix_t mix = {
        .p = scores[0],
        .v = token,
        .keep = first ? NULL : keep,
        .out = (float *)p->out + (t * p->heads + head) * p->kv_lora,
        .p_stride = PAGE_KEYS,
        .v_stride = width,
        .out_stride = p->kv_lora,
        .rows = rows,
        .k = keys,
        .width = p->kv_lora,
    };
    isa->mix(&mix);
}

static void absorbed_heads(const sl_isa_t *isa, const sl_attn_absorbed_t *p, size_t t, size_t head,
                           size_t rows)
{
    size_t page_tokens = p->cache.page_tokens, tokens = (size_t)p->kv_len[t];
    float *out = (float *)p->out + (t * p->heads + head) * p->kv_lora;
    running_t running[HEADS];
    SL_ASSERT(p->kv_len[t] >= 0);
    if (tokens == 0) { /* a padding row: it may have no request */
        memset(out, 0, rows * p->kv_lora * sizeof(float));
        return;
    }
    size_t request = p->row_request != NULL ? (size_t)p->row_request[t] : t;
    SL_ASSERT(p->page_begin[request] >= 0);
    const int32_t *pages = p->pages + p->page_begin[request];
    for (size_t i = 0; i < rows; i++) {
        running[i] = (running_t){.max = -INFINITY, .sum = 0};
    }
    for (size_t j = 0; j < tokens;) {
        int32_t page = pages[j / page_tokens];
        SL_ASSERT(page >= 0 && (uint32_t)page < p->cache.page_count);
        size_t offset = j % page_tokens, keys = page_tokens - offset;
        keys = keys < tokens - j ? keys : tokens - j;
        keys = keys < PAGE_KEYS ? keys : PAGE_KEYS;
        const float *token =
            sl_host_cached_token(&p->cache, p->layer, (uint32_t)page, (uint32_t)offset);
        absorbed_block(isa, p, t, head, rows, token, keys, running, j == 0);
        j += keys;
    }
    for (size_t i = 0; i < rows; i++) {
        (void)finish(isa, &running[i], out + i * p->kv_lora, p->kv_lora);
    }
}

/* The threads share the (row, block of heads) pairs. */
static void absorbed_part(const void *job_p, size_t part, size_t parts)
{
    const attention_job_t *job = job_p;
    const sl_attn_absorbed_t *p = job->params;
    size_t blocks = (p->heads + HEADS - 1) / HEADS, begin, end;
    sl_pool_part(p->rows * blocks, 1, part, parts, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        size_t head = i % blocks * HEADS;
        size_t rows = p->heads - head < HEADS ? p->heads - head : HEADS;
        absorbed_heads(job->isa, p, i / blocks, head, rows);
    }
}

sl_status_t sl_cpu_attn_absorbed(sl_device_t *device, sl_stream_t *stream,
                                 const sl_attn_absorbed_t *p)
{
    (void)stream;
    double tokens = 0;
    for (size_t t = 0; t < p->rows; t++) {
        tokens += p->kv_len[t];
    }
    attention_job_t job = {.isa = device->isa, .params = p};
    double work = tokens * p->heads * (p->cache.width + p->kv_lora);
    sl_pool_run(device->pool, work, absorbed_part, &job);
    return SL_OK;
}
