/*
 * All requests of all clients, and their attempts on the ranks.
 *
 *   request:   WAITING -- placed --> PLACED -- finish, failed, canceled --> (freed)
 *                 ^                    |
 *                 +---- no_pages ------+        back to its old position, under a new attempt
 *
 *   attempt:   one side on a decode rank (pages reserved) and one on a prefill rank (prompt tokens
 *              queued). It outlives its request: a side is accounted until that rank has said
 *              `released` or is lost, and the attempt is freed when both sides are.
 *
 * Clients see the events of a request numbered from 0 without gap; the last is tokens with a finish
 * reason, or failed. Output positions already sent are never sent again, even when a second
 * attempt computes them again.
 *
 * Single thread (the router's loop); never blocks. A send that fails never changes the tables under
 * the caller's hands: clients found gone are dropped by sl_requests_settle(), ranks by
 * sl_registry_settle().
 */
#ifndef SL_ROUTER_REQUESTS_H
#define SL_ROUTER_REQUESTS_H

#include "router/registry.h"

typedef struct sl_requests sl_requests_t;

typedef struct {
    sl_registry_t *registry;
    sl_sink_t sink;
    uint64_t max_clients;        /* connections with requests */
    uint64_t max_waiting;        /* requests not yet placed */
    uint64_t max_waiting_tokens; /* their prompt tokens */
    uint64_t starve_ms;          /* waiting longer than this gets a rank held for it */
    uint64_t place_timeout_ms;   /* waiting while a pool has no ready group */
    uint64_t queue_timeout_ms;   /* waiting at all */
    uint64_t silence_ms;         /* placed, and nothing heard from its ranks */
    uint64_t hash_seed;          /* random */
    uint64_t first_attempt;      /* greater than any id of an earlier router */
} sl_requests_params_t;

typedef struct {
    uint64_t waiting, waiting_tokens, placed;     /* now */
    uint64_t attempts;                            /* now; those of ended requests included */
    uint64_t clients;                             /* now */
    uint64_t finished, failed, canceled, refused; /* ever */
} sl_requests_counts_t;

SL_MUST_USE sl_status_t sl_requests_create(const sl_requests_params_t *params,
                                           sl_requests_t **requests_p);

/* Frees everything, sends nothing. NULL is ignored. */
void sl_requests_destroy(sl_requests_t *requests);

/* ---- from clients ---- */

/* Takes the message's arrays when the request is accepted; the caller destroys it in any case. */
void sl_requests_generate(sl_requests_t *requests, const sl_peer_key_t *client,
                          sl_message_t *message, uint64_t now_us);
void sl_requests_cancel(sl_requests_t *requests, const sl_peer_key_t *client,
                        const char *request_id);

/* The client's connection is gone: cancels all it has asked for at the next settle. */
void sl_requests_client_gone(sl_requests_t *requests, const sl_peer_key_t *client);

/* Tells a client that a frame of its was not accepted. The error never carries the id of a request
 * that is under way, whose stream it would seem to end. */
void sl_requests_reject(sl_requests_t *requests, const sl_peer_key_t *client,
                        const char *request_id, sl_status_t status, const char *text);

/* ---- from ranks ---- */

void sl_requests_tokens(sl_requests_t *requests, sl_rank_t *rank, sl_message_t *message,
                        uint64_t now_us); /* may take its arrays, to hold it back */
void sl_requests_prompt_logprobs(sl_requests_t *requests, sl_rank_t *rank,
                                 const sl_msg_prompt_logprobs_t *piece, uint64_t now_us);
void sl_requests_failed(sl_requests_t *requests, sl_rank_t *rank, const sl_msg_failed_t *failed);
void sl_requests_no_pages(sl_requests_t *requests, sl_rank_t *rank, uint64_t attempt_id,
                          uint64_t now_us);
void sl_requests_released(sl_requests_t *requests, sl_rank_t *rank, uint64_t attempt_id);

/* Hook of the registry (sl_registry_params_t.rank_lost). */
void sl_requests_rank_lost(sl_requests_t *requests, sl_rank_t *rank, bool gone, const char *reason);

/* ---- from the loop ---- */

/* Places what can be placed, in order of arrival but never head-of-line. Cheap when nothing has
 * changed since the last call. */
void sl_requests_schedule(sl_requests_t *requests, uint64_t now_us);

/* Drops clients found gone. */
void sl_requests_settle(sl_requests_t *requests);

/* Deadlines; call some times a second. */
void sl_requests_tick(sl_requests_t *requests, uint64_t now_us);

/* Fails everything with `text` and cancels it on the ranks: the router is stopping. */
void sl_requests_stop(sl_requests_t *requests, const char *text);

sl_requests_counts_t sl_requests_counts(const sl_requests_t *requests);

#endif
