/*
 * Every case of the table on every backend of this build against the oracle (the CPU backend once
 * for each instruction set this processor has, and with one thread and three), and the oracle's
 * operations for batch invariance and independence. NaN and infinity are compared by place first.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "tests/ops/bind.h"

/* The build makes a program of each test_*.c alone. */
#include "tests/ops/bind.c"
#include "tests/ops/bind_ops.c"
#include "tests/ops/cases.c"

/* Beginning of the descriptions of the cases to run: "linear", say. "": all. */
static const char *wanted = "";

static const sl_ops_t *find(const char *name)
{
    const sl_ops_t *ops = NULL;
    assert_int_equal(sl_ops_find(name, &ops), SL_OK);
    return ops;
}

/* Error allowed, of 1 + |expected|. f32: sums of up to 5,000 terms of order 1 in another order
 * than the oracle's double, exponentials good to 1e-7. bf16: one rounding of the result, and one of
 * what is kept between two products. */
static double tolerance_of(const sl_ops_t *ops)
{
    return ops->act_dtype == SL_DTYPE_F32 ? 1e-5 : 1.2e-2;
}

static void check_cases(const sl_ops_t *ops, sl_device_t *device, const char *label)
{
    const sl_ops_t *ref = find("ref");
    sl_device_t *ref_device;
    assert_int_equal(ref->open(&(sl_device_params_t){0}, &ref_device), SL_OK);
    size_t failed = 0;
    for (size_t i = 0; i < op_case_count; i++) {
        const op_case_t *c = &op_cases[i];
        char text[256];
        op_case_describe(c, text, sizeof(text));
        if ((c->flags & BENCH_ONLY) || strncmp(text, wanted, strlen(wanted)) != 0) {
            continue;
        }
        bind_t expected, got;
        bind_open(&expected, ref, ref_device, c);
        bind_open(&got, ops, device, c);
        bind_run(&expected);
        bind_run(&got);
        bool good = bind_fetch(&expected);
        good = bind_fetch(&got) && good;
        if (!good || !bind_agree(&got, &expected, tolerance_of(ops))) {
            fprintf(stderr, "%s: %s failed\n", label, text);
            failed++;
        }
        bind_close(&got);
        bind_close(&expected);
    }
    ref->close(ref_device);
    assert_int_equal(failed, 0);
}

/* Calls `check` with the CPU backend in each of its forms. */
static void with_each_cpu(void (*check)(const sl_ops_t *, sl_device_t *, const char *))
{
    const sl_ops_t *cpu = find("cpu");
    for (size_t i = 0; sl_isa_at(i) != NULL; i++) {
        for (int threads = 1; threads <= 3; threads += 2) {
            sl_device_t *device;
            char label[64];
            assert_int_equal(cpu->open(&(sl_device_params_t){.threads = threads}, &device), SL_OK);
            device->isa = sl_isa_at(i);
            snprintf(label, sizeof(label), "cpu %s, threads %d", device->isa->name, threads);
            check(cpu, device, label);
            cpu->close(device);
        }
    }
}

static void test_cpu_equals_ref(void **state)
{
    (void)state;
    with_each_cpu(check_cases);
}

static void test_cuda_equals_ref(void **state)
{
    (void)state;
    const sl_ops_t *cuda = NULL;
    sl_device_t *device;
    if (sl_ops_find("cuda", &cuda) != SL_OK ||
        cuda->open(&(sl_device_params_t){0}, &device) != SL_OK) {
        skip();
    }
    check_cases(cuda, device, "cuda");
    cuda->close(device);
}

/* Runs a product of `rows` rows, and each row alone, and compares bits. */
static void check_rows(const sl_ops_t *ops, sl_device_t *device, const op_case_t *c)
{
    bind_t whole;
    bind_open(&whole, ops, device, c);
    bind_run(&whole);
    assert_true(bind_fetch(&whole));
    const char *got = whole.buffers[0].host;
    size_t row_bytes = whole.buffers[0].bytes / c->rows;
    bind_t alone;
    bind_open(&alone, ops, device, c);
    for (uint32_t t = 0; t < c->rows; t++) {
        size_t act = sl_dtype_bytes(ops->act_dtype);
        if (c->op == OP_LINEAR) {
            sl_linear_t p = alone.params.linear;
            p.rows = 1;
            p.x = (const char *)p.x + t * p.k * act;
            p.out = (char *)p.out + t * row_bytes;
            assert_int_equal(ops->linear(device, NULL, &p), SL_OK);
        } else {
            sl_head_linear_t p = alone.params.head_linear;
            p.rows = 1;
            p.x = (const char *)p.x + t * p.x_row_stride * act;
            p.out = (char *)p.out + t * row_bytes;
            assert_int_equal(ops->head_linear(device, NULL, &p), SL_OK);
        }
    }
    assert_true(bind_fetch(&alone));
    assert_memory_equal(got, alone.buffers[0].host, whole.buffers[0].bytes);
    bind_close(&alone);
    bind_close(&whole);
}

/* One expert with `rows` rows between two others, against the plain product of each row. */
static void check_grouped_rows(const sl_ops_t *ops, sl_device_t *device, uint32_t rows)
{
    op_case_t c = {OP_GROUPED_LINEAR, .n = 13, .k = 40, LENS(3, 1, (int32_t)rows, 2)};
    bind_t b;
    bind_open(&b, ops, device, &c);
    bind_run(&b);
    assert_true(bind_fetch(&b));
    const sl_grouped_linear_t *p = &b.params.grouped_linear;
    size_t act = sl_dtype_bytes(ops->act_dtype);
    for (uint32_t r = 1; r <= rows; r++) {
        op_case_t row_case = {OP_LINEAR, .rows = 1, .n = c.n, .k = c.k};
        bind_t row;
        bind_open(&row, ops, device, &row_case);
        row.params.linear.x = (const char *)p->x + r * c.k * act;
        row.params.linear.w = (const char *)p->w + (size_t)c.n * c.k * act;
        bind_run(&row);
        assert_true(bind_fetch(&row));
        assert_memory_equal((const float *)b.buffers[0].host + r * c.n, row.buffers[0].host,
                            c.n * sizeof(float));
        bind_close(&row);
    }
    bind_close(&b);
}

static void check_invariance(const sl_ops_t *ops, sl_device_t *device, const char *label)
{
    (void)label;
    for (uint32_t rows = 1; rows <= 70; rows++) {
        check_rows(ops, device, &(op_case_t){OP_LINEAR, .rows = rows, .n = 38, .k = 83});
        check_rows(ops, device,
                   &(op_case_t){OP_HEAD_LINEAR, .rows = rows, .heads = 2, .n = 11, .k = 64});
        check_grouped_rows(ops, device, rows);
    }
    check_rows(ops, device, &(op_case_t){OP_LINEAR, .rows = 70, .n = 100, .k = 8200});
}

static void test_products_are_batch_invariant(void **state)
{
    (void)state;
    with_each_cpu(check_invariance);
}

/* The number of threads changes no bit. */
static void test_threads_change_nothing(void **state)
{
    (void)state;
    const sl_ops_t *cpu = find("cpu");
    sl_device_t *one, *three;
    assert_int_equal(cpu->open(&(sl_device_params_t){.threads = 1}, &one), SL_OK);
    assert_int_equal(cpu->open(&(sl_device_params_t){.threads = 3}, &three), SL_OK);
    for (size_t i = 0; i < op_case_count; i++) {
        if (op_cases[i].flags & BENCH_ONLY) {
            continue;
        }
        bind_t a, b;
        bind_open(&a, cpu, one, &op_cases[i]);
        bind_open(&b, cpu, three, &op_cases[i]);
        bind_run(&a);
        bind_run(&b);
        assert_true(bind_fetch(&a) && bind_fetch(&b));
        assert_true(bind_equal(&a, &b));
        bind_close(&a);
        bind_close(&b);
    }
    cpu->close(three);
    cpu->close(one);
}

/* test_ops [TEST [OPERATION]]: only the tests, and only the cases, whose names begin so. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu_equals_ref),
        cmocka_unit_test(test_cuda_equals_ref),
        cmocka_unit_test(test_products_are_batch_invariant),
        cmocka_unit_test(test_threads_change_nothing),
    };
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
        wanted = argc > 2 ? argv[2] : "";
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
