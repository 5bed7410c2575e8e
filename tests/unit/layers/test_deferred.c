/*
 * Steps, staging and recordings of the layers on a device that works later than the host asks
 * (deferred_ops.h): decode with two steps under way, rows that come, go and move, and recordings of
 * several sizes gives the tokens of `ref`, which has no queue; so does prefill that nobody waits
 * for between its pieces. Ranks of a group are threads.
 */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "decode_node/forward.h"
#include "kernels/layers/model.h"
#include "node/step.h"
#include "tests/unit/layers/deferred_ops.h"

#define MAX_ROWS 8u
#define OUTPUTS_MAX 44u
#define PAGES 24u
#define PREFILL_ROWS 96u
#define RANKS_MAX 2u

/* A request's life in decode: its first step holds its whole prompt, every step gives a token. */
typedef struct {
    uint32_t first_step, prompt_rows, outputs;
    float temperature;
    int32_t logprobs;
} request_t;

/* Never more than 8 rows a step; sizes 1, 2, 4 and 8 come again and again. */
static const request_t requests[] = {
    {0, 1, 44, 0.0f, -1}, {2, 2, 9, 1.0f, 3},  {3, 3, 5, 0.8f, 0},  {6, 1, 1, 1.0f, -1},
    {9, 2, 14, 1.2f, -1}, {10, 3, 9, 0.0f, 5}, {13, 1, 6, 1.0f, 2}, {15, 2, 16, 0.9f, -1},
    {17, 1, 13, 1.0f, 1}, {28, 2, 10, 1.0f, 4}};
#define REQUESTS (sizeof(requests) / sizeof(requests[0]))
#define STEPS 44u

typedef struct {
    int32_t tokens[REQUESTS][OUTPUTS_MAX];
    sl_logprobs_t logprobs[REQUESTS][OUTPUTS_MAX];
    bool has_logprobs[REQUESTS][OUTPUTS_MAX];
    bool has_token[REQUESTS][OUTPUTS_MAX];
} results_t;

/* How the steps are made. */
typedef struct {
    const char *checkpoint;
    uint32_t tp;
    sl_attention_t attention;
    deferred_params_t device;
    bool plain;           /* `ref` itself, one step at a time; the rest does not matter then */
    uint32_t fetch_every; /* steps; above 1: tokens come from `known` in place of the device */
    const results_t *known;
} manner_t;

typedef struct {
    const manner_t *manner;
    uint32_t rank;
    sl_checkpoint_t *checkpoint;
    sl_model_t *model;
    sl_step_t *step;
    const sl_ops_t *ops;
    results_t *results;
    sl_status_t status;
} rig_t;

/* ---- the script ---- */

static bool active(uint32_t r, uint32_t step)
{
    return step >= requests[r].first_step && step < requests[r].first_step + requests[r].outputs;
}

static bool of_rank(const rig_t *rig, uint32_t r, uint32_t rank)
{
    return rig->manner->attention == SL_ATTENTION_TP || r % rig->manner->tp == rank;
}

static uint32_t rows_of(uint32_t r, uint32_t step)
{
    return !active(r, step) ? 0 : step == requests[r].first_step ? requests[r].prompt_rows : 1;
}

/* Of the rank's rows before and with request `r`. */
static uint32_t rows_up_to(const rig_t *rig, uint32_t rank, uint32_t r, uint32_t step)
{
    uint32_t rows = 0;
    for (uint32_t i = 0; i <= r; i++) {
        rows += of_rank(rig, i, rank) ? rows_of(i, step) : 0;
    }
    return rows;
}

static bool chooses(const rig_t *rig)
{
    return rig->manner->attention == SL_ATTENTION_DP || rig->rank == 0;
}

static uint32_t bucket_of(const uint32_t *rank_rows, uint32_t tp)
{
    uint32_t bucket = 1;
    for (uint32_t i = 0; i < tp; i++) {
        while (bucket < rank_rows[i]) {
            bucket *= 2;
        }
    }
    return bucket;
}

/* ---- a rank ---- */

static sl_status_t rig_open(rig_t *rig)
{
    const manner_t *manner = rig->manner;
    const char *source = getenv("SLUICE_SOURCE_DIR");
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/tests/golden/%s", source != NULL ? source : ".",
             manner->checkpoint);
    SL_TRY(sl_checkpoint_open(dir, &rig->checkpoint));
    sl_model_params_t params = {
        .checkpoint = rig->checkpoint,
        .ops = rig->ops,
        .threads = 1,
        .rank = rig->rank,
        .tp = manner->tp,
        .attention = manner->attention,
        .absorbed = true,
        .unabsorbed = true,
        .max_rows = PREFILL_ROWS,
        .max_requests = MAX_ROWS,
        .max_logit_rows = MAX_ROWS,
        .page_count = PAGES,
    };
    SL_TRY(sl_model_create(&params, &rig->model));
    if (manner->tp > 1) {
        SL_TRY(sl_model_join(rig->model, NULL));
    }
    return sl_step_create(params.max_rows, params.max_requests, sl_model_sequence_pages(rig->model),
                          manner->tp, PAGES, &rig->step);
}

static void rig_close(rig_t *rig)
{
    sl_step_destroy(rig->step);
    sl_model_destroy(rig->model);
    sl_checkpoint_close(rig->checkpoint);
}

static uint32_t layers_of(const rig_t *rig)
{
    return sl_checkpoint_config(rig->checkpoint)->num_hidden_layers;
}

/* The input of request `r`: what it chose last, as the host or only the device knows it. */
static int32_t input_of(const rig_t *rig, uint32_t r, uint32_t step)
{
    const results_t *from = rig->manner->plain && chooses(rig) ? rig->results : rig->manner->known;
    if (from != NULL) {
        return from->tokens[r][step - 1 - requests[r].first_step];
    }
    return -(int32_t)rows_up_to(rig, rig->rank, r, step - 1);
}

static void add_rows(rig_t *rig, uint32_t r, uint32_t step, sl_sample_row_t *rules)
{
    const request_t *request = &requests[r];
    uint32_t output = step - request->first_step, rows = rows_of(r, step);
    uint32_t page = (r * 7 + 3) % PAGES, last = rows_up_to(rig, rig->rank, r, step) - 1;
    int32_t tokens[MAX_ROWS];
    for (uint32_t i = 0; i < rows; i++) {
        tokens[i] = output == 0 ? (int32_t)(10 + 20 * r + i) : input_of(rig, r, step);
    }
    sl_step_add(rig->step, tokens, rows, output == 0 ? 0 : request->prompt_rows + output - 1, &page,
                1);
    rules[last] = (sl_sample_row_t){
        .temperature = request->temperature,
        .top_p = 1,
        .seed = 77 * r + 5,
        .position = output,
        .logprobs = request->logprobs,
    };
}

static sl_status_t issue(rig_t *rig, uint32_t step)
{
    const manner_t *manner = rig->manner;
    sl_sample_row_t rules[MAX_ROWS];
    uint32_t rank_rows[RANKS_MAX];
    for (uint32_t i = 0; i < MAX_ROWS; i++) {
        rules[i] = (sl_sample_row_t){.logprobs = -1};
    }
    sl_step_clear(rig->step);
    for (uint32_t r = 0; r < REQUESTS; r++) {
        if (active(r, step) && of_rank(rig, r, rig->rank)) {
            add_rows(rig, r, step, rules);
        }
    }
    for (uint32_t i = 0; i < manner->tp; i++) {
        rank_rows[i] = rows_up_to(rig, i, REQUESTS - 1, step);
    }
    uint32_t padded = manner->plain ? 0 : bucket_of(rank_rows, manner->tp);
    sl_batch_t batch = *sl_step_batch(rig->step, rank_rows, padded);
    batch.rules = chooses(rig) ? rules : NULL;
    return sl_decode_forward(rig->model, layers_of(rig), &batch);
}

static bool wants_logprobs(const rig_t *rig, uint32_t step)
{
    return rig->manner->plain || step % 3 != 1;
}

/* Whether tokens of that step go to the host. */
static bool fetches(const rig_t *rig, uint32_t step)
{
    return chooses(rig) && rows_up_to(rig, rig->rank, REQUESTS - 1, step) > 0 &&
           step % rig->manner->fetch_every == rig->manner->fetch_every - 1;
}

static sl_status_t fetch(rig_t *rig, uint32_t step)
{
    if (!fetches(rig, step)) {
        return SL_OK;
    }
    uint32_t rows = rows_up_to(rig, rig->rank, REQUESTS - 1, step);
    return sl_model_fetch(rig->model, rows, wants_logprobs(rig, step));
}

static sl_status_t take(rig_t *rig, uint32_t step)
{
    int32_t tokens[MAX_ROWS];
    sl_logprobs_t logprobs[MAX_ROWS];
    bool with = wants_logprobs(rig, step);
    if (!fetches(rig, step)) {
        return SL_OK;
    }
    uint32_t rows = rows_up_to(rig, rig->rank, REQUESTS - 1, step);
    SL_TRY(sl_model_fetched(rig->model, rows, tokens, with ? logprobs : NULL));
    for (uint32_t r = 0; r < REQUESTS; r++) {
        if (!active(r, step) || !of_rank(rig, r, rig->rank)) {
            continue;
        }
        uint32_t output = step - requests[r].first_step;
        uint32_t row = rows_up_to(rig, rig->rank, r, step) - 1;
        rig->results->tokens[r][output] = tokens[row];
        rig->results->has_token[r][output] = true;
        if (with && requests[r].logprobs >= 0) {
            rig->results->logprobs[r][output] = logprobs[row];
            rig->results->has_logprobs[r][output] = true;
        }
    }
    return SL_OK;
}

/* The next step is issued before the tokens of the one before it are taken. */
static sl_status_t decode(rig_t *rig)
{
    uint32_t behind = rig->manner->plain ? 0 : 1;
    for (uint32_t step = 0; step < STEPS + behind; step++) {
        if (step < STEPS) {
            SL_TRY(issue(rig, step));
            SL_TRY(fetch(rig, step));
        }
        if (step >= behind) {
            SL_TRY(take(rig, step - behind));
        }
    }
    SL_TRY(sl_model_mark(rig->model, 0));
    return sl_model_wait_mark(rig->model, 0);
}

static void *run_rank(void *arg)
{
    rig_t *rig = arg;
    rig->status = rig_open(rig);
    if (rig->status == SL_OK) {
        rig->status = decode(rig);
    }
    SL_ASSERT(rig->status == SL_OK); /* the others would wait for it */
    rig_close(rig);
    return NULL;
}

/* All ranks of the group, this thread being rank 0. With DP attention each has own requests, hence
 * own places in `results`. */
static void run_group(const manner_t *manner, results_t *results)
{
    rig_t rigs[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    const sl_ops_t *ops = NULL;
    deferred_params_t device = manner->device;
    device.meeting = manner->tp > 1 ? deferred_meeting_create(manner->tp) : NULL;
    if (manner->plain && manner->tp == 1) {
        assert_int_equal(sl_ops_find("ref", &ops), SL_OK);
    } else {
        ops = deferred_ops(&device);
    }
    for (uint32_t r = manner->tp; r-- > 0;) {
        rigs[r] = (rig_t){.manner = manner, .rank = r, .ops = ops, .results = results};
        if (r > 0) {
            assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &rigs[r]), 0);
        }
    }
    run_rank(&rigs[0]);
    for (uint32_t r = 1; r < manner->tp; r++) {
        assert_int_equal(pthread_join(threads[r], NULL), 0);
    }
    if (device.meeting != NULL) {
        deferred_meeting_destroy(device.meeting);
    }
}

/* ---- decode ---- */

static void assert_same_logprobs(const sl_logprobs_t *a, const sl_logprobs_t *b, uint32_t r,
                                 uint32_t output)
{
    size_t count = a->top_count;
    if (a->logprob != b->logprob || a->top_count != b->top_count ||
        memcmp(a->top_ids, b->top_ids, count * sizeof(a->top_ids[0])) != 0 ||
        memcmp(a->top_logprobs, b->top_logprobs, count * sizeof(a->top_logprobs[0])) != 0) {
        fail_msg("request %u: other logprobs of output %u", r, output);
    }
}

static void assert_same(const results_t *found, const results_t *expected)
{
    bool seen[4096] = {false};
    uint32_t kinds = 0;
    for (uint32_t r = 0; r < REQUESTS; r++) {
        for (uint32_t i = 0; i < requests[r].outputs; i++) {
            int32_t token = expected->tokens[r][i];
            kinds += !seen[token];
            seen[token] = true;
            if (found->has_token[r][i] && found->tokens[r][i] != token) {
                fail_msg("request %u: output %u is %d, expected %d", r, i, found->tokens[r][i],
                         token);
            }
            if (found->has_logprobs[r][i]) {
                assert_same_logprobs(&found->logprobs[r][i], &expected->logprobs[r][i], r, i);
            }
        }
    }
    assert_true(kinds > 20); /* or a wrong token could be the right one by chance */
}

static uint32_t count_tokens(const results_t *results)
{
    uint32_t count = 0;
    for (uint32_t r = 0; r < REQUESTS; r++) {
        for (uint32_t i = 0; i < requests[r].outputs; i++) {
            count += results->has_token[r][i];
        }
    }
    return count;
}

static void test_decode(void **state)
{
    const manner_t *manner = *state;
    manner_t plain = {
        .checkpoint = manner->checkpoint,
        .tp = manner->tp,
        .attention = manner->attention,
        .device = {.progress = DEFERRED_EAGER}, /* where `ref` has no ranks in one process */
        .plain = true,
        .fetch_every = 1,
    };
    results_t *expected = calloc(1, sizeof(*expected)), *found = calloc(1, sizeof(*found));
    assert_true(expected != NULL && found != NULL);
    run_group(&plain, expected);
    uint64_t launches = deferred_launches();
    manner_t own = *manner;
    own.known = manner->fetch_every > 1 ? expected : NULL;
    run_group(&own, found);
    assert_same(found, expected);
    assert_true(count_tokens(found) >= count_tokens(expected) / manner->fetch_every / 2);
    if (manner->fetch_every == 1) {
        assert_int_equal(count_tokens(found), count_tokens(expected));
    }
    launches = deferred_launches() - launches;
    assert_true(manner->device.records ? launches > 20 : launches == 0);
    free(expected);
    free(found);
}

/* ---- prefill ---- */

#define PROMPTS 2u
#define PIECES 3u
static const uint32_t prompt_rows[PIECES][PROMPTS] = {{40, 21}, {33, 50}, {29, 9}};

static sl_status_t prefill_piece(rig_t *rig, uint32_t piece, uint32_t *first)
{
    int32_t tokens[PREFILL_ROWS];
    uint32_t total = 0;
    static const uint32_t pages[PROMPTS][2] = {{7, 2}, {11, 5}};
    sl_step_clear(rig->step);
    for (uint32_t p = 0; p < PROMPTS; p++) {
        uint32_t rows = prompt_rows[piece][p];
        for (uint32_t i = 0; i < rows; i++) {
            tokens[i] = (int32_t)((p + 3) * (first[p] + i) * 29 % 251);
        }
        sl_step_add(rig->step, tokens, rows, first[p], pages[p], 2);
        first[p] += rows;
        total += rows;
    }
    SL_TRY(sl_model_begin(rig->model, sl_step_batch(rig->step, &total, 0)));
    SL_TRY(sl_model_embed(rig->model));
    for (uint32_t layer = 0; layer < layers_of(rig); layer++) {
        SL_TRY(sl_model_attention_begin(rig->model, layer));
        SL_TRY(sl_model_attend_unabsorbed(rig->model, layer));
        SL_TRY(sl_model_attention_end(rig->model, layer));
        SL_TRY(sl_model_mlp(rig->model, layer));
    }
    return SL_OK;
}

typedef struct {
    float logits[PROMPTS * 1024];
    int32_t tokens[PROMPTS];
    sl_logprobs_t logprobs[PROMPTS], of_targets[PROMPTS];
    uint32_t experts_hit;
} prefilled_t;

/* All pieces are issued before anybody waits. */
static sl_status_t prefill(rig_t *rig, prefilled_t *out)
{
    uint32_t first[PROMPTS] = {0}, vocab = sl_checkpoint_config(rig->checkpoint)->vocab_size;
    const sl_sample_row_t rules[PROMPTS] = {
        {.temperature = 1, .top_p = 1, .seed = 4, .logprobs = 3}, {.logprobs = 5}};
    const int32_t targets[PROMPTS] = {17, 99};
    int32_t rows[PROMPTS];
    float *logits;
    SL_ASSERT(PROMPTS * vocab <= sizeof(out->logits) / sizeof(out->logits[0]));
    for (uint32_t piece = 0; piece < PIECES; piece++) {
        SL_TRY(prefill_piece(rig, piece, first));
    }
    for (uint32_t p = 0; p < PROMPTS; p++) {
        rows[p] = sl_step_last_row(rig->step, p);
    }
    SL_TRY(sl_model_logits(rig->model, rows, PROMPTS, &logits));
    memset(rows, 0x7F, sizeof(rows)); /* the call's array is ours again */
    SL_TRY(sl_model_sample(rig->model, logits, rules, PROMPTS, out->tokens, out->logprobs));
    memcpy(out->logits, logits, PROMPTS * vocab * sizeof(*logits));
    sl_logprobs_t of_targets[PROMPTS];
    SL_TRY(sl_model_token_logprobs(rig->model, logits, targets, PROMPTS, 4, of_targets));
    memcpy(out->of_targets, of_targets, sizeof(of_targets)); /* before anybody else waits */
    return sl_model_experts_hit(rig->model, &out->experts_hit);
}

static void run_prefill(const manner_t *manner, const sl_ops_t *ops, prefilled_t *out)
{
    rig_t rig = {.manner = manner, .ops = ops};
    assert_int_equal(rig_open(&rig), SL_OK);
    assert_int_equal(prefill(&rig, out), SL_OK);
    rig_close(&rig);
}

static void test_prefill(void **state)
{
    const manner_t *manner = *state;
    const sl_ops_t *ref;
    prefilled_t *expected = calloc(1, sizeof(*expected)), *found = calloc(1, sizeof(*found));
    assert_true(expected != NULL && found != NULL);
    assert_int_equal(sl_ops_find("ref", &ref), SL_OK);
    run_prefill(manner, ref, expected);
    run_prefill(manner, deferred_ops(&manner->device), found);
    assert_memory_equal(found->logits, expected->logits, sizeof(found->logits));
    assert_int_equal(found->experts_hit, expected->experts_hit);
    for (uint32_t p = 0; p < PROMPTS; p++) {
        assert_int_equal(found->tokens[p], expected->tokens[p]);
        assert_same_logprobs(&found->logprobs[p], &expected->logprobs[p], p, 0);
        assert_same_logprobs(&found->of_targets[p], &expected->of_targets[p], p, 1);
    }
    free(expected);
    free(found);
}

#define TEST(test, name, ...)                                                                      \
    {                                                                                              \
        name, test, NULL, NULL, &(manner_t)                                                        \
        {                                                                                          \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }

int main(void)
{
    const deferred_params_t lazy = {.progress = DEFERRED_LAZY, .records = true};
    const deferred_params_t eager = {.progress = DEFERRED_EAGER, .records = true};
    const deferred_params_t random = {.progress = DEFERRED_RANDOM, .seed = 12, .records = true};
    const deferred_params_t unrecorded = {.progress = DEFERRED_LAZY};
    const sl_attention_t dp = SL_ATTENTION_DP, tp = SL_ATTENTION_TP;
    const struct CMUnitTest tests[] = {
        TEST(test_decode, "decode lite", "lite", 1, dp, lazy, false, 1, NULL),
        TEST(test_decode, "decode v3", "v3", 1, dp, lazy, false, 1, NULL),
        TEST(test_decode, "decode v2, random progress", "v2", 1, dp, random, false, 1, NULL),
        TEST(test_decode, "decode odd, at once", "odd", 1, dp, eager, false, 1, NULL),
        TEST(test_decode, "decode lite, unrecorded", "lite", 1, dp, unrecorded, false, 1, NULL),
        TEST(test_decode, "steps that nobody fetches", "v3", 1, dp, lazy, false, 7, NULL),
        TEST(test_decode, "decode lite, 2 ranks of tp attention", "lite", 2, tp, lazy, false, 1,
             NULL),
        TEST(test_decode, "decode v3, 2 ranks of dp attention", "v3", 2, dp, lazy, false, 1, NULL),
        TEST(test_decode, "decode v2, 2 ranks at random", "v2", 2, tp, random, false, 1, NULL),
        TEST(test_prefill, "prefill lite", "lite", 1, dp, lazy, false, 1, NULL),
        TEST(test_prefill, "prefill v3, random progress", "v3", 1, dp, random, false, 1, NULL),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
