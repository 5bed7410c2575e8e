/*
 * The layers of one rank against goldens made by transformers: prefill in one or several pieces and
 * in both attention forms, then absorbed decode token by token, on both host backends. No network.
 */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/layers/model.h"
#include "node/step.h"

#define LOGIT_TOLERANCE 1e-4
#define STEPS 24
#define PAGES 40

typedef struct {
    const char *checkpoint;
    const char *backend;
    bool absorbed_prefill;
    uint32_t piece; /* prompt tokens a step */
} variant_t;

typedef struct {
    sl_checkpoint_t *checkpoint;
    sl_model_t *model;
    sl_step_t *step;
    uint32_t layers;
    uint32_t pages[PAGES];
    const variant_t *variant;
} rig_t;

static json_t *golden_of(const char *checkpoint, char *dir, size_t dir_size)
{
    const char *source = getenv("SLUICE_SOURCE_DIR");
    char path[600];
    json_error_t error;
    snprintf(dir, dir_size, "%s/tests/golden/%s", source != NULL ? source : ".", checkpoint);
    snprintf(path, sizeof(path), "%s/golden.json", dir);
    json_t *golden = json_load_file(path, 0, &error);
    if (golden == NULL) {
        fail_msg("%s: %s", path, error.text);
    }
    return golden;
}

static void rig_open(rig_t *rig, const variant_t *variant, const char *dir)
{
    const sl_ops_t *ops;
    rig->variant = variant;
    assert_int_equal(sl_checkpoint_open(dir, &rig->checkpoint), SL_OK);
    assert_int_equal(sl_ops_find(variant->backend, &ops), SL_OK);
    sl_model_params_t params = {
        .checkpoint = rig->checkpoint,
        .ops = ops,
        .threads = 1,
        .tp = 1,
        .attention = SL_ATTENTION_DP,
        .absorbed = true,
        .unabsorbed = true,
        .max_rows = 1024,
        .max_requests = 4,
        .max_logit_rows = 4,
        .page_count = PAGES,
    };
    assert_int_equal(sl_model_create(&params, &rig->model), SL_OK);
    assert_int_equal(sl_step_create(params.max_rows, params.max_requests,
                                    sl_model_sequence_pages(rig->model), 1, PAGES, &rig->step),
                     SL_OK);
    rig->layers = sl_checkpoint_config(rig->checkpoint)->num_hidden_layers;
    for (uint32_t i = 0; i < PAGES; i++) {
        rig->pages[i] = (i * 17 + 5) % PAGES; /* in no particular order */
    }
}

static void rig_close(rig_t *rig)
{
    sl_step_destroy(rig->step);
    sl_model_destroy(rig->model);
    sl_checkpoint_close(rig->checkpoint);
}

/* Runs `rows` tokens of the one sequence and returns the logits after the last of them. */
static const float *forward(rig_t *rig, const int32_t *tokens, uint32_t rows, uint32_t position,
                            bool absorbed)
{
    float *logits;
    sl_step_clear(rig->step);
    sl_step_add(rig->step, tokens, rows, position, rig->pages, PAGES);
    /* Single tokens are padded, as where steps are recorded: rows that belong to nobody. */
    const sl_batch_t *batch = sl_step_batch(rig->step, &rows, rows == 1 ? 4 : 0);
    assert_int_equal(sl_model_begin(rig->model, batch), SL_OK);
    assert_int_equal(sl_model_embed(rig->model), SL_OK);
    for (uint32_t layer = 0; layer < rig->layers; layer++) {
        assert_int_equal(sl_model_attention_begin(rig->model, layer), SL_OK);
        assert_int_equal(absorbed ? sl_model_attend_absorbed(rig->model, layer)
                                  : sl_model_attend_unabsorbed(rig->model, layer),
                         SL_OK);
        assert_int_equal(sl_model_attention_end(rig->model, layer), SL_OK);
        assert_int_equal(sl_model_mlp(rig->model, layer), SL_OK);
    }
    int32_t last = sl_step_last_row(rig->step, 0);
    assert_int_equal(sl_model_logits(rig->model, &last, 1, &logits), SL_OK);
    return logits;
}

static void assert_close(const float *logits, const json_t *wanted, const json_t *ids,
                         const char *what, const rig_t *rig)
{
    size_t index;
    json_t *value;
    json_array_foreach(wanted, index, value)
    {
        size_t id = ids == NULL ? index : (size_t)json_integer_value(json_array_get(ids, index));
        double error = fabs((double)logits[id] - json_real_value(value));
        if (!(error <= LOGIT_TOLERANCE)) {
            fail_msg("%s %s: logit of id %zu is %.7g, expected %.7g", rig->variant->checkpoint,
                     what, id, (double)logits[id], json_real_value(value));
        }
    }
}

static int32_t token_at(const json_t *tokens, size_t i)
{
    return (int32_t)json_integer_value(json_array_get(tokens, i));
}

static void check_case(rig_t *rig, const json_t *item)
{
    const json_t *prompt = json_object_get(item, "prompt"),
                 *tokens = json_object_get(item, "tokens");
    const json_t *top_ids = json_object_get(item, "top_ids");
    const json_t *top_logits = json_object_get(item, "top_logits");
    uint32_t count = (uint32_t)json_array_size(prompt);
    int32_t ids[1024];
    const float *logits = NULL;
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = token_at(prompt, i);
    }
    for (uint32_t done = 0; done < count; done += rig->variant->piece) {
        uint32_t left = count - done;
        uint32_t rows = left < rig->variant->piece ? left : rig->variant->piece;
        logits = forward(rig, ids + done, rows, done, rig->variant->absorbed_prefill);
    }
    assert_close(logits, json_object_get(item, "logits_first"), NULL, "after the prompt", rig);
    for (uint32_t i = 0; i < STEPS; i++) {
        int32_t token;
        sl_sample_row_t greedy = {.position = i, .logprobs = -1};
        assert_close(logits, json_array_get(top_logits, i), json_array_get(top_ids, i), "in decode",
                     rig);
        assert_int_equal(sl_model_sample(rig->model, logits, &greedy, 1, &token, NULL), SL_OK);
        assert_int_equal(token, token_at(tokens, i));
        if (i + 1 < STEPS) {
            logits = forward(rig, &token, 1, count + i, true);
        }
    }
    assert_close(logits, json_object_get(item, "logits_last"), NULL, "at the end", rig);
}

static void test_golden(void **state)
{
    const variant_t *variant = *state;
    char dir[512];
    rig_t rig;
    size_t index;
    json_t *item, *golden = golden_of(variant->checkpoint, dir, sizeof(dir));
    rig_open(&rig, variant, dir);
    json_array_foreach(json_object_get(golden, "cases"), index, item)
    {
        check_case(&rig, item);
    }
    assert_true(index > 0);
    rig_close(&rig);
    json_decref(golden);
}

#define VARIANT(checkpoint, backend, absorbed, piece)                                              \
    {                                                                                              \
        "golden " checkpoint " " backend " " #absorbed " " #piece, test_golden, NULL, NULL,        \
            &(variant_t)                                                                           \
        {                                                                                          \
            checkpoint, backend, absorbed, piece                                                   \
        }                                                                                          \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        VARIANT("lite", "cpu", false, 1024), VARIANT("v2", "cpu", false, 1024),
        VARIANT("v3", "cpu", false, 1024),   VARIANT("odd", "cpu", false, 1024),
        VARIANT("lite", "cpu", false, 64),   VARIANT("v2", "cpu", false, 64),
        VARIANT("v3", "cpu", false, 64),     VARIANT("lite", "cpu", true, 1024),
        VARIANT("v2", "cpu", true, 128),     VARIANT("v3", "cpu", true, 64),
        VARIANT("lite", "ref", false, 128),  VARIANT("v3", "ref", true, 1024),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
