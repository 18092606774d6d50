/* Speed of the output parser: MiB of output text per second of one core.
 *
 * Three texts (prose, reasoning full of '<', one long tool argument), each fed in one piece, in pieces
 * of a token's size (4 bytes) and, for the worst cases, byte by byte: that a long held span costs the
 * same per byte as a short one shows that the parser is linear.  Then tokens -> text -> events, with the
 * vocabulary of the argument (a GGUF or tokenizer.json, default build/vocab/tokenizer.json), and the
 * cost of the tripwires per token, which should be below 1 % of a step (30 us of 3 ms).  Target of
 * detokenizer and parser together: 100 MiB/s. */
#include "router/parse/stream.h"

#include "common/buf.h"
#include "common/clock.h"
#include "router/parse/loop_guard.h"
#include "router/text/bpe.h"
#include "router/text/detok.h"
#include "router/text/vocab_load.h"

#include <stdio.h>
#include <time.h>

#define TEXT_BYTES  ((size_t)8 << 20)
#define EVENT_BYTES ((size_t)1 << 28)
#define MIB         (1024.0 * 1024.0)
#define STEP_NS     3e6
#define PFX                                                                                        \
    "\xef\xbd\x9c"                                                                                 \
    "DSML\xef\xbd\x9c"

/* Of this thread alone: what else the machine does at the time hardly shows. */
static int64_t cpu_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * DS4_NS_PER_SEC + now.tv_nsec;
}

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
    begin = cpu_ns();
    for (size_t at = 0; at < text.len && rc == 0; at += piece) {
        rc = ds4_stream_feed(s, ds4_str_head(ds4_str_skip(text, at), piece), &events, NULL);
        ds4_events_clear(&events);
    }
    if (rc == 0)
        rc = ds4_stream_finish(s, DS4_ENGINE_STOP, &events, NULL);
    begin = cpu_ns() - begin;
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

/* What the router does with every sampled token. */
static void report_tokens(const struct ds4_vocab *vocab, const char *name, struct ds4_buf *text,
                          const char *head, const char *body)
{
    uint32_t seed = 1;
    const struct ds4_parse_config config = {
        .tools = &tool, .n_tools = 1, .random = fill_random, .random_ctx = &seed};
    struct ds4_stream *s = ds4_stream_new(&config, NULL);
    struct ds4_bpe *bpe = ds4_bpe_new(vocab, NULL);
    struct ds4_ids ids = {0};
    struct ds4_detok detok;
    struct ds4_events events;
    struct ds4_buf piece;
    int64_t begin;
    int rc;

    repeat(text, head, body, TEXT_BYTES);
    ds4_buf_init(&piece, 4096);
    ds4_events_init(&events, EVENT_BYTES);
    ds4_detok_init(&detok, vocab, true);
    rc = ds4_bpe_encode(bpe, ds4_buf_view(text), DS4_BPE_SPECIAL, &ids, NULL);
    begin = cpu_ns();
    for (size_t t = 0; t < ids.len && rc == 0; t++) {
        ds4_buf_clear(&piece);
        rc = ds4_detok_push(&detok, ids.ptr[t], &piece, NULL) != 0
                 ? -1
                 : ds4_stream_feed(s, ds4_buf_view(&piece), &events, NULL);
        ds4_events_clear(&events);
    }
    begin = cpu_ns() - begin;
    printf("tokens -> events, %-16s %9.1f MiB/s, %.2f bytes per token%s\n", name,
           (double)text->len / MIB / ((double)begin * 1e-9), (double)text->len / (double)ids.len,
           rc == 0 ? "" : ", FAILED");
    ds4_buf_deinit(&piece);
    ds4_events_deinit(&events);
    DS4_VEC_DEINIT(&ids);
    ds4_bpe_free(bpe);
    ds4_stream_free(s);
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
    begin = cpu_ns();
    for (struct ds4_str rest = ds4_buf_view(text); rest.len > 0 && rc == 0; n++) {
        rc = ds4_loop_guard_add(&guard, ds4_str_head(rest, 4), &trip, NULL);
        rest = ds4_str_skip(rest, 4);
    }
    printf("tripwires, %-23s %9.2f us per token, %.2f %% of a step of 3 ms\n", name,
           (double)(cpu_ns() - begin) * 1e-3 / (double)n,
           (double)(cpu_ns() - begin) / (double)n / STEP_NS * 100);
    ds4_loop_guard_deinit(&guard);
}

int main(int argc, char **argv)
{
    const char *vocab_path = argc > 1 ? argv[1] : "build/vocab/tokenizer.json";
    struct ds4_vocab *vocab = ds4_vocab_load(vocab_path, NULL, NULL);
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
    if (vocab == NULL)
        printf("tokens -> events: skipped, no vocabulary at %s\n", vocab_path);
    for (size_t i = 0; i < 3 && vocab != NULL; i++)
        report_tokens(vocab, texts[i].name, &text, texts[i].head, texts[i].body);
    ds4_vocab_free(vocab);
    report_guard("prose", &text,
                 "The quick brown fox jumps over the lazy dog. It does so again.\n");
    report_guard("short lines", &text, "Let me check a. \nLet me see b. \nNow c. \n");
    report_guard("one line", &text, "Go.\n");
    ds4_buf_deinit(&text);
    return 0;
}
