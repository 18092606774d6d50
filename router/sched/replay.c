/* What happens to requests when a generation is lost (kv-cache.md 5.2).
 *
 * recovery.mode = fail: they end.  replay: they go back into the queue with the tokens they have, which the
 * next generation computes like a prompt; random numbers are f(seed, position), so the answer goes on as it
 * would have.  What the client has stays sent: the parser was fed those tokens once and is not fed again.
 *
 * Poison guard: a prompt that was there at two losses is taken for their cause, is not replayed a second
 * time and is refused for a while.  Only the hash of the prompt is kept.
 * Invariant: a request is in the queue or over when this returns, never both. */
#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "router/sched/engine.h"

#include <xxhash.h>

#define DS4_POISON_NS   (600 * DS4_NS_PER_SEC)
#define DS4_MAX_CRASHES 2
#define DS4_MAX_REPLAYS 1

static uint64_t hash_of(const struct ds4_request *req)
{
    return XXH3_64bits_withSeed(req->prompt, (size_t)req->n_prompt * sizeof(*req->prompt),
                                req->salt);
}

static struct ds4_suspect *find_suspect(struct ds4_sched *s, uint64_t hash, int64_t now_ns)
{
    for (int32_t i = 0; i < DS4_N_SUSPECT; i++)
        if (s->suspect[i].n_crash > 0 && s->suspect[i].hash == hash &&
            now_ns - s->suspect[i].last_ns < DS4_POISON_NS)
            return &s->suspect[i];
    return NULL;
}

/* Losses this prompt was there at, this one included, however many answers to it were under way. */
static int32_t note_crash(struct ds4_sched *s, const struct ds4_request *req, int64_t now_ns)
{
    uint64_t hash = hash_of(req);
    struct ds4_suspect *suspect = find_suspect(s, hash, now_ns);

    if (suspect == NULL) { /* the place of the one not seen for longest */
        suspect = &s->suspect[0];
        for (int32_t i = 1; i < DS4_N_SUSPECT; i++)
            if (s->suspect[i].last_ns < suspect->last_ns)
                suspect = &s->suspect[i];
        *suspect = (struct ds4_suspect){.hash = hash};
    }
    if (suspect->n_crash == 0 || suspect->generation != s->form.generation)
        suspect->n_crash++;
    suspect->generation = s->form.generation;
    suspect->last_ns = now_ns;
    return suspect->n_crash;
}

int ds4_engine_check_poison(struct ds4_sched *s, const struct ds4_request *req, int64_t now_ns,
                            int32_t *wait_ms, struct ds4_err *err)
{
    const struct ds4_suspect *suspect =
        s->config.replay ? find_suspect(s, hash_of(req), now_ns) : NULL;

    if (suspect == NULL || suspect->n_crash < DS4_MAX_CRASHES)
        return 0;
    *wait_ms = (int32_t)((suspect->last_ns + DS4_POISON_NS - now_ns) / DS4_NS_PER_MS);
    return ds4_fail(err, DS4_E_UNAVAILABLE,
                    "the pipeline was lost %d times while this prompt was running",
                    suspect->n_crash);
}

/* Back into the queue with what it has; false if it must end. */
static bool requeue(struct ds4_sched *s, struct ds4_seq *seq, int64_t now_ns)
{
    struct ds4_request *req = seq->req;
    struct ds4_err err = {0};

    if (req->internal || req->n_replay >= DS4_MAX_REPLAYS || s->drained ||
        ds4_request_move(req, DS4_REQUEST_QUEUED, &err) != 0)
        return false;
    if (!seq->reading) { /* else it stands where it stood in the queue */
        DS4_VEC_DEINIT(&req->history);
        req->history.ptr = seq->token.ptr;
        req->history.len = (size_t)seq->n_told; /* of a record that was refused nobody has heard */
        req->history.cap = seq->token.cap;
        seq->token = (struct ds4_tokens){0};
    }
    req->n_replay++;
    req->seq = 0;
    ds4_metric_add(s->config.metrics, DS4_M_REQUESTS_REPLAYED, 1, NULL);
    ds4_log(DS4_LOG_INFO, "sched.replay", "request=%s tokens=%zu prompt=%d", req->id,
            req->history.len, req->n_prompt);
    ds4_engine_queue(s, req, now_ns);
    return true;
}

void ds4_engine_lose(struct ds4_sched *s, struct ds4_seq *seq, enum ds4_reason reason,
                     const struct ds4_err *why, int64_t now_ns)
{
    struct ds4_err poison = {0};

    if (s->config.replay && reason == DS4_REASON_RESTARTED) {
        if (!seq->req->internal && note_crash(s, seq->req, now_ns) >= DS4_MAX_CRASHES) {
            reason = DS4_REASON_POISONED;
            why = &poison;
            ds4_fail(&poison, DS4_E_UNAVAILABLE,
                     "the pipeline was lost again while this prompt was running");
        } else if (requeue(s, seq, now_ns)) {
            return;
        }
    }
    ds4_engine_finish(s, seq->req, DS4_END_ERROR, reason, -1, now_ns, why);
}
