/*
 * Multi-head latent attention of one layer.
 *
 * Projections, per token: q [h][nope | rope] (through q_a, norm and q_b where there is a q_lora),
 * and kv_a [latent | k_pe]. The latent is normed, k_pe and the rope part of q are rotated, and
 * latent | k_pe goes to the cache: that is all that is ever kept of a token.
 *
 * Unabsorbed: kv_b expands latents to per-head k_nope | v; ordinary attention with 192-wide keys.
 * Tokens of earlier chunks are expanded again, piece by piece, and merged by log-sum-exp.
 *
 * Absorbed: W_UK moves into the query, W_UV behind the attention, and all heads attend to the one
 * latent: fewer bytes, more arithmetic.
 */
#include "kernels/layers/model_internal.h"

static sl_status_t norm_into(sl_model_t *model, const void *weight, void *out)
{
    sl_rms_norm_t norm = {
        .out = out,
        .x = model->hidden_pending ? model->work.hidden : NULL,
        .residual = model->work.residual,
        .weight = weight,
        .rows = model->batch.rows,
        .width = model->config->hidden_size,
        .eps = model->config->rms_norm_eps,
    };
    model->hidden_pending = false;
    return model->ops->rms_norm(model->device, model->stream, &norm);
}

static sl_status_t project(sl_model_t *model, const void *x, uint32_t k, const void *w, uint32_t n,
                           void *out)
{
    sl_linear_t linear = {.out = out, .x = x, .w = w, .rows = model->batch.rows, .n = n, .k = k};
    return model->ops->linear(model->device, model->stream, &linear);
}

static sl_status_t project_queries(sl_model_t *model, const sl_layer_weights_t *weights,
                                   const void *x)
{
    const sl_model_config_t *config = model->config;
    sl_workspace_t *work = &model->work;
    uint32_t width = model->weights->heads * config->qk_head_dim;
    if (config->q_lora_rank == 0) {
        return project(model, x, config->hidden_size, weights->q, width, work->q);
    }
    SL_TRY(project(model, x, config->hidden_size, weights->q_a, config->q_lora_rank, work->q_a));
    sl_rms_norm_t norm = {
        .out = work->q_a,
        .x = work->q_a,
        .weight = weights->q_a_norm,
        .rows = model->batch.rows,
        .width = config->q_lora_rank,
        .eps = config->rms_norm_eps,
    };
    SL_TRY(model->ops->rms_norm(model->device, model->stream, &norm));
    return project(model, work->q_a, config->q_lora_rank, weights->q_b, width, work->q);
}

sl_status_t sl_model_attention_begin(sl_model_t *model, uint32_t layer)
{
    if (model->batch.rows == 0) {
        return SL_OK;
    }
    const sl_model_config_t *config = model->config;
    const sl_layer_weights_t *weights = &model->weights->layers[layer];
    sl_workspace_t *work = &model->work;
    /* In place: the norm consumes `hidden` into the residual, and `hidden` is free again. */
    SL_TRY(norm_into(model, weights->input_norm, work->hidden));
    SL_TRY(project_queries(model, weights, work->hidden));
    SL_TRY(project(model, work->hidden, config->hidden_size, weights->kv_a, config->latent_width,
                   work->latent));
    sl_rope_cache_t rope = {
        .q = work->q,
        .latent = work->latent,
        .norm_weight = weights->kv_a_norm,
        .positions = work->positions,
        .cos_sin = work->cos_sin,
        .slots = work->slots,
        .cache = model->cache,
        .layer = layer,
        .rows = model->batch.rows,
        .heads = model->weights->heads,
        .nope = config->qk_nope_head_dim,
        .rope = config->qk_rope_head_dim,
        .kv_lora = config->kv_lora_rank,
        .eps = config->rms_norm_eps,
    };
    return model->ops->rope_cache(model->device, model->stream, &rope);
}

/* Expands `rows` latents to k_nope | v of every local head. */
static sl_status_t expand(sl_model_t *model, const sl_layer_weights_t *weights, const void *latents,
                          uint32_t rows)
{
    const sl_model_config_t *config = model->config;
    sl_linear_t linear = {
        .out = model->work.kv,
        .x = latents,
        .x_stride = config->latent_width,
        .w = weights->kv_b,
        .rows = rows,
        .n = model->weights->heads * (config->qk_nope_head_dim + config->v_head_dim),
        .k = config->kv_lora_rank,
    };
    return model->ops->linear(model->device, model->stream, &linear);
}

/* The parts of an attention call that all calls of a step share. */
static sl_attn_prefill_t attention_shape(const sl_model_t *model, void *latents)
{
    const sl_model_config_t *config = model->config;
    return (sl_attn_prefill_t){
        .out = model->work.attended,
        .lse = model->work.lse,
        .q = model->work.q,
        .kv = model->work.kv,
        .k_pe = sl_act_at(model, latents, config->kv_lora_rank),
        .k_pe_stride = config->latent_width,
        .heads = model->weights->heads,
        .nope = config->qk_nope_head_dim,
        .rope = config->qk_rope_head_dim,
        .v_dim = config->v_head_dim,
        .scale = config->softmax_scale,
    };
}

/* Attends rows [row, row + rows) of request `request` to its cached tokens [first, first + count)
 * and merges the result into `attended`. */
static sl_status_t attend_prefix_piece(sl_model_t *model, uint32_t layer, uint32_t request,
                                       uint32_t first, uint32_t count)
{
    sl_workspace_t *work = &model->work;
    uint32_t heads = model->weights->heads;
    uint32_t row = (uint32_t)model->batch.row_begin[request];
    uint32_t rows = (uint32_t)model->batch.row_begin[request + 1] - row;
    sl_gather_latents_t gather = {
        .out = work->prefix_latent,
        .cache = model->cache,
        .layer = layer,
        .pages = work->pages + model->batch.page_begin[request],
        .first = first,
        .count = count,
    };
    SL_TRY(model->ops->gather_latents(model->device, model->stream, &gather));
    SL_TRY(expand(model, &model->weights->layers[layer], work->prefix_latent, count));
    const int32_t begin[4] = {0, (int32_t)rows, 0, (int32_t)count};
    SL_TRY(
        model->ops->upload(model->device, model->stream, work->piece_begin, begin, sizeof(begin)));
    sl_attn_prefill_t attn = attention_shape(model, work->prefix_latent);
    attn.out = work->prefix_attended;
    attn.lse = work->prefix_lse;
    attn.q = sl_act_at(model, work->q, (size_t)row * heads * model->config->qk_head_dim);
    attn.q_begin = work->piece_begin;
    attn.k_begin = work->piece_begin + 2;
    attn.host_q_begin = begin;
    attn.host_k_begin = begin + 2;
    attn.sequences = 1;
    SL_TRY(model->ops->attn_prefill(model->device, model->stream, &attn));
    sl_attn_merge_t merge = {
        .out = sl_act_at(model, work->attended, (size_t)row * heads * attn.v_dim),
        .lse = work->lse + (size_t)row * heads,
        .other_out = work->prefix_attended,
        .other_lse = work->prefix_lse,
        .rows = rows,
        .heads = heads,
        .v_dim = attn.v_dim,
    };
    return model->ops->attn_merge(model->device, model->stream, &merge);
}

sl_status_t sl_model_attend_unabsorbed(sl_model_t *model, uint32_t layer)
{
    const sl_batch_t *batch = &model->batch;
    sl_workspace_t *work = &model->work;
    SL_ASSERT(model->params.unabsorbed);
    if (batch->rows == 0) {
        return SL_OK;
    }
    SL_TRY(expand(model, &model->weights->layers[layer], work->latent, batch->rows));
    sl_attn_prefill_t attn = attention_shape(model, work->latent);
    attn.q_begin = attn.k_begin = work->row_begin;
    attn.host_q_begin = attn.host_k_begin = batch->row_begin;
    attn.sequences = batch->requests;
    attn.causal = true;
    SL_TRY(model->ops->attn_prefill(model->device, model->stream, &attn));
    for (uint32_t r = 0; r < batch->requests; r++) {
        uint32_t prefix = (uint32_t)batch->positions[batch->row_begin[r]];
        for (uint32_t first = 0; first < prefix; first += model->prefix_tokens) {
            uint32_t left = prefix - first;
            uint32_t count = left < model->prefix_tokens ? left : model->prefix_tokens;
            SL_TRY(attend_prefix_piece(model, layer, r, first, count));
        }
    }
    return SL_OK;
}

/* The attention of a layer; all but the layer is the same for the whole step. */
static sl_attn_absorbed_t absorbed_call(const sl_model_t *model, uint32_t layer)
{
    const sl_model_config_t *config = model->config;
    const sl_workspace_t *work = &model->work;
    uint32_t heads = model->weights->heads;
    return (sl_attn_absorbed_t){
        .out = work->o_latent,
        .q_latent = work->q_latent,
        .q_rope = sl_act_at(model, work->q, config->qk_nope_head_dim),
        .q_rope_row_stride = heads * config->qk_head_dim,
        .q_rope_head_stride = config->qk_head_dim,
        .cache = model->cache,
        .layer = layer,
        .pages = work->pages,
        .page_begin = work->page_begin,
        .row_request = work->row_request,
        .kv_len = work->kv_len,
        .rows = model->batch.rows,
        .heads = heads,
        .kv_lora = config->kv_lora_rank,
        .scale = config->softmax_scale,
    };
}

sl_status_t sl_model_plan_absorbed(sl_model_t *model)
{
    if (!model->params.absorbed || model->ops->attn_absorbed_plan == NULL) {
        return SL_OK;
    }
    sl_attn_absorbed_t attn = absorbed_call(model, 0);
    return model->ops->attn_absorbed_plan(model->device, model->stream, &attn);
}

sl_status_t sl_model_attend_absorbed(sl_model_t *model, uint32_t layer)
{
    const sl_model_config_t *config = model->config;
    const sl_layer_weights_t *weights = &model->weights->layers[layer];
    sl_workspace_t *work = &model->work;
    uint32_t heads = model->weights->heads, rows = model->batch.rows;
    SL_ASSERT(model->params.absorbed);
    if (rows == 0) {
        return SL_OK;
    }
    uint32_t lora = config->kv_lora_rank, v = config->v_head_dim;
    sl_head_linear_t absorb = {
        .out = work->q_latent,
        .x = work->q,
        .w = weights->w_uk_t,
        .rows = rows,
        .heads = heads,
        .n = lora,
        .k = config->qk_nope_head_dim,
        .x_row_stride = heads * config->qk_head_dim,
        .x_head_stride = config->qk_head_dim,
        .out_row_stride = heads * lora,
        .out_head_stride = lora,
    };
    SL_TRY(model->ops->head_linear(model->device, model->stream, &absorb));
    sl_attn_absorbed_t attn = absorbed_call(model, layer);
    SL_TRY(model->ops->attn_absorbed(model->device, model->stream, &attn));
    sl_head_linear_t unfold = {
        .out = work->attended,
        .x = work->o_latent,
        .w = weights->w_uv,
        .rows = rows,
        .heads = heads,
        .n = v,
        .k = lora,
        .x_row_stride = heads * lora,
        .x_head_stride = lora,
        .out_row_stride = heads * v,
        .out_head_stride = v,
    };
    return model->ops->head_linear(model->device, model->stream, &unfold);
}

sl_status_t sl_model_attention_end(sl_model_t *model, uint32_t layer)
{
    const sl_model_config_t *config = model->config;
    const sl_collectives_t *group = &model->collectives;
    sl_workspace_t *work = &model->work;
    if (model->batch.rows == 0) {
        return SL_OK;
    }
    SL_TRY(project(model, work->attended, model->weights->heads * config->v_head_dim,
                   model->weights->layers[layer].o, config->hidden_size, work->hidden));
    if (model->params.attention == SL_ATTENTION_TP && group->size > 1) {
        SL_TRY(group->all_reduce(group, model->stream, work->hidden,
                                 (size_t)model->batch.rows * config->hidden_size));
    }
    model->hidden_pending = true;
    return SL_OK;
}
