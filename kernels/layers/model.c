/* Creation, and the start of a step. The layers are in attention.c and mlp.c, the end in head.c. */
#include "kernels/layers/model.h"

#include <stdlib.h>

#include "kernels/layers/model_internal.h"

sl_status_t sl_model_create(const sl_model_params_t *params, sl_model_t **model_p)
{
    SL_ASSERT(params->max_rows > 0 && params->max_requests > 0 && params->max_logit_rows > 0);
    sl_model_t *model = calloc(1, sizeof(*model));
    if (model == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "model: out of host memory");
    }
    model->params = *params;
    model->config = sl_checkpoint_config(params->checkpoint);
    model->ops = params->ops;
    model->act_bytes = sl_dtype_bytes(params->ops->act_dtype);
    model->collectives = (sl_collectives_t){.rank = params->rank, .size = params->tp};
    sl_device_params_t device = {
        .index = params->device_index,
        .threads = params->threads,
        .give_up = params->give_up,
        .give_up_arg = params->give_up_arg,
    };
    sl_weights_params_t weights = {
        .checkpoint = params->checkpoint,
        .ops = params->ops,
        .rank = params->rank,
        .tp = params->tp,
        .attention = params->attention,
        .absorbed = params->absorbed,
        .unabsorbed = params->unabsorbed,
    };
    sl_status_t status;
    uint64_t total = 0;
    SL_TRY_GOTO(status, model->ops->open(&device, &model->device), fail);
    SL_TRY_GOTO(status, model->ops->memory(model->device, &model->free_at_start, &total), fail);
    weights.device = model->device;
    SL_TRY_GOTO(status, sl_model_check_memory(model, &weights), fail);
    SL_TRY_GOTO(status, sl_weights_load(&weights, &model->weights), fail);
    SL_TRY_GOTO(status, sl_model_take_workspace(model), fail);
    SL_TRY_GOTO(status, sl_model_log_memory(model), fail);
    *model_p = model;
    return SL_OK;
fail:
    sl_model_destroy(model);
    return status;
}

void sl_model_destroy(sl_model_t *model)
{
    if (model == NULL) {
        return;
    }
    if (model->device != NULL) {
        /* Recordings hold the communicator: they go first. */
        for (uint32_t i = 0; i < model->recording_count; i++) {
            if (model->recordings[i].graph != NULL) {
                model->ops->graph_free(model->device, model->recordings[i].graph);
            }
        }
        model->ops->collectives_close(model->device, &model->collectives);
        sl_model_free_staging(model);
        for (uint32_t i = 0; i < model->item_count; i++) {
            model->ops->free(model->device, model->items[i].memory);
        }
        sl_weights_free(model->ops, model->device, model->weights);
        model->ops->close(model->device);
    }
    free(model);
}

sl_status_t sl_model_join(sl_model_t *model, sl_group_t *group)
{
    return model->ops->collectives_open(model->device, group, model->params.rank, model->params.tp,
                                        &model->collectives);
}

sl_status_t sl_model_bind_thread(sl_model_t *model)
{
    return model->ops->bind_thread(model->device);
}

void sl_model_pages(const sl_model_t *model, void **base_p, size_t *page_bytes_p)
{
    *base_p = model->cache.base;
    *page_bytes_p = sl_model_page_bytes(model);
}

size_t sl_model_page_bytes(const sl_model_t *model)
{
    return (size_t)model->config->num_hidden_layers * SL_PAGE_TOKENS * model->config->latent_width *
           model->act_bytes;
}

uint32_t sl_model_page_count(const sl_model_t *model)
{
    return model->cache.page_count;
}

uint32_t sl_model_sequence_pages(const sl_model_t *model)
{
    return model->sequence_pages;
}

sl_status_t sl_model_begin(sl_model_t *model, const sl_batch_t *batch)
{
    SL_ASSERT(batch->rows <= model->params.max_rows);
    SL_ASSERT(batch->requests <= model->params.max_requests);
    SL_ASSERT(batch->rank_rows[model->params.rank] == batch->rows);
    SL_ASSERT(batch->rules == NULL || batch->rows <= model->params.max_logit_rows);
    model->batch = *batch;
    model->hidden_pending = false;
    return batch->rows > 0 ? sl_model_send_batch(model) : SL_OK;
}

sl_status_t sl_model_embed(sl_model_t *model)
{
    if (model->batch.rows == 0) {
        return SL_OK;
    }
    sl_embed_t embed = {
        .out = model->work.residual,
        .ids = model->work.tokens,
        .previous = model->work.previous,
        .table = model->weights->embed,
        .rows = model->batch.rows,
        .width = model->config->hidden_size,
    };
    SL_TRY(model->ops->embed(model->device, model->stream, &embed));
    return sl_model_plan_absorbed(model);
}
