/*
 * One batch through the layers of one group, without router, transfer and scheduling: prefill in
 * one pass, then decode step by step. Flags and lines as in SGLang's bench_one_batch.
 *
 * The group's ranks are forked here and meet over UCX. With DP attention the batch is divided over
 * the ranks; with TP attention every rank has all of it. Weights are made up unless --load-format
 * says otherwise. The latents that decode reads are those of a real prefill of the same batch.
 *
 *   rank 0 .. tp-1:  weights -> connect -> for each (batch size, input, output):
 *                    warm-up, prefill in one pass (timed), decode steps (timed)
 */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "decode_node/forward.h"
#include "kernels/collectives.h"
#include "node/step.h"

#define LIST_MAX 16
#define ADDRESS_MAX 8192
#define STEPS_SHOWN 5
#define LOGIT_ROWS 512u

typedef struct {
    const char *model, *device, *batch_size, *input_len, *output_len, *run_name, *result_filename;
    uint64_t tp, threads, num_hidden_layers, device_index, max_rows, repeat;
    int attention, mla, load_format, phase; /* phase 0: both, 1: prefill, 2: decode */
} bench_options_t;

static const sl_option_t table[] = {
    {"model", SL_OPTION_STRING, offsetof(bench_options_t, model), NULL,
     "Directory with config.json, and weights unless they are made up.", 0, 0, NULL},
    {"load-format", SL_OPTION_CHOICE, offsetof(bench_options_t, load_format), "dummy",
     "Where weights come from.", 0, 0, "safetensors|dummy"},
    {"num-hidden-layers", SL_OPTION_U64, offsetof(bench_options_t, num_hidden_layers), "0",
     "Only the first so many layers; 0: all.", 0, 10000, NULL},
    {"device", SL_OPTION_STRING, offsetof(bench_options_t, device), "cpu", "Backend.", 0, 0, NULL},
    {"device-index", SL_OPTION_U64, offsetof(bench_options_t, device_index), "0",
     "Accelerator of rank 0; the others take the next ones.", 0, 1023, NULL},
    {"threads", SL_OPTION_U64, offsetof(bench_options_t, threads), "1", "CPU threads a rank.", 1,
     1024, NULL},
    {"tp", SL_OPTION_U64, offsetof(bench_options_t, tp), "1", "Ranks of the group.", 1, 64, NULL},
    {"attention", SL_OPTION_CHOICE, offsetof(bench_options_t, attention), "dp", "Attention mode.",
     0, 0, "dp|tp"},
    {"mla-prefill", SL_OPTION_CHOICE, offsetof(bench_options_t, mla), "unabsorbed",
     "Attention of the prefill.", 0, 0, "unabsorbed|absorbed"},
    {"phase", SL_OPTION_CHOICE, offsetof(bench_options_t, phase), "both",
     "What is timed; decode fills its cache untimed, in pieces that fit.", 0, 0,
     "both|prefill|decode"},
    {"batch-size", SL_OPTION_STRING, offsetof(bench_options_t, batch_size), "1",
     "Requests of the whole group, a list: 1,16,64.", 0, 0, NULL},
    {"input-len", SL_OPTION_STRING, offsetof(bench_options_t, input_len), "512",
     "Prompt tokens, a list.", 0, 0, NULL},
    {"output-len", SL_OPTION_STRING, offsetof(bench_options_t, output_len), "16",
     "Output tokens, a list.", 0, 0, NULL},
    {"max-rows", SL_OPTION_U64, offsetof(bench_options_t, max_rows), "65536",
     "Rows of one pass on a rank.", 64, 1048576, NULL},
    {"repeat", SL_OPTION_U64, offsetof(bench_options_t, repeat), "3",
     "Prefill passes timed; the median counts.", 1, 100, NULL},
    {"run-name", SL_OPTION_STRING, offsetof(bench_options_t, run_name), "default",
     "Name in the results.", 0, 0, NULL},
    {"result-filename", SL_OPTION_STRING, offsetof(bench_options_t, result_filename), "",
     "File that gets a JSON line a run.", 0, 0, NULL},
};

static const sl_options_t options_table = {"bench_one_batch",
                                           "One batch through the layers of one group.", table,
                                           sizeof(table) / sizeof(table[0])};

/* Shared by the forked ranks: where each leaves its group address. */
typedef struct {
    _Atomic uint32_t ready;
    size_t sizes[SL_GROUP_RANKS_MAX];
    uint8_t addresses[SL_GROUP_RANKS_MAX][ADDRESS_MAX];
} meeting_t;

typedef struct {
    const bench_options_t *options;
    uint32_t rank, tp, layers, pages_a_request, max_requests;
    sl_checkpoint_t *checkpoint;
    sl_model_t *model;
    sl_ucx_t *ucx;
    sl_group_t *group;
    sl_step_t *step;
    uint32_t *page_ids;
    int32_t *tokens, *next;
    sl_sample_row_t *rules;
    double *step_s;
} rank_t;

static uint32_t parse_list(const char *text, uint32_t values[LIST_MAX])
{
    uint32_t count = 0;
    while (*text != '\0' && count < LIST_MAX) {
        char *end;
        values[count++] = (uint32_t)strtoul(text, &end, 10);
        text = *end == ',' ? end + 1 : end;
        if (end == text && *end != '\0') {
            break;
        }
    }
    return count;
}

static uint32_t largest(const char *text)
{
    uint32_t values[LIST_MAX], most = 0, count = parse_list(text, values);
    for (uint32_t i = 0; i < count; i++) {
        most = values[i] > most ? values[i] : most;
    }
    return most;
}

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

/* Requests of a batch that live on this rank. */
static uint32_t share(const rank_t *self, uint32_t batch)
{
    if (self->options->attention == SL_ATTENTION_TP) {
        return batch;
    }
    return batch / self->tp + (self->rank < batch % self->tp);
}

static void fill_rank_rows(const rank_t *self, uint32_t batch, uint32_t rows_a_request,
                           uint32_t rank_rows[SL_GROUP_RANKS_MAX])
{
    rank_t other = *self;
    for (uint32_t r = 0; r < self->tp; r++) {
        other.rank = r;
        rank_rows[r] = share(&other, batch) * rows_a_request;
    }
}

static const uint32_t *pages_of(const rank_t *self, uint32_t request)
{
    return self->page_ids + (size_t)request * self->pages_a_request;
}

/* Prompts [first, first + count) of every rank in one pass; the first tokens go to self->next. */
static sl_status_t prefill(rank_t *self, uint32_t first, uint32_t count, uint32_t batch,
                           uint32_t input_len, bool absorbed)
{
    uint32_t rank_rows[SL_GROUP_RANKS_MAX], mine = share(self, batch);
    float *logits;
    fill_rank_rows(self, batch, 1, rank_rows);
    for (uint32_t r = 0; r < self->tp; r++) {
        uint32_t left = rank_rows[r] > first ? rank_rows[r] - first : 0;
        rank_rows[r] = (left < count ? left : count) * input_len;
    }
    sl_step_clear(self->step);
    for (uint32_t i = first; i < mine && i < first + count; i++) {
        sl_step_add(self->step, self->tokens + i, input_len, 0, pages_of(self, i),
                    self->pages_a_request);
    }
    SL_TRY(sl_model_begin(self->model, sl_step_batch(self->step, rank_rows, 0)));
    SL_TRY(sl_model_embed(self->model));
    for (uint32_t layer = 0; layer < self->layers; layer++) {
        SL_TRY(sl_model_attention_begin(self->model, layer));
        SL_TRY(absorbed ? sl_model_attend_absorbed(self->model, layer)
                        : sl_model_attend_unabsorbed(self->model, layer));
        SL_TRY(sl_model_attention_end(self->model, layer));
        SL_TRY(sl_model_mlp(self->model, layer));
    }
    for (uint32_t i = 0; i < sl_step_requests(self->step); i += LOGIT_ROWS) {
        int32_t rows[LOGIT_ROWS];
        uint32_t n = sl_step_requests(self->step) - i;
        n = n < LOGIT_ROWS ? n : LOGIT_ROWS;
        for (uint32_t j = 0; j < n; j++) {
            rows[j] = sl_step_last_row(self->step, i + j);
        }
        SL_TRY(sl_model_logits(self->model, rows, n, &logits));
        SL_TRY(sl_model_sample(self->model, logits, self->rules, n, self->next + first + i, NULL));
    }
    return SL_OK;
}

/* The whole batch in pieces that fit, as the cache of a decode. */
static sl_status_t fill_cache(rank_t *self, uint32_t batch, uint32_t input_len)
{
    uint32_t piece = (uint32_t)self->options->max_rows / input_len;
    for (uint32_t first = 0; first < batch; first += piece) {
        SL_TRY(prefill(self, first, piece, batch, input_len, false));
    }
    return SL_OK;
}

static sl_status_t decode_step(rank_t *self, uint32_t batch, uint32_t position)
{
    uint32_t rank_rows[SL_GROUP_RANKS_MAX], mine = share(self, batch), bucket = 0;
    fill_rank_rows(self, batch, 1, rank_rows);
    for (uint32_t r = 0; sl_model_records(self->model) && r < self->tp; r++) {
        bucket = rank_rows[r] > bucket ? rank_rows[r] : bucket;
    }
    sl_step_clear(self->step);
    for (uint32_t i = 0; i < mine; i++) {
        sl_step_add(self->step, self->next + i, 1, position, pages_of(self, i),
                    self->pages_a_request);
    }
    sl_batch_t step = *sl_step_batch(self->step, rank_rows, bucket);
    step.rules = self->rules;
    SL_TRY(sl_decode_forward(self->model, self->layers, &step));
    if (mine == 0) {
        return SL_OK;
    }
    SL_TRY(sl_model_fetch(self->model, mine, false));
    return sl_model_fetched(self->model, mine, self->next, NULL);
}

static sl_status_t barrier(rank_t *self)
{
    sl_step_record_t mine = {0}, all[SL_GROUP_RANKS_MAX];
    return sl_group_exchange(self->group, &mine, all);
}

typedef struct {
    double prefill_s, decode_s; /* medians; 0: not measured */
    double total_s;
} result_t;

static sl_status_t time_prefill(rank_t *self, uint32_t batch, uint32_t input_len, result_t *result)
{
    double times[100];
    bool absorbed = self->options->mla == 1;
    SL_TRY(prefill(self, 0, batch, batch, input_len, absorbed)); /* warm */
    for (uint32_t i = 0; i < self->options->repeat; i++) {
        SL_TRY(barrier(self));
        uint64_t started_us = sl_now_us();
        SL_TRY(prefill(self, 0, batch, batch, input_len, absorbed));
        times[i] = (double)(sl_now_us() - started_us) / 1e6;
    }
    result->prefill_s = median(times, (uint32_t)self->options->repeat);
    if (self->rank == 0) {
        printf("Prefill. latency: %6.5f s, throughput: %9.2f token/s\n", result->prefill_s,
               (double)batch * input_len / result->prefill_s);
    }
    return SL_OK;
}

static sl_status_t time_decode(rank_t *self, uint32_t batch, uint32_t input_len,
                               uint32_t output_len, result_t *result)
{
    if (self->options->phase != 0) {
        SL_TRY(fill_cache(self, batch, input_len));
    }
    /* The first step runs, the second records: neither counts where steps are recorded. */
    uint32_t skipped = sl_model_records(self->model) ? 2 : 0, count = 0;
    for (uint32_t i = 0; i + 1 < output_len + skipped; i++) {
        SL_TRY(barrier(self));
        uint64_t started_us = sl_now_us();
        SL_TRY(decode_step(self, batch, input_len + i));
        double step_s = (double)(sl_now_us() - started_us) / 1e6;
        if (i < skipped) {
            continue;
        }
        self->step_s[count++] = step_s;
        result->total_s += step_s;
        if (self->rank == 0 && count <= STEPS_SHOWN) {
            printf("Decode %u. Batch size: %u, latency: %6.5f s, throughput: %9.2f token/s\n",
                   count - 1, batch, step_s, batch / step_s);
        }
    }
    result->decode_s = count > 0 ? median(self->step_s, count) : 0;
    if (self->rank == 0 && count > 0) {
        printf("Decode.  median latency: %6.5f s, median throughput: %9.2f token/s\n",
               result->decode_s, batch / result->decode_s);
    }
    return SL_OK;
}

static void save(const rank_t *self, uint32_t batch, uint32_t input_len, uint32_t output_len,
                 const result_t *result)
{
    const bench_options_t *options = self->options;
    if (options->result_filename[0] == '\0') {
        return;
    }
    FILE *file = fopen(options->result_filename, "a");
    if (file == NULL) {
        fprintf(stderr, "cannot write %s\n", options->result_filename);
        return;
    }
    fprintf(
        file,
        "{\"run_name\": \"%s\", \"model\": \"%s\", \"device\": \"%s\", \"layers\": %u, \"tp\": %u, "
        "\"attention\": \"%s\", \"mla_prefill\": \"%s\", \"batch_size\": %u, \"input_len\": %u, "
        "\"output_len\": %u, \"prefill_latency\": %.6f, \"prefill_throughput\": %.2f, "
        "\"median_decode_latency\": %.6f, \"median_decode_throughput\": %.2f, "
        "\"total_latency\": %.6f}\n",
        options->run_name,
        strrchr(options->model, '/') != NULL ? strrchr(options->model, '/') + 1 : options->model,
        options->device, self->layers, self->tp, options->attention == 0 ? "dp" : "tp",
        options->mla == 0 ? "unabsorbed" : "absorbed", batch, input_len, output_len,
        result->prefill_s,
        result->prefill_s > 0 ? (double)batch * input_len / result->prefill_s : 0.0,
        result->decode_s, result->decode_s > 0 ? batch / result->decode_s : 0.0,
        result->total_s + result->prefill_s);
    fclose(file);
}

static sl_status_t run_case(rank_t *self, uint32_t batch, uint32_t input_len, uint32_t output_len)
{
    result_t result = {0};
    if (self->rank == 0) {
        printf("== batch size %u, input %u, output %u\n", batch, input_len, output_len);
    }
    if (self->options->phase != 2) {
        if ((uint64_t)share(self, batch) * input_len > self->options->max_rows) {
            return sl_error(SL_ERR_CONFIG,
                            "batch %u of %u tokens: expected at most --max-rows %llu "
                            "rows on a rank",
                            batch, input_len, (unsigned long long)self->options->max_rows);
        }
        SL_TRY(time_prefill(self, batch, input_len, &result));
    }
    if (self->options->phase != 1 && output_len > 1) {
        SL_TRY(time_decode(self, batch, input_len, output_len, &result));
    }
    if (self->rank == 0) {
        double total_s = result.prefill_s + result.total_s;
        printf("Total. latency: %6.3f s, throughput: %9.2f token/s\n", total_s,
               (double)batch * (input_len + output_len) / total_s);
        fflush(stdout);
        save(self, batch, input_len, output_len, &result);
    }
    return SL_OK;
}

static sl_status_t run_cases(rank_t *self)
{
    uint32_t batches[LIST_MAX], inputs[LIST_MAX], outputs[LIST_MAX];
    uint32_t batch_count = parse_list(self->options->batch_size, batches);
    uint32_t input_count = parse_list(self->options->input_len, inputs);
    uint32_t output_count = parse_list(self->options->output_len, outputs);
    for (uint32_t b = 0; b < batch_count; b++) {
        for (uint32_t i = 0; i < input_count; i++) {
            for (uint32_t o = 0; o < output_count; o++) {
                SL_TRY(run_case(self, batches[b], inputs[i], outputs[o]));
            }
        }
    }
    return SL_OK;
}

static sl_status_t meet(rank_t *self, meeting_t *meeting)
{
    sl_bytes_t mine, all[SL_GROUP_RANKS_MAX];
    sl_group_params_t params = {.rank = self->rank, .size = self->tp, .timeout_us = 120000000};
    SL_TRY(sl_ucx_create(&self->ucx));
    SL_TRY(sl_group_create(self->ucx, &params, &self->group));
    sl_group_address(self->group, &mine);
    SL_ASSERT(mine.size <= ADDRESS_MAX);
    memcpy(meeting->addresses[self->rank], mine.data, mine.size);
    meeting->sizes[self->rank] = mine.size;
    atomic_fetch_add(&meeting->ready, 1);
    while (atomic_load(&meeting->ready) < self->tp) {
        usleep(1000);
    }
    for (uint32_t r = 0; r < self->tp; r++) {
        all[r] = (sl_bytes_t){meeting->addresses[r], meeting->sizes[r]};
    }
    SL_TRY(sl_group_connect(self->group, all, self->tp));
    return sl_model_join(self->model, self->group);
}

static sl_status_t open_model(rank_t *self)
{
    const bench_options_t *options = self->options;
    const sl_ops_t *ops;
    sl_checkpoint_options_t how = {options->load_format == 1, (uint32_t)options->num_hidden_layers};
    SL_TRY(sl_ops_find(options->device, &ops));
    SL_TRY(sl_checkpoint_open_with(options->model, &how, &self->checkpoint));
    uint32_t tokens = largest(options->input_len) + largest(options->output_len) + 2;
    uint32_t requests = share(self, largest(options->batch_size));
    self->layers = sl_checkpoint_config(self->checkpoint)->num_hidden_layers;
    self->pages_a_request = (tokens + SL_PAGE_TOKENS - 1) / SL_PAGE_TOKENS;
    self->max_requests = requests > 0 ? requests : 1;
    sl_model_params_t params = {
        .checkpoint = self->checkpoint,
        .ops = ops,
        .device_index =
            (int)(options->device_index + (strcmp(options->device, "cuda") == 0 ? self->rank : 0)),
        .threads = (int)options->threads,
        .rank = self->rank,
        .tp = self->tp,
        .attention = (sl_attention_t)options->attention,
        .absorbed = options->phase != 1 || options->mla == 1,
        .unabsorbed = true,
        .max_rows = (uint32_t)options->max_rows,
        .max_requests = self->max_requests,
        .max_logit_rows = self->max_requests > LOGIT_ROWS ? self->max_requests : LOGIT_ROWS,
        .page_count = self->max_requests * self->pages_a_request,
        .sequence_pages = self->pages_a_request,
    };
    SL_TRY(sl_model_create(&params, &self->model));
    return sl_step_create(params.max_rows, params.max_requests,
                          sl_model_sequence_pages(self->model), self->tp, params.page_count,
                          &self->step);
}

static sl_status_t take_memory(rank_t *self)
{
    uint32_t pages = self->max_requests * self->pages_a_request;
    uint32_t tokens = largest(self->options->input_len) + self->max_requests;
    uint32_t vocab = sl_checkpoint_config(self->checkpoint)->vocab_size;
    self->page_ids = calloc(pages, sizeof(*self->page_ids));
    self->tokens = calloc(tokens, sizeof(*self->tokens));
    self->next = calloc(self->max_requests, sizeof(*self->next));
    self->rules = calloc(self->max_requests + LOGIT_ROWS, sizeof(*self->rules));
    self->step_s = calloc(largest(self->options->output_len) + 2, sizeof(*self->step_s));
    if (self->page_ids == NULL || self->tokens == NULL || self->next == NULL ||
        self->rules == NULL || self->step_s == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "bench: out of memory");
    }
    for (uint32_t i = 0; i < pages; i++) {
        self->page_ids[i] = i;
    }
    for (uint32_t i = 0; i < tokens; i++) {
        self->tokens[i] = (int32_t)((i * 2654435761u >> 7) % vocab);
    }
    for (uint32_t i = 0; i < self->max_requests + LOGIT_ROWS; i++) {
        self->rules[i].logprobs = -1; /* greedy */
    }
    return SL_OK;
}

static sl_status_t run_rank(const bench_options_t *options, uint32_t rank, meeting_t *meeting)
{
    rank_t self = {.options = options, .rank = rank, .tp = (uint32_t)options->tp};
    sl_status_t status = open_model(&self);
    if (status == SL_OK) {
        status = take_memory(&self);
    }
    if (status == SL_OK) {
        status = meet(&self, meeting);
    }
    if (status == SL_OK) {
        status = run_cases(&self);
    }
    sl_step_destroy(self.step);
    sl_model_destroy(self.model);
    sl_group_destroy(self.group);
    sl_ucx_destroy(self.ucx);
    sl_checkpoint_close(self.checkpoint);
    free(self.page_ids);
    free(self.tokens);
    free(self.next);
    free(self.rules);
    free(self.step_s);
    return status;
}

int main(int argc, char **argv)
{
    bench_options_t options = {0};
    sl_options_action_t action;
    if (sl_options_parse(&options_table, argc, argv, &options, &action) != SL_OK) {
        return EXIT_FAILURE;
    }
    if (action == SL_OPTIONS_EXIT) {
        return EXIT_SUCCESS;
    }
    sl_log_set_level(SL_LOG_INFO);
    meeting_t *meeting =
        mmap(NULL, sizeof(*meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (meeting == MAP_FAILED) {
        return EXIT_FAILURE;
    }
    bool failed = false;
    for (uint32_t rank = 0; rank < options.tp; rank++) {
        if (fork() == 0) {
            exit(run_rank(&options, rank, meeting) == SL_OK ? EXIT_SUCCESS : EXIT_FAILURE);
        }
    }
    for (uint32_t rank = 0; rank < options.tp; rank++) {
        int code;
        failed = wait(&code) < 0 || code != 0 || failed;
    }
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
