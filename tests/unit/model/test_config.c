/*
 * config.json of the three published families as they are, one change at a time, and the derived
 * values against numbers that transformers computed for the same configs.
 */
#include "check.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/model/config.h"

#define YARN(mscale)                                                                               \
    "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"beta_fast\":32,\"beta_slow\":1,"          \
    "\"mscale\":" mscale ",\"mscale_all_dim\":" mscale                                             \
    ",\"original_max_position_embeddings\":4096}"

static const char lite[] =
    "{\"architectures\":[\"DeepseekV2ForCausalLM\"],\"attention_bias\":false,"
    "\"eos_token_id\":100001,\"first_k_dense_replace\":1,\"hidden_act\":\"silu\","
    "\"hidden_size\":2048,\"intermediate_size\":10944,\"kv_lora_rank\":512,"
    "\"max_position_embeddings\":163840,\"model_type\":\"deepseek_v2\","
    "\"moe_intermediate_size\":1408,\"moe_layer_freq\":1,\"n_group\":1,\"n_routed_experts\":64,"
    "\"n_shared_experts\":2,\"norm_topk_prob\":false,\"num_attention_heads\":16,"
    "\"num_experts_per_tok\":6,\"num_hidden_layers\":27,\"num_key_value_heads\":16,"
    "\"q_lora_rank\":null,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,"
    "\"rms_norm_eps\":1e-06,\"rope_theta\":10000,\"routed_scaling_factor\":1.0,"
    "\"scoring_func\":\"softmax\",\"tie_word_embeddings\":false,\"topk_group\":1,"
    "\"topk_method\":\"greedy\",\"torch_dtype\":\"bfloat16\",\"v_head_dim\":128,"
    "\"vocab_size\":102400," YARN("0.707") "}";

static const char v2[] =
    "{\"architectures\":[\"DeepseekV2ForCausalLM\"],\"eos_token_id\":100001,"
    "\"first_k_dense_replace\":1,\"hidden_size\":5120,\"intermediate_size\":12288,"
    "\"kv_lora_rank\":512,\"max_position_embeddings\":163840,\"model_type\":\"deepseek_v2\","
    "\"moe_intermediate_size\":1536,\"moe_layer_freq\":1,\"n_group\":8,\"n_routed_experts\":160,"
    "\"n_shared_experts\":2,\"norm_topk_prob\":false,\"num_attention_heads\":128,"
    "\"num_experts_per_tok\":6,\"num_hidden_layers\":60,\"q_lora_rank\":1536,"
    "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"rms_norm_eps\":1e-06,\"rope_theta\":10000,"
    "\"routed_scaling_factor\":16.0,\"scoring_func\":\"softmax\",\"topk_group\":3,"
    "\"topk_method\":\"group_limited_greedy\",\"v_head_dim\":128,\"vocab_size\":102400," YARN(
        "1.0") "}";

static const char v3[] =
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"eos_token_id\":1,"
    "\"first_k_dense_replace\":3,\"hidden_size\":7168,\"intermediate_size\":18432,"
    "\"kv_lora_rank\":512,\"max_position_embeddings\":163840,\"model_type\":\"deepseek_v3\","
    "\"moe_intermediate_size\":2048,\"n_group\":8,\"n_routed_experts\":256,"
    "\"n_shared_experts\":1,\"norm_topk_prob\":true,\"num_attention_heads\":128,"
    "\"num_experts_per_tok\":8,\"num_hidden_layers\":61,\"num_nextn_predict_layers\":1,"
    "\"q_lora_rank\":1536,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,"
    "\"rms_norm_eps\":1e-06,\"rope_theta\":10000,\"routed_scaling_factor\":2.5,"
    "\"topk_group\":4,\"v_head_dim\":128,\"vocab_size\":129280," YARN("1.0") "}";

static sl_status_t parse(const char *json, sl_model_config_t *config)
{
    return sl_model_config_parse(json, strlen(json), "config.json", config);
}

/* `base` with the key at `path` ("a" or "a.b") set to the JSON `value`, or removed for NULL. */
static char *edited(const char *base, const char *path, const char *value)
{
    char first[64];
    json_t *root = json_loads(base, 0, NULL), *object = root;
    assert_non_null(root);
    const char *dot = strchr(path, '.');
    if (dot != NULL) {
        snprintf(first, sizeof(first), "%.*s", (int)(dot - path), path);
        object = json_object_get(root, first);
        assert_non_null(object);
        path = dot + 1;
    }
    if (value == NULL) {
        json_object_del(object, path);
    } else {
        json_t *item = json_loads(value, JSON_DECODE_ANY, NULL);
        assert_non_null(item);
        json_object_set_new(object, path, item);
    }
    char *text = json_dumps(root, 0);
    json_decref(root);
    return text;
}

static sl_status_t parse_edited(const char *base, const char *path, const char *value,
                                sl_model_config_t *config)
{
    char *text = edited(base, path, value);
    sl_status_t status = parse(text, config);
    free(text);
    return status;
}

static void test_published(void **state)
{
    (void)state;
    sl_model_config_t config;
    assert_int_equal(parse(lite, &config), SL_OK);
    assert_string_equal(config.model_type, "deepseek_v2");
    assert_int_equal(config.q_lora_rank, 0);
    assert_int_equal(config.topk_method, SL_TOPK_GREEDY);
    assert_int_equal(config.scoring_func, SL_SCORE_SOFTMAX);
    assert_false(config.norm_topk_prob);
    assert_int_equal(config.latent_width, 576);
    assert_int_equal(config.qk_head_dim, 192);
    assert_float_equal(config.softmax_scale, 0.114721387f, 1e-8f);
    assert_float_equal(config.rope_cos_sin_scale, 1.0f, 1e-7f);
    assert_int_equal(config.eos_count, 1);
    assert_int_equal(config.eos_token_ids[0], 100001);

    assert_int_equal(parse(v2, &config), SL_OK);
    assert_int_equal(config.topk_method, SL_TOPK_GROUP_LIMITED_GREEDY);
    assert_int_equal(config.q_lora_rank, 1536);
    assert_float_equal(config.routed_scaling_factor, 16.0f, 0);
    assert_float_equal(config.softmax_scale, 0.135234f, 1e-6f);

    assert_int_equal(parse(v3, &config), SL_OK);
    assert_int_equal(config.topk_method, SL_TOPK_NOAUX_TC); /* not in the file */
    assert_int_equal(config.scoring_func, SL_SCORE_SIGMOID);
    assert_true(config.norm_topk_prob);
    assert_int_equal(config.moe_layer_freq, 1);
    assert_int_equal(config.num_hidden_layers, 61);
    assert_float_equal(config.softmax_scale, 0.135234f, 1e-6f);
}

static void test_moe_layers(void **state)
{
    (void)state;
    sl_model_config_t config;
    assert_int_equal(parse(v3, &config), SL_OK);
    assert_false(sl_model_layer_is_moe(&config, 0));
    assert_false(sl_model_layer_is_moe(&config, 2));
    assert_true(sl_model_layer_is_moe(&config, 3));
    config.moe_layer_freq = 2;
    assert_false(sl_model_layer_is_moe(&config, 3));
    assert_true(sl_model_layer_is_moe(&config, 4));
    assert_int_equal(parse_edited(lite, "n_routed_experts", "null", &config), SL_OK);
    assert_false(sl_model_layer_is_moe(&config, 20));
}

/* The spelling of transformers 5 means the same as the published one. */
static void test_rope_parameters(void **state)
{
    (void)state;
    sl_model_config_t config;
    char published[2048], written[2048];
    char *text = edited(lite, "rope_scaling", NULL);
    char *without = edited(text, "rope_theta", NULL);
    char *with = edited(without, "rope_parameters",
                        "{\"rope_type\":\"yarn\",\"type\":\"yarn\",\"rope_theta\":10000.0,"
                        "\"factor\":40.0,\"beta_fast\":32.0,\"beta_slow\":1.0,\"mscale\":0.707,"
                        "\"mscale_all_dim\":0.707,\"original_max_position_embeddings\":4096}");
    assert_int_equal(parse(lite, &config), SL_OK);
    assert_true(sl_model_config_text(&config, published, sizeof(published)) < sizeof(published));
    assert_int_equal(parse(with, &config), SL_OK);
    sl_model_config_text(&config, written, sizeof(written));
    assert_string_equal(published, written);

    free(with);
    with = edited(without, "rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":1000}");
    assert_int_equal(parse(with, &config), SL_OK);
    assert_false(config.yarn.enabled);
    assert_float_equal(config.rope_theta, 1000.0f, 0);
    assert_float_equal(config.softmax_scale, 0.0721687836f, 1e-8f);
    free(with);
    free(without);
    free(text);
}

static void check_inv_freq(const sl_model_config_t *config, const float *expected)
{
    float found[32];
    sl_model_rope_inv_freq(config, found);
    for (uint32_t j = 0; j < config->qk_rope_head_dim / 2; j++) {
        if (fabsf(found[j] - expected[j]) > 3e-7f * expected[j]) {
            fail_msg("pair %u: expected %.9g, found %.9g", j, (double)expected[j],
                     (double)found[j]);
        }
    }
}

/* Numbers of transformers 5.17's rotary embedding. */
static void test_inv_freq(void **state)
{
    (void)state;
    static const float published[32] = {1.0f,
                                        0.749894202f,
                                        0.562341332f,
                                        0.421696514f,
                                        0.316227764f,
                                        0.237137362f,
                                        0.177827939f,
                                        0.133352146f,
                                        0.100000001f,
                                        0.0749894157f,
                                        0.0562341288f,
                                        0.0390069261f,
                                        0.0268793609f,
                                        0.0183781441f,
                                        0.012447956f,
                                        0.0083345091f,
                                        0.00550000044f,
                                        0.00356199732f,
                                        0.00224936521f,
                                        0.00137051346f,
                                        0.000790569407f,
                                        0.000414990413f,
                                        0.00017782794f,
                                        3.3338034e-05f,
                                        2.49999994e-05f,
                                        1.87473543e-05f,
                                        1.40585325e-05f,
                                        1.05424124e-05f,
                                        7.90569447e-06f,
                                        5.92843435e-06f,
                                        4.44569832e-06f,
                                        3.33380353e-06f};
    static const float small_yarn[8] = {1.0f,
                                        0.239147246f,
                                        0.0512499996f,
                                        0.0084986221f,
                                        0.000250000012f,
                                        7.90569466e-05f,
                                        2.49999994e-05f,
                                        7.90569447e-06f};
    static const float plain[4] = {1.0f, 0.177827939f, 0.0316227786f, 0.00562341325f};
    sl_model_config_t config;
    assert_int_equal(parse(lite, &config), SL_OK);
    check_inv_freq(&config, published);
    config.qk_rope_head_dim = 16;
    config.yarn.original_max_position_embeddings = 512;
    check_inv_freq(&config, small_yarn);
    config.qk_rope_head_dim = 8;
    config.rope_theta = 1000;
    config.yarn.enabled = false;
    check_inv_freq(&config, plain);
}

static void test_mscale(void **state)
{
    (void)state;
    sl_model_config_t config;
    assert_int_equal(parse_edited(lite, "rope_scaling.mscale", "1.4", &config), SL_OK);
    assert_float_equal(config.rope_cos_sin_scale, 1.20275903f, 1e-7f);
    assert_float_equal(config.softmax_scale, 0.114721387f, 1e-8f);
    /* neither given: all of the correction on cos and sin */
    char *text = edited(lite, "rope_scaling.mscale", NULL);
    assert_int_equal(parse_edited(text, "rope_scaling.mscale_all_dim", NULL, &config), SL_OK);
    assert_float_equal(config.rope_cos_sin_scale, 1.36888795f, 1e-7f);
    assert_float_equal(config.softmax_scale, 0.0721687836f, 1e-8f);
    free(text);
    /* a factor of 1 stretches nothing */
    assert_int_equal(parse_edited(lite, "rope_scaling.factor", "1", &config), SL_OK);
    assert_false(config.yarn.enabled);
    assert_float_equal(config.softmax_scale, 0.0721687836f, 1e-8f);
    /* without a factor it is the ratio of the two lengths, 163840 / 4096 */
    assert_int_equal(parse_edited(lite, "rope_scaling.factor", NULL, &config), SL_OK);
    assert_float_equal(config.yarn.factor, 40.0f, 0);
}

static void test_eos(void **state)
{
    (void)state;
    sl_model_config_t config;
    assert_int_equal(parse_edited(lite, "eos_token_id", "[1, 5]", &config), SL_OK);
    assert_int_equal(config.eos_count, 2);
    assert_int_equal(config.eos_token_ids[1], 5);
    assert_int_equal(parse_edited(lite, "eos_token_id", "null", &config), SL_OK);
    assert_int_equal(config.eos_count, 0);
}

typedef struct {
    const char *base, *path, *value;
    sl_status_t status;
    const char *expected, *found; /* words of the error, beside the key */
} bad_t;

static void test_bad(void **state)
{
    (void)state;
    static const bad_t cases[] = {
        {lite, "model_type", "\"llama\"", SL_ERR_UNSUPPORTED, "\"deepseek_v2\"", "\"llama\""},
        {lite, "model_type", NULL, SL_ERR_INVALID, "\"deepseek_v3\"", "nothing"},
        {lite, "model_type", "7", SL_ERR_INVALID, "\"deepseek_v3\"", "found 7"},
        {lite, "architectures", "[\"LlamaForCausalLM\"]", SL_ERR_UNSUPPORTED,
         "DeepseekV2ForCausalLM", "LlamaForCausalLM"},
        {v3, "quantization_config", "{\"quant_method\":\"fp8\"}", SL_ERR_UNSUPPORTED, "bfloat16",
         "\"fp8\""},
        {v3, "quantization_config", "{}", SL_ERR_UNSUPPORTED, "expected none", "{}"},
        {lite, "attention_bias", "true", SL_ERR_UNSUPPORTED, "expected false", "found true"},
        {lite, "hidden_act", "\"gelu\"", SL_ERR_UNSUPPORTED, "\"silu\"", "\"gelu\""},
        {v3, "rope_interleave", "false", SL_ERR_UNSUPPORTED, "expected true", "found false"},
        {lite, "hidden_size", NULL, SL_ERR_INVALID, "from 1", "nothing"},
        {lite, "hidden_size", "\"2048\"", SL_ERR_INVALID, "an integer", "\"2048\""},
        {lite, "hidden_size", "2048.5", SL_ERR_INVALID, "an integer", "2048.5"},
        {lite, "hidden_size", "0", SL_ERR_INVALID, "from 1", "found 0"},
        {lite, "num_hidden_layers", "-1", SL_ERR_INVALID, "from 1", "found -1"},
        {lite, "vocab_size", "99999999999", SL_ERR_INVALID, "from 1", "99999999999"},
        {lite, "rms_norm_eps", "\"x\"", SL_ERR_INVALID, "a number", "\"x\""},
        {lite, "rms_norm_eps", "0", SL_ERR_INVALID, "a number", "found 0"},
        {lite, "norm_topk_prob", "1", SL_ERR_INVALID, "true or false", "found 1"},
        {lite, "topk_method", "\"best\"", SL_ERR_UNSUPPORTED, "\"noaux_tc\"", "\"best\""},
        {lite, "scoring_func", "\"sigmoid\"", SL_ERR_UNSUPPORTED, "\"softmax\"", "\"sigmoid\""},
        {lite, "qk_rope_head_dim", "63", SL_ERR_INVALID, "even", "63"},
        {lite, "num_experts_per_tok", NULL, SL_ERR_INVALID, "1 or more", "nothing"},
        {lite, "num_experts_per_tok", "65", SL_ERR_INVALID, "64", "65"},
        {lite, "moe_intermediate_size", NULL, SL_ERR_INVALID, "1 or more", "nothing"},
        {v2, "n_group", "7", SL_ERR_INVALID, "divisor of n_routed_experts 160", "found 7"},
        {v2, "topk_group", "9", SL_ERR_INVALID, "n_group 8", "found 9"},
        {v2, "num_experts_per_tok", "61", SL_ERR_INVALID, "60 experts", "found 61"},
        {v3, "n_group", "256", SL_ERR_INVALID, "2 or more experts", "256 groups"},
        {lite, "moe_layer_freq", "0", SL_ERR_INVALID, "from 1", "found 0"},
        {lite, "eos_token_id", "102400", SL_ERR_INVALID, "vocab_size 102400", "found 102400"},
        {lite, "eos_token_id", "[1, \"a\"]", SL_ERR_INVALID, "vocab_size", "\"a\""},
        {lite, "eos_token_id", "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", SL_ERR_LIMIT,
         "at most 16", "found 17"},
        {lite, "rope_scaling", "[]", SL_ERR_INVALID, "an object", "[]"},
        {lite, "rope_scaling.type", "\"linear\"", SL_ERR_UNSUPPORTED, "\"yarn\"", "\"linear\""},
        {lite, "rope_scaling.factor", "0.5", SL_ERR_INVALID, "from 1", "0.5"},
        {lite, "rope_scaling.beta_fast", "0.5", SL_ERR_INVALID, "beta_slow (1)", "0.5"},
        {lite, "rope_scaling.attention_factor", "1.2", SL_ERR_UNSUPPORTED, "none", "1.2"},
        {lite, "rope_scaling.truncate", "false", SL_ERR_UNSUPPORTED, "true", "false"},
        {lite, "rope_theta", "0", SL_ERR_INVALID, "a number", "found 0"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        sl_model_config_t config = {.vocab_size = 12345};
        sl_status_t status = parse_edited(cases[i].base, cases[i].path, cases[i].value, &config);
        /* routing sums name the key that does not fit, in every case the one that was changed */
        check_error(status, cases[i].status, "config.json: key ", cases[i].path, cases[i].expected,
                    cases[i].found, NULL);
        assert_int_equal(config.vocab_size, 12345); /* nothing is set on failure */
    }
}

static void test_bad_json(void **state)
{
    (void)state;
    sl_model_config_t config;
    check_error(parse("", &config), SL_ERR_INVALID, "not valid JSON", NULL);
    check_error(parse("[]", &config), SL_ERR_INVALID, "expected a JSON object", NULL);
    check_error(parse("{\"a\":1,}", &config), SL_ERR_INVALID, "line 1", NULL);
    check_error(parse("{\"a\":1,\"a\":2}", &config), SL_ERR_INVALID, "duplicate", NULL);
    check_error(parse("{\"model_type\":\"\\u0000\"}", &config), SL_ERR_INVALID, "JSON", NULL);

    static char deep[70000];
    memset(deep, '[', sizeof(deep) - 1);
    check_error(parse(deep, &config), SL_ERR_LIMIT, "deeper than 32", NULL);
    /* brackets inside a string nest nothing */
    char *text = edited(lite, "note", "\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\\"[[\"");
    assert_int_equal(parse(text, &config), SL_OK);
    free(text);

    size_t size = (1u << 20) + 1;
    char *large = malloc(size);
    memset(large, ' ', size);
    check_error(sl_model_config_parse(large, size, "config.json", &config), SL_ERR_LIMIT,
                "at most 1048576 bytes", "found 1048577", NULL);
    free(large);
}

static void write_text(const char *dir, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void test_load(void **state)
{
    (void)state;
    sl_model_config_t config;
    char dir[] = "/tmp/sluice-config-XXXXXX", path[256];
    assert_non_null(mkdtemp(dir));
    check_error(sl_model_config_load(dir, &config), SL_ERR_IO, dir, "config.json", "no such file",
                NULL);
    write_text(dir, "config.json", lite);
    assert_int_equal(sl_model_config_load(dir, &config), SL_OK);
    assert_int_equal(config.eos_token_ids[0], 100001);
    write_text(dir, "generation_config.json", "{\"eos_token_id\":[7,8]}");
    assert_int_equal(sl_model_config_load(dir, &config), SL_OK);
    assert_int_equal(config.eos_count, 2);
    assert_int_equal(config.eos_token_ids[0], 7);
    write_text(dir, "generation_config.json", "{\"eos_token_id\":\"x\"}");
    check_error(sl_model_config_load(dir, &config), SL_ERR_INVALID, "generation_config.json",
                "eos_token_id", NULL);
    snprintf(path, sizeof(path), "%s/generation_config.json", dir);
    unlink(path);
    snprintf(path, sizeof(path), "%s/config.json", dir);
    unlink(path);
    assert_int_equal(mkdir(path, 0700), 0);
    check_error(sl_model_config_load(dir, &config), SL_ERR_INVALID, "regular file", NULL);
    rmdir(path);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_published),
                                       cmocka_unit_test(test_moe_layers),
                                       cmocka_unit_test(test_rope_parameters),
                                       cmocka_unit_test(test_inv_freq),
                                       cmocka_unit_test(test_mscale),
                                       cmocka_unit_test(test_eos),
                                       cmocka_unit_test(test_bad),
                                       cmocka_unit_test(test_bad_json),
                                       cmocka_unit_test(test_load)};
    quiet();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
