/* The group's collectives between real processes: values, order of sums, desynchronisation, dead
 * peers, sleeping groups. */
#include "tests/unit/transfer/processes.h"

#include <poll.h>

#include "common/base/clock.h"
#include "common/transfer/group.h"

#define TEST_TIMEOUT_US 20000000u
#define SHORT_TIMEOUT_US 300000u

typedef struct {
    sl_ucx_t *ucx;
    sl_group_t *group;
    sl_bytes_t addresses[PROCESSES_MAX];
} member_t;

static void group_open(process_t *process, uint64_t timeout_us, member_t *member)
{
    CHECK_OK(sl_ucx_create(&member->ucx));
    sl_group_params_t params = {
        .rank = process->rank, .size = process->size, .timeout_us = timeout_us};
    CHECK_OK(sl_group_create(member->ucx, &params, &member->group));
    sl_bytes_t own;
    sl_group_address(member->group, &own);
    process_meet(process, own.data, own.size, member->addresses);
}

static void group_join(process_t *process, uint64_t timeout_us, member_t *member)
{
    group_open(process, timeout_us, member);
    CHECK_OK(sl_group_connect(member->group, member->addresses, process->size));
}

static void group_leave(process_t *process, member_t *member)
{
    for (uint32_t r = 0; r < process->size; r++) {
        free(member->addresses[r].data);
    }
    sl_group_destroy(member->group);
    sl_ucx_destroy(member->ucx);
}

/* A value that depends on who made it and where it stands; sums of it are inexact in float, so
 * that the order of summation shows. */
static float value(uint32_t rank, size_t i)
{
    return 1.0f / (float)(3 + rank * 7 + i % 1013) + (float)(rank + 1) * 1000.0f;
}

static float value_sum(uint32_t size, size_t i)
{
    float sum = value(0, i);
    for (uint32_t r = 1; r < size; r++) {
        sum += value(r, i);
    }
    return sum;
}

static void check_exchange(process_t *process, sl_group_t *group)
{
    uint64_t last = 0;
    for (uint32_t step = 0; step < 50; step++) {
        sl_step_record_t mine = {.plan_bytes = step % 3, .tokens = process->rank * 100 + step};
        mine.leaves = step % 2;
        mine.extra = ~(uint64_t)process->rank;
        sl_step_record_t records[PROCESSES_MAX];
        CHECK_OK(sl_group_exchange(group, &mine, records));
        for (uint32_t r = 0; r < process->size; r++) {
            CHECK(records[r].sequence == records[0].sequence && records[r].sequence > last);
            CHECK(records[r].plan_bytes == step % 3 && records[r].tokens == r * 100 + step);
            CHECK(records[r].leaves == step % 2 && records[r].extra == ~(uint64_t)r);
        }
        last = records[0].sequence;
    }
}

/* counts[r] of a shape: all equal, growing by rank, some zero, all zero. */
static void shape(uint32_t kind, uint32_t size, size_t unit, size_t *counts)
{
    for (uint32_t r = 0; r < size; r++) {
        counts[r] = kind == 0 ? unit : kind == 1 ? unit * r + 1 : kind == 2 ? (r % 2) * unit : 0;
    }
}

static size_t sum_of(const size_t *counts, uint32_t count)
{
    size_t sum = 0;
    for (uint32_t r = 0; r < count; r++) {
        sum += counts[r];
    }
    return sum;
}

static void check_gather(process_t *process, sl_group_t *group, const size_t *counts, bool in_place)
{
    size_t total = sum_of(counts, process->size), own_at = sum_of(counts, process->rank);
    size_t bytes[PROCESSES_MAX];
    float *out = malloc((total + 1) * sizeof(float));
    float *mine = in_place ? out + own_at : malloc((counts[process->rank] + 1) * sizeof(float));
    for (size_t i = 0; i < total + 1; i++) {
        out[i] = -1;
    }
    for (size_t i = 0; i < counts[process->rank]; i++) {
        mine[i] = value(process->rank, i);
    }
    for (uint32_t r = 0; r < process->size; r++) {
        bytes[r] = counts[r] * sizeof(float);
    }
    CHECK_OK(sl_group_all_gather(group, mine, bytes, out));
    size_t at = 0;
    for (uint32_t r = 0; r < process->size; r++) {
        for (size_t i = 0; i < counts[r]; i++, at++) {
            CHECK(out[at] == value(r, i));
        }
    }
    CHECK(out[total] == -1);
    if (!in_place) {
        free(mine);
    }
    free(out);
}

static void check_scatter(process_t *process, sl_group_t *group, const size_t *counts,
                          bool in_place)
{
    size_t total = sum_of(counts, process->size), own_at = sum_of(counts, process->rank);
    float *in = malloc((total + 1) * sizeof(float));
    for (size_t i = 0; i < total; i++) {
        in[i] = value(process->rank, i);
    }
    float *out = in_place ? in + own_at : malloc((counts[process->rank] + 1) * sizeof(float));
    if (!in_place) {
        out[counts[process->rank]] = -1;
    }
    CHECK_OK(sl_group_reduce_scatter(group, in, counts, out));
    for (size_t i = 0; i < counts[process->rank]; i++) {
        CHECK(out[i] == value_sum(process->size, own_at + i));
    }
    if (!in_place) {
        CHECK(out[counts[process->rank]] == -1);
        free(out);
    }
    free(in);
}

static void check_reduce(process_t *process, sl_group_t *group, size_t count)
{
    float *data = malloc((count + 1) * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        data[i] = value(process->rank, i);
    }
    data[count] = -1;
    CHECK_OK(sl_group_all_reduce(group, data, count));
    for (size_t i = 0; i < count; i++) {
        CHECK(data[i] == value_sum(process->size, i));
    }
    CHECK(data[count] == -1);
    free(data);
}

static void check_broadcast(process_t *process, sl_group_t *group, size_t count)
{
    uint32_t *data = malloc((count + 1) * sizeof(*data));
    for (uint32_t root = 0; root < process->size; root++) {
        for (size_t i = 0; i < count; i++) {
            data[i] = process->rank == root ? root * 1000 + (uint32_t)i : 0;
        }
        CHECK_OK(sl_group_broadcast(group, root, data, count * sizeof(*data)));
        for (size_t i = 0; i < count; i++) {
            CHECK(data[i] == root * 1000 + (uint32_t)i);
        }
    }
    free(data);
}

static void run_all_operations(process_t *process)
{
    static const size_t units[] = {1, 37, 2048, 70001};
    member_t member;
    group_join(process, TEST_TIMEOUT_US, &member);
    check_exchange(process, member.group);
    for (size_t u = 0; u < sizeof(units) / sizeof(units[0]); u++) {
        for (uint32_t kind = 0; kind < 4; kind++) {
            size_t counts[PROCESSES_MAX];
            shape(kind, process->size, units[u], counts);
            for (int in_place = 0; in_place < 2; in_place++) {
                check_gather(process, member.group, counts, in_place);
                check_scatter(process, member.group, counts, in_place);
            }
        }
        check_reduce(process, member.group, units[u]);
        check_broadcast(process, member.group, units[u]);
    }
    check_reduce(process, member.group, 0);
    check_broadcast(process, member.group, 0);
    group_leave(process, &member);
}

static void test_operations(void **state)
{
    (void)state;
    for (uint32_t size = 1; size <= 4; size *= 2) {
        run_processes(size, run_all_operations, NULL, NULL);
    }
}

static void run_all_operations_tcp(process_t *process)
{
    setenv("UCX_TLS", "tcp,self", 1);
    run_all_operations(process);
}

static void test_operations_tcp(void **state)
{
    (void)state;
    run_processes(3, run_all_operations_tcp, NULL, NULL);
}

/* The root sends as fast as it can while the others have not even begun. */
static void run_broadcasts(process_t *process)
{
    member_t member;
    group_join(process, TEST_TIMEOUT_US, &member);
    for (uint32_t i = 0; i < 500; i++) {
        uint32_t data[64] = {0};
        data[0] = process->rank == 0 ? i : 0;
        data[63] = process->rank == 0 ? ~i : 0;
        CHECK_OK(sl_group_broadcast(member.group, 0, data, sizeof(data)));
        CHECK(data[0] == i && data[63] == ~i);
    }
    group_leave(process, &member);
}

static void test_broadcasts_in_a_row(void **state)
{
    (void)state;
    run_processes(3, run_broadcasts, NULL, NULL);
}

/* ---- out of step ---- */

typedef enum { OTHER_OPERATION, OTHER_SIZE_LONG, OTHER_SIZE_SHORT, EXTRA_OPERATION } desync_t;

static void run_desync(process_t *process)
{
    desync_t kind = *(const desync_t *)process->arg;
    member_t member;
    group_join(process, TEST_TIMEOUT_US, &member);
    bool odd = process->rank == 1;
    uint8_t out[4096], mine[2048] = {0};
    size_t bytes[2] = {64, 64};
    sl_step_record_t record = {0}, records[2];
    if (!odd && kind == EXTRA_OPERATION) {
        /* The root of a broadcast waits for nobody, so only what follows shows it. */
        CHECK_OK(sl_group_broadcast(member.group, 0, mine, 64));
    }
    if (kind == OTHER_SIZE_LONG || kind == OTHER_SIZE_SHORT) {
        bytes[1] = odd ? (kind == OTHER_SIZE_LONG ? 2000 : 8) : 64;
    }
    sl_status_t status;
    if (odd && kind == OTHER_OPERATION) {
        status = sl_group_exchange(member.group, &record, records);
    } else {
        status = sl_group_all_gather(member.group, mine, bytes, out);
    }
    if (odd && (kind == OTHER_SIZE_LONG || kind == OTHER_SIZE_SHORT)) {
        /* What rank 0 sent is what this rank expects; it is rank 0 that notices. */
        CHECK(status == SL_OK);
    } else {
        CHECK(status == SL_ERR_DESYNC);
        CHECK(strstr(sl_error_text(), odd ? "from rank 0" : "from rank 1") != NULL);
        /* The group is over, whatever is asked of it next. */
        CHECK(sl_group_exchange(member.group, &record, records) == SL_ERR_DESYNC);
        CHECK(sl_group_all_reduce(member.group, (float *)out, 4) == SL_ERR_DESYNC);
        CHECK(sl_group_arm(member.group) == SL_ERR_DESYNC);
    }
    process_barrier(process);
    group_leave(process, &member);
}

static void test_desync(void **state)
{
    (void)state;
    for (desync_t kind = OTHER_OPERATION; kind <= EXTRA_OPERATION; kind++) {
        run_processes(2, run_desync, &kind, NULL);
    }
}

/* Text of a desync names both sides' operation, number and size. */
static void run_desync_text(process_t *process)
{
    member_t member;
    group_join(process, TEST_TIMEOUT_US, &member);
    uint8_t out[256] = {0};
    size_t bytes[2] = {16, 16};
    sl_step_record_t record = {0}, records[2];
    if (process->rank == 0) {
        CHECK_STATUS(sl_group_all_gather(member.group, out, bytes, out), SL_ERR_DESYNC);
        CHECK(strstr(sl_error_text(), "all-gather 2 with 16 bytes") != NULL);
        CHECK(strstr(sl_error_text(), "exchange 2 with 32 bytes") != NULL);
    } else {
        CHECK_STATUS(sl_group_exchange(member.group, &record, records), SL_ERR_DESYNC);
        CHECK(strstr(sl_error_text(), "exchange 2 with 32 bytes") != NULL);
        CHECK(strstr(sl_error_text(), "all-gather 2 with 16 bytes") != NULL);
    }
    process_barrier(process);
    group_leave(process, &member);
}

static void test_desync_names_both_values(void **state)
{
    (void)state;
    run_processes(2, run_desync_text, NULL, NULL);
}

/* ---- dead peers ---- */

static void run_killed(process_t *process)
{
    member_t member;
    group_join(process, SHORT_TIMEOUT_US, &member);
    sl_step_record_t record = {0}, records[PROCESSES_MAX];
    CHECK_OK(sl_group_exchange(member.group, &record, records));
    if (process->rank == 2) {
        kill(getpid(), SIGKILL);
    }
    uint64_t begin_us = sl_now_us();
    sl_status_t status = SL_OK;
    for (int i = 0; i < 3 && status == SL_OK; i++) {
        status = sl_group_exchange(member.group, &record, records);
    }
    CHECK(status == SL_ERR_TIMEOUT);
    CHECK(strstr(sl_error_text(), " 2") != NULL);
    uint64_t took_us = sl_now_us() - begin_us;
    CHECK(took_us >= SHORT_TIMEOUT_US && took_us < SHORT_TIMEOUT_US + 5000000);
    group_leave(process, &member);
}

static void test_killed_rank_is_a_timeout(void **state)
{
    (void)state;
    static const int expected[] = {0, 0, PROCESS_KILLED};
    run_processes(3, run_killed, NULL, expected);
}

/* ---- sleeping groups ---- */

static void run_sleeping(process_t *process)
{
    member_t member;
    group_join(process, TEST_TIMEOUT_US, &member);
    sl_step_record_t record = {0}, records[PROCESSES_MAX];
    for (int round = 0; round < 20; round++) {
        if (process->rank != 0) {
            sl_status_t armed;
            while ((armed = sl_group_arm(member.group)) == SL_ERR_AGAIN &&
                   !sl_group_peer_waits(member.group)) {
            }
            CHECK(armed == SL_OK);
            process_barrier(process); /* rank 0 posts its record only now */
            struct pollfd fd = {.fd = sl_group_fd(member.group), .events = POLLIN};
            while (!sl_group_peer_waits(member.group)) {
                CHECK(poll(&fd, 1, 10000) == 1);
                sl_status_t again = sl_group_arm(member.group);
                CHECK(again == SL_OK || again == SL_ERR_AGAIN);
            }
            CHECK(sl_group_arm(member.group) == SL_ERR_AGAIN);
        } else {
            CHECK(!sl_group_peer_waits(member.group));
            process_barrier(process);
        }
        CHECK_OK(sl_group_exchange(member.group, &record, records));
        process_barrier(process);
    }
    group_leave(process, &member);
}

static void test_sleeping_group_is_woken(void **state)
{
    (void)state;
    run_processes(2, run_sleeping, NULL, NULL);
}

/* ---- addresses ---- */

static void run_bad_addresses(process_t *process)
{
    member_t member;
    group_open(process, SHORT_TIMEOUT_US, &member);
    sl_bytes_t *addresses = member.addresses;
    CHECK_STATUS(sl_group_connect(member.group, addresses, 1), SL_ERR_DESYNC);
    sl_bytes_t swapped[2] = {addresses[1], addresses[0]};
    CHECK_STATUS(sl_group_connect(member.group, swapped, 2), SL_ERR_DESYNC);
    sl_bytes_t cut[2] = {addresses[0], addresses[1]};
    cut[process->rank == 0 ? 1 : 0].size -= 1;
    CHECK_STATUS(sl_group_connect(member.group, cut, 2), SL_ERR_INVALID);
    addresses[1].data[addresses[1].size / 2] ^= 0x40;
    CHECK_STATUS(sl_group_connect(member.group, addresses, 2), SL_ERR_INVALID);
    process_barrier(process);
    group_leave(process, &member);
}

static void test_bad_addresses(void **state)
{
    (void)state;
    run_processes(2, run_bad_addresses, NULL, NULL);
}

static void run_bad_params(process_t *process)
{
    (void)process;
    sl_ucx_t *ucx;
    sl_group_t *group = NULL;
    CHECK_OK(sl_ucx_create(&ucx));
    static const sl_group_params_t bad[] = {
        {.rank = 0, .size = 0}, {.rank = 2, .size = 2}, {.rank = 0, .size = 65}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_STATUS(sl_group_create(ucx, &bad[i], &group), SL_ERR_CONFIG);
        CHECK(group == NULL);
    }
    sl_ucx_destroy(ucx);
}

static void test_bad_params(void **state)
{
    (void)state;
    run_processes(1, run_bad_params, NULL, NULL);
}

int main(int argc, char **argv)
{
    (void)argc;
    restart_without_memory_hooks(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_operations),
        cmocka_unit_test(test_operations_tcp),
        cmocka_unit_test(test_broadcasts_in_a_row),
        cmocka_unit_test(test_desync),
        cmocka_unit_test(test_desync_names_both_values),
        cmocka_unit_test(test_killed_rank_is_a_timeout),
        cmocka_unit_test(test_sleeping_group_is_woken),
        cmocka_unit_test(test_bad_addresses),
        cmocka_unit_test(test_bad_params),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
