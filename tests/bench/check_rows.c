/* Pieces of the device's buffers come to the host as f32, which every type here fits exactly. */
#include "tests/bench/check_rows.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/convert.h"
#include "tests/ops/bind_internal.h"

#define LINES_MAX 64 /* rows of a product, and columns */
#define EXPERT_ROWS_MIN 4
#define PAIRS_MAX 32
#define MESSAGES_MAX 5

typedef struct {
    bind_t *b;
    double tolerance;
    size_t wrong;
} checks_t;

/* Rows [begin, end) of x against one matrix. Pointers are the device's, strides in elements. */
typedef struct {
    const char *x, *w, *out;
    size_t x_stride, out_stride, begin, end, n, k;
    sl_dtype_t out_dtype;
} product_t;

/* One query against tokens of `width` values, whose first k_width are the key. */
typedef struct {
    float *q, *tokens; /* [k_width], [count][width] */
    size_t count, width, k_width, v_at, v_width;
    double scale;
} attention_t;

static void *take(size_t bytes)
{
    void *memory = malloc(bytes + 1);
    SL_ASSERT(memory != NULL);
    return memory;
}

/* `rows` rows of `width` elements, `stride` apart on the device and `to_stride` on the host. */
static void pull_rows(const bind_t *b, float *to, size_t to_stride, const void *from, size_t stride,
                      size_t rows, size_t width, sl_dtype_t dtype)
{
    if (rows == 0) {
        return;
    }
    size_t element = sl_dtype_bytes(dtype), bytes = ((rows - 1) * stride + width) * element;
    char *raw = take(bytes);
    SL_ASSERT(b->ops->download(b->device, NULL, raw, from, bytes) == SL_OK);
    SL_ASSERT(b->ops->synchronize(b->device, NULL) == SL_OK);
    for (size_t i = 0; i < rows; i++) {
        sl_convert_to_f32(to + i * to_stride, raw + i * stride * element, dtype, width);
    }
    free(raw);
}

static void pull(const bind_t *b, float *to, const void *from, size_t count, sl_dtype_t dtype)
{
    pull_rows(b, to, count, from, count, 1, count, dtype);
}

static void pull_ids(const bind_t *b, int32_t *to, const int32_t *from, size_t count)
{
    SL_ASSERT(b->ops->download(b->device, NULL, to, from, count * sizeof(*to)) == SL_OK);
    SL_ASSERT(b->ops->synchronize(b->device, NULL) == SL_OK);
}

/* Element `index` of a row-major or otherwise strided buffer of activations. */
static const char *act_at(const bind_t *b, const void *base, size_t index)
{
    return (const char *)base + index * sl_dtype_bytes(b->ops->act_dtype);
}

/* Number i of the `samples` <= count that stand for [0, count), ascending: the first, the last, and
 * one out of each equal part between them, at random, so that none is left out by its alignment. */
static size_t pick(bind_t *b, size_t i, size_t samples, size_t count)
{
    if (i == 0 || samples == count) {
        return i;
    }
    size_t begin = i * count / samples, end = (i + 1) * count / samples;
    return i + 1 == samples ? count - 1 : begin + bind_random(b) % (end - begin);
}

static size_t at_most(size_t count, size_t max)
{
    return count < max ? count : max;
}

/* Within tolerance * (scale + |expected|). What the two places mean is the operation's: row and
 * column, say. */
static void compare(checks_t *checks, float got, double expected, double scale, size_t row,
                    size_t place)
{
    bool same = (double)got == expected || (isnan(got) && isnan(expected));
    double error = fabs((double)got - expected);
    if (!same && !(error <= checks->tolerance * (scale + fabs(expected))) &&
        checks->wrong++ < MESSAGES_MAX) {
        fprintf(stderr, "row %zu, element %zu: got %.9g, expected %.9g\n", row, place, (double)got,
                expected);
    }
}

static double dot(const float *a, const float *b, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += (double)a[i] * b[i];
    }
    return sum;
}

static void check_product(checks_t *checks, const product_t *p, size_t rows_max)
{
    bind_t *b = checks->b;
    sl_dtype_t act = b->ops->act_dtype, wt = b->ops->weight_dtype;
    size_t rows = at_most(p->end - p->begin, rows_max), columns = at_most(p->n, LINES_MAX);
    size_t column[LINES_MAX];
    float *w = take(columns * p->k * sizeof(float));
    float *x = take(p->k * sizeof(float)), *out = take(p->n * sizeof(float));
    for (size_t j = 0; rows > 0 && j < columns; j++) {
        column[j] = pick(b, j, columns, p->n);
        pull(b, w + j * p->k, p->w + column[j] * p->k * sl_dtype_bytes(wt), p->k, wt);
    }
    for (size_t i = 0; i < rows; i++) {
        size_t row = p->begin + pick(b, i, rows, p->end - p->begin);
        pull(b, x, act_at(b, p->x, row * p->x_stride), p->k, act);
        pull(b, out, p->out + row * p->out_stride * sl_dtype_bytes(p->out_dtype), p->n,
             p->out_dtype);
        for (size_t j = 0; j < columns; j++) {
            compare(checks, out[column[j]], dot(x, w + j * p->k, p->k), 1, row, column[j]);
        }
    }
    free(w);
    free(x);
    free(out);
}

static void check_linear(checks_t *checks)
{
    const sl_linear_t *p = &checks->b->params.linear;
    product_t product = {
        .x = p->x,
        .w = p->w,
        .out = p->out,
        .x_stride = p->x_stride != 0 ? p->x_stride : p->k,
        .out_stride = p->out_stride != 0 ? p->out_stride : p->n,
        .end = p->rows,
        .n = p->n,
        .k = p->k,
        .out_dtype = p->out_f32 ? SL_DTYPE_F32 : checks->b->ops->act_dtype,
    };
    check_product(checks, &product, LINES_MAX);
}

static void check_head_linear(checks_t *checks)
{
    const bind_t *b = checks->b;
    const sl_head_linear_t *p = &b->params.head_linear;
    size_t matrix_bytes = (size_t)p->n * p->k * sl_dtype_bytes(b->ops->weight_dtype);
    for (size_t i = 0; i < p->heads; i++) {
        product_t product = {
            .x = act_at(b, p->x, i * p->x_head_stride),
            .w = (const char *)p->w + i * matrix_bytes,
            .out = act_at(b, p->out, i * p->out_head_stride),
            .x_stride = p->x_row_stride,
            .out_stride = p->out_row_stride,
            .end = p->rows,
            .n = p->n,
            .k = p->k,
            .out_dtype = b->ops->act_dtype,
        };
        check_product(checks, &product, LINES_MAX);
    }
}

/* Rows that no expert has must still be poison. */
static void check_unused_rows(checks_t *checks, const sl_grouped_linear_t *p, size_t begin)
{
    const bind_t *b = checks->b;
    float *out = take(p->n * sizeof(float));
    for (size_t row = begin; row < p->max_rows; row++) {
        pull(b, out, act_at(b, p->out, row * p->n), p->n, b->ops->act_dtype);
        for (size_t j = 0; j < p->n; j++) {
            compare(checks, out[j], NAN, 1, row, j);
        }
    }
    free(out);
}

static void check_grouped_linear(checks_t *checks)
{
    const bind_t *b = checks->b;
    const sl_grouped_linear_t *p = &b->params.grouped_linear;
    size_t matrix_bytes = (size_t)p->n * p->k * sl_dtype_bytes(b->ops->weight_dtype);
    size_t share = LINES_MAX / p->experts;
    int32_t *begin = take((p->experts + 1) * sizeof(*begin));
    pull_ids(b, begin, p->expert_begin, p->experts + 1);
    for (size_t e = 0; e < p->experts; e++) {
        product_t product = {
            .x = p->x,
            .w = (const char *)p->w + e * matrix_bytes,
            .out = p->out,
            .x_stride = p->k,
            .out_stride = p->n,
            .begin = (size_t)begin[e],
            .end = (size_t)begin[e + 1],
            .n = p->n,
            .k = p->k,
            .out_dtype = b->ops->act_dtype,
        };
        check_product(checks, &product, share > EXPERT_ROWS_MIN ? share : EXPERT_ROWS_MIN);
    }
    check_unused_rows(checks, p, (size_t)begin[p->experts]);
    free(begin);
}

/* Sets out [v_width]; returns the log-sum-exp of the scores, -inf of none. */
static double attend(const attention_t *a, double *out)
{
    double *weights = take(a->count * sizeof(double)), max = -INFINITY, sum = 0;
    for (size_t j = 0; j < a->count; j++) {
        weights[j] = dot(a->q, a->tokens + j * a->width, a->k_width) * a->scale;
        max = fmax(max, weights[j]);
    }
    for (size_t c = 0; c < a->v_width; c++) {
        out[c] = 0;
    }
    for (size_t j = 0; j < a->count; j++) {
        double weight = exp(weights[j] - max);
        sum += weight;
        for (size_t c = 0; c < a->v_width; c++) {
            out[c] += weight * a->tokens[j * a->width + a->v_at + c];
        }
    }
    for (size_t c = 0; a->count > 0 && c < a->v_width; c++) {
        out[c] /= sum;
    }
    free(weights);
    return a->count > 0 ? max + log(sum) : -INFINITY;
}

static double rms(const double *values, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += values[i] * values[i];
    }
    return sqrt(sum / (double)count);
}

/* `out_p` is the device's. Returns attend()'s. An average over thousands of random keys is far
 * below 1, and the error is held to its own size: otherwise a tile of keys left out would not show.
 */
static double check_attention(checks_t *checks, const attention_t *a, const char *out_p, size_t row,
                              size_t head)
{
    double *expected = take(a->v_width * sizeof(double));
    float *out = take(a->v_width * sizeof(float));
    double lse = attend(a, expected);
    double scale = rms(expected, a->v_width);
    pull(checks->b, out, out_p, a->v_width, checks->b->ops->act_dtype);
    for (size_t c = 0; c < a->v_width; c++) {
        compare(checks, out[c], expected[c], scale, row, head * a->v_width + c);
    }
    free(expected);
    free(out);
    return lse;
}

/* Tokens are laid out as k_pe, k_nope, v: the last two as they come, side by side. */
static void check_prefill_pair(checks_t *checks, size_t row, size_t head)
{
    const bind_t *b = checks->b;
    const sl_attn_prefill_t *p = &b->params.attn_prefill;
    sl_dtype_t act = b->ops->act_dtype;
    size_t s = 0, pair = row * p->heads + head, kv_width = p->nope + p->v_dim;
    while (row >= (size_t)p->host_q_begin[s + 1]) {
        s++;
    }
    int64_t key = p->host_k_begin[s], keys = p->host_k_begin[s + 1] - key;
    if (p->causal) {
        keys -= p->host_q_begin[s + 1] - 1 - (int64_t)row;
    }
    attention_t a = {.count = keys > 0 ? (size_t)keys : 0,
                     .width = p->rope + kv_width,
                     .k_width = p->rope + p->nope,
                     .v_at = p->rope + p->nope,
                     .v_width = p->v_dim,
                     .scale = p->scale};
    a.q = take(a.k_width * sizeof(float));
    a.tokens = take(a.count * a.width * sizeof(float));
    pull(b, a.q, act_at(b, p->q, pair * a.k_width + p->nope), p->rope, act);
    pull(b, a.q + p->rope, act_at(b, p->q, pair * a.k_width), p->nope, act);
    pull_rows(b, a.tokens, a.width, act_at(b, p->k_pe, (size_t)key * p->k_pe_stride),
              p->k_pe_stride, a.count, p->rope, act);
    pull_rows(b, a.tokens + p->rope, a.width,
              act_at(b, p->kv, ((size_t)key * p->heads + head) * kv_width), p->heads * kv_width,
              a.count, kv_width, act);
    double lse = check_attention(checks, &a, act_at(b, p->out, pair * p->v_dim), row, head);
    if (p->lse != NULL) {
        float got;
        pull(b, &got, p->lse + pair, 1, SL_DTYPE_F32);
        compare(checks, got, lse, 1, row, head);
    }
    free(a.q);
    free(a.tokens);
}

/* The first `count` cached tokens of a request. */
static void pull_tokens(const bind_t *b, float *to, size_t request, size_t count)
{
    const sl_attn_absorbed_t *p = &b->params.attn_absorbed;
    const sl_cache_t *cache = &p->cache;
    size_t page_tokens = cache->page_tokens, width = cache->width;
    int32_t begin, page;
    pull_ids(b, &begin, p->page_begin + request, 1);
    for (size_t j = 0; j < count; j += page_tokens) {
        pull_ids(b, &page, p->pages + begin + j / page_tokens, 1);
        SL_ASSERT(page >= 0 && (uint32_t)page < cache->page_count);
        size_t token = ((size_t)page * cache->layers + p->layer) * page_tokens;
        pull(b, to + j * width, act_at(b, cache->base, token * width),
             at_most(count - j, page_tokens) * width, b->ops->act_dtype);
    }
}

static void check_absorbed_pair(checks_t *checks, size_t row, size_t head)
{
    const bind_t *b = checks->b;
    const sl_attn_absorbed_t *p = &b->params.attn_absorbed;
    sl_dtype_t act = b->ops->act_dtype;
    size_t pair = row * p->heads + head;
    int32_t request = (int32_t)row, count;
    if (p->row_request != NULL) {
        pull_ids(b, &request, p->row_request + row, 1);
    }
    pull_ids(b, &count, p->kv_len + row, 1);
    attention_t a = {.count = (size_t)count,
                     .width = p->cache.width,
                     .k_width = p->cache.width,
                     .v_width = p->kv_lora,
                     .scale = p->scale};
    a.q = take(a.k_width * sizeof(float));
    a.tokens = take(a.count * a.width * sizeof(float));
    pull(b, a.q, act_at(b, p->q_latent, pair * p->kv_lora), p->kv_lora, act);
    pull(b, a.q + p->kv_lora,
         act_at(b, p->q_rope, row * p->q_rope_row_stride + head * p->q_rope_head_stride),
         a.width - p->kv_lora, act);
    if (count > 0) {
        pull_tokens(b, a.tokens, (size_t)request, a.count);
    }
    (void)check_attention(checks, &a, act_at(b, p->out, pair * p->kv_lora), row, head);
    free(a.q);
    free(a.tokens);
}

static void check_pairs(checks_t *checks, size_t rows, size_t heads,
                        void (*check)(checks_t *, size_t row, size_t head))
{
    size_t samples = at_most(rows * heads, PAIRS_MAX);
    for (size_t i = 0; i < samples; i++) {
        size_t pair = pick(checks->b, i, samples, rows * heads);
        check(checks, pair / heads, pair % heads);
    }
}

bool check_rows_agree(bind_t *b, double tolerance)
{
    checks_t checks = {.b = b, .tolerance = tolerance};
    const sl_attn_prefill_t *prefill = &b->params.attn_prefill;
    const sl_attn_absorbed_t *absorbed = &b->params.attn_absorbed;
    switch (b->c->op) {
    case OP_LINEAR:
        check_linear(&checks);
        break;
    case OP_HEAD_LINEAR:
        check_head_linear(&checks);
        break;
    case OP_GROUPED_LINEAR:
        check_grouped_linear(&checks);
        break;
    case OP_ATTN_PREFILL:
        check_pairs(&checks, (size_t)prefill->host_q_begin[prefill->sequences], prefill->heads,
                    check_prefill_pair);
        break;
    case OP_ATTN_ABSORBED:
        check_pairs(&checks, absorbed->rows, absorbed->heads, check_absorbed_pair);
        break;
    default:
        SL_ASSERT(!"an operation that is checked by rows");
    }
    return checks.wrong == 0;
}
