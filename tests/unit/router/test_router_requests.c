/* The life of requests and attempts: placing, streams, cancel, no_pages, lost ranks, limits. */
#include "fixture.h"

static void assert_failed(fixture_t *fixture, const char *client, size_t nth, const char *id,
                          const char *code, const char *part)
{
    sl_message_t *message = sent_to(fixture, client, SL_MSG_FAILED, nth);
    assert_non_null(message);
    assert_string_equal(message->failed.id, id);
    assert_string_equal(message->failed.code, code);
    if (strstr(message->failed.message, part) == NULL) {
        fail_msg("\"%s\" does not hold \"%s\"", message->failed.message, part);
    }
}

static void assert_account(fixture_t *fixture, const char *name, uint64_t running, uint64_t pages,
                           uint64_t queued)
{
    const sl_load_t *load = &rank_of(fixture, name)->load;
    assert_int_equal(load->running, running);
    assert_int_equal(load->pages_reserved, pages);
    assert_int_equal(load->queued_tokens, queued);
}

/* Nothing is waiting, running or accounted any more. */
static void assert_all_free(fixture_t *fixture)
{
    sl_requests_counts_t now = counts(fixture);
    assert_int_equal(now.waiting, 0);
    assert_int_equal(now.waiting_tokens, 0);
    assert_int_equal(now.placed, 0);
    assert_int_equal(now.attempts, 0);
    assert_int_equal(now.clients, 0);
}

static void join_both(fixture_t *fixture)
{
    join(fixture, "p", SL_POOL_PREFILL, 0);
    join(fixture, "d", SL_POOL_DECODE, 0);
    forget_sent(fixture);
}

/* The concatenated output of a request, checked for numbering; returns the number of tokens. */
static size_t read_stream(fixture_t *fixture, const char *client, const char *id,
                          sl_finish_t *finish_p)
{
    size_t next_index = 0;
    uint64_t next_seq = 0;
    *finish_p = SL_FINISH_NONE;
    for (size_t i = 0; i < fixture->sent_count; i++) {
        const sl_message_t *message = &fixture->sent[i].message;
        sl_peer_key_t key = key_of(client);
        if (!fixture->sent[i].to_client || !sl_peer_key_same(&fixture->sent[i].key, &key) ||
            strcmp(message->tokens.id, id) != 0) {
            continue;
        }
        assert_int_equal(*finish_p, SL_FINISH_NONE); /* nothing follows the finish */
        if (message->type == SL_MSG_TOKENS) {
            assert_int_equal(message->tokens.attempt, 0);
            assert_int_equal(message->tokens.seq, next_seq++);
            assert_int_equal(message->tokens.index, next_index);
            for (size_t j = 0; j < message->tokens.token_count; j++) {
                assert_int_equal(message->tokens.tokens[j], next_index++);
            }
            *finish_p = message->tokens.finish;
        } else if (message->type == SL_MSG_PROMPT_LOGPROBS) {
            assert_int_equal(message->prompt_logprobs.seq, next_seq++);
        }
    }
    return next_index;
}

static void request_runs_to_its_end(void **state)
{
    fixture_t *fixture = *state;
    sl_finish_t finish;
    join_both(fixture);
    generate(fixture, "c", "a", 100, 10);
    sl_message_t *prefill = sent_to(fixture, "p", SL_MSG_PREFILL, 0);
    sl_message_t *reserve = sent_to(fixture, "d", SL_MSG_RESERVE, 0);
    assert_int_equal(prefill->prefill.attempt, 1000);
    assert_int_equal(reserve->reserve.attempt, 1000);
    assert_int_equal(reserve->reserve.prompt_len, 100);
    assert_true(sl_rank_same(&reserve->reserve.prefill, &rank_of(fixture, "p")->id));
    assert_true(sl_rank_same(&prefill->prefill.decode, &rank_of(fixture, "d")->id));
    assert_int_equal(prefill->prefill.sampling.seed, reserve->reserve.sampling.seed);
    assert_account(fixture, "d", 1, 2, 0);
    assert_account(fixture, "p", 1, 0, 100);

    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    assert_account(fixture, "p", 1, 0, 0);
    say_released(fixture, "p", 1000);
    assert_account(fixture, "p", 0, 0, 0);
    say_tokens(fixture, "d", 1000, 1, 4, SL_FINISH_NONE);
    say_tokens(fixture, "d", 1000, 5, 5, SL_FINISH_LENGTH);
    assert_int_equal(read_stream(fixture, "c", "a", &finish), 10);
    assert_int_equal(finish, SL_FINISH_LENGTH);
    assert_int_equal(counts(fixture).finished, 1);
    assert_account(fixture, "d", 1, 2, 0); /* until the rank says so */
    say_released(fixture, "d", 1000);
    assert_account(fixture, "d", 0, 0, 0);
    assert_all_free(fixture);
}

static void early_decode_tokens_wait_for_the_first(void **state)
{
    fixture_t *fixture = *state;
    sl_finish_t finish;
    join_both(fixture);
    generate(fixture, "c", "a", 10, 4);
    say_tokens(fixture, "d", 1000, 1, 1, SL_FINISH_NONE);
    say_tokens(fixture, "d", 1000, 2, 2, SL_FINISH_STOP);
    say_released(fixture, "d", 1000);
    assert_int_equal(read_stream(fixture, "c", "a", &finish), 0);
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    assert_int_equal(read_stream(fixture, "c", "a", &finish), 4);
    assert_int_equal(finish, SL_FINISH_STOP);
    say_released(fixture, "p", 1000);
    assert_all_free(fixture);
}

static void first_token_may_be_the_last(void **state)
{
    fixture_t *fixture = *state;
    sl_finish_t finish;
    join_both(fixture);
    generate(fixture, "c", "a", 10, 1);
    say_released(fixture, "d", 1000); /* overtakes the token on the other socket */
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_LENGTH);
    assert_int_equal(read_stream(fixture, "c", "a", &finish), 1);
    assert_int_equal(sent_count(fixture, NULL, SL_MSG_CANCEL_ATTEMPT), 0);
    say_released(fixture, "p", 1000);
    assert_all_free(fixture);
    assert_int_equal(counts(fixture).finished, 1);
}

static void release_without_a_finish_fails_the_request(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    generate(fixture, "c", "a", 10, 5);
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    say_released(fixture, "p", 1000);
    assert_int_equal(sent_count(fixture, "c", SL_MSG_FAILED), 0); /* the decode rank goes on */
    say_released(fixture, "d", 1000);
    assert_failed(fixture, "c", 0, "a", "desync", "released after 1 tokens");

    generate(fixture, "c", "b", 10, 5);
    say_released(fixture, "d", 1001);
    say_tokens(fixture, "p", 1001, 0, 1, SL_FINISH_NONE);
    assert_int_equal(sent_count(fixture, "c", SL_MSG_FAILED), 1); /* p has yet to say why */
    say_released(fixture, "p", 1001);
    assert_failed(fixture, "c", 1, "b", "desync", "released after 1 tokens");

    generate(fixture, "c", "c", 10, 5);
    say_released(fixture, "p", 1002);
    assert_failed(fixture, "c", 2, "c", "desync", "released after 0 tokens");
    say_released(fixture, "d", 1002);
    assert_all_free(fixture);
}

static void gap_or_repeat_fails_the_request(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    const uint32_t wrong[] = {0, 1, 3};
    for (uint64_t i = 0; i < 3; i++) {
        char id[2] = {(char)('a' + i), 0};
        uint64_t attempt = 1000 + i;
        generate(fixture, "c", id, 10, 9);
        say_tokens(fixture, "p", attempt, 0, 1, SL_FINISH_NONE);
        say_tokens(fixture, "d", attempt, 1, 1, SL_FINISH_NONE);
        say_tokens(fixture, "d", attempt, wrong[i], 1, SL_FINISH_NONE);
        assert_failed(fixture, "c", i, id, "desync", "expected 2 next");
        assert_int_equal(sent_to(fixture, "c", SL_MSG_FAILED, i)->failed.seq, 2);
        say_tokens(fixture, "d", attempt, 2, 1, SL_FINISH_NONE); /* too late to matter */
        say_released(fixture, "p", attempt);
        say_released(fixture, "d", attempt);
    }
    assert_int_equal(counts(fixture).failed, 3);
    assert_all_free(fixture);
}

static void more_than_max_tokens_fails_the_request(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    generate(fixture, "c", "a", 10, 3);
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    say_tokens(fixture, "d", 1000, 1, 3, SL_FINISH_NONE);
    assert_failed(fixture, "c", 0, "a", "desync", "max_tokens 3");
}

static void prompt_logprobs_come_in_order_before_the_first_token(void **state)
{
    fixture_t *fixture = *state;
    sl_finish_t finish;
    sl_logprobs_t entries[60] = {{.logprob = -1}};
    join_both(fixture);
    generate(fixture, "c", "a", 100, 2);
    sl_rank_t *prefill = rank_of(fixture, "p");
    sl_msg_prompt_logprobs_t piece = {
        .attempt = 1000, .index = 0, .entries = entries, .entry_count = 60};
    sl_requests_prompt_logprobs(fixture->requests, prefill, &piece, fixture->now_us);
    piece.index = 60;
    piece.entry_count = 40;
    sl_requests_prompt_logprobs(fixture->requests, prefill, &piece, fixture->now_us);
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    assert_int_equal(sent_count(fixture, "c", SL_MSG_PROMPT_LOGPROBS), 2);
    assert_int_equal(sent_to(fixture, "c", SL_MSG_PROMPT_LOGPROBS, 1)->prompt_logprobs.index, 60);
    assert_int_equal(sent_to(fixture, "c", SL_MSG_TOKENS, 0)->tokens.seq, 2);
    sl_requests_prompt_logprobs(fixture->requests, prefill, &piece, fixture->now_us);
    assert_failed(fixture, "c", 0, "a", "desync", "prompt_logprobs");
    (void)finish;
}

static void rank_error_reaches_the_client_and_the_other_side(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    generate(fixture, "c", "a", 10, 5);
    sl_msg_failed_t failed = {.attempt = 1000, .code = "invalid", .message = "bad thing 7"};
    sl_requests_failed(fixture->requests, rank_of(fixture, "p"), &failed);
    assert_failed(fixture, "c", 0, "a", "invalid", "bad thing 7");
    assert_int_equal(sent_count(fixture, "p", SL_MSG_CANCEL_ATTEMPT), 0);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_CANCEL_ATTEMPT), 1);
    /* The other side fails too, as it must; nobody hears of it twice. */
    sl_requests_failed(fixture->requests, rank_of(fixture, "d"), &failed);
    assert_int_equal(sent_count(fixture, "c", SL_MSG_FAILED), 1);
    say_released(fixture, "p", 1000);
    say_released(fixture, "d", 1000);
    assert_all_free(fixture);
}

static void cancel_works_in_every_state(void **state)
{
    fixture_t *fixture = *state;
    generate(fixture, "c", "waits", 10, 5);
    cancel(fixture, "c", "waits");
    assert_failed(fixture, "c", 0, "waits", "canceled", "");
    assert_all_free(fixture);

    join_both(fixture);
    generate(fixture, "c", "placed", 10, 5);
    cancel(fixture, "c", "placed");
    assert_failed(fixture, "c", 0, "placed", "canceled", "");
    assert_int_equal(sent_count(fixture, "p", SL_MSG_CANCEL_ATTEMPT), 1);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_CANCEL_ATTEMPT), 1);
    assert_account(fixture, "p", 1, 0, 0);
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE); /* crossed the cancel */
    assert_int_equal(sent_count(fixture, "c", SL_MSG_TOKENS), 0);
    say_released(fixture, "p", 1000);
    say_released(fixture, "d", 1000);

    generate(fixture, "c", "streams", 10, 5);
    say_tokens(fixture, "p", 1001, 0, 1, SL_FINISH_NONE);
    say_released(fixture, "p", 1001);
    cancel(fixture, "c", "streams");
    assert_int_equal(sent_to(fixture, "c", SL_MSG_FAILED, 1)->failed.seq, 1);
    assert_int_equal(sent_count(fixture, "p", SL_MSG_CANCEL_ATTEMPT), 1); /* it has let go */
    assert_int_equal(sent_count(fixture, "d", SL_MSG_CANCEL_ATTEMPT), 2);
    say_released(fixture, "d", 1001);
    assert_all_free(fixture);
    assert_int_equal(counts(fixture).canceled, 3);

    cancel(fixture, "c", "streams");
    assert_failed(fixture, "c", 2, "streams", "not_found", "streams");
}

static void no_pages_tries_again_elsewhere_under_a_new_attempt(void **state)
{
    fixture_t *fixture = *state;
    sl_finish_t finish;
    join_both(fixture);
    join(fixture, "e", SL_POOL_DECODE, 1);
    generate(fixture, "c", "a", 10, 5);
    const char *first = sent_count(fixture, "d", SL_MSG_RESERVE) == 1 ? "d" : "e";
    const char *second = first[0] == 'd' ? "e" : "d";
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    say_no_pages(fixture, first, 1000);
    assert_account(fixture, first, 0, 0, 0);
    assert_int_equal(sent_count(fixture, "p", SL_MSG_CANCEL_ATTEMPT), 1);
    assert_int_equal(counts(fixture).waiting, 1);
    assert_int_equal(sent_count(fixture, NULL, SL_MSG_RESERVE), 1); /* not at once */
    say_released(fixture, "p", 1000);
    fixture->now_us += 25000;
    run_turn(fixture);
    assert_int_equal(sent_count(fixture, second, SL_MSG_RESERVE), 1);
    assert_int_equal(sent_to(fixture, second, SL_MSG_RESERVE, 0)->reserve.attempt, 1001);

    /* The first token comes again and is not shown again. */
    say_tokens(fixture, "p", 1001, 0, 1, SL_FINISH_NONE);
    say_tokens(fixture, second, 1001, 1, 4, SL_FINISH_LENGTH);
    assert_int_equal(read_stream(fixture, "c", "a", &finish), 5);
    assert_int_equal(finish, SL_FINISH_LENGTH);
    say_released(fixture, "p", 1001);
    say_released(fixture, second, 1001);
    assert_all_free(fixture);
}

static void refused_request_keeps_its_position(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    rank_of(fixture, "d")->load.max_running = 1;
    generate(fixture, "c", "a", 10, 5);
    generate(fixture, "c", "b", 10, 5);
    say_no_pages(fixture, "d", 1000); /* b is placed at once: a is backing off */
    assert_int_equal(sent_count(fixture, "d", SL_MSG_RESERVE), 2);
    generate(fixture, "c", "x", 20, 5);
    advance_ms(fixture, 1000);
    cancel(fixture, "c", "b");
    say_released(fixture, "d", 1001); /* now it is a's turn before x's */
    assert_int_equal(sent_to(fixture, "d", SL_MSG_RESERVE, 2)->reserve.prompt_len, 10);
}

static void small_requests_pass_a_large_one(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    generate(fixture, "c", "first", 640, 64); /* 11 of 20 pages */
    generate(fixture, "c", "large", 640, 64); /* does not fit */
    generate(fixture, "c", "small", 64, 64);  /* 2 pages */
    assert_int_equal(sent_count(fixture, "d", SL_MSG_RESERVE), 2);
    assert_int_equal(sent_to(fixture, "d", SL_MSG_RESERVE, 1)->reserve.prompt_len, 64);
    assert_int_equal(counts(fixture).waiting, 1);
}

static void starving_request_gets_a_rank_held(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    generate(fixture, "c", "first", 640, 64);
    generate(fixture, "c", "large", 640, 64);
    advance_ms(fixture, 2100);
    generate(fixture, "c", "small", 64, 64); /* would fit, but came later */
    assert_int_equal(sent_count(fixture, "d", SL_MSG_RESERVE), 1);
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_STOP);
    say_released(fixture, "p", 1000);
    say_released(fixture, "d", 1000);
    assert_int_equal(sent_to(fixture, "d", SL_MSG_RESERVE, 1)->reserve.prompt_len, 640);
    assert_int_equal(sent_to(fixture, "d", SL_MSG_RESERVE, 2)->reserve.prompt_len, 64);
    assert_int_equal(rank_of(fixture, "d")->load.hold_order, SL_HOLD_NONE);
}

static void held_rank_is_let_go_with_its_holder(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    generate(fixture, "c", "first", 640, 64);
    generate(fixture, "c", "large", 640, 64);
    advance_ms(fixture, 2100);
    assert_int_not_equal(rank_of(fixture, "d")->load.hold_order, SL_HOLD_NONE);
    generate(fixture, "c", "small", 64, 64);
    cancel(fixture, "c", "large");
    assert_int_equal(rank_of(fixture, "d")->load.hold_order, SL_HOLD_NONE);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_RESERVE), 2);

    /* And the holder lets go of a rank that dies. */
    generate(fixture, "c", "large", 640, 64);
    advance_ms(fixture, 2100);
    unplug(fixture, "d");
    sl_registry_gone(fixture->registry, &(sl_peer_key_t){.size = 1, .bytes = "d"});
    run_turn(fixture);
    join(fixture, "e", SL_POOL_DECODE, 1);
    run_turn(fixture);
    assert_int_equal(sent_to(fixture, "e", SL_MSG_RESERVE, 0)->reserve.prompt_len, 640);
}

static void half_of_a_pool_is_never_held(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    join(fixture, "e", SL_POOL_DECODE, 1);
    generate(fixture, "c", "x", 640, 64);
    generate(fixture, "c", "y", 640, 64);
    generate(fixture, "c", "large1", 640, 64);
    generate(fixture, "c", "large2", 640, 64);
    advance_ms(fixture, 2100);
    bool d = rank_of(fixture, "d")->load.hold_order != SL_HOLD_NONE;
    bool e = rank_of(fixture, "e")->load.hold_order != SL_HOLD_NONE;
    assert_true(d != e);
    generate(fixture, "c", "small", 64, 64);
    assert_int_equal(sent_count(fixture, d ? "e" : "d", SL_MSG_RESERVE), 2);
}

static void prefill_queue_limit_holds(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    rank_of(fixture, "p")->load.max_queued_tokens = 150;
    generate(fixture, "c", "a", 100, 5);
    generate(fixture, "c", "b", 100, 5);
    generate(fixture, "c", "s", 50, 5);
    assert_int_equal(sent_count(fixture, "p", SL_MSG_PREFILL), 2);
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    assert_int_equal(sent_count(fixture, "p", SL_MSG_PREFILL), 3);
    generate(fixture, "c", "long", 151, 5);
    assert_failed(fixture, "c", 0, "long", "limit", "expected at most 150");
}

/* Two prefill ranks, of which neither is the larger in everything. */
static void long_prompt_goes_where_its_pages_are(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    sl_message_t hello = hello_of(SL_POOL_PREFILL, 1, 0, 1, 55);
    hello.hello.pages_total = 4;
    say_hello(fixture, "small", hello);
    sl_registry_ready(fixture->registry, rank_of(fixture, "small"));
    for (size_t i = 0; i < 3; i++) {
        char id[2] = {(char)('a' + i), 0};
        generate(fixture, "c", id, 300, 5); /* 5 pages: the emptier rank has 4 */
    }
    assert_int_equal(sent_count(fixture, "p", SL_MSG_PREFILL), 3);
    assert_int_equal(sent_count(fixture, "small", SL_MSG_PREFILL), 0);
    generate(fixture, "c", "short", 256, 5);
    assert_int_equal(sent_count(fixture, "small", SL_MSG_PREFILL), 1);

    /* The pages of one and the queue of another make no room for a prompt. */
    rank_of(fixture, "p")->load.max_queued_tokens = 200;
    generate(fixture, "c", "long", 300, 5);
    assert_failed(fixture, "c", 0, "long", "limit", "expected at most the 4 of the largest");
}

static void lost_rank_fails_its_requests_and_frees_the_other_side(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    join(fixture, "e", SL_POOL_DECODE, 1);
    generate(fixture, "c", "a", 10, 5);
    generate(fixture, "c", "b", 10, 5);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_RESERVE), 1);
    uint64_t lost = sent_to(fixture, "d", SL_MSG_RESERVE, 0)->reserve.attempt;
    say_tokens(fixture, "p", lost, 0, 1, SL_FINISH_NONE);
    const sl_msg_goodbye_t on_purpose = {0};
    sl_registry_goodbye(fixture->registry, rank_of(fixture, "d"), &on_purpose, fixture->now_us);
    run_turn(fixture);
    assert_int_equal(counts(fixture).failed, 1);
    sl_message_t *failed = sent_to(fixture, "c", SL_MSG_FAILED, 0);
    assert_string_equal(failed->failed.code, "unreachable");
    assert_non_null(strstr(failed->failed.message, "decode/0/0"));
    assert_non_null(strstr(failed->failed.message, "goodbye"));
    assert_int_equal(failed->failed.seq, 1);
    assert_int_equal(sent_to(fixture, "p", SL_MSG_CANCEL_ATTEMPT, 0)->attempt.attempt, lost);
    assert_int_equal(counts(fixture).attempts, 2);
    say_released(fixture, "p", lost);
    assert_int_equal(counts(fixture).attempts, 1); /* the other one is not disturbed */
    assert_int_equal(counts(fixture).placed, 1);
}

static void reconnected_rank_starts_clean(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    uint64_t incarnation = rank_of(fixture, "d")->id.incarnation;
    generate(fixture, "c", "a", 10, 5);
    say_hello(fixture, "d2", hello_of(SL_POOL_DECODE, 0, 0, 1, incarnation));
    run_turn(fixture);
    assert_failed(fixture, "c", 0, "a", "unreachable", "lost its connection");
    assert_int_equal(sent_count(fixture, "d2", SL_MSG_CANCEL_ATTEMPT), 1);
    assert_account(fixture, "d2", 0, 0, 0);
    say_released(fixture, "p", 1000);
    say_released(fixture, "d2", 1000); /* its answer to the cancel: known no more */
    assert_all_free(fixture);
    generate(fixture, "c", "b", 10, 5);
    assert_int_equal(sent_count(fixture, "d2", SL_MSG_RESERVE), 1);
}

/* It has dropped tokens while it heard nothing; the next would show as a gap. */
static void rank_that_registers_again_starts_clean_on_its_old_connection_too(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    sl_rank_t *decode = rank_of(fixture, "d");
    sl_message_t hello = hello_of(SL_POOL_DECODE, 0, 0, 1, decode->id.incarnation);
    sl_msg_heartbeat_t beat = {.sequence = 1};
    generate(fixture, "c", "a", 10, 5);
    say_hello(fixture, "d", hello); /* sent before its welcome came: nothing is lost */
    assert_int_equal(sent_count(fixture, "c", SL_MSG_FAILED), 0);
    sl_registry_heartbeat(fixture->registry, decode, &beat, fixture->now_us);
    say_hello(fixture, "d", hello);
    assert_failed(fixture, "c", 0, "a", "unreachable", "acknowledged within its lease");
    assert_int_equal(sent_count(fixture, "d", SL_MSG_CANCEL_ATTEMPT), 1);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_WELCOME), 2);
    say_released(fixture, "p", 1000);
    say_released(fixture, "d", 1000);
    assert_all_free(fixture);
    generate(fixture, "c", "b", 10, 5);
    say_hello(fixture, "d", hello); /* of those it sent while the router did not read */
    assert_int_equal(sent_count(fixture, "c", SL_MSG_FAILED), 1);
    assert_account(fixture, "d", 1, 1, 0);
}

static void unknown_attempt_is_told_to_stop(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    say_tokens(fixture, "d", 77, 3, 1, SL_FINISH_NONE);
    assert_int_equal(sent_to(fixture, "d", SL_MSG_CANCEL_ATTEMPT, 0)->attempt.attempt, 77);
    say_released(fixture, "d", 77);
    say_no_pages(fixture, "d", 77);
    assert_all_free(fixture);
}

static void requests_wait_for_the_pools_but_not_for_ever(void **state)
{
    fixture_t *fixture = *state;
    generate(fixture, "c", "a", 10, 5);
    advance_ms(fixture, 20000);
    assert_int_equal(counts(fixture).waiting, 1);
    join(fixture, "p", SL_POOL_PREFILL, 0);
    advance_ms(fixture, 10100);
    assert_failed(fixture, "c", 0, "a", "unreachable", "no ready decode group");

    generate(fixture, "c", "b", 10, 5);
    join(fixture, "d", SL_POOL_DECODE, 0);
    run_turn(fixture);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_RESERVE), 1);
}

static void request_from_before_the_cluster_is_checked_when_it_comes(void **state)
{
    fixture_t *fixture = *state;
    generate(fixture, "c", "a", 10, 5000);
    assert_int_equal(counts(fixture).waiting, 1);
    join(fixture, "p", SL_POOL_PREFILL, 0);
    join(fixture, "d", SL_POOL_DECODE, 0);
    run_turn(fixture);
    assert_failed(fixture, "c", 0, "a", "limit", "max_model_len");

    generate(fixture, "c", "b", 10, 1500); /* 24 pages, the rank has 20 */
    assert_failed(fixture, "c", 1, "b", "limit", "the 20 of the largest decode rank");
    assert_int_equal(counts(fixture).refused, 1);
    assert_all_free(fixture);
}

static void limits_refuse_and_disturb_nobody(void **state)
{
    fixture_t *fixture = *state;
    char id[16];
    for (int i = 0; i < 9; i++) {
        snprintf(id, sizeof(id), "r%d", i);
        generate(fixture, "c", id, 10, 5);
    }
    assert_failed(fixture, "c", 0, "r8", "limit", "8 requests are waiting");
    cancel(fixture, "c", "r0");
    generate(fixture, "c", "long", 3999, 5);
    assert_failed(fixture, "c", 2, "long", "limit", "--max-waiting-tokens");
    generate(fixture, "c", "r1", 10, 5); /* in use: the error does not end r1's stream */
    assert_failed(fixture, "c", 3, "", "invalid", "\"r1\" is in use");
    assert_int_equal(counts(fixture).waiting, 7);

    cancel(fixture, "c", "r1");
    generate(fixture, "c2", "r2", 10, 5); /* the same id of another client is another request */
    assert_int_equal(counts(fixture).waiting, 7);
    cancel(fixture, "c", "r3");
    cancel(fixture, "c", "r4");
    generate(fixture, "c3", "a", 10, 5);
    generate(fixture, "c4", "a", 10, 5);
    assert_failed(fixture, "c4", 0, "a", "limit", "3 clients have requests");
}

static void vanished_client_is_canceled(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    generate(fixture, "c", "a", 10, 5);
    generate(fixture, "c", "b", 10, 5);
    generate(fixture, "other", "a", 10, 5);
    unplug(fixture, "c");
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    assert_int_equal(counts(fixture).canceled, 2);
    assert_int_equal(counts(fixture).clients, 1);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_CANCEL_ATTEMPT), 2);
    for (uint64_t attempt = 1000; attempt < 1002; attempt++) {
        say_released(fixture, "p", attempt);
        say_released(fixture, "d", attempt);
    }
    assert_int_equal(counts(fixture).attempts, 1);
    assert_int_equal(counts(fixture).placed, 1);
}

static void silent_attempt_is_given_up(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    generate(fixture, "c", "a", 10, 5);
    advance_ms(fixture, 599000);
    assert_int_equal(counts(fixture).placed, 1);
    advance_ms(fixture, 1100);
    assert_failed(fixture, "c", 0, "a", "timeout", "attempt 1000");
    assert_int_equal(sent_count(fixture, "d", SL_MSG_CANCEL_ATTEMPT), 1);
    assert_account(fixture, "d", 1, 1, 0); /* never given back on a timer */
}

static void queue_has_a_deadline(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    rank_of(fixture, "d")->load.max_running = 1;
    generate(fixture, "c", "a", 10, 5);
    say_tokens(fixture, "p", 1000, 0, 1, SL_FINISH_NONE);
    generate(fixture, "c", "b", 10, 5);
    for (uint32_t i = 1; i < 4; i++) {
        advance_ms(fixture, 200100);
        say_tokens(fixture, "d", 1000, i, 1, SL_FINISH_NONE);
    }
    assert_failed(fixture, "c", 0, "b", "deadline", "--queue-timeout-ms");
    assert_int_equal(counts(fixture).placed, 1);
}

static void stop_tells_everybody(void **state)
{
    fixture_t *fixture = *state;
    join_both(fixture);
    rank_of(fixture, "d")->load.max_running = 1;
    generate(fixture, "c", "a", 10, 5);
    generate(fixture, "c", "b", 10, 5);
    sl_requests_stop(fixture->requests, "the router is stopping");
    assert_int_equal(sent_count(fixture, "c", SL_MSG_FAILED), 2);
    assert_int_equal(sent_count(fixture, "p", SL_MSG_CANCEL_ATTEMPT), 1);
    assert_int_equal(sent_count(fixture, "d", SL_MSG_CANCEL_ATTEMPT), 1);
}

/* Many requests over two ranks a side with random events: whatever happens, every request ends
 * exactly once and every account returns to nothing. */
static void any_order_of_events_ends_in_nothing_held(void **state)
{
    fixture_t *fixture = *state;
    static const char *const names[] = {"p", "q", "d", "e"};
    join(fixture, "p", SL_POOL_PREFILL, 0);
    join(fixture, "q", SL_POOL_PREFILL, 1);
    join(fixture, "d", SL_POOL_DECODE, 0);
    join(fixture, "e", SL_POOL_DECODE, 1);
    uint32_t random = 12345;
    for (int round = 0; round < 300; round++) {
        char id[16];
        snprintf(id, sizeof(id), "r%d", round);
        forget_sent(fixture);
        random = random * 1664525u + 1013904223u;
        generate(fixture, "c", id, 1 + (random >> 8) % 600, 3);
        sl_message_t *prefill = sent_to(fixture, NULL, SL_MSG_PREFILL, 0);
        assert_non_null(prefill);
        uint64_t attempt = prefill->prefill.attempt;
        const char *p = sent_count(fixture, names[0], SL_MSG_PREFILL) > 0 ? names[0] : names[1];
        const char *d = sent_count(fixture, names[2], SL_MSG_RESERVE) > 0 ? names[2] : names[3];
        uint32_t step = (random >> 20) % 6;
        if (step == 0) {
            cancel(fixture, "c", id);
        }
        say_tokens(fixture, p, attempt, 0, 1, step == 1 ? SL_FINISH_STOP : SL_FINISH_NONE);
        if (step == 2) {
            cancel(fixture, "c", id);
        }
        if (step > 1) {
            say_tokens(fixture, d, attempt, 1, 1, step == 3 ? SL_FINISH_STOP : SL_FINISH_NONE);
        }
        if (step > 3) {
            say_tokens(fixture, d, attempt, 2, 1, SL_FINISH_LENGTH);
        }
        say_released(fixture, step % 2 ? p : d, attempt);
        say_released(fixture, step % 2 ? d : p, attempt);
        assert_all_free(fixture);
    }
    for (int i = 0; i < 4; i++) {
        assert_account(fixture, names[i], 0, 0, 0);
    }
    sl_requests_counts_t now = counts(fixture);
    assert_int_equal(now.finished + now.canceled, 300);
    assert_int_equal(now.failed, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(request_runs_to_its_end),
        TEST(early_decode_tokens_wait_for_the_first),
        TEST(first_token_may_be_the_last),
        TEST(release_without_a_finish_fails_the_request),
        TEST(gap_or_repeat_fails_the_request),
        TEST(more_than_max_tokens_fails_the_request),
        TEST(prompt_logprobs_come_in_order_before_the_first_token),
        TEST(rank_error_reaches_the_client_and_the_other_side),
        TEST(cancel_works_in_every_state),
        TEST(no_pages_tries_again_elsewhere_under_a_new_attempt),
        TEST(refused_request_keeps_its_position),
        TEST(small_requests_pass_a_large_one),
        TEST(starving_request_gets_a_rank_held),
        TEST(held_rank_is_let_go_with_its_holder),
        TEST(half_of_a_pool_is_never_held),
        TEST(prefill_queue_limit_holds),
        TEST(long_prompt_goes_where_its_pages_are),
        TEST(lost_rank_fails_its_requests_and_frees_the_other_side),
        TEST(reconnected_rank_starts_clean),
        TEST(rank_that_registers_again_starts_clean_on_its_old_connection_too),
        TEST(unknown_attempt_is_told_to_stop),
        TEST(requests_wait_for_the_pools_but_not_for_ever),
        TEST(request_from_before_the_cluster_is_checked_when_it_comes),
        TEST(limits_refuse_and_disturb_nobody),
        TEST(vanished_client_is_canceled),
        TEST(silent_attempt_is_given_up),
        TEST(queue_has_a_deadline),
        TEST(stop_tells_everybody),
        TEST(any_order_of_events_ends_in_nothing_held),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
