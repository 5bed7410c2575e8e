/*
 * Reads one msgpack value into one struct field, with the kind and value checks, and says in full
 * what was wrong: path, expected, found. Internal to common/wire; no allocation beyond the arrays
 * that a field itself owns.
 */
#ifndef SL_WIRE_READ_H
#define SL_WIRE_READ_H

#include <msgpack.h>

#include "common/wire/fields.h"

/* Where a value stands, for error texts; built on the stack, printed only when something fails. */
typedef struct sl_place {
    const struct sl_place *parent; /* NULL: the message itself */
    const char *name;              /* NULL: an array item */
    size_t index;
} sl_place_t;

/* Decides an error at `place`: "<path>: expected <expected>, found <value>". */
sl_status_t sl_read_fail(sl_status_t status, const sl_place_t *place, const char *expected,
                         const msgpack_object *found);

/* The field's value from `value`. On failure the field may own a partly filled array, which
 * sl_message_destroy() frees. STRUCT and STRUCTS are not read here. */
SL_MUST_USE sl_status_t sl_read_value(const sl_place_t *place, const sl_field_t *field,
                                      const msgpack_object *value, void *body);

/* Checks that `value` is an array of items within the field's bounds and allocates them, zeroed;
 * the count is set (or, for a shared count, compared). *items_p is NULL for an empty array. */
SL_MUST_USE sl_status_t sl_read_array(const sl_place_t *place, const sl_field_t *field,
                                      const msgpack_object *value, void *body, void **items_p);

/* Prints the path of `place`, e.g. "status_reply.ranks[2].tp"; returns `text`. */
const char *sl_place_text(const sl_place_t *place, char *text, size_t size);

/* Prints untrusted text in quotes, short, with everything but printable ASCII escaped. */
const char *sl_quote(const char *from, size_t from_size, char *text, size_t size);

#endif
