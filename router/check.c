/* First what the message alone tells, then what depends on the cluster. */
#include "router/check.h"

#include <inttypes.h>
#include <math.h>

uint64_t sl_check_pages(uint64_t prompt_tokens, uint64_t max_tokens, uint64_t page_tokens)
{
    return (prompt_tokens + max_tokens + page_tokens - 1) / page_tokens;
}

static sl_status_t check_probabilities(const sl_sampling_t *sampling)
{
    if (!isfinite(sampling->temperature) || sampling->temperature < 0) {
        return sl_error(SL_ERR_INVALID, "temperature is %g, expected a finite number >= 0",
                        (double)sampling->temperature);
    }
    if (!(sampling->top_p > 0 && sampling->top_p <= 1)) {
        return sl_error(SL_ERR_INVALID, "top_p is %g, expected a number in (0, 1]",
                        (double)sampling->top_p);
    }
    if (!(sampling->min_p >= 0 && sampling->min_p <= 1)) {
        return sl_error(SL_ERR_INVALID, "min_p is %g, expected a number in [0, 1]",
                        (double)sampling->min_p);
    }
    return SL_OK;
}

static sl_status_t check_counts(const sl_sampling_t *sampling)
{
    if (sampling->max_tokens == 0) {
        return sl_error(SL_ERR_INVALID, "max_tokens is 0, expected at least 1");
    }
    if (sampling->min_tokens > sampling->max_tokens) {
        return sl_error(SL_ERR_INVALID,
                        "min_tokens is %u, expected at most max_tokens, which is %u",
                        sampling->min_tokens, sampling->max_tokens);
    }
    if (sampling->logprobs < -1 || sampling->logprobs > SL_TOP_LOGPROBS_MAX) {
        return sl_error(SL_ERR_INVALID, "logprobs is %d, expected 0 to %d, or -1 for none",
                        sampling->logprobs, SL_TOP_LOGPROBS_MAX);
    }
    if (sampling->prompt_logprobs < -1 || sampling->prompt_logprobs > SL_TOP_LOGPROBS_MAX) {
        return sl_error(SL_ERR_INVALID, "prompt_logprobs is %d, expected 0 to %d, or -1 for none",
                        sampling->prompt_logprobs, SL_TOP_LOGPROBS_MAX);
    }
    if (sampling->stop_count > SL_STOP_TOKENS_MAX) {
        return sl_error(SL_ERR_LIMIT, "stop_token_ids holds %u ids, expected at most %d",
                        sampling->stop_count, SL_STOP_TOKENS_MAX);
    }
    return SL_OK;
}

static sl_status_t check_vocabulary(const char *what, const int32_t *tokens, size_t count,
                                    uint64_t vocab_size)
{
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || (vocab_size != 0 && (uint64_t)tokens[i] >= vocab_size)) {
            return sl_error(SL_ERR_INVALID,
                            "%s[%zu] is %d, outside the vocabulary (%" PRIu64 " ids, from 0)", what,
                            i, tokens[i], vocab_size);
        }
    }
    return SL_OK;
}

static sl_status_t check_room(const sl_msg_generate_t *generate, const sl_check_limits_t *limits)
{
    uint64_t prompt = generate->token_count, output = generate->sampling.max_tokens;
    if (limits->max_model_len != 0 && prompt + output > limits->max_model_len) {
        return sl_error(SL_ERR_LIMIT,
                        "a prompt of %" PRIu64 " tokens and max_tokens %" PRIu64 " make %" PRIu64
                        ", expected at most max_model_len, which is %" PRIu64,
                        prompt, output, prompt + output, limits->max_model_len);
    }
    if (limits->page_tokens == 0) {
        return SL_OK;
    }
    uint64_t pages = sl_check_pages(prompt, output, limits->page_tokens);
    if (limits->decode_pages != 0 && pages > limits->decode_pages) {
        return sl_error(SL_ERR_LIMIT,
                        "a prompt of %" PRIu64 " tokens and max_tokens %" PRIu64 " need %" PRIu64
                        " pages, expected at most the %" PRIu64 " of the largest decode rank",
                        prompt, output, pages, limits->decode_pages);
    }
    uint64_t prompt_pages = sl_check_pages(prompt, 0, limits->page_tokens);
    if (limits->prefill_pages != 0 && prompt_pages > limits->prefill_pages) {
        return sl_error(SL_ERR_LIMIT,
                        "a prompt of %" PRIu64 " tokens needs %" PRIu64
                        " pages, expected at most the %" PRIu64 " of the largest prefill rank",
                        prompt, prompt_pages, limits->prefill_pages);
    }
    if (limits->prefill_queue_tokens != 0 && prompt > limits->prefill_queue_tokens) {
        return sl_error(SL_ERR_LIMIT,
                        "a prompt of %" PRIu64 " tokens, expected at most %" PRIu64
                        ", which is all a prefill rank accepts at once",
                        prompt, limits->prefill_queue_tokens);
    }
    return SL_OK;
}

sl_status_t sl_check_generate(const sl_msg_generate_t *generate, const sl_check_limits_t *limits)
{
    const sl_sampling_t *sampling = &generate->sampling;
    if (generate->id[0] == 0) {
        return sl_error(SL_ERR_INVALID, "id is empty, expected 1 to %d characters",
                        SL_REQUEST_ID_BYTES - 1);
    }
    if (generate->token_count == 0) {
        return sl_error(SL_ERR_INVALID, "the prompt is empty, expected at least 1 token");
    }
    SL_TRY(check_probabilities(sampling));
    SL_TRY(check_counts(sampling));
    SL_TRY(check_vocabulary("tokens", generate->tokens, generate->token_count, limits->vocab_size));
    SL_TRY(check_vocabulary("stop_token_ids", sampling->stop_token_ids, sampling->stop_count,
                            limits->vocab_size));
    return check_room(generate, limits);
}
