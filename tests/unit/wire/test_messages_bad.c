/* Bad input: each ends in its own clear text, nothing leaks and nothing is written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>
#include <msgpack.h>

#include "tests/unit/wire/samples.h"

/* The status and the text of a frame that must not decode. */
static void expect_bytes(const void *data, size_t size, sl_status_t status, const char *text)
{
    sl_message_t message;
    memset(&message, 0xa5, sizeof(message));
    sl_message_t before = message;
    /* An exact heap block, so that a sanitizer sees any read past its end. */
    uint8_t *exact = malloc(size > 0 ? size : 1);
    memcpy(exact, data, size);
    sl_status_t got = sl_message_decode(exact, size, &sl_wire_limits_default, &message);
    free(exact);
    if (got != status || strstr(sl_error_text(), text) == NULL) {
        fail_msg("expected %d \"%s\", found %d \"%s\"", status, text, got,
                 got == SL_OK ? "" : sl_error_text());
    }
    assert_memory_equal(&message, &before, sizeof(message));
}
#define EXPECT_BYTES(literal, status, text)                                                        \
    expect_bytes((literal), sizeof(literal) - 1, (status), (text))

static void test_not_msgpack(void **state)
{
    (void)state;
    EXPECT_BYTES("", SL_ERR_INVALID, "not complete");
    EXPECT_BYTES("\xc1", SL_ERR_INVALID, "0xc1");
    EXPECT_BYTES("GET / HTTP/1.1\r\n", SL_ERR_INVALID, "trailing bytes");
    EXPECT_BYTES("\x01", SL_ERR_INVALID, "message: expected a map, found 1");
    EXPECT_BYTES("\x90", SL_ERR_INVALID, "message: expected a map, found an array of 0");
    EXPECT_BYTES("\x81\xa1v", SL_ERR_INVALID, "a value is missing at byte 3");
    EXPECT_BYTES("\xd9", SL_ERR_INVALID, "a length is missing");
    EXPECT_BYTES("\xda\x00\x05"
                 "abcd",
                 SL_ERR_INVALID, "does not fit the 4 bytes left");
    EXPECT_BYTES("\xcb\x00\x00", SL_ERR_INVALID, "does not fit");
    EXPECT_BYTES("\xc7\x00\x01", SL_ERR_INVALID, "extension");
}

static void test_counts_that_do_not_fit(void **state)
{
    (void)state;
    EXPECT_BYTES("\xdd\xff\x00\x00\x00", SL_ERR_INVALID, "an array of 4278190080");
    EXPECT_BYTES("\xdf\xff\xff\xff\xff", SL_ERR_INVALID, "a map of 4294967295");
    EXPECT_BYTES("\xc6\xff\x00\x00\x00", SL_ERR_INVALID, "a value of 4278190080 bytes");
    /* Each header alone fits the bytes left; together they claim them three times. */
    EXPECT_BYTES("\x93\x93\x93\x93\x01\x02\x03", SL_ERR_INVALID, "does not fit");
}

static void test_too_deep(void **state)
{
    (void)state;
    EXPECT_BYTES("\x91\x91\x91\x91\x91\x91\x91\x01", SL_ERR_LIMIT, "at most 6 levels");
    EXPECT_BYTES("\x91\x91\x91\x91\x91\x91\x01", SL_ERR_INVALID, "expected a map");
    uint8_t deep[10000];
    memset(deep, 0x91, sizeof(deep));
    expect_bytes(deep, sizeof(deep), SL_ERR_LIMIT, "at most 6 levels");
}

static void test_too_large(void **state)
{
    (void)state;
    sl_wire_limits_t limits = {.message_bytes = 16, .depth = 6, .array_items = 3, .map_items = 2};
    uint8_t bytes[17] = {0xdc, 0, 14};
    sl_message_t message;
    assert_int_equal(sl_message_decode(bytes, 17, &limits, &message), SL_ERR_LIMIT);
    assert_string_equal(sl_error_text(), "message: expected at most 16 bytes, found 17");
    assert_int_equal(sl_message_decode((const uint8_t *)"\x94\1\1\1\1", 5, &limits, &message),
                     SL_ERR_LIMIT);
    assert_non_null(strstr(sl_error_text(), "at most 3 items in an array, found 4"));
    assert_int_equal(sl_message_decode((const uint8_t *)"\x83\1\1\1\1\1\1", 7, &limits, &message),
                     SL_ERR_LIMIT);
    assert_non_null(strstr(sl_error_text(), "at most 2 items in a map, found 3"));
    assert_int_equal(
        sl_message_decode((const uint8_t *)"\x93\x92\1\1\x92\1\1\1", 8, &limits, &message),
        SL_ERR_LIMIT);
    assert_non_null(strstr(sl_error_text(), "at most 6 values in all"));
}

/* ---- frames that are msgpack: a good message with one thing changed ---- */

typedef struct {
    msgpack_sbuffer buffer;
    msgpack_packer packer;
} frame_t;

static void put_key(frame_t *frame, const char *key)
{
    msgpack_pack_str(&frame->packer, strlen(key));
    msgpack_pack_str_body(&frame->packer, key, strlen(key));
}

/* Opens a map of `extra` entries behind version and type. */
static void frame_begin(frame_t *frame, const char *type, uint32_t extra)
{
    msgpack_sbuffer_init(&frame->buffer);
    msgpack_packer_init(&frame->packer, &frame->buffer, msgpack_sbuffer_write);
    msgpack_pack_map(&frame->packer, 2 + extra);
    put_key(frame, "v");
    msgpack_pack_int(&frame->packer, SL_PROTOCOL_VERSION);
    put_key(frame, "type");
    put_key(frame, type);
}

/* A generate that is good so far, with room for one more entry. */
static void generate_begin(frame_t *frame)
{
    frame_begin(frame, "generate", 3);
    put_key(frame, "id");
    put_key(frame, "a");
    put_key(frame, "tokens");
    msgpack_pack_array(&frame->packer, 1);
    msgpack_pack_int(&frame->packer, 5);
}

static void frame_expect(frame_t *frame, sl_status_t status, const char *text)
{
    expect_bytes(frame->buffer.data, frame->buffer.size, status, text);
    msgpack_sbuffer_destroy(&frame->buffer);
}

static void expect_double(const char *key, double value, const char *text)
{
    frame_t frame;
    generate_begin(&frame);
    put_key(&frame, key);
    msgpack_pack_double(&frame.packer, value);
    frame_expect(&frame, SL_ERR_INVALID, text);
}

static void expect_int(const char *key, int64_t value, sl_status_t status, const char *text)
{
    frame_t frame;
    generate_begin(&frame);
    put_key(&frame, key);
    msgpack_pack_int64(&frame.packer, value);
    frame_expect(&frame, status, text);
}

static void expect_array(const char *key, uint32_t count, int64_t item, sl_status_t status,
                         const char *text)
{
    frame_t frame;
    generate_begin(&frame);
    put_key(&frame, key);
    msgpack_pack_array(&frame.packer, count);
    for (uint32_t i = 0; i < count; i++) {
        msgpack_pack_int64(&frame.packer, item);
    }
    frame_expect(&frame, status, text);
}

static void test_versions_and_types(void **state)
{
    (void)state;
    EXPECT_BYTES("\x80", SL_ERR_INVALID, "v: missing");
    EXPECT_BYTES("\x81\xa1v\x01", SL_ERR_INVALID, "v: expected protocol version 2, found 1");
    EXPECT_BYTES("\x81\xa1v\xa1"
                 "2",
                 SL_ERR_INVALID, "v: expected protocol version 2, found \"2\"");
    EXPECT_BYTES("\x81\xa1v\x02", SL_ERR_INVALID, "type: missing");
    EXPECT_BYTES("\x82\xa1v\x02\xa4type\x07", SL_ERR_INVALID, "a known message type, found 7");
    frame_t frame;
    frame_begin(&frame, "generat", 0);
    frame_expect(&frame, SL_ERR_INVALID, "type: expected a known message type, found \"generat\"");
    frame_begin(&frame, "x\n\"\xff", 0);
    frame_expect(&frame, SL_ERR_INVALID, "found \"x\\x0a\\x22\\xff\"");
}

static void test_keys(void **state)
{
    (void)state;
    frame_t frame;
    expect_int("temprature", 1, SL_ERR_INVALID, "generate: unknown key \"temprature\"");
    expect_int("id", 1, SL_ERR_INVALID, "generate: repeated key \"id\"");
    generate_begin(&frame);
    msgpack_pack_int(&frame.packer, 3);
    msgpack_pack_int(&frame.packer, 3);
    frame_expect(&frame, SL_ERR_INVALID, "generate: expected string keys, found 3");
    frame_begin(&frame, "generate", 0);
    frame_expect(&frame, SL_ERR_INVALID, "generate.id: missing");
    frame_begin(&frame, "cancel", 1);
    put_key(&frame, "id");
    put_key(&frame, "");
    frame_expect(&frame, SL_ERR_INVALID, "cancel.id: expected a string that is not empty");
    frame_begin(&frame, "ready", 1);
    put_key(&frame, "attempt");
    msgpack_pack_int(&frame.packer, 3);
    frame_expect(&frame, SL_ERR_INVALID, "ready: unknown key \"attempt\"");
}

static void test_trailing_bytes(void **state)
{
    (void)state;
    sl_message_t message = sample_message(SL_MSG_CANCEL, true);
    sl_bytes_t frame;
    assert_int_equal(sl_message_encode(&message, &frame), SL_OK);
    uint8_t *longer = malloc(frame.size + 1);
    memcpy(longer, frame.data, frame.size);
    longer[frame.size] = 0xc0;
    expect_bytes(longer, frame.size + 1, SL_ERR_INVALID, "found 1 trailing bytes");
    free(longer);
    free(frame.data);
}

/* Every proper prefix of every message is refused. */
static void test_truncated(void **state)
{
    (void)state;
    for (int type = 0; type < SL_MSG_TYPE_COUNT; type++) {
        sl_message_t message = sample_message((sl_message_type_t)type, type % 2 == 0);
        sl_bytes_t frame;
        assert_int_equal(sl_message_encode(&message, &frame), SL_OK);
        for (size_t size = 0; size < frame.size; size++) {
            expect_bytes(frame.data, size, SL_ERR_INVALID, "message: ");
        }
        free(frame.data);
    }
}

static void test_sampling_numbers(void **state)
{
    (void)state;
    expect_double("temperature", NAN,
                  "generate.temperature: expected a finite number >= 0, found nan");
    expect_double("temperature", -NAN, "found nan");
    expect_double("temperature", INFINITY, "generate.temperature: expected a finite number >= 0");
    expect_double("temperature", -0.5, "found -0.5");
    expect_double("temperature", 1e300, "generate.temperature");
    expect_int("temperature", -1, SL_ERR_INVALID, "found -1");
    expect_double("top_p", 0.0, "generate.top_p: expected a number above 0 and at most 1, found 0");
    expect_double("top_p", 1e-300, "generate.top_p");
    expect_double("top_p", 1.5, "found 1.5");
    expect_double("top_p", NAN, "found nan");
    expect_double("min_p", -0.1, "generate.min_p: expected a number from 0 to 1, found -0.1");
    expect_double("min_p", 1.1, "found 1.1");
    expect_double("max_tokens", 4.0, "generate.max_tokens: expected an integer from 1 to");
    expect_int("max_tokens", 0, SL_ERR_INVALID,
               "generate.max_tokens: expected an integer from 1 "
               "to 4294967295, found 0");
    expect_int("max_tokens", 1ll << 32, SL_ERR_LIMIT, "found 4294967296");
    expect_int("min_tokens", -1, SL_ERR_INVALID, "generate.min_tokens");
    expect_int("top_k", -1, SL_ERR_INVALID, "generate.top_k: expected an integer from 0");
    expect_int("seed", -1, SL_ERR_INVALID, "generate.seed: expected an integer from 0");
    expect_int("logprobs", 21, SL_ERR_LIMIT,
               "generate.logprobs: expected an integer from -1 to 20,"
               " found 21");
    expect_int("prompt_logprobs", -2, SL_ERR_INVALID, "found -2");
    expect_int("ignore_eos", 1, SL_ERR_INVALID, "generate.ignore_eos: expected true or false");
    expect_array("temperature", 1, 1, SL_ERR_INVALID, "found an array of 1");
}

static void test_token_arrays(void **state)
{
    (void)state;
    frame_t frame;
    expect_array("stop_token_ids", 65, 1, SL_ERR_LIMIT,
                 "generate.stop_token_ids: expected an array"
                 " of at most 64 token ids, found an array of 65");
    expect_array("stop_token_ids", 2, -1, SL_ERR_INVALID,
                 "generate.stop_token_ids[0]: expected a "
                 "token id");
    expect_int("stop_token_ids", 3, SL_ERR_INVALID, "generate.stop_token_ids");
    for (uint32_t count = 0; count < 2; count++) {
        frame_begin(&frame, "generate", 2);
        put_key(&frame, "id");
        put_key(&frame, "a");
        put_key(&frame, "tokens");
        msgpack_pack_array(&frame.packer, count);
        if (count > 0) {
            msgpack_pack_uint64(&frame.packer, 1ull << 31);
        }
        frame_expect(
            &frame, SL_ERR_INVALID,
            count == 0 ? "generate.tokens: expected an array that is not empty, found an array of 0"
                       : "generate.tokens[0]: expected a token id from 0 to 2147483647");
    }
}

static void test_texts(void **state)
{
    (void)state;
    char longest[SL_REQUEST_ID_BYTES + 1];
    memset(longest, 'i', sizeof(longest));
    longest[SL_REQUEST_ID_BYTES] = 0;
    frame_t frame;
    const struct {
        const char *id, *text;
        sl_status_t status;
    } cases[] = {
        {longest, "cancel.id: expected at most 63 bytes", SL_ERR_LIMIT},
        {"a\xff", "cancel.id: expected UTF-8", SL_ERR_INVALID},
        {"\xc0\xaf", "cancel.id: expected UTF-8", SL_ERR_INVALID},
        {"\xed\xa0\x80", "cancel.id: expected UTF-8", SL_ERR_INVALID},
        {"\xf4\x90\x80\x80", "cancel.id: expected UTF-8", SL_ERR_INVALID},
        {"\xe2\x82", "cancel.id: expected UTF-8", SL_ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        frame_begin(&frame, "cancel", 1);
        put_key(&frame, "id");
        put_key(&frame, cases[i].id);
        frame_expect(&frame, cases[i].status, cases[i].text);
    }
    EXPECT_BYTES("\x83\xa1v\x02\xa4type\xa6"
                 "cancel\xa2id\xa2"
                 "a\0",
                 SL_ERR_INVALID, "zero bytes");
}

static void put_rank(frame_t *frame, const char *pool)
{
    msgpack_pack_map(&frame->packer, 2);
    put_key(frame, "pool");
    put_key(frame, pool);
    put_key(frame, "group");
    msgpack_pack_int(&frame->packer, 0);
}

static void test_nested(void **state)
{
    (void)state;
    frame_t frame;
    frame_begin(&frame, "hello", 1);
    put_key(&frame, "rank");
    put_rank(&frame, "train");
    frame_expect(&frame, SL_ERR_INVALID,
                 "hello.rank.pool: expected one of \"prefill\", \"decode\","
                 " found \"train\"");
    frame_begin(&frame, "hello", 1);
    put_key(&frame, "rank");
    put_rank(&frame, "decode");
    frame_expect(&frame, SL_ERR_INVALID, "hello.rank.rank: missing");
    frame_begin(&frame, "hello", 1);
    put_key(&frame, "rank");
    msgpack_pack_nil(&frame.packer);
    frame_expect(&frame, SL_ERR_INVALID, "hello.rank: expected a map, found nil");
    frame_begin(&frame, "group", 2);
    put_key(&frame, "addresses");
    msgpack_pack_array(&frame.packer, 0);
    put_key(&frame, "incarnations");
    msgpack_pack_array(&frame.packer, 1);
    msgpack_pack_int(&frame.packer, 3);
    frame_expect(&frame, SL_ERR_INVALID, "group.addresses: expected an array of 1, one for each");
}

static void test_logprobs(void **state)
{
    (void)state;
    frame_t frame;
    for (int bad = 0; bad < 4; bad++) {
        frame_begin(&frame, "prompt_logprobs", 3);
        put_key(&frame, "attempt");
        msgpack_pack_int(&frame.packer, 1);
        put_key(&frame, "index");
        msgpack_pack_int(&frame.packer, 0);
        put_key(&frame, "entries");
        msgpack_pack_array(&frame.packer, 1);
        msgpack_pack_array(&frame.packer, bad == 0 ? 1 : 2);
        msgpack_pack_double(&frame.packer, bad == 1 ? INFINITY : -1.0);
        if (bad == 1) {
            msgpack_pack_array(&frame.packer, 0);
        } else if (bad > 1) {
            uint32_t tops = bad == 2 ? 21 : 1;
            msgpack_pack_array(&frame.packer, tops);
            for (uint32_t i = 0; i < tops; i++) {
                msgpack_pack_array(&frame.packer, 1);
                msgpack_pack_int(&frame.packer, 1);
            }
        }
        static const char *const texts[] = {
            "prompt_logprobs.entries[0]: expected [logprob, [[id, logprob], ...]]",
            "prompt_logprobs.entries[0][0]: expected a finite number or nil, found inf",
            "prompt_logprobs.entries[0][1]: expected at most 20 alternatives, found an array of 21",
            "prompt_logprobs.entries[0][1][0]: expected [id, logprob], found an array of 1",
        };
        frame_expect(&frame, bad == 2 ? SL_ERR_LIMIT : SL_ERR_INVALID, texts[bad]);
    }
}

static void test_good_edges(void **state)
{
    (void)state;
    sl_message_t message;
    frame_t frame;
    frame_begin(&frame, "generate", 6);
    put_key(&frame, "temperature"); /* integers are numbers too */
    msgpack_pack_int(&frame.packer, 0);
    put_key(&frame, "seed"); /* nil is absent */
    msgpack_pack_nil(&frame.packer);
    put_key(&frame, "top_p");
    msgpack_pack_double(&frame.packer, 1.0);
    put_key(&frame, "id");
    put_key(&frame, "\xf0\x9f\xa6\xa5");
    put_key(&frame, "tokens");
    msgpack_pack_array(&frame.packer, 1);
    msgpack_pack_int(&frame.packer, 0);
    put_key(&frame, "stop_token_ids");
    msgpack_pack_array(&frame.packer, 0);
    assert_int_equal(sl_message_decode((const uint8_t *)frame.buffer.data, frame.buffer.size,
                                       &sl_wire_limits_default, &message),
                     SL_OK);
    assert_true(message.generate.sampling.temperature == 0 && !message.generate.has_seed);
    sl_message_destroy(&message);
    msgpack_sbuffer_destroy(&frame.buffer);
}

static void expect_id(const void *data, size_t size, const char *want)
{
    char id[SL_REQUEST_ID_BYTES];
    sl_error(SL_ERR_INVALID, "kept");
    sl_message_peek_id(data, size, &sl_wire_limits_default, id);
    assert_string_equal(id, want);
    assert_string_equal(sl_error_text(), "kept");
}

static void test_peek_id(void **state)
{
    (void)state;
    static const char bad_later[] = "\x83\xa1v\x09\xa2id\xa3"
                                    "abc\xa1x\xdd\xff\x00\x00\x00";
    expect_id(bad_later, sizeof(bad_later) - 1, "abc");
    expect_id("\x81\xa2id\xd9\x01z", 7, "z");
    expect_id("\x81\xa2id\x05", 5, "");
    expect_id("\x81\xa2id\xa2"
              "a\xff",
              7, "");
    expect_id("\x81\xa2id\xa5"
              "ab",
              7, "");
    expect_id("\x82\xc1\x01\xa2id\xa1z", 8, "");
    expect_id("\xdd\xff\x00\x00\x00", 5, "");
    expect_id("\xdf\xff\xff\xff\xff", 5, "");
    expect_id("", 0, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_not_msgpack),
        cmocka_unit_test(test_counts_that_do_not_fit),
        cmocka_unit_test(test_too_deep),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_versions_and_types),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_trailing_bytes),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_sampling_numbers),
        cmocka_unit_test(test_token_arrays),
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_nested),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_good_edges),
        cmocka_unit_test(test_peek_id),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
