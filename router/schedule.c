/*
 * The waiting queue, ordered by arrival. Every pass walks it from the oldest and places whatever
 * fits, so that a request too large for now does not stop smaller ones behind it.
 *
 * Nor may the small ones starve it: a request that has waited for starve_ms and does not fit gets a
 * rank held for it in each pool where it does not fit. Requests that came later do not take room on
 * a held rank, so it drains until the holder fits. At most half of a pool (but at least one rank)
 * is held at a time: the rest serves the small ones meanwhile.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/base/log.h"
#include "router/check.h"
#include "router/requests_internal.h"

/* One pass over the queue. */
typedef struct {
    sl_requests_t *requests;
    uint64_t now_us;
    sl_rank_t *const *ranks[SL_POOL_COUNT];
    size_t count[SL_POOL_COUNT];
} pass_t;

/* ---- queue ---- */

void sl_waiting_add(sl_requests_t *requests, sl_request_t *request)
{
    sl_request_t *before;
    TAILQ_FOREACH_REVERSE(before, &requests->waiting, sl_waiting_list, waiting_link)
    {
        if (before->order < request->order) {
            break;
        }
    }
    if (before == NULL) {
        TAILQ_INSERT_HEAD(&requests->waiting, request, waiting_link);
    } else {
        TAILQ_INSERT_AFTER(&requests->waiting, before, request, waiting_link);
    }
    requests->counts.waiting++;
    requests->counts.waiting_tokens += request->generate.generate.token_count;
    requests->schedule_needed = true;
}

void sl_waiting_remove(sl_requests_t *requests, sl_request_t *request)
{
    TAILQ_REMOVE(&requests->waiting, request, waiting_link);
    requests->counts.waiting--;
    requests->counts.waiting_tokens -= request->generate.generate.token_count;
}

/* ---- holds ---- */

static void hold_release(sl_requests_t *requests, sl_request_t *request, int pool)
{
    if (request->holds[pool] != NULL) {
        request->holds[pool]->load.hold_order = SL_HOLD_NONE;
        request->holds[pool] = NULL;
        requests->hold_count[pool]--;
        requests->schedule_needed = true;
    }
}

void sl_holds_release(sl_requests_t *requests, sl_request_t *request)
{
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        hold_release(requests, request, pool);
    }
}

void sl_holds_forget_rank(sl_requests_t *requests, sl_rank_t *rank)
{
    sl_request_t *request;
    if (rank->load.hold_order == SL_HOLD_NONE) {
        return;
    }
    TAILQ_FOREACH(request, &requests->waiting, waiting_link)
    {
        if (request->holds[rank->id.pool] == rank) {
            hold_release(requests, request, rank->id.pool);
            return;
        }
    }
}

static void hold_take(const pass_t *pass, sl_request_t *request, sl_pool_t pool,
                      const sl_demand_t *demand)
{
    sl_requests_t *requests = pass->requests;
    size_t most = pass->count[pool] > 1 ? pass->count[pool] / 2 : 1;
    if (request->holds[pool] != NULL || requests->hold_count[pool] >= most) {
        return;
    }
    const sl_load_t *const *loads = requests->loads[pool];
    size_t index = pool == SL_POOL_DECODE ? sl_place_hold_decode(loads, pass->count[pool], demand)
                                          : sl_place_hold_prefill(loads, pass->count[pool], demand);
    if (index == SL_PLACE_NONE) {
        return;
    }
    char name[32];
    sl_rank_t *rank = pass->ranks[pool][index];
    rank->load.hold_order = request->order;
    request->holds[pool] = rank;
    requests->hold_count[pool]++;
    sl_log_info("%s is held for request \"%s\", which has waited %" PRIu64 " ms for %" PRIu64
                " pages",
                sl_rank_name(&rank->id, name), request->generate.generate.id,
                (pass->now_us - request->arrived_us) / 1000, demand->pages);
}

/* ---- checks ---- */

sl_status_t sl_request_check(const sl_requests_t *requests, const sl_msg_generate_t *generate)
{
    const sl_cluster_t *cluster = sl_registry_cluster(requests->params.registry);
    sl_check_limits_t limits = {.vocab_size = cluster->vocab_size,
                                .max_model_len = cluster->max_model_len,
                                .page_tokens = cluster->page_tokens};
    size_t count;
    sl_rank_t *const *ranks =
        sl_registry_targets(requests->params.registry, SL_POOL_DECODE, &count);
    for (size_t i = 0; i < count; i++) {
        uint64_t pages = ranks[i]->load.pages_total;
        limits.decode_pages = pages > limits.decode_pages ? pages : limits.decode_pages;
    }
    const sl_rank_t *prefill = sl_registry_largest_prefill(requests->params.registry);
    if (prefill != NULL) {
        limits.prefill_pages = prefill->load.pages_total;
        limits.prefill_queue_tokens = prefill->load.max_queued_tokens;
    }
    return sl_check_generate(generate, &limits);
}

/* The cluster has changed since the request was checked, or it came before the cluster. */
static bool check_again(sl_requests_t *requests, sl_request_t *request)
{
    sl_status_t status = sl_request_check(requests, &request->generate.generate);
    if (status != SL_OK) {
        sl_request_fail(requests, request, sl_status_name(status), sl_error_text());
        return false;
    }
    request->checked_epoch = sl_registry_cluster(requests->params.registry)->epoch;
    return true;
}

/* ---- placing ---- */

static const sl_load_t *avoided_load(const pass_t *pass, const sl_request_t *request)
{
    for (size_t i = 0; request->avoid_incarnation != 0 && i < pass->count[SL_POOL_DECODE]; i++) {
        sl_rank_t *rank = pass->ranks[SL_POOL_DECODE][i];
        if (rank->id.incarnation == request->avoid_incarnation) {
            return &rank->load;
        }
    }
    return NULL;
}

static void place_at(const pass_t *pass, sl_request_t *request, size_t prefill, size_t decode,
                     uint64_t pages)
{
    sl_requests_t *requests = pass->requests;
    sl_waiting_remove(requests, request);
    sl_holds_release(requests, request);
    sl_status_t status = sl_attempt_start(requests, request, pass->ranks[SL_POOL_PREFILL][prefill],
                                          pass->ranks[SL_POOL_DECODE][decode], pages, pass->now_us);
    if (status != SL_OK) {
        sl_waiting_add(requests, request);
        sl_request_fail(requests, request, sl_status_name(status), sl_error_text());
        return;
    }
    requests->counts.placed++;
    requests->rotation++;
}

/* False: the request stays, and would have been placed if it fitted. */
static bool try_place(const pass_t *pass, sl_request_t *request)
{
    sl_requests_t *requests = pass->requests;
    const sl_msg_generate_t *generate = &request->generate.generate;
    uint64_t page_tokens = sl_registry_cluster(requests->params.registry)->page_tokens;
    sl_demand_t demand = {
        .pages = sl_check_pages(generate->token_count, generate->sampling.max_tokens, page_tokens),
        .prompt_tokens = generate->token_count,
        .prompt_pages = sl_check_pages(generate->token_count, 0, page_tokens),
        .order = request->order,
        .avoid = avoided_load(pass, request),
        .rotation = requests->rotation,
    };
    size_t decode =
        sl_place_decode(requests->loads[SL_POOL_DECODE], pass->count[SL_POOL_DECODE], &demand);
    demand.avoid = NULL;
    size_t prefill =
        sl_place_prefill(requests->loads[SL_POOL_PREFILL], pass->count[SL_POOL_PREFILL], &demand);
    if (decode != SL_PLACE_NONE && prefill != SL_PLACE_NONE) {
        place_at(pass, request, prefill, decode, demand.pages);
        return true;
    }
    if (pass->now_us - request->arrived_us >= requests->params.starve_ms * 1000) {
        if (decode == SL_PLACE_NONE) {
            hold_take(pass, request, SL_POOL_DECODE, &demand);
        }
        if (prefill == SL_PLACE_NONE) {
            hold_take(pass, request, SL_POOL_PREFILL, &demand);
        }
    }
    return false;
}

static sl_status_t pass_begin(sl_requests_t *requests, uint64_t now_us, pass_t *pass)
{
    *pass = (pass_t){.requests = requests, .now_us = now_us};
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        size_t count;
        sl_rank_t *const *ranks = sl_registry_targets(requests->params.registry, pool, &count);
        if (count > requests->load_capacity[pool]) {
            const sl_load_t **loads =
                realloc(requests->loads[pool], count * sizeof(const sl_load_t *));
            if (loads == NULL) {
                return sl_error(SL_ERR_NO_MEMORY, "no memory for %zu ranks", count);
            }
            requests->loads[pool] = loads;
            requests->load_capacity[pool] = count;
        }
        for (size_t i = 0; i < count; i++) {
            requests->loads[pool][i] = &ranks[i]->load;
        }
        pass->ranks[pool] = ranks;
        pass->count[pool] = count;
    }
    return SL_OK;
}

/* Whether a new request of the least size could be placed: when not, the rest of the queue need not
 * be walked. */
static bool any_room(const pass_t *pass)
{
    const sl_demand_t least = {
        .pages = 1, .prompt_tokens = 1, .prompt_pages = 1, .order = SL_HOLD_NONE};
    sl_requests_t *requests = pass->requests;
    return sl_place_decode(requests->loads[SL_POOL_DECODE], pass->count[SL_POOL_DECODE], &least) !=
               SL_PLACE_NONE &&
           sl_place_prefill(requests->loads[SL_POOL_PREFILL], pass->count[SL_POOL_PREFILL],
                            &least) != SL_PLACE_NONE;
}

static bool is_starving(const pass_t *pass, const sl_request_t *request)
{
    return pass->now_us - request->arrived_us >= pass->requests->params.starve_ms * 1000;
}

void sl_requests_schedule(sl_requests_t *requests, uint64_t now_us)
{
    pass_t pass;
    uint64_t epoch = sl_registry_cluster(requests->params.registry)->epoch;
    if (!requests->schedule_needed && now_us < requests->wake_us &&
        epoch == requests->scheduled_epoch) {
        return;
    }
    requests->schedule_needed = false;
    requests->scheduled_epoch = epoch;
    requests->wake_us = UINT64_MAX;
    if (TAILQ_EMPTY(&requests->waiting) || pass_begin(requests, now_us, &pass) != SL_OK ||
        pass.count[SL_POOL_PREFILL] == 0 || pass.count[SL_POOL_DECODE] == 0) {
        return;
    }
    bool room = any_room(&pass);
    sl_request_t *request = TAILQ_FIRST(&requests->waiting);
    /* Starving requests lead the queue, being the oldest; they are looked at for their holds. */
    while (request != NULL && (room || is_starving(&pass, request))) {
        sl_request_t *next = TAILQ_NEXT(request, waiting_link);
        if (request->not_before_us > now_us) {
            if (request->not_before_us < requests->wake_us) {
                requests->wake_us = request->not_before_us;
            }
        } else if ((request->checked_epoch == epoch || check_again(requests, request)) &&
                   try_place(&pass, request)) {
            room = any_room(&pass);
        }
        request = next;
    }
}

/* ---- deadlines ---- */

/* How long the request has waited while one of the pools has had no ready group. */
static uint64_t waited_for_pool_us(const sl_requests_t *requests, const sl_request_t *request,
                                   sl_pool_t pool, uint64_t now_us)
{
    size_t count;
    (void)sl_registry_targets(requests->params.registry, pool, &count);
    if (count > 0) {
        return 0;
    }
    uint64_t since_us = sl_registry_empty_since_us(requests->params.registry, pool);
    since_us = request->arrived_us > since_us ? request->arrived_us : since_us;
    return now_us > since_us ? now_us - since_us : 0;
}

static void check_deadlines(sl_requests_t *requests, sl_request_t *request, uint64_t now_us)
{
    static const char *const pools[] = {"prefill", "decode"};
    char text[192];
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        uint64_t waited_us = waited_for_pool_us(requests, request, pool, now_us);
        if (waited_us >= requests->params.place_timeout_ms * 1000 && waited_us > 0) {
            snprintf(text, sizeof(text),
                     "no ready %s group for %" PRIu64 " ms (%zu groups are joining)", pools[pool],
                     waited_us / 1000, sl_registry_joining(requests->params.registry, pool));
            sl_request_fail(requests, request, sl_status_name(SL_ERR_UNREACHABLE), text);
            return;
        }
    }
    uint64_t waited_us = now_us - request->arrived_us;
    if (waited_us >= requests->params.queue_timeout_ms * 1000) {
        snprintf(text, sizeof(text),
                 "waited %" PRIu64 " ms for room in the pools (--queue-timeout-ms)",
                 waited_us / 1000);
        sl_request_fail(requests, request, sl_status_name(SL_ERR_DEADLINE), text);
    }
}

void sl_waiting_tick(sl_requests_t *requests, uint64_t now_us)
{
    sl_request_t *request = TAILQ_FIRST(&requests->waiting);
    while (request != NULL) {
        sl_request_t *next = TAILQ_NEXT(request, waiting_link);
        check_deadlines(requests, request, now_us);
        request = next;
    }
}
