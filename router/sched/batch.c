/* Batch formation (step 5).
 *
 * Why whole groups: posting each member as soon as it could go would let members drift apart until
 * every step carries one sequence and the pipe does B small steps where S large ones would do.  Why
 * groups at all: with one batch of everybody a pipeline of S stages has S - 1 idle ones.
 * Invariant: after every call group sizes differ by at most one and none is empty. */
#include "router/sched/batch.h"

#include <assert.h>

void ds4_batch_init(struct ds4_batch *batch, int32_t n_stage, int32_t max_entry,
                    int32_t max_step_tok, int32_t chunk_tok)
{
    *batch = (struct ds4_batch){
        .n_stage = n_stage,
        .max_entry = max_entry,
        .max_step_tok = max_step_tok,
        .chunk_tok = chunk_tok,
        .mixed_tok = chunk_tok,
    };
}

int64_t ds4_batch_waiting_tok(const struct ds4_batch *batch)
{
    int64_t n = 0;

    for (size_t i = 0; i < batch->prefill.len; i++)
        n += batch->prefill.ptr[i]->fill_end - batch->prefill.ptr[i]->n_posted;
    return n;
}

void ds4_batch_deinit(struct ds4_batch *batch)
{
    for (int32_t g = 0; g < DS4_MAX_GROUPS; g++)
        DS4_VEC_DEINIT(&batch->group[g].member);
    DS4_VEC_DEINIT(&batch->prefill);
}

/* Groups for n decoding sequences: one per stage, more only if a step could not hold a group. */
static int32_t groups_for(const struct ds4_batch *batch, int32_t n)
{
    int32_t least = (n + batch->max_entry - 1) / batch->max_entry;
    int32_t want = n < batch->n_stage ? n : batch->n_stage;

    want = want > least ? want : least;
    return want < DS4_MAX_GROUPS ? want : DS4_MAX_GROUPS;
}

static int32_t extreme_group(const struct ds4_batch *batch, bool largest)
{
    int32_t best = 0;

    for (int32_t g = 1; g < batch->n_group; g++) {
        size_t len = batch->group[g].member.len, best_len = batch->group[best].member.len;

        if (largest ? len > best_len : len < best_len)
            best = g;
    }
    return best;
}

static bool remove_from(struct ds4_seqs *list, const struct ds4_seq *seq)
{
    for (size_t i = 0; i < list->len; i++) {
        if (list->ptr[i] != seq)
            continue;
        memmove(&list->ptr[i], &list->ptr[i + 1], (list->len - i - 1) * sizeof(struct ds4_seq *));
        list->len--;
        return true;
    }
    return false;
}

/* Moves the newest member of group `from`.  Every group has room for every sequence there is
 * (ds4_batch_start_decode reserves it), so this cannot fail. */
static void move_one(struct ds4_batch *batch, int32_t from, int32_t to)
{
    struct ds4_seqs *list = &batch->group[from].member;
    struct ds4_seqs *dest = &batch->group[to].member;

    assert(dest->len < dest->cap);
    dest->ptr[dest->len++] = list->ptr[--list->len];
    dest->ptr[dest->len - 1]->group = to;
}

/* After a join or a leave: no more groups than wanted, sizes within one. */
static void balance(struct ds4_batch *batch)
{
    int32_t want = groups_for(batch, batch->n_decode);

    while (batch->n_group > want) {
        int32_t last = batch->n_group - 1;
        struct ds4_batch_group gone;
        int32_t g = extreme_group(batch, false);

        /* The smallest takes the last place, and its members (mostly none) find new groups. */
        gone = batch->group[g];
        batch->group[g] = batch->group[last];
        for (size_t i = 0; i < batch->group[g].member.len; i++)
            batch->group[g].member.ptr[i]->group = g;
        batch->group[last] = gone;
        batch->n_group = last;
        while (batch->group[last].member.len > 0 && last > 0)
            move_one(batch, last, extreme_group(batch, false));
    }
    for (int32_t guard = batch->n_decode; guard > 0 && batch->n_group > 1; guard--) {
        int32_t from = extreme_group(batch, true), to = extreme_group(batch, false);

        if (batch->group[from].member.len < batch->group[to].member.len + 2)
            break;
        move_one(batch, from, to);
    }
}

int ds4_batch_add_prefill(struct ds4_batch *batch, struct ds4_seq *seq, struct ds4_err *err)
{
    if (DS4_VEC_PUSH(&batch->prefill, seq) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the prefill line");
    return 0;
}

int ds4_batch_start_decode(struct ds4_batch *batch, struct ds4_seq *seq, struct ds4_err *err)
{
    int32_t n_group = groups_for(batch, batch->n_decode + 1);
    struct ds4_seqs *home;

    assert(seq->group < 0);
    n_group = n_group > batch->n_group ? n_group : batch->n_group;
    for (int32_t g = 0; g < n_group; g++)
        if (DS4_VEC_RESERVE(&batch->group[g].member, (size_t)batch->n_decode + 1) != 0)
            return ds4_fail(err, DS4_E_NOMEM, "no memory for a decode group");
    if (batch->prefill.len > 0 && batch->prefill.ptr[0] == seq)
        batch->turn = 0;
    remove_from(&batch->prefill, seq);
    batch->n_decode++;
    while (batch->n_group < n_group)
        batch->group[batch->n_group++].last_step = -1;
    seq->group = extreme_group(batch, false);
    home = &batch->group[seq->group].member;
    home->ptr[home->len++] = seq;
    balance(batch); /* a group that was split because it outgrew a step */
    return 0;
}

void ds4_batch_remove(struct ds4_batch *batch, struct ds4_seq *seq)
{
    if (batch->prefill.len > 0 && batch->prefill.ptr[0] == seq)
        batch->turn = 0;
    remove_from(&batch->prefill, seq);
    if (seq->group < 0)
        return;
    remove_from(&batch->group[seq->group].member, seq);
    seq->group = -1;
    batch->n_decode--;
    balance(batch);
}

/* May the group be posted: somebody wants to decode, and everybody who wants to can. */
static bool group_ready(const struct ds4_batch_group *group)
{
    bool any = false;

    for (size_t i = 0; i < group->member.len; i++) {
        const struct ds4_seq *seq = group->member.ptr[i];

        if (!ds4_seq_wants_decode(seq))
            continue;
        if (!ds4_seq_can_decode(seq))
            return false;
        any = true;
    }
    return any;
}

/* Drafts that each of n decode entries of a step may have. */
static int32_t drafts_each(const struct ds4_batch *batch, int32_t n)
{
    int32_t most = ds4_draft_rows(batch->max_entry, batch->max_draft) / (n > 0 ? n : 1);

    return most < batch->max_draft ? most : batch->max_draft;
}

static int32_t pick_decodes(struct ds4_batch *batch, int64_t step_no, struct ds4_pick *pick)
{
    struct ds4_batch_group *next = NULL;
    int32_t n = 0, n_draft;

    for (int32_t g = 0; g < batch->n_group; g++) {
        struct ds4_batch_group *group = &batch->group[g];

        if ((next == NULL || group->last_step < next->last_step) && group_ready(group))
            next = group;
    }
    if (next == NULL)
        return 0;
    n_draft = drafts_each(batch, (int32_t)next->member.len);
    for (size_t i = 0; i < next->member.len && n < batch->max_entry; i++)
        if (ds4_seq_can_decode(next->member.ptr[i]))
            ds4_seq_next_decode(next->member.ptr[i], n_draft, &pick[n++]);
    next->last_step = step_no;
    return n;
}

/* The first of the line had its turn: to the end with it. */
static void rotate(struct ds4_batch *batch)
{
    struct ds4_seq *first = batch->prefill.ptr[0];
    size_t rest = batch->prefill.len - 1;

    memmove(&batch->prefill.ptr[0], &batch->prefill.ptr[1], rest * sizeof(first));
    batch->prefill.ptr[rest] = first;
    batch->turn = 0;
}

static int32_t pick_prefills(struct ds4_batch *batch, int32_t n, struct ds4_pick *pick)
{
    int32_t room = batch->max_step_tok;

    for (int32_t i = 0; i < n; i++)
        room -= pick[i].n_tok;
    if (batch->prefill.len > 1 && batch->turn >= batch->n_stage)
        rotate(batch);
    if (room > (n > 0 ? batch->mixed_tok : batch->chunk_tok))
        room = n > 0 ? batch->mixed_tok : batch->chunk_tok;
    for (size_t i = 0; i < batch->prefill.len && n < batch->max_entry && room > 0; i++) {
        /* A prompt behind the first one joins only if it fits whole: it must not be cut at an odd
         * place because of who happened to stand before it. */
        if (i > 0 && batch->prefill.ptr[i]->fill_end - batch->prefill.ptr[i]->n_posted > room)
            break;
        if (!ds4_seq_next_chunk(batch->prefill.ptr[i], room, &pick[n]))
            break;
        room -= pick[n++].n_tok;
        if (i == 0)
            batch->turn++;
    }
    return n;
}

int32_t ds4_batch_next(struct ds4_batch *batch, int64_t step_no, struct ds4_pick *pick)
{
    return pick_prefills(batch, pick_decodes(batch, step_no, pick), pick);
}
