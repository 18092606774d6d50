/* ds4-text: the offline text tool over router/text and router/parse.
 *
 * JSON lines in, JSON lines out, one answer per line, in order.  A line that fails answers with an
 * error object, the tool goes on, and the exit status is 1 at the end.  Bad arguments exit with 64
 * (argp), an unreadable model with 78. */
#include "common/buf.h"
#include "common/err.h"
#include "common/json_write.h"
#include "router/text/bpe.h"
#include "router/text/template.h"
#include "router/text/vocab_load.h"
#include "router/text_encode.h"
#include "router/text_parse.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>

#define ANSWER_BYTES    ((size_t)2 << 30)
#define EXIT_MODEL      78
#define STATUS_INVALID  400
#define STATUS_INTERNAL 500

enum command { TOKENIZE, DETOKENIZE, RENDER, PARSE, STREAM, TRIPWIRE, N_COMMAND };

static const char *const command_names[N_COMMAND] = {"tokenize", "detokenize", "render",
                                                     "parse",    "stream",     "tripwire"};

struct tool {
    enum command command;
    bool has_command;
    const char *model, *added;
    enum ds4_release release;
    struct ds4_text_parse_options parse;
    struct ds4_vocab *vocab;
    struct ds4_bpe *bpe;
};

/* ---- arguments ----------------------------------------------------------------------------------- */

static const char doc[] =
    "Reads JSON lines on standard input and writes one JSON line per input line.\v"
    "Commands:\n"
    "  tokenize    {text, parse_special?} or {bytes_hex} -> {ids}        needs --model\n"
    "  detokenize  {ids} -> {text, piece_hex}                            needs --model\n"
    "  render      {encoder, thinking_mode, messages} or a request -> {prompt, effort?}\n"
    "  parse       a model's output -> {reasoning, content, tool_calls, finish_reason}\n"
    "  stream      an output in chunks -> {states, final}\n"
    "  tripwire    {window} -> {soup, exact_line, fuzzy_15, fuzzy_6}     needs --model\n";

static const struct argp_option option_table[] = {
    {"model", 'm', "FILE", 0, "GGUF or tokenizer.json with the vocabulary", 0},
    {"added", 'a', "FILE", 0, "added tokens to lay over a tokenizer.json", 0},
    {"release", 'r', "RELEASE", 0, "v4_preview, v4_0731, v41, or v4 for either V4", 0},
    {"rules", 'R', NULL, 0, "parse: report which rules were used", 0},
    {0},
};

static bool needs_model(enum command command)
{
    return command == TOKENIZE || command == DETOKENIZE || command == TRIPWIRE;
}

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    struct tool *tool = state->input;

    switch (key) {
    case 'm':
        tool->model = arg;
        return 0;
    case 'a':
        tool->added = arg;
        return 0;
    case 'r':
        tool->release = ds4_release_parse(ds4_str_view(arg));
        if (tool->release == DS4_RELEASE_UNSET)
            argp_error(state, "unknown release \"%s\"", arg);
        return 0;
    case 'R':
        tool->parse.rules = true;
        return 0;
    case ARGP_KEY_ARG:
        for (int c = 0; c < N_COMMAND && !tool->has_command; c++) {
            if (strcmp(arg, command_names[c]) == 0) {
                tool->command = (enum command)c;
                tool->has_command = true;
                return 0;
            }
        }
        argp_error(state, "unexpected argument \"%s\"", arg);
        return 0;
    case ARGP_KEY_END:
        if (!tool->has_command)
            argp_usage(state);
        if (needs_model(tool->command) && tool->model == NULL)
            argp_error(state, "%s needs --model", command_names[tool->command]);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- lines --------------------------------------------------------------------------------------- */

/* A text that cannot be encoded counts as endless: it is no short line. */
static size_t count_tokens(void *ctx, struct ds4_str text)
{
    struct ds4_ids ids = {0};
    size_t n = SIZE_MAX;

    if (ds4_bpe_encode(ctx, text, DS4_BPE_PLAIN, &ids, NULL) == 0)
        n = ids.len;
    DS4_VEC_DEINIT(&ids);
    return n;
}

static int run_command(const struct tool *tool, struct ds4_str line, struct ds4_buf *answer,
                       struct ds4_err *err)
{
    switch (tool->command) {
    case TOKENIZE:
        return ds4_text_tokenize(line, tool->bpe, answer, err);
    case DETOKENIZE:
        return ds4_text_detokenize(line, tool->vocab, answer, err);
    case RENDER:
        return ds4_text_render(line, answer, err);
    case PARSE:
        return ds4_text_parse_case(line, &tool->parse, answer, err);
    case TRIPWIRE:
        return ds4_text_tripwire_case(line, count_tokens, tool->bpe, answer, err);
    default:
        return ds4_text_stream_case(line, &tool->parse, answer, err);
    }
}

static void write_error(const struct ds4_err *err, struct ds4_buf *answer)
{
    bool client = err->code == DS4_E_INVALID || err->code == DS4_E_TOO_LONG;
    struct ds4_jw w;

    ds4_buf_clear(answer);
    ds4_jw_init(&w, answer);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "error");
    ds4_jw_object(&w);
    ds4_jw_key(&w, "status");
    ds4_jw_int(&w, client ? STATUS_INVALID : STATUS_INTERNAL);
    ds4_jw_key(&w, "code");
    ds4_jw_text(&w, err->code == DS4_E_INVALID    ? "invalid_value"
                    : err->code == DS4_E_TOO_LONG ? "too_long"
                                                  : "internal_error");
    ds4_jw_key(&w, "message");
    ds4_jw_text(&w, err->msg);
    ds4_jw_end(&w);
    ds4_jw_end(&w);
}

/* 0, or 1 if a line failed or the answers could not be written. */
static int run_lines(const struct tool *tool)
{
    struct ds4_buf answer;
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    int status = 0;

    ds4_buf_init(&answer, ANSWER_BYTES);
    while ((n = getline(&line, &cap, stdin)) >= 0) {
        struct ds4_err err = {0};
        struct ds4_str text = {line, (size_t)n};

        if (text.len > 0 && text.ptr[text.len - 1] == '\n')
            text.len--;
        ds4_buf_clear(&answer);
        if (run_command(tool, text, &answer, &err) != 0) {
            write_error(&err, &answer);
            status = 1;
        }
        fwrite(answer.ptr, 1, answer.len, stdout);
        putchar('\n');
        fflush(stdout);
    }
    if (ferror(stdin) || ferror(stdout))
        status = 1;
    free(line);
    ds4_buf_deinit(&answer);
    return status;
}

static int load_model(struct tool *tool)
{
    struct ds4_vocab_overlay overlay = {tool->added, tool->release == DS4_RELEASE_V41};
    struct ds4_err err = {0};

    tool->vocab = ds4_vocab_load(tool->model, tool->added == NULL ? NULL : &overlay, &err);
    if (tool->vocab != NULL)
        tool->bpe = ds4_bpe_new(tool->vocab, &err);
    if (tool->bpe == NULL) {
        fprintf(stderr, "ds4-text: %s\n", err.msg);
        return -1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const struct argp argp = {option_table, parse_option, "COMMAND", doc, NULL, NULL, NULL};
    struct tool tool = {0};
    int status = EXIT_MODEL;

    argp_program_version = "ds4-text " DS4_VERSION;
    argp_parse(&argp, argc, argv, 0, NULL, &tool);
    tool.parse.spaced_tags = tool.release == DS4_RELEASE_V41;
    if (tool.model == NULL || load_model(&tool) == 0)
        status = run_lines(&tool);
    ds4_bpe_free(tool.bpe);
    ds4_vocab_free(tool.vocab);
    return status;
}
