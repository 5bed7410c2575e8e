/*
 * Start-up and the services of a rank. What is created first is destroyed last: the transfer and
 * the group use UCX, all of them use the model's pages.
 */
#include "node/rank.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/model/layout.h"
#include "node/rank_internal.h"

/* Longer than a step, the transfers' end (5 s) and the last messages to the router (2 s) take. */
#define ORDERLY_LEAVE_S 15
#define FAILED_LEAVE_S 3 /* the transfers are cut, so the messages to the router alone */

/* For the others of the group to come to the end of a step. */
#define STOP_WAIT_US 5000000u

static _Atomic uint64_t stop_us; /* when it was told to; 0: has not been */
static int stop_fd = -1;
static volatile sig_atomic_t may_hang; /* there is a device whose driver's calls may never return */
static volatile sig_atomic_t leave_code;

static void on_leave_timeout(int signal_number)
{
    static const char text[] = "not gone in time: leaving as it is\n";
    (void)signal_number;
    ssize_t written = write(STDERR_FILENO, text, sizeof(text) - 1);
    (void)written;
    _exit(leave_code);
}

/*
 * Ends the process with `code` after `seconds`, whatever it does then: a collective with a peer
 * that is gone never ends, and calls into the driver may wait for it. The group's next incarnation
 * waits for the place. Only the first call counts: another alarm would put off the end. Any thread,
 * signal handlers too.
 */
static void leave_within(unsigned seconds, int code)
{
    static atomic_flag called = ATOMIC_FLAG_INIT;
    if (may_hang && !atomic_flag_test_and_set(&called)) {
        leave_code = code;
        (void)alarm(seconds);
    }
}

/* On the net thread once the group is gone, on the engine thread once this rank leaves. */
static void leave_in_time(bool in_order)
{
    if (in_order) {
        leave_within(ORDERLY_LEAVE_S, EXIT_SUCCESS);
    } else {
        leave_within(FAILED_LEAVE_S, EXIT_FAILURE);
    }
}

static void on_stop_signal(int signal_number)
{
    (void)signal_number;
    int saved_errno = errno;
    uint64_t one = 1;
    uint64_t never = 0;
    atomic_compare_exchange_strong(&stop_us, &never, sl_now_us()); /* the first one counts */
    ssize_t written = write(stop_fd, &one, sizeof(one));
    (void)written;
    leave_within(ORDERLY_LEAVE_S, EXIT_SUCCESS);
    errno = saved_errno;
}

bool sl_rank_stopping(void)
{
    return atomic_load(&stop_us) != 0;
}

int sl_rank_stop_fd(void)
{
    return stop_fd;
}

static sl_status_t catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_stop_signal, .sa_flags = SA_RESTART};
    struct sigaction leave = {.sa_handler = on_leave_timeout};
    stop_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (stop_fd < 0 || sigaction(SIGTERM, &action, NULL) != 0 ||
        sigaction(SIGINT, &action, NULL) != 0 || sigaction(SIGALRM, &leave, NULL) != 0) {
        return sl_error(SL_ERR_IO, "signals: %s", strerror(errno));
    }
    return SL_OK;
}

static void layout_of(const sl_rank_t *rank, sl_layout_t *layout)
{
    const sl_model_config_t *config = sl_checkpoint_config(rank->checkpoint);
    *layout = (sl_layout_t){
        .model_identity = sl_checkpoint_identity(rank->checkpoint),
        .dtype = rank->ops->act_dtype,
        .layers = config->num_hidden_layers,
        .page_tokens = SL_PAGE_TOKENS,
        .latent_width = config->latent_width,
        .rope_order = "interleaved",
        .protocol_version = SL_PROTOCOL_VERSION,
    };
}

/* A peer's pages may be written only while the router still counts this rank among the living. */
static bool may_write(void *arg)
{
    sl_rank_t *rank = arg;
    sl_node_t *node = atomic_load(&rank->lease_node);
    return node != NULL && sl_node_lease_valid(node);
}

/* Asked during waits for the group: a step cannot be finished with a group that is gone. Told to
 * stop, a rank of a group finishes its step all the same: see sl_rank_run(). */
static bool give_up(void *arg)
{
    sl_rank_t *rank = arg;
    uint64_t since_us = atomic_load(&stop_us);
    if (since_us != 0 && (!rank->joined || sl_now_us() - since_us > STOP_WAIT_US)) {
        return true;
    }
    return rank->node != NULL && sl_node_group_failed(rank->node);
}

static sl_status_t create_model(sl_rank_t *rank)
{
    const sl_rank_options_t *options = rank->params.options;
    sl_checkpoint_options_t checkpoint = {
        .dummy = options->load_format == 1,
        .num_hidden_layers = (uint32_t)options->num_hidden_layers,
    };
    SL_TRY(sl_checkpoint_open_with(options->model, &checkpoint, &rank->checkpoint));
    sl_model_params_t params = {
        .checkpoint = rank->checkpoint,
        .ops = rank->ops,
        .device_index = (int)options->device_index,
        .threads = (int)options->threads,
        .give_up = give_up,
        .give_up_arg = rank,
        .rank = (uint32_t)options->rank,
        .tp = (uint32_t)options->tp,
        .attention = (sl_attention_t)options->attention,
        .absorbed = rank->params.absorbed,
        .unabsorbed = rank->params.unabsorbed,
        .max_rows = rank->params.max_rows,
        .max_requests = rank->params.max_requests,
        .max_logit_rows = rank->params.max_logit_rows,
        .page_count = (uint32_t)options->pages,
        .mem_fraction = options->mem_fraction,
    };
    SL_TRY(sl_model_create(&params, &rank->model));
    SL_TRY(sl_step_create(params.max_rows, params.max_requests,
                          sl_model_sequence_pages(rank->model), params.tp,
                          sl_model_page_count(rank->model), &rank->step));
    rank->plan = calloc(1, sl_step_plan_max(rank->step));
    if (rank->plan == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "step plan of %u bytes: out of memory",
                        sl_step_plan_max(rank->step));
    }
    return SL_OK;
}

static sl_status_t bind_thread(void *arg)
{
    return sl_model_bind_thread(arg);
}

static sl_status_t create_transports(sl_rank_t *rank)
{
    const sl_rank_options_t *options = rank->params.options;
    sl_layout_t layout;
    layout_of(rank, &layout);
    SL_TRY(sl_ucx_create(&rank->ucx));
    sl_group_params_t group = {
        .rank = (uint32_t)options->rank,
        .size = (uint32_t)options->tp,
        .timeout_us = options->group_timeout_ms * 1000,
        .give_up = give_up,
        .give_up_arg = rank,
    };
    SL_TRY(sl_group_create(rank->ucx, &group, &rank->group));
    sl_transfer_params_t transfer = {
        .ucx = rank->ucx,
        .self = rank->id,
        .layers = layout.layers,
        .page_count = sl_model_page_count(rank->model),
        .layout_hash = sl_layout_hash(&layout),
        .may_write = may_write,
        .may_write_arg = rank,
    };
    sl_model_pages(rank->model, &transfer.base, &transfer.page_bytes);
    transfer.device_memory = !rank->ops->host_memory;
    transfer.bind_thread = bind_thread;
    transfer.bind_thread_arg = rank->model;
    SL_TRY(sl_transfer_create(&transfer, &rank->transfer));
    return sl_peers_create(&rank->peers);
}

static sl_status_t register_rank(sl_rank_t *rank)
{
    const sl_rank_options_t *options = rank->params.options;
    const sl_model_config_t *config = sl_checkpoint_config(rank->checkpoint);
    sl_layout_t layout;
    layout_of(rank, &layout);
    sl_node_params_t params = {.router = options->router,
                               .register_timeout_us = options->register_timeout_ms * 1000,
                               .stopping = sl_rank_stopping,
                               .group_gone = leave_in_time};
    sl_msg_hello_t *hello = &params.hello;
    *hello = (sl_msg_hello_t){
        .rank = rank->id,
        .tp = (uint32_t)options->tp,
        .attention = (sl_attention_t)options->attention,
        .layout_hash = sl_layout_hash(&layout),
        .vocab_size = config->vocab_size,
        .max_model_len = config->max_position_embeddings,
        .page_tokens = SL_PAGE_TOKENS,
        .pages_total = sl_model_page_count(rank->model),
        .max_rows = rank->params.max_rows,
        .max_running = rank->params.max_running,
        .max_queued_tokens = rank->params.max_queued_tokens,
    };
    sl_layout_text(&layout, hello->layout, sizeof(hello->layout));
    strncpy(hello->model, layout.model_identity, sizeof(hello->model) - 1);
    strncpy(hello->tokenizer_path, sl_checkpoint_tokenizer_path(rank->checkpoint),
            sizeof(hello->tokenizer_path) - 1);
    sl_transfer_address(rank->transfer, &hello->transfer_address);
    sl_group_address(rank->group, &hello->group_address);
    SL_TRY(sl_node_create(&params, &rank->node));
    sl_msg_heartbeat_t idle = {.pages_free = hello->pages_total};
    sl_node_publish(rank->node, &idle); /* the first heartbeat precedes the engine */
    SL_TRY(sl_node_wait_welcome(rank->node));
    sl_transfer_set_lease(rank->transfer, sl_node_lease_us(rank->node));
    atomic_store(&rank->lease_node, rank->node);
    return SL_OK;
}

static sl_status_t check_place(const sl_rank_options_t *options)
{
    if (options->rank >= options->tp) {
        return sl_error(SL_ERR_CONFIG, "--rank %llu: expected less than --tp %llu",
                        (unsigned long long)options->rank, (unsigned long long)options->tp);
    }
    return SL_OK;
}

/* Goodbye to the router and, if `in_order`, to the peers; otherwise those see a process that ends,
 * and keep the pages that it may still be writing to until its lease has passed. */
static void leave_cluster(sl_rank_t *rank, bool in_order)
{
    if (rank->node != NULL) {
        /* First, so that nothing new is sent here while the transfers end. */
        sl_message_t goodbye = {.type = SL_MSG_GOODBYE};
        memcpy(goodbye.goodbye.message, rank->fault, sizeof(rank->fault));
        sl_status_t status = sl_rank_post(rank, &goodbye);
        (void)status; /* the router will notice by itself */
    }
    if (rank->transfer != NULL && in_order) {
        sl_transfer_stop(rank->transfer); /* may write while the lease holds */
    }
    atomic_store(&rank->lease_node, NULL);
    if (rank->node != NULL) {
        sl_node_leave(rank->node);
    }
}

static void destroy(sl_rank_t *rank)
{
    leave_cluster(rank, true);
    sl_transfer_destroy(rank->transfer);
    sl_node_destroy(rank->node);
    sl_group_destroy(rank->group);
    sl_ucx_destroy(rank->ucx);
    sl_peers_destroy(rank->peers);
    sl_step_destroy(rank->step);
    free(rank->plan);
    sl_model_destroy(rank->model);
    sl_checkpoint_close(rank->checkpoint);
    free(rank);
}

/* Everything up to the router's welcome. SL_ERR_CONFIG, SL_ERR_REFUSED, ... with a text. */
static sl_status_t create(const sl_rank_params_t *params, sl_rank_t **rank_p)
{
    const sl_rank_options_t *options = params->options;
    char name[32];
    SL_TRY(check_place(options));
    SL_TRY(catch_signals());
    sl_rank_t *rank = calloc(1, sizeof(*rank));
    if (rank == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "rank: out of memory");
    }
    rank->params = *params;
    rank->id = (sl_rank_id_t){params->pool, (uint32_t)options->group, (uint32_t)options->rank, 0};
    sl_log_set_name(sl_rank_name(&rank->id, name));
    sl_status_t status = SL_OK;
    if (getrandom(&rank->id.incarnation, sizeof(rank->id.incarnation), 0) !=
        (ssize_t)sizeof(rank->id.incarnation)) {
        status = sl_error(SL_ERR_IO, "getrandom: %s", strerror(errno));
        goto fail;
    }
    rank->id.incarnation >>= 1; /* fits a signed 64-bit integer of any client language */
    SL_TRY_GOTO(status, sl_ops_find(options->device, &rank->ops), fail);
    may_hang = !rank->ops->host_memory;
    SL_TRY_GOTO(status, create_model(rank), fail);
    SL_TRY_GOTO(status, create_transports(rank), fail);
    SL_TRY_GOTO(status, register_rank(rank), fail);
    *rank_p = rank;
    return SL_OK;
fail:
    destroy(rank);
    return status;
}

uint32_t sl_rank_page_count(const sl_rank_t *rank)
{
    return sl_model_page_count(rank->model);
}

sl_model_t *sl_rank_model(sl_rank_t *rank)
{
    return rank->model;
}

const sl_model_config_t *sl_rank_config(const sl_rank_t *rank)
{
    return sl_checkpoint_config(rank->checkpoint);
}

sl_transfer_t *sl_rank_transfer(sl_rank_t *rank)
{
    return rank->transfer;
}

const sl_peers_t *sl_rank_peers(const sl_rank_t *rank)
{
    return rank->peers;
}

sl_status_t sl_rank_post(sl_rank_t *rank, const sl_message_t *message)
{
    return sl_node_post(rank->node, message);
}

sl_status_t sl_rank_post_attempt(sl_rank_t *rank, sl_message_type_t type, uint64_t attempt)
{
    sl_message_t message = {.type = type, .attempt = {.attempt = attempt}};
    return sl_rank_post(rank, &message);
}

sl_status_t sl_rank_post_failed(sl_rank_t *rank, uint64_t attempt, sl_status_t code,
                                const char *text)
{
    sl_message_t message = {.type = SL_MSG_FAILED, .failed = {.attempt = attempt}};
    strncpy(message.failed.code, sl_status_name(code), sizeof(message.failed.code) - 1);
    strncpy(message.failed.message, text, sizeof(message.failed.message) - 1);
    return sl_rank_post(rank, &message);
}

sl_status_t sl_rank_post_token(sl_rank_t *rank, uint64_t attempt, uint32_t index, int32_t token,
                               const sl_logprobs_t *logprobs, sl_finish_t finish)
{
    sl_logprobs_t entry;
    sl_message_t message = {
        .type = SL_MSG_TOKENS,
        .tokens = {.attempt = attempt,
                   .index = index,
                   .tokens = &token,
                   .token_count = 1,
                   .finish = finish},
    };
    if (logprobs != NULL) {
        entry = *logprobs;
        message.tokens.logprobs = &entry;
    }
    return sl_rank_post(rank, &message);
}

/*
 * A device is left as it is: its work may never end, for a peer of a collective may have gone
 * first, and no call that waits for it would return. The driver takes back what the process held.
 */
int sl_rank_main(const sl_rank_params_t *params, sl_status_t (*attach)(void *self, sl_rank_t *rank))
{
    sl_rank_t *rank = NULL;
    sl_log_set_level((sl_log_level_t)params->options->log_level);
    sl_status_t created = create(params, &rank);
    if (created != SL_OK) {
        sl_log(SL_LOG_ERROR, "cannot start: %s: %s", sl_status_name(created), sl_error_text());
        return EXIT_FAILURE;
    }
    sl_status_t status = attach(params->self, rank);
    if (status == SL_OK) {
        status = sl_rank_run(rank);
    } else {
        sl_rank_set_fault(rank, status);
    }
    int code = status == SL_OK ? EXIT_SUCCESS : EXIT_FAILURE;
    leave_in_time(status == SL_OK);
    if (!rank->ops->host_memory) {
        leave_cluster(rank, status == SL_OK);
        _exit(code);
    }
    destroy(rank);
    return code;
}
