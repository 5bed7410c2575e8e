/*
 * The decode pool's own scheduling (decode.c, requests.c, forward.c) on a device that works later
 * than the host asks (deferred_ops.h), with one step issued ahead: every attempt's tokens and
 * logprobs are those of a run of `ref`, one step at a time; and no step writes to pages that have
 * been given back, though others get them at once. In place of rank.c, the transfer and the router
 * stands this file: prompts' latents are put into the pages by the host, as a prefill rank would.
 */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "decode_node/buckets.h"
#include "decode_node/decode.h"
#include "node/rules.h"
#include "tests/unit/layers/deferred_ops.h"

#define PAGES 7u /* fewer than all want at once */
#define MAX_BATCH 8u
#define PROMPT_MAX 100u
#define OUTPUTS_MAX 40u
#define NEVER UINT32_MAX

typedef struct {
    uint32_t start; /* round in which it is reserved first */
    uint32_t prompt_len, max_tokens;
    float temperature;
    int32_t logprobs;
    uint32_t stop_at;   /* the token of this output ends it, which the host cannot foresee */
    uint32_t cancel_at; /* round */
} script_t;

static const script_t script[] = {
    {0, 5, 40, 0.0f, -1, NEVER, NEVER}, {0, 20, 30, 1.0f, -1, 6, NEVER},
    {0, 61, 20, 1.0f, 3, 8, NEVER},     {1, 30, 30, 1.0f, -1, 3, NEVER},
    {2, 10, 30, 0.9f, -1, NEVER, 9},    {3, 3, 2, 0.0f, -1, NEVER, NEVER},
    {4, 40, 20, 1.0f, 0, NEVER, NEVER}, {5, 60, 4, 1.0f, -1, NEVER, NEVER},
    {5, 58, 6, 1.0f, -1, 2, NEVER},     {6, 59, 5, 0.7f, 5, NEVER, NEVER},
    {7, 90, 38, 1.0f, -1, 20, NEVER},   {8, 12, 25, 1.0f, -1, NEVER, 25},
    {9, 55, 9, 1.0f, 1, NEVER, NEVER},  {12, 57, 7, 1.0f, -1, NEVER, NEVER}};
#define ATTEMPTS (sizeof(script) / sizeof(script[0]))

typedef struct {
    sl_sampling_t sampling;
    char *latents; /* of the prompt, page by page */
    int32_t first_token;
} prompt_t;

typedef enum { WAITING, GRANTED, RUNNING, RELEASED } state_t;

typedef struct {
    state_t state;
    uint32_t pages[4], page_count, generation;
    uint32_t count; /* outputs, the prompt's one included */
    int32_t tokens[OUTPUTS_MAX];
    sl_logprobs_t logprobs[OUTPUTS_MAX];
    sl_finish_t finish;
} outcome_t;

typedef struct {
    deferred_params_t device;
    bool plain; /* `ref`, one step at a time, and nothing below */
} manner_t;

/* The rank as decode.c sees it. */
struct sl_rank {
    const prompt_t *prompts;
    outcome_t *outcomes;
    sl_checkpoint_t *checkpoint;
    sl_model_t *model;
    sl_decode_t *decode;
    sl_step_t *step;
    uint32_t ahead, unfinished;
    uint32_t buckets[SL_BUCKETS_MAX], bucket_count;
};

static const char *checkpoint_dir(char *dir, size_t size)
{
    const char *source = getenv("SLUICE_SOURCE_DIR");
    snprintf(dir, size, "%s/tests/golden/v2", source != NULL ? source : ".");
    return dir;
}

static uint32_t pages_for(uint32_t tokens)
{
    return sl_pages_for(tokens, SL_PAGE_TOKENS);
}

/* ---- what decode.c calls ---- */

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
    return (sl_transfer_t *)rank; /* see sl_transfer_grant() below */
}

/* Compares the prompt's latents with what was put there, or writes over whole pages. */
static bool for_prompt(const sl_rank_t *rank, uint32_t attempt, bool overwrite)
{
    const outcome_t *outcome = &rank->outcomes[attempt];
    uint32_t layers = sl_rank_config(rank)->num_hidden_layers, left = script[attempt].prompt_len;
    const char *latents = rank->prompts[attempt].latents;
    size_t page_bytes;
    void *base;
    bool same = true;
    sl_model_pages(rank->model, &base, &page_bytes);
    size_t layer_bytes = page_bytes / layers, token_bytes = layer_bytes / SL_PAGE_TOKENS;
    for (uint32_t i = 0; i < outcome->page_count; i++, latents += page_bytes) {
        char *page = (char *)base + outcome->pages[i] * page_bytes;
        size_t tokens = left < SL_PAGE_TOKENS ? left : SL_PAGE_TOKENS;
        left -= (uint32_t)tokens;
        for (uint32_t layer = 0; layer < layers; layer++) {
            size_t at = layer * layer_bytes;
            same = same && memcmp(page + at, latents + at, tokens * token_bytes) == 0;
        }
        if (overwrite) {
            memset(page, 0x7F, page_bytes);
        }
    }
    return same;
}

sl_status_t sl_rank_post_attempt(sl_rank_t *rank, sl_message_type_t type, uint64_t attempt)
{
    outcome_t *outcome = &rank->outcomes[attempt - 1];
    if (type == SL_MSG_RELEASED) {
        assert_int_equal(outcome->state, RUNNING);
        if (!for_prompt(rank, (uint32_t)attempt - 1, true)) {
            fail_msg("attempt %u: somebody wrote to its pages", (unsigned)attempt);
        }
        outcome->state = RELEASED;
    } else {
        assert_int_equal(type, SL_MSG_NO_PAGES);
        assert_int_equal(outcome->state, WAITING);
    }
    return SL_OK;
}

sl_status_t sl_rank_post_failed(sl_rank_t *rank, uint64_t attempt, sl_status_t code,
                                const char *text)
{
    (void)rank;
    fail_msg("attempt %u failed: %s, %s", (unsigned)attempt, sl_status_name(code), text);
    return SL_OK;
}

sl_status_t sl_rank_post_token(sl_rank_t *rank, uint64_t attempt, uint32_t index, int32_t token,
                               const sl_logprobs_t *logprobs, sl_finish_t finish)
{
    outcome_t *outcome = &rank->outcomes[attempt - 1];
    assert_int_equal(outcome->state, RUNNING);
    assert_int_equal(outcome->finish, SL_FINISH_NONE);
    assert_int_equal(index, outcome->count);
    assert_int_equal(logprobs != NULL, script[attempt - 1].logprobs >= 0);
    outcome->tokens[outcome->count] = token;
    if (logprobs != NULL) {
        outcome->logprobs[outcome->count] = *logprobs;
    }
    outcome->count++;
    outcome->finish = finish;
    return SL_OK;
}

sl_status_t sl_transfer_grant(sl_transfer_t *transfer, uint64_t attempt, uint32_t generation,
                              const sl_rank_id_t *writer, const uint32_t *pages,
                              uint32_t page_count)
{
    (void)writer;
    outcome_t *outcome = &((sl_rank_t *)transfer)->outcomes[attempt - 1];
    assert_int_equal(page_count, pages_for(script[attempt - 1].prompt_len));
    memcpy(outcome->pages, pages, page_count * sizeof(*pages));
    outcome->page_count = page_count;
    outcome->generation = generation;
    outcome->state = GRANTED;
    return SL_OK;
}

/* ---- prompts ---- */

static void sampling_of(const script_t *item, uint32_t attempt, sl_sampling_t *sampling)
{
    *sampling = (sl_sampling_t){
        .temperature = item->temperature,
        .top_p = 1,
        .seed = 1000 + attempt,
        .max_tokens = item->max_tokens,
        .ignore_eos = true,
        .logprobs = item->logprobs,
        .prompt_logprobs = -1,
    };
}

/* Runs one prompt and keeps what a prefill rank sends on: latents and the first token. */
static void prefill(sl_model_t *model, const sl_model_config_t *config, sl_step_t *step,
                    uint32_t attempt, prompt_t *prompt)
{
    static const uint32_t pages[] = {0, 1};
    uint32_t rows = script[attempt].prompt_len;
    int32_t tokens[PROMPT_MAX], last = (int32_t)rows - 1;
    sl_sample_row_t rule;
    float *logits;
    void *base;
    size_t page_bytes;
    for (uint32_t i = 0; i < rows; i++) {
        tokens[i] = (int32_t)((attempt * 31 + i * (7 + attempt)) % 251);
    }
    sl_step_clear(step);
    sl_step_add(step, tokens, rows, 0, pages, 2);
    assert_int_equal(sl_model_begin(model, sl_step_batch(step, &rows, 0)), SL_OK);
    assert_int_equal(sl_model_embed(model), SL_OK);
    for (uint32_t layer = 0; layer < config->num_hidden_layers; layer++) {
        assert_int_equal(sl_model_attention_begin(model, layer), SL_OK);
        assert_int_equal(sl_model_attend_unabsorbed(model, layer), SL_OK);
        assert_int_equal(sl_model_attention_end(model, layer), SL_OK);
        assert_int_equal(sl_model_mlp(model, layer), SL_OK);
    }
    sampling_of(&script[attempt], attempt, &prompt->sampling);
    sl_rule_make(config, &prompt->sampling, 0, &rule);
    assert_int_equal(sl_model_logits(model, &last, 1, &logits), SL_OK);
    assert_int_equal(sl_model_sample(model, logits, &rule, 1, &prompt->first_token, NULL), SL_OK);
    sl_model_pages(model, &base, &page_bytes);
    prompt->latents = malloc(pages_for(rows) * page_bytes);
    assert_non_null(prompt->latents);
    memcpy(prompt->latents, base, pages_for(rows) * page_bytes);
}

static void make_prompts(prompt_t *prompts)
{
    char dir[512];
    sl_checkpoint_t *checkpoint;
    sl_model_t *model;
    sl_step_t *step;
    sl_model_params_t params = {
        .threads = 1,
        .tp = 1,
        .unabsorbed = true,
        .max_rows = PROMPT_MAX,
        .max_requests = 1,
        .max_logit_rows = 1,
        .page_count = 2,
    };
    assert_int_equal(sl_checkpoint_open(checkpoint_dir(dir, sizeof(dir)), &checkpoint), SL_OK);
    params.checkpoint = checkpoint;
    assert_int_equal(sl_ops_find("ref", &params.ops), SL_OK);
    assert_int_equal(sl_model_create(&params, &model), SL_OK);
    assert_int_equal(sl_step_create(PROMPT_MAX, 1, 2, 1, 2, &step), SL_OK);
    for (uint32_t i = 0; i < ATTEMPTS; i++) {
        prefill(model, sl_checkpoint_config(checkpoint), step, i, &prompts[i]);
    }
    sl_step_destroy(step);
    sl_model_destroy(model);
    sl_checkpoint_close(checkpoint);
}

/* ---- the engine's part ---- */

static void reserve(sl_rank_t *rank, uint32_t attempt)
{
    sl_message_t message = {
        .type = SL_MSG_RESERVE,
        .reserve = {.attempt = attempt + 1,
                    .prompt_len = script[attempt].prompt_len,
                    .sampling = rank->prompts[attempt].sampling},
    };
    assert_int_equal(sl_decode_rank_ops.on_message(rank->decode, &message), SL_OK);
}

/* The latents arrive, whatever the device is at. */
static void commit(sl_rank_t *rank, uint32_t attempt)
{
    const prompt_t *prompt = &rank->prompts[attempt];
    outcome_t *outcome = &rank->outcomes[attempt];
    void *base;
    size_t page_bytes;
    sl_model_pages(rank->model, &base, &page_bytes);
    for (uint32_t i = 0; i < outcome->page_count; i++) {
        memcpy((char *)base + outcome->pages[i] * page_bytes, prompt->latents + i * page_bytes,
               page_bytes);
    }
    sl_transfer_event_t event = {
        .type = SL_TRANSFER_COMMITTED,
        .attempt = attempt + 1,
        .generation = outcome->generation,
        .commit = {.page_count = outcome->page_count,
                   .prompt_len = script[attempt].prompt_len,
                   .first_token = prompt->first_token},
    };
    outcome->state = RUNNING;
    outcome->tokens[0] = prompt->first_token;
    outcome->count = 1;
    assert_int_equal(sl_decode_rank_ops.on_event(rank->decode, &event), SL_OK);
}

static void cancel(sl_rank_t *rank, uint32_t attempt)
{
    sl_message_t message = {.type = SL_MSG_CANCEL_ATTEMPT, .attempt = {.attempt = attempt + 1}};
    assert_int_equal(rank->outcomes[attempt].state, RUNNING); /* or the script is too late */
    assert_int_equal(sl_decode_rank_ops.on_message(rank->decode, &message), SL_OK);
}

static void take_messages(sl_rank_t *rank, uint32_t round, bool cancels)
{
    for (uint32_t i = 0; i < ATTEMPTS; i++) {
        if (rank->outcomes[i].state == WAITING && script[i].start <= round) {
            reserve(rank, i);
            if (rank->outcomes[i].state == GRANTED) {
                commit(rank, i);
            }
        }
        if (cancels && script[i].cancel_at == round) {
            cancel(rank, i);
        }
    }
}

static void finish_steps(sl_rank_t *rank, uint32_t keep)
{
    for (; rank->unfinished > keep; rank->unfinished--) {
        assert_int_equal(sl_decode_rank_ops.finish(rank->decode, rank->step), SL_OK);
    }
}

static void forward(sl_rank_t *rank, uint32_t rows, uint32_t padded)
{
    const sl_batch_t *batch = sl_step_batch(rank->step, &rows, padded);
    assert_int_equal(sl_decode_rank_ops.forward(rank->decode, rank->model, batch), SL_OK);
}

static void make_step(sl_rank_t *rank)
{
    sl_step_clear(rank->step);
    sl_decode_rank_ops.plan(rank->decode, rank->step);
    uint32_t rows = sl_step_rows(rank->step), i = 0;
    assert_true(rows > 0);
    while (rank->bucket_count > 0 && rank->buckets[i] < rows) {
        i++;
    }
    forward(rank, rows, rank->bucket_count > 0 ? rank->buckets[i] : 0);
    rank->unfinished++;
    finish_steps(rank, rank->ahead);
}

/* As the engine does before the first request. */
static void record_steps(sl_rank_t *rank)
{
    sl_step_clear(rank->step);
    for (uint32_t i = rank->bucket_count; i-- > 0;) {
        for (int run = 0; run < SL_MODEL_RUNS_TO_RECORD; run++) {
            forward(rank, 0, rank->buckets[i]);
        }
    }
}

static void run_rounds(sl_rank_t *rank, bool cancels)
{
    bool any = true;
    record_steps(rank);
    for (uint32_t round = 0; any; round++) {
        take_messages(rank, round, cancels);
        if (sl_decode_rank_ops.has_work(rank->decode)) {
            make_step(rank);
        } else {
            finish_steps(rank, 0);
        }
        any = false;
        for (uint32_t i = 0; i < ATTEMPTS; i++) {
            any = any || rank->outcomes[i].state != RELEASED;
        }
        assert_true(round < 1000);
    }
    finish_steps(rank, 0);
}

static void run(const manner_t *manner, const prompt_t *prompts, bool cancels, outcome_t *outcomes)
{
    char dir[512];
    sl_rank_t rank = {.prompts = prompts, .outcomes = outcomes, .ahead = !manner->plain};
    sl_decode_options_t options = {.rank = {.attention = SL_ATTENTION_DP}, .max_batch = MAX_BATCH};
    sl_msg_heartbeat_t figures = {0};
    sl_model_params_t params = {
        .threads = 1,
        .tp = 1,
        .absorbed = true,
        .max_rows = MAX_BATCH,
        .max_requests = MAX_BATCH,
        .max_logit_rows = MAX_BATCH,
        .page_count = PAGES,
    };
    memset(outcomes, 0, ATTEMPTS * sizeof(*outcomes));
    assert_int_equal(sl_checkpoint_open(checkpoint_dir(dir, sizeof(dir)), &rank.checkpoint), SL_OK);
    params.checkpoint = rank.checkpoint;
    assert_int_equal(sl_ops_find("ref", &params.ops), SL_OK);
    if (!manner->plain) {
        params.ops = deferred_ops(&manner->device);
        rank.bucket_count = manner->device.records ? sl_decode_buckets(MAX_BATCH, rank.buckets) : 0;
    }
    assert_int_equal(sl_model_create(&params, &rank.model), SL_OK);
    assert_int_equal(sl_step_create(MAX_BATCH, MAX_BATCH, sl_model_sequence_pages(rank.model), 1,
                                    PAGES, &rank.step),
                     SL_OK);
    assert_int_equal(sl_decode_create(&options, &rank.decode), SL_OK);
    assert_int_equal(sl_decode_attach(rank.decode, &rank), SL_OK);
    run_rounds(&rank, cancels);
    sl_decode_rank_ops.figures(rank.decode, &figures);
    assert_int_equal(figures.pages_free, PAGES);
    assert_int_equal(figures.running, 0);
    sl_decode_destroy(rank.decode);
    sl_step_destroy(rank.step);
    sl_model_destroy(rank.model);
    sl_checkpoint_close(rank.checkpoint);
}

/* ---- the test ---- */

/* Makes the token of output stop_at, as found without it, one that stops. */
static void set_stops(prompt_t *prompts, const outcome_t *outcomes)
{
    for (uint32_t i = 0; i < ATTEMPTS; i++) {
        if (script[i].stop_at != NEVER) {
            prompts[i].sampling.stop_count = 1;
            prompts[i].sampling.stop_token_ids[0] = outcomes[i].tokens[script[i].stop_at];
        }
    }
}

static void assert_same(const outcome_t *found, const outcome_t *expected, uint32_t attempt)
{
    bool canceled = script[attempt].cancel_at != NEVER;
    if (canceled) {
        assert_in_range(found->count, 2, expected->count - 1);
    } else {
        assert_int_equal(found->count, expected->count);
        assert_int_equal(found->finish, expected->finish);
    }
    for (uint32_t i = 0; i < found->count; i++) {
        const sl_logprobs_t *a = &found->logprobs[i], *b = &expected->logprobs[i];
        if (found->tokens[i] != expected->tokens[i]) {
            fail_msg("attempt %u: output %u is %d, expected %d", attempt + 1, i, found->tokens[i],
                     expected->tokens[i]);
        }
        assert_true(a->logprob == b->logprob && a->top_count == b->top_count);
        assert_memory_equal(a->top_ids, b->top_ids, b->top_count * sizeof(a->top_ids[0]));
        assert_memory_equal(a->top_logprobs, b->top_logprobs,
                            b->top_count * sizeof(a->top_logprobs[0]));
    }
}

static void test_schedule(void **state)
{
    const manner_t *manner = *state, plain = {.plain = true};
    prompt_t *prompts = calloc(ATTEMPTS, sizeof(*prompts));
    outcome_t *expected = calloc(ATTEMPTS, sizeof(*expected));
    outcome_t *found = calloc(ATTEMPTS, sizeof(*found));
    assert_true(prompts != NULL && expected != NULL && found != NULL);
    make_prompts(prompts);
    run(&plain, prompts, false, expected);
    set_stops(prompts, expected);
    run(&plain, prompts, false, expected);
    uint64_t launches = deferred_launches();
    run(manner, prompts, true, found);
    launches = deferred_launches() - launches;
    assert_true(manner->device.records ? launches > 40 : launches == 0);
    for (uint32_t i = 0; i < ATTEMPTS; i++) {
        assert_same(&found[i], &expected[i], i);
        free(prompts[i].latents);
    }
    free(prompts);
    free(expected);
    free(found);
}

#define TEST(name, progress, seed, records)                                                        \
    {                                                                                              \
        name, test_schedule, NULL, NULL, &(manner_t)                                               \
        {                                                                                          \
            {progress, seed, records, NULL}, false                                                 \
        }                                                                                          \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST("lazy device", DEFERRED_LAZY, 0, true),
        TEST("random progress", DEFERRED_RANDOM, 3, true),
        TEST("random progress, other seed", DEFERRED_RANDOM, 4, true),
        TEST("lazy device, unrecorded", DEFERRED_LAZY, 0, false),
        TEST("device that keeps up", DEFERRED_EAGER, 0, true),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
