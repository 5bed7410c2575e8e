/* The progress bar: on a pseudo-terminal it draws and completes its line, elsewhere it is silent.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/progress.h"

static void run(int fd, const char *label)
{
    sl_progress_t progress;
    int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0 && dup2(fd, STDERR_FILENO) >= 0);
    sl_progress_begin(&progress, label, 4u << 20);
    for (int i = 0; i < 1000; i++) {
        sl_progress_add(&progress, (4u << 20) / 1000);
    }
    sl_progress_add(&progress, 1u << 20); /* past the end is still the end */
    sl_progress_end(&progress);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
}

/* Reads until `last` has come, or ten seconds have passed. */
static void read_until(int fd, const char *last, char *text, size_t size)
{
    size_t used = 0;
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    text[0] = '\0';
    while (strstr(text, last) == NULL && used + 1 < size) {
        assert_int_equal(poll(&poll_fd, 1, 10000), 1);
        ssize_t got = read(fd, text + used, size - 1 - used);
        assert_true(got > 0);
        used += (size_t)got;
        text[used] = '\0';
    }
}

static void test_terminal(void **state)
{
    (void)state;
    static char text[65536], label[1000];
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(master >= 0);
    assert_int_equal(grantpt(master), 0);
    assert_int_equal(unlockpt(master), 0);
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    assert_true(slave >= 0);
    run(slave, "loading weights");
    read_until(master, "\n", text, sizeof(text));
    assert_non_null(strstr(text, "\rloading weights ["));
    assert_non_null(strstr(text, "  0%"));
    assert_non_null(strstr(text, "100%"));
    assert_non_null(strstr(text, "/4.0 MiB"));
    /* a thousand steps within moments: nothing like a thousand lines */
    size_t draws = 0;
    for (const char *at = text; (at = strstr(at, "\rloading")) != NULL; at++) {
        draws++;
    }
    assert_true(draws >= 2 && draws < 100);
    memset(label, 'x', sizeof(label) - 1);
    run(slave, label);
    read_until(master, "\n", text, sizeof(text));
    assert_non_null(strstr(text, "100%"));
    close(slave);
    close(master);
}

static void test_elsewhere(void **state)
{
    (void)state;
    int ends[2];
    char byte;
    assert_int_equal(pipe(ends), 0);
    run(ends[1], "loading");
    close(ends[1]);
    assert_int_equal(read(ends[0], &byte, 1), 0); /* nothing but the end */
    close(ends[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_terminal),
                                       cmocka_unit_test(test_elsewhere)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
