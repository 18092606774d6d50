/* Dialect of /v1/responses: how answers are written (step 15); responses_request.c reads.
 *
 * Every event carries its type twice and a number from 0 without gaps.  An item is a part of the answer:
 * it is added, grows by deltas and is done, complete; the last event holds the whole response.  Clients'
 * idle timers count events only, so response.in_progress is repeated until the first item comes.
 * Reasoning grows as its summary when one was asked for; its text then follows in one piece. */
#include "router/api/openai_responses.h"

#include "common/clock.h"
#include "common/json_write.h"
#include "router/api/answer.h"
#include "router/api/parts.h"
#include "router/api/responses_items.h"
#include "router/api/responses_request.h"
#include "router/api/responses_store.h"
#include "router/api/side_field.h"
#include "router/sse.h"

#include <stdio.h>

#define DS4_FRAME_BYTES ((size_t)256 << 20)
/* Codex counts events only, and its idle limit may be as low as 3 s; once a second was seen to do. */
#define DS4_RESPONSES_PING_MS 1000

static struct ds4_response *state_of(const struct ds4_answer *answer)
{
    return answer->state;
}

/* ---- the response ------------------------------------------------------------------------------------- */

static void write_raw(struct ds4_jw *w, const char *key, struct ds4_str json, const char *otherwise)
{
    ds4_jw_key(w, key);
    ds4_jw_raw(w, json.ptr != NULL ? json : ds4_str_view(otherwise));
}

static void write_usage(const struct ds4_answer *answer, struct ds4_jw *w)
{
    struct ds4_usage u = ds4_answer_usage(answer);

    ds4_jw_key(w, "usage");
    ds4_jw_object(w);
    ds4_jw_key(w, "input_tokens");
    ds4_jw_int(w, u.prompt_tok);
    ds4_jw_key(w, "input_tokens_details");
    ds4_jw_object(w);
    ds4_jw_key(w, "cached_tokens");
    ds4_jw_int(w, u.cached_tok);
    ds4_jw_end(w);
    ds4_jw_key(w, "output_tokens");
    ds4_jw_int(w, u.completion_tok);
    ds4_jw_key(w, "output_tokens_details");
    ds4_jw_object(w);
    ds4_jw_key(w, "reasoning_tokens");
    ds4_jw_int(w, u.reasoning_tok);
    ds4_jw_end(w);
    ds4_jw_key(w, "total_tokens");
    ds4_jw_int(w, (int64_t)u.prompt_tok + u.completion_tok);
    ds4_jw_end(w);
}

static void write_failure(const struct ds4_api_error *error, struct ds4_jw *w)
{
    ds4_jw_key(w, "error");
    if (error == NULL) {
        ds4_jw_null(w);
        return;
    }
    ds4_jw_object(w);
    ds4_jw_key(w, "code");
    ds4_jw_text(w, error->code);
    ds4_jw_key(w, "message");
    ds4_jw_text(w, error->message);
    ds4_jw_end(w);
}

/* What the response repeats of its request. */
static void write_request(const struct ds4_answer *answer, struct ds4_jw *w)
{
    const struct ds4_response *response = state_of(answer);
    const struct ds4_request *req = answer->choice[0].req;

    write_raw(w, "instructions", response->instructions, "null");
    ds4_jw_key(w, "parallel_tool_calls");
    ds4_jw_bool(w, answer->parallel_calls);
    write_raw(w, "tool_choice", response->tool_choice, "\"auto\"");
    write_raw(w, "tools", response->tools, "[]");
    ds4_jw_key(w, "previous_response_id");
    if (response->previous.ptr != NULL)
        ds4_jw_str(w, response->previous);
    else
        ds4_jw_null(w);
    ds4_jw_key(w, "reasoning");
    ds4_jw_object(w);
    write_raw(w, "effort", response->effort, "null");
    write_raw(w, "summary", response->summary_wish, "null");
    ds4_jw_end(w);
    ds4_jw_key(w, "store");
    ds4_jw_bool(w, response->store);
    ds4_jw_key(w, "temperature");
    ds4_jw_double(w, (double)req->sampling.temperature);
    ds4_jw_key(w, "top_p");
    ds4_jw_double(w, (double)req->sampling.top_p);
    write_raw(w, "max_output_tokens", response->max_output_tokens, "null");
    write_raw(w, "text", response->text, "{\"format\":{\"type\":\"text\"}}");
    ds4_jw_key(w, "truncation");
    ds4_jw_text(w, "disabled");
    write_raw(w, "metadata", response->metadata, "{}");
}

static void write_response(struct ds4_answer *answer, const char *status,
                           const struct ds4_api_error *error, struct ds4_jw *w)
{
    const struct ds4_choice *choice = &answer->choice[0];
    bool running = strcmp(status, "in_progress") == 0;
    bool incomplete = strcmp(status, "incomplete") == 0;

    ds4_jw_object(w);
    ds4_jw_key(w, "id");
    ds4_jw_text(w, answer->id);
    ds4_jw_key(w, "object");
    ds4_jw_text(w, "response");
    ds4_jw_key(w, "created_at");
    ds4_jw_int(w, answer->created_unix_s);
    if (!running) {
        ds4_jw_key(w, "completed_at");
        ds4_jw_int(w, ds4_clock_unix_ns() / DS4_NS_PER_SEC);
    }
    ds4_jw_key(w, "status");
    ds4_jw_text(w, status);
    ds4_jw_key(w, "model");
    ds4_jw_str(w, choice->req->model);
    ds4_jw_key(w, "output");
    ds4_jw_array(w);
    for (size_t i = 0; !running && i < choice->parts.len; i++)
        ds4_response_write_item(choice, i, true, w);
    ds4_jw_end(w);
    write_failure(error, w);
    write_raw(w, "incomplete_details",
              incomplete ? DS4_STR("{\"reason\":\"max_output_tokens\"}")
                         : (struct ds4_str){NULL, 0},
              "null");
    write_request(answer, w);
    if (running) {
        ds4_jw_key(w, "usage");
        ds4_jw_null(w);
    } else {
        write_usage(answer, w);
    }
    if (choice->done)
        ds4_side_field_write(answer, w);
    ds4_jw_end(w);
}

void ds4_responses_write(struct ds4_answer *answer, const char *status, struct ds4_buf *out)
{
    struct ds4_jw w;

    ds4_jw_init(&w, out);
    write_response(answer, status, NULL, &w);
}

void ds4_responses_cancel(struct ds4_answer *answer)
{
    state_of(answer)->cancelled = true;
    ds4_answer_cancel(answer);
}

/* The finished response into *out, and into the store if the client did not say no. */
static void finish(struct ds4_answer *answer, struct ds4_buf *out)
{
    const struct ds4_response *response = state_of(answer);

    ds4_responses_write(answer,
                        ds4_response_is_cut(&answer->choice[0]) ? "incomplete" : "completed", out);
    if (response->store && !out->failed)
        ds4_responses_store_put(answer->context, ds4_str_view(answer->id), ds4_buf_view(out),
                                response->items);
}

/* ---- streams ------------------------------------------------------------------------------------------- */

/* An event under construction. */
struct frame {
    const char *type;
    struct ds4_buf buf;
    struct ds4_jw w;
};

static void open_frame(struct frame *frame, struct ds4_answer *answer, const char *type)
{
    frame->type = type;
    ds4_buf_init(&frame->buf, DS4_FRAME_BYTES);
    ds4_jw_init(&frame->w, &frame->buf);
    ds4_jw_object(&frame->w);
    ds4_jw_key(&frame->w, "type");
    ds4_jw_text(&frame->w, type);
    ds4_jw_key(&frame->w, "sequence_number");
    ds4_jw_int(&frame->w, state_of(answer)->sequence++);
}

static void send_frame(struct frame *frame, struct ds4_answer *answer)
{
    ds4_jw_end(&frame->w);
    ds4_sse_send_event(answer->sse, frame->type, ds4_buf_view(&frame->buf));
    ds4_buf_deinit(&frame->buf);
}

static void send_status(struct ds4_answer *answer, const char *type, const char *status,
                        const struct ds4_api_error *error)
{
    struct frame frame;

    open_frame(&frame, answer, type);
    ds4_jw_key(&frame.w, "response");
    write_response(answer, status, error, &frame.w);
    send_frame(&frame, answer);
}

/* Also before admission: a request that waits in the queue shows life. */
static void start(struct ds4_answer *answer)
{
    if (state_of(answer)->started)
        return;
    state_of(answer)->started = true;
    send_status(answer, "response.created", "in_progress", NULL);
    send_status(answer, "response.in_progress", "in_progress", NULL);
}

static void begin(struct ds4_choice *choice)
{
    start(choice->answer);
}

/* Opens an event about a place inside a part: "content_index" or "summary_index" 0. */
static void open_inner(struct frame *frame, const struct ds4_choice *choice, size_t part,
                       const char *type, const char *index)
{
    open_frame(frame, choice->answer, type);
    ds4_response_write_id(choice, part, "item_id", &frame->w);
    ds4_jw_key(&frame->w, "output_index");
    ds4_jw_int(&frame->w, (int64_t)part);
    if (index != NULL) {
        ds4_jw_key(&frame->w, index);
        ds4_jw_int(&frame->w, 0);
    }
}

static void send_text(struct ds4_choice *choice, size_t part, const char *type, const char *index,
                      const char *key, struct ds4_str text)
{
    struct frame frame;

    open_inner(&frame, choice, part, type, index);
    ds4_jw_key(&frame.w, key);
    ds4_jw_str(&frame.w, text);
    if (strncmp(type, "response.output_text", 20) == 0) {
        ds4_jw_key(&frame.w, "logprobs");
        ds4_jw_array(&frame.w);
        ds4_jw_end(&frame.w);
    }
    send_frame(&frame, choice->answer);
}

static void send_part(struct ds4_choice *choice, size_t part, const char *type, const char *index,
                      const char *kind, struct ds4_str text)
{
    struct frame frame;

    open_inner(&frame, choice, part, type, index);
    ds4_jw_key(&frame.w, "part");
    if (strcmp(kind, "output_text") == 0)
        ds4_response_write_output(choice, part, text, &frame.w);
    else
        ds4_response_write_text(kind, text, &frame.w);
    send_frame(&frame, choice->answer);
}

static void send_item(struct ds4_choice *choice, size_t part, bool whole)
{
    struct frame frame;

    open_frame(&frame, choice->answer,
               whole ? "response.output_item.done" : "response.output_item.added");
    ds4_jw_key(&frame.w, "output_index");
    ds4_jw_int(&frame.w, (int64_t)part);
    ds4_jw_key(&frame.w, "item");
    ds4_response_write_item(choice, part, whole, &frame.w);
    send_frame(&frame, choice->answer);
}

static void open_item(struct ds4_choice *choice, size_t part)
{
    send_item(choice, part, false);
    if (ds4_parts_call(choice, part) != NULL)
        return;
    if (!ds4_response_is_reasoning(choice, part))
        send_part(choice, part, "response.content_part.added", "content_index", "output_text",
                  DS4_STR(""));
    else if (state_of(choice->answer)->summary)
        send_part(choice, part, "response.reasoning_summary_part.added", "summary_index",
                  "summary_text", DS4_STR(""));
    else
        send_part(choice, part, "response.content_part.added", "content_index", "reasoning_text",
                  DS4_STR(""));
}

static void send_piece(struct ds4_choice *choice, size_t part, struct ds4_str text)
{
    if (ds4_response_is_custom(choice, part))
        return; /* its text is known when its arguments are complete */
    if (ds4_parts_call(choice, part) != NULL)
        send_text(choice, part, "response.function_call_arguments.delta", NULL, "delta", text);
    else if (!ds4_response_is_reasoning(choice, part))
        send_text(choice, part, "response.output_text.delta", "content_index", "delta", text);
    else if (state_of(choice->answer)->summary)
        send_text(choice, part, "response.reasoning_summary_text.delta", "summary_index", "delta",
                  text);
    else
        send_text(choice, part, "response.reasoning_text.delta", "content_index", "delta", text);
}

static void close_reasoning(struct ds4_choice *choice, size_t part)
{
    struct ds4_str text = ds4_parts_text(choice, part);

    if (state_of(choice->answer)->summary) {
        send_text(choice, part, "response.reasoning_summary_text.done", "summary_index", "text",
                  text);
        send_part(choice, part, "response.reasoning_summary_part.done", "summary_index",
                  "summary_text", text);
        send_part(choice, part, "response.content_part.added", "content_index", "reasoning_text",
                  DS4_STR(""));
        send_text(choice, part, "response.reasoning_text.delta", "content_index", "delta", text);
    }
    send_text(choice, part, "response.reasoning_text.done", "content_index", "text", text);
    send_part(choice, part, "response.content_part.done", "content_index", "reasoning_text", text);
}

static void close_call(struct ds4_choice *choice, size_t part)
{
    const struct ds4_response_tool *tool = ds4_response_tool_of(choice, part);
    const struct ds4_answer_call *call = ds4_parts_call(choice, part);
    struct frame frame;

    if (ds4_response_is_custom(choice, part)) {
        open_inner(&frame, choice, part, "response.custom_tool_call_input.delta", NULL);
        ds4_jw_key(&frame.w, "delta");
        ds4_response_write_input(ds4_buf_view(&call->arguments), &frame.w);
        send_frame(&frame, choice->answer);
        open_inner(&frame, choice, part, "response.custom_tool_call_input.done", NULL);
        ds4_jw_key(&frame.w, "input");
        ds4_response_write_input(ds4_buf_view(&call->arguments), &frame.w);
        send_frame(&frame, choice->answer);
        return;
    }
    open_inner(&frame, choice, part, "response.function_call_arguments.done", NULL);
    ds4_jw_key(&frame.w, "arguments");
    ds4_jw_str(&frame.w, ds4_buf_view(&call->arguments));
    ds4_jw_key(&frame.w, "name");
    ds4_jw_str(&frame.w, tool != NULL ? tool->name : ds4_buf_view(&call->name));
    send_frame(&frame, choice->answer);
}

static void close_item(struct ds4_choice *choice, size_t part)
{
    struct ds4_str text = ds4_parts_text(choice, part);

    ds4_response_decide_extra(choice, part);
    if (ds4_parts_call(choice, part) != NULL) {
        close_call(choice, part);
    } else if (ds4_response_is_reasoning(choice, part)) {
        close_reasoning(choice, part);
    } else {
        send_text(choice, part, "response.output_text.done", "content_index", "text", text);
        send_part(choice, part, "response.content_part.done", "content_index", "output_text", text);
    }
    send_item(choice, part, true);
}

static const struct ds4_part_writer items = {open_item, send_piece, close_item};

static void send_events(struct ds4_choice *choice, const struct ds4_events *events)
{
    ds4_parts_send(choice, events, &items);
}

static void choice_done(struct ds4_choice *choice)
{
    ds4_parts_finish(choice, &items);
}

static void done(struct ds4_answer *answer)
{
    struct ds4_buf body;
    struct frame frame;

    ds4_buf_init(&body, DS4_FRAME_BYTES);
    finish(answer, &body);
    open_frame(&frame, answer,
               ds4_response_is_cut(&answer->choice[0]) ? "response.incomplete"
                                                       : "response.completed");
    ds4_jw_key(&frame.w, "response");
    ds4_jw_raw(&frame.w, ds4_buf_view(&body));
    send_frame(&frame, answer);
    ds4_buf_deinit(&body);
}

static void fail(struct ds4_answer *answer, const struct ds4_api_error *error)
{
    start(answer);
    send_status(answer, "response.failed", state_of(answer)->cancelled ? "cancelled" : "failed",
                error);
}

static void ping(struct ds4_answer *answer)
{
    if (!state_of(answer)->started)
        start(answer);
    else if (answer->choice[0].n_part_opened == 0)
        send_status(answer, "response.in_progress", "in_progress", NULL);
    else
        ds4_sse_send_comment(answer->sse, "keep-alive");
}

static void whole(struct ds4_answer *answer, struct ds4_buf *body)
{
    struct ds4_choice *choice = &answer->choice[0];

    for (size_t i = 0; i < choice->parts.len; i++)
        ds4_response_decide_extra(choice, i);
    finish(answer, body);
}

const struct ds4_dialect ds4_dialect_responses = {
    .api = DS4_API_RESPONSES,
    .style = DS4_STYLE_OPENAI,
    .parse = ds4_responses_request_parse,
    .begin = begin,
    .events = send_events,
    .choice_done = choice_done,
    .done = done,
    .error = fail,
    .ping = ping,
    .ping_ms = DS4_RESPONSES_PING_MS,
    .whole = whole,
};

/* ---- input_tokens ---------------------------------------------------------------------------------------- */

void ds4_input_tokens_handle(struct ds4_exchange *x, void *context)
{
    struct ds4_api_error error = {0};
    struct ds4_response response = {0};
    struct ds4_chat_prompt prompt;
    struct ds4_body body;
    char text[80];

    ds4_chat_prompt_init(&prompt);
    if (ds4_body_init(&body, ds4_exchange_body(x), &error) == 0 &&
        ds4_responses_prompt_build(context, &body, &response, &prompt, &error) == 0) {
        (void)snprintf(text, sizeof(text),
                       "{\"object\":\"response.input_tokens\",\"input_tokens\":%zu}",
                       prompt.ids.len);
        ds4_exchange_reply(x, 200, "application/json", ds4_str_view(text));
    } else {
        ds4_api_error_reply(&error, DS4_STYLE_OPENAI, x);
    }
    ds4_chat_prompt_deinit(&prompt);
    ds4_body_deinit(&body);
}
