/* The table, without the routed experts' products, which tests/ops/cases.c has. A case holds 16
 * lengths at most, so decode attention has 16 requests. */
#include "tests/bench/real_cases.h"

#define HEAD .nope = 128, .rope = 64, .v_dim = 128, .kv_lora = 512
#define CACHED HEAD, .page_tokens = 64
#define TIMES_8(x) x, x, x, x, x, x, x, x
#define EACH_OF_16(x) .len_count = 16, .lens = {TIMES_8(x), TIMES_8(x)}

const op_case_t sl_real_cases[] = {
    {OP_EMBED, .rows = 8192, .n = 2048, .k = 16384},
    {OP_RMS_NORM, .rows = 128, .n = 2048, .flags = RESIDUAL},
    {OP_RMS_NORM, .rows = 8192, .n = 2048, .flags = RESIDUAL},

    {OP_LINEAR, .rows = 1, .n = 3072, .k = 2048},
    {OP_LINEAR, .rows = 128, .n = 3072, .k = 2048},
    {OP_LINEAR, .rows = 8192, .n = 3072, .k = 2048},
    {OP_LINEAR, .rows = 8192, .n = 576, .k = 2048},
    {OP_LINEAR, .rows = 8192, .n = 4096, .k = 512},
    {OP_LINEAR, .rows = 8192, .n = 64, .k = 2048, .flags = F32_OUT},
    {OP_LINEAR, .rows = 8192, .n = 5632, .k = 2048},
    {OP_LINEAR, .rows = 128, .n = 102400, .k = 2048, .flags = F32_OUT},
    {OP_HEAD_LINEAR, .rows = 128, .heads = 16, .n = 512, .k = 128},
    {OP_HEAD_LINEAR, .rows = 8192, .heads = 16, .n = 512, .k = 128},
    {OP_HEAD_LINEAR, .rows = 128, .heads = 16, .n = 128, .k = 512},
    {OP_HEAD_LINEAR, .rows = 8192, .heads = 16, .n = 128, .k = 512},

    {OP_ROPE_CACHE, .rows = 128, .heads = 16, CACHED},
    {OP_ROPE_CACHE, .rows = 8192, .heads = 16, CACHED},
    {OP_GATHER_LATENTS, CACHED, .len_count = 2, .lens = {0, 8192}},

    {OP_ATTN_PREFILL, .heads = 16, HEAD, EACH_OF_16(512), .flags = CAUSAL},
    {OP_ATTN_PREFILL, .heads = 128, HEAD, EACH_OF_16(512), .flags = CAUSAL},
    {OP_ATTN_PREFILL, .heads = 16, HEAD, .len_count = 4, .lens = {4096, 4096, 4096, 4096},
     .flags = CAUSAL},
    {OP_ATTN_MERGE, .rows = 8192, .heads = 16, .v_dim = 128},

    {OP_ATTN_ABSORBED, .heads = 16, CACHED, .len_count = 1, .lens = {4096}},
    {OP_ATTN_ABSORBED, .heads = 16, CACHED, EACH_OF_16(4096)},
    {OP_ATTN_ABSORBED, .heads = 128, CACHED, EACH_OF_16(4096)},

    {OP_ROUTE, .rows = 128, .experts = 64, .top_k = 6},
    {OP_ROUTE, .rows = 8192, .experts = 64, .top_k = 6},
    {OP_ROUTE, .rows = 8192, .experts = 160, .top_k = 6, .n_group = 8, .topk_group = 3,
     .method = SL_TOPK_GROUP_LIMITED_GREEDY},
    {OP_MOE_PERMUTE, .rows = 128, .top_k = 6, .experts = 64, .n = 2048},
    {OP_MOE_PERMUTE, .rows = 8192, .top_k = 6, .experts = 64, .n = 2048},
    {OP_SILU_MUL, .rows = 768, .n = 1408},
    {OP_SILU_MUL, .rows = 49152, .n = 1408},
    {OP_MOE_COMBINE, .rows = 128, .top_k = 6, .n = 2048},
    {OP_MOE_COMBINE, .rows = 8192, .top_k = 6, .n = 2048},

    {OP_TAKE_ROWS, .rows = 128, .n = 2048, .k = 8192},
    {OP_SAMPLE, .rows = 128, .n = 102400},
    {OP_TOKEN_LOGPROBS, .rows = 128, .n = 102400, .top_k = 20},
};
const size_t sl_real_case_count = sizeof(sl_real_cases) / sizeof(sl_real_cases[0]);
