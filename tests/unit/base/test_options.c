/* The option table: every source, every kind, every mistake, and the sample file read back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/log.h"
#include "common/base/options.h"

typedef struct {
    const char *model;
    uint64_t token_budget;
    uint64_t any;
    double wait_s;
    bool fast;
    int attention;
} program_t;

#define AT(field) offsetof(program_t, field)
static const sl_option_t table[] = {
    {.name = "Model", .kind = SL_OPTION_GROUP},
    {.name = "model", .kind = SL_OPTION_STRING, .offset = AT(model), .help = "Directory."},
    {.name = "Speed", .kind = SL_OPTION_GROUP},
    {.name = "token-budget",
     .kind = SL_OPTION_U64,
     .offset = AT(token_budget),
     .default_text = "8k",
     .help = "Tokens of one forward pass.",
     .min = 1,
     .max = 1048576},
    {.name = "any",
     .kind = SL_OPTION_U64,
     .offset = AT(any),
     .default_text = "0",
     .help = "Any number at all."},
    {.name = "wait-s",
     .kind = SL_OPTION_F64,
     .offset = AT(wait_s),
     .default_text = "1.5",
     .help = "Seconds.",
     .min = 0.25,
     .max = 60},
    {.name = "fast",
     .kind = SL_OPTION_BOOL,
     .offset = AT(fast),
     .default_text = "true",
     .help = "Whether."},
    {.name = "attention",
     .kind = SL_OPTION_CHOICE,
     .offset = AT(attention),
     .default_text = "dp",
     .help = "Mode.",
     .choices = "dp|tp|dp-wide"},
};
static const sl_options_t options = {.program = "sluice-test",
                                     .summary = "A program.",
                                     .table = table,
                                     .count = sizeof(table) / sizeof(table[0])};

/* Parses the arguments up to NULL. */
static sl_status_t parse(program_t *out, sl_options_action_t *action_p, const char *first, ...)
{
    char *argv[16] = {(char *)"sluice-test"};
    int argc = 1;
    va_list args;
    va_start(args, first);
    for (const char *arg = first; arg != NULL; arg = va_arg(args, const char *)) {
        argv[argc++] = (char *)arg;
    }
    va_end(args);
    *out = (program_t){0};
    return sl_options_parse(&options, argc, argv, out, action_p);
}

static void check_text(const char *word)
{
    if (strstr(sl_error_text(), word) == NULL) {
        fail_msg("expected \"%s\" in the error, found: %s", word, sl_error_text());
    }
}

static void test_defaults_and_flags(void **state)
{
    (void)state;
    program_t out;
    sl_options_action_t action = SL_OPTIONS_EXIT;
    assert_int_equal(parse(&out, &action, "--model", "/m", NULL), SL_OK);
    assert_int_equal(action, SL_OPTIONS_RUN);
    assert_string_equal(out.model, "/m");
    assert_int_equal(out.token_budget, 8192);
    assert_true(out.wait_s == 1.5);
    assert_true(out.fast);
    assert_int_equal(out.attention, 0);
    assert_int_equal(parse(&out, &action, "--model=/a=b", "--token-budget", "1m", "--no-fast",
                           "--wait-s=0.25", "--attention", "dp-wide", "--any=3g", NULL),
                     SL_OK);
    assert_string_equal(out.model, "/a=b");
    assert_int_equal(out.token_budget, 1048576);
    assert_true(out.any == 3ull << 30);
    assert_true(out.wait_s == 0.25);
    assert_false(out.fast);
    assert_int_equal(out.attention, 2);
    /* of a flag given twice the last one holds */
    assert_int_equal(parse(&out, &action, "--model=", "--fast=false", "--fast", "--attention=dp",
                           "--attention=tp", NULL),
                     SL_OK);
    assert_string_equal(out.model, "");
    assert_true(out.fast);
    assert_int_equal(out.attention, 1);
    assert_int_equal(parse(&out, &action, "--model=m", "--any=18446744073709551615", NULL), SL_OK);
    assert_true(out.any == UINT64_MAX);
}

static void test_bad_flags(void **state)
{
    (void)state;
    static const struct {
        const char *args[2];
        const char *words[3];
    } cases[] = {
        {{"--token-bugdet=5"}, {"unknown flag --token-bugdet", "nearest known is --token-budget"}},
        {{"--modell", "x"}, {"unknown flag --modell", "--model"}},
        {{"--no-fats"}, {"unknown flag --no-fats", "--no-fast"}},
        {{"--hlep"}, {"unknown flag --hlep", "--help"}},
        {{"--no-model"}, {"unknown flag --no-model"}},
        {{"--no-fast=true"}, {"unknown flag --no-fast", "--no-fast"}},
        {{"--Speed=1"}, {"unknown flag --Speed"}},
        {{"--"}, {"unknown flag --"}},
        {{"-m"}, {"unknown flag -m"}},
        {{"--print-config=x"}, {"unknown flag --print-config"}},
        {{"model"}, {"expected a flag", "\"model\"", "--help"}},
        {{"--model"}, {"--model: expected a value", "the end"}},
        {{"--model", "--fast"}, {"--model: expected a value", "flag --fast"}},
        {{"--model=m", "--token-budget=0"}, {"--token-budget", "from 1 to 1048576", "\"0\""}},
        {{"--model=m", "--token-budget=2m"}, {"--token-budget", "from 1 to 1048576", "\"2m\""}},
        {{"--model=m", "--token-budget=-1"}, {"--token-budget", "from 1 to 1048576", "\"-1\""}},
        {{"--model=m", "--token-budget= 1"}, {"--token-budget", "an integer", "\" 1\""}},
        {{"--model=m", "--token-budget="}, {"--token-budget", "an integer", "\"\""}},
        {{"--model=m", "--token-budget=1kk"}, {"--token-budget", "an integer", "\"1kk\""}},
        {{"--model=m", "--token-budget=1.5"}, {"--token-budget", "an integer", "\"1.5\""}},
        {{"--model=m", "--any=18446744073709551616"}, {"--any", "an integer", "616"}},
        {{"--model=m", "--any=17179869184g"}, {"--any", "an integer", "17179869184g"}},
        {{"--model=m", "--wait-s=nan"}, {"--wait-s", "from 0.25 to 60", "\"nan\""}},
        {{"--model=m", "--wait-s=inf"}, {"--wait-s", "from 0.25 to 60", "\"inf\""}},
        {{"--model=m", "--wait-s=61"}, {"--wait-s", "from 0.25 to 60", "\"61\""}},
        {{"--model=m", "--wait-s=1x"}, {"--wait-s", "a number", "\"1x\""}},
        {{"--model=m", "--fast=yes"}, {"--fast", "true or false", "\"yes\""}},
        {{"--model=m", "--attention=d"}, {"--attention", "one of dp|tp|dp-wide", "\"d\""}},
        {{"--model=m", "--attention=dp|tp"}, {"--attention", "one of", "\"dp|tp\""}},
        {{"--fast"}, {"--model: required", "SLUICE_MODEL", "found nothing"}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        program_t out;
        sl_options_action_t action = SL_OPTIONS_RUN;
        assert_int_equal(parse(&out, &action, cases[i].args[0], cases[i].args[1], NULL),
                         SL_ERR_CONFIG);
        for (size_t j = 0; j < 3 && cases[i].words[j] != NULL; j++) {
            check_text(cases[i].words[j]);
        }
        assert_null(out.model); /* nothing is set on failure */
        assert_int_equal(out.token_budget, 0);
    }
}

static void test_environment(void **state)
{
    (void)state;
    program_t out;
    sl_options_action_t action;
    setenv("SLUICE_MODEL", "/from/env", 1);
    setenv("SLUICE_TOKEN_BUDGET", "7", 1);
    setenv("SLUICE_ANY", "", 1);
    setenv("SLUICE_OF_ANOTHER_PROGRAM", "x", 1);
    assert_int_equal(parse(&out, &action, "--token-budget=9", NULL), SL_OK);
    setenv("SLUICE_MODEL", "/changed", 1);
    assert_string_equal(out.model, "/from/env");
    assert_int_equal(out.token_budget, 9); /* the flag is stronger */
    assert_int_equal(parse(&out, &action, NULL), SL_OK);
    assert_int_equal(out.token_budget, 7);
    setenv("SLUICE_TOKEN_BUDGET", "seven", 1);
    assert_int_equal(parse(&out, &action, NULL), SL_ERR_CONFIG);
    check_text("environment SLUICE_TOKEN_BUDGET: expected an integer");
    check_text("\"seven\"");
    /* what a stronger source replaced is not looked at */
    assert_int_equal(parse(&out, &action, "--token-budget=9", NULL), SL_OK);
    unsetenv("SLUICE_MODEL");
    unsetenv("SLUICE_TOKEN_BUDGET");
    unsetenv("SLUICE_ANY");
    unsetenv("SLUICE_OF_ANOTHER_PROGRAM");
}

static char file_path[] = "/tmp/sluice-options-XXXXXX";

static void write_file(const void *text, size_t size)
{
    FILE *file = fopen(file_path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static sl_status_t parse_text(const char *text, program_t *out)
{
    sl_options_action_t action;
    write_file(text, strlen(text));
    return parse(out, &action, "--config", file_path, NULL);
}

static void test_file(void **state)
{
    (void)state;
    program_t out;
    assert_int_equal(parse_text("# a comment\n\n  model = /m # and more\r\n"
                                "token_budget=2k\nfast = false\nattention= tp",
                                &out),
                     SL_OK);
    assert_string_equal(out.model, "/m");
    assert_int_equal(out.token_budget, 2048);
    assert_false(out.fast);
    assert_int_equal(out.attention, 1);
    assert_int_equal(parse_text("model = \" a # b \" # c\n", &out), SL_OK);
    assert_string_equal(out.model, " a # b ");

    setenv("SLUICE_TOKEN_BUDGET", "5", 1);
    assert_int_equal(parse_text("model=m\ntoken_budget=x\n", &out), SL_OK);
    assert_int_equal(out.token_budget, 5); /* the environment is stronger */
    unsetenv("SLUICE_TOKEN_BUDGET");
}

static void test_bad_file(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words[3];
    } cases[] = {
        {"model=m\ntoken_bugdet=5\n", {"line 2", "unknown key token_bugdet", "token_budget"}},
        {"token-budget=5\n", {"line 1", "unknown key token-budget", "is token_budget"}},
        {"Speed=5\n", {"unknown key Speed"}},
        {"=5\n", {"line 1", "unknown key "}},
        {"model=m\n\nmodel=n\n", {"line 3", "key model: expected once", "line 1"}},
        {"model\n", {"line 1", "expected key = value", "\"model\""}},
        {"model=\"m\n", {"line 1", "key model", "quote"}},
        {"model=\"m\" n\n", {"line 1", "key model", "quote"}},
        {"model=m\n# c\ntoken_budget=0\n", {"line 3: token_budget", "from 1", "\"0\""}},
        {"token_budget=1\n", {"--model: required", "key model"}},
    };
    program_t out;
    sl_options_action_t action;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(parse_text(cases[i].text, &out), SL_ERR_CONFIG);
        for (size_t j = 0; j < 3 && cases[i].words[j] != NULL; j++) {
            check_text(cases[i].words[j]);
        }
    }
    write_file("model=m\0x", 9);
    assert_int_equal(parse(&out, &action, "--config", file_path, NULL), SL_ERR_CONFIG);
    check_text("zero byte");
    char *large = calloc(1, (1u << 20) + 1);
    memset(large, '#', (1u << 20) + 1);
    write_file(large, (1u << 20) + 1);
    free(large);
    assert_int_equal(parse(&out, &action, "--config", file_path, NULL), SL_ERR_CONFIG);
    check_text("at most 1048576 bytes");
    assert_int_equal(parse(&out, &action, "--config=/no/such/file", NULL), SL_ERR_CONFIG);
    check_text("--config /no/such/file: cannot open");
    assert_int_equal(parse(&out, &action, "--config=/tmp", NULL), SL_ERR_CONFIG);
    check_text("--config /tmp: cannot read");
    assert_int_equal(parse(&out, &action, "--config", NULL), SL_ERR_CONFIG);
    check_text("--config: expected a value");
}

/* What `print` writes, for the caller to free. Not inlined: GCC 12 at -O3 then takes the stream's
 * memory for that of the local variable. */
__attribute__((noinline)) static char *printed(void (*print)(const sl_options_t *, FILE *))
{
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    print(&options, file);
    fclose(file);
    return text;
}

static void test_help(void **state)
{
    (void)state;
    static const char *const words[] = {"sluice-test: A program.",
                                        "\nModel:\n",
                                        "\nSpeed:\n",
                                        "  --token-budget N\n",
                                        "  --fast, --no-fast\n",
                                        "  --attention dp|tp|dp-wide\n",
                                        "Directory. [required; SLUICE_MODEL]",
                                        "[1 to 1048576; default 8k; SLUICE_TOKEN_BUDGET]",
                                        "[0.25 to 60; default 1.5; SLUICE_WAIT_S]",
                                        "--print-config"};
    char *text = printed(sl_options_print_help);
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        if (strstr(text, words[i]) == NULL) {
            fail_msg("expected \"%s\" in the help, found:\n%s", words[i], text);
        }
    }
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        assert_true(strcspn(line, "\n") <= 100);
    }
    free(text);
}

/* The sample file reads back as the defaults. */
static void test_print_config(void **state)
{
    (void)state;
    program_t out;
    char *text = printed(sl_options_print_config);
    assert_non_null(strstr(text, "# ---- Speed ----"));
    assert_non_null(strstr(text, "# required:\n# model =\n"));
    assert_non_null(strstr(text, "# Tokens of one forward pass. (an integer from 1 to 1048576)"));
    assert_int_equal(parse_text(text, &out), SL_ERR_CONFIG);
    check_text("--model: required");
    char *at = strstr(text, "# model =");
    memcpy(at, "model=m  ", 9);
    assert_int_equal(parse_text(text, &out), SL_OK);
    assert_string_equal(out.model, "m");
    assert_int_equal(out.token_budget, 8192);
    assert_true(out.fast && out.wait_s == 1.5 && out.attention == 0);
    free(text);
}

static void test_exit_actions(void **state)
{
    (void)state;
    static const char *const flags[] = {"--help", "-h", "--version", "--print-config"};
    /* they print to stdout, which belongs to the runner */
    int saved = dup(STDOUT_FILENO);
    assert_non_null(freopen("/dev/null", "w", stdout));
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        program_t out;
        sl_options_action_t action = SL_OPTIONS_RUN;
        sl_status_t status = parse(&out, &action, flags[i], NULL);
        if (status != SL_OK || action != SL_OPTIONS_EXIT) {
            dup2(saved, STDOUT_FILENO);
            fail_msg("%s: status %d action %d", flags[i], status, action);
        }
    }
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(file_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_and_flags), cmocka_unit_test(test_bad_flags),
        cmocka_unit_test(test_environment),        cmocka_unit_test(test_file),
        cmocka_unit_test(test_bad_file),           cmocka_unit_test(test_help),
        cmocka_unit_test(test_print_config),       cmocka_unit_test(test_exit_actions),
    };
    sl_log_set_level((sl_log_level_t)(SL_LOG_ERROR + 1)); /* mistakes are expected here */
    int fd = mkstemp(file_path);
    if (fd < 0) {
        return 1;
    }
    close(fd);
    return cmocka_run_group_tests(tests, NULL, remove_file);
}
