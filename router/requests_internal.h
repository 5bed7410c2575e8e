/*
 * The request table's data, shared by requests.c (clients' side), attempts.c (ranks' side) and
 * schedule.c (the waiting queue). Not for others.
 *
 * Who points to whom: a client lists its requests; a request points to its current attempt, and
 * back; an attempt's two sides hang in the lists of their ranks. Clients, requests and attempts are
 * each found through a map.
 */
#ifndef SL_ROUTER_REQUESTS_INTERNAL_H
#define SL_ROUTER_REQUESTS_INTERNAL_H

#include <sys/queue.h>

#include "router/requests.h"

typedef struct sl_attempt sl_attempt_t;
typedef struct sl_request sl_request_t;

typedef struct {
    sl_map_node_t node;
    sl_peer_key_t key;
    bool gone; /* a send has failed; dropped at the next settle */
    size_t request_count;
    TAILQ_HEAD(, sl_request) requests;
} sl_client_t;

struct sl_request {
    sl_map_node_t node; /* by client and id */
    sl_client_t *client;
    TAILQ_ENTRY(sl_request) client_link;
    sl_message_t generate;  /* owned */
    uint64_t order;         /* of arrival; its position in the waiting queue for good */
    uint64_t checked_epoch; /* of the cluster it was checked against */
    uint64_t arrived_us;
    uint64_t next_seq;
    uint64_t output_count;         /* tokens sent to the client */
    uint64_t prompt_logprob_count; /* prompt positions whose logprobs were sent */

    sl_attempt_t *attempt; /* NULL: waiting */
    TAILQ_ENTRY(sl_request) waiting_link;
    uint64_t not_before_us;          /* waiting: back-off after no_pages */
    uint32_t refusals;               /* no_pages in a row */
    uint64_t avoid_incarnation;      /* the rank that had no pages; 0: none */
    sl_rank_t *holds[SL_POOL_COUNT]; /* kept for it while it starves; NULL: none */
};

/* What one rank has to do with an attempt. `rank` is NULL once it has released, or is lost. */
typedef struct sl_side {
    LIST_ENTRY(sl_side) link; /* of the rank */
    sl_attempt_t *attempt;
    sl_rank_t *rank;
    bool cancel_sent;
} sl_side_t;

/* A decode message that came before the first token, which travels on another socket. */
typedef struct sl_held {
    STAILQ_ENTRY(sl_held) link;
    sl_message_t message; /* owned */
} sl_held_t;

struct sl_attempt {
    sl_map_node_t node; /* by id */
    uint64_t id;
    sl_request_t *request; /* NULL: the request has ended, the sides have yet to release */
    TAILQ_ENTRY(sl_attempt) link;
    sl_side_t sides[SL_POOL_COUNT];
    uint64_t pages, prompt_tokens;
    bool queued;         /* its prompt tokens count as queued on the prefill rank */
    uint64_t next_index; /* of the token expected next */
    uint64_t next_prompt_index;
    uint64_t heard_us;
    uint32_t held_count;
    STAILQ_HEAD(, sl_held) held;
};

struct sl_requests {
    sl_requests_params_t params;
    sl_map_t clients, by_id, attempts;
    TAILQ_HEAD(sl_waiting_list, sl_request) waiting; /* by order */
    TAILQ_HEAD(, sl_attempt) attempt_list;
    sl_requests_counts_t counts;
    uint64_t next_order, next_attempt;
    size_t rotation;
    size_t hold_count[SL_POOL_COUNT];
    bool schedule_needed;
    uint64_t wake_us;         /* the earliest end of a back-off; UINT64_MAX: none */
    uint64_t scheduled_epoch; /* of the cluster at the last pass */
    bool settle_needed;
    uint64_t tick_us;     /* of the last look at deadlines */
    uint64_t leak_log_us; /* of the last warning of an attempt that is not released */
    const sl_load_t **loads[SL_POOL_COUNT]; /* scratch of one scheduling pass */
    size_t load_capacity[SL_POOL_COUNT];
};

/* ---- requests.c ---- */

/* Sends the request's next event; seq and id are filled in here. */
void sl_request_event(sl_requests_t *requests, sl_request_t *request, sl_message_t *message);

/* Sends `failed` as the last event and frees the request. Counts it as canceled when the code is
 * that, else as failed. */
void sl_request_fail(sl_requests_t *requests, sl_request_t *request, const char *code,
                     const char *text);

/* Frees the request; its attempt lives on until the ranks have released it. */
void sl_request_end(sl_requests_t *requests, sl_request_t *request);

/* ---- attempts.c ---- */

/* Makes an attempt on two ranks and tells both. */
SL_MUST_USE sl_status_t sl_attempt_start(sl_requests_t *requests, sl_request_t *request,
                                         sl_rank_t *prefill, sl_rank_t *decode, uint64_t pages,
                                         uint64_t now_us);

/* Tells the sides that still hold something to give it up. */
void sl_attempt_cancel(sl_requests_t *requests, sl_attempt_t *attempt);

/* Cuts attempt and request apart. */
void sl_attempt_detach(sl_attempt_t *attempt);

/* Drops it without a word: at the end of the program. */
void sl_attempt_free(sl_requests_t *requests, sl_attempt_t *attempt);

/* Deadlines of attempts. */
void sl_attempts_tick(sl_requests_t *requests, uint64_t now_us);

/* The attempt has died through no fault of the request: `code` and `reason` say how. This is the
 * one place where running the request again elsewhere would start; today the request fails. */
void sl_request_attempt_lost(sl_requests_t *requests, sl_request_t *request, const char *code,
                             const char *reason);

/* ---- schedule.c ---- */

void sl_waiting_add(sl_requests_t *requests, sl_request_t *request); /* by its order */
void sl_waiting_remove(sl_requests_t *requests, sl_request_t *request);

/* Gives up the ranks held for a request. */
void sl_holds_release(sl_requests_t *requests, sl_request_t *request);

/* The rank is gone: whoever held it does so no more. */
void sl_holds_forget_rank(sl_requests_t *requests, sl_rank_t *rank);

/* Deadlines of waiting requests. */
void sl_waiting_tick(sl_requests_t *requests, uint64_t now_us);

/* Checks a request against the cluster as it is now. */
SL_MUST_USE sl_status_t sl_request_check(const sl_requests_t *requests,
                                         const sl_msg_generate_t *generate);

#endif
