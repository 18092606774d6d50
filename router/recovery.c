/* Recovery from repetition inside a turn (steps 12 and 14).
 *
 * The guard is given the text that a token released, not the token's own text: "<" may be the start of
 * a call, and the name of a DSML tag reads like invented markup until the parser has decided.  Invariant:
 * a token is taken back only if all of its text is still undecided, so that what the client has and what
 * the sequence holds stay the same. */
#include "router/recovery.h"

#include "router/parse/event.h"
#include "router/parse/stream.h"
#include "router/text/bpe.h"

/* A text that cannot be encoded counts as endless: it is no short line. */
static size_t count_tokens(void *ctx, struct ds4_str text)
{
    struct ds4_ids ids = {0};
    size_t n = SIZE_MAX;

    if (ds4_bpe_encode(ctx, text, DS4_BPE_PLAIN, &ids, NULL) == 0)
        n = ids.len;
    DS4_VEC_DEINIT(&ids);
    return n;
}

int ds4_recovery_init(struct ds4_recovery *recovery, const struct ds4_loop_knobs *knobs,
                      struct ds4_str text, struct ds4_bpe *bpe, struct ds4_err *err)
{
    bool reopen = knobs->recovery == DS4_RECOVERY_REOPEN;

    *recovery = (struct ds4_recovery){.knobs = *knobs, .bpe = bpe};
    for (int thinking = 0; thinking < 2; thinking++) {
        struct ds4_ids *ids = &recovery->text[thinking];

        if (ds4_bpe_encode(bpe,
                           text.len > 0 ? text : ds4_recovery_text(knobs->recovery, thinking == 1),
                           reopen ? DS4_BPE_SPECIAL : DS4_BPE_PLAIN, ids, err) != 0) {
            ds4_recovery_deinit(recovery);
            return -1;
        }
        if ((int32_t)ids->len > recovery->max_tok)
            recovery->max_tok = (int32_t)ids->len;
    }
    return 0;
}

void ds4_recovery_deinit(struct ds4_recovery *recovery)
{
    DS4_VEC_DEINIT(&recovery->text[0]);
    DS4_VEC_DEINIT(&recovery->text[1]);
}

int32_t ds4_recovery_room(const struct ds4_recovery *recovery)
{
    return recovery->knobs.recovery == DS4_RECOVERY_OFF
               ? 0
               : recovery->knobs.recovery_max * recovery->max_tok;
}

void ds4_watch_init(struct ds4_watch *watch, const struct ds4_recovery *recovery, bool thinking)
{
    *watch = (struct ds4_watch){.recovery = recovery, .thinking = thinking};
    ds4_loop_guard_init(&watch->guard, &recovery->knobs, count_tokens, recovery->bpe);
}

void ds4_watch_deinit(struct ds4_watch *watch)
{
    ds4_loop_guard_deinit(&watch->guard);
}

static bool is_text(const struct ds4_stream *parser)
{
    enum ds4_stream_place place = ds4_stream_place(parser);

    return place == DS4_PLACE_REASONING || place == DS4_PLACE_CONTENT;
}

struct ds4_watch_mark ds4_watch_before(const struct ds4_stream *parser,
                                       const struct ds4_events *events)
{
    return (struct ds4_watch_mark){
        .n_event = events->list.len,
        .n_text = events->text.len,
        .is_text = is_text(parser),
    };
}

/* Did the token bring anything but text?  The event before the mark may have grown by it. */
static bool only_text_since(const struct ds4_events *events, size_t n_event)
{
    for (size_t i = n_event; i < events->list.len; i++)
        if (events->list.ptr[i].kind != DS4_EVENT_REASONING &&
            events->list.ptr[i].kind != DS4_EVENT_CONTENT)
            return false;
    return true;
}

int ds4_watch_after(struct ds4_watch *watch, const struct ds4_watch_mark *mark, size_t raw_bytes,
                    const struct ds4_stream *parser, const struct ds4_events *events, bool *fired,
                    struct ds4_err *err)
{
    struct ds4_str text = ds4_str_skip(ds4_buf_view(&events->text), mark->n_text);
    struct ds4_trip trip;

    *fired = false;
    watch->tail_bytes[watch->n_seen++ % DS4_WATCH_TAIL_TOK] = (uint32_t)raw_bytes;
    if (!mark->is_text || !is_text(parser) || !only_text_since(events, mark->n_event))
        return 0;
    if (ds4_loop_guard_add(&watch->guard, text, &trip, err) != 0)
        return -1;
    *fired = trip.kind != DS4_TRIP_NONE;
    if (*fired)
        watch->last = trip;
    return 0;
}

/* The newest tokens that lie wholly in the last `undecided` bytes; *bytes is their text. */
static int32_t tail_tok(const struct ds4_watch *watch, size_t undecided, size_t *bytes)
{
    int32_t n = 0;

    *bytes = 0;
    while (n < DS4_WATCH_TAIL_TOK && (uint64_t)n < watch->n_seen) {
        size_t next = watch->tail_bytes[(watch->n_seen - 1 - (uint64_t)n) % DS4_WATCH_TAIL_TOK];

        if (*bytes + next > undecided || *bytes == undecided)
            break;
        *bytes += next;
        n++;
    }
    return n;
}

int ds4_watch_recover(struct ds4_watch *watch, struct ds4_stream *parser, struct ds4_events *events,
                      struct ds4_splice *splice, struct ds4_err *err)
{
    size_t bytes = 0;
    int32_t n_drop = tail_tok(watch, ds4_stream_undecided(parser), &bytes);

    *splice = (struct ds4_splice){.mode = ds4_loop_guard_recover(&watch->guard)};
    if (splice->mode == DS4_RECOVERY_OFF)
        return 0;
    splice->text = &watch->recovery->text[watch->thinking];
    splice->n_drop = n_drop;
    watch->n_seen = 0;
    ds4_stream_take_back(parser, bytes);
    return splice->mode == DS4_RECOVERY_REOPEN ? ds4_stream_reopen(parser, events, err) : 0;
}

const char *ds4_trip_text(enum ds4_trip_kind kind)
{
    static const char *const text[] = {"none", "control_soup", "repeat_line", "fuzzy_phrase"};

    return text[kind];
}
