/* Waiting on conditions, and servers on free ports, for the tests of common/net. */
#ifndef SL_TESTS_NET_HELPERS_H
#define SL_TESTS_NET_HELPERS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/net/server.h"

#define DEADLINE_US 30000000u

/* Evaluates the step until `done` holds; fails the test after the deadline. The step is what waits.
 */
#define UNTIL(done, ...)                                                                           \
    do {                                                                                           \
        uint64_t until_us_ = sl_now_us() + DEADLINE_US;                                            \
        while (!(done)) {                                                                          \
            if (sl_now_us() > until_us_) {                                                         \
                fail_msg("still not so after 30 s: %s", #done);                                    \
            }                                                                                      \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

static inline sl_server_t *server_at(const char *address, size_t queue_bytes)
{
    const sl_server_params_t params = {
        .bind = address, .name = "test socket", .peer_queue_bytes = queue_bytes};
    sl_server_t *server;
    if (sl_server_create(&params, &server) != SL_OK) {
        fail_msg("%s", sl_error_text());
    }
    return server;
}

/* Waits a little for something to read; the caller then tries again. */
static inline void server_wait(sl_server_t *server)
{
    struct pollfd item = {.fd = sl_server_fd(server), .events = POLLIN};
    poll(&item, 1, 5);
}

typedef struct {
    sl_peer_key_t sender;
    char bad_id[SL_REQUEST_ID_BYTES];
    sl_message_t message;
    sl_status_t status;
} received_t;

/* The next frame, good or bad. */
static inline received_t server_next(sl_server_t *server)
{
    received_t got;
    UNTIL((got.status = sl_server_receive(server, &got.sender, got.bad_id, &got.message)) !=
              SL_ERR_AGAIN,
          server_wait(server));
    return got;
}

#endif
