/*
 * One option table per program: it generates flags, environment, config file, --help and the
 * sample config. Order of strength: flag, environment, file, default. Unknown flags and keys are
 * fatal, with the nearest known name in the text; environment variables of other programs are
 * ignored, since one environment is often shared by all of them.
 *
 *   table name "token-budget"  ->  flag --token-budget N or --token-budget=N
 *                                  environment SLUICE_TOKEN_BUDGET
 *                                  file key    token_budget = N     (# starts a comment)
 *
 * A value in a file may stand in double quotes, which may hold '#'. An empty environment variable
 * counts as not set. Of a flag given twice the last one holds; a key given twice is an error.
 *
 * Built-in flags of every program: --help, --version, --config FILE, --print-config.
 * Main thread, at start only.
 */
#ifndef SL_BASE_OPTIONS_H
#define SL_BASE_OPTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"

typedef enum {
    SL_OPTION_STRING, /* const char *; points into the options' own storage */
    SL_OPTION_U64,    /* uint64_t, with bounds; suffixes k, m, g (powers of 1024) are accepted */
    SL_OPTION_F64,    /* double, with bounds; nan and inf are refused */
    SL_OPTION_BOOL,   /* bool; --x, --no-x, x = true|false */
    SL_OPTION_CHOICE, /* int: the index of the word in `choices` */
    SL_OPTION_GROUP,  /* no option: `name` heads those that follow in --help and the sample file */
} sl_option_kind_t;

typedef struct {
    const char *name;         /* lower case, words joined by '-' */
    sl_option_kind_t kind;
    size_t offset;            /* of the field in the program's options struct */
    const char *default_text; /* as a user would write it; NULL: the option is required */
    const char *help;         /* one sentence, with the unit */
    double min, max;          /* U64 and F64: inclusive bounds; both 0: any value */
    const char *choices;      /* CHOICE: words joined by '|' */
} sl_option_t;

typedef struct {
    const char *program;      /* "sluice-router" */
    const char *summary;      /* one sentence for --help */
    const sl_option_t *table;
    size_t count;
} sl_options_t;

typedef enum { SL_OPTIONS_RUN, SL_OPTIONS_EXIT } sl_options_action_t;

/*
 * Fills `out` (the program's zeroed struct). *action_p is SL_OPTIONS_EXIT when --help, --version
 * or --print-config was asked for and printed to stdout. SL_ERR_CONFIG names the flag or key, what
 * was expected and what was found. Strings live until the process ends.
 */
SL_MUST_USE sl_status_t sl_options_parse(const sl_options_t *options, int argc, char **argv,
                                         void *out, sl_options_action_t *action_p);

void sl_options_print_help(const sl_options_t *options, FILE *file);
void sl_options_print_config(const sl_options_t *options, FILE *file);

#endif
