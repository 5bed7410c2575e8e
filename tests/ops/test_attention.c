/*
 * What attention must not depend on, bit for bit: other sequences and rows of the batch, where the
 * pages lie, and anything beyond what a query may see, be it NaN.
 */
#include "tests/ops/each_backend.h"

enum { HEADS_N = 3, NOPE = 16, ROPE = 8, V = 24, LORA = 16, WIDTH = LORA + ROPE, PAGE = 4 };
enum { Q_WIDTH = HEADS_N * (NOPE + ROPE), KV_WIDTH = HEADS_N * (NOPE + V) };

/* Attention of sequences of these lengths; queries are the last of the keys. */
typedef struct {
    float *q, *kv, *k_pe, *out, *lse;
    int32_t q_begin[8], k_begin[8];
    sl_attn_prefill_t p;
} prefill_t;

static void prefill_open(prefill_t *f, const int32_t *queries, const int32_t *keys, uint32_t count)
{
    memset(f, 0, sizeof(*f));
    for (uint32_t s = 0; s < count; s++) {
        f->q_begin[s + 1] = f->q_begin[s] + queries[s];
        f->k_begin[s + 1] = f->k_begin[s] + keys[s];
    }
    size_t q = (size_t)f->q_begin[count], k = (size_t)f->k_begin[count];
    f->q = calloc(q * Q_WIDTH + 1, sizeof(float));
    f->kv = calloc(k * KV_WIDTH + 1, sizeof(float));
    f->k_pe = calloc(k * ROPE + 1, sizeof(float));
    f->out = calloc(q * HEADS_N * V + 1, sizeof(float));
    f->lse = calloc(q * HEADS_N + 1, sizeof(float));
    assert_true(f->q && f->kv && f->k_pe && f->out && f->lse);
    fill_random(f->q, q * Q_WIDTH, 2, 1);
    fill_random(f->kv, k * KV_WIDTH, 1, 2);
    fill_random(f->k_pe, k * ROPE, 1, 3);
    f->p = (sl_attn_prefill_t){.out = f->out, .lse = f->lse, .q = f->q, .kv = f->kv,
                               .k_pe = f->k_pe, .q_begin = f->q_begin, .k_begin = f->k_begin,
                               .host_q_begin = f->q_begin, .host_k_begin = f->k_begin,
                               .sequences = count, .heads = HEADS_N, .nope = NOPE, .rope = ROPE,
                               .v_dim = V, .k_pe_stride = ROPE, .causal = true, .scale = 0.25f};
}

static void prefill_close(prefill_t *f)
{
    free(f->q);
    free(f->kv);
    free(f->k_pe);
    free(f->out);
    free(f->lse);
}

static void check_sequences_are_independent(const sl_ops_t *ops, sl_device_t *device)
{
    const int32_t queries[] = {5, 70, 1, 33}, keys[] = {9, 70, 200, 161};
    prefill_t all;
    prefill_open(&all, queries, keys, 4);
    assert_int_equal(ops->attn_prefill(device, NULL, &all.p), SL_OK);
    for (uint32_t s = 0; s < 4; s++) {
        prefill_t one;
        prefill_open(&one, &queries[s], &keys[s], 1);
        one.p.q = all.q + (size_t)all.q_begin[s] * Q_WIDTH;
        one.p.kv = all.kv + (size_t)all.k_begin[s] * KV_WIDTH;
        one.p.k_pe = all.k_pe + (size_t)all.k_begin[s] * ROPE;
        assert_int_equal(ops->attn_prefill(device, NULL, &one.p), SL_OK);
        size_t rows = (size_t)queries[s], first = (size_t)all.q_begin[s];
        assert_memory_equal(one.out, all.out + first * HEADS_N * V,
                            rows * HEADS_N * V * sizeof(float));
        assert_memory_equal(one.lse, all.lse + first * HEADS_N, rows * HEADS_N * sizeof(float));
        prefill_close(&one);
    }
    prefill_close(&all);
}
EACH_BACKEND_TEST(sequences_are_independent)

/* NaN in the keys and values from token `bad` on reaches the queries that see them, no other. */
static void check_causality_stops_nan(const sl_ops_t *ops, sl_device_t *device)
{
    const int32_t queries[] = {150}, keys[] = {170};
    prefill_t clean, dirty;
    prefill_open(&clean, queries, keys, 1);
    prefill_open(&dirty, queries, keys, 1);
    const size_t bad = 140, first_hit = bad - 20; /* query i sees keys up to 20 + i */
    for (size_t i = bad * KV_WIDTH; i < 170 * KV_WIDTH; i++) {
        dirty.kv[i] = NAN;
    }
    for (size_t i = bad * ROPE; i < 170 * ROPE; i++) {
        dirty.k_pe[i] = INFINITY;
    }
    assert_int_equal(ops->attn_prefill(device, NULL, &clean.p), SL_OK);
    assert_int_equal(ops->attn_prefill(device, NULL, &dirty.p), SL_OK);
    assert_memory_equal(clean.out, dirty.out, first_hit * HEADS_N * V * sizeof(float));
    assert_memory_equal(clean.lse, dirty.lse, first_hit * HEADS_N * sizeof(float));
    for (size_t i = first_hit * HEADS_N * V; i < 150 * HEADS_N * V; i++) {
        assert_true(isnan(dirty.out[i]));
    }
    prefill_close(&clean);
    prefill_close(&dirty);
}
EACH_BACKEND_TEST(causality_stops_nan)

/* A request of 11 tokens at pages {2, 5, 0}, then at others, among other rows. */
static void check_rows_and_pages_are_independent(const sl_ops_t *ops, sl_device_t *device)
{
    enum { PAGES = 8, TOKENS = 11, ROWS = 3, NO_PAGE = 2147480000 };
    static float cache[PAGES * PAGE * WIDTH], latents[TOKENS * WIDTH];
    float q_latent[ROWS * HEADS_N * LORA], q[ROWS * Q_WIDTH];
    float alone[HEADS_N * LORA], batch[ROWS * HEADS_N * LORA];
    fill_random(latents, TOKENS * WIDTH, 1, 4);
    fill_random(q_latent, ROWS * HEADS_N * LORA, 2, 5);
    fill_random(q, ROWS * Q_WIDTH, 2, 6);
    const int32_t places[2][3] = {{2, 5, 0}, {7, 1, 3}};
    /* Rows: a padding row, one of the request's first token, and the one in question. */
    const int32_t page_begin[ROWS] = {NO_PAGE, 1, 3}, kv_len[ROWS] = {0, 1, TOKENS};
    sl_attn_absorbed_t p = {.q_rope_row_stride = Q_WIDTH, .q_rope_head_stride = NOPE + ROPE,
                            .cache = {cache, .page_count = PAGES, .layers = 1,
                                      .page_tokens = PAGE, .width = WIDTH},
                            .heads = HEADS_N, .kv_lora = LORA, .scale = 0.25f};
    for (size_t place = 0; place < 2; place++) {
        for (size_t i = 0; i < PAGES * PAGE * WIDTH; i++) {
            cache[i] = NAN;
        }
        for (size_t j = 0; j < TOKENS; j++) {
            memcpy(cache + ((size_t)places[place][j / PAGE] * PAGE + j % PAGE) * WIDTH,
                   latents + j * WIDTH, WIDTH * sizeof(float));
        }
        const int32_t *at = places[place];
        const int32_t pages[] = {NO_PAGE, at[0], NO_PAGE, at[0], at[1], at[2], NO_PAGE};
        p.out = batch, p.q_latent = q_latent, p.q_rope = q + NOPE;
        p.pages = pages, p.page_begin = page_begin, p.kv_len = kv_len, p.rows = ROWS;
        assert_int_equal(ops->attn_absorbed(device, NULL, &p), SL_OK);
        for (size_t i = 0; i < HEADS_N * LORA; i++) {
            assert_true(batch[i] == 0);
        }
        for (size_t i = 0; i < HEADS_N * LORA; i++) { /* one token: its latent itself */
            assert_true(batch[HEADS_N * LORA + i] == latents[i % LORA]);
        }
        float *last = batch + 2 * HEADS_N * LORA;
        if (place == 0) { /* alone, now; the second place must give the same */
            p.out = alone, p.q_latent = q_latent + 2 * HEADS_N * LORA;
            p.q_rope = q + 2 * Q_WIDTH + NOPE, p.page_begin = page_begin + 2;
            p.kv_len = kv_len + 2, p.rows = 1;
            assert_int_equal(ops->attn_absorbed(device, NULL, &p), SL_OK);
        }
        assert_memory_equal(alone, last, sizeof(alone));
    }
}
EACH_BACKEND_TEST(rows_and_pages_are_independent)

/* A long prompt: scores of 1,500 keys, one block of memory; the oracle checks the values. */
static void check_long_prompt(const sl_ops_t *ops, sl_device_t *device)
{
    const int32_t queries[] = {3}, keys[] = {1500};
    const sl_ops_t *ref = NULL;
    prefill_t got, expected;
    assert_int_equal(sl_ops_find("ref", &ref), SL_OK);
    prefill_open(&got, queries, keys, 1);
    prefill_open(&expected, queries, keys, 1);
    got.q[0] = expected.q[0] = 300; /* one key takes nearly all of a head's weight */
    assert_int_equal(ops->attn_prefill(device, NULL, &got.p), SL_OK);
    assert_int_equal(ref->attn_prefill(NULL, NULL, &expected.p), SL_OK);
    for (size_t i = 0; i < 3 * HEADS_N * V; i++) {
        assert_near(got.out[i], expected.out[i], 1e-5);
    }
    prefill_close(&got);
    prefill_close(&expected);
}
EACH_BACKEND_TEST(long_prompt)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sequences_are_independent),
        cmocka_unit_test(test_causality_stops_nan),
        cmocka_unit_test(test_rows_and_pages_are_independent),
        cmocka_unit_test(test_long_prompt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
