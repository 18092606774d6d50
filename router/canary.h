/* A question with a known answer, asked of the whole pipeline again and again.
 *
 * Silent corruption (a bad memory cell, a kernel that reads foreign rows) raises no error: tokens go on
 * coming and are wrong.  The canary is a fixed prompt answered greedily.  Its answer is recorded when the
 * cluster is first ready with these weights, backends and devices (or given by canary.expect); every later
 * answer must be the same.  One that differs is counted and asked again at once; twice in a row means
 * DEGRADED, and with canary.fatal a new generation.
 *
 * It runs in the probe's place of the scheduler (ds4_sched_run_canary): it evicts nothing and is counted
 * by ds4_canary_total alone.  Loop thread only; time is handed in. */
#ifndef DS4_ROUTER_CANARY_H
#define DS4_ROUTER_CANARY_H

#include "common/err.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_CANARY_PROMPT_TOK 64
#define DS4_CANARY_ANSWER_TOK 8

struct ds4_bpe;
struct ds4_canary;
struct ds4_cluster;
struct ds4_metrics;
struct ds4_sched;

struct ds4_canary_config {
    int32_t idle_ms;             /* asked so often while nothing else runs; required */
    int32_t busy_ms;             /* and so often whatever runs; required */
    bool fatal;                  /* a wrong answer ends the generation */
    int32_t n_expect;            /* 0 = record the first answer, else DS4_CANARY_ANSWER_TOK */
    const int32_t *expect;       /* copied */
    struct ds4_metrics *metrics; /* borrowed; NULL = none */
};

struct ds4_canary_status {
    int64_t good_ns;  /* when the newest right answer came; 0 = never */
    int64_t watch_ns; /* since when this generation could be asked; 0 = none runs */
    int64_t late_ms;  /* longer without a right answer is late */
    bool known;       /* `answer` is the known one */
    bool wrong;       /* the two newest answers were not */
    int32_t answer[DS4_CANARY_ANSWER_TOK];
};

/* No right answer for longer than late_ms, in a generation that could be asked. */
bool ds4_canary_is_late(const struct ds4_canary_status *status, int64_t now_ns);

/* The prompt's DS4_CANARY_PROMPT_TOK ids in this vocabulary. */
int ds4_canary_prompt(struct ds4_bpe *bpe, int32_t *prompt, struct ds4_err *err) DS4_MUST_CHECK;

/* Everything is borrowed for the canary's life; `prompt` is copied. */
struct ds4_canary *ds4_canary_new(const struct ds4_canary_config *config, const int32_t *prompt,
                                  struct ds4_sched *sched, struct ds4_cluster *cluster,
                                  struct ds4_err *err);
/* After the scheduler, which may still hold its request, was stopped. */
void ds4_canary_free(struct ds4_canary *canary);
const struct ds4_canary_status *ds4_canary_status(const struct ds4_canary *canary);

/* Asks when it is time; at least ten times a second. */
void ds4_canary_tick(struct ds4_canary *canary, int64_t now_ns);

#endif
