/* An HTTP request on its way to its answer (the frame around steps 2 to 15).
 *
 * The scheduler calls back from its own work; a callback may end the last choice and with it the
 * answer.  So every loop over choices that can end them runs under `cancelling` or `in_start`, which
 * keep the answer alive until the loop is through. */
#include "router/api/answer.h"

#include "common/clock.h"
#include "common/json_write.h"
#include "common/log.h"
#include "common/metrics.h"
#include "router/api/format.h"
#include "router/api/logprobs.h"
#include "router/api/parts.h"
#include "router/api/remember.h"
#include "router/api/request_log.h"
#include "router/cluster.h"
#include "router/sched/sched.h"
#include "router/sse.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#define DS4_REQUEST_ARENA_BYTES ((size_t)512 << 20)
#define DS4_ANSWER_TEXT_BYTES   ((size_t)256 << 20)
#define DS4_NOTES_BYTES         ((size_t)64 << 10)

static void check_end(struct ds4_answer *answer);

/* ---- making and freeing ----------------------------------------------------------------------- */

/* "chatcmpl-" and 22 base-62 digits: enough randomness that nobody guesses another's id. */
static void choose_id(struct ds4_answer *answer)
{
    static const char digits[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    static const char *const prefixes[DS4_N_API] = {"chatcmpl-", "cmpl-", "resp_", "msg_"};
    const char *prefix = prefixes[answer->dialect->api];
    unsigned char random[22] = {0};
    size_t used = strlen(prefix);

    (void)getrandom(random, sizeof(random), 0);
    memcpy(answer->id, prefix, used);
    for (size_t i = 0; i < sizeof(random); i++)
        answer->id[used + i] = digits[random[i] % (sizeof(digits) - 1)];
    answer->id[used + sizeof(random)] = '\0';
}

static struct ds4_answer *new_answer(const struct ds4_api_context *context,
                                     const struct ds4_dialect *dialect, struct ds4_exchange *x)
{
    struct ds4_answer *answer = calloc(1, sizeof(*answer));

    if (answer == NULL)
        return NULL;
    answer->context = context;
    answer->dialect = dialect;
    answer->x = x;
    answer->created_unix_s = ds4_clock_unix_ns() / DS4_NS_PER_SEC;
    answer->include_reasoning = true;
    answer->parallel_calls = true;
    ds4_buf_init(&answer->notes, DS4_NOTES_BYTES);
    choose_id(answer);
    answer->link = &context->live->first;
    answer->next = context->live->first;
    if (answer->next != NULL)
        answer->next->link = &answer->next;
    context->live->first = answer;
    return answer;
}

static void free_choice(struct ds4_choice *choice)
{
    for (size_t i = 0; i < choice->calls.len; i++) {
        ds4_buf_deinit(&choice->calls.ptr[i].name);
        ds4_buf_deinit(&choice->calls.ptr[i].arguments);
    }
    DS4_VEC_DEINIT(&choice->calls);
    DS4_VEC_DEINIT(&choice->parts);
    DS4_VEC_DEINIT(&choice->undecided);
    DS4_VEC_DEINIT(&choice->tokens);
    ds4_buf_deinit(&choice->reasoning);
    ds4_buf_deinit(&choice->content);
    ds4_buf_deinit(&choice->logprobs_content);
    ds4_buf_deinit(&choice->logprobs_reasoning);
    ds4_request_free(choice->req);
}

static void free_answer(struct ds4_answer *answer)
{
    *answer->link = answer->next;
    if (answer->next != NULL)
        answer->next->link = answer->link;
    for (int32_t i = 0; i < answer->n_choice; i++)
        free_choice(&answer->choice[i]);
    ds4_buf_deinit(&answer->notes);
    free(answer);
}

struct ds4_request *ds4_answer_add_request(struct ds4_answer *answer, int32_t index,
                                           struct ds4_api_error *error)
{
    struct ds4_choice *choice = &answer->choice[index];
    struct ds4_err err = {0};

    *choice = (struct ds4_choice){.answer = answer, .index = index};
    ds4_buf_init(&choice->reasoning, DS4_ANSWER_TEXT_BYTES);
    ds4_buf_init(&choice->content, DS4_ANSWER_TEXT_BYTES);
    ds4_buf_init(&choice->logprobs_content, DS4_ANSWER_TEXT_BYTES);
    ds4_buf_init(&choice->logprobs_reasoning, DS4_ANSWER_TEXT_BYTES);
    answer->n_choice = index + 1;
    choice->req = ds4_request_new(answer->dialect->api, ds4_exchange_started_ns(answer->x),
                                  DS4_REQUEST_ARENA_BYTES, &err);
    if (choice->req == NULL) {
        (void)ds4_api_fail_err(error, NULL, &err);
        return NULL;
    }
    (void)snprintf(choice->req->id, sizeof(choice->req->id), "%s", ds4_exchange_id(answer->x));
    choice->req->created_unix_s = answer->created_unix_s;
    choice->req->choice = index;
    return choice->req;
}

void ds4_answer_note(struct ds4_answer *answer, const char *what, const char *from, const char *to,
                     const char *why)
{
    struct ds4_jw w;

    if (answer->notes.len > 0)
        (void)ds4_buf_append_byte(&answer->notes, ',');
    ds4_jw_init(&w, &answer->notes);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "what");
    ds4_jw_text(&w, what);
    ds4_jw_key(&w, "from");
    ds4_jw_raw(&w, ds4_str_view(from));
    ds4_jw_key(&w, "to");
    ds4_jw_raw(&w, ds4_str_view(to));
    ds4_jw_key(&w, "why");
    ds4_jw_text(&w, why);
    ds4_jw_end(&w);
}

struct ds4_usage ds4_answer_usage(const struct ds4_answer *answer)
{
    struct ds4_usage sum = {0};

    for (int32_t i = 0; i < answer->n_choice; i++) {
        const struct ds4_choice *choice = &answer->choice[i];
        const struct ds4_usage *one = choice->done ? &choice->result.usage : &choice->req->usage;

        if (answer->n_per_prompt > 0 ? i % answer->n_per_prompt == 0 : i == 0) {
            sum.prompt_tok += one->prompt_tok + choice->n_echo;
            sum.cached_tok += one->cached_tok;
        }
        sum.completion_tok +=
            one->completion_tok > choice->n_echo ? one->completion_tok - choice->n_echo : 0;
        sum.reasoning_tok += one->reasoning_tok;
    }
    return sum;
}

/* ---- what comes back --------------------------------------------------------------------------- */

static void collect_call(struct ds4_choice *choice, const struct ds4_event *event,
                         struct ds4_str text)
{
    struct ds4_answer_call call = {0};

    if (event->kind == DS4_EVENT_CALL_BEGIN) {
        memcpy(call.id, event->id, sizeof(call.id));
        ds4_buf_init(&call.name, DS4_ANSWER_TEXT_BYTES);
        ds4_buf_init(&call.arguments, DS4_ANSWER_TEXT_BYTES);
        (void)ds4_buf_append_str(&call.name, text);
        if (DS4_VEC_PUSH(&choice->calls, call) != 0)
            ds4_buf_deinit(&call.name);
    } else if (event->call < choice->calls.len) {
        if (event->kind == DS4_EVENT_CALL_ARGS)
            (void)ds4_buf_append_str(&choice->calls.ptr[event->call].arguments, text);
        else
            choice->calls.ptr[event->call].incomplete = event->incomplete;
    }
}

static void collect(struct ds4_choice *choice, const struct ds4_events *events)
{
    for (size_t i = 0; i < events->list.len; i++) {
        const struct ds4_event *event = &events->list.ptr[i];
        struct ds4_str text = ds4_event_text(events, event);

        ds4_parts_add(choice, event);
        switch (event->kind) {
        case DS4_EVENT_REASONING:
            (void)ds4_buf_append_str(&choice->reasoning, text);
            break;
        case DS4_EVENT_CONTENT:
            (void)ds4_buf_append_str(&choice->content, text);
            break;
        case DS4_EVENT_CALL_BEGIN:
        case DS4_EVENT_CALL_ARGS:
        case DS4_EVENT_CALL_END:
            collect_call(choice, event, text);
            break;
        case DS4_EVENT_FINISH:
            choice->finish = event->finish;
            break;
        }
    }
}

static void begin_choice(struct ds4_choice *choice)
{
    struct ds4_answer *answer = choice->answer;

    if (answer->sse == NULL || choice->begun)
        return;
    choice->begun = true;
    answer->dialect->begin(choice);
}

static void on_admitted(void *owner, int32_t cached_tok)
{
    struct ds4_choice *choice = owner;
    char text[16];

    if (choice->answer->x != NULL && choice->index == 0) {
        (void)snprintf(text, sizeof(text), "%d", cached_tok);
        ds4_exchange_set_header(choice->answer->x, "x-ds4-cached-tokens", text);
    }
    if (choice->answer->paused)
        ds4_sched_pause(choice->answer->context->sched, choice->req, true);
    begin_choice(choice);
}

static void on_progress(void *owner, int32_t done_tok, int32_t total_tok, int32_t cached_tok)
{
    struct ds4_choice *choice = owner;
    struct ds4_answer *answer = choice->answer;

    (void)snprintf(answer->progress_text, sizeof(answer->progress_text),
                   "prefill done=%d total=%d cached=%d", done_tok, total_tok, cached_tok);
    if (answer->sse != NULL && answer->return_progress && answer->dialect->progress != NULL)
        answer->dialect->progress(choice, done_tok, total_tok);
}

static void on_token(void *owner, const struct ds4_token_entry *entry, int32_t index)
{
    struct ds4_choice *choice = owner;

    (void)DS4_VEC_PUSH(&choice->tokens, entry->token[index]);
    choice->answer->progress_text[0] = '\0';
    if (choice->wants_logprobs && entry->n_logprob > 0) {
        struct ds4_scored_token scored = {.token = entry->token[index],
                                          .n_logprob = entry->n_logprob};

        memcpy(scored.logprob, entry->logprob + index * entry->n_logprob,
               (size_t)entry->n_logprob * sizeof(*scored.logprob));
        (void)DS4_VEC_PUSH(&choice->undecided, scored);
    }
}

/* Called while the choice has said nothing but reasoning. */
static void time_first_content(const struct ds4_choice *choice, const struct ds4_events *events)
{
    for (size_t i = 0; i < events->list.len; i++) {
        enum ds4_event_kind kind = events->list.ptr[i].kind;

        if (kind != DS4_EVENT_CONTENT && kind != DS4_EVENT_CALL_BEGIN)
            continue;
        ds4_metric_observe(choice->answer->context->metrics, DS4_M_FIRST_CONTENT_SECONDS,
                           (double)(ds4_clock_ns() - choice->req->timing.received_ns) /
                               (double)DS4_NS_PER_SEC,
                           ds4_api_text(choice->req->api));
        return;
    }
}

static void on_events(void *owner, const struct ds4_events *events)
{
    struct ds4_choice *choice = owner;
    struct ds4_answer *answer = choice->answer;

    if (choice->wants_logprobs && !answer->dialect->raw)
        ds4_logprobs_decide(choice, events);
    if (choice->content.len == 0 && choice->calls.len == 0)
        time_first_content(choice, events);
    collect(choice, events);
    if (answer->sse != NULL && !answer->failed) {
        begin_choice(choice);
        answer->dialect->events(choice, events);
    }
}

static void cancel_open(struct ds4_answer *answer, enum ds4_cancel why)
{
    if (answer->cancelling)
        return;
    answer->cancelling = true;
    for (int32_t i = 0; i < answer->n_choice; i++)
        if (answer->choice[i].submitted && !answer->choice[i].done)
            ds4_sched_cancel(answer->context->sched, answer->choice[i].req, why, ds4_clock_ns());
    answer->cancelling = false;
    /* One that could not be ended from here (it is delivering, or its generation is being ended) tells
     * of its end later. */
    if (answer->n_open == 0)
        check_end(answer);
}

static void on_done(void *owner, const struct ds4_request_result *result)
{
    struct ds4_choice *choice = owner;
    struct ds4_answer *answer = choice->answer;

    choice->done = true;
    choice->result = *result;
    answer->n_open--;
    ds4_request_log(choice);
    if (result->end != DS4_END_ERROR && result->end != DS4_END_CANCELLED) {
        ds4_remember_turn(choice);
        ds4_format_check(choice);
    }
    if (result->end == DS4_END_ERROR || result->end == DS4_END_CANCELLED) {
        if (!answer->failed && result->end == DS4_END_CANCELLED)
            (void)ds4_api_fail(&answer->failure, "internal_error", NULL, "%s", result->err.msg);
        else if (!answer->failed)
            (void)ds4_api_fail_reason(&answer->failure, result->reason, &result->err,
                                      result->retry_after_ms);
        answer->failed = true;
    } else if (answer->sse != NULL && !answer->failed) {
        begin_choice(choice);
        answer->dialect->choice_done(choice);
    }
    check_end(answer);
}

/* ---- the end ------------------------------------------------------------------------------------ */

static void end_stream(struct ds4_answer *answer)
{
    if (answer->failed && !ds4_sse_started(answer->sse)) {
        answer->x = ds4_sse_abandon(answer->sse);
        answer->sse = NULL;
        ds4_api_error_reply(&answer->failure, answer->dialect->style, answer->x);
        return;
    }
    if (answer->failed)
        answer->dialect->error(answer, &answer->failure);
    else
        answer->dialect->done(answer);
    ds4_sse_close(answer->sse);
}

static void end_whole(struct ds4_answer *answer)
{
    struct ds4_buf body;
    struct ds4_err err = {0};

    if (answer->failed) {
        ds4_api_error_reply(&answer->failure, answer->dialect->style, answer->x);
        return;
    }
    ds4_buf_init(&body, SIZE_MAX / 2);
    answer->dialect->whole(answer, &body);
    if (ds4_buf_check(&body, "answer", &err) != 0) {
        (void)ds4_api_fail_err(&answer->failure, NULL, &err);
        ds4_api_error_reply(&answer->failure, answer->dialect->style, answer->x);
    } else {
        ds4_exchange_reply(answer->x, 200, "application/json", ds4_buf_view(&body));
    }
    ds4_buf_deinit(&body);
}

/* Ends the exchange when every choice is done; a failed choice takes the others with it. */
static void check_end(struct ds4_answer *answer)
{
    if (answer->in_start || answer->cancelling)
        return;
    if (answer->n_open > 0) {
        if (answer->failed)
            cancel_open(answer, DS4_CANCEL_API);
        return;
    }
    if (answer->sse != NULL)
        end_stream(answer);
    else
        end_whole(answer);
    free_answer(answer);
}

void ds4_answer_cancel(struct ds4_answer *answer)
{
    cancel_open(answer, DS4_CANCEL_API);
}

struct ds4_answer *ds4_answer_find(const struct ds4_api_context *context, struct ds4_str id)
{
    struct ds4_answer *answer = context->live->first;

    while (answer != NULL && !ds4_str_equal(ds4_str_view(answer->id), id))
        answer = answer->next;
    return answer;
}

static void on_gone(void *owner)
{
    cancel_open(owner, DS4_CANCEL_DISCONNECT);
}

static void on_sse_gone(void *owner, const char *reason)
{
    cancel_open(owner, strcmp(reason, "slow_client") == 0 ? DS4_CANCEL_SLOW_CLIENT
                                                          : DS4_CANCEL_DISCONNECT);
}

static void set_paused(struct ds4_answer *answer, bool paused)
{
    answer->paused = paused; /* those still in the queue are paused when they leave it */
    for (int32_t i = 0; i < answer->n_choice; i++)
        if (answer->choice[i].submitted && !answer->choice[i].done)
            ds4_sched_pause(answer->context->sched, answer->choice[i].req, paused);
}

static void on_sse_pause(void *owner)
{
    set_paused(owner, true);
}

static void on_sse_resume(void *owner)
{
    set_paused(owner, false);
}

static void on_ping(void *owner)
{
    struct ds4_answer *answer = owner;

    answer->dialect->ping(answer);
}

/* ---- the start ---------------------------------------------------------------------------------- */

static int check_ready(const struct ds4_answer *answer, struct ds4_api_error *error)
{
    struct ds4_cluster_view *view;
    struct ds4_err err = {.code = DS4_E_UNAVAILABLE};
    int64_t now_ns = ds4_clock_ns();

    if (ds4_cluster_is_ready(answer->context->cluster, now_ns))
        return 0;
    view = calloc(1, sizeof(*view));
    if (view == NULL)
        return ds4_api_fail(error, "loading", NULL, "the cluster is not ready");
    ds4_cluster_view(answer->context->cluster, now_ns, view);
    (void)snprintf(err.msg, sizeof(err.msg), "the cluster is %s%s%s",
                   ds4_cluster_state_text(view->state), view->n_reason > 0 ? ": " : "",
                   view->n_reason > 0 ? view->reasons[0] : "");
    (void)ds4_api_fail_reason(error,
                              view->reason == DS4_REASON_NONE ? DS4_REASON_LOADING : view->reason,
                              &err, view->retry_after_ms);
    free(view);
    return -1;
}

/* What the scheduler never saw; it counts its own refusals. */
static void count_refusal(const struct ds4_answer *answer, const char *reason)
{
    struct ds4_metrics *m = answer->context->metrics;
    const char *api = ds4_api_text(answer->dialect->api);

    ds4_metric_add(m, DS4_M_REQUESTS_STARTED, 1, api);
    ds4_metric_add(m, DS4_M_REQUESTS, 1, api, "refused");
    ds4_metric_add(m, DS4_M_ADMIT_REJECTS, 1, reason);
}

static void set_headers(struct ds4_answer *answer)
{
    const struct ds4_request *req = answer->choice[0].req;
    const struct ds4_request_effort *effort = &req->effort;
    char text[256];

    if (answer->dialect->style == DS4_STYLE_ANTHROPIC)
        ds4_exchange_set_header(answer->x, "request-id", ds4_exchange_id(answer->x));
    ds4_exchange_set_header(answer->x, "x-ds4-thinking", effort->thinking ? "on" : "off");
    (void)snprintf(text, sizeof(text), "%.*s", DS4_STR_ARG(effort->applied));
    ds4_exchange_set_header(answer->x, "x-ds4-effort", text);
    (void)snprintf(text, sizeof(text), "%.*s",
                   DS4_STR_ARG(effort->requested.len > 0 ? effort->requested : DS4_STR("default")));
    ds4_exchange_set_header(answer->x, "x-ds4-effort-requested", text);
    if (effort->downgraded) {
        (void)snprintf(text, sizeof(text), "%.*s->%.*s; %.*s", DS4_STR_ARG(effort->requested),
                       DS4_STR_ARG(effort->applied), DS4_STR_ARG(effort->why));
        ds4_exchange_set_header(answer->x, "x-ds4-effort-downgraded", text);
    }
    (void)snprintf(text, sizeof(text), "%d", req->n_prompt);
    ds4_exchange_set_header(answer->x, "x-ds4-prompt-tokens", text);
    (void)snprintf(text, sizeof(text), "%u", ds4_cluster_generation(answer->context->cluster));
    ds4_exchange_set_header(answer->x, "x-ds4-generation", text);
}

static int open_stream(struct ds4_answer *answer, struct ds4_api_error *error)
{
    const struct ds4_config *config = answer->context->config;
    int32_t limit_ms = answer->dialect->ping_ms;
    const struct ds4_sse_config sse = {
        .loop = answer->context->loop,
        .start_ms = config->http.queue_header_ms,
        .ping_ms =
            limit_ms > 0 && limit_ms < config->http.ping_ms ? limit_ms : config->http.ping_ms,
        .slow_client_ms = (int64_t)config->http.slow_client_s * 1000,
        .out_buf_bytes = (size_t)config->http.out_buf,
        .ping = on_ping,
        .pause = on_sse_pause,
        .resume = on_sse_resume,
        .gone = on_sse_gone,
        .owner = answer,
    };

    answer->sse = ds4_sse_new(answer->x, &sse);
    if (answer->sse == NULL)
        return ds4_api_fail(error, "internal_error", NULL, "no memory for the stream");
    return 0;
}

static int submit(struct ds4_answer *answer, struct ds4_choice *choice, struct ds4_api_error *error)
{
    enum ds4_reason reason = DS4_REASON_NONE;
    int32_t retry_after_ms = 0;
    struct ds4_err err = {0};
    struct ds4_request *req = choice->req;

    req->sink = (struct ds4_request_sink){
        .owner = choice,
        .admitted = on_admitted,
        .progress = on_progress,
        .token = on_token,
        .events = on_events,
        .done = on_done,
    };
    if (ds4_sched_submit(answer->context->sched, req, ds4_clock_ns(), &reason, &retry_after_ms,
                         &err) == 0) {
        choice->submitted = true;
        answer->n_open++;
        return 0;
    }
    if (reason == DS4_REASON_CONTEXT)
        return ds4_api_fail_context(error, answer->dialect->style, req->n_prompt, req->context_tok);
    return ds4_api_fail_reason(error, reason, &err, retry_after_ms);
}

static int submit_all(struct ds4_answer *answer, struct ds4_api_error *error)
{
    char from[24], to[24];
    struct ds4_request *req = answer->choice[0].req;

    for (int32_t i = 0; i < answer->n_choice; i++)
        if (submit(answer, &answer->choice[i], error) != 0)
            return -1;
    if (req->max_new_reduced && req->max_new_asked > 0) {
        (void)snprintf(from, sizeof(from), "%d", req->max_new_asked);
        (void)snprintf(to, sizeof(to), "%d", req->max_new);
        ds4_answer_note(answer, "max_tokens", from, to, "the context leaves no more");
    }
    return 0;
}

void ds4_answer_start(const struct ds4_api_context *context, const struct ds4_dialect *dialect,
                      struct ds4_exchange *x)
{
    struct ds4_api_error error = {.code = "internal_error"};
    struct ds4_answer *answer = new_answer(context, dialect, x);

    if (answer == NULL) {
        (void)ds4_api_fail(&error, "internal_error", NULL, "no memory for the request");
        ds4_api_error_reply(&error, dialect->style, x);
        return;
    }
    answer->in_start = true;
    ds4_exchange_on_gone(x, on_gone, answer);
    if (check_ready(answer, &error) != 0) {
        count_refusal(answer, strcmp(error.code, "draining") == 0 ? "draining" : "not_ready");
    } else if (dialect->parse(answer, &error) != 0) {
        count_refusal(answer, "invalid");
    } else {
        set_headers(answer);
        if ((!answer->stream || open_stream(answer, &error) == 0) &&
            submit_all(answer, &error) == 0) {
            answer->in_start = false;
            return;
        }
    }
    answer->failed = true;
    answer->failure = error;
    answer->in_start = false;
    check_end(answer);
}
