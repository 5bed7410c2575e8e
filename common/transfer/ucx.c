/*
 * The UCX contexts of a process. UCX reads its environment when the library is loaded, so the few
 * defaults that Sluice wants otherwise are set through its option table here, and only where the
 * user's environment says nothing. UCX's own log lines go to Sluice's log.
 */
#include "common/transfer/ucx.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/log_def.h>

#include "common/base/log.h"
#include "common/transfer/ucx_context.h"

#if defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREAD_SANITIZED 1
#endif
#endif
#ifndef THREAD_SANITIZED
#define THREAD_SANITIZED 0
#endif

struct sl_ucx {
    ucp_context_h group;
    ucp_context_h transfer;
};

/* A UCX error is mostly a peer that went away; whoever waits for it decides the status and logs
 * that at its own level. Hence nothing of UCX's is above `warn`. */
static ucs_log_func_rc_t forward_log(const char *file, unsigned line, const char *function,
                                     ucs_log_level_t level,
                                     const ucs_log_component_config_t *component,
                                     const char *format, va_list args)
{
    (void)function;
    if (level > component->log_level) {
        return UCS_LOG_FUNC_RC_STOP;
    }
    if (level == UCS_LOG_LEVEL_FATAL) {
        return UCS_LOG_FUNC_RC_CONTINUE; /* UCX's own handler prints the trace and aborts */
    }
    char text[512];
    vsnprintf(text, sizeof(text), format, args);
    const char *slash = strrchr(file, '/');
    sl_log(level <= UCS_LOG_LEVEL_WARN ? SL_LOG_WARN : SL_LOG_DEBUG, "ucx: %s (%s:%u)", text,
           slash == NULL ? file : slash + 1, line);
    return UCS_LOG_FUNC_RC_STOP;
}

static void configure_library(void)
{
    if (getenv("UCX_WARN_UNUSED_ENV_VARS") == NULL) {
        ucs_global_opts.warn_unused_env_vars = 0;
    }
    if (getenv("UCX_TCP_RX_SEG_SIZE") == NULL) {
        /* UCX 1.13 carries puts over tcp as messages; its default of 8 KiB each makes them three
         * times slower than what it is ready to receive. Read when a worker is created. */
        setenv("UCX_TCP_TX_SEG_SIZE", "64k", 0);
    }
    if (getenv("UCX_MEMTYPE_CACHE") == NULL) {
        ucs_global_opts.enable_memtype_cache = UCS_NO; /* it misses what was taken before */
    }
    ucs_log_push_handler(forward_log);
}

sl_status_t sl_ucx_error(ucs_status_t ucs_status, const char *what)
{
    return sl_error(SL_ERR_DEVICE, "ucx: %s: %s", what, ucs_status_string(ucs_status));
}

static sl_status_t create_context(const char *name, uint64_t features, ucp_context_h *context_p)
{
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) {
        return sl_ucx_error(status, "reading the configuration");
    }
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
        .features = features,
        .name = name,
    };
    status = ucp_init(&params, config, context_p);
    ucp_config_release(config);
    return status == UCS_OK ? SL_OK : sl_ucx_error(status, "creating a context");
}

sl_status_t sl_ucx_create(sl_ucx_t **ucx_p)
{
    if (THREAD_SANITIZED && getenv("UCX_MEM_EVENTS") == NULL) {
        /* UCX patches mmap and its like when it is loaded, which crashes new threads under the
         * thread sanitizer; only the environment is early enough to prevent it. */
        return sl_error(SL_ERR_CONFIG, "ucx: a thread-sanitizer build needs the environment "
                                       "variable UCX_MEM_EVENTS=n");
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, configure_library);

    sl_ucx_t *ucx = calloc(1, sizeof(*ucx));
    if (ucx == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "ucx: context of %zu bytes", sizeof(*ucx));
    }
    sl_status_t status;
    SL_TRY_GOTO(status,
                create_context("sluice-group", UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP, &ucx->group),
                destroy);
    SL_TRY_GOTO(status,
                create_context("sluice-transfer",
                               UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                               &ucx->transfer),
                destroy);
    *ucx_p = ucx;
    return SL_OK;

destroy:
    sl_ucx_destroy(ucx);
    return status;
}

void sl_ucx_destroy(sl_ucx_t *ucx)
{
    if (ucx == NULL) {
        return;
    }
    if (ucx->transfer != NULL) {
        ucp_cleanup(ucx->transfer);
    }
    if (ucx->group != NULL) {
        ucp_cleanup(ucx->group);
    }
    free(ucx);
}

ucp_context_h sl_ucx_group_context(const sl_ucx_t *ucx)
{
    return ucx->group;
}

ucp_context_h sl_ucx_transfer_context(const sl_ucx_t *ucx)
{
    return ucx->transfer;
}

sl_status_t sl_ucx_worker_create(ucp_context_h context, sl_ucx_worker_t *worker_p)
{
    sl_ucx_worker_t worker = {0};
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED, /* made by one thread, used by another */
    };
    ucs_status_t status = ucp_worker_create(context, &params, &worker.worker);
    if (status != UCS_OK) {
        return sl_ucx_error(status, "creating a worker");
    }
    const char *what = "reading the worker's address";
    status = ucp_worker_get_address(worker.worker, &worker.address, &worker.address_bytes);
    if (status == UCS_OK) {
        what = "opening the worker's event descriptor";
        status = ucp_worker_get_efd(worker.worker, &worker.fd);
    }
    if (status != UCS_OK) {
        sl_ucx_worker_destroy(&worker);
        return sl_ucx_error(status, what);
    }
    *worker_p = worker;
    return SL_OK;
}

void sl_ucx_worker_destroy(sl_ucx_worker_t *worker)
{
    if (worker->address != NULL) {
        ucp_worker_release_address(worker->worker, worker->address);
    }
    if (worker->worker != NULL) {
        ucp_worker_destroy(worker->worker);
    }
    *worker = (sl_ucx_worker_t){0};
}

bool sl_ucx_endpoint_writes(ucp_ep_h endpoint)
{
    /* UCX 1.13 tells of an endpoint's lanes in words only. Where they are not understood, messages
     * are right everywhere. */
    char *text = NULL;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    if (stream == NULL) {
        return false;
    }
    ucp_ep_print_info(endpoint, stream);
    fclose(stream);
    bool writes = text != NULL && strstr(text, " rma#") != NULL;
    sl_log_debug("ucx: %s", text == NULL ? "endpoint" : text);
    free(text);
    return writes;
}

void sl_ucx_worker_sleep(const sl_ucx_worker_t *worker, int extra_fd, int wait_ms)
{
    /* UCX wakes the descriptor only for what comes after a successful arm. */
    if (ucp_worker_arm(worker->worker) != UCS_OK) {
        return;
    }
    struct pollfd fds[2] = {{.fd = worker->fd, .events = POLLIN},
                            {.fd = extra_fd, .events = POLLIN}};
    int ready = poll(fds, extra_fd < 0 ? 1 : 2, wait_ms);
    (void)ready; /* an interrupted or timed out sleep is a wake-up like any other */
}
