/* Events -> parts (step 15).
 *
 * One rule says where a part ends, used for the list and for the stream: text of another kind, a call's
 * beginning, and a call's end begin something new. */
#include "router/api/parts.h"

static bool is_text(enum ds4_event_kind kind)
{
    return kind == DS4_EVENT_REASONING || kind == DS4_EVENT_CONTENT;
}

void ds4_parts_add(struct ds4_choice *choice, const struct ds4_event *event)
{
    size_t n = choice->parts.len;
    struct ds4_answer_part part = {.kind = event->kind, .len = event->text_len};

    if (event->kind == DS4_EVENT_CALL_BEGIN) {
        part.call = event->call;
    } else if (!is_text(event->kind)) {
        return;
    } else if (n > 0 && choice->parts.ptr[n - 1].kind == event->kind) {
        choice->parts.ptr[n - 1].len += event->text_len;
        return;
    } else {
        part.at = event->kind == DS4_EVENT_REASONING ? choice->reasoning.len : choice->content.len;
    }
    (void)DS4_VEC_PUSH(&choice->parts, part); /* without memory the part is missing, not wrong */
}

/* Moves the writer to the next part of the list. */
static void advance(struct ds4_choice *choice, const struct ds4_part_writer *writer)
{
    ds4_parts_finish(choice, writer);
    if (choice->n_part_opened == choice->parts.len)
        return; /* the list could not grow */
    choice->part_open = true;
    writer->open(choice, choice->n_part_opened++);
}

void ds4_parts_send(struct ds4_choice *choice, const struct ds4_events *events,
                    const struct ds4_part_writer *writer)
{
    for (size_t i = 0; i < events->list.len; i++) {
        const struct ds4_event *event = &events->list.ptr[i];

        if (event->kind == DS4_EVENT_CALL_BEGIN ||
            (is_text(event->kind) &&
             !(choice->part_open &&
               choice->parts.ptr[choice->n_part_opened - 1].kind == event->kind)))
            advance(choice, writer);
        if (!choice->part_open)
            continue;
        if (is_text(event->kind) || event->kind == DS4_EVENT_CALL_ARGS)
            writer->piece(choice, choice->n_part_opened - 1, ds4_event_text(events, event));
        else if (event->kind == DS4_EVENT_CALL_END)
            ds4_parts_finish(choice, writer);
    }
}

void ds4_parts_finish(struct ds4_choice *choice, const struct ds4_part_writer *writer)
{
    if (!choice->part_open)
        return;
    choice->part_open = false;
    writer->close(choice, choice->n_part_opened - 1);
}

struct ds4_str ds4_parts_text(const struct ds4_choice *choice, size_t part)
{
    const struct ds4_answer_part *p = &choice->parts.ptr[part];
    const struct ds4_buf *from;

    if (p->kind == DS4_EVENT_CALL_BEGIN)
        return p->call < choice->calls.len ? ds4_buf_view(&choice->calls.ptr[p->call].arguments)
                                           : DS4_STR("");
    from = p->kind == DS4_EVENT_REASONING ? &choice->reasoning : &choice->content;
    return ds4_str_head(ds4_str_skip(ds4_buf_view(from), p->at), p->len);
}

const struct ds4_answer_call *ds4_parts_call(const struct ds4_choice *choice, size_t part)
{
    const struct ds4_answer_part *p = &choice->parts.ptr[part];

    return p->kind == DS4_EVENT_CALL_BEGIN && p->call < choice->calls.len
               ? &choice->calls.ptr[p->call]
               : NULL;
}
