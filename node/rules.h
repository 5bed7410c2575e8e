/*
 * From a request's sampling parameters to the rule of one token, and whether a token ends the
 * request. Used for the first token by prefill and for the others by decode, so that both apply
 * the same rule. Pure functions.
 */
#ifndef SL_NODE_RULES_H
#define SL_NODE_RULES_H

#include "common/model/config.h"
#include "common/wire/messages.h"
#include "kernels/ops.h"

/* What a rank checks of an attempt before it takes it: an id, a prompt, and room in the model for
 * prompt and max_tokens. SL_ERR_INVALID with the field, expected and found. */
SL_MUST_USE sl_status_t sl_rule_check(const sl_model_config_t *config, uint64_t attempt,
                                      uint64_t prompt_len, const sl_sampling_t *sampling);

/* The rule for output `index` (0: the first token after the prompt). */
void sl_rule_make(const sl_model_config_t *config, const sl_sampling_t *sampling, uint32_t index,
                  sl_sample_row_t *rule);

/* Whether `token` as output `index` is the last one, and why. */
sl_finish_t sl_rule_finish(const sl_model_config_t *config, const sl_sampling_t *sampling,
                           uint32_t index, int32_t token);

#endif
