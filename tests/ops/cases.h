/*
 * One table of shapes for every operation of kernels/ops.h: test_ops.c runs it on each backend
 * against the oracle, tests/bench/bench_ops.c times it. bind.h turns a case into buffers and a
 * parameter struct.
 */
#ifndef SL_TESTS_OPS_CASES_H
#define SL_TESTS_OPS_CASES_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"

typedef enum {
    OP_EMBED,
    OP_RMS_NORM,
    OP_LINEAR,
    OP_HEAD_LINEAR,
    OP_ROPE_CACHE,
    OP_GATHER_LATENTS,
    OP_ATTN_PREFILL,
    OP_ATTN_MERGE,
    OP_ATTN_ABSORBED,
    OP_ROUTE,
    OP_MOE_PERMUTE,
    OP_GROUPED_LINEAR,
    OP_SILU_MUL,
    OP_MOE_COMBINE,
    OP_TAKE_ROWS,
    OP_SAMPLE,
    OP_TOKEN_LOGPROBS,
    OP_COUNT
} op_t;

/* Variants; what each means to an operation stands in its bind function. */
enum {
    STRIDED = 1 << 0,       /* rows apart by more than their width */
    RESIDUAL = 1 << 1,      /* rms_norm: adds to a residual */
    NO_X = 1 << 2,          /* rms_norm: residual alone */
    ALIASED = 1 << 3,       /* out is an input */
    CAUSAL = 1 << 4,        /* attn_prefill */
    WITH_LSE = 1 << 5,      /* attn_prefill */
    MAPPED = 1 << 6,        /* attn_absorbed: row_request given; silu_mul: row_count given;
                               embed: previous given */
    SOME_INVALID = 1 << 7,  /* route: row_valid; permute, combine: ids of -1 */
    NORMALISED = 1 << 8,    /* route: norm_topk_prob */
    SIGMOID = 1 << 9,       /* route */
    TIES = 1 << 10,         /* route, sample: few distinct logits */
    NO_SHARED = 1 << 11,    /* moe_combine */
    F32_OUT = 1 << 12,      /* linear */
    BENCH = 1 << 13,        /* timed */
    BENCH_ONLY = 1 << 14,   /* too long for the tests */
    NAN_BETWEEN = 1 << 15,  /* attn_prefill: every other sequence has keys and values of NaN */
};

typedef struct {
    op_t op;
    uint32_t rows, n, k;                    /* n: columns of a product, or the width */
    uint32_t heads, nope, rope, v_dim, kv_lora;
    uint32_t page_tokens;
    uint32_t experts, top_k, n_group, topk_group;
    sl_topk_method_t method;
    int32_t lens[16]; /* lengths; attn_prefill: queries and keys in turn */
    uint32_t len_count;
    uint32_t flags;
} op_case_t;

extern const op_case_t op_cases[];
extern const size_t op_case_count;

const char *op_name(op_t op);

/* Shape and flags of a case, for messages. */
void op_case_describe(const op_case_t *c, char *text, size_t size);

#endif
