/* Who is let in, when a group is ready, and what happens when a rank is lost. */
#include "fixture.h"

static void assert_refused(fixture_t *fixture, const char *name, const char *code, const char *part)
{
    sl_message_t *message = sent_to(fixture, name, SL_MSG_REFUSED, 0);
    assert_non_null(message);
    assert_string_equal(message->refused.code, code);
    if (strstr(message->refused.message, part) == NULL) {
        fail_msg("\"%s\" does not hold \"%s\"", message->refused.message, part);
    }
}

static void heartbeat(fixture_t *fixture, const char *name, uint64_t progress, bool busy)
{
    sl_msg_heartbeat_t figures = {.sequence = 5, .progress = progress, .busy = busy};
    sl_registry_heartbeat(fixture->registry, rank_of(fixture, name), &figures, fixture->now_us);
}

/* Moves the registry's time in steps, as the loop would. */
static void pass_ms(fixture_t *fixture, uint64_t ms)
{
    for (uint64_t done = 0; done < ms; done += 100) {
        fixture->now_us += 100000;
        sl_registry_tick(fixture->registry, fixture->now_us);
    }
}

static void group_forms_and_meets_the_other_pool(void **state)
{
    fixture_t *fixture = *state;
    size_t count;
    join(fixture, "p", SL_POOL_PREFILL, 0);
    say_hello(fixture, "d1", hello_of(SL_POOL_DECODE, 0, 1, 2, 21));
    assert_int_equal(sent_to(fixture, "d1", SL_MSG_WELCOME, 0)->welcome.incarnation, 21);
    assert_int_equal(sent_count(fixture, "d1", SL_MSG_GROUP), 0);
    say_hello(fixture, "d0", hello_of(SL_POOL_DECODE, 0, 0, 2, 20));
    sl_message_t *group = sent_to(fixture, "d1", SL_MSG_GROUP, 0);
    assert_int_equal(group->group.rank_count, 2);
    assert_int_equal(group->group.incarnations[0], 20);
    assert_int_equal(group->group.incarnations[1], 21);
    assert_int_equal(sent_count(fixture, "d0", SL_MSG_GROUP), 1);

    sl_registry_ready(fixture->registry, rank_of(fixture, "d0"));
    assert_int_equal(sent_count(fixture, NULL, SL_MSG_PEER), 0);
    sl_registry_targets(fixture->registry, SL_POOL_DECODE, &count);
    assert_int_equal(count, 0);
    sl_registry_ready(fixture->registry, rank_of(fixture, "d1"));
    sl_registry_targets(fixture->registry, SL_POOL_DECODE, &count);
    assert_int_equal(count, 2);
    assert_int_equal(sent_count(fixture, "p", SL_MSG_PEER), 2);
    assert_int_equal(sent_count(fixture, "d0", SL_MSG_PEER), 1);
    assert_int_equal(sent_count(fixture, "d1", SL_MSG_PEER), 1);
    sl_message_t *peer = sent_to(fixture, "d1", SL_MSG_PEER, 0);
    assert_true(peer->peer.alive);
    assert_int_equal(peer->peer.transfer_address.size, 4);
}

static void tensor_parallel_attention_has_one_target(void **state)
{
    fixture_t *fixture = *state;
    size_t count;
    for (uint32_t i = 0; i < 2; i++) {
        sl_message_t hello = hello_of(SL_POOL_DECODE, 3, i, 2, 20 + i);
        hello.hello.attention = SL_ATTENTION_TP;
        say_hello(fixture, i == 0 ? "d0" : "d1", hello);
    }
    sl_registry_ready(fixture->registry, rank_of(fixture, "d0"));
    sl_registry_ready(fixture->registry, rank_of(fixture, "d1"));
    sl_rank_t *const *targets = sl_registry_targets(fixture->registry, SL_POOL_DECODE, &count);
    assert_int_equal(count, 1);
    assert_ptr_equal(targets[0], rank_of(fixture, "d0"));
}

static void other_layout_is_refused_with_both_texts(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "p", SL_POOL_PREFILL, 0);
    sl_message_t hello = hello_of(SL_POOL_DECODE, 0, 0, 1, 9);
    hello.hello.layout_hash = 43;
    snprintf(hello.hello.layout, sizeof(hello.hello.layout), "fp32, 4 layers");
    say_hello(fixture, "d", hello);
    assert_refused(fixture, "d", "refused", "fp32, 4 layers");
    assert_refused(fixture, "d", "refused", "bf16, 4 layers");
    assert_null(rank_of(fixture, "d"));

    /* Once nobody is left the next one may be anything. */
    const sl_msg_goodbye_t on_purpose = {0};
    sl_registry_goodbye(fixture->registry, rank_of(fixture, "p"), &on_purpose, fixture->now_us);
    assert_false(sl_registry_cluster(fixture->registry)->known);
    hello = hello_of(SL_POOL_DECODE, 0, 0, 1, 10);
    hello.hello.layout_hash = 43;
    say_hello(fixture, "d2", hello);
    assert_non_null(rank_of(fixture, "d2"));
}

static void bad_figures_are_refused(void **state)
{
    fixture_t *fixture = *state;
    say_hello(fixture, "a", hello_of(SL_POOL_DECODE, 0, 0, 3, 1));
    assert_refused(fixture, "a", "refused", "tp 3");
    say_hello(fixture, "b", hello_of(SL_POOL_DECODE, 0, 0, 128, 2));
    assert_refused(fixture, "b", "refused", "tp 128");
    say_hello(fixture, "c", hello_of(SL_POOL_DECODE, 0, 2, 2, 3));
    assert_refused(fixture, "c", "refused", "rank 2, expected less than its tp 2");
    sl_message_t hello = hello_of(SL_POOL_DECODE, 0, 0, 1, 4);
    hello.hello.page_tokens = 0;
    say_hello(fixture, "d", hello);
    assert_refused(fixture, "d", "refused", "page_tokens 0");
    say_hello(fixture, "e", hello_of(SL_POOL_DECODE, 0, 0, 2, 5));
    hello = hello_of(SL_POOL_DECODE, 0, 1, 2, 6);
    hello.hello.attention = SL_ATTENTION_TP;
    say_hello(fixture, "f", hello);
    assert_refused(fixture, "f", "refused", "attention tp, expected tp 2 and attention dp");
    assert_int_equal(sl_registry_count(fixture->registry), 1);
}

static void unequal_rows_within_a_group_are_refused(void **state)
{
    fixture_t *fixture = *state;
    for (uint32_t group = 0; group < 2; group++) {
        sl_attention_t attention = group == 0 ? SL_ATTENTION_DP : SL_ATTENTION_TP;
        const char *first = group == 0 ? "dp1" : "tp1", *rows = group == 0 ? "dp-rows" : "tp-rows";
        sl_message_t hello = hello_of(SL_POOL_DECODE, group, 1, 2, 10 + group);
        hello.hello.attention = attention;
        hello.hello.max_rows = 64;
        say_hello(fixture, first, hello);
        hello = hello_of(SL_POOL_DECODE, group, 0, 2, 20 + group);
        hello.hello.attention = attention;
        hello.hello.max_rows = 32;
        say_hello(fixture, rows, hello);
        assert_refused(fixture, rows, "refused", group == 0 ? "decode/0/0" : "decode/1/0");
        assert_refused(fixture, rows, "refused", "max_rows 32, expected 64");
        assert_null(rank_of(fixture, rows));
        assert_non_null(rank_of(fixture, first)); /* and nobody else is disturbed */
    }

    /* Another group may be of another size. */
    sl_message_t hello = hello_of(SL_POOL_DECODE, 2, 0, 1, 40);
    hello.hello.max_rows = 8;
    say_hello(fixture, "other", hello);
    assert_non_null(rank_of(fixture, "other"));
}

/* A group of two: the second rank to come, rank 0, has fewer pages than the first. */
static void join_uneven(fixture_t *fixture, sl_attention_t attention)
{
    for (uint32_t i = 2; i-- > 0;) {
        const char *name = i == 0 ? "d0" : "d1";
        sl_message_t hello = hello_of(SL_POOL_DECODE, 0, i, 2, 20 + i);
        hello.hello.attention = attention;
        hello.hello.pages_total = i == 0 ? 19 : 24;
        say_hello(fixture, name, hello);
    }
}

static void tensor_parallel_attention_uses_the_pages_of_the_smallest_rank(void **state)
{
    fixture_t *fixture = *state;
    join_uneven(fixture, SL_ATTENTION_TP);
    for (uint32_t i = 0; i < 2; i++) {
        const char *name = i == 0 ? "d0" : "d1";
        assert_int_equal(sent_to(fixture, name, SL_MSG_GROUP, 0)->group.pages, 19);
        assert_int_equal(rank_of(fixture, name)->load.pages_total, 19);
        sl_registry_ready(fixture->registry, rank_of(fixture, name));
    }
    join(fixture, "p", SL_POOL_PREFILL, 0);
    generate(fixture, "c", "fits", 18 * 64, 64);
    assert_int_equal(sent_count(fixture, "d0", SL_MSG_RESERVE), 1);
    generate(fixture, "c", "does not", 18 * 64, 65);
    sl_message_t *failed = sent_to(fixture, "c", SL_MSG_FAILED, 0);
    assert_non_null(failed);
    assert_string_equal(failed->failed.code, "limit");
}

/* Told again over a new connection: the number is the ranks' own, so it is the same. */
static void group_told_again_has_the_same_pages(void **state)
{
    fixture_t *fixture = *state;
    join_uneven(fixture, SL_ATTENTION_TP);
    sl_message_t hello = hello_of(SL_POOL_DECODE, 0, 1, 2, 21);
    hello.hello.attention = SL_ATTENTION_TP;
    hello.hello.pages_total = 24;
    say_hello(fixture, "d1-again", hello);
    assert_int_equal(sent_to(fixture, "d1-again", SL_MSG_GROUP, 0)->group.pages, 19);
    assert_int_equal(rank_of(fixture, "d1-again")->load.pages_total, 19);
}

static void data_parallel_attention_uses_each_ranks_own_pages(void **state)
{
    fixture_t *fixture = *state;
    join_uneven(fixture, SL_ATTENTION_DP);
    for (uint32_t i = 0; i < 2; i++) {
        const char *name = i == 0 ? "d0" : "d1";
        assert_int_equal(sent_to(fixture, name, SL_MSG_GROUP, 0)->group.pages, 0);
        assert_int_equal(rank_of(fixture, name)->load.pages_total, i == 0 ? 19 : 24);
    }
}

static void taken_place_is_refused_with_both_incarnations(void **state)
{
    fixture_t *fixture = *state;
    say_hello(fixture, "a", hello_of(SL_POOL_DECODE, 0, 0, 1, 11));
    say_hello(fixture, "b", hello_of(SL_POOL_DECODE, 0, 0, 1, 12));
    assert_refused(fixture, "b", "refused", "incarnation 11");
    assert_refused(fixture, "b", "refused", "incarnation 12");
    assert_non_null(rank_of(fixture, "a"));
}

static void dead_holder_gives_way_to_a_new_incarnation(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "p", SL_POOL_PREFILL, 0);
    join(fixture, "a", SL_POOL_DECODE, 0);
    unplug(fixture, "a");
    say_hello(fixture, "b", hello_of(SL_POOL_DECODE, 0, 0, 1, 12));
    assert_null(rank_of(fixture, "a"));
    assert_non_null(rank_of(fixture, "b"));
    sl_message_t *peer = sent_to(fixture, "p", SL_MSG_PEER, 1);
    assert_non_null(peer);
    assert_false(peer->peer.alive);
}

static void repeated_hello_is_welcomed_again(void **state)
{
    fixture_t *fixture = *state;
    say_hello(fixture, "a", hello_of(SL_POOL_DECODE, 0, 0, 1, 11));
    say_hello(fixture, "a", hello_of(SL_POOL_DECODE, 0, 0, 1, 11));
    assert_int_equal(sent_count(fixture, "a", SL_MSG_WELCOME), 2);
    assert_int_equal(sl_registry_count(fixture->registry), 1);
}

static void new_connection_of_the_same_process_keeps_the_place(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "p", SL_POOL_PREFILL, 0);
    say_hello(fixture, "a", hello_of(SL_POOL_DECODE, 0, 0, 1, 11));
    sl_registry_ready(fixture->registry, rank_of(fixture, "a"));
    unplug(fixture, "a");
    say_hello(fixture, "a2", hello_of(SL_POOL_DECODE, 0, 0, 1, 11));
    assert_null(rank_of(fixture, "a"));
    assert_int_equal(rank_of(fixture, "a2")->group->state, SL_GROUP_READY);
    assert_int_equal(sent_count(fixture, "a2", SL_MSG_WELCOME), 1);
    assert_int_equal(sent_count(fixture, "a2", SL_MSG_PEER), 1);
}

static void silent_rank_takes_its_group_down(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "p", SL_POOL_PREFILL, 0);
    say_hello(fixture, "d0", hello_of(SL_POOL_DECODE, 0, 0, 2, 20));
    say_hello(fixture, "d1", hello_of(SL_POOL_DECODE, 0, 1, 2, 21));
    sl_registry_ready(fixture->registry, rank_of(fixture, "d0"));
    sl_registry_ready(fixture->registry, rank_of(fixture, "d1"));
    forget_sent(fixture);
    for (int i = 0; i < 6; i++) {
        pass_ms(fixture, 1000);
        heartbeat(fixture, "p", 0, false);
        if (rank_of(fixture, "d0") != NULL) {
            heartbeat(fixture, "d0", 0, false);
        }
    }
    assert_null(rank_of(fixture, "d0"));
    assert_null(rank_of(fixture, "d1"));
    assert_non_null(rank_of(fixture, "p"));
    sl_message_t *failed = sent_to(fixture, "d0", SL_MSG_GROUP_FAILED, 0);
    assert_non_null(failed);
    assert_non_null(strstr(failed->group_failed.message, "decode/0/1"));
    assert_non_null(strstr(failed->group_failed.message, "no heartbeat"));
    assert_int_equal(sent_count(fixture, "p", SL_MSG_PEER), 2);
    assert_false(sent_to(fixture, "p", SL_MSG_PEER, 1)->peer.alive);

    /* The survivor does not come back with old state; a new one takes the place at once. */
    say_hello(fixture, "d0", hello_of(SL_POOL_DECODE, 0, 0, 2, 20));
    assert_refused(fixture, "d0", "stale", "incarnation 20 belongs to a failed group");
    say_hello(fixture, "d2", hello_of(SL_POOL_DECODE, 0, 0, 2, 22));
    assert_non_null(rank_of(fixture, "d2"));
}

/* An overdue rank gets its last acknowledgement again, once a heartbeat, until it is heard. */
static void overdue_rank_is_probed(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "d", SL_POOL_DECODE, 0);
    heartbeat(fixture, "d", 0, false);
    forget_sent(fixture);
    pass_ms(fixture, 2000);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_HEARTBEAT_ACK), 0);
    pass_ms(fixture, 2000);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_HEARTBEAT_ACK), 2);
    assert_int_equal(sent_to(fixture, "d", SL_MSG_HEARTBEAT_ACK, 1)->heartbeat_ack.sequence, 5);
    heartbeat(fixture, "d", 0, false);
    forget_sent(fixture);
    pass_ms(fixture, 1500);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_HEARTBEAT_ACK), 0);
    /* Given up, it is never acknowledged again. */
    pass_ms(fixture, 4000);
    assert_null(rank_of(fixture, "d"));
    forget_sent(fixture);
    pass_ms(fixture, 10000);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_HEARTBEAT_ACK), 0);
}

static void busy_rank_without_progress_is_lost(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "idle", SL_POOL_DECODE, 0);
    join(fixture, "slow", SL_POOL_DECODE, 1);
    join(fixture, "stuck", SL_POOL_DECODE, 2);
    for (uint64_t i = 0; i < 32; i++) {
        pass_ms(fixture, 1000);
        heartbeat(fixture, "idle", 3, false);
        heartbeat(fixture, "slow", i / 20, true);
        if (rank_of(fixture, "stuck") != NULL) {
            heartbeat(fixture, "stuck", 7, true);
        }
    }
    assert_non_null(rank_of(fixture, "idle"));
    assert_non_null(rank_of(fixture, "slow"));
    assert_null(rank_of(fixture, "stuck"));
    sl_message_t *failed = sent_to(fixture, "stuck", SL_MSG_GROUP_FAILED, 0);
    assert_non_null(strstr(failed->group_failed.message, "without progress beyond step 7"));
}

/* The others of a group are told whether one has left, which is no fault of theirs, or has failed.
 */
static void a_goodbye_says_whether_it_is_a_fault(void **state)
{
    fixture_t *fixture = *state;
    const char *const texts[2] = {"", "desync: step 7"};
    for (uint32_t group = 0; group < 2; group++) {
        char first[4], second[4];
        sl_msg_goodbye_t goodbye = {0};
        snprintf(first, sizeof(first), "a%u", group);
        snprintf(second, sizeof(second), "b%u", group);
        say_hello(fixture, first, hello_of(SL_POOL_DECODE, group, 0, 2, 50 + 2 * group));
        say_hello(fixture, second, hello_of(SL_POOL_DECODE, group, 1, 2, 51 + 2 * group));
        snprintf(goodbye.message, sizeof(goodbye.message), "%s", texts[group]);
        sl_registry_goodbye(fixture->registry, rank_of(fixture, first), &goodbye, fixture->now_us);
        sl_message_t *told = sent_to(fixture, second, SL_MSG_GROUP_FAILED, 0);
        assert_non_null(told);
        assert_int_equal(told->group_failed.left, group == 0);
        assert_non_null(strstr(told->group_failed.message, texts[group]));
        assert_null(sent_to(fixture, first, SL_MSG_GROUP_FAILED, 0));
        assert_null(rank_of(fixture, second));
    }
}

static void pause_of_the_router_itself_is_forgiven(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "d", SL_POOL_DECODE, 0);
    pass_ms(fixture, 4000);
    fixture->now_us += 60000000;
    sl_registry_tick(fixture->registry, fixture->now_us);
    assert_non_null(rank_of(fixture, "d"));
    pass_ms(fixture, 1100);
    assert_null(rank_of(fixture, "d"));
}

/* The loop reads the sockets before it runs the timers, so what was sent during the pause, or comes
 * right after it, is heard before the pause is forgiven. */
static void heartbeat_read_before_a_pause_is_forgiven_counts_once(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "d", SL_POOL_DECODE, 0);
    join(fixture, "silent", SL_POOL_DECODE, 1);
    pass_ms(fixture, 1000);
    heartbeat(fixture, "d", 7, true);
    pass_ms(fixture, 500);
    fixture->now_us += 2000000;
    heartbeat(fixture, "d", 8, true); /* seen and moved on now */
    say_hello(fixture, "new", hello_of(SL_POOL_DECODE, 2, 0, 1, 77));
    sl_registry_tick(fixture->registry, fixture->now_us);
    assert_non_null(rank_of(fixture, "d"));
    assert_non_null(rank_of(fixture, "new"));
    assert_non_null(rank_of(fixture, "silent"));
    assert_int_equal(rank_of(fixture, "d")->seen_us, fixture->now_us);
    assert_int_equal(rank_of(fixture, "d")->progress_us, fixture->now_us);

    pass_ms(fixture, 3400); /* 4.9 s of silence that were not the router's own */
    assert_non_null(rank_of(fixture, "silent"));
    pass_ms(fixture, 200);
    assert_null(rank_of(fixture, "silent"));
    assert_non_null(rank_of(fixture, "d"));
    pass_ms(fixture, 1300); /* and of the other one no more is forgiven than of anyone */
    assert_non_null(rank_of(fixture, "d"));
    pass_ms(fixture, 200);
    assert_null(rank_of(fixture, "d"));
}

static void failed_send_dooms_at_settle_only(void **state)
{
    fixture_t *fixture = *state;
    join(fixture, "d", SL_POOL_DECODE, 0);
    unplug(fixture, "d");
    heartbeat(fixture, "d", 0, false);
    assert_non_null(rank_of(fixture, "d"));
    sl_registry_settle(fixture->registry, fixture->now_us);
    assert_null(rank_of(fixture, "d"));
    assert_int_equal(sl_registry_count(fixture->registry), 1); /* still shown, as failed */
    pass_ms(fixture, 61000);
    assert_int_equal(sl_registry_count(fixture->registry), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(group_forms_and_meets_the_other_pool),
        TEST(tensor_parallel_attention_has_one_target),
        TEST(other_layout_is_refused_with_both_texts),
        TEST(bad_figures_are_refused),
        TEST(unequal_rows_within_a_group_are_refused),
        TEST(tensor_parallel_attention_uses_the_pages_of_the_smallest_rank),
        TEST(group_told_again_has_the_same_pages),
        TEST(data_parallel_attention_uses_each_ranks_own_pages),
        TEST(taken_place_is_refused_with_both_incarnations),
        TEST(dead_holder_gives_way_to_a_new_incarnation),
        TEST(repeated_hello_is_welcomed_again),
        TEST(new_connection_of_the_same_process_keeps_the_place),
        TEST(silent_rank_takes_its_group_down),
        TEST(overdue_rank_is_probed),
        TEST(busy_rank_without_progress_is_lost),
        TEST(a_goodbye_says_whether_it_is_a_fault),
        TEST(pause_of_the_router_itself_is_forgiven),
        TEST(heartbeat_read_before_a_pause_is_forgiven_counts_once),
        TEST(failed_send_dooms_at_settle_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
