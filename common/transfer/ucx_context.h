/*
 * What group.c and transfer*.c share of UCX: the two contexts of the process, how a status is put
 * into words, and the worker's address. Internal to common/transfer.
 *
 * The group and the transfer engine get a context each, because a context's features decide which
 * transports its endpoints use: collectives want tag messages over shared memory, transfers want
 * one-sided puts. Neither context is shared between threads.
 */
#ifndef SL_TRANSFER_UCX_CONTEXT_H
#define SL_TRANSFER_UCX_CONTEXT_H

#include <ucp/api/ucp.h>

#include "common/base/status.h"
#include "common/transfer/ucx.h"

ucp_context_h sl_ucx_group_context(const sl_ucx_t *ucx);
ucp_context_h sl_ucx_transfer_context(const sl_ucx_t *ucx);

/* SL_ERR_DEVICE with `what` and UCX's text. */
sl_status_t sl_ucx_error(ucs_status_t ucs_status, const char *what);

/* A worker for one thread, with its event descriptor and address (owned by the worker: released by
 * sl_ucx_worker_destroy()). */
typedef struct {
    ucp_worker_h worker;
    ucp_address_t *address;
    size_t address_bytes;
    int fd;
} sl_ucx_worker_t;

SL_MUST_USE sl_status_t sl_ucx_worker_create(ucp_context_h context, sl_ucx_worker_t *worker_p);
void sl_ucx_worker_destroy(sl_ucx_worker_t *worker);

/* Whether puts of the endpoint are carried out by the transport. If not, UCX emulates them by
 * messages that the other side must answer. */
bool sl_ucx_endpoint_writes(ucp_ep_h endpoint);

/* Sleeps until the worker may have something to progress, at most `wait_ms`; returns at once when
 * it has something already. The worker must have been progressed until it had nothing. */
void sl_ucx_worker_sleep(const sl_ucx_worker_t *worker, int extra_fd, int wait_ms);

#endif
