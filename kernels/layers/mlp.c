/*
 * Dense MLP or mixture of experts of one layer, over the tokens of the whole group.
 *
 *   DP attention:  own rows --norm--> own block of `gathered` --all-gather--> all rows
 *                  local slice of every expert over all rows -> `partial` (sums to be completed)
 *                  --reduce-scatter--> own rows of `hidden`
 *   TP attention:  every rank has all rows already; `partial` is summed by an all-reduce.
 *   One rank:      no exchange, and `partial` is not used.
 *
 * Every rank routes all gathered rows itself: the gate is small, and equal inputs give equal
 * choices on every rank. Large batches go through the experts in blocks of rows.
 */
#include <stdlib.h>

#include "kernels/layers/model_internal.h"

static sl_status_t gated_mlp(sl_model_t *model, const void *x, uint32_t rows, const void *gate_up,
                             const void *down, uint32_t width, void *out)
{
    const sl_ops_t *ops = model->ops;
    sl_workspace_t *work = &model->work;
    uint32_t hidden = model->config->hidden_size;
    sl_linear_t first = {
        .out = work->gate_up, .x = x, .w = gate_up, .rows = rows, .n = 2 * width, .k = hidden};
    sl_silu_mul_t act = {.out = work->activated, .x = work->gate_up, .rows = rows, .width = width};
    sl_linear_t second = {
        .out = out, .x = work->activated, .w = down, .rows = rows, .n = hidden, .k = width};
    SL_TRY(ops->linear(model->device, model->stream, &first));
    SL_TRY(ops->silu_mul(model->device, model->stream, &act));
    return ops->linear(model->device, model->stream, &second);
}

static sl_status_t choose_experts(sl_model_t *model, const sl_layer_weights_t *weights,
                                  const void *x, uint32_t rows, const uint8_t *row_valid)
{
    const sl_model_config_t *config = model->config;
    sl_workspace_t *work = &model->work;
    sl_linear_t gate = {
        .out = work->gate_logits,
        .x = x,
        .w = weights->router,
        .rows = rows,
        .n = config->n_routed_experts,
        .k = config->hidden_size,
        .out_f32 = true,
    };
    SL_TRY(model->ops->linear(model->device, model->stream, &gate));
    sl_route_t route = {
        .ids = work->expert_ids,
        .weights = work->expert_weights,
        .logits = work->gate_logits,
        .bias = weights->router_bias,
        .row_valid = row_valid,
        .rows = rows,
        .experts = config->n_routed_experts,
        .top_k = config->num_experts_per_tok,
        .n_group = config->n_group,
        .topk_group = config->topk_group,
        .method = config->topk_method,
        .scoring = config->scoring_func,
        .norm_topk_prob = config->norm_topk_prob,
        .scaling = config->routed_scaling_factor,
    };
    return model->ops->route(model->device, model->stream, &route);
}

/* The routed experts' outputs, sorted by expert, to work->y_sorted. */
static sl_status_t run_experts(sl_model_t *model, const sl_layer_weights_t *weights, const void *x,
                               uint32_t rows)
{
    const sl_model_config_t *config = model->config;
    const sl_ops_t *ops = model->ops;
    sl_workspace_t *work = &model->work;
    uint32_t experts = config->n_routed_experts, width = model->weights->expert_width;
    uint32_t pairs = rows * config->num_experts_per_tok;
    sl_moe_permute_t permute = {
        .x_sorted = work->x_sorted,
        .expert_begin = work->expert_begin,
        .sorted_row = work->sorted_row,
        .ids = work->expert_ids,
        .x = x,
        .rows = rows,
        .top_k = config->num_experts_per_tok,
        .experts = experts,
        .width = config->hidden_size,
    };
    sl_grouped_linear_t first = {
        .out = work->gate_up,
        .x = work->x_sorted,
        .w = weights->gate_up,
        .expert_begin = work->expert_begin,
        .max_rows = pairs,
        .experts = experts,
        .n = 2 * width,
        .k = config->hidden_size,
    };
    sl_silu_mul_t act = {
        .out = work->activated,
        .x = work->gate_up,
        .row_count = work->expert_begin + experts,
        .rows = pairs,
        .width = width,
    };
    sl_grouped_linear_t second = {
        .out = work->y_sorted,
        .x = work->activated,
        .w = weights->down,
        .expert_begin = work->expert_begin,
        .max_rows = pairs,
        .experts = experts,
        .n = config->hidden_size,
        .k = width,
    };
    SL_TRY(ops->moe_permute(model->device, model->stream, &permute));
    SL_TRY(ops->grouped_linear(model->device, model->stream, &first));
    SL_TRY(ops->silu_mul(model->device, model->stream, &act));
    return ops->grouped_linear(model->device, model->stream, &second);
}

static sl_status_t moe(sl_model_t *model, const sl_layer_weights_t *weights, const void *x,
                       uint32_t rows, const uint8_t *row_valid, void *out)
{
    const sl_model_config_t *config = model->config;
    sl_workspace_t *work = &model->work;
    SL_TRY(choose_experts(model, weights, x, rows, row_valid));
    SL_TRY(run_experts(model, weights, x, rows));
    bool shared = model->weights->shared_width > 0;
    if (shared) {
        SL_TRY(gated_mlp(model, x, rows, weights->shared_gate_up, weights->shared_down,
                         model->weights->shared_width, out));
    }
    sl_moe_combine_t combine = {
        .out = out,
        .y = work->y_sorted,
        .sorted_row = work->sorted_row,
        .weights = work->expert_weights,
        .shared = shared ? out : NULL,
        .rows = rows,
        .top_k = config->num_experts_per_tok,
        .width = config->hidden_size,
    };
    return model->ops->moe_combine(model->device, model->stream, &combine);
}

static sl_status_t local_slice(sl_model_t *model, uint32_t layer, void *x, uint32_t rows, void *out)
{
    const sl_layer_weights_t *weights = &model->weights->layers[layer];
    size_t hidden = model->config->hidden_size;
    for (uint32_t row = 0; row < rows; row += model->block_rows) {
        uint32_t count = rows - row < model->block_rows ? rows - row : model->block_rows;
        void *block = sl_act_at(model, x, row * hidden);
        void *block_out = sl_act_at(model, out, row * hidden);
        if (sl_model_layer_is_moe(model->config, layer)) {
            const uint8_t *valid =
                model->batch.rank_valid != NULL ? model->work.row_valid + row : NULL;
            SL_TRY(moe(model, weights, block, count, valid, block_out));
        } else {
            SL_TRY(gated_mlp(model, block, count, weights->gate_up, weights->down,
                             model->weights->dense_width, block_out));
        }
    }
    return SL_OK;
}

static sl_status_t norm_rows(sl_model_t *model, uint32_t layer, void *out)
{
    if (model->batch.rows == 0) {
        return SL_OK;
    }
    SL_ASSERT(model->hidden_pending);
    model->hidden_pending = false;
    sl_rms_norm_t norm = {
        .out = out,
        .x = model->work.hidden,
        .residual = model->work.residual,
        .weight = model->weights->layers[layer].post_norm,
        .rows = model->batch.rows,
        .width = model->config->hidden_size,
        .eps = model->config->rms_norm_eps,
    };
    return model->ops->rms_norm(model->device, model->stream, &norm);
}

static sl_status_t mlp_gathered(sl_model_t *model, uint32_t layer)
{
    const sl_collectives_t *group = &model->collectives;
    const uint32_t *rank_rows = model->batch.rank_rows;
    sl_workspace_t *work = &model->work;
    uint32_t hidden = model->config->hidden_size, before = 0, total = 0;
    for (uint32_t r = 0; r < group->size; r++) {
        before += r < group->rank ? rank_rows[r] : 0;
        total += rank_rows[r];
    }
    SL_ASSERT(total <= model->gathered_max);
    void *mine = sl_act_at(model, work->gathered, (size_t)before * hidden);
    SL_TRY(norm_rows(model, layer, mine));
    SL_TRY(group->all_gather(group, model->stream, mine, rank_rows, hidden, work->gathered));
    SL_TRY(local_slice(model, layer, work->gathered, total, work->partial));
    return group->reduce_scatter(group, model->stream, work->partial, rank_rows, hidden,
                                 work->hidden);
}

sl_status_t sl_model_mlp(sl_model_t *model, uint32_t layer)
{
    const sl_collectives_t *group = &model->collectives;
    sl_workspace_t *work = &model->work;
    uint32_t rows = model->batch.rows;
    if (group->size > 1 && model->params.attention == SL_ATTENTION_DP) {
        SL_TRY(mlp_gathered(model, layer));
    } else if (rows > 0) {
        SL_TRY(norm_rows(model, layer, work->gathered));
        SL_TRY(local_slice(model, layer, work->gathered, rows, work->hidden));
        if (group->size > 1) {
            SL_TRY(group->all_reduce(group, model->stream, work->hidden,
                                     (size_t)rows * model->config->hidden_size));
        }
    }
    model->hidden_pending = rows > 0;
    return SL_OK;
}

sl_status_t sl_model_experts_hit(sl_model_t *model, uint32_t *count_p)
{
    uint32_t experts = model->config->n_routed_experts, count = 0;
    SL_ASSERT(model->recording == NULL);
    int32_t *begin = calloc(experts + 1, sizeof(*begin));
    if (begin == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "rows of %u experts: out of host memory", experts);
    }
    sl_status_t status = SL_OK;
    SL_TRY_GOTO(status,
                model->ops->download(model->device, model->stream, begin, model->work.expert_begin,
                                     (experts + 1) * sizeof(*begin)),
                done);
    SL_TRY_GOTO(status, model->ops->synchronize(model->device, model->stream), done);
    for (uint32_t e = 0; e < experts; e++) {
        count += begin[e + 1] > begin[e];
    }
    *count_p = count;
done:
    free(begin);
    return status;
}
