#include "decode_node/forward.h"

sl_status_t sl_decode_forward(sl_model_t *model, uint32_t layers, const sl_batch_t *batch)
{
    SL_TRY(sl_model_begin(model, batch));
    for (uint32_t layer = 0; layer < layers; layer++) {
        SL_TRY(sl_model_attention_begin(model, layer));
        SL_TRY(sl_model_attend_absorbed(model, layer));
        SL_TRY(sl_model_attention_end(model, layer));
        SL_TRY(sl_model_mlp(model, layer));
    }
    return SL_OK;
}
