/* Which tensors a config calls for, under which names and in which shapes. Pure. */
#ifndef SL_MODEL_WEIGHTS_H
#define SL_MODEL_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/model/checkpoint.h"

#define SL_WEIGHT_NAME_BYTES 128

typedef enum { SL_WEIGHT_GLOBAL, SL_WEIGHT_LAYER, SL_WEIGHT_EXPERT } sl_weight_scope_t;

sl_weight_scope_t sl_weight_scope(sl_weight_kind_t kind);

/* Whether layer `layer` has weights of this kind (any layer for global ones). */
bool sl_weight_present(const sl_model_config_t *config, sl_weight_kind_t kind, uint32_t layer);

void sl_weight_name(sl_weight_kind_t kind, uint32_t layer, uint32_t expert,
                    char name[SL_WEIGHT_NAME_BYTES]);

/* Rows and columns; a vector has rank 1 and shape[1] of 1. */
void sl_weight_shape(const sl_model_config_t *config, sl_weight_kind_t kind, uint32_t *rank_p,
                     uint64_t shape[2]);

/* Whether a tensor that no weight claims is known and needless here: the layers after the last
 * (multi-token prediction) and the frequencies that early files carry. */
bool sl_weight_skipped(const sl_model_config_t *config, const char *name);

#endif
