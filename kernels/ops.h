/*
 * The seam between the backend-blind code and the backends: one table of operations per backend.
 *
 * A device is one accelerator (or the CPU) with its memory. Every operation takes a parameter
 * struct and a stream and is asynchronous with respect to the host unless it says otherwise; the
 * CPU backends run it at once. Pointers in parameter structs are device memory, except where they
 * are marked `host`. Shapes are given as [rows][columns], row-major; a stride is in elements and 0
 * means dense. `act` is the backend's activation type (f32 on the CPU, bf16 on CUDA), `wt` its
 * weight type. T: tokens (rows), H: hidden size, h: local attention heads, E: experts, k: experts
 * a token, V: vocabulary.
 *
 * Products of the host backends are batch-invariant: a row's result does not depend, bit for bit,
 * on how many other rows are computed with it, which makes a request's tokens independent of its
 * neighbours. On CUDA that is not promised (cuBLAS chooses by shape); tests report it.
 *
 * One engine thread per device. Operations fail only with PROCESS-scope codes; a parameter that
 * breaks the contract is asserted. Source of the maths: the published modelling code of
 * DeepSeek-V2 and V3.
 */
#ifndef SL_KERNELS_OPS_H
#define SL_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/model/checkpoint.h"
#include "common/wire/sampling.h"

typedef struct sl_device sl_device_t; /* the backend's own */
typedef struct sl_stream sl_stream_t; /* NULL: the device's only stream */

typedef struct sl_graph sl_graph_t; /* recorded work, ready to be launched again */
struct sl_collectives;
struct sl_group;

#define SL_MARKS_MAX 68

typedef struct {
    int index;   /* which accelerator; 0 on the CPU */
    int threads; /* CPU: threads of the products; 0: 1 */
    /* Asked now and then while the host waits for the device: true ends the wait with
     * SL_ERR_CANCELED (a peer of the group is gone, so its collectives never end). NULL: never. */
    bool (*give_up)(void *arg);
    void *give_up_arg;
} sl_device_params_t;

/* The latent cache: page-outermost [page][layer][page_tokens][width]. Element type: act. */
typedef struct {
    void *base;
    uint32_t page_count, layers, page_tokens, width;
} sl_cache_t;

/* out[T][H] = table[ids[t]]. An id below 0 stands for previous[-1 - id]: a token that was chosen on
 * the device and may not be known to the host yet. */
typedef struct {
    void *out;               /* act [T][H] */
    const int32_t *ids;      /* [T], each below V */
    const int32_t *previous; /* as long as ids ask for, each in [0, V); NULL: no id is below 0 */
    const void *table;       /* wt [V][H] */
    uint32_t rows, width;
} sl_embed_t;

/* y = x / sqrt(mean(x^2) + eps) * weight. With `residual`: residual += x first, and y is the norm
 * of the new residual; x may be NULL then (norm of the residual as it is). */
typedef struct {
    void *out;          /* act [rows][width], may alias x */
    const void *x;      /* act [rows][width] */
    void *residual;     /* act [rows][width] or NULL; updated */
    const void *weight; /* wt [width] */
    uint32_t rows, width;
    uint32_t x_stride, out_stride; /* residual is dense */
    float eps;
} sl_rms_norm_t;

/* out[t][n] = sum_k x[t][k] * w[n][k] */
typedef struct {
    void *out;     /* act, or f32 if out_f32: [rows][n] */
    const void *x; /* act [rows][k] */
    const void *w; /* wt [n][k] dense, as a checkpoint lays it out */
    uint32_t rows, n, k;
    uint32_t x_stride, out_stride;
    bool out_f32;
} sl_linear_t;

/* For each head i: out[t][i][n] = sum_k x[t][i][k] * w[i][n][k] */
typedef struct {
    void *out;     /* act */
    const void *x; /* act */
    const void *w; /* wt [heads][n][k] dense */
    uint32_t rows, heads, n, k;
    uint32_t x_row_stride, x_head_stride;     /* both needed */
    uint32_t out_row_stride, out_head_stride; /* both needed */
} sl_head_linear_t;

/* Rotation of q and k_pe, norm of the latent, write into the cache; in one pass over the tokens.
 * Pairs are interleaved: (2j, 2j+1) rotate by position * inv_freq[j], and stay where they are. */
typedef struct {
    void *q;                  /* act [T][h][nope + rope], the rope part rotated in place */
    void *latent;             /* act [T][width]: in: kv_a output; out: norm(latent), rotated k_pe */
    const void *norm_weight;  /* wt [kv_lora] */
    const int32_t *positions; /* [T] */
    const float *cos_sin;     /* f32 [max_position][rope]: cos of rope/2 pairs, then sin */
    const int64_t *slots;     /* [T]: page * page_tokens + offset; -1: not cached */
    sl_cache_t cache;
    uint32_t layer;
    uint32_t rows, heads, nope, rope, kv_lora;
    uint32_t q_stride; /* of a token; 0: dense */
    float eps;
} sl_rope_cache_t;

/* Copies the cached latents of tokens [first, first + count) of one sequence, in order. */
typedef struct {
    void *out; /* act [count][width] */
    sl_cache_t cache;
    uint32_t layer;
    const int32_t *pages; /* the sequence's pages in token order */
    uint32_t first, count;
} sl_gather_latents_t;

/* Unabsorbed attention of variable-length sequences. Sequence s has queries [q_begin[s],
 * q_begin[s+1]) and keys [k_begin[s], k_begin[s+1]). Causal: its queries are the last ones of its
 * keys. Score = (q_nope . k_nope + q_rope . k_pe) * scale. A query without keys gives 0 and
 * lse -inf. */
typedef struct {
    void *out;        /* act [Tq][h][v_dim] */
    float *lse;       /* f32 [Tq][h], natural log; NULL: not wanted */
    const void *q;    /* act [Tq][h][nope + rope] */
    const void *kv;   /* act [Tk][h][nope + v_dim]: k_nope | v */
    const void *k_pe; /* act [Tk] rows of `rope`, k_pe_stride apart (inside the latents) */
    const int32_t *q_begin, *k_begin;           /* [sequences + 1] */
    const int32_t *host_q_begin, *host_k_begin; /* the same, host */
    uint32_t sequences, heads, nope, rope, v_dim, k_pe_stride;
    bool causal;
    float scale;
} sl_attn_prefill_t;

/* Merges two partial attentions over disjoint keys by their log-sum-exp, into the first. */
typedef struct {
    void *out;  /* act [T][h][v_dim], in and out */
    float *lse; /* f32 [T][h], in and out */
    const void *other_out;
    const float *other_lse;
    uint32_t rows, heads, v_dim;
} sl_attn_merge_t;

/* Absorbed attention over the paged latents. Row t attends to the first kv_len[t] cached tokens of
 * request row_request[t]; kv_len 0 gives 0 (a padding row). Never reads a cached token at or past
 * kv_len, nor a page table entry it does not need. */
typedef struct {
    void *out;            /* act [T][h][kv_lora] */
    const void *q_latent; /* act [T][h][kv_lora]: q_nope times W_UK */
    const void *q_rope;   /* act: the rotated parts, inside the projected queries */
    uint32_t q_rope_row_stride, q_rope_head_stride; /* both needed */
    sl_cache_t cache;
    uint32_t layer;
    const int32_t *pages;       /* page ids of all requests, one request after the other */
    const int32_t *page_begin;  /* [requests]: where in `pages` those of a request begin */
    const int32_t *row_request; /* [T]; NULL: row t is request t */
    const int32_t *kv_len;      /* [T] */
    uint32_t rows, heads, kv_lora;
    float scale;
} sl_attn_absorbed_t;

/* Expert choice. greedy: top k of the scores. group_limited_greedy: a group's score is its best
 * expert's; only the topk_group best groups compete. noaux_tc: choice by score + bias, a group's
 * score is the sum of its two best; losing groups are masked with -inf; weights are the scores
 * without bias. norm_topk_prob: weights / (sum + 1e-20) [for k > 1], then * scaling: V3 always
 * scales, V2 scales only where it does not normalise. Ties go to the lower expert index. */
typedef struct {
    int32_t *ids;             /* [T][k]; -1 in rows that are not valid */
    float *weights;           /* f32 [T][k] */
    const float *logits;      /* f32 [T][E] */
    const float *bias;        /* f32 [E]; noaux_tc only */
    const uint8_t *row_valid; /* [T]; NULL: all */
    uint32_t rows, experts, top_k, n_group, topk_group;
    sl_topk_method_t method;
    sl_scoring_func_t scoring;
    bool norm_topk_prob;
    float scaling;
} sl_route_t;

/* Sorts (token, slot) pairs by expert, stable in token order, and gathers the tokens' rows. */
typedef struct {
    void *x_sorted;        /* act [T*k][H]; rows past the last expert's end are left alone */
    int32_t *expert_begin; /* [E + 1]: rows of expert e are [begin[e], begin[e+1]) */
    int32_t *sorted_row;   /* [T][k]: where pair (t, j) went; -1 for id -1 */
    const int32_t *ids;    /* [T][k] */
    const void *x;         /* act [T][H] */
    uint32_t rows, top_k, experts, width;
} sl_moe_permute_t;

/* out[r][n] = sum_k x[r][k] * w[e][n][k] for the rows r of each expert e. */
typedef struct {
    void *out;                   /* act [max_rows][n] */
    const void *x;               /* act [max_rows][k] */
    const void *w;               /* wt [E][n][k] */
    const int32_t *expert_begin; /* [E + 1] */
    uint32_t max_rows, experts, n, k;
} sl_grouped_linear_t;

/* out[r][i] = silu(x[r][i]) * x[r][width + i] for rows [0, rows), or [0, *row_count) if given. */
typedef struct {
    void *out;                /* act [rows][width] */
    const void *x;            /* act [rows][2 * width]: gate | up */
    const int32_t *row_count; /* device; NULL: rows */
    uint32_t rows, width;
} sl_silu_mul_t;

/* out[t] = sum_j weights[t][j] * y[sorted_row[t][j]] + shared[t]; in slot order, no atomics. */
typedef struct {
    void *out;                 /* act [T][H]; may alias shared */
    const void *y;             /* act [.][H] */
    const int32_t *sorted_row; /* [T][k], -1: nothing */
    const float *weights;      /* f32 [T][k] */
    const void *shared;        /* act [T][H] or NULL */
    uint32_t rows, top_k, width;
} sl_moe_combine_t;

/* out[i] = x[index[i]] */
typedef struct {
    void *out;            /* act [rows][width] */
    const void *x;        /* act */
    const int32_t *index; /* [rows] */
    uint32_t rows, width;
} sl_take_rows_t;

#define SL_MASKED_TOKENS_MAX (SL_STOP_TOKENS_MAX + 16)

/* One row's rule for choosing a token. */
typedef struct {
    float temperature; /* 0: the largest logit, lowest id on a tie */
    uint32_t top_k;    /* 0: off */
    float top_p, min_p;
    uint64_t seed;
    uint64_t position;     /* output index: 0 for the first token after the prompt */
    int32_t logprobs;      /* -1: none; else alternatives wanted */
    uint32_t masked_count; /* ids that may not be chosen (minimum length not reached) */
    int32_t masked[SL_MASKED_TOKENS_MAX];
} sl_sample_row_t;

/*
 * Mask, temperature, then top_k, top_p and min_p on what is left, renormalised; the draw is the
 * inverse CDF in id order of one uniform number, Philox4x32-10 with key = seed and counter =
 * position: a function of (seed, position) alone. Logprobs are of the raw logits' softmax.
 */
typedef struct {
    int32_t *tokens;              /* [rows] */
    sl_logprobs_t *logprobs;      /* [rows] or NULL; set for rows that want them */
    const float *logits;          /* f32 [rows][V]; left as they are */
    const sl_sample_row_t *rules; /* [rows] */
    uint32_t rows, vocab;
} sl_sample_t;

/* Logprob of given tokens, and the best alternatives. */
typedef struct {
    sl_logprobs_t *out;     /* [rows] */
    const float *logits;    /* f32 [rows][V] */
    const int32_t *targets; /* [rows] */
    uint32_t rows, vocab, top_count;
} sl_token_logprobs_t;

/* A piece of a checkpoint's matrix in host memory (unaligned, any supported dtype). */
typedef struct {
    const void *data; /* host: element [0][0] of the piece */
    sl_dtype_t dtype;
    uint64_t rows, columns, row_stride; /* elements */
} sl_weight_source_t;

/* Made-up weights for benchmarks: out[i][j] = mean + range * u, u in [-1, 1) a function of seed and
 * of the element's place first + i * row_step + j * column_step in the whole tensor alone, so that
 * the ranks of any layout make the same model. */
typedef struct {
    void *out; /* wt [rows][columns], dense */
    uint64_t rows, columns;
    uint64_t seed, first, row_step, column_step;
    float mean, range;
} sl_dummy_weight_t;

typedef struct sl_ops {
    const char *name; /* "ref", "cpu", "cuda" */
    sl_dtype_t act_dtype, weight_dtype;
    bool host_memory; /* device memory is host memory: copies can be skipped */

    sl_status_t (*open)(const sl_device_params_t *params, sl_device_t **device_p);
    void (*close)(sl_device_t *device);
    sl_status_t (*memory)(sl_device_t *device, uint64_t *free_bytes, uint64_t *total_bytes);

    /* At start only. 256-byte aligned. The error names `what`, the bytes asked and those free. */
    sl_status_t (*alloc)(sl_device_t *device, size_t bytes, const char *what, void **memory_p);
    void (*free)(sl_device_t *device, void *memory);

    /* Host memory that uploads and downloads reach without holding up the host: it belongs to the
     * copy until the stream has come that far. At start only. */
    sl_status_t (*alloc_host)(sl_device_t *device, size_t bytes, const char *what, void **memory_p);
    void (*free_host)(sl_device_t *device, void *memory);

    /* Ordinary host memory is free again when upload returns, and filled after the next
     * synchronize(); either call may wait for the stream. alloc_host() memory: see there. */
    sl_status_t (*upload)(sl_device_t *device, sl_stream_t *stream, void *to, const void *host,
                          size_t bytes);
    sl_status_t (*download)(sl_device_t *device, sl_stream_t *stream, void *host, const void *from,
                            size_t bytes);
    sl_status_t (*synchronize)(sl_device_t *device, sl_stream_t *stream);

    /* Makes the calling thread one that may use the device's memory (the transfer thread). */
    sl_status_t (*bind_thread)(sl_device_t *device);

    /* Marks a point of the stream, 0 <= mark < SL_MARKS_MAX, and waits on the host until the work
     * before it is done. */
    sl_status_t (*mark)(sl_device_t *device, sl_stream_t *stream, uint32_t mark);
    sl_status_t (*wait_mark)(sl_device_t *device, uint32_t mark);

    /* Records the operations between begin and end instead of running them. All NULL where the
     * backend runs operations at once. Each operation must have run before at its largest size. */
    sl_status_t (*graph_begin)(sl_device_t *device, sl_stream_t *stream);
    sl_status_t (*graph_end)(sl_device_t *device, sl_stream_t *stream, sl_graph_t **graph_p);
    sl_status_t (*graph_launch)(sl_device_t *device, sl_stream_t *stream, sl_graph_t *graph);
    void (*graph_free)(sl_device_t *device, sl_graph_t *graph);

    /* The group's collectives on device memory; `group` is borrowed and connected. */
    sl_status_t (*collectives_open)(sl_device_t *device, struct sl_group *group, uint32_t rank,
                                    uint32_t size, struct sl_collectives *collectives_p);
    void (*collectives_close)(sl_device_t *device, struct sl_collectives *collectives);

    /* Converts a piece to wt, dense [rows][columns] at `to`. Blocking; at load only. */
    sl_status_t (*load_weight)(sl_device_t *device, void *to, const sl_weight_source_t *source);

    sl_status_t (*dummy_weight)(sl_device_t *device, const sl_dummy_weight_t *dummy);

    sl_status_t (*embed)(sl_device_t *, sl_stream_t *, const sl_embed_t *);
    sl_status_t (*rms_norm)(sl_device_t *, sl_stream_t *, const sl_rms_norm_t *);
    sl_status_t (*linear)(sl_device_t *, sl_stream_t *, const sl_linear_t *);
    sl_status_t (*head_linear)(sl_device_t *, sl_stream_t *, const sl_head_linear_t *);
    sl_status_t (*rope_cache)(sl_device_t *, sl_stream_t *, const sl_rope_cache_t *);
    sl_status_t (*gather_latents)(sl_device_t *, sl_stream_t *, const sl_gather_latents_t *);
    sl_status_t (*attn_prefill)(sl_device_t *, sl_stream_t *, const sl_attn_prefill_t *);
    sl_status_t (*attn_merge)(sl_device_t *, sl_stream_t *, const sl_attn_merge_t *);
    /* Once a step, before its first attn_absorbed(), with the same rows, arrays and shape: the
     * schedule that all layers share. NULL: not needed. */
    sl_status_t (*attn_absorbed_plan)(sl_device_t *, sl_stream_t *, const sl_attn_absorbed_t *);
    sl_status_t (*attn_absorbed)(sl_device_t *, sl_stream_t *, const sl_attn_absorbed_t *);
    sl_status_t (*route)(sl_device_t *, sl_stream_t *, const sl_route_t *);
    sl_status_t (*moe_permute)(sl_device_t *, sl_stream_t *, const sl_moe_permute_t *);
    sl_status_t (*grouped_linear)(sl_device_t *, sl_stream_t *, const sl_grouped_linear_t *);
    sl_status_t (*silu_mul)(sl_device_t *, sl_stream_t *, const sl_silu_mul_t *);
    sl_status_t (*moe_combine)(sl_device_t *, sl_stream_t *, const sl_moe_combine_t *);
    sl_status_t (*take_rows)(sl_device_t *, sl_stream_t *, const sl_take_rows_t *);
    sl_status_t (*sample)(sl_device_t *, sl_stream_t *, const sl_sample_t *);
    sl_status_t (*token_logprobs)(sl_device_t *, sl_stream_t *, const sl_token_logprobs_t *);
} sl_ops_t;

/*
 * The backend of that name. SL_ERR_UNSUPPORTED names it and those this build has; asking for
 * "cuda" in a build without it fails here, at start. There is no fallback.
 */
SL_MUST_USE sl_status_t sl_ops_find(const char *name, const sl_ops_t **ops_p);

#endif
