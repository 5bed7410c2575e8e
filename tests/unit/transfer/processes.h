/*
 * Tests of common/transfer run every rank as a process of its own, forked before UCX starts in it.
 * The test's own process only starts them, passes their addresses around and judges their exits; it
 * never uses UCX itself.
 *
 * A rank reports a failed check by its exit code 1. It leaves through exit(), so that a leak check
 * runs in it.
 */
#ifndef SL_TESTS_TRANSFER_PROCESSES_H
#define SL_TESTS_TRANSFER_PROCESSES_H

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/wire/messages.h"

#define PROCESSES_MAX 8
#define PROCESS_KILLED (-1) /* expected "exit code" of a rank that kills itself */

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: check failed: %s (last error: %s)\n", __FILE__, __LINE__,      \
                    #cond, sl_error_text());                                                       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_STATUS(call, expected)                                                               \
    do {                                                                                           \
        sl_status_t check_status_ = (call);                                                        \
        if (check_status_ != (expected)) {                                                         \
            fprintf(stderr, "%s:%d: %s is %s, expected %s (%s)\n", __FILE__, __LINE__, #call,      \
                    sl_status_name(check_status_), sl_status_name(expected), sl_error_text());     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define CHECK_OK(call) CHECK_STATUS(call, SL_OK)

typedef struct {
    uint32_t rank, size;
    int fd; /* to the test's process: the meeting place of the ranks */
    const void *arg;
} process_t;

typedef void (*process_main_t)(process_t *process);

static inline bool pipe_read(int fd, void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t got = read(fd, (char *)data + done, bytes - done);
        if (got <= 0) {
            return false;
        }
        done += (size_t)got;
    }
    return true;
}

static inline bool pipe_write(int fd, const void *data, size_t bytes)
{
    return send(fd, data, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
}

#if defined(__SANITIZE_THREAD__)
/* What is written in the reader's transfer thread is ordered before the reader's look at
 * the page by way of the writer's commit, which may have reached another process; the sanitizer
 * sees only this one. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
    return "race:ucp_put_handler\nrace:sl_data_on_message\n";
}
#endif

/* UCX reads this when it is loaded, before main(): its memory hooks do not go with sanitizers. */
static inline void restart_without_memory_hooks(char **argv)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    if (getenv("UCX_MEM_EVENTS") == NULL) {
        setenv("UCX_MEM_EVENTS", "n", 1);
        execv("/proc/self/exe", argv);
    }
#else
    (void)argv;
#endif
}

/* Everyone brings bytes, everyone gets all of them (malloc'ed, in rank order). Also a barrier. A
 * rank that has died brings none. */
static inline void process_meet(process_t *process, const void *mine, size_t bytes, sl_bytes_t *all)
{
    CHECK(pipe_write(process->fd, &bytes, sizeof(bytes)));
    CHECK(bytes == 0 || pipe_write(process->fd, mine, bytes));
    for (uint32_t r = 0; r < process->size; r++) {
        sl_bytes_t got = {0};
        CHECK(pipe_read(process->fd, &got.size, sizeof(got.size)));
        got.data = malloc(got.size + 1);
        CHECK(got.size == 0 || pipe_read(process->fd, got.data, got.size));
        if (all != NULL) {
            all[r] = got;
        } else {
            free(got.data);
        }
    }
}

static inline void process_barrier(process_t *process)
{
    process_meet(process, NULL, 0, NULL);
}

/* One round of process_meet() on the test's side; false once all ranks are gone. */
static inline bool serve_meeting(const int *fds, bool *open, uint32_t size)
{
    sl_bytes_t all[PROCESSES_MAX] = {0};
    uint32_t present = 0;
    for (uint32_t r = 0; r < size; r++) {
        size_t bytes;
        open[r] = open[r] && pipe_read(fds[r], &bytes, sizeof(bytes));
        if (open[r]) {
            all[r].data = malloc(bytes + 1);
            all[r].size = bytes;
            open[r] = pipe_read(fds[r], all[r].data, bytes);
            present++;
        }
    }
    for (uint32_t r = 0; r < size; r++) {
        for (uint32_t of = 0; open[r] && of < size; of++) {
            open[r] = pipe_write(fds[r], &all[of].size, sizeof(all[of].size)) &&
                      (all[of].size == 0 || pipe_write(fds[r], all[of].data, all[of].size));
        }
    }
    for (uint32_t r = 0; r < size; r++) {
        free(all[r].data);
    }
    return present > 0;
}

/* Runs `main` in `size` processes and asserts their exit codes (NULL: all 0). */
static inline void run_processes(uint32_t size, process_main_t main, const void *arg,
                                 const int *expected)
{
    int fds[PROCESSES_MAX];
    pid_t pids[PROCESSES_MAX];
    bool open[PROCESSES_MAX];
    fflush(NULL);
    for (uint32_t r = 0; r < size; r++) {
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        pids[r] = fork();
        if (pids[r] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            close(pair[0]);
            for (uint32_t other = 0; other < r; other++) {
                close(fds[other]);
            }
            process_t process = {.rank = r, .size = size, .fd = pair[1], .arg = arg};
            main(&process);
            exit(0);
        }
        close(pair[1]);
        fds[r] = pair[0];
        open[r] = true;
    }
    while (serve_meeting(fds, open, size)) {
    }
    bool failed = false;
    for (uint32_t r = 0; r < size; r++) {
        int status = 0;
        close(fds[r]);
        waitpid(pids[r], &status, 0);
        int code = WIFEXITED(status) ? WEXITSTATUS(status)
                                     : (WTERMSIG(status) == SIGKILL ? PROCESS_KILLED : 1000);
        if (code != (expected == NULL ? 0 : expected[r])) {
            fprintf(stderr, "rank %u ended with %d (wait status %x)\n", r, code, status);
            failed = true;
        }
    }
    assert_false(failed);
}

#endif
