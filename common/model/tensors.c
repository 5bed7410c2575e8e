/*
 * Shards keep their own headers; the table holds pointers into them, so it is built once all shards
 * are open and never moves after that.
 */
#include "common/model/tensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/model/json.h"

#define SINGLE_NAME "model.safetensors"
#define INDEX_NAME "model.safetensors.index.json"
#define INDEX_BYTES_MAX (64u << 20)
#define SHARDS_MAX 10000

static sl_status_t join(const char *dir, const char *name, char **path_p)
{
    char *path = NULL;
    if (asprintf(&path, "%s/%s", dir, name) < 0) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for a path", name);
    }
    *path_p = path;
    return SL_OK;
}

static sl_status_t map_file(int fd, sl_shard_t *shard)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot stat: %s", shard->path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode) || info.st_size == 0) {
        return sl_error(SL_ERR_INVALID, "%s: expected a safetensors file, found %s", shard->path,
                        S_ISREG(info.st_mode) ? "an empty file" : "no regular file");
    }
    void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        return sl_error(SL_ERR_IO, "%s: cannot map %lld bytes: %s", shard->path,
                        (long long)info.st_size, strerror(errno));
    }
    shard->map = map;
    shard->bytes = (size_t)info.st_size;
    return SL_OK;
}

/* Opens the file that shard->path names. SL_ERR_NOT_FOUND, said to nobody, when there is none. */
static sl_status_t open_shard(sl_shard_t *shard)
{
    int fd = open(shard->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        return SL_ERR_NOT_FOUND;
    }
    if (fd < 0) {
        return sl_error(SL_ERR_IO, "%s: cannot open: %s", shard->path, strerror(errno));
    }
    sl_status_t status = map_file(fd, shard);
    close(fd); /* the mapping keeps the file */
    SL_TRY(status);
    return sl_safetensors_parse(shard->map, shard->bytes, shard->path, &shard->header);
}

/* A shard lies in the directory itself; anything else in an index is a mistake or an attack. */
static sl_status_t check_shard_name(const char *index_path, const char *tensor, const json_t *file)
{
    char found[SL_JSON_FOUND_BYTES];
    const char *name = json_string_value(file);
    if (name == NULL || name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL ||
        strstr(name, "..") != NULL || strlen(name) > SL_SAFETENSORS_NAME_MAX) {
        char shown[64];
        return sl_error(SL_ERR_INVALID,
                        "%s: tensor %s: expected the name of a file in the same directory, found "
                        "%s",
                        index_path, sl_json_printable(tensor, shown, sizeof(shown)),
                        sl_json_found(file, found));
    }
    return SL_OK;
}

/* Opens each file that `map` names once; `numbers` becomes file name -> index of its shard. */
static sl_status_t open_named_shards(const char *dir, const char *index_path, json_t *map,
                                     json_t *numbers, sl_tensors_t *tensors)
{
    const char *name;
    json_t *file;
    char shown[64], shown_file[SL_JSON_FOUND_BYTES];
    json_object_foreach(map, name, file)
    {
        SL_TRY(check_shard_name(index_path, name, file));
        const char *file_name = json_string_value(file);
        if (json_object_get(numbers, file_name) != NULL) {
            continue;
        }
        if (tensors->shard_count == SHARDS_MAX) {
            return sl_error(SL_ERR_LIMIT, "%s: expected at most %d files", index_path, SHARDS_MAX);
        }
        sl_shard_t *shard = &tensors->shards[tensors->shard_count];
        SL_TRY(join(dir, file_name, &shard->path));
        if (json_object_set_new(numbers, file_name,
                                json_integer((json_int_t)tensors->shard_count)) != 0) {
            free(shard->path);
            shard->path = NULL;
            return sl_error(SL_ERR_NO_MEMORY, "%s: no memory", index_path);
        }
        tensors->shard_count++;
        sl_status_t status = open_shard(shard);
        if (status == SL_ERR_NOT_FOUND) {
            return sl_error(SL_ERR_IO,
                            "%s: tensor %s: expected file %s beside the index, found "
                            "no such file",
                            index_path, sl_json_printable(name, shown, sizeof(shown)),
                            sl_json_printable(file_name, shown_file, sizeof(shown_file)));
        }
        SL_TRY(status);
    }
    return SL_OK;
}

static int compare_rows(const void *left, const void *right)
{
    const sl_tensor_row_t *a = left, *b = right;
    return strcmp(a->entry->name, b->entry->name);
}

static sl_status_t build_rows(const char *dir, sl_tensors_t *tensors)
{
    size_t count = 0;
    for (size_t i = 0; i < tensors->shard_count; i++) {
        count += tensors->shards[i].header.count;
    }
    tensors->rows = calloc(count + 1, sizeof(tensors->rows[0]));
    if (tensors->rows == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for a table of %zu tensors", dir, count);
    }
    for (size_t i = 0; i < tensors->shard_count; i++) {
        const sl_shard_t *shard = &tensors->shards[i];
        for (size_t j = 0; j < shard->header.count; j++) {
            tensors->rows[tensors->row_count++] =
                (sl_tensor_row_t){.entry = &shard->header.entries[j], .shard = shard};
        }
    }
    qsort(tensors->rows, count, sizeof(tensors->rows[0]), compare_rows);
    for (size_t i = 1; i < count; i++) {
        const sl_tensor_row_t *row = &tensors->rows[i];
        if (strcmp(row[-1].entry->name, row->entry->name) == 0) {
            return sl_error(SL_ERR_INVALID, "tensor %s: expected once, found in %s and in %s",
                            row->entry->name, row[-1].shard->path, row->shard->path);
        }
    }
    return SL_OK;
}

/* Each tensor of the index has to lie in the file that the index gives for it. */
static sl_status_t check_placement(const char *index_path, json_t *map, const json_t *numbers,
                                   const sl_tensors_t *tensors)
{
    const char *name;
    json_t *file;
    char shown[64];
    json_object_foreach(map, name, file)
    {
        size_t number =
            (size_t)json_integer_value(json_object_get(numbers, json_string_value(file)));
        const sl_tensor_row_t *row = sl_tensors_find(tensors, name);
        if (row == NULL || row->shard != &tensors->shards[number]) {
            return sl_error(SL_ERR_INVALID, "%s: tensor %s: expected in %s, found %s%s", index_path,
                            sl_json_printable(name, shown, sizeof(shown)),
                            tensors->shards[number].path, row == NULL ? "nowhere" : "in ",
                            row == NULL ? "" : row->shard->path);
        }
    }
    return SL_OK;
}

static sl_status_t open_map(const char *dir, const char *index_path, json_t *map,
                            sl_tensors_t *tensors)
{
    json_t *numbers = json_object();
    size_t most = json_object_size(map);
    most = most > SHARDS_MAX ? SHARDS_MAX : most;
    tensors->shards = calloc(most, sizeof(tensors->shards[0]));
    if (numbers == NULL || tensors->shards == NULL) {
        json_decref(numbers);
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for %zu files", index_path, most);
    }
    sl_status_t status = open_named_shards(dir, index_path, map, numbers, tensors);
    if (status == SL_OK) {
        status = build_rows(dir, tensors);
    }
    if (status == SL_OK) {
        status = check_placement(index_path, map, numbers, tensors);
    }
    json_decref(numbers);
    return status;
}

static sl_status_t open_index(const char *dir, sl_tensors_t *tensors)
{
    char *path = NULL, found[SL_JSON_FOUND_BYTES];
    json_t *root = NULL;
    SL_TRY(join(dir, INDEX_NAME, &path));
    sl_status_t status = sl_json_read(path, INDEX_BYTES_MAX, &root);
    if (status == SL_ERR_NOT_FOUND) {
        status = sl_error(SL_ERR_IO, "%s: expected %s or %s, found neither", dir, SINGLE_NAME,
                          INDEX_NAME);
    }
    if (status == SL_OK) {
        json_t *map = json_object_get(root, "weight_map");
        if (!json_is_object(map) || json_object_size(map) == 0) {
            status = sl_error(SL_ERR_INVALID,
                              "%s: key weight_map: expected an object of tensor and file names, "
                              "found %s",
                              path, sl_json_found(map, found));
        } else {
            status = open_map(dir, path, map, tensors);
        }
    }
    json_decref(root);
    free(path);
    return status;
}

static sl_status_t open_any(const char *dir, sl_tensors_t *tensors)
{
    tensors->shards = calloc(1, sizeof(tensors->shards[0]));
    if (tensors->shards == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory", dir);
    }
    SL_TRY(join(dir, SINGLE_NAME, &tensors->shards[0].path));
    tensors->shard_count = 1;
    sl_status_t status = open_shard(&tensors->shards[0]);
    if (status == SL_ERR_NOT_FOUND) {
        sl_tensors_close(tensors);
        return open_index(dir, tensors);
    }
    SL_TRY(status);
    return build_rows(dir, tensors);
}

sl_status_t sl_tensors_open(const char *dir, sl_tensors_t *tensors_p)
{
    sl_tensors_t tensors = {0};
    sl_status_t status = open_any(dir, &tensors);
    if (status != SL_OK) {
        sl_tensors_close(&tensors);
        return status;
    }
    *tensors_p = tensors;
    return SL_OK;
}

void sl_tensors_close(sl_tensors_t *tensors)
{
    for (size_t i = 0; i < tensors->shard_count; i++) {
        sl_shard_t *shard = &tensors->shards[i];
        sl_safetensors_cleanup(&shard->header);
        if (shard->map != NULL) {
            munmap(shard->map, shard->bytes);
        }
        free(shard->path);
    }
    free(tensors->shards);
    free(tensors->rows);
    *tensors = (sl_tensors_t){0};
}

static int compare_name(const void *name, const void *row)
{
    return strcmp(name, ((const sl_tensor_row_t *)row)->entry->name);
}

sl_tensor_row_t *sl_tensors_find(const sl_tensors_t *tensors, const char *name)
{
    if (tensors->row_count == 0) {
        return NULL;
    }
    return bsearch(name, tensors->rows, tensors->row_count, sizeof(tensors->rows[0]), compare_name);
}
