/*
 * Operations against numbers worked out by hand and against facts of the mathematics, on the oracle
 * as well: what the oracle itself rests on.
 */
#include "tests/ops/each_backend.h"

/* Id -1 is the first token of `previous`, -2 the second; without negative ids there is none. */
static void check_embed(const sl_ops_t *ops, sl_device_t *device)
{
    float table[] = {0, 1, 10, 11, 20, 21, 30, 31}, out[8];
    int32_t ids[] = {3, -1, 0, -2}, previous[] = {2, 1};
    sl_embed_t p = {.out = out, .ids = ids, .previous = previous, .table = table, .rows = 4,
                    .width = 2};
    const float expected[] = {30, 31, 20, 21, 0, 1, 10, 11};
    assert_int_equal(ops->embed(device, NULL, &p), SL_OK);
    assert_memory_equal(out, expected, sizeof(out));
    ids[1] = 2, ids[3] = 1, p.previous = NULL;
    memset(out, 0, sizeof(out));
    assert_int_equal(ops->embed(device, NULL, &p), SL_OK);
    assert_memory_equal(out, expected, sizeof(out));
}
EACH_BACKEND_TEST(embed)

static void check_rms_norm(const sl_ops_t *ops, sl_device_t *device)
{
    /* mean of squares 12.5 */
    float x[] = {3, 4}, weight[] = {1, 2}, residual[] = {0, -1}, out[2];
    sl_rms_norm_t p = {.out = out, .x = x, .weight = weight, .rows = 1, .width = 2};
    assert_int_equal(ops->rms_norm(device, NULL, &p), SL_OK);
    assert_near(out[0], 3 / sqrt(12.5), 1e-6);
    assert_near(out[1], 8 / sqrt(12.5), 1e-6);
    p.residual = residual; /* becomes 3, 3 */
    p.eps = 1;
    assert_int_equal(ops->rms_norm(device, NULL, &p), SL_OK);
    assert_true(residual[0] == 3 && residual[1] == 3);
    assert_near(out[0], 3 / sqrt(10), 1e-6);
    assert_near(out[1], 6 / sqrt(10), 1e-6);
    p.x = NULL; /* the residual as it is */
    assert_int_equal(ops->rms_norm(device, NULL, &p), SL_OK);
    assert_true(residual[0] == 3 && residual[1] == 3);
    assert_near(out[0], 3 / sqrt(10), 1e-6);
}
EACH_BACKEND_TEST(rms_norm)

static void check_products(const sl_ops_t *ops, sl_device_t *device)
{
    float x[] = {1, 2, 3, -1, 0, 1}, w[] = {1, 1, 1, 2, 0, -1}, out[4];
    sl_linear_t linear = {.out = out, .x = x, .w = w, .rows = 2, .n = 2, .k = 3};
    assert_int_equal(ops->linear(device, NULL, &linear), SL_OK);
    const float expected[] = {6, -1, 0, -3};
    assert_memory_equal(out, expected, sizeof(expected));

    /* Two heads of one column: x[t][i] . w[i] */
    float heads_out[4], heads_x[] = {1, 2, 3, 4, 5, 6, 7, 8}, heads_w[] = {1, 0, 0, 1};
    sl_head_linear_t head = {.out = heads_out, .x = heads_x, .w = heads_w, .rows = 2, .heads = 2,
                             .n = 1, .k = 2, .x_row_stride = 4, .x_head_stride = 2,
                             .out_row_stride = 2, .out_head_stride = 1};
    assert_int_equal(ops->head_linear(device, NULL, &head), SL_OK);
    const float heads_expected[] = {1, 4, 5, 8};
    assert_memory_equal(heads_out, heads_expected, sizeof(heads_expected));

    /* Rows 0 and 1 to expert 1, row 2 to expert 2, row 3 to none. */
    float grouped_out[] = {9, 9, 9, 9}, grouped_x[] = {1, 2, 3, 4}, grouped_w[] = {100, 10, -1};
    int32_t begin[] = {0, 0, 2, 3};
    sl_grouped_linear_t grouped = {.out = grouped_out, .x = grouped_x, .w = grouped_w,
                                   .expert_begin = begin, .max_rows = 4, .experts = 3, .n = 1,
                                   .k = 1};
    assert_int_equal(ops->grouped_linear(device, NULL, &grouped), SL_OK);
    const float grouped_expected[] = {10, 20, -3, 9};
    assert_memory_equal(grouped_out, grouped_expected, sizeof(grouped_expected));
}
EACH_BACKEND_TEST(products)

/* Pairs are (0, 1) and (2, 3): a unit vector turns by its own pair's angle and stays in place. */
static void check_rope_cache(const sl_ops_t *ops, sl_device_t *device)
{
    const float a = 0.3f, b = 1.1f; /* angles of the two pairs at position 1 */
    float table[] = {1, 1, 0, 0, cosf(a), cosf(b), sinf(a), sinf(b)};
    float q[] = {7, 1, 0, 0, 1}; /* nope 1, rope 4 */
    float latent[] = {3, 4, 0, 2, 1, 0}, weight[] = {1, 1}, cached[2 * 2 * 3 * 6];
    memset(cached, 0x7f, sizeof(cached));
    int32_t positions[] = {1};
    int64_t slots[] = {1 * 3 + 2}; /* page 1, offset 2 */
    sl_rope_cache_t p = {.q = q, .latent = latent, .norm_weight = weight, .positions = positions,
                         .cos_sin = table, .slots = slots,
                         .cache = {cached, .page_count = 2, .layers = 2, .page_tokens = 3,
                                   .width = 6},
                         .layer = 1, .rows = 1, .heads = 1, .nope = 1, .rope = 4, .kv_lora = 2};
    assert_int_equal(ops->rope_cache(device, NULL, &p), SL_OK);
    const double q_expected[] = {7, cos(a), sin(a), -sin(b), cos(b)};
    const double expected[] = {3 / sqrt(12.5), 4 / sqrt(12.5), -2 * sin(a), 2 * cos(a), cos(b),
                               sin(b)};
    for (size_t i = 0; i < 5; i++) {
        assert_near(q[i], q_expected[i], 1e-6);
    }
    const float *stored = cached + ((1 * 2 + 1) * 3 + 2) * 6; /* [page][layer][offset] */
    for (size_t i = 0; i < 6; i++) {
        assert_near(latent[i], expected[i], 1e-6);
        assert_true(stored[i] == latent[i]);
    }
    float untouched;
    memset(&untouched, 0x7f, sizeof(untouched));
    for (const float *other = cached; other < stored; other++) {
        assert_memory_equal(other, &untouched, sizeof(untouched));
    }
}
EACH_BACKEND_TEST(rope_cache)

static void check_attention_by_hand(const sl_ops_t *ops, sl_device_t *device)
{
    /* One head, nope 1, rope 1, v 1. Scores of the second query: 2 * 0 + 1 * 4 and 2 * 1 + 1 * 2,
     * both 4 times the scale 0.5, so it takes the mean; the first query sees the first key only. */
    float q[] = {1, 1, 2, 1}, kv[] = {0, 10, 1, 20}, k_pe[] = {4, -99, 2, -99};
    float out[2], lse[2];
    int32_t begin[] = {0, 2};
    sl_attn_prefill_t p = {.out = out, .lse = lse, .q = q, .kv = kv, .k_pe = k_pe,
                           .q_begin = begin, .k_begin = begin, .host_q_begin = begin,
                           .host_k_begin = begin, .sequences = 1, .heads = 1, .nope = 1, .rope = 1,
                           .v_dim = 1, .k_pe_stride = 2, .causal = true, .scale = 0.5f};
    assert_int_equal(ops->attn_prefill(device, NULL, &p), SL_OK);
    assert_near(out[0], 10, 1e-6);
    assert_near(lse[0], 2, 1e-6);
    assert_near(out[1], 15, 1e-6);
    assert_near(lse[1], 2 + log(2), 1e-6);

    /* A query without keys. */
    int32_t none[] = {0, 0};
    p.k_begin = none;
    p.host_k_begin = none;
    assert_int_equal(ops->attn_prefill(device, NULL, &p), SL_OK);
    assert_true(out[0] == 0 && out[1] == 0 && lse[0] == -INFINITY && lse[1] == -INFINITY);
}
EACH_BACKEND_TEST(attention_by_hand)

/* Attention over all keys is the merge of attention over two parts of them. */
static void check_merge_of_parts(const sl_ops_t *ops, sl_device_t *device)
{
    enum { HEADS_N = 2, NOPE = 4, ROPE = 2, V = 3, Q = 5, K = 150, CUT = 131 };
    static float q[Q * HEADS_N * (NOPE + ROPE)], kv[K * HEADS_N * (NOPE + V)], k_pe[K * ROPE];
    float whole[Q * HEADS_N * V], whole_lse[Q * HEADS_N], other[Q * HEADS_N * V];
    float part[Q * HEADS_N * V], part_lse[Q * HEADS_N], other_lse[Q * HEADS_N];
    fill_random(q, Q * HEADS_N * (NOPE + ROPE), 3, 1);
    fill_random(kv, K * HEADS_N * (NOPE + V), 1, 2);
    fill_random(k_pe, K * ROPE, 1, 3);
    int32_t q_begin[] = {0, Q}, all[] = {0, K}, first[] = {0, CUT}, rest[] = {CUT, K};
    sl_attn_prefill_t p = {.out = whole, .lse = whole_lse, .q = q, .kv = kv, .k_pe = k_pe,
                           .q_begin = q_begin, .k_begin = all, .host_q_begin = q_begin,
                           .host_k_begin = all, .sequences = 1, .heads = HEADS_N, .nope = NOPE,
                           .rope = ROPE, .v_dim = V, .k_pe_stride = ROPE, .causal = true,
                           .scale = 0.7f};
    assert_int_equal(ops->attn_prefill(device, NULL, &p), SL_OK);
    p.out = part, p.lse = part_lse, p.k_begin = rest, p.host_k_begin = rest;
    assert_int_equal(ops->attn_prefill(device, NULL, &p), SL_OK);
    p.out = other, p.lse = other_lse, p.k_begin = first, p.host_k_begin = first, p.causal = false;
    assert_int_equal(ops->attn_prefill(device, NULL, &p), SL_OK);
    sl_attn_merge_t merge = {.out = part, .lse = part_lse, .other_out = other,
                             .other_lse = other_lse, .rows = Q, .heads = HEADS_N, .v_dim = V};
    assert_int_equal(ops->attn_merge(device, NULL, &merge), SL_OK);
    for (size_t i = 0; i < Q * HEADS_N * V; i++) {
        assert_near(part[i], whole[i], 1e-5);
    }
    for (size_t i = 0; i < Q * HEADS_N; i++) {
        assert_near(part_lse[i], whole_lse[i], 1e-5);
    }
}
EACH_BACKEND_TEST(merge_of_parts)

/*
 * The identity the decode pool rests on: with k_nope = W_UK c and v = W_UV c of a latent c,
 * attention over keys and values equals W_UV times absorbed attention with queries q W_UK.
 */
static void check_absorbed_equals_unabsorbed(const sl_ops_t *ops, sl_device_t *device)
{
    enum { HEADS_N = 3, NOPE = 4, ROPE = 2, V = 5, LORA = 8, W = LORA + ROPE, K = 70, PAGE = 16 };
    static float cache[5 * PAGE * W], kv[K * HEADS_N * (NOPE + V)];
    static float kv_b[HEADS_N * (NOPE + V) * LORA];
    static float latents[K * W], uk[HEADS_N * LORA * NOPE], uv[HEADS_N * V * LORA];
    float q[HEADS_N * (NOPE + ROPE)], q_latent[HEADS_N * LORA], mixed[HEADS_N * LORA];
    float expected[HEADS_N * V], got[HEADS_N * V];
    fill_random(latents, K * W, 1, 4);
    fill_random(kv_b, HEADS_N * (NOPE + V) * LORA, 1, 5);
    fill_random(q, HEADS_N * (NOPE + ROPE), 2, 6);
    for (size_t h = 0; h < HEADS_N; h++) { /* rows of a head: k_nope, then v */
        for (size_t l = 0; l < LORA; l++) {
            for (size_t i = 0; i < NOPE; i++) {
                uk[(h * LORA + l) * NOPE + i] = kv_b[(h * (NOPE + V) + i) * LORA + l];
            }
            for (size_t i = 0; i < V; i++) {
                uv[(h * V + i) * LORA + l] = kv_b[(h * (NOPE + V) + NOPE + i) * LORA + l];
            }
        }
    }
    int32_t pages[] = {3, 0, 4, 1, 2}, page_begin = 0, kv_len[] = {K};
    int32_t q_begin[] = {0, 1}, k_begin[] = {0, K};
    for (size_t j = 0; j < K; j++) {
        memcpy(cache + ((size_t)pages[j / PAGE] * PAGE + j % PAGE) * W, latents + j * W,
               W * sizeof(float));
    }
    sl_linear_t up = {.out = kv, .x = latents, .w = kv_b, .rows = K, .n = HEADS_N * (NOPE + V),
                      .k = LORA, .x_stride = W};
    assert_int_equal(ops->linear(device, NULL, &up), SL_OK);
    sl_attn_prefill_t prefill = {.out = expected, .q = q, .kv = kv, .k_pe = latents + LORA,
                                 .q_begin = q_begin, .k_begin = k_begin, .host_q_begin = q_begin,
                                 .host_k_begin = k_begin, .sequences = 1, .heads = HEADS_N,
                                 .nope = NOPE, .rope = ROPE, .v_dim = V, .k_pe_stride = W,
                                 .causal = true, .scale = 0.4f};
    assert_int_equal(ops->attn_prefill(device, NULL, &prefill), SL_OK);

    sl_head_linear_t into = {.out = q_latent, .x = q, .w = uk, .rows = 1, .heads = HEADS_N,
                             .n = LORA, .k = NOPE, .x_row_stride = HEADS_N * (NOPE + ROPE),
                             .x_head_stride = NOPE + ROPE, .out_row_stride = HEADS_N * LORA,
                             .out_head_stride = LORA};
    assert_int_equal(ops->head_linear(device, NULL, &into), SL_OK);
    sl_attn_absorbed_t absorbed = {.out = mixed, .q_latent = q_latent, .q_rope = q + NOPE,
                                   .q_rope_row_stride = HEADS_N * (NOPE + ROPE),
                                   .q_rope_head_stride = NOPE + ROPE,
                                   .cache = {cache, .page_count = 5, .layers = 1,
                                             .page_tokens = PAGE, .width = W},
                                   .pages = pages, .page_begin = &page_begin,
                                   .kv_len = kv_len, .rows = 1, .heads = HEADS_N,
                                   .kv_lora = LORA, .scale = 0.4f};
    assert_int_equal(ops->attn_absorbed(device, NULL, &absorbed), SL_OK);
    sl_head_linear_t out_of = {.out = got, .x = mixed, .w = uv, .rows = 1, .heads = HEADS_N,
                               .n = V, .k = LORA, .x_row_stride = HEADS_N * LORA,
                               .x_head_stride = LORA, .out_row_stride = HEADS_N * V,
                               .out_head_stride = V};
    assert_int_equal(ops->head_linear(device, NULL, &out_of), SL_OK);
    for (size_t i = 0; i < HEADS_N * V; i++) {
        assert_near(got[i], expected[i], 1e-5);
    }
}
EACH_BACKEND_TEST(absorbed_equals_unabsorbed)

typedef struct {
    const char *what;
    sl_route_t p; /* rows 1 */
    float logits[8], bias[8];
    int32_t ids[4];
    double weights[4];
} route_fact_t;

#define SIGMOID_OF(x) (1 / (1 + exp(-(x))))

static void check_route(const sl_ops_t *ops, sl_device_t *device)
{
    const double s1 = SIGMOID_OF(1), s2 = SIGMOID_OF(2);
    const double soft = exp(2) + exp(1) + exp(0) + exp(-1);
    const route_fact_t facts[] = {
        {"greedy: weights are the probabilities times the factor",
         {.experts = 4, .top_k = 2, .scaling = 3}, {0, 2, -1, 1}, {0}, {1, 3},
         {3 * exp(2) / soft, 3 * exp(1) / soft}},
        {"greedy, normalised: no factor",
         {.experts = 4, .top_k = 2, .scaling = 3, .norm_topk_prob = true}, {0, 2, -1, 1}, {0},
         {1, 3}, {exp(2) / (exp(2) + exp(1)), exp(1) / (exp(2) + exp(1))}},
        {"one expert is never normalised",
         {.experts = 4, .top_k = 1, .scaling = 3, .norm_topk_prob = true}, {0, 2, -1, 1}, {0}, {1},
         {3 * exp(2) / soft}},
        {"ties go to the lower index",
         {.experts = 4, .top_k = 3, .scaling = 1}, {1, 1, 1, 1}, {0}, {0, 1, 2},
         {0.25, 0.25, 0.25}},
        {"group-limited: a group counts by its best, and only the best group competes",
         {.experts = 4, .top_k = 2, .n_group = 2, .topk_group = 1, .scaling = 1,
          .method = SL_TOPK_GROUP_LIMITED_GREEDY},
         {1, 0, 2, -1}, {0}, {2, 3}, {exp(2) / soft, exp(-1) / soft}},
        {"noaux_tc: a group counts by the sum of its two best",
         {.experts = 8, .top_k = 2, .n_group = 2, .topk_group = 1, .scaling = 1,
          .method = SL_TOPK_NOAUX_TC, .scoring = SL_SCORE_SIGMOID},
         {3, -9, -9, -9, 1, 2, -9, -9}, {0}, {5, 4}, {s2, s1}},
        {"noaux_tc: the bias chooses, the weights are without it, normalised and scaled",
         {.experts = 4, .top_k = 2, .n_group = 1, .topk_group = 1, .scaling = 2.5f,
          .method = SL_TOPK_NOAUX_TC, .scoring = SL_SCORE_SIGMOID, .norm_topk_prob = true},
         {2, 2, 1, 1}, {0, 0, 5, 4}, {2, 3}, {1.25, 1.25}},
        {"noaux_tc: losing groups are out even where all biased scores are negative",
         {.experts = 4, .top_k = 2, .n_group = 2, .topk_group = 1, .scaling = 1,
          .method = SL_TOPK_NOAUX_TC, .scoring = SL_SCORE_SIGMOID},
         {1, 2, 2, 2}, {-2, -2, -9, -9}, {1, 0}, {s2, s1}},
    };
    for (size_t i = 0; i < sizeof(facts) / sizeof(facts[0]); i++) {
        int32_t ids[4];
        float weights[4];
        sl_route_t p = facts[i].p;
        p.rows = 1, p.ids = ids, p.weights = weights;
        p.logits = facts[i].logits, p.bias = facts[i].bias;
        assert_int_equal(ops->route(device, NULL, &p), SL_OK);
        for (size_t j = 0; j < p.top_k; j++) {
            if (ids[j] != facts[i].ids[j] || fabs(weights[j] - facts[i].weights[j]) > 1e-6) {
                fail_msg("%s, %s: choice %zu is %d of %g, expected %d of %g", ops->name,
                         facts[i].what, j, ids[j], (double)weights[j], facts[i].ids[j],
                         facts[i].weights[j]);
            }
        }
    }
}
EACH_BACKEND_TEST(route)

/* Rows go to their experts in token order and come back weighted. */
static void check_permute_and_combine(const sl_ops_t *ops, sl_device_t *device)
{
    float x[] = {1, 2, 3}, sorted[6], out[3], weights[] = {0.5f, 0.25f, 1, 7, 2, -1};
    float shared[] = {100, 200, 300};
    int32_t ids[] = {2, 0, 0, -1, 2, 2}, begin[4], row_of[6];
    sl_moe_permute_t permute = {.x_sorted = sorted, .expert_begin = begin, .sorted_row = row_of,
                                .ids = ids, .x = x, .rows = 3, .top_k = 2, .experts = 3,
                                .width = 1};
    assert_int_equal(ops->moe_permute(device, NULL, &permute), SL_OK);
    const int32_t begin_expected[] = {0, 2, 2, 5}, row_expected[] = {2, 0, 1, -1, 3, 4};
    const float sorted_expected[] = {1, 2, 1, 3, 3};
    assert_memory_equal(begin, begin_expected, sizeof(begin_expected));
    assert_memory_equal(row_of, row_expected, sizeof(row_expected));
    assert_memory_equal(sorted, sorted_expected, sizeof(sorted_expected));
    sl_moe_combine_t combine = {.out = out, .y = sorted, .sorted_row = row_of, .weights = weights,
                                .shared = shared, .rows = 3, .top_k = 2, .width = 1};
    assert_int_equal(ops->moe_combine(device, NULL, &combine), SL_OK);
    const float expected[] = {100.75f, 202, 303};
    assert_memory_equal(out, expected, sizeof(expected));
}
EACH_BACKEND_TEST(permute_and_combine)

static void check_silu_mul(const sl_ops_t *ops, sl_device_t *device)
{
    const float gates[] = {0, 1, -1, 90, -90, 1e30f, -1e30f, 20};
    float x[16], out[8];
    for (size_t i = 0; i < 8; i++) {
        x[i] = gates[i];
        x[8 + i] = 2;
    }
    sl_silu_mul_t p = {.out = out, .x = x, .rows = 1, .width = 8};
    assert_int_equal(ops->silu_mul(device, NULL, &p), SL_OK);
    const double expected[] = {0, 2 / (1 + exp(-1)), -2 / (1 + exp(1)), 180, 0, 2e30, 0,
                               40 / (1 + exp(-20))};
    for (size_t i = 0; i < 8; i++) {
        assert_near(out[i], expected[i], 1e-6);
    }
}
EACH_BACKEND_TEST(silu_mul)

/* An unaligned piece of two rows of three, out of rows of five. */
static void check_load_weight(const sl_ops_t *ops, sl_device_t *device)
{
    static const struct {
        sl_dtype_t dtype;
        uint32_t bits[6];
        double values[6];
    } facts[] = {
        {SL_DTYPE_F32, {0x3f800000, 0xc0490fdb, 1, 0x7f800000, 0x80000000, 0x7f7fffff},
         {1, -3.14159274101257324, 0x1p-149, INFINITY, 0, 0x1.fffffep127}},
        {SL_DTYPE_BF16, {0x3f80, 0xc049, 0x0001, 0xff80, 0x8000, 0x7f7f},
         {1, -3.140625, 0x1p-133, -INFINITY, 0, 0x1.fep127}},
        {SL_DTYPE_F16, {0x3c00, 0xc248, 0x0001, 0x7c00, 0x83ff, 0x7bff},
         {1, -3.140625, 0x1p-24, INFINITY, -0x3ffp-24, 65504}},
    };
    for (size_t i = 0; i < sizeof(facts) / sizeof(facts[0]); i++) {
        size_t bytes = facts[i].dtype == SL_DTYPE_F32 ? 4 : 2;
        unsigned char source[1 + 2 * 5 * 4];
        memset(source, 0xff, sizeof(source));
        for (size_t j = 0; j < 6; j++) {
            memcpy(source + 1 + (j / 3 * 5 + j % 3) * bytes, &facts[i].bits[j], bytes);
        }
        float *to;
        void *memory;
        assert_int_equal(ops->alloc(device, 7 * sizeof(float), "weight", &memory), SL_OK);
        to = memory;
        to[6] = 42;
        sl_weight_source_t piece = {.data = source + 1, .dtype = facts[i].dtype, .rows = 2,
                                    .columns = 3, .row_stride = 5};
        assert_int_equal(ops->load_weight(device, to, &piece), SL_OK);
        for (size_t j = 0; j < 6; j++) {
            assert_true((double)to[j] == facts[i].values[j]);
        }
        assert_true(to[6] == 42);
        ops->free(device, memory);
    }
    const uint16_t nans[] = {0x7e00, 0xfc01}; /* quiet and signalling, half precision */
    float to[2];
    sl_weight_source_t piece = {.data = nans, .dtype = SL_DTYPE_F16, .rows = 1, .columns = 2,
                                .row_stride = 2};
    assert_int_equal(ops->load_weight(device, to, &piece), SL_OK);
    assert_true(isnan(to[0]) && isnan(to[1]));
}
EACH_BACKEND_TEST(load_weight)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_rms_norm),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_rope_cache),
        cmocka_unit_test(test_attention_by_hand),
        cmocka_unit_test(test_merge_of_parts),
        cmocka_unit_test(test_absorbed_equals_unabsorbed),
        cmocka_unit_test(test_route),
        cmocka_unit_test(test_permute_and_combine),
        cmocka_unit_test(test_silu_mul),
        cmocka_unit_test(test_load_weight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
