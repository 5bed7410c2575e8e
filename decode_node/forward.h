/*
 * The decode pool's step on the device: the layers with absorbed attention, the LM head on every
 * row, and the choice of tokens, recorded once for each number of rows where the backend can.
 * Engine thread.
 */
#ifndef SL_DECODE_FORWARD_H
#define SL_DECODE_FORWARD_H

#include "common/base/status.h"
#include "kernels/layers/model.h"

/* Issues the step and does not wait for it. batch->rules NULL: no tokens are chosen here (TP
 * attention, ranks other than 0). Results: sl_model_fetch(). */
SL_MUST_USE sl_status_t sl_decode_forward(sl_model_t *model, uint32_t layers,
                                          const sl_batch_t *batch);

#endif
