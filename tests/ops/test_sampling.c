/*
 * Sampling on every backend: the generator against its authors' vectors, the draw against the
 * definition in kernels/philox.h, the sets that the filters leave, and the frequencies.
 */
#include "kernels/philox.h"
#include "tests/ops/each_backend.h"

static void test_philox_known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } facts[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof(facts) / sizeof(facts[0]); i++) {
        uint32_t out[4];
        sl_philox4x32_10(facts[i].counter, facts[i].key, out);
        assert_memory_equal(out, facts[i].out, sizeof(out));
    }
    /* Seed 0, position 0: the first two words of the first vector, 53 bits of them. */
    uint64_t bits = 0x6627e8d5e169c58dull >> 11;
    assert_true(sl_philox_uniform(0, 0) == (double)bits / 9007199254740992.0);
    assert_true(sl_philox_uniform(1ull << 32, 0) != sl_philox_uniform(0, 0));
    assert_true(sl_philox_uniform(0, 1ull << 32) != sl_philox_uniform(0, 0));
}

/* A rule of the given fields; complete() turns what is left out off. */
#define RULE(...) ((sl_sample_row_t){__VA_ARGS__})

static sl_sample_row_t complete(sl_sample_row_t rule)
{
    rule.top_p = rule.top_p == 0 ? 1 : rule.top_p;
    rule.logprobs = rule.logprobs == 0 ? -1 : rule.logprobs;
    return rule;
}

static int32_t sample_one(const sl_ops_t *ops, sl_device_t *device, const float *logits,
                          uint32_t vocab, sl_sample_row_t rule)
{
    int32_t token = -7;
    rule = complete(rule);
    sl_sample_t p = {.tokens = &token, .logits = logits, .rules = &rule, .rows = 1, .vocab = vocab};
    assert_int_equal(ops->sample(device, NULL, &p), SL_OK);
    return token;
}

static void check_greedy(const sl_ops_t *ops, sl_device_t *device)
{
    const float logits[] = {1, 5, NAN, 5, 4, -INFINITY};
    assert_int_equal(sample_one(ops, device, logits, 6, RULE(.temperature = 0)), 1);
    assert_int_equal(sample_one(ops, device, logits, 6, RULE(.masked_count = 1, .masked = {1})), 3);
    assert_int_equal(
        sample_one(ops, device, logits, 6, RULE(.masked_count = 4, .masked = {3, 1, -4, 99})), 4);
    /* Nothing that can be chosen: the lowest id that may. */
    const float nothing[] = {-INFINITY, NAN, -INFINITY};
    for (int hot = 0; hot < 2; hot++) {
        float t = (float)hot;
        assert_int_equal(sample_one(ops, device, nothing, 3, RULE(.temperature = t)), 0);
        assert_int_equal(sample_one(ops, device, nothing, 3,
                                    RULE(.temperature = t, .masked_count = 1, .masked = {0})), 1);
        assert_int_equal(sample_one(ops, device, nothing, 3,
                                    RULE(.temperature = t, .masked_count = 3, .masked = {0, 1, 2})),
                         0);
    }
    const float infinite[] = {3, INFINITY, INFINITY};
    assert_int_equal(sample_one(ops, device, infinite, 3, RULE(.temperature = 1)), 1);
    assert_int_equal(sample_one(ops, device, logits, 6, RULE(.temperature = 1e-40f)),
                     sample_one(ops, device, logits, 6, RULE(.temperature = 1e-20f)));
}
EACH_BACKEND_TEST(greedy)

/* The set of ids that 400 draws of a rule give, as bits. */
static uint32_t drawn(const sl_ops_t *ops, sl_device_t *device, const float *logits, uint32_t vocab,
                      sl_sample_row_t rule)
{
    uint32_t set = 0;
    for (rule.position = 0; rule.position < 400; rule.position++) {
        set |= 1u << sample_one(ops, device, logits, vocab, rule);
    }
    return set;
}

/* Probabilities 0.4 0.1 0.3 0.1 0.1 at temperature 1. */
static void check_filters(const sl_ops_t *ops, sl_device_t *device)
{
    float logits[5];
    const double p[] = {0.4, 0.1, 0.3, 0.1, 0.1};
    for (size_t i = 0; i < 5; i++) {
        logits[i] = (float)log(p[i]) + 3;
    }
    const struct {
        sl_sample_row_t rule;
        uint32_t set; /* ids as bits */
    } facts[] = {
        {RULE(.temperature = 1), 0x1f},
        {RULE(.temperature = 1, .top_k = 1), 0x01},
        {RULE(.temperature = 1, .top_k = 2), 0x05},
        {RULE(.temperature = 1, .top_k = 3), 0x07},        /* tie: the lower id */
        {RULE(.temperature = 1, .top_k = 99), 0x1f},
        {RULE(.temperature = 1, .top_p = 0.001f), 0x01},   /* at least one */
        {RULE(.temperature = 1, .top_p = 0.39f), 0x01},
        {RULE(.temperature = 1, .top_p = 0.45f), 0x05},    /* up to the one that reaches it */
        {RULE(.temperature = 1, .top_p = 0.75f), 0x07},
        {RULE(.temperature = 1, .min_p = 0.5f), 0x05},
        {RULE(.temperature = 1, .min_p = 0.2f), 0x1f},
        {RULE(.temperature = 1, .min_p = 1), 0x01},
        /* top_p counts what top_k leaves: 4/7 of two is enough for 0.5, not 0.4 of all. */
        {RULE(.temperature = 1, .top_k = 2, .top_p = 0.5f), 0x01},
        {RULE(.temperature = 1, .top_k = 2, .top_p = 0.6f), 0x05},
        {RULE(.temperature = 1, .top_k = 4, .min_p = 0.5f), 0x05},
        {RULE(.temperature = 1, .masked_count = 1, .masked = {0}, .top_k = 2), 0x06},
        /* Of 1, 3, 1, 1 the 3 is half. */
        {RULE(.temperature = 1, .masked_count = 1, .masked = {0}, .top_p = 0.45f), 0x04},
        /* Hotter: 0.4 and 0.3 move together, 0.1 follows. 0.1^0.1 / 0.4^0.1 is 0.87. */
        {RULE(.temperature = 10, .min_p = 0.9f), 0x05},
        {RULE(.temperature = 10, .min_p = 0.8f), 0x1f},
    };
    for (size_t i = 0; i < sizeof(facts) / sizeof(facts[0]); i++) {
        uint32_t set = drawn(ops, device, logits, 5, facts[i].rule);
        if (set != facts[i].set) {
            fail_msg("%s, rule %zu: drew %#x, expected %#x", ops->name, i, set, facts[i].set);
        }
    }
}
EACH_BACKEND_TEST(filters)

/* The inverse of the running sum, in id order, of the uniform number of (seed, position). */
static void check_draw(const sl_ops_t *ops, sl_device_t *device)
{
    const float logits[] = {logf(0.25f), logf(0.125f), logf(0.5f), logf(0.125f)};
    for (uint64_t position = 0; position < 300; position++) {
        double u = sl_philox_uniform(77, position);
        int32_t expected = u < 0.25 ? 0 : u < 0.375 ? 1 : u < 0.875 ? 2 : 3;
        assert_int_equal(sample_one(ops, device, logits, 4,
                                    RULE(.temperature = 1, .seed = 77, .position = position)),
                         expected);
    }
}
EACH_BACKEND_TEST(draw)

/* 20,000 draws; the statistic of 9 degrees of freedom stays below 27.9 but once in 1,000. */
static void check_frequencies(const sl_ops_t *ops, sl_device_t *device)
{
    enum { VOCAB = 10, DRAWS = 20000, BATCH = 100 };
    static float logits[BATCH * VOCAB];
    static sl_sample_row_t rules[BATCH];
    double probability[VOCAB], total = 0, statistic = 0;
    uint32_t counts[VOCAB] = {0};
    fill_random(logits, VOCAB, 1.5f, 9);
    for (size_t i = 0; i < VOCAB; i++) {
        probability[i] = exp(logits[i] / 0.8);
        total += probability[i];
    }
    for (size_t t = 0; t < BATCH; t++) {
        memcpy(logits + t * VOCAB, logits, VOCAB * sizeof(float));
        rules[t] = complete(RULE(.temperature = 0.8f, .seed = 0xfeedfacecafebeefull));
    }
    for (uint64_t first = 0; first < DRAWS; first += BATCH) {
        int32_t tokens[BATCH];
        for (size_t t = 0; t < BATCH; t++) {
            rules[t].position = first + t;
        }
        sl_sample_t p = {.tokens = tokens, .logits = logits, .rules = rules, .rows = BATCH,
                         .vocab = VOCAB};
        assert_int_equal(ops->sample(device, NULL, &p), SL_OK);
        for (size_t t = 0; t < BATCH; t++) {
            counts[tokens[t]]++;
        }
    }
    for (size_t i = 0; i < VOCAB; i++) {
        double expected = DRAWS * probability[i] / total;
        statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    if (!(statistic < 27.9)) {
        fail_msg("%s: chi-square %g over 9 degrees of freedom", ops->name, statistic);
    }
}
EACH_BACKEND_TEST(frequencies)

/* A row's token does not depend on its place in the batch. */
static void check_place_in_batch(const sl_ops_t *ops, sl_device_t *device)
{
    enum { VOCAB = 100, ROWS = 7 };
    static float logits[ROWS * VOCAB];
    sl_sample_row_t rules[ROWS];
    int32_t tokens[ROWS];
    fill_random(logits, ROWS * VOCAB, 2, 11);
    for (uint64_t t = 0; t < ROWS; t++) {
        rules[t] =
            complete(RULE(.temperature = 1, .seed = t, .position = 5, .top_k = t == 3 ? 4 : 0));
    }
    sl_sample_t p = {.tokens = tokens, .logits = logits, .rules = rules, .rows = ROWS,
                     .vocab = VOCAB};
    assert_int_equal(ops->sample(device, NULL, &p), SL_OK);
    for (size_t t = 0; t < ROWS; t++) {
        assert_int_equal(tokens[t], sample_one(ops, device, logits + t * VOCAB, VOCAB, rules[t]));
    }
}
EACH_BACKEND_TEST(place_in_batch)

/* Logprobs are of the raw logits, whatever the rule; alternatives descend, ties by id. */
static void check_logprobs(const sl_ops_t *ops, sl_device_t *device)
{
    const float logits[] = {logf(0.1f), logf(0.4f), logf(0.1f), logf(0.4f), -INFINITY};
    sl_sample_row_t rule = complete(RULE(.temperature = 5, .top_k = 1, .logprobs = 3,
                                         .masked_count = 2, .masked = {1, 3}));
    int32_t token;
    sl_logprobs_t logprobs[2];
    memset(logprobs, 0xff, sizeof(logprobs));
    sl_sample_t p = {.tokens = &token, .logprobs = logprobs, .logits = logits, .rules = &rule,
                     .rows = 1, .vocab = 5};
    assert_int_equal(ops->sample(device, NULL, &p), SL_OK);
    assert_int_equal(token, 0);
    assert_near(logprobs[0].logprob, log(0.1), 1e-6);
    assert_int_equal(logprobs[0].top_count, 3);
    const int32_t ids[] = {1, 3, 0};
    assert_memory_equal(logprobs[0].top_ids, ids, sizeof(ids));
    assert_near(logprobs[0].top_logprobs[0], log(0.4), 1e-6);
    assert_near(logprobs[0].top_logprobs[2], log(0.1), 1e-6);

    int32_t targets[] = {4};
    sl_token_logprobs_t given = {.out = logprobs, .logits = logits, .targets = targets, .rows = 1,
                                 .vocab = 5, .top_count = 99};
    assert_int_equal(ops->token_logprobs(device, NULL, &given), SL_OK);
    assert_true(logprobs[0].logprob == -INFINITY);
    assert_int_equal(logprobs[0].top_count, 5); /* all there are */
    assert_int_equal(logprobs[0].top_ids[4], 4);
    assert_int_equal(logprobs[1].top_count, 0xffffffff); /* nothing beyond the rows */
}
EACH_BACKEND_TEST(logprobs)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_filters),
        cmocka_unit_test(test_draw),
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_place_in_batch),
        cmocka_unit_test(test_logprobs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
