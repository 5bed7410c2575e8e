/*
 * The tensors that lie in a checkpoint directory, whatever the model: its .safetensors files mapped
 * read-only and one table over all of them, sorted by name. Any thread once open; opening blocks on
 * files.
 */
#ifndef SL_MODEL_TENSORS_H
#define SL_MODEL_TENSORS_H

#include <stdbool.h>
#include <stddef.h>

#include "common/model/checkpoint.h"
#include "common/model/safetensors.h"

typedef struct {
    char *path;
    void *map;
    size_t bytes;
    sl_safetensors_t header;
} sl_shard_t;

typedef struct {
    const sl_safetensors_entry_t *entry;
    const sl_shard_t *shard;
    sl_tensor_t tensor; /* filled when the model claims the row */
    bool used;
} sl_tensor_row_t;

typedef struct {
    sl_shard_t *shards;
    size_t shard_count;
    sl_tensor_row_t *rows;
    size_t row_count;
} sl_tensors_t;

/* DIR/model.safetensors where there is one, as transformers does, or the files that
 * DIR/model.safetensors.index.json names. */
SL_MUST_USE sl_status_t sl_tensors_open(const char *dir, sl_tensors_t *tensors_p);
void sl_tensors_close(sl_tensors_t *tensors);

/* The row called `name`, or NULL. */
sl_tensor_row_t *sl_tensors_find(const sl_tensors_t *tensors, const char *name);

#endif
