/*
 * The prefill pool's forward pass: unabsorbed attention by default, absorbed as the baseline it is
 * measured against. After each run of layers the caller is told, so that finished latents can leave
 * while later layers are computed. Engine thread; blocking.
 */
#ifndef SL_PREFILL_FORWARD_H
#define SL_PREFILL_FORWARD_H

#include "common/base/status.h"
#include "kernels/layers/model.h"

typedef enum { SL_MLA_UNABSORBED, SL_MLA_ABSORBED } sl_mla_prefill_t;

typedef struct {
    sl_mla_prefill_t mla;
    uint32_t layers;      /* of the model */
    uint32_t push_layers; /* tell the caller every so many layers, > 0, and after the last */
    void (*layer_done)(void *arg); /* after every layer: a sign of life in a long pass */
    /* Latents of layers [begin, end) of all rows are final and in the pages. */
    sl_status_t (*layers_done)(void *arg, uint32_t begin, uint32_t end);
    void *arg;
} sl_prefill_forward_t;

/* Layers to send at once of a model with pages of `page_bytes`, all layers together: in nearly
 * equal runs of which a page's part has about 2 MiB, or all of them. Each page's part of a run is
 * a write of its own, at a cost of its own; all layers of adjoining pages are one write. Pure. */
uint32_t sl_prefill_push_layers(uint32_t layers, size_t page_bytes);

SL_MUST_USE sl_status_t sl_prefill_forward(const sl_prefill_forward_t *forward, sl_model_t *model,
                                           const sl_batch_t *batch);

#endif
