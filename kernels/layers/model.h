/*
 * The layers of one rank, blind to the backend: a node's forward pass is a loop over these calls,
 * and differs only in which attention it asks for.
 *
 *   sl_model_begin, sl_model_embed       tokens -> residual stream
 *   for each layer:
 *     sl_model_attention_begin           norm, projections, rotation, latents into the cache
 *     sl_model_attend_unabsorbed | _absorbed
 *     sl_model_attention_end             output projection (TP attention: summed over the group)
 *     sl_model_mlp                       norm; gather the group's tokens; local slice of every
 *                                        expert; reduce-scatter back
 *   sl_model_logits                      final norm and LM head on the rows asked for
 *
 * Owned by the engine thread. Device memory (weights, latent pages, workspace) is taken at
 * creation. With tp > 1 all ranks of the group make the same calls with the same rank_rows.
 */
#ifndef SL_LAYERS_MODEL_H
#define SL_LAYERS_MODEL_H

#include "common/base/status.h"
#include "common/model/checkpoint.h"
#include "common/model/layout.h"
#include "common/wire/messages.h"
#include "kernels/collectives.h"
#include "kernels/ops.h"

typedef struct sl_model sl_model_t;

#define SL_HOST_PAGES 512u /* where the number of pages is not given and memory is the host's */

typedef struct {
    const sl_checkpoint_t *checkpoint; /* borrowed */
    const sl_ops_t *ops;
    int device_index;
    int threads;                /* CPU backend */
    bool (*give_up)(void *arg); /* see sl_device_params_t */
    void *give_up_arg;
    uint32_t rank, tp;
    sl_attention_t attention;
    bool absorbed, unabsorbed; /* attention paths that will be used */
    uint32_t max_rows;         /* tokens of one step on this rank (TP attention: of the group) */
    uint32_t max_requests;     /* of one step */
    uint32_t max_logit_rows;   /* of one sl_model_logits() */
    uint32_t page_count; /* 0: as many as fit, see mem_fraction (host backends: SL_HOST_PAGES) */
    double mem_fraction; /* of the memory free at start, for weights, workspace and pages; 0: 0.9 */
    uint32_t sequence_pages; /* of the longest sequence; 0: of the model's longest */
} sl_model_params_t;

SL_MUST_USE sl_status_t sl_model_create(const sl_model_params_t *params, sl_model_t **model_p);
void sl_model_destroy(sl_model_t *model);

/* Once the group is connected; needed before the first step if tp > 1. The group is borrowed. */
SL_MUST_USE sl_status_t sl_model_join(sl_model_t *model, sl_group_t *group);

/* Lets the calling thread use the device's memory. */
SL_MUST_USE sl_status_t sl_model_bind_thread(sl_model_t *model);

/* The page pool: page p at base + p * page_bytes, device memory. */
void sl_model_pages(const sl_model_t *model, void **base_p, size_t *page_bytes_p);
size_t sl_model_page_bytes(const sl_model_t *model);
uint32_t sl_model_page_count(const sl_model_t *model);
uint32_t sl_model_sequence_pages(const sl_model_t *model); /* of the longest sequence */

/* One step's rows; host memory, borrowed until the step's last call. Rows of a request are
 * consecutive and in position order. */
typedef struct {
    uint32_t rows;            /* own rows, padding included; 0 for an idle rank */
    const int32_t *tokens;    /* [rows]; -1 - j: what was chosen for row j of the last step that
                               * chose, which the host need not know yet */
    const int32_t *positions; /* [rows] */
    const int64_t *slots;     /* [rows]: page * SL_PAGE_TOKENS + offset; -1: padding */
    uint32_t requests;
    const int32_t *row_begin;     /* [requests + 1]; rows from the last on are padding */
    const int32_t *pages;         /* page ids of the requests, one request after the other */
    const int32_t *page_begin;    /* [requests + 1]: where in `pages` each request's begin */
    const sl_sample_row_t *rules; /* [rows] for sl_model_choose(); NULL: it will not be called */
    const uint32_t *rank_rows;    /* [tp]: rows each rank feeds into the MLPs; equal with TP
                                   * attention */
    const uint32_t *rank_valid;   /* [tp]: of these, rows that are not padding; NULL: all */
} sl_batch_t;

/* Sends the step's arrays to the device; sl_model_embed() begins the residual stream. While the
 * device is at work on one step the host may begin and issue the next one, not more. */
SL_MUST_USE sl_status_t sl_model_begin(sl_model_t *model, const sl_batch_t *batch);
SL_MUST_USE sl_status_t sl_model_embed(sl_model_t *model);
SL_MUST_USE sl_status_t sl_model_attention_begin(sl_model_t *model, uint32_t layer);
SL_MUST_USE sl_status_t sl_model_attend_unabsorbed(sl_model_t *model, uint32_t layer);
SL_MUST_USE sl_status_t sl_model_attend_absorbed(sl_model_t *model, uint32_t layer);
SL_MUST_USE sl_status_t sl_model_attention_end(sl_model_t *model, uint32_t layer);
SL_MUST_USE sl_status_t sl_model_mlp(sl_model_t *model, uint32_t layer);

/* Routed experts that had rows in the last pass through a layer's experts; waits for it. Not
 * between record_begin and record_end. */
SL_MUST_USE sl_status_t sl_model_experts_hit(sl_model_t *model, uint32_t *count_p);

/* f32 logits [count][vocab] of the step's own rows `rows[0..count)` (host), in device memory valid
 * until the next call. count <= max_logit_rows. rows NULL: the first `count` rows, once a step. */
SL_MUST_USE sl_status_t sl_model_logits(sl_model_t *model, const int32_t *rows, uint32_t count,
                                        float **logits_p);

/* Chooses a token for each of the step's first `count` rows by the batch's rules. With TP attention
 * all ranks call sl_model_share_chosen() after it, and hold what rank 0 chose. */
SL_MUST_USE sl_status_t sl_model_choose(sl_model_t *model, const float *logits, uint32_t count,
                                        bool logprobs);
SL_MUST_USE sl_status_t sl_model_share_chosen(sl_model_t *model);

/* What was chosen, on its way to the host: fetch sends for it without waiting; fetched waits for
 * the oldest that was sent for, `count` rows of it. logprobs: NULL or [count]. Two may be under
 * way. */
SL_MUST_USE sl_status_t sl_model_fetch(sl_model_t *model, uint32_t count, bool logprobs);
SL_MUST_USE sl_status_t sl_model_fetched(sl_model_t *model, uint32_t count, int32_t *tokens,
                                         sl_logprobs_t *logprobs);

/* Choice by other rules and its results, all in one; nothing else may be under way. */
SL_MUST_USE sl_status_t sl_model_sample(sl_model_t *model, const float *logits,
                                        const sl_sample_row_t *rules, uint32_t count,
                                        int32_t *tokens, sl_logprobs_t *logprobs);

/*
 * Recording (CUDA graphs). Between begin and end lie calls that only depend on device memory. For
 * each number of rows of a step the first time runs them, the second records them, and from then on
 * begin launches the recording and *issue_p is false: the caller makes no calls. A backend without
 * recordings always says true. All ranks of a group record the same collectives.
 */
#define SL_MODEL_RUNS_TO_RECORD 2
SL_MUST_USE sl_status_t sl_model_record_begin(sl_model_t *model, bool *issue_p);
SL_MUST_USE sl_status_t sl_model_record_end(sl_model_t *model);
bool sl_model_records(const sl_model_t *model);

/* See `mark` and `wait_mark` of sl_ops_t; some marks are the model's own. */
#define SL_MODEL_MARKS_MAX (SL_MARKS_MAX - 4)
SL_MUST_USE sl_status_t sl_model_mark(sl_model_t *model, uint32_t mark);
SL_MUST_USE sl_status_t sl_model_wait_mark(sl_model_t *model, uint32_t mark);

/* Logprobs of `targets` (host) and the best alternatives. Returns when the results are there. */
SL_MUST_USE sl_status_t sl_model_token_logprobs(sl_model_t *model, const float *logits,
                                                const int32_t *targets, uint32_t count,
                                                uint32_t top_count, sl_logprobs_t *out);

#endif
