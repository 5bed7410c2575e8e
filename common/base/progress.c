/*
 * The line is redrawn over itself with a carriage return and finished with a newline. Redrawing
 * costs a system call, so it happens ten times a second however often bytes are added.
 */
#include "common/base/progress.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"

#define DRAW_INTERVAL_US 100000
#define BAR_CELLS 30
#define MIB (1024.0 * 1024.0)

static void draw(sl_progress_t *progress, uint64_t now_us, bool last)
{
    char bar[BAR_CELLS + 1], line[256];
    double share = progress->total == 0 ? 1.0 : (double)progress->done / (double)progress->total;
    share = share > 1.0 ? 1.0 : share;
    double seconds = (double)(now_us - progress->started_us) / 1e6;
    double rate = seconds > 0 ? (double)progress->done / MIB / seconds : 0;
    size_t filled = (size_t)(share * BAR_CELLS);
    memset(bar, ' ', BAR_CELLS);
    memset(bar, '=', filled);
    bar[BAR_CELLS] = '\0';
    int length =
        snprintf(line, sizeof(line), "\r%.64s [%s] %3.0f%% %.1f/%.1f MiB %.0f MiB/s\033[K%s",
                 progress->label, bar, share * 100, (double)progress->done / MIB,
                 (double)progress->total / MIB, rate, last ? "\n" : "");
    if (length >= (int)sizeof(line)) {
        length = (int)sizeof(line) - 1;
    }
    ssize_t written = write(STDERR_FILENO, line, (size_t)length);
    (void)written; /* a terminal that went away stops nothing */
    progress->drawn_us = now_us;
}

void sl_progress_begin(sl_progress_t *progress, const char *label, uint64_t total_bytes)
{
    uint64_t now_us = sl_now_us();
    *progress = (sl_progress_t){.label = label, .total = total_bytes, .started_us = now_us};
    if (isatty(STDERR_FILENO)) {
        draw(progress, now_us, false);
    }
}

void sl_progress_add(sl_progress_t *progress, uint64_t bytes)
{
    progress->done += bytes;
    if (progress->drawn_us == 0) { /* no terminal */
        return;
    }
    uint64_t now_us = sl_now_us();
    if (now_us - progress->drawn_us >= DRAW_INTERVAL_US) {
        draw(progress, now_us, false);
    }
}

void sl_progress_end(sl_progress_t *progress)
{
    if (progress->drawn_us != 0) {
        draw(progress, sl_now_us(), true);
    }
    progress->drawn_us = 0;
}
