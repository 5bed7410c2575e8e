/*
 * Decode steps of one sequence in one process: no router, no transfer, no group. The floor under
 * what a stream through the cluster can do on the same machine. Prints one line for scripts:
 *     decode_us_per_token 2500.1
 *
 * Usage: bench_decode CHECKPOINT [PROMPT_TOKENS [STEPS]]
 */
#include <stdio.h>
#include <stdlib.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "decode_node/forward.h"
#include "node/step.h"

#define PAGES 64

typedef struct {
    sl_model_t *model;
    sl_step_t *step;
    uint32_t layers;
    uint32_t pages[PAGES];
} rig_t;

static sl_status_t one_step(rig_t *rig, int32_t token, uint32_t position, int32_t *next_p)
{
    const uint32_t rows = 1;
    const sl_sample_row_t greedy = {.logprobs = -1};
    sl_step_clear(rig->step);
    sl_step_add(rig->step, &token, rows, position, rig->pages, PAGES);
    sl_batch_t batch = *sl_step_batch(rig->step, &rows, 0);
    batch.rules = &greedy;
    SL_TRY(sl_decode_forward(rig->model, rig->layers, &batch));
    SL_TRY(sl_model_fetch(rig->model, 1, false));
    return sl_model_fetched(rig->model, 1, next_p, NULL);
}

static sl_status_t measure(rig_t *rig, uint32_t prompt, uint32_t steps)
{
    int32_t token = 5;
    for (uint32_t i = 0; i < prompt; i++) {
        SL_TRY(one_step(rig, token, i, &token));
    }
    uint64_t started_us = sl_now_us();
    for (uint32_t i = 0; i < steps; i++) {
        SL_TRY(one_step(rig, token, prompt + i, &token));
    }
    printf("decode_us_per_token %.1f\n", (double)(sl_now_us() - started_us) / steps);
    return SL_OK;
}

int main(int argc, char **argv)
{
    uint32_t prompt = argc > 2 ? (uint32_t)atoi(argv[2]) : 64;
    uint32_t steps = argc > 3 ? (uint32_t)atoi(argv[3]) : 400;
    if (argc < 2 || steps == 0 || prompt + steps > PAGES * SL_PAGE_TOKENS) {
        fprintf(stderr,
                "usage: bench_decode CHECKPOINT [PROMPT_TOKENS [STEPS]], %d tokens at most\n",
                PAGES * SL_PAGE_TOKENS);
        return EXIT_FAILURE;
    }
    sl_log_set_level(SL_LOG_WARN);
    sl_model_params_t params = {
        .threads = 1,
        .tp = 1,
        .absorbed = true,
        .max_rows = 1,
        .max_requests = 1,
        .max_logit_rows = 1,
        .page_count = PAGES,
    };
    rig_t rig = {0};
    sl_checkpoint_t *checkpoint;
    if (sl_ops_find("cpu", &params.ops) != SL_OK ||
        sl_checkpoint_open(argv[1], &checkpoint) != SL_OK) {
        return EXIT_FAILURE;
    }
    params.checkpoint = checkpoint;
    rig.layers = sl_checkpoint_config(checkpoint)->num_hidden_layers;
    for (uint32_t i = 0; i < PAGES; i++) {
        rig.pages[i] = i;
    }
    sl_status_t status = sl_model_create(&params, &rig.model);
    if (status == SL_OK) {
        status = sl_step_create(1, 1, sl_model_sequence_pages(rig.model), 1, PAGES, &rig.step);
    }
    if (status == SL_OK) {
        status = measure(&rig, prompt, steps);
    }
    sl_step_destroy(rig.step);
    sl_model_destroy(rig.model);
    sl_checkpoint_close(checkpoint);
    return status == SL_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
