/*
 * Each source only notes texts: the file first, then the environment, then the flags, each over
 * what was there. When all have spoken the texts are converted, and only if all convert is the
 * program's struct written. Messages therefore name the source that set the value, and a bad value
 * that something stronger replaced is no error.
 */
#include "common/base/options.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/options_text.h"

#define FILE_BYTES_MAX (1u << 20)

typedef enum { FROM_NOWHERE, FROM_DEFAULT, FROM_FILE, FROM_ENV, FROM_FLAG } source_t;

typedef struct {
    const char *text;
    source_t source;
    unsigned line; /* of the file */
} value_t;

typedef union {
    const char *string;
    uint64_t u64;
    double f64;
    bool boolean;
    int choice;
} converted_t;

typedef struct {
    const sl_options_t *options;
    value_t *values;  /* one for each row of the table */
    const char *file; /* of --config, or NULL */
    bool wants_config_printed;
} parse_t;

/* Strings handed to the program live as long as it does; the list keeps them reachable. */
typedef struct kept {
    struct kept *next;
    char text[];
} kept_t;
static kept_t *kept_strings;

static const char *keep(const char *text, size_t length)
{
    kept_t *kept = malloc(sizeof(*kept) + length + 1);
    if (kept == NULL) {
        return NULL;
    }
    memcpy(kept->text, text, length);
    kept->text[length] = '\0';
    kept->next = kept_strings;
    kept_strings = kept;
    return kept->text;
}

static sl_status_t no_memory(const parse_t *parse)
{
    return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for options", parse->options->program);
}

/* ---- conversion ---- */

/* "--tp", "environment SLUICE_TP" or "node.conf line 3: tp": where a value came from. */
static const char *describe(const parse_t *parse, size_t i, char *text, size_t size)
{
    const sl_option_t *option = &parse->options->table[i];
    const value_t *value = &parse->values[i];
    char name[SL_OPTION_NAME_BYTES];
    switch (value->source) {
    case FROM_FILE:
        sl_option_key_name(option, name);
        snprintf(text, size, "%.200s line %u: %s", parse->file, value->line, name);
        break;
    case FROM_ENV:
        sl_option_env_name(option, name);
        snprintf(text, size, "environment %s", name);
        break;
    default:
        snprintf(text, size, "--%s", option->name);
        break;
    }
    return text;
}

/* Power of two of a suffix; 0 for any other letter. */
static unsigned suffix_shift(char letter)
{
    switch (letter) {
    case 'k':
    case 'K':
        return 10;
    case 'm':
    case 'M':
        return 20;
    case 'g':
    case 'G':
        return 30;
    default:
        return 0;
    }
}

static bool convert_u64(const sl_option_t *option, const char *text, uint64_t *number_p)
{
    char *end = NULL;
    if (text[0] < '0' || text[0] > '9') {
        return false; /* strtoull takes blanks and signs */
    }
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    unsigned shift = suffix_shift(*end);
    end += shift != 0;
    if (errno != 0 || *end != '\0' || number > UINT64_MAX >> shift) {
        return false;
    }
    number <<= shift;
    if ((option->min != 0 || option->max != 0) &&
        ((double)number < option->min || (double)number > option->max)) {
        return false;
    }
    *number_p = number;
    return true;
}

static bool convert_f64(const sl_option_t *option, const char *text, double *number_p)
{
    char *end = NULL;
    if (text[0] == '\0' || strchr(" \t\n\v\f\r", text[0]) != NULL) {
        return false;
    }
    double number = strtod(text, &end);
    if (*end != '\0' || !isfinite(number)) {
        return false;
    }
    if ((option->min != 0 || option->max != 0) && (number < option->min || number > option->max)) {
        return false;
    }
    *number_p = number;
    return true;
}

static bool convert_choice(const sl_option_t *option, const char *text, int *index_p)
{
    const char *word = option->choices;
    for (int i = 0; word != NULL; i++) {
        size_t length = strcspn(word, "|");
        if (strlen(text) == length && strncmp(text, word, length) == 0) {
            *index_p = i;
            return true;
        }
        word = word[length] == '|' ? word + length + 1 : NULL;
    }
    return false;
}

static bool convert(const sl_option_t *option, const char *text, converted_t *converted)
{
    switch (option->kind) {
    case SL_OPTION_STRING:
        converted->string = text;
        return true;
    case SL_OPTION_U64:
        return convert_u64(option, text, &converted->u64);
    case SL_OPTION_F64:
        return convert_f64(option, text, &converted->f64);
    case SL_OPTION_BOOL:
        converted->boolean = strcmp(text, "true") == 0;
        return converted->boolean || strcmp(text, "false") == 0;
    case SL_OPTION_CHOICE:
        return convert_choice(option, text, &converted->choice);
    case SL_OPTION_GROUP:
        break;
    }
    return true;
}

static void store(const sl_option_t *option, const converted_t *converted, void *out)
{
    void *field = (char *)out + option->offset;
    switch (option->kind) {
    case SL_OPTION_STRING:
        *(const char **)field = converted->string;
        break;
    case SL_OPTION_U64:
        *(uint64_t *)field = converted->u64;
        break;
    case SL_OPTION_F64:
        *(double *)field = converted->f64;
        break;
    case SL_OPTION_BOOL:
        *(bool *)field = converted->boolean;
        break;
    case SL_OPTION_CHOICE:
        *(int *)field = converted->choice;
        break;
    case SL_OPTION_GROUP:
        break;
    }
}

static sl_status_t convert_value(const parse_t *parse, size_t i, converted_t *converted)
{
    const sl_option_t *option = &parse->options->table[i];
    const value_t *value = &parse->values[i];
    char where[320], expected[512];
    if (option->kind == SL_OPTION_GROUP) {
        return SL_OK;
    }
    if (value->source == FROM_NOWHERE) {
        char env[SL_OPTION_NAME_BYTES], key[SL_OPTION_NAME_BYTES];
        sl_option_env_name(option, env);
        sl_option_key_name(option, key);
        return sl_error(SL_ERR_CONFIG,
                        "--%s: required (as a flag, environment %s or file key %s), found nothing",
                        option->name, env, key);
    }
    if (!convert(option, value->text, converted)) {
        SL_ASSERT(value->source != FROM_DEFAULT); /* the table itself is wrong */
        sl_option_expected(option, expected, sizeof(expected));
        return sl_error(SL_ERR_CONFIG, "%s: expected %s, found \"%.100s\"",
                        describe(parse, i, where, sizeof(where)), expected, value->text);
    }
    return SL_OK;
}

static sl_status_t convert_all(const parse_t *parse, void *out)
{
    size_t count = parse->options->count;
    sl_status_t status = SL_OK;
    converted_t *converted = calloc(count + 1, sizeof(converted[0]));
    if (converted == NULL) {
        return no_memory(parse);
    }
    for (size_t i = 0; i < count && status == SL_OK; i++) {
        status = convert_value(parse, i, &converted[i]);
    }
    for (size_t i = 0; i < count && status == SL_OK; i++) {
        store(&parse->options->table[i], &converted[i], out);
    }
    free(converted);
    return status;
}

/* ---- the file ---- */

static char *trim(char *text)
{
    static const char blanks[] = " \t\r";
    text += strspn(text, blanks);
    size_t length = strlen(text);
    while (length > 0 && strchr(blanks, text[length - 1]) != NULL) {
        length--;
    }
    text[length] = '\0';
    return text;
}

/* The value at the start of `text`, quoted or up to a comment; NULL if neither ends well. */
static char *parse_file_value(char *text)
{
    text = trim(text);
    if (text[0] != '"') {
        text[strcspn(text, "#")] = '\0';
        return trim(text);
    }
    char *end = strchr(text + 1, '"');
    if (end == NULL) {
        return NULL;
    }
    char *rest = trim(end + 1);
    *end = '\0';
    return rest[0] == '\0' || rest[0] == '#' ? text + 1 : NULL;
}

static sl_status_t find_key(const parse_t *parse, const char *key, unsigned line, size_t *i_p)
{
    char name[SL_OPTION_NAME_BYTES];
    for (size_t i = 0; i < parse->options->count; i++) {
        if (parse->options->table[i].kind == SL_OPTION_GROUP) {
            continue;
        }
        sl_option_key_name(&parse->options->table[i], name);
        if (strcmp(key, name) == 0) {
            *i_p = i;
            return SL_OK;
        }
    }
    sl_option_nearest(parse->options, key, true, name);
    return sl_error(SL_ERR_CONFIG, "%s line %u: unknown key %.100s of %s; the nearest known is %s",
                    parse->file, line, key, parse->options->program, name);
}

static sl_status_t parse_line(parse_t *parse, char *text, unsigned line)
{
    size_t i = 0;
    text = trim(text);
    if (text[0] == '\0' || text[0] == '#') {
        return SL_OK;
    }
    char *equals = strchr(text, '=');
    if (equals == NULL) {
        return sl_error(SL_ERR_CONFIG, "%s line %u: expected key = value, found \"%.100s\"",
                        parse->file, line, text);
    }
    *equals = '\0';
    const char *key = trim(text);
    SL_TRY(find_key(parse, key, line, &i));
    const char *value = parse_file_value(equals + 1);
    if (value == NULL) {
        return sl_error(SL_ERR_CONFIG,
                        "%s line %u: key %s: expected a value that ends with its quote",
                        parse->file, line, key);
    }
    if (parse->values[i].source == FROM_FILE) {
        return sl_error(SL_ERR_CONFIG, "%s line %u: key %s: expected once, found on line %u too",
                        parse->file, line, key, parse->values[i].line);
    }
    parse->values[i] = (value_t){keep(value, strlen(value)), FROM_FILE, line};
    return parse->values[i].text == NULL ? no_memory(parse) : SL_OK;
}

/* Splits `text` of `size` bytes and a zero into lines. */
static sl_status_t parse_lines(parse_t *parse, char *text, size_t size)
{
    if (strlen(text) != size) {
        return sl_error(SL_ERR_CONFIG, "%s: expected text, found a zero byte", parse->file);
    }
    char *next = text;
    for (unsigned line = 1; next != NULL; line++) {
        char *here = next;
        next = strchr(here, '\n');
        if (next != NULL) {
            *next++ = '\0';
        }
        SL_TRY(parse_line(parse, here, line));
    }
    return SL_OK;
}

static sl_status_t parse_file(parse_t *parse)
{
    FILE *file = fopen(parse->file, "re");
    if (file == NULL) {
        return sl_error(SL_ERR_CONFIG, "--config %s: cannot open: %s", parse->file,
                        strerror(errno));
    }
    sl_status_t status = SL_OK;
    char *text = malloc(FILE_BYTES_MAX + 2);
    size_t size = text == NULL ? 0 : fread(text, 1, FILE_BYTES_MAX + 1, file);
    if (text == NULL) {
        status = no_memory(parse);
    } else if (ferror(file)) {
        status =
            sl_error(SL_ERR_CONFIG, "--config %s: cannot read: %s", parse->file, strerror(errno));
    } else if (size > FILE_BYTES_MAX) {
        status = sl_error(SL_ERR_CONFIG, "--config %s: expected at most %u bytes", parse->file,
                          FILE_BYTES_MAX);
    } else {
        text[size] = '\0';
        status = parse_lines(parse, text, size);
    }
    free(text);
    fclose(file);
    return status;
}

/* ---- environment and flags ---- */

static sl_status_t parse_environment(parse_t *parse)
{
    char name[SL_OPTION_NAME_BYTES];
    for (size_t i = 0; i < parse->options->count; i++) {
        if (parse->options->table[i].kind == SL_OPTION_GROUP) {
            continue;
        }
        sl_option_env_name(&parse->options->table[i], name);
        const char *text = getenv(name);
        if (text != NULL && text[0] != '\0') {
            parse->values[i] = (value_t){keep(text, strlen(text)), FROM_ENV, 0};
            if (parse->values[i].text == NULL) {
                return no_memory(parse);
            }
        }
    }
    return SL_OK;
}

/* Row of the table for the flag name of `length` bytes, or the table's count. */
static size_t find_flag(const sl_options_t *options, const char *name, size_t length)
{
    size_t i = 0;
    for (; i < options->count; i++) {
        const sl_option_t *option = &options->table[i];
        if (option->kind != SL_OPTION_GROUP && strlen(option->name) == length &&
            strncmp(option->name, name, length) == 0) {
            break;
        }
    }
    return i;
}

/* The same for "no-x", where x is a flag that can be off. */
static size_t find_negated(const sl_options_t *options, const char *name, size_t length)
{
    size_t i = options->count;
    if (strncmp(name, "no-", 3) == 0 && name[length] == '\0') {
        i = find_flag(options, name + 3, length - 3);
    }
    return i < options->count && options->table[i].kind == SL_OPTION_BOOL ? i : options->count;
}

static bool is_flag(const char *arg, const char *name, size_t length)
{
    return strlen(name) == length && strncmp(arg, name, length) == 0;
}

static sl_status_t unknown_flag(const sl_options_t *options, const char *arg)
{
    char nearest[SL_OPTION_NAME_BYTES];
    if (strncmp(arg, "-", 1) != 0) {
        return sl_error(SL_ERR_CONFIG, "%s: expected a flag, found \"%.100s\"; see --help",
                        options->program, arg);
    }
    int length = (int)strcspn(arg, "=");
    char name[SL_OPTION_NAME_BYTES];
    snprintf(name, sizeof(name), "%.*s", length, arg);
    sl_option_nearest(options, name, false, nearest);
    return sl_error(SL_ERR_CONFIG, "%s: unknown flag %.100s; the nearest known is %s",
                    options->program, name, nearest);
}

/* The value of a flag: after its '=', or the next argument, which *i_p then moves to. */
static sl_status_t flag_value(int argc, char **argv, int *i_p, const char **text_p)
{
    const char *arg = argv[*i_p];
    const char *equals = strchr(arg, '=');
    if (equals != NULL) {
        *text_p = equals + 1;
        return SL_OK;
    }
    if (*i_p + 1 >= argc || strncmp(argv[*i_p + 1], "--", 2) == 0) {
        return sl_error(SL_ERR_CONFIG, "%.100s: expected a value (%.100s=VALUE), found %s%.100s",
                        arg, arg, *i_p + 1 >= argc ? "the end" : "flag ",
                        *i_p + 1 >= argc ? "" : argv[*i_p + 1]);
    }
    *i_p += 1;
    *text_p = argv[*i_p];
    return SL_OK;
}

/* Reads the flag at argv[*i_p]; *i_p moves to the last argument that belongs to it. */
static sl_status_t parse_flag(parse_t *parse, int argc, char **argv, int *i_p, value_t *flags)
{
    const sl_options_t *options = parse->options;
    const char *arg = argv[*i_p];
    if (strncmp(arg, "--", 2) != 0) {
        return unknown_flag(options, arg);
    }
    const char *name = arg + 2, *text = NULL;
    size_t length = strcspn(name, "=");
    bool has_value = name[length] == '=';
    if (is_flag(name, "config", length)) {
        return flag_value(argc, argv, i_p, &parse->file);
    }
    if (is_flag(name, "print-config", length) && !has_value) {
        parse->wants_config_printed = true;
        return SL_OK;
    }
    size_t row = find_flag(options, name, length);
    if (row < options->count && options->table[row].kind == SL_OPTION_BOOL && !has_value) {
        text = "true";
    } else if (row < options->count) {
        SL_TRY(flag_value(argc, argv, i_p, &text));
    } else {
        row = find_negated(options, name, length);
        text = "false";
    }
    if (row == options->count) {
        return unknown_flag(options, arg);
    }
    flags[row] = (value_t){text, FROM_FLAG, 0};
    return SL_OK;
}

static sl_status_t parse_sources(parse_t *parse, int argc, char **argv, value_t *flags)
{
    const sl_options_t *options = parse->options;
    for (int i = 1; i < argc; i++) {
        SL_TRY(parse_flag(parse, argc, argv, &i, flags));
    }
    if (parse->wants_config_printed) {
        return SL_OK;
    }
    for (size_t i = 0; i < options->count; i++) {
        if (options->table[i].default_text != NULL) {
            parse->values[i] = (value_t){options->table[i].default_text, FROM_DEFAULT, 0};
        }
    }
    if (parse->file != NULL) {
        SL_TRY(parse_file(parse));
    }
    SL_TRY(parse_environment(parse));
    for (size_t i = 0; i < options->count; i++) {
        if (flags[i].source == FROM_FLAG) {
            parse->values[i] = flags[i];
        }
    }
    return SL_OK;
}

/* --help and --version hold wherever they stand, so that they work beside a mistake. */
static bool print_if_asked(const sl_options_t *options, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            sl_options_print_help(options, stdout);
            return true;
        }
        if (strcmp(argv[i], "--version") == 0) {
            printf("%s %s\n", options->program, SLUICE_VERSION);
            return true;
        }
    }
    return false;
}

sl_status_t sl_options_parse(const sl_options_t *options, int argc, char **argv, void *out,
                             sl_options_action_t *action_p)
{
    parse_t parse = {.options = options};
    if (print_if_asked(options, argc, argv)) {
        *action_p = SL_OPTIONS_EXIT;
        return SL_OK;
    }
    parse.values = calloc(options->count + 1, sizeof(parse.values[0]));
    value_t *flags = calloc(options->count + 1, sizeof(flags[0]));
    sl_status_t status = parse.values == NULL || flags == NULL
                             ? no_memory(&parse)
                             : parse_sources(&parse, argc, argv, flags);
    if (status == SL_OK && parse.wants_config_printed) {
        sl_options_print_config(options, stdout);
        *action_p = SL_OPTIONS_EXIT;
    } else if (status == SL_OK) {
        status = convert_all(&parse, out);
        if (status == SL_OK) {
            *action_p = SL_OPTIONS_RUN;
        }
    }
    free(parse.values);
    free(flags);
    return status;
}
