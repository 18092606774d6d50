/* Dialect of /v1/chat/completions: how answers are written (step 15); chat_request.c reads.
 *
 * Order of a stream, as the clients in use were seen to need it: role, reasoning, content, calls, an
 * empty delta with finish_reason, usage if asked for, [DONE].  Only stop, length, tool_calls ever
 * stand in finish_reason: unknown reasons make clients retry for ever.  A failure inside a stream is an
 * error object and [DONE], without a finish chunk. */
#include "router/api/openai_chat.h"

#include "common/clock.h"
#include "common/json_write.h"
#include "router/api/answer.h"
#include "router/api/chat_request.h"
#include "router/api/logprobs.h"
#include "router/api/openai_stream.h"
#include "router/api/side_field.h"
#include "router/sse.h"

#define DS4_CHUNK_OBJECT "chat.completion.chunk"

/* ---- parts shared by chunks and whole answers ---------------------------------------------------- */

static const char *finish_reason(const struct ds4_choice *choice)
{
    switch (choice->result.end) {
    case DS4_END_TOOL_CALLS:
        return "tool_calls";
    case DS4_END_LENGTH:
    case DS4_END_CONTEXT:
        return "length";
    case DS4_END_EOS:
    case DS4_END_STOP:
        /* The parser knows more: a call cut inside a value ends as length. */
        return ds4_finish_name(choice->finish.reason);
    case DS4_END_REPETITION:
    case DS4_END_ERROR:
    case DS4_END_CANCELLED:
    case DS4_N_END:
        break;
    }
    return "stop";
}

static void write_reasoning(const struct ds4_answer *answer, struct ds4_str text, struct ds4_jw *w)
{
    unsigned int field = answer->context->config->parse.reasoning_field;

    if (field != DS4_REASONING_SHORT) {
        ds4_jw_key(w, "reasoning_content");
        ds4_jw_str(w, text);
    }
    if (field != DS4_REASONING_CONTENT) {
        ds4_jw_key(w, "reasoning");
        ds4_jw_str(w, text);
    }
}

/* ---- chunks --------------------------------------------------------------------------------------- */

struct chunk {
    struct ds4_buf buf;
    struct ds4_jw w;
};

/* Opens a chunk up to the inside of its delta. */
static void open_chunk(struct chunk *chunk, const struct ds4_choice *choice)
{
    ds4_buf_init(&chunk->buf, DS4_OPENAI_FRAME_BYTES);
    ds4_jw_init(&chunk->w, &chunk->buf);
    ds4_openai_write_head(choice->answer, DS4_CHUNK_OBJECT, &chunk->w);
    ds4_jw_key(&chunk->w, "choices");
    ds4_jw_array(&chunk->w);
    ds4_jw_object(&chunk->w);
    ds4_jw_key(&chunk->w, "index");
    ds4_jw_int(&chunk->w, choice->index);
    ds4_jw_key(&chunk->w, "delta");
    ds4_jw_object(&chunk->w);
}

static void send_chunk(struct chunk *chunk, struct ds4_choice *choice, const char *finish,
                       bool with_logprobs, bool last)
{
    struct ds4_answer *answer = choice->answer;

    ds4_jw_end(&chunk->w); /* delta */
    ds4_jw_key(&chunk->w, "finish_reason");
    ds4_jw_text(&chunk->w, finish);
    ds4_jw_key(&chunk->w, "logprobs");
    if (with_logprobs)
        ds4_logprobs_take(choice, &chunk->w);
    else
        ds4_jw_null(&chunk->w);
    ds4_jw_end(&chunk->w); /* choice */
    ds4_jw_end(&chunk->w); /* choices */
    if (answer->continuous_usage)
        ds4_usage_write(answer, &chunk->w);
    if (last)
        ds4_side_field_write(answer, &chunk->w);
    ds4_jw_end(&chunk->w);
    ds4_sse_send_data(answer->sse, ds4_buf_view(&chunk->buf));
    ds4_buf_deinit(&chunk->buf);
}

static void chat_begin(struct ds4_choice *choice)
{
    struct chunk chunk;

    open_chunk(&chunk, choice);
    ds4_jw_key(&chunk.w, "role");
    ds4_jw_text(&chunk.w, "assistant");
    ds4_jw_key(&chunk.w, "content");
    ds4_jw_text(&chunk.w, "");
    send_chunk(&chunk, choice, NULL, false, false);
}

static void write_call_delta(struct ds4_jw *w, const struct ds4_event *event, struct ds4_str text)
{
    ds4_jw_key(w, "tool_calls");
    ds4_jw_array(w);
    ds4_jw_object(w);
    ds4_jw_key(w, "index");
    ds4_jw_int(w, event->call);
    if (event->kind == DS4_EVENT_CALL_BEGIN) {
        ds4_jw_key(w, "id");
        ds4_jw_text(w, event->id);
        ds4_jw_key(w, "type");
        ds4_jw_text(w, "function");
    }
    ds4_jw_key(w, "function");
    ds4_jw_object(w);
    if (event->kind == DS4_EVENT_CALL_BEGIN) {
        ds4_jw_key(w, "name");
        ds4_jw_str(w, text);
    }
    ds4_jw_key(w, "arguments");
    ds4_jw_str(w, event->kind == DS4_EVENT_CALL_BEGIN ? DS4_STR("") : text);
    ds4_jw_end(w);
    ds4_jw_end(w);
    ds4_jw_end(w);
}

static void chat_events(struct ds4_choice *choice, const struct ds4_events *events)
{
    struct ds4_answer *answer = choice->answer;
    struct chunk chunk;

    for (size_t i = 0; i < events->list.len; i++) {
        const struct ds4_event *event = &events->list.ptr[i];
        struct ds4_str text = ds4_event_text(events, event);

        if (event->kind == DS4_EVENT_CALL_END || event->kind == DS4_EVENT_FINISH ||
            (event->kind == DS4_EVENT_REASONING && !answer->include_reasoning))
            continue;
        open_chunk(&chunk, choice);
        if (event->kind == DS4_EVENT_REASONING) {
            write_reasoning(answer, text, &chunk.w);
        } else if (event->kind == DS4_EVENT_CONTENT) {
            ds4_jw_key(&chunk.w, "content");
            ds4_jw_str(&chunk.w, text);
        } else {
            write_call_delta(&chunk.w, event, text);
        }
        send_chunk(&chunk, choice, NULL, choice->wants_logprobs, false);
    }
}

static bool is_last_open(const struct ds4_choice *choice)
{
    return choice->answer->n_open == 0;
}

static void chat_choice_done(struct ds4_choice *choice)
{
    struct chunk chunk;

    open_chunk(&chunk, choice);
    send_chunk(&chunk, choice, finish_reason(choice), choice->wants_logprobs,
               is_last_open(choice) && !choice->answer->include_usage);
}

static void chat_done(struct ds4_answer *answer)
{
    ds4_openai_stream_done(answer, DS4_CHUNK_OBJECT);
}

static void chat_progress(struct ds4_choice *choice, int32_t done_tok, int32_t total_tok)
{
    struct ds4_answer *answer = choice->answer;
    const struct ds4_timing *t = &choice->req->timing;
    struct ds4_buf buf;
    struct ds4_jw w;

    ds4_buf_init(&buf, DS4_OPENAI_FRAME_BYTES);
    ds4_jw_init(&w, &buf);
    ds4_openai_write_head(answer, DS4_CHUNK_OBJECT, &w);
    ds4_jw_key(&w, "choices");
    ds4_jw_array(&w);
    ds4_jw_end(&w);
    ds4_jw_key(&w, "prompt_progress");
    ds4_jw_object(&w);
    ds4_jw_key(&w, "total");
    ds4_jw_int(&w, total_tok);
    ds4_jw_key(&w, "cache");
    ds4_jw_int(&w, choice->req->usage.cached_tok);
    ds4_jw_key(&w, "processed");
    ds4_jw_int(&w, done_tok);
    ds4_jw_key(&w, "time_ms");
    ds4_jw_int(&w, (ds4_clock_ns() - t->admitted_ns) / DS4_NS_PER_MS);
    ds4_jw_end(&w);
    ds4_jw_end(&w);
    ds4_sse_send_data(answer->sse, ds4_buf_view(&buf));
    ds4_buf_deinit(&buf);
}

/* ---- whole answers --------------------------------------------------------------------------------- */

static void write_calls(const struct ds4_choice *choice, struct ds4_jw *w)
{
    ds4_jw_key(w, "tool_calls");
    ds4_jw_array(w);
    for (size_t i = 0; i < choice->calls.len; i++) {
        const struct ds4_answer_call *call = &choice->calls.ptr[i];

        ds4_jw_object(w);
        ds4_jw_key(w, "id");
        ds4_jw_text(w, call->id);
        ds4_jw_key(w, "type");
        ds4_jw_text(w, "function");
        ds4_jw_key(w, "function");
        ds4_jw_object(w);
        ds4_jw_key(w, "name");
        ds4_jw_str(w, ds4_buf_view(&call->name));
        ds4_jw_key(w, "arguments");
        ds4_jw_str(w, ds4_buf_view(&call->arguments));
        ds4_jw_end(w);
        ds4_jw_end(w);
    }
    ds4_jw_end(w);
}

static void write_message(const struct ds4_choice *choice, struct ds4_jw *w)
{
    ds4_jw_key(w, "message");
    ds4_jw_object(w);
    ds4_jw_key(w, "role");
    ds4_jw_text(w, "assistant");
    ds4_jw_key(w, "content");
    if (choice->content.len == 0 && choice->calls.len > 0)
        ds4_jw_null(w);
    else
        ds4_jw_str(w, ds4_buf_view(&choice->content));
    ds4_jw_key(w, "refusal");
    ds4_jw_null(w);
    if (choice->reasoning.len > 0 && choice->answer->include_reasoning)
        write_reasoning(choice->answer, ds4_buf_view(&choice->reasoning), w);
    if (choice->calls.len > 0)
        write_calls(choice, w);
    ds4_jw_end(w);
}

static void chat_whole(struct ds4_answer *answer, struct ds4_buf *body)
{
    struct ds4_jw w;

    ds4_jw_init(&w, body);
    ds4_openai_write_head(answer, "chat.completion", &w);
    ds4_jw_key(&w, "service_tier");
    ds4_jw_null(&w);
    ds4_jw_key(&w, "choices");
    ds4_jw_array(&w);
    for (int32_t i = 0; i < answer->n_choice; i++) {
        struct ds4_choice *choice = &answer->choice[i];

        ds4_jw_object(&w);
        ds4_jw_key(&w, "index");
        ds4_jw_int(&w, choice->index);
        write_message(choice, &w);
        ds4_jw_key(&w, "finish_reason");
        ds4_jw_text(&w, finish_reason(choice));
        ds4_jw_key(&w, "logprobs");
        ds4_logprobs_take(choice, &w);
        ds4_jw_end(&w);
    }
    ds4_jw_end(&w);
    ds4_usage_write(answer, &w);
    ds4_side_field_write(answer, &w);
    ds4_jw_end(&w);
}

const struct ds4_dialect ds4_dialect_openai_chat = {
    .api = DS4_API_CHAT,
    .style = DS4_STYLE_OPENAI,
    .parse = ds4_chat_request_parse,
    .begin = chat_begin,
    .events = chat_events,
    .choice_done = chat_choice_done,
    .done = chat_done,
    .error = ds4_openai_stream_error,
    .ping = ds4_openai_stream_ping,
    .progress = chat_progress,
    .whole = chat_whole,
};
