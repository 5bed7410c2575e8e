/* The ring: order, bounds, the descriptor, and two threads that lose and double nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>

#include <cmocka.h>

#include "common/base/ring.h"

#define MANY 200000

static bool readable(const sl_ring_t *ring, int timeout_ms)
{
    struct pollfd poll_fd = {.fd = sl_ring_fd(ring), .events = POLLIN};
    return poll(&poll_fd, 1, timeout_ms) == 1;
}

static void test_order_and_bounds(void **state)
{
    (void)state;
    sl_ring_t *ring = NULL;
    int items[9];
    assert_int_equal(sl_ring_create(5, &ring), SL_OK); /* rounded up to 8 */
    assert_null(sl_ring_pop(ring));
    assert_false(sl_ring_has(ring));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 8; i++) {
            assert_int_equal(sl_ring_push(ring, &items[i]), SL_OK);
        }
        assert_int_equal(sl_ring_push(ring, &items[8]), SL_ERR_AGAIN);
        assert_true(sl_ring_has(ring));
        for (int i = 0; i < 8; i++) {
            assert_ptr_equal(sl_ring_pop(ring), &items[i]);
        }
        assert_null(sl_ring_pop(ring));
    }
    sl_ring_destroy(ring);
    sl_ring_destroy(NULL);
}

static void test_descriptor(void **state)
{
    (void)state;
    sl_ring_t *ring = NULL;
    int item;
    assert_int_equal(sl_ring_create(2, &ring), SL_OK);
    assert_false(readable(ring, 0));
    assert_int_equal(sl_ring_push(ring, &item), SL_OK);
    assert_true(readable(ring, 0));
    sl_ring_clear(ring);
    assert_false(readable(ring, 0));
    assert_ptr_equal(sl_ring_pop(ring), &item);
    sl_ring_clear(ring); /* with nothing there it does not block */
    sl_ring_destroy(ring);
}

static void *produce(void *context)
{
    sl_ring_t *ring = context;
    for (uintptr_t i = 1; i <= MANY; i++) {
        while (sl_ring_push(ring, (void *)i) == SL_ERR_AGAIN) {
            sched_yield();
        }
    }
    return NULL;
}

static void test_two_threads(void **state)
{
    (void)state;
    sl_ring_t *ring = NULL;
    pthread_t thread;
    uintptr_t expected = 1;
    assert_int_equal(sl_ring_create(64, &ring), SL_OK);
    assert_int_equal(pthread_create(&thread, NULL, produce, ring), 0);
    while (expected <= MANY) {
        assert_true(readable(ring, 10000)); /* a lost wakeup would end here */
        sl_ring_clear(ring);
        void *item;
        while ((item = sl_ring_pop(ring)) != NULL) {
            assert_true((uintptr_t)item == expected);
            expected++;
        }
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_null(sl_ring_pop(ring));
    sl_ring_destroy(ring);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_order_and_bounds),
                                       cmocka_unit_test(test_descriptor),
                                       cmocka_unit_test(test_two_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
