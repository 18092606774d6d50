/* The parser's short ways against its machine: the same text, cut the same, by both. */
#include "router/parse/stream.h"

#include "common/buf.h"
#include "tests/support/parse_check.h"

#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define MAX_PARTS 40

/* The long form has more: test_direct 1000000. */
static int n_texts = 15000;

#define BAR "\xef\xbd\x9c"

/* What texts are made of: markup, what only begins like it, and what the short ways must not swallow. */
static const char *const markup[] = {
    "<think>",
    "</think>",
    "<" BAR "User" BAR ">",
    "<" BAR "end\xe2\x96\x81of\xe2\x96\x81sentence" BAR ">",
    "<" BAR "DSML" BAR "tool_calls>",
    "</" BAR "DSML" BAR "tool_calls>",
    "<" BAR "DSML" BAR " calls>",
    "</" BAR "DSML" BAR " calls>",
    "<|DSML|toolkit>",
    "</|DSML|toolkit>",
    "<" BAR "DSML" BAR "invoke name=\"bash\">",
    "<" BAR "DSML" BAR "invoke name=\"edit\">",
    "<" BAR "DSML" BAR "invoke name=\"now\">",
    "<" BAR "DSML" BAR "invoke>",
    "</" BAR "DSML" BAR "invoke>",
    "<" BAR "DSML" BAR "invoke name=\"other\">",
    "<" BAR "DSML" BAR "invoke name=\"other\">prose</" BAR "DSML" BAR "invoke>",
    "<" BAR "DSML" BAR "invoke name=\"bash\">\n</" BAR "DSML" BAR "invoke>",
    "<" BAR "DSML" BAR "parameter name=\"command\" string=\"true\">",
    "<" BAR "DSML" BAR "parameter name=\"path\">",
    "<" BAR "DSML" BAR "parameter name=\"edits\">",
    "<" BAR "DSML" BAR "parameter name=\"arguments\" string=\"true\">",
    "<" BAR "DSML" BAR "parameter name=\"timeout\" string=\"false\">",
    "</" BAR "DSML" BAR "parameter>",
    "<DSML\xe2\x94\x82parameter name=\"opt\">",
    "</\xe2\x9d\x98"
    "DSML_parameter>",
    "<invoke name=\"bash\">",
    "</invoke>",
    "<parameter name=\"command\">",
    "</parameter>",
    "<parameter name=\"bash\">",
    "<tool_calls>",
    "</tool_calls>",
    "</toolcalls>",
    "</tool_call>",
    "<calls>",
    "<function_calls>",
    "</function_calls>",
    "<bash",
    "<call ",
    "<thinking>",
    "DSML",
};
static const char *const words[] = {
    "a",
    "x",
    "\n",
    "\n\n",
    " ",
    "\t",
    "\r",
    "{",
    "}",
    "\"",
    "\\",
    "`",
    "``",
    "```",
    "<",
    "</",
    "<<",
    ">",
    "/",
    "D",
    "DS",
    "b",
    "c",
    "th",
    "t",
    "<div",
    "</div",
    "<t",
    "<to",
    "E",
    "EN",
    "ND",
    "END",
    "i",
    "p",
    "f",
    "|",
    BAR,
    "\x01",
    "\x7f",
    "é",
    "你",
    "\xf0\x9f\x98\x80",
    "1",
    "null",
    "SML",
    "ash",
    "all ",
    "hinking>",
    "{\"command\": \"ls\"}",
    "the quick brown fox jumps over the lazy dog",
    "\xe2\x80\xa8",
    "a word and a blank at its end ",
    "                       ",
};
/* A strict block up to an open string: without it few random texts get that far. */
static const char block[] =
    "<" BAR "DSML" BAR "tool_calls>\n<" BAR "DSML" BAR "invoke name=\"bash\">\n<" BAR "DSML" BAR
    "parameter name=\"command\" string=\"true\">";
#define N_OF(a) (sizeof(a) / sizeof((a)[0]))

/* A text of random parts; markup is cut short, or has a byte changed, as often as not. */
static void make_text(struct ds4_buf *out, uint64_t *seed)
{
    size_t n_parts = 1 + (size_t)(parse_check_random(seed) % MAX_PARTS);
    uint64_t share = parse_check_random(seed) % 4;

    ds4_buf_clear(out);
    if (parse_check_random(seed) % 3 == 0)
        (void)ds4_buf_append_text(out, block);
    while (n_parts-- > 0) {
        uint64_t r = parse_check_random(seed);
        struct ds4_str part = ds4_str_view(words[(r >> 8) % N_OF(words)]);

        if (r % 4 < share) {
            part = ds4_str_view(markup[(r >> 8) % N_OF(markup)]);
            if ((r >> 32) % 3 == 0)
                part.len = 1 + (size_t)((r >> 40) % part.len);
            while (part.len > 0 && part.ptr[part.len] != '\0' &&
                   ((unsigned char)part.ptr[part.len] & 0xc0) == 0x80)
                part.len--;
        }
        (void)ds4_buf_append_str(out, part);
        if ((r >> 48) % 16 == 0 && part.len > 0 && (part.ptr[part.len - 1] & 0x80) == 0)
            out->ptr[out->len - 1] = "</>DSML bct\n\"x"[(r >> 52) % 14];
    }
}

static void make_config(struct ds4_parse_config *config, uint64_t *seed)
{
    static const struct ds4_str stops[] = {
        {"END", 3}, {"\n\n", 2}, {"<d", 2}, {"NDE", 3}, {"<", 1}};
    uint64_t r = parse_check_random(seed);

    *config = (struct ds4_parse_config){.tools = parse_check_tools, .stops = stops};
    config->n_tools = r % 8 == 0 ? 0 : 3;
    config->n_stops = (r >> 8) % 2 == 0 ? 0 : (r >> 9) % (N_OF(stops) + 1);
    config->starts_in_reasoning = (r >> 16) % 2 == 0;
    config->spaced_tags = (r >> 17) % 2 == 0;
    config->no_recovery = (r >> 20) % 8 == 0;
    config->no_plain_xml = (r >> 24) % 8 == 0;
    config->raw = (r >> 28) % 64 == 0;
    config->calls_mode = (enum ds4_calls_mode)((r >> 36) % 12 < 9 ? 0 : (r >> 36) % 3);
    config->hold_max_bytes = (r >> 40) % 3 == 0 ? 1 + (r >> 44) % 200 : 0;
}

static void compare(const struct ds4_parse_config *config, struct ds4_str text, uint64_t seed)
{
    for (int engine = 0; engine < 2; engine++) {
        const char *wrong = parse_check_direct(config, text, (enum ds4_engine_finish)engine, seed);
        if (wrong != NULL)
            fail_msg(
                "%s\nengine %d seed %llu tools %zu stops %zu reasoning %d hold %zu text:\n%.*s",
                wrong, engine, (unsigned long long)seed, config->n_tools, config->n_stops,
                config->starts_in_reasoning, config->hold_max_bytes, DS4_STR_ARG(text));
    }
}

static void random_texts_are_read_as_the_machine_reads_them(void **state)
{
    struct ds4_parse_config config;
    uint64_t seed = 1;
    struct ds4_buf text;

    (void)state;
    ds4_buf_init(&text, (size_t)1 << 20);
    for (int i = 0; i < n_texts; i++) {
        make_config(&config, &seed);
        make_text(&text, &seed);
        compare(&config, ds4_buf_view(&text), parse_check_random(&seed));
    }
    ds4_buf_deinit(&text);
}

/* Every tag, cut after each of its bytes and gone on otherwise, behind text, a string and a hoard. */
static void every_beginning_of_a_tag_is_waited_for_as_the_machine_waits(void **state)
{
    static const char *const before[] = {"", "text ", block,
                                         "<" BAR "DSML" BAR "invoke name=\"bash\">\n<" BAR
                                         "DSML" BAR "parameter name=\"command\">v"};
    static const char *const behind[] = {"x", "<", "\n", "/", "b", "</", ">", BAR};
    struct ds4_parse_config config = {.tools = parse_check_tools, .n_tools = 3};
    struct ds4_buf text;

    (void)state;
    ds4_buf_init(&text, (size_t)1 << 20);
    for (size_t tag = 0; tag < N_OF(markup); tag++)
        for (size_t n = 1; n <= strlen(markup[tag]); n++) {
            if (((unsigned char)markup[tag][n] & 0xc0) == 0x80)
                continue;
            for (size_t k = 0; k < N_OF(before) * N_OF(behind); k++) {
                ds4_buf_clear(&text);
                (void)ds4_buf_append_text(&text, before[k / N_OF(behind)]);
                (void)ds4_buf_append(&text, markup[tag], n);
                (void)ds4_buf_append_text(&text, behind[k % N_OF(behind)]);
                (void)ds4_buf_append_text(&text, markup[tag] + n);
                compare(&config, ds4_buf_view(&text), tag + n + k);
            }
        }
    ds4_buf_deinit(&text);
}

/* "DSML", with a '<' in its middle that a tripwire takes back: the text has it all the same. */
static void a_pseudo_tag_is_seen_across_a_tag_taken_back(void **state)
{
    uint64_t ids = 1;
    struct ds4_parse_config config = {
        .tools = parse_check_tools, .n_tools = 3, .random = parse_check_fill, .random_ctx = &ids};
    struct ds4_stream *s = ds4_stream_new(&config, NULL);
    static const char *const tokens[] = {"some text ", "D", "<", "SML"};
    struct ds4_events events;

    (void)state;
    assert_non_null(s);
    ds4_events_init(&events, 1000);
    for (size_t i = 0; i < N_OF(tokens); i++) {
        assert_int_equal(ds4_stream_feed(s, ds4_str_view(tokens[i]), &events, NULL), 0);
        ds4_stream_take_back(s, ds4_stream_undecided(s));
    }
    assert_int_equal(ds4_stream_finish(s, DS4_ENGINE_STOP, &events, NULL), 0);
    assert_true(events.list.ptr[events.list.len - 1].finish.pseudo_tag);
    ds4_events_deinit(&events);
    ds4_stream_free(s);
}

/* Blanks that came in one piece with the beginning of a closer counted as text behind the rejected call. */
static void blanks_before_a_closer_do_not_hide_the_rejected_call(void **state)
{
    static const char rejected[] =
        "a <" BAR "DSML" BAR "invoke name=\"bash\">\n</" BAR "DSML" BAR "invoke>";
    static const char *const pieces[] = {rejected, " </" BAR, "DSML" BAR "tool_calls>"};
    uint64_t ids = 1;
    struct ds4_parse_config config = {
        .tools = parse_check_tools, .n_tools = 3, .random = parse_check_fill, .random_ctx = &ids};
    struct ds4_stream *s = ds4_stream_new(&config, NULL);
    struct ds4_events events;

    (void)state;
    assert_non_null(s);
    ds4_events_init(&events, 1000);
    for (size_t i = 0; i < N_OF(pieces); i++)
        assert_int_equal(ds4_stream_feed(s, ds4_str_view(pieces[i]), &events, NULL), 0);
    assert_int_equal(ds4_stream_finish(s, DS4_ENGINE_STOP, &events, NULL), 0);
    assert_int_equal(ds4_stream_rules(s)[DS4_RULE_STRAY_CLOSER], 0);
    assert_true(ds4_str_equal(ds4_event_text(&events, &events.list.ptr[0]),
                              DS4_STR("a <" BAR "DSML" BAR "invoke name=\"bash\">\n</" BAR
                                      "DSML" BAR "invoke> </" BAR "DSML" BAR "tool_calls>")));
    ds4_events_deinit(&events);
    ds4_stream_free(s);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blanks_before_a_closer_do_not_hide_the_rejected_call),
        cmocka_unit_test(a_pseudo_tag_is_seen_across_a_tag_taken_back),
        cmocka_unit_test(every_beginning_of_a_tag_is_waited_for_as_the_machine_waits),
        cmocka_unit_test(random_texts_are_read_as_the_machine_reads_them),
    };

    if (argc > 1)
        n_texts = (int)strtol(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
