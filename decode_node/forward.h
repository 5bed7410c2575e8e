/* The decode pool's forward pass: absorbed attention over the paged latents. Engine thread. */
#ifndef SL_DECODE_FORWARD_H
#define SL_DECODE_FORWARD_H

#include "common/base/status.h"
#include "kernels/layers/model.h"

SL_MUST_USE sl_status_t sl_decode_forward(sl_model_t *model, uint32_t layers,
                                          const sl_batch_t *batch);

#endif
