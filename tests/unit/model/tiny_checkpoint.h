/*
 * A checkpoint of 30 tensors that a test takes apart: one dense layer, one with two experts, a
 * shared expert, and a few hundred bytes of weights. The names are written out here, apart from the
 * table that the code under test has.
 */
#ifndef TESTS_UNIT_MODEL_TINY_CHECKPOINT_H
#define TESTS_UNIT_MODEL_TINY_CHECKPOINT_H

#include "check.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#define TINY_MAX 64

static const char tiny_config[] =
    "{\"model_type\":\"deepseek_v2\",\"vocab_size\":8,\"hidden_size\":4,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":2,\"q_lora_rank\":null,\"kv_lora_rank\":4,\"qk_nope_head_dim\":3,"
    "\"qk_rope_head_dim\":2,\"v_head_dim\":5,\"intermediate_size\":6,\"moe_intermediate_size\":3,"
    "\"n_routed_experts\":2,\"n_shared_experts\":2,\"num_experts_per_tok\":1,"
    "\"first_k_dense_replace\":1,\"max_position_embeddings\":64}";

typedef struct {
    char name[96];
    const char *dtype;
    unsigned element; /* bytes */
    unsigned rank;
    unsigned long shape[3];
    bool second_file; /* which shard it goes to */
} tiny_tensor_t;

typedef struct {
    char dir[64];
    tiny_tensor_t tensors[TINY_MAX];
    size_t count;
} tiny_t;

static inline void tiny_add(tiny_t *tiny, const char *name, unsigned long rows,
                            unsigned long columns)
{
    tiny_tensor_t *tensor = &tiny->tensors[tiny->count++];
    assert_true(tiny->count <= TINY_MAX);
    *tensor = (tiny_tensor_t){.dtype = "BF16", .element = 2, .rank = columns == 0 ? 1 : 2};
    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    tensor->shape[0] = rows;
    tensor->shape[1] = columns;
}

static inline void tiny_add_layer(tiny_t *tiny, int layer, const char *suffix, unsigned long rows,
                                  unsigned long columns)
{
    char name[96];
    snprintf(name, sizeof(name), "model.layers.%d.%s", layer, suffix);
    tiny_add(tiny, name, rows, columns);
}

static inline void tiny_write_text(const tiny_t *tiny, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", tiny->dir, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* A fresh directory with config.json, and the tensors listed but not yet written. */
static inline void tiny_create(tiny_t *tiny)
{
    *tiny = (tiny_t){.dir = "/tmp/sluice-model-XXXXXX"};
    assert_non_null(mkdtemp(tiny->dir));
    tiny_write_text(tiny, "config.json", tiny_config);
    tiny_add(tiny, "model.embed_tokens.weight", 8, 4);
    tiny_add(tiny, "model.norm.weight", 4, 0);
    tiny_add(tiny, "lm_head.weight", 8, 4);
    for (int layer = 0; layer < 2; layer++) {
        tiny_add_layer(tiny, layer, "input_layernorm.weight", 4, 0);
        tiny_add_layer(tiny, layer, "post_attention_layernorm.weight", 4, 0);
        tiny_add_layer(tiny, layer, "self_attn.q_proj.weight", 10, 4);
        tiny_add_layer(tiny, layer, "self_attn.kv_a_proj_with_mqa.weight", 6, 4);
        tiny_add_layer(tiny, layer, "self_attn.kv_a_layernorm.weight", 4, 0);
        tiny_add_layer(tiny, layer, "self_attn.kv_b_proj.weight", 16, 4);
        tiny_add_layer(tiny, layer, "self_attn.o_proj.weight", 4, 10);
    }
    tiny_add_layer(tiny, 0, "mlp.gate_proj.weight", 6, 4);
    tiny_add_layer(tiny, 0, "mlp.up_proj.weight", 6, 4);
    tiny_add_layer(tiny, 0, "mlp.down_proj.weight", 4, 6);
    tiny_add_layer(tiny, 1, "mlp.gate.weight", 2, 4);
    tiny_add_layer(tiny, 1, "mlp.experts.0.gate_proj.weight", 3, 4);
    tiny_add_layer(tiny, 1, "mlp.experts.0.up_proj.weight", 3, 4);
    tiny_add_layer(tiny, 1, "mlp.experts.0.down_proj.weight", 4, 3);
    tiny_add_layer(tiny, 1, "mlp.experts.1.gate_proj.weight", 3, 4);
    tiny_add_layer(tiny, 1, "mlp.experts.1.up_proj.weight", 3, 4);
    tiny_add_layer(tiny, 1, "mlp.experts.1.down_proj.weight", 4, 3);
    tiny_add_layer(tiny, 1, "mlp.shared_experts.gate_proj.weight", 6, 4);
    tiny_add_layer(tiny, 1, "mlp.shared_experts.up_proj.weight", 6, 4);
    tiny_add_layer(tiny, 1, "mlp.shared_experts.down_proj.weight", 4, 6);
}

static inline tiny_tensor_t *tiny_find(tiny_t *tiny, const char *name)
{
    for (size_t i = 0; i < tiny->count; i++) {
        if (strcmp(tiny->tensors[i].name, name) == 0) {
            return &tiny->tensors[i];
        }
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

static inline void tiny_remove(tiny_t *tiny, const char *name)
{
    *tiny_find(tiny, name) = tiny->tensors[--tiny->count];
}

static inline size_t tiny_bytes(const tiny_tensor_t *tensor)
{
    size_t bytes = tensor->element;
    for (unsigned i = 0; i < tensor->rank; i++) {
        bytes *= tensor->shape[i];
    }
    return bytes;
}

/* Byte `j` of the data of a tensor: no two tensors share eight in a row. */
static inline unsigned char tiny_byte(const char *name, size_t j)
{
    uint32_t hash = (uint32_t)j * 2654435761u;
    for (; *name != '\0'; name++) {
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    }
    return (unsigned char)(hash >> 24);
}

/* One file of the tensors whose second_file is `second`. Bytes depend on name and place alone. */
static inline void tiny_write_file(const tiny_t *tiny, const char *file_name, bool second)
{
    static char header[16384];
    char path[512];
    size_t used = (size_t)snprintf(header, sizeof(header), "{\"__metadata__\":{\"format\":\"pt\"}");
    size_t offset = 0;
    for (size_t i = 0; i < tiny->count; i++) {
        const tiny_tensor_t *tensor = &tiny->tensors[i];
        if (tensor->second_file != second) {
            continue;
        }
        used +=
            (size_t)snprintf(header + used, sizeof(header) - used,
                             ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", tensor->name, tensor->dtype);
        for (unsigned j = 0; j < tensor->rank; j++) {
            used += (size_t)snprintf(header + used, sizeof(header) - used, "%s%lu",
                                     j == 0 ? "" : ",", tensor->shape[j]);
        }
        used +=
            (size_t)snprintf(header + used, sizeof(header) - used, "],\"data_offsets\":[%zu,%zu]}",
                             offset, offset + tiny_bytes(tensor));
        offset += tiny_bytes(tensor);
    }
    used += (size_t)snprintf(header + used, sizeof(header) - used, "}");
    assert_true(used < sizeof(header));

    snprintf(path, sizeof(path), "%s/%s", tiny->dir, file_name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    for (int i = 0; i < 8; i++) {
        fputc((int)(used >> (8 * i) & 0xff), file);
    }
    fwrite(header, 1, used, file);
    for (size_t i = 0; i < tiny->count; i++) {
        const tiny_tensor_t *tensor = &tiny->tensors[i];
        for (size_t j = 0; tensor->second_file == second && j < tiny_bytes(tensor); j++) {
            fputc(tiny_byte(tensor->name, j), file);
        }
    }
    assert_int_equal(fclose(file), 0);
}

/* Removes the directory and what is in it. */
static inline void tiny_destroy(tiny_t *tiny)
{
    char path[512];
    DIR *dir = opendir(tiny->dir);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        snprintf(path, sizeof(path), "%s/%s", tiny->dir, entry->d_name);
        unlink(path);
    }
    closedir(dir);
    assert_int_equal(rmdir(tiny->dir), 0);
}

#endif
