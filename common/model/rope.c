/*
 * RoPE, plain or extended by YaRN (https://arxiv.org/abs/2309.00071).
 *
 * Two spellings are read: `rope_theta` beside a `rope_scaling` object, as DeepSeek published them,
 * and one `rope_parameters` object with the base inside, as transformers 5 writes them. As in
 * transformers, YaRN applies from the first position on, not only to long contexts.
 *
 * With m(x) = 0.1 * x * ln(factor) + 1 there are two corrections that are easily confused:
 *   cos and sin    times m(mscale) / m(mscale_all_dim), which is 1 in every published model;
 *   softmax scale  times m(mscale_all_dim) squared, where mscale_all_dim is set.
 */
#include "common/model/rope.h"

#include <math.h>
#include <string.h>

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

/* The object that describes RoPE, or NULL; *scope_p is how its keys are named. */
static sl_status_t find_object(const sl_json_scope_t *scope, sl_json_scope_t *scope_p)
{
    static const struct {
        const char *key, *prefix;
    } spellings[] = {{"rope_scaling", "rope_scaling."}, {"rope_parameters", "rope_parameters."}};
    char found[SL_JSON_FOUND_BYTES];
    *scope_p = (sl_json_scope_t){NULL, scope->label, ""};
    for (size_t i = 0; i < sizeof(spellings) / sizeof(spellings[0]); i++) {
        const json_t *value = sl_json_get(scope, spellings[i].key);
        if (value == NULL) {
            continue;
        }
        if (!json_is_object(value)) {
            return sl_error(SL_ERR_INVALID, "%s: key %s: expected an object or null, found %s",
                            scope->label, spellings[i].key, sl_json_found(value, found));
        }
        *scope_p = (sl_json_scope_t){value, scope->label, spellings[i].prefix};
        return SL_OK;
    }
    return SL_OK;
}

static sl_status_t parse_theta(const sl_json_scope_t *scope, const sl_json_scope_t *rope,
                               float *theta_p)
{
    static const float fallback = 10000.0f;
    bool inside = rope->object != NULL && sl_json_get(rope, "rope_theta") != NULL;
    return sl_json_float(inside ? rope : scope, "rope_theta", 1.001, 1e12, &fallback, theta_p);
}

/* Variants of YaRN that no DeepSeek model uses and this code does not compute. */
static sl_status_t refuse_variants(const sl_json_scope_t *rope)
{
    char found[SL_JSON_FOUND_BYTES];
    bool truncate = true;
    float partial = 1.0f;
    const json_t *attention = sl_json_get(rope, "attention_factor");
    if (attention != NULL) {
        return sl_error(SL_ERR_UNSUPPORTED,
                        "%s: key %sattention_factor: expected none (mscale and mscale_all_dim set "
                        "it), found %s",
                        rope->label, rope->prefix, sl_json_found(attention, found));
    }
    SL_TRY(sl_json_bool(rope, "truncate", true, &truncate));
    if (!truncate) {
        return sl_error(SL_ERR_UNSUPPORTED, "%s: key %struncate: expected true, found false",
                        rope->label, rope->prefix);
    }
    SL_TRY(sl_json_float(rope, "partial_rotary_factor", 0, 1, &partial, &partial));
    if (partial != 1.0f) {
        return sl_error(SL_ERR_UNSUPPORTED, "%s: key %spartial_rotary_factor: expected 1, found %g",
                        rope->label, rope->prefix, (double)partial);
    }
    return SL_OK;
}

static sl_status_t parse_yarn(const sl_json_scope_t *rope, const sl_model_config_t *config,
                              sl_yarn_t *yarn)
{
    static const float beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 0;
    SL_TRY(refuse_variants(rope));
    SL_TRY(sl_json_u32(rope, "original_max_position_embeddings", 1, UINT32_MAX,
                       &config->max_position_embeddings, &yarn->original_max_position_embeddings));
    float factor =
        (float)config->max_position_embeddings / (float)yarn->original_max_position_embeddings;
    if (factor < 1) {
        factor = 1;
    }
    SL_TRY(sl_json_float(rope, "factor", 1, 1e6, &factor, &yarn->factor));
    SL_TRY(sl_json_float(rope, "beta_fast", 1e-3, 1e6, &beta_fast, &yarn->beta_fast));
    SL_TRY(sl_json_float(rope, "beta_slow", 1e-3, 1e6, &beta_slow, &yarn->beta_slow));
    SL_TRY(sl_json_float(rope, "mscale", 0, 1e3, &mscale, &yarn->mscale));
    SL_TRY(sl_json_float(rope, "mscale_all_dim", 0, 1e3, &mscale_all_dim, &yarn->mscale_all_dim));
    if (yarn->beta_fast < yarn->beta_slow) {
        return sl_error(
            SL_ERR_INVALID, "%s: key %sbeta_fast: expected at least beta_slow (%g), found %g",
            rope->label, rope->prefix, (double)yarn->beta_slow, (double)yarn->beta_fast);
    }
    yarn->enabled = yarn->factor > 1;
    return SL_OK;
}

sl_status_t sl_rope_parse(const sl_json_scope_t *scope, sl_model_config_t *config)
{
    enum { DEFAULT, YARN };
    static const char *const types[] = {"default", "yarn", NULL};
    sl_json_scope_t rope;
    int type = DEFAULT;
    bool interleave = true;

    SL_TRY(sl_json_bool(scope, "rope_interleave", true, &interleave));
    if (!interleave) {
        return sl_error(SL_ERR_UNSUPPORTED, "%s: key rope_interleave: expected true, found false",
                        scope->label);
    }
    SL_TRY(find_object(scope, &rope));
    SL_TRY(parse_theta(scope, &rope, &config->rope_theta));
    if (rope.object != NULL) {
        const char *key = sl_json_get(&rope, "rope_type") != NULL ? "rope_type" : "type";
        SL_TRY(sl_json_word(&rope, key, types, DEFAULT, &type));
    }
    if (type == YARN) {
        SL_TRY(parse_yarn(&rope, config, &config->yarn));
    }

    double scale = 1.0 / sqrt((double)config->qk_head_dim);
    double cos_sin = 1.0;
    if (config->yarn.enabled) {
        double all_dim =
            yarn_mscale((double)config->yarn.factor, (double)config->yarn.mscale_all_dim);
        scale *= all_dim * all_dim; /* 1 where mscale_all_dim is not set */
        cos_sin = yarn_mscale((double)config->yarn.factor, (double)config->yarn.mscale) / all_dim;
    }
    config->softmax_scale = (float)scale;
    config->rope_cos_sin_scale = (float)cos_sin;
    return SL_OK;
}

/* The (fractional) pair that turns `rotations` times within the original context. */
static double correction_dim(const sl_model_config_t *config, double rotations)
{
    double context = (double)config->yarn.original_max_position_embeddings;
    return (double)config->qk_rope_head_dim * log(context / (rotations * 2.0 * M_PI)) /
           (2.0 * log((double)config->rope_theta));
}

/*
 * Pairs below `low` turn often and keep their frequency, pairs above `high` are slowed down by the
 * factor, and a ramp joins the two. Products are rounded to float where transformers does, since an
 * angle is frequency times position and a long context magnifies the difference.
 */
void sl_model_rope_inv_freq(const sl_model_config_t *config, float *inv_freq)
{
    uint32_t dim = config->qk_rope_head_dim;
    double low = 0, high = 0;
    if (config->yarn.enabled) {
        low = fmax(floor(correction_dim(config, (double)config->yarn.beta_fast)), 0.0);
        high =
            fmin(ceil(correction_dim(config, (double)config->yarn.beta_slow)), (double)dim - 1.0);
        if (low == high) {
            high += 0.001;
        }
    }
    for (uint32_t j = 0; j < dim / 2; j++) {
        float power = (float)pow((double)config->rope_theta, (double)((float)(2 * j) / (float)dim));
        inv_freq[j] = 1.0f / power;
        if (config->yarn.enabled) {
            float ramp = (float)fmin(fmax(((double)j - low) / (high - low), 0.0), 1.0);
            inv_freq[j] = 1.0f / (config->yarn.factor * power) * ramp + inv_freq[j] * (1.0f - ramp);
        }
    }
}
