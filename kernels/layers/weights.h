/*
 * The weights one rank holds, on its device. With DP attention the attention weights are
 * replicated; with TP attention they are sharded by heads. Dense MLPs, experts and shared experts
 * are always sharded over the group by their inner width, so a rank reads only its own slices of
 * the checkpoint: rows [rank * I/tp, ...) of gate and up, the same columns of down.
 *
 * kv_b_proj is kept in two forms: whole for unabsorbed attention, and split into W_UK (transposed)
 * and W_UV for absorbed attention; a rank loads the ones its paths need.
 */
#ifndef SL_LAYERS_WEIGHTS_H
#define SL_LAYERS_WEIGHTS_H

#include "common/base/status.h"
#include "common/model/checkpoint.h"
#include "common/model/layout.h"
#include "common/wire/messages.h"
#include "kernels/ops.h"

/* Device memory; NULL where the layer or the path has no such weight. h: local heads, I: local
 * inner width. Element type wt, except router_bias. */
typedef struct {
    void *input_norm, *post_norm;       /* [H] */
    void *q;                            /* [h*(nope+rope)][H], without q_lora */
    void *q_a, *q_a_norm, *q_b;         /* [q_lora][H], [q_lora], [h*(nope+rope)][q_lora] */
    void *kv_a, *kv_a_norm;             /* [kv_lora+rope][H], [kv_lora] */
    void *kv_b;                         /* [h*(nope+v)][kv_lora] */
    void *w_uk_t;                       /* [h][kv_lora][nope] */
    void *w_uv;                         /* [h][v][kv_lora] */
    void *o;                            /* [H][h*v] */
    void *router;                       /* [E][H] */
    float *router_bias;                 /* f32 [E] */
    void *gate_up, *down;               /* dense: [2I][H], [H][I]; experts: [E][2I][H], [E][H][I] */
    void *shared_gate_up, *shared_down; /* [2I][H], [H][I] */
} sl_layer_weights_t;

typedef struct {
    uint32_t heads;        /* local */
    uint32_t dense_width;  /* local inner width of dense layers */
    uint32_t expert_width; /* of one expert */
    uint32_t shared_width; /* of the shared experts' MLP; 0: none */
    void *embed, *final_norm, *lm_head;
    sl_layer_weights_t *layers;
    uint64_t bytes; /* on the device */
} sl_weights_t;

typedef struct {
    const sl_checkpoint_t *checkpoint;
    const sl_ops_t *ops;
    sl_device_t *device;
    uint32_t rank, tp;
    sl_attention_t attention;
    bool absorbed, unabsorbed; /* which attention paths will run */
    bool
        count_only; /* take no memory: only `bytes` and the local widths of the result are of use */
} sl_weights_params_t;

/* SL_ERR_CONFIG when a width does not divide by tp (named), SL_ERR_NO_MEMORY when it does not fit.
 * Shows a progress bar on a terminal. Main thread, blocking. */
SL_MUST_USE sl_status_t sl_weights_load(const sl_weights_params_t *params,
                                        sl_weights_t **weights_p);
void sl_weights_free(const sl_ops_t *ops, sl_device_t *device, sl_weights_t *weights);

#endif
