/* Names, --help and the sample config: all that is made from the table without values. */
#include "common/base/options_text.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

#define HELP_COLUMNS 90

static const char *const built_in_flags[] = {"help", "version", "config", "print-config"};
#define BUILT_IN_COUNT (sizeof(built_in_flags) / sizeof(built_in_flags[0]))

void sl_option_key_name(const sl_option_t *option, char name[SL_OPTION_NAME_BYTES])
{
    snprintf(name, SL_OPTION_NAME_BYTES, "%s", option->name);
    for (char *at = name; *at != '\0'; at++) {
        *at = *at == '-' ? '_' : *at;
    }
}

void sl_option_env_name(const sl_option_t *option, char name[SL_OPTION_NAME_BYTES])
{
    char key[SL_OPTION_NAME_BYTES];
    sl_option_key_name(option, key);
    snprintf(name, SL_OPTION_NAME_BYTES, "SLUICE_%.*s", SL_OPTION_NAME_BYTES - 8, key);
    for (char *at = name; *at != '\0'; at++) {
        *at = (char)toupper((unsigned char)*at);
    }
}

void sl_option_expected(const sl_option_t *option, char *text, size_t size)
{
    bool bounded = option->min != 0 || option->max != 0;
    switch (option->kind) {
    case SL_OPTION_STRING:
        snprintf(text, size, "a text");
        break;
    case SL_OPTION_U64:
        if (bounded) {
            snprintf(text, size, "an integer from %.0f to %.0f", option->min, option->max);
        } else {
            snprintf(text, size, "an integer");
        }
        break;
    case SL_OPTION_F64:
        if (bounded) {
            snprintf(text, size, "a number from %g to %g", option->min, option->max);
        } else {
            snprintf(text, size, "a number");
        }
        break;
    case SL_OPTION_BOOL:
        snprintf(text, size, "true or false");
        break;
    case SL_OPTION_CHOICE:
        snprintf(text, size, "one of %s", option->choices);
        break;
    case SL_OPTION_GROUP:
        snprintf(text, size, "%s", "");
        break;
    }
}

/* Levenshtein's distance between the first SL_OPTION_NAME_BYTES - 1 bytes of two names. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[SL_OPTION_NAME_BYTES];
    size_t a_length = strnlen(a, SL_OPTION_NAME_BYTES - 1);
    size_t b_length = strnlen(b, SL_OPTION_NAME_BYTES - 1);
    for (size_t j = 0; j <= b_length; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= a_length; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            size_t above = row[j];
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            best = above + 1 < best ? above + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            diagonal = above;
            row[j] = best;
        }
    }
    return row[b_length];
}

static void keep_nearer(const char *name, const char *candidate, size_t *best_p,
                        char nearest[SL_OPTION_NAME_BYTES])
{
    size_t distance = edit_distance(name, candidate);
    if (distance < *best_p) {
        *best_p = distance;
        snprintf(nearest, SL_OPTION_NAME_BYTES, "%s", candidate);
    }
}

void sl_option_nearest(const sl_options_t *options, const char *name, bool as_key,
                       char nearest[SL_OPTION_NAME_BYTES])
{
    size_t best = SIZE_MAX;
    char candidate[SL_OPTION_NAME_BYTES];
    nearest[0] = '\0';
    for (size_t i = 0; i < options->count; i++) {
        const sl_option_t *option = &options->table[i];
        if (option->kind == SL_OPTION_GROUP) {
            continue;
        }
        if (as_key) {
            sl_option_key_name(option, candidate);
            keep_nearer(name, candidate, &best, nearest);
            continue;
        }
        snprintf(candidate, sizeof(candidate), "--%.60s", option->name);
        keep_nearer(name, candidate, &best, nearest);
        if (option->kind == SL_OPTION_BOOL) {
            snprintf(candidate, sizeof(candidate), "--no-%.58s", option->name);
            keep_nearer(name, candidate, &best, nearest);
        }
    }
    for (size_t i = 0; !as_key && i < BUILT_IN_COUNT; i++) {
        snprintf(candidate, sizeof(candidate), "--%s", built_in_flags[i]);
        keep_nearer(name, candidate, &best, nearest);
    }
}

/* Prints `text` up to the last column, broken at blanks; `prefix` starts each
 * line. */
static void print_wrapped(FILE *file, const char *prefix, const char *text)
{
    size_t column = 0;
    while (*text != '\0') {
        size_t word = strcspn(text, " ");
        if (column == 0 || column + 1 + word > HELP_COLUMNS) {
            fprintf(file, "%s%s", column == 0 ? "" : "\n", prefix);
            column = strlen(prefix);
        } else {
            fputc(' ', file);
            column++;
        }
        fwrite(text, 1, word, file);
        column += word;
        text += word;
        text += strspn(text, " ");
    }
    fputc('\n', file);
}

static void print_flag(const sl_option_t *option, FILE *file)
{
    switch (option->kind) {
    case SL_OPTION_STRING:
        fprintf(file, "  --%s TEXT\n", option->name);
        break;
    case SL_OPTION_U64:
        fprintf(file, "  --%s N\n", option->name);
        break;
    case SL_OPTION_F64:
        fprintf(file, "  --%s X\n", option->name);
        break;
    case SL_OPTION_BOOL:
        fprintf(file, "  --%s, --no-%s\n", option->name, option->name);
        break;
    case SL_OPTION_CHOICE:
        fprintf(file, "  --%s %s\n", option->name, option->choices);
        break;
    case SL_OPTION_GROUP:
        break;
    }
}

/* Bounds, as far as a number has any, in words that end in "; ". */
static const char *bounds_text(const sl_option_t *option, char *text, size_t size)
{
    text[0] = '\0';
    if (option->min != 0 || option->max != 0) {
        const char *format = option->kind == SL_OPTION_U64 ? "%.0f to %.0f; " : "%g to %g; ";
        snprintf(text, size, format, option->min, option->max);
    }
    return text;
}

static void print_option_help(const sl_option_t *option, FILE *file)
{
    char text[2048], bounds[96], env[SL_OPTION_NAME_BYTES];
    sl_option_env_name(option, env);
    bounds_text(option, bounds, sizeof(bounds));
    print_flag(option, file);
    if (option->default_text == NULL) {
        snprintf(text, sizeof(text), "%s [%srequired; %s]", option->help, bounds, env);
    } else {
        snprintf(text, sizeof(text), "%s [%sdefault %s; %s]", option->help, bounds,
                 option->default_text[0] == '\0' ? "none" : option->default_text, env);
    }
    print_wrapped(file, "      ", text);
}

void sl_options_print_help(const sl_options_t *options, FILE *file)
{
    fprintf(file, "%s: %s\n\nUsage: %s [--flag value | --flag=value]...\n", options->program,
            options->summary, options->program);
    if (options->count > 0 && options->table[0].kind != SL_OPTION_GROUP) {
        fprintf(file, "\nOptions:\n");
    }
    for (size_t i = 0; i < options->count; i++) {
        if (options->table[i].kind == SL_OPTION_GROUP) {
            fprintf(file, "\n%s:\n", options->table[i].name);
        } else {
            print_option_help(&options->table[i], file);
        }
    }
    fprintf(file, "\nIn every program:\n"
                  "  --config FILE\n      Reads options from a file of lines key = value.\n"
                  "  --print-config\n      Prints such a file, with every option at its default.\n"
                  "  --version\n      Prints the version.\n"
                  "  --help\n      Prints this text.\n\n"
                  "A flag is stronger than the environment variable, the variable than the file.\n"
                  "Integers may end in k, m or g (times 1024, 1024^2, 1024^3).\n");
}

/* A value that reads back as itself. */
static void print_value(FILE *file, const char *text)
{
    size_t length = strlen(text);
    bool quoted = length == 0 || strchr(text, '#') != NULL || isspace((unsigned char)text[0]) ||
                  isspace((unsigned char)text[length - 1]);
    fprintf(file, quoted ? "\"%s\"\n" : "%s\n", text);
}

static void print_option_config(const sl_option_t *option, FILE *file)
{
    char key[SL_OPTION_NAME_BYTES], expected[512], text[2048];
    sl_option_key_name(option, key);
    sl_option_expected(option, expected, sizeof(expected));
    snprintf(text, sizeof(text), "%s (%s)", option->help, expected);
    fputc('\n', file);
    print_wrapped(file, "# ", text);
    if (option->default_text == NULL) {
        fprintf(file, "# required:\n# %s =\n", key);
    } else {
        fprintf(file, "%s = ", key);
        print_value(file, option->default_text);
    }
}

void sl_options_print_config(const sl_options_t *options, FILE *file)
{
    fprintf(file, "# %s: %s\n# Use: %s --config THIS_FILE\n", options->program, options->summary,
            options->program);
    for (size_t i = 0; i < options->count; i++) {
        if (options->table[i].kind == SL_OPTION_GROUP) {
            fprintf(file, "\n# ---- %s ----\n", options->table[i].name);
        } else {
            print_option_config(&options->table[i], file);
        }
    }
}
