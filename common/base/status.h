/*
 * Status codes of every fallible function, grouped by scope. The scope is the recovery:
 *   REQUEST  fail that request, nothing else is disturbed;
 *   PEER     the other side is gone, stale or refuses: try elsewhere;
 *   PROCESS  this process cannot go on: drain what can be drained and exit.
 *
 * The first function that decides an error calls sl_error() with the ids, the expected and the
 * found value; callers propagate the code untouched. The text is kept per thread until the next
 * sl_error() of that thread. Any thread; never blocks.
 */
#ifndef SL_BASE_STATUS_H
#define SL_BASE_STATUS_H

#include <stdbool.h>

typedef enum {
    SL_OK = 0,

    SL_ERR_INVALID = -1,   /* malformed or out of range input */
    SL_ERR_LIMIT = -2,     /* over a stated limit (length, queue, size, depth) */
    SL_ERR_NO_PAGES = -3,  /* not enough free pages now */
    SL_ERR_CANCELED = -4,  /* given up by its owner */
    SL_ERR_DEADLINE = -5,  /* the request's own deadline has passed */
    SL_ERR_NOT_FOUND = -6, /* a named thing does not exist */

    SL_ERR_UNREACHABLE = -100, /* peer not connected, or its connection failed */
    SL_ERR_STALE = -101,       /* older incarnation, generation or attempt */
    SL_ERR_REFUSED = -102,     /* the peer said no, with a reason */
    SL_ERR_TIMEOUT = -103,     /* the peer did not answer in time */
    SL_ERR_AGAIN = -104,       /* would block now; not an error, never logged */

    SL_ERR_IO = -200,          /* operating system call failed */
    SL_ERR_NO_MEMORY = -201,   /* allocation failed or pool does not fit */
    SL_ERR_DEVICE = -202,      /* accelerator or its library failed */
    SL_ERR_DESYNC = -203,      /* ranks of a group disagree on the step */
    SL_ERR_UNSUPPORTED = -204, /* valid, but not something this build does */
    SL_ERR_CONFIG = -205,      /* unknown flag or key, missing or contradictory option */
} sl_status_t;

typedef enum { SL_SCOPE_NONE, SL_SCOPE_REQUEST, SL_SCOPE_PEER, SL_SCOPE_PROCESS } sl_scope_t;

#define SL_MUST_USE __attribute__((warn_unused_result))

sl_scope_t sl_status_scope(sl_status_t status);

/* Stable lower-case name of a code, as it travels in `failed` messages ("invalid", "no_pages"). */
const char *sl_status_name(sl_status_t status);

/* The code of such a name; SL_ERR_UNSUPPORTED for a name this version does not know. */
sl_status_t sl_status_from_name(const char *name);

/* Decides an error: stores the text for this thread, logs it (REQUEST scope at debug level, the
 * rest at error level) and returns `status`. At most 1,023 characters are kept. */
sl_status_t sl_error(sl_status_t status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Text of this thread's last sl_error(); "" if there was none. Valid until the next one. */
const char *sl_error_text(void);

/* Returns early with the status of `call` unless it is SL_OK. */
#define SL_TRY(call)                                                                               \
    do {                                                                                           \
        sl_status_t sl_try_status_ = (call);                                                       \
        if (sl_try_status_ != SL_OK) {                                                             \
            return sl_try_status_;                                                                 \
        }                                                                                          \
    } while (0)

/* Goes to `label` with `status` set unless `call` is SL_OK. `status` is the caller's variable. */
#define SL_TRY_GOTO(status, call, label)                                                           \
    do {                                                                                           \
        (status) = (call);                                                                         \
        if ((status) != SL_OK) {                                                                   \
            goto label;                                                                            \
        }                                                                                          \
    } while (0)

/* Always-on assertion of an invariant of our own code; never for input. Aborts with the place. */
#define SL_ASSERT(cond)                                                                            \
    ((cond) ? (void)0 : sl_assert_fail(#cond, __FILE__, __LINE__, __func__))
_Noreturn void sl_assert_fail(const char *cond, const char *file, int line, const char *func);

#endif
