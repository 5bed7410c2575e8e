/* Formats a line in a stack buffer and writes it with one call. */
#include "common/base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"

#define LINE_BYTES 1536

static char log_name[64] = "sluice";
static _Atomic int log_level = SL_LOG_INFO;

void sl_log_set_name(const char *name)
{
    snprintf(log_name, sizeof(log_name), "%s", name);
}

void sl_log_set_level(sl_log_level_t level)
{
    atomic_store(&log_level, (int)level);
}

void sl_log(sl_log_level_t level, const char *format, ...)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if ((int)level < atomic_load_explicit(&log_level, memory_order_relaxed)) {
        return;
    }
    struct timespec now;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);

    char line[LINE_BYTES];
    size_t used = strftime(line, sizeof(line), "%Y-%m-%dT%H:%M:%S", &parts);
    used += (size_t)snprintf(line + used, sizeof(line) - used, ".%03ldZ %s %s: ",
                             now.tv_nsec / 1000000, names[level], log_name);
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(line + used, sizeof(line) - used - 1, format, args);
    va_end(args);
    if (wanted < 0) {
        return;
    }
    used += (size_t)wanted;
    if (used > sizeof(line) - 2) {
        used = sizeof(line) - 2;
    }
    line[used++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written; /* a log that cannot be written has nowhere else to go */
}

bool sl_log_allowed(uint64_t *last_us, uint64_t interval_us)
{
    uint64_t now_us = sl_now_us();
    if (*last_us != 0 && now_us - *last_us < interval_us) {
        return false;
    }
    *last_us = now_us;
    return true;
}
