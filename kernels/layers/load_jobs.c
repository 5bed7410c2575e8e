/*
 * The threads take the next piece from one atomic counter. The calling thread works too, and alone
 * draws the progress; one mutex guards the first failure.
 */
#include "kernels/layers/load_jobs.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/model/layout.h"

typedef struct {
    const sl_load_jobs_t *jobs;
    const sl_ops_t *ops;
    sl_device_t *device;
    _Atomic size_t next;
    _Atomic uint64_t bytes_done;
    _Atomic bool failed;
    pthread_mutex_t mutex; /* over the two below */
    sl_status_t status;
    char text[1024];
} run_t;

sl_status_t sl_load_jobs_add(sl_load_jobs_t *jobs, void *to, const sl_weight_source_t *source)
{
    if (jobs->count == jobs->capacity) {
        size_t capacity = jobs->capacity == 0 ? 256 : jobs->capacity * 2;
        sl_load_job_t *items = realloc(jobs->items, capacity * sizeof(*items));
        if (items == NULL) {
            return sl_error(SL_ERR_NO_MEMORY, "weights: out of host memory for %zu pieces",
                            capacity);
        }
        jobs->items = items;
        jobs->capacity = capacity;
    }
    jobs->items[jobs->count++] = (sl_load_job_t){.to = to, .source = *source};
    return SL_OK;
}

void sl_load_jobs_free(sl_load_jobs_t *jobs)
{
    free(jobs->items);
    *jobs = (sl_load_jobs_t){0};
}

static void record_failure(run_t *run, sl_status_t status)
{
    pthread_mutex_lock(&run->mutex);
    if (run->status == SL_OK) {
        run->status = status;
        snprintf(run->text, sizeof(run->text), "%s", sl_error_text());
    }
    pthread_mutex_unlock(&run->mutex);
    atomic_store(&run->failed, true);
}

/* One piece; false when there is none left, or one has failed. */
static bool run_one(run_t *run)
{
    size_t at = atomic_fetch_add(&run->next, 1);
    if (at >= run->jobs->count || atomic_load(&run->failed)) {
        return false;
    }
    const sl_load_job_t *job = &run->jobs->items[at];
    sl_status_t status = run->ops->load_weight(run->device, job->to, &job->source);
    if (status != SL_OK) {
        record_failure(run, status);
        return false;
    }
    atomic_fetch_add(&run->bytes_done,
                     job->source.rows * job->source.columns * sl_dtype_bytes(job->source.dtype));
    return true;
}

static void *work(void *arg)
{
    while (run_one(arg)) {
    }
    return NULL;
}

static uint32_t thread_count(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores < 1 ? 1 : cores > SL_LOAD_THREADS_MAX ? SL_LOAD_THREADS_MAX : (uint32_t)cores;
}

sl_status_t sl_load_jobs_run(sl_load_jobs_t *jobs, const sl_ops_t *ops, sl_device_t *device,
                             sl_progress_t *progress)
{
    run_t run = {.jobs = jobs, .ops = ops, .device = device};
    pthread_t threads[SL_LOAD_THREADS_MAX];
    uint32_t wanted = thread_count() - 1, started = 0;
    uint64_t drawn = 0;
    pthread_mutex_init(&run.mutex, NULL);
    while (started < wanted && pthread_create(&threads[started], NULL, work, &run) == 0) {
        started++;
    }
    while (run_one(&run)) {
        uint64_t done = atomic_load(&run.bytes_done);
        sl_progress_add(progress, done - drawn);
        drawn = done;
    }
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    sl_progress_add(progress, atomic_load(&run.bytes_done) - drawn);
    pthread_mutex_destroy(&run.mutex);
    jobs->count = 0;
    return run.status == SL_OK ? SL_OK : sl_error(run.status, "%s", run.text);
}
