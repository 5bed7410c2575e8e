/* The latents on their way into the cache and out of it. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/host.h"

/* Rotates pairs (2j, 2j+1) in place. */
static void rotate(float *x, const float *cosines, const float *sines, size_t pairs)
{
    for (size_t j = 0; j < pairs; j++) {
        float a = x[2 * j], b = x[2 * j + 1];
        x[2 * j] = a * cosines[j] - b * sines[j];
        x[2 * j + 1] = b * cosines[j] + a * sines[j];
    }
}

sl_status_t sl_cpu_rope_cache(sl_device_t *device, sl_stream_t *stream, const sl_rope_cache_t *p)
{
    (void)stream;
    const sl_isa_t *isa = device->isa;
    size_t head_width = p->nope + p->rope, width = p->kv_lora + p->rope, pairs = p->rope / 2;
    size_t q_stride = p->q_stride ? p->q_stride : p->heads * head_width;
    for (size_t t = 0; t < p->rows; t++) {
        SL_ASSERT(p->positions[t] >= 0);
        const float *cosines = p->cos_sin + (size_t)p->positions[t] * p->rope;
        const float *sines = cosines + pairs;
        float *q = (float *)p->q + t * q_stride + p->nope;
        for (size_t i = 0; i < p->heads; i++) {
            rotate(q + i * head_width, cosines, sines, pairs);
        }
        float *latent = (float *)p->latent + t * width;
        float mean = isa->square_sum(latent, p->kv_lora) / (float)p->kv_lora;
        isa->scale_by(latent, latent, p->norm_weight, 1 / sqrtf(mean + p->eps), p->kv_lora);
        rotate(latent + p->kv_lora, cosines, sines, pairs);
        if (p->slots[t] < 0) {
            continue;
        }
        uint64_t slot = (uint64_t)p->slots[t], page = slot / p->cache.page_tokens;
        SL_ASSERT(page < p->cache.page_count && p->cache.width == width);
        memcpy(sl_host_cached_token(&p->cache, p->layer, page,
                                    (uint32_t)(slot % p->cache.page_tokens)),
               latent, width * sizeof(float));
    }
    return SL_OK;
}

sl_status_t sl_cpu_gather_latents(sl_device_t *device, sl_stream_t *stream,
                                  const sl_gather_latents_t *p)
{
    (void)device, (void)stream;
    uint32_t page_tokens = p->cache.page_tokens, done = 0;
    while (done < p->count) { /* the tokens of a page and layer lie side by side */
        uint32_t offset = (p->first + done) % page_tokens, run = page_tokens - offset;
        int32_t page = p->pages[(p->first + done) / page_tokens];
        SL_ASSERT(page >= 0 && (uint32_t)page < p->cache.page_count);
        run = run < p->count - done ? run : p->count - done;
        memcpy((float *)p->out + (size_t)done * p->cache.width,
               sl_host_cached_token(&p->cache, p->layer, (uint32_t)page, offset),
               (size_t)run * p->cache.width * sizeof(float));
        done += run;
    }
    return SL_OK;
}
