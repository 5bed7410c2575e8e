/*
 * Binds the tensors of a directory to the weights of its config. Each layer keeps one pointer a
 * kind and three an expert; the pointers lead into the rows of the table.
 *
 * A hostile config can ask for hundreds of millions of experts, so nothing is sized by the whole
 * model at once: a layer's table is taken when its turn comes, and the first tensor that is not
 * there ends it.
 */
#include "common/model/checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/model/hash.h"
#include "common/model/layout.h"
#include "common/model/tensors.h"
#include "common/model/weights.h"

#define CONFIG_TEXT_BYTES 2048
#define SAMPLE_BYTES 4096

typedef struct {
    const sl_tensor_t *weights[SL_WEIGHT_KIND_COUNT];
    const sl_tensor_t **experts; /* [expert][3]: gate, up, down */
} layer_t;

struct sl_checkpoint {
    bool dummy;
    sl_tensor_t dummies[SL_WEIGHT_KIND_COUNT];
    sl_model_config_t config;
    sl_tensors_t tensors;
    layer_t *layers;
    const sl_tensor_t *globals[SL_WEIGHT_KIND_COUNT];
    uint64_t bytes;
    char identity[64];
    char *tokenizer_path;
};

static void shape_text(uint32_t rank, const uint64_t *shape, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (uint32_t i = 0; i < rank && used < size; i++) {
        used +=
            (size_t)snprintf(text + used, size - used, "%s%" PRIu64, i == 0 ? "" : ", ", shape[i]);
    }
    if (used < size) {
        snprintf(text + used, size - used, "]");
    }
}

static sl_status_t check_dtype(const sl_tensor_row_t *row, sl_dtype_t *dtype_p)
{
    static const char *const names[] = {"F32", "BF16", "F16"};
    static const sl_dtype_t dtypes[] = {SL_DTYPE_F32, SL_DTYPE_BF16, SL_DTYPE_F16};
    for (int i = 0; i < 3; i++) {
        if (strcmp(row->entry->dtype, names[i]) == 0) {
            *dtype_p = dtypes[i];
            return SL_OK;
        }
    }
    return sl_error(SL_ERR_UNSUPPORTED, "%s: tensor %s: dtype: expected F32, BF16 or F16, found %s",
                    row->shard->path, row->entry->name, row->entry->dtype);
}

/* Checks the row against what the config calls for and makes it the weight's tensor. */
static sl_status_t claim(const sl_model_config_t *config, sl_weight_kind_t kind,
                         sl_tensor_row_t *row)
{
    uint32_t rank = 0;
    uint64_t shape[2];
    sl_dtype_t dtype = SL_DTYPE_F32;
    const sl_safetensors_entry_t *entry = row->entry;
    sl_weight_shape(config, kind, &rank, shape);
    bool same = entry->rank == rank && entry->shape[0] == shape[0] &&
                (rank == 1 || entry->shape[1] == shape[1]);
    if (!same) {
        char expected[64], found[256];
        shape_text(rank, shape, expected, sizeof(expected));
        shape_text(entry->rank, entry->shape, found, sizeof(found));
        return sl_error(SL_ERR_INVALID, "%s: tensor %s: shape: expected %s, found %s",
                        row->shard->path, entry->name, expected, found);
    }
    SL_TRY(check_dtype(row, &dtype));
    row->tensor = (sl_tensor_t){
        .name = entry->name,
        .dtype = dtype,
        .rank = rank,
        .shape = {shape[0], shape[1]},
        .data = (const char *)row->shard->map + entry->begin,
        .bytes = (size_t)(entry->end - entry->begin),
    };
    row->used = true;
    return SL_OK;
}

static sl_status_t bind_weight(sl_checkpoint_t *checkpoint, const char *dir, sl_weight_kind_t kind,
                               uint32_t layer, uint32_t expert, const sl_tensor_t **tensor_p)
{
    char name[SL_WEIGHT_NAME_BYTES];
    sl_weight_name(kind, layer, expert, name);
    sl_tensor_row_t *row = sl_tensors_find(&checkpoint->tensors, name);
    if (row == NULL) {
        uint32_t rank = 0;
        uint64_t shape[2];
        char expected[64];
        sl_weight_shape(&checkpoint->config, kind, &rank, shape);
        shape_text(rank, shape, expected, sizeof(expected));
        return sl_error(SL_ERR_INVALID,
                        "%s: tensor %s: expected shape %s by config.json, found no such tensor in "
                        "%zu file(s)",
                        dir, name, expected, checkpoint->tensors.shard_count);
    }
    SL_TRY(claim(&checkpoint->config, kind, row));
    *tensor_p = &row->tensor;
    return SL_OK;
}

static sl_status_t bind_globals(sl_checkpoint_t *checkpoint, const char *dir)
{
    const sl_tensor_t **globals = checkpoint->globals;
    SL_TRY(bind_weight(checkpoint, dir, SL_WEIGHT_EMBED, 0, 0, &globals[SL_WEIGHT_EMBED]));
    SL_TRY(
        bind_weight(checkpoint, dir, SL_WEIGHT_FINAL_NORM, 0, 0, &globals[SL_WEIGHT_FINAL_NORM]));
    /* A tied file that carries a head all the same is used with it: either the two are equal, or
     * the config is wrong, which is how transformers sees it too. */
    if (checkpoint->config.tie_word_embeddings &&
        sl_tensors_find(&checkpoint->tensors, "lm_head.weight") == NULL) {
        globals[SL_WEIGHT_LM_HEAD] = globals[SL_WEIGHT_EMBED];
        return SL_OK;
    }
    return bind_weight(checkpoint, dir, SL_WEIGHT_LM_HEAD, 0, 0, &globals[SL_WEIGHT_LM_HEAD]);
}

static sl_status_t bind_experts(sl_checkpoint_t *checkpoint, const char *dir, uint32_t layer)
{
    static const sl_weight_kind_t kinds[] = {SL_WEIGHT_EXPERT_GATE, SL_WEIGHT_EXPERT_UP,
                                             SL_WEIGHT_EXPERT_DOWN};
    uint32_t count = checkpoint->config.n_routed_experts;
    const sl_tensor_t **experts = calloc((size_t)count * 3, sizeof(experts[0]));
    if (experts == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for %u experts", dir, count);
    }
    checkpoint->layers[layer].experts = experts;
    for (uint32_t i = 0; i < count * 3; i++) {
        SL_TRY(bind_weight(checkpoint, dir, kinds[i % 3], layer, i / 3, &experts[i]));
    }
    return SL_OK;
}

static sl_status_t bind_layers(sl_checkpoint_t *checkpoint, const char *dir)
{
    const sl_model_config_t *config = &checkpoint->config;
    checkpoint->layers = calloc(config->num_hidden_layers, sizeof(checkpoint->layers[0]));
    if (checkpoint->layers == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for %u layers", dir,
                        config->num_hidden_layers);
    }
    for (uint32_t layer = 0; layer < config->num_hidden_layers; layer++) {
        for (int i = 0; i < SL_WEIGHT_KIND_COUNT; i++) {
            sl_weight_kind_t kind = (sl_weight_kind_t)i;
            if (sl_weight_scope(kind) == SL_WEIGHT_LAYER &&
                sl_weight_present(config, kind, layer)) {
                SL_TRY(bind_weight(checkpoint, dir, kind, layer, 0,
                                   &checkpoint->layers[layer].weights[kind]));
            }
        }
        if (sl_model_layer_is_moe(config, layer)) {
            SL_TRY(bind_experts(checkpoint, dir, layer));
        }
    }
    return SL_OK;
}

/* A tensor that nothing claims usually means that the config does not describe the weights. */
static sl_status_t refuse_unknown(const sl_checkpoint_t *checkpoint)
{
    for (size_t i = 0; i < checkpoint->tensors.row_count; i++) {
        const sl_tensor_row_t *row = &checkpoint->tensors.rows[i];
        if (!row->used && !sl_weight_skipped(&checkpoint->config, row->entry->name)) {
            return sl_error(SL_ERR_INVALID,
                            "%s: tensor %s: expected only tensors of a %s model with %u layers, "
                            "found one it has no use for",
                            row->shard->path, row->entry->name, checkpoint->config.model_type,
                            checkpoint->config.num_hidden_layers);
        }
    }
    return SL_OK;
}

/*
 * Names, shapes and dtypes alone are the same for a base model and everything fine-tuned from it,
 * so the hash also takes the start of what every rank reads anyway: vectors (norms, routing biases)
 * and output projections. That is about a megabyte of V3.
 */
static void make_identity(sl_checkpoint_t *checkpoint)
{
    static const char sampled[] = ".o_proj.weight";
    char text[CONFIG_TEXT_BYTES];
    size_t used = sl_model_config_text(&checkpoint->config, text, sizeof(text));
    SL_ASSERT(used < sizeof(text));
    uint64_t hash = sl_fnv1a(SL_FNV1A_START, text, used);
    for (size_t i = 0; i < checkpoint->tensors.row_count; i++) {
        const sl_tensor_t *tensor = &checkpoint->tensors.rows[i].tensor;
        if (!checkpoint->tensors.rows[i].used) {
            continue;
        }
        checkpoint->bytes += tensor->bytes;
        used = (size_t)snprintf(text, sizeof(text), "\n%s %s %" PRIu64 " %" PRIu64 " %zu ",
                                tensor->name, sl_dtype_name(tensor->dtype), tensor->shape[0],
                                tensor->shape[1], tensor->bytes);
        hash = sl_fnv1a(hash, text, used);
        size_t length = strlen(tensor->name), tail = sizeof(sampled) - 1;
        if (tensor->rank == 1 ||
            (length > tail && strcmp(tensor->name + length - tail, sampled) == 0)) {
            hash = sl_fnv1a(hash, tensor->data,
                            tensor->bytes < SAMPLE_BYTES ? tensor->bytes : SAMPLE_BYTES);
        }
    }
    snprintf(checkpoint->identity, sizeof(checkpoint->identity), "%s-%016" PRIx64,
             checkpoint->config.model_type, hash);
}

static sl_status_t find_tokenizer(sl_checkpoint_t *checkpoint, const char *dir)
{
    if (asprintf(&checkpoint->tokenizer_path, "%s/tokenizer.json", dir) < 0) {
        checkpoint->tokenizer_path = NULL;
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for a path", dir);
    }
    if (access(checkpoint->tokenizer_path, R_OK) != 0) {
        checkpoint->tokenizer_path[0] = '\0';
    }
    return SL_OK;
}

static uint64_t dummy_bytes(const sl_checkpoint_t *checkpoint)
{
    const sl_model_config_t *config = &checkpoint->config;
    uint64_t bytes = 0;
    for (int i = 0; i < SL_WEIGHT_KIND_COUNT; i++) {
        sl_weight_kind_t kind = (sl_weight_kind_t)i;
        sl_weight_scope_t scope = sl_weight_scope(kind);
        uint64_t count = scope == SL_WEIGHT_EXPERT ? config->n_routed_experts : 1;
        uint32_t layers = scope == SL_WEIGHT_GLOBAL ? 1 : config->num_hidden_layers;
        for (uint32_t layer = 0; layer < layers; layer++) {
            bytes += sl_weight_present(config, kind, layer)
                         ? count * checkpoint->dummies[kind].bytes
                         : 0;
        }
    }
    return bytes;
}

/* A tensor a kind, for all layers and experts: they differ only in what fills them. */
static void make_dummies(sl_checkpoint_t *checkpoint)
{
    char text[CONFIG_TEXT_BYTES];
    for (int i = 0; i < SL_WEIGHT_KIND_COUNT; i++) {
        sl_tensor_t *tensor = &checkpoint->dummies[i];
        *tensor = (sl_tensor_t){.name = "dummy", .dtype = SL_DTYPE_BF16};
        sl_weight_shape(&checkpoint->config, (sl_weight_kind_t)i, &tensor->rank, tensor->shape);
        tensor->bytes = tensor->shape[0] * tensor->shape[1] * sl_dtype_bytes(tensor->dtype);
    }
    checkpoint->dummy = true;
    checkpoint->bytes = dummy_bytes(checkpoint);
    size_t used = sl_model_config_text(&checkpoint->config, text, sizeof(text));
    snprintf(checkpoint->identity, sizeof(checkpoint->identity), "%s-dummy-%016" PRIx64,
             checkpoint->config.model_type, sl_fnv1a(SL_FNV1A_START, text, used));
}

static sl_status_t cut_layers(sl_model_config_t *config, const char *dir, uint32_t layers)
{
    if (layers > config->num_hidden_layers) {
        return sl_error(SL_ERR_CONFIG, "%s: %u layers wanted, expected at most the model's %u", dir,
                        layers, config->num_hidden_layers);
    }
    if (layers > 0) {
        config->num_hidden_layers = layers;
    }
    return SL_OK;
}

static sl_status_t open_into(sl_checkpoint_t *checkpoint, const char *dir,
                             const sl_checkpoint_options_t *options)
{
    SL_TRY(sl_model_config_load(dir, &checkpoint->config));
    SL_TRY(cut_layers(&checkpoint->config, dir, options->num_hidden_layers));
    SL_TRY(find_tokenizer(checkpoint, dir));
    if (options->dummy) {
        make_dummies(checkpoint);
        return SL_OK;
    }
    SL_TRY(sl_tensors_open(dir, &checkpoint->tensors));
    SL_TRY(bind_globals(checkpoint, dir));
    SL_TRY(bind_layers(checkpoint, dir));
    SL_TRY(refuse_unknown(checkpoint));
    make_identity(checkpoint);
    return SL_OK;
}

sl_status_t sl_checkpoint_open_with(const char *dir, const sl_checkpoint_options_t *options,
                                    sl_checkpoint_t **checkpoint_p)
{
    sl_checkpoint_t *checkpoint = calloc(1, sizeof(*checkpoint));
    if (checkpoint == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for a checkpoint", dir);
    }
    sl_status_t status = open_into(checkpoint, dir, options);
    if (status != SL_OK) {
        sl_checkpoint_close(checkpoint);
        return status;
    }
    *checkpoint_p = checkpoint;
    return SL_OK;
}

sl_status_t sl_checkpoint_open(const char *dir, sl_checkpoint_t **checkpoint_p)
{
    return sl_checkpoint_open_with(dir, &(sl_checkpoint_options_t){0}, checkpoint_p);
}

void sl_checkpoint_close(sl_checkpoint_t *checkpoint)
{
    if (checkpoint == NULL) {
        return;
    }
    for (uint32_t i = 0; checkpoint->layers != NULL && i < checkpoint->config.num_hidden_layers;
         i++) {
        free(checkpoint->layers[i].experts);
    }
    free(checkpoint->layers);
    sl_tensors_close(&checkpoint->tensors);
    free(checkpoint->tokenizer_path);
    free(checkpoint);
}

const sl_model_config_t *sl_checkpoint_config(const sl_checkpoint_t *checkpoint)
{
    return &checkpoint->config;
}

const char *sl_checkpoint_identity(const sl_checkpoint_t *checkpoint)
{
    return checkpoint->identity;
}

const char *sl_checkpoint_tokenizer_path(const sl_checkpoint_t *checkpoint)
{
    return checkpoint->tokenizer_path;
}

uint64_t sl_checkpoint_bytes(const sl_checkpoint_t *checkpoint)
{
    return checkpoint->bytes;
}

const sl_tensor_t *sl_checkpoint_weight(const sl_checkpoint_t *checkpoint, sl_weight_kind_t kind,
                                        uint32_t layer, uint32_t expert)
{
    const sl_tensor_t *tensor = NULL;
    SL_ASSERT(kind < SL_WEIGHT_KIND_COUNT);
    if (checkpoint->dummy) {
        return &checkpoint->dummies[kind];
    }
    sl_weight_scope_t scope = sl_weight_scope(kind);
    SL_ASSERT(scope == SL_WEIGHT_GLOBAL || layer < checkpoint->config.num_hidden_layers);
    switch (scope) {
    case SL_WEIGHT_GLOBAL:
        tensor = checkpoint->globals[kind];
        break;
    case SL_WEIGHT_LAYER:
        tensor = checkpoint->layers[layer].weights[kind];
        break;
    case SL_WEIGHT_EXPERT:
        SL_ASSERT(checkpoint->layers[layer].experts != NULL &&
                  expert < checkpoint->config.n_routed_experts);
        tensor = checkpoint->layers[layer].experts[expert * 3 + (kind - SL_WEIGHT_EXPERT_GATE)];
        break;
    }
    SL_ASSERT(tensor != NULL);
    return tensor;
}
