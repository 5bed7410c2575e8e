/* Shared by the tests of this folder: quiet logs, and errors checked down to their words. */
#ifndef TESTS_UNIT_MODEL_CHECK_H
#define TESTS_UNIT_MODEL_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/log.h"
#include "common/base/status.h"

/* Expected errors would otherwise fill the output of the runner. */
static inline void quiet(void)
{
    sl_log_set_level((sl_log_level_t)(SL_LOG_ERROR + 1));
}

/* `status` is `expected` and the error's text holds every word up to NULL. */
static inline void check_error(sl_status_t status, sl_status_t expected, ...)
{
    va_list words;
    const char *text = sl_error_text(), *word;
    if (status != expected) {
        fail_msg("expected %s, found %s: %s", sl_status_name(expected), sl_status_name(status),
                 text);
    }
    va_start(words, expected);
    while ((word = va_arg(words, const char *)) != NULL) {
        if (strstr(text, word) == NULL) {
            fail_msg("expected \"%s\" in the error, found: %s", word, text);
        }
    }
    va_end(words);
}

#endif
