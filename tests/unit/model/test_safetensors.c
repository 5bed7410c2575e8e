/* Headers of safetensors files, right and wrong, from memory. */
#include "check.h"

#include <stdlib.h>

#include "common/model/safetensors.h"

/* A file of `header` and `data_bytes` of data, with the length that `length` gives (-1: right). */
static sl_status_t parse(const char *header, size_t data_bytes, int64_t length,
                         sl_safetensors_t *header_p)
{
    size_t text = strlen(header), size = 8 + text + data_bytes;
    unsigned char *bytes = calloc(1, size); /* exact, so that a sanitizer sees one byte too far */
    uint64_t value = length < 0 ? text : (uint64_t)length;
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(value >> (8 * i));
    }
    memcpy(bytes + 8, header, text);
    sl_status_t status = sl_safetensors_parse(bytes, size, "m.safetensors", header_p);
    free(bytes);
    return status;
}

static void test_good(void **state)
{
    (void)state;
    sl_safetensors_t header;
    assert_int_equal(
        parse("{\"__metadata__\":{\"format\":\"pt\"},"
              "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
              "\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
              "\"none\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[4,4]},"
              "\"s\":{\"dtype\":\"F8_E4M3\",\"shape\":[],\"data_offsets\":[28,29]}}   ",
              29, -1, &header),
        SL_OK);
    assert_int_equal(header.count, 4);
    assert_string_equal(header.entries[0].name, "a");
    assert_string_equal(header.entries[1].name, "none");
    assert_string_equal(header.entries[2].name, "b");
    assert_string_equal(header.entries[2].dtype, "F32");
    assert_int_equal(header.entries[2].rank, 2);
    assert_int_equal(header.entries[2].shape[1], 3);
    assert_int_equal(header.entries[2].end - header.entries[2].begin, 24);
    assert_int_equal(header.entries[3].rank, 0);
    sl_safetensors_cleanup(&header);
    sl_safetensors_cleanup(&header);
    assert_int_equal(parse("{}", 0, -1, &header), SL_OK);
    assert_int_equal(header.count, 0);
    sl_safetensors_cleanup(&header);
}

typedef struct {
    const char *header;
    size_t data_bytes;
    int64_t length;
    sl_status_t status;
    const char *words[3];
} bad_t;

#define F32(name, shape, begin, end)                                                               \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

static const bad_t cases[] = {
    {"", 0, 0, SL_ERR_INVALID, {"at least 10 bytes", "found 8"}},
    {"{}", 0, 3, SL_ERR_INVALID, {"header of 3 bytes", "found 2", "truncated"}},
    {"{}", 0, 100000001, SL_ERR_LIMIT, {"100000000", "100000001"}},
    {"{}", 0, INT64_MAX, SL_ERR_LIMIT, {"100000000", "9223372036854775807"}},
    {"{x", 0, -1, SL_ERR_INVALID, {"not valid JSON"}},
    {"[]", 0, -1, SL_ERR_INVALID, {"JSON object"}},
    {"{\"a\":3}", 0, -1, SL_ERR_INVALID, {"tensor a", "an object"}},
    {"{" F32("a", "[2]", "0", "8") "}",
     7,
     -1,
     SL_ERR_INVALID,
     {"tensor a ends at data byte 8", "found 7 bytes", "truncated"}},
    {"{" F32("a", "[2]", "0", "8") "," F32("b", "[2]", "4", "12") "}",
     12,
     -1,
     SL_ERR_INVALID,
     {"tensor b overlaps a", "byte 8", "found 4"}},
    {"{" F32("a", "[2]", "0", "8") "," F32("b", "[2]", "0", "8") "}",
     8,
     -1,
     SL_ERR_INVALID,
     {"overlaps", "byte 8", "found 0"}},
    {"{" F32("a", "[2]", "0", "8") "," F32("b", "[2]", "12", "20") "}",
     20,
     -1,
     SL_ERR_INVALID,
     {"tensor b leaves a hole after a", "byte 8", "found 12"}},
    {"{" F32("a", "[2]", "4", "12") "}",
     12,
     -1,
     SL_ERR_INVALID,
     {"tensor a leaves a hole after the header", "byte 0", "found 4"}},
    {"{" F32("a", "[2]", "0", "8") "}", 9, -1, SL_ERR_INVALID, {"after a", "found"}},
    {"{}", 1, -1, SL_ERR_INVALID, {"after the header", "found 11"}},
    {"{" F32("a", "[3]", "0", "8") "}", 8, -1, SL_ERR_INVALID, {"tensor a", "found 8 bytes"}},
    {"{" F32("a", "[2]", "8", "0") "}", 8, -1, SL_ERR_INVALID, {"tensor a", "in order", "8 and 0"}},
    {"{" F32("a", "[4294967296,4294967296]", "0", "0") "}",
     0,
     -1,
     SL_ERR_INVALID,
     {"tensor a", "found 0 bytes"}},
    {"{" F32("a", "[4611686018427387904,2]", "0", "0") "}", 0, -1, SL_ERR_INVALID, {"tensor a"}},
    {"{" F32("a", "[-1]", "0", "4") "}", 4, -1, SL_ERR_INVALID, {"tensor a", "shape", "[-1]"}},
    {"{" F32("a", "[1.5]", "0", "4") "}", 4, -1, SL_ERR_INVALID, {"tensor a", "shape", "[1.5]"}},
    {"{" F32("a", "7", "0", "4") "}", 4, -1, SL_ERR_INVALID, {"tensor a", "shape", "found 7"}},
    {"{" F32("a", "[1,1,1,1,1,1,1,1,1]", "0", "4") "}",
     4,
     -1,
     SL_ERR_INVALID,
     {"tensor a", "at most 8"}},
    {"{" F32("a", "[1]", "0", "99999999999999999999") "}", 4, -1, SL_ERR_INVALID, {"JSON"}},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}",
     4,
     -1,
     SL_ERR_INVALID,
     {"tensor a", "data_offsets", "nothing"}},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}",
     4,
     -1,
     SL_ERR_INVALID,
     {"tensor a", "data_offsets", "1 values"}},
    {"{\"a\":{\"dtype\":\"Q4\",\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     -1,
     SL_ERR_UNSUPPORTED,
     {"tensor a", "dtype", "\"Q4\""}},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     -1,
     SL_ERR_INVALID,
     {"tensor a", "dtype", "nothing"}},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,0]}}",
     0,
     -1,
     SL_ERR_INVALID,
     {"tensor a", "dtype F4"}},
    {"{\"a\\nb\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     -1,
     SL_ERR_INVALID,
     {"printable", "a?b"}},
    {"{\"\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     -1,
     SL_ERR_INVALID,
     {"found 0 bytes"}},
    {"{" F32("a", "[1]", "0", "4") "," F32("a", "[1]", "0", "4") "}",
     4,
     -1,
     SL_ERR_INVALID,
     {"duplicate"}},
};

static void test_bad(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        sl_safetensors_t header = {.count = 77};
        sl_status_t status = parse(cases[i].header, cases[i].data_bytes, cases[i].length, &header);
        check_error(status, cases[i].status, "m.safetensors: ", cases[i].words[0],
                    cases[i].words[1], cases[i].words[2], NULL);
        assert_int_equal(header.count, 77);
    }
}

static void test_limits(void **state)
{
    (void)state;
    sl_safetensors_t header;
    static char text[9 << 20];
    memset(text, '[', 64);
    check_error(parse(text, 0, -1, &header), SL_ERR_LIMIT, "deeper than 32", NULL);
    /* what would take jansson hundreds of megabytes is refused by counting */
    snprintf(text, sizeof(text), "{\"a\":[");
    for (size_t i = strlen(text); i + 2 < sizeof(text); i += 2) {
        memcpy(text + i, "0,", 2);
    }
    check_error(parse(text, 0, -1, &header), SL_ERR_LIMIT, "JSON values", NULL);
    char name[600] = "{\"";
    memset(name + 2, 'n', 300);
    strcpy(name + 302, "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}");
    check_error(parse(name, 4, -1, &header), SL_ERR_INVALID, "found 300 bytes", NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_good), cmocka_unit_test(test_bad),
                                       cmocka_unit_test(test_limits)};
    quiet();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
