/* The running router: what is opened in which order, what a reload changes, and how it ends.
 *
 * One uv loop thread does everything.  SIGTERM drains: new requests get 503, running streams finish,
 * and the loop ends when the last exchange has, or after cluster.drain_s.  SIGHUP reads settings and
 * keys anew: what is marked reloadable takes effect, what is not is named in the log.  Workers are services of their
 * own and keep their weights; a router that comes back forms a new generation with them. */
#include "router/app.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/model.h"
#include "common/service.h"
#include "common/weights_file.h"
#include "router/api/routes.h"
#include "router/api/text_store.h"
#include "router/bus.h"
#include "router/canary.h"
#include "router/cluster.h"
#include "router/generation.h"
#include "router/recovery.h"
#include "router/sched/sched.h"
#include "router/server.h"
#include "router/stats.h"
#include "router/text/bpe.h"
#include "router/text/vocab_load.h"
#include "router/tool_memory.h"
#include "router/turn_memory.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <uv.h>
#include <xxhash.h>

#define DS4_RESPONSES_BYTES   ((size_t)256 << 20)
#define DS4_RESPONSES_AGE_NS  (3600 * DS4_NS_PER_SEC)
#define DS4_REASONING_ENTRIES ((size_t)65536)
#define DS4_REASONING_BYTES   ((size_t)64 << 20)
#define DS4_HALF_CLOSE_MS     5000
#define DS4_TICK_MS           50
#define DS4_RELOAD_BYTES      ((size_t)16384)
#define DS4_LAST_WORDS_MS     2000 /* connections get so long to take their last bytes */

struct ds4_app {
    struct ds4_config *config;
    ds4_app_load_fn load;
    void *load_arg;
    int passed_fd; /* the service manager's listening socket; 0 = none */
    uv_loop_t loop;
    bool watching; /* signals and ticker are open */
    uv_poll_t signals;
    bool woken;        /* `wake` is open */
    uv_async_t wake;   /* the disk thread has an answer: a turn of the loop takes it */
    uv_timer_t ticker; /* watchdog pings, and the end of a drain */
    int signal_fd;
    struct ds4_model_shape shape;
    struct ds4_vocab *vocab;
    struct ds4_bpe *bpe;
    struct ds4_recovery recovery;
    struct ds4_tool_memory *tool_memory;
    struct ds4_turn_memory *turn_memory;
    struct ds4_metrics *metrics;
    struct ds4_bus *bus;
    struct ds4_sched *sched;
    struct ds4_cluster *cluster;
    struct ds4_canary *canary;
    struct ds4_stats *stats;
    struct ds4_server *server;
    struct ds4_live_answers live;
    struct ds4_api_context api;
    bool draining;
    bool saved_all; /* the last request is over, what is worth it goes to disk */
    int64_t drain_until_ns;
    struct ds4_cluster_view shown; /* what the service manager was told last */
    int64_t tick_ns;               /* the last one */
    int64_t ping_ms;               /* 0: the service manager does not watch */
    struct ds4_deadline ping;
};

/* ---- model --------------------------------------------------------------------------------------- */

/* The name clients see: the setting, else general.name in lower case with dashes, else the file's. */
static void choose_model_name(struct ds4_app *app)
{
    const char *base = strrchr(app->config->model.path, '/');
    const char *from = app->config->model.name;
    size_t n = 0;

    if (from[0] == '\0')
        from = app->shape.name;
    if (from[0] == '\0')
        from = base != NULL ? base + 1 : app->config->model.path;
    for (; *from != '\0' && n + 1 < sizeof(app->api.model_name); from++) {
        unsigned char c = (unsigned char)*from;

        app->api.model_name[n++] = (char)(c >= 'A' && c <= 'Z'             ? c - 'A' + 'a'
                                          : c == ' ' || c < ' ' || c > '~' ? '-'
                                                                           : c);
    }
    app->api.model_name[n] = '\0';
}

static int open_recovery(struct ds4_app *app, struct ds4_err *err)
{
    const struct ds4_config *c = app->config;
    const struct ds4_loop_knobs knobs = {
        .soup = c->loop.soup,
        .soup_streak = c->loop.soup_streak,
        .soup_total = c->loop.soup_total,
        .repetition = c->loop.repetition,
        .block_tok = c->loop.block_tok,
        .window_tok = c->loop.rep_window,
        .streak = c->loop.rep_streak,
        .fuzzy = c->loop.rep_fuzzy,
        .fuzzy_min_lines = c->loop.fuzzy_min_lines,
        .fuzzy_min_hits = c->loop.fuzzy_min_hits,
        .fuzzy_prefix_words = c->loop.fuzzy_prefix_words,
        .fuzzy_overlap = c->loop.fuzzy_overlap,
        .recovery = (enum ds4_recovery_mode)c->loop.recovery,
        .recovery_max = c->loop.recovery_max,
    };
    const char *text =
        knobs.recovery == DS4_RECOVERY_REOPEN ? c->loop.reopen_text : c->loop.nudge_text;

    return ds4_recovery_init(&app->recovery, &knobs, ds4_str_view(text), app->bpe, err);
}

static int open_model(struct ds4_app *app, struct ds4_err *err)
{
    struct ds4_weights_file *wf;
    struct ds4_str name;
    int rc = -1;

    if (app->config->model.path[0] == '\0')
        return ds4_fail(err, DS4_E_INVALID, "model.path is not set");
    wf = ds4_weights_open(app->config->model.path, DS4_WEIGHTS_PREAD, err);
    if (wf == NULL)
        return -1;
    if (ds4_model_read(wf, &app->shape, err) == 0 &&
        ds4_model_check_vocab(wf, app->shape.n_vocab, err) == 0 &&
        ds4_model_release(wf, (enum ds4_release)app->config->model.release, &app->api.release,
                          err) == 0)
        rc = 0;
    ds4_weights_close(wf);
    if (rc != 0)
        return ds4_err_wrap(err, "%s", app->config->model.path);
    app->vocab = ds4_vocab_load(app->config->model.path, NULL, err);
    if (app->vocab == NULL)
        return ds4_err_wrap(err, "%s", app->config->model.path);
    if (ds4_vocab_require_chat(app->vocab, app->api.release == DS4_RELEASE_V41, err) != 0)
        return -1;
    app->bpe = ds4_bpe_new(app->vocab, err);
    if (app->bpe == NULL)
        return -1;
    if (open_recovery(app, err) != 0)
        return -1;
    choose_model_name(app);
    name = ds4_str_view(app->api.model_name);
    (void)snprintf(app->api.fingerprint, sizeof(app->api.fingerprint), "ds4-%s-%08x", DS4_VERSION,
                   (unsigned)XXH3_64bits(name.ptr, name.len));
    return 0;
}

/* ---- parts ----------------------------------------------------------------------------------------- */

static int show_build(struct ds4_app *app, struct ds4_err *err)
{
    const struct ds4_metric_pair pairs[] = {
        {"version", DS4_VERSION},
        {"commit", DS4_COMMIT},
        {"weights", app->api.fingerprint},
        {"release", ds4_config_choice("model.release", app->api.release)},
    };

    ds4_metrics_show_aliases(app->metrics, app->config->metrics.vllm_aliases);
    return ds4_metrics_set_info(app->metrics, DS4_M_BUILD_INFO, -1, pairs,
                                sizeof(pairs) / sizeof(pairs[0]), err);
}

static int open_canary(struct ds4_app *app, struct ds4_err *err)
{
    const struct ds4_config *c = app->config;
    const struct ds4_canary_config canary = {
        .idle_ms = c->canary.idle_s * 1000,
        .busy_ms = c->canary.busy_s * 1000,
        .fatal = c->canary.fatal,
        .n_expect = c->canary.expect.n,
        .expect = c->canary.expect.v,
        .metrics = app->metrics,
    };
    int32_t prompt[DS4_CANARY_PROMPT_TOK];

    if (ds4_canary_prompt(app->bpe, prompt, err) != 0)
        return -1;
    app->canary = ds4_canary_new(&canary, prompt, app->sched, app->cluster, err);
    if (app->canary == NULL)
        return -1;
    ds4_cluster_watch_canary(app->cluster, ds4_canary_status(app->canary));
    return 0;
}

/* Where messages begin: places that later conversations share. */
/* Called by the disk thread. */
static void wake_loop(void *arg)
{
    struct ds4_app *app = arg;

    (void)uv_async_send(&app->wake);
}

static void on_wake(uv_async_t *wake)
{
    (void)wake; /* the bus's last act of every turn does the work */
}

static void add_boundaries(const struct ds4_app *app, struct ds4_sched_config *sched)
{
    static const enum ds4_special begins[] = {DS4_SPECIAL_USER, DS4_SPECIAL_ASSISTANT,
                                              DS4_SPECIAL_SYSTEM};

    for (size_t i = 0; i < sizeof(begins) / sizeof(begins[0]); i++) {
        int32_t id = ds4_vocab_special(app->vocab, begins[i]);

        if (id >= 0)
            sched->boundary_id[sched->n_boundary_id++] = id;
    }
}

static int open_engine(struct ds4_app *app, struct ds4_err *err)
{
    const struct ds4_config *c = app->config;
    struct ds4_bus_config bus = {.endpoint_dir = c->cluster.endpoint_dir,
                                 .endpoint = c->cluster.steps_endpoint,
                                 .curve_dir = c->cluster.curve_dir,
                                 .metrics = app->metrics};
    struct ds4_sched_config sched = {
        .max_seqs = c->sched.max_seqs,
        .default_max_new = c->sched.default_max_new,
        .queue_max = c->sched.queue_max,
        .queue_ms = c->sched.queue_s * 1000,
        .chunk_tok = c->sched.chunk_tok,
        .itl_ms = c->sched.itl_ms,
        .replay = c->recovery.mode == DS4_LOST_REPLAY,
        .inflight = c->sched.inflight,
        .overcommit = c->kv.overcommit,
        .hot_window_tok = c->kv.hot_window,
        .max_draft = c->spec.method == DS4_SPEC_NONE ? 0 : c->spec.k,
        .vocab = app->shape.n_vocab,
        .step_ms = c->watchdog.step_s * 1000,
        .prefill_ms = c->watchdog.prefill_s * 1000,
        .probe_ms = c->sched.probe_ms,
        .metrics = app->metrics,
        .disk_bytes = (uint64_t)c->kv.disk_mb << 20,
        .disk_dir = c->kv.disk_dir,
        .disk_ms = c->kv.disk_timeout_s * 1000,
        .disk_wake = wake_loop,
        .disk_wake_arg = app,
        .unix_offset_ns = ds4_clock_unix_ns() - ds4_clock_ns(),
    };
    struct ds4_cluster_config cluster = {
        .n_stage = ds4_config_stages(c),
        .context_tok = c->model.context,
        .n_blocks = c->kv.blocks,
        .lost_ms = c->cluster.lost_ms,
        .form_ms = c->cluster.form_ms,
        .away_ms = c->cluster.away_ms,
        .fresh_ms = c->cluster.fresh_ms,
        .hold_ms =
            1000 * (sched.replay && c->recovery.hold_s > c->cluster.hold_s ? c->recovery.hold_s
                                                                           : c->cluster.hold_s),
        .leave_ms = c->cluster.leave_s * 1000,
        .first_generation = (uint32_t)(ds4_clock_unix_ns() / DS4_NS_PER_SEC),
        .generation_file = c->recovery.generation_file,
        .metrics = app->metrics,
    };
    struct ds4_sched_port sched_port;
    struct ds4_cluster_port cluster_port;
    uint32_t kept = 0;

    if (c->recovery.generation_file[0] != '\0' &&
        ds4_generation_load(c->recovery.generation_file, &kept, err) != 0)
        return -1;
    if (kept > cluster.first_generation)
        cluster.first_generation = kept;
    app->bus = ds4_bus_open(&app->loop, &bus, err);
    if (app->bus == NULL)
        return -1;
    sched_port = ds4_bus_sched_port(app->bus);
    cluster_port = ds4_bus_cluster_port(app->bus);
    add_boundaries(app, &sched);
    if (uv_async_init(&app->loop, &app->wake, on_wake) != 0)
        return ds4_fail(err, DS4_E_IO, "could not open the loop's alarm");
    app->woken = true;
    app->sched = ds4_sched_new(&sched, &sched_port, err);
    if (app->sched == NULL)
        return -1;
    app->cluster = ds4_cluster_new(&cluster, &cluster_port, app->sched, err);
    if (app->cluster == NULL)
        return -1;
    ds4_bus_attach(app->bus, app->cluster);
    ds4_metric_set(app->metrics, DS4_M_KV_DISK_LIMIT, (double)sched.disk_bytes, NULL);
    app->stats = ds4_stats_new(app->sched, app->cluster, app->metrics, cluster.n_stage, err);
    if (app->stats == NULL)
        return -1;
    return open_canary(app, err);
}

/* What the endpoints remember between requests. */
static int open_stores(struct ds4_app *app, struct ds4_err *err)
{
    app->api.live = &app->live;
    app->api.responses = ds4_text_store_new((size_t)app->config->http.store_max,
                                            DS4_RESPONSES_BYTES, DS4_RESPONSES_AGE_NS, err);
    if (app->api.responses == NULL)
        return -1;
    app->api.reasoning = ds4_text_store_new(DS4_REASONING_ENTRIES, DS4_REASONING_BYTES, 0, err);
    return app->api.reasoning == NULL ? -1 : 0;
}

static int open_memory(struct ds4_app *app, struct ds4_err *err)
{
    if (!app->config->prompt.reasoning_memory)
        return 0;
    app->tool_memory = ds4_tool_memory_new(DS4_TOOL_MEMORY_TURNS, DS4_TOOL_MEMORY_BYTES, err);
    app->turn_memory = app->tool_memory == NULL ? NULL : ds4_turn_memory_new(err);
    return app->turn_memory == NULL ? -1 : 0;
}

static int open_server(struct ds4_app *app, struct ds4_err *err)
{
    const struct ds4_config *c = app->config;
    char side[DS4_CONFIG_ADDRESS_BYTES] = "";
    struct ds4_server_config server = {
        .listen = c->http.listen,
        .port = c->http.port,
        .passed_fd = app->passed_fd,
        .open = c->http.open,
        .keys_file = c->http.keys_file,
        .max_body_bytes = (size_t)c->http.max_body,
        .request_ms = c->http.request_s * 1000,
        .out_buf_bytes = 2 * (size_t)c->http.out_buf,
        .half_close_ms = DS4_HALF_CLOSE_MS,
        .cors_origins = &c->http.cors_origins,
        .context = &app->api,
        .refuse = ds4_routes_refuse,
        .metrics = app->metrics,
    };

    if (open_stores(app, err) != 0)
        return -1;
    app->api.loop = &app->loop;
    app->api.config = c;
    app->api.shape = &app->shape;
    app->api.vocab = app->vocab;
    app->api.bpe = app->bpe;
    app->api.recovery = &app->recovery;
    app->api.tool_memory = app->tool_memory;
    app->api.turn_memory = app->turn_memory;
    app->api.cluster = app->cluster;
    app->api.sched = app->sched;
    app->api.metrics = app->metrics;
    app->api.stats = app->stats;
    app->api.started_unix_s = ds4_clock_unix_ns() / DS4_NS_PER_SEC;
    server.routes = ds4_routes(&app->api, &server.n_routes);
    if (c->metrics.listen[0] != '\0' &&
        ds4_config_address(c->metrics.listen, side, &server.side_port) == 0) {
        server.side_listen = side;
        server.side_route = ds4_routes_metrics();
        server.side_open = c->metrics.open || ds4_config_is_loopback(side);
    }
    app->server = ds4_server_open(&app->loop, &server, err);
    return app->server == NULL ? -1 : 0;
}

/* The service manager's socket, if it passed one in, decides where we listen: what the settings say of
 * address and port becomes what is true, so that every check of it holds. */
static int adopt_socket(struct ds4_app *app, struct ds4_err *err)
{
    struct ds4_config *c = app->config;
    char address[DS4_SERVICE_ADDRESS_BYTES], port[16];
    int32_t number;
    int fd;

    if (ds4_service_listen_fd(&fd, err) != 0)
        return -1;
    if (fd < 0)
        return 0;
    if (ds4_service_listen_address(fd, address, &number, err) != 0)
        return -1;
    if (strcmp(c->http.listen, address) != 0 || c->http.port != number)
        ds4_log(DS4_LOG_WARN, "router.socket",
                "listen=%s port=%d message=\"http.listen and http.port say %s %d: "
                "the socket of the service manager wins\"",
                address, number, c->http.listen, c->http.port);
    (void)snprintf(port, sizeof(port), "%d", number);
    app->passed_fd = fd;
    if (ds4_config_set(c, "http.listen", address, err) != 0 ||
        ds4_config_set(c, "http.port", port, err) != 0)
        return -1;
    return ds4_config_check(c, err);
}

/* ---- signals and the end ------------------------------------------------------------------------------ */

static void start_drain(struct ds4_app *app)
{
    if (app->draining) {
        uv_stop(&app->loop);
        return;
    }
    app->draining = true;
    app->drain_until_ns = ds4_clock_ns() + (int64_t)app->config->cluster.drain_s * DS4_NS_PER_SEC;
    ds4_service_stopping();
    ds4_log(DS4_LOG_INFO, "router.drain", "open=%zu limit_s=%d", ds4_server_n_open(app->server),
            app->config->cluster.drain_s);
    ds4_server_drain(app->server);
    ds4_cluster_drain(app->cluster);
}

/* SIGHUP.  A fault in the file or in the keys changes nothing. */
static void reload(struct ds4_app *app)
{
    struct ds4_config *c = app->config, fresh = {0};
    struct ds4_buf taken, left;
    struct ds4_err err = {0};

    if (app->load(app->load_arg, &fresh, &err) != 0 ||
        ds4_server_read_keys(app->server, fresh.http.keys_file, &err) != 0) {
        ds4_log(DS4_LOG_ERROR, "router.reload", "error=\"%s\"", err.msg);
        ds4_config_deinit(&fresh);
        return;
    }
    ds4_buf_init(&taken, DS4_RELOAD_BYTES);
    ds4_buf_init(&left, DS4_RELOAD_BYTES);
    ds4_config_take_live(c, &fresh, &taken, &left);
    ds4_config_deinit(&fresh);
    ds4_log_set_level((enum ds4_log_level)c->log.level);
    ds4_sched_set_limits(app->sched, c->sched.default_max_new, c->sched.queue_max,
                         c->sched.queue_s * 1000);
    ds4_log(DS4_LOG_INFO, "router.reload", "changed=\"%.*s\" keys=read", (int)taken.len, taken.ptr);
    if (left.len > 0)
        ds4_log(DS4_LOG_WARN, "router.reload", "need_restart=\"%.*s\"", (int)left.len, left.ptr);
    ds4_buf_deinit(&taken);
    ds4_buf_deinit(&left);
}

static void on_signal(uv_poll_t *poll, int status, int events)
{
    struct ds4_app *app = poll->data;
    int signum;

    (void)status;
    (void)events;
    while ((signum = ds4_service_next_signal(app->signal_fd)) != 0) {
        if (signum == SIGHUP && !app->draining)
            reload(app);
        else if (signum == SIGTERM || signum == SIGINT)
            start_drain(app);
    }
}

/* The service manager shows the state in one line; told when it changes. */
static void show_state(struct ds4_app *app, int64_t now_ns)
{
    enum ds4_cluster_state state = app->shown.state;
    uint32_t generation = app->shown.generation;
    int32_t n_reason = app->shown.n_reason;

    ds4_cluster_view(app->cluster, now_ns, &app->shown);
    if (app->shown.state != state || app->shown.generation != generation ||
        app->shown.n_reason != n_reason)
        ds4_service_status("%s, generation %u%s%s", ds4_cluster_state_text(app->shown.state),
                           app->shown.generation, app->shown.n_reason > 0 ? ": " : "",
                           app->shown.n_reason > 0 ? app->shown.reasons[0] : "");
}

static void on_tick(uv_timer_t *timer)
{
    struct ds4_app *app = timer->data;
    int64_t now_ns = ds4_clock_ns();
    int64_t late_ns = now_ns - app->tick_ns - DS4_TICK_MS * DS4_NS_PER_MS;

    if (app->tick_ns != 0)
        ds4_metric_observe(app->metrics, DS4_M_EVENTLOOP_LAG_SECONDS,
                           late_ns > 0 ? (double)late_ns / (double)DS4_NS_PER_SEC : 0);
    app->tick_ns = now_ns;
    ds4_canary_tick(app->canary, now_ns);
    show_state(app, now_ns);
    ds4_stats_tick(app->stats, now_ns);
    if (app->ping_ms > 0 && ds4_deadline_passed(app->ping)) {
        ds4_service_ping();
        app->ping = ds4_deadline_in_ms(app->ping_ms);
    }
    if (!app->draining)
        return;
    if (now_ns >= app->drain_until_ns)
        uv_stop(&app->loop);
    if (ds4_server_n_open(app->server) > 0)
        return;
    if (!app->saved_all)
        ds4_sched_save_all(app->sched, now_ns);
    else if (!ds4_sched_is_saving(app->sched))
        uv_stop(&app->loop);
    app->saved_all = true;
}

static int start_loop(struct ds4_app *app, struct ds4_err *err)
{
    if (uv_poll_init(&app->loop, &app->signals, app->signal_fd) != 0)
        return ds4_fail(err, DS4_E_IO, "could not watch for signals");
    (void)uv_timer_init(&app->loop, &app->ticker);
    app->watching = true;
    app->signals.data = app;
    app->ticker.data = app;
    (void)uv_poll_start(&app->signals, UV_READABLE, on_signal);
    app->ping_ms = ds4_service_watchdog_ms();
    (void)uv_timer_start(&app->ticker, on_tick, DS4_TICK_MS, DS4_TICK_MS);
    return 0;
}

struct ds4_app *ds4_app_open(const struct ds4_app_config *from, int *exit_code, struct ds4_err *err)
{
    struct ds4_config *config = from->config;
    struct ds4_app *app = calloc(1, sizeof(*app));

    *exit_code = DS4_EXIT_CONFIG;
    if (app == NULL) {
        (void)ds4_fail(err, DS4_E_NOMEM, "no memory for the router");
        return NULL;
    }
    app->config = config;
    app->load = from->load;
    app->load_arg = from->load_arg;
    app->signal_fd = from->signal_fd;
    if (uv_loop_init(&app->loop) != 0) {
        (void)ds4_fail(err, DS4_E_IO, "could not open the event loop");
        free(app);
        return NULL;
    }
    if (adopt_socket(app, err) == 0 && open_model(app, err) == 0)
        app->metrics = ds4_metrics_new(app->api.model_name, err);
    if (app->metrics == NULL || show_build(app, err) != 0 || open_engine(app, err) != 0 ||
        open_memory(app, err) != 0 || open_server(app, err) != 0 || start_loop(app, err) != 0) {
        if (err->code == DS4_E_IO || err->code == DS4_E_BUSY)
            *exit_code =
                app->bus != NULL || err->code == DS4_E_BUSY ? DS4_EXIT_TEMPORARY : DS4_EXIT_CONFIG;
        ds4_app_close(app);
        return NULL;
    }
    ds4_log(DS4_LOG_INFO, "router.start",
            "model=%s release=%s vocab=%d layers=%d stages=%d listen=%s port=%d "
            "metrics_port=%d think_default=%s think_floor=%d",
            app->api.model_name, ds4_config_choice("model.release", app->api.release),
            app->shape.n_vocab, app->shape.n_layer, ds4_config_stages(config), config->http.listen,
            ds4_server_port(app->server), ds4_server_side_port(app->server),
            ds4_config_choice("think.default", config->think.default_effort),
            config->think.max_min_context);
    return app;
}

int ds4_app_run(struct ds4_app *app)
{
    ds4_service_ready();
    (void)uv_run(&app->loop, UV_RUN_DEFAULT);
    ds4_log(DS4_LOG_INFO, "router.stop", "open=%zu", ds4_server_n_open(app->server));
    return DS4_EXIT_OK;
}

/* Requests still held end with an error.  The house stands as long as the loop turns: a request that
 * comes in on an open connection meanwhile gets its 503. */
static void end_requests(struct ds4_app *app)
{
    const struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "the server is stopping"};
    int64_t now_ns = ds4_clock_ns();

    ds4_cluster_drain(app->cluster);
    ds4_sched_stop(app->sched, DS4_REASON_DRAINING, &why, now_ns);
    ds4_sched_fail_queue(app->sched, DS4_REASON_DRAINING, &why, now_ns);
    ds4_server_stop_listening(app->server);
}

static void turn_until(struct ds4_app *app, size_t (*left)(const struct ds4_server *), int64_t ms)
{
    struct ds4_deadline deadline = ds4_deadline_in_ms(ms);

    while (left(app->server) > 0 && !ds4_deadline_passed(deadline))
        (void)uv_run(&app->loop, UV_RUN_ONCE); /* the ticker ends every wait */
}

/* Lets go of the loop.  False if a connection would not end: what it refers to must stay. */
static bool close_loop(struct ds4_app *app)
{
    if (app->server != NULL) {
        end_requests(app);
        turn_until(app, ds4_server_n_unsent, DS4_LAST_WORDS_MS);
        ds4_server_cut_connections(app->server);
        turn_until(app, ds4_server_n_connections, DS4_LAST_WORDS_MS);
        if (ds4_server_n_connections(app->server) > 0)
            return false;
    }
    ds4_server_close(app->server);
    if (app->sched != NULL)
        ds4_sched_close_disk(app->sched);
    if (app->woken)
        uv_close((uv_handle_t *)&app->wake, NULL);
    ds4_bus_close(app->bus);
    if (app->watching) {
        uv_close((uv_handle_t *)&app->signals, NULL);
        uv_close((uv_handle_t *)&app->ticker, NULL);
    }
    (void)uv_run(&app->loop, UV_RUN_NOWAIT);
    return uv_loop_close(&app->loop) == 0;
}

void ds4_app_close(struct ds4_app *app)
{
    if (app == NULL)
        return;
    if (app->bus != NULL)
        ds4_bus_attach(app->bus, NULL);
    if (!close_loop(app)) {
        ds4_log(DS4_LOG_WARN, "router.close", "error=\"a connection or handle is still open\"");
        return; /* the process ends with it */
    }
    ds4_server_free(app->server);
    ds4_cluster_free(app->cluster);
    ds4_sched_free(app->sched);
    ds4_canary_free(app->canary);
    ds4_stats_free(app->stats);
    ds4_text_store_free(app->api.responses);
    ds4_text_store_free(app->api.reasoning);
    ds4_metrics_free(app->metrics);
    ds4_tool_memory_free(app->tool_memory);
    ds4_turn_memory_free(app->turn_memory);
    ds4_recovery_deinit(&app->recovery);
    ds4_bpe_free(app->bpe);
    ds4_vocab_free(app->vocab);
    free(app);
}
