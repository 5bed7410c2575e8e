#include "node/rules.h"

#include <string.h>

sl_status_t sl_rule_check(const sl_model_config_t *config, uint64_t attempt, uint64_t prompt_len,
                          const sl_sampling_t *sampling)
{
    uint64_t longest = config->max_position_embeddings;
    if (attempt == 0) {
        return sl_error(SL_ERR_INVALID, "attempt: expected an id above 0, found 0");
    }
    if (prompt_len == 0 || sampling->max_tokens == 0 || prompt_len > longest ||
        sampling->max_tokens > longest - prompt_len) {
        return sl_error(SL_ERR_INVALID,
                        "attempt %llu: expected a prompt and max_tokens of at least 1 and at most "
                        "%llu tokens together, found %llu and %u",
                        (unsigned long long)attempt, (unsigned long long)longest,
                        (unsigned long long)prompt_len, sampling->max_tokens);
    }
    return SL_OK;
}

static void mask(sl_sample_row_t *rule, const int32_t *ids, uint32_t count)
{
    SL_ASSERT(rule->masked_count + count <= SL_MASKED_TOKENS_MAX);
    memcpy(rule->masked + rule->masked_count, ids, count * sizeof(*ids));
    rule->masked_count += count;
}

void sl_rule_make(const sl_model_config_t *config, const sl_sampling_t *sampling, uint32_t index,
                  sl_sample_row_t *rule)
{
    *rule = (sl_sample_row_t){
        .temperature = sampling->temperature,
        .top_k = sampling->top_k,
        .top_p = sampling->top_p,
        .min_p = sampling->min_p,
        .seed = sampling->seed,
        .position = index,
        .logprobs = sampling->logprobs,
    };
    if (index < sampling->min_tokens) {
        mask(rule, sampling->stop_token_ids, sampling->stop_count);
        if (!sampling->ignore_eos) {
            mask(rule, config->eos_token_ids, config->eos_count);
        }
    }
}

static bool contains(const int32_t *ids, uint32_t count, int32_t id)
{
    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] == id) {
            return true;
        }
    }
    return false;
}

sl_finish_t sl_rule_finish(const sl_model_config_t *config, const sl_sampling_t *sampling,
                           uint32_t index, int32_t token)
{
    bool stops =
        contains(sampling->stop_token_ids, sampling->stop_count, token) ||
        (!sampling->ignore_eos && contains(config->eos_token_ids, config->eos_count, token));
    if (stops && index >= sampling->min_tokens) {
        return SL_FINISH_STOP;
    }
    return index + 1 >= sampling->max_tokens ? SL_FINISH_LENGTH : SL_FINISH_NONE;
}
