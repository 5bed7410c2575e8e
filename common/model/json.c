/*
 * jansson recurses to depth 2,048 and takes about 60 bytes of memory for each two bytes of "0,", so
 * a short scan over the text counts brackets and separators first; it needs to know strings only,
 * because brackets and commas inside them mean nothing.
 */
#include "common/model/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const char *sl_json_printable(const char *in, char *text, size_t size)
{
    size_t used = 0;
    for (; in[used] != '\0' && used + 1 < size; used++) {
        unsigned char byte = (unsigned char)in[used];
        text[used] = byte < 0x20 || byte == 0x7f ? '?' : (char)byte;
    }
    text[used] = '\0';
    if (in[used] != '\0' && size > 4) {
        memcpy(text + size - 4, "...", 4);
    }
    return text;
}

const char *sl_json_found(const json_t *value, char text[SL_JSON_FOUND_BYTES])
{
    char raw[SL_JSON_FOUND_BYTES];
    if (value == NULL) {
        return strcpy(text, "nothing");
    }
    size_t size = json_dumpb(value, raw, sizeof(raw) - 1,
                             JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(9));
    if (size == 0) {
        return strcpy(text, "a value that cannot be shown");
    }
    if (size > sizeof(raw) - 1) {
        snprintf(text, SL_JSON_FOUND_BYTES, "%s of %zu bytes",
                 json_is_object(value)  ? "an object"
                 : json_is_array(value) ? "an array"
                                        : "a value",
                 size);
        return text;
    }
    raw[size] = '\0';
    return sl_json_printable(raw, text, SL_JSON_FOUND_BYTES);
}

/* Depth and number of values, before jansson sees the text. */
static sl_status_t check_limits(const char *text, size_t size, const char *label)
{
    size_t depth = 0, values = 0;
    bool in_string = false;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\') {
                i++;
            } else if (c == '"') {
                in_string = false;
            }
            continue;
        }
        in_string = c == '"';
        if (c == '{' || c == '[') {
            depth++;
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--;
        }
        values += c == ',' || c == ':' || c == '{' || c == '[';
        if (depth > SL_JSON_DEPTH_MAX) {
            return sl_error(SL_ERR_LIMIT, "%s: JSON nested deeper than %d at byte %zu", label,
                            SL_JSON_DEPTH_MAX, i);
        }
        if (values > SL_JSON_VALUES_MAX) {
            return sl_error(SL_ERR_LIMIT, "%s: more than %u JSON values at byte %zu", label,
                            SL_JSON_VALUES_MAX, i);
        }
    }
    return SL_OK;
}

sl_status_t sl_json_parse(const char *text, size_t size, const char *label, json_t **root_p)
{
    json_error_t error;
    char shown[sizeof(error.text)];
    SL_TRY(check_limits(text, size, label));
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) {
        return sl_error(SL_ERR_INVALID, "%s: not valid JSON at line %d column %d: %s", label,
                        error.line, error.column,
                        sl_json_printable(error.text, shown, sizeof(shown)));
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return sl_error(SL_ERR_INVALID, "%s: expected a JSON object, found another kind of value",
                        label);
    }
    *root_p = root;
    return SL_OK;
}

/* The whole file behind `fd` in memory of its own. */
static sl_status_t read_all(int fd, const char *path, size_t size_max, char **text_p,
                            size_t *size_p)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot stat: %s", path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        return sl_error(SL_ERR_INVALID, "%s: expected a regular file", path);
    }
    if ((uint64_t)info.st_size > size_max) {
        return sl_error(SL_ERR_LIMIT, "%s: expected at most %zu bytes, found %lld", path, size_max,
                        (long long)info.st_size);
    }
    size_t size = (size_t)info.st_size, done = 0;
    char *text = malloc(size + 1);
    if (text == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for %zu bytes", path, size);
    }
    while (done < size) {
        ssize_t got = read(fd, text + done, size - done);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            free(text);
            return sl_error(SL_ERR_IO, "%s: read %zu of %zu bytes: %s", path, done, size,
                            got < 0 ? strerror(errno) : "the file became shorter");
        }
        done += (size_t)got;
    }
    *text_p = text;
    *size_p = size;
    return SL_OK;
}

sl_status_t sl_json_read(const char *path, size_t size_max, json_t **root_p)
{
    char *text = NULL;
    size_t size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        return SL_ERR_NOT_FOUND;
    }
    if (fd < 0) {
        return sl_error(SL_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    }
    sl_status_t status = read_all(fd, path, size_max, &text, &size);
    close(fd);
    if (status == SL_OK) {
        status = sl_json_parse(text, size, path, root_p);
        free(text);
    }
    return status;
}

const json_t *sl_json_get(const sl_json_scope_t *scope, const char *key)
{
    const json_t *value = json_object_get(scope->object, key);
    return json_is_null(value) ? NULL : value;
}

sl_status_t sl_json_u32(const sl_json_scope_t *scope, const char *key, uint32_t min, uint32_t max,
                        const uint32_t *fallback, uint32_t *value_p)
{
    char found[SL_JSON_FOUND_BYTES];
    const json_t *value = sl_json_get(scope, key);
    if (value == NULL && fallback != NULL) {
        *value_p = *fallback;
        return SL_OK;
    }
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < min || number > max) {
        return sl_error(SL_ERR_INVALID, "%s: key %s%s: expected an integer from %u to %u, found %s",
                        scope->label, scope->prefix, key, min, max, sl_json_found(value, found));
    }
    *value_p = (uint32_t)number;
    return SL_OK;
}

sl_status_t sl_json_float(const sl_json_scope_t *scope, const char *key, double min, double max,
                          const float *fallback, float *value_p)
{
    char found[SL_JSON_FOUND_BYTES];
    const json_t *value = sl_json_get(scope, key);
    if (value == NULL && fallback != NULL) {
        *value_p = *fallback;
        return SL_OK;
    }
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= min && number <= max)) {
        return sl_error(SL_ERR_INVALID, "%s: key %s%s: expected a number from %g to %g, found %s",
                        scope->label, scope->prefix, key, min, max, sl_json_found(value, found));
    }
    *value_p = (float)number;
    return SL_OK;
}

sl_status_t sl_json_bool(const sl_json_scope_t *scope, const char *key, bool fallback,
                         bool *value_p)
{
    char found[SL_JSON_FOUND_BYTES];
    const json_t *value = sl_json_get(scope, key);
    if (value != NULL && !json_is_boolean(value)) {
        return sl_error(SL_ERR_INVALID, "%s: key %s%s: expected true or false, found %s",
                        scope->label, scope->prefix, key, sl_json_found(value, found));
    }
    *value_p = value == NULL ? fallback : json_is_true(value);
    return SL_OK;
}

sl_status_t sl_json_word(const sl_json_scope_t *scope, const char *key, const char *const *words,
                         int fallback, int *index_p)
{
    char found[SL_JSON_FOUND_BYTES], known[256] = "";
    const json_t *value = sl_json_get(scope, key);
    if (value == NULL && fallback >= 0) {
        *index_p = fallback;
        return SL_OK;
    }
    size_t used = 0;
    for (int i = 0; words[i] != NULL; i++) {
        if (json_is_string(value) && strcmp(json_string_value(value), words[i]) == 0) {
            *index_p = i;
            return SL_OK;
        }
        int wrote = snprintf(known + used, sizeof(known) - used, "%s\"%s\"", i == 0 ? "" : " or ",
                             words[i]);
        used += (size_t)wrote < sizeof(known) - used ? (size_t)wrote : 0;
    }
    return sl_error(json_is_string(value) ? SL_ERR_UNSUPPORTED : SL_ERR_INVALID,
                    "%s: key %s%s: expected %s, found %s", scope->label, scope->prefix, key, known,
                    sl_json_found(value, found));
}
