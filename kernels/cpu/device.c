/* The CPU backend's table and device. */
#include "kernels/cpu/cpu.h"
#include "kernels/host.h"

static sl_status_t cpu_open(const sl_device_params_t *params, sl_device_t **device_p)
{
    int threads = params->threads != 0 ? params->threads : 1;
    if (params->index != 0) {
        return sl_error(SL_ERR_CONFIG, "cpu device %d: there is only device 0", params->index);
    }
    if (threads < 1 || threads > SL_CPU_THREADS_MAX) {
        return sl_error(SL_ERR_CONFIG, "cpu device: %d threads, expected 1 to %d", threads,
                        SL_CPU_THREADS_MAX);
    }
    sl_device_t *device = calloc(1, sizeof(*device));
    if (device == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "cpu device: %zu bytes asked", sizeof(*device));
    }
    device->isa = sl_isa_best();
    sl_status_t status = sl_pool_create((size_t)threads, &device->pool);
    if (status != SL_OK) {
        free(device);
        return status;
    }
    *device_p = device;
    return SL_OK;
}

static void cpu_close(sl_device_t *device)
{
    sl_pool_destroy(device->pool);
    free(device->scratch);
    free(device);
}

sl_status_t sl_cpu_scratch(sl_device_t *device, size_t bytes, const char *what, void **memory_p)
{
    if (bytes > device->scratch_bytes) {
        void *larger = NULL;
        SL_TRY(sl_host_alloc(bytes, what, &larger));
        free(device->scratch);
        device->scratch = larger;
        device->scratch_bytes = bytes;
    }
    *memory_p = device->scratch;
    return SL_OK;
}

static sl_status_t cpu_memory(sl_device_t *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    (void)device;
    return sl_host_memory(free_bytes, total_bytes);
}

static sl_status_t cpu_alloc(sl_device_t *device, size_t bytes, const char *what, void **memory_p)
{
    (void)device;
    return sl_host_alloc(bytes, what, memory_p);
}

static void cpu_free(sl_device_t *device, void *memory)
{
    (void)device;
    free(memory);
}

static sl_status_t cpu_copy(sl_device_t *device, sl_stream_t *stream, void *to, const void *from,
                            size_t bytes)
{
    (void)device, (void)stream;
    if (bytes > 0) {
        memmove(to, from, bytes);
    }
    return SL_OK;
}

static sl_status_t cpu_synchronize(sl_device_t *device, sl_stream_t *stream)
{
    (void)device, (void)stream;
    return SL_OK;
}

static sl_status_t cpu_load_weight(sl_device_t *device, void *to, const sl_weight_source_t *source)
{
    (void)device;
    sl_host_load_weight(to, source);
    return SL_OK;
}

const sl_ops_t sl_cpu_ops = {
    .name = "cpu",
    .act_dtype = SL_DTYPE_F32,
    .weight_dtype = SL_DTYPE_F32,
    .host_memory = true,
    .open = cpu_open,
    .close = cpu_close,
    .memory = cpu_memory,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .alloc_host = cpu_alloc,
    .free_host = cpu_free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .synchronize = cpu_synchronize,
    .bind_thread = sl_host_bind_thread,
    .mark = sl_host_mark,
    .wait_mark = sl_host_wait_mark,
    .collectives_open = sl_host_collectives_open,
    .collectives_close = sl_host_collectives_close,
    .load_weight = cpu_load_weight,
    .dummy_weight = sl_host_dummy_weight,
    .embed = sl_cpu_embed,
    .rms_norm = sl_cpu_rms_norm,
    .linear = sl_cpu_linear,
    .head_linear = sl_cpu_head_linear,
    .rope_cache = sl_cpu_rope_cache,
    .gather_latents = sl_cpu_gather_latents,
    .attn_prefill = sl_cpu_attn_prefill,
    .attn_merge = sl_cpu_attn_merge,
    .attn_absorbed = sl_cpu_attn_absorbed,
    .route = sl_cpu_route,
    .moe_permute = sl_cpu_moe_permute,
    .grouped_linear = sl_cpu_grouped_linear,
    .silu_mul = sl_cpu_silu_mul,
    .moe_combine = sl_cpu_moe_combine,
    .take_rows = sl_cpu_take_rows,
    .sample = sl_cpu_sample,
    .token_logprobs = sl_cpu_token_logprobs,
};
