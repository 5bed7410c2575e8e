/* The oracle's table, its (stateless) device, and the operations that work on plain rows. */
#include <math.h>

#include "kernels/host.h"
#include "kernels/ref/ref.h"

struct sl_device {
    int index;
};

static sl_status_t ref_open(const sl_device_params_t *params, sl_device_t **device_p)
{
    sl_device_t *device = calloc(1, sizeof(*device));
    if (device == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "ref device: %zu bytes asked", sizeof(*device));
    }
    device->index = params->index;
    *device_p = device;
    return SL_OK;
}

static void ref_close(sl_device_t *device)
{
    free(device);
}

static sl_status_t ref_memory(sl_device_t *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    (void)device;
    return sl_host_memory(free_bytes, total_bytes);
}

static sl_status_t ref_alloc(sl_device_t *device, size_t bytes, const char *what, void **memory_p)
{
    (void)device;
    return sl_host_alloc(bytes, what, memory_p);
}

static void ref_free(sl_device_t *device, void *memory)
{
    (void)device;
    free(memory);
}

static sl_status_t ref_copy(sl_device_t *device, sl_stream_t *stream, void *to, const void *from,
                            size_t bytes)
{
    (void)device, (void)stream;
    if (bytes > 0) {
        memmove(to, from, bytes);
    }
    return SL_OK;
}

static sl_status_t ref_synchronize(sl_device_t *device, sl_stream_t *stream)
{
    (void)device, (void)stream;
    return SL_OK;
}

static sl_status_t ref_load_weight(sl_device_t *device, void *to, const sl_weight_source_t *source)
{
    (void)device;
    sl_host_load_weight(to, source);
    return SL_OK;
}

static sl_status_t ref_embed(sl_device_t *device, sl_stream_t *stream, const sl_embed_t *p)
{
    (void)device, (void)stream;
    float *out = p->out;
    const float *table = p->table;
    for (size_t t = 0; t < p->rows; t++) {
        int32_t id = p->ids[t];
        if (id < 0) {
            SL_ASSERT(p->previous != NULL);
            id = p->previous[-1 - id];
        }
        SL_ASSERT(id >= 0);
        for (size_t i = 0; i < p->width; i++) {
            out[t * p->width + i] = table[(size_t)id * p->width + i];
        }
    }
    return SL_OK;
}

static sl_status_t ref_rms_norm(sl_device_t *device, sl_stream_t *stream, const sl_rms_norm_t *p)
{
    (void)device, (void)stream;
    SL_ASSERT(p->x != NULL || p->residual != NULL);
    size_t x_stride = p->x_stride ? p->x_stride : p->width;
    size_t out_stride = p->out_stride ? p->out_stride : p->width;
    const float *weight = p->weight;
    for (size_t t = 0; t < p->rows; t++) {
        float *out = (float *)p->out + t * out_stride;
        const float *in = p->x != NULL ? (const float *)p->x + t * x_stride : NULL;
        if (p->residual != NULL) {
            float *residual = (float *)p->residual + t * p->width;
            for (size_t i = 0; in != NULL && i < p->width; i++) {
                residual[i] += in[i];
            }
            in = residual;
        }
        double square_sum = 0;
        for (size_t i = 0; i < p->width; i++) {
            square_sum += (double)in[i] * in[i];
        }
        double scale = 1 / sqrt(square_sum / p->width + (double)p->eps);
        for (size_t i = 0; i < p->width; i++) {
            out[i] = (float)(in[i] * scale * weight[i]);
        }
    }
    return SL_OK;
}

static float dot(const float *a, const float *b, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += (double)a[i] * b[i];
    }
    return (float)sum;
}

static sl_status_t ref_linear(sl_device_t *device, sl_stream_t *stream, const sl_linear_t *p)
{
    (void)device, (void)stream;
    size_t x_stride = p->x_stride ? p->x_stride : p->k;
    size_t out_stride = p->out_stride ? p->out_stride : p->n;
    const float *x = p->x, *w = p->w;
    float *out = p->out;
    for (size_t t = 0; t < p->rows; t++) {
        for (size_t n = 0; n < p->n; n++) {
            out[t * out_stride + n] = dot(x + t * x_stride, w + n * p->k, p->k);
        }
    }
    return SL_OK;
}

static sl_status_t ref_head_linear(sl_device_t *device, sl_stream_t *stream,
                                   const sl_head_linear_t *p)
{
    (void)device, (void)stream;
    for (size_t t = 0; t < p->rows; t++) {
        for (size_t i = 0; i < p->heads; i++) {
            const float *x = (const float *)p->x + t * p->x_row_stride + i * p->x_head_stride;
            const float *w = (const float *)p->w + i * p->n * p->k;
            float *out = (float *)p->out + t * p->out_row_stride + i * p->out_head_stride;
            for (size_t n = 0; n < p->n; n++) {
                out[n] = dot(x, w + n * p->k, p->k);
            }
        }
    }
    return SL_OK;
}

sl_status_t sl_ref_grouped_linear(sl_device_t *device, sl_stream_t *stream,
                                  const sl_grouped_linear_t *p)
{
    (void)device, (void)stream;
    const float *x = p->x, *w = p->w;
    float *out = p->out;
    for (size_t e = 0; e < p->experts; e++) {
        SL_ASSERT(p->expert_begin[e + 1] <= (int64_t)p->max_rows);
        for (size_t r = (size_t)p->expert_begin[e]; r < (size_t)p->expert_begin[e + 1]; r++) {
            for (size_t n = 0; n < p->n; n++) {
                out[r * p->n + n] = dot(x + r * p->k, w + (e * p->n + n) * p->k, p->k);
            }
        }
    }
    return SL_OK;
}

static sl_status_t ref_silu_mul(sl_device_t *device, sl_stream_t *stream, const sl_silu_mul_t *p)
{
    (void)device, (void)stream;
    const float *x = p->x;
    float *out = p->out;
    size_t rows = p->row_count != NULL ? (size_t)*p->row_count : p->rows;
    SL_ASSERT(rows <= p->rows);
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < p->width; i++) {
            double gate = x[r * 2 * p->width + i];
            double up = x[r * 2 * p->width + p->width + i];
            out[r * p->width + i] = (float)(gate / (1 + exp(-gate)) * up);
        }
    }
    return SL_OK;
}

static sl_status_t ref_take_rows(sl_device_t *device, sl_stream_t *stream, const sl_take_rows_t *p)
{
    (void)device, (void)stream;
    const float *x = p->x;
    float *out = p->out;
    for (size_t i = 0; i < p->rows; i++) {
        SL_ASSERT(p->index[i] >= 0);
        for (size_t c = 0; c < p->width; c++) {
            out[i * p->width + c] = x[(size_t)p->index[i] * p->width + c];
        }
    }
    return SL_OK;
}

const sl_ops_t sl_ref_ops = {
    .name = "ref",
    .act_dtype = SL_DTYPE_F32,
    .weight_dtype = SL_DTYPE_F32,
    .host_memory = true,
    .open = ref_open,
    .close = ref_close,
    .memory = ref_memory,
    .alloc = ref_alloc,
    .free = ref_free,
    .alloc_host = ref_alloc,
    .free_host = ref_free,
    .upload = ref_copy,
    .download = ref_copy,
    .synchronize = ref_synchronize,
    .bind_thread = sl_host_bind_thread,
    .mark = sl_host_mark,
    .wait_mark = sl_host_wait_mark,
    .collectives_open = sl_host_collectives_open,
    .collectives_close = sl_host_collectives_close,
    .load_weight = ref_load_weight,
    .dummy_weight = sl_host_dummy_weight,
    .embed = ref_embed,
    .rms_norm = ref_rms_norm,
    .linear = ref_linear,
    .head_linear = ref_head_linear,
    .rope_cache = sl_ref_rope_cache,
    .gather_latents = sl_ref_gather_latents,
    .attn_prefill = sl_ref_attn_prefill,
    .attn_merge = sl_ref_attn_merge,
    .attn_absorbed = sl_ref_attn_absorbed,
    .route = sl_ref_route,
    .moe_permute = sl_ref_moe_permute,
    .grouped_linear = sl_ref_grouped_linear,
    .silu_mul = ref_silu_mul,
    .moe_combine = sl_ref_moe_combine,
    .take_rows = ref_take_rows,
    .sample = sl_ref_sample,
    .token_logprobs = sl_ref_token_logprobs,
};
