/* Checks of a `generate` message against what the cluster can do. Pure; the texts name the field,
 * what was found and what was expected. */
#ifndef SL_ROUTER_CHECK_H
#define SL_ROUTER_CHECK_H

#include "common/wire/messages.h"

typedef struct {
    uint64_t vocab_size, max_model_len, page_tokens; /* 0: not known yet, not checked */
    uint64_t decode_pages;         /* of the largest decode rank; 0: none there, not checked */
    uint64_t prefill_pages;        /* of the largest prefill rank; 0: likewise */
    uint64_t prefill_queue_tokens; /* of the longest prefill queue; 0: no limit, or none there */
} sl_check_limits_t;

/* SL_ERR_INVALID or SL_ERR_LIMIT, with the text in sl_error_text(). */
SL_MUST_USE sl_status_t sl_check_generate(const sl_msg_generate_t *generate,
                                          const sl_check_limits_t *limits);

/* Pages for prompt and output together. */
uint64_t sl_check_pages(uint64_t prompt_tokens, uint64_t max_tokens, uint64_t page_tokens);

#endif
