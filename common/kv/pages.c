/* One array of states, one of owners, and the free ones by runs. */
#include "common/kv/pages.h"

#include <stdlib.h>

#include "common/kv/runs.h"

struct sl_pages {
    uint32_t total;
    uint32_t counts[SL_PAGE_STATE_COUNT];
    uint8_t *states;
    uint64_t *owners; /* 0 for a free page */
    sl_runs_t *free;
};

/* moves[from] has bit `to` set where the diagram of the header has an arrow. */
#define TO(state) (1u << (state))
static const unsigned moves[SL_PAGE_STATE_COUNT] = {
    [SL_PAGE_FREE] = 0, /* only sl_pages_take() leaves it */
    [SL_PAGE_RESERVED] = TO(SL_PAGE_FILLING) | TO(SL_PAGE_IN_USE) | TO(SL_PAGE_FREE),
    [SL_PAGE_FILLING] = TO(SL_PAGE_READY) | TO(SL_PAGE_QUIESCING),
    [SL_PAGE_READY] = TO(SL_PAGE_IN_USE) | TO(SL_PAGE_FREE),
    [SL_PAGE_IN_USE] = TO(SL_PAGE_FREE),
    [SL_PAGE_QUIESCING] = TO(SL_PAGE_FREE),
};

sl_status_t sl_pages_create(uint32_t count, sl_pages_t **pages_p)
{
    sl_pages_t *pages = calloc(1, sizeof(*pages));
    if (pages == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "no memory for the states of %u pages", count);
    }
    pages->total = count;
    pages->states = calloc((size_t)count + 1, sizeof(pages->states[0]));
    pages->owners = calloc((size_t)count + 1, sizeof(pages->owners[0]));
    sl_status_t status = SL_OK;
    if (pages->states == NULL || pages->owners == NULL) {
        status = sl_error(SL_ERR_NO_MEMORY, "no memory for the states of %u pages", count);
    }
    if (status == SL_OK) {
        status = sl_runs_create(count, &pages->free);
    }
    if (status != SL_OK) {
        sl_pages_destroy(pages);
        return status;
    }
    pages->counts[SL_PAGE_FREE] = count;
    *pages_p = pages;
    return SL_OK;
}

void sl_pages_destroy(sl_pages_t *pages)
{
    if (pages == NULL) {
        return;
    }
    free(pages->states);
    free(pages->owners);
    sl_runs_destroy(pages->free);
    free(pages);
}

sl_status_t sl_pages_take(sl_pages_t *pages, uint64_t owner, uint32_t count, uint32_t *ids)
{
    SL_ASSERT(owner != 0);
    if (count > pages->counts[SL_PAGE_FREE]) {
        return SL_ERR_NO_PAGES;
    }
    for (uint32_t done = 0; done < count;) {
        uint32_t first, taken = sl_runs_take(pages->free, count - done, &first);
        for (uint32_t id = first; id < first + taken; id++) {
            SL_ASSERT(pages->states[id] == SL_PAGE_FREE && pages->owners[id] == 0);
            pages->states[id] = SL_PAGE_RESERVED;
            pages->owners[id] = owner;
            ids[done++] = id;
        }
    }
    pages->counts[SL_PAGE_FREE] -= count;
    pages->counts[SL_PAGE_RESERVED] += count;
    return SL_OK;
}

void sl_pages_move(sl_pages_t *pages, uint64_t owner, const uint32_t *ids, uint32_t count,
                   sl_page_state_t from, sl_page_state_t to)
{
    SL_ASSERT(from < SL_PAGE_STATE_COUNT && to < SL_PAGE_STATE_COUNT);
    SL_ASSERT((moves[from] & TO(to)) != 0);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t id = ids[i];
        SL_ASSERT(id < pages->total);
        SL_ASSERT(pages->owners[id] == owner);
        SL_ASSERT(pages->states[id] == from);
        pages->states[id] = (uint8_t)to;
        pages->counts[from]--;
        if (to == SL_PAGE_FREE) {
            pages->owners[id] = 0;
            sl_runs_give(pages->free, id);
        }
        pages->counts[to]++;
    }
}

uint32_t sl_pages_total(const sl_pages_t *pages)
{
    return pages->total;
}

uint32_t sl_pages_count(const sl_pages_t *pages, sl_page_state_t state)
{
    SL_ASSERT(state < SL_PAGE_STATE_COUNT);
    return pages->counts[state];
}

sl_page_state_t sl_pages_state(const sl_pages_t *pages, uint32_t id)
{
    SL_ASSERT(id < pages->total);
    return (sl_page_state_t)pages->states[id];
}

uint32_t sl_pages_for(uint64_t tokens, uint32_t page_tokens)
{
    SL_ASSERT(page_tokens > 0);
    uint64_t pages = tokens / page_tokens + (tokens % page_tokens != 0);
    return pages > UINT32_MAX ? UINT32_MAX : (uint32_t)pages; /* more than any pool holds */
}
