/*
 * A few threads that run the parts of one job together with the caller. Made once; one owner
 * thread. A pool of one thread has no workers and runs the job in place.
 */
#ifndef SL_KERNELS_CPU_POOL_H
#define SL_KERNELS_CPU_POOL_H

#include <stddef.h>

#include "common/base/status.h"

typedef struct sl_pool sl_pool_t;

/* Does part `part` of `parts`. Parts must not write the same memory. */
typedef void (*sl_pool_job_t)(const void *context, size_t part, size_t parts);

/* `threads` >= 1, the caller included. SL_ERR_NO_MEMORY, SL_ERR_IO. */
SL_MUST_USE sl_status_t sl_pool_create(size_t threads, sl_pool_t **pool_p);
void sl_pool_destroy(sl_pool_t *pool);

/* Runs the job in as many parts as there are threads, or in one if its `work` (multiply-adds) is
 * not worth waking them. Returns when all parts are done. */
void sl_pool_run(sl_pool_t *pool, double work, sl_pool_job_t job, const void *context);

/* Part `part` of `count` things in units of `unit`: [*begin_p, *end_p). */
void sl_pool_part(size_t count, size_t unit, size_t part, size_t parts, size_t *begin_p,
                  size_t *end_p);

#endif
