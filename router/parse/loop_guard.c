/* Step 14: repetition tripwires of one sequence.
 *
 * Upstream looks once per scheduler step, which with speculative decoding is five or six tokens; with
 * one token a step the same streaks would fire on a single mention of a tag.  So the guard looks once
 * per block of tokens whatever the steps were.  Windows overlap by 16 tokens, more than the longest
 * signature, so that a block border hides nothing. */
#include "router/parse/loop_guard.h"

#include <stdio.h>

#define OVERLAP_TOK      16
#define MAX_WINDOW_BYTES ((size_t)1 << 24)

void ds4_loop_knobs_default(struct ds4_loop_knobs *knobs)
{
    *knobs = (struct ds4_loop_knobs){
        .soup = true,
        .soup_streak = 12,
        .soup_total = 18,
        .repetition = true,
        .block_tok = 5,
        .window_tok = 160,
        .streak = 6,
        .fuzzy = true,
        .fuzzy_min_lines = 8,
        .fuzzy_min_hits = 15,
        .fuzzy_prefix_words = 2,
        .fuzzy_overlap = 0.35,
        .recovery = DS4_RECOVERY_NUDGE,
        .recovery_max = 2,
    };
}

void ds4_loop_guard_init(struct ds4_loop_guard *guard, const struct ds4_loop_knobs *knobs,
                         ds4_count_tokens_fn count_tokens, void *ctx)
{
    *guard = (struct ds4_loop_guard){.knobs = knobs, .count_tokens = count_tokens, .ctx = ctx};
    ds4_buf_init(&guard->text, MAX_WINDOW_BYTES);
}

void ds4_loop_guard_deinit(struct ds4_loop_guard *guard)
{
    ds4_buf_deinit(&guard->text);
    DS4_VEC_DEINIT(&guard->token_bytes);
}

/* The text of the last n tokens. */
static struct ds4_str last_tokens(const struct ds4_loop_guard *g, size_t n)
{
    struct ds4_str text = ds4_buf_view(&g->text);
    size_t bytes = 0;

    for (size_t i = g->token_bytes.len; i > 0 && n > 0; i--, n--)
        bytes += g->token_bytes.ptr[i - 1];
    return ds4_str_skip(text, text.len - bytes);
}

static size_t window_tok(const struct ds4_loop_guard *g)
{
    size_t n = (size_t)g->n_new + OVERLAP_TOK, least = (size_t)g->knobs->window_tok;

    return n > least ? n : least;
}

/* Drops what no window can reach any more; in one piece now and then, so that it costs nothing. */
static void forget(struct ds4_loop_guard *g)
{
    size_t keep = window_tok(g) + (size_t)g->knobs->block_tok, drop, bytes = 0;

    if (g->token_bytes.len < 2 * keep)
        return;
    drop = g->token_bytes.len - keep;
    for (size_t i = 0; i < drop; i++)
        bytes += g->token_bytes.ptr[i];
    ds4_buf_consume(&g->text, bytes);
    memmove(g->token_bytes.ptr, g->token_bytes.ptr + drop, keep * sizeof(*g->token_bytes.ptr));
    g->token_bytes.len = keep;
}

static void say(struct ds4_trip *trip, enum ds4_trip_kind kind, struct ds4_str evidence)
{
    trip->kind = kind;
    snprintf(trip->evidence, sizeof(trip->evidence), "%.*s", DS4_STR_ARG(evidence));
}

static void look_for_soup(struct ds4_loop_guard *g, struct ds4_trip *trip)
{
    size_t n_signatures, n_optional;
    const struct ds4_str *signatures = ds4_soup_signatures(&n_signatures, &n_optional);
    uint32_t found;

    if (!g->knobs->soup_optional)
        n_signatures -= n_optional;
    found = ds4_soup_find(last_tokens(g, (size_t)g->n_new + OVERLAP_TOK), n_signatures);
    for (size_t i = 0; i < n_signatures; i++) {
        if ((found >> i & 1) == 0) {
            g->soup_streak[i] = 0;
            continue;
        }
        g->soup_streak[i]++;
        g->soup_total[i]++;
        if (trip->kind == DS4_TRIP_NONE && (g->soup_streak[i] >= g->knobs->soup_streak ||
                                            g->soup_total[i] >= g->knobs->soup_total))
            say(trip, DS4_TRIP_SOUP, signatures[i]);
    }
}

static void look_at_lines(struct ds4_loop_guard *g, struct ds4_trip *trip)
{
    struct ds4_str window = last_tokens(g, window_tok(g));
    struct ds4_str line = ds4_exact_find(window, g->count_tokens, g->ctx);
    struct ds4_fuzzy_hit fuzzy = {0};

    if (line.len == 0 && g->knobs->fuzzy)
        fuzzy = ds4_fuzzy_find(window, g->knobs);
    if (line.len == 0 && !fuzzy.hit) {
        g->line_streak = 0;
        return;
    }
    g->line_streak++;
    if (g->line_streak < g->knobs->streak || trip->kind != DS4_TRIP_NONE)
        return;
    if (line.len > 0)
        say(trip, DS4_TRIP_EXACT, line);
    else
        say(trip, DS4_TRIP_FUZZY, ds4_str_view(fuzzy.prefix));
}

void ds4_loop_guard_look(struct ds4_loop_guard *g, struct ds4_trip *trip)
{
    *trip = (struct ds4_trip){0};
    if (g->n_new == 0)
        return;
    if (g->knobs->soup)
        look_for_soup(g, trip);
    if (g->knobs->repetition)
        look_at_lines(g, trip);
    g->n_new = 0;
    forget(g);
}

int ds4_loop_guard_add(struct ds4_loop_guard *g, struct ds4_str text, struct ds4_trip *trip,
                       struct ds4_err *err)
{
    *trip = (struct ds4_trip){0};
    if (ds4_buf_append_str(&g->text, text) != 0 ||
        DS4_VEC_PUSH(&g->token_bytes, (uint32_t)text.len) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "could not keep %zu bytes of window", text.len);
    g->n_new++;
    if (g->n_new >= g->knobs->block_tok)
        ds4_loop_guard_look(g, trip);
    return 0;
}

enum ds4_recovery_mode ds4_loop_guard_recover(struct ds4_loop_guard *g)
{
    if (g->knobs->recovery == DS4_RECOVERY_OFF || g->n_recovered >= g->knobs->recovery_max)
        return DS4_RECOVERY_OFF;
    g->n_recovered++;
    g->line_streak = 0;
    g->n_new = 0;
    for (size_t i = 0; i < DS4_SOUP_MAX_SIGNATURES; i++)
        g->soup_streak[i] = 0;
    /* What has been judged must not be judged again: with the old lines in its window every block
     * after the splice would be a hit, whatever the model makes of it. */
    ds4_buf_clear(&g->text);
    g->token_bytes.len = 0;
    return g->knobs->recovery;
}
