/*
 * Plan: int32 words [rows, requests, pages], then per request [first position, rows, pages], then
 * the tokens, then the page ids. It is kept in this form all along: adding a request appends to the
 * three parts, and the batch arrays are derived once, when the step runs.
 */
#include "node/step.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t first_position, rows, pages;
} entry_t;

struct sl_step {
    uint32_t max_rows, max_requests, sequence_pages, ranks, page_count;
    size_t max_pages; /* of all requests together */
    uint32_t rows, requests, pages;
    entry_t *entries;  /* [max_requests] */
    int32_t *tokens;   /* [max_rows] */
    int32_t *page_ids; /* [max_pages] */
    int32_t *plan;     /* the three parts behind one another */

    int32_t *positions;              /* [max_rows] */
    int64_t *slots;                  /* [max_rows] */
    int32_t *row_begin, *page_begin; /* [max_requests + 1] */
    uint32_t *rank_rows, *rank_valid;
    sl_batch_t batch;
};

#define PLAN_HEAD_WORDS 3
#define ENTRY_WORDS (sizeof(entry_t) / sizeof(int32_t))

static size_t plan_words(size_t rows, size_t requests, size_t pages)
{
    return PLAN_HEAD_WORDS + requests * ENTRY_WORDS + rows + pages;
}

sl_status_t sl_step_create(uint32_t max_rows, uint32_t max_requests, uint32_t sequence_pages,
                           uint32_t ranks, uint32_t page_count, sl_step_t **step_p)
{
    size_t max_pages = (size_t)max_requests * sequence_pages;
    max_pages = max_pages < page_count ? max_pages : page_count;
    if (plan_words(max_rows, max_requests, max_pages) > UINT32_MAX / sizeof(int32_t)) {
        return sl_error(SL_ERR_CONFIG,
                        "step of %u requests with up to %u pages each: expected fewer requests",
                        max_requests, sequence_pages);
    }
    sl_step_t *step = calloc(1, sizeof(*step));
    if (step == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "step: out of memory");
    }
    step->max_rows = max_rows;
    step->max_requests = max_requests;
    step->max_pages = max_pages;
    step->page_count = page_count;
    step->sequence_pages = sequence_pages;
    step->ranks = ranks;
    step->entries = calloc(max_requests, sizeof(*step->entries));
    step->tokens = calloc(max_rows, sizeof(*step->tokens));
    step->page_ids = calloc(step->max_pages, sizeof(*step->page_ids));
    step->plan = calloc(plan_words(max_rows, max_requests, step->max_pages), sizeof(*step->plan));
    step->positions = calloc(max_rows, sizeof(*step->positions));
    step->slots = calloc(max_rows, sizeof(*step->slots));
    step->row_begin = calloc(max_requests + 1, sizeof(*step->row_begin));
    step->page_begin = calloc(max_requests + 1, sizeof(*step->page_begin));
    step->rank_rows = calloc(ranks, sizeof(*step->rank_rows));
    step->rank_valid = calloc(ranks, sizeof(*step->rank_valid));
    if (step->entries == NULL || step->tokens == NULL || step->page_ids == NULL ||
        step->plan == NULL || step->positions == NULL || step->slots == NULL ||
        step->row_begin == NULL || step->page_begin == NULL || step->rank_rows == NULL ||
        step->rank_valid == NULL) {
        sl_step_destroy(step);
        return sl_error(SL_ERR_NO_MEMORY, "step of %u rows and %u requests: out of memory",
                        max_rows, max_requests);
    }
    *step_p = step;
    return SL_OK;
}

void sl_step_destroy(sl_step_t *step)
{
    if (step == NULL) {
        return;
    }
    free(step->entries);
    free(step->tokens);
    free(step->page_ids);
    free(step->plan);
    free(step->positions);
    free(step->slots);
    free(step->row_begin);
    free(step->page_begin);
    free(step->rank_rows);
    free(step->rank_valid);
    free(step);
}

void sl_step_limit_pages(sl_step_t *step, uint32_t page_count)
{
    SL_ASSERT(page_count <= step->page_count);
    step->page_count = page_count;
}

void sl_step_clear(sl_step_t *step)
{
    step->rows = step->requests = step->pages = 0;
}

uint32_t sl_step_rows(const sl_step_t *step)
{
    return step->rows;
}

uint32_t sl_step_requests(const sl_step_t *step)
{
    return step->requests;
}

uint32_t sl_step_rows_left(const sl_step_t *step)
{
    return step->max_rows - step->rows;
}

bool sl_step_full(const sl_step_t *step)
{
    return step->rows == step->max_rows || step->requests == step->max_requests;
}

void sl_step_add(sl_step_t *step, const int32_t *tokens, uint32_t rows, uint32_t first_position,
                 const uint32_t *pages, uint32_t page_count)
{
    SL_ASSERT(!sl_step_full(step) && rows > 0 && rows <= sl_step_rows_left(step));
    uint32_t needed = (first_position + rows + SL_PAGE_TOKENS - 1) / SL_PAGE_TOKENS;
    SL_ASSERT(needed <= page_count && needed <= step->sequence_pages);
    SL_ASSERT(step->pages + needed <= step->max_pages);
    step->entries[step->requests++] =
        (entry_t){(int32_t)first_position, (int32_t)rows, (int32_t)needed};
    memcpy(step->tokens + step->rows, tokens, rows * sizeof(*tokens));
    for (uint32_t i = 0; i < needed; i++) {
        step->page_ids[step->pages + i] = (int32_t)pages[i];
    }
    step->rows += rows;
    step->pages += needed;
}

static void derive_request(sl_step_t *step, uint32_t request, uint32_t row, uint32_t page)
{
    const entry_t *entry = &step->entries[request];
    const int32_t *pages = step->page_ids + page;
    step->row_begin[request] = (int32_t)row;
    step->page_begin[request] = (int32_t)page;
    for (int32_t i = 0; i < entry->rows; i++) {
        int32_t position = entry->first_position + i;
        step->positions[row + (uint32_t)i] = position;
        step->slots[row + (uint32_t)i] =
            (int64_t)pages[position / SL_PAGE_TOKENS] * SL_PAGE_TOKENS + position % SL_PAGE_TOKENS;
    }
}

/* Rows that belong to no request: any token, cached nowhere. */
static void derive_padding(sl_step_t *step, uint32_t padded_rows)
{
    SL_ASSERT(step->rows <= padded_rows && padded_rows <= step->max_rows);
    for (uint32_t row = step->rows; row < padded_rows; row++) {
        step->tokens[row] = 0;
        step->positions[row] = 0;
        step->slots[row] = -1;
    }
}

const sl_batch_t *sl_step_batch(sl_step_t *step, const uint32_t *rank_rows, uint32_t padded_rows)
{
    uint32_t row = 0, page = 0;
    for (uint32_t r = 0; r < step->requests; r++) {
        derive_request(step, r, row, page);
        row += (uint32_t)step->entries[r].rows;
        page += (uint32_t)step->entries[r].pages;
    }
    step->row_begin[step->requests] = (int32_t)row;
    step->page_begin[step->requests] = (int32_t)page;
    memcpy(step->rank_rows, rank_rows, step->ranks * sizeof(*rank_rows));
    if (padded_rows > 0) {
        derive_padding(step, padded_rows);
        memcpy(step->rank_valid, rank_rows, step->ranks * sizeof(*rank_rows));
        for (uint32_t r = 0; r < step->ranks; r++) {
            SL_ASSERT(rank_rows[r] <= padded_rows);
            step->rank_rows[r] = padded_rows;
        }
    }
    step->batch = (sl_batch_t){
        .rows = padded_rows > 0 ? padded_rows : step->rows,
        .rank_valid = padded_rows > 0 ? step->rank_valid : NULL,
        .tokens = step->tokens,
        .positions = step->positions,
        .slots = step->slots,
        .requests = step->requests,
        .row_begin = step->row_begin,
        .pages = step->page_ids,
        .page_begin = step->page_begin,
        .rank_rows = step->rank_rows,
    };
    return &step->batch;
}

int32_t sl_step_first_row(const sl_step_t *step, uint32_t request)
{
    SL_ASSERT(request < step->requests);
    return step->row_begin[request];
}

int32_t sl_step_last_row(const sl_step_t *step, uint32_t request)
{
    SL_ASSERT(request < step->requests);
    return step->row_begin[request + 1] - 1;
}

void sl_step_plan(sl_step_t *step, const void **plan_p, uint32_t *bytes_p)
{
    int32_t *to = step->plan;
    *to++ = (int32_t)step->rows;
    *to++ = (int32_t)step->requests;
    *to++ = (int32_t)step->pages;
    memcpy(to, step->entries, step->requests * sizeof(entry_t));
    to += step->requests * ENTRY_WORDS;
    memcpy(to, step->tokens, step->rows * sizeof(*to));
    to += step->rows;
    memcpy(to, step->page_ids, step->pages * sizeof(*to));
    *plan_p = step->plan;
    *bytes_p = (uint32_t)(plan_words(step->rows, step->requests, step->pages) * sizeof(int32_t));
}

uint32_t sl_step_plan_max(const sl_step_t *step)
{
    return (uint32_t)(plan_words(step->max_rows, step->max_requests, step->max_pages) *
                      sizeof(int32_t));
}

/* Whether the entries add up to the rows and pages announced, each with the pages it needs, and
 * tokens and pages are such as there may be. */
static bool entries_fit(const sl_step_t *step)
{
    uint64_t rows = 0, pages = 0;
    for (uint32_t r = 0; r < step->requests; r++) {
        const entry_t *entry = &step->entries[r];
        if (entry->rows < 1 || entry->first_position < 0 || entry->pages < 1 ||
            (uint32_t)entry->pages > step->sequence_pages ||
            (int64_t)entry->pages * SL_PAGE_TOKENS < (int64_t)entry->first_position + entry->rows) {
            return false;
        }
        rows += (uint32_t)entry->rows;
        pages += (uint32_t)entry->pages;
    }
    for (uint32_t i = 0; i < step->rows; i++) {
        if (step->tokens[i] < -(int32_t)step->max_rows) {
            return false; /* the choice of a row that no step has */
        }
    }
    for (uint32_t i = 0; i < step->pages; i++) {
        if (step->page_ids[i] < 0 || (uint32_t)step->page_ids[i] >= step->page_count) {
            return false;
        }
    }
    return rows == step->rows && pages == step->pages;
}

sl_status_t sl_step_set_plan(sl_step_t *step, const void *plan, uint32_t bytes)
{
    const int32_t *from = plan;
    uint32_t words = bytes / sizeof(int32_t);
    sl_step_clear(step);
    if (words < PLAN_HEAD_WORDS || from[0] < 0 || (uint32_t)from[0] > step->max_rows ||
        from[1] < 0 || (uint32_t)from[1] > step->max_requests || from[2] < 0 ||
        (uint32_t)from[2] > step->max_pages ||
        plan_words((uint32_t)from[0], (uint32_t)from[1], (uint32_t)from[2]) != words) {
        return sl_error(SL_ERR_DESYNC, "step plan of %u bytes does not fit its own counts", bytes);
    }
    step->rows = (uint32_t)from[0];
    step->requests = (uint32_t)from[1];
    step->pages = (uint32_t)from[2];
    from += PLAN_HEAD_WORDS;
    memcpy(step->entries, from, step->requests * sizeof(entry_t));
    from += step->requests * ENTRY_WORDS;
    memcpy(step->tokens, from, step->rows * sizeof(*from));
    memcpy(step->page_ids, from + step->rows, step->pages * sizeof(*from));
    if (!entries_fit(step)) {
        sl_step_clear(step);
        return sl_error(SL_ERR_DESYNC, "step plan of %u bytes: its requests do not add up", bytes);
    }
    return SL_OK;
}
