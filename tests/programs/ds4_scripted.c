/* ds4-scripted: a worker without a model.  It speaks the ordinary wire as the only stage of a rig, and
 * says what a script tells it to (tests/support/script.h), so that tool calls, malformed output, deaths
 * and silences reach the real router at will.
 *
 *   ds4_scripted --config ds4.conf --script script.json
 *
 * Steps are executed by the scheduler tests' scripted stage, which objects to everything a correct
 * router would not send: an objection ends the process with 72.  The answer of a step is ready at
 * once and held back for as long as the script says; one step is held at a time, later ones queue.
 *
 * What follows a prompt is fixed when its first token is asked for.  If the tokens behind the prompt are
 * not the ones said here (the router cut and spliced, or forced some), the rules are asked again with
 * the whole text so far. */
#include "common/clock.h"
#include "common/log.h"
#include "common/model.h"
#include "common/service.h"
#include "common/weights_digest.h"
#include "proto/codec.h"
#include "router/sched/budget.h"
#include "router/text/bpe.h"
#include "router/text/detok.h"
#include "router/text/vocab_load.h"
#include "tests/support/script.h"
#include "tests/support/scripted_stage.h"
#include "worker/bus.h"
#include "worker/settings.h"

#include <argp.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CONTEXT_TOK    131072
#define SPARE_SEQS     2
#define MAX_TEXT_BYTES ((size_t)64 << 20)
#define LINGER_MS      200
#define TOO_HOT_C      85

/* What a slot's sequence is saying. */
struct speech {
    uint64_t seq;
    uint32_t epoch;
    const struct ds4_script_rule *rule;
    size_t start;         /* tokens before the first one said */
    struct ds4_ids token; /* what is said, without the end */
};

struct scripted {
    struct ds4_config config;
    struct ds4_worker_settings settings;
    struct ds4_script script;
    struct ds4_model_shape model;
    struct ds4_vocab *vocab;
    struct ds4_bpe *bpe;
    struct ds4_hello hello;
    struct ds4_wbus *bus;
    struct ds4_frame_gate gate;
    struct ds4_buf in, out, text;
    struct ds4_arena arena;
    struct ds4_scripted_stage stage;
    struct speech *speech; /* [max_slots] */
    int signal_fd;
    bool link_up;
    uint32_t generation; /* 0 = none */
    bool formed;
    struct ds4_deadline heartbeat;

    /* The step whose answer is held. */
    bool holding;
    struct ds4_tokens_out held;
    struct ds4_deadline due;
    bool die; /* when due */
    int64_t step_no;
    int64_t step_start_ns;
    uint64_t steps_done;
    bool leaving;
};

/* ---- what is said -------------------------------------------------------------------------------- */

static void out_of_memory(void)
{
    ds4_log(DS4_LOG_ERROR, "scripted", "message=\"out of memory\"");
    abort();
}

static bool is_on_script(const struct speech *sp, const struct ds4_scripted_slot *slot)
{
    size_t n_said = slot->token.len - sp->start;

    if (sp->rule == NULL || sp->seq != slot->seq || sp->epoch != slot->epoch ||
        slot->token.len < sp->start)
        return false;
    if (sp->token.len == 0 || (!sp->rule->repeat && n_said > sp->token.len))
        return n_said == 0;
    for (size_t t = 0; t < n_said; t++)
        if (slot->token.ptr[sp->start + t] != sp->token.ptr[t % sp->token.len])
            return false;
    return true;
}

static void look_up(struct scripted *s, struct speech *sp, const struct ds4_scripted_slot *slot)
{
    struct ds4_detok detok;
    struct ds4_buf say;
    struct ds4_err err = {0};

    ds4_buf_clear(&s->text);
    ds4_detok_init(&detok, s->vocab, false);
    for (size_t t = 0; t < slot->token.len; t++)
        if (ds4_detok_push(&detok, slot->token.ptr[t], &s->text, &err) != 0)
            out_of_memory();
    ds4_buf_init(&say, MAX_TEXT_BYTES);
    sp->seq = slot->seq;
    sp->epoch = slot->epoch;
    sp->start = slot->token.len;
    sp->rule = ds4_script_match(&s->script, ds4_buf_view(&s->text));
    sp->token.len = 0;
    if (ds4_script_say(sp->rule, ds4_buf_view(&s->text), &say) != 0 ||
        ds4_bpe_encode(s->bpe, ds4_buf_view(&say), DS4_BPE_SPECIAL, &sp->token, &err) != 0)
        out_of_memory();
    ds4_buf_deinit(&say);
    ds4_log(DS4_LOG_INFO, "scripted.say", "seq=%" PRIu64 " prompt_tok=%zu rule=%td tok=%zu",
            slot->seq, sp->start,
            sp->rule >= s->script.rule && sp->rule < s->script.rule + s->script.n_rule
                ? sp->rule - s->script.rule
                : (ptrdiff_t)-1,
            sp->token.len);
}

/* The token that sampling parameters force here, or -1 (proto/message.h has the rules). */
static int32_t forced(const struct ds4_scripted_slot *slot)
{
    const struct ds4_sampling *sampling = &slot->how.sampling;
    int32_t n = (int32_t)slot->token.len;
    bool closed = false;
    int32_t after = sampling->forced_after_id < 0 ? slot->how.n_prompt : -1;

    for (int32_t t = slot->how.n_prompt; t < n; t++) {
        closed = closed || slot->token.ptr[t] == sampling->think_close_id;
        if (after < 0 && slot->token.ptr[t] == sampling->forced_after_id)
            after = t + 1;
    }
    if (sampling->force_close_at >= 0 && n >= sampling->force_close_at && !closed)
        return sampling->think_close_id;
    if (after >= 0 && n - after < sampling->n_forced)
        return sampling->forced_id[n - after];
    return -1;
}

static int32_t next_token(void *owner, const struct ds4_scripted_slot *slot)
{
    struct scripted *s = owner;
    struct speech *sp = &s->speech[slot - s->stage.slot];
    int32_t token = forced(slot);
    size_t n_said;

    if (token >= 0)
        return token;
    if (!is_on_script(sp, slot))
        look_up(s, sp, slot);
    n_said = slot->token.len - sp->start;
    if ((int64_t)n_said >= sp->rule->nan_at)
        return -1;
    if (sp->token.len > 0 && (n_said < sp->token.len || sp->rule->repeat))
        return sp->token.ptr[n_said % sp->token.len];
    if (sp->token.len > 0 &&
        (int32_t)slot->token.len - slot->how.n_prompt < slot->how.sampling.min_new_tok)
        return sp->token.ptr[sp->token.len - 1];
    return ds4_vocab_special(s->vocab, DS4_SPECIAL_EOS);
}

/* ---- sending ------------------------------------------------------------------------------------- */

static void send_out(struct scripted *s, enum ds4_frame_kind kind, uint32_t generation, int encoded,
                     struct ds4_err *err)
{
    if (encoded != 0 ||
        (s->link_up && ds4_wbus_send(s->bus, kind, generation, ds4_buf_view(&s->out), err) != 0))
        ds4_log(DS4_LOG_WARN, "scripted.send", "kind=%s message=\"%s\"", ds4_frame_kind_name(kind),
                err->msg);
}

static void send_health(struct scripted *s)
{
    struct ds4_err err = {0};
    struct ds4_health health = {
        .generation = s->generation,
        .state = s->leaving           ? DS4_WORKER_DRAINING
                 : s->generation == 0 ? DS4_WORKER_IDLE
                 : s->formed          ? DS4_WORKER_READY
                                      : DS4_WORKER_FORMING,
        .step_no = s->step_no,
        .step_age_ms = s->holding ? (ds4_clock_ns() - s->step_start_ns) / DS4_NS_PER_MS : 0,
        .steps_done = s->steps_done,
    };

    s->heartbeat = ds4_deadline_in_ms(s->settings.control.heartbeat_ms);
    if (s->script.celsius > 0) {
        health.card.told = true;
        for (int32_t i = 0; i < DS4_N_CARD_SENSOR; i++)
            health.card.value[i] = DS4_CARD_NOT_TOLD;
        health.card.value[DS4_CARD_CORE_C] = (double)s->script.celsius;
        health.card.value[DS4_CARD_SLOW_HEAT] = s->script.celsius >= TOO_HOT_C;
    }
    ds4_buf_clear(&s->out);
    send_out(s, DS4_FRAME_HEALTH, s->generation, ds4_codec_encode_health(&health, &s->out, &err),
             &err);
}

static void send_hello(struct scripted *s)
{
    struct ds4_err err = {0};

    ds4_buf_clear(&s->out);
    send_out(s, DS4_FRAME_HELLO, 0, ds4_codec_encode_hello(&s->hello, &s->out, &err), &err);
}

static void send_empty(struct scripted *s, enum ds4_frame_kind kind)
{
    struct ds4_err err = {0};

    ds4_buf_clear(&s->out);
    send_out(s, kind, s->generation, 0, &err);
}

/* ---- steps --------------------------------------------------------------------------------------- */

/* How long the step takes, and whether it ends otherwise, by its rows and by the rules of those that
 * said something in it.  `rows` are those before the answer. */
static void judge(struct scripted *s, int64_t prefill_rows)
{
    int64_t ms = prefill_rows * s->script.ms_per_ktok / 1000;

    for (int32_t i = 0; i < s->held.n_entry; i++) {
        struct ds4_token_entry *entry = &s->held.entry[i];
        struct speech *sp = s->speech;
        int64_t nth;

        if ((entry->flags & (DS4_TOKEN_SAMPLED | DS4_TOKEN_NONFINITE)) == 0)
            continue;
        while (sp < s->speech + s->stage.form.n_slots &&
               (sp->rule == NULL || sp->seq != entry->seq || sp->epoch != entry->epoch))
            sp++;
        if (sp == s->speech + s->stage.form.n_slots)
            continue; /* only forced tokens so far */
        if (s->stage.slot[sp - s->speech].how.sampling.n_logprobs >= 0 && entry->n_token > 0) {
            entry->n_logprob = 1;
            entry->logprob[0] = (struct ds4_logprob){.token = entry->token[0], .logprob = -0.125F};
        }
        nth = entry->pos - (int64_t)sp->start;
        if (nth == 0 && sp->rule->prefill_ms > ms)
            ms = sp->rule->prefill_ms;
        if (nth > 0 && sp->rule->step_ms > ms)
            ms = sp->rule->step_ms;
        if (nth >= sp->rule->hang_at)
            ms = -1;
        s->die = s->die || nth >= sp->rule->die_at;
        if (ms < 0)
            break;
    }
    s->due = ds4_deadline_in_ms(ms);
}

static void begin_step(struct scripted *s)
{
    const struct ds4_step *step;
    int64_t prefill_rows = 0;

    if (s->holding || s->stage.queue.len == 0)
        return;
    step = s->stage.queue.ptr[0];
    for (int32_t i = 0; i < step->n_entry; i++)
        if (step->entry[i].kind == DS4_ENTRY_PREFILL)
            prefill_rows += step->entry[i].n_tok;
    s->step_no = step->step_no;
    s->step_start_ns = ds4_clock_ns();
    s->holding = ds4_scripted_answer(&s->stage, &s->held);
    s->die = false;
    judge(s, prefill_rows);
}

static void end_step(struct scripted *s)
{
    struct ds4_err err = {0};

    if (!s->holding || !ds4_deadline_passed(s->due))
        return;
    if (s->die)
        (void)kill(getpid(), SIGKILL);
    s->holding = false;
    s->steps_done++;
    ds4_buf_clear(&s->out);
    ds4_arena_reset(&s->arena, (struct ds4_arena_mark){0});
    send_out(s, DS4_FRAME_TOKENS, s->generation,
             ds4_codec_encode_tokens(&s->held, &s->arena, &s->out, &err), &err);
}

/* ---- the router's frames ------------------------------------------------------------------------- */

static void leave_generation(struct scripted *s)
{
    s->generation = 0;
    s->gate.generation = 0;
    s->formed = false;
    s->holding = false;
    while (s->stage.queue.len > 0 && ds4_scripted_answer(&s->stage, &s->held))
        continue; /* nobody waits for these */
    send_health(s);
}

static int take_form(struct scripted *s, struct ds4_err *err)
{
    struct ds4_form form;

    ds4_arena_reset(&s->arena, (struct ds4_arena_mark){0});
    if (ds4_codec_decode_form(ds4_buf_view(&s->in), &s->arena, &form, err) != 0)
        return -1;
    s->generation = form.generation;
    s->formed = !s->script.never_ready;
    s->holding = false;
    if (s->formed) {
        ds4_scripted_form(&s->stage, &form, s->model.n_vocab, s->config.kv.hot_window);
        s->stage.check_cells = false; /* quadratic in the length of a conversation */
        for (int32_t i = 0; i < s->hello.max_slots; i++)
            s->speech[i].rule = NULL;
        s->gate.generation = form.generation;
        send_empty(s, DS4_FRAME_FORMED);
    }
    send_health(s);
    return 0;
}

static int take_step(struct scripted *s, struct ds4_err *err)
{
    struct ds4_step step;

    ds4_arena_reset(&s->arena, (struct ds4_arena_mark){0});
    if (ds4_codec_decode_step(ds4_buf_view(&s->in), s->generation, &s->arena, &step, err) != 0)
        return -1;
    return ds4_scripted_send(&s->stage, &step, err);
}

static int take_frame(struct scripted *s, const struct ds4_frame *frame, struct ds4_err *err)
{
    if (!ds4_frame_admit(&s->gate, frame))
        return 0;
    switch (frame->kind) {
    case DS4_FRAME_FORM:
        return take_form(s, err);
    case DS4_FRAME_STEP:
        return take_step(s, err);
    case DS4_FRAME_ABORT:
        if (frame->generation == s->generation)
            leave_generation(s);
        return 0;
    case DS4_FRAME_DRAIN:
    case DS4_FRAME_STOP:
        s->leaving = true;
        return 0;
    case DS4_FRAME_REFUSED:
        return ds4_fail(err, DS4_E_INVALID, "refused by the router");
    default:
        return 0;
    }
}

static void take_links(struct scripted *s)
{
    enum ds4_wbus_link link;

    while ((link = ds4_wbus_next_link(s->bus)) != DS4_WBUS_SAME) {
        s->link_up = link == DS4_WBUS_UP;
        s->gate.next_sequence = 0;
        if (s->link_up) {
            send_hello(s);
            send_health(s);
        } else if (s->generation != 0) {
            leave_generation(s);
        }
    }
}

static void take_signals(struct scripted *s)
{
    int signum;

    while ((signum = ds4_service_next_signal(s->signal_fd)) != 0)
        if (signum == SIGTERM || signum == SIGINT)
            s->leaving = true;
}

/* ---- life ---------------------------------------------------------------------------------------- */

static int run(struct scripted *s, struct ds4_err *err)
{
    struct ds4_frame frame;
    int rc;

    while (!s->leaving) {
        int32_t ms = ds4_deadline_left_ms(s->heartbeat);
        int32_t due_ms = ds4_deadline_left_ms(s->due);

        ds4_wbus_wait(s->bus, &s->signal_fd, 1, s->holding && due_ms < ms ? due_ms : ms);
        take_signals(s);
        take_links(s);
        while ((rc = ds4_wbus_recv(s->bus, &frame, &s->in, err)) > 0)
            if (take_frame(s, &frame, err) != 0)
                return DS4_EXIT_PROTOCOL;
        if (rc < 0)
            return DS4_EXIT_PROTOCOL;
        for (uint64_t before = UINT64_MAX; before != s->steps_done;) {
            before = s->steps_done;
            begin_step(s);
            end_step(s);
        }
        if (s->stage.err.code != DS4_OK) {
            *err = s->stage.err;
            return DS4_EXIT_PROTOCOL;
        }
        if (ds4_deadline_passed(s->heartbeat))
            send_health(s);
    }
    send_empty(s, DS4_FRAME_BYE);
    return DS4_EXIT_OK;
}

static int open_model(struct scripted *s, struct ds4_err *err)
{
    struct ds4_weights_file *wf = ds4_weights_open(s->config.model.path, DS4_WEIGHTS_PREAD, err);
    int rc;

    if (wf == NULL)
        return -1;
    rc = ds4_model_read(wf, &s->model, err) != 0 ||
                 ds4_weights_digest(wf, s->hello.model_digest, err) != 0
             ? -1
             : 0;
    ds4_weights_close(wf);
    if (rc != 0)
        return -1;
    s->vocab = ds4_vocab_load(s->config.model.path, NULL, err);
    s->bpe = s->vocab == NULL ? NULL : ds4_bpe_new(s->vocab, err);
    return s->bpe == NULL ? -1 : 0;
}

static void fill_hello(struct scripted *s)
{
    const struct ds4_config *c = &s->config;
    int32_t n_seq = c->sched.max_seqs + SPARE_SEQS;
    int32_t context = c->model.context > 0 ? c->model.context : CONTEXT_TOK;

    s->hello.n_stage = 1;
    s->hello.last_layer = s->model.n_layer;
    s->hello.n_layer = s->model.n_layer;
    s->hello.max_slots = n_seq;
    s->hello.max_context = context;
    s->hello.max_blocks = c->kv.blocks > 0 ? c->kv.blocks : n_seq * ds4_budget_blocks(context) + 1;
    s->hello.pid = getpid();
    memcpy(s->hello.boot_id, s->settings.control.bus.boot_id, DS4_ID_BYTES);
    (void)snprintf(s->hello.backend, sizeof(s->hello.backend), "scripted");
    (void)snprintf(s->hello.host, sizeof(s->hello.host), "localhost");
}

static int open_all(struct scripted *s, const char *config, const char *script, struct ds4_err *err)
{
    if (ds4_config_init(&s->config, err) || ds4_config_load(&s->config, config, err) ||
        ds4_config_check(&s->config, err) ||
        ds4_worker_settings_fill(&s->config, 0, &s->settings, err) ||
        ds4_script_load(&s->script, script, err) || open_model(s, err))
        return -1;
    fill_hello(s);
    s->speech = calloc((size_t)s->hello.max_slots, sizeof(*s->speech));
    if (s->speech == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for %d slots", s->hello.max_slots);
    ds4_buf_init(&s->in, DS4_MAX_FRAME_BYTES);
    ds4_buf_init(&s->out, DS4_MAX_FRAME_BYTES);
    ds4_buf_init(&s->text, MAX_TEXT_BYTES);
    ds4_arena_init(&s->arena, DS4_CODEC_ARENA_BYTES);
    s->stage.next = next_token;
    s->stage.next_owner = s;
    s->step_no = -1;
    s->signal_fd = ds4_service_open_signals(err);
    s->bus = s->signal_fd < 0 ? NULL : ds4_wbus_open(&s->settings.control.bus, err);
    return s->bus == NULL ? -1 : 0;
}

struct arguments {
    const char *config, *script;
};

static error_t parse_option(int key, char *value, struct argp_state *state)
{
    struct arguments *arguments = state->input;

    if (key == 'c')
        arguments->config = value;
    else if (key == 's')
        arguments->script = value;
    else if (key == ARGP_KEY_END && (arguments->config == NULL || arguments->script == NULL))
        argp_error(state, "--config and --script are required");
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

int main(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"config", 'c', "FILE", 0, "settings of the rig", 0},
        {"script", 's', "FILE", 0, "what to say (JSON)", 0},
        {0},
    };
    const struct argp argp = {
        options, parse_option, NULL, "The only stage of a rig, without a model.", NULL, NULL, NULL};
    static struct scripted s; /* the process's life is its life */
    struct arguments arguments = {0};
    struct ds4_err err = {0};
    int code = DS4_EXIT_CONFIG;

    argp_parse(&argp, argc, argv, 0, NULL, &arguments);
    ds4_log_set_name("scripted");
    if (open_all(&s, arguments.config, arguments.script, &err) == 0)
        code = run(&s, &err);
    if (code != DS4_EXIT_OK)
        ds4_log(DS4_LOG_ERROR, "exit", "code=%d message=\"%s\"", code, err.msg);
    ds4_wbus_close(s.bus, LINGER_MS);
    return code;
}
