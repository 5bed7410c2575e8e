/*
 * Whether the model fits its device, said before anything is taken, and what the memory went to, as
 * a table in the log. Counting runs the very code that takes memory, without taking any.
 */
#include <stdio.h>
#include <string.h>

#include "common/base/log.h"
#include "kernels/layers/model_internal.h"

static double gib(uint64_t bytes)
{
    return (double)bytes / 0x1p30;
}

static uint64_t usable(const sl_model_t *model)
{
    double share = model->ops->host_memory ? 1 : SL_FREE_SHARE;
    return (uint64_t)(share * (double)model->free_at_start);
}

static sl_status_t refuse(const sl_model_t *model)
{
    char remedy[160];
    size_t page_bytes = sl_model_page_bytes(model);
    uint64_t free_bytes = usable(model), weights = model->weights->bytes;
    uint64_t pages = (uint64_t)model->cache.page_count * page_bytes;
    uint64_t workspace = model->work_bytes - pages;
    if (weights + workspace + page_bytes <= free_bytes) {
        snprintf(remedy, sizeof(remedy), "--pages of at most %llu would fit",
                 (unsigned long long)((free_bytes - weights - workspace) / page_bytes));
    } else {
        snprintf(remedy, sizeof(remedy),
                 "a smaller --token-budget or --max-batch makes the "
                 "workspace smaller, a larger --tp the weights");
    }
    return sl_error(SL_ERR_NO_MEMORY,
                    "memory: weights %.2f GiB, workspace %.2f and %u latent pages %.2f make %.2f, "
                    "but of %.2f free %.2f can be used: %s",
                    gib(weights), gib(workspace), model->cache.page_count, gib(pages),
                    gib(weights + model->work_bytes), gib(model->free_at_start), gib(free_bytes),
                    remedy);
}

sl_status_t sl_model_check_memory(sl_model_t *model, const sl_weights_params_t *weights)
{
    sl_weights_params_t counted = *weights;
    counted.count_only = true;
    SL_TRY(sl_weights_load(&counted, &model->weights));
    model->counting = true;
    sl_status_t status = sl_model_take_workspace(model);
    if (status == SL_OK && model->weights->bytes + model->work_bytes > usable(model)) {
        status = refuse(model);
    }
    model->counting = false;
    model->work_bytes = 0;
    sl_weights_free(model->ops, model->device, model->weights);
    model->weights = NULL;
    return status;
}

static void log_row(const char *what, uint64_t bytes, const char *note)
{
    sl_log_info("memory: %-20s %12.1f MiB%s", what, (double)bytes / 0x1p20, note);
}

/* Items of one kind lie side by side. */
static void log_items(const sl_model_t *model, const char *pages_note)
{
    for (uint32_t i = 0; i < model->item_count;) {
        const sl_item_t *first = &model->items[i];
        uint64_t bytes = 0;
        for (; i < model->item_count && strcmp(model->items[i].what, first->what) == 0; i++) {
            bytes += model->items[i].bytes;
        }
        log_row(first->what, bytes, first->memory == model->cache.base ? pages_note : "");
    }
}

sl_status_t sl_model_log_memory(const sl_model_t *model)
{
    uint64_t free_now = 0, total = 0;
    char note[96];
    uint32_t pages = model->cache.page_count;
    SL_TRY(model->ops->memory(model->device, &free_now, &total));
    snprintf(note, sizeof(note), ": %u pages of %zu bytes, %llu tokens", pages,
             sl_model_page_bytes(model), (unsigned long long)pages * SL_PAGE_TOKENS);
    log_row("weights", model->weights->bytes, "");
    log_items(model, note);
    log_row("all of these", model->weights->bytes + model->work_bytes, "");
    log_row("free at start", model->free_at_start, "");
    log_row("free now", free_now, "");
    return SL_OK;
}
