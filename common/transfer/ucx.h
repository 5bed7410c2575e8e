/*
 * The UCX context of a process, shared by its group and its transfer engine (each has a worker of
 * its own, used by one thread). UCX headers stay inside common/transfer.
 */
#ifndef SL_TRANSFER_UCX_H
#define SL_TRANSFER_UCX_H

#include "common/base/status.h"

typedef struct sl_ucx sl_ucx_t;

/* Main thread. SL_ERR_DEVICE with UCX's own text. */
SL_MUST_USE sl_status_t sl_ucx_create(sl_ucx_t **ucx_p);
void sl_ucx_destroy(sl_ucx_t *ucx);

#endif
