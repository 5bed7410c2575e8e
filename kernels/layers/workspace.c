/*
 * Device memory besides the weights, all taken at creation: the latent pages, the step arrays and
 * the activations, each sized by the longest step the parameters allow.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/layers/model_internal.h"

static sl_status_t take(sl_model_t *model, const char *what, size_t elements, size_t element_bytes,
                        void *memory_p)
{
    SL_ASSERT(model->item_count < SL_WORKSPACE_ITEMS_MAX);
    size_t bytes = elements * element_bytes;
    void *memory = NULL;
    if (bytes == 0) {
        memcpy(memory_p, &memory, sizeof(memory));
        return SL_OK;
    }
    model->work_bytes += bytes;
    if (!model->counting) {
        SL_TRY(model->ops->alloc(model->device, bytes, what, &memory));
        model->items[model->item_count++] = (sl_item_t){memory, what, bytes};
    }
    memcpy(memory_p, &memory, sizeof(memory));
    return SL_OK;
}

static sl_status_t take_step_arrays(sl_model_t *model)
{
    model->inputs_bytes = sl_model_inputs_bytes(model);
    if (!model->counting) {
        SL_TRY(sl_model_take_staging(model));
    }
    SL_TRY(take(model, "step arrays", model->inputs_bytes, 1, &model->work.inputs));
    return take(model, "step arrays", 4, sizeof(int32_t), &model->work.piece_begin);
}

static sl_status_t take_attention(sl_model_t *model)
{
    sl_workspace_t *work = &model->work;
    const sl_model_config_t *config = model->config;
    size_t rows = model->params.max_rows, act = model->act_bytes;
    size_t heads = model->weights->heads, v = config->v_head_dim, lora = config->kv_lora_rank;
    SL_TRY(take(model, "residual stream", rows * config->hidden_size, act, &work->residual));
    SL_TRY(take(model, "residual stream", rows * config->hidden_size, act, &work->hidden));
    SL_TRY(take(model, "attention", rows * config->q_lora_rank, act, &work->q_a));
    SL_TRY(take(model, "attention", rows * heads * config->qk_head_dim, act, &work->q));
    SL_TRY(take(model, "attention", rows * config->latent_width, act, &work->latent));
    SL_TRY(take(model, "attention", rows * heads * v, act, &work->attended));
    if (model->params.absorbed) {
        SL_TRY(take(model, "attention", rows * heads * lora, act, &work->q_latent));
        SL_TRY(take(model, "attention", rows * heads * lora, act, &work->o_latent));
    }
    if (model->params.unabsorbed) {
        size_t kv_width = heads * (config->qk_nope_head_dim + v);
        SL_TRY(take(model, "attention", rows * kv_width, act, &work->kv));
        SL_TRY(take(model, "attention", (size_t)model->prefix_tokens * config->latent_width, act,
                    &work->prefix_latent));
        SL_TRY(take(model, "attention", rows * heads * v, act, &work->prefix_attended));
        SL_TRY(take(model, "attention", rows * heads, sizeof(float), &work->lse));
        SL_TRY(take(model, "attention", rows * heads, sizeof(float), &work->prefix_lse));
    }
    return SL_OK;
}

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

static sl_status_t take_mlp(sl_model_t *model)
{
    sl_workspace_t *work = &model->work;
    const sl_model_config_t *config = model->config;
    const sl_weights_t *weights = model->weights;
    size_t gathered = model->gathered_max, block = model->block_rows, act = model->act_bytes;
    size_t k = config->n_routed_experts > 0 ? config->num_experts_per_tok : 0;
    size_t hidden = config->hidden_size, experts = config->n_routed_experts;
    size_t inner = max_size(block * max_size(weights->dense_width, weights->shared_width),
                            block * k * weights->expert_width);
    SL_TRY(take(model, "experts", gathered * hidden, act, &work->gathered));
    SL_TRY(take(model, "experts", gathered * hidden, act, &work->partial));
    SL_TRY(take(model, "experts", block * experts, sizeof(float), &work->gate_logits));
    SL_TRY(take(model, "experts", block * k, sizeof(int32_t), &work->expert_ids));
    SL_TRY(take(model, "experts", block * k, sizeof(float), &work->expert_weights));
    SL_TRY(take(model, "experts", block * k, sizeof(int32_t), &work->sorted_row));
    SL_TRY(take(model, "experts", experts + 1, sizeof(int32_t), &work->expert_begin));
    SL_TRY(take(model, "experts", block * k * hidden, act, &work->x_sorted));
    SL_TRY(take(model, "experts", block * k * hidden, act, &work->y_sorted));
    SL_TRY(take(model, "experts", inner * 2, act, &work->gate_up));
    return take(model, "experts", inner, act, &work->activated);
}

static sl_status_t take_logits(sl_model_t *model)
{
    sl_workspace_t *work = &model->work;
    size_t rows = model->params.max_logit_rows, hidden = model->config->hidden_size;
    SL_TRY(take(model, "logits and sampling", rows, sizeof(int32_t), &work->logit_rows));
    SL_TRY(
        take(model, "logits and sampling", rows * hidden, model->act_bytes, &work->logit_residual));
    SL_TRY(
        take(model, "logits and sampling", rows * hidden, model->act_bytes, &work->logit_hidden));
    SL_TRY(take(model, "logits and sampling", rows * model->config->vocab_size, sizeof(float),
                &work->logits));
    SL_TRY(take(model, "logits and sampling", rows, sizeof(int32_t), &work->sampled));
    work->previous = work->sampled;
    if (model->params.attention == SL_ATTENTION_TP && model->params.tp > 1) {
        SL_TRY(take(model, "logits and sampling", rows * model->params.tp, sizeof(int32_t),
                    &work->shared));
        work->previous = work->shared;
    }
    SL_TRY(take(model, "logits and sampling", rows, sizeof(sl_logprobs_t), &work->logprobs));
    return take(model, "logits and sampling", rows, sizeof(sl_sample_row_t), &work->sample_rules);
}

/* cos and sin of every position. The angle is rounded to f32, as in the published code. */
static sl_status_t fill_rotations(sl_model_t *model)
{
    const sl_model_config_t *config = model->config;
    size_t pairs = config->qk_rope_head_dim / 2, positions = config->max_position_embeddings;
    float *inv_freq = malloc(pairs * sizeof(float));
    float *table = malloc(positions * 2 * pairs * sizeof(float));
    sl_status_t status = SL_OK;
    if (inv_freq == NULL || table == NULL) {
        status = sl_error(SL_ERR_NO_MEMORY, "rotation table of %zu positions: out of host memory",
                          positions);
        goto done;
    }
    sl_model_rope_inv_freq(config, inv_freq);
    for (size_t p = 0; p < positions; p++) {
        for (size_t j = 0; j < pairs; j++) {
            float angle = (float)p * inv_freq[j];
            table[p * 2 * pairs + j] = (float)(cos(angle) * config->rope_cos_sin_scale);
            table[p * 2 * pairs + pairs + j] = (float)(sin(angle) * config->rope_cos_sin_scale);
        }
    }
    status = model->ops->upload(model->device, model->stream, model->work.cos_sin, table,
                                positions * 2 * pairs * sizeof(float));
done:
    free(table);
    free(inv_freq);
    return status;
}

/* What weights and workspace have left of the share that may be used, in pages. */
static sl_status_t fitting_pages(const sl_model_t *model, uint32_t *count_p)
{
    size_t page_bytes = sl_model_page_bytes(model);
    uint64_t free_now = 0, total = 0;
    double fraction = model->params.mem_fraction > 0 ? model->params.mem_fraction : 0.9;
    SL_TRY(model->ops->memory(model->device, &free_now, &total));
    /* By our own account: others may have taken memory, or given it back, since the start. */
    double own = (double)(model->weights->bytes + model->work_bytes);
    double left = fraction * (double)model->free_at_start - own;
    double there = SL_FREE_SHARE * (double)free_now;
    double pages = (left < there ? left : there) / (double)page_bytes;
    if (pages < 1) {
        return sl_error(SL_ERR_NO_MEMORY,
                        "memory: %.2f GiB free at start, %.0f %% of it may be used, %.2f free now; "
                        "weights (%.2f) and workspace (%.2f) leave no page of %.2f MiB; a smaller "
                        "--token-budget or --max-batch, a larger --tp or --mem-fraction would",
                        (double)model->free_at_start / 0x1p30, 100 * fraction,
                        (double)free_now / 0x1p30, (double)model->weights->bytes / 0x1p30,
                        (double)model->work_bytes / 0x1p30, (double)page_bytes / 0x1p20);
    }
    *count_p = pages < (double)INT32_MAX ? (uint32_t)pages : (uint32_t)INT32_MAX;
    return SL_OK;
}

static sl_status_t take_pages(sl_model_t *model)
{
    sl_cache_t *cache = &model->cache;
    cache->page_count = model->params.page_count;
    cache->layers = model->config->num_hidden_layers;
    cache->page_tokens = SL_PAGE_TOKENS;
    cache->width = model->config->latent_width;
    if (cache->page_count == 0 && model->ops->host_memory) {
        cache->page_count = SL_HOST_PAGES;
    } else if (cache->page_count == 0) {
        SL_TRY(fitting_pages(model, &cache->page_count));
    }
    return take(model, "latent pages", cache->page_count, sl_model_page_bytes(model), &cache->base);
}

/* Pages that the requests of a step can have together: what there may be in all, at most. */
static uint32_t most_pages(const sl_model_t *model)
{
    const sl_model_params_t *params = &model->params;
    uint64_t all = params->page_count;
    if (all == 0) {
        all = model->ops->host_memory ? SL_HOST_PAGES
                                      : model->free_at_start / sl_model_page_bytes(model);
    }
    uint64_t wanted = (uint64_t)params->max_requests * model->sequence_pages;
    return (uint32_t)(wanted < all ? wanted : all);
}

sl_status_t sl_model_take_workspace(sl_model_t *model)
{
    uint32_t positions = model->config->max_position_embeddings;
    const sl_model_params_t *params = &model->params;
    model->sequence_pages = (positions + SL_PAGE_TOKENS - 1) / SL_PAGE_TOKENS;
    if (params->sequence_pages > 0 && params->sequence_pages < model->sequence_pages) {
        model->sequence_pages = params->sequence_pages;
    }
    model->max_pages = most_pages(model);
    model->gathered_max =
        params->attention == SL_ATTENTION_DP ? params->max_rows * params->tp : params->max_rows;
    model->block_rows =
        model->gathered_max < SL_MOE_BLOCK_ROWS ? model->gathered_max : SL_MOE_BLOCK_ROWS;
    model->prefix_tokens =
        params->max_rows < SL_PREFIX_BLOCK_TOKENS ? params->max_rows : SL_PREFIX_BLOCK_TOKENS;
    SL_TRY(take(model, "rotation table", (size_t)positions * model->config->qk_rope_head_dim,
                sizeof(float), &model->work.cos_sin));
    SL_TRY(take_step_arrays(model));
    SL_TRY(take_attention(model));
    SL_TRY(take_mlp(model));
    SL_TRY(take_logits(model));
    SL_TRY(take_pages(model)); /* last: they get what is left */
    return model->counting ? SL_OK : fill_rotations(model);
}
