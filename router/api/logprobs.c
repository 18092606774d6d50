/* Log-probabilities: values of the model's distribution at temperature 1, before penalties and
 * filters, so a chosen token may lie outside the top list; it is then listed by itself.  Minus
 * infinity is written -9999.0, as clients of other servers expect. */
#include "router/api/logprobs.h"

#include "router/text/vocab.h"

#include <math.h>

#define DS4_LOGPROB_FLOOR (-9999.0)

static void write_token(const struct ds4_vocab *vocab, const struct ds4_logprob *lp,
                        struct ds4_jw *w)
{
    struct ds4_str bytes = ds4_vocab_piece(vocab, lp->token);

    ds4_jw_key(w, "token");
    ds4_jw_str(w, bytes);
    ds4_jw_key(w, "logprob");
    ds4_jw_double(w, isfinite(lp->logprob) ? (double)lp->logprob : DS4_LOGPROB_FLOOR);
    ds4_jw_key(w, "bytes");
    ds4_jw_array(w);
    for (size_t i = 0; i < bytes.len; i++)
        ds4_jw_int(w, (unsigned char)bytes.ptr[i]);
    ds4_jw_end(w);
}

static void append_item(struct ds4_buf *items, const struct ds4_vocab *vocab,
                        const struct ds4_scored_token *entry, int32_t n_top)
{
    struct ds4_jw w;

    if (items->len > 0)
        (void)ds4_buf_append_byte(items, ',');
    ds4_jw_init(&w, items);
    ds4_jw_object(&w);
    write_token(vocab, &entry->logprob[0], &w);
    ds4_jw_key(&w, "top_logprobs");
    ds4_jw_array(&w);
    for (int32_t i = 1; i < entry->n_logprob && i <= n_top; i++) {
        ds4_jw_object(&w);
        write_token(vocab, &entry->logprob[i], &w);
        ds4_jw_end(&w);
    }
    ds4_jw_end(&w);
    ds4_jw_end(&w);
}

/* Think tags produce no text of their own, so the next piece would claim them. */
static bool is_think_tag(const struct ds4_vocab *vocab, int32_t id)
{
    return id >= 0 && (id == ds4_vocab_special(vocab, DS4_SPECIAL_THINK_OPEN) ||
                       id == ds4_vocab_special(vocab, DS4_SPECIAL_THINK_CLOSE));
}

void ds4_logprobs_decide(struct ds4_choice *choice, const struct ds4_events *events)
{
    bool content = false, reasoning = false, markup = false;
    struct ds4_buf *items;

    for (size_t i = 0; i < events->list.len; i++) {
        enum ds4_event_kind kind = events->list.ptr[i].kind;

        content |= kind == DS4_EVENT_CONTENT;
        reasoning |= kind == DS4_EVENT_REASONING;
        markup |= kind != DS4_EVENT_CONTENT && kind != DS4_EVENT_REASONING;
    }
    if (!content && !reasoning && !markup)
        return;
    items = content ? &choice->logprobs_content : &choice->logprobs_reasoning;
    for (size_t i = 0; (content || reasoning) && i < choice->undecided.len; i++)
        if (!is_think_tag(choice->answer->context->vocab, choice->undecided.ptr[i].token))
            append_item(items, choice->answer->context->vocab, &choice->undecided.ptr[i],
                        choice->req->sampling.n_logprobs);
    DS4_VEC_TRUNCATE(&choice->undecided, 0);
}

static void write_items(struct ds4_jw *w, const char *key, struct ds4_buf *items)
{
    struct ds4_buf list;

    ds4_jw_key(w, key);
    ds4_buf_init(&list, SIZE_MAX / 2);
    (void)ds4_buf_append_byte(&list, '[');
    (void)ds4_buf_append_str(&list, ds4_buf_view(items));
    (void)ds4_buf_append_byte(&list, ']');
    ds4_jw_raw(w, ds4_buf_view(&list));
    ds4_buf_deinit(&list);
    ds4_buf_clear(items);
}

void ds4_logprobs_take(struct ds4_choice *choice, struct ds4_jw *w)
{
    if (!choice->wants_logprobs ||
        (choice->answer->stream &&
         choice->logprobs_content.len + choice->logprobs_reasoning.len == 0)) {
        ds4_jw_null(w);
        return;
    }
    ds4_jw_object(w);
    write_items(w, "content", &choice->logprobs_content);
    if (choice->logprobs_reasoning.len > 0)
        write_items(w, "reasoning_content", &choice->logprobs_reasoning);
    ds4_jw_end(w);
}
