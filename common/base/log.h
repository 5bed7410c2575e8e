/*
 * One-line logs to standard error: time, level, program name, text. Lower case, with ids and
 * values. Any thread; one write(2) a line, so lines of several threads never mix.
 */
#ifndef SL_BASE_LOG_H
#define SL_BASE_LOG_H

#include <stdbool.h>
#include <stdint.h>

typedef enum { SL_LOG_DEBUG, SL_LOG_INFO, SL_LOG_WARN, SL_LOG_ERROR } sl_log_level_t;

/* Name shown in each line, e.g. "decode/0/1"; copied, at most 63 characters. Call before threads
 * start. */
void sl_log_set_name(const char *name);

/* Lines below `level` are not printed; the default is SL_LOG_INFO. */
void sl_log_set_level(sl_log_level_t level);

void sl_log(sl_log_level_t level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define sl_log_debug(...) sl_log(SL_LOG_DEBUG, __VA_ARGS__)
#define sl_log_info(...) sl_log(SL_LOG_INFO, __VA_ARGS__)
#define sl_log_warn(...) sl_log(SL_LOG_WARN, __VA_ARGS__)

/* True at most once in `interval_us` for one `*last_us` (start at 0): for per-request lines. */
bool sl_log_allowed(uint64_t *last_us, uint64_t interval_us);

#endif
