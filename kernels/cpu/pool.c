/*
 * One lock guards a job number, the job and the count of parts still running. Workers wait for the
 * number to change, the caller for the count to fall to 0. Nothing spins: ranks share the cores.
 */
#include "kernels/cpu/pool.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define WORK_MIN 200e3 /* below this (a few us) waking a thread costs more than it brings */

typedef struct {
    sl_pool_t *pool;
    size_t part;
    pthread_t thread;
} worker_t;

struct sl_pool {
    size_t threads, workers_started;
    worker_t *workers;
    pthread_mutex_t lock;
    pthread_cond_t job_given, job_done;
    uint64_t job_number;
    size_t parts_running;
    bool stopping;
    sl_pool_job_t job;
    const void *context;
};

static void *work(void *worker_p)
{
    const worker_t *worker = worker_p;
    sl_pool_t *pool = worker->pool;
    uint64_t done = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->job_number == done && !pool->stopping) {
            pthread_cond_wait(&pool->job_given, &pool->lock);
        }
        if (pool->stopping) {
            break;
        }
        done = pool->job_number;
        sl_pool_job_t job = pool->job;
        const void *context = pool->context;
        pthread_mutex_unlock(&pool->lock);
        job(context, worker->part, pool->threads);
        pthread_mutex_lock(&pool->lock);
        if (--pool->parts_running == 0) {
            pthread_cond_signal(&pool->job_done);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

sl_status_t sl_pool_create(size_t threads, sl_pool_t **pool_p)
{
    SL_ASSERT(threads >= 1);
    sl_pool_t *pool = calloc(1, sizeof(*pool));
    worker_t *workers = calloc(threads, sizeof(*workers));
    if (pool == NULL || workers == NULL) {
        free(pool);
        free(workers);
        return sl_error(SL_ERR_NO_MEMORY, "pool of %zu threads", threads);
    }
    pool->threads = threads;
    pool->workers = workers;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->job_given, NULL);
    pthread_cond_init(&pool->job_done, NULL);
    for (size_t i = 0; i + 1 < threads; i++) {
        workers[i] = (worker_t){.pool = pool, .part = i + 1};
        int error = pthread_create(&workers[i].thread, NULL, work, &workers[i]);
        if (error != 0) {
            sl_pool_destroy(pool);
            return sl_error(SL_ERR_IO, "thread %zu of %zu: %s", i + 1, threads, strerror(error));
        }
        pool->workers_started++;
    }
    *pool_p = pool;
    return SL_OK;
}

void sl_pool_destroy(sl_pool_t *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->job_given);
    pthread_mutex_unlock(&pool->lock);
    for (size_t i = 0; i < pool->workers_started; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&pool->job_done);
    pthread_cond_destroy(&pool->job_given);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

void sl_pool_run(sl_pool_t *pool, double work_size, sl_pool_job_t job, const void *context)
{
    if (pool->threads == 1 || work_size < WORK_MIN) {
        job(context, 0, 1);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->job = job;
    pool->context = context;
    pool->parts_running = pool->threads - 1;
    pool->job_number++;
    pthread_cond_broadcast(&pool->job_given);
    pthread_mutex_unlock(&pool->lock);
    job(context, 0, pool->threads);
    pthread_mutex_lock(&pool->lock);
    while (pool->parts_running > 0) {
        pthread_cond_wait(&pool->job_done, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}

void sl_pool_part(size_t count, size_t unit, size_t part, size_t parts, size_t *begin_p,
                  size_t *end_p)
{
    size_t units = (count + unit - 1) / unit;
    size_t begin = units * part / parts * unit, end = units * (part + 1) / parts * unit;
    *begin_p = begin < count ? begin : count;
    *end_p = end < count ? end : count;
}
