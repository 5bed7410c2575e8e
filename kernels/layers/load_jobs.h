/*
 * Pieces of a checkpoint on their way to the device, copied by several threads: what takes the time
 * is paging the file in and converting it on the host. Pieces do not overlap, so their order does
 * not matter. Main thread, at start; sl_ops_t.load_weight() may run on several threads at once.
 */
#ifndef SL_LAYERS_LOAD_JOBS_H
#define SL_LAYERS_LOAD_JOBS_H

#include "common/base/progress.h"
#include "kernels/ops.h"

typedef struct {
    void *to;
    sl_weight_source_t source;
} sl_load_job_t;

typedef struct {
    sl_load_job_t *items;
    size_t count, capacity;
} sl_load_jobs_t;

#define SL_LOAD_THREADS_MAX 8

/* SL_ERR_NO_MEMORY. */
SL_MUST_USE sl_status_t sl_load_jobs_add(sl_load_jobs_t *jobs, void *to,
                                         const sl_weight_source_t *source);

/* Copies all pieces and empties the list; `progress` moves by their bytes in the file. The first
 * failure ends it, with its text. */
SL_MUST_USE sl_status_t sl_load_jobs_run(sl_load_jobs_t *jobs, const sl_ops_t *ops,
                                         sl_device_t *device, sl_progress_t *progress);

void sl_load_jobs_free(sl_load_jobs_t *jobs);

#endif
