/* Numbers, texts, words and arrays out of msgpack objects; see read.h. */
#include "common/wire/read.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/wire/scan.h"

#define EXPECTED_BYTES 160
#define FOUND_BYTES 120
#define PATH_BYTES 160
#define QUOTED_MAX 40 /* characters of untrusted text that are shown */

const char *sl_place_text(const sl_place_t *place, char *text, size_t size)
{
    text[0] = 0;
    if (place->parent != NULL) {
        sl_place_text(place->parent, text, size);
    }
    size_t used = strlen(text);
    if (place->name != NULL) {
        snprintf(text + used, size - used, "%s%s", used > 0 ? "." : "", place->name);
    } else {
        snprintf(text + used, size - used, "[%zu]", place->index);
    }
    return text;
}

const char *sl_quote(const char *from, size_t from_size, char *text, size_t size)
{
    size_t shown = from_size < QUOTED_MAX ? from_size : QUOTED_MAX;
    size_t used = 0;
    text[used++] = '"';
    for (size_t i = 0; i < shown && used + 8 < size; i++) {
        unsigned char c = (unsigned char)from[i];
        bool plain = c >= 0x20 && c < 0x7f && c != '"' && c != '\\';
        used += (size_t)snprintf(text + used, size - used, plain ? "%c" : "\\x%02x", c);
    }
    snprintf(text + used, size - used, from_size > shown ? "...\"" : "\"");
    return text;
}

static const char *describe_number(double number, char *text, size_t size)
{
    if (isnan(number)) {
        snprintf(text, size, "nan");
    } else {
        snprintf(text, size, "%g", number);
    }
    return text;
}

static const char *describe(const msgpack_object *value, char *text, size_t size)
{
    switch (value->type) {
    case MSGPACK_OBJECT_NIL:
        return "nil";
    case MSGPACK_OBJECT_BOOLEAN:
        return value->via.boolean ? "true" : "false";
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        snprintf(text, size, "%" PRIu64, value->via.u64);
        return text;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        snprintf(text, size, "%" PRId64, value->via.i64);
        return text;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return describe_number(value->via.f64, text, size);
    case MSGPACK_OBJECT_STR:
        return sl_quote(value->via.str.ptr, value->via.str.size, text, size);
    case MSGPACK_OBJECT_BIN:
        snprintf(text, size, "%" PRIu32 " bytes of binary", value->via.bin.size);
        return text;
    case MSGPACK_OBJECT_ARRAY:
        snprintf(text, size, "an array of %" PRIu32, value->via.array.size);
        return text;
    case MSGPACK_OBJECT_MAP:
        snprintf(text, size, "a map of %" PRIu32, value->via.map.size);
        return text;
    default:
        return "an extension";
    }
}

sl_status_t sl_read_fail(sl_status_t status, const sl_place_t *place, const char *expected,
                         const msgpack_object *found)
{
    char path[PATH_BYTES], text[FOUND_BYTES];
    return sl_error(status, "%s: expected %s, found %s", sl_place_text(place, path, sizeof(path)),
                    expected, describe(found, text, sizeof(text)));
}

/* An integer from `least` to `most`; the result's bits are those of the two's complement. */
static sl_status_t read_integer(const sl_place_t *place, const msgpack_object *value, int64_t least,
                                uint64_t most, uint64_t *number_p)
{
    bool positive = value->type == MSGPACK_OBJECT_POSITIVE_INTEGER;
    bool negative = value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER;
    bool low = (negative && value->via.i64 < least) ||
               (positive && least > 0 && value->via.u64 < (uint64_t)least);
    bool high = positive && value->via.u64 > most;
    if ((!positive && !negative) || low || high) {
        char expected[EXPECTED_BYTES];
        snprintf(expected, sizeof(expected), "an integer from %" PRId64 " to %" PRIu64, least,
                 most);
        return sl_read_fail(high ? SL_ERR_LIMIT : SL_ERR_INVALID, place, expected, value);
    }
    *number_p = positive ? value->via.u64 : (uint64_t)value->via.i64;
    return SL_OK;
}

/* Any number as a double; false if it is none. */
static bool number_of(const msgpack_object *value, double *number_p)
{
    switch (value->type) {
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        *number_p = value->via.f64;
        return true;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        *number_p = (double)value->via.u64;
        return true;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        *number_p = (double)value->via.i64;
        return true;
    default:
        return false;
    }
}

/* The bounds hold for the sent double and for the float it becomes: 1e-60 is above 0 only before
 * it is rounded. */
static sl_status_t read_f32(const sl_place_t *place, const sl_field_t *field,
                            const msgpack_object *value, float *number_p)
{
    double sent;
    bool good = number_of(value, &sent) && sent >= field->min_float && sent <= field->max_float;
    float number = good ? (float)sent : 0.0f;
    if (!good || (field->above_min && !((double)number > field->min_float))) {
        return sl_read_fail(SL_ERR_INVALID, place, field->expected, value);
    }
    *number_p = number;
    return SL_OK;
}

static sl_status_t read_text(const sl_place_t *place, const sl_field_t *field,
                             const msgpack_object *value, char *text)
{
    char expected[EXPECTED_BYTES];
    if (value->type != MSGPACK_OBJECT_STR) {
        return sl_read_fail(SL_ERR_INVALID, place, "a string", value);
    }
    uint32_t size = value->via.str.size;
    if (size >= field->capacity) {
        snprintf(expected, sizeof(expected), "at most %zu bytes", field->capacity - 1);
        return sl_read_fail(SL_ERR_LIMIT, place, expected, value);
    }
    if (size < (uint64_t)field->min_int) {
        return sl_read_fail(SL_ERR_INVALID, place, "a string that is not empty", value);
    }
    if (sl_utf8_prefix(value->via.str.ptr, size) != size) {
        return sl_read_fail(SL_ERR_INVALID, place, "UTF-8 without zero bytes", value);
    }
    memcpy(text, value->via.str.ptr, size);
    text[size] = 0;
    return SL_OK;
}

static sl_status_t read_word(const sl_place_t *place, const sl_field_t *field,
                             const msgpack_object *value, int *word_p)
{
    for (uint32_t i = 0; value->type == MSGPACK_OBJECT_STR && i < field->word_count; i++) {
        if (value->via.str.size == strlen(field->words[i]) &&
            memcmp(value->via.str.ptr, field->words[i], value->via.str.size) == 0) {
            *word_p = (int)i;
            return SL_OK;
        }
    }
    char expected[EXPECTED_BYTES];
    size_t used = (size_t)snprintf(expected, sizeof(expected), "one of");
    for (uint32_t i = 0; i < field->word_count; i++) {
        used += (size_t)snprintf(expected + used, sizeof(expected) - used, "%s \"%s\"",
                                 i > 0 ? "," : "", field->words[i]);
        SL_ASSERT(used < sizeof(expected));
    }
    return sl_read_fail(SL_ERR_INVALID, place, expected, value);
}

static sl_status_t read_blob(const sl_place_t *place, const msgpack_object *value, sl_bytes_t *blob)
{
    if (value->type != MSGPACK_OBJECT_BIN) {
        return sl_read_fail(SL_ERR_INVALID, place, "binary", value);
    }
    size_t size = value->via.bin.size;
    if (size == 0) {
        return SL_OK;
    }
    blob->data = malloc(size);
    if (blob->data == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for %zu bytes", place->name, size);
    }
    memcpy(blob->data, value->via.bin.ptr, size);
    blob->size = size;
    return SL_OK;
}

static sl_status_t read_id(const sl_place_t *place, const msgpack_object *value, int32_t *id_p)
{
    if (value->type != MSGPACK_OBJECT_POSITIVE_INTEGER || value->via.u64 > INT32_MAX) {
        return sl_read_fail(SL_ERR_INVALID, place, "a token id from 0 to 2147483647", value);
    }
    *id_p = (int32_t)value->via.u64;
    return SL_OK;
}

static sl_status_t read_ids(const sl_place_t *place, const msgpack_object *array, int32_t *ids)
{
    for (uint32_t i = 0; i < array->via.array.size; i++) {
        sl_place_t item = {place, NULL, i};
        SL_TRY(read_id(&item, &array->via.array.ptr[i], &ids[i]));
    }
    return SL_OK;
}

/* Writes the inline array only when all of it is good. */
static sl_status_t read_few_ids(const sl_place_t *place, const sl_field_t *field,
                                const msgpack_object *value, void *body)
{
    char expected[EXPECTED_BYTES];
    snprintf(expected, sizeof(expected), "an array of at most %zu token ids", field->capacity);
    if (value->type != MSGPACK_OBJECT_ARRAY) {
        return sl_read_fail(SL_ERR_INVALID, place, expected, value);
    }
    if (value->via.array.size > field->capacity) {
        return sl_read_fail(SL_ERR_LIMIT, place, expected, value);
    }
    SL_TRY(read_ids(place, value, sl_field_at(field, body)));
    *(uint32_t *)((char *)body + field->count_offset) = value->via.array.size;
    return SL_OK;
}

static sl_status_t read_logprob(const sl_place_t *place, const msgpack_object *value,
                                float *logprob_p)
{
    static const sl_field_t range = {
        .min_float = -FLT_MAX, .max_float = FLT_MAX, .expected = "a finite number or nil"};
    if (value->type == MSGPACK_OBJECT_NIL) {
        *logprob_p = NAN;
        return SL_OK;
    }
    return read_f32(place, &range, value, logprob_p);
}

static bool is_array_of(const msgpack_object *value, uint32_t size)
{
    return value->type == MSGPACK_OBJECT_ARRAY && value->via.array.size == size;
}

static sl_status_t read_logprobs_entry(const sl_place_t *place, const msgpack_object *value,
                                       sl_logprobs_t *entry)
{
    if (!is_array_of(value, 2) || value->via.array.ptr[1].type != MSGPACK_OBJECT_ARRAY) {
        return sl_read_fail(SL_ERR_INVALID, place, "[logprob, [[id, logprob], ...]]", value);
    }
    const msgpack_object_array *tops = &value->via.array.ptr[1].via.array;
    sl_place_t number_place = {place, NULL, 0}, tops_place = {place, NULL, 1};
    SL_TRY(read_logprob(&number_place, &value->via.array.ptr[0], &entry->logprob));
    if (tops->size > SL_TOP_LOGPROBS_MAX) {
        return sl_read_fail(SL_ERR_LIMIT, &tops_place, "at most 20 alternatives",
                            &value->via.array.ptr[1]);
    }
    for (uint32_t i = 0; i < tops->size; i++) {
        sl_place_t pair_place = {&tops_place, NULL, i};
        if (!is_array_of(&tops->ptr[i], 2)) {
            return sl_read_fail(SL_ERR_INVALID, &pair_place, "[id, logprob]", &tops->ptr[i]);
        }
        const msgpack_object *pair = tops->ptr[i].via.array.ptr;
        SL_TRY(read_id(&pair_place, &pair[0], &entry->top_ids[i]));
        SL_TRY(read_logprob(&pair_place, &pair[1], &entry->top_logprobs[i]));
    }
    entry->top_count = tops->size;
    return SL_OK;
}
_Static_assert(SL_TOP_LOGPROBS_MAX == 20, "the texts above say 20");

sl_status_t sl_read_array(const sl_place_t *place, const sl_field_t *field,
                          const msgpack_object *value, void *body, void **items_p)
{
    char expected[EXPECTED_BYTES];
    size_t *count = (size_t *)((char *)body + field->count_offset);
    if (value->type != MSGPACK_OBJECT_ARRAY) {
        return sl_read_fail(SL_ERR_INVALID, place, "an array", value);
    }
    size_t size = value->via.array.size;
    if (field->shares_count && size != *count) {
        snprintf(expected, sizeof(expected), "an array of %zu, one for each", *count);
        return sl_read_fail(SL_ERR_INVALID, place, expected, value);
    }
    if (size < (uint64_t)field->min_int) {
        return sl_read_fail(SL_ERR_INVALID, place, "an array that is not empty", value);
    }
    if (field->capacity > 0 && size > field->capacity) {
        snprintf(expected, sizeof(expected), "an array of at most %zu", field->capacity);
        return sl_read_fail(SL_ERR_LIMIT, place, expected, value);
    }
    void *items = size > 0 ? calloc(size, sl_field_item_bytes(field)) : NULL;
    if (size > 0 && items == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for %zu items", place->name, size);
    }
    *count = size;
    *(void **)sl_field_at(field, body) = items;
    *items_p = items;
    return SL_OK;
}

static sl_status_t read_items(const sl_place_t *place, const sl_field_t *field,
                              const msgpack_object *value, void *body)
{
    void *items;
    SL_TRY(sl_read_array(place, field, value, body, &items));
    for (uint32_t i = 0; i < value->via.array.size; i++) {
        const msgpack_object *item = &value->via.array.ptr[i];
        sl_place_t item_place = {place, NULL, i};
        switch (field->kind) {
        case SL_FIELD_IDS:
            SL_TRY(read_id(&item_place, item, (int32_t *)items + i));
            break;
        case SL_FIELD_U64S:
            SL_TRY(read_integer(&item_place, item, 0, UINT64_MAX, (uint64_t *)items + i));
            break;
        case SL_FIELD_BLOBS:
            SL_TRY(read_blob(&item_place, item, (sl_bytes_t *)items + i));
            break;
        default:
            SL_ASSERT(field->kind == SL_FIELD_LOGPROBS);
            SL_TRY(read_logprobs_entry(&item_place, item, (sl_logprobs_t *)items + i));
        }
    }
    return SL_OK;
}

/* The unsigned and signed integers, of the field's width. */
static sl_status_t read_integer_field(const sl_place_t *place, const sl_field_t *field,
                                      const msgpack_object *value, void *at)
{
    uint64_t number;
    if (field->kind == SL_FIELD_U64) {
        return read_integer(place, value, 0, UINT64_MAX, at);
    }
    SL_TRY(read_integer(place, value, field->min_int, field->max_int, &number));
    if (field->kind == SL_FIELD_U32) {
        *(uint32_t *)at = (uint32_t)number;
    } else {
        *(int32_t *)at = (int32_t)(int64_t)number;
    }
    return SL_OK;
}

sl_status_t sl_read_value(const sl_place_t *place, const sl_field_t *field,
                          const msgpack_object *value, void *body)
{
    void *at = sl_field_at(field, body);
    switch (field->kind) {
    case SL_FIELD_U32:
    case SL_FIELD_U64:
    case SL_FIELD_I32:
        return read_integer_field(place, field, value, at);
    case SL_FIELD_F32:
        return read_f32(place, field, value, at);
    case SL_FIELD_BOOL:
        if (value->type != MSGPACK_OBJECT_BOOLEAN) {
            return sl_read_fail(SL_ERR_INVALID, place, "true or false", value);
        }
        *(bool *)at = value->via.boolean;
        return SL_OK;
    case SL_FIELD_TEXT:
        return read_text(place, field, value, at);
    case SL_FIELD_WORD:
        return read_word(place, field, value, at);
    case SL_FIELD_BYTES:
        return read_blob(place, value, at);
    case SL_FIELD_FEW_IDS:
        return read_few_ids(place, field, value, body);
    default:
        return read_items(place, field, value, body);
    }
}
