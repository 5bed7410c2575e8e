/*
 * What a model's step costs at least, from its config alone: the numerators of "percent of the
 * ceiling". Counted is the model's own arithmetic, whichever way it is computed: padding, absorbed
 * attention's longer products and work repeated on several ranks do not add to it. Any thread.
 *
 * Per layer, with H hidden size, h heads, n/r/v the nope, rope and value widths of a head, l
 * kv_lora, q q_lora, I inner width of a dense layer, M of one expert, E experts, k of them a token,
 * s shared ones:
 *
 *   attention   q: H q + q h (n + r), or H h (n + r) without q_lora; kv: H (l + r) + l h (n + v);
 *               output: h v H
 *   dense MLP   3 H I
 *   experts     H E (router) + 3 H M (k + s) active, 3 H M (E + s) in all
 *
 * and the LM head H V once. Norms, biases and the embedding (a copy of rows) are left out.
 */
#ifndef SL_BENCH_MODEL_COST_H
#define SL_BENCH_MODEL_COST_H

#include <stdint.h>

#include "common/model/config.h"
#include "common/wire/messages.h"

/* How a group holds the model. */
typedef struct {
    uint32_t tp;
    sl_attention_t attention;
    double weight_bytes, latent_bytes; /* of an element */
} sl_cost_layout_t;

/* Weights that a token is multiplied with, without the LM head. */
double sl_model_cost_active(const sl_model_config_t *config);

/* Operations of prefilling `sequences` prompts of `tokens` each, the whole group's:
 * 2 active sequences tokens + layers 2 h (n + r + v) sequences tokens (tokens + 1) / 2 (causal
 * attention, unabsorbed) + 2 H V sequences (one row of logits a prompt). */
double sl_model_cost_prefill_flops(const sl_model_config_t *config, uint32_t sequences,
                                   uint32_t tokens);

/* Bytes that rank 0's device reads in a decode step: its slices of the weights that the group's
 * tokens touch (`experts_hit` routed experts of a layer, on average; MLPs divided by tp; attention,
 * but for q's and kv's way down to the latents, divided by tp with TP attention; router and LM head
 * whole), and the latents of `context` tokens of each of the rank's own `rank_batch` requests in
 * every layer. */
double sl_model_cost_decode_bytes(const sl_model_config_t *config, const sl_cost_layout_t *layout,
                                  double experts_hit, uint32_t rank_batch, double context);

#endif
