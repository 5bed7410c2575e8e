/* The formulas are in the header. Counts are doubles: they pass 2^32 and are only divided. */
#include "tests/bench/model_cost.h"

/* Weights of a layer's attention that TP attention divides over the group by heads. */
static double by_heads(const sl_model_config_t *config)
{
    double q_in = config->q_lora_rank > 0 ? config->q_lora_rank : config->hidden_size;
    double kv = config->qk_nope_head_dim + config->v_head_dim;
    double head = q_in * config->qk_head_dim + config->kv_lora_rank * kv +
                  (double)config->v_head_dim * config->hidden_size;
    return config->num_attention_heads * head;
}

/* And those that every rank has. */
static double not_by_heads(const sl_model_config_t *config)
{
    return (double)config->hidden_size * (config->q_lora_rank + config->latent_width);
}

/* Weights of a layer's MLP that are divided over the group, with `experts` routed ones at work. */
static double mlp(const sl_model_config_t *config, uint32_t layer, double experts)
{
    double hidden = config->hidden_size;
    if (!sl_model_layer_is_moe(config, layer)) {
        return 3 * hidden * config->intermediate_size;
    }
    return 3 * hidden * config->moe_intermediate_size * (experts + config->n_shared_experts);
}

static double router(const sl_model_config_t *config, uint32_t layer)
{
    bool moe = sl_model_layer_is_moe(config, layer);
    return moe ? (double)config->hidden_size * config->n_routed_experts : 0;
}

static double lm_head(const sl_model_config_t *config)
{
    return (double)config->hidden_size * config->vocab_size;
}

double sl_model_cost_active(const sl_model_config_t *config)
{
    double weights = 0;
    for (uint32_t layer = 0; layer < config->num_hidden_layers; layer++) {
        weights += by_heads(config) + not_by_heads(config) + router(config, layer) +
                   mlp(config, layer, config->num_experts_per_tok);
    }
    return weights;
}

double sl_model_cost_prefill_flops(const sl_model_config_t *config, uint32_t sequences,
                                   uint32_t tokens)
{
    double rows = (double)sequences * tokens, pairs = rows * (tokens + 1.0) / 2;
    double head = 2.0 * (config->qk_head_dim + config->v_head_dim);
    return 2 * sl_model_cost_active(config) * rows +
           config->num_hidden_layers * config->num_attention_heads * head * pairs +
           2 * lm_head(config) * sequences;
}

double sl_model_cost_decode_bytes(const sl_model_config_t *config, const sl_cost_layout_t *layout,
                                  double experts_hit, uint32_t rank_batch, double context)
{
    double head_parts = layout->attention == SL_ATTENTION_TP ? layout->tp : 1;
    double weights = lm_head(config);
    for (uint32_t layer = 0; layer < config->num_hidden_layers; layer++) {
        weights += by_heads(config) / head_parts + not_by_heads(config) + router(config, layer) +
                   mlp(config, layer, experts_hit) / layout->tp;
    }
    double latents = rank_batch * context * config->latent_width * config->num_hidden_layers;
    return weights * layout->weight_bytes + latents * layout->latent_bytes;
}
