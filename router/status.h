/* The router's answers about itself: `status_reply` and `info_reply`, from the registry and the
 * request table. Single thread; never blocks. */
#ifndef SL_ROUTER_STATUS_H
#define SL_ROUTER_STATUS_H

#include "router/requests.h"

/* Fills a `status_reply`; its rank array is owned by the message: sl_message_destroy() it. */
SL_MUST_USE sl_status_t sl_status_report(const sl_registry_t *registry,
                                         const sl_requests_t *requests, uint64_t started_us,
                                         uint64_t now_us, sl_message_t *message_p);

/* Fills an `info_reply`; it owns nothing. */
void sl_status_info(const sl_registry_t *registry, sl_message_t *message_p);

#endif
