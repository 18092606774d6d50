/* Speed of what becomes of a sampled token: detokenizer, parser, both; MiB of output text per second of
 * one core.
 *
 *   bench_parse [VOCAB [NAME]]    a GGUF or tokenizer.json; default build/vocab/tokenizer.json; only that text
 *
 * First the texts as a rig produces them, token by token: prose, reasoning and code are files of this
 * project, CJK and emoji are phrases in random order, calls have a file as their argument.  Then made-up
 * worst cases, whole and in pieces of 64, 4 and 1 bytes: that a long held span costs the same per byte as a
 * short one shows that the parser is linear.  Then the tripwires, which should stay below 1 % of a step (30 us
 * of 3 ms).  Target of detokenizer and parser together: 100 MiB/s of each text.
 *
 * Median and spread are over N_ROUND rounds of this thread's processor time; on a machine that others use
 * the best round says more than the median. */
#include "router/parse/stream.h"

#include "common/buf.h"
#include "common/clock.h"
#include "common/utf8.h"
#include "router/parse/loop_guard.h"
#include "router/text/bpe.h"
#include "router/text/detok.h"
#include "router/text/vocab_load.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define N_ROUND     15
#define ROUND_BYTES ((size_t)1 << 20)
#define TEXT_BYTES  ((size_t)8 << 20)
#define EVENT_BYTES ((size_t)1 << 28)
#define MIB         (1024.0 * 1024.0)
#define STEP_NS     3e6
#define PFX                                                                                        \
    "\xef\xbd\x9c"                                                                                 \
    "DSML\xef\xbd\x9c"
#define CALL                                                                                       \
    "<" PFX "tool_calls>\n<" PFX "invoke name=\"bash\">\n<" PFX "parameter name=\"command\" "
#define END_CALL "</" PFX "parameter>\n</" PFX "invoke>\n</" PFX "tool_calls>"

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
    while (*body != '\0' && buf->len < n_bytes && ds4_buf_append_text(buf, body) == 0)
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

/* ---- token by token ------------------------------------------------------------------------- */

enum work { DETOKENISE, PARSE, BOTH, N_WORK };

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Seconds of the work for one turn of these tokens; 0 if it failed. */
static double turn_seconds(const struct ds4_vocab *vocab, const struct ds4_ids *ids,
                           const struct ds4_parse_config *config, enum work work)
{
    struct ds4_stream *s = ds4_stream_new(config, NULL);
    struct ds4_events events;
    struct ds4_detok detok;
    struct ds4_buf scratch;
    int64_t begin;
    int rc = s == NULL ? -1 : 0;

    ds4_buf_init(&scratch, 4096);
    ds4_events_init(&events, EVENT_BYTES);
    ds4_detok_init(&detok, vocab, true);
    begin = cpu_ns();
    for (size_t t = 0; t < ids->len && rc == 0; t++) {
        struct ds4_detok_text piece = {0};
        if (work == PARSE)
            piece.text = ds4_vocab_piece(vocab, ids->ptr[t]);
        else
            rc = ds4_detok_next(&detok, ids->ptr[t], &scratch, &piece, NULL);
        if (work == PARSE)
            rc = ds4_stream_feed(s, piece.text, &events, NULL);
        else if (rc == 0 && work == BOTH)
            rc = ds4_stream_feed_token(s, piece.text, piece.classes, &events, NULL);
        ds4_events_clear(&events);
    }
    begin = cpu_ns() - begin;
    ds4_buf_deinit(&scratch);
    ds4_events_deinit(&events);
    ds4_stream_free(s);
    return rc == 0 ? (double)begin * 1e-9 : 0;
}

static const char *only; /* the text to measure, NULL: all of them */

static void report_tokens(const struct ds4_vocab *vocab, const char *name, bool reasoning,
                          struct ds4_str text)
{
    static const char *const works[N_WORK] = {"detokenise", "parse", "tokens to events"};
    uint32_t seed = 1;
    const struct ds4_parse_config config = {.tools = &tool,
                                            .n_tools = 1,
                                            .starts_in_reasoning = reasoning,
                                            .random = fill_random,
                                            .random_ctx = &seed};
    struct ds4_bpe *bpe = ds4_bpe_new(vocab, NULL);
    struct ds4_ids ids = {0};

    if (only != NULL && strcmp(only, name) != 0)
        goto out;
    if (bpe == NULL || ds4_bpe_encode(bpe, text, DS4_BPE_SPECIAL, &ids, NULL) != 0)
        abort();
    printf("%-18s %.2f bytes a token", name, (double)text.len / (double)ids.len);
    for (enum work work = DETOKENISE; work < N_WORK; work++) {
        double mib_s[N_ROUND];

        for (size_t r = 0; r < N_ROUND; r++)
            mib_s[r] = (double)text.len / MIB / turn_seconds(vocab, &ids, &config, work);
        qsort(mib_s, N_ROUND, sizeof(*mib_s), compare_double);
        printf("; %s %.0f (%.0f..%.0f)", works[work], mib_s[N_ROUND / 2], mib_s[0],
               mib_s[N_ROUND - 1]);
    }
    printf(" MiB/s\n");
out:
    DS4_VEC_DEINIT(&ids);
    ds4_bpe_free(bpe);
}

/* The files of a pattern, again and again, up to n_bytes in all; cut between characters. */
static void append_files(struct ds4_buf *out, const char *pattern, size_t n_bytes)
{
    static char block[65536];
    glob_t found = {0};
    size_t begin = out->len;

    if (glob(pattern, 0, NULL, &found) != 0) {
        fprintf(stderr, "no %s here: run this from the top folder\n", pattern);
        abort();
    }
    for (size_t f = 0; out->len - begin < n_bytes; f = (f + 1) % found.gl_pathc) {
        FILE *file = fopen(found.gl_pathv[f], "rb");
        size_t n = file == NULL ? 0 : fread(block, 1, sizeof(block), file);
        (void)ds4_buf_append(out, block, n);
        if (file != NULL)
            fclose(file);
    }
    ds4_buf_truncate(out, begin + n_bytes);
    ds4_buf_truncate(out, out->len - ds4_utf8_cut_tail(ds4_buf_view(out)));
    globfree(&found);
}

static void append_phrases(struct ds4_buf *out, const char *const *phrases, size_t n,
                           size_t n_bytes)
{
    uint32_t seed = 1;

    while (out->len < n_bytes) {
        seed = seed * 1664525u + 1013904223u;
        (void)ds4_buf_append_text(out, phrases[(seed >> 16) % n]);
    }
}

static void report_all_tokens(const struct ds4_vocab *vocab, struct ds4_buf *text)
{
    static const char *const cjk[] = {
        "模型", "的",   "回答",   "应该", "是",   "正确的", "，",     "。",       "我们",
        "先",   "检查", "文件",   "再",   "运行", "测试",   "\n",     "日本語の", "テキスト",
        "を",   "処理", "します", "、",   "問題", "이",     "문장은", " 한국어",  "입니다."};
    static const char *const emoji[] = {"🎉",       "👩‍💻", "🚀", " ok ", "✅", "❤️",
                                        "🔧 fixed", "\n",          "😀", "done", "🇩🇪"};

    ds4_buf_clear(text);
    append_files(text, "*/README.md", ROUND_BYTES);
    report_tokens(vocab, "prose", false, ds4_buf_view(text));
    ds4_buf_clear(text);
    append_files(text, "deploy/*.md", ROUND_BYTES - 64);
    (void)ds4_buf_append_text(text, "</think>Done.");
    report_tokens(vocab, "reasoning", true, ds4_buf_view(text));
    ds4_buf_clear(text);
    append_files(text, "router/*/*.c", ROUND_BYTES);
    report_tokens(vocab, "code", false, ds4_buf_view(text));
    repeat(text, "", "for (i = 0; i < n; i++) v<int> x = a[i] << 2;  // <tag> </tag>\n",
           ROUND_BYTES);
    report_tokens(vocab, "full of '<'", false, ds4_buf_view(text));
    repeat(text, CALL "string=\"true\">", "", 0);
    append_files(text, "worker/*.c", ROUND_BYTES - 256);
    (void)ds4_buf_append_text(text, END_CALL);
    report_tokens(vocab, "string argument", false, ds4_buf_view(text));
    repeat(text, CALL "string=\"false\">[", "{\"line\": 12, \"text\": \"a < b\", \"ok\": true}, ",
           ROUND_BYTES);
    (void)ds4_buf_append_text(text, "1]" END_CALL);
    report_tokens(vocab, "JSON argument", false, ds4_buf_view(text));
    ds4_buf_clear(text);
    append_phrases(text, cjk, sizeof(cjk) / sizeof(cjk[0]), ROUND_BYTES);
    report_tokens(vocab, "CJK", false, ds4_buf_view(text));
    ds4_buf_clear(text);
    append_phrases(text, emoji, sizeof(emoji) / sizeof(emoji[0]), ROUND_BYTES);
    report_tokens(vocab, "emoji", false, ds4_buf_view(text));
}

/* ---- tripwires ------------------------------------------------------------------------------ */

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
        {"string argument", CALL "string=\"true\">", "echo \"hello\" | grep -v '<x>' > out.txt\n"},
        {"held JSON argument", CALL "string=\"false\">", "[1, 2, 3, \"<x>\"], "},
        {"held candidate, prose at last",
         "<" PFX "invoke name=\"bash\">\n<" PFX "parameter name=\"command\">", "echo <x> hello\n"},
        {"plain parameters, never closed", "\n", "<parameter name=\"command\">ls</parameter>\n"},
        {"DSML parameters, never closed", "\n",
         "<" PFX "parameter name=\"command\">ls</" PFX "parameter>\n"},
        {"wrapper openers", "", "<" PFX "tool_calls>\n   "},
        {"newlines", "x", "\n\n\n\n\n\n\n\n"},
    };
    struct ds4_buf text;

    only = argc > 2 ? argv[2] : NULL;
    ds4_buf_init(&text, 2 * TEXT_BYTES);
    if (vocab == NULL)
        printf("token by token: skipped, no vocabulary at %s\n", vocab_path);
    else
        report_all_tokens(vocab, &text);
    ds4_vocab_free(vocab);
    if (only != NULL)
        goto out;
    printf("%-34s %9s %9s %9s %9s  (MiB/s by bytes per piece)\n", "", "whole", "64", "4", "1");
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        repeat(&text, texts[i].head, texts[i].body, TEXT_BYTES - 4096);
        report(texts[i].name, &text);
    }
    report_guard("prose", &text,
                 "The quick brown fox jumps over the lazy dog. It does so again.\n");
    report_guard("short lines", &text, "Let me check a. \nLet me see b. \nNow c. \n");
    report_guard("one line", &text, "Go.\n");
out:
    ds4_buf_deinit(&text);
    return 0;
}
