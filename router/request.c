/* The canonical request: its states, and what its tokens become (steps 13 and 14).
 *
 * ds4_request_accept() is where a token turns into something a client can see: detokenizer, parser,
 * sink.  It decides the ends that depend on tokens (stop ids, what the parser recognised, the limit);
 * ends that depend on anything else come from the scheduler.
 * Invariant: sink callbacks run with `delivering` set, so a cancellation from inside one is remembered
 * and obeyed by the caller after the callback has returned, never underneath it. */
#include "router/request.h"

#include "common/clock.h"
#include "router/parse/stream.h"
#include "router/text/detok.h"

#include <assert.h>
#include <stdlib.h>

#define DS4_TOKEN_TEXT_BYTES  ((size_t)1 << 20)  /* text of one burst of tokens */
#define DS4_EVENTS_TEXT_BYTES ((size_t)16 << 20) /* what a parser may release at once */

const char *ds4_api_text(enum ds4_api api)
{
    static const char *const text[DS4_N_API] = {"chat", "completions", "responses", "messages"};

    return (unsigned)api < DS4_N_API ? text[api] : "?";
}

const char *ds4_end_text(enum ds4_end end)
{
    static const char *const text[DS4_N_END] = {
#define DS4_END_TEXT(name, label) label,
        DS4_ENDS(DS4_END_TEXT)
#undef DS4_END_TEXT
    };

    return (unsigned)end < DS4_N_END ? text[end] : "?";
}

const char *ds4_reason_text(enum ds4_reason reason)
{
    static const char *const text[DS4_N_REASON] = {
#define DS4_REASON_TEXT(name, code) code,
        DS4_REASONS(DS4_REASON_TEXT)
#undef DS4_REASON_TEXT
    };

    return (unsigned)reason < DS4_N_REASON ? text[reason] : "?";
}

const char *ds4_cancel_text(enum ds4_cancel cancel)
{
    static const char *const text[DS4_N_CANCEL] = {"disconnect", "api", "slow_client", "shutdown"};

    return (unsigned)cancel < DS4_N_CANCEL ? text[cancel] : "?";
}

const char *ds4_request_state_text(enum ds4_request_state state)
{
    static const char *const text[] = {"received", "checked",  "queued", "prefill",
                                       "decode",   "draining", "done"};

    return (unsigned)state < sizeof(text) / sizeof(text[0]) ? text[state] : "?";
}

struct ds4_request *ds4_request_new(enum ds4_api api, int64_t received_ns, size_t arena_max_bytes,
                                    struct ds4_err *err)
{
    struct ds4_request *req = calloc(1, sizeof(*req));

    if (req == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a request");
        return NULL;
    }
    ds4_arena_init(&req->arena, arena_max_bytes);
    ds4_buf_init(&req->text, DS4_TOKEN_TEXT_BYTES);
    req->state = DS4_REQUEST_RECEIVED;
    req->api = api;
    req->created_unix_s = ds4_clock_unix_ns() / DS4_NS_PER_SEC;
    req->timing.received_ns = received_ns;
    req->n_choice = 1;
    req->sampling = (struct ds4_sampling){
        .temperature = 1,
        .top_p = 1,
        .repetition_penalty = 1,
        .n_logprobs = -1,
        .think_close_id = -1,
        .force_close_at = -1,
        .forced_after_id = -1,
    };
    return req;
}

void ds4_request_free(struct ds4_request *req)
{
    if (req == NULL)
        return;
    assert(req->state != DS4_REQUEST_QUEUED && req->state != DS4_REQUEST_PREFILL &&
           req->state != DS4_REQUEST_DECODE);
    if (req->watch != NULL)
        ds4_watch_deinit(req->watch);
    ds4_stream_free(req->parser);
    if (req->events != NULL)
        ds4_events_deinit(req->events);
    ds4_buf_deinit(&req->text);
    DS4_VEC_DEINIT(&req->history);
    ds4_arena_deinit(&req->arena);
    free(req);
}

int ds4_request_set_prompt(struct ds4_request *req, const int32_t *ids, int32_t n,
                           struct ds4_err *err)
{
    int32_t *copy = ds4_arena_take_array(&req->arena, (size_t)n, sizeof(*ids));

    if (copy == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a prompt of %d tokens", n);
    if (n > 0)
        memcpy(copy, ids, (size_t)n * sizeof(*ids));
    req->prompt = copy;
    req->n_prompt = n;
    return 0;
}

int ds4_request_set_parser(struct ds4_request *req, const struct ds4_vocab *vocab,
                           const struct ds4_parse_config *config, struct ds4_err *err)
{
    req->detok = ds4_arena_take(&req->arena, sizeof(*req->detok));
    req->events = ds4_arena_take(&req->arena, sizeof(*req->events));
    if (req->detok == NULL || req->events == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory to read the answer");
    ds4_detok_init(req->detok, vocab, true);
    ds4_events_init(req->events, DS4_EVENTS_TEXT_BYTES);
    req->parser = ds4_stream_new(config, err);
    return req->parser == NULL ? -1 : 0;
}

int ds4_request_set_watch(struct ds4_request *req, const struct ds4_recovery *recovery,
                          struct ds4_err *err)
{
    if (!recovery->knobs.soup && !recovery->knobs.repetition)
        return 0;
    req->watch = ds4_arena_take(&req->arena, sizeof(*req->watch));
    if (req->watch == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory to watch the answer");
    ds4_watch_init(req->watch, recovery, ds4_stream_place(req->parser) == DS4_PLACE_REASONING);
    return 0;
}

int32_t ds4_request_splice_room(const struct ds4_request *req)
{
    return req->watch == NULL ? 0 : ds4_recovery_room(req->watch->recovery);
}

/* The diagram of request.h as one switch: may `from` become `to`? */
static bool legal(enum ds4_request_state from, enum ds4_request_state to)
{
    switch (from) {
    case DS4_REQUEST_RECEIVED:
        return to == DS4_REQUEST_CHECKED || to == DS4_REQUEST_DRAINING;
    case DS4_REQUEST_CHECKED:
        return to == DS4_REQUEST_QUEUED || to == DS4_REQUEST_DRAINING;
    case DS4_REQUEST_QUEUED:
        return to == DS4_REQUEST_PREFILL || to == DS4_REQUEST_DRAINING;
    case DS4_REQUEST_PREFILL:
        return to == DS4_REQUEST_DECODE || to == DS4_REQUEST_QUEUED || to == DS4_REQUEST_DRAINING;
    case DS4_REQUEST_DECODE:
        return to == DS4_REQUEST_QUEUED || to == DS4_REQUEST_DRAINING;
    case DS4_REQUEST_DRAINING:
        return to == DS4_REQUEST_DONE;
    case DS4_REQUEST_DONE:
        return false;
    }
    return false;
}

int ds4_request_move(struct ds4_request *req, enum ds4_request_state to, struct ds4_err *err)
{
    if (!legal(req->state, to))
        return ds4_fail(err, DS4_E_BUG, "request %s cannot go from %s to %s", req->id,
                        ds4_request_state_text(req->state), ds4_request_state_text(to));
    req->state = to;
    return 0;
}

/* Gives the sink what the parser has said since the last time. */
static void emit(struct ds4_request *req)
{
    if (req->events == NULL || req->events->list.len == 0)
        return;
    if (req->sink.events != NULL) {
        req->delivering = true;
        req->sink.events(req->sink.owner, req->events);
        req->delivering = false;
    }
    ds4_events_clear(req->events);
}

/* Feeds one token's text to the parser.  *fired: a tripwire did. */
static int read_token(struct ds4_request *req, int32_t id, bool *fired, struct ds4_err *err)
{
    struct ds4_watch_mark mark = {0};
    struct ds4_detok_text piece;

    *fired = false;
    if (ds4_stream_place(req->parser) == DS4_PLACE_REASONING)
        req->usage.reasoning_tok++;
    if (ds4_detok_next(req->detok, id, &req->text, &piece, err) != 0)
        return -1;
    if (req->watch != NULL)
        mark = ds4_watch_before(req->parser, req->events);
    if (ds4_stream_feed_token(req->parser, piece.text, piece.classes, req->events, err) != 0)
        return -1;
    if (req->watch == NULL || ds4_stream_ended(req->parser))
        return 0;
    return ds4_watch_after(req->watch, &mark, piece.text.len, req->parser, req->events, fired, err);
}

static int32_t stop_index(const struct ds4_request *req, int32_t id)
{
    for (int32_t i = req->ignore_stop ? req->n_model_stop_id : 0; i < req->n_stop_id; i++)
        if (req->stop_id[i] == id)
            return i;
    return -1;
}

static void end_with(struct ds4_accept *accept, enum ds4_end end)
{
    accept->verdict = DS4_VERDICT_END;
    accept->end = end;
}

/* A tripwire fired: splice or end. */
static int react(struct ds4_request *req, struct ds4_accept *accept, struct ds4_err *err)
{
    struct ds4_splice *splice = &accept->splice;

    if (ds4_watch_recover(req->watch, req->parser, req->events, splice, err) != 0)
        return -1;
    accept->tripped = true;
    if (splice->mode == DS4_RECOVERY_OFF) {
        end_with(accept, DS4_END_REPETITION);
        return 0;
    }
    accept->verdict = DS4_VERDICT_SPLICE;
    req->usage.completion_tok -= splice->n_drop;
    req->usage.recovery_tok += (int32_t)splice->text->len;
    ds4_detok_init(req->detok, req->detok->vocab, true);
    return 0;
}

static bool has_call(const struct ds4_request *req)
{
    uint32_t n_complete;

    (void)ds4_stream_n_calls(req->parser, &n_complete);
    return n_complete > 0;
}

/* One token; leaves accept->verdict at GO if the answer goes on. */
static void accept_token(struct ds4_request *req, const struct ds4_token_entry *entry, int32_t t,
                         int32_t limit, struct ds4_accept *accept, struct ds4_err *err)
{
    int32_t id = entry->token[t];
    int32_t stop = stop_index(req, id);
    bool fired = false;

    accept->n_used++;
    req->usage.completion_tok++;
    if (req->sink.token != NULL) {
        req->delivering = true;
        req->sink.token(req->sink.owner, entry, t);
        req->delivering = false;
    }
    if (stop >= 0) {
        accept->stop_id = id;
        end_with(accept, stop < req->n_model_stop_id ? DS4_END_EOS : DS4_END_STOP);
        return;
    }
    if (req->parser != NULL) {
        if (read_token(req, id, &fired, err) != 0) {
            accept->verdict = DS4_VERDICT_FAIL;
            return;
        }
        if (ds4_stream_ended(req->parser)) {
            end_with(accept, DS4_END_STOP);
            return;
        }
        if (req->one_call && has_call(req)) {
            end_with(accept, DS4_END_TOOL_CALLS);
            return;
        }
    }
    if (req->usage.completion_tok >= limit)
        end_with(accept, req->max_new_reduced ? DS4_END_CONTEXT : DS4_END_LENGTH);
    else if (fired && react(req, accept, err) != 0)
        accept->verdict = DS4_VERDICT_FAIL;
}

struct ds4_accept ds4_request_accept(struct ds4_request *req, const struct ds4_token_entry *entry,
                                     int32_t limit, int64_t now_ns, struct ds4_err *err)
{
    struct ds4_accept accept = {.verdict = DS4_VERDICT_GO, .stop_id = -1};

    if (req->state == DS4_REQUEST_PREFILL && ds4_request_move(req, DS4_REQUEST_DECODE, err) != 0)
        accept.verdict = DS4_VERDICT_FAIL;
    if (req->timing.first_token_ns == 0)
        req->timing.first_token_ns = now_ns;
    req->timing.last_token_ns = now_ns;
    /* Several tokens are told at once, but where each has log-probabilities: what a piece of the answer
     * holds says which of its lists they belong to. */
    for (int32_t t = 0;
         t < entry->n_token && accept.verdict == DS4_VERDICT_GO && !req->cancel_asked; t++) {
        accept_token(req, entry, t, limit, &accept, err);
        if (req->sampling.n_logprobs >= 0)
            emit(req);
    }
    emit(req);
    return accept;
}

/* Lets the parser decide everything undecided; its last word may be better than ours.  -1 with *reason. */
static int flush(struct ds4_request *req, enum ds4_end *end, enum ds4_reason *reason,
                 struct ds4_err *err)
{
    bool cut = *end == DS4_END_LENGTH || *end == DS4_END_CONTEXT;
    const struct ds4_event *last;

    if (req->parser == NULL)
        return 0;
    ds4_buf_clear(&req->text);
    if (ds4_detok_finish(req->detok, &req->text, err) != 0 ||
        ds4_stream_feed(req->parser, ds4_buf_view(&req->text), req->events, err) != 0 ||
        ds4_stream_finish(req->parser, cut ? DS4_ENGINE_LENGTH : DS4_ENGINE_STOP, req->events,
                          err) != 0)
        return -1;
    if (req->must_call && *end == DS4_END_EOS && ds4_stream_n_calls(req->parser, NULL) == 0) {
        *reason = DS4_REASON_UNSATISFIED;
        return ds4_fail(err, DS4_E_INVALID,
                        "the model ended its turn without the call that tool_choice demands");
    }
    last = req->events->list.len > 0 ? &req->events->list.ptr[req->events->list.len - 1] : NULL;
    if (last != NULL && last->kind == DS4_EVENT_FINISH) {
        req->finish = last->finish;
        /* Whatever the parser makes of it, a tripwire is why that turn ended. */
        if (*end != DS4_END_REPETITION && last->finish.reason == DS4_FINISH_TOOL_CALLS)
            *end = DS4_END_TOOL_CALLS;
        else if (*end != DS4_END_REPETITION && last->finish.stop_string)
            *end = DS4_END_STOP;
    }
    emit(req);
    return 0;
}

void ds4_request_finish(struct ds4_request *req, enum ds4_end end, enum ds4_reason reason,
                        int32_t stop_id, int64_t now_ns, const struct ds4_err *err,
                        struct ds4_request_result *result)
{
    enum ds4_reason failure_reason = DS4_REASON_INTERNAL;
    struct ds4_err failure = {0};

    if (ds4_request_move(req, DS4_REQUEST_DRAINING, &failure) != 0)
        assert(!"a request ends once");
    *result = (struct ds4_request_result){.reason = reason, .stop_id = stop_id};
    if (end == DS4_END_ERROR || end == DS4_END_CANCELLED) {
        if (err != NULL)
            result->err = *err;
    } else if (flush(req, &end, &failure_reason, &failure) != 0) {
        end = DS4_END_ERROR;
        result->err = failure;
        result->reason = failure_reason;
    }
    req->timing.done_ns = now_ns;
    result->end = end;
    result->usage = req->usage;
    result->timing = req->timing;
}

void ds4_request_deliver(struct ds4_request *req, const struct ds4_request_result *result)
{
    req->state = DS4_REQUEST_DONE;
    if (req->sink.done != NULL)
        req->sink.done(req->sink.owner, result);
}
