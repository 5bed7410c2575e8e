/* What surrounds the operations: finding a backend, its device, its memory, the pool of threads. */
#include <stdatomic.h>

#include "kernels/cpu/pool.h"
#include "tests/ops/each_backend.h"

static void test_unknown_backend_is_named(void **state)
{
    (void)state;
    const sl_ops_t *ops = NULL;
    assert_int_equal(sl_ops_find("tpu", &ops), SL_ERR_UNSUPPORTED);
    assert_null(ops);
    assert_non_null(strstr(sl_error_text(), "\"tpu\""));
    assert_non_null(strstr(sl_error_text(), "ref, cpu"));
}

/* What a backend that runs operations at once has no use for. */
static bool is_optional(size_t at)
{
    static const size_t optional[] = {
        offsetof(sl_ops_t, graph_begin),        offsetof(sl_ops_t, graph_end),
        offsetof(sl_ops_t, graph_launch),       offsetof(sl_ops_t, graph_free),
        offsetof(sl_ops_t, attn_absorbed_plan),
    };
    for (size_t i = 0; i < sizeof(optional) / sizeof(optional[0]); i++) {
        if (at == optional[i]) {
            return true;
        }
    }
    return false;
}

static void test_tables_are_complete(void **state)
{
    (void)state;
    static const char *const names[] = {"ref", "cpu", "cuda"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const sl_ops_t *ops = NULL;
        if (sl_ops_find(names[i], &ops) != SL_OK) {
            assert_string_equal(names[i], "cuda");
            continue;
        }
        assert_string_equal(ops->name, names[i]);
        /* From `open` on the table is function pointers alone. */
        void (*entry)(void);
        for (size_t at = offsetof(sl_ops_t, open); at < sizeof(*ops); at += sizeof(entry)) {
            memcpy(&entry, (const char *)ops + at, sizeof(entry));
            assert_true(entry != NULL || (ops->host_memory && is_optional(at)));
        }
    }
}

static void check_memory(const sl_ops_t *ops, sl_device_t *device)
{
    uint64_t free_bytes = 0, total_bytes = 0;
    assert_int_equal(ops->memory(device, &free_bytes, &total_bytes), SL_OK);
    assert_true(free_bytes > 0 && free_bytes <= total_bytes);

    static const size_t sizes[] = {0, 1, 255, 256, 257, 1 << 20};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        void *memory = NULL;
        assert_int_equal(ops->alloc(device, sizes[i], "a test", &memory), SL_OK);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % 256, 0);
        memset(memory, 1, sizes[i]);
        ops->free(device, memory);
        assert_int_equal(ops->alloc_host(device, sizes[i], "a test", &memory), SL_OK);
        assert_non_null(memory);
        memset(memory, 1, sizes[i]);
        ops->free_host(device, memory);
    }

    char asked[32];
    size_t too_much = (size_t)total_bytes * 2;
    snprintf(asked, sizeof(asked), "%zu", too_much);
    void *memory = NULL;
    assert_int_equal(ops->alloc(device, too_much, "latent pages", &memory), SL_ERR_NO_MEMORY);
    assert_null(memory);
    assert_non_null(strstr(sl_error_text(), "latent pages"));
    assert_non_null(strstr(sl_error_text(), asked));
    assert_non_null(strstr(sl_error_text(), "free"));
    assert_int_equal(ops->alloc(device, SIZE_MAX, "all there is", &memory), SL_ERR_NO_MEMORY);
    assert_int_equal(ops->alloc_host(device, too_much, "tokens", &memory), SL_ERR_NO_MEMORY);
    assert_non_null(strstr(sl_error_text(), "tokens"));
    assert_non_null(strstr(sl_error_text(), asked));
}
EACH_BACKEND_TEST(memory)

static void check_copies(const sl_ops_t *ops, sl_device_t *device)
{
    const char text[] = "to the device and back";
    char back[sizeof(text)] = "";
    void *memory;
    assert_int_equal(ops->alloc(device, sizeof(text), "text", &memory), SL_OK);
    assert_int_equal(ops->upload(device, NULL, memory, text, sizeof(text)), SL_OK);
    assert_int_equal(ops->download(device, NULL, back, memory, sizeof(back)), SL_OK);
    assert_int_equal(ops->synchronize(device, NULL), SL_OK);
    assert_string_equal(back, text);
    assert_int_equal(ops->upload(device, NULL, NULL, NULL, 0), SL_OK);

    /* The same from and to alloc_host() memory, which may not change before synchronize(). */
    void *from, *to;
    assert_int_equal(ops->alloc_host(device, sizeof(text), "text", &from), SL_OK);
    assert_int_equal(ops->alloc_host(device, sizeof(text), "text", &to), SL_OK);
    memset(from, 'x', sizeof(text) - 1);
    ((char *)from)[sizeof(text) - 1] = 0;
    assert_int_equal(ops->upload(device, NULL, memory, from, sizeof(text)), SL_OK);
    assert_int_equal(ops->download(device, NULL, to, memory, sizeof(text)), SL_OK);
    assert_int_equal(ops->synchronize(device, NULL), SL_OK);
    assert_string_equal(to, from);
    ops->free_host(device, from);
    ops->free_host(device, to);
    ops->free(device, memory);
}
EACH_BACKEND_TEST(copies)

static void test_cuda_copies(void **state)
{
    (void)state;
    const sl_ops_t *cuda = NULL;
    sl_device_t *device;
    if (sl_ops_find("cuda", &cuda) != SL_OK ||
        cuda->open(&(sl_device_params_t){0}, &device) != SL_OK) {
        skip();
    }
    check_copies(cuda, device);
    cuda->close(device);
}

static void test_cpu_refuses_bad_parameters(void **state)
{
    (void)state;
    const sl_ops_t *cpu = NULL;
    sl_device_t *device = NULL;
    assert_int_equal(sl_ops_find("cpu", &cpu), SL_OK);
    assert_int_equal(cpu->open(&(sl_device_params_t){.threads = -1}, &device), SL_ERR_CONFIG);
    assert_int_equal(cpu->open(&(sl_device_params_t){.threads = 100000}, &device), SL_ERR_CONFIG);
    assert_non_null(strstr(sl_error_text(), "100000 threads"));
    assert_int_equal(cpu->open(&(sl_device_params_t){.index = 3}, &device), SL_ERR_CONFIG);
    assert_non_null(strstr(sl_error_text(), "device 3"));
    assert_null(device);
}

#define THINGS 103

static void count_things(const void *context, size_t part, size_t parts)
{
    atomic_int *done = *(atomic_int *const *)context;
    size_t begin, end;
    sl_pool_part(THINGS, 4, part, parts, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        atomic_fetch_add(&done[i], 1);
    }
}

/* Every thing is done once in every job, whatever the number of threads and the job's size. */
static void test_pool_does_each_part_once(void **state)
{
    (void)state;
    static atomic_int done[THINGS];
    atomic_int *context = done;
    int runs = 0;
    for (size_t threads = 1; threads <= 5; threads++) {
        sl_pool_t *pool;
        assert_int_equal(sl_pool_create(threads, &pool), SL_OK);
        for (int job = 0; job < 50; job++) {
            sl_pool_run(pool, job % 2 == 0 ? 1e9 : 1, count_things, &context);
            runs++;
            for (size_t i = 0; i < THINGS; i++) {
                assert_int_equal(atomic_load(&done[i]), runs);
            }
        }
        sl_pool_destroy(pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unknown_backend_is_named),
        cmocka_unit_test(test_tables_are_complete),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_cuda_copies),
        cmocka_unit_test(test_cpu_refuses_bad_parameters),
        cmocka_unit_test(test_pool_does_each_part_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
