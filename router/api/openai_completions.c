/* Dialect of /v1/completions: how answers are written (step 15); completions_request.c reads.
 *
 * The answer is text as the model wrote it.  Log-probabilities have the old shape of four parallel
 * lists; a token is listed when the text it begins in has been sent, so that lists and text agree
 * however pieces fall, and tokens cut off by a stop string are never listed. */
#include "router/api/openai_completions.h"

#include "common/json_write.h"
#include "router/api/answer.h"
#include "router/api/completions_request.h"
#include "router/api/openai_stream.h"
#include "router/api/side_field.h"
#include "router/sse.h"
#include "router/text/vocab.h"

#include <math.h>

#define DS4_TEXT_OBJECT   "text_completion"
#define DS4_LOGPROB_FLOOR (-9999.0) /* minus infinity, as other servers write it */

/* ---- parts ----------------------------------------------------------------------------------------- */

static struct ds4_completion *state_of(const struct ds4_choice *choice)
{
    return (struct ds4_completion *)choice->answer->state + choice->index;
}

static const char *finish_reason(const struct ds4_choice *choice)
{
    return choice->result.end == DS4_END_LENGTH || choice->result.end == DS4_END_CONTEXT ? "length"
                                                                                         : "stop";
}

/* Code points that begin in the text. */
static int64_t count_chars(struct ds4_str text)
{
    int64_t n = 0;

    for (size_t i = 0; i < text.len; i++)
        n += ((unsigned char)text.ptr[i] & 0xc0) != 0x80;
    return n;
}

/* ---- log-probabilities --------------------------------------------------------------------------------- */

/* The four lists under construction. */
struct lists {
    struct ds4_jw tokens, values, tops, offsets;
    struct ds4_buf buf[4];
};

static void open_lists(struct lists *lists)
{
    struct ds4_jw *w[] = {&lists->tokens, &lists->values, &lists->tops, &lists->offsets};

    for (int i = 0; i < 4; i++) {
        ds4_buf_init(&lists->buf[i], DS4_OPENAI_FRAME_BYTES);
        ds4_jw_init(w[i], &lists->buf[i]);
        ds4_jw_array(w[i]);
    }
}

static void close_lists(struct lists *lists, struct ds4_jw *out)
{
    static const char *const keys[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    struct ds4_jw *w[] = {&lists->tokens, &lists->values, &lists->tops, &lists->offsets};

    ds4_jw_object(out);
    for (int i = 0; i < 4; i++) {
        ds4_jw_end(w[i]);
        ds4_jw_key(out, keys[i]);
        ds4_jw_raw(out, ds4_buf_view(&lists->buf[i]));
        ds4_buf_deinit(&lists->buf[i]);
    }
    ds4_jw_end(out);
}

static void write_value(const struct ds4_logprob *lp, struct ds4_jw *w)
{
    ds4_jw_double(w, isfinite(lp->logprob) ? (double)lp->logprob : DS4_LOGPROB_FLOOR);
}

static void add_token(struct lists *lists, const struct ds4_choice *choice,
                      const struct ds4_scored_token *entry, int64_t offset)
{
    const struct ds4_vocab *vocab = choice->answer->context->vocab;
    int32_t n_top = choice->req->sampling.n_logprobs;
    bool chosen_listed = false;

    ds4_jw_str(&lists->tokens, ds4_vocab_piece(vocab, entry->logprob[0].token));
    write_value(&entry->logprob[0], &lists->values);
    ds4_jw_int(&lists->offsets, offset);
    ds4_jw_object(&lists->tops);
    for (int32_t i = 1; i < entry->n_logprob && i <= n_top; i++) {
        ds4_jw_key_str(&lists->tops, ds4_vocab_piece(vocab, entry->logprob[i].token));
        write_value(&entry->logprob[i], &lists->tops);
        chosen_listed = chosen_listed || entry->logprob[i].token == entry->logprob[0].token;
    }
    if (!chosen_listed) {
        ds4_jw_key_str(&lists->tops, ds4_vocab_piece(vocab, entry->logprob[0].token));
        write_value(&entry->logprob[0], &lists->tops);
    }
    ds4_jw_end(&lists->tops);
}

/* The first token of a scored prompt: nothing stands before it that could predict it. */
static void add_first(struct lists *lists, const struct ds4_choice *choice)
{
    struct ds4_completion *state = state_of(choice);
    const struct ds4_vocab *vocab = choice->answer->context->vocab;

    if (state->first_id < 0)
        return;
    ds4_jw_str(&lists->tokens, ds4_vocab_piece(vocab, state->first_id));
    ds4_jw_null(&lists->values);
    ds4_jw_null(&lists->tops);
    ds4_jw_int(&lists->offsets, 0);
    state->first_id = -1;
}

/* Lists the tokens that begin in the text sent so far. */
static void write_logprobs(struct ds4_choice *choice, struct ds4_jw *w)
{
    struct ds4_completion *state = state_of(choice);
    const struct ds4_vocab *vocab = choice->answer->context->vocab;
    struct lists lists;

    ds4_jw_key(w, "logprobs");
    if (!choice->wants_logprobs) {
        ds4_jw_null(w);
        return;
    }
    open_lists(&lists);
    add_first(&lists, choice);
    for (; state->n_token_taken < choice->undecided.len; state->n_token_taken++) {
        const struct ds4_scored_token *entry = &choice->undecided.ptr[state->n_token_taken];
        struct ds4_str piece = ds4_vocab_piece(vocab, entry->logprob[0].token);
        bool inside = piece.len > 0 && ((unsigned char)piece.ptr[0] & 0xc0) == 0x80;
        int64_t offset = state->n_char_token - (inside ? 1 : 0);

        if (ds4_vocab_is_hidden(vocab, entry->logprob[0].token))
            continue;
        if (offset >= state->n_char_text)
            break;
        add_token(&lists, choice, entry, offset);
        state->n_char_token += count_chars(piece);
    }
    close_lists(&lists, w);
}

/* ---- streams ------------------------------------------------------------------------------------------- */

static void send_text(struct ds4_choice *choice, struct ds4_str text, const char *finish, bool last)
{
    struct ds4_answer *answer = choice->answer;
    struct ds4_completion *state = state_of(choice);
    struct ds4_buf buf;
    struct ds4_jw w;

    state->n_char_text += count_chars(text);
    ds4_buf_init(&buf, DS4_OPENAI_FRAME_BYTES);
    ds4_jw_init(&w, &buf);
    ds4_openai_write_head(answer, DS4_TEXT_OBJECT, &w);
    ds4_jw_key(&w, "choices");
    ds4_jw_array(&w);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "index");
    ds4_jw_int(&w, choice->index);
    ds4_jw_key(&w, "text");
    ds4_jw_str(&w, text);
    write_logprobs(choice, &w);
    ds4_jw_key(&w, "finish_reason");
    ds4_jw_text(&w, finish);
    ds4_jw_end(&w);
    ds4_jw_end(&w);
    if (answer->continuous_usage)
        ds4_usage_write(answer, &w);
    if (last)
        ds4_side_field_write(answer, &w);
    ds4_jw_end(&w);
    ds4_sse_send_data(answer->sse, ds4_buf_view(&buf));
    ds4_buf_deinit(&buf);
}

static void begin(struct ds4_choice *choice)
{
    struct ds4_completion *state = state_of(choice);

    state->n_char_token = count_chars(state->echo);
    if (state->echo.len > 0)
        send_text(choice, state->echo, NULL, false);
}

static void send_events(struct ds4_choice *choice, const struct ds4_events *events)
{
    for (size_t i = 0; i < events->list.len; i++)
        if (events->list.ptr[i].kind == DS4_EVENT_CONTENT)
            send_text(choice, ds4_event_text(events, &events->list.ptr[i]), NULL, false);
}

static void choice_done(struct ds4_choice *choice)
{
    send_text(choice, DS4_STR(""), finish_reason(choice),
              choice->answer->n_open == 0 && !choice->answer->include_usage);
}

static void done(struct ds4_answer *answer)
{
    ds4_openai_stream_done(answer, DS4_TEXT_OBJECT);
}

/* ---- whole answers --------------------------------------------------------------------------------------- */

static void write_choice(struct ds4_choice *choice, struct ds4_jw *w)
{
    struct ds4_completion *state = state_of(choice);
    struct ds4_buf text;

    ds4_buf_init(&text, SIZE_MAX / 2);
    (void)ds4_buf_append_str(&text, state->echo);
    (void)ds4_buf_append_str(&text, ds4_buf_view(&choice->content));
    state->n_char_token = count_chars(state->echo);
    state->n_char_text = count_chars(ds4_buf_view(&text));
    ds4_jw_object(w);
    ds4_jw_key(w, "index");
    ds4_jw_int(w, choice->index);
    ds4_jw_key(w, "text");
    ds4_jw_str(w, ds4_buf_view(&text));
    write_logprobs(choice, w);
    ds4_jw_key(w, "finish_reason");
    ds4_jw_text(w, finish_reason(choice));
    ds4_jw_end(w);
    ds4_buf_deinit(&text);
}

static void whole(struct ds4_answer *answer, struct ds4_buf *body)
{
    struct ds4_jw w;

    ds4_jw_init(&w, body);
    ds4_openai_write_head(answer, DS4_TEXT_OBJECT, &w);
    ds4_jw_key(&w, "choices");
    ds4_jw_array(&w);
    for (int32_t i = 0; i < answer->n_choice; i++)
        write_choice(&answer->choice[i], &w);
    ds4_jw_end(&w);
    ds4_usage_write(answer, &w);
    ds4_side_field_write(answer, &w);
    ds4_jw_end(&w);
}

const struct ds4_dialect ds4_dialect_completions = {
    .api = DS4_API_COMPLETIONS,
    .style = DS4_STYLE_OPENAI,
    .raw = true,
    .parse = ds4_completions_request_parse,
    .begin = begin,
    .events = send_events,
    .choice_done = choice_done,
    .done = done,
    .error = ds4_openai_stream_error,
    .ping = ds4_openai_stream_ping,
    .whole = whole,
};
