/* Codes, names and the per-thread error text. One table keeps code, name and wire spelling. */
#include "common/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"

#define ERROR_TEXT_BYTES 1024

static _Thread_local char error_text[ERROR_TEXT_BYTES];

static const struct {
    sl_status_t status;
    const char *name;
} status_names[] = {
    {SL_OK, "ok"},
    {SL_ERR_INVALID, "invalid"},
    {SL_ERR_LIMIT, "limit"},
    {SL_ERR_NO_PAGES, "no_pages"},
    {SL_ERR_CANCELED, "canceled"},
    {SL_ERR_DEADLINE, "deadline"},
    {SL_ERR_NOT_FOUND, "not_found"},
    {SL_ERR_UNREACHABLE, "unreachable"},
    {SL_ERR_STALE, "stale"},
    {SL_ERR_REFUSED, "refused"},
    {SL_ERR_TIMEOUT, "timeout"},
    {SL_ERR_AGAIN, "again"},
    {SL_ERR_IO, "io"},
    {SL_ERR_NO_MEMORY, "no_memory"},
    {SL_ERR_DEVICE, "device"},
    {SL_ERR_DESYNC, "desync"},
    {SL_ERR_UNSUPPORTED, "unsupported"},
    {SL_ERR_CONFIG, "config"},
};
#define STATUS_NAME_COUNT (sizeof(status_names) / sizeof(status_names[0]))

sl_scope_t sl_status_scope(sl_status_t status)
{
    if (status == SL_OK) {
        return SL_SCOPE_NONE;
    }
    if (status > -100) {
        return SL_SCOPE_REQUEST;
    }
    return status > -200 ? SL_SCOPE_PEER : SL_SCOPE_PROCESS;
}

const char *sl_status_name(sl_status_t status)
{
    for (size_t i = 0; i < STATUS_NAME_COUNT; i++) {
        if (status_names[i].status == status) {
            return status_names[i].name;
        }
    }
    return "unknown";
}

sl_status_t sl_status_from_name(const char *name)
{
    for (size_t i = 0; i < STATUS_NAME_COUNT; i++) {
        if (strcmp(status_names[i].name, name) == 0) {
            return status_names[i].status;
        }
    }
    return SL_ERR_UNSUPPORTED;
}

sl_status_t sl_error(sl_status_t status, const char *format, ...)
{
    /* Formatted apart first: an argument may be the text of an earlier error. */
    char text[ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    memcpy(error_text, text, sizeof(text));
    sl_log(sl_status_scope(status) == SL_SCOPE_REQUEST ? SL_LOG_DEBUG : SL_LOG_ERROR, "%s: %s",
           sl_status_name(status), error_text);
    return status;
}

const char *sl_error_text(void)
{
    return error_text;
}

void sl_assert_fail(const char *cond, const char *file, int line, const char *func)
{
    fprintf(stderr, "assertion failed: %s at %s:%d in %s\n", cond, file, line, func);
    abort();
}
