/* sluice-router: parses the options, creates the router, runs it until SIGINT or SIGTERM. */
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/base/log.h"
#include "common/base/options.h"
#include "router/router.h"

typedef struct {
    sl_router_params_t router;
    int log_level;
} options_t;

#define ROUTER(field) offsetof(options_t, router.field)

static const sl_option_t option_table[] = {
    {"client-bind", SL_OPTION_STRING, ROUTER(client_bind), "tcp://127.0.0.1:5550",
     "Address of the clients' socket; port 0 takes a free one.", 0, 0, NULL},
    {"node-bind", SL_OPTION_STRING, ROUTER(node_bind), "tcp://127.0.0.1:5551",
     "Address of the ranks' socket; port 0 takes a free one.", 0, 0, NULL},
    {"ready-file", SL_OPTION_STRING, ROUTER(ready_file), "",
     "File to write the two real addresses to once both are bound; empty: none.", 0, 0, NULL},
    {"heartbeat-ms", SL_OPTION_U64, ROUTER(heartbeat_ms), "1000",
     "How often ranks send a heartbeat, in milliseconds.", 10, 10000, NULL},
    {"dead-ms", SL_OPTION_U64, ROUTER(dead_ms), "5000",
     "A rank without a heartbeat for this many milliseconds is lost.", 50, 3600000, NULL},
    {"stuck-ms", SL_OPTION_U64, ROUTER(stuck_ms), "30000",
     "A rank with work but without progress for this many milliseconds is lost.", 50, 86400000,
     NULL},
    {"lease-ms", SL_OPTION_U64, ROUTER(lease_ms), "5000",
     "A rank without an answer to its heartbeats for this many milliseconds, or for dead-ms if "
     "that is less, stops writing to peers.",
     50, 3600000, NULL},
    {"max-ranks", SL_OPTION_U64, ROUTER(max_ranks), "1024", "Registered ranks at most.", 1, 65536,
     NULL},
    {"max-clients", SL_OPTION_U64, ROUTER(max_clients), "4096",
     "Client connections with unfinished requests at most.", 1, 1048576, NULL},
    {"max-waiting", SL_OPTION_U64, ROUTER(max_waiting), "4096",
     "Requests waiting to be placed at most.", 1, 1048576, NULL},
    {"max-waiting-tokens", SL_OPTION_U64, ROUTER(max_waiting_tokens), "64m",
     "Prompt tokens of waiting requests at most.", 1, 1e12, NULL},
    {"starve-ms", SL_OPTION_U64, ROUTER(starve_ms), "2000",
     "A request waiting longer than this many milliseconds gets a rank held for it.", 0, 3600000,
     NULL},
    {"place-timeout-ms", SL_OPTION_U64, ROUTER(place_timeout_ms), "30000",
     "A request waits for a pool without a ready group for this many milliseconds at most.", 0,
     86400000, NULL},
    {"queue-timeout-ms", SL_OPTION_U64, ROUTER(queue_timeout_ms), "600000",
     "A request waits for room for this many milliseconds at most.", 1, 86400000, NULL},
    {"silence-ms", SL_OPTION_U64, ROUTER(silence_ms), "600000",
     "A placed request of which nothing is heard for this many milliseconds is lost.", 1, 86400000,
     NULL},
    {"log-level", SL_OPTION_CHOICE, offsetof(options_t, log_level), "info",
     "Least level of the lines logged.", 0, 0, "debug|info|warn|error"},
};

static const sl_options_t options_spec = {
    .program = "sluice-router",
    .summary = "Takes prompts from clients, places them on prefill and decode ranks, and streams "
               "their tokens back.",
    .table = option_table,
    .count = sizeof(option_table) / sizeof(option_table[0]),
};

/* Before any thread starts: ZeroMQ's threads inherit the mask, so the signals reach only the
 * descriptor. */
static sl_status_t open_signals(int *fd_p)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    if (sigprocmask(SIG_BLOCK, &signals, NULL) != 0) {
        return sl_error(SL_ERR_IO, "sigprocmask: %s", strerror(errno));
    }
    int fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0) {
        return sl_error(SL_ERR_IO, "signalfd: %s", strerror(errno));
    }
    *fd_p = fd;
    return SL_OK;
}

static sl_status_t check_options(const options_t *options)
{
    const sl_router_params_t *params = &options->router;
    if (params->dead_ms < 2 * params->heartbeat_ms) {
        return sl_error(
            SL_ERR_CONFIG, "dead-ms is %llu, expected at least twice heartbeat-ms, which is %llu",
            (unsigned long long)params->dead_ms, (unsigned long long)params->heartbeat_ms);
    }
    return SL_OK;
}

static sl_status_t run(const options_t *options)
{
    int signals = -1;
    sl_router_t *router;
    SL_TRY(check_options(options));
    SL_TRY(open_signals(&signals));
    sl_status_t status = sl_router_create(&options->router, &router);
    if (status == SL_OK) {
        status = sl_router_run(router, signals);
        sl_router_destroy(router);
    }
    close(signals);
    return status;
}

int main(int argc, char **argv)
{
    options_t options = {0};
    sl_options_action_t action;
    sl_log_set_name("router");
    if (sl_options_parse(&options_spec, argc, argv, &options, &action) != SL_OK) {
        return 2; /* the reason is logged */
    }
    if (action == SL_OPTIONS_EXIT) {
        return 0;
    }
    sl_log_set_level((sl_log_level_t)options.log_level);
    sl_status_t status = run(&options);
    return status == SL_OK ? 0 : status == SL_ERR_CONFIG ? 2 : 1;
}
