/* The workers as the router sees them: who is there, when they form, what loses a generation.
 *
 * One rule for every failure (a silent or disconnected worker, FATAL, BYE, another boot of a stage, a
 * late step, a record that contradicts the books): first leave TOGETHER, so that nobody is told "ready"
 * from then on; then ABORT to the survivors; then end the running requests.  The next formation gets a
 * new generation and a new random pipe key, so that nothing of an old one can be taken for new.
 * Invariant: the scheduler is started exactly while bond is TOGETHER. */
#include "router/cluster.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/service.h"
#include "router/cluster_state.h"
#include "router/generation.h"
#include "router/sched/budget.h"
#include "router/sched/sched.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <xxhash.h>

#define DS4_JOIN_BACKOFF_MAX_S 30
#define DS4_EXIT_UNKNOWN       (-1)

static int32_t or_default(int32_t value, int32_t fallback)
{
    return value > 0 ? value : fallback;
}

/* Counters of this cluster's stages are there from the start: Prometheus sees a rise only between two
 * samples, so the first fault of a series that begins with it would go unnoticed. */
static void show_zeros(const struct ds4_cluster *c)
{
    static const char *const exits[] = {"clean", "70", "71", "72", "75", "78", "79", "signal"};
    static const char *const codes[] = {"214", "700", "710", "714", "716", "719", "other"};

    for (int32_t s = 0; s < c->config.n_stage; s++) {
        for (size_t i = 0; i < sizeof(exits) / sizeof(exits[0]); i++)
            ds4_metric_add(c->config.metrics, DS4_M_WORKER_RESTARTS, 0, ds4_metric_stage(s),
                           exits[i]);
        for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
            ds4_metric_add(c->config.metrics, DS4_M_CUDA_ERRORS, 0, ds4_metric_stage(s), codes[i]);
    }
}

struct ds4_cluster *ds4_cluster_new(const struct ds4_cluster_config *config,
                                    const struct ds4_cluster_port *port, struct ds4_sched *sched,
                                    struct ds4_err *err)
{
    struct ds4_cluster *c;
    struct ds4_cluster_config *k;

    if (config->n_stage < 1 || config->n_stage > DS4_MAX_STAGES) {
        ds4_fail(err, DS4_E_INVALID, "%d stages, must be 1 to %d", config->n_stage, DS4_MAX_STAGES);
        return NULL;
    }
    c = calloc(1, sizeof(*c));
    if (c == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the worker table");
        return NULL;
    }
    c->config = *config;
    k = &c->config;
    k->lost_ms = or_default(k->lost_ms, 3000);
    k->ping_ms = or_default(k->ping_ms, 250);
    k->form_ms = or_default(k->form_ms, 30000);
    k->away_ms = or_default(k->away_ms, 120000);
    k->hold_ms = or_default(k->hold_ms, 20000);
    k->fresh_ms = or_default(k->fresh_ms, 15000);
    k->leave_ms = or_default(k->leave_ms, 30000);
    c->leaving = -1;
    c->port = *port;
    c->sched = sched;
    c->generation = config->first_generation;
    for (int32_t s = 0; s < DS4_MAX_STAGES; s++)
        c->worker[s].exit_code = DS4_EXIT_UNKNOWN;
    show_zeros(c);
    return c;
}

void ds4_cluster_free(struct ds4_cluster *c)
{
    free(c);
}

/* The worker a message is from, if that boot of it is the present one. */
static struct ds4_worker *find_worker(struct ds4_cluster *c, const struct ds4_peer *from)
{
    struct ds4_worker *w;

    if (from->stage < 0 || from->stage >= c->config.n_stage)
        return NULL;
    w = &c->worker[from->stage];
    if (!w->present || memcmp(w->peer.boot_id, from->boot_id, DS4_ID_BYTES) != 0)
        return NULL;
    return w;
}

/* The same, after a silence: a process that was only stopped for a while has not lost its weights and
 * does not know that it should introduce itself again.  One that said good-bye stays gone. */
static struct ds4_worker *find_returned(struct ds4_cluster *c, const struct ds4_peer *from)
{
    struct ds4_worker *w;

    if (from->stage < 0 || from->stage >= c->config.n_stage)
        return NULL;
    w = &c->worker[from->stage];
    if (!w->known || w->present || w->exit_code != DS4_EXIT_UNKNOWN ||
        memcmp(w->peer.boot_id, from->boot_id, DS4_ID_BYTES) != 0)
        return NULL;
    w->present = true;
    w->formed = false;
    ds4_log(DS4_LOG_INFO, "worker.back", "stage=%d", from->stage);
    return w;
}

/* Two processes for one stage: the older one would wait for ever for work that never comes. */
static void turn_away(struct ds4_cluster *c, const struct ds4_peer *from)
{
    const struct ds4_worker *w;
    char why[128];

    if (from->stage < 0 || from->stage >= c->config.n_stage)
        return;
    w = &c->worker[from->stage];
    if (!w->present || memcmp(w->peer.boot_id, from->boot_id, DS4_ID_BYTES) == 0)
        return;
    snprintf(why, sizeof(why), "stage %d is another process now: pid %" PRId64 " on %.64s",
             from->stage, w->hello.pid, w->hello.host);
    ds4_log(DS4_LOG_WARN, "worker.refused", "stage=%d reason=\"%s\"", from->stage, why);
    c->port.send_refused(c->port.owner, from, why);
}

/* ---- what happened --------------------------------------------------------------------------------- */

void ds4_cluster_note(struct ds4_cluster *c, bool bad, const char *text, int64_t now_ns)
{
    struct ds4_cluster_event *event = &c->event[c->n_event++ % DS4_CLUSTER_EVENTS];

    event->at_ns = now_ns;
    event->bad = bad;
    snprintf(event->text, sizeof(event->text), "%s", text);
}

const struct ds4_cluster_event *ds4_cluster_event(const struct ds4_cluster *c, int32_t i)
{
    if (i < 0 || i >= DS4_CLUSTER_EVENTS || (uint64_t)i >= c->n_event)
        return NULL;
    return &c->event[(c->n_event - 1 - (uint64_t)i) % DS4_CLUSTER_EVENTS];
}

/* ---- losing a generation ------------------------------------------------------------------------- */

/* Ends formation or generation, whichever there is. */
static void part(struct ds4_cluster *c, const struct ds4_err *why, int64_t now_ns)
{
    enum ds4_bond before = c->bond;

    snprintf(c->last_problem, sizeof(c->last_problem), "%s", why->msg);
    if (before == DS4_BOND_APART)
        return;
    c->bond = DS4_BOND_APART; /* before anything else: nobody may be told "ready" any more */
    c->apart_ns = now_ns;
    ds4_cluster_note(c, true, why->msg, now_ns);
    ds4_log(DS4_LOG_ERROR, "cluster.part", "generation=%u was=%s reason=\"%s\"", c->generation,
            before == DS4_BOND_JOINING ? "joining" : "together", why->msg);
    for (int32_t s = 0; s < c->config.n_stage; s++) {
        c->worker[s].formed = false;
        if (c->worker[s].present)
            c->port.send_abort(c->port.owner, &c->worker[s].peer, c->generation);
    }
    if (before == DS4_BOND_JOINING) {
        int64_t wait_s = INT64_C(1) << (c->n_failed_joins < 5 ? c->n_failed_joins : 5);

        if (wait_s > DS4_JOIN_BACKOFF_MAX_S)
            wait_s = DS4_JOIN_BACKOFF_MAX_S;
        c->n_failed_joins++;
        c->next_join_ns = now_ns + wait_s * DS4_NS_PER_SEC;
        ds4_metric_add(c->config.metrics, DS4_M_REFORMS, 1,
                       why->code == DS4_E_TIMEOUT ? "timeout" : "failed");
        return;
    }
    ds4_sched_stop(c->sched, DS4_REASON_RESTARTED, why, now_ns);
}

/* Whatever ended the generation, the planned restart is over with it. */
static void forget_leaving(struct ds4_cluster *c)
{
    c->leaving = -1;
    ds4_sched_hold(c->sched, false);
}

static void lose_worker(struct ds4_cluster *c, struct ds4_worker *w, const struct ds4_err *why,
                        int64_t now_ns)
{
    w->present = false;
    w->gone_ns = now_ns;
    ds4_log(DS4_LOG_ERROR, "worker.lost", "stage=%d reason=\"%s\"", w->peer.stage, why->msg);
    part(c, why, now_ns);
    if (c->leaving == w->peer.stage)
        forget_leaving(c);
}

/* ---- joining ------------------------------------------------------------------------------------- */

/* Do these stages make one model?  Leaves the first contradiction in plan_problem. */
static bool plan_is_good(struct ds4_cluster *c)
{
    const struct ds4_hello *first = &c->worker[0].hello;
    int32_t next = 0;
    struct ds4_err err = {0};

    for (int32_t s = 0; s < c->config.n_stage && err.code == DS4_OK; s++) {
        const struct ds4_hello *h = &c->worker[s].hello;

        if (memcmp(h->model_digest, first->model_digest, DS4_ID_BYTES) != 0)
            ds4_fail(&err, DS4_E_INVALID, "stage %d has another model file than stage 0", s);
        else if (h->n_layer != first->n_layer)
            ds4_fail(&err, DS4_E_INVALID, "stage %d counts %d layers, stage 0 %d", s, h->n_layer,
                     first->n_layer);
        else if (h->first_layer != next || h->last_layer <= h->first_layer)
            ds4_fail(&err, DS4_E_INVALID, "stage %d has layers %d to %d, expected them from %d on",
                     s, h->first_layer, h->last_layer - 1, next);
        next = h->last_layer;
    }
    if (err.code == DS4_OK && next != first->n_layer)
        ds4_fail(&err, DS4_E_INVALID, "the last stage ends at layer %d of %d", next,
                 first->n_layer);
    if (strcmp(c->plan_problem, err.msg) != 0 && err.code != DS4_OK)
        ds4_log(DS4_LOG_ERROR, "cluster.plan", "reason=\"%s\"", err.msg);
    snprintf(c->plan_problem, sizeof(c->plan_problem), "%s", err.msg);
    return err.code == DS4_OK;
}

static int32_t least(int32_t a, int32_t b)
{
    return b < a ? b : a;
}

/* What every stage can hold: the smallest of each. */
static int make_form(struct ds4_cluster *c, struct ds4_form *form, struct ds4_err *err)
{
    int64_t cache_tok;

    *form = (struct ds4_form){
        .generation = c->generation + 1,
        .n_stage = c->config.n_stage,
        .n_blocks = or_default(c->config.n_blocks, INT32_MAX),
        .n_slots = DS4_MAX_SLOTS,
        .context_tok = or_default(c->config.context_tok, DS4_MAX_POS),
        .max_draft = DS4_MAX_DRAFT,
    };
    for (int32_t s = 0; s < c->config.n_stage; s++) {
        const struct ds4_hello *h = &c->worker[s].hello;

        form->n_blocks = least(form->n_blocks, h->max_blocks);
        form->n_slots = least(form->n_slots, h->max_slots);
        form->context_tok = least(form->context_tok, h->max_context);
        form->max_draft = least(form->max_draft, h->max_draft);
    }
    ds4_sched_shape(c->sched, form);
    /* One block belongs to the probe.  Whatever the context allows must fit the empty cache, so that
     * "too long" is always about the context and never about the cache. */
    cache_tok = (int64_t)(form->n_blocks - 1) * DS4_BLOCK_TOK;
    if (form->context_tok > cache_tok)
        form->context_tok = (int32_t)cache_tok;
    if (form->n_slots < 2 || form->context_tok < 2)
        return ds4_fail(err, DS4_E_INVALID, "the stages hold %d blocks and %d slots: too few",
                        form->n_blocks, form->n_slots);
    if (getrandom(form->pipe_key, sizeof(form->pipe_key), 0) != (ssize_t)sizeof(form->pipe_key))
        return ds4_fail(err, DS4_E_IO, "could not read random bytes");
    return 0;
}

/* What each stage can keep beside the device: all of it or, if one has nothing, none. */
static void make_host(struct ds4_cluster *c)
{
    char own[sizeof(c->worker[0].hello.host)] = "";

    (void)gethostname(own, sizeof(own) - 1);
    c->host =
        (struct ds4_kv_host){.n_stage = c->config.n_stage, .disk = true, .local = own[0] != '\0'};
    memcpy(c->host.fingerprint, c->worker[0].hello.kv_fingerprint, sizeof(c->host.fingerprint));
    for (int32_t s = 0; s < c->config.n_stage; s++) {
        const struct ds4_hello *h = &c->worker[s].hello;

        c->host.stage[s].shape = h->point;
        c->host.stage[s].unit_bytes = h->unit_bytes;
        c->host.stage[s].max_bytes = h->host_bytes;
        c->host.stage[s].block_bytes = h->block_bytes;
        c->host.stage[s].first_layer = h->first_layer;
        c->host.stage[s].last_layer = h->last_layer;
        c->host.disk &= h->disk && memcmp(h->kv_fingerprint, c->host.fingerprint,
                                          sizeof(h->kv_fingerprint)) == 0;
        c->host.local &= strcmp(h->host, own) == 0;
        if (h->host_bytes == 0)
            c->host.n_stage = 0;
        /* What a layer misses of its window spoils so many tokens of the next one's. */
        if (h->point.window_tok > 1)
            c->host.replay_tok += (h->point.window_tok - 1) * (h->last_layer - h->first_layer);
        if (h->hot_tok > 0 && (c->host.hot_tok == 0 || h->hot_tok < c->host.hot_tok))
            c->host.hot_tok = h->hot_tok;
    }
}

static void join(struct ds4_cluster *c, int64_t now_ns)
{
    struct ds4_err err = {0};
    struct ds4_form form;

    if (!plan_is_good(c))
        return;
    if (make_form(c, &form, &err) != 0) {
        snprintf(c->plan_problem, sizeof(c->plan_problem), "%s", err.msg);
        return;
    }
    c->generation = form.generation; /* used up, whatever comes */
    if (c->config.generation_file != NULL && c->config.generation_file[0] != '\0' &&
        ds4_generation_store(c->config.generation_file, form.generation, &err) != 0) {
        snprintf(c->plan_problem, sizeof(c->plan_problem), "%s", err.msg);
        ds4_log(DS4_LOG_ERROR, "cluster.generation", "error=\"%s\"", err.msg);
        c->next_join_ns = now_ns + DS4_NS_PER_SEC;
        return;
    }
    c->form = form;
    make_host(c);
    c->bond = DS4_BOND_JOINING;
    c->join_ns = now_ns;
    ds4_log(DS4_LOG_INFO, "cluster.form", "generation=%u blocks=%d slots=%d context=%d drafts=%d",
            form.generation, form.n_blocks, form.n_slots, form.context_tok, form.max_draft);
    for (int32_t s = 0; s < c->config.n_stage; s++) {
        struct ds4_form own = c->form;

        own.host_bytes = c->host.stage[s].max_bytes;
        c->worker[s].formed = false;
        c->port.send_form(c->port.owner, &c->worker[s].peer, &own);
    }
}

static bool all_idle(const struct ds4_cluster *c)
{
    for (int32_t s = 0; s < c->config.n_stage; s++)
        if (!c->worker[s].present || c->worker[s].health.state != DS4_WORKER_IDLE)
            return false;
    return true;
}

static void show_cache(const struct ds4_cluster *c)
{
    char block[16], n[16];
    struct ds4_err err = {0};
    const struct ds4_metric_pair pairs[] = {{"block_size", block}, {"num_gpu_blocks", n}};

    snprintf(block, sizeof(block), "%d", DS4_BLOCK_TOK);
    snprintf(n, sizeof(n), "%d", c->form.n_blocks);
    if (ds4_metrics_set_info(c->config.metrics, DS4_M_VLLM_CACHE_CONFIG, -1, pairs,
                             sizeof(pairs) / sizeof(pairs[0]), &err) != 0)
        ds4_log(DS4_LOG_WARN, "metrics.info", "error=\"%s\"", err.msg);
}

static void joined(struct ds4_cluster *c, int64_t now_ns)
{
    char text[64];
    struct ds4_err err = {0};

    if (ds4_sched_start(c->sched, &c->form, &c->host, now_ns, &err) != 0) {
        part(c, &err, now_ns);
        return;
    }
    c->bond = DS4_BOND_TOGETHER;
    c->was_ready = true;
    c->n_failed_joins = 0;
    snprintf(text, sizeof(text), "%d stage%s formed the pipeline", c->config.n_stage,
             c->config.n_stage == 1 ? "" : "s");
    ds4_cluster_note(c, false, text, now_ns);
    ds4_log(DS4_LOG_INFO, "cluster.formed", "generation=%u took_ms=%" PRId64, c->generation,
            (now_ns - c->join_ns) / DS4_NS_PER_MS);
    show_cache(c);
    ds4_metric_add(c->config.metrics, DS4_M_REFORMS, 1, "ok");
    ds4_metric_observe(c->config.metrics, DS4_M_REFORM_SECONDS,
                       (double)(now_ns - c->join_ns) / (double)DS4_NS_PER_SEC, NULL);
}

/* ---- messages ------------------------------------------------------------------------------------ */

static const char *exit_label(int32_t code)
{
    static const char *const label[] = {"70", "71", "72", "75", "78", "79"};
    char text[16];

    if (code == 0)
        return "clean";
    snprintf(text, sizeof(text), "%d", code);
    for (size_t i = 0; i < sizeof(label) / sizeof(label[0]); i++)
        if (strcmp(text, label[i]) == 0)
            return label[i];
    return "signal";
}

/* A worker of an unknown boot takes its stage's place. */
static void admit(struct ds4_cluster *c, struct ds4_worker *w, const struct ds4_peer *from,
                  int64_t now_ns)
{
    struct ds4_err why = {0};

    if (w->present) {
        ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d came back as another process", from->stage);
        lose_worker(c, w, &why, now_ns);
    }
    if (w->known) {
        w->restarts++;
        ds4_metric_add(c->config.metrics, DS4_M_WORKER_RESTARTS, 1, ds4_metric_stage(from->stage),
                       exit_label(w->exit_code));
    }
    w->present = true;
    w->known = true;
    w->formed = false;
    w->peer = *from;
    w->exit_code = DS4_EXIT_UNKNOWN;
    w->health = (struct ds4_health){.stage = from->stage, .step_no = -1};
}

static void show_worker(const struct ds4_cluster *c, const struct ds4_hello *hello)
{
    char layers[32], boot[2 * DS4_ID_BYTES + 1];
    struct ds4_err err = {0};
    const struct ds4_metric_pair pairs[] = {
        {"layers", layers},    {"backend", hello->backend}, {"device", hello->device},
        {"host", hello->host}, {"boot_id", boot},
    };

    snprintf(layers, sizeof(layers), "%d-%d", hello->first_layer, hello->last_layer - 1);
    for (int i = 0; i < DS4_ID_BYTES; i++)
        snprintf(boot + 2 * (size_t)i, 3, "%02x", hello->boot_id[i]);
    if (ds4_metrics_set_info(c->config.metrics, DS4_M_WORKER_INFO, hello->stage, pairs,
                             sizeof(pairs) / sizeof(pairs[0]), &err) != 0)
        ds4_log(DS4_LOG_WARN, "metrics.info", "error=\"%s\"", err.msg);
}

void ds4_cluster_hello(struct ds4_cluster *c, const struct ds4_peer *from,
                       const struct ds4_hello *hello, int64_t now_ns)
{
    struct ds4_worker *w;
    char why[128];

    if (from->stage < 0 || from->stage >= c->config.n_stage ||
        hello->n_stage != c->config.n_stage || hello->stage != from->stage) {
        snprintf(why, sizeof(why), "this cluster has %d stages, not stage %d of %d",
                 c->config.n_stage, hello->stage, hello->n_stage);
        ds4_log(DS4_LOG_ERROR, "worker.refused", "stage=%d reason=\"%s\"", hello->stage, why);
        c->port.send_refused(c->port.owner, from, why);
        return;
    }
    w = &c->worker[from->stage];
    if (find_worker(c, from) == NULL)
        admit(c, w, from, now_ns);
    w->hello = *hello;
    w->heard_ns = now_ns;
    show_worker(c, hello);
    ds4_log(DS4_LOG_INFO, "worker.hello",
            "stage=%d layers=%d-%d backend=%s device=\"%s\" pid=%" PRId64, hello->stage,
            hello->first_layer, hello->last_layer - 1, hello->backend, hello->device, hello->pid);
    if (c->port.send_welcome(c->port.owner, from) != 0)
        ds4_log(DS4_LOG_WARN, "worker.hello", "stage=%d error=\"gone already\"", from->stage);
}

/* From now on nothing is admitted; check_leaving does the rest. */
static void begin_leaving(struct ds4_cluster *c, int32_t stage, int64_t now_ns)
{
    c->leaving = stage;
    c->leave_ns = now_ns + c->config.leave_ms * DS4_NS_PER_MS;
    ds4_sched_hold(c->sched, true);
    ds4_sched_save_all(c->sched, now_ns);
    ds4_log(DS4_LOG_INFO, "cluster.restart_stage", "stage=%d running=%d limit_ms=%d", stage,
            ds4_sched_n_running(c->sched), c->config.leave_ms);
}

void ds4_cluster_health(struct ds4_cluster *c, const struct ds4_peer *from,
                        const struct ds4_health *health, int64_t now_ns)
{
    struct ds4_worker *w = find_worker(c, from);
    struct ds4_err why = {0};
    uint32_t current = c->bond == DS4_BOND_APART ? 0 : c->generation;

    if (w == NULL)
        w = find_returned(c, from);
    if (w == NULL) {
        turn_away(c, from);
        return;
    }
    w->heard_ns = now_ns;
    w->health = *health;
    w->health.stage = from->stage;
    if (health->generation > c->generation)
        c->generation = health->generation; /* left by a router before us: ours come after it */
    if (health->generation != 0 && health->generation != current) {
        c->port.send_abort(c->port.owner, from, health->generation);
        return;
    }
    if (health->state == DS4_WORKER_FAILED)
        ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d reports a failure: %s", from->stage,
                 health->message);
    else if (c->bond == DS4_BOND_TOGETHER && health->generation == 0)
        ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d has left the generation", from->stage);
    else if (health->state == DS4_WORKER_DRAINING && c->bond == DS4_BOND_TOGETHER && !c->draining &&
             c->leaving < 0) /* its service manager stops it: as if an operator had asked */
        begin_leaving(c, from->stage, now_ns);
    if (why.code != DS4_OK)
        part(c, &why, now_ns);
}

void ds4_cluster_formed(struct ds4_cluster *c, const struct ds4_peer *from, uint32_t generation,
                        int64_t now_ns)
{
    struct ds4_worker *w = find_worker(c, from);

    if (w == NULL || c->bond != DS4_BOND_JOINING || generation != c->generation)
        return;
    w->heard_ns = now_ns;
    w->formed = true;
    w->health.generation = generation;
    for (int32_t s = 0; s < c->config.n_stage; s++)
        if (!c->worker[s].formed)
            return;
    joined(c, now_ns);
}

void ds4_cluster_form_failed(struct ds4_cluster *c, const struct ds4_peer *from,
                             uint32_t generation, const char *message, int64_t now_ns)
{
    struct ds4_err why = {0};

    if (find_worker(c, from) == NULL || c->bond != DS4_BOND_JOINING || generation != c->generation)
        return;
    ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d could not join: %s", from->stage, message);
    part(c, &why, now_ns);
}

void ds4_cluster_pipe_offer(struct ds4_cluster *c, const struct ds4_peer *from, uint32_t generation,
                            const struct ds4_pipe_id *id, int64_t now_ns)
{
    struct ds4_worker *w = find_worker(c, from);

    if (w == NULL || from->stage != 0 || c->bond != DS4_BOND_JOINING ||
        generation != c->generation) {
        ds4_metric_add(c->config.metrics, DS4_M_ZMQ_DROPPED, 1, "generation");
        return;
    }
    w->heard_ns = now_ns;
    for (int32_t s = 1; s < c->config.n_stage; s++)
        c->port.send_pipe_id(c->port.owner, &c->worker[s].peer, generation, id);
}

/* What comes from a stage of another generation, or of none, is counted and dropped. */
static bool is_of_generation(struct ds4_cluster *c, const struct ds4_peer *from,
                             uint32_t generation, int64_t now_ns)
{
    struct ds4_worker *w = find_worker(c, from);

    if (w == NULL || c->bond != DS4_BOND_TOGETHER || generation != c->generation) {
        ds4_metric_add(c->config.metrics, DS4_M_ZMQ_DROPPED, 1, "generation");
        return false;
    }
    w->heard_ns = now_ns;
    return true;
}

void ds4_cluster_tokens(struct ds4_cluster *c, const struct ds4_peer *from,
                        const struct ds4_tokens_out *out, int64_t now_ns)
{
    struct ds4_err err = {0};

    if (!is_of_generation(c, from, out->generation, now_ns))
        return;
    if (from->stage != c->config.n_stage - 1)
        ds4_fail(&err, DS4_E_PROTOCOL, "tokens from stage %d, which is not the last", from->stage);
    else if (ds4_sched_tokens(c->sched, out, now_ns, &err) == 0)
        return;
    ds4_metric_add(c->config.metrics, DS4_M_KV_INVARIANT_FAILURES, 1, "I6");
    part(c, &err, now_ns);
}

/* CUDA's number of a fault, found by the words cudaGetErrorString() has for it. */
static const char *fault_code(const char *message)
{
    static const char *const known[][2] = {
        {"illegal memory access", "700"}, {"unspecified launch failure", "719"},
        {"misaligned address", "716"},    {"uncorrectable ECC", "214"},
        {"device-side assert", "710"},    {"hardware stack error", "714"},
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strstr(message, known[i][0]) != NULL)
            return known[i][1];
    return "other";
}

void ds4_cluster_step_done(struct ds4_cluster *c, const struct ds4_peer *from,
                           const struct ds4_step_done *done, int64_t now_ns)
{
    struct ds4_err err = {0};

    if (!is_of_generation(c, from, done->generation, now_ns))
        return;
    if (ds4_sched_step_done(c->sched, from->stage, done, &err) == 0)
        return;
    ds4_metric_add(c->config.metrics, DS4_M_KV_INVARIANT_FAILURES, 1, "I6");
    part(c, &err, now_ns);
}

void ds4_cluster_kv_done(struct ds4_cluster *c, const struct ds4_peer *from,
                         const struct ds4_kv_done *done, int64_t now_ns)
{
    struct ds4_err err = {0};

    if (!is_of_generation(c, from, done->generation, now_ns))
        return;
    if (ds4_sched_kv_done(c->sched, from->stage, done, now_ns, &err) != 0)
        part(c, &err, now_ns);
}

void ds4_cluster_fatal(struct ds4_cluster *c, const struct ds4_peer *from,
                       const struct ds4_fatal_report *report, int64_t now_ns)
{
    struct ds4_worker *w = find_worker(c, from);
    struct ds4_err why = {0};

    if (w == NULL)
        return;
    w->exit_code = report->exit_code;
    if (report->exit_code == DS4_EXIT_DEVICE)
        ds4_metric_add(c->config.metrics, DS4_M_CUDA_ERRORS, 1, ds4_metric_stage(from->stage),
                       fault_code(report->message));
    ds4_log(DS4_LOG_ERROR, "worker.fatal",
            "stage=%d exit=%d generation=%u step=%" PRId64 " layer=%d message=\"%s\"", from->stage,
            report->exit_code, report->generation, report->step_no, report->layer, report->message);
    ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d failed (exit %d)", from->stage, report->exit_code);
    lose_worker(c, w, &why, now_ns);
}

void ds4_cluster_bye(struct ds4_cluster *c, const struct ds4_peer *from, int64_t now_ns)
{
    struct ds4_worker *w = find_worker(c, from);
    struct ds4_err why = {0};

    if (w == NULL)
        return;
    w->exit_code = 0;
    ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d left", from->stage);
    lose_worker(c, w, &why, now_ns);
}

/* ---- time ---------------------------------------------------------------------------------------- */

static void check_heartbeats(struct ds4_cluster *c, int64_t now_ns)
{
    for (int32_t s = 0; s < c->config.n_stage; s++) {
        struct ds4_worker *w = &c->worker[s];
        struct ds4_err why = {0};

        if (!w->present || now_ns - w->heard_ns < c->config.lost_ms * DS4_NS_PER_MS)
            continue;
        ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d is silent for %" PRId64 " ms", s,
                 (now_ns - w->heard_ns) / DS4_NS_PER_MS);
        lose_worker(c, w, &why, now_ns);
    }
}

/* A process that died takes its connection along: sending to it fails long before its heartbeats are
 * missed.  The workers learn from the same frame that the router lives. */
static void ping(struct ds4_cluster *c, int64_t now_ns)
{
    struct ds4_err why = {0};

    if (now_ns < c->next_ping_ns)
        return;
    c->next_ping_ns = now_ns + c->config.ping_ms * DS4_NS_PER_MS;
    for (int32_t s = 0; s < c->config.n_stage; s++)
        if (c->worker[s].present && c->port.send_welcome(c->port.owner, &c->worker[s].peer) != 0) {
            ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d is disconnected", s);
            lose_worker(c, &c->worker[s], &why, now_ns);
        }
}

/* A planned restart: what runs may finish, then the stage goes.  Nobody was told "ready" since it was
 * asked for. */
static void check_leaving(struct ds4_cluster *c, int64_t now_ns)
{
    const struct ds4_worker *w;
    struct ds4_err why = {0};

    if (c->leaving < 0 || ((ds4_sched_n_running(c->sched) > 0 || ds4_sched_is_saving(c->sched)) &&
                           (c->draining || now_ns < c->leave_ns)))
        return;
    w = &c->worker[c->leaving];
    ds4_fail(&why, DS4_E_UNAVAILABLE, "stage %d is restarted as asked", c->leaving);
    c->port.send_drain(c->port.owner, &w->peer, c->generation);
    part(c, &why, now_ns);
    forget_leaving(c);
}

/* Requests that wait for a cluster that is not coming get their answer. */
static void check_queue(struct ds4_cluster *c, int64_t now_ns)
{
    struct ds4_err why = {.code = DS4_E_UNAVAILABLE};

    if (c->bond == DS4_BOND_TOGETHER || now_ns - c->apart_ns < c->config.hold_ms * DS4_NS_PER_MS)
        return;
    snprintf(why.msg, sizeof(why.msg), "%s",
             c->last_problem[0] != '\0' ? c->last_problem : "the workers are not ready");
    ds4_sched_fail_queue(c->sched, c->was_ready ? DS4_REASON_RESTARTED : DS4_REASON_LOADING, &why,
                         now_ns);
}

void ds4_cluster_tick(struct ds4_cluster *c, int64_t now_ns)
{
    struct ds4_err err = {0};

    if (c->born_ns == 0) {
        c->born_ns = now_ns;
        c->apart_ns = now_ns;
        for (int32_t s = 0; s < c->config.n_stage; s++)
            c->worker[s].gone_ns = now_ns;
    }
    check_heartbeats(c, now_ns);
    ping(c, now_ns);
    switch (c->bond) {
    case DS4_BOND_APART:
        if (now_ns >= c->next_join_ns && all_idle(c))
            join(c, now_ns);
        break;
    case DS4_BOND_JOINING:
        if (now_ns - c->join_ns >= c->config.form_ms * DS4_NS_PER_MS) {
            ds4_fail(&err, DS4_E_TIMEOUT, "the stages did not form within %d ms",
                     c->config.form_ms);
            part(c, &err, now_ns);
        }
        break;
    case DS4_BOND_TOGETHER:
        if (ds4_sched_check_step(c->sched, now_ns, &err) != 0)
            part(c, &err, now_ns);
        break;
    }
    check_leaving(c, now_ns);
    check_queue(c, now_ns);
    ds4_sched_pump(c->sched, now_ns);
}

void ds4_cluster_drain(struct ds4_cluster *c)
{
    c->draining = true;
    ds4_sched_drain(c->sched, true);
}

int ds4_cluster_rest(struct ds4_cluster *c, bool rest, int64_t now_ns, struct ds4_err *err)
{
    if (c->draining)
        return ds4_fail(err, DS4_E_UNAVAILABLE, "the router is stopping");
    c->resting = rest;
    ds4_sched_drain(c->sched, rest);
    ds4_cluster_note(c, false, rest ? "an operator drains the router" : "the drain was taken back",
                     now_ns);
    ds4_log(DS4_LOG_INFO, "cluster.rest", "rest=%s", rest ? "yes" : "no");
    return 0;
}

int ds4_cluster_restart_stage(struct ds4_cluster *c, int32_t stage, int64_t now_ns,
                              struct ds4_err *err)
{
    if (stage < 0 || stage >= c->config.n_stage)
        return ds4_fail(err, DS4_E_INVALID, "this cluster has stages 0 to %d",
                        c->config.n_stage - 1);
    if (!c->worker[stage].present)
        return ds4_fail(err, DS4_E_UNAVAILABLE, "stage %d is not there", stage);
    if (c->leaving >= 0)
        return ds4_fail(err, DS4_E_UNAVAILABLE, "stage %d is being restarted", c->leaving);
    begin_leaving(c, stage, now_ns);
    return 0;
}

void ds4_cluster_restart(struct ds4_cluster *c, const struct ds4_err *why, int64_t now_ns)
{
    part(c, why, now_ns);
}

void ds4_cluster_watch_canary(struct ds4_cluster *c, const struct ds4_canary_status *canary)
{
    c->canary = canary;
}

uint64_t ds4_cluster_fingerprint(const struct ds4_cluster *c)
{
    uint64_t sum = 0;

    for (int32_t s = 0; s < c->config.n_stage; s++) {
        const struct ds4_hello *h = &c->worker[s].hello;

        sum = XXH3_64bits_withSeed(h->model_digest, sizeof(h->model_digest), sum);
        sum = XXH3_64bits_withSeed(h->backend, strlen(h->backend), sum);
        sum = XXH3_64bits_withSeed(h->device, strlen(h->device), sum);
    }
    return sum;
}

void ds4_cluster_stop_workers(struct ds4_cluster *c)
{
    for (int32_t s = 0; s < c->config.n_stage; s++)
        if (c->worker[s].present)
            c->port.send_stop(c->port.owner, &c->worker[s].peer, c->generation);
}
