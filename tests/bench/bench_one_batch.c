/*
 * One batch through the layers of one group, without router, transfer and scheduling: prefill in
 * one pass, then decode step by step. Flags and lines as in SGLang's bench_one_batch.
 *
 * The group's ranks are forked here and meet over UCX. With DP attention the batch is divided over
 * the ranks; with TP attention every rank has all of it. Batch size 0 is the largest that the
 * group's memory holds to the last output token, and --max-batch allows. Weights are made up unless
 * --load-format says otherwise. The latents that decode reads are those of a real prefill of the
 * same batch.
 *
 *   rank 0 .. tp-1:  ceilings (rank 0) -> weights -> connect -> for each (batch size, input,
 * output): warm-up, prefill in one pass (timed), decode steps (timed)
 *
 * Beside the times stands what the step must do at least (model_cost.h) as a share of what rank 0's
 * device can do (ceiling.h, measured in this run before the weights are loaded).
 */
#include <signal.h>
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
#include "tests/bench/ceiling.h"
#include "tests/bench/model_cost.h"
#include "tests/bench/prompt.h"

#define LIST_MAX 16
#define ADDRESS_MAX 8192
#define STEPS_SHOWN 5
#define LOGIT_ROWS 512u

typedef struct {
    const char *model, *device, *batch_size, *input_len, *output_len, *run_name, *result_filename;
    uint64_t tp, threads, num_hidden_layers, device_index, max_rows, max_batch, repeat;
    double mem_fraction;
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
     "Requests of the whole group, a list: 1,16,64; 0: as many as memory holds.", 0, 0, NULL},
    {"input-len", SL_OPTION_STRING, offsetof(bench_options_t, input_len), "512",
     "Prompt tokens, a list.", 0, 0, NULL},
    {"output-len", SL_OPTION_STRING, offsetof(bench_options_t, output_len), "16",
     "Output tokens, a list.", 0, 0, NULL},
    {"max-rows", SL_OPTION_U64, offsetof(bench_options_t, max_rows), "65536",
     "Rows of one pass on a rank.", 64, 1048576, NULL},
    {"max-batch", SL_OPTION_U64, offsetof(bench_options_t, max_batch), "256",
     "With batch size 0: requests of a rank, at most.", 1, 65536, NULL},
    {"mem-fraction", SL_OPTION_F64, offsetof(bench_options_t, mem_fraction), "0.9",
     "With batch size 0: share of the free memory to use.", 0.05, 1, NULL},
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
    uint32_t rank, tp, layers, max_requests, page_count;
    uint32_t pages_a_request; /* in the case at hand */
    sl_ceiling_t ceiling;     /* rank 0 */
    const char *limit; /* what bounds its batch, where the largest was asked for; "" elsewhere */
    const sl_ops_t *ops;
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

/* Whether the list asks for the largest batch. */
static bool wants_largest(const char *text)
{
    uint32_t values[LIST_MAX], count = parse_list(text, values);
    for (uint32_t i = 0; i < count; i++) {
        if (values[i] == 0) {
            return true;
        }
    }
    return false;
}

/* Pages of a request: the prompt, the outputs, and two more where steps are recorded. */
static uint32_t request_pages(uint32_t input_len, uint32_t output_len)
{
    return (input_len + output_len + 2 + SL_PAGE_TOKENS - 1) / SL_PAGE_TOKENS;
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

/* Requests of a batch that live on a rank; rank 0 has no fewer than any other. */
static uint32_t rank_share(const rank_t *self, uint32_t batch, uint32_t rank)
{
    if (self->options->attention == SL_ATTENTION_TP) {
        return batch;
    }
    return batch / self->tp + (rank < batch % self->tp);
}

static uint32_t share(const rank_t *self, uint32_t batch)
{
    return rank_share(self, batch, self->rank);
}

static int device_index(const rank_t *self)
{
    return (int)(self->options->device_index + (self->ops->host_memory ? 0 : self->rank));
}

static const uint32_t *pages_of(const rank_t *self, uint32_t request)
{
    return self->page_ids + (size_t)request * self->pages_a_request;
}

/* Prompts have nothing in common, on one rank or on two: tokens that repeat would choose the same
 * experts, and a step would read fewer of them than it does in service. */
static void make_prompt(rank_t *self, uint32_t request, uint32_t input_len)
{
    bool divided = self->options->attention == SL_ATTENTION_DP;
    uint64_t number = divided ? (uint64_t)request * self->tp + self->rank : request;
    sl_bench_prompt(number, input_len, sl_checkpoint_config(self->checkpoint)->vocab_size,
                    self->tokens);
}

/* The step that has begun, through all layers. `hit_p`: routed experts that had tokens, of a layer
 * on average; NULL: not wanted. */
static sl_status_t run_layers(rank_t *self, bool absorbed, double *hit_p)
{
    const sl_model_config_t *config = sl_checkpoint_config(self->checkpoint);
    uint32_t hit = 0, all = 0, counted = 0;
    SL_TRY(sl_model_embed(self->model));
    for (uint32_t layer = 0; layer < self->layers; layer++) {
        SL_TRY(sl_model_attention_begin(self->model, layer));
        SL_TRY(absorbed ? sl_model_attend_absorbed(self->model, layer)
                        : sl_model_attend_unabsorbed(self->model, layer));
        SL_TRY(sl_model_attention_end(self->model, layer));
        SL_TRY(sl_model_mlp(self->model, layer));
        if (hit_p != NULL && sl_model_layer_is_moe(config, layer)) {
            SL_TRY(sl_model_experts_hit(self->model, &hit));
            all += hit;
            counted++;
        }
    }
    if (hit_p != NULL) {
        *hit_p = counted > 0 ? (double)all / counted : 0;
    }
    return SL_OK;
}

/* Prompts [first, first + count) of every rank in one pass; the first tokens go to self->next. */
static sl_status_t prefill(rank_t *self, uint32_t first, uint32_t count, uint32_t batch,
                           uint32_t input_len, bool absorbed)
{
    uint32_t rank_rows[SL_GROUP_RANKS_MAX], mine = share(self, batch);
    float *logits;
    for (uint32_t r = 0; r < self->tp; r++) {
        uint32_t requests = rank_share(self, batch, r);
        uint32_t left = requests > first ? requests - first : 0;
        rank_rows[r] = (left < count ? left : count) * input_len;
    }
    sl_step_clear(self->step);
    for (uint32_t i = first; i < mine && i < first + count; i++) {
        make_prompt(self, i, input_len);
        sl_step_add(self->step, self->tokens, input_len, 0, pages_of(self, i),
                    self->pages_a_request);
    }
    SL_TRY(sl_model_begin(self->model, sl_step_batch(self->step, rank_rows, 0)));
    SL_TRY(run_layers(self, absorbed, NULL));
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
    for (uint32_t first = 0; first < rank_share(self, batch, 0); first += piece) {
        SL_TRY(prefill(self, first, piece, batch, input_len, false));
    }
    return SL_OK;
}

/* The batch of a decode step, one row a request. */
static sl_batch_t decode_batch(rank_t *self, uint32_t batch, uint32_t position)
{
    uint32_t rank_rows[SL_GROUP_RANKS_MAX], mine = share(self, batch), bucket = 0;
    for (uint32_t r = 0; r < self->tp; r++) {
        rank_rows[r] = rank_share(self, batch, r);
    }
    if (sl_model_records(self->model)) {
        bucket = rank_rows[0];
    }
    sl_step_clear(self->step);
    for (uint32_t i = 0; i < mine; i++) {
        sl_step_add(self->step, self->next + i, 1, position, pages_of(self, i),
                    self->pages_a_request);
    }
    sl_batch_t step = *sl_step_batch(self->step, rank_rows, bucket);
    step.rules = self->rules;
    return step;
}

static sl_status_t decode_step(rank_t *self, uint32_t batch, uint32_t position)
{
    uint32_t mine = share(self, batch);
    sl_batch_t step = decode_batch(self, batch, position);
    SL_TRY(sl_decode_forward(self->model, self->layers, &step));
    if (mine == 0) {
        return SL_OK;
    }
    SL_TRY(sl_model_fetch(self->model, mine, false));
    return sl_model_fetched(self->model, mine, self->next, NULL);
}

/* A step by hand, to look into its layers. */
static sl_status_t count_experts(rank_t *self, uint32_t batch, uint32_t position, double *hit_p)
{
    sl_batch_t step = decode_batch(self, batch, position);
    SL_TRY(sl_model_begin(self->model, &step));
    return run_layers(self, true, hit_p);
}

static sl_status_t barrier(rank_t *self)
{
    sl_step_record_t mine = {0}, all[SL_GROUP_RANKS_MAX];
    return sl_group_exchange(self->group, &mine, all);
}

/* The largest batch: every rank takes as many requests as the rank with the fewest pages can. */
static sl_status_t agree_on_batch(rank_t *self, uint32_t *batch_p)
{
    uint32_t fitting = self->page_count / self->pages_a_request;
    sl_step_record_t mine = {0}, all[SL_GROUP_RANKS_MAX];
    mine.extra = fitting < self->max_requests ? fitting : self->max_requests;
    SL_TRY(sl_group_exchange(self->group, &mine, all));
    uint64_t least = mine.extra;
    for (uint32_t r = 0; r < self->tp; r++) {
        least = all[r].extra < least ? all[r].extra : least;
    }
    if (least == 0) {
        return sl_error(SL_ERR_CONFIG, "%u pages of rank %u: expected at least the %u of a request",
                        self->page_count, self->rank, self->pages_a_request);
    }
    self->limit = least == self->max_requests ? "max-batch" : "pages";
    *batch_p = (uint32_t)least * (self->options->attention == SL_ATTENTION_DP ? self->tp : 1);
    return SL_OK;
}

typedef struct {
    uint32_t batch, input_len, output_len;
    double prefill_s, decode_s; /* medians; 0: not measured */
    double total_s;
    double prefill_flops; /* a second and device */
    double experts_hit;   /* routed experts with tokens in a step, of a layer on average */
    double decode_bytes;  /* of a step, on rank 0 */
} result_t;

static double product_share(const rank_t *self, const result_t *result)
{
    return 100 * result->prefill_flops / self->ceiling.flops;
}

static double memory_share(const rank_t *self, const result_t *result)
{
    return 100 * result->decode_bytes / result->decode_s / self->ceiling.bytes;
}

static void print_prefill(const rank_t *self, result_t *result)
{
    const sl_model_config_t *config = sl_checkpoint_config(self->checkpoint);
    uint32_t batch = result->batch, input_len = result->input_len;
    result->prefill_flops =
        sl_model_cost_prefill_flops(config, batch, input_len) / self->tp / result->prefill_s;
    printf("Prefill. latency: %6.5f s, throughput: %9.2f token/s\n", result->prefill_s,
           (double)batch * input_len / result->prefill_s);
    printf("Prefill. %.3f TFLOPS a device, %.1f %% of a large product's\n",
           result->prefill_flops / 1e12, product_share(self, result));
}

static sl_status_t time_prefill(rank_t *self, result_t *result)
{
    double times[100];
    uint32_t batch = result->batch, input_len = result->input_len;
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
        print_prefill(self, result);
    }
    return SL_OK;
}

static void print_decode(const rank_t *self, uint32_t skipped, uint32_t steps, result_t *result)
{
    const sl_ops_t *ops = self->ops;
    sl_cost_layout_t layout = {
        .tp = self->tp,
        .attention = (sl_attention_t)self->options->attention,
        .weight_bytes = (double)sl_dtype_bytes(ops->weight_dtype),
        .latent_bytes = (double)sl_dtype_bytes(ops->act_dtype),
    };
    /* Tokens that a row of the middle step attends to. */
    double context = result->input_len + skipped + (steps + 1) / 2.0;
    result->decode_bytes =
        sl_model_cost_decode_bytes(sl_checkpoint_config(self->checkpoint), &layout,
                                   result->experts_hit, share(self, result->batch), context);
    printf("Decode.  median latency: %6.5f s, median throughput: %9.2f token/s\n", result->decode_s,
           result->batch / result->decode_s);
    printf("Decode.  %.1f experts of a layer, %.3f GB of weights and latents a device and step, "
           "%.1f GB/s, %.1f %% of the memory's\n",
           result->experts_hit, result->decode_bytes / 1e9,
           result->decode_bytes / result->decode_s / 1e9, memory_share(self, result));
}

static sl_status_t time_decode(rank_t *self, result_t *result)
{
    uint32_t batch = result->batch, input_len = result->input_len;
    if (self->options->phase != 0) {
        SL_TRY(fill_cache(self, batch, input_len));
    }
    /* The first step runs, the second records: neither counts where steps are recorded. */
    uint32_t skipped = sl_model_records(self->model) ? 2 : 0, count = 0;
    for (uint32_t i = 0; i + 1 < result->output_len + skipped; i++) {
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
    result->decode_s = median(self->step_s, count);
    SL_TRY(count_experts(self, batch, input_len + skipped + count, &result->experts_hit));
    if (self->rank == 0) {
        print_decode(self, skipped, count, result);
    }
    return SL_OK;
}

static void save_run(const rank_t *self, const result_t *result, FILE *file)
{
    const bench_options_t *options = self->options;
    const char *slash = strrchr(options->model, '/');
    fprintf(file,
            "{\"run_name\": \"%s\", \"model\": \"%s\", \"device\": \"%s\", \"layers\": %u, "
            "\"tp\": %u, \"attention\": \"%s\", \"mla_prefill\": \"%s\", \"batch_size\": %u, "
            "\"batch_limited_by\": \"%s\", \"pages\": %u, \"input_len\": %u, \"output_len\": %u",
            options->run_name, slash != NULL ? slash + 1 : options->model, options->device,
            self->layers, self->tp, options->attention == SL_ATTENTION_DP ? "dp" : "tp",
            options->mla == 0 ? "unabsorbed" : "absorbed", result->batch, self->limit,
            self->page_count, result->input_len, result->output_len);
}

static void save_figures(const rank_t *self, const result_t *result, FILE *file)
{
    const sl_ceiling_t *ceiling = &self->ceiling;
    bool prefilled = result->prefill_s > 0, decoded = result->decode_s > 0;
    double tokens = (double)result->batch * result->input_len;
    fprintf(file,
            ", \"prefill_latency\": %.6f, \"prefill_throughput\": %.2f, "
            "\"prefill_tflops_a_device\": %.3f, \"prefill_percent_of_product\": %.2f, "
            "\"median_decode_latency\": %.6f, \"median_decode_throughput\": %.2f, "
            "\"decode_experts_a_layer\": %.1f, \"decode_gbytes_a_device\": %.4f, "
            "\"decode_percent_of_memory\": %.2f, "
            "\"total_latency\": %.6f, \"ceiling_tflops\": %.3f, \"ceiling_gbytes_s\": %.1f, "
            "\"ceilings\": \"%s\"}\n",
            result->prefill_s, prefilled ? tokens / result->prefill_s : 0,
            result->prefill_flops / 1e12, prefilled ? product_share(self, result) : 0,
            result->decode_s, decoded ? result->batch / result->decode_s : 0, result->experts_hit,
            result->decode_bytes / 1e9, decoded ? memory_share(self, result) : 0,
            result->total_s + result->prefill_s, ceiling->flops / 1e12, ceiling->bytes / 1e9,
            ceiling->description);
}

static sl_status_t save(const rank_t *self, const result_t *result)
{
    const char *name = self->options->result_filename;
    if (name[0] == '\0') {
        return SL_OK;
    }
    FILE *file = fopen(name, "a");
    if (file == NULL) {
        return sl_error(SL_ERR_IO, "cannot write %s", name);
    }
    save_run(self, result, file);
    save_figures(self, result, file);
    return fclose(file) == 0 ? SL_OK : sl_error(SL_ERR_IO, "cannot write %s", name);
}

/* What the case asks of a rank must fit its rows; the pages are there. */
static sl_status_t check_rows(const rank_t *self, const result_t *result)
{
    const bench_options_t *options = self->options;
    uint64_t requests = rank_share(self, result->batch, 0), rows = requests;
    if (options->phase != 2) {
        rows = requests * result->input_len;
    } else if (result->input_len > rows) {
        rows = result->input_len; /* prompts may go in pieces, each of them whole */
    }
    if (rows > options->max_rows || result->input_len == 0 || result->output_len == 0) {
        return sl_error(SL_ERR_CONFIG,
                        "batch %u of %u tokens and %u more: expected 1 or more tokens, and at most "
                        "--max-rows %llu rows on a rank, found %llu",
                        result->batch, result->input_len, result->output_len,
                        (unsigned long long)options->max_rows, (unsigned long long)rows);
    }
    return SL_OK;
}

static sl_status_t run_case(rank_t *self, uint32_t batch, uint32_t input_len, uint32_t output_len)
{
    self->pages_a_request = request_pages(input_len, output_len);
    self->limit = "";
    if (batch == 0) {
        SL_TRY(agree_on_batch(self, &batch));
    }
    result_t result = {.batch = batch, .input_len = input_len, .output_len = output_len};
    if (self->rank == 0) {
        printf("== batch size %u, input %u, output %u\n", batch, input_len, output_len);
    }
    SL_TRY(check_rows(self, &result));
    if (self->options->phase != 2) {
        SL_TRY(time_prefill(self, &result));
    }
    if (self->options->phase != 1 && output_len > 1) {
        SL_TRY(time_decode(self, &result));
    }
    if (self->rank != 0) {
        return SL_OK;
    }
    double total_s = result.prefill_s + result.total_s;
    double tokens = result.prefill_s > 0 ? input_len + output_len : output_len - 1.0;
    if (total_s > 0) {
        printf("Total. latency: %6.3f s, throughput: %9.2f token/s\n", total_s,
               batch * tokens / total_s);
    }
    fflush(stdout);
    return save(self, &result);
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

/* Requests on this rank at most. */
static uint32_t most_requests(const rank_t *self)
{
    const bench_options_t *options = self->options;
    uint32_t requests = share(self, largest(options->batch_size));
    if (wants_largest(options->batch_size) && requests < options->max_batch) {
        requests = (uint32_t)options->max_batch;
    }
    return requests > 0 ? requests : 1;
}

static sl_status_t open_model(rank_t *self)
{
    const bench_options_t *options = self->options;
    sl_checkpoint_options_t how = {options->load_format == 1, (uint32_t)options->num_hidden_layers};
    SL_TRY(sl_checkpoint_open_with(options->model, &how, &self->checkpoint));
    uint32_t pages = request_pages(largest(options->input_len), largest(options->output_len));
    self->layers = sl_checkpoint_config(self->checkpoint)->num_hidden_layers;
    self->max_requests = most_requests(self);
    sl_model_params_t params = {
        .checkpoint = self->checkpoint,
        .ops = self->ops,
        .device_index = device_index(self),
        .threads = (int)options->threads,
        .rank = self->rank,
        .tp = self->tp,
        .attention = (sl_attention_t)options->attention,
        .absorbed = options->phase != 1 || options->mla == 1,
        .unabsorbed = true,
        .max_rows = (uint32_t)options->max_rows,
        .max_requests = self->max_requests,
        .max_logit_rows = self->max_requests > LOGIT_ROWS ? self->max_requests : LOGIT_ROWS,
        .page_count = wants_largest(options->batch_size) ? 0 : self->max_requests * pages,
        .mem_fraction = options->mem_fraction,
        .sequence_pages = pages,
    };
    SL_TRY(sl_model_create(&params, &self->model));
    self->page_count = sl_model_page_count(self->model);
    return sl_step_create(params.max_rows, params.max_requests,
                          sl_model_sequence_pages(self->model), self->tp, self->page_count,
                          &self->step);
}

static sl_status_t take_memory(rank_t *self)
{
    uint32_t pages = self->page_count;
    uint32_t tokens = largest(self->options->input_len);
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
    for (uint32_t i = 0; i < self->max_requests + LOGIT_ROWS; i++) {
        self->rules[i].logprobs = -1; /* greedy */
    }
    return SL_OK;
}

/* What rank 0's device can do, before it has anything else to do. On the host, what one thread can
 * compute counts once for each. */
static sl_status_t measure_ceiling(rank_t *self)
{
    if (self->rank != 0) {
        return SL_OK;
    }
    SL_TRY(sl_ceiling_measure(self->options->device, device_index(self), &self->ceiling));
    if (self->ops->host_memory) {
        self->ceiling.flops *= (double)self->options->threads;
    }
    printf("Ceilings: %.3f TFLOPS, %.1f GB/s (%s)\n", self->ceiling.flops / 1e12,
           self->ceiling.bytes / 1e9, self->ceiling.description);
    return SL_OK;
}

/* After a failure a device may have work that never ends (a collective with a rank that gave up),
 * and whatever waits for the device would hang. The process ends as it is, and wait_all() ends the
 * others. */
static void leave_pending_work(const rank_t *self)
{
    if (self->ops != NULL && !self->ops->host_memory && self->tp > 1) {
        (void)fflush(stdout);
        _exit(EXIT_FAILURE);
    }
}

static sl_status_t run_rank(const bench_options_t *options, uint32_t rank, meeting_t *meeting)
{
    rank_t self = {.options = options, .rank = rank, .tp = (uint32_t)options->tp};
    sl_status_t status = sl_ops_find(options->device, &self.ops);
    if (status == SL_OK) {
        status = measure_ceiling(&self);
    }
    if (status == SL_OK) {
        status = open_model(&self);
    }
    if (status == SL_OK) {
        status = take_memory(&self);
    }
    if (status == SL_OK) {
        status = meet(&self, meeting);
    }
    if (status == SL_OK) {
        status = run_cases(&self);
    }
    if (status != SL_OK) {
        leave_pending_work(&self);
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

/* Whether all ranks went well. One that fails takes the others along, which may wait for it. */
static bool wait_all(const pid_t *ranks, uint32_t count)
{
    bool good = true;
    for (uint32_t left = count; left > 0; left--) {
        int code;
        pid_t ended = wait(&code);
        if (ended > 0 && code == 0) {
            continue;
        }
        for (uint32_t r = 0; good && r < count; r++) {
            if (ranks[r] > 0 && ranks[r] != ended) {
                (void)kill(ranks[r], SIGKILL);
            }
        }
        good = false;
    }
    return good;
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
    pid_t ranks[SL_GROUP_RANKS_MAX];
    for (uint32_t rank = 0; rank < options.tp; rank++) {
        ranks[rank] = fork();
        if (ranks[rank] == 0) {
            exit(run_rank(&options, rank, meeting) == SL_OK ? EXIT_SUCCESS : EXIT_FAILURE);
        }
    }
    return wait_all(ranks, (uint32_t)options.tp) ? EXIT_SUCCESS : EXIT_FAILURE;
}
