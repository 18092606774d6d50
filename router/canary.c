/* The canary: when it is asked, and what its answers mean.
 *
 *   quiet --due, place free--> asked --right--> quiet
 *     ^                          |  wrong once: asked again at once;  twice: `wrong`
 *     +--- generation lost ------+
 *
 * The prompt counts aloud.  What comes next is plain to any model that read anything, so that two
 * kernels for different batch shapes, which may round differently, agree on the tokens, while zeros or
 * foreign rows in weights or cache do not go unnoticed.
 * Invariant: `req` exists exactly while the scheduler holds it. */
#include "router/canary.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "router/cluster.h"
#include "router/request.h"
#include "router/sched/sched.h"
#include "router/text/bpe.h"

#include <stdlib.h>
#include <string.h>

#define DS4_CANARY_ARENA_BYTES ((size_t)1 << 20)
#define DS4_CANARY_LATE_FACTOR 2
#define DS4_CANARY_FATAL_MS    60000 /* a generation is not ended for it more often */

struct ds4_canary {
    struct ds4_canary_config config;
    struct ds4_sched *sched;
    struct ds4_cluster *cluster;
    int32_t prompt[DS4_CANARY_PROMPT_TOK];
    struct ds4_canary_status status;
    uint64_t fingerprint; /* of what the known answer belongs to */
    uint32_t generation;  /* of the newest question */
    struct ds4_request *req;
    int32_t n_token;
    int32_t token[DS4_CANARY_ANSWER_TOK];
    bool again;       /* the newest answer was wrong, the one before not */
    int64_t asked_ns; /* 0 = not in this generation */
    int64_t fatal_ns;
};

bool ds4_canary_is_late(const struct ds4_canary_status *status, int64_t now_ns)
{
    int64_t since_ns = status->good_ns > status->watch_ns ? status->good_ns : status->watch_ns;

    return status->watch_ns != 0 && now_ns - since_ns > status->late_ms * DS4_NS_PER_MS;
}

int ds4_canary_prompt(struct ds4_bpe *bpe, int32_t *prompt, struct ds4_err *err)
{
    static const char text[] = "one two three four five six seven eight nine ten\n"
                               "one two three four five six seven eight nine ten\n"
                               "one two three four five six seven eight nine ten\n"
                               "one two three four five six seven eight nine ten\n"
                               "one two three four five six seven eight nine ten\n"
                               "one two three four five six seven eight nine ten\n"
                               "one two three four five six seven eight nine ten\n";
    struct ds4_ids ids = {0};
    int rc = ds4_bpe_encode(bpe, DS4_STR(text), DS4_BPE_PLAIN, &ids, err);

    if (rc == 0 && ids.len == 0)
        rc = ds4_fail(err, DS4_E_INVALID, "the vocabulary has no words for the canary");
    for (size_t t = 0; rc == 0 && t < DS4_CANARY_PROMPT_TOK; t++)
        prompt[t] = ids.ptr[t % ids.len];
    DS4_VEC_DEINIT(&ids);
    return rc;
}

struct ds4_canary *ds4_canary_new(const struct ds4_canary_config *config, const int32_t *prompt,
                                  struct ds4_sched *sched, struct ds4_cluster *cluster,
                                  struct ds4_err *err)
{
    struct ds4_canary *c;

    if (config->n_expect != 0 && config->n_expect != DS4_CANARY_ANSWER_TOK) {
        ds4_fail(err, DS4_E_INVALID, "canary.expect has %d tokens, must have %d", config->n_expect,
                 DS4_CANARY_ANSWER_TOK);
        return NULL;
    }
    c = calloc(1, sizeof(*c));
    if (c == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the canary");
        return NULL;
    }
    c->config = *config;
    c->sched = sched;
    c->cluster = cluster;
    memcpy(c->prompt, prompt, sizeof(c->prompt));
    c->status.late_ms = (int64_t)DS4_CANARY_LATE_FACTOR * config->busy_ms;
    c->status.known = config->n_expect > 0;
    if (c->status.known)
        memcpy(c->status.answer, config->expect, sizeof(c->status.answer));
    return c;
}

void ds4_canary_free(struct ds4_canary *c)
{
    free(c);
}

const struct ds4_canary_status *ds4_canary_status(const struct ds4_canary *c)
{
    return &c->status;
}

/* ---- the answer ---------------------------------------------------------------------------------- */

static void on_token(void *owner, const struct ds4_token_entry *entry, int32_t index)
{
    struct ds4_canary *c = owner;

    if (c->n_token < DS4_CANARY_ANSWER_TOK)
        c->token[c->n_token++] = entry->token[index];
}

static void right(struct ds4_canary *c, int64_t now_ns)
{
    if (c->status.wrong)
        ds4_log(DS4_LOG_INFO, "canary.right", "generation=%u", c->generation);
    c->status.good_ns = now_ns;
    c->status.wrong = false;
    c->again = false;
    ds4_metric_add(c->config.metrics, DS4_M_CANARY, 1, "ok");
}

static void wrong(struct ds4_canary *c, int64_t now_ns)
{
    int32_t at = 0;

    while (at < c->n_token && c->token[at] == c->status.answer[at])
        at++;
    ds4_log(DS4_LOG_ERROR, "canary.wrong", "generation=%u token=%d got=%d known=%d again=%s",
            c->generation, at, at < c->n_token ? c->token[at] : -1,
            at < DS4_CANARY_ANSWER_TOK ? c->status.answer[at] : -1, c->again ? "yes" : "no");
    if (c->again && !c->status.wrong)
        ds4_cluster_note(c->cluster, true, "the canary's answer is not the known one", now_ns);
    c->status.wrong = c->status.wrong || c->again;
    c->again = !c->status.wrong;
    ds4_metric_add(c->config.metrics, DS4_M_CANARY, 1, "mismatch");
}

static void on_done(void *owner, const struct ds4_request_result *result)
{
    struct ds4_canary *c = owner;

    ds4_request_free(c->req);
    c->req = NULL;
    if (result->end != DS4_END_LENGTH) {
        /* Its generation is gone, or a step of it was not finite: others tell of that. */
        ds4_metric_add(c->config.metrics, DS4_M_CANARY, 1, "timeout");
        return;
    }
    if (!c->status.known) {
        memcpy(c->status.answer, c->token, sizeof(c->status.answer));
        c->status.known = true;
        ds4_log(DS4_LOG_INFO, "canary.recorded", "answer=%d,%d,%d,%d,%d,%d,%d,%d", c->token[0],
                c->token[1], c->token[2], c->token[3], c->token[4], c->token[5], c->token[6],
                c->token[7]);
    }
    if (c->n_token == DS4_CANARY_ANSWER_TOK &&
        memcmp(c->token, c->status.answer, sizeof(c->token)) == 0)
        right(c, result->timing.done_ns);
    else
        wrong(c, result->timing.done_ns);
}

/* ---- the question -------------------------------------------------------------------------------- */

static void ask(struct ds4_canary *c, int64_t now_ns)
{
    struct ds4_err err = {0};
    struct ds4_request *req =
        ds4_request_new(DS4_API_COMPLETIONS, now_ns, DS4_CANARY_ARENA_BYTES, &err);

    if (req == NULL)
        return;
    if (ds4_request_set_prompt(req, c->prompt, DS4_CANARY_PROMPT_TOK, &err) != 0) {
        ds4_request_free(req);
        return;
    }
    req->internal = true;
    req->max_new = DS4_CANARY_ANSWER_TOK;
    req->sampling.temperature = 0;
    req->sink = (struct ds4_request_sink){.owner = c, .token = on_token, .done = on_done};
    c->n_token = 0;
    if (ds4_sched_run_canary(c->sched, req, now_ns, &err) != 0) {
        ds4_request_free(req);
        if (err.code != DS4_E_BUSY)
            c->asked_ns = now_ns; /* a context too small for it, or no memory: not every tick */
        return;
    }
    c->req = req;
    c->asked_ns = now_ns;
}

static bool is_due(const struct ds4_canary *c, int64_t now_ns)
{
    struct ds4_sched_stats stats;
    int64_t since_ms = (now_ns - c->asked_ns) / DS4_NS_PER_MS;

    if (c->asked_ns == 0 || c->again || since_ms >= c->config.busy_ms)
        return true;
    if (since_ms < c->config.idle_ms)
        return false;
    ds4_sched_stats(c->sched, &stats);
    return stats.queued + stats.prefilling + stats.decoding + stats.parked == 0;
}

/* The known answer belongs to weights and cards: others give another. */
static void meet_generation(struct ds4_canary *c, int64_t now_ns)
{
    uint64_t fingerprint = ds4_cluster_fingerprint(c->cluster);

    c->generation = ds4_cluster_generation(c->cluster);
    c->status.watch_ns = now_ns;
    c->asked_ns = 0;
    if (fingerprint == c->fingerprint)
        return;
    if (c->fingerprint != 0 && c->config.n_expect == 0)
        c->status.known = false;
    c->fingerprint = fingerprint;
    c->status.wrong = false;
    c->again = false;
}

void ds4_canary_tick(struct ds4_canary *c, int64_t now_ns)
{
    struct ds4_err why = {0};

    if (c->req != NULL)
        return; /* one that never comes back is a step that never does: the cluster's business */
    if (!ds4_cluster_is_ready(c->cluster, now_ns)) {
        c->status.watch_ns = 0;
        return;
    }
    if (c->status.watch_ns == 0 || c->generation != ds4_cluster_generation(c->cluster))
        meet_generation(c, now_ns);
    if (c->status.wrong && c->config.fatal &&
        (c->fatal_ns == 0 || now_ns - c->fatal_ns >= DS4_CANARY_FATAL_MS * DS4_NS_PER_MS)) {
        c->fatal_ns = now_ns;
        ds4_fail(&why, DS4_E_CORRUPT, "the canary's answer is not the known one");
        ds4_cluster_restart(c->cluster, &why, now_ns);
        return;
    }
    if (is_due(c, now_ns))
        ask(c, now_ns);
}
