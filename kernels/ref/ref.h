/*
 * The oracle backend: every operation of kernels/ops.h as its definition reads, one scalar loop at
 * a time, sums in double. Never optimised; the other backends are tested against it. One thread
 * whatever sl_device_params_t says.
 */
#ifndef SL_KERNELS_REF_REF_H
#define SL_KERNELS_REF_REF_H

#include "kernels/ops.h"

extern const sl_ops_t sl_ref_ops;

/* Operations by file, for the table in ops.c. */
sl_status_t sl_ref_rope_cache(sl_device_t *device, sl_stream_t *stream, const sl_rope_cache_t *p);
sl_status_t sl_ref_gather_latents(sl_device_t *device, sl_stream_t *stream,
                                  const sl_gather_latents_t *p);
sl_status_t sl_ref_attn_prefill(sl_device_t *device, sl_stream_t *stream,
                                const sl_attn_prefill_t *p);
sl_status_t sl_ref_attn_merge(sl_device_t *device, sl_stream_t *stream, const sl_attn_merge_t *p);
sl_status_t sl_ref_attn_absorbed(sl_device_t *device, sl_stream_t *stream,
                                 const sl_attn_absorbed_t *p);
sl_status_t sl_ref_route(sl_device_t *device, sl_stream_t *stream, const sl_route_t *p);
sl_status_t sl_ref_moe_permute(sl_device_t *device, sl_stream_t *stream,
                               const sl_moe_permute_t *p);
sl_status_t sl_ref_grouped_linear(sl_device_t *device, sl_stream_t *stream,
                                  const sl_grouped_linear_t *p);
sl_status_t sl_ref_moe_combine(sl_device_t *device, sl_stream_t *stream,
                               const sl_moe_combine_t *p);
sl_status_t sl_ref_sample(sl_device_t *device, sl_stream_t *stream, const sl_sample_t *p);
sl_status_t sl_ref_token_logprobs(sl_device_t *device, sl_stream_t *stream,
                                  const sl_token_logprobs_t *p);

#endif
