#include "decode_node/forward.h"

static sl_status_t issue(sl_model_t *model, uint32_t layers, const sl_batch_t *batch)
{
    float *logits;
    SL_TRY(sl_model_embed(model));
    for (uint32_t layer = 0; layer < layers; layer++) {
        SL_TRY(sl_model_attention_begin(model, layer));
        SL_TRY(sl_model_attend_absorbed(model, layer));
        SL_TRY(sl_model_attention_end(model, layer));
        SL_TRY(sl_model_mlp(model, layer));
    }
    if (batch->rules != NULL && batch->rows > 0) {
        SL_TRY(sl_model_logits(model, NULL, batch->rows, &logits));
        SL_TRY(sl_model_choose(model, logits, batch->rows, true)); /* logprobs where wanted */
    }
    return sl_model_share_chosen(model);
}

sl_status_t sl_decode_forward(sl_model_t *model, uint32_t layers, const sl_batch_t *batch)
{
    bool must_issue;
    SL_TRY(sl_model_begin(model, batch));
    SL_TRY(sl_model_record_begin(model, &must_issue));
    if (!must_issue) {
        return SL_OK;
    }
    SL_TRY(issue(model, layers, batch));
    return sl_model_record_end(model);
}
