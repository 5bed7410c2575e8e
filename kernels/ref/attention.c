/*
 * Attention over latents, as defined: all scores of one query and head, their softmax, the sum.
 * The cache is [page][layer][page_tokens][width]; a token is kv_lora latent values, then `rope`
 * rotated key values. The absorbed form attends to the latents themselves: score = q . token, and
 * the value is the token's latent part.
 */
#include <math.h>

#include "kernels/host.h"
#include "kernels/ref/ref.h"

/* Rotates pairs (2j, 2j+1) in place by the angle of `position`. */
static void rotate(float *x, const float *cos_sin, size_t position, size_t rope)
{
    const float *cosines = cos_sin + position * rope, *sines = cosines + rope / 2;
    for (size_t j = 0; j < rope / 2; j++) {
        double a = x[2 * j], b = x[2 * j + 1];
        x[2 * j] = (float)(a * cosines[j] - b * sines[j]);
        x[2 * j + 1] = (float)(b * cosines[j] + a * sines[j]);
    }
}

sl_status_t sl_ref_rope_cache(sl_device_t *device, sl_stream_t *stream, const sl_rope_cache_t *p)
{
    (void)device, (void)stream;
    size_t head_width = p->nope + p->rope, width = p->kv_lora + p->rope;
    size_t q_stride = p->q_stride ? p->q_stride : p->heads * head_width;
    const float *weight = p->norm_weight;
    for (size_t t = 0; t < p->rows; t++) {
        size_t position = (size_t)p->positions[t];
        for (size_t i = 0; i < p->heads; i++) {
            rotate((float *)p->q + t * q_stride + i * head_width + p->nope, p->cos_sin, position,
                   p->rope);
        }
        float *latent = (float *)p->latent + t * width;
        double square_sum = 0;
        for (size_t c = 0; c < p->kv_lora; c++) {
            square_sum += (double)latent[c] * latent[c];
        }
        double scale = 1 / sqrt(square_sum / p->kv_lora + (double)p->eps);
        for (size_t c = 0; c < p->kv_lora; c++) {
            latent[c] = (float)(latent[c] * scale * weight[c]);
        }
        rotate(latent + p->kv_lora, p->cos_sin, position, p->rope);
        if (p->slots[t] >= 0) {
            SL_ASSERT(p->cache.width == width);
            uint64_t slot = (uint64_t)p->slots[t];
            SL_ASSERT(slot / p->cache.page_tokens < p->cache.page_count);
            memcpy(sl_host_cached_token(&p->cache, p->layer, slot / p->cache.page_tokens,
                                        (uint32_t)(slot % p->cache.page_tokens)),
                   latent, width * sizeof(float));
        }
    }
    return SL_OK;
}

sl_status_t sl_ref_gather_latents(sl_device_t *device, sl_stream_t *stream,
                                  const sl_gather_latents_t *p)
{
    (void)device, (void)stream;
    for (uint32_t i = 0; i < p->count; i++) {
        uint32_t token = p->first + i;
        int32_t page = p->pages[token / p->cache.page_tokens];
        SL_ASSERT(page >= 0 && (uint32_t)page < p->cache.page_count);
        memcpy((float *)p->out + (size_t)i * p->cache.width,
               sl_host_cached_token(&p->cache, p->layer, (uint32_t)page,
                                    token % p->cache.page_tokens),
               p->cache.width * sizeof(float));
    }
    return SL_OK;
}

/* Scores to weights that sum to 1, in place; returns their log-sum-exp, -inf without any weight. */
static double softmax(double *scores, size_t count)
{
    double max = -INFINITY, sum = 0;
    for (size_t j = 0; j < count; j++) {
        max = scores[j] > max ? scores[j] : max;
    }
    double shift = max == -INFINITY ? 0 : max;
    for (size_t j = 0; j < count; j++) {
        scores[j] = exp(scores[j] - shift);
        sum += scores[j];
    }
    for (size_t j = 0; j < count && sum != 0; j++) {
        scores[j] /= sum;
    }
    return sum == 0 ? -INFINITY : shift + log(sum);
}

static sl_status_t take_scores(size_t count, double **scores_p)
{
    *scores_p = malloc((count + 1) * sizeof(double));
    if (*scores_p == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "ref attention: %zu scores", count);
    }
    return SL_OK;
}

/* One query and head against keys [key0, key0 + count). */
static double attend(const sl_attn_prefill_t *p, size_t query, size_t head, size_t key0,
                     size_t count, double *scores)
{
    size_t q_width = p->nope + p->rope, kv_width = p->nope + p->v_dim;
    const float *q = (const float *)p->q + (query * p->heads + head) * q_width;
    for (size_t j = 0; j < count; j++) {
        const float *k = (const float *)p->kv + ((key0 + j) * p->heads + head) * kv_width;
        const float *k_pe = (const float *)p->k_pe + (key0 + j) * p->k_pe_stride;
        double score = 0;
        for (size_t c = 0; c < p->nope; c++) {
            score += (double)q[c] * k[c];
        }
        for (size_t c = 0; c < p->rope; c++) {
            score += (double)q[p->nope + c] * k_pe[c];
        }
        scores[j] = score * p->scale;
    }
    double lse = softmax(scores, count);
    float *out = (float *)p->out + (query * p->heads + head) * p->v_dim;
    for (size_t c = 0; c < p->v_dim; c++) {
        double sum = 0;
        for (size_t j = 0; j < count; j++) {
            const float *kv = (const float *)p->kv + ((key0 + j) * p->heads + head) * kv_width;
            sum += scores[j] * kv[p->nope + c];
        }
        out[c] = (float)sum;
    }
    return lse;
}

sl_status_t sl_ref_attn_prefill(sl_device_t *device, sl_stream_t *stream,
                                const sl_attn_prefill_t *p)
{
    (void)device, (void)stream;
    double *scores;
    SL_TRY(take_scores((size_t)p->k_begin[p->sequences], &scores));
    for (uint32_t s = 0; s < p->sequences; s++) {
        int64_t queries = p->q_begin[s + 1] - p->q_begin[s];
        int64_t keys = p->k_begin[s + 1] - p->k_begin[s];
        for (int64_t i = 0; i < queries; i++) {
            int64_t visible = p->causal ? keys - queries + i + 1 : keys;
            visible = visible < 0 ? 0 : visible;
            for (size_t head = 0; head < p->heads; head++) {
                size_t query = (size_t)(p->q_begin[s] + i);
                double lse = attend(p, query, head, (size_t)p->k_begin[s], (size_t)visible, scores);
                if (p->lse != NULL) {
                    p->lse[query * p->heads + head] = (float)lse;
                }
            }
        }
    }
    free(scores);
    return SL_OK;
}

sl_status_t sl_ref_attn_merge(sl_device_t *device, sl_stream_t *stream, const sl_attn_merge_t *p)
{
    (void)device, (void)stream;
    float *out = p->out;
    const float *other = p->other_out;
    for (size_t i = 0; i < (size_t)p->rows * p->heads; i++) {
        double a = p->lse[i], b = p->other_lse[i];
        if (b == -INFINITY) {
            continue; /* nothing to add; `other` is 0 there */
        }
        double max = a > b ? a : b;
        double sum = exp(a - max) + exp(b - max);
        for (size_t c = i * p->v_dim; c < (i + 1) * p->v_dim; c++) {
            out[c] = (float)((exp(a - max) * out[c] + exp(b - max) * other[c]) / sum);
        }
        p->lse[i] = (float)(max + log(sum));
    }
    return SL_OK;
}

static const float *request_token(const sl_attn_absorbed_t *p, size_t request, uint32_t token)
{
    uint32_t page_tokens = p->cache.page_tokens;
    SL_ASSERT(p->page_begin[request] >= 0);
    int32_t page = p->pages[(size_t)p->page_begin[request] + token / page_tokens];
    SL_ASSERT(page >= 0 && (uint32_t)page < p->cache.page_count);
    return sl_host_cached_token(&p->cache, p->layer, (uint32_t)page, token % page_tokens);
}

static double absorbed_score(const sl_attn_absorbed_t *p, size_t row, size_t head,
                             const float *token)
{
    const float *latent = (const float *)p->q_latent + (row * p->heads + head) * p->kv_lora;
    const float *rope =
        (const float *)p->q_rope + row * p->q_rope_row_stride + head * p->q_rope_head_stride;
    double score = 0;
    for (size_t c = 0; c < p->kv_lora; c++) {
        score += (double)latent[c] * token[c];
    }
    for (size_t c = p->kv_lora; c < p->cache.width; c++) {
        score += (double)rope[c - p->kv_lora] * token[c];
    }
    return score;
}

sl_status_t sl_ref_attn_absorbed(sl_device_t *device, sl_stream_t *stream,
                                 const sl_attn_absorbed_t *p)
{
    (void)device, (void)stream;
    double *scores;
    int32_t longest = 0;
    for (size_t t = 0; t < p->rows; t++) {
        SL_ASSERT(p->kv_len[t] >= 0);
        longest = p->kv_len[t] > longest ? p->kv_len[t] : longest;
    }
    SL_TRY(take_scores((size_t)longest, &scores));
    for (size_t t = 0; t < p->rows; t++) {
        size_t request = p->row_request != NULL ? (size_t)p->row_request[t] : t;
        uint32_t tokens = (uint32_t)p->kv_len[t];
        for (size_t i = 0; i < p->heads; i++) {
            float *out = (float *)p->out + (t * p->heads + i) * p->kv_lora;
            for (uint32_t j = 0; j < tokens; j++) {
                scores[j] = absorbed_score(p, t, i, request_token(p, request, j)) * p->scale;
            }
            softmax(scores, tokens);
            for (size_t c = 0; c < p->kv_lora; c++) {
                double sum = 0;
                for (uint32_t j = 0; j < tokens; j++) {
                    sum += scores[j] * request_token(p, request, j)[c];
                }
                out[c] = (float)sum;
            }
        }
    }
    free(scores);
    return SL_OK;
}
