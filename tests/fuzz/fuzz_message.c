/*
 * Any bytes as a message. What decodes must survive copying, and its encoding must decode to the
 * same bytes again.
 */
#include <stdlib.h>
#include <string.h>

#include "common/wire/messages.h"
#include "tests/fuzz/fuzz.h"

static sl_bytes_t encode(const sl_message_t *message)
{
    sl_bytes_t frame;
    SL_ASSERT(sl_message_encode(message, &frame) == SL_OK);
    return frame;
}

static void check_round_trip(const sl_message_t *message)
{
    sl_message_t copy, again;
    sl_bytes_t frame = encode(message);
    SL_ASSERT(sl_message_copy(message, &copy) == SL_OK);
    SL_ASSERT(sl_message_decode(frame.data, frame.size, &sl_wire_limits_default, &again) == SL_OK);
    sl_bytes_t frame_of_copy = encode(&copy), frame_again = encode(&again);
    SL_ASSERT(frame_of_copy.size == frame.size && frame_again.size == frame.size);
    SL_ASSERT(memcmp(frame_of_copy.data, frame.data, frame.size) == 0);
    SL_ASSERT(memcmp(frame_again.data, frame.data, frame.size) == 0);
    sl_message_destroy(&copy);
    sl_message_destroy(&again);
    free(frame.data);
    free(frame_of_copy.data);
    free(frame_again.data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char id[SL_REQUEST_ID_BYTES];
    sl_message_t message;
    sl_status_t status = sl_message_decode(data, size, &sl_wire_limits_default, &message);
    SL_ASSERT(status == SL_OK || status == SL_ERR_INVALID || status == SL_ERR_LIMIT);
    if (status == SL_OK) {
        check_round_trip(&message);
        sl_message_destroy(&message);
    } else {
        SL_ASSERT(sl_error_text()[0] != 0);
    }
    sl_message_peek_id(data, size, &sl_wire_limits_default, id);
    SL_ASSERT(strnlen(id, sizeof(id)) < sizeof(id));
    return 0;
}
