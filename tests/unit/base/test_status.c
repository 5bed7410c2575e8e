/* Status codes, their names and scopes, and the error text of a thread. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/log.h"
#include "common/base/status.h"

static const sl_status_t all[] = {
    SL_OK,           SL_ERR_INVALID,     SL_ERR_LIMIT,       SL_ERR_NO_PAGES,  SL_ERR_CANCELED,
    SL_ERR_DEADLINE, SL_ERR_NOT_FOUND,   SL_ERR_UNREACHABLE, SL_ERR_STALE,     SL_ERR_REFUSED,
    SL_ERR_TIMEOUT,  SL_ERR_AGAIN,       SL_ERR_IO,          SL_ERR_NO_MEMORY, SL_ERR_DEVICE,
    SL_ERR_DESYNC,   SL_ERR_UNSUPPORTED, SL_ERR_CONFIG};
#define COUNT (sizeof(all) / sizeof(all[0]))

static void test_names(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT; i++) {
        const char *name = sl_status_name(all[i]);
        assert_string_not_equal(name, "unknown");
        assert_int_equal(sl_status_from_name(name), all[i]);
        for (size_t j = 0; j < i; j++) {
            assert_string_not_equal(name, sl_status_name(all[j]));
        }
    }
    assert_string_equal(sl_status_name((sl_status_t)-999), "unknown");
    assert_int_equal(sl_status_from_name("from_the_future"), SL_ERR_UNSUPPORTED);
}

static void test_scopes(void **state)
{
    (void)state;
    assert_int_equal(sl_status_scope(SL_OK), SL_SCOPE_NONE);
    for (size_t i = 1; i < COUNT; i++) {
        sl_scope_t expected = all[i] > -100   ? SL_SCOPE_REQUEST
                              : all[i] > -200 ? SL_SCOPE_PEER
                                              : SL_SCOPE_PROCESS;
        assert_int_equal(sl_status_scope(all[i]), expected);
    }
}

static void *error_elsewhere(void *text)
{
    (void)sl_error(SL_ERR_LIMIT, "elsewhere");
    snprintf(text, 32, "%s", sl_error_text());
    return NULL;
}

static void test_text(void **state)
{
    (void)state;
    char other[32] = "", large[3000];
    pthread_t thread;
    assert_int_equal(sl_error(SL_ERR_INVALID, "page %d of %s", 7, "here"), SL_ERR_INVALID);
    assert_string_equal(sl_error_text(), "page 7 of here");
    assert_int_equal(pthread_create(&thread, NULL, error_elsewhere, other), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_string_equal(other, "elsewhere");
    assert_string_equal(sl_error_text(), "page 7 of here"); /* each thread has its own */
    (void)sl_error(SL_ERR_INVALID, "again: %s", sl_error_text());
    assert_string_equal(sl_error_text(), "again: page 7 of here");
    memset(large, 'x', sizeof(large) - 1);
    large[sizeof(large) - 1] = '\0';
    (void)sl_error(SL_ERR_INVALID, "%s", large);
    assert_int_equal(strlen(sl_error_text()), 1023);
}

static sl_status_t tries(sl_status_t first, int *reached)
{
    SL_TRY(first);
    *reached += 1;
    return SL_OK;
}

static sl_status_t tries_goto(sl_status_t first, int *undone)
{
    sl_status_t status;
    SL_TRY_GOTO(status, first, undo);
    return SL_OK;
undo:
    *undone += 1;
    return status;
}

static void test_try(void **state)
{
    (void)state;
    int count = 0;
    assert_int_equal(tries(SL_ERR_STALE, &count), SL_ERR_STALE);
    assert_int_equal(count, 0);
    assert_int_equal(tries(SL_OK, &count), SL_OK);
    assert_int_equal(count, 1);
    assert_int_equal(tries_goto(SL_ERR_IO, &count), SL_ERR_IO);
    assert_int_equal(count, 2);
    assert_int_equal(tries_goto(SL_OK, &count), SL_OK);
    assert_int_equal(count, 2);
}

/* What a child with its standard error in a pipe writes there; how it ended in *status_p. */
static void run_child(void (*body)(void), char *text, size_t size, int *status_p)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    assert_true(child > 0);
    close(ends[1]);
    size_t used = 0;
    ssize_t got;
    while (used + 1 < size && (got = read(ends[0], text + used, size - 1 - used)) > 0) {
        used += (size_t)got;
    }
    text[used] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, status_p, 0), child);
}

static void assert_in_child(void)
{
    int pages = 3;
    SL_ASSERT(pages == 4);
}

static void test_assert(void **state)
{
    (void)state;
    char text[4096];
    int status = 0;
    SL_ASSERT(1 + 1 == 2);
    run_child(assert_in_child, text, sizeof(text), &status);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    assert_non_null(strstr(text, "pages == 4"));
    assert_non_null(strstr(text, "assert_in_child"));
}

static void log_in_child(void)
{
    char large[4000];
    uint64_t last_us = 0;
    sl_log_set_level(SL_LOG_INFO);
    sl_log_set_name("decode/0/1");
    sl_log_debug("not shown");
    sl_log_info("request %d", 5);
    (void)sl_error(SL_ERR_NO_PAGES, "not shown either: the request's own affair");
    (void)sl_error(SL_ERR_DEVICE, "shown");
    for (int i = 0; i < 100; i++) {
        if (sl_log_allowed(&last_us, 60000000)) {
            sl_log_warn("once");
        }
    }
    memset(large, 'y', sizeof(large) - 1);
    large[sizeof(large) - 1] = '\0';
    sl_log_info("%s", large);
}

static void test_log(void **state)
{
    (void)state;
    char text[8192];
    int status = 0, lines = 0;
    run_child(log_in_child, text, sizeof(text), &status);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_null(strstr(text, "not shown"));
    assert_non_null(strstr(text, "Z info decode/0/1: request 5\n"));
    assert_non_null(strstr(text, "Z error decode/0/1: device: shown\n"));
    for (const char *at = text; (at = strchr(at, '\n')) != NULL; at++) {
        lines++;
    }
    assert_int_equal(lines, 4); /* request, shown, once, and one shortened line */
    assert_int_equal(text[strlen(text) - 1], '\n');
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_names),  cmocka_unit_test(test_scopes),
                                       cmocka_unit_test(test_text),   cmocka_unit_test(test_try),
                                       cmocka_unit_test(test_assert), cmocka_unit_test(test_log)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
