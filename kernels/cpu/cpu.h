/*
 * The CPU backend: f32 activations and weights in host memory, operations run at once on the
 * calling thread, helped by a small pool where sl_device_params_t asks for several threads (the
 * products and attention; the results do not depend on the number). Design of the inner loops:
 * isa.h and isa_template.h.
 */
#ifndef SL_KERNELS_CPU_CPU_H
#define SL_KERNELS_CPU_CPU_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/pool.h"
#include "kernels/ops.h"

#define SL_CPU_THREADS_MAX 256

extern const sl_ops_t sl_cpu_ops;

struct sl_device {
    const sl_isa_t *isa;
    sl_pool_t *pool;
    void *scratch; /* grows to the largest need, so a steady load allocates nothing */
    size_t scratch_bytes;
};

/* At least `bytes` of memory that lives until the next call. SL_ERR_NO_MEMORY. */
sl_status_t sl_cpu_scratch(sl_device_t *device, size_t bytes, const char *what, void **memory_p);

/* Operations by file, for the table in device.c. */
sl_status_t sl_cpu_embed(sl_device_t *device, sl_stream_t *stream, const sl_embed_t *p);
sl_status_t sl_cpu_rms_norm(sl_device_t *device, sl_stream_t *stream, const sl_rms_norm_t *p);
sl_status_t sl_cpu_silu_mul(sl_device_t *device, sl_stream_t *stream, const sl_silu_mul_t *p);
sl_status_t sl_cpu_take_rows(sl_device_t *device, sl_stream_t *stream, const sl_take_rows_t *p);
sl_status_t sl_cpu_linear(sl_device_t *device, sl_stream_t *stream, const sl_linear_t *p);
sl_status_t sl_cpu_head_linear(sl_device_t *device, sl_stream_t *stream, const sl_head_linear_t *p);
sl_status_t sl_cpu_grouped_linear(sl_device_t *device, sl_stream_t *stream,
                                  const sl_grouped_linear_t *p);
sl_status_t sl_cpu_rope_cache(sl_device_t *device, sl_stream_t *stream, const sl_rope_cache_t *p);
sl_status_t sl_cpu_gather_latents(sl_device_t *device, sl_stream_t *stream,
                                  const sl_gather_latents_t *p);
sl_status_t sl_cpu_attn_prefill(sl_device_t *device, sl_stream_t *stream,
                                const sl_attn_prefill_t *p);
sl_status_t sl_cpu_attn_merge(sl_device_t *device, sl_stream_t *stream, const sl_attn_merge_t *p);
sl_status_t sl_cpu_attn_absorbed(sl_device_t *device, sl_stream_t *stream,
                                 const sl_attn_absorbed_t *p);
sl_status_t sl_cpu_route(sl_device_t *device, sl_stream_t *stream, const sl_route_t *p);
sl_status_t sl_cpu_moe_permute(sl_device_t *device, sl_stream_t *stream,
                               const sl_moe_permute_t *p);
sl_status_t sl_cpu_moe_combine(sl_device_t *device, sl_stream_t *stream,
                               const sl_moe_combine_t *p);
sl_status_t sl_cpu_sample(sl_device_t *device, sl_stream_t *stream, const sl_sample_t *p);
sl_status_t sl_cpu_token_logprobs(sl_device_t *device, sl_stream_t *stream,
                                  const sl_token_logprobs_t *p);

#endif
