/* Round trips: every message type survives encoding, decoding and copying, field by field. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>
#include <msgpack.h>

#include "tests/unit/wire/samples.h"

static sl_bytes_t encode(const sl_message_t *message)
{
    sl_bytes_t frame;
    assert_int_equal(sl_message_encode(message, &frame), SL_OK);
    return frame;
}

static sl_message_t decode(sl_bytes_t frame)
{
    sl_message_t message;
    if (sl_message_decode(frame.data, frame.size, &sl_wire_limits_default, &message) != SL_OK) {
        fail_msg("did not decode: %s", sl_error_text());
    }
    return message;
}

static void assert_same_frame(const sl_message_t *message, sl_bytes_t frame)
{
    sl_bytes_t again = encode(message);
    assert_int_equal(again.size, frame.size);
    assert_memory_equal(again.data, frame.data, frame.size);
    free(again.data);
}

static void round_trip(sl_message_type_t type, bool client)
{
    sl_message_t message = sample_message(type, client);
    sl_bytes_t frame = encode(&message);
    sl_message_t decoded = decode(frame);
    sl_message_t copy;
    assert_int_equal(decoded.type, type);
    assert_same_frame(&decoded, frame);
    assert_int_equal(sl_message_copy(&decoded, &copy), SL_OK);
    sl_message_destroy(&decoded);
    assert_same_frame(&copy, frame);
    sl_message_destroy(&copy);
    free(frame.data);
}

static void test_every_type_survives(void **state)
{
    (void)state;
    for (int type = 0; type < SL_MSG_TYPE_COUNT; type++) {
        round_trip((sl_message_type_t)type, true);
        round_trip((sl_message_type_t)type, false);
    }
}

/* Same bytes again prove only that both directions agree; these look at the values. */
static void test_generate_fields(void **state)
{
    (void)state;
    sl_message_t message = sample_message(SL_MSG_GENERATE, true);
    sl_bytes_t frame = encode(&message);
    sl_message_t got = decode(frame);
    assert_string_equal(got.generate.id, "request-1");
    assert_int_equal(got.generate.token_count, SAMPLE_ID_COUNT);
    assert_memory_equal(got.generate.tokens, sample_ids, sizeof(sample_ids));
    sl_sampling_t want = sample_sampling(), *have = &got.generate.sampling;
    assert_true(have->temperature == want.temperature && have->top_p == want.top_p);
    assert_true(have->min_p == want.min_p && have->top_k == want.top_k);
    assert_true(got.generate.has_seed && have->seed == UINT64_MAX);
    assert_int_equal(have->max_tokens, 300);
    assert_int_equal(have->min_tokens, 2);
    assert_int_equal(have->stop_count, SL_STOP_TOKENS_MAX);
    assert_memory_equal(have->stop_token_ids, want.stop_token_ids, sizeof(want.stop_token_ids));
    assert_true(have->ignore_eos && have->logprobs == 20 && have->prompt_logprobs == 0);
    sl_message_destroy(&got);
    free(frame.data);
}

static void check_logprobs(const sl_logprobs_t *got, size_t count)
{
    assert_int_equal(count, SAMPLE_ID_COUNT);
    for (size_t i = 0; i < count; i++) {
        const sl_logprobs_t *want = &sample_logprobs[i];
        assert_true(i == 0 ? isnan(got[i].logprob) : got[i].logprob == want->logprob);
        assert_int_equal(got[i].top_count, want->top_count);
        for (uint32_t k = 0; k < want->top_count; k++) {
            assert_int_equal(got[i].top_ids[k], want->top_ids[k]);
            assert_true(got[i].top_logprobs[k] == want->top_logprobs[k]);
        }
    }
}

static void test_logprobs_fields(void **state)
{
    (void)state;
    sl_message_t message = sample_message(SL_MSG_TOKENS, false);
    sl_bytes_t frame = encode(&message);
    sl_message_t got = decode(frame);
    assert_string_equal(got.tokens.id, "");
    assert_true(got.tokens.attempt == 42 && got.tokens.index == 9 && got.tokens.seq == 0);
    assert_int_equal(got.tokens.finish, SL_FINISH_LENGTH);
    check_logprobs(got.tokens.logprobs, got.tokens.token_count);
    sl_message_destroy(&got);
    free(frame.data);

    message = sample_message(SL_MSG_PROMPT_LOGPROBS, true);
    frame = encode(&message);
    got = decode(frame);
    assert_string_equal(got.prompt_logprobs.id, "request-1");
    assert_true(got.prompt_logprobs.attempt == 0 && got.prompt_logprobs.seq == 4);
    check_logprobs(got.prompt_logprobs.entries, got.prompt_logprobs.entry_count);
    sl_message_destroy(&got);
    free(frame.data);
}

static void test_group_and_status_fields(void **state)
{
    (void)state;
    sl_message_t message = sample_message(SL_MSG_GROUP, true);
    sl_bytes_t frame = encode(&message);
    sl_message_t got = decode(frame);
    assert_int_equal(got.group.rank_count, 2);
    assert_true(got.group.incarnations[1] == UINT64_MAX);
    assert_int_equal(got.group.addresses[0].size, 4);
    assert_memory_equal(got.group.addresses[0].data, sample_blob, 4);
    assert_int_equal(got.group.addresses[1].size, 0);
    assert_int_equal(got.group.pages, 80);
    sl_message_destroy(&got);
    free(frame.data);

    message = sample_message(SL_MSG_STATUS_REPLY, true);
    frame = encode(&message);
    got = decode(frame);
    assert_int_equal(got.status_reply.rank_count, 2);
    for (int i = 0; i < 2; i++) {
        const sl_rank_status_t *rank = &got.status_reply.ranks[i];
        assert_true(sl_rank_same(&rank->rank, &sample_ranks[i].rank));
        assert_string_equal(rank->state, sample_ranks[i].state);
        assert_true(rank->pages_free == 900u + (unsigned)i && rank->heartbeat_age_ms == 8);
    }
    sl_message_destroy(&got);
    free(frame.data);
}

/* ---- what others must find in the bytes ---- */

static bool frame_has_key(sl_bytes_t frame, const char *name)
{
    msgpack_unpacked unpacked;
    size_t at = 0;
    bool found = false;
    msgpack_unpacked_init(&unpacked);
    assert_int_equal(msgpack_unpack_next(&unpacked, (const char *)frame.data, frame.size, &at),
                     MSGPACK_UNPACK_SUCCESS);
    for (uint32_t i = 0; i < unpacked.data.via.map.size; i++) {
        const msgpack_object_str *key = &unpacked.data.via.map.ptr[i].key.via.str;
        found = found || (key->size == strlen(name) && memcmp(key->ptr, name, key->size) == 0);
    }
    msgpack_unpacked_destroy(&unpacked);
    return found;
}

static void test_each_form_has_its_keys(void **state)
{
    (void)state;
    for (int client = 0; client < 2; client++) {
        sl_message_t message = sample_message(SL_MSG_TOKENS, client);
        message.tokens.logprobs = NULL;
        sl_bytes_t frame = encode(&message);
        assert_int_equal(frame_has_key(frame, "id"), client);
        assert_int_equal(frame_has_key(frame, "seq"), client);
        assert_int_equal(frame_has_key(frame, "attempt"), !client);
        assert_true(frame_has_key(frame, "finish_reason"));
        assert_false(frame_has_key(frame, "logprobs"));
        free(frame.data);
    }
    sl_message_t message = sample_message(SL_MSG_GENERATE, true);
    message.generate.has_seed = false;
    sl_bytes_t frame = encode(&message);
    assert_false(frame_has_key(frame, "seed"));
    free(frame.data);
}

static void test_generate_defaults(void **state)
{
    (void)state;
    static const uint8_t bytes[] = "\x84\xa1v\x02\xa4type\xa8generate\xa2id\xa1"
                                   "a\xa6tokens\x91\x05";
    sl_message_t got = decode((sl_bytes_t){(uint8_t *)bytes, sizeof(bytes) - 1});
    const sl_sampling_t *sampling = &got.generate.sampling;
    assert_true(sampling->temperature == 1.0f && sampling->top_p == 1.0f && sampling->min_p == 0);
    assert_true(sampling->top_k == 0 && sampling->max_tokens == 16 && sampling->min_tokens == 0);
    assert_true(sampling->logprobs == -1 && sampling->prompt_logprobs == -1);
    assert_true(sampling->stop_count == 0 && !sampling->ignore_eos && !got.generate.has_seed);
    sl_message_destroy(&got);
}

/* A text cut within a character at its buffer's end still arrives, without the half character. */
static void test_cut_text_stays_utf8(void **state)
{
    (void)state;
    sl_message_t message = {.type = SL_MSG_GROUP_FAILED};
    memset(message.group_failed.message, 'a', SL_TEXT_BYTES - 1);
    message.group_failed.message[SL_TEXT_BYTES - 2] = '\xc3';
    sl_bytes_t frame = encode(&message);
    sl_message_t got = decode(frame);
    assert_int_equal(strlen(got.group_failed.message), SL_TEXT_BYTES - 2);
    sl_message_destroy(&got);
    free(frame.data);
}

static void test_rank_names(void **state)
{
    (void)state;
    char name[32];
    sl_rank_id_t a = sample_rank(SL_POOL_DECODE), b = a;
    assert_string_equal(sl_rank_name(&a, name), "decode/3/1");
    assert_true(sl_rank_same(&a, &b));
    b.incarnation++;
    assert_false(sl_rank_same(&a, &b));
    assert_string_equal(sl_message_type_name(SL_MSG_CANCEL_ATTEMPT), "cancel_attempt");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_type_survives),
        cmocka_unit_test(test_generate_fields),
        cmocka_unit_test(test_logprobs_fields),
        cmocka_unit_test(test_group_and_status_fields),
        cmocka_unit_test(test_each_form_has_its_keys),
        cmocka_unit_test(test_generate_defaults),
        cmocka_unit_test(test_cut_text_stays_utf8),
        cmocka_unit_test(test_rank_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
