/* The grouped product's tiles cover every row of every expert once, on any machine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cuda/grouped_tiles.h"

#define EXPERTS_MAX 64
#define ROWS_MAX 20000
#define N_TILES_MAX 8

typedef struct {
    int32_t begin[EXPERTS_MAX + 1];
    uint32_t tile_end[EXPERTS_MAX];
    uint32_t experts, n, height_max;
} routing_t;

static uint8_t seen[ROWS_MAX][N_TILES_MAX];

static void count(routing_t *routing, const uint32_t *rows)
{
    uint32_t tiles = 0;
    routing->begin[0] = 0;
    for (uint32_t e = 0; e < routing->experts; e++) {
        routing->begin[e + 1] = routing->begin[e] + (int32_t)rows[e];
        tiles +=
            sl_grouped_split(rows[e], routing->height_max).count * sl_grouped_n_tiles(routing->n);
        routing->tile_end[e] = tiles;
    }
}

static void check_tile(const routing_t *routing, const sl_grouped_tile_t *tile)
{
    uint32_t end = (uint32_t)routing->begin[tile->expert + 1];
    assert_true(tile->rows > 0 && tile->rows <= tile->height);
    assert_true(tile->height % SL_TILE_ROWS_STEP == 0 && tile->height <= routing->height_max);
    assert_true(tile->row >= (uint32_t)routing->begin[tile->expert]);
    assert_true(tile->row + tile->rows <= end);
    assert_true(tile->height - tile->rows < SL_TILE_ROWS_STEP);
    assert_true(tile->rows == tile->height || tile->row + tile->rows == end);
    assert_true(tile->n < routing->n && tile->n % SL_TILE_N == 0);
    for (uint32_t r = tile->row; r < tile->row + tile->rows; r++) {
        assert_int_equal(seen[r][tile->n / SL_TILE_N]++, 0);
    }
}

/* As `blocks` blocks walk them. */
static void check(routing_t *routing, const uint32_t *rows, uint32_t blocks)
{
    count(routing, rows);
    uint32_t total_rows = (uint32_t)routing->begin[routing->experts];
    uint32_t n_tiles = sl_grouped_n_tiles(routing->n), tiles = 0;
    assert_true(total_rows <= ROWS_MAX && n_tiles <= N_TILES_MAX);
    memset(seen, 0, sizeof(seen));
    for (uint32_t block = 0; block < blocks; block++) {
        sl_grouped_tile_t tile;
        uint32_t expert = 0;
        for (uint32_t i = block;
             sl_grouped_find(routing->begin, routing->tile_end, routing->experts,
                             routing->height_max, i, &expert, &tile);
             i += blocks) {
            check_tile(routing, &tile);
            tiles++;
        }
    }
    for (uint32_t r = 0; r < total_rows; r++) {
        for (uint32_t n = 0; n < n_tiles; n++) {
            assert_int_equal(seen[r][n], 1);
        }
    }
    assert_int_equal(tiles, routing->tile_end[routing->experts - 1]);
    assert_true(tiles <= sl_grouped_tiles_max(total_rows, routing->experts, routing->n,
                                              routing->height_max));
}

static void test_splits(void **state)
{
    (void)state;
    assert_int_equal(sl_grouped_split(0, 256).count, 0);
    for (uint32_t height_max = 16; height_max <= 256; height_max *= 2) {
        for (uint32_t rows = 1; rows <= ROWS_MAX; rows++) {
            sl_row_split_t split = sl_grouped_split(rows, height_max);
            assert_true(split.height <= height_max && split.height % SL_TILE_ROWS_STEP == 0);
            assert_true(split.count * split.height >= rows);
            assert_true((split.count - 1) * split.height < rows);
        }
    }
    assert_int_equal(sl_grouped_split(300, 256).height, 160);
    assert_int_equal(sl_grouped_split(5, 256).height, 16);
}

static void test_every_row_once(void **state)
{
    (void)state;
    static const uint32_t heights[] = {16, 64, 256}, widths[] = {1, 128, 129, 1000};
    srand(7);
    for (size_t round = 0; round < 120; round++) {
        routing_t routing = {.experts = 1 + (uint32_t)rand() % EXPERTS_MAX,
                             .height_max = heights[round % 3],
                             .n = widths[round / 3 % 4]};
        uint32_t rows[EXPERTS_MAX];
        for (uint32_t e = 0; e < EXPERTS_MAX; e++) {
            int kind = rand() % 4;
            rows[e] = kind == 0 ? 0 : (uint32_t)rand() % (kind == 1 ? 300 : 40);
        }
        rows[(uint32_t)rand() % routing.experts] += round % 5 == 0 ? 4500 : 0;
        check(&routing, rows, 1 + (uint32_t)rand() % 133);
    }
}

static void test_no_rows(void **state)
{
    (void)state;
    routing_t routing = {.experts = 3, .height_max = 64, .n = 256};
    check(&routing, (const uint32_t[]){0, 0, 0}, 4);
    check(&routing, (const uint32_t[]){0, 1, 0}, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_every_row_once),
        cmocka_unit_test(test_no_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
