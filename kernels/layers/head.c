/*
 * The end of a step: final norm and LM head on the rows that need logits, sampling, logprobs.
 * The residual stream is left as it is, so that rows may be asked for in several blocks.
 */
#include <string.h>

#include "kernels/layers/model_internal.h"

static sl_status_t take_rows(sl_model_t *model, const void *x, uint32_t count, void *out)
{
    sl_take_rows_t take = {
        .out = out,
        .x = x,
        .index = model->work.logit_rows,
        .rows = count,
        .width = model->config->hidden_size,
    };
    return model->ops->take_rows(model->device, model->stream, &take);
}

/* Brings the residual stream and the last MLP's output of the rows wanted together. */
static sl_status_t gather_rows(sl_model_t *model, const int32_t *rows, uint32_t count)
{
    sl_workspace_t *work = &model->work;
    SL_TRY(model->ops->upload(model->device, model->stream, work->logit_rows, rows,
                              count * sizeof(int32_t)));
    SL_TRY(take_rows(model, work->residual, count, work->logit_residual));
    return take_rows(model, work->hidden, count, work->logit_hidden);
}

sl_status_t sl_model_logits(sl_model_t *model, const int32_t *rows, uint32_t count,
                            float **logits_p)
{
    SL_ASSERT(count <= model->params.max_logit_rows && model->hidden_pending);
    const sl_model_config_t *config = model->config;
    sl_workspace_t *work = &model->work;
    if (rows != NULL) {
        SL_TRY(gather_rows(model, rows, count));
    }
    sl_rms_norm_t norm = {
        .out = work->logit_hidden,
        .x = rows != NULL ? work->logit_hidden : work->hidden,
        .residual = rows != NULL ? work->logit_residual : work->residual,
        .weight = model->weights->final_norm,
        .rows = count,
        .width = config->hidden_size,
        .eps = config->rms_norm_eps,
    };
    SL_TRY(model->ops->rms_norm(model->device, model->stream, &norm));
    sl_linear_t head = {
        .out = work->logits,
        .x = work->logit_hidden,
        .w = model->weights->lm_head,
        .rows = count,
        .n = config->vocab_size,
        .k = config->hidden_size,
        .out_f32 = true,
    };
    SL_TRY(model->ops->linear(model->device, model->stream, &head));
    *logits_p = work->logits;
    return SL_OK;
}

sl_status_t sl_model_choose(sl_model_t *model, const float *logits, uint32_t count, bool logprobs)
{
    sl_workspace_t *work = &model->work;
    sl_sample_t sample = {
        .tokens = work->sampled,
        .logprobs = logprobs ? work->logprobs : NULL,
        .logits = logits,
        .rules = work->rules,
        .rows = count,
        .vocab = model->config->vocab_size,
    };
    return model->ops->sample(model->device, model->stream, &sample);
}

/* A token id travels as activations: the bytes are copied, whatever they mean. */
sl_status_t sl_model_share_chosen(sl_model_t *model)
{
    const sl_collectives_t *group = &model->collectives;
    sl_workspace_t *work = &model->work;
    if (model->batch.rows == 0 || work->previous != work->shared) {
        return SL_OK; /* everybody chooses for itself */
    }
    return group->all_gather(group, model->stream, work->sampled, model->batch.rank_rows,
                             (uint32_t)(sizeof(int32_t) / model->act_bytes), work->shared);
}

sl_status_t sl_model_sample(sl_model_t *model, const float *logits, const sl_sample_row_t *rules,
                            uint32_t count, int32_t *tokens, sl_logprobs_t *logprobs)
{
    sl_workspace_t *work = &model->work;
    SL_ASSERT(count <= model->params.max_logit_rows && model->fetches == 0);
    work->rules = work->sample_rules;
    memcpy(model->host_rules, rules, count * sizeof(*rules));
    SL_TRY(model->ops->upload(model->device, model->stream, work->rules, model->host_rules,
                              count * sizeof(*rules)));
    SL_TRY(sl_model_choose(model, logits, count, logprobs != NULL));
    SL_TRY(sl_model_fetch(model, count, logprobs != NULL));
    return sl_model_fetched(model, count, tokens, logprobs);
}

sl_status_t sl_model_token_logprobs(sl_model_t *model, const float *logits, const int32_t *targets,
                                    uint32_t count, uint32_t top_count, sl_logprobs_t *out)
{
    SL_ASSERT(count <= model->params.max_logit_rows);
    const sl_ops_t *ops = model->ops;
    sl_workspace_t *work = &model->work;
    SL_TRY(ops->upload(model->device, model->stream, work->sampled, targets,
                       count * sizeof(*targets)));
    sl_token_logprobs_t logprobs = {
        .out = work->logprobs,
        .logits = logits,
        .targets = work->sampled,
        .rows = count,
        .vocab = model->config->vocab_size,
        .top_count = top_count,
    };
    SL_TRY(ops->token_logprobs(model->device, model->stream, &logprobs));
    SL_TRY(ops->download(model->device, model->stream, out, work->logprobs, count * sizeof(*out)));
    return ops->synchronize(model->device, model->stream);
}
