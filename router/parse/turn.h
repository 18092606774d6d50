/* A turn added up: what a client has after all deltas so far.
 *
 * For answers that are not streamed, and for tests: the sum of the events is the parser's result. */
#ifndef DS4_ROUTER_PARSE_TURN_H
#define DS4_ROUTER_PARSE_TURN_H

#include "common/buf.h"
#include "common/err.h"
#include "common/vec.h"
#include "router/parse/event.h"

#include <stdbool.h>
#include <stddef.h>

struct ds4_turn_call {
    char id[DS4_CALL_ID_CHARS + 1];
    struct ds4_buf name;
    struct ds4_buf arguments;
    bool incomplete;
};

/* Owns its texts; each has the maximum given at init. */
struct ds4_turn {
    struct ds4_buf reasoning;
    struct ds4_buf content;
    DS4_VEC(struct ds4_turn_call) calls;
    bool finished;
    struct ds4_finish finish; /* meaningful when finished */
    size_t max_bytes;
};

void ds4_turn_init(struct ds4_turn *turn, size_t max_bytes);
void ds4_turn_deinit(struct ds4_turn *turn);

/* Adds the events of one list, which the caller clears afterwards.  Lists must come in order.  0, or -1
 * with DS4_E_TOO_LONG or DS4_E_NOMEM. */
int ds4_turn_add(struct ds4_turn *turn, const struct ds4_events *events,
                 struct ds4_err *err) DS4_MUST_CHECK;

#endif
