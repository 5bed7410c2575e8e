/*
 * A Hugging Face checkpoint directory, memory-mapped: config.json, and one or many .safetensors
 * files with their index. Opening validates headers only; weights are read by whoever touches
 * them, so a rank pages in its own slices alone. Immutable after opening, so any thread may read.
 */
#ifndef SL_MODEL_CHECKPOINT_H
#define SL_MODEL_CHECKPOINT_H

#include <stddef.h>

#include "common/base/status.h"
#include "common/model/config.h"

typedef enum { SL_DTYPE_F32, SL_DTYPE_BF16, SL_DTYPE_F16 } sl_dtype_t;

typedef struct {
    const char *name; /* owned by the checkpoint */
    sl_dtype_t dtype;
    uint32_t rank;     /* 1 or 2 */
    uint64_t shape[2]; /* rows, columns; shape[1] is 1 for rank 1 */
    const void *data; /* NULL in a dummy checkpoint; else in the mapping, row-major, not necessarily
                         aligned to the element */
    size_t bytes;
} sl_tensor_t;

/* All elements of a tensor as f32; `out` holds shape[0] * shape[1] of them. */
void sl_tensor_to_f32(const sl_tensor_t *tensor, float *out);

typedef struct sl_checkpoint sl_checkpoint_t;

/*
 * Opens and checks DIR: the config, every header (size, JSON depth, offsets inside the file, no
 * overlap, no gap at the end, bytes == product of shape), every shard the index names, and that
 * each tensor the config calls for is there with the right shape and a supported dtype
 * (multi-token-prediction layers and rotary inv_freq buffers are skipped; other unknown tensors are
 * refused by name).
 */
SL_MUST_USE sl_status_t sl_checkpoint_open(const char *dir, sl_checkpoint_t **checkpoint_p);
void sl_checkpoint_close(sl_checkpoint_t *checkpoint);

typedef struct {
    bool dummy;                 /* only config.json is read; tensors have shapes but no data */
    uint32_t num_hidden_layers; /* the first so many layers of the model; 0: all */
} sl_checkpoint_options_t;

/* The same for benchmarks at real shapes: a model without its weights, or cut short. */
SL_MUST_USE sl_status_t sl_checkpoint_open_with(const char *dir,
                                                const sl_checkpoint_options_t *options,
                                                sl_checkpoint_t **checkpoint_p);

const sl_model_config_t *sl_checkpoint_config(const sl_checkpoint_t *checkpoint);

/* Family and hash of config, tensor table (names, shapes, dtypes, bytes) and a sample of the small
 * weights, e.g. "deepseek_v2-9f3a..."; equal for equal checkpoints wherever they lie and however
 * they are sharded, different for models fine-tuned from one another. */
const char *sl_checkpoint_identity(const sl_checkpoint_t *checkpoint);

/* Path of DIR/tokenizer.json, or "" if there is none. */
const char *sl_checkpoint_tokenizer_path(const sl_checkpoint_t *checkpoint);

/* Sum of the bytes of the tensors the model uses. */
uint64_t sl_checkpoint_bytes(const sl_checkpoint_t *checkpoint);

typedef enum {
    SL_WEIGHT_EMBED,       /* [vocab, H] */
    SL_WEIGHT_FINAL_NORM,  /* [H] */
    SL_WEIGHT_LM_HEAD,     /* [vocab, H]; the embedding when tied and absent */
    SL_WEIGHT_INPUT_NORM,  /* [H] */
    SL_WEIGHT_POST_NORM,   /* [H] */
    SL_WEIGHT_Q,           /* [h*(nope+rope), H], without q_lora */
    SL_WEIGHT_Q_A,         /* [q_lora, H] */
    SL_WEIGHT_Q_A_NORM,    /* [q_lora] */
    SL_WEIGHT_Q_B,         /* [h*(nope+rope), q_lora] */
    SL_WEIGHT_KV_A,        /* [kv_lora+rope, H] */
    SL_WEIGHT_KV_A_NORM,   /* [kv_lora] */
    SL_WEIGHT_KV_B,        /* [h*(nope+v), kv_lora] */
    SL_WEIGHT_O,           /* [H, h*v] */
    SL_WEIGHT_MLP_GATE,    /* dense layer [I, H] */
    SL_WEIGHT_MLP_UP,      /* [I, H] */
    SL_WEIGHT_MLP_DOWN,    /* [H, I] */
    SL_WEIGHT_ROUTER,      /* mlp.gate.weight [E, H] */
    SL_WEIGHT_ROUTER_BIAS, /* e_score_correction_bias [E], noaux_tc only */
    SL_WEIGHT_EXPERT_GATE, /* [moe, H], per expert */
    SL_WEIGHT_EXPERT_UP,
    SL_WEIGHT_EXPERT_DOWN, /* [H, moe] */
    SL_WEIGHT_SHARED_GATE, /* [n_shared*moe, H] */
    SL_WEIGHT_SHARED_UP,
    SL_WEIGHT_SHARED_DOWN, /* [H, n_shared*moe] */
    SL_WEIGHT_KIND_COUNT
} sl_weight_kind_t;

/* The tensor of a weight; layer and expert are ignored where they do not apply. The checkpoint was
 * checked when opened, so asking for a weight this model has cannot fail (asserted). */
const sl_tensor_t *sl_checkpoint_weight(const sl_checkpoint_t *checkpoint, sl_weight_kind_t kind,
                                        uint32_t layer, uint32_t expert);

#endif
