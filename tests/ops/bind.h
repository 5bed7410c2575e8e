/*
 * A case on one backend: its buffers in device memory, between guard bands; its parameter struct;
 * and what came out. Inputs are a function of the case alone and exact in bf16, so every backend
 * sees the same numbers; outputs start poisoned (NaN, or a large negative id).
 */
#ifndef SL_TESTS_OPS_BIND_H
#define SL_TESTS_OPS_BIND_H

#include "tests/ops/cases.h"

#define BIND_BUFFERS_MAX 16
#define BIND_HOSTS_MAX 32
#define BIND_POISON_ID (-1000000)
#define BIND_GARBAGE_PAGE 2147480000 /* in page lists past what is needed */

/* ACT and WT are in the backend's own types, and f32 on the host. */
typedef enum { KIND_ACT, KIND_WT, KIND_F32, KIND_I32, KIND_RAW, KIND_LOGPROBS } kind_t;

typedef struct {
    kind_t kind;
    size_t count;   /* elements; bytes for KIND_RAW */
    size_t bytes;   /* on the device, without guards */
    char *memory;   /* device: guard, data, guard */
    void *host;     /* what came out; set by bind_fetch for outputs */
    bool output;
} bind_buffer_t;

typedef struct bind {
    const sl_ops_t *ops;
    sl_device_t *device;
    const op_case_t *c;
    uint64_t random;
    const struct bind *like; /* while opened like another: whose inputs to take */
    bind_buffer_t buffers[BIND_BUFFERS_MAX];
    size_t buffer_count;
    void *hosts[BIND_HOSTS_MAX]; /* host memory freed with the binding */
    size_t host_count;
    double flops, bytes; /* of one run: bind_flops(), and bytes moved at least */
    union {
        sl_embed_t embed;
        sl_rms_norm_t rms_norm;
        sl_linear_t linear;
        sl_head_linear_t head_linear;
        sl_rope_cache_t rope_cache;
        sl_gather_latents_t gather_latents;
        sl_attn_prefill_t attn_prefill;
        sl_attn_merge_t attn_merge;
        sl_attn_absorbed_t attn_absorbed;
        sl_route_t route;
        sl_moe_permute_t moe_permute;
        sl_grouped_linear_t grouped_linear;
        sl_silu_mul_t silu_mul;
        sl_moe_combine_t moe_combine;
        sl_take_rows_t take_rows;
        sl_sample_t sample;
        sl_token_logprobs_t token_logprobs;
    } params;
} bind_t;

/* Failures of the backend abort the program: a test cannot go on without memory. */
void bind_open(bind_t *b, const sl_ops_t *ops, sl_device_t *device, const op_case_t *c);
void bind_close(bind_t *b);

/* A second binding with the inputs of `like`, which is of the same backend and has not run yet;
 * quicker than making them again. */
void bind_open_like(bind_t *b, const bind_t *like);

/* For work on large cases on the host: the cores, 16 at most, as a container's share of a large
 * machine does not show. */
int bind_threads(void);

/* Of one run of the case: multiply and add count 2; 0 of an operation that is no product. */
double bind_flops(const op_case_t *c);
void bind_run(bind_t *b);

/* False, with a message, if a guard band was written. */
bool bind_guards_intact(const bind_t *b);

/* Checks the guard bands and copies every output to the host. */
bool bind_fetch(bind_t *b);

/* NaN and infinity at the same places, the rest within tolerance * (1 + |expected|). */
bool bind_floats_agree(float got, float expected, double tolerance);

/* Whether the outputs agree, integers exactly. Says where not. Both fetched. */
bool bind_agree(const bind_t *got, const bind_t *expected, double tolerance);

/* Bit for bit. */
bool bind_equal(const bind_t *a, const bind_t *b);

#endif
