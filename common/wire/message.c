/* Names, freeing and copying of messages: everything that needs the field tables but no msgpack. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/wire/fields.h"

const sl_wire_limits_t sl_wire_limits_default = {
    .message_bytes = (size_t)64 << 20,
    .depth = 6,
    .array_items = 4u << 20,
    .map_items = 64,
};

const char *sl_message_type_name(sl_message_type_t type)
{
    return (unsigned)type < SL_MSG_TYPE_COUNT ? sl_message_fields(type)->name : "unknown";
}

static size_t *field_count(const sl_field_t *field, void *body)
{
    return (size_t *)((char *)body + field->count_offset);
}

static void free_blobs(sl_bytes_t *blobs, size_t count)
{
    for (size_t i = 0; blobs != NULL && i < count; i++) {
        free(blobs[i].data);
    }
}

void sl_message_destroy(sl_message_t *message)
{
    const sl_field_table_t *table = sl_message_fields(message->type);
    void *body = sl_message_body(message);
    for (uint32_t i = 0; i < table->count; i++) {
        const sl_field_t *field = &table->fields[i];
        void *at = sl_field_at(field, body);
        if (field->kind == SL_FIELD_BYTES) {
            free(((sl_bytes_t *)at)->data);
        } else if (sl_field_item_bytes(field) > 0) {
            if (field->kind == SL_FIELD_BLOBS) {
                free_blobs(*(sl_bytes_t **)at, *field_count(field, body));
            }
            free(*(void **)at);
        }
    }
    memset(message, 0, sizeof(*message));
}

/* A heap copy of `bytes` bytes at `from`; NULL for none. */
static sl_status_t copy_block(const void *from, size_t bytes, void **copy_p)
{
    *copy_p = NULL;
    if (bytes == 0) {
        return SL_OK;
    }
    void *copy = malloc(bytes);
    if (copy == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "message copy: no memory for %zu bytes", bytes);
    }
    memcpy(copy, from, bytes);
    *copy_p = copy;
    return SL_OK;
}

static sl_status_t copy_blob(sl_bytes_t *blob)
{
    const uint8_t *from = blob->data;
    void *copy;
    blob->data = NULL;
    SL_TRY(copy_block(from, blob->size, &copy));
    blob->data = copy;
    return SL_OK;
}

/* `at` holds NULL and `from` the source's pointer; on failure whatever is set can be freed. */
static sl_status_t copy_array(const sl_field_t *field, const void *from, size_t count, void **at)
{
    size_t item_bytes = sl_field_item_bytes(field);
    if (from == NULL) {
        return SL_OK;
    }
    if (field->kind != SL_FIELD_BLOBS) {
        return copy_block(from, count * item_bytes, at);
    }
    sl_bytes_t *blobs = calloc(count > 0 ? count : 1, item_bytes);
    if (blobs == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "message copy: no memory for %zu blobs", count);
    }
    *at = blobs;
    for (size_t i = 0; i < count; i++) {
        blobs[i] = ((const sl_bytes_t *)from)[i];
        SL_TRY(copy_blob(&blobs[i]));
    }
    return SL_OK;
}

/* Forgets the pointers that `copy` still shares with its source. */
static void forget_arrays(const sl_field_table_t *table, void *body)
{
    for (uint32_t i = 0; i < table->count; i++) {
        const sl_field_t *field = &table->fields[i];
        if (field->kind == SL_FIELD_BYTES) {
            ((sl_bytes_t *)sl_field_at(field, body))->data = NULL;
        } else if (sl_field_item_bytes(field) > 0) {
            *(void **)sl_field_at(field, body) = NULL;
        }
    }
}

sl_status_t sl_message_copy(const sl_message_t *message, sl_message_t *copy_p)
{
    const sl_field_table_t *table = sl_message_fields(message->type);
    sl_message_t copy = *message;
    sl_message_t source = *message;
    sl_status_t status = SL_OK;
    forget_arrays(table, sl_message_body(&copy));
    for (uint32_t i = 0; i < table->count && status == SL_OK; i++) {
        const sl_field_t *field = &table->fields[i];
        void *from = sl_field_at(field, sl_message_body(&source));
        void *to = sl_field_at(field, sl_message_body(&copy));
        if (field->kind == SL_FIELD_BYTES) {
            *(sl_bytes_t *)to = *(sl_bytes_t *)from;
            status = copy_blob(to);
        } else if (sl_field_item_bytes(field) > 0) {
            status = copy_array(field, *(void **)from,
                                *field_count(field, sl_message_body(&source)), to);
        }
    }
    if (status != SL_OK) {
        sl_message_destroy(&copy);
        return status;
    }
    *copy_p = copy;
    return SL_OK;
}

const char *sl_rank_name(const sl_rank_id_t *rank, char buffer[32])
{
    snprintf(buffer, 32, "%s/%" PRIu32 "/%" PRIu32,
             rank->pool == SL_POOL_PREFILL ? "prefill" : "decode", rank->group, rank->rank);
    return buffer;
}

bool sl_rank_same(const sl_rank_id_t *a, const sl_rank_id_t *b)
{
    return a->pool == b->pool && a->group == b->group && a->rank == b->rank &&
           a->incarnation == b->incarnation;
}
