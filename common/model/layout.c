/* The text is the truth; the hash is only a short way to compare it. */
#include "common/model/layout.h"

#include <stdio.h>
#include <string.h>

#include "common/model/hash.h"

#define LAYOUT_TEXT_BYTES 512

void sl_layout_text(const sl_layout_t *layout, char *text, size_t size)
{
    snprintf(text, size, "model=%s dtype=%s layers=%u page_tokens=%u width=%u rope=%s protocol=%u",
             layout->model_identity, sl_dtype_name(layout->dtype), layout->layers,
             layout->page_tokens, layout->latent_width, layout->rope_order,
             layout->protocol_version);
}

uint64_t sl_layout_hash(const sl_layout_t *layout)
{
    char text[LAYOUT_TEXT_BYTES];
    sl_layout_text(layout, text, sizeof(text));
    return sl_fnv1a(SL_FNV1A_START, text, strlen(text));
}

uint64_t sl_layout_page_bytes(const sl_layout_t *layout)
{
    return (uint64_t)layout->layers * layout->page_tokens * layout->latent_width *
           sl_dtype_bytes(layout->dtype);
}

const char *sl_dtype_name(sl_dtype_t dtype)
{
    switch (dtype) {
    case SL_DTYPE_F32:
        return "f32";
    case SL_DTYPE_BF16:
        return "bf16";
    case SL_DTYPE_F16:
        return "f16";
    }
    return "unknown";
}

size_t sl_dtype_bytes(sl_dtype_t dtype)
{
    return dtype == SL_DTYPE_F32 ? 4 : 2;
}
