/*
 * The layout hash: everything two ranks must agree on before latents may cross between them.
 * The text names each part, so a refusal can show both values.
 */
#ifndef SL_MODEL_LAYOUT_H
#define SL_MODEL_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "common/model/checkpoint.h"

#define SL_PAGE_TOKENS 64

typedef struct {
    const char *model_identity;
    sl_dtype_t dtype;     /* of the cached latents */
    uint32_t layers;
    uint32_t page_tokens;
    uint32_t latent_width;
    const char *rope_order; /* "interleaved": cached k_pe pairs are (2j, 2j+1) */
    uint32_t protocol_version;
} sl_layout_t;

/* "model=... dtype=f32 layers=6 page_tokens=64 width=576 rope=interleaved protocol=1" */
void sl_layout_text(const sl_layout_t *layout, char *text, size_t size);
uint64_t sl_layout_hash(const sl_layout_t *layout); /* 64-bit FNV-1a of the text */

/* Bytes of one page of all layers: layers * page_tokens * latent_width * element. */
uint64_t sl_layout_page_bytes(const sl_layout_t *layout);

const char *sl_dtype_name(sl_dtype_t dtype);
size_t sl_dtype_bytes(sl_dtype_t dtype);

#endif
