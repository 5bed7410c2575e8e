/*
 * What both rank programs share: start-up, the group, and the engine loop. A pool's own part is a
 * table of callbacks.
 *
 *   start:  checkpoint -> model on its device -> UCX -> transfer -> hello -> welcome
 *   join:   the router's `group` names the addresses -> connect -> steps recorded -> ready
 *   loop:   take messages and events; if this rank has work or a peer of the group wants a step,
 *           make one step together; otherwise sleep on the descriptors
 *
 * One step, on every rank of the group:
 *   plan        the pool's choice of own rows (DP attention: every rank; TP attention: rank 0)
 *   exchange    the step record; a wholly idle group goes back to sleep
 *   broadcast   the plan of rank 0 (TP attention only)
 *   forward     the pool's forward pass over the batch, issued to the device
 *   finish      results of own rows; with asynchronous scheduling those of the step before, so that
 *               the device has its next step before the host has read the last one's tokens
 *
 * Threads: this loop is the engine thread (the main thread); the node's net thread and the
 * transfer thread meet it through rings. SIGTERM and SIGINT end the loop; a failed group, a refused
 * registration and every PROCESS-scope status end it with that status.
 */
#ifndef SL_NODE_RANK_H
#define SL_NODE_RANK_H

#include "common/base/options.h"
#include "common/base/status.h"
#include "common/net/node.h"
#include "common/transfer/transfer.h"
#include "kernels/layers/model.h"
#include "node/peers.h"
#include "node/step.h"

typedef struct {
    const char *router, *model, *device;
    uint64_t group, rank, tp;
    int attention; /* sl_attention_t */
    uint64_t device_index, threads, pages;
    double mem_fraction;
    int load_format;            /* 0: safetensors, 1: dummy */
    uint64_t num_hidden_layers; /* 0: all */
    uint64_t register_timeout_ms, group_timeout_ms;
    int log_level; /* sl_log_level_t */
} sl_rank_options_t;

/* The rows of the option table for a program whose options struct is `type` with the common part
 * in member `member`. */
/* clang-format off */
#define SL_RANK_OPTION_ROWS(type, member)                                                          \
    {"router", SL_OPTION_STRING, offsetof(type, member.router), "tcp://127.0.0.1:5551",            \
     "Address of the router's node socket.", 0, 0, NULL},                                          \
    {"model", SL_OPTION_STRING, offsetof(type, member.model), NULL,                                \
     "Checkpoint directory in Hugging Face layout.", 0, 0, NULL},                                  \
    {"group", SL_OPTION_U64, offsetof(type, member.group), "0", "Group of this rank in its pool.", \
     0, 65535, NULL},                                                                              \
    {"rank", SL_OPTION_U64, offsetof(type, member.rank), "0", "Place of this rank in its group.",  \
     0, 63, NULL},                                                                                 \
    {"tp", SL_OPTION_U64, offsetof(type, member.tp), "1", "Ranks of a group.", 1, 64, NULL},       \
    {"attention", SL_OPTION_CHOICE, offsetof(type, member.attention), "dp",                        \
     "dp: each rank attends for its own requests; tp: heads are sharded over the group.", 0, 0,    \
     "dp|tp"},                                                                                     \
    {"device", SL_OPTION_STRING, offsetof(type, member.device), "cpu",                             \
     "Backend: cpu, cuda, or ref (slow, for checking).", 0, 0, NULL},                              \
    {"device-index", SL_OPTION_U64, offsetof(type, member.device_index), "0",                      \
     "Which accelerator of this host.", 0, 1023, NULL},                                            \
    {"threads", SL_OPTION_U64, offsetof(type, member.threads), "1",                                \
     "Threads of the CPU backend's products.", 1, 1024, NULL},                                     \
    {"pages", SL_OPTION_U64, offsetof(type, member.pages), "0",                                    \
     "Latent pages of this rank, of 64 tokens each; 0: what fits (512 on the CPU).",               \
     0, 16777216, NULL},                                                                           \
    {"mem-fraction", SL_OPTION_F64, offsetof(type, member.mem_fraction), "0.9",                    \
     "Of the GPU memory free at start, for weights, workspace and pages.", 0.05, 1, NULL},         \
    {"load-format", SL_OPTION_CHOICE, offsetof(type, member.load_format), "safetensors",           \
     "dummy: seeded made-up weights, for benchmarks; only config.json is read.", 0, 0,             \
     "safetensors|dummy"},                                                                         \
    {"num-hidden-layers", SL_OPTION_U64, offsetof(type, member.num_hidden_layers), "0",            \
     "Use only the first so many layers, for benchmarks; 0: all.", 0, 10000, NULL},                \
    {"register-timeout-ms", SL_OPTION_U64, offsetof(type, member.register_timeout_ms), "30000",    \
     "Wait for the router's welcome at most this long.", 1, 86400000, NULL},                       \
    {"group-timeout-ms", SL_OPTION_U64, offsetof(type, member.group_timeout_ms), "30000",          \
     "A peer that keeps its group waiting this long ends the group.", 100, 86400000, NULL},        \
    {"log-level", SL_OPTION_CHOICE, offsetof(type, member.log_level), "info",                      \
     "Least level of the lines logged.", 0, 0, "debug|info|warn|error"}
/* clang-format on */

/* Whether a step is issued before the one before it is finished. AUTO: where the backend works by
 * itself while the host goes on; on the others a token would only wait for the next step. */
typedef enum { SL_ASYNC_OFF, SL_ASYNC_ON, SL_ASYNC_AUTO } sl_async_t;

typedef struct sl_rank sl_rank_t;

/* A pool's part of the engine. `self` is the pool's own state. Every callback runs on the engine
 * thread. A status of REQUEST or PEER scope is a mistake here: such failures are settled with the
 * router by the callback itself. */
typedef struct {
    /* Attention tp only, once, when the group has formed: pages from `page_count` on are not used,
     * because a rank of the group has no more. No request has come yet. */
    sl_status_t (*use_pages)(void *self, uint32_t page_count);
    /* RESERVE, PREFILL, CANCEL_ATTEMPT */
    sl_status_t (*on_message)(void *self, const sl_message_t *message);
    sl_status_t (*on_event)(void *self, const sl_transfer_event_t *event);
    /* Whether plan() would find rows. */
    bool (*has_work)(void *self);
    /* Fills the cleared step with own rows; may leave it empty. */
    void (*plan)(void *self, sl_step_t *step);
    /* The step that was planned last; before the first plan, steps of padding alone. */
    sl_status_t (*forward)(void *self, sl_model_t *model, const sl_batch_t *batch);
    /* Results of the oldest step with own rows that has been issued; `step` is the one planned
     * last (the same one, without asynchronous scheduling). */
    sl_status_t (*finish)(void *self, sl_step_t *step);
    /* Fills pages_free, pages_quiescing, running, queued_tokens, tokens_out. */
    void (*figures)(void *self, sl_msg_heartbeat_t *figures);
} sl_rank_ops_t;

typedef struct {
    const sl_rank_options_t *options;
    sl_pool_t pool;
    const sl_rank_ops_t *ops;
    void *self;
    uint32_t max_rows, max_requests, max_logit_rows; /* of a step, see sl_model_params_t */
    bool absorbed, unabsorbed;
    /* Where the backend records steps: the numbers of rows a step may have, ascending, the last one
     * max_rows. NULL: any number. */
    const uint32_t *buckets;
    uint32_t bucket_count;
    sl_async_t async_scheduling;
    uint64_t max_running, max_queued_tokens; /* told to the router */
} sl_rank_params_t;

/* Runs until SIGTERM or SIGINT, here or to another rank of the group (SL_OK), or a failure. */
SL_MUST_USE sl_status_t sl_rank_run(sl_rank_t *rank);

/* For the callbacks. */
uint32_t sl_rank_page_count(const sl_rank_t *rank);
sl_model_t *sl_rank_model(sl_rank_t *rank);
const sl_model_config_t *sl_rank_config(const sl_rank_t *rank);
sl_transfer_t *sl_rank_transfer(sl_rank_t *rank);
const sl_peers_t *sl_rank_peers(const sl_rank_t *rank);
/* A sign of life within a long step: the router takes a rank that is busy without any for stuck. */
void sl_rank_progress(sl_rank_t *rank);
SL_MUST_USE sl_status_t sl_rank_post(sl_rank_t *rank, const sl_message_t *message);
SL_MUST_USE sl_status_t sl_rank_post_attempt(sl_rank_t *rank, sl_message_type_t type,
                                             uint64_t attempt); /* NO_PAGES, RELEASED */
SL_MUST_USE sl_status_t sl_rank_post_failed(sl_rank_t *rank, uint64_t attempt, sl_status_t code,
                                            const char *text);
SL_MUST_USE sl_status_t sl_rank_post_token(sl_rank_t *rank, uint64_t attempt, uint32_t index,
                                           int32_t token, const sl_logprobs_t *logprobs,
                                           sl_finish_t finish);

/* Main of a rank program: parses nothing, only creates, runs and destroys; returns the exit code,
 * or ends the process with it. */
int sl_rank_main(const sl_rank_params_t *params,
                 sl_status_t (*attach)(void *self, sl_rank_t *rank));

#endif
