/*
 * Struct to msgpack: walks the field table twice, once to count the keys that will be written and
 * once to write them. Only memory can fail, and the buffer remembers that itself.
 */
#include <math.h>
#include <msgpack.h>
#include <string.h>

#include "common/wire/fields.h"
#include "common/wire/scan.h"

static void pack_text(msgpack_packer *packer, const char *text, size_t size)
{
    msgpack_pack_str(packer, size);
    msgpack_pack_str_body(packer, text, size);
}

/* A text cut at its buffer's end may end within a character: the rest of it is left out, since
 * readers insist on UTF-8. */
static void pack_field_text(msgpack_packer *packer, const char *text, size_t capacity)
{
    pack_text(packer, text, sl_utf8_prefix(text, strnlen(text, capacity)));
}

static void pack_blob(msgpack_packer *packer, const sl_bytes_t *blob)
{
    msgpack_pack_bin(packer, blob->size);
    if (blob->size > 0) {
        msgpack_pack_bin_body(packer, blob->data, blob->size);
    }
}

/* Undefined logprobs (the first prompt token has no prefix) travel as nil. */
static void pack_logprob(msgpack_packer *packer, float logprob)
{
    if (isfinite(logprob)) {
        msgpack_pack_float(packer, logprob);
    } else {
        msgpack_pack_nil(packer);
    }
}

static void pack_logprobs(msgpack_packer *packer, const sl_logprobs_t *entries, size_t count)
{
    msgpack_pack_array(packer, count);
    for (size_t i = 0; i < count; i++) {
        const sl_logprobs_t *entry = &entries[i];
        SL_ASSERT(entry->top_count <= SL_TOP_LOGPROBS_MAX);
        msgpack_pack_array(packer, 2);
        pack_logprob(packer, entry->logprob);
        msgpack_pack_array(packer, entry->top_count);
        for (uint32_t k = 0; k < entry->top_count; k++) {
            msgpack_pack_array(packer, 2);
            msgpack_pack_int32(packer, entry->top_ids[k]);
            pack_logprob(packer, entry->top_logprobs[k]);
        }
    }
}

static void pack_ids(msgpack_packer *packer, const int32_t *ids, size_t count)
{
    msgpack_pack_array(packer, count);
    for (size_t i = 0; i < count; i++) {
        msgpack_pack_int32(packer, ids[i]);
    }
}

static void pack_struct(msgpack_packer *packer, const sl_field_table_t *table, const void *body);

static void pack_array(msgpack_packer *packer, const sl_field_t *field, const void *items,
                       size_t count)
{
    switch (field->kind) {
    case SL_FIELD_IDS:
        pack_ids(packer, items, count);
        break;
    case SL_FIELD_LOGPROBS:
        pack_logprobs(packer, items, count);
        break;
    case SL_FIELD_U64S:
        msgpack_pack_array(packer, count);
        for (size_t i = 0; i < count; i++) {
            msgpack_pack_uint64(packer, ((const uint64_t *)items)[i]);
        }
        break;
    case SL_FIELD_BLOBS:
        msgpack_pack_array(packer, count);
        for (size_t i = 0; i < count; i++) {
            pack_blob(packer, &((const sl_bytes_t *)items)[i]);
        }
        break;
    default:
        SL_ASSERT(field->kind == SL_FIELD_STRUCTS);
        msgpack_pack_array(packer, count);
        for (size_t i = 0; i < count; i++) {
            pack_struct(packer, field->table, (const char *)items + i * field->table->size);
        }
    }
}

static void pack_bool(msgpack_packer *packer, bool value)
{
    if (value) {
        msgpack_pack_true(packer);
    } else {
        msgpack_pack_false(packer);
    }
}

static void pack_word(msgpack_packer *packer, const sl_field_t *field, int value)
{
    SL_ASSERT((unsigned)value < field->word_count);
    pack_text(packer, field->words[value], strlen(field->words[value]));
}

static void pack_value(msgpack_packer *packer, const sl_field_t *field, const void *body)
{
    const void *at = sl_field_in(field, body);
    const char *count_at = (const char *)body + field->count_offset;
    switch (field->kind) {
    case SL_FIELD_U32:
        msgpack_pack_uint32(packer, *(const uint32_t *)at);
        break;
    case SL_FIELD_U64:
        msgpack_pack_uint64(packer, *(const uint64_t *)at);
        break;
    case SL_FIELD_I32:
        msgpack_pack_int32(packer, *(const int32_t *)at);
        break;
    case SL_FIELD_F32:
        msgpack_pack_float(packer, *(const float *)at);
        break;
    case SL_FIELD_BOOL:
        pack_bool(packer, *(const bool *)at);
        break;
    case SL_FIELD_TEXT:
        pack_field_text(packer, at, field->capacity);
        break;
    case SL_FIELD_WORD:
        pack_word(packer, field, *(const int *)at);
        break;
    case SL_FIELD_BYTES:
        pack_blob(packer, at);
        break;
    case SL_FIELD_STRUCT:
        pack_struct(packer, field->table, at);
        break;
    case SL_FIELD_FEW_IDS:
        SL_ASSERT(*(const uint32_t *)count_at <= field->capacity);
        pack_ids(packer, at, *(const uint32_t *)count_at);
        break;
    default:
        pack_array(packer, field, *(void *const *)at, *(const size_t *)count_at);
    }
}

static bool is_client_form(const void *body)
{
    /* The three structs with both forms start alike, so one of them stands for all. */
    const sl_msg_failed_t *start = body;
    return start->id[0] != 0 || start->attempt == 0;
}
_Static_assert(offsetof(sl_msg_tokens_t, attempt) == offsetof(sl_msg_failed_t, attempt) &&
                   offsetof(sl_msg_prompt_logprobs_t, attempt) ==
                       offsetof(sl_msg_failed_t, attempt) &&
                   offsetof(sl_msg_tokens_t, id) == 0 && offsetof(sl_msg_failed_t, id) == 0 &&
                   offsetof(sl_msg_prompt_logprobs_t, id) == 0,
               "messages with two forms start alike");

static bool is_written(const sl_field_t *field, const void *body)
{
    switch (field->presence) {
    case SL_FIELD_CLIENT_FORM:
        return is_client_form(body);
    case SL_FIELD_RANK_FORM:
        return !is_client_form(body);
    case SL_FIELD_OPTIONAL:
        if (field->flag_offset != 0) {
            return *(const bool *)((const char *)body + field->flag_offset);
        }
        return sl_field_item_bytes(field) == 0 || *(void *const *)sl_field_in(field, body) != NULL;
    default:
        return true;
    }
}

static uint32_t count_written(const sl_field_table_t *table, const void *body)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < table->count; i++) {
        count += is_written(&table->fields[i], body);
    }
    return count;
}

static void pack_fields(msgpack_packer *packer, const sl_field_table_t *table, const void *body)
{
    for (uint32_t i = 0; i < table->count; i++) {
        const sl_field_t *field = &table->fields[i];
        if (is_written(field, body)) {
            pack_text(packer, field->name, strlen(field->name));
            pack_value(packer, field, body);
        }
    }
}

static void pack_struct(msgpack_packer *packer, const sl_field_table_t *table, const void *body)
{
    msgpack_pack_map(packer, count_written(table, body));
    pack_fields(packer, table, body);
}

/* Sink that keeps failing once it has failed, so that only the end needs a check. */
typedef struct {
    msgpack_sbuffer buffer;
    bool failed;
} sink_t;

static int sink_write(void *arg, const char *data, size_t size)
{
    sink_t *sink = arg;
    sink->failed = sink->failed || msgpack_sbuffer_write(&sink->buffer, data, size) != 0;
    return sink->failed ? -1 : 0;
}

sl_status_t sl_message_encode(const sl_message_t *message, sl_bytes_t *frame_p)
{
    const sl_field_table_t *table = sl_message_fields(message->type);
    const void *body = &message->generate;
    sink_t sink = {.failed = false};
    msgpack_packer packer;
    msgpack_sbuffer_init(&sink.buffer);
    msgpack_packer_init(&packer, &sink, sink_write);
    msgpack_pack_map(&packer, 2 + count_written(table, body));
    pack_text(&packer, "v", 1);
    msgpack_pack_int(&packer, SL_PROTOCOL_VERSION);
    pack_text(&packer, "type", 4);
    pack_text(&packer, table->name, strlen(table->name));
    pack_fields(&packer, table, body);
    if (sink.failed) {
        size_t size = sink.buffer.size;
        msgpack_sbuffer_destroy(&sink.buffer);
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for a frame of over %zu bytes",
                        table->name, size);
    }
    frame_p->size = sink.buffer.size;
    frame_p->data = (uint8_t *)msgpack_sbuffer_release(&sink.buffer);
    return SL_OK;
}
