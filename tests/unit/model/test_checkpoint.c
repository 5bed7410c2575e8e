/*
 * Checkpoints on disk: the goldens open and have what their configs say, and a tiny one that is
 * spoilt in one way at a time gets an error that names the tensor, the expected and the found.
 */
#include "tiny_checkpoint.h"

#include <jansson.h>

#include "common/model/checkpoint.h"
#include "common/model/layout.h"

#define SINGLE "model.safetensors"
#define INDEX "model.safetensors.index.json"

static sl_checkpoint_t *open_good(const char *dir)
{
    sl_checkpoint_t *checkpoint = NULL;
    sl_status_t status = sl_checkpoint_open(dir, &checkpoint);
    if (status != SL_OK) {
        fail_msg("%s: %s", dir, sl_error_text());
    }
    return checkpoint;
}

static void check_bad(const tiny_t *tiny, sl_status_t expected, const char *word1,
                      const char *word2, const char *word3)
{
    sl_checkpoint_t *checkpoint = NULL;
    sl_status_t status = sl_checkpoint_open(tiny->dir, &checkpoint);
    check_error(status, expected, word1, word2, word3, NULL);
    assert_null(checkpoint);
}

static void test_goldens(void **state)
{
    (void)state;
    static const char *const names[] = {"lite", "v2", "v3", "odd"};
    const char *root = getenv("SLUICE_SOURCE_DIR");
    char dir[512];
    assert_non_null(root);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(dir, sizeof(dir), "%s/tests/golden/%s", root, names[i]);
        sl_checkpoint_t *checkpoint = open_good(dir);
        const sl_model_config_t *config = sl_checkpoint_config(checkpoint);
        uint32_t last = config->num_hidden_layers - 1;
        const sl_tensor_t *o = sl_checkpoint_weight(checkpoint, SL_WEIGHT_O, last, 0);
        assert_int_equal(o->shape[0], config->hidden_size);
        assert_int_equal(o->shape[1], config->num_attention_heads * config->v_head_dim);
        const sl_tensor_t *head = sl_checkpoint_weight(checkpoint, SL_WEIGHT_LM_HEAD, 0, 0);
        const sl_tensor_t *embed = sl_checkpoint_weight(checkpoint, SL_WEIGHT_EMBED, 0, 0);
        assert_true((head == embed) == config->tie_word_embeddings);
        assert_true(sl_checkpoint_bytes(checkpoint) > 100000);
        assert_string_equal(sl_checkpoint_tokenizer_path(checkpoint), "");
        sl_checkpoint_close(checkpoint);
    }
}

static void test_weights(void **state)
{
    (void)state;
    tiny_t tiny;
    tiny_create(&tiny);
    tiny_write_file(&tiny, SINGLE, false);
    tiny_write_text(&tiny, "tokenizer.json", "{}");
    sl_checkpoint_t *checkpoint = open_good(tiny.dir);
    uint64_t bytes = 0;
    for (size_t i = 0; i < tiny.count; i++) {
        bytes += tiny_bytes(&tiny.tensors[i]);
    }
    assert_int_equal(sl_checkpoint_bytes(checkpoint), bytes);
    assert_non_null(strstr(sl_checkpoint_tokenizer_path(checkpoint), "/tokenizer.json"));

    const sl_tensor_t *tensor = sl_checkpoint_weight(checkpoint, SL_WEIGHT_EXPERT_DOWN, 1, 1);
    assert_string_equal(tensor->name, "model.layers.1.mlp.experts.1.down_proj.weight");
    assert_int_equal(tensor->dtype, SL_DTYPE_BF16);
    assert_int_equal(tensor->shape[0], 4);
    assert_int_equal(tensor->shape[1], 3);
    assert_int_equal(tensor->bytes, 24);
    const unsigned char *data = tensor->data;
    for (size_t j = 0; j < tensor->bytes; j++) {
        assert_int_equal(data[j], tiny_byte(tensor->name, j));
    }
    tensor = sl_checkpoint_weight(checkpoint, SL_WEIGHT_KV_A_NORM, 0, 0);
    assert_int_equal(tensor->rank, 1);
    assert_int_equal(tensor->shape[1], 1);
    tensor = sl_checkpoint_weight(checkpoint, SL_WEIGHT_MLP_DOWN, 0, 0);
    assert_string_equal(tensor->name, "model.layers.0.mlp.down_proj.weight");
    tensor = sl_checkpoint_weight(checkpoint, SL_WEIGHT_SHARED_UP, 1, 0);
    assert_int_equal(tensor->shape[0], 6);
    sl_checkpoint_close(checkpoint);
    sl_checkpoint_close(NULL);
    tiny_destroy(&tiny);
}

static void write_shards(tiny_t *tiny)
{
    json_t *map = json_object(),
           *root = json_pack("{s:{s:i},s:o}", "metadata", "total_size", 1, "weight_map", map);
    for (size_t i = 0; i < tiny->count; i++) {
        tiny->tensors[i].second_file = i % 3 == 0;
        json_object_set_new(map, tiny->tensors[i].name,
                            json_string(i % 3 == 0 ? "two.safetensors" : "one.safetensors"));
    }
    char *text = json_dumps(root, 0);
    tiny_write_text(tiny, INDEX, text);
    tiny_write_file(tiny, "one.safetensors", false);
    tiny_write_file(tiny, "two.safetensors", true);
    free(text);
    json_decref(root);
}

/* Changes the first byte of a tensor in its file. */
static void flip_byte(const tiny_t *tiny, const tiny_tensor_t *tensor)
{
    char path[128];
    unsigned char first[8];
    static unsigned char buffer[16384];
    snprintf(path, sizeof(path), "%s/%s", tiny->dir,
             tensor->second_file ? "two.safetensors" : "one.safetensors");
    for (size_t j = 0; j < sizeof(first); j++) {
        first[j] = tiny_byte(tensor->name, j);
    }
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    size_t size = fread(buffer, 1, sizeof(buffer), file);
    unsigned char *at = memmem(buffer, size, first, sizeof(first));
    assert_non_null(at);
    assert_int_equal(fseek(file, at - buffer, SEEK_SET), 0);
    fputc(first[0] ^ 1, file);
    assert_int_equal(fclose(file), 0);
}

/* One file or two, here or there: the same model. A changed norm: another. */
static void test_identity(void **state)
{
    (void)state;
    tiny_t one, two;
    tiny_create(&one);
    tiny_create(&two);
    tiny_write_file(&one, SINGLE, false);
    write_shards(&two);
    sl_checkpoint_t *a = open_good(one.dir), *b = open_good(two.dir);
    assert_string_equal(sl_checkpoint_identity(a), sl_checkpoint_identity(b));
    assert_non_null(strstr(sl_checkpoint_identity(a), "deepseek_v2-"));
    sl_checkpoint_close(b);

    tiny_tensor_t *norm = tiny_find(&two, "model.norm.weight");
    norm->dtype = "F16"; /* as many bytes, another meaning */
    write_shards(&two);
    b = open_good(two.dir);
    assert_string_not_equal(sl_checkpoint_identity(a), sl_checkpoint_identity(b));
    sl_checkpoint_close(b);

    norm->dtype = "BF16";
    write_shards(&two);
    flip_byte(&two, norm);
    b = open_good(two.dir);
    assert_string_not_equal(sl_checkpoint_identity(a), sl_checkpoint_identity(b));
    sl_checkpoint_close(b);
    sl_checkpoint_close(a);
    tiny_destroy(&one);
    tiny_destroy(&two);
}

static void test_skipped(void **state)
{
    (void)state;
    tiny_t tiny;
    tiny_create(&tiny);
    tiny_add_layer(&tiny, 2, "eh_proj.weight", 4, 8);
    tiny_add_layer(&tiny, 2, "mlp.experts.0.gate_proj.weight", 1, 1);
    tiny.tensors[tiny.count - 1].dtype = "F8_E4M3"; /* nobody looks at what is skipped */
    tiny.tensors[tiny.count - 1].element = 1;
    tiny_add_layer(&tiny, 0, "self_attn.rotary_emb.inv_freq", 1, 0);
    tiny_write_file(&tiny, SINGLE, false);
    sl_checkpoint_close(open_good(tiny.dir));
    tiny_destroy(&tiny);
}

static void test_tied(void **state)
{
    (void)state;
    tiny_t tiny;
    tiny_create(&tiny);
    char config[sizeof(tiny_config) + 64];
    snprintf(config, sizeof(config), "{\"tie_word_embeddings\":true,%s", tiny_config + 1);
    tiny_write_text(&tiny, "config.json", config);
    tiny_write_file(&tiny, SINGLE, false);
    sl_checkpoint_t *checkpoint = open_good(tiny.dir);
    assert_string_equal(sl_checkpoint_weight(checkpoint, SL_WEIGHT_LM_HEAD, 0, 0)->name,
                        "lm_head.weight");
    sl_checkpoint_close(checkpoint);
    tiny_remove(&tiny, "lm_head.weight");
    tiny_write_file(&tiny, SINGLE, false);
    checkpoint = open_good(tiny.dir);
    assert_string_equal(sl_checkpoint_weight(checkpoint, SL_WEIGHT_LM_HEAD, 0, 0)->name,
                        "model.embed_tokens.weight");
    sl_checkpoint_close(checkpoint);
    tiny_destroy(&tiny);
}

static void test_missing(void **state)
{
    (void)state;
    static const struct {
        const char *name, *shape;
    } cases[] = {{"lm_head.weight", "[8, 4]"},
                 {"model.norm.weight", "[4]"},
                 {"model.layers.1.self_attn.kv_b_proj.weight", "[16, 4]"},
                 {"model.layers.1.mlp.experts.1.up_proj.weight", "[3, 4]"},
                 {"model.layers.1.mlp.gate.weight", "[2, 4]"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        tiny_t tiny;
        tiny_create(&tiny);
        tiny_remove(&tiny, cases[i].name);
        tiny_write_file(&tiny, SINGLE, false);
        check_bad(&tiny, SL_ERR_INVALID, cases[i].name, cases[i].shape, "found no such tensor");
        tiny_destroy(&tiny);
    }
}

static void test_wrong_shape(void **state)
{
    (void)state;
    tiny_t tiny;
    tiny_create(&tiny);
    tiny_tensor_t *tensor = tiny_find(&tiny, "model.layers.0.self_attn.o_proj.weight");
    tensor->shape[0] = 10; /* transposed */
    tensor->shape[1] = 4;
    tiny_write_file(&tiny, SINGLE, false);
    check_bad(&tiny, SL_ERR_INVALID, "model.layers.0.self_attn.o_proj.weight", "expected [4, 10]",
              "found [10, 4]");
    tensor->shape[0] = 40;
    tensor->rank = 1;
    tiny_write_file(&tiny, SINGLE, false);
    check_bad(&tiny, SL_ERR_INVALID, "o_proj.weight", "expected [4, 10]", "found [40]");
    tensor->rank = 3;
    tensor->shape[0] = 4;
    tensor->shape[1] = 10;
    tensor->shape[2] = 1;
    tiny_write_file(&tiny, SINGLE, false);
    check_bad(&tiny, SL_ERR_INVALID, "o_proj.weight", "expected [4, 10]", "found [4, 10, 1]");
    tiny_destroy(&tiny);
}

static void test_wrong_dtype(void **state)
{
    (void)state;
    static const struct {
        const char *dtype;
        unsigned element;
    } cases[] = {{"I64", 8}, {"F8_E4M3", 1}, {"I8", 1}, {"F64", 8}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        tiny_t tiny;
        tiny_create(&tiny);
        tiny_tensor_t *tensor = tiny_find(&tiny, "model.layers.1.mlp.gate.weight");
        tensor->dtype = cases[i].dtype;
        tensor->element = cases[i].element;
        tiny_write_file(&tiny, SINGLE, false);
        check_bad(&tiny, SL_ERR_UNSUPPORTED, "model.layers.1.mlp.gate.weight",
                  "expected F32, BF16 or F16, found", cases[i].dtype);
        tiny_destroy(&tiny);
    }
}

static void test_unknown_tensor(void **state)
{
    (void)state;
    tiny_t tiny;
    tiny_create(&tiny);
    tiny_add_layer(&tiny, 0, "self_attn.q_proj.bias", 10, 0);
    tiny_write_file(&tiny, SINGLE, false);
    check_bad(&tiny, SL_ERR_INVALID, "model.layers.0.self_attn.q_proj.bias",
              "deepseek_v2 model with 2 layers", "no use for");
    tiny_destroy(&tiny);
    /* an expert beyond the config's, and a name that only looks like a later layer */
    tiny_create(&tiny);
    tiny_add_layer(&tiny, 1, "mlp.experts.2.up_proj.weight", 3, 4);
    tiny_write_file(&tiny, SINGLE, false);
    check_bad(&tiny, SL_ERR_INVALID, "experts.2.up_proj.weight", "no use for", "");
    tiny.count--;
    tiny_add(&tiny, "model.layers.9x.norm", 1, 0);
    tiny_write_file(&tiny, SINGLE, false);
    check_bad(&tiny, SL_ERR_INVALID, "model.layers.9x.norm", "no use for", "");
    tiny_destroy(&tiny);
}

static void test_truncated(void **state)
{
    (void)state;
    tiny_t tiny;
    char path[128];
    tiny_create(&tiny);
    tiny_write_file(&tiny, SINGLE, false);
    snprintf(path, sizeof(path), "%s/%s", tiny.dir, SINGLE);
    FILE *file = fopen(path, "rb");
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    fclose(file);
    /* every length from nothing to one byte short is refused, none of them crashes */
    for (long length = 0; length < size; length += length < 32 || length > size - 32 ? 1 : 61) {
        sl_checkpoint_t *checkpoint = NULL;
        tiny_write_file(&tiny, SINGLE, false);
        assert_int_equal(truncate(path, length), 0);
        check_error(sl_checkpoint_open(tiny.dir, &checkpoint), SL_ERR_INVALID, SINGLE, NULL);
    }
    check_bad(&tiny, SL_ERR_INVALID, "truncated", "shared_experts.down_proj.weight", SINGLE);
    tiny_destroy(&tiny);
}

static void test_overlap(void **state)
{
    (void)state;
    static const char header[] =
        "{\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8]},"
        "\"lm_head.weight\":{\"dtype\":\"BF16\",\"shape\":[8,4],\"data_offsets\":[4,68]}}";
    tiny_t tiny;
    char path[128];
    tiny_create(&tiny);
    snprintf(path, sizeof(path), "%s/%s", tiny.dir, SINGLE);
    FILE *file = fopen(path, "wb");
    for (int i = 0; i < 8; i++) {
        fputc((int)((sizeof(header) - 1) >> (8 * i) & 0xff), file);
    }
    fwrite(header, 1, sizeof(header) - 1, file);
    for (int i = 0; i < 68; i++) {
        fputc(0, file);
    }
    fclose(file);
    check_bad(&tiny, SL_ERR_INVALID, "lm_head.weight overlaps model.norm.weight", "data byte 8",
              "found 4");
    tiny_destroy(&tiny);
}

static void write_map(const tiny_t *tiny, const char *entry)
{
    char text[512];
    snprintf(text, sizeof(text), "{\"weight_map\":{%s}}", entry);
    tiny_write_text(tiny, INDEX, text);
}

static void test_bad_index(void **state)
{
    (void)state;
    static const char *const outside[] = {
        "\"../x.safetensors\"", "\"/etc/passwd\"", "\"a/b\"", "\"..\"", "\"\"", "7"};
    tiny_t tiny;
    tiny_create(&tiny);
    check_bad(&tiny, SL_ERR_IO, tiny.dir, "expected model.safetensors or", INDEX);
    tiny_write_text(&tiny, INDEX, "{\"weight_map\":[]}");
    check_bad(&tiny, SL_ERR_INVALID, INDEX, "weight_map", "found []");
    tiny_write_text(&tiny, INDEX, "{");
    check_bad(&tiny, SL_ERR_INVALID, INDEX, "not valid JSON", "");
    write_map(&tiny, "\"model.norm.weight\":\"gone.safetensors\"");
    check_bad(&tiny, SL_ERR_IO, INDEX, "tensor model.norm.weight",
              "expected file gone.safetensors beside the index, found no such file");
    for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++) {
        char entry[128];
        snprintf(entry, sizeof(entry), "\"model.norm.weight\":%s", outside[i]);
        write_map(&tiny, entry);
        check_bad(&tiny, SL_ERR_INVALID, "tensor model.norm.weight", "a file in the same directory",
                  outside[i]);
    }
    tiny_write_file(&tiny, "one.safetensors", false);
    write_map(&tiny, "\"model.nowhere\":\"one.safetensors\"");
    check_bad(&tiny, SL_ERR_INVALID, "tensor model.nowhere", "one.safetensors", "found nowhere");
    tiny_write_file(&tiny, "two.safetensors", false);
    write_map(&tiny, "\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"");
    check_bad(&tiny, SL_ERR_INVALID, "expected once, found in", "one.safetensors",
              "two.safetensors");
    tiny_destroy(&tiny);

    tiny_create(&tiny);
    write_shards(&tiny);
    char path[128];
    snprintf(path, sizeof(path), "%s/two.safetensors", tiny.dir);
    assert_int_equal(truncate(path, 0), 0);
    check_bad(&tiny, SL_ERR_INVALID, "two.safetensors", "an empty file", "");
    tiny_destroy(&tiny);
}

/* A config that asks for far more than there is fails at the first absence, not in the allocator.
 */
static void test_huge_config(void **state)
{
    (void)state;
    tiny_t tiny;
    tiny_create(&tiny);
    char *at, config[sizeof(tiny_config) + 64];
    snprintf(config, sizeof(config), "%s", tiny_config);
    at = strstr(config, "\"num_hidden_layers\":2");
    memmove(at + 24, at + 21, strlen(at + 21) + 1);
    memcpy(at, "\"num_hidden_layers\":4096", 24);
    at = strstr(config, "\"n_routed_experts\":2");
    memmove(at + 24, at + 20, strlen(at + 20) + 1);
    memcpy(at, "\"n_routed_experts\":65536", 24);
    tiny_write_text(&tiny, "config.json", config);
    tiny_write_file(&tiny, SINGLE, false);
    check_bad(&tiny, SL_ERR_INVALID, "model.layers.1.mlp.gate.weight", "expected [65536, 4]",
              "found [2, 4]");
    tiny_destroy(&tiny);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goldens),        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_identity),       cmocka_unit_test(test_skipped),
        cmocka_unit_test(test_tied),           cmocka_unit_test(test_missing),
        cmocka_unit_test(test_wrong_shape),    cmocka_unit_test(test_wrong_dtype),
        cmocka_unit_test(test_unknown_tensor), cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_overlap),        cmocka_unit_test(test_bad_index),
        cmocka_unit_test(test_huge_config)};
    quiet();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
