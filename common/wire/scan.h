/*
 * Walks msgpack bytes before anything is allocated for them. Any thread; never blocks; safe on any
 * bytes.
 *
 * A header of five bytes can announce four billion items, and nested headers can each claim the
 * same bytes left, so every announced item of every open container is owed at least one byte, and
 * all items owed together must fit what is left. What passes costs a decoder memory in proportion
 * to the frame's size.
 */
#ifndef SL_WIRE_SCAN_H
#define SL_WIRE_SCAN_H

#include "common/wire/messages.h"

#define SL_SCAN_DEPTH_MAX 16 /* upper bound of sl_wire_limits_t.depth */

/* Checks one value starting at *at_p, with all its nested values; *at_p is moved behind it on
 * success. SL_ERR_INVALID or SL_ERR_LIMIT with the byte position in the text; with `quiet` only the
 * status. */
SL_MUST_USE sl_status_t sl_scan_value(const uint8_t *data, size_t size,
                                      const sl_wire_limits_t *limits, size_t *at_p, bool quiet);

/* Checks a whole frame: its size, one value, nothing behind it. */
SL_MUST_USE sl_status_t sl_scan_frame(const uint8_t *data, size_t size,
                                      const sl_wire_limits_t *limits);

/* Length of the longest prefix of `text` that is UTF-8 without zero bytes. */
size_t sl_utf8_prefix(const char *text, size_t size);

#endif
