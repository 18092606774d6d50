/* Speed of the output parser: MiB of output text per second on one core, detokenizer not included.
 *
 * Three texts (prose, reasoning full of '<', one long tool argument), each fed in one piece, in pieces
 * of a token's size (4 bytes) and, for the worst cases, byte by byte: that a long held span costs the
 * same per byte as a short one shows that the parser is linear.  Target: 100 MiB/s.  Then the cost of
 * the tripwires per token, which should be below 1 % of a step (30 us of 3 ms). */
#include "router/parse/stream.h"

#include "common/buf.h"
#include "common/clock.h"
#include "router/parse/loop_guard.h"

#include <stdio.h>

#define TEXT_BYTES  ((size_t)8 << 20)
#define EVENT_BYTES ((size_t)1 << 28)
#define MIB         (1024.0 * 1024.0)
#define PFX                                                                                        \
    "\xef\xbd\x9c"                                                                                 \
    "DSML\xef\xbd\x9c"

static void fill_random(void *ctx, void *out, size_t n)
{
    unsigned char *bytes = out;

    for (size_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)(*(uint32_t *)ctx = *(uint32_t *)ctx * 1664525u + 1013904223u);
}

#define SCHEMA                                                                                     \
    "{\"properties\": {\"command\": {\"type\": \"string\"}}, \"required\": [\"command\"]}"
static const struct ds4_parse_tool tool = {{"bash", 4}, {SCHEMA, sizeof(SCHEMA) - 1}};

/* Seconds for one turn. */
static double parse_seconds(struct ds4_str text, size_t piece)
{
    uint32_t seed = 1;
    struct ds4_parse_config config = {
        .tools = &tool, .n_tools = 1, .random = fill_random, .random_ctx = &seed};
    struct ds4_stream *s = ds4_stream_new(&config, NULL);
    struct ds4_events events;
    int64_t begin;
    int rc = 0;

    ds4_events_init(&events, EVENT_BYTES);
    begin = ds4_clock_ns();
    for (size_t at = 0; at < text.len && rc == 0; at += piece) {
        rc = ds4_stream_feed(s, ds4_str_head(ds4_str_skip(text, at), piece), &events, NULL);
        ds4_events_clear(&events);
    }
    if (rc == 0)
        rc = ds4_stream_finish(s, DS4_ENGINE_STOP, &events, NULL);
    begin = ds4_clock_ns() - begin;
    ds4_events_deinit(&events);
    ds4_stream_free(s);
    return rc == 0 ? (double)begin * 1e-9 : 0;
}

static void repeat(struct ds4_buf *buf, const char *head, const char *body, size_t n_bytes)
{
    ds4_buf_clear(buf);
    (void)ds4_buf_append_text(buf, head);
    while (buf->len < n_bytes && ds4_buf_append_text(buf, body) == 0)
        continue;
}

static void report(const char *name, const struct ds4_buf *text)
{
    static const size_t pieces[] = {(size_t)-1, 64, 4, 1};

    printf("%-34s", name);
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        double seconds = parse_seconds(ds4_buf_view(text), pieces[i]);
        printf(" %9.1f", (double)text->len / MIB / seconds);
    }
    printf("\n");
}

/* Stands in for the tokenizer: asked only about lines that repeat. */
static size_t count_tokens(void *ctx, struct ds4_str text)
{
    (void)ctx;
    return text.len / 4 + 1;
}

/* Microseconds per token of the tripwires, tokens of 4 bytes. */
static void report_guard(const char *name, struct ds4_buf *text, const char *body)
{
    struct ds4_loop_knobs knobs;
    struct ds4_loop_guard guard;
    struct ds4_trip trip;
    int64_t begin;
    size_t n = 0;
    int rc = 0;

    repeat(text, "", body, TEXT_BYTES / 64);
    ds4_loop_knobs_default(&knobs);
    ds4_loop_guard_init(&guard, &knobs, count_tokens, NULL);
    begin = ds4_clock_ns();
    for (struct ds4_str rest = ds4_buf_view(text); rest.len > 0 && rc == 0; n++) {
        rc = ds4_loop_guard_add(&guard, ds4_str_head(rest, 4), &trip, NULL);
        rest = ds4_str_skip(rest, 4);
    }
    printf("tripwires, %-23s %9.2f us per token\n", name,
           (double)(ds4_clock_ns() - begin) * 1e-3 / (double)n);
    ds4_loop_guard_deinit(&guard);
}

int main(void)
{
    static const struct {
        const char *name, *head, *body;
    } texts[] = {
        {"prose", "", "The quick brown fox jumps over the lazy dog. It does so again.\n"},
        {"code with '<'", "", "for (i = 0; i < n; i++) v<int> x = a[i] << 2;  // <tag> </tag>\n"},
        {"string argument",
         "<" PFX "tool_calls>\n<" PFX "invoke name=\"bash\">\n<" PFX
         "parameter name=\"command\" string=\"true\">",
         "echo \"hello\" | grep -v '<x>' > out.txt\n"},
        {"held JSON argument",
         "<" PFX "tool_calls>\n<" PFX "invoke name=\"bash\">\n<" PFX
         "parameter name=\"command\" string=\"false\">",
         "[1, 2, 3, \"<x>\"], "},
        {"held candidate, prose at last",
         "<" PFX "invoke name=\"bash\">\n<" PFX "parameter name=\"command\">", "echo <x> hello\n"},
        {"plain parameters, never closed", "\n", "<parameter name=\"command\">ls</parameter>\n"},
        {"DSML parameters, never closed", "\n",
         "<" PFX "parameter name=\"command\">ls</" PFX "parameter>\n"},
        {"wrapper openers", "", "<" PFX "tool_calls>\n   "},
        {"newlines", "x", "\n\n\n\n\n\n\n\n"},
    };
    struct ds4_buf text;

    ds4_buf_init(&text, 2 * TEXT_BYTES);
    printf("%-34s %9s %9s %9s %9s  (MiB/s by bytes per piece)\n", "", "whole", "64", "4", "1");
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        repeat(&text, texts[i].head, texts[i].body, TEXT_BYTES - 4096);
        report(texts[i].name, &text);
    }
    report_guard("prose", &text,
                 "The quick brown fox jumps over the lazy dog. It does so again.\n");
    report_guard("short lines", &text, "Let me check a. \nLet me see b. \nNow c. \n");
    report_guard("one line", &text, "Go.\n");
    ds4_buf_deinit(&text);
    return 0;
}
