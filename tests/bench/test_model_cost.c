/* The counts against published figures of the models, and against sums done by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/bench/model_cost.h"

static sl_model_config_t load(const char *name)
{
    char path[1024];
    sl_model_config_t config;
    (void)snprintf(path, sizeof(path), "%s/tests/bench/configs/%s", getenv("SLUICE_SOURCE_DIR"),
                   name);
    assert_int_equal(sl_model_config_load(path, &config), SL_OK);
    return config;
}

static void assert_near(double found, double expected, double tolerance)
{
    if (fabs(found - expected) > tolerance * fabs(expected)) {
        fail_msg("found %.6g, expected %.6g", found, expected);
    }
}

/* Two layers, one of them dense, with small numbers. */
static sl_model_config_t small(void)
{
    return (sl_model_config_t){
        .vocab_size = 1000,
        .hidden_size = 10,
        .num_hidden_layers = 2,
        .num_attention_heads = 2,
        .q_lora_rank = 3,
        .kv_lora_rank = 5,
        .qk_nope_head_dim = 4,
        .qk_rope_head_dim = 2,
        .v_head_dim = 7,
        .intermediate_size = 20,
        .moe_intermediate_size = 6,
        .n_routed_experts = 8,
        .n_shared_experts = 1,
        .num_experts_per_tok = 2,
        .first_k_dense_replace = 1,
        .moe_layer_freq = 1,
        .latent_width = 7,
        .qk_head_dim = 6,
    };
}

/* q 30 + 36, kv 70 + 110, output 140: 386 a layer; dense 600; router 80, experts 3 of 180. */
#define SMALL_ATTENTION 386.0
#define SMALL_ACTIVE (2 * SMALL_ATTENTION + 600 + 80 + 540)

static void counts_a_small_model(void **state)
{
    (void)state;
    sl_model_config_t config = small();
    assert_near(sl_model_cost_active(&config), SMALL_ACTIVE, 1e-12);
    /* Three prompts of 4: 12 rows, 30 pairs of 2 heads and 13 columns in 2 layers, 3 heads rows. */
    double expected = 2 * SMALL_ACTIVE * 12 + 2 * 2 * 2 * 13 * 30 + 2 * 10000.0 * 3;
    assert_near(sl_model_cost_prefill_flops(&config, 3, 4), expected, 1e-12);
}

static void counts_what_a_decode_step_reads(void **state)
{
    (void)state;
    sl_model_config_t config = small();
    sl_cost_layout_t layout = {
        .tp = 1, .attention = SL_ATTENTION_DP, .weight_bytes = 2, .latent_bytes = 4};
    /* One token: its two experts and the shared one. */
    double latents = 1 * 9 * 7 * 2 * 4.0;
    assert_near(sl_model_cost_decode_bytes(&config, &layout, 2, 1, 9),
                2 * (SMALL_ACTIVE + 10000) + latents, 1e-12);
    /* Divided over two: MLPs; with TP attention also the 286 of 386 that go by heads. */
    layout.tp = 2;
    double mlps = (600 + 540) / 2.0;
    assert_near(sl_model_cost_decode_bytes(&config, &layout, 2, 0, 9),
                2 * (2 * SMALL_ATTENTION + mlps + 80 + 10000), 1e-12);
    layout.attention = SL_ATTENTION_TP;
    assert_near(sl_model_cost_decode_bytes(&config, &layout, 2, 1, 9),
                2 * (2 * (100 + 286 / 2.0) + mlps + 80 + 10000) + latents, 1e-12);
}

/* DeepSeek's papers: 2.4 B of 15.7 B, and 21 B of 236 B parameters are activated, LM head and
 * embedding among them. */
static void agrees_with_published_sizes(void **state)
{
    (void)state;
    sl_model_config_t lite = load("deepseek-v2-lite"), large = load("deepseek-coder-v2");
    sl_cost_layout_t layout = {.tp = 1, .attention = SL_ATTENTION_DP, .weight_bytes = 1};
    double lite_head = 2048.0 * 102400, large_head = 5120.0 * 102400;
    assert_near(sl_model_cost_active(&lite) + lite_head, 2.4e9, 0.03);
    assert_near(sl_model_cost_active(&large) + large_head, 21e9, 0.03);
    /* A step that hits every expert reads every weight but the embedding. */
    assert_near(sl_model_cost_decode_bytes(&lite, &layout, 64, 0, 0), 15.7e9 - lite_head, 0.01);
    assert_near(sl_model_cost_decode_bytes(&large, &layout, 160, 0, 0), 236e9 - large_head,
                0.01);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_a_small_model),
        cmocka_unit_test(counts_what_a_decode_step_reads),
        cmocka_unit_test(agrees_with_published_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
