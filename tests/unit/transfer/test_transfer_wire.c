/* Bytes of addresses and messages: round trips, every truncation, every bit flipped, sizes and
 * counts that lie. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/transfer/transfer_wire.h"

static const uint8_t worker_address[] = {1, 2, 3, 4, 5, 250};
static const uint8_t rkey[] = {9, 8, 7};

static sl_transfer_blob_t sample_blob(void)
{
    return (sl_transfer_blob_t){
        .rank = {.pool = SL_POOL_DECODE, .group = 3, .rank = 2, .incarnation = 0xfedcba9876543210u},
        .layout_hash = 0x0123456789abcdefu,
        .pool_base = 0x7f0000001000u,
        .page_bytes = 61 * 4096,
        .layers = 61,
        .page_count = 1000,
        .worker_address = worker_address,
        .worker_address_bytes = sizeof(worker_address),
        .rkey = rkey,
        .rkey_bytes = sizeof(rkey),
    };
}

static void test_transfer_blob(void **state)
{
    (void)state;
    sl_transfer_blob_t blob = sample_blob(), found;
    sl_bytes_t bytes;
    assert_int_equal(sl_transfer_blob_encode(&blob, &bytes), SL_OK);
    assert_int_equal(sl_transfer_blob_parse(bytes.data, bytes.size, &found), SL_OK);
    assert_int_equal(found.rank.pool, SL_POOL_DECODE);
    assert_int_equal(found.rank.group, 3);
    assert_int_equal(found.rank.rank, 2);
    assert_true(found.rank.incarnation == blob.rank.incarnation);
    assert_true(found.layout_hash == blob.layout_hash);
    assert_true(found.pool_base == blob.pool_base && found.page_bytes == blob.page_bytes);
    assert_true(found.layers == 61 && found.page_count == 1000);
    assert_int_equal(found.worker_address_bytes, sizeof(worker_address));
    assert_memory_equal(found.worker_address, worker_address, sizeof(worker_address));
    assert_int_equal(found.rkey_bytes, sizeof(rkey));
    assert_memory_equal(found.rkey, rkey, sizeof(rkey));
    free(bytes.data);
}

static void test_pools_that_cannot_be(void **state)
{
    (void)state;
    sl_transfer_blob_t bad[7];
    for (size_t i = 0; i < 7; i++) {
        bad[i] = sample_blob();
    }
    bad[0].page_count = 0;
    bad[1].page_bytes = 0;
    bad[2].layers = 0;
    bad[3].page_bytes = 61 * 4096 + 1;                /* not whole layers */
    bad[4].page_bytes = (uint64_t)61 << 57;           /* pages * bytes wraps */
    bad[5].pool_base = UINT64_MAX - 61 * 4096000 + 1; /* the end wraps */
    bad[6].worker_address_bytes = 0;
    for (size_t i = 0; i < 7; i++) {
        sl_bytes_t bytes;
        sl_transfer_blob_t found;
        assert_int_equal(sl_transfer_blob_encode(&bad[i], &bytes), SL_OK);
        assert_int_equal(sl_transfer_blob_parse(bytes.data, bytes.size, &found), SL_ERR_INVALID);
        free(bytes.data);
    }
}

typedef sl_status_t (*parse_t)(const uint8_t *data, size_t size);

static sl_status_t parse_transfer_blob(const uint8_t *data, size_t size)
{
    sl_transfer_blob_t blob;
    return sl_transfer_blob_parse(data, size, &blob);
}

static sl_status_t parse_group_blob(const uint8_t *data, size_t size)
{
    sl_group_blob_t blob;
    return sl_group_blob_parse(data, size, &blob);
}

static sl_status_t parse_msg(const uint8_t *data, size_t size)
{
    sl_transfer_msg_t msg;
    return sl_transfer_msg_parse(data, size, &msg);
}

/* Exact allocations, so that the address sanitizer sees a byte read too many. */
static void refuse_damage(const sl_bytes_t *bytes, parse_t parse, bool checksummed)
{
    assert_int_equal(parse(bytes->data, bytes->size), SL_OK);
    for (size_t size = 0; size < bytes->size; size++) {
        uint8_t *cut = malloc(size + (size == 0));
        memcpy(cut, bytes->data, size);
        assert_int_equal(parse(cut, size), SL_ERR_INVALID);
        free(cut);
    }
    uint8_t *longer = calloc(1, bytes->size + 1);
    memcpy(longer, bytes->data, bytes->size);
    assert_int_equal(parse(longer, bytes->size + 1), SL_ERR_INVALID);
    free(longer);
    for (size_t bit = 0; checksummed && bit < bytes->size * 8; bit++) {
        bytes->data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_int_equal(parse(bytes->data, bytes->size), SL_ERR_INVALID);
        bytes->data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

static void test_damaged_addresses(void **state)
{
    (void)state;
    sl_transfer_blob_t blob = sample_blob();
    sl_bytes_t bytes;
    assert_int_equal(sl_transfer_blob_encode(&blob, &bytes), SL_OK);
    refuse_damage(&bytes, parse_transfer_blob, true);
    free(bytes.data);

    sl_group_blob_t group = {.rank = 1,
                             .size = 4,
                             .worker_address = worker_address,
                             .worker_address_bytes = sizeof(worker_address)};
    assert_int_equal(sl_group_blob_encode(&group, &bytes), SL_OK);
    refuse_damage(&bytes, parse_group_blob, true);
    free(bytes.data);

    group.rank = 4;
    assert_int_equal(sl_group_blob_encode(&group, &bytes), SL_OK);
    assert_int_equal(parse_group_blob(bytes.data, bytes.size), SL_ERR_INVALID);
    free(bytes.data);
}

static sl_transfer_msg_t sample_msg(sl_transfer_msg_type_t type)
{
    return (sl_transfer_msg_t){
        .type = type,
        .from = {.pool = SL_POOL_PREFILL, .group = 1, .rank = 5, .incarnation = 77},
        .attempt = 0x8000000000000001u,
        .generation = 0xfffffffeu,
        .layout_hash = 42,
    };
}

static void test_grant(void **state)
{
    (void)state;
    const uint32_t pages[] = {0, 0xffffffffu, 0x01020304u};
    sl_transfer_msg_t msg = sample_msg(SL_TRANSFER_MSG_GRANT), found;
    msg.page_count = 3;
    sl_bytes_t bytes;
    assert_int_equal(sl_transfer_msg_encode(&msg, pages, &bytes), SL_OK);
    assert_int_equal(sl_transfer_msg_parse(bytes.data, bytes.size, &found), SL_OK);
    assert_int_equal(found.type, SL_TRANSFER_MSG_GRANT);
    assert_true(found.attempt == msg.attempt && found.generation == msg.generation);
    assert_true(found.layout_hash == 42 && found.from.incarnation == 77);
    assert_int_equal(found.page_count, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(sl_transfer_msg_page(&found, i) == pages[i]);
    }
    refuse_damage(&bytes, parse_msg, false);

    /* A count that promises what is not there, up to one that would wrap a 32-bit size. */
    size_t count_at = bytes.size - 16;
    static const uint32_t lies[] = {0, 2, 4, 1u << 20, (1u << 20) + 1, 0x40000000u, 0xffffffffu};
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        for (int b = 0; b < 4; b++) {
            bytes.data[count_at + b] = (uint8_t)(lies[i] >> 8 * b);
        }
        assert_int_equal(parse_msg(bytes.data, bytes.size), SL_ERR_INVALID);
    }
    free(bytes.data);
}

static void test_commit(void **state)
{
    (void)state;
    sl_transfer_msg_t msg = sample_msg(SL_TRANSFER_MSG_COMMIT), found;
    msg.commit = (sl_commit_t){
        .page_count = 16, .prompt_len = 1000, .first_token = -2, .seed = 0xdeadbeefcafef00du};
    sl_bytes_t bytes;
    assert_int_equal(sl_transfer_msg_encode(&msg, NULL, &bytes), SL_OK);
    assert_int_equal(sl_transfer_msg_parse(bytes.data, bytes.size, &found), SL_OK);
    assert_int_equal(found.commit.page_count, 16);
    assert_int_equal(found.commit.prompt_len, 1000);
    assert_int_equal(found.commit.first_token, -2);
    assert_true(found.commit.seed == 0xdeadbeefcafef00du);
    refuse_damage(&bytes, parse_msg, false);
    free(bytes.data);
}

static void test_release_and_bye(void **state)
{
    (void)state;
    for (int type = SL_TRANSFER_MSG_RELEASE; type <= SL_TRANSFER_MSG_BYE; type++) {
        sl_transfer_msg_t msg = sample_msg((sl_transfer_msg_type_t)type), found;
        sl_bytes_t bytes;
        assert_int_equal(sl_transfer_msg_encode(&msg, NULL, &bytes), SL_OK);
        assert_int_equal(sl_transfer_msg_parse(bytes.data, bytes.size, &found), SL_OK);
        assert_int_equal(found.type, type);
        refuse_damage(&bytes, parse_msg, false);

        static const uint8_t bad_types[] = {0, 7, 255};
        for (size_t i = 0; i < sizeof(bad_types); i++) {
            bytes.data[8] = bad_types[i];
            assert_int_equal(parse_msg(bytes.data, bytes.size), SL_ERR_INVALID);
        }
        bytes.data[8] = (uint8_t)type;
        bytes.data[12] = 2; /* no such pool */
        assert_int_equal(parse_msg(bytes.data, bytes.size), SL_ERR_INVALID);
        bytes.data[12] = 0;
        bytes.data[4] = 2; /* another version */
        assert_int_equal(parse_msg(bytes.data, bytes.size), SL_ERR_INVALID);
        assert_non_null(strstr(sl_error_text(), "version 2, expected 1"));
        free(bytes.data);
    }
}

static void test_data(void **state)
{
    (void)state;
    sl_transfer_msg_t msg = sample_msg(SL_TRANSFER_MSG_DATA), found;
    msg.data = (sl_data_place_t){
        .to_granter = true, .index = 3, .page = 0xfffffffeu, .offset = 0x123456789abu};
    sl_bytes_t bytes;
    assert_int_equal(sl_transfer_msg_encode(&msg, NULL, &bytes), SL_OK);
    assert_int_equal(sl_transfer_msg_parse(bytes.data, bytes.size, &found), SL_OK);
    assert_true(found.data.to_granter && found.data.index == 3);
    assert_true(found.data.page == 0xfffffffeu && found.data.offset == 0x123456789abu);
    refuse_damage(&bytes, parse_msg, false);
    bytes.data[bytes.size - 20] = 2; /* neither to the granter nor not */
    assert_int_equal(parse_msg(bytes.data, bytes.size), SL_ERR_INVALID);
    free(bytes.data);

    msg = sample_msg(SL_TRANSFER_MSG_DATA_SEEN);
    msg.seen = 0xfedcba9876543210u;
    assert_int_equal(sl_transfer_msg_encode(&msg, NULL, &bytes), SL_OK);
    assert_int_equal(sl_transfer_msg_parse(bytes.data, bytes.size, &found), SL_OK);
    assert_true(found.seen == msg.seen);
    refuse_damage(&bytes, parse_msg, false);
    free(bytes.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transfer_blob),
        cmocka_unit_test(test_pools_that_cannot_be),
        cmocka_unit_test(test_damaged_addresses),
        cmocka_unit_test(test_grant),
        cmocka_unit_test(test_commit),
        cmocka_unit_test(test_release_and_bye),
        cmocka_unit_test(test_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
