/* Page states: each arrow of the diagram, no other, and counts that add up under random use. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/kv/pages.h"

static uint32_t sum(const sl_pages_t *pages)
{
    uint32_t total = 0;
    for (int state = 0; state < SL_PAGE_STATE_COUNT; state++) {
        total += sl_pages_count(pages, (sl_page_state_t)state);
    }
    return total;
}

static void test_take(void **state)
{
    (void)state;
    sl_pages_t *pages = NULL;
    uint32_t ids[5], more[3] = {99, 99, 99};
    assert_int_equal(sl_pages_create(5, &pages), SL_OK);
    assert_int_equal(sl_pages_total(pages), 5);
    assert_int_equal(sl_pages_take(pages, 7, 3, ids), SL_OK);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(ids[i], i);
        assert_int_equal(sl_pages_state(pages, ids[i]), SL_PAGE_RESERVED);
    }
    /* all or nothing */
    assert_int_equal(sl_pages_take(pages, 8, 3, more), SL_ERR_NO_PAGES);
    assert_int_equal(more[0], 99);
    assert_int_equal(sl_pages_count(pages, SL_PAGE_FREE), 2);
    assert_int_equal(sl_pages_take(pages, 8, 2, more), SL_OK);
    assert_int_equal(sl_pages_take(pages, 9, 0, NULL), SL_OK);
    assert_int_equal(sl_pages_take(pages, 9, 1, ids), SL_ERR_NO_PAGES);
    sl_pages_move(pages, 7, ids, 3, SL_PAGE_RESERVED, SL_PAGE_FREE);
    assert_int_equal(sl_pages_count(pages, SL_PAGE_FREE), 3);
    assert_int_equal(sum(pages), 5);
    sl_pages_destroy(pages);
    sl_pages_destroy(NULL);
}

static void test_decode_life(void **state)
{
    (void)state;
    sl_pages_t *pages = NULL;
    uint32_t ids[4];
    assert_int_equal(sl_pages_create(4, &pages), SL_OK);
    assert_int_equal(sl_pages_take(pages, 1, 4, ids), SL_OK);
    sl_pages_move(pages, 1, ids, 3, SL_PAGE_RESERVED, SL_PAGE_FILLING);
    sl_pages_move(pages, 1, ids, 2, SL_PAGE_FILLING, SL_PAGE_READY);
    sl_pages_move(pages, 1, ids, 1, SL_PAGE_READY, SL_PAGE_IN_USE);
    sl_pages_move(pages, 1, ids + 2, 1, SL_PAGE_FILLING, SL_PAGE_QUIESCING);
    sl_pages_move(pages, 1, ids + 3, 1, SL_PAGE_RESERVED, SL_PAGE_IN_USE); /* growth */
    assert_int_equal(sl_pages_count(pages, SL_PAGE_READY), 1);
    assert_int_equal(sl_pages_count(pages, SL_PAGE_IN_USE), 2);
    assert_int_equal(sl_pages_count(pages, SL_PAGE_QUIESCING), 1);
    sl_pages_move(pages, 1, ids, 1, SL_PAGE_IN_USE, SL_PAGE_FREE);
    sl_pages_move(pages, 1, ids + 1, 1, SL_PAGE_READY, SL_PAGE_FREE);
    sl_pages_move(pages, 1, ids + 2, 1, SL_PAGE_QUIESCING, SL_PAGE_FREE);
    sl_pages_move(pages, 1, ids + 3, 1, SL_PAGE_IN_USE, SL_PAGE_FREE);
    assert_int_equal(sl_pages_count(pages, SL_PAGE_FREE), 4);
    sl_pages_destroy(pages);
}

/* Brings the one page of a pool into `state`, owned by 1. */
static void bring_to(sl_pages_t *pages, sl_page_state_t state)
{
    uint32_t id = 0;
    if (state == SL_PAGE_FREE) {
        return;
    }
    assert_int_equal(sl_pages_take(pages, 1, 1, &id), SL_OK);
    if (state == SL_PAGE_FILLING || state == SL_PAGE_READY || state == SL_PAGE_QUIESCING) {
        sl_pages_move(pages, 1, &id, 1, SL_PAGE_RESERVED, SL_PAGE_FILLING);
    }
    if (state == SL_PAGE_READY || state == SL_PAGE_QUIESCING) {
        sl_pages_move(pages, 1, &id, 1, SL_PAGE_FILLING, state);
    }
    if (state == SL_PAGE_IN_USE) {
        sl_pages_move(pages, 1, &id, 1, SL_PAGE_RESERVED, state);
    }
}

/* Whether the move stops the process, tried in a child. */
static bool aborts(sl_pages_t *pages, uint64_t owner, uint32_t id, sl_page_state_t from,
                   sl_page_state_t to)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        if (freopen("/dev/null", "w", stderr) == NULL) {
            _exit(2);
        }
        sl_pages_move(pages, owner, &id, 1, from, to);
        _exit(0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void test_arrows(void **state)
{
    (void)state;
    /* rows: from; columns: to; in the order of the states */
    static const bool drawn[SL_PAGE_STATE_COUNT][SL_PAGE_STATE_COUNT] = {
        [SL_PAGE_RESERVED] =
            {[SL_PAGE_FREE] = true, [SL_PAGE_FILLING] = true, [SL_PAGE_IN_USE] = true},
        [SL_PAGE_FILLING] = {[SL_PAGE_READY] = true, [SL_PAGE_QUIESCING] = true},
        [SL_PAGE_READY] = {[SL_PAGE_IN_USE] = true, [SL_PAGE_FREE] = true},
        [SL_PAGE_IN_USE] = {[SL_PAGE_FREE] = true},
        [SL_PAGE_QUIESCING] = {[SL_PAGE_FREE] = true},
    };
    for (int from = 0; from < SL_PAGE_STATE_COUNT; from++) {
        sl_pages_t *pages = NULL;
        assert_int_equal(sl_pages_create(1, &pages), SL_OK);
        bring_to(pages, (sl_page_state_t)from);
        assert_int_equal(sl_pages_state(pages, 0), from);
        for (int to = 0; to < SL_PAGE_STATE_COUNT; to++) {
            bool stopped = aborts(pages, 1, 0, (sl_page_state_t)from, (sl_page_state_t)to);
            if (stopped == drawn[from][to]) {
                fail_msg("move from %d to %d: expected %s", from, to,
                         drawn[from][to] ? "done" : "refused");
            }
        }
        sl_pages_destroy(pages);
    }
}

static void test_mistakes(void **state)
{
    (void)state;
    sl_pages_t *pages = NULL;
    assert_int_equal(sl_pages_create(1, &pages), SL_OK);
    bring_to(pages, SL_PAGE_RESERVED);
    assert_true(aborts(pages, 2, 0, SL_PAGE_RESERVED, SL_PAGE_FREE)); /* another's page */
    assert_true(aborts(pages, 1, 1, SL_PAGE_RESERVED, SL_PAGE_FREE)); /* no such page */
    assert_true(aborts(pages, 1, 0, SL_PAGE_FILLING, SL_PAGE_READY)); /* another state */
    assert_false(aborts(pages, 1, 0, SL_PAGE_RESERVED, SL_PAGE_FREE));
    sl_pages_destroy(pages);
}

#define OWNERS 40
#define POOL 97

/* Many owners take and give up; no page has two, and at the end all are free. */
static void test_random(void **state)
{
    (void)state;
    static const sl_page_state_t path[] = {SL_PAGE_RESERVED, SL_PAGE_FILLING, SL_PAGE_READY,
                                           SL_PAGE_IN_USE, SL_PAGE_FREE};
    uint32_t ids[OWNERS][8], counts[OWNERS] = {0};
    int stages[OWNERS] = {0};
    bool held[POOL] = {false};
    sl_pages_t *pages = NULL;
    unsigned seed = 5;
    assert_int_equal(sl_pages_create(POOL, &pages), SL_OK);
    for (int step = 0; step < 20000 || sl_pages_count(pages, SL_PAGE_FREE) < POOL; step++) {
        uint32_t who = (uint32_t)rand_r(&seed) % OWNERS;
        if (counts[who] == 0 && step < 20000) {
            uint32_t wanted = 1 + (uint32_t)rand_r(&seed) % 8;
            if (sl_pages_take(pages, who + 1, wanted, ids[who]) == SL_OK) {
                counts[who] = wanted;
                stages[who] = 0;
                for (uint32_t i = 0; i < wanted; i++) {
                    assert_false(held[ids[who][i]]);
                    held[ids[who][i]] = true;
                }
            } else {
                assert_true(sl_pages_count(pages, SL_PAGE_FREE) < wanted);
            }
        } else if (counts[who] > 0) {
            int next = stages[who] + 1;
            sl_pages_move(pages, who + 1, ids[who], counts[who], path[stages[who]], path[next]);
            stages[who] = next;
            for (uint32_t i = 0; path[next] == SL_PAGE_FREE && i < counts[who]; i++) {
                held[ids[who][i]] = false;
            }
            counts[who] = path[next] == SL_PAGE_FREE ? 0 : counts[who];
        }
        assert_int_equal(sum(pages), POOL);
    }
    sl_pages_destroy(pages);
}

static void test_pages_for(void **state)
{
    (void)state;
    assert_int_equal(sl_pages_for(0, 64), 0);
    assert_int_equal(sl_pages_for(1, 64), 1);
    assert_int_equal(sl_pages_for(64, 64), 1);
    assert_int_equal(sl_pages_for(65, 64), 2);
    assert_true(sl_pages_for(UINT64_MAX, 64) == UINT32_MAX);
}

static void test_empty_pool(void **state)
{
    (void)state;
    sl_pages_t *pages = NULL;
    uint32_t id;
    assert_int_equal(sl_pages_create(0, &pages), SL_OK);
    assert_int_equal(sl_pages_take(pages, 1, 1, &id), SL_ERR_NO_PAGES);
    sl_pages_destroy(pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_take),      cmocka_unit_test(test_decode_life),
        cmocka_unit_test(test_arrows),    cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_random),    cmocka_unit_test(test_pages_for),
        cmocka_unit_test(test_empty_pool)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
