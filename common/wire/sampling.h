/*
 * How the next token of one request is chosen and when the request ends. Plain data, shared by the
 * wire, the router's checks and the sampling operation.
 */
#ifndef SL_WIRE_SAMPLING_H
#define SL_WIRE_SAMPLING_H

#include <stdbool.h>
#include <stdint.h>

#define SL_STOP_TOKENS_MAX 64  /* stop_token_ids of one request */
#define SL_TOP_LOGPROBS_MAX 20 /* alternatives a token */

typedef struct {
    float temperature;   /* 0: greedy; finite, >= 0 */
    uint32_t top_k;      /* 0: off */
    float top_p;         /* (0, 1]; 1: off */
    float min_p;         /* [0, 1]; 0: off */
    uint64_t seed;       /* randomness is a function of (seed, position) alone */
    uint32_t max_tokens; /* >= 1: output tokens at most */
    uint32_t min_tokens; /* stop and EOS tokens are masked before this many outputs */
    uint32_t stop_count;
    int32_t stop_token_ids[SL_STOP_TOKENS_MAX];
    bool ignore_eos;         /* the model's EOS tokens do not end the request */
    int32_t logprobs;        /* -1: none; k >= 0: the chosen token's and the k best tokens' */
    int32_t prompt_logprobs; /* the same for each prompt token; -1: none */
} sl_sampling_t;

/* Natural log of the model's own softmax (before temperature and filters). */
typedef struct {
    float logprob; /* of the token itself; NaN for the first prompt token, which has no prefix */
    uint32_t top_count;
    int32_t top_ids[SL_TOP_LOGPROBS_MAX];
    float top_logprobs[SL_TOP_LOGPROBS_MAX]; /* descending */
} sl_logprobs_t;

#endif
