/* Free runs against a plain model: pages come side by side wherever they can, none is lost or given
 * out twice, and what comes back is joined again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/kv/pages.h"
#include "common/kv/runs.h"

#define PAGES 300u
#define HELD_MAX 64

static uint32_t random_below(uint64_t *state, uint32_t limit)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % limit;
}

static uint32_t longest_run(const bool *is_free)
{
    uint32_t longest = 0, length = 0;
    for (uint32_t id = 0; id < PAGES; id++) {
        length = is_free[id] ? length + 1 : 0;
        longest = length > longest ? length : longest;
    }
    return longest;
}

/* The length of the run around `first`. */
static uint32_t run_at(const bool *is_free, uint32_t first)
{
    uint32_t length = 0;
    assert_true(first == 0 || !is_free[first - 1]); /* from the start of a run */
    while (first + length < PAGES && is_free[first + length]) {
        length++;
    }
    return length;
}

typedef struct {
    uint32_t ids[PAGES], count;
} held_t;

/* One request's pages, piece by piece. */
static void take(sl_runs_t *runs, bool *is_free, uint32_t wanted, held_t *held)
{
    held->count = 0;
    while (held->count < wanted) {
        uint32_t first = PAGES, left = wanted - held->count, longest = longest_run(is_free);
        uint32_t taken = sl_runs_take(runs, left, &first);
        uint32_t length = run_at(is_free, first);
        assert_in_range(taken, 1, left);
        assert_true(taken <= length);
        if (longest >= left) {
            assert_int_equal(taken, left);
        } else {
            assert_int_equal(taken, length); /* all of one of the longest */
            assert_true(2 * length > longest);
        }
        for (uint32_t i = 0; i < taken; i++) {
            assert_true(is_free[first + i]);
            is_free[first + i] = false;
            held->ids[held->count++] = first + i;
        }
    }
}

static void give(sl_runs_t *runs, bool *is_free, held_t *held, uint64_t *seed)
{
    for (uint32_t left = held->count; left > 0; left--) { /* in any order */
        uint32_t i = random_below(seed, left), id = held->ids[i];
        held->ids[i] = held->ids[left - 1];
        is_free[id] = true;
        sl_runs_give(runs, id);
    }
    held->count = 0;
}

static void test_random_use(void **state)
{
    (void)state;
    static held_t held[HELD_MAX];
    bool is_free[PAGES];
    uint64_t seed = 7;
    uint32_t free_count = PAGES, first;
    sl_runs_t *runs = NULL;
    assert_int_equal(sl_runs_create(PAGES, &runs), SL_OK);
    memset(is_free, true, sizeof(is_free));
    for (int round = 0; round < 20000; round++) {
        held_t *one = &held[random_below(&seed, HELD_MAX)];
        uint32_t wanted = 1 + random_below(&seed, 24);
        if (one->count > 0) {
            free_count += one->count;
            give(runs, is_free, one, &seed);
        } else if (wanted <= free_count) {
            take(runs, is_free, wanted, one);
            free_count -= wanted;
        }
    }
    for (int i = 0; i < HELD_MAX; i++) {
        give(runs, is_free, &held[i], &seed);
    }
    assert_int_equal(sl_runs_take(runs, PAGES, &first), PAGES); /* one run again */
    assert_int_equal(first, 0);
    sl_runs_destroy(runs);
}

/* The runs that are left over are used before a longer one is cut. */
static void test_fits_best(void **state)
{
    (void)state;
    sl_runs_t *runs = NULL;
    uint32_t first;
    assert_int_equal(sl_runs_create(40, &runs), SL_OK);
    assert_int_equal(sl_runs_take(runs, 20, &first), 20);
    for (uint32_t id = 2; id < 5; id++) {
        sl_runs_give(runs, id);
    }
    for (uint32_t id = 8; id < 10; id++) {
        sl_runs_give(runs, id);
    }
    assert_int_equal(sl_runs_take(runs, 2, &first), 2);
    assert_int_equal(first, 8);
    assert_int_equal(sl_runs_take(runs, 3, &first), 3);
    assert_int_equal(first, 2);
    assert_int_equal(sl_runs_take(runs, 20, &first), 20);
    assert_int_equal(first, 20);
    sl_runs_destroy(runs);
}

/* A pool in use for long still gives nearly every request its pages side by side. */
static void test_stays_together(void **state)
{
    (void)state;
    enum { POOL = 4096, REQUESTS = 100, ROUNDS = 20000 };
    static uint32_t ids[REQUESTS][40];
    uint32_t counts[REQUESTS] = {0}, together = 0, taken = 0;
    uint64_t seed = 3;
    sl_pages_t *pages = NULL;
    assert_int_equal(sl_pages_create(POOL, &pages), SL_OK);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t i = random_below(&seed, REQUESTS);
        if (counts[i] > 0) {
            sl_pages_move(pages, i + 1, ids[i], counts[i], SL_PAGE_RESERVED, SL_PAGE_FREE);
            counts[i] = 0;
            continue;
        }
        counts[i] = 1 + random_below(&seed, 40);
        assert_int_equal(sl_pages_take(pages, i + 1, counts[i], ids[i]), SL_OK);
        taken++;
        together += ids[i][counts[i] - 1] - ids[i][0] == counts[i] - 1;
    }
    assert_true(together * 100 >= taken * 95);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        if (counts[i] > 0) {
            sl_pages_move(pages, i + 1, ids[i], counts[i], SL_PAGE_RESERVED, SL_PAGE_FREE);
        }
    }
    assert_int_equal(sl_pages_count(pages, SL_PAGE_FREE), POOL);
    sl_pages_destroy(pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_use),
        cmocka_unit_test(test_fits_best),
        cmocka_unit_test(test_stays_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
