/* Speed of the tokenizer: encode and decode, one core.
 *
 *   bench_text [VOCAB FILE...]    VOCAB is a tokenizer.json or GGUF, files are read as UTF-8
 *
 * Without arguments: the real vocabulary in build/vocab, and the project's own C, prose and test data
 * (JSON with many scripts).
 * Each file is encoded whole, cold (fresh encoder, empty piece cache) and as plain text; one round
 * over all files is one sample.  Prints MiB per CPU second as median and spread over the rounds.  What bounds it:
 * about one memory access per word (piece cache), the classes of each character, and the merging of
 * words not seen before. */
#include "common/buf.h"
#include "router/text/bpe.h"
#include "router/text/detok.h"
#include "router/text/vocab_load.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define VOCAB_PATH     "build/vocab/tokenizer.json"
#define N_ROUND        11
#define MAX_TEXT_BYTES ((size_t)512 << 20)
#define MIB            (1024.0 * 1024.0)
#define NS_PER_S       1e9

/* CPU time of this thread: a busy machine slows the clock, not the work. */
static int64_t cpu_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * (int64_t)NS_PER_S + t.tv_nsec;
}

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void report(const char *what, double *mib_s)
{
    qsort(mib_s, N_ROUND, sizeof(*mib_s), compare_double);
    printf("%-8s %8.1f MiB/s median, %.1f..%.1f over %d rounds\n", what, mib_s[N_ROUND / 2],
           mib_s[0], mib_s[N_ROUND - 1], N_ROUND);
}

static void print_machine(void)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");

    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "model name", strlen("model name")) == 0) {
            printf("%s", line);
            break;
        }
    }
    if (file != NULL)
        fclose(file);
}

static int read_whole(const char *path, struct ds4_buf *buf)
{
    FILE *file = fopen(path, "rb");
    char block[65536];
    size_t n;

    ds4_buf_init(buf, MAX_TEXT_BYTES);
    if (file == NULL)
        return -1;
    while ((n = fread(block, 1, sizeof(block), file)) > 0)
        ds4_buf_append(buf, block, n);
    fclose(file);
    return buf->failed ? -1 : 0;
}

/* One round over all texts; returns ids of the last text in *ids, ns spent on encoding and decoding. */
static void run_round(const struct ds4_vocab *vocab, const struct ds4_buf *texts, size_t n_text,
                      size_t *n_id, double ns[2])
{
    ns[0] = ns[1] = 0;
    *n_id = 0;
    for (size_t t = 0; t < n_text; t++) {
        struct ds4_bpe *bpe = ds4_bpe_new(vocab, NULL);
        struct ds4_ids ids = {0};
        struct ds4_detok detok;
        struct ds4_buf out;
        int64_t start = cpu_ns();

        if (bpe == NULL ||
            ds4_bpe_encode(bpe, ds4_buf_view(&texts[t]), DS4_BPE_PLAIN, &ids, NULL) != 0)
            abort();
        ns[0] += (double)(cpu_ns() - start);
        ds4_buf_init(&out, MAX_TEXT_BYTES);
        ds4_detok_init(&detok, vocab, true);
        start = cpu_ns();
        for (size_t i = 0; i < ids.len; i++)
            if (ds4_detok_push(&detok, ids.ptr[i], &out, NULL) != 0)
                abort();
        ns[1] += (double)(cpu_ns() - start);
        *n_id += ids.len;
        ds4_buf_deinit(&out);
        DS4_VEC_DEINIT(&ids);
        ds4_bpe_free(bpe);
    }
}

/* The texts of all paths; 0 or -1. */
static int read_all(char **paths, size_t n_path, struct ds4_buf *texts, size_t *n_bytes)
{
    for (size_t t = 0; t < n_path; t++) {
        if (read_whole(paths[t], &texts[t]) != 0) {
            fprintf(stderr, "could not read %s\n", paths[t]);
            return -1;
        }
        *n_bytes += texts[t].len;
    }
    return 0;
}

static void run_rounds(const struct ds4_vocab *vocab, const struct ds4_buf *texts, size_t n_text,
                       size_t n_bytes)
{
    double encode[N_ROUND], decode[N_ROUND];
    size_t n_id = 0;

    for (int r = 0; r < N_ROUND; r++) {
        double ns[2];

        run_round(vocab, texts, n_text, &n_id, ns);
        encode[r] = (double)n_bytes / MIB / (ns[0] / NS_PER_S);
        decode[r] = (double)n_bytes / MIB / (ns[1] / NS_PER_S);
    }
    printf("%zu bytes, %zu tokens, %.2f bytes per token\n", n_bytes, n_id,
           (double)n_bytes / (double)n_id);
    report("encode", encode);
    report("decode", decode);
}

static int bench(const char *vocab_path, char **paths, size_t n_path)
{
    struct ds4_err err = {0};
    struct ds4_vocab *vocab = ds4_vocab_load(vocab_path, NULL, &err);
    struct ds4_buf *texts = calloc(n_path + 1, sizeof(*texts));
    size_t n_bytes = 0;
    int status = 1;

    if (vocab == NULL || texts == NULL) {
        fprintf(stderr, "%s\n", err.msg);
    } else if (read_all(paths, n_path, texts, &n_bytes) == 0) {
        print_machine();
        run_rounds(vocab, texts, n_path, n_bytes);
        status = 0;
    }
    for (size_t t = 0; t < n_path && texts != NULL; t++)
        ds4_buf_deinit(&texts[t]);
    free(texts);
    ds4_vocab_free(vocab);
    return status;
}

int main(int argc, char **argv)
{
    static const char *const own[] = {"README.md",
                                      "*/README.md",
                                      "*/*/README.md",
                                      "common/*.c",
                                      "router/*.c",
                                      "router/*/*.c",
                                      "worker/*.c",
                                      "tests/unit/*.c",
                                      "tests/data/encoding/*.json",
                                      "tests/data/dsml/*.json"};
    glob_t found = {0};
    int status;

    if (argc > 2)
        return bench(argv[1], argv + 2, (size_t)argc - 2);
    if (access(VOCAB_PATH, R_OK) != 0) {
        printf("skipped: no vocabulary at " VOCAB_PATH "\n");
        return 0;
    }
    for (size_t g = 0; g < sizeof(own) / sizeof(own[0]); g++)
        glob(own[g], found.gl_pathc > 0 ? GLOB_APPEND : 0, NULL, &found);
    status = bench(VOCAB_PATH, found.gl_pathv, found.gl_pathc);
    globfree(&found);
    return status;
}
