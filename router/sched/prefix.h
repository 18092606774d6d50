/* Finished sequences kept for their prefix: the tokens, and the lease whose rows hold their state.
 *
 * A lookup compares tokens, never text or hashes, and answers with the position from which a prompt
 * can be computed: the longest common prefix if the rings still hold the rows around it, else 0.  The
 * rings hold them when the cut is not below the last install and no more than the hot window below the
 * highest position ever written (positions above the cut may be gone, positions far below certainly are).
 *
 * There are at most as many entries as slots, and all but the right one differ early or share a
 * long prefix that memcmp passes at memory speed, so the index is an array: a tree would cost more than
 * it saves until restore points outnumber slots.  A new kind of restore point changes
 * restore_point() in prefix.c and nothing else. */
#ifndef DS4_ROUTER_SCHED_PREFIX_H
#define DS4_ROUTER_SCHED_PREFIX_H

#include "common/err.h"
#include "common/vec.h"
#include "router/sched/budget.h"

#include <stdbool.h>
#include <stdint.h>

DS4_VEC_TYPE(ds4_tokens, int32_t);

struct ds4_prefix_entry {
    struct ds4_tokens
        token;  /* owned; exactly the tokens that were run: their number is the state's position */
    int32_t hi; /* highest position ever written since install, plus one */
    int32_t install_pos; /* the rings hold nothing from before it */
    uint64_t salt;
    int64_t used_ns;
    const struct ds4_kv_lease *lease; /* cached; the entry's holder releases or resumes it */
};

struct ds4_prefix {
    DS4_VEC(struct ds4_prefix_entry) entry;
    int32_t hot_window_tok;
};

struct ds4_prefix_hit {
    int32_t index; /* of the entry, -1 = no use */
    int32_t lcp;   /* common tokens with that entry, or the longest of all if index is -1 */
    int32_t start; /* computing starts here: 0 < start < n_prompt, or 0 */
};

void ds4_prefix_init(struct ds4_prefix *prefix, int32_t hot_window_tok);
/* Frees the tokens; leases are the caller's. */
void ds4_prefix_deinit(struct ds4_prefix *prefix);

/* Takes entry->token on success. */
int ds4_prefix_insert(struct ds4_prefix *prefix, struct ds4_prefix_entry *entry,
                      struct ds4_err *err) DS4_MUST_CHECK;

/* The entry from which most of the prompt is saved.  At least one prompt token is left to run.  An
 * entry is not worth taking when the common part is a trifle of it: a short side request must not
 * eat a long conversation. */
struct ds4_prefix_hit ds4_prefix_find(const struct ds4_prefix *prefix, const int32_t *prompt,
                                      int32_t n_prompt, uint64_t salt);

/* Where a prompt could start on a state of n tokens that was written up to hi and installed at
 * install_pos: the rule of ds4_prefix_find for one candidate; 0 = not worth it.  *lcp may be NULL. */
int32_t ds4_prefix_start(const struct ds4_prefix *prefix, const struct ds4_prefix_entry *entry,
                         const int32_t *prompt, int32_t n_prompt, int32_t *lcp);

/* Moves an entry out; the caller owns its tokens and lease. */
struct ds4_prefix_entry ds4_prefix_take(struct ds4_prefix *prefix, int32_t index);

/* The entry idle for longest, `keep` (-1 = none) excepted; -1 if there is none. */
int32_t ds4_prefix_oldest(const struct ds4_prefix *prefix, int32_t keep);

/* Length of the common prefix. */
int32_t ds4_prefix_common(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b);

#endif
