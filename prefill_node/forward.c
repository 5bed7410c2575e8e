#include "prefill_node/forward.h"

sl_status_t sl_prefill_forward(const sl_prefill_forward_t *forward, sl_model_t *model,
                               const sl_batch_t *batch)
{
    uint32_t told = 0;
    SL_TRY(sl_model_begin(model, batch));
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
        if (last || (forward->push_layers > 0 && layer + 1 - told >= forward->push_layers)) {
            SL_TRY(forward->layers_done(forward->arg, told, layer + 1));
            told = layer + 1;
        }
    }
    return SL_OK;
}
