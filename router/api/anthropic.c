/* Dialect of /v1/messages: how answers are written (step 15); anthropic_request.c reads.
 *
 * Order of a stream: message_start, ping, then per block start, deltas, stop; message_delta with the
 * reason, message_stop.  Blocks are the parts of the answer, counted from 0 without gaps.  A thinking
 * block ends with a signature: an opaque token under which the reasoning is remembered, so that a
 * client that keeps only the token loses nothing. */
#include "router/api/anthropic.h"

#include "common/clock.h"
#include "common/json_text.h"
#include "common/json_write.h"
#include "router/api/answer.h"
#include "router/api/anthropic_request.h"
#include "router/api/parts.h"
#include "router/api/side_field.h"
#include "router/api/text_store.h"
#include "router/sse.h"

#include <stdio.h>

#define DS4_FRAME_BYTES ((size_t)64 << 20)

/* ---- parts shared by streams and whole answers ------------------------------------------------------ */

static const char *stop_reason(const struct ds4_choice *choice)
{
    switch (choice->result.end) {
    case DS4_END_TOOL_CALLS:
        return "tool_use";
    case DS4_END_LENGTH:
    case DS4_END_CONTEXT:
        return "max_tokens";
    case DS4_END_EOS:
    case DS4_END_STOP:
        if (choice->finish.reason == DS4_FINISH_LENGTH)
            return "max_tokens"; /* a call cut inside a value */
        if (choice->finish.stop_string)
            return "stop_sequence";
        /* A named tool ends the turn as "stop" in the OpenAI dialects, not in this one. */
        return choice->calls.len > 0 ? "tool_use" : "end_turn";
    case DS4_END_REPETITION:
    case DS4_END_ERROR:
    case DS4_END_CANCELLED:
    case DS4_N_END:
        break;
    }
    return "end_turn";
}

static void write_stop(const struct ds4_choice *choice, struct ds4_jw *w)
{
    ds4_jw_key(w, "stop_reason");
    ds4_jw_text(w, stop_reason(choice));
    ds4_jw_key(w, "stop_sequence");
    if (choice->finish.stop_string)
        ds4_jw_str(w, choice->finish.stop_text);
    else
        ds4_jw_null(w);
}

/* input_tokens excludes what was cached: the three input counts add up to the prompt. */
static void write_usage(int32_t prompt_tok, int32_t cached_tok, int32_t output_tok,
                        struct ds4_jw *w)
{
    ds4_jw_key(w, "usage");
    ds4_jw_object(w);
    ds4_jw_key(w, "input_tokens");
    ds4_jw_int(w, (int64_t)prompt_tok - cached_tok);
    ds4_jw_key(w, "cache_read_input_tokens");
    ds4_jw_int(w, cached_tok);
    ds4_jw_key(w, "cache_creation_input_tokens");
    ds4_jw_int(w, 0);
    ds4_jw_key(w, "output_tokens");
    ds4_jw_int(w, output_tok);
    ds4_jw_end(w);
}

/* "call_x" is "toolu_x" in this dialect. */
static void write_tool_id(const struct ds4_answer_call *call, struct ds4_jw *w)
{
    char id[sizeof("toolu_") + DS4_CALL_ID_CHARS];

    (void)snprintf(id, sizeof(id), "toolu_%s", call->id + strlen("call_"));
    ds4_jw_key(w, "id");
    ds4_jw_text(w, id);
    ds4_jw_key(w, "name");
    ds4_jw_str(w, ds4_buf_view(&call->name));
}

/* Remembers the reasoning of a part and names it. */
static void sign(struct ds4_choice *choice, size_t part, char token[DS4_OPAQUE_CHARS + 1])
{
    ds4_text_store_opaque(token);
    (void)ds4_text_store_put(choice->answer->context->reasoning, ds4_str_view(token),
                             ds4_parts_text(choice, part), ds4_clock_ns());
}

/* ---- streams ------------------------------------------------------------------------------------------ */

/* A frame under construction: its event's name is its type. */
struct frame {
    const char *type;
    struct ds4_buf buf;
    struct ds4_jw w;
};

static void open_frame(struct frame *frame, const char *type)
{
    frame->type = type;
    ds4_buf_init(&frame->buf, DS4_FRAME_BYTES);
    ds4_jw_init(&frame->w, &frame->buf);
    ds4_jw_object(&frame->w);
    ds4_jw_key(&frame->w, "type");
    ds4_jw_text(&frame->w, type);
}

static void send_frame(struct frame *frame, struct ds4_answer *answer)
{
    ds4_jw_end(&frame->w);
    ds4_sse_send_event(answer->sse, frame->type, ds4_buf_view(&frame->buf));
    ds4_buf_deinit(&frame->buf);
}

static void messages_ping(struct ds4_answer *answer)
{
    struct frame frame;

    open_frame(&frame, "ping");
    send_frame(&frame, answer);
}

static void write_head(const struct ds4_answer *answer, struct ds4_jw *w)
{
    ds4_jw_key(w, "id");
    ds4_jw_text(w, answer->id);
    ds4_jw_key(w, "type");
    ds4_jw_text(w, "message");
    ds4_jw_key(w, "role");
    ds4_jw_text(w, "assistant");
    ds4_jw_key(w, "model");
    ds4_jw_str(w, answer->choice[0].req->model);
}

static void messages_begin(struct ds4_choice *choice)
{
    const struct ds4_request *req = choice->req;
    struct frame frame;

    open_frame(&frame, "message_start");
    ds4_jw_key(&frame.w, "message");
    ds4_jw_object(&frame.w);
    write_head(choice->answer, &frame.w);
    ds4_jw_key(&frame.w, "content");
    ds4_jw_array(&frame.w);
    ds4_jw_end(&frame.w);
    ds4_jw_key(&frame.w, "stop_reason");
    ds4_jw_null(&frame.w);
    ds4_jw_key(&frame.w, "stop_sequence");
    ds4_jw_null(&frame.w);
    write_usage(req->n_prompt, req->usage.cached_tok, 0, &frame.w);
    ds4_jw_end(&frame.w);
    send_frame(&frame, choice->answer);
    messages_ping(choice->answer);
}

static void open_block(struct ds4_choice *choice, size_t part)
{
    const struct ds4_answer_call *call = ds4_parts_call(choice, part);
    bool thinking = choice->parts.ptr[part].kind == DS4_EVENT_REASONING;
    struct frame frame;

    open_frame(&frame, "content_block_start");
    ds4_jw_key(&frame.w, "index");
    ds4_jw_int(&frame.w, (int64_t)part);
    ds4_jw_key(&frame.w, "content_block");
    ds4_jw_object(&frame.w);
    ds4_jw_key(&frame.w, "type");
    ds4_jw_text(&frame.w, call != NULL ? "tool_use" : thinking ? "thinking" : "text");
    if (call != NULL) {
        write_tool_id(call, &frame.w);
        ds4_jw_key(&frame.w, "input");
        ds4_jw_object(&frame.w);
        ds4_jw_end(&frame.w);
    } else {
        ds4_jw_key(&frame.w, thinking ? "thinking" : "text");
        ds4_jw_text(&frame.w, "");
    }
    if (thinking) {
        ds4_jw_key(&frame.w, "signature");
        ds4_jw_text(&frame.w, "");
    }
    ds4_jw_end(&frame.w);
    send_frame(&frame, choice->answer);
}

static void send_delta(struct ds4_choice *choice, size_t part, const char *type, const char *key,
                       struct ds4_str text)
{
    struct frame frame;

    open_frame(&frame, "content_block_delta");
    ds4_jw_key(&frame.w, "index");
    ds4_jw_int(&frame.w, (int64_t)part);
    ds4_jw_key(&frame.w, "delta");
    ds4_jw_object(&frame.w);
    ds4_jw_key(&frame.w, "type");
    ds4_jw_text(&frame.w, type);
    ds4_jw_key(&frame.w, key);
    ds4_jw_str(&frame.w, text);
    ds4_jw_end(&frame.w);
    send_frame(&frame, choice->answer);
}

static void send_piece(struct ds4_choice *choice, size_t part, struct ds4_str text)
{
    switch (choice->parts.ptr[part].kind) {
    case DS4_EVENT_REASONING:
        send_delta(choice, part, "thinking_delta", "thinking", text);
        break;
    case DS4_EVENT_CONTENT:
        send_delta(choice, part, "text_delta", "text", text);
        break;
    default:
        send_delta(choice, part, "input_json_delta", "partial_json", text);
        break;
    }
}

static void close_block(struct ds4_choice *choice, size_t part)
{
    char token[DS4_OPAQUE_CHARS + 1];
    struct frame frame;

    if (choice->parts.ptr[part].kind == DS4_EVENT_REASONING) {
        sign(choice, part, token);
        send_delta(choice, part, "signature_delta", "signature", ds4_str_view(token));
    }
    open_frame(&frame, "content_block_stop");
    ds4_jw_key(&frame.w, "index");
    ds4_jw_int(&frame.w, (int64_t)part);
    send_frame(&frame, choice->answer);
}

static const struct ds4_part_writer blocks = {open_block, send_piece, close_block};

static void messages_events(struct ds4_choice *choice, const struct ds4_events *events)
{
    ds4_parts_send(choice, events, &blocks);
}

static void messages_choice_done(struct ds4_choice *choice)
{
    ds4_parts_finish(choice, &blocks);
}

static void messages_done(struct ds4_answer *answer)
{
    const struct ds4_choice *choice = &answer->choice[0];
    struct frame frame;

    open_frame(&frame, "message_delta");
    ds4_jw_key(&frame.w, "delta");
    ds4_jw_object(&frame.w);
    write_stop(choice, &frame.w);
    ds4_jw_end(&frame.w);
    ds4_jw_key(&frame.w, "usage");
    ds4_jw_object(&frame.w);
    ds4_jw_key(&frame.w, "output_tokens");
    ds4_jw_int(&frame.w, choice->result.usage.completion_tok);
    ds4_jw_end(&frame.w);
    ds4_side_field_write(answer, &frame.w);
    send_frame(&frame, answer);
    open_frame(&frame, "message_stop");
    send_frame(&frame, answer);
}

static void messages_error(struct ds4_answer *answer, const struct ds4_api_error *error)
{
    struct ds4_buf buf;

    ds4_buf_init(&buf, DS4_FRAME_BYTES);
    ds4_api_error_write(error, DS4_STYLE_ANTHROPIC, ds4_exchange_id(answer->x), &buf);
    ds4_sse_send_event(answer->sse, "error", ds4_buf_view(&buf));
    ds4_buf_deinit(&buf);
}

/* ---- whole answers --------------------------------------------------------------------------------------- */

/* An object in any case: arguments that the limit cut are kept as one text. */
static void write_input(struct ds4_str arguments, struct ds4_jw *w)
{
    ds4_jw_key(w, "input");
    if (ds4_jt_valid(arguments, DS4_JT_ARGUMENT_DEPTH) &&
        ds4_str_starts(ds4_str_trim(arguments), DS4_STR("{"))) {
        ds4_jw_raw(w, arguments);
        return;
    }
    ds4_jw_object(w);
    ds4_jw_key(w, "arguments");
    ds4_jw_str(w, arguments);
    ds4_jw_end(w);
}

static void write_block(struct ds4_choice *choice, size_t part, struct ds4_jw *w)
{
    const struct ds4_answer_call *call = ds4_parts_call(choice, part);
    struct ds4_str text = ds4_parts_text(choice, part);
    char token[DS4_OPAQUE_CHARS + 1];

    ds4_jw_object(w);
    ds4_jw_key(w, "type");
    if (call != NULL) {
        ds4_jw_text(w, "tool_use");
        write_tool_id(call, w);
        write_input(text, w);
    } else if (choice->parts.ptr[part].kind == DS4_EVENT_REASONING) {
        ds4_jw_text(w, "thinking");
        ds4_jw_key(w, "thinking");
        ds4_jw_str(w, text);
        sign(choice, part, token);
        ds4_jw_key(w, "signature");
        ds4_jw_text(w, token);
    } else {
        ds4_jw_text(w, "text");
        ds4_jw_key(w, "text");
        ds4_jw_str(w, text);
    }
    ds4_jw_end(w);
}

static void messages_whole(struct ds4_answer *answer, struct ds4_buf *body)
{
    struct ds4_choice *choice = &answer->choice[0];
    const struct ds4_usage *u = &choice->result.usage;
    struct ds4_jw w;

    ds4_jw_init(&w, body);
    ds4_jw_object(&w);
    write_head(answer, &w);
    ds4_jw_key(&w, "content");
    ds4_jw_array(&w);
    for (size_t i = 0; i < choice->parts.len; i++)
        write_block(choice, i, &w);
    ds4_jw_end(&w);
    write_stop(choice, &w);
    write_usage(u->prompt_tok, u->cached_tok, u->completion_tok, &w);
    ds4_side_field_write(answer, &w);
    ds4_jw_end(&w);
}

const struct ds4_dialect ds4_dialect_anthropic = {
    .api = DS4_API_MESSAGES,
    .style = DS4_STYLE_ANTHROPIC,
    .parse = ds4_anthropic_request_parse,
    .begin = messages_begin,
    .events = messages_events,
    .choice_done = messages_choice_done,
    .done = messages_done,
    .error = messages_error,
    .ping = messages_ping,
    .whole = messages_whole,
};

/* ---- count_tokens ----------------------------------------------------------------------------------------- */

void ds4_count_tokens_handle(struct ds4_exchange *x, void *context)
{
    struct ds4_api_error error = {0};
    struct ds4_chat_prompt prompt;
    struct ds4_body body;
    char text[48];

    ds4_chat_prompt_init(&prompt);
    if (ds4_body_init(&body, ds4_exchange_body(x), &error) == 0 &&
        ds4_anthropic_prompt_build(context, &body, &prompt, &error) == 0) {
        (void)snprintf(text, sizeof(text), "{\"input_tokens\":%zu}", prompt.ids.len);
        ds4_exchange_set_header(x, "request-id", ds4_exchange_id(x));
        ds4_exchange_reply(x, 200, "application/json", ds4_str_view(text));
    } else {
        ds4_api_error_reply(&error, DS4_STYLE_ANTHROPIC, x);
    }
    ds4_chat_prompt_deinit(&prompt);
    ds4_body_deinit(&body);
}
