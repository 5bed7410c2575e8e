/*
 * Loading: every weight is one device allocation, filled by pieces (a row range, or a column range
 * of all rows) straight from the mapped file, by several threads once all memory is taken.
 * Allocations are listed so that freeing is one loop.
 */
#include "kernels/layers/weights.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/progress.h"
#include "kernels/layers/load_jobs.h"

typedef struct {
    void **items;
    size_t count, capacity;
} allocations_t;

typedef struct {
    sl_weights_t weights; /* first: the public part */
    allocations_t allocations;
} loaded_t;

typedef struct {
    const sl_weights_params_t *params;
    const sl_model_config_t *config;
    loaded_t *loaded;
    sl_progress_t progress;
    sl_load_jobs_t jobs;
    uint32_t layer;
    sl_weight_kind_t kind; /* of the last loader_tensor(), for dummy weights */
    uint32_t expert;
} loader_t;

static sl_status_t loader_alloc(loader_t *loader, size_t elements, size_t element_bytes,
                                void **memory_p)
{
    static char counted; /* stands for memory that was only counted; never touched */
    const sl_weights_params_t *params = loader->params;
    allocations_t *list = &loader->loaded->allocations;
    size_t bytes = elements * element_bytes;
    if (params->count_only) {
        loader->loaded->weights.bytes += bytes;
        *memory_p = &counted;
        return SL_OK;
    }
    if (list->count == list->capacity) {
        size_t capacity = list->capacity == 0 ? 64 : list->capacity * 2;
        void **items = realloc(list->items, capacity * sizeof(*items));
        if (items == NULL) {
            return sl_error(SL_ERR_NO_MEMORY, "weights: out of host memory");
        }
        list->items = items;
        list->capacity = capacity;
    }
    SL_TRY(params->ops->alloc(params->device, bytes, "weights", memory_p));
    list->items[list->count++] = *memory_p;
    loader->loaded->weights.bytes += bytes;
    return SL_OK;
}

#define DUMMY_RANGE                                                                                \
    0.0346f /* uniform with a standard deviation of 0.02, as models are initialised */

/* Made-up values for a piece of the tensor asked for last; vectors (norms) are all 1. */
static sl_status_t loader_dummy(loader_t *loader, const sl_tensor_t *tensor, uint64_t first,
                                uint64_t rows, uint64_t columns, uint64_t row_step,
                                uint64_t column_step, void *to)
{
    bool vector = tensor->rank == 1;
    sl_dummy_weight_t dummy = {
        .out = to,
        .rows = rows,
        .columns = columns,
        .seed = ((uint64_t)loader->kind << 48) ^ ((uint64_t)loader->layer << 24) ^ loader->expert,
        .first = first,
        .row_step = row_step,
        .column_step = column_step,
        .mean = vector ? 1.0f : 0.0f,
        .range = vector ? 0.0f : DUMMY_RANGE,
    };
    SL_TRY(loader->params->ops->dummy_weight(loader->params->device, &dummy));
    sl_progress_add(&loader->progress, rows * columns * sl_dtype_bytes(tensor->dtype));
    return SL_OK;
}

/* Fills `to` with rows [row, row + rows) and columns [column, column + columns) of a tensor. */
static sl_status_t loader_fill(loader_t *loader, const sl_tensor_t *tensor, uint64_t row,
                               uint64_t rows, uint64_t column, uint64_t columns, void *to)
{
    SL_ASSERT(row + rows <= tensor->shape[0] && column + columns <= tensor->shape[1]);
    if (loader->params->count_only) {
        return SL_OK;
    }
    if (tensor->data == NULL) {
        return loader_dummy(loader, tensor, row * tensor->shape[1] + column, rows, columns,
                            tensor->shape[1], 1, to);
    }
    size_t element = sl_dtype_bytes(tensor->dtype);
    sl_weight_source_t source = {
        .data = (const char *)tensor->data + (row * tensor->shape[1] + column) * element,
        .dtype = tensor->dtype,
        .rows = rows,
        .columns = columns,
        .row_stride = tensor->shape[1],
    };
    return sl_load_jobs_add(&loader->jobs, to, &source);
}

static const sl_tensor_t *loader_tensor(loader_t *loader, sl_weight_kind_t kind, uint32_t expert)
{
    loader->kind = kind;
    loader->expert = expert;
    return sl_checkpoint_weight(loader->params->checkpoint, kind, loader->layer, expert);
}

/* A row range of a tensor as one weight. */
static sl_status_t load_rows(loader_t *loader, sl_weight_kind_t kind, uint64_t row, uint64_t rows,
                             void **to_p)
{
    const sl_tensor_t *tensor = loader_tensor(loader, kind, 0);
    SL_TRY(loader_alloc(loader, rows * tensor->shape[1],
                        sl_dtype_bytes(loader->params->ops->weight_dtype), to_p));
    return loader_fill(loader, tensor, row, rows, 0, tensor->shape[1], *to_p);
}

static sl_status_t load_whole(loader_t *loader, sl_weight_kind_t kind, void **to_p)
{
    return load_rows(loader, kind, 0, loader_tensor(loader, kind, 0)->shape[0], to_p);
}

/* This rank's column range [rank * columns, ...) of a tensor. */
static sl_status_t load_columns(loader_t *loader, sl_weight_kind_t kind, uint64_t columns,
                                void **to_p)
{
    const sl_tensor_t *tensor = loader_tensor(loader, kind, 0);
    uint64_t part = columns == tensor->shape[1] ? 0 : loader->params->rank;
    SL_TRY(loader_alloc(loader, tensor->shape[0] * columns,
                        sl_dtype_bytes(loader->params->ops->weight_dtype), to_p));
    return loader_fill(loader, tensor, 0, tensor->shape[0], part * columns, columns, *to_p);
}

/* Gate and up of `experts` MLPs, stacked as [experts][2 * width][H], and down [experts][H][width];
 * this rank's slice of the inner width. */
static sl_status_t load_mlps(loader_t *loader, const sl_weight_kind_t kinds[3], uint32_t experts,
                             uint64_t width, void **gate_up_p, void **down_p)
{
    const sl_ops_t *ops = loader->params->ops;
    uint64_t hidden = loader->config->hidden_size;
    size_t element = sl_dtype_bytes(ops->weight_dtype);
    uint64_t first = loader->params->rank * width;
    SL_TRY(loader_alloc(loader, experts * 2 * width * hidden, element, gate_up_p));
    SL_TRY(loader_alloc(loader, experts * hidden * width, element, down_p));
    for (uint32_t e = 0; e < experts; e++) {
        char *gate_up = (char *)*gate_up_p + e * 2 * width * hidden * element;
        char *down = (char *)*down_p + e * hidden * width * element;
        SL_TRY(loader_fill(loader, loader_tensor(loader, kinds[0], e), first, width, 0, hidden,
                           gate_up));
        SL_TRY(loader_fill(loader, loader_tensor(loader, kinds[1], e), first, width, 0, hidden,
                           gate_up + width * hidden * element));
        SL_TRY(
            loader_fill(loader, loader_tensor(loader, kinds[2], e), 0, hidden, first, width, down));
    }
    return SL_OK;
}

static void copy_row(const sl_tensor_t *tensor, uint64_t row, size_t element, void *to)
{
    memcpy(to, (const char *)tensor->data + row * tensor->shape[1] * element,
           tensor->shape[1] * element);
}

/* The same two parts of a made-up kv_b_proj: rows of W_UK become columns. */
static sl_status_t load_dummy_absorbed(loader_t *loader, const sl_tensor_t *kv_b,
                                       uint32_t first_head, sl_layer_weights_t *layer)
{
    const sl_model_config_t *config = loader->config;
    uint64_t nope = config->qk_nope_head_dim, v = config->v_head_dim, lora = config->kv_lora_rank;
    size_t element = sl_dtype_bytes(loader->params->ops->weight_dtype);
    for (uint32_t head = 0; head < loader->loaded->weights.heads; head++) {
        uint64_t base = (uint64_t)(first_head + head) * (nope + v) * lora;
        SL_TRY(loader_dummy(loader, kv_b, base, lora, nope, 1, lora,
                            (char *)layer->w_uk_t + head * lora * nope * element));
        SL_TRY(loader_dummy(loader, kv_b, base + nope * lora, v, lora, lora, 1,
                            (char *)layer->w_uv + head * v * lora * element));
    }
    return SL_OK;
}

/*
 * Splits kv_b_proj, whose rows per head are [nope of W_UK | v of W_UV], each of kv_lora columns.
 * W_UV is a row range; W_UK is transposed here, on the host, in the file's own element type.
 */
static sl_status_t load_absorbed(loader_t *loader, uint32_t first_head, sl_layer_weights_t *layer)
{
    const sl_model_config_t *config = loader->config;
    const sl_ops_t *ops = loader->params->ops;
    const sl_tensor_t *kv_b = loader_tensor(loader, SL_WEIGHT_KV_B, 0);
    uint32_t heads = loader->loaded->weights.heads;
    uint64_t nope = config->qk_nope_head_dim, v = config->v_head_dim, lora = config->kv_lora_rank;
    size_t element = sl_dtype_bytes(kv_b->dtype),
           device_element = sl_dtype_bytes(ops->weight_dtype);
    SL_TRY(loader_alloc(loader, heads * lora * nope, device_element, &layer->w_uk_t));
    SL_TRY(loader_alloc(loader, heads * v * lora, device_element, &layer->w_uv));
    if (loader->params->count_only) {
        return SL_OK;
    }
    if (kv_b->data == NULL) {
        return load_dummy_absorbed(loader, kv_b, first_head, layer);
    }
    char *row = malloc(lora * element), *transposed = malloc(lora * nope * element);
    sl_status_t status = SL_OK;
    if (row == NULL || transposed == NULL) {
        status = sl_error(SL_ERR_NO_MEMORY, "weights: out of host memory");
    }
    for (uint32_t head = 0; head < heads && status == SL_OK; head++) {
        uint64_t base = (uint64_t)(first_head + head) * (nope + v);
        for (uint64_t n = 0; n < nope; n++) {
            copy_row(kv_b, base + n, element, row);
            for (uint64_t c = 0; c < lora; c++) {
                memcpy(transposed + (c * nope + n) * element, row + c * element, element);
            }
        }
        sl_weight_source_t source = {transposed, kv_b->dtype, lora, nope, nope};
        status =
            ops->load_weight(loader->params->device,
                             (char *)layer->w_uk_t + head * lora * nope * device_element, &source);
        if (status == SL_OK) {
            status = loader_fill(loader, kv_b, base + nope, v, 0, lora,
                                 (char *)layer->w_uv + head * v * lora * device_element);
        }
    }
    free(transposed);
    free(row);
    return status;
}

static sl_status_t load_attention(loader_t *loader, sl_layer_weights_t *layer)
{
    const sl_model_config_t *config = loader->config;
    uint32_t heads = loader->loaded->weights.heads;
    uint32_t first_head = heads == config->num_attention_heads ? 0 : loader->params->rank * heads;
    uint64_t qk = config->qk_head_dim, kv = config->qk_nope_head_dim + config->v_head_dim;
    SL_TRY(load_whole(loader, SL_WEIGHT_INPUT_NORM, &layer->input_norm));
    SL_TRY(load_whole(loader, SL_WEIGHT_POST_NORM, &layer->post_norm));
    if (config->q_lora_rank == 0) {
        SL_TRY(load_rows(loader, SL_WEIGHT_Q, first_head * qk, heads * qk, &layer->q));
    } else {
        SL_TRY(load_whole(loader, SL_WEIGHT_Q_A, &layer->q_a));
        SL_TRY(load_whole(loader, SL_WEIGHT_Q_A_NORM, &layer->q_a_norm));
        SL_TRY(load_rows(loader, SL_WEIGHT_Q_B, first_head * qk, heads * qk, &layer->q_b));
    }
    SL_TRY(load_whole(loader, SL_WEIGHT_KV_A, &layer->kv_a));
    SL_TRY(load_whole(loader, SL_WEIGHT_KV_A_NORM, &layer->kv_a_norm));
    if (loader->params->unabsorbed) {
        SL_TRY(load_rows(loader, SL_WEIGHT_KV_B, first_head * kv, heads * kv, &layer->kv_b));
    }
    if (loader->params->absorbed) {
        SL_TRY(load_absorbed(loader, first_head, layer));
    }
    return load_columns(loader, SL_WEIGHT_O, (uint64_t)heads * config->v_head_dim, &layer->o);
}

/* The bias stays f32 whatever the backend: it only decides which expert is chosen. */
static sl_status_t load_router_bias(loader_t *loader, sl_layer_weights_t *layer)
{
    const sl_tensor_t *tensor = loader_tensor(loader, SL_WEIGHT_ROUTER_BIAS, 0);
    uint64_t count = tensor->shape[0];
    float *values = calloc(count, sizeof(float)); /* a made-up bias is 0 */
    if (values == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "weights: out of host memory");
    }
    if (tensor->data != NULL) {
        sl_tensor_to_f32(tensor, values);
    }
    void *memory = NULL;
    sl_status_t status = loader_alloc(loader, count, sizeof(float), &memory);
    if (status == SL_OK && !loader->params->count_only) {
        layer->router_bias = memory;
        status = loader->params->ops->upload(loader->params->device, NULL, memory, values,
                                             count * sizeof(float));
    }
    free(values);
    return status;
}

static sl_status_t load_mlp(loader_t *loader, sl_layer_weights_t *layer)
{
    static const sl_weight_kind_t dense[3] = {SL_WEIGHT_MLP_GATE, SL_WEIGHT_MLP_UP,
                                              SL_WEIGHT_MLP_DOWN};
    static const sl_weight_kind_t experts[3] = {SL_WEIGHT_EXPERT_GATE, SL_WEIGHT_EXPERT_UP,
                                                SL_WEIGHT_EXPERT_DOWN};
    static const sl_weight_kind_t shared[3] = {SL_WEIGHT_SHARED_GATE, SL_WEIGHT_SHARED_UP,
                                               SL_WEIGHT_SHARED_DOWN};
    const sl_model_config_t *config = loader->config;
    const sl_weights_t *weights = &loader->loaded->weights;
    if (!sl_model_layer_is_moe(config, loader->layer)) {
        return load_mlps(loader, dense, 1, weights->dense_width, &layer->gate_up, &layer->down);
    }
    SL_TRY(load_whole(loader, SL_WEIGHT_ROUTER, &layer->router));
    if (config->topk_method == SL_TOPK_NOAUX_TC) {
        SL_TRY(load_router_bias(loader, layer));
    }
    SL_TRY(load_mlps(loader, experts, config->n_routed_experts, weights->expert_width,
                     &layer->gate_up, &layer->down));
    if (weights->shared_width == 0) {
        return SL_OK;
    }
    return load_mlps(loader, shared, 1, weights->shared_width, &layer->shared_gate_up,
                     &layer->shared_down);
}

static sl_status_t split(const char *what, uint32_t total, uint32_t tp, uint32_t *part_p)
{
    if (total % tp != 0) {
        return sl_error(SL_ERR_CONFIG,
                        "%s %u cannot be split over tp %u ranks: expected a multiple", what, total,
                        tp);
    }
    *part_p = total / tp;
    return SL_OK;
}

static sl_status_t split_widths(const sl_weights_params_t *params, sl_weights_t *weights)
{
    const sl_model_config_t *config = sl_checkpoint_config(params->checkpoint);
    weights->heads = config->num_attention_heads;
    if (params->attention == SL_ATTENTION_TP) {
        SL_TRY(
            split("num_attention_heads", config->num_attention_heads, params->tp, &weights->heads));
    }
    SL_TRY(
        split("intermediate_size", config->intermediate_size, params->tp, &weights->dense_width));
    SL_TRY(split("moe_intermediate_size", config->moe_intermediate_size, params->tp,
                 &weights->expert_width));
    return split("n_shared_experts * moe_intermediate_size",
                 config->n_shared_experts * config->moe_intermediate_size, params->tp,
                 &weights->shared_width);
}

static sl_status_t load_all(loader_t *loader)
{
    const sl_model_config_t *config = loader->config;
    sl_weights_t *weights = &loader->loaded->weights;
    SL_TRY(load_whole(loader, SL_WEIGHT_EMBED, &weights->embed));
    SL_TRY(load_whole(loader, SL_WEIGHT_FINAL_NORM, &weights->final_norm));
    if (config->tie_word_embeddings) {
        weights->lm_head = weights->embed;
    } else {
        SL_TRY(load_whole(loader, SL_WEIGHT_LM_HEAD, &weights->lm_head));
    }
    for (uint32_t i = 0; i < config->num_hidden_layers; i++) {
        loader->layer = i;
        SL_TRY(load_attention(loader, &weights->layers[i]));
        SL_TRY(load_mlp(loader, &weights->layers[i]));
    }
    return SL_OK;
}

sl_status_t sl_weights_load(const sl_weights_params_t *params, sl_weights_t **weights_p)
{
    const sl_model_config_t *config = sl_checkpoint_config(params->checkpoint);
    loaded_t *loaded = calloc(1, sizeof(*loaded));
    if (loaded == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "weights: out of host memory");
    }
    loader_t loader = {.params = params, .config = config, .loaded = loaded};
    loaded->weights.layers = calloc(config->num_hidden_layers, sizeof(sl_layer_weights_t));
    sl_status_t status = SL_OK;
    if (loaded->weights.layers == NULL) {
        status = sl_error(SL_ERR_NO_MEMORY, "weights: out of host memory");
        goto fail;
    }
    SL_TRY_GOTO(status, split_widths(params, &loaded->weights), fail);
    if (params->count_only) {
        SL_TRY_GOTO(status, load_all(&loader), fail);
        *weights_p = &loaded->weights;
        return SL_OK;
    }
    sl_progress_begin(&loader.progress, "loading weights",
                      sl_checkpoint_bytes(params->checkpoint) / params->tp);
    status = load_all(&loader);
    if (status == SL_OK) {
        status = sl_load_jobs_run(&loader.jobs, params->ops, params->device, &loader.progress);
    }
    sl_load_jobs_free(&loader.jobs);
    sl_progress_end(&loader.progress);
    if (status != SL_OK) {
        goto fail;
    }
    double took_s = (double)(sl_now_us() - loader.progress.started_us) / 1e6;
    sl_log_info("weights: %.2f GiB in %.2f s", (double)loaded->weights.bytes / 0x1p30, took_s);
    *weights_p = &loaded->weights;
    return SL_OK;
fail:
    sl_weights_free(params->ops, params->device, &loaded->weights);
    return status;
}

void sl_weights_free(const sl_ops_t *ops, sl_device_t *device, sl_weights_t *weights)
{
    if (weights == NULL) {
        return;
    }
    loaded_t *loaded = (loaded_t *)weights;
    for (size_t i = 0; i < loaded->allocations.count; i++) {
        ops->free(device, loaded->allocations.items[i]);
    }
    free(loaded->allocations.items);
    free(loaded->weights.layers);
    free(loaded);
}
