/* The hash map through growth, collisions and removal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "router/map.h"

typedef struct {
    sl_map_node_t node;
    uint32_t value;
} item_t;

static bool same(const sl_map_node_t *node, const void *key)
{
    return ((const item_t *)node)->value == *(const uint32_t *)key;
}

static void fill_find_remove(sl_map_t *map, item_t *items, uint32_t count, bool collide)
{
    for (uint32_t i = 0; i < count; i++) {
        items[i].value = i;
        sl_map_add(map, &items[i].node, collide ? 5 : sl_map_hash(&i, sizeof(i), 3));
    }
    assert_int_equal(map->count, count);
    for (uint32_t i = 0; i < count; i += 2) {
        sl_map_remove(map, &items[i].node);
    }
    for (uint32_t i = 0; i < count; i++) {
        sl_map_node_t *found =
            sl_map_find(map, collide ? 5 : sl_map_hash(&i, sizeof(i), 3), same, &i);
        assert_ptr_equal(found, i % 2 == 0 ? NULL : &items[i].node);
    }
    sl_map_node_t *node;
    while ((node = sl_map_any(map)) != NULL) {
        sl_map_remove(map, node);
    }
    assert_int_equal(map->count, 0);
}

static void map_keeps_what_was_added(void **state)
{
    (void)state;
    static item_t items[1000];
    sl_map_t map;
    assert_int_equal(sl_map_init(&map), SL_OK);
    fill_find_remove(&map, items, 1000, false);
    fill_find_remove(&map, items, 200, true);
    sl_map_cleanup(&map);
}

static void hash_depends_on_bytes_and_seed(void **state)
{
    (void)state;
    assert_int_not_equal(sl_map_hash("ab", 2, 0), sl_map_hash("ba", 2, 0));
    assert_int_not_equal(sl_map_hash("ab", 2, 0), sl_map_hash("ab", 2, 1));
    assert_int_not_equal(sl_map_hash("", 0, 0), sl_map_hash("\0", 1, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(map_keeps_what_was_added),
        cmocka_unit_test(hash_depends_on_bytes_and_seed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
