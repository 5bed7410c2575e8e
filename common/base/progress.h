/* A progress bar on standard error: drawn in place on a terminal (at most ten times a second),
 * silent elsewhere. One thread. */
#ifndef SL_BASE_PROGRESS_H
#define SL_BASE_PROGRESS_H

#include <stdint.h>

typedef struct {
    const char *label;
    uint64_t total; /* bytes */
    uint64_t done;
    uint64_t started_us, drawn_us;
} sl_progress_t;

void sl_progress_begin(sl_progress_t *progress, const char *label, uint64_t total_bytes);
void sl_progress_add(sl_progress_t *progress, uint64_t bytes);
void sl_progress_end(sl_progress_t *progress); /* completes the line */

#endif
