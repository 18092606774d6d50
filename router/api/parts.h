/* The parts of an answer in order: stretches of reasoning, of text, and calls.
 *
 * Messages and Responses send each part with an opening and a closing frame.  The list of a choice
 * (struct ds4_answer_part) grows with its events; a writer follows it. */
#ifndef DS4_ROUTER_API_PARTS_H
#define DS4_ROUTER_API_PARTS_H

#include "router/api/answer.h"

/* Takes one event into the list, before the answer appends its text. */
void ds4_parts_add(struct ds4_choice *choice, const struct ds4_event *event);

struct ds4_part_writer {
    void (*open)(struct ds4_choice *choice, size_t part);
    void (*piece)(struct ds4_choice *choice, size_t part, struct ds4_str text);
    void (*close)(struct ds4_choice *choice, size_t part); /* the part's text is complete */
};

/* Sends what the events bring; they were collected before. */
void ds4_parts_send(struct ds4_choice *choice, const struct ds4_events *events,
                    const struct ds4_part_writer *writer);
/* Closes the part still open: the end of a choice. */
void ds4_parts_finish(struct ds4_choice *choice, const struct ds4_part_writer *writer);

/* Reasoning or text of a part; the arguments of a call. */
struct ds4_str ds4_parts_text(const struct ds4_choice *choice, size_t part);
/* The call of a part, NULL if it is none. */
const struct ds4_answer_call *ds4_parts_call(const struct ds4_choice *choice, size_t part);

#endif
