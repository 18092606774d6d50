/* ds4-gguf: inspect, check and synthesise model files.
 *
 *   ds4-gguf info F                       what is inside
 *   ds4-gguf check [--check-tensors] F    every rule of the loader; one line per finding, exit 1 if any
 *   ds4-gguf synth --shape flash --quant q2 --layers 0-2 --seed 1 OUT
 *
 * Results go to standard output, complaints about the call to standard error. */
#include "common/err.h"
#include "common/log.h"
#include "worker/gguf_check.h"
#include "worker/gguf_info.h"
#include "worker/gguf_synth.h"

#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXIT_FINDINGS 1
#define EXIT_FAILED   1
#define MAX_LAYER     9999

enum { OPT_SHAPE = 's', OPT_QUANT = 'q', OPT_LAYERS = 'l', OPT_SEED = 'n', OPT_TENSORS = 't' };

struct options {
    const char *command;
    const char *path;
    bool tensors;
    struct ds4_gguf_synth synth;
};

const char *argp_program_version = "ds4-gguf " DS4_VERSION;

static const struct argp_option option_table[] = {
    {"check-tensors", OPT_TENSORS, NULL, 0,
     "check: read all weights, report NaN and infinite scales", 0},
    {"shape", OPT_SHAPE, "NAME", 0, "synth: flash or tiny", 0},
    {"quant", OPT_QUANT, "NAME", 0, "synth: q2, mxfp4 or q8 experts", 0},
    {"layers", OPT_LAYERS, "A-B", 0, "synth: first and last layer, from 0 (default: all)", 0},
    {"seed", OPT_SEED, "N", 0, "synth: other weights for another number (default 1)", 0},
    {0},
};

static const char *read_number(const char *p, uint64_t max, uint64_t *out)
{
    const char *begin = p;
    uint64_t value = 0;

    for (; *p >= '0' && *p <= '9'; p++) {
        if (value > (max - (uint64_t)(*p - '0')) / 10)
            return NULL;
        value = value * 10 + (uint64_t)(*p - '0');
    }
    *out = value;
    return p == begin ? NULL : p;
}

static void parse_layers(const char *text, struct options *o, struct argp_state *state)
{
    uint64_t first = 0;
    uint64_t last = 0;
    const char *p = read_number(text, MAX_LAYER, &first);

    if (p != NULL && *p == '\0') /* a single layer */
        last = first;
    else if (p != NULL && *p == '-')
        p = read_number(p + 1, MAX_LAYER, &last);
    else
        p = NULL;
    if (p == NULL || *p != '\0')
        argp_error(state, "--layers \"%s\" must be like 0-14", text);
    o->synth.first_layer = (int32_t)first;
    o->synth.last_layer = (int32_t)last;
}

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    struct options *o = state->input;
    const char *p;

    switch (key) {
    case OPT_TENSORS:
        o->tensors = true;
        return 0;
    case OPT_SHAPE:
        o->synth.shape = arg;
        return 0;
    case OPT_QUANT:
        o->synth.quant = arg;
        return 0;
    case OPT_LAYERS:
        parse_layers(arg, o, state);
        return 0;
    case OPT_SEED:
        p = read_number(arg, UINT64_MAX, &o->synth.seed);
        if (p == NULL || *p != '\0')
            argp_error(state, "--seed \"%s\" must be a number", arg);
        return 0;
    case ARGP_KEY_ARG:
        if (o->command == NULL)
            o->command = arg;
        else if (o->path == NULL)
            o->path = arg;
        else
            argp_error(state, "too many arguments: %s", arg);
        return 0;
    case ARGP_KEY_END:
        if (o->path == NULL)
            argp_error(state, "a command (info, check, synth) and a file are needed");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp parser = {
    option_table,
    parse_option,
    "info FILE\ncheck FILE\nsynth OUT",
    "Inspect, check and synthesise DeepSeek V4 model files (GGUF).",
    NULL,
    NULL,
    NULL,
};

static int fail(const struct ds4_err *err)
{
    fprintf(stderr, "ds4-gguf: %s\n", err->msg);
    return EXIT_FAILED;
}

static void print_finding(void *arg, const struct ds4_err *finding)
{
    (void)arg;
    printf("%s\n", finding->msg);
}

static int run_check(const struct options *o)
{
    int32_t n = ds4_gguf_check(o->path, o->tensors, print_finding, NULL);

    fprintf(stderr, "ds4-gguf: %s: %" PRId32 " finding(s)\n", o->path, n);
    return n == 0 ? EXIT_SUCCESS : EXIT_FINDINGS;
}

static int run_info(const struct options *o)
{
    struct ds4_err err = {DS4_OK, ""};

    return ds4_gguf_print_info(o->path, stdout, &err) == 0 ? EXIT_SUCCESS : fail(&err);
}

static int run_synth(const struct options *o)
{
    struct ds4_err err = {DS4_OK, ""};

    if (o->synth.shape == NULL || o->synth.quant == NULL) {
        fputs("ds4-gguf: synth needs --shape and --quant\n", stderr);
        return EXIT_FAILED;
    }
    return ds4_gguf_synth_write(&o->synth, o->path, &err) == 0 ? EXIT_SUCCESS : fail(&err);
}

int main(int argc, char **argv)
{
    struct options o = {.synth = {.last_layer = -1, .seed = 1}};
    int status = EXIT_FAILED;

    argp_parse(&parser, argc, argv, 0, NULL, &o);
    if (strcmp(o.command, "info") == 0)
        status = run_info(&o);
    else if (strcmp(o.command, "check") == 0)
        status = run_check(&o);
    else if (strcmp(o.command, "synth") == 0)
        status = run_synth(&o);
    else
        fprintf(stderr, "ds4-gguf: unknown command %s; try --help\n", o.command);
    if (fflush(stdout) != 0) {
        fprintf(stderr, "ds4-gguf: could not write the answer: %s\n", strerror(errno));
        status = EXIT_FAILED;
    }
    return status;
}
