/*
 * Any bytes as config.json: an error or a config whose every number can be used. What a config lets
 * through is used the way the loader uses it, so that a hole in the checks shows as a crash here.
 */
#include <math.h>
#include <stdlib.h>

#include "common/base/log.h"
#include "common/model/config.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    sl_model_config_t config;
    char text[4096];
    sl_log_set_level((sl_log_level_t)(SL_LOG_ERROR + 1));
    if (sl_model_config_parse((const char *)data, size, "config.json", &config) != SL_OK) {
        return 0;
    }
    SL_ASSERT(sl_model_config_text(&config, text, sizeof(text)) < sizeof(text));
    SL_ASSERT(isfinite(config.softmax_scale) && config.softmax_scale > 0);
    SL_ASSERT(isfinite(config.rope_cos_sin_scale) && config.rope_cos_sin_scale > 0);
    SL_ASSERT(config.eos_count <= SL_EOS_MAX);
    (void)sl_model_layer_is_moe(&config, config.num_hidden_layers - 1);
    float *inv_freq = malloc(sizeof(float) * (config.qk_rope_head_dim / 2));
    SL_ASSERT(inv_freq != NULL);
    sl_model_rope_inv_freq(&config, inv_freq);
    for (uint32_t j = 0; j < config.qk_rope_head_dim / 2; j++) {
        SL_ASSERT(isfinite(inv_freq[j]) && inv_freq[j] >= 0 && inv_freq[j] <= 1);
    }
    free(inv_freq);
    return 0;
}
