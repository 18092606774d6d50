/* Random operations on the sequence state against a naive model.
 *
 * Conversations are continued, cut back, forked, cancelled, refused, sent under other salts and beside each
 * other, with fewer slots, blocks and points than they would like, so that everything is parked, evicted,
 * copied, saved and installed all the time.  Every answer must be that of a fresh run over all its tokens
 * (ds4_scripted_next), with drafts and without, and after every operation ledger, index and points are recounted. */
#include "router/sched/engine.h"
#include "tests/support/sched_rig.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define N_TALK      10
#define N_CLIENT    6
#define MAX_TALK    1500
#define MAX_NEW     6
#define DEFAULT_OPS 100000

struct talk {
    int32_t token[MAX_TALK];
    int32_t n;
};

struct world {
    struct ds4_rig rig;
    struct talk talk[N_TALK];
    struct ds4_rig_client *client[N_CLIENT];
    int32_t of_talk[N_CLIENT]; /* which conversation the answer continues, -1 none */
    uint64_t seed;
    uint64_t n_submitted, n_refused, n_cancelled, n_cached, n_right;
};

static int32_t pick(struct world *w, int32_t n)
{
    w->seed = w->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int32_t)((w->seed >> 33) % (uint64_t)n);
}

static void check(struct world *w)
{
    struct ds4_sched *s = w->rig.sched;
    struct ds4_err err = {0};

    (void)(ds4_budget_check(s->budget, &err) == 0 && ds4_prefix_check(&s->prefix, &err) == 0 &&
           ds4_points_check(&s->points, &err) == 0);
    assert_string_equal(err.msg, "");
    assert_string_equal(w->rig.stage.err.msg, "");
    if (s->n_posted == 0) /* stages and router think of the same points */
        assert_int_equal(s->points.n_point - (int32_t)s->points.wanted.len +
                             (int32_t)s->points.dropped.len,
                         w->rig.stage.point.len);
}

/* Takes in a finished answer. */
static void collect(struct world *w, int32_t c)
{
    struct ds4_rig_client *client = w->client[c];
    struct talk *talk;

    if (client == NULL || client->n_done == 0)
        return;
    if (client->result.end != DS4_END_CANCELLED) {
        assert_int_equal(client->result.err.code, DS4_OK);
        assert_true(ds4_rig_is_right(client, MAX_NEW));
        w->n_right++;
        w->n_cached += (uint64_t)client->cached;
        if (w->of_talk[c] >= 0) {
            talk = &w->talk[w->of_talk[c]];
            talk->n = client->prompt.len < MAX_TALK ? (int32_t)client->prompt.len : MAX_TALK;
            memcpy(talk->token, client->prompt.ptr, (size_t)talk->n * sizeof(int32_t));
            for (size_t t = 0; t < client->out.len && talk->n < MAX_TALK; t++)
                talk->token[talk->n++] = client->out.ptr[t];
        }
    }
    ds4_rig_client_free(client);
    w->client[c] = NULL;
}

static void turns(struct world *w, int32_t n)
{
    while (n-- > 0 && ds4_rig_turn(&w->rig)) {
    }
    for (int32_t c = 0; c < N_CLIENT; c++)
        collect(w, c);
}

static int32_t free_client(struct world *w)
{
    for (;;) {
        for (int32_t c = 0; c < N_CLIENT; c++)
            if (w->client[c] == NULL)
                return c;
        turns(w, 4);
    }
}

/* A request over the first `keep` tokens of a conversation and n_more others. */
static void ask(struct world *w, int32_t t, int32_t keep, int32_t n_more)
{
    struct talk *talk = &w->talk[t];
    int32_t prompt[MAX_TALK + 512];
    int32_t c = free_client(w), n;
    struct ds4_err err = {0};

    keep = keep < talk->n ? keep : talk->n;
    keep = keep > 0 ? keep : 0;
    memcpy(prompt, talk->token, (size_t)keep * sizeof(int32_t));
    for (n = keep; n < keep + n_more; n++)
        prompt[n] = pick(w, DS4_RIG_VOCAB);
    w->client[c] = ds4_rig_client_of(&w->rig, prompt, n, MAX_NEW);
    w->client[c]->req->salt = pick(w, 30) == 0 ? 1 : 0;
    w->client[c]->req->affinity = (uint64_t)pick(w, 3) == 0 ? 0 : (uint64_t)t + 1;
    w->client[c]->req->no_cache_reads = pick(w, 60) == 0;
    w->of_talk[c] = t;
    assert_int_equal(ds4_rig_submit(w->client[c], NULL, &err), 0);
    w->n_submitted++;
}

static void refuse(struct world *w)
{
    static const int32_t bad[30] = {[3] = DS4_RIG_VOCAB};
    uint64_t before = ds4_budget_digest(w->rig.sched->budget);
    struct ds4_rig_client *client = ds4_rig_client(&w->rig, 7, 30, 1000000);
    enum ds4_reason reason;
    struct ds4_err err = {0};

    client->req->n_prompt = pick(w, 2) == 0 ? 0 : client->req->n_prompt;
    if (client->req->n_prompt > 0)
        client->req->prompt = bad;
    assert_int_equal(ds4_rig_submit(client, &reason, &err), -1);
    assert_true(before == ds4_budget_digest(w->rig.sched->budget));
    ds4_rig_client_free(client);
    w->n_refused++;
}

static void cancel(struct world *w)
{
    int32_t c = pick(w, N_CLIENT);

    if (w->client[c] == NULL || w->client[c]->n_done > 0)
        return;
    ds4_sched_cancel(w->rig.sched, w->client[c]->req, DS4_CANCEL_DISCONNECT, w->rig.now_ns);
    assert_int_equal(w->client[c]->n_done, 1);
    w->n_cancelled++;
    collect(w, c);
}

static void operate(struct world *w)
{
    int32_t t = pick(w, N_TALK), kind = pick(w, 100);
    struct talk *talk = &w->talk[t];

    if (talk->n > MAX_TALK - 200)
        ask(w, t, 100 + pick(w, 900), 1 + pick(w, 20)); /* compaction */
    else if (kind < 40)
        ask(w, t, talk->n, 1 + pick(w, 40));
    else if (kind < 55) /* shallow cut */
        ask(w, t, talk->n - pick(w, 60), 1 + pick(w, 30));
    else if (kind < 62) /* deep cut */
        ask(w, t, 1 + pick(w, talk->n + 1), 1 + pick(w, 30));
    else if (kind < 68) { /* fork */
        ask(w, t, talk->n, 3);
        ask(w, t, talk->n, 3);
    } else if (kind < 72) /* the same prompt again */
        ask(w, t, talk->n, talk->n == 0 ? 1 : 0);
    else if (kind < 76) /* a long paste */
        ask(w, t, talk->n, 300 + pick(w, 100));
    else if (kind < 80) /* somebody new */
        ask(w, t, 0, 20 + pick(w, 300));
    else if (kind < 88)
        cancel(w);
    else if (kind < 92)
        refuse(w);
    else if (kind == 92 && pick(w, 40) == 0) { /* nothing survives a new generation */
        struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "lost"};

        while (ds4_sched_n_running(w->rig.sched) > 0)
            turns(w, 1);
        ds4_sched_stop(w->rig.sched, DS4_REASON_RESTARTED, &why, w->rig.now_ns);
        ds4_rig_start(&w->rig);
    }
    turns(w, pick(w, 12));
}

static void run(uint64_t seed, int32_t n_op)
{
    static struct world w;
    const struct ds4_rig_shape shape = {
        .n_stage = 1 + (int32_t)(seed % 3),
        .n_blocks = 26 + (int32_t)(seed % 3) * 12,
        .n_slots = 5,
        .context_tok = 4096,
        .n_points = seed % 4 == 3 ? 6 : 60,
        .replay_tok = seed % 2 == 1 ? 300 : 0,
        .max_draft = seed % 5 < 3 ? (int32_t)seed % 5 * 3 : DS4_MAX_DRAFT,
        .config = {.max_seqs = 4, .chunk_tok = 256, .queue_max = 16, .queue_ms = 1000000000},
    };
    struct ds4_points *points;

    w = (struct world){.seed = seed};
    ds4_rig_open(&w.rig, &shape);
    points = &w.rig.sched->points;
    for (int32_t i = 0; i < n_op; i++) {
        operate(&w);
        check(&w);
    }
    for (int32_t c = 0; c < N_CLIENT; c++)
        while (w.client[c] != NULL)
            turns(&w, 1);
    check(&w);
    print_message("seed %" PRIu64 ": %d operations, %" PRIu64 " requests, %" PRIu64
                  " cancelled, %" PRIu64 " refused; %" PRIu64 " tokens from the cache; %" PRIu64
                  " saves, %" PRIu64 " thinned, %" PRIu64 " installs, %" PRIu64 " copies, %" PRIu64
                  " replays, %" PRIu64 " of %" PRIu64 " drafts right\n",
                  seed, n_op, w.n_submitted, w.n_cancelled, w.n_refused, w.n_cached,
                  w.rig.stage.n_saves, points->n_thinned, w.rig.stage.n_installs,
                  w.rig.stage.n_copies, w.rig.stage.n_replays, w.rig.stage.n_accepted,
                  w.rig.stage.n_drafted);
    assert_true(w.n_right > 0 && w.n_cached > 100 * w.n_right);
    assert_true(w.rig.stage.n_installs > 0 && w.rig.stage.n_copies > 0 && points->n_thinned > 0);
    assert_int_equal(w.rig.stage.n_replays > 0, shape.replay_tok > 0);
    assert_int_equal(w.rig.stage.n_accepted > 0, shape.max_draft > 0);
    assert_true(w.rig.stage.n_accepted < w.rig.stage.n_drafted || shape.max_draft == 0);
    ds4_rig_close(&w.rig);
}

static void random_operations_equal_fresh_runs(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 10; seed++)
        run(seed, DEFAULT_OPS / 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_operations_equal_fresh_runs)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
