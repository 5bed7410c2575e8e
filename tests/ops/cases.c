/* The table. Products: one row, odd shapes, lane and tile boundaries; attention: block and page
 * boundaries, the real head geometry (512/64/128/128) and a tiny one; nothing at all. */
#include "tests/ops/cases.h"

#include <stdio.h>

#define REAL .nope = 128, .rope = 64, .v_dim = 128, .kv_lora = 512
#define TINY .nope = 16, .rope = 8, .v_dim = 24, .kv_lora = 16
#define LENS(count, ...) .len_count = (count), .lens = {__VA_ARGS__}

const op_case_t op_cases[] = {
    {OP_EMBED, .rows = 0, .n = 8, .k = 4},
    {OP_EMBED, .rows = 1, .n = 1, .k = 1},
    {OP_EMBED, .rows = 67, .n = 256, .k = 4096, .flags = BENCH},
    {OP_EMBED, .rows = 1, .n = 8, .k = 5, .flags = MAPPED},
    {OP_EMBED, .rows = 13, .n = 37, .k = 50, .flags = MAPPED},
    {OP_EMBED, .rows = 67, .n = 256, .k = 4096, .flags = MAPPED},

    {OP_RMS_NORM, .rows = 0, .n = 16},
    {OP_RMS_NORM, .rows = 1, .n = 1},
    {OP_RMS_NORM, .rows = 3, .n = 17},
    {OP_RMS_NORM, .rows = 5, .n = 63, .flags = RESIDUAL},
    {OP_RMS_NORM, .rows = 4, .n = 256, .flags = RESIDUAL | NO_X},
    {OP_RMS_NORM, .rows = 3, .n = 40, .flags = STRIDED},
    {OP_RMS_NORM, .rows = 3, .n = 40, .flags = STRIDED | RESIDUAL},
    {OP_RMS_NORM, .rows = 7, .n = 65, .flags = ALIASED},
    {OP_RMS_NORM, .rows = 7, .n = 65, .flags = ALIASED | RESIDUAL},
    {OP_RMS_NORM, .rows = 64, .n = 2048, .flags = RESIDUAL | BENCH},

    {OP_LINEAR, .rows = 0, .n = 8, .k = 8},
    {OP_LINEAR, .rows = 1, .n = 1, .k = 1},
    {OP_LINEAR, .rows = 1, .n = 7, .k = 3},
    {OP_LINEAR, .rows = 2, .n = 5, .k = 15},
    {OP_LINEAR, .rows = 3, .n = 4, .k = 16},
    {OP_LINEAR, .rows = 4, .n = 9, .k = 17},
    {OP_LINEAR, .rows = 5, .n = 33, .k = 31, .flags = STRIDED},
    {OP_LINEAR, .rows = 66, .n = 70, .k = 129, .flags = STRIDED | F32_OUT},
    {OP_LINEAR, .rows = 11, .n = 3, .k = 4999},
    {OP_LINEAR, .rows = 65, .n = 576, .k = 256, .flags = F32_OUT},
    {OP_LINEAR, .rows = 1, .n = 4096, .k = 256, .flags = BENCH},
    {OP_LINEAR, .rows = 1, .n = 576, .k = 2048, .flags = BENCH | BENCH_ONLY},
    {OP_LINEAR, .rows = 8, .n = 1024, .k = 256, .flags = BENCH | BENCH_ONLY},
    {OP_LINEAR, .rows = 64, .n = 1024, .k = 256, .flags = BENCH | BENCH_ONLY},
    {OP_LINEAR, .rows = 512, .n = 2048, .k = 2048, .flags = BENCH | BENCH_ONLY},

    {OP_HEAD_LINEAR, .rows = 0, .heads = 2, .n = 8, .k = 8},
    {OP_HEAD_LINEAR, .rows = 1, .heads = 1, .n = 1, .k = 1},
    {OP_HEAD_LINEAR, .rows = 5, .heads = 3, .n = 17, .k = 16, .flags = STRIDED},
    {OP_HEAD_LINEAR, .rows = 4, .heads = 4, .n = 16, .k = 24},
    {OP_HEAD_LINEAR, .rows = 3, .heads = 4, .n = 512, .k = 128, .flags = STRIDED | BENCH},
    {OP_HEAD_LINEAR, .rows = 3, .heads = 4, .n = 128, .k = 512, .flags = BENCH},

    {OP_ROPE_CACHE, .rows = 0, .heads = 2, TINY, .page_tokens = 4},
    {OP_ROPE_CACHE, .rows = 1, .heads = 1, TINY, .page_tokens = 4},
    {OP_ROPE_CACHE, .rows = 13, .heads = 3, TINY, .page_tokens = 4, .flags = STRIDED},
    {OP_ROPE_CACHE, .rows = 9, .heads = 1, .nope = 1, .rope = 2, .kv_lora = 3, .page_tokens = 5},
    {OP_ROPE_CACHE, .rows = 67, .heads = 4, REAL, .page_tokens = 64, .flags = BENCH},

    {OP_GATHER_LATENTS, TINY, .page_tokens = 4, LENS(2, 0, 0)},
    {OP_GATHER_LATENTS, TINY, .page_tokens = 4, LENS(2, 0, 1)},
    {OP_GATHER_LATENTS, TINY, .page_tokens = 4, LENS(2, 3, 6)},
    {OP_GATHER_LATENTS, TINY, .page_tokens = 4, LENS(2, 4, 4)},
    {OP_GATHER_LATENTS, REAL, .page_tokens = 64, LENS(2, 63, 131), .flags = BENCH},

    {OP_ATTN_PREFILL, .heads = 2, TINY, LENS(2, 0, 0), .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 1, TINY, LENS(2, 1, 1), .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 3, TINY, LENS(6, 5, 5, 1, 1, 34, 34), .flags = CAUSAL},
    {OP_ATTN_PREFILL, .heads = 2, TINY, LENS(8, 3, 7, 0, 4, 2, 0, 33, 130),
     .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 2, TINY, LENS(6, 3, 7, 2, 0, 40, 129), .flags = WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 2, TINY, LENS(4, 9, 4, 65, 63), .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 1, .nope = 1, .rope = 2, .v_dim = 1, .kv_lora = 1,
     LENS(4, 31, 31, 128, 257), .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 2, TINY, LENS(8, 9, 9, 5, 5, 40, 70, 6, 6),
     .flags = CAUSAL | WITH_LSE | NAN_BETWEEN},
    {OP_ATTN_PREFILL, .heads = 2, REAL, LENS(4, 17, 17, 96, 160), .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 3, REAL, LENS(8, 100, 100, 60, 60, 129, 300, 77, 77),
     .flags = CAUSAL | WITH_LSE | NAN_BETWEEN},
    {OP_ATTN_PREFILL, .heads = 2, REAL, LENS(6, 130, 65, 9, 200, 64, 129),
     .flags = WITH_LSE | NAN_BETWEEN},
    {OP_ATTN_PREFILL, .heads = 2, REAL, LENS(4, 3, 0, 70, 0), .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 2, REAL, LENS(6, 3, 0, 200, 130, 70, 70),
     .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 1, REAL, LENS(4, 140, 700, 1, 513), .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 70, REAL, LENS(4, 129, 20, 3, 5), .flags = WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 1, REAL, LENS(2, 33, 129), .flags = WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 5, REAL, LENS(6, 200, 200, 1, 300, 129, 129),
     .flags = CAUSAL | WITH_LSE},
    {OP_ATTN_PREFILL, .heads = 8, REAL, LENS(2, 512, 512),
     .flags = CAUSAL | WITH_LSE | BENCH | BENCH_ONLY},

    {OP_ATTN_MERGE, .rows = 0, .heads = 2, .v_dim = 8},
    {OP_ATTN_MERGE, .rows = 9, .heads = 3, .v_dim = 24},
    {OP_ATTN_MERGE, .rows = 64, .heads = 8, .v_dim = 128, .flags = BENCH},

    {OP_ATTN_ABSORBED, .heads = 2, TINY, .page_tokens = 4, LENS(0, 0)},
    {OP_ATTN_ABSORBED, .heads = 1, TINY, .page_tokens = 4, LENS(1, 1)},
    {OP_ATTN_ABSORBED, .heads = 3, TINY, .page_tokens = 4, LENS(8, 0, 1, 3, 4, 5, 8, 9, 0)},
    {OP_ATTN_ABSORBED, .heads = 5, TINY, .page_tokens = 4, LENS(6, 9, 2, 0, 12, 1, 7),
     .flags = MAPPED},
    {OP_ATTN_ABSORBED, .heads = 2, .nope = 4, .rope = 2, .v_dim = 4, .kv_lora = 5,
     .page_tokens = 100, LENS(4, 64, 65, 100, 199)},
    {OP_ATTN_ABSORBED, .heads = 35, TINY, .page_tokens = 64, LENS(3, 63, 64, 130)},
    {OP_ATTN_ABSORBED, .heads = 4, REAL, .page_tokens = 64, LENS(5, 1, 63, 64, 65, 200)},
    {OP_ATTN_ABSORBED, .heads = 1, REAL, .page_tokens = 64, LENS(3, 65, 0, 7), .flags = MAPPED},
    {OP_ATTN_ABSORBED, .heads = 16, REAL, .page_tokens = 64, LENS(5, 900, 0, 64, 129, 1)},
    {OP_ATTN_ABSORBED, .heads = 32, REAL, .page_tokens = 64, LENS(3, 300, 5, 65)},
    {OP_ATTN_ABSORBED, .heads = 64, REAL, .page_tokens = 64, LENS(3, 257, 64, 0)},
    {OP_ATTN_ABSORBED, .heads = 128, REAL, .page_tokens = 64, LENS(2, 191, 64), .flags = MAPPED},
    {OP_ATTN_ABSORBED, .heads = 4, REAL, .page_tokens = 64, LENS(4, 1000, 1000, 1000, 1000),
     .flags = BENCH | BENCH_ONLY},

    {OP_ROUTE, .rows = 0, .experts = 4, .top_k = 2},
    {OP_ROUTE, .rows = 3, .experts = 1, .top_k = 1},
    {OP_ROUTE, .rows = 5, .experts = 4, .top_k = 1, .flags = NORMALISED},
    {OP_ROUTE, .rows = 33, .experts = 64, .top_k = 6, .flags = SOME_INVALID},
    {OP_ROUTE, .rows = 33, .experts = 16, .top_k = 4, .flags = NORMALISED | TIES},
    {OP_ROUTE, .rows = 33, .experts = 20, .top_k = 20, .flags = TIES},
    {OP_ROUTE, .rows = 33, .experts = 160, .top_k = 6, .n_group = 8, .topk_group = 3,
     .method = SL_TOPK_GROUP_LIMITED_GREEDY, .flags = BENCH},
    {OP_ROUTE, .rows = 33, .experts = 16, .top_k = 4, .n_group = 4, .topk_group = 2,
     .method = SL_TOPK_GROUP_LIMITED_GREEDY, .flags = NORMALISED | TIES | SOME_INVALID},
    {OP_ROUTE, .rows = 33, .experts = 256, .top_k = 8, .n_group = 8, .topk_group = 4,
     .method = SL_TOPK_NOAUX_TC, .flags = NORMALISED | SIGMOID | BENCH},
    {OP_ROUTE, .rows = 33, .experts = 16, .top_k = 4, .n_group = 4, .topk_group = 1,
     .method = SL_TOPK_NOAUX_TC, .flags = SIGMOID | TIES | SOME_INVALID},
    {OP_ROUTE, .rows = 9, .experts = 8, .top_k = 3, .n_group = 8, .topk_group = 5,
     .method = SL_TOPK_NOAUX_TC, .flags = NORMALISED},
    {OP_ROUTE, .rows = 9, .experts = 8, .top_k = 3, .n_group = 1, .topk_group = 1,
     .method = SL_TOPK_NOAUX_TC, .flags = NORMALISED | SIGMOID},

    {OP_MOE_PERMUTE, .rows = 0, .top_k = 2, .experts = 4, .n = 8},
    {OP_MOE_PERMUTE, .rows = 1, .top_k = 1, .experts = 1, .n = 1},
    {OP_MOE_PERMUTE, .rows = 37, .top_k = 4, .experts = 16, .n = 19, .flags = SOME_INVALID},
    {OP_MOE_PERMUTE, .rows = 64, .top_k = 6, .experts = 64, .n = 256, .flags = BENCH},

    {OP_GROUPED_LINEAR, .n = 8, .k = 8, LENS(3, 0, 0, 0)},
    {OP_GROUPED_LINEAR, .n = 1, .k = 1, LENS(1, 1)},
    {OP_GROUPED_LINEAR, .n = 13, .k = 21, LENS(6, 0, 1, 5, 0, 9, 2)},
    {OP_GROUPED_LINEAR, .n = 64, .k = 128, LENS(4, 33, 0, 4, 70)},
    {OP_GROUPED_LINEAR, .n = 136, .k = 328, LENS(3, 300, 0, 7)},
    {OP_GROUPED_LINEAR, .n = 128, .k = 72, LENS(4, 100, 45, 256, 16)},
    {OP_GROUPED_LINEAR, .n = 72, .k = 136, LENS(6, 60, 77, 90, 120, 140, 150)},
    {OP_GROUPED_LINEAR, .n = 264, .k = 72, LENS(4, 130, 3, 0, 31)},
    {OP_GROUPED_LINEAR, .n = 256, .k = 256, LENS(8, 1, 1, 0, 1, 1, 0, 0, 0), .flags = BENCH},
    {OP_GROUPED_LINEAR, .rows = 50, .experts = 20, .n = 24, .k = 40},
    /* Routed experts of DeepSeek-V2-Lite: rows are 6 a token. */
    {OP_GROUPED_LINEAR, .rows = 96, .experts = 64, .n = 2816, .k = 2048,
     .flags = BENCH | BENCH_ONLY},
    {OP_GROUPED_LINEAR, .rows = 768, .experts = 64, .n = 2816, .k = 2048,
     .flags = BENCH | BENCH_ONLY},
    {OP_GROUPED_LINEAR, .rows = 6144, .experts = 64, .n = 2816, .k = 2048,
     .flags = BENCH | BENCH_ONLY},
    {OP_GROUPED_LINEAR, .rows = 49152, .experts = 64, .n = 2816, .k = 2048,
     .flags = BENCH | BENCH_ONLY},
    {OP_GROUPED_LINEAR, .rows = 96, .experts = 64, .n = 2048, .k = 1408,
     .flags = BENCH | BENCH_ONLY},
    {OP_GROUPED_LINEAR, .rows = 768, .experts = 64, .n = 2048, .k = 1408,
     .flags = BENCH | BENCH_ONLY},
    {OP_GROUPED_LINEAR, .rows = 6144, .experts = 64, .n = 2048, .k = 1408,
     .flags = BENCH | BENCH_ONLY},
    {OP_GROUPED_LINEAR, .rows = 49152, .experts = 64, .n = 2048, .k = 1408,
     .flags = BENCH | BENCH_ONLY},

    {OP_SILU_MUL, .rows = 0, .n = 4},
    {OP_SILU_MUL, .rows = 1, .n = 1},
    {OP_SILU_MUL, .rows = 9, .n = 37, .flags = MAPPED},
    {OP_SILU_MUL, .rows = 64, .n = 512, .flags = BENCH},

    {OP_MOE_COMBINE, .rows = 0, .top_k = 2, .n = 8},
    {OP_MOE_COMBINE, .rows = 1, .top_k = 1, .n = 1, .flags = NO_SHARED},
    {OP_MOE_COMBINE, .rows = 21, .top_k = 4, .n = 33, .flags = SOME_INVALID},
    {OP_MOE_COMBINE, .rows = 21, .top_k = 3, .n = 48, .flags = SOME_INVALID | ALIASED},
    {OP_MOE_COMBINE, .rows = 21, .top_k = 3, .n = 48, .flags = SOME_INVALID | NO_SHARED},
    {OP_MOE_COMBINE, .rows = 64, .top_k = 6, .n = 2048, .flags = BENCH},

    {OP_TAKE_ROWS, .rows = 0, .n = 8, .k = 3},
    {OP_TAKE_ROWS, .rows = 1, .n = 1, .k = 1},
    {OP_TAKE_ROWS, .rows = 19, .n = 37, .k = 50},

    {OP_SAMPLE, .rows = 0, .n = 8},
    {OP_SAMPLE, .rows = 2, .n = 1},
    {OP_SAMPLE, .rows = 48, .n = 7, .flags = TIES},
    {OP_SAMPLE, .rows = 48, .n = 257},
    {OP_SAMPLE, .rows = 48, .n = 1000, .flags = TIES},
    {OP_SAMPLE, .rows = 8, .n = 4096, .flags = BENCH},

    {OP_TOKEN_LOGPROBS, .rows = 0, .n = 8, .top_k = 2},
    {OP_TOKEN_LOGPROBS, .rows = 2, .n = 1, .top_k = 5},
    {OP_TOKEN_LOGPROBS, .rows = 9, .n = 19, .top_k = 20, .flags = TIES},
    {OP_TOKEN_LOGPROBS, .rows = 9, .n = 1023, .top_k = 0},
    {OP_TOKEN_LOGPROBS, .rows = 8, .n = 4096, .top_k = 20, .flags = BENCH},
};
const size_t op_case_count = sizeof(op_cases) / sizeof(op_cases[0]);

const char *op_name(op_t op)
{
    static const char *const names[OP_COUNT] = {
        [OP_EMBED] = "embed",
        [OP_RMS_NORM] = "rms_norm",
        [OP_LINEAR] = "linear",
        [OP_HEAD_LINEAR] = "head_linear",
        [OP_ROPE_CACHE] = "rope_cache",
        [OP_GATHER_LATENTS] = "gather_latents",
        [OP_ATTN_PREFILL] = "attn_prefill",
        [OP_ATTN_MERGE] = "attn_merge",
        [OP_ATTN_ABSORBED] = "attn_absorbed",
        [OP_ROUTE] = "route",
        [OP_MOE_PERMUTE] = "moe_permute",
        [OP_GROUPED_LINEAR] = "grouped_linear",
        [OP_SILU_MUL] = "silu_mul",
        [OP_MOE_COMBINE] = "moe_combine",
        [OP_TAKE_ROWS] = "take_rows",
        [OP_SAMPLE] = "sample",
        [OP_TOKEN_LOGPROBS] = "token_logprobs",
    };
    return names[op];
}

void op_case_describe(const op_case_t *c, char *text, size_t size)
{
    const struct {
        const char *name;
        uint32_t value;
    } fields[] = {
        {"rows", c->rows},     {"n", c->n},
        {"k", c->k},           {"heads", c->heads},
        {"kv_lora", c->kv_lora}, {"page", c->page_tokens},
        {"experts", c->experts}, {"top_k", c->top_k},
        {"groups", c->n_group},
    };
    int used = snprintf(text, size, "%s", op_name(c->op));
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].value != 0 && (size_t)used < size) {
            used += snprintf(text + used, size - (size_t)used, " %s=%u", fields[i].name,
                             fields[i].value);
        }
    }
    for (uint32_t i = 0; i < c->len_count && (size_t)used < size; i++) {
        used += snprintf(text + used, size - (size_t)used, "%s%d", i == 0 ? " len=" : ",",
                         c->lens[i]);
    }
    uint32_t variant = c->flags & ~(uint32_t)(BENCH | BENCH_ONLY);
    if (variant != 0 && (size_t)used < size) {
        (void)snprintf(text + used, size - (size_t)used, " flags=%#x", variant);
    }
}
