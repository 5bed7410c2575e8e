/*
 * The schedule of the absorbed attention, which all layers of a step can share.
 *
 * It depends on kv_len and row_request alone, and those are device memory: a small kernel makes it.
 * A caller that runs several layers over the same arrays calls plan once, then attn_absorbed for
 * each layer, then plan_end. Without a plan of the very same stream, arrays, rows and heads,
 * attn_absorbed makes its own first: correct, one small launch slower.
 *
 * All of it may be captured in a graph: what is captured between plan and plan_end replays the
 * plan's kernel too. The arrays' contents must not change between the plan and its last use.
 */
#ifndef SL_KERNELS_CUDA_ATTN_H
#define SL_KERNELS_CUDA_ATTN_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of `p` only cache (but its base), row_request, kv_len, rows, heads and kv_lora are used. Engine
 * thread; asynchronous. SL_ERR_DEVICE, SL_ERR_NO_MEMORY. */
SL_MUST_USE sl_status_t sl_cuda_attn_absorbed_plan(sl_device_t *device, sl_stream_t *stream,
                                                   const sl_attn_absorbed_t *p);

/* The plan is not to be used any more: the arrays are about to change. */
void sl_cuda_attn_absorbed_plan_end(sl_device_t *device);

#ifdef __cplusplus
}
#endif

#endif
