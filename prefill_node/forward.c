#include "prefill_node/forward.h"

#define RUN_BYTES ((size_t)2 << 20) /* of a page, at least */

uint32_t sl_prefill_push_layers(uint32_t layers, size_t page_bytes)
{
    size_t runs = page_bytes / RUN_BYTES;
    runs = runs < 1 ? 1 : runs > layers ? layers : runs;
    return (layers + (uint32_t)runs - 1) / (uint32_t)runs;
}

sl_status_t sl_prefill_forward(const sl_prefill_forward_t *forward, sl_model_t *model,
                               const sl_batch_t *batch)
{
    uint32_t run_end[SL_MODEL_MARKS_MAX], runs = 0, begin = 0;
    SL_TRY(sl_model_begin(model, batch));
    SL_TRY(sl_model_embed(model));
    for (uint32_t layer = 0; layer < forward->layers; layer++) {
        SL_TRY(sl_model_attention_begin(model, layer));
        if (forward->mla == SL_MLA_UNABSORBED) {
            SL_TRY(sl_model_attend_unabsorbed(model, layer));
        } else {
            SL_TRY(sl_model_attend_absorbed(model, layer));
        }
        SL_TRY(sl_model_attention_end(model, layer));
        SL_TRY(sl_model_mlp(model, layer));
        forward->layer_done(forward->arg);
        bool last = layer + 1 == forward->layers;
        uint32_t since = layer + 1 - (runs > 0 ? run_end[runs - 1] : 0);
        if (last || (since >= forward->push_layers && runs + 1 < SL_MODEL_MARKS_MAX)) {
            SL_TRY(sl_model_mark(model, runs));
            run_end[runs++] = layer + 1;
        }
    }
    /* All layers are issued; the first ones may long be done. */
    for (uint32_t run = 0; run < runs; begin = run_end[run++]) {
        SL_TRY(sl_model_wait_mark(model, run));
        SL_TRY(forward->layers_done(forward->arg, begin, run_end[run]));
    }
    return SL_OK;
}
