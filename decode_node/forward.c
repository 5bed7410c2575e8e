#include "decode_node/forward.h"

static sl_status_t issue(sl_model_t *model, uint32_t layers, uint32_t chosen_rows)
{
    float *logits;
    SL_TRY(sl_model_embed(model));
    for (uint32_t layer = 0; layer < layers; layer++) {
        SL_TRY(sl_model_attention_begin(model, layer));
        SL_TRY(sl_model_attend_absorbed(model, layer));
        SL_TRY(sl_model_attention_end(model, layer));
        SL_TRY(sl_model_mlp(model, layer));
    }
    if (chosen_rows == 0) {
        return SL_OK;
    }
    SL_TRY(sl_model_logits(model, NULL, chosen_rows, &logits));
    return sl_model_choose(model, logits, chosen_rows, true); /* of the rows that want them */
}

sl_status_t sl_decode_forward(sl_model_t *model, uint32_t layers, const sl_batch_t *batch,
                              const sl_sample_row_t *rules)
{
    bool must_issue;
    SL_TRY(sl_model_begin(model, batch));
    if (rules != NULL) {
        SL_TRY(sl_model_set_rules(model, rules, batch->rows));
    }
    SL_TRY(sl_model_record_begin(model, &must_issue));
    if (!must_issue) {
        return SL_OK;
    }
    SL_TRY(issue(model, layers, rules != NULL ? batch->rows : 0));
    return sl_model_record_end(model);
}
