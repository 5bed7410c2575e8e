/*
 * msgpack to struct. The frame is walked first (scan.h), so that msgpack-c's up-front allocations
 * are bounded by the frame's size; then its objects are matched to the field table: every key must
 * be known and come once, every required field must be there. Fields are read in the table's
 * order, whatever the order of the keys, since some share the count of an earlier one.
 */
#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#include "common/wire/fields.h"
#include "common/wire/read.h"
#include "common/wire/scan.h"

typedef struct {
    const msgpack_object *values[SL_FIELDS_MAX]; /* by field; NULL: absent */
} found_t;

static bool is_key(const msgpack_object *key, const char *name)
{
    return key->via.str.size == strlen(name) &&
           memcmp(key->via.str.ptr, name, key->via.str.size) == 0;
}

static sl_status_t fail_key(const sl_place_t *place, const char *problem, const msgpack_object *key)
{
    char path[160], name[120];
    return sl_error(SL_ERR_INVALID, "%s: %s %s", sl_place_text(place, path, sizeof(path)), problem,
                    sl_quote(key->via.str.ptr, key->via.str.size, name, sizeof(name)));
}

/* Sorts the keys of `map` into `found`. The frame's own keys are passed over at the top level. */
static sl_status_t match_keys(const sl_place_t *place, const sl_field_table_t *table,
                              const msgpack_object_map *map, found_t *found)
{
    SL_ASSERT(table->count <= SL_FIELDS_MAX);
    memset(found, 0, sizeof(*found));
    bool top = place->parent == NULL;
    for (uint32_t i = 0; i < map->size; i++) {
        const msgpack_object *key = &map->ptr[i].key;
        uint32_t at = 0;
        if (key->type != MSGPACK_OBJECT_STR) {
            return sl_read_fail(SL_ERR_INVALID, place, "string keys", key);
        }
        if (top && (is_key(key, "v") || is_key(key, "type"))) {
            continue;
        }
        while (at < table->count && !is_key(key, table->fields[at].name)) {
            at++;
        }
        if (at == table->count) {
            return fail_key(place, "unknown key", key);
        }
        if (found->values[at] != NULL) {
            return fail_key(place, "repeated key", key);
        }
        found->values[at] = &map->ptr[i].val;
    }
    return SL_OK;
}

static void set_default(const sl_field_t *field, void *body)
{
    void *at = sl_field_at(field, body);
    if (field->kind == SL_FIELD_F32) {
        *(float *)at = (float)field->default_value;
    } else if (field->kind == SL_FIELD_U32) {
        *(uint32_t *)at = (uint32_t)field->default_value;
    } else if (field->kind == SL_FIELD_I32) {
        *(int32_t *)at = (int32_t)field->default_value;
    } /* all else is zero already */
}

static sl_status_t read_struct(const sl_place_t *place, const sl_field_table_t *table,
                               const msgpack_object *value, void *body);

static sl_status_t read_structs(const sl_place_t *place, const sl_field_t *field,
                                const msgpack_object *value, void *body)
{
    void *items;
    SL_TRY(sl_read_array(place, field, value, body, &items));
    for (uint32_t i = 0; i < value->via.array.size; i++) {
        sl_place_t item_place = {place, NULL, i};
        SL_TRY(read_struct(&item_place, field->table, &value->via.array.ptr[i],
                           (char *)items + i * field->table->size));
    }
    return SL_OK;
}

static sl_status_t read_field(const sl_place_t *parent, const sl_field_t *field,
                              const msgpack_object *value, void *body)
{
    sl_place_t place = {parent, field->name, 0};
    bool nil = value != NULL && value->type == MSGPACK_OBJECT_NIL;
    if (value == NULL || (nil && field->presence != SL_FIELD_REQUIRED)) {
        if (field->presence == SL_FIELD_REQUIRED) {
            char path[160];
            return sl_error(SL_ERR_INVALID, "%s: missing",
                            sl_place_text(&place, path, sizeof(path)));
        }
        set_default(field, body);
        return SL_OK;
    }
    if (field->flag_offset != 0) {
        *(bool *)((char *)body + field->flag_offset) = true;
    }
    switch (field->kind) {
    case SL_FIELD_STRUCT:
        return read_struct(&place, field->table, value, sl_field_at(field, body));
    case SL_FIELD_STRUCTS:
        return read_structs(&place, field, value, body);
    default:
        return sl_read_value(&place, field, value, body);
    }
}

static sl_status_t read_fields(const sl_place_t *place, const sl_field_table_t *table,
                               const msgpack_object_map *map, void *body)
{
    found_t found;
    SL_TRY(match_keys(place, table, map, &found));
    for (uint32_t i = 0; i < table->count; i++) {
        SL_TRY(read_field(place, &table->fields[i], found.values[i], body));
    }
    return SL_OK;
}

static sl_status_t read_struct(const sl_place_t *place, const sl_field_table_t *table,
                               const msgpack_object *value, void *body)
{
    if (value->type != MSGPACK_OBJECT_MAP) {
        return sl_read_fail(SL_ERR_INVALID, place, "a map", value);
    }
    return read_fields(place, table, &value->via.map, body);
}

/* ---- the frame ---- */

/* The only value under `name`, or NULL. */
static const msgpack_object *frame_value(const msgpack_object_map *map, const char *name)
{
    for (uint32_t i = 0; i < map->size; i++) {
        if (map->ptr[i].key.type == MSGPACK_OBJECT_STR && is_key(&map->ptr[i].key, name)) {
            return &map->ptr[i].val;
        }
    }
    return NULL;
}

static sl_status_t check_version(const msgpack_object *version)
{
    char expected[64];
    const sl_place_t place = {NULL, "v", 0};
    if (version == NULL) {
        return sl_error(SL_ERR_INVALID, "v: missing; expected protocol version %d",
                        SL_PROTOCOL_VERSION);
    }
    snprintf(expected, sizeof(expected), "protocol version %d", SL_PROTOCOL_VERSION);
    if (version->type != MSGPACK_OBJECT_POSITIVE_INTEGER ||
        version->via.u64 != SL_PROTOCOL_VERSION) {
        return sl_read_fail(SL_ERR_INVALID, &place, expected, version);
    }
    return SL_OK;
}

static sl_status_t find_type(const msgpack_object *type, sl_message_type_t *type_p)
{
    const sl_place_t place = {NULL, "type", 0};
    if (type == NULL) {
        return sl_error(SL_ERR_INVALID, "type: missing");
    }
    for (int i = 0; type->type == MSGPACK_OBJECT_STR && i < SL_MSG_TYPE_COUNT; i++) {
        if (is_key(type, sl_message_type_name((sl_message_type_t)i))) {
            *type_p = (sl_message_type_t)i;
            return SL_OK;
        }
    }
    return sl_read_fail(SL_ERR_INVALID, &place, "a known message type", type);
}

static sl_status_t read_message(const msgpack_object *object, sl_message_t *message_p)
{
    const sl_place_t frame = {NULL, "message", 0};
    if (object->type != MSGPACK_OBJECT_MAP) {
        return sl_read_fail(SL_ERR_INVALID, &frame, "a map", object);
    }
    const msgpack_object_map *map = &object->via.map;
    sl_message_t message = {0};
    SL_TRY(check_version(frame_value(map, "v")));
    SL_TRY(find_type(frame_value(map, "type"), &message.type));
    const sl_field_table_t *table = sl_message_fields(message.type);
    const sl_place_t place = {NULL, table->name, 0};
    sl_status_t status = read_fields(&place, table, map, sl_message_body(&message));
    if (status != SL_OK) {
        sl_message_destroy(&message);
        return status;
    }
    *message_p = message;
    return SL_OK;
}

sl_status_t sl_message_decode(const uint8_t *data, size_t size, const sl_wire_limits_t *limits,
                              sl_message_t *message_p)
{
    SL_TRY(sl_scan_frame(data, size, limits));
    msgpack_unpacked unpacked;
    size_t at = 0;
    msgpack_unpacked_init(&unpacked);
    msgpack_unpack_return result = msgpack_unpack_next(&unpacked, (const char *)data, size, &at);
    sl_status_t status;
    if (result == MSGPACK_UNPACK_NOMEM_ERROR) {
        status = sl_error(SL_ERR_NO_MEMORY, "message: no memory to unpack %zu bytes", size);
    } else if (result != MSGPACK_UNPACK_SUCCESS) {
        status = sl_error(SL_ERR_INVALID, "message: not msgpack (%zu bytes)", size);
    } else {
        status = read_message(&unpacked.data, message_p);
    }
    msgpack_unpacked_destroy(&unpacked);
    return status;
}

/* Bytes of the map header at the start of `data` and its entries; 0 if it is none. */
static size_t map_header(const uint8_t *data, size_t size, uint32_t *entries_p)
{
    size_t length_bytes = 0;
    uint32_t entries = 0;
    if (size == 0) {
        return 0;
    }
    if ((data[0] & 0xf0) == 0x80) {
        *entries_p = data[0] & 0x0fu;
        return 1;
    }
    length_bytes = data[0] == 0xde ? 2 : data[0] == 0xdf ? 4 : 0;
    if (length_bytes == 0 || size < 1 + length_bytes) {
        return 0;
    }
    for (size_t i = 0; i < length_bytes; i++) {
        entries = entries << 8 | data[1 + i];
    }
    *entries_p = entries;
    return 1 + length_bytes;
}

void sl_message_peek_id(const uint8_t *data, size_t size, const sl_wire_limits_t *limits,
                        char id[SL_REQUEST_ID_BYTES])
{
    uint32_t entries;
    size_t at = map_header(data, size, &entries);
    id[0] = 0;
    for (uint32_t i = 0; at > 0 && i < entries && i < limits->map_items; i++) {
        size_t key = at;
        if (sl_scan_value(data, size, limits, &at, true) != SL_OK) {
            return;
        }
        size_t value = at;
        if (sl_scan_value(data, size, limits, &at, true) != SL_OK) {
            return;
        }
        if (value - key != 3 || memcmp(data + key, "\xa2id", 3) != 0) {
            continue;
        }
        /* Of the two forms of a string that short, tag a0..bf and tag d9 with its length. */
        size_t skip = (data[value] & 0xe0) == 0xa0 ? 1 : data[value] == 0xd9 ? 2 : 0;
        size_t length = at - value - skip;
        const char *text = (const char *)data + value + skip;
        if (skip > 0 && length < SL_REQUEST_ID_BYTES && sl_utf8_prefix(text, length) == length) {
            memcpy(id, text, length);
            id[length] = 0;
        }
        return;
    }
}
