/*
 * A main for fuzz targets where libFuzzer is not: runs the target over every file of the given
 * folders, then over mutations of those files that are the same in every run. An empty folder is
 * an error: a corpus that went missing must not pass. Sanitizers find what goes wrong, so inputs
 * are heap blocks of exactly their size.
 *
 *   fuzz_message tests/fuzz/corpus/fuzz_message
 */
#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

#define MUTATIONS 2000
#define FILES_MAX 4096
#define GROWTH_MAX 64 /* bytes that one mutation may add */

typedef struct {
    char *name;
    uint8_t *data;
    size_t size;
} input_t;

static input_t inputs[FILES_MAX];
static size_t input_count;
static uint64_t random_state = 0x9e3779b97f4a7c15u;

static void die(const char *what, const char *name)
{
    fprintf(stderr, "replay: %s %s: %s\n", what, name, strerror(errno));
    exit(2);
}

static void *must_alloc(size_t size)
{
    void *block = malloc(size > 0 ? size : 1);
    if (block == NULL) {
        die("no memory for", "an input");
    }
    return block;
}

/* xorshift64*: any generator will do, as long as it is the same everywhere. */
static uint32_t random_below(uint32_t bound)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 0x2545f4914f6cdd1du) >> 32) % bound;
}

static void run(const uint8_t *data, size_t size)
{
    uint8_t *exact = must_alloc(size);
    memcpy(exact, data, size);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
}

/* ---- corpus ---- */

static void load_file(const char *folder, const char *name)
{
    char path[4096];
    struct stat info;
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    if (stat(path, &info) != 0) {
        die("cannot look at", path);
    }
    if (!S_ISREG(info.st_mode) || input_count == FILES_MAX) {
        return;
    }
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        die("cannot open", path);
    }
    input_t *input = &inputs[input_count++];
    input->size = (size_t)info.st_size;
    input->data = must_alloc(input->size);
    input->name = strdup(path);
    if (fread(input->data, 1, input->size, file) != input->size) {
        die("cannot read", path);
    }
    fclose(file);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const input_t *)a)->name, ((const input_t *)b)->name);
}

static void load_folder(const char *folder)
{
    DIR *dir = opendir(folder);
    if (dir == NULL) {
        die("cannot open", folder);
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        load_file(folder, entry->d_name);
    }
    closedir(dir);
    if (input_count == 0) {
        fprintf(stderr, "replay: no files in %s\n", folder);
        exit(2);
    }
}

/* ---- mutations ---- */

/* Values at the edges of what lengths and numbers can be, and msgpack's and JSON's own marks. */
static uint8_t edge_byte(void)
{
    static const uint8_t edges[] = {0x00, 0x01, 0x7f, 0x80, 0x8f, 0x9f, 0xbf, 0xc0,
                                    0xc1, 0xc6, 0xca, 0xcb, 0xcf, 0xd3, 0xd9, 0xdb,
                                    0xdd, 0xdf, 0xff, '"',  '{',  '[',  '-',  '\\'};
    return edges[random_below(sizeof(edges))];
}

/* One change of `data`, which has room for GROWTH_MAX more; returns the new size. */
static size_t mutate(uint8_t *data, size_t size)
{
    uint32_t kind = random_below(7);
    size_t at = size > 0 ? random_below((uint32_t)size) : 0;
    size_t length = 1 + random_below(GROWTH_MAX / 8);
    if (size == 0 || kind == 0) { /* insert */
        memmove(data + at + length, data + at, size - at);
        for (size_t i = 0; i < length; i++) {
            data[at + i] = edge_byte();
        }
        return size + length;
    }
    length = length < size - at ? length : size - at;
    switch (kind) {
    case 1: /* remove */
        memmove(data + at, data + at + length, size - at - length);
        return size - length;
    case 2: /* cut */
        return at;
    case 3: /* flip a bit */
        data[at] ^= (uint8_t)(1u << random_below(8));
        return size;
    case 4: /* copy a piece over another */
        memmove(data + random_below((uint32_t)(size - length + 1)), data + at, length);
        return size;
    case 5: /* a run of ones, as a huge length */
        memset(data + at, 0xff, length);
        return size;
    default:
        data[at] = edge_byte();
        return size;
    }
}

static void run_mutation(void)
{
    const input_t *input = &inputs[random_below((uint32_t)input_count)];
    uint32_t changes = 1 + random_below(4);
    uint8_t *data = must_alloc(input->size + changes * GROWTH_MAX);
    size_t size = input->size;
    memcpy(data, input->data, size);
    for (uint32_t i = 0; i < changes; i++) {
        size = mutate(data, size);
    }
    run(data, size);
    free(data);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s CORPUS_FOLDER...\n", argv[0]);
        return 2;
    }
    for (int i = 1; i < argc; i++) {
        load_folder(argv[i]);
    }
    qsort(inputs, input_count, sizeof(inputs[0]), by_name);
    for (size_t i = 0; i < input_count; i++) {
        run(inputs[i].data, inputs[i].size);
    }
    for (int i = 0; i < MUTATIONS; i++) {
        run_mutation();
    }
    printf("replayed %zu files and %d mutations\n", input_count, MUTATIONS);
    for (size_t i = 0; i < input_count; i++) {
        free(inputs[i].name);
        free(inputs[i].data);
    }
    return 0;
}
