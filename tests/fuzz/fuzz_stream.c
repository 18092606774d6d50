/* Any text, any tools, any cuts: same result whole and in pieces and by the machine alone, prefixes only,
 * JSON arguments.
 *
 * The first eight bytes choose settings and the random cuts; the rest, made valid UTF-8, is the text. */
#include "common/utf8.h"
#include "tests/support/parse_check.h"

#include <stdio.h>
#include <stdlib.h>

#define HEAD_BYTES     8
#define MAX_TEXT_BYTES ((size_t)1 << 22)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct ds4_parse_tool tools[] = {
        {DS4_STR("bash"),
         DS4_STR("{\"properties\": {\"command\": {\"type\": \"string\"}, \"timeout\": {\"type\": "
                 "\"number\"}}, \"required\": [\"command\"]}")},
        {DS4_STR("now"), DS4_STR("{}")},
        {DS4_STR("edit"),
         DS4_STR("{\"properties\": {\"path\": {\"type\": \"string\"}, \"edits\": {\"type\": "
                 "\"object\"},"
                 " \"opt\": {\"type\": [\"boolean\", \"null\"]}}, \"required\": [\"path\"]}")},
        {DS4_STR("f"), DS4_STR("{\"required\": \"a\"")},
    };
    const struct ds4_str stops[] = {DS4_STR("END"), DS4_STR("\n\n"), DS4_STR("NDE")};
    uint64_t ids = 1, seed = 0;
    struct ds4_parse_config config = {
        .tools = tools, .stops = stops, .random = parse_check_fill, .random_ctx = &ids};
    enum ds4_engine_finish engine;
    const char *wrong;
    struct ds4_buf text;

    if (size < HEAD_BYTES)
        return 0;
    for (size_t i = 0; i < HEAD_BYTES; i++)
        seed = seed << 8 | data[i];
    config.n_tools = data[0] % 5;
    config.n_stops = data[1] % 4;
    config.starts_in_reasoning = (data[2] & 1) != 0;
    config.no_recovery = (data[2] & 2) != 0 && (data[2] & 4) != 0;
    config.no_plain_xml = (data[2] & 8) != 0 && (data[2] & 16) != 0;
    config.hold_max_bytes = (data[3] & 1) != 0 ? (size_t)data[3] + 1 : 0;
    ds4_buf_init(&text, MAX_TEXT_BYTES);
    (void)ds4_utf8_append_replaced(
        &text, (struct ds4_str){(const char *)data + HEAD_BYTES, size - HEAD_BYTES});
    engine = (data[2] & 32) != 0 ? DS4_ENGINE_LENGTH : DS4_ENGINE_STOP;
    wrong = parse_check(&config, ds4_buf_view(&text), engine, seed);
    if (wrong == NULL)
        wrong = parse_check_direct(&config, ds4_buf_view(&text), engine, seed);
    if (wrong != NULL) {
        fprintf(stderr, "%s\n", wrong);
        abort();
    }
    ds4_buf_deinit(&text);
    return 0;
}
