/*
 * Everything is checked against the file's real size before it is believed. Sorting by offset turns
 * "no overlap, no hole" into one pass: each tensor has to begin where the one before ended.
 */
#include "common/model/safetensors.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/json.h"

#define LENGTH_BYTES 8

static const struct {
    const char *name;
    unsigned bits;
} dtypes[] = {
    {"F32", 32},    {"BF16", 16},       {"F16", 16},        {"F64", 64},    {"I64", 64},
    {"I32", 32},    {"I16", 16},        {"I8", 8},          {"U64", 64},    {"U32", 32},
    {"U16", 16},    {"U8", 8},          {"BOOL", 8},        {"F8_E4M3", 8}, {"F8_E5M2", 8},
    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F4", 4},      {"F6_E2M3", 6},
    {"F6_E3M2", 6}, {"C64", 64},
};

static uint64_t read_length(const void *bytes)
{
    const unsigned char *at = bytes;
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) {
        length = length << 8 | at[i];
    }
    return length;
}

static sl_status_t check_name(const char *name, const char *label)
{
    char shown[64];
    size_t length = strlen(name);
    bool printable = true;
    for (size_t i = 0; i < length; i++) {
        printable = printable && (unsigned char)name[i] >= 0x20 && name[i] != 0x7f;
    }
    if (length == 0 || length > SL_SAFETENSORS_NAME_MAX || !printable) {
        return sl_error(SL_ERR_INVALID,
                        "%s: expected tensor names of 1 to %d printable bytes, found %zu bytes "
                        "\"%s\"",
                        label, SL_SAFETENSORS_NAME_MAX, length,
                        sl_json_printable(name, shown, sizeof(shown)));
    }
    return SL_OK;
}

/* Reads an array of at most `max` integers of 0 or more. */
static sl_status_t parse_integers(const json_t *tensor, const char *key, size_t max,
                                  const char *name, const char *label, uint64_t *values,
                                  size_t *count_p)
{
    char found[SL_JSON_FOUND_BYTES];
    const json_t *list = json_object_get(tensor, key);
    size_t count = json_array_size(list);
    bool valid = json_is_array(list) && count <= max;
    for (size_t i = 0; valid && i < count; i++) {
        const json_t *item = json_array_get(list, i);
        valid = json_is_integer(item) && json_integer_value(item) >= 0;
        values[i] = valid ? (uint64_t)json_integer_value(item) : 0;
    }
    if (!valid) {
        return sl_error(SL_ERR_INVALID,
                        "%s: tensor %s: %s: expected a list of at most %zu integers, found %s",
                        label, name, key, max, sl_json_found(list, found));
    }
    *count_p = count;
    return SL_OK;
}

static sl_status_t parse_dtype(const json_t *tensor, const char *name, const char *label,
                               const char **dtype_p, unsigned *bits_p)
{
    char found[SL_JSON_FOUND_BYTES];
    const json_t *value = json_object_get(tensor, "dtype");
    const char *text = json_string_value(value);
    for (size_t i = 0; text != NULL && i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
        if (strcmp(text, dtypes[i].name) == 0) {
            *dtype_p = dtypes[i].name;
            *bits_p = dtypes[i].bits;
            return SL_OK;
        }
    }
    return sl_error(text != NULL ? SL_ERR_UNSUPPORTED : SL_ERR_INVALID,
                    "%s: tensor %s: dtype: expected one of the format (F32, BF16, F16, ...), "
                    "found %s",
                    label, name, sl_json_found(value, found));
}

/* Bytes that shape and dtype ask for; false if the product overflows or ends within a byte. */
static bool tensor_bytes(const sl_safetensors_entry_t *entry, unsigned bits, uint64_t *bytes_p)
{
    uint64_t total = bits;
    for (uint32_t i = 0; i < entry->rank; i++) {
        if (__builtin_mul_overflow(total, entry->shape[i], &total)) {
            return false;
        }
    }
    *bytes_p = total / 8;
    return total % 8 == 0;
}

static sl_status_t parse_entry(const char *name, const json_t *tensor, uint64_t data_start,
                               uint64_t data_bytes, const char *label,
                               sl_safetensors_entry_t *entry)
{
    uint64_t offsets[2] = {0, 0}, bytes = 0;
    size_t rank = 0, offset_count = 0;
    unsigned bits = 0;
    SL_TRY(check_name(name, label));
    if (!json_is_object(tensor)) {
        return sl_error(SL_ERR_INVALID, "%s: tensor %s: expected an object", label, name);
    }
    SL_TRY(parse_dtype(tensor, name, label, &entry->dtype, &bits));
    SL_TRY(
        parse_integers(tensor, "shape", SL_SAFETENSORS_RANK_MAX, name, label, entry->shape, &rank));
    SL_TRY(parse_integers(tensor, "data_offsets", 2, name, label, offsets, &offset_count));
    entry->name = name;
    entry->rank = (uint32_t)rank;
    if (offset_count != 2 || offsets[0] > offsets[1]) {
        return sl_error(SL_ERR_INVALID,
                        "%s: tensor %s: data_offsets: expected begin and end in order, found %zu "
                        "values %llu and %llu",
                        label, name, offset_count, (unsigned long long)offsets[0],
                        (unsigned long long)offsets[1]);
    }
    if (offsets[1] > data_bytes) {
        return sl_error(SL_ERR_INVALID,
                        "%s: tensor %s ends at data byte %llu, found %llu bytes of data: the file "
                        "is truncated",
                        label, name, (unsigned long long)offsets[1],
                        (unsigned long long)data_bytes);
    }
    if (!tensor_bytes(entry, bits, &bytes) || bytes != offsets[1] - offsets[0]) {
        return sl_error(SL_ERR_INVALID,
                        "%s: tensor %s: expected the bytes of its shape and dtype %s, found %llu "
                        "bytes between its data_offsets",
                        label, name, entry->dtype, (unsigned long long)(offsets[1] - offsets[0]));
    }
    entry->begin = data_start + offsets[0];
    entry->end = data_start + offsets[1];
    return SL_OK;
}

static int compare_offsets(const void *left, const void *right)
{
    const sl_safetensors_entry_t *a = left, *b = right;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return a->end < b->end ? -1 : a->end > b->end;
}

/* `entries` sorted: each begins where the one before ended, and the last ends with the file. */
static sl_status_t check_tiling(const sl_safetensors_t *header, uint64_t data_start, uint64_t size,
                                const char *label)
{
    uint64_t expected = data_start;
    const char *before = "the header";
    for (size_t i = 0; i < header->count; i++) {
        const sl_safetensors_entry_t *entry = &header->entries[i];
        if (entry->begin != expected) {
            return sl_error(SL_ERR_INVALID,
                            "%s: tensor %s %s %s: expected it to begin at data byte %llu, found "
                            "%llu",
                            label, entry->name,
                            entry->begin < expected ? "overlaps" : "leaves a hole after", before,
                            (unsigned long long)(expected - data_start),
                            (unsigned long long)(entry->begin - data_start));
        }
        expected = entry->end;
        before = entry->name;
    }
    if (expected != size) {
        return sl_error(SL_ERR_INVALID,
                        "%s: expected the file to end at byte %llu after %s, found %llu bytes",
                        label, (unsigned long long)expected, before, (unsigned long long)size);
    }
    return SL_OK;
}

static sl_status_t parse_entries(const char *label, uint64_t data_start, uint64_t size,
                                 sl_safetensors_t *header)
{
    const char *name;
    json_t *tensor;
    size_t members = json_object_size(header->root);
    header->entries = calloc(members + 1, sizeof(header->entries[0]));
    if (header->entries == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for a table of %zu tensors", label,
                        members);
    }
    json_object_foreach(header->root, name, tensor)
    {
        if (strcmp(name, "__metadata__") == 0) {
            continue;
        }
        SL_TRY(parse_entry(name, tensor, data_start, size - data_start, label,
                           &header->entries[header->count]));
        header->count++;
    }
    qsort(header->entries, header->count, sizeof(header->entries[0]), compare_offsets);
    return check_tiling(header, data_start, size, label);
}

sl_status_t sl_safetensors_parse(const void *bytes, size_t size, const char *label,
                                 sl_safetensors_t *header_p)
{
    sl_safetensors_t header = {0};
    if (size < LENGTH_BYTES + 2) {
        return sl_error(SL_ERR_INVALID,
                        "%s: expected a safetensors file of at least %d bytes, found %zu: the file "
                        "is truncated",
                        label, LENGTH_BYTES + 2, size);
    }
    uint64_t length = read_length(bytes);
    if (length > SL_SAFETENSORS_HEADER_MAX) {
        return sl_error(SL_ERR_LIMIT, "%s: expected a header of at most %u bytes, found %llu",
                        label, SL_SAFETENSORS_HEADER_MAX, (unsigned long long)length);
    }
    if (length > size - LENGTH_BYTES) {
        return sl_error(SL_ERR_INVALID,
                        "%s: expected a header of %llu bytes, found %zu after the length: the file "
                        "is truncated",
                        label, (unsigned long long)length, size - LENGTH_BYTES);
    }
    SL_TRY(sl_json_parse((const char *)bytes + LENGTH_BYTES, (size_t)length, label, &header.root));
    sl_status_t status = parse_entries(label, LENGTH_BYTES + length, size, &header);
    if (status != SL_OK) {
        sl_safetensors_cleanup(&header);
        return status;
    }
    *header_p = header;
    return SL_OK;
}

void sl_safetensors_cleanup(sl_safetensors_t *header)
{
    free(header->entries);
    json_decref(header->root);
    *header = (sl_safetensors_t){0};
}
