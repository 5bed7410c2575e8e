/*
 * What a DeepSeek-V2/V3-style config.json says, checked, with the derived values that are easy to
 * get wrong. Field names are the file's own. Source: the published configuration and modelling
 * files of DeepSeek-V2-Lite, V2, V2.5, Coder-V2, V3 and R1.
 */
#ifndef SL_MODEL_CONFIG_H
#define SL_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define SL_EOS_MAX 16

typedef enum { SL_TOPK_GREEDY, SL_TOPK_GROUP_LIMITED_GREEDY, SL_TOPK_NOAUX_TC } sl_topk_method_t;
typedef enum { SL_SCORE_SOFTMAX, SL_SCORE_SIGMOID } sl_scoring_func_t;

/* YaRN context extension; present if factor > 1. */
typedef struct {
    bool enabled;
    float factor;
    float beta_fast, beta_slow;
    float mscale, mscale_all_dim;
    uint32_t original_max_position_embeddings;
} sl_yarn_t;

typedef struct {
    char model_type[32]; /* "deepseek_v2" or "deepseek_v3" */
    uint32_t vocab_size;
    uint32_t hidden_size;
    uint32_t num_hidden_layers; /* multi-token-prediction layers not counted */
    uint32_t num_attention_heads;
    uint32_t q_lora_rank; /* 0: null in the file, plain q_proj */
    uint32_t kv_lora_rank;
    uint32_t qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    uint32_t intermediate_size;     /* dense MLP */
    uint32_t moe_intermediate_size; /* one expert */
    uint32_t n_routed_experts;      /* 0: all layers dense */
    uint32_t n_shared_experts;      /* 0: none; they form one MLP of n_shared * moe width */
    uint32_t num_experts_per_tok;
    uint32_t n_group, topk_group;
    uint32_t first_k_dense_replace, moe_layer_freq;
    sl_topk_method_t topk_method;
    sl_scoring_func_t scoring_func;
    bool norm_topk_prob;
    float routed_scaling_factor;
    float rms_norm_eps;
    float rope_theta;
    sl_yarn_t yarn;
    uint32_t max_position_embeddings;
    bool tie_word_embeddings;
    uint32_t eos_count;
    int32_t eos_token_ids[SL_EOS_MAX];

    /* Derived. */
    uint32_t latent_width;  /* kv_lora_rank + qk_rope_head_dim: cached numbers a token and layer */
    uint32_t qk_head_dim;   /* nope + rope */
    float softmax_scale;    /* qk_head_dim^-0.5, times the YaRN mscale squared */
    float rope_cos_sin_scale; /* YaRN factor on cos and sin; 1 for the published models */
} sl_model_config_t;

/*
 * Reads DIR/config.json (and eos_token_id of DIR/generation_config.json where there is one).
 * Errors name the file, the key, what was expected and what was found: unsupported model_type or
 * architecture, quantization_config of any kind, wrong JSON type, values out of range, sums that do
 * not fit (experts not divisible by n_group, ...), deep or huge JSON. Keys that do not matter to
 * inference are ignored, as the format demands. SL_ERR_INVALID, SL_ERR_UNSUPPORTED, SL_ERR_IO.
 */
SL_MUST_USE sl_status_t sl_model_config_load(const char *dir, sl_model_config_t *config_p);

/* The same from text in memory; `label` names it in errors. For tests and fuzzing. */
SL_MUST_USE sl_status_t sl_model_config_parse(const char *json, size_t size, const char *label,
                                              sl_model_config_t *config_p);

/* Whether layer `layer` routes to experts (first_k_dense_replace, moe_layer_freq). */
bool sl_model_layer_is_moe(const sl_model_config_t *config, uint32_t layer);

/* One canonical line of every field, equal for configs that mean the same however they are
 * spelled: the part of the model's identity that config.json decides. Returns the length as
 * snprintf does. */
size_t sl_model_config_text(const sl_model_config_t *config, char *text, size_t size);

/* Inverse frequencies of the qk_rope_head_dim / 2 rotation pairs, YaRN ramp applied. */
void sl_model_rope_inv_freq(const sl_model_config_t *config, float *inv_freq);

#endif
