/* All four choices are one scan for the best rank under a filter and a cost; a lower cost wins, and
 * the first of equals in rotated order stays. */
#include "router/placement.h"

typedef struct {
    bool (*fits)(const sl_load_t *load, const sl_demand_t *demand);
    bool (*better)(const sl_load_t *a, const sl_load_t *b);
} rule_t;

static uint64_t free_pages(const sl_load_t *load)
{
    return load->pages_total > load->pages_reserved ? load->pages_total - load->pages_reserved : 0;
}

static bool may_take(const sl_load_t *load, const sl_demand_t *demand)
{
    /* Older requests and the holder itself (equal order) pass a hold; younger ones do not. */
    return demand->order <= load->hold_order &&
           (load->max_running == 0 || load->running < load->max_running);
}

static bool decode_fits(const sl_load_t *load, const sl_demand_t *demand)
{
    return may_take(load, demand) && free_pages(load) >= demand->pages;
}

static bool decode_better(const sl_load_t *a, const sl_load_t *b)
{
    uint64_t free_a = free_pages(a), free_b = free_pages(b);
    return free_a != free_b ? free_a > free_b : a->running < b->running;
}

/* Whether the prompt could ever be computed there, however empty the rank is. */
static bool prefill_holds(const sl_load_t *load, const sl_demand_t *demand)
{
    return load->pages_total >= demand->prompt_pages &&
           (load->max_queued_tokens == 0 || demand->prompt_tokens <= load->max_queued_tokens);
}

static bool prefill_fits(const sl_load_t *load, const sl_demand_t *demand)
{
    return may_take(load, demand) && prefill_holds(load, demand) &&
           (load->max_queued_tokens == 0 ||
            load->queued_tokens + demand->prompt_tokens <= load->max_queued_tokens);
}

static bool prefill_better(const sl_load_t *a, const sl_load_t *b)
{
    return a->queued_tokens != b->queued_tokens ? a->queued_tokens < b->queued_tokens
                                                : a->running < b->running;
}

static bool decode_holdable(const sl_load_t *load, const sl_demand_t *demand)
{
    return load->hold_order == SL_HOLD_NONE && load->pages_total >= demand->pages;
}

static bool prefill_holdable(const sl_load_t *load, const sl_demand_t *demand)
{
    return load->hold_order == SL_HOLD_NONE && prefill_holds(load, demand);
}

static size_t choose(const sl_load_t *const *loads, size_t count, const sl_demand_t *demand,
                     const rule_t *rule)
{
    size_t best = SL_PLACE_NONE, last_resort = SL_PLACE_NONE;
    for (size_t i = 0; i < count; i++) {
        size_t index = (demand->rotation + i) % count;
        const sl_load_t *load = loads[index];
        if (!rule->fits(load, demand)) {
            continue;
        }
        if (load == demand->avoid) {
            last_resort = index;
        } else if (best == SL_PLACE_NONE || rule->better(load, loads[best])) {
            best = index;
        }
    }
    return best != SL_PLACE_NONE ? best : last_resort;
}

size_t sl_place_decode(const sl_load_t *const *loads, size_t count, const sl_demand_t *demand)
{
    return choose(loads, count, demand, &(rule_t){decode_fits, decode_better});
}

size_t sl_place_prefill(const sl_load_t *const *loads, size_t count, const sl_demand_t *demand)
{
    return choose(loads, count, demand, &(rule_t){prefill_fits, prefill_better});
}

size_t sl_place_hold_decode(const sl_load_t *const *loads, size_t count, const sl_demand_t *demand)
{
    return choose(loads, count, demand, &(rule_t){decode_holdable, decode_better});
}

size_t sl_place_hold_prefill(const sl_load_t *const *loads, size_t count, const sl_demand_t *demand)
{
    return choose(loads, count, demand, &(rule_t){prefill_holdable, prefill_better});
}
