/* What the files of this folder share: the model's state and its workspace. */
#ifndef SL_LAYERS_MODEL_INTERNAL_H
#define SL_LAYERS_MODEL_INTERNAL_H

#include "kernels/layers/model.h"
#include "kernels/layers/weights.h"

/* Rows the experts take in one go: bounds the workspace of large prefills. */
#define SL_MOE_BLOCK_ROWS 16384u
/* Prefix tokens up-projected at a time when a chunk attends to earlier ones. */
#define SL_PREFIX_BLOCK_TOKENS 8192u

/* Step arrays and activations on the device. T: max_rows, G: gathered rows, B: rows of one pass
 * through the experts, h: local heads. act unless a comment says otherwise. */
typedef struct {
    void *inputs; /* bytes; the step's arrays, which lie where staging.c has put them: */
    int32_t *tokens, *positions, *kv_len, *row_request; /* [T] */
    int64_t *slots;                                     /* [T] */
    uint8_t *row_valid;                                 /* [G]: 0 for padding */
    int32_t *row_begin, *page_begin;                    /* [requests + 1] */
    int32_t *pages;                                     /* of all requests */
    sl_sample_row_t *rules;                             /* [L] */

    int32_t *piece_begin; /* [4]: q 0, n; k 0, n of one prefix piece */
    float *cos_sin;       /* f32 [max_position][rope] */

    void *residual, *hidden;   /* [T][H] */
    void *q_a;                 /* [T][q_lora] */
    void *q;                   /* [T][h][qk] */
    void *latent;              /* [T][width] */
    void *attended;            /* [T][h][v] */
    void *q_latent, *o_latent; /* absorbed: [T][h][kv_lora] */
    void *kv;                  /* unabsorbed: [T][h][nope + v] */
    void *prefix_latent;       /* unabsorbed: [P][width] */
    void *prefix_attended;     /* unabsorbed: [T][h][v] */
    float *lse, *prefix_lse;   /* unabsorbed: f32 [T][h] */

    void *gathered, *partial;  /* [G][H] */
    float *gate_logits;        /* f32 [B][E] */
    int32_t *expert_ids;       /* [B][k] */
    float *expert_weights;     /* f32 [B][k] */
    int32_t *sorted_row;       /* [B][k] */
    int32_t *expert_begin;     /* [E + 1] */
    void *x_sorted, *y_sorted; /* [B*k][H] */
    void *gate_up, *activated; /* [B*k][2I], [B*k][I]; also dense and shared MLPs */

    int32_t *logit_rows;                 /* [L] */
    void *logit_residual, *logit_hidden; /* [L][H] */
    float *logits;                       /* f32 [L][V] */
    int32_t *sampled;                    /* [L] */
    int32_t *shared;                     /* TP attention: [tp][rows], rank 0's choice first */
    const int32_t *previous;             /* what tokens below 0 stand for: sampled or shared */
    sl_logprobs_t *logprobs;             /* [L] */
    sl_sample_row_t *sample_rules;       /* [L]: rules of sl_model_sample() */
} sl_workspace_t;

#define SL_SIDES 2u

/* Host memory of one step under way, see staging.c. */
typedef struct {
    void *inputs;
    bool sent;
    void *tokens, *logprobs; /* int32_t [L], sl_logprobs_t [L] */
} sl_side_t;

typedef struct {
    void *memory;
    const char *what; /* items of one kind have one name */
    uint64_t bytes;
} sl_item_t;

#define SL_WORKSPACE_ITEMS_MAX 64

/* Of a device's free memory, what weights, workspace and pages may take at most: operations and
 * libraries will want some. */
#define SL_FREE_SHARE 0.95

#define SL_RECORDINGS_MAX 128

/* The operations of a step with so many rows. */
typedef struct {
    uint32_t rows;
    sl_graph_t *graph; /* NULL: has run once, not recorded yet */
} sl_recording_t;

struct sl_model {
    sl_model_params_t params;
    const sl_model_config_t *config;
    const sl_ops_t *ops;
    sl_device_t *device;
    sl_stream_t *stream;
    sl_collectives_t collectives;
    sl_weights_t *weights;
    sl_cache_t cache;
    size_t act_bytes;        /* of one activation element */
    uint32_t gathered_max;   /* G */
    uint32_t block_rows;     /* B */
    uint32_t prefix_tokens;  /* P */
    uint32_t sequence_pages; /* of the longest sequence */
    uint32_t max_pages;      /* of all requests of a step together */
    sl_workspace_t work;
    sl_item_t items[SL_WORKSPACE_ITEMS_MAX]; /* every device allocation but the weights */
    uint32_t item_count;
    uint64_t work_bytes;    /* of all items */
    bool counting;          /* workspace is only counted, see memory.c */
    uint64_t free_at_start; /* bytes of the device, before anything was taken */

    size_t inputs_bytes; /* of a step's arrays, at most */
    sl_side_t sides[SL_SIDES];
    uint32_t next_side;            /* of the next batch */
    uint32_t first_fetch, fetches; /* the oldest under way, and how many are */
    void *host_rules;              /* sl_sample_row_t [L] of sl_model_sample() */

    sl_recording_t recordings[SL_RECORDINGS_MAX];
    uint32_t recording_count;
    sl_recording_t *recording; /* being made, or NULL */

    sl_batch_t batch;    /* of the running step */
    bool hidden_pending; /* `hidden` is to be added to the residual by the next norm */
};

/* kernels/layers/attention.c: the step's schedule of absorbed attention, where there is one. */
SL_MUST_USE sl_status_t sl_model_plan_absorbed(sl_model_t *model);

/* kernels/layers/staging.c; the free one before the device closes. */
size_t sl_model_inputs_bytes(const sl_model_t *model);
SL_MUST_USE sl_status_t sl_model_take_staging(sl_model_t *model);
void sl_model_free_staging(sl_model_t *model);
SL_MUST_USE sl_status_t sl_model_send_batch(sl_model_t *model);

/* kernels/layers/memory.c. The first before anything is taken: SL_ERR_NO_MEMORY with what would
 * fit. The second logs what the device's memory went to. */
SL_MUST_USE sl_status_t sl_model_check_memory(sl_model_t *model,
                                              const sl_weights_params_t *weights);
SL_MUST_USE sl_status_t sl_model_log_memory(const sl_model_t *model);

/* kernels/layers/workspace.c */
SL_MUST_USE sl_status_t sl_model_take_workspace(sl_model_t *model);

/* An address `elements` activations behind `base`. */
static inline void *sl_act_at(const sl_model_t *model, void *base, size_t elements)
{
    return (char *)base + elements * model->act_bytes;
}

#endif
