/* Rotary embedding of a config: which keys say it, and what follows from them. Part of config. */
#ifndef SL_MODEL_ROPE_H
#define SL_MODEL_ROPE_H

#include "common/model/config.h"
#include "common/model/json.h"

/* Fills rope_theta, yarn, softmax_scale and rope_cos_sin_scale; the head dimensions and
 * max_position_embeddings of `config` are already there. */
SL_MUST_USE sl_status_t sl_rope_parse(const sl_json_scope_t *scope, sl_model_config_t *config);

#endif
