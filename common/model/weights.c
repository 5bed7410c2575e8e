/* One row a kind: where its name goes and the two dimensions of its shape. */
#include "common/model/weights.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    DIM_NONE, /* the second dimension of a vector */
    DIM_VOCAB,
    DIM_HIDDEN,
    DIM_Q_HEADS, /* heads * (nope + rope) */
    DIM_Q_LORA,
    DIM_LATENT, /* kv_lora + rope */
    DIM_KV_LORA,
    DIM_KV_HEADS, /* heads * (nope + v) */
    DIM_V_HEADS,  /* heads * v */
    DIM_DENSE,
    DIM_EXPERT,
    DIM_SHARED,
    DIM_EXPERTS,
} dim_t;

static const struct {
    sl_weight_scope_t scope;
    const char *name; /* after "model.layers.N." or "model.layers.N.mlp.experts.M." */
    dim_t rows, columns;
} weights[SL_WEIGHT_KIND_COUNT] = {
    [SL_WEIGHT_EMBED] = {SL_WEIGHT_GLOBAL, "model.embed_tokens.weight", DIM_VOCAB, DIM_HIDDEN},
    [SL_WEIGHT_FINAL_NORM] = {SL_WEIGHT_GLOBAL, "model.norm.weight", DIM_HIDDEN, DIM_NONE},
    [SL_WEIGHT_LM_HEAD] = {SL_WEIGHT_GLOBAL, "lm_head.weight", DIM_VOCAB, DIM_HIDDEN},
    [SL_WEIGHT_INPUT_NORM] = {SL_WEIGHT_LAYER, "input_layernorm.weight", DIM_HIDDEN, DIM_NONE},
    [SL_WEIGHT_POST_NORM] = {SL_WEIGHT_LAYER, "post_attention_layernorm.weight", DIM_HIDDEN,
                             DIM_NONE},
    [SL_WEIGHT_Q] = {SL_WEIGHT_LAYER, "self_attn.q_proj.weight", DIM_Q_HEADS, DIM_HIDDEN},
    [SL_WEIGHT_Q_A] = {SL_WEIGHT_LAYER, "self_attn.q_a_proj.weight", DIM_Q_LORA, DIM_HIDDEN},
    [SL_WEIGHT_Q_A_NORM] = {SL_WEIGHT_LAYER, "self_attn.q_a_layernorm.weight", DIM_Q_LORA,
                            DIM_NONE},
    [SL_WEIGHT_Q_B] = {SL_WEIGHT_LAYER, "self_attn.q_b_proj.weight", DIM_Q_HEADS, DIM_Q_LORA},
    [SL_WEIGHT_KV_A] = {SL_WEIGHT_LAYER, "self_attn.kv_a_proj_with_mqa.weight", DIM_LATENT,
                        DIM_HIDDEN},
    [SL_WEIGHT_KV_A_NORM] = {SL_WEIGHT_LAYER, "self_attn.kv_a_layernorm.weight", DIM_KV_LORA,
                             DIM_NONE},
    [SL_WEIGHT_KV_B] = {SL_WEIGHT_LAYER, "self_attn.kv_b_proj.weight", DIM_KV_HEADS, DIM_KV_LORA},
    [SL_WEIGHT_O] = {SL_WEIGHT_LAYER, "self_attn.o_proj.weight", DIM_HIDDEN, DIM_V_HEADS},
    [SL_WEIGHT_MLP_GATE] = {SL_WEIGHT_LAYER, "mlp.gate_proj.weight", DIM_DENSE, DIM_HIDDEN},
    [SL_WEIGHT_MLP_UP] = {SL_WEIGHT_LAYER, "mlp.up_proj.weight", DIM_DENSE, DIM_HIDDEN},
    [SL_WEIGHT_MLP_DOWN] = {SL_WEIGHT_LAYER, "mlp.down_proj.weight", DIM_HIDDEN, DIM_DENSE},
    [SL_WEIGHT_ROUTER] = {SL_WEIGHT_LAYER, "mlp.gate.weight", DIM_EXPERTS, DIM_HIDDEN},
    [SL_WEIGHT_ROUTER_BIAS] = {SL_WEIGHT_LAYER, "mlp.gate.e_score_correction_bias", DIM_EXPERTS,
                               DIM_NONE},
    [SL_WEIGHT_EXPERT_GATE] = {SL_WEIGHT_EXPERT, "gate_proj.weight", DIM_EXPERT, DIM_HIDDEN},
    [SL_WEIGHT_EXPERT_UP] = {SL_WEIGHT_EXPERT, "up_proj.weight", DIM_EXPERT, DIM_HIDDEN},
    [SL_WEIGHT_EXPERT_DOWN] = {SL_WEIGHT_EXPERT, "down_proj.weight", DIM_HIDDEN, DIM_EXPERT},
    [SL_WEIGHT_SHARED_GATE] = {SL_WEIGHT_LAYER, "mlp.shared_experts.gate_proj.weight", DIM_SHARED,
                               DIM_HIDDEN},
    [SL_WEIGHT_SHARED_UP] = {SL_WEIGHT_LAYER, "mlp.shared_experts.up_proj.weight", DIM_SHARED,
                             DIM_HIDDEN},
    [SL_WEIGHT_SHARED_DOWN] = {SL_WEIGHT_LAYER, "mlp.shared_experts.down_proj.weight", DIM_HIDDEN,
                               DIM_SHARED},
};

static uint64_t dim_value(const sl_model_config_t *config, dim_t dim)
{
    uint64_t heads = config->num_attention_heads;
    switch (dim) {
    case DIM_NONE:
        return 1;
    case DIM_VOCAB:
        return config->vocab_size;
    case DIM_HIDDEN:
        return config->hidden_size;
    case DIM_Q_HEADS:
        return heads * config->qk_head_dim;
    case DIM_Q_LORA:
        return config->q_lora_rank;
    case DIM_LATENT:
        return config->latent_width;
    case DIM_KV_LORA:
        return config->kv_lora_rank;
    case DIM_KV_HEADS:
        return heads * (config->qk_nope_head_dim + config->v_head_dim);
    case DIM_V_HEADS:
        return heads * config->v_head_dim;
    case DIM_DENSE:
        return config->intermediate_size;
    case DIM_EXPERT:
        return config->moe_intermediate_size;
    case DIM_SHARED:
        return (uint64_t)config->n_shared_experts * config->moe_intermediate_size;
    case DIM_EXPERTS:
        return config->n_routed_experts;
    }
    return 0;
}

sl_weight_scope_t sl_weight_scope(sl_weight_kind_t kind)
{
    return weights[kind].scope;
}

bool sl_weight_present(const sl_model_config_t *config, sl_weight_kind_t kind, uint32_t layer)
{
    bool moe = sl_model_layer_is_moe(config, layer);
    switch (kind) {
    case SL_WEIGHT_Q:
        return config->q_lora_rank == 0;
    case SL_WEIGHT_Q_A:
    case SL_WEIGHT_Q_A_NORM:
    case SL_WEIGHT_Q_B:
        return config->q_lora_rank > 0;
    case SL_WEIGHT_MLP_GATE:
    case SL_WEIGHT_MLP_UP:
    case SL_WEIGHT_MLP_DOWN:
        return !moe;
    case SL_WEIGHT_ROUTER:
    case SL_WEIGHT_EXPERT_GATE:
    case SL_WEIGHT_EXPERT_UP:
    case SL_WEIGHT_EXPERT_DOWN:
        return moe;
    case SL_WEIGHT_ROUTER_BIAS:
        return moe && config->topk_method == SL_TOPK_NOAUX_TC;
    case SL_WEIGHT_SHARED_GATE:
    case SL_WEIGHT_SHARED_UP:
    case SL_WEIGHT_SHARED_DOWN:
        return moe && config->n_shared_experts > 0;
    default:
        return true;
    }
}

void sl_weight_name(sl_weight_kind_t kind, uint32_t layer, uint32_t expert,
                    char name[SL_WEIGHT_NAME_BYTES])
{
    switch (weights[kind].scope) {
    case SL_WEIGHT_GLOBAL:
        snprintf(name, SL_WEIGHT_NAME_BYTES, "%s", weights[kind].name);
        break;
    case SL_WEIGHT_LAYER:
        snprintf(name, SL_WEIGHT_NAME_BYTES, "model.layers.%u.%s", layer, weights[kind].name);
        break;
    case SL_WEIGHT_EXPERT:
        snprintf(name, SL_WEIGHT_NAME_BYTES, "model.layers.%u.mlp.experts.%u.%s", layer, expert,
                 weights[kind].name);
        break;
    }
}

void sl_weight_shape(const sl_model_config_t *config, sl_weight_kind_t kind, uint32_t *rank_p,
                     uint64_t shape[2])
{
    *rank_p = weights[kind].columns == DIM_NONE ? 1 : 2;
    shape[0] = dim_value(config, weights[kind].rows);
    shape[1] = dim_value(config, weights[kind].columns);
}

bool sl_weight_skipped(const sl_model_config_t *config, const char *name)
{
    static const char prefix[] = "model.layers.";
    static const char inv_freq[] = ".rotary_emb.inv_freq";
    if (strncmp(name, prefix, sizeof(prefix) - 1) != 0) {
        return false;
    }
    const char *digits = name + sizeof(prefix) - 1;
    char *end = NULL;
    unsigned long layer = isdigit((unsigned char)*digits) ? strtoul(digits, &end, 10) : 0;
    if (end == NULL || *end != '.') {
        return false;
    }
    size_t length = strlen(end), tail = sizeof(inv_freq) - 1;
    return layer >= config->num_hidden_layers ||
           (length >= tail && strcmp(end + length - tail, inv_freq) == 0);
}
