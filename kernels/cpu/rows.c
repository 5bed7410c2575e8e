/* Operations on plain rows: gathers, norm, activation, and the three kinds of product. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

sl_status_t sl_cpu_embed(sl_device_t *device, sl_stream_t *stream, const sl_embed_t *p)
{
    (void)device, (void)stream;
    for (size_t t = 0; t < p->rows; t++) {
        SL_ASSERT(p->ids[t] >= 0 || p->previous != NULL);
        int32_t id = p->ids[t] >= 0 ? p->ids[t] : p->previous[-1 - p->ids[t]];
        SL_ASSERT(id >= 0);
        memcpy((float *)p->out + t * p->width, (const float *)p->table + (size_t)id * p->width,
               p->width * sizeof(float));
    }
    return SL_OK;
}

sl_status_t sl_cpu_take_rows(sl_device_t *device, sl_stream_t *stream, const sl_take_rows_t *p)
{
    (void)device, (void)stream;
    for (size_t i = 0; i < p->rows; i++) {
        SL_ASSERT(p->index[i] >= 0);
        memcpy((float *)p->out + i * p->width,
               (const float *)p->x + (size_t)p->index[i] * p->width, p->width * sizeof(float));
    }
    return SL_OK;
}

sl_status_t sl_cpu_rms_norm(sl_device_t *device, sl_stream_t *stream, const sl_rms_norm_t *p)
{
    (void)stream;
    SL_ASSERT(p->x != NULL || p->residual != NULL);
    const sl_isa_t *isa = device->isa;
    size_t x_stride = p->x_stride ? p->x_stride : p->width;
    size_t out_stride = p->out_stride ? p->out_stride : p->width;
    for (size_t t = 0; t < p->rows; t++) {
        float *out = (float *)p->out + t * out_stride;
        const float *in = p->x != NULL ? (const float *)p->x + t * x_stride : NULL;
        if (p->residual != NULL) {
            float *residual = (float *)p->residual + t * p->width;
            if (in != NULL) {
                isa->add_scaled(residual, in, 1, p->width);
            }
            in = residual;
        }
        float mean = isa->square_sum(in, p->width) / (float)p->width;
        isa->scale_by(out, in, p->weight, 1 / sqrtf(mean + p->eps), p->width);
    }
    return SL_OK;
}

sl_status_t sl_cpu_silu_mul(sl_device_t *device, sl_stream_t *stream, const sl_silu_mul_t *p)
{
    (void)stream;
    size_t rows = p->row_count != NULL ? (size_t)*p->row_count : p->rows;
    SL_ASSERT(rows <= p->rows);
    for (size_t r = 0; r < rows; r++) {
        const float *gate = (const float *)p->x + r * 2 * p->width;
        device->isa->silu_mul((float *)p->out + r * p->width, gate, gate + p->width, p->width);
    }
    return SL_OK;
}

/* The threads share the columns of each product. */
typedef struct {
    const sl_isa_t *isa;
    const void *params;
} product_job_t;

static void linear_part(const void *job_p, size_t part, size_t parts)
{
    const product_job_t *job = job_p;
    const sl_linear_t *p = job->params;
    size_t begin, end;
    sl_pool_part(p->n, 4, part, parts, &begin, &end);
    sl_dot_t dot = {
        .parts[0] = {.x = p->x,
                     .w = (const float *)p->w + begin * p->k,
                     .x_stride = p->x_stride ? p->x_stride : p->k,
                     .w_stride = p->k,
                     .k = p->k},
        .part_count = 1,
        .rows = p->rows,
        .n = end - begin,
        .out = (float *)p->out + begin,
        .out_stride = p->out_stride ? p->out_stride : p->n,
    };
    job->isa->dot(&dot);
}

sl_status_t sl_cpu_linear(sl_device_t *device, sl_stream_t *stream, const sl_linear_t *p)
{
    (void)stream;
    product_job_t job = {.isa = device->isa, .params = p};
    sl_pool_run(device->pool, (double)p->rows * p->n * p->k, linear_part, &job);
    return SL_OK;
}

static void head_linear_part(const void *job_p, size_t part, size_t parts)
{
    const product_job_t *job = job_p;
    const sl_head_linear_t *p = job->params;
    size_t begin, end;
    sl_pool_part(p->n, 4, part, parts, &begin, &end);
    for (size_t i = 0; i < p->heads; i++) {
        sl_dot_t dot = {
            .parts[0] = {.x = (const float *)p->x + i * p->x_head_stride,
                         .w = (const float *)p->w + (i * p->n + begin) * p->k,
                         .x_stride = p->x_row_stride,
                         .w_stride = p->k,
                         .k = p->k},
            .part_count = 1,
            .rows = p->rows,
            .n = end - begin,
            .out = (float *)p->out + i * p->out_head_stride + begin,
            .out_stride = p->out_row_stride,
        };
        job->isa->dot(&dot);
    }
}

sl_status_t sl_cpu_head_linear(sl_device_t *device, sl_stream_t *stream, const sl_head_linear_t *p)
{
    (void)stream;
    product_job_t job = {.isa = device->isa, .params = p};
    sl_pool_run(device->pool, (double)p->rows * p->heads * p->n * p->k, head_linear_part, &job);
    return SL_OK;
}

static void grouped_linear_part(const void *job_p, size_t part, size_t parts)
{
    const product_job_t *job = job_p;
    const sl_grouped_linear_t *p = job->params;
    size_t begin, end;
    sl_pool_part(p->n, 4, part, parts, &begin, &end);
    for (size_t e = 0; e < p->experts; e++) {
        size_t first = (size_t)p->expert_begin[e], last = (size_t)p->expert_begin[e + 1];
        SL_ASSERT(first <= last && last <= p->max_rows);
        sl_dot_t dot = {
            .parts[0] = {.x = (const float *)p->x + first * p->k,
                         .w = (const float *)p->w + (e * p->n + begin) * p->k,
                         .x_stride = p->k,
                         .w_stride = p->k,
                         .k = p->k},
            .part_count = 1,
            .rows = last - first,
            .n = end - begin,
            .out = (float *)p->out + first * p->n + begin,
            .out_stride = p->n,
        };
        job->isa->dot(&dot);
    }
}

sl_status_t sl_cpu_grouped_linear(sl_device_t *device, sl_stream_t *stream,
                                  const sl_grouped_linear_t *p)
{
    (void)stream;
    product_job_t job = {.isa = device->isa, .params = p};
    double rows = p->experts > 0 ? p->expert_begin[p->experts] : 0;
    sl_pool_run(device->pool, rows * p->n * p->k, grouped_linear_part, &job);
    return SL_OK;
}
