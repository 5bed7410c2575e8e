/* Buffers and parameters of each operation's cases. Products' weights are scaled so that outputs
 * are of order 1, which is what the tolerances are meant for. */
#include <math.h>
#include <string.h>

#include "tests/ops/bind.h"
#include "tests/ops/bind_internal.h"

static int32_t *random_ids(bind_t *b, size_t count, uint32_t limit)
{
    int32_t *ids = bind_host(b, count * sizeof(int32_t));
    for (size_t i = 0; i < count; i++) {
        ids[i] = (int32_t)(bind_random(b) % limit);
    }
    return ids;
}

/* MAPPED: two of three ids are of `previous`, in reverse. */
static void bind_embed(bind_t *b, const op_case_t *c)
{
    int32_t *ids = random_ids(b, c->rows, c->k), *previous = random_ids(b, c->rows, c->k);
    for (uint32_t t = 0; (c->flags & MAPPED) && t < c->rows; t++) {
        ids[t] = t % 3 != 1 ? -(int32_t)(c->rows - t) : ids[t];
    }
    b->params.embed = (sl_embed_t){
        .out = bind_out(b, KIND_ACT, (size_t)c->rows * c->n),
        .ids = bind_in(b, KIND_I32, c->rows, ids),
        .previous = c->flags & MAPPED ? bind_in(b, KIND_I32, c->rows, previous) : NULL,
        .table = bind_random_in(b, KIND_WT, (size_t)c->k * c->n, 1),
        .rows = c->rows,
        .width = c->n,
    };
    b->bytes = 8.0 * c->rows * c->n; /* not the whole table */
}

static void bind_take_rows(bind_t *b, const op_case_t *c)
{
    b->params.take_rows = (sl_take_rows_t){
        .out = bind_out(b, KIND_ACT, (size_t)c->rows * c->n),
        .x = bind_random_in(b, KIND_ACT, (size_t)c->k * c->n, 1),
        .index = bind_in(b, KIND_I32, c->rows, random_ids(b, c->rows, c->k)),
        .rows = c->rows,
        .width = c->n,
    };
}

static void bind_rms_norm(bind_t *b, const op_case_t *c)
{
    uint32_t x_stride = c->flags & STRIDED ? c->n + 3 : c->n;
    uint32_t out_stride = c->flags & STRIDED ? c->n + 5 : c->n;
    size_t count = (size_t)c->rows * x_stride;
    sl_rms_norm_t *p = &b->params.rms_norm;
    *p = (sl_rms_norm_t){.rows = c->rows, .width = c->n, .eps = 1e-6f};
    if (c->flags & STRIDED) {
        p->x_stride = x_stride;
        p->out_stride = out_stride;
    }
    if (c->flags & ALIASED) {
        p->out = bind_random_inout(b, KIND_ACT, count, 2);
        p->x = p->out;
    } else {
        p->out = bind_out(b, KIND_ACT, (size_t)c->rows * out_stride);
        p->x = c->flags & NO_X ? NULL : bind_random_in(b, KIND_ACT, count, 2);
    }
    if (c->flags & RESIDUAL) {
        p->residual = bind_random_inout(b, KIND_ACT, (size_t)c->rows * c->n, 2);
    }
    p->weight = bind_random_in(b, KIND_WT, c->n, 1);
}

static void bind_linear(bind_t *b, const op_case_t *c)
{
    bool strided = c->flags & STRIDED, f32 = c->flags & F32_OUT;
    size_t x_stride = strided ? c->k + 3 : c->k, out_stride = strided ? c->n + 5 : c->n;
    b->params.linear = (sl_linear_t){
        .out = bind_out(b, f32 ? KIND_F32 : KIND_ACT, c->rows * out_stride),
        .x = bind_random_in(b, KIND_ACT, c->rows * x_stride, 1),
        .w = bind_random_in(b, KIND_WT, (size_t)c->n * c->k, 2 / sqrtf((float)c->k)),
        .rows = c->rows,
        .n = c->n,
        .k = c->k,
        .x_stride = strided ? (uint32_t)x_stride : 0,
        .out_stride = strided ? (uint32_t)out_stride : 0,
        .out_f32 = f32,
    };
}

static void bind_head_linear(bind_t *b, const op_case_t *c)
{
    uint32_t gap = c->flags & STRIDED ? 2 : 0;
    uint32_t x_head = c->k + gap, out_head = c->n + gap;
    uint32_t x_row = c->heads * x_head + gap, out_row = c->heads * out_head + gap;
    b->params.head_linear = (sl_head_linear_t){
        .out = bind_out(b, KIND_ACT, (size_t)c->rows * out_row),
        .x = bind_random_in(b, KIND_ACT, (size_t)c->rows * x_row, 1),
        .w = bind_random_in(b, KIND_WT, (size_t)c->heads * c->n * c->k, 2 / sqrtf((float)c->k)),
        .rows = c->rows,
        .heads = c->heads,
        .n = c->n,
        .k = c->k,
        .x_row_stride = x_row,
        .x_head_stride = x_head,
        .out_row_stride = out_row,
        .out_head_stride = out_head,
    };
}

/* Angles are rounded like inputs; every backend reads the same table. */
static float *cos_sin_table(bind_t *b, size_t positions, size_t rope)
{
    float *table = bind_host(b, positions * rope * sizeof(float));
    for (size_t t = 0; t < positions; t++) {
        for (size_t j = 0; j < rope / 2; j++) {
            double angle = (double)t * pow(10000, -2.0 * (double)j / (double)rope);
            table[t * rope + j] = (float)cos(angle);
            table[t * rope + rope / 2 + j] = (float)sin(angle);
        }
    }
    return table;
}

static void bind_rope_cache(bind_t *b, const op_case_t *c)
{
    uint32_t width = c->kv_lora + c->rope, head = c->nope + c->rope, layers = 3;
    uint32_t q_stride = c->heads * head + (c->flags & STRIDED ? 7 : 0);
    uint32_t pages = c->rows / c->page_tokens + 2, positions = 300;
    int32_t *order = bind_shuffled(b, (size_t)pages * c->page_tokens);
    int64_t *slots = bind_host(b, c->rows * sizeof(int64_t));
    for (uint32_t t = 0; t < c->rows; t++) {
        slots[t] = t % 4 == 2 ? -1 : order[t];
    }
    size_t cached = (size_t)pages * layers * c->page_tokens * width;
    b->params.rope_cache = (sl_rope_cache_t){
        .q = bind_random_inout(b, KIND_ACT, (size_t)c->rows * q_stride, 1),
        .latent = bind_random_inout(b, KIND_ACT, (size_t)c->rows * width, 1),
        .norm_weight = bind_random_in(b, KIND_WT, c->kv_lora, 1),
        .positions = bind_in(b, KIND_I32, c->rows, random_ids(b, c->rows, positions)),
        .cos_sin = bind_in(b, KIND_F32, (size_t)positions * c->rope,
                           cos_sin_table(b, positions, c->rope)),
        .slots = bind_in(b, KIND_RAW, c->rows * sizeof(int64_t), slots),
        .cache = {.base = bind_inout(b, KIND_ACT, cached, bind_nans(b, cached)),
                  .page_count = pages,
                  .layers = layers,
                  .page_tokens = c->page_tokens,
                  .width = width},
        .layer = 1,
        .rows = c->rows,
        .heads = c->heads,
        .nope = c->nope,
        .rope = c->rope,
        .kv_lora = c->kv_lora,
        .q_stride = c->flags & STRIDED ? q_stride : 0,
        .eps = 1e-6f,
    };
}

/* A cache, and the list of its requests' pages (host memory). */
typedef struct {
    sl_cache_t cache;
    int32_t *pages, *page_begin; /* [page_count], [requests] */
    uint32_t page_count;
} cached_t;

/* The first `tokens` tokens of a request into `values`, in these pages. */
static void fill_pages(bind_t *b, const sl_cache_t *cache, uint32_t layer, float *values,
                       const int32_t *pages, int32_t tokens)
{
    for (uint32_t j = 0; j < (uint32_t)tokens; j++) {
        size_t page = (size_t)pages[j / cache->page_tokens];
        size_t at = (page * cache->layers + layer) * cache->page_tokens + j % cache->page_tokens;
        float *token = bind_floats(b, cache->width, 1);
        memcpy(values + at * cache->width, token, cache->width * sizeof(float));
        b->host_count--; /* bind_host's last: given back at once, there may be thousands */
        free(token);
    }
}

/* A cache of NaN with the first `tokens[r]` tokens of request r filled in, in shuffled pages.
 * Garbage are: page ids before, between and after those of the requests, and where the pages of a
 * request without tokens begin. */
static cached_t bind_cache(bind_t *b, const op_case_t *c, uint32_t layer, uint32_t requests,
                           const int32_t *tokens)
{
    enum { GAP = 2 };
    cached_t cached = {.cache = {.page_count = 1,
                                 .layers = 2,
                                 .page_tokens = c->page_tokens,
                                 .width = c->kv_lora + c->rope}};
    sl_cache_t *cache = &cached.cache;
    for (uint32_t r = 0; r < requests; r++) {
        cache->page_count += ((uint32_t)tokens[r] + c->page_tokens - 1) / c->page_tokens;
    }
    cached.page_count = cache->page_count - 1 + GAP * (requests + 1);
    cached.pages = bind_host(b, cached.page_count * sizeof(int32_t));
    cached.page_begin = bind_host(b, requests * sizeof(int32_t));
    for (uint32_t i = 0; i < cached.page_count; i++) {
        cached.pages[i] = BIND_GARBAGE_PAGE;
    }
    size_t count = (size_t)cache->page_count * cache->layers * cache->page_tokens * cache->width;
    float *values = bind_nans(b, count);
    int32_t *order = bind_shuffled(b, cache->page_count);
    uint32_t used = 0, at = GAP;
    for (uint32_t r = 0; r < requests; r++, at += GAP) {
        cached.page_begin[r] = tokens[r] > 0 ? (int32_t)at : BIND_GARBAGE_PAGE;
        int32_t *pages = cached.pages + at;
        for (uint32_t i = 0; i * c->page_tokens < (uint32_t)tokens[r]; i++) {
            cached.pages[at++] = order[used++];
        }
        fill_pages(b, cache, layer, values, pages, tokens[r]);
    }
    cache->base = bind_in(b, KIND_ACT, count, values);
    return cached;
}

static void bind_gather_latents(bind_t *b, const op_case_t *c)
{
    int32_t first = c->lens[0], count = c->lens[1], tokens = first + count;
    cached_t cached = bind_cache(b, c, 1, 1, &tokens);
    const int32_t *pages = bind_in(b, KIND_I32, cached.page_count, cached.pages);
    b->params.gather_latents = (sl_gather_latents_t){
        .out = bind_out(b, KIND_ACT, (size_t)count * cached.cache.width),
        .cache = cached.cache,
        .layer = 1,
        .pages = pages + (tokens > 0 ? cached.page_begin[0] : 0),
        .first = (uint32_t)first,
        .count = (uint32_t)count,
    };
}

static void bind_attn_prefill(bind_t *b, const op_case_t *c)
{
    uint32_t sequences = c->len_count / 2, latent = c->kv_lora + c->rope;
    int32_t *q_begin = bind_host(b, (sequences + 1) * sizeof(int32_t));
    int32_t *k_begin = bind_host(b, (sequences + 1) * sizeof(int32_t));
    for (uint32_t s = 0; s < sequences; s++) {
        q_begin[s + 1] = q_begin[s] + c->lens[2 * s];
        k_begin[s + 1] = k_begin[s] + c->lens[2 * s + 1];
    }
    size_t queries = (size_t)q_begin[sequences], keys = (size_t)k_begin[sequences];
    /* k_pe lies inside the latents, whose other part the operation must not use. */
    float *latents = bind_floats(b, keys * latent, 1);
    for (size_t i = 0; i < keys * latent; i++) {
        latents[i] = i % latent < c->kv_lora ? NAN : latents[i];
    }
    size_t key_width = (size_t)c->heads * (c->nope + c->v_dim);
    float *kv = bind_floats(b, keys * key_width, 1);
    for (uint32_t s = 1; c->flags & NAN_BETWEEN && s < sequences; s += 2) {
        for (size_t i = (size_t)k_begin[s] * key_width; i < (size_t)k_begin[s + 1] * key_width;
             i++) {
            kv[i] = NAN;
        }
    }
    sl_attn_prefill_t *p = &b->params.attn_prefill;
    *p = (sl_attn_prefill_t){
        .out = bind_out(b, KIND_ACT, queries * c->heads * c->v_dim),
        .lse = c->flags & WITH_LSE ? bind_out(b, KIND_F32, queries * c->heads) : NULL,
        .q = bind_random_in(b, KIND_ACT, queries * c->heads * (c->nope + c->rope), 2),
        .kv = bind_in(b, KIND_ACT, keys * key_width, kv),
        .q_begin = bind_in(b, KIND_I32, sequences + 1, q_begin),
        .k_begin = bind_in(b, KIND_I32, sequences + 1, k_begin),
        .host_q_begin = q_begin,
        .host_k_begin = k_begin,
        .sequences = sequences,
        .heads = c->heads,
        .nope = c->nope,
        .rope = c->rope,
        .v_dim = c->v_dim,
        .k_pe_stride = latent,
        .causal = c->flags & CAUSAL,
        .scale = 1 / sqrtf((float)(c->nope + c->rope)),
    };
    size_t act_bytes = b->ops->act_dtype == SL_DTYPE_F32 ? 4 : 2;
    p->k_pe = (char *)bind_in(b, KIND_ACT, keys * latent, latents) + c->kv_lora * act_bytes;
}

/* Every third pair has nothing on the first side, every fifth nothing on the other. */
static void bind_attn_merge(bind_t *b, const op_case_t *c)
{
    size_t pairs = (size_t)c->rows * c->heads, width = c->v_dim;
    float *out = bind_floats(b, pairs * width, 1), *other = bind_floats(b, pairs * width, 1);
    float *lse = bind_floats(b, pairs, 30), *other_lse = bind_floats(b, pairs, 30);
    for (size_t i = 0; i < pairs; i++) {
        if (i % 3 == 1) {
            lse[i] = -INFINITY;
            memset(out + i * width, 0, width * sizeof(float));
        }
        if (i % 5 == 2) {
            other_lse[i] = -INFINITY;
            memset(other + i * width, 0, width * sizeof(float));
        }
    }
    b->params.attn_merge = (sl_attn_merge_t){
        .out = bind_inout(b, KIND_ACT, pairs * width, out),
        .lse = bind_inout(b, KIND_F32, pairs, lse),
        .other_out = bind_in(b, KIND_ACT, pairs * width, other),
        .other_lse = bind_in(b, KIND_F32, pairs, other_lse),
        .rows = c->rows,
        .heads = c->heads,
        .v_dim = c->v_dim,
    };
}

/* Lengths are those of the requests. MAPPED: rows in other order than requests, and two rows a
 * request, the second seeing one token less. */
static void bind_attn_absorbed(bind_t *b, const op_case_t *c)
{
    uint32_t requests = c->len_count, rows = c->flags & MAPPED ? 2 * requests : requests;
    int32_t *map = bind_host(b, rows * sizeof(int32_t));
    int32_t *kv_len = bind_host(b, rows * sizeof(int32_t));
    for (uint32_t t = 0; t < rows; t++) {
        uint32_t request = t < requests ? t : rows - 1 - t;
        int32_t tokens = c->lens[request];
        map[t] = (int32_t)request;
        kv_len[t] = t < requests || tokens == 0 ? tokens : tokens - 1;
    }
    cached_t cached = bind_cache(b, c, 1, requests, c->lens);
    /* The rope parts lie at the end of each head's projected query. */
    uint32_t head = c->nope + c->rope;
    size_t act_bytes = b->ops->act_dtype == SL_DTYPE_F32 ? 4 : 2;
    const char *q = bind_random_in(b, KIND_ACT, (size_t)rows * c->heads * head, 2);
    b->params.attn_absorbed = (sl_attn_absorbed_t){
        .out = bind_out(b, KIND_ACT, (size_t)rows * c->heads * c->kv_lora),
        .q_latent = bind_random_in(b, KIND_ACT, (size_t)rows * c->heads * c->kv_lora, 2),
        .q_rope = q + c->nope * act_bytes,
        .q_rope_row_stride = c->heads * head,
        .q_rope_head_stride = head,
        .cache = cached.cache,
        .layer = 1,
        .pages = bind_in(b, KIND_I32, cached.page_count, cached.pages),
        .page_begin = bind_in(b, KIND_I32, requests, cached.page_begin),
        .row_request = c->flags & MAPPED ? bind_in(b, KIND_I32, rows, map) : NULL,
        .kv_len = bind_in(b, KIND_I32, rows, kv_len),
        .rows = rows,
        .heads = c->heads,
        .kv_lora = c->kv_lora,
        .scale = 1 / sqrtf((float)(c->nope + c->rope)),
    };
}

/* Logits of order 1, or of a handful of values so that ties are everywhere. */
static float *logits_of(bind_t *b, size_t count, bool ties, float scale)
{
    float *logits = bind_floats(b, count, scale);
    for (size_t i = 0; ties && i < count; i++) {
        logits[i] = roundf(logits[i]);
    }
    return logits;
}

static void bind_route(bind_t *b, const op_case_t *c)
{
    size_t pairs = (size_t)c->rows * c->top_k, scores = (size_t)c->rows * c->experts;
    float *logits = logits_of(b, scores, c->flags & TIES, 3);
    /* Biases down to -1.5 make most of the biased scores negative. */
    float *bias = logits_of(b, c->experts, c->flags & TIES, 1);
    for (uint32_t e = 0; e < c->experts; e++) {
        bias[e] -= 0.5f;
    }
    uint8_t *valid = bind_host(b, c->rows);
    for (uint32_t t = 0; t < c->rows; t++) {
        valid[t] = t % 5 != 3;
    }
    b->params.route = (sl_route_t){
        .ids = bind_out(b, KIND_I32, pairs),
        .weights = bind_out(b, KIND_F32, pairs),
        .logits = bind_in(b, KIND_F32, scores, logits),
        .bias = c->method == SL_TOPK_NOAUX_TC ? bind_in(b, KIND_F32, c->experts, bias) : NULL,
        .row_valid = c->flags & SOME_INVALID ? bind_in(b, KIND_RAW, c->rows, valid) : NULL,
        .rows = c->rows,
        .experts = c->experts,
        .top_k = c->top_k,
        .n_group = c->n_group,
        .topk_group = c->topk_group,
        .method = c->method,
        .scoring = c->flags & SIGMOID ? SL_SCORE_SIGMOID : SL_SCORE_SOFTMAX,
        .norm_topk_prob = c->flags & NORMALISED,
        .scaling = 2.5f,
    };
}

static void bind_moe_permute(bind_t *b, const op_case_t *c)
{
    size_t pairs = (size_t)c->rows * c->top_k;
    int32_t *ids = random_ids(b, pairs, c->experts);
    for (size_t i = 0; (c->flags & SOME_INVALID) && i < pairs; i++) {
        ids[i] = i / c->top_k % 4 == 1 || ids[i] == 3 ? -1 : ids[i]; /* expert 3 gets nothing */
    }
    b->params.moe_permute = (sl_moe_permute_t){
        .x_sorted = bind_out(b, KIND_ACT, pairs * c->n),
        .expert_begin = bind_out(b, KIND_I32, c->experts + 1),
        .sorted_row = bind_out(b, KIND_I32, pairs),
        .ids = bind_in(b, KIND_I32, pairs, ids),
        .x = bind_random_in(b, KIND_ACT, (size_t)c->rows * c->n, 1),
        .rows = c->rows,
        .top_k = c->top_k,
        .experts = c->experts,
        .width = c->n,
    };
}

/* Rows of each expert: as the case lists them, or `rows` that each chose one at random. Two rows
 * more than the experts use; they must stay as they are. */
static void bind_grouped_linear(bind_t *b, const op_case_t *c)
{
    uint32_t experts = c->len_count != 0 ? c->len_count : c->experts, idle = 0;
    int32_t *lens = bind_host(b, experts * sizeof(int32_t));
    int32_t *begin = bind_host(b, (experts + 1) * sizeof(int32_t));
    memcpy(lens, c->lens, c->len_count * sizeof(int32_t));
    for (uint32_t i = 0; c->len_count == 0 && i < c->rows; i++) {
        lens[bind_random(b) % experts]++;
    }
    for (uint32_t e = 0; e < experts; e++) {
        begin[e + 1] = begin[e] + lens[e];
        idle += lens[e] == 0;
    }
    uint32_t rows = (uint32_t)begin[experts], max_rows = rows + 2;
    b->params.grouped_linear = (sl_grouped_linear_t){
        .out = bind_out(b, KIND_ACT, (size_t)max_rows * c->n),
        .x = bind_random_in(b, KIND_ACT, (size_t)max_rows * c->k, 1),
        .w = bind_random_in(b, KIND_WT, (size_t)experts * c->n * c->k, 2 / sqrtf((float)c->k)),
        .expert_begin = bind_in(b, KIND_I32, experts + 1, begin),
        .max_rows = max_rows,
        .experts = experts,
        .n = c->n,
        .k = c->k,
    };
    b->bytes -= (double)idle * c->n * c->k * (double)sl_dtype_bytes(b->ops->weight_dtype);
}

static void bind_silu_mul(bind_t *b, const op_case_t *c)
{
    size_t count = (size_t)c->rows * 2 * c->n;
    float *x = bind_floats(b, count, 4);
    for (size_t i = 0; i < count; i += 7) {
        x[i] *= 32; /* both tails of the exponential */
    }
    int32_t used = (int32_t)c->rows - 2;
    b->params.silu_mul = (sl_silu_mul_t){
        .out = bind_out(b, KIND_ACT, (size_t)c->rows * c->n),
        .x = bind_in(b, KIND_ACT, count, x),
        .row_count = c->flags & MAPPED ? bind_in(b, KIND_I32, 1, &used) : NULL,
        .rows = c->rows,
        .width = c->n,
    };
}

static void bind_moe_combine(bind_t *b, const op_case_t *c)
{
    size_t pairs = (size_t)c->rows * c->top_k, count = (size_t)c->rows * c->n;
    int32_t *sorted = bind_shuffled(b, pairs);
    for (size_t i = 0; (c->flags & SOME_INVALID) && i < pairs; i++) {
        sorted[i] = i % 3 == 1 || i / c->top_k == 2 ? -1 : sorted[i];
    }
    sl_moe_combine_t *p = &b->params.moe_combine;
    *p = (sl_moe_combine_t){
        .y = bind_random_in(b, KIND_ACT, pairs * c->n, 1),
        .sorted_row = bind_in(b, KIND_I32, pairs, sorted),
        .weights = bind_random_in(b, KIND_F32, pairs, 1),
        .rows = c->rows,
        .top_k = c->top_k,
        .width = c->n,
    };
    if (c->flags & ALIASED) {
        p->out = bind_random_inout(b, KIND_ACT, count, 1);
        p->shared = p->out;
        return;
    }
    p->out = bind_out(b, KIND_ACT, count);
    p->shared = c->flags & NO_SHARED ? NULL : bind_random_in(b, KIND_ACT, count, 1);
}

/* One kind of rule after another, so that 48 rows see each several times. */
static void make_rule(bind_t *b, sl_sample_row_t *rule, uint32_t t, uint32_t vocab)
{
    *rule = (sl_sample_row_t){
        .temperature = t % 6 == 0 ? 0 : 0.25f * (float)(t % 5 + 1),
        .top_k = t % 4 == 1 ? 1 + t % 9 : 0,
        .top_p = t % 3 == 1 ? 0.7f : 1,
        .min_p = t % 5 == 2 ? 0.1f : 0,
        .seed = 0x123456789abcdefull + t / 8,
        .position = t == 7 ? 1ull << 40 : t,
        .logprobs = (int32_t)(t % 4) * 5 - 1,
    };
    if (t % 7 == 3) {
        rule->masked_count = 3;
        for (uint32_t i = 0; i < rule->masked_count; i++) {
            rule->masked[i] = (int32_t)(bind_random(b) % vocab);
        }
        rule->masked[1] = (int32_t)vocab + 5; /* masks nothing */
    }
}

static void bind_sample(bind_t *b, const op_case_t *c)
{
    size_t count = (size_t)c->rows * c->n, rule_bytes = c->rows * sizeof(sl_sample_row_t);
    sl_sample_row_t *rules = bind_host(b, rule_bytes);
    for (uint32_t t = 0; t < c->rows; t++) {
        make_rule(b, &rules[t], t, c->n);
    }
    b->params.sample = (sl_sample_t){
        .tokens = bind_out(b, KIND_I32, c->rows),
        .logprobs = bind_out(b, KIND_LOGPROBS, c->rows),
        .logits = bind_in(b, KIND_F32, count, logits_of(b, count, c->flags & TIES, 4)),
        .rules = bind_in(b, KIND_RAW, rule_bytes, rules),
        .rows = c->rows,
        .vocab = c->n,
    };
}

static void bind_token_logprobs(bind_t *b, const op_case_t *c)
{
    size_t count = (size_t)c->rows * c->n;
    b->params.token_logprobs = (sl_token_logprobs_t){
        .out = bind_out(b, KIND_LOGPROBS, c->rows),
        .logits = bind_in(b, KIND_F32, count, logits_of(b, count, c->flags & TIES, 4)),
        .targets = bind_in(b, KIND_I32, c->rows, random_ids(b, c->rows, c->n)),
        .rows = c->rows,
        .vocab = c->n,
        .top_count = c->top_k,
    };
}

static double prefill_flops(const op_case_t *c)
{
    double pairs = 0;
    for (uint32_t i = 0; i < c->len_count; i += 2) {
        pairs += (double)c->lens[i] * c->lens[i + 1] * (c->flags & CAUSAL ? 0.5 : 1);
    }
    return 2 * pairs * c->heads * (c->nope + c->rope + c->v_dim);
}

double bind_flops(const op_case_t *c)
{
    double rows = c->rows, seen = 0;
    for (uint32_t i = 0; i < c->len_count; i++) {
        seen += c->lens[i] + (c->flags & MAPPED && c->lens[i] > 0 ? c->lens[i] - 1 : 0);
    }
    switch (c->op) {
    case OP_LINEAR:
        return 2 * rows * c->n * c->k;
    case OP_HEAD_LINEAR:
        return 2 * rows * c->heads * c->n * c->k;
    case OP_GROUPED_LINEAR:
        return 2 * (c->len_count != 0 ? seen : rows) * c->n * c->k;
    case OP_ATTN_PREFILL:
        return prefill_flops(c);
    case OP_ATTN_ABSORBED:
        return 2 * seen * c->heads * (2 * c->kv_lora + c->rope);
    default:
        return 0;
    }
}

static void bind_case(bind_t *b)
{
    static void (*const binders[OP_COUNT])(bind_t *, const op_case_t *) = {
        [OP_EMBED] = bind_embed,
        [OP_RMS_NORM] = bind_rms_norm,
        [OP_LINEAR] = bind_linear,
        [OP_HEAD_LINEAR] = bind_head_linear,
        [OP_ROPE_CACHE] = bind_rope_cache,
        [OP_GATHER_LATENTS] = bind_gather_latents,
        [OP_ATTN_PREFILL] = bind_attn_prefill,
        [OP_ATTN_MERGE] = bind_attn_merge,
        [OP_ATTN_ABSORBED] = bind_attn_absorbed,
        [OP_ROUTE] = bind_route,
        [OP_MOE_PERMUTE] = bind_moe_permute,
        [OP_GROUPED_LINEAR] = bind_grouped_linear,
        [OP_SILU_MUL] = bind_silu_mul,
        [OP_MOE_COMBINE] = bind_moe_combine,
        [OP_TAKE_ROWS] = bind_take_rows,
        [OP_SAMPLE] = bind_sample,
        [OP_TOKEN_LOGPROBS] = bind_token_logprobs,
    };
    b->random = 0x9E3779B97F4A7C15ull;
    b->flops = bind_flops(b->c);
    binders[b->c->op](b, b->c);
}

void bind_open(bind_t *b, const sl_ops_t *ops, sl_device_t *device, const op_case_t *c)
{
    *b = (bind_t){.ops = ops, .device = device, .c = c};
    bind_case(b);
}

/* Host values that the parameters hold are drawn before any floats, so they come out the same. */
void bind_open_like(bind_t *b, const bind_t *like)
{
    *b = (bind_t){.ops = like->ops, .device = like->device, .c = like->c, .like = like};
    bind_case(b);
    b->like = NULL;
}

/* A case of every operation goes through here, so a missing one cannot hide. */
#define RUN(op_upper, op_lower)                                                                    \
    case OP_##op_upper:                                                                            \
        status = b->ops->op_lower(b->device, NULL, &b->params.op_lower);                           \
        break

void bind_run(bind_t *b)
{
    sl_status_t status = SL_ERR_UNSUPPORTED;
    switch (b->c->op) {
        RUN(EMBED, embed);
        RUN(RMS_NORM, rms_norm);
        RUN(LINEAR, linear);
        RUN(HEAD_LINEAR, head_linear);
        RUN(ROPE_CACHE, rope_cache);
        RUN(GATHER_LATENTS, gather_latents);
        RUN(ATTN_PREFILL, attn_prefill);
        RUN(ATTN_MERGE, attn_merge);
        RUN(ATTN_ABSORBED, attn_absorbed);
        RUN(ROUTE, route);
        RUN(MOE_PERMUTE, moe_permute);
        RUN(GROUPED_LINEAR, grouped_linear);
        RUN(SILU_MUL, silu_mul);
        RUN(MOE_COMBINE, moe_combine);
        RUN(TAKE_ROWS, take_rows);
        RUN(SAMPLE, sample);
        RUN(TOKEN_LOGPROBS, token_logprobs);
    case OP_COUNT:
        break;
    }
    SL_ASSERT(status == SL_OK);
    SL_ASSERT(b->ops->synchronize(b->device, NULL) == SL_OK);
}
