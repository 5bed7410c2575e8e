/*
 * One table names each plain key with its kind, bounds and default per family; it drives the parse
 * and the canonical text. What is left is what the keys mean together. Defaults are those of the
 * published configuration classes, because files leave out what equals them.
 */
#include "common/model/config.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "common/model/json.h"
#include "common/model/rope.h"

#define CONFIG_BYTES_MAX (1u << 20)
#define PATH_BYTES 4096

/* Wide enough for any model to come, narrow enough that no product of two overflows 64 bits. */
#define WIDTH_MAX (1u << 24)

typedef enum { KIND_U32, KIND_FLOAT, KIND_BOOL } kind_t;
enum { FAMILY_V2, FAMILY_V3 };
#define REQUIRED (-1.0)

typedef struct {
    const char *key;
    kind_t kind;
    size_t offset;
    double min, max;
    double fallback[2]; /* by family; REQUIRED where there is none */
} field_t;

#define FIELD(name, kind, min, max, v2, v3)                                                        \
    {                                                                                              \
#name, kind, offsetof(sl_model_config_t, name), min, max,                                  \
        {                                                                                          \
            v2, v3                                                                                 \
        }                                                                                          \
    }

static const field_t fields[] = {
    FIELD(vocab_size, KIND_U32, 1, 1 << 30, REQUIRED, REQUIRED),
    FIELD(hidden_size, KIND_U32, 1, WIDTH_MAX, REQUIRED, REQUIRED),
    FIELD(num_hidden_layers, KIND_U32, 1, 4096, REQUIRED, REQUIRED),
    FIELD(num_attention_heads, KIND_U32, 1, 65536, REQUIRED, REQUIRED),
    FIELD(q_lora_rank, KIND_U32, 0, WIDTH_MAX, 0, 0),
    FIELD(kv_lora_rank, KIND_U32, 1, WIDTH_MAX, REQUIRED, REQUIRED),
    FIELD(qk_nope_head_dim, KIND_U32, 1, 65536, REQUIRED, REQUIRED),
    FIELD(qk_rope_head_dim, KIND_U32, 2, 65536, REQUIRED, REQUIRED),
    FIELD(v_head_dim, KIND_U32, 1, 65536, REQUIRED, REQUIRED),
    FIELD(intermediate_size, KIND_U32, 1, WIDTH_MAX, REQUIRED, REQUIRED),
    FIELD(moe_intermediate_size, KIND_U32, 1, WIDTH_MAX, 0, 0),
    FIELD(n_routed_experts, KIND_U32, 0, 65536, 0, 0),
    FIELD(n_shared_experts, KIND_U32, 0, 1024, 0, 0),
    FIELD(num_experts_per_tok, KIND_U32, 1, 65536, 0, 0),
    FIELD(n_group, KIND_U32, 1, 65536, 1, 1),
    FIELD(topk_group, KIND_U32, 1, 65536, 1, 1),
    FIELD(first_k_dense_replace, KIND_U32, 0, 65536, 0, 3),
    FIELD(moe_layer_freq, KIND_U32, 1, 65536, 1, 1),
    FIELD(norm_topk_prob, KIND_BOOL, 0, 1, 0, 1),
    FIELD(routed_scaling_factor, KIND_FLOAT, 1e-6, 1e6, 1.0, 2.5),
    FIELD(rms_norm_eps, KIND_FLOAT, 1e-20, 1, 1e-6, 1e-6),
    FIELD(max_position_embeddings, KIND_U32, 1, 1 << 30, REQUIRED, REQUIRED),
    FIELD(tie_word_embeddings, KIND_BOOL, 0, 1, 0, 0),
};
#define FIELD_COUNT (sizeof(fields) / sizeof(fields[0]))

static const char *const model_types[] = {"deepseek_v2", "deepseek_v3", NULL};
static const char *const topk_methods[] = {"greedy", "group_limited_greedy", "noaux_tc", NULL};
static const char *const scoring_funcs[] = {"softmax", "sigmoid", NULL};

static sl_status_t parse_fields(const sl_json_scope_t *scope, int family, sl_model_config_t *config)
{
    for (size_t i = 0; i < FIELD_COUNT; i++) {
        const field_t *field = &fields[i];
        void *value = (char *)config + field->offset;
        double fallback = field->fallback[family];
        bool has_fallback = fallback != REQUIRED;
        uint32_t fallback_u32 = has_fallback ? (uint32_t)fallback : 0;
        float fallback_float = (float)fallback;
        switch (field->kind) {
        case KIND_U32:
            SL_TRY(sl_json_u32(scope, field->key, (uint32_t)field->min, (uint32_t)field->max,
                               has_fallback ? &fallback_u32 : NULL, value));
            break;
        case KIND_FLOAT:
            SL_TRY(sl_json_float(scope, field->key, field->min, field->max,
                                 has_fallback ? &fallback_float : NULL, value));
            break;
        case KIND_BOOL:
            SL_TRY(sl_json_bool(scope, field->key, fallback_u32 != 0, value));
            break;
        }
    }
    return SL_OK;
}

/* Keys that change what the model computes in ways this project does not implement. */
static sl_status_t refuse_unsupported(const sl_json_scope_t *scope)
{
    static const char *const quantisations[] = {"quantization_config", "compression_config"};
    static const char *const biases[] = {"attention_bias", "mlp_bias"};
    static const char *const activations[] = {"silu", NULL};
    char found[SL_JSON_FOUND_BYTES];
    int activation = 0;
    for (size_t i = 0; i < 2; i++) {
        const json_t *value = sl_json_get(scope, quantisations[i]);
        if (value != NULL) {
            const json_t *method = json_object_get(value, "quant_method");
            return sl_error(SL_ERR_UNSUPPORTED,
                            "%s: key %s: expected none (weights in bfloat16, float16 or float32), "
                            "found quant_method %s",
                            scope->label, quantisations[i],
                            sl_json_found(method != NULL ? method : value, found));
        }
    }
    for (size_t i = 0; i < 2; i++) {
        bool biased = false;
        SL_TRY(sl_json_bool(scope, biases[i], false, &biased));
        if (biased) {
            return sl_error(SL_ERR_UNSUPPORTED, "%s: key %s: expected false, found true",
                            scope->label, biases[i]);
        }
    }
    return sl_json_word(scope, "hidden_act", activations, 0, &activation);
}

static sl_status_t check_architecture(const sl_json_scope_t *scope)
{
    static const char *const known[] = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"};
    char found[SL_JSON_FOUND_BYTES];
    const json_t *list = sl_json_get(scope, "architectures");
    if (list == NULL) {
        return SL_OK;
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (name != NULL && (strcmp(name, known[0]) == 0 || strcmp(name, known[1]) == 0)) {
            return SL_OK;
        }
    }
    return sl_error(SL_ERR_UNSUPPORTED,
                    "%s: key architectures: expected \"%s\" or \"%s\" in a list, found %s",
                    scope->label, known[0], known[1], sl_json_found(list, found));
}

/* One id, a list of ids, or nothing. Ids replace what `config` has. */
static sl_status_t parse_eos(const sl_json_scope_t *scope, sl_model_config_t *config)
{
    char found[SL_JSON_FOUND_BYTES];
    const json_t *value = sl_json_get(scope, "eos_token_id");
    bool is_list = json_is_array(value);
    size_t count = value == NULL ? 0 : is_list ? json_array_size(value) : 1;
    if (count == 0) {
        return SL_OK;
    }
    if (count > SL_EOS_MAX) {
        return sl_error(SL_ERR_LIMIT, "%s: key eos_token_id: expected at most %d ids, found %zu",
                        scope->label, SL_EOS_MAX, count);
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *item = is_list ? json_array_get(value, i) : value;
        json_int_t id = json_integer_value(item);
        if (!json_is_integer(item) || id < 0 || id >= (json_int_t)config->vocab_size) {
            return sl_error(SL_ERR_INVALID,
                            "%s: key eos_token_id: expected ids below vocab_size %u, found %s",
                            scope->label, config->vocab_size, sl_json_found(item, found));
        }
        config->eos_token_ids[i] = (int32_t)id;
    }
    config->eos_count = (uint32_t)count;
    return SL_OK;
}

static sl_status_t require_moe(const char *label, const char *key, uint32_t value)
{
    return value > 0 ? SL_OK
                     : sl_error(SL_ERR_INVALID,
                                "%s: key %s: expected an integer of 1 or more for a model with "
                                "n_routed_experts, found nothing",
                                label, key);
}

/* Sums that have to come out for routing to be defined. */
static sl_status_t check_moe(const char *label, const sl_model_config_t *config)
{
    SL_TRY(require_moe(label, "moe_intermediate_size", config->moe_intermediate_size));
    SL_TRY(require_moe(label, "num_experts_per_tok", config->num_experts_per_tok));
    bool noaux = config->topk_method == SL_TOPK_NOAUX_TC;
    if (noaux != (config->scoring_func == SL_SCORE_SIGMOID)) {
        return sl_error(SL_ERR_UNSUPPORTED,
                        "%s: key scoring_func: expected \"%s\" with topk_method \"%s\", found "
                        "\"%s\"",
                        label, scoring_funcs[noaux ? SL_SCORE_SIGMOID : SL_SCORE_SOFTMAX],
                        topk_methods[config->topk_method], scoring_funcs[config->scoring_func]);
    }
    uint32_t candidates = config->n_routed_experts;
    if (config->topk_method != SL_TOPK_GREEDY) {
        uint32_t groups = config->n_group, chosen = config->topk_group;
        if (config->n_routed_experts % groups != 0) {
            return sl_error(SL_ERR_INVALID,
                            "%s: key n_group: expected a divisor of n_routed_experts %u, found %u",
                            label, config->n_routed_experts, groups);
        }
        if (chosen > groups) {
            return sl_error(SL_ERR_INVALID,
                            "%s: key topk_group: expected at most n_group %u, found %u", label,
                            groups, chosen);
        }
        candidates = config->n_routed_experts / groups;
        if (noaux && candidates < 2) {
            return sl_error(SL_ERR_INVALID,
                            "%s: key n_group: expected 2 or more experts a group for noaux_tc, "
                            "found %u groups of %u experts",
                            label, groups, config->n_routed_experts);
        }
        candidates *= chosen;
    }
    if (config->num_experts_per_tok > candidates) {
        return sl_error(SL_ERR_INVALID,
                        "%s: key num_experts_per_tok: expected at most the %u experts to choose "
                        "from, found %u",
                        label, candidates, config->num_experts_per_tok);
    }
    return SL_OK;
}

static sl_status_t parse_object(const sl_json_scope_t *scope, sl_model_config_t *config)
{
    int family = 0, method = 0, scoring = 0;
    SL_TRY(sl_json_word(scope, "model_type", model_types, -1, &family));
    snprintf(config->model_type, sizeof(config->model_type), "%s", model_types[family]);
    SL_TRY(check_architecture(scope));
    SL_TRY(refuse_unsupported(scope));
    SL_TRY(parse_fields(scope, family, config));
    SL_TRY(sl_json_word(scope, "topk_method", topk_methods,
                        family == FAMILY_V3 ? SL_TOPK_NOAUX_TC : SL_TOPK_GREEDY, &method));
    config->topk_method = (sl_topk_method_t)method;
    SL_TRY(sl_json_word(scope, "scoring_func", scoring_funcs,
                        family == FAMILY_V3 ? SL_SCORE_SIGMOID : SL_SCORE_SOFTMAX, &scoring));
    config->scoring_func = (sl_scoring_func_t)scoring;
    if (config->qk_rope_head_dim % 2 != 0) {
        return sl_error(SL_ERR_INVALID,
                        "%s: key qk_rope_head_dim: expected an even number, found %u", scope->label,
                        config->qk_rope_head_dim);
    }
    if (config->n_routed_experts > 0) {
        SL_TRY(check_moe(scope->label, config));
    }
    SL_TRY(parse_eos(scope, config));
    config->latent_width = config->kv_lora_rank + config->qk_rope_head_dim;
    config->qk_head_dim = config->qk_nope_head_dim + config->qk_rope_head_dim;
    return sl_rope_parse(scope, config);
}

sl_status_t sl_model_config_parse(const char *json, size_t size, const char *label,
                                  sl_model_config_t *config_p)
{
    json_t *root = NULL;
    sl_model_config_t config = {0};
    if (size > CONFIG_BYTES_MAX) {
        return sl_error(SL_ERR_LIMIT, "%s: expected at most %u bytes, found %zu", label,
                        CONFIG_BYTES_MAX, size);
    }
    SL_TRY(sl_json_parse(json, size, label, &root));
    sl_status_t status = parse_object(&(sl_json_scope_t){root, label, ""}, &config);
    json_decref(root);
    if (status == SL_OK) {
        *config_p = config;
    }
    return status;
}

static sl_status_t load_generation_config(const char *path, sl_model_config_t *config)
{
    json_t *root = NULL;
    sl_status_t status = sl_json_read(path, CONFIG_BYTES_MAX, &root);
    if (status == SL_ERR_NOT_FOUND) {
        return SL_OK; /* the file is optional */
    }
    SL_TRY(status);
    status = parse_eos(&(sl_json_scope_t){root, path, ""}, config);
    json_decref(root);
    return status;
}

sl_status_t sl_model_config_load(const char *dir, sl_model_config_t *config_p)
{
    char path[PATH_BYTES], generation_path[PATH_BYTES];
    json_t *root = NULL;
    sl_model_config_t config = {0};
    if (snprintf(path, sizeof(path), "%s/config.json", dir) >= (int)sizeof(path) ||
        snprintf(generation_path, sizeof(generation_path), "%s/generation_config.json", dir) >=
            (int)sizeof(generation_path)) {
        return sl_error(SL_ERR_INVALID, "model directory: expected a path of at most %d bytes",
                        PATH_BYTES - 32);
    }
    sl_status_t status = sl_json_read(path, CONFIG_BYTES_MAX, &root);
    if (status == SL_ERR_NOT_FOUND) {
        return sl_error(SL_ERR_IO, "%s: no such file; expected a Hugging Face checkpoint directory",
                        path);
    }
    SL_TRY(status);
    status = parse_object(&(sl_json_scope_t){root, path, ""}, &config);
    json_decref(root);
    SL_TRY(status);
    SL_TRY(load_generation_config(generation_path, &config));
    *config_p = config;
    return SL_OK;
}

bool sl_model_layer_is_moe(const sl_model_config_t *config, uint32_t layer)
{
    return config->n_routed_experts > 0 && layer >= config->first_k_dense_replace &&
           layer % config->moe_layer_freq == 0;
}

/* Appends to `text` as far as it reaches; *used_p counts on, as snprintf does. */
static void append(char *text, size_t size, size_t *used_p, const char *key, double value)
{
    char *at = *used_p < size ? text + *used_p : NULL;
    *used_p += (size_t)snprintf(at, at == NULL ? 0 : size - *used_p, " %s=%.10g", key, value);
}

size_t sl_model_config_text(const sl_model_config_t *config, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "%s", config->model_type);
    for (size_t i = 0; i < FIELD_COUNT; i++) {
        const void *value = (const char *)config + fields[i].offset;
        double number = fields[i].kind == KIND_U32     ? (double)*(const uint32_t *)value
                        : fields[i].kind == KIND_FLOAT ? (double)*(const float *)value
                                                       : (double)*(const bool *)value;
        append(text, size, &used, fields[i].key, number);
    }
    append(text, size, &used, "topk_method", (double)config->topk_method);
    append(text, size, &used, "scoring_func", (double)config->scoring_func);
    append(text, size, &used, "rope_theta", (double)config->rope_theta);
    if (config->yarn.enabled) {
        const sl_yarn_t *yarn = &config->yarn;
        append(text, size, &used, "yarn_factor", (double)yarn->factor);
        append(text, size, &used, "beta_fast", (double)yarn->beta_fast);
        append(text, size, &used, "beta_slow", (double)yarn->beta_slow);
        append(text, size, &used, "mscale", (double)yarn->mscale);
        append(text, size, &used, "mscale_all_dim", (double)yarn->mscale_all_dim);
        append(text, size, &used, "original", (double)yarn->original_max_position_embeddings);
    }
    for (uint32_t i = 0; i < config->eos_count; i++) {
        append(text, size, &used, "eos", (double)config->eos_token_ids[i]);
    }
    return used;
}
