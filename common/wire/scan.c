/*
 * The walk is iterative. `owed` counts the values that headers have announced and that have not
 * been read, over all levels together; `left[]` counts them per open container, only to know the
 * depth. Map entries count twice: key and value.
 */
#include "common/wire/scan.h"

#include <string.h>

/* What the tag of one value says. */
typedef struct {
    enum { HEAD_PLAIN, HEAD_STRING, HEAD_ARRAY, HEAD_MAP, HEAD_EXTENSION, HEAD_BAD } kind;
    uint8_t length_bytes; /* of the big-endian length behind the tag; 0: `length` is final */
    uint32_t length;      /* payload bytes, or entries of an array or map */
} head_t;

typedef struct {
    const uint8_t *data;
    size_t size, at;
    const sl_wire_limits_t *limits;
    uint64_t owed, total;
    uint64_t left[SL_SCAN_DEPTH_MAX];
    uint32_t depth;
    bool quiet; /* the status is enough: the thread's error text stays as it is */
} scan_t;

#define SCAN_FAIL(scan, status, ...)                                                               \
    ((scan)->quiet ? (status) : sl_error((status), "message: " __VA_ARGS__))

static head_t head_of_tag(uint8_t tag)
{
    static const head_t wide[] = {
        [0xc0 - 0xc0] = {HEAD_PLAIN, 0, 0},     [0xc1 - 0xc0] = {HEAD_BAD, 0, 0},
        [0xc2 - 0xc0] = {HEAD_PLAIN, 0, 0},     [0xc3 - 0xc0] = {HEAD_PLAIN, 0, 0},
        [0xc4 - 0xc0] = {HEAD_STRING, 1, 0},    [0xc5 - 0xc0] = {HEAD_STRING, 2, 0},
        [0xc6 - 0xc0] = {HEAD_STRING, 4, 0},    [0xc7 - 0xc0] = {HEAD_EXTENSION, 0, 0},
        [0xc8 - 0xc0] = {HEAD_EXTENSION, 0, 0}, [0xc9 - 0xc0] = {HEAD_EXTENSION, 0, 0},
        [0xca - 0xc0] = {HEAD_PLAIN, 0, 4},     [0xcb - 0xc0] = {HEAD_PLAIN, 0, 8},
        [0xcc - 0xc0] = {HEAD_PLAIN, 0, 1},     [0xcd - 0xc0] = {HEAD_PLAIN, 0, 2},
        [0xce - 0xc0] = {HEAD_PLAIN, 0, 4},     [0xcf - 0xc0] = {HEAD_PLAIN, 0, 8},
        [0xd0 - 0xc0] = {HEAD_PLAIN, 0, 1},     [0xd1 - 0xc0] = {HEAD_PLAIN, 0, 2},
        [0xd2 - 0xc0] = {HEAD_PLAIN, 0, 4},     [0xd3 - 0xc0] = {HEAD_PLAIN, 0, 8},
        [0xd4 - 0xc0] = {HEAD_EXTENSION, 0, 0}, [0xd5 - 0xc0] = {HEAD_EXTENSION, 0, 0},
        [0xd6 - 0xc0] = {HEAD_EXTENSION, 0, 0}, [0xd7 - 0xc0] = {HEAD_EXTENSION, 0, 0},
        [0xd8 - 0xc0] = {HEAD_EXTENSION, 0, 0}, [0xd9 - 0xc0] = {HEAD_STRING, 1, 0},
        [0xda - 0xc0] = {HEAD_STRING, 2, 0},    [0xdb - 0xc0] = {HEAD_STRING, 4, 0},
        [0xdc - 0xc0] = {HEAD_ARRAY, 2, 0},     [0xdd - 0xc0] = {HEAD_ARRAY, 4, 0},
        [0xde - 0xc0] = {HEAD_MAP, 2, 0},       [0xdf - 0xc0] = {HEAD_MAP, 4, 0},
    };
    if (tag < 0x80 || tag >= 0xe0) {
        return (head_t){HEAD_PLAIN, 0, 0};
    }
    if (tag < 0x90) {
        return (head_t){HEAD_MAP, 0, tag & 0x0fu};
    }
    if (tag < 0xa0) {
        return (head_t){HEAD_ARRAY, 0, tag & 0x0fu};
    }
    if (tag < 0xc0) {
        return (head_t){HEAD_STRING, 0, tag & 0x1fu};
    }
    return wide[tag - 0xc0];
}

/* Reads tag and length at scan->at. */
static sl_status_t scan_head(scan_t *scan, head_t *head_p)
{
    size_t start = scan->at;
    if (start >= scan->size) {
        return SCAN_FAIL(scan, SL_ERR_INVALID, "not complete: a value is missing at byte %zu",
                         start);
    }
    head_t head = head_of_tag(scan->data[start]);
    if (head.kind == HEAD_BAD || head.kind == HEAD_EXTENSION) {
        return SCAN_FAIL(scan, SL_ERR_INVALID,
                         "expected msgpack without extension types, found "
                         "byte 0x%02x at byte %zu",
                         scan->data[start], start);
    }
    if (head.length_bytes > scan->size - start - 1) {
        return SCAN_FAIL(scan, SL_ERR_INVALID, "not complete: a length is missing at byte %zu",
                         start);
    }
    for (size_t i = 0; i < head.length_bytes; i++) {
        head.length = head.length << 8 | scan->data[start + 1 + i];
    }
    scan->at = start + 1 + head.length_bytes;
    *head_p = head;
    return SL_OK;
}

/* Enters an array or map whose header has just been read. */
static sl_status_t scan_open(scan_t *scan, const head_t *head)
{
    const sl_wire_limits_t *limits = scan->limits;
    bool is_map = head->kind == HEAD_MAP;
    uint64_t items = is_map ? 2 * (uint64_t)head->length : head->length;
    uint64_t bytes_left = scan->size - scan->at;
    if (scan->owed + items > bytes_left) {
        return SCAN_FAIL(scan, SL_ERR_INVALID,
                         "%s of %u before byte %zu does not fit the %llu "
                         "bytes left",
                         is_map ? "a map" : "an array", head->length, scan->at,
                         (unsigned long long)bytes_left);
    }
    uint32_t most = is_map ? limits->map_items : limits->array_items;
    if (head->length > most) {
        return SCAN_FAIL(scan, SL_ERR_LIMIT, "expected at most %u items in %s, found %u", most,
                         is_map ? "a map" : "an array", head->length);
    }
    scan->owed += items;
    scan->total += items;
    if (scan->total > 2 * (uint64_t)limits->array_items) {
        return SCAN_FAIL(scan, SL_ERR_LIMIT, "expected at most %llu values in all, found more",
                         2 * (unsigned long long)limits->array_items);
    }
    if (scan->depth >= limits->depth || scan->depth >= SL_SCAN_DEPTH_MAX) {
        return SCAN_FAIL(scan, SL_ERR_LIMIT, "expected at most %u levels, found more at byte %zu",
                         limits->depth, scan->at);
    }
    scan->left[scan->depth++] = items;
    return SL_OK;
}

sl_status_t sl_scan_value(const uint8_t *data, size_t size, const sl_wire_limits_t *limits,
                          size_t *at_p, bool quiet)
{
    scan_t scan = {
        .data = data, .size = size, .at = *at_p, .limits = limits, .owed = 1, .quiet = quiet};
    while (scan.owed > 0) {
        head_t head = {HEAD_BAD, 0, 0};
        SL_TRY(scan_head(&scan, &head));
        scan.owed--;
        if (scan.depth > 0) {
            scan.left[scan.depth - 1]--;
        }
        if (head.kind == HEAD_ARRAY || head.kind == HEAD_MAP) {
            SL_TRY(scan_open(&scan, &head));
        } else if (head.length > size - scan.at) {
            return SCAN_FAIL(&scan, SL_ERR_INVALID,
                             "a value of %u bytes at byte %zu does not fit "
                             "the %zu bytes left",
                             head.length, scan.at, size - scan.at);
        } else {
            scan.at += head.length;
        }
        while (scan.depth > 0 && scan.left[scan.depth - 1] == 0) {
            scan.depth--;
        }
    }
    *at_p = scan.at;
    return SL_OK;
}

sl_status_t sl_scan_frame(const uint8_t *data, size_t size, const sl_wire_limits_t *limits)
{
    if (size > limits->message_bytes) {
        return sl_error(SL_ERR_LIMIT, "message: expected at most %zu bytes, found %zu",
                        limits->message_bytes, size);
    }
    size_t at = 0;
    SL_TRY(sl_scan_value(data, size, limits, &at, false));
    if (at != size) {
        return sl_error(SL_ERR_INVALID,
                        "message: expected the end at byte %zu, found %zu trailing "
                        "bytes",
                        at, size - at);
    }
    return SL_OK;
}

/* Bytes of the UTF-8 sequence at `text`; 0 if it is none. Overlong forms, surrogates and values
 * above U+10FFFF are none. */
static size_t utf8_sequence(const uint8_t *text, size_t size)
{
    uint8_t lead = text[0];
    if (lead < 0x80) {
        return lead != 0 ? 1 : 0;
    }
    size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || length > size) {
        return 0;
    }
    for (size_t i = 1; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    bool overlong = (lead == 0xe0 && text[1] < 0xa0) || (lead == 0xf0 && text[1] < 0x90);
    bool outside = (lead == 0xed && text[1] >= 0xa0) || (lead == 0xf4 && text[1] >= 0x90);
    return overlong || outside ? 0 : length;
}

size_t sl_utf8_prefix(const char *text, size_t size)
{
    size_t at = 0;
    while (at < size) {
        size_t length = utf8_sequence((const uint8_t *)text + at, size - at);
        if (length == 0) {
            break;
        }
        at += length;
    }
    return at;
}
