/*
 * States of the latent pages of one rank, and who owns them. Pure bookkeeping: the bytes lie
 * elsewhere, page p at base + p * page_bytes. One owning thread (the engine); never blocks; memory
 * is taken once, at creation.
 *
 *        take             grant            commit           admit
 *   FREE ----> RESERVED ----> FILLING ----> READY ----> IN_USE
 *     ^            |             |             |           |
 *     |<-----------+             v             |           |
 *     |<------------------- QUIESCING          |           |
 *     |<---------------------------------------+-----------+
 *
 * FILLING means a peer may be writing: such a page only leaves for READY (the peer committed) or
 * QUIESCING (given up while the writer may still write), and QUIESCING only for FREE. A prefill
 * rank, which writes its own pages, goes FREE -> RESERVED -> IN_USE -> FREE. Every move is
 * asserted, so a lost or doubled page stops the process at the place of the mistake.
 */
#ifndef SL_KV_PAGES_H
#define SL_KV_PAGES_H

#include <stdint.h>

#include "common/base/status.h"

typedef enum {
    SL_PAGE_FREE,
    SL_PAGE_RESERVED,
    SL_PAGE_FILLING,
    SL_PAGE_READY,
    SL_PAGE_IN_USE,
    SL_PAGE_QUIESCING,
    SL_PAGE_STATE_COUNT
} sl_page_state_t;

typedef struct sl_pages sl_pages_t;

SL_MUST_USE sl_status_t sl_pages_create(uint32_t count, sl_pages_t **pages_p);
void sl_pages_destroy(sl_pages_t *pages);

/* FREE -> RESERVED for `count` pages owned by `owner` (an attempt id, not 0), side by side if there
 * is room, else in few pieces. All or nothing: SL_ERR_NO_PAGES takes none (not logged: waiting is
 * normal). */
SL_MUST_USE sl_status_t sl_pages_take(sl_pages_t *pages, uint64_t owner, uint32_t count,
                                      uint32_t *ids);

/* Moves pages of `owner` from one state to another; asserts the move is drawn above, and that each
 * page is in `from` and owned by `owner`. Moving to FREE gives the page up. */
void sl_pages_move(sl_pages_t *pages, uint64_t owner, const uint32_t *ids, uint32_t count,
                   sl_page_state_t from, sl_page_state_t to);

uint32_t sl_pages_total(const sl_pages_t *pages);
uint32_t sl_pages_count(const sl_pages_t *pages, sl_page_state_t state);
sl_page_state_t sl_pages_state(const sl_pages_t *pages, uint32_t id);

/* Pages for `tokens` tokens of `page_tokens` a page. */
uint32_t sl_pages_for(uint64_t tokens, uint32_t page_tokens);

#endif
