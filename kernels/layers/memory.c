/* What the device's memory went to, as a table in the log. */
#include <stdio.h>
#include <string.h>

#include "common/base/log.h"
#include "kernels/layers/model_internal.h"

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
    void *base;
    size_t page_bytes;
    uint32_t pages = model->cache.page_count;
    SL_TRY(model->ops->memory(model->device, &free_now, &total));
    sl_model_pages(model, &base, &page_bytes);
    snprintf(note, sizeof(note), ": %u pages of %zu bytes, %llu tokens", pages, page_bytes,
             (unsigned long long)pages * SL_PAGE_TOKENS);
    log_row("weights", model->weights->bytes, "");
    log_items(model, note);
    log_row("all of these", model->weights->bytes + model->work_bytes, "");
    log_row("free at start", model->free_at_start, "");
    log_row("free now", free_now, "");
    return SL_OK;
}
