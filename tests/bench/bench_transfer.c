/*
 * Latent transfer between two processes of this host: a prefill rank that writes and a decode rank
 * that reads, in host memory or from GPU 0 to another one. Attempts whose bytes are checked come
 * first, then attempts are timed, beside the plain copy rate of the same run:
 *
 *   one at a time     grants lie ready, as in service, where they come with the prompt; the writer
 *                     waits for each attempt to be flushed and committed before the next
 *   with its grant    the grant is sent when the attempt before has ended
 *   8 at once         the same with several attempts under way
 *
 * With --model the writer also runs the prefill that makes the latents, and tells how much of their
 * transfer hides behind it (see time_prefills()). Times of both processes are comparable, since
 * they share the host's clock.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "kernels/layers/model.h"
#include "node/step.h"
#include "prefill_node/forward.h"
#include "tests/bench/ceiling.h"
#include "tests/bench/prompt.h"
#include "tests/bench/transfer_pair.h"

#define BARE_LAYERS 4u /* of a page without a model */
#define AT_ONCE 8u     /* attempts in flight at most; each has its own pages */
#define GRANTS_AHEAD 4u
#define LOGIT_ROWS 512u
#define HOST_COPY_BYTES ((size_t)64 << 20)
#define DEVICE_COPY_BYTES ((size_t)256 << 20)
#define COPIES 10

typedef struct {
    const char *device, *model, *result_filename;
    uint64_t page_bytes, pages, attempts, reader_index, threads;
    uint64_t num_hidden_layers, prompt_len, batch_size, push_layers;
    bool shuffled;
    int load_format;
} bench_options_t;

static const sl_option_t table[] = {
    {"device", SL_OPTION_STRING, offsetof(bench_options_t, device), "cpu", "Backend.", 0, 0, NULL},
    {"reader-index", SL_OPTION_U64, offsetof(bench_options_t, reader_index), "1",
     "Accelerator of the reader; the writer has the first.", 0, 1023, NULL},
    {"page-bytes", SL_OPTION_U64, offsetof(bench_options_t, page_bytes), "1m",
     "Bytes of a page, a multiple of 4; with --model what the model says.", 4, 1u << 30, NULL},
    {"pages", SL_OPTION_U64, offsetof(bench_options_t, pages), "8",
     "Pages of an attempt; with --model those of a prompt.", 1, 4096, NULL},
    {"shuffled", SL_OPTION_BOOL, offsetof(bench_options_t, shuffled), "false",
     "No two pages of an attempt side by side: the worst case.", 0, 0, NULL},
    {"attempts", SL_OPTION_U64, offsetof(bench_options_t, attempts), "50",
     "Attempts, and prefills, of which the figures are made.", 1, 1000, NULL},
    {"model", SL_OPTION_STRING, offsetof(bench_options_t, model), "",
     "Directory with config.json: run its prefill too.", 0, 0, NULL},
    {"load-format", SL_OPTION_CHOICE, offsetof(bench_options_t, load_format), "dummy",
     "Where weights come from.", 0, 0, "safetensors|dummy"},
    {"num-hidden-layers", SL_OPTION_U64, offsetof(bench_options_t, num_hidden_layers), "0",
     "Only the first so many layers; 0: all.", 0, 10000, NULL},
    {"prompt-len", SL_OPTION_U64, offsetof(bench_options_t, prompt_len), "4096", "Prompt tokens.",
     1, 1048576, NULL},
    {"batch-size", SL_OPTION_U64, offsetof(bench_options_t, batch_size), "1",
     "Prompts of one forward pass.", 1, LOGIT_ROWS, NULL},
    {"push-layers", SL_OPTION_U64, offsetof(bench_options_t, push_layers), "0",
     "Send latents after every so many layers; 0: as sluice-prefill does.", 0, 1024, NULL},
    {"threads", SL_OPTION_U64, offsetof(bench_options_t, threads), "1",
     "CPU threads of the prefill.", 1, 1024, NULL},
    {"result-filename", SL_OPTION_STRING, offsetof(bench_options_t, result_filename), "",
     "File that gets a JSON line.", 0, 0, NULL},
};

static const sl_options_t options_table = {"bench_transfer",
                                           "Latent transfer between two processes.", table,
                                           sizeof(table) / sizeof(table[0])};

typedef struct {
    const bench_options_t *options;
    sl_pair_t pair;

    /* the writer's prefill; NULL without --model */
    sl_checkpoint_t *checkpoint;
    sl_model_t *model;
    sl_step_t *step;
    int32_t *tokens, *chosen;
    sl_sample_row_t *rules;
    uint32_t push_layers;
    bool pushing;         /* the pass under way sends its latents */
    uint64_t computed_us; /* when the last pass ended */
} bench_t;

/* Figures of the run; times are medians. */
typedef struct {
    double copy_rate; /* bytes a second */
    double single_us, latency_us, granted_us, many_us;
    double transfer_us, compute_us, both_us, longer_us, exposed_us; /* 0 without --model */
} result_t;

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof(*values), by_value);
    return values[count / 2];
}

/* ---- the writer's prefill ---- */

static void open_model(bench_t *bench)
{
    const bench_options_t *options = bench->options;
    sl_checkpoint_options_t how = {options->load_format == 1, (uint32_t)options->num_hidden_layers};
    sl_pair_require_ok(sl_checkpoint_open_with(options->model, &how, &bench->checkpoint), "model");
    const sl_model_config_t *config = sl_checkpoint_config(bench->checkpoint);
    if (options->prompt_len > config->max_position_embeddings) {
        fprintf(stderr, "bench_transfer: --prompt-len %llu: expected at most the model's %u\n",
                (unsigned long long)options->prompt_len, config->max_position_embeddings);
        sl_pair_die();
    }
    uint32_t batch = (uint32_t)options->batch_size;
    bench->pair.shape.layers = config->num_hidden_layers;
    bench->pair.shape.pages =
        (uint32_t)((options->prompt_len + SL_PAGE_TOKENS - 1) / SL_PAGE_TOKENS);
    bench->pair.shape.slots = batch > AT_ONCE ? batch : AT_ONCE;
    sl_model_params_t params = {
        .checkpoint = bench->checkpoint,
        .ops = bench->pair.ops,
        .threads = (int)options->threads,
        .tp = 1,
        .unabsorbed = true,
        .max_rows = (uint32_t)(batch * options->prompt_len),
        .max_requests = batch,
        .max_logit_rows = batch,
        .page_count = bench->pair.shape.slots * bench->pair.shape.pages,
        .sequence_pages = bench->pair.shape.pages,
    };
    void *pool;
    size_t page_bytes;
    sl_pair_require_ok(sl_model_create(&params, &bench->model), "model");
    sl_model_pages(bench->model, &pool, &page_bytes);
    bench->pair.pool = pool;
    bench->pair.shape.page_bytes = page_bytes;
    bench->push_layers = options->push_layers > 0
                             ? (uint32_t)options->push_layers
                             : sl_prefill_push_layers(config->num_hidden_layers, page_bytes);
    sl_pair_require_ok(sl_step_create(params.max_rows, batch, params.sequence_pages, 1,
                                      params.page_count, &bench->step),
                       "step");
    bench->tokens = calloc(options->prompt_len, sizeof(*bench->tokens));
    bench->chosen = calloc(batch, sizeof(*bench->chosen));
    bench->rules = calloc(batch, sizeof(*bench->rules));
    sl_pair_require(bench->tokens != NULL && bench->chosen != NULL && bench->rules != NULL,
                    "memory");
    for (uint32_t i = 0; i < batch; i++) {
        bench->rules[i].logprobs = -1; /* greedy */
    }
}

static void layer_done(void *arg)
{
    (void)arg;
}

static sl_status_t layers_done(void *arg, uint32_t begin, uint32_t end)
{
    bench_t *bench = arg;
    for (uint32_t i = 0; bench->pushing && i < bench->options->batch_size; i++) {
        sl_pair_push(&bench->pair, bench->pair.next_attempt + i, begin, end);
    }
    return SL_OK;
}

/* The step of attempts [next_attempt, next_attempt + batch size). */
static void plan(bench_t *bench)
{
    uint32_t length = (uint32_t)bench->options->prompt_len;
    uint32_t vocab = sl_checkpoint_config(bench->checkpoint)->vocab_size;
    sl_step_clear(bench->step);
    for (uint32_t i = 0; i < bench->options->batch_size; i++) {
        /* Other tokens in each prompt: latents of one before would be noticed. */
        uint64_t attempt = bench->pair.next_attempt + i;
        sl_bench_prompt(attempt, length, vocab, bench->tokens);
        sl_step_add(bench->step, bench->tokens, length, 0, sl_pair_pages(&bench->pair, attempt),
                    bench->pair.shape.pages);
    }
}

/* What a prefill rank does of a step: the layers and the prompts' first tokens. */
static void prefill(bench_t *bench, bool pushing)
{
    uint32_t batch = (uint32_t)bench->options->batch_size;
    uint32_t rows = batch * (uint32_t)bench->options->prompt_len;
    int32_t last_rows[LOGIT_ROWS];
    float *logits;
    bench->pushing = pushing;
    sl_prefill_forward_t forward = {
        .mla = SL_MLA_UNABSORBED,
        .layers = bench->pair.shape.layers,
        .push_layers = bench->push_layers,
        .layer_done = layer_done,
        .layers_done = layers_done,
        .arg = bench,
    };
    sl_pair_require_ok(
        sl_prefill_forward(&forward, bench->model, sl_step_batch(bench->step, &rows, 0)),
        "prefill");
    for (uint32_t i = 0; i < batch; i++) {
        last_rows[i] = sl_step_last_row(bench->step, i);
    }
    sl_pair_require_ok(sl_model_logits(bench->model, last_rows, batch, &logits), "logits");
    sl_pair_require_ok(
        sl_model_sample(bench->model, logits, bench->rules, batch, bench->chosen, NULL),
        "first tokens");
    bench->computed_us = sl_now_us();
}

/* ---- attempts ---- */

static void begin(bench_t *bench, uint64_t attempt)
{
    if (!bench->pair.writer) {
        sl_pair_grant(&bench->pair, attempt);
        return;
    }
    sl_pair_open_attempt(&bench->pair, attempt);
    sl_pair_push(&bench->pair, attempt, 0, bench->pair.shape.layers);
    sl_pair_commit(&bench->pair, attempt);
}

/* Times of the attempts of a run, in order: begun by the writer, ended as this process saw it. */
typedef struct {
    uint64_t *begun_us, *ended_us;
} times_t;

/* `--attempts` attempts, with up to `window` begun and not ended in this process. */
static void run(bench_t *bench, uint32_t window, const times_t *times)
{
    uint32_t attempts = (uint32_t)bench->options->attempts, begun = 0;
    for (uint32_t ended = 0; ended < attempts; ended++) {
        while (begun < attempts && begun - ended < window) {
            times->begun_us[begun] = sl_now_us();
            begin(bench, bench->pair.next_attempt + begun++);
            if (!bench->pair.writer && begun == (window < attempts ? window : attempts)) {
                sl_pair_meet(&bench->pair); /* the first grants are on their way */
            }
        }
        sl_pair_wait_end(&bench->pair);
        times->ended_us[ended] = sl_now_us();
    }
    bench->pair.next_attempt += attempts;
}

/* Mean time of an attempt from end to end, and the median one from push to COMMITTED (the writer's;
 * NULL: not wanted). */
static void time_attempts(bench_t *bench, uint32_t writer_window, uint32_t reader_window,
                          double *mean_us, double *latency_us)
{
    uint32_t attempts = (uint32_t)bench->options->attempts;
    size_t bytes = attempts * sizeof(uint64_t);
    times_t times = {malloc(bytes), malloc(bytes)};
    double *latencies_us = malloc(attempts * sizeof(*latencies_us));
    sl_pair_require(times.begun_us != NULL && times.ended_us != NULL && latencies_us != NULL,
                    "memory");
    if (bench->pair.writer) {
        sl_pair_meet(&bench->pair);
    }
    run(bench, bench->pair.writer ? writer_window : reader_window, &times);
    *mean_us = (double)(times.ended_us[attempts - 1] - times.begun_us[0]) / attempts;
    if (bench->pair.writer) {
        sl_pair_hear(&bench->pair, times.ended_us, bytes);
        for (uint32_t i = 0; i < attempts; i++) {
            latencies_us[i] = (double)(times.ended_us[i] - times.begun_us[i]);
        }
        double latency = median(latencies_us, attempts);
        if (latency_us != NULL) {
            *latency_us = latency;
        }
    } else {
        sl_pair_tell(&bench->pair, times.ended_us, bytes);
    }
    free(times.begun_us);
    free(times.ended_us);
    free(latencies_us);
}

/* ---- the share of the transfer that hides behind the prefill ---- */

/* Reader: grants of `rounds` batches, each while the one before is under way, so that they lie
 * ready; tells when each batch was complete. */
static void serve_rounds(bench_t *bench, uint32_t rounds)
{
    uint32_t batch = (uint32_t)bench->options->batch_size, granted = 0;
    for (uint32_t round = 0; round < rounds; round++) {
        for (; granted < rounds && granted <= round + 1; granted++) {
            for (uint32_t i = 0; i < batch; i++) {
                sl_pair_grant(&bench->pair, bench->pair.next_attempt + granted * batch + i);
            }
        }
        for (uint32_t i = 0; i < batch; i++) {
            sl_pair_wait_end(&bench->pair);
        }
        uint64_t ended_us = sl_now_us();
        sl_pair_tell(&bench->pair, &ended_us, sizeof(ended_us));
    }
    bench->pair.next_attempt += rounds * batch;
}

/* Writer: one batch, computed (as planned) and sent, or only sent. When the reader had all. */
static uint64_t send_batch(bench_t *bench, bool computing)
{
    uint32_t batch = (uint32_t)bench->options->batch_size;
    uint64_t ended_us;
    for (uint32_t i = 0; i < batch; i++) {
        sl_pair_open_attempt(&bench->pair, bench->pair.next_attempt + i);
    }
    if (computing) {
        prefill(bench, true);
    }
    for (uint32_t i = 0; i < batch; i++) {
        if (!computing) {
            sl_pair_push(&bench->pair, bench->pair.next_attempt + i, 0, bench->pair.shape.layers);
        }
        sl_pair_commit(&bench->pair, bench->pair.next_attempt + i);
    }
    for (uint32_t i = 0; i < batch; i++) {
        sl_pair_wait_end(&bench->pair);
    }
    sl_pair_hear(&bench->pair, &ended_us, sizeof(ended_us));
    bench->pair.next_attempt += batch;
    return ended_us;
}

static double time_prefill_alone(bench_t *bench)
{
    uint64_t started_us = sl_now_us();
    prefill(bench, false);
    return (double)(sl_now_us() - started_us);
}

static double time_prefill_sent(bench_t *bench, double *exposed_us)
{
    uint64_t started_us = sl_now_us();
    uint64_t ended_us = send_batch(bench, true);
    *exposed_us = (double)(ended_us - bench->computed_us);
    return (double)(ended_us - started_us);
}

/*
 * In turn: the transfer of a batch's latents alone; the prefill of the next batch alone; and that
 * again as in service, where finished layers leave while later ones are computed, until the reader
 * has all. What both take longer than the prefill is what did not hide, taken in pairs, since a
 * machine's speed drifts; and since a GPU is the slower the longer it has been at work, another
 * prefill precedes each pair and every other pair is taken the other way round. `exposed`: from the
 * end of that prefill to COMMITTED, which leaves out what the transfer slows down the prefill.
 */
static void time_prefills(bench_t *bench, result_t *result)
{
    uint32_t rounds = (uint32_t)bench->options->attempts;
    double *times_us = malloc(5 * rounds * sizeof(*times_us));
    sl_pair_require(times_us != NULL, "memory");
    double *transfer_us = times_us, *compute_us = times_us + rounds;
    double *both_us = times_us + 2 * rounds, *longer_us = times_us + 3 * rounds;
    double *exposed_us = times_us + 4 * rounds;
    plan(bench);
    prefill(bench, false); /* warms up */
    for (uint32_t i = 0; i < rounds; i++) {
        uint64_t started_us = sl_now_us();
        transfer_us[i] = (double)(send_batch(bench, false) - started_us);
        plan(bench);
        prefill(bench, false);
        if (i % 2 == 0) {
            compute_us[i] = time_prefill_alone(bench);
        }
        both_us[i] = time_prefill_sent(bench, &exposed_us[i]);
        if (i % 2 == 1) {
            compute_us[i] = time_prefill_alone(bench);
        }
        longer_us[i] = both_us[i] - compute_us[i];
    }
    plan(bench);
    send_batch(bench, true); /* of prompts not computed before: its bytes are checked */
    result->transfer_us = median(transfer_us, rounds);
    result->compute_us = median(compute_us, rounds);
    result->both_us = median(both_us, rounds);
    result->longer_us = median(longer_us, rounds);
    result->exposed_us = median(exposed_us, rounds);
    free(times_us);
}

static void run_prefill(bench_t *bench, result_t *result)
{
    uint32_t batch = (uint32_t)bench->options->batch_size;
    if (bench->pair.writer) {
        time_prefills(bench, result);
    } else {
        serve_rounds(bench, 2 * (uint32_t)bench->options->attempts + 1);
    }
    for (uint32_t i = 1; i <= batch; i++) {
        sl_pair_check_pages(&bench->pair, bench->pair.next_attempt - i);
    }
}

/* ---- the two processes ---- */

/* Device, page pool (the model's, if there is one), and its shape. */
static void take_pool(bench_t *bench)
{
    const bench_options_t *options = bench->options;
    sl_device_params_t params = {.threads = 1};
    void *memory;
    if (!bench->pair.writer && strcmp(options->device, "cuda") == 0) {
        params.index = (int)options->reader_index;
    }
    bench->pair.shape =
        (sl_pair_shape_t){options->page_bytes, BARE_LAYERS, (uint32_t)options->pages, AT_ONCE};
    sl_pair_require_ok(sl_ops_find(options->device, &bench->pair.ops), "backend");
    sl_pair_require_ok(bench->pair.ops->open(&params, &bench->pair.device), "device");
    if (bench->pair.writer && options->model[0] != '\0') {
        open_model(bench);
    }
    if (bench->pair.writer) {
        sl_pair_tell(&bench->pair, &bench->pair.shape, sizeof(bench->pair.shape));
    } else {
        sl_pair_hear(&bench->pair, &bench->pair.shape, sizeof(bench->pair.shape));
    }
    if (bench->pair.pool == NULL) {
        size_t bytes =
            bench->pair.shape.page_bytes * bench->pair.shape.pages * bench->pair.shape.slots;
        sl_pair_require_ok(bench->pair.ops->alloc(bench->pair.device, bytes, "pool", &memory),
                           "pool");
        bench->pair.pool = memory;
    }
}

static void close_all(bench_t *bench)
{
    sl_pair_close(&bench->pair);
    if (bench->model == NULL) {
        bench->pair.ops->free(bench->pair.device, bench->pair.pool);
    }
    sl_step_destroy(bench->step);
    sl_model_destroy(bench->model);
    sl_checkpoint_close(bench->checkpoint);
    bench->pair.ops->close(bench->pair.device);
    free(bench->tokens);
    free(bench->chosen);
    free(bench->rules);
}

static void run_side(bench_t *bench, result_t *result)
{
    take_pool(bench);
    sl_pair_open(&bench->pair, bench->options->shuffled);
    for (bench->pair.next_attempt = 1; bench->pair.next_attempt <= AT_ONCE;
         bench->pair.next_attempt++) {
        begin(bench, bench->pair.next_attempt); /* every slot once, which warms up as well */
        sl_pair_wait_end(&bench->pair);
        sl_pair_check_pages(&bench->pair, bench->pair.next_attempt);
    }
    time_attempts(bench, 1, GRANTS_AHEAD, &result->single_us, &result->latency_us);
    time_attempts(bench, 1, 1, &result->granted_us, NULL);
    time_attempts(bench, AT_ONCE, AT_ONCE, &result->many_us, NULL);
    if (bench->options->model[0] != '\0') {
        run_prefill(bench, result);
    }
}

/* ---- the plain copy ---- */

static double copy_host(void)
{
    uint8_t *from = malloc(HOST_COPY_BYTES), *to = malloc(HOST_COPY_BYTES);
    double times_us[COPIES];
    sl_pair_require(from != NULL && to != NULL, "memory");
    memset(from, 1, HOST_COPY_BYTES);
    memset(to, 0, HOST_COPY_BYTES);
    for (int i = 0; i < COPIES; i++) {
        uint64_t started_us = sl_now_us();
        memcpy(to, from, HOST_COPY_BYTES);
        times_us[i] = (double)(sl_now_us() - started_us);
    }
    sl_pair_require(to[HOST_COPY_BYTES - 1] == 1, "copy");
    free(from);
    free(to);
    return HOST_COPY_BYTES / median(times_us, COPIES) * 1e6;
}

/* Bytes a second. In a process of its own: a device must not be in use before a fork. */
static double measure_copy(const bench_options_t *options)
{
    int pipe_fds[2], status;
    double rate = 0;
    sl_pair_require(pipe(pipe_fds) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        if (strcmp(options->device, "cuda") != 0) {
            rate = copy_host();
        } else {
            sl_pair_require_ok(sl_ceiling_peer_copy(0, (int)options->reader_index,
                                                    DEVICE_COPY_BYTES, COPIES, &rate),
                               "plain copy");
        }
        exit(write(pipe_fds[1], &rate, sizeof(rate)) == sizeof(rate) ? 0 : 1);
    }
    close(pipe_fds[1]);
    bool good = child > 0 && read(pipe_fds[0], &rate, sizeof(rate)) == sizeof(rate);
    close(pipe_fds[0]);
    good = child > 0 && waitpid(child, &status, 0) == child && status == 0 && good;
    sl_pair_require(good, "measuring the plain copy");
    return rate;
}

/* ---- output ---- */

static void print_rate(const char *what, double attempt_us, double bytes, const result_t *result)
{
    double rate = bytes / attempt_us * 1e6;
    printf("%-26s %10.1f us %8.2f GB/s %6.1f %%\n", what, attempt_us, rate / 1e9,
           100 * rate / result->copy_rate);
}

static double hidden_share(const result_t *result)
{
    return 1 - result->longer_us / result->transfer_us;
}

static void print_result(const bench_t *bench, const result_t *result)
{
    const bench_options_t *options = bench->options;
    double bytes = (double)bench->pair.shape.page_bytes * bench->pair.shape.pages;
    printf("plain copy %38.2f GB/s  100.0 %%\n", result->copy_rate / 1e9);
    printf("== %u pages of %llu bytes %s, %llu attempts\n", bench->pair.shape.pages,
           (unsigned long long)bench->pair.shape.page_bytes,
           options->shuffled ? "shuffled" : "side by side", (unsigned long long)options->attempts);
    print_rate("one at a time", result->single_us, bytes, result);
    print_rate("  push to COMMITTED", result->latency_us, bytes, result);
    print_rate("one, with its grant", result->granted_us, bytes, result);
    print_rate("8 at once", result->many_us, bytes, result);
    if (bench->model == NULL) {
        return;
    }
    printf("== %s, %u layers, %llu prompt(s) of %llu tokens, sent after every %u layers\n",
           options->model, bench->pair.shape.layers, (unsigned long long)options->batch_size,
           (unsigned long long)options->prompt_len, bench->push_layers);
    printf("prefill alone  %10.3f ms\n", result->compute_us / 1e3);
    printf("transfer alone %10.3f ms\n", result->transfer_us / 1e3);
    printf("both           %10.3f ms\n", result->both_us / 1e3);
    printf("both longer by %10.3f ms than the prefill next to it\n", result->longer_us / 1e3);
    printf("hidden         %10.1f %% of the transfer (1 - longer / transfer)\n",
           100 * hidden_share(result));
    printf("exposed        %10.3f ms from the prefill's end to COMMITTED\n",
           result->exposed_us / 1e3);
}

static void save_result(const bench_t *bench, const result_t *result)
{
    const bench_options_t *options = bench->options;
    if (options->result_filename[0] == '\0') {
        return;
    }
    FILE *file = fopen(options->result_filename, "a");
    sl_pair_require(file != NULL, options->result_filename);
    fprintf(file,
            "{\"device\": \"%s\", \"reader_index\": %llu, \"page_bytes\": %llu, \"pages\": %u, "
            "\"shuffled\": %s, \"attempts\": %llu, \"copy_GB_s\": %.3f, \"single_us\": %.1f, "
            "\"push_to_committed_us\": %.1f, \"with_grant_us\": %.1f, \"eight_at_once_us\": %.1f",
            options->device, (unsigned long long)options->reader_index,
            (unsigned long long)bench->pair.shape.page_bytes, bench->pair.shape.pages,
            options->shuffled ? "true" : "false", (unsigned long long)options->attempts,
            result->copy_rate / 1e9, result->single_us, result->latency_us, result->granted_us,
            result->many_us);
    if (bench->model != NULL) {
        const char *slash = strrchr(options->model, '/');
        fprintf(file,
                ", \"model\": \"%s\", \"layers\": %u, \"batch_size\": %llu, \"prompt_len\": %llu, "
                "\"push_layers\": %u, \"prefill_us\": %.1f, \"transfer_us\": %.1f, "
                "\"both_us\": %.1f, \"longer_us\": %.1f, \"exposed_us\": %.1f, "
                "\"hidden_share\": %.4f",
                slash == NULL ? options->model : slash + 1, bench->pair.shape.layers,
                (unsigned long long)options->batch_size, (unsigned long long)options->prompt_len,
                bench->push_layers, result->compute_us, result->transfer_us, result->both_us,
                result->longer_us, result->exposed_us, hidden_share(result));
    }
    fprintf(file, "}\n");
    sl_pair_require(fclose(file) == 0, options->result_filename);
}

int main(int argc, char **argv)
{
    static bench_options_t options;
    static bench_t bench = {.options = &options};
    result_t result = {0};
    sl_options_action_t action;
    int pair[2], status = 0;
    if (sl_options_parse(&options_table, argc, argv, &options, &action) != SL_OK) {
        return EXIT_FAILURE;
    }
    if (action == SL_OPTIONS_EXIT) {
        return EXIT_SUCCESS;
    }
    sl_log_set_level(SL_LOG_WARN);
    if (options.page_bytes % BARE_LAYERS != 0) {
        fprintf(stderr, "bench_transfer: --page-bytes %llu: expected a multiple of %u\n",
                (unsigned long long)options.page_bytes, BARE_LAYERS);
        return EXIT_FAILURE;
    }
    result.copy_rate = measure_copy(&options);
    sl_pair_require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    pid_t reader = fork();
    sl_pair_require(reader >= 0, "fork");
    bench.pair.writer = reader != 0;
    bench.pair.fd = pair[bench.pair.writer];
    close(pair[!bench.pair.writer]);
    run_side(&bench, &result);
    if (bench.pair.writer) {
        print_result(&bench, &result);
        save_result(&bench, &result);
    }
    close_all(&bench);
    return bench.pair.writer && (waitpid(reader, &status, 0) != reader || status != 0);
}
