/* Finished sequences kept for their prefix (step 4).
 *
 * The rule for cutting back in place (m = the cut): m >= install_pos and hi - m <= hot window.  `hi`
 * never falls while a sequence keeps its slot, so cuts compose: what an abandoned branch overwrote
 * stays overwritten.  Rejected: matching a hash of the prefix (a collision would answer with another
 * conversation's state) and rounding hits to blocks (short prompts would never hit). */
#include "router/sched/prefix.h"

#define DS4_PREFIX_COMPARE_TOK 256 /* tokens per memcmp: small enough to find the spot quickly */
#define DS4_PREFIX_TRIFLE_TOK  64  /* a common part of so much is always worth having, */
#define DS4_PREFIX_TRIFLE_PART 100 /* and of less, if it is this part of the entry */

void ds4_prefix_init(struct ds4_prefix *prefix, int32_t hot_window_tok)
{
    *prefix = (struct ds4_prefix){.hot_window_tok = hot_window_tok};
}

void ds4_prefix_deinit(struct ds4_prefix *prefix)
{
    for (size_t i = 0; i < prefix->entry.len; i++)
        DS4_VEC_DEINIT(&prefix->entry.ptr[i].token);
    DS4_VEC_DEINIT(&prefix->entry);
}

int ds4_prefix_insert(struct ds4_prefix *prefix, struct ds4_prefix_entry *entry,
                      struct ds4_err *err)
{
    if (DS4_VEC_PUSH(&prefix->entry, *entry) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a prefix entry");
    entry->token = (struct ds4_tokens){0};
    return 0;
}

int32_t ds4_prefix_common(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b)
{
    int32_t n = n_a < n_b ? n_a : n_b;
    int32_t t = 0;

    while (t + DS4_PREFIX_COMPARE_TOK <= n &&
           memcmp(a + t, b + t, DS4_PREFIX_COMPARE_TOK * sizeof(*a)) == 0)
        t += DS4_PREFIX_COMPARE_TOK;
    while (t < n && a[t] == b[t])
        t++;
    return t;
}

/* Where computing can start if the state of `entry` is to serve the first `cut` tokens; 0 = not. */
static int32_t restore_point(const struct ds4_prefix *prefix, const struct ds4_prefix_entry *entry,
                             int32_t cut)
{
    if (cut >= entry->install_pos && entry->hi - cut <= prefix->hot_window_tok)
        return cut;
    return 0;
}

int32_t ds4_prefix_start(const struct ds4_prefix *prefix, const struct ds4_prefix_entry *entry,
                         const int32_t *prompt, int32_t n_prompt, int32_t *lcp)
{
    int32_t len = (int32_t)entry->token.len;
    int32_t common = ds4_prefix_common(entry->token.ptr, len, prompt, n_prompt);
    int32_t start = restore_point(prefix, entry, common < n_prompt ? common : n_prompt - 1);

    if (lcp != NULL)
        *lcp = common;
    if (start < DS4_PREFIX_TRIFLE_TOK && start < len / DS4_PREFIX_TRIFLE_PART)
        return 0;
    return start;
}

struct ds4_prefix_hit ds4_prefix_find(const struct ds4_prefix *prefix, const int32_t *prompt,
                                      int32_t n_prompt, uint64_t salt)
{
    struct ds4_prefix_hit best = {.index = -1};

    for (size_t i = 0; i < prefix->entry.len; i++) {
        const struct ds4_prefix_entry *entry = &prefix->entry.ptr[i];
        int32_t lcp, start;

        if (entry->salt != salt)
            continue;
        start = ds4_prefix_start(prefix, entry, prompt, n_prompt, &lcp);
        if (start > best.start)
            best = (struct ds4_prefix_hit){.index = (int32_t)i, .lcp = lcp, .start = start};
        else if (best.index < 0 && lcp > best.lcp)
            best.lcp = lcp;
    }
    return best;
}

struct ds4_prefix_entry ds4_prefix_take(struct ds4_prefix *prefix, int32_t index)
{
    struct ds4_prefix_entry entry = prefix->entry.ptr[index];

    prefix->entry.ptr[index] = prefix->entry.ptr[--prefix->entry.len];
    return entry;
}

int32_t ds4_prefix_oldest(const struct ds4_prefix *prefix, int32_t keep)
{
    int32_t oldest = -1;

    for (int32_t i = 0; i < (int32_t)prefix->entry.len; i++)
        if (i != keep &&
            (oldest < 0 || prefix->entry.ptr[i].used_ns < prefix->entry.ptr[oldest].used_ns))
            oldest = i;
    return oldest;
}
