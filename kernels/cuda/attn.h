/*
 * The plan of the absorbed attention: a schedule that all layers of a step can share.
 *
 * It depends on kv_len and row_request alone, and those are device memory: a small kernel makes it.
 * A caller that runs several layers over the same arrays calls plan once, then attn_absorbed for
 * each layer. Without a plan in effect for the very same stream, arrays, rows and heads,
 * attn_absorbed makes one for itself first: correct, one small launch slower.
 *
 * A device has one plan in effect at most. Each of these ends it, so that one made of other lengths
 * is never used:
 *
 *   plan, or an attn_absorbed   the plan's memory is written again
 *     without a plan
 *   upload                      the arrays may have new contents (nothing else writes them)
 *   graph_begin                 a recording holds the plan's kernel itself, or each layer's own
 *   graph_end                   a recorded plan has not been made yet
 *   graph_launch                the replay writes the plan's memory
 *
 * Hence an ordinary step and a recorded one may follow each other in any order, and a recording
 * never depends on what ran before its launch.
 */
#ifndef SL_KERNELS_CUDA_ATTN_H
#define SL_KERNELS_CUDA_ATTN_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of `p` only cache (but its base), row_request, kv_len, rows, heads and kv_lora are used. A shape
 * that needs no plan is SL_OK. Engine thread; asynchronous. SL_ERR_DEVICE, SL_ERR_NO_MEMORY. */
SL_MUST_USE sl_status_t sl_cuda_attn_absorbed_plan(sl_device_t *device, sl_stream_t *stream,
                                                   const sl_attn_absorbed_t *p);

#ifdef __cplusplus
}
#endif

#endif
