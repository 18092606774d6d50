/* Sampled tokens by their text (step 3).
 *
 * A turn is looked for where the model began to speak: behind the assistant's header and the think tag that
 * may follow it.  Up to the end token it is one stretch with a special token on either side, so nothing
 * merges across its borders and the rest of the prompt is tokenised as ever.
 * The table is small and full of strangers' lengths: a hash and the length are compared before bytes. */
#include "router/turn_memory.h"

#include "common/vec.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct turn {
    uint64_t hash;
    uint64_t used; /* rising */
    char *text;    /* NULL: free; owned, the ids behind it */
    size_t len;
    int32_t *id;
    int32_t n_id;
};

struct ds4_turn_memory {
    struct turn turn[DS4_TURN_MEMORY_TURNS];
    size_t n_turn, bytes;
    uint64_t clock;
};

static size_t cost(const struct turn *turn)
{
    return turn->len + (size_t)turn->n_id * sizeof(*turn->id);
}

static void drop(struct ds4_turn_memory *m, struct turn *turn)
{
    if (turn->text == NULL)
        return;
    m->bytes -= cost(turn);
    m->n_turn--;
    free(turn->text);
    free(turn->id);
    *turn = (struct turn){0};
}

struct ds4_turn_memory *ds4_turn_memory_new(struct ds4_err *err)
{
    struct ds4_turn_memory *m = calloc(1, sizeof(*m));

    if (m == NULL)
        ds4_fail(err, DS4_E_NOMEM, "no memory for the turn memory");
    return m;
}

void ds4_turn_memory_free(struct ds4_turn_memory *m)
{
    for (size_t i = 0; m != NULL && i < DS4_TURN_MEMORY_TURNS; i++)
        drop(m, &m->turn[i]);
    free(m);
}

static struct turn *find(struct ds4_turn_memory *m, struct ds4_str text)
{
    uint64_t hash = XXH3_64bits(text.ptr, text.len);

    for (size_t i = 0; i < DS4_TURN_MEMORY_TURNS; i++) {
        struct turn *turn = &m->turn[i];

        if (turn->text != NULL && turn->hash == hash && turn->len == text.len &&
            memcmp(turn->text, text.ptr, text.len) == 0)
            return turn;
    }
    return NULL;
}

/* A free place; the least recently used turn gives its own if there is none. */
static struct turn *place(struct ds4_turn_memory *m)
{
    struct turn *oldest = &m->turn[0];

    for (size_t i = 0; i < DS4_TURN_MEMORY_TURNS; i++) {
        if (m->turn[i].text == NULL)
            return &m->turn[i];
        if (m->turn[i].used < oldest->used)
            oldest = &m->turn[i];
    }
    drop(m, oldest);
    return oldest;
}

static void drop_oldest(struct ds4_turn_memory *m)
{
    struct turn *oldest = NULL;

    for (size_t i = 0; i < DS4_TURN_MEMORY_TURNS; i++)
        if (m->turn[i].text != NULL && (oldest == NULL || m->turn[i].used < oldest->used))
            oldest = &m->turn[i];
    drop(m, oldest);
}

void ds4_turn_memory_put(struct ds4_turn_memory *m, struct ds4_str text, const int32_t *id,
                         int32_t n_id)
{
    struct turn *turn;
    struct turn next = {.len = text.len, .n_id = n_id};

    if (text.len == 0 || n_id < 1 || cost(&next) > DS4_TURN_MEMORY_TURN_BYTES)
        return;
    turn = find(m, text);
    if (turn != NULL)
        drop(m, turn);
    next.text = malloc(text.len);
    next.id = malloc((size_t)n_id * sizeof(*id));
    if (next.text == NULL || next.id == NULL) {
        free(next.text);
        free(next.id);
        return; /* a turn not remembered is no failure of the answer */
    }
    while (m->n_turn > 0 && m->bytes + cost(&next) > DS4_TURN_MEMORY_BYTES)
        drop_oldest(m);
    memcpy(next.text, text.ptr, text.len);
    memcpy(next.id, id, (size_t)n_id * sizeof(*id));
    next.hash = XXH3_64bits(text.ptr, text.len);
    next.used = ++m->clock;
    turn = place(m);
    *turn = next;
    m->n_turn++;
    m->bytes += cost(&next);
}

/* A walk over a prompt.  Places only rise, so what lies behind is never looked at again: a prompt may
 * have a hundred thousand turns. */
struct walk {
    const struct ds4_prompt *prompt;
    size_t literal, exact; /* the first of each that does not end before the place */
};

/* The next end of an assistant's header at or after `from` that is ours, and not a client's text that
 * looks like one; DS4_STR_NONE if there is none. */
static size_t next_literal(struct walk *walk, enum ds4_special which, size_t from, bool behind)
{
    const struct ds4_prompt *prompt = walk->prompt;
    struct ds4_str want = ds4_special_text(which), text = ds4_prompt_view(prompt);

    while (walk->literal < prompt->literals.len && prompt->literals.ptr[walk->literal].end <= from)
        walk->literal++;
    for (size_t i = walk->literal; i < prompt->literals.len; i++) {
        struct ds4_bpe_span span = prompt->literals.ptr[i];
        size_t at =
            ds4_str_find(ds4_str_head(text, span.end), want, span.start > from ? span.start : from);

        if (at != DS4_STR_NONE)
            return behind ? at + want.len : at;
    }
    return DS4_STR_NONE;
}

static bool is_exact(struct walk *walk, size_t at)
{
    const struct ds4_prompt *prompt = walk->prompt;

    while (walk->exact < prompt->exact.len && prompt->exact.ptr[walk->exact].end <= at)
        walk->exact++;
    return walk->exact < prompt->exact.len && prompt->exact.ptr[walk->exact].start <= at;
}

/* Behind the think tag that the prompt ended with when the model began to speak. */
static size_t skip_tag(const struct ds4_prompt *prompt, size_t at)
{
    static const enum ds4_special tags[] = {DS4_SPECIAL_THINK_OPEN, DS4_SPECIAL_THINK_CLOSE};
    struct ds4_str rest = ds4_str_skip(ds4_prompt_view(prompt), at);

    for (size_t i = 0; i < sizeof(tags) / sizeof(tags[0]); i++)
        if (ds4_str_starts(rest, ds4_special_text(tags[i])))
            return at + ds4_special_text(tags[i]).len;
    return at;
}

int32_t ds4_turn_memory_restore(struct ds4_turn_memory *m, struct ds4_prompt *prompt,
                                struct ds4_err *err)
{
    struct ds4_str text = ds4_prompt_view(prompt);
    DS4_VEC(struct ds4_prompt_exact) found = {0};
    struct walk walk = {.prompt = prompt};
    int32_t n = -1;
    size_t at = 0;

    if (m->n_turn == 0)
        return 0;
    while ((at = next_literal(&walk, DS4_SPECIAL_ASSISTANT, at, true)) != DS4_STR_NONE) {
        size_t end = next_literal(&walk, DS4_SPECIAL_EOS, at, false);
        struct turn *turn;

        at = skip_tag(prompt, at);
        if (end == DS4_STR_NONE)
            break; /* the turn that is to be said */
        turn = end <= at ? NULL : find(m, ds4_str_head(ds4_str_skip(text, at), end - at));
        if (turn != NULL && !is_exact(&walk, at)) {
            const struct ds4_prompt_exact exact = {at, end, turn->id, turn->n_id};

            if (DS4_VEC_PUSH(&found, exact) != 0) {
                ds4_fail(err, DS4_E_NOMEM, "no memory for turns of the prompt");
                goto out;
            }
            turn->used = ++m->clock;
        }
        at = end > at ? end : at;
    }
    if (ds4_prompt_add_exact(prompt, found.ptr, found.len, err) == 0)
        n = (int32_t)found.len;
out:
    DS4_VEC_DEINIT(&found);
    return n;
}

size_t ds4_turn_memory_count(const struct ds4_turn_memory *m)
{
    return m->n_turn;
}

size_t ds4_turn_memory_bytes(const struct ds4_turn_memory *m)
{
    return m->bytes;
}
