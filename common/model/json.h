/*
 * JSON of a checkpoint directory: jansson behind limits on size, depth and number of values, all
 * checked before anything is allocated, and typed getters whose errors name the file, the key, what
 * was expected and what was found. Any thread; blocks only to read files.
 */
#ifndef SL_MODEL_JSON_H
#define SL_MODEL_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define SL_JSON_DEPTH_MAX 32
#define SL_JSON_VALUES_MAX (4u << 20) /* V3 with its 92,000 tensors needs 0.9 million */
#define SL_JSON_FOUND_BYTES 96        /* room for a value as it is shown in an error */

/* One object and how errors name it. */
typedef struct {
    const json_t *object;
    const char *label;  /* "path/config.json" */
    const char *prefix; /* "" or "rope_scaling." */
} sl_json_scope_t;

/* Parses `size` bytes into *root_p (the caller's to json_decref), which is an object with no key
 * twice. SL_ERR_LIMIT over a limit, SL_ERR_INVALID for what is not such JSON. */
SL_MUST_USE sl_status_t sl_json_parse(const char *text, size_t size, const char *label,
                                      json_t **root_p);

/* The same for a file of at most `size_max` bytes. A file that does not exist is SL_ERR_NOT_FOUND,
 * and then not an error yet: nothing is logged or said. */
SL_MUST_USE sl_status_t sl_json_read(const char *path, size_t size_max, json_t **root_p);

/* The member `key`, or NULL when it is missing or null: the format uses both for "not set". */
const json_t *sl_json_get(const sl_json_scope_t *scope, const char *key);

/* Numbers within inclusive bounds. With a `fallback`, a missing or null key gives its value. */
SL_MUST_USE sl_status_t sl_json_u32(const sl_json_scope_t *scope, const char *key, uint32_t min,
                                    uint32_t max, const uint32_t *fallback, uint32_t *value_p);
SL_MUST_USE sl_status_t sl_json_float(const sl_json_scope_t *scope, const char *key, double min,
                                      double max, const float *fallback, float *value_p);
SL_MUST_USE sl_status_t sl_json_bool(const sl_json_scope_t *scope, const char *key, bool fallback,
                                     bool *value_p);

/* Index of the string under `key` among the NULL-terminated `words`; `fallback` when it is missing
 * or null (-1: required). A string that is no word is SL_ERR_UNSUPPORTED. */
SL_MUST_USE sl_status_t sl_json_word(const sl_json_scope_t *scope, const char *key,
                                     const char *const *words, int fallback, int *index_p);

/* `value` as one printable line in `text`, shortened to fit; "nothing" for NULL. Returns `text`. */
const char *sl_json_found(const json_t *value, char text[SL_JSON_FOUND_BYTES]);

/* Copies `in` with bytes that would break a log line shown as '?', shortened to fit. */
const char *sl_json_printable(const char *in, char *text, size_t size);

#endif
