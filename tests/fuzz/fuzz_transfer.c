/*
 * Addresses and messages of common/transfer from any bytes. The first byte picks the parser:
 *   0 message, 1 group address, 2 transfer address, 3 and 4 the addresses with their checksum put
 *   right, so that what lies behind it is reached too.
 * What parses must encode to the very same bytes, and all that it points to must be readable.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/transfer/transfer_wire.h"
#include "tests/fuzz/fuzz.h"

static void check_same(const sl_bytes_t *bytes, const uint8_t *data, size_t size)
{
    SL_ASSERT(bytes->size == size && memcmp(bytes->data, data, size) == 0);
    free(bytes->data);
}

static void run_msg(const uint8_t *data, size_t size)
{
    sl_transfer_msg_t msg;
    if (sl_transfer_msg_parse(data, size, &msg) != SL_OK) {
        return;
    }
    uint32_t *pages = malloc((msg.page_count + 1) * sizeof(*pages));
    SL_ASSERT(pages != NULL);
    for (uint32_t i = 0; i < msg.page_count; i++) {
        pages[i] = sl_transfer_msg_page(&msg, i);
    }
    sl_bytes_t bytes;
    SL_ASSERT(sl_transfer_msg_encode(&msg, pages, &bytes) == SL_OK);
    check_same(&bytes, data, size);
    free(pages);
}

static void run_group(const uint8_t *data, size_t size)
{
    sl_group_blob_t blob;
    sl_bytes_t bytes;
    if (sl_group_blob_parse(data, size, &blob) == SL_OK) {
        SL_ASSERT(sl_group_blob_encode(&blob, &bytes) == SL_OK);
        check_same(&bytes, data, size);
    }
}

static void run_transfer(const uint8_t *data, size_t size)
{
    sl_transfer_blob_t blob;
    sl_bytes_t bytes;
    if (sl_transfer_blob_parse(data, size, &blob) == SL_OK) {
        SL_ASSERT(blob.page_bytes % blob.layers == 0);
        SL_ASSERT(sl_transfer_blob_encode(&blob, &bytes) == SL_OK);
        check_same(&bytes, data, size);
    }
}

/* FNV-1a over all but the last eight bytes, which become the checksum. */
static void mend_checksum(uint8_t *data, size_t size)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i + 8 < size; i++) {
        hash = (hash ^ data[i]) * 0x100000001b3u;
    }
    for (size_t i = 0; size >= 8 && i < 8; i++) {
        data[size - 8 + i] = (uint8_t)(hash >> (8 * i));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    uint8_t kind = data[0] % 5;
    size_t rest = size - 1;
    uint8_t *copy = malloc(rest + (rest == 0)); /* exact, so that a read beyond it is seen */
    SL_ASSERT(copy != NULL);
    memcpy(copy, data + 1, rest);
    if (kind >= 3) {
        mend_checksum(copy, rest);
    }
    if (kind == 0) {
        run_msg(copy, rest);
    } else if (kind == 1 || kind == 3) {
        run_group(copy, rest);
    } else {
        run_transfer(copy, rest);
    }
    free(copy);
    return 0;
}
