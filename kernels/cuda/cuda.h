/*
 * The CUDA backend: bf16 activations and weights, f32 sums, one NVIDIA GPU of compute capability
 * 9.0 a device. Logits, gate logits, routing weights and log-sum-exps are f32.
 *
 * Every operation but load_weight, upload, download and synchronize may be captured in a CUDA graph
 * once it has run on the same stream at its largest size (that is when scratch memory grows). An
 * operation never allocates otherwise, never synchronises and never reads device memory from the
 * host. A sl_stream_t * is a cudaStream_t; NULL is the device's own stream. Results are the same
 * from run to run: no float atomics, and no order that depends on scheduling.
 *
 * What the operations' files share is in device.h (host) and vec.cuh (device code); CUDA sources
 * get device.h from here.
 */
#ifndef SL_KERNELS_CUDA_CUDA_H
#define SL_KERNELS_CUDA_CUDA_H

#ifdef __cplusplus
/* The seam is C; C++ spells a few of its words otherwise. Standard headers stay outside of extern
 * "C", where C++ ones may hold templates. */
#include <cstddef>
#include <cstdint>
#include <cstring>
#ifndef _Noreturn
#define _Noreturn [[noreturn]]
#endif
extern "C" {
#endif

#include "kernels/ops.h"

extern const sl_ops_t sl_cuda_ops;

/* Operations by file, for the table in table.c. */
sl_status_t sl_cuda_open(const sl_device_params_t *params, sl_device_t **device_p);
void sl_cuda_close(sl_device_t *device);
sl_status_t sl_cuda_memory(sl_device_t *device, uint64_t *free_bytes, uint64_t *total_bytes);
sl_status_t sl_cuda_alloc(sl_device_t *device, size_t bytes, const char *what, void **memory_p);
void sl_cuda_free(sl_device_t *device, void *memory);
sl_status_t sl_cuda_alloc_host(sl_device_t *device, size_t bytes, const char *what,
                               void **memory_p);
void sl_cuda_free_host(sl_device_t *device, void *memory);
sl_status_t sl_cuda_upload(sl_device_t *device, sl_stream_t *stream, void *to, const void *host,
                           size_t bytes);
sl_status_t sl_cuda_download(sl_device_t *device, sl_stream_t *stream, void *host, const void *from,
                             size_t bytes);
sl_status_t sl_cuda_synchronize(sl_device_t *device, sl_stream_t *stream);
sl_status_t sl_cuda_bind_thread(sl_device_t *device);
sl_status_t sl_cuda_mark(sl_device_t *device, sl_stream_t *stream, uint32_t mark);
sl_status_t sl_cuda_wait_mark(sl_device_t *device, uint32_t mark);
sl_status_t sl_cuda_graph_begin(sl_device_t *device, sl_stream_t *stream);
sl_status_t sl_cuda_graph_end(sl_device_t *device, sl_stream_t *stream, sl_graph_t **graph_p);
sl_status_t sl_cuda_graph_launch(sl_device_t *device, sl_stream_t *stream, sl_graph_t *graph);
void sl_cuda_graph_free(sl_device_t *device, sl_graph_t *graph);
sl_status_t sl_cuda_collectives_open(sl_device_t *device, struct sl_group *group, uint32_t rank,
                                     uint32_t size, struct sl_collectives *collectives_p);
void sl_cuda_collectives_close(sl_device_t *device, struct sl_collectives *collectives);
sl_status_t sl_cuda_load_weight(sl_device_t *device, void *to, const sl_weight_source_t *source);

sl_status_t sl_cuda_dummy_weight(sl_device_t *device, const sl_dummy_weight_t *dummy);

sl_status_t sl_cuda_embed(sl_device_t *device, sl_stream_t *stream, const sl_embed_t *p);
sl_status_t sl_cuda_rms_norm(sl_device_t *device, sl_stream_t *stream, const sl_rms_norm_t *p);
sl_status_t sl_cuda_linear(sl_device_t *device, sl_stream_t *stream, const sl_linear_t *p);
sl_status_t sl_cuda_head_linear(sl_device_t *device, sl_stream_t *stream,
                                const sl_head_linear_t *p);
sl_status_t sl_cuda_rope_cache(sl_device_t *device, sl_stream_t *stream, const sl_rope_cache_t *p);
sl_status_t sl_cuda_gather_latents(sl_device_t *device, sl_stream_t *stream,
                                   const sl_gather_latents_t *p);
sl_status_t sl_cuda_attn_prefill(sl_device_t *device, sl_stream_t *stream,
                                 const sl_attn_prefill_t *p);
sl_status_t sl_cuda_attn_merge(sl_device_t *device, sl_stream_t *stream, const sl_attn_merge_t *p);
sl_status_t sl_cuda_attn_absorbed(sl_device_t *device, sl_stream_t *stream,
                                  const sl_attn_absorbed_t *p);
sl_status_t sl_cuda_route(sl_device_t *device, sl_stream_t *stream, const sl_route_t *p);
sl_status_t sl_cuda_moe_permute(sl_device_t *device, sl_stream_t *stream,
                                const sl_moe_permute_t *p);
sl_status_t sl_cuda_grouped_linear(sl_device_t *device, sl_stream_t *stream,
                                   const sl_grouped_linear_t *p);
sl_status_t sl_cuda_silu_mul(sl_device_t *device, sl_stream_t *stream, const sl_silu_mul_t *p);
sl_status_t sl_cuda_moe_combine(sl_device_t *device, sl_stream_t *stream,
                                const sl_moe_combine_t *p);
sl_status_t sl_cuda_take_rows(sl_device_t *device, sl_stream_t *stream, const sl_take_rows_t *p);
sl_status_t sl_cuda_sample(sl_device_t *device, sl_stream_t *stream, const sl_sample_t *p);
sl_status_t sl_cuda_token_logprobs(sl_device_t *device, sl_stream_t *stream,
                                   const sl_token_logprobs_t *p);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__
#include "kernels/cuda/device.h"
#endif

#endif
