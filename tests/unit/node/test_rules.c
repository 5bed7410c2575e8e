/* From sampling parameters to the rule of a token and the end of a request; peers of a group. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "node/peers.h"
#include "node/rules.h"

static const sl_model_config_t config = {.eos_count = 2, .eos_token_ids = {1, 2}};

static sl_sampling_t sampling_of(uint32_t min_tokens, uint32_t max_tokens, bool ignore_eos)
{
    return (sl_sampling_t){
        .temperature = 0.5f,
        .top_p = 0.9f,
        .seed = 77,
        .min_tokens = min_tokens,
        .max_tokens = max_tokens,
        .stop_count = 1,
        .stop_token_ids = {50},
        .ignore_eos = ignore_eos,
        .logprobs = 3,
    };
}

static void test_mask(void **state)
{
    (void)state;
    sl_sample_row_t rule;
    sl_sampling_t sampling = sampling_of(2, 8, false);
    sl_rule_make(&config, &sampling, 1, &rule);
    assert_int_equal(rule.masked_count, 3);
    assert_int_equal(rule.masked[0], 50);
    assert_int_equal(rule.masked[2], 2);
    assert_int_equal(rule.position, 1);
    assert_int_equal(rule.seed, 77);
    assert_int_equal(rule.logprobs, 3);
    sl_rule_make(&config, &sampling, 2, &rule);
    assert_int_equal(rule.masked_count, 0);
    sampling = sampling_of(2, 8, true);
    sl_rule_make(&config, &sampling, 0, &rule);
    assert_int_equal(rule.masked_count, 1); /* EOS does not stop, so it may be chosen */
}

static void test_finish(void **state)
{
    (void)state;
    sl_sampling_t sampling = sampling_of(0, 3, false);
    assert_int_equal(sl_rule_finish(&config, &sampling, 0, 9), SL_FINISH_NONE);
    assert_int_equal(sl_rule_finish(&config, &sampling, 0, 50), SL_FINISH_STOP);
    assert_int_equal(sl_rule_finish(&config, &sampling, 0, 2), SL_FINISH_STOP);
    assert_int_equal(sl_rule_finish(&config, &sampling, 2, 9), SL_FINISH_LENGTH);
    assert_int_equal(sl_rule_finish(&config, &sampling, 2, 50), SL_FINISH_STOP);
    sampling = sampling_of(0, 3, true);
    assert_int_equal(sl_rule_finish(&config, &sampling, 0, 2), SL_FINISH_NONE);
    assert_int_equal(sl_rule_finish(&config, &sampling, 0, 50), SL_FINISH_STOP);
}

static void test_check(void **state)
{
    (void)state;
    const sl_model_config_t small = {.max_position_embeddings = 100};
    sl_sampling_t sampling = sampling_of(0, 40, false);
    assert_int_equal(sl_rule_check(&small, 7, 60, &sampling), SL_OK);
    assert_int_equal(sl_rule_check(&small, 7, 61, &sampling), SL_ERR_INVALID);
    assert_int_equal(sl_rule_check(&small, 7, 0, &sampling), SL_ERR_INVALID);
    assert_int_equal(sl_rule_check(&small, 7, UINT64_MAX, &sampling), SL_ERR_INVALID);
    assert_int_equal(sl_rule_check(&small, 0, 60, &sampling), SL_ERR_INVALID);
    sampling.max_tokens = 0;
    assert_int_equal(sl_rule_check(&small, 7, 60, &sampling), SL_ERR_INVALID);
}

/* A peer whose end was told while this rank could not hear it is gone when its place is taken. */
static void test_replaced_peer(void **state)
{
    (void)state;
    sl_peers_t *peers = NULL;
    sl_rank_id_t targets[SL_GROUP_RANKS_MAX];
    uint32_t count = 0;
    assert_int_equal(sl_peers_create(&peers), SL_OK);
    for (uint64_t life = 1; life <= 200; life++) {
        for (uint32_t rank = 0; rank < 2; rank++) {
            sl_msg_peer_t peer = {.rank = {SL_POOL_DECODE, 0, rank, 10 * life + rank},
                                  .tp = 2,
                                  .attention = SL_ATTENTION_TP};
            assert_int_equal(sl_peers_add(peers, &peer), SL_OK);
            assert_int_equal(sl_peers_add(peers, &peer), SL_OK); /* told twice */
        }
        sl_rank_id_t leader = {SL_POOL_DECODE, 0, 0, 10 * life};
        assert_int_equal(sl_peers_targets(peers, &leader, targets, &count), SL_OK);
        assert_int_equal(count, 2);
        assert_int_equal(targets[1].incarnation, 10 * life + 1);
    }
    sl_peers_destroy(peers);
}

static sl_msg_peer_t peer_of(uint32_t group, uint32_t rank, uint64_t incarnation,
                             sl_attention_t attention)
{
    return (sl_msg_peer_t){
        .rank = {SL_POOL_DECODE, group, rank, incarnation}, .tp = 2, .attention = attention};
}

static void test_targets(void **state)
{
    (void)state;
    sl_peers_t *peers = NULL;
    sl_rank_id_t targets[SL_GROUP_RANKS_MAX];
    uint32_t count = 0;
    assert_int_equal(sl_peers_create(&peers), SL_OK);
    sl_msg_peer_t dp0 = peer_of(0, 0, 100, SL_ATTENTION_DP);
    sl_msg_peer_t dp1 = peer_of(0, 1, 101, SL_ATTENTION_DP);
    sl_msg_peer_t tp0 = peer_of(1, 0, 110, SL_ATTENTION_TP);
    sl_msg_peer_t tp1 = peer_of(1, 1, 111, SL_ATTENTION_TP);
    assert_int_equal(sl_peers_targets(peers, &dp0.rank, targets, &count), SL_ERR_UNREACHABLE);
    assert_int_equal(sl_peers_add(peers, &dp0), SL_OK);
    assert_int_equal(sl_peers_add(peers, &dp1), SL_OK);
    assert_int_equal(sl_peers_add(peers, &tp0), SL_OK);
    assert_int_equal(sl_peers_targets(peers, &dp1.rank, targets, &count), SL_OK);
    assert_int_equal(count, 1);
    assert_true(sl_rank_same(&targets[0], &dp1.rank));
    /* With TP attention a missing rank of the group would leave its copy of the latents empty. */
    assert_int_equal(sl_peers_targets(peers, &tp0.rank, targets, &count), SL_ERR_UNREACHABLE);
    assert_int_equal(sl_peers_add(peers, &tp1), SL_OK);
    assert_int_equal(sl_peers_targets(peers, &tp0.rank, targets, &count), SL_OK);
    assert_int_equal(count, 2);
    assert_true(sl_rank_same(&targets[1], &tp1.rank));
    sl_rank_id_t stale = dp0.rank;
    stale.incarnation++;
    assert_int_equal(sl_peers_targets(peers, &stale, targets, &count), SL_ERR_UNREACHABLE);
    sl_peers_remove(peers, &tp1.rank);
    assert_int_equal(sl_peers_targets(peers, &tp0.rank, targets, &count), SL_ERR_UNREACHABLE);
    sl_peers_destroy(peers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mask),          cmocka_unit_test(test_finish),
        cmocka_unit_test(test_check),         cmocka_unit_test(test_targets),
        cmocka_unit_test(test_replaced_peer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
