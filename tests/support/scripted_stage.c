/* The scripted stage: executes steps on hashes (see the header). */
#include "tests/support/scripted_stage.h"

#include "proto/check.h"
#include "proto/point.h"
#include "router/sched/budget.h"

#include <inttypes.h>
#include <stdlib.h>

static uint64_t mix(uint64_t h, int32_t token)
{
    h = (h ^ (uint64_t)(uint32_t)token) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ (h >> 29);
}

static int32_t pick_token(int32_t vocab, uint64_t h)
{
    return (int32_t)(mix(h, 77) % (uint64_t)vocab);
}

/* A row: what is written for a token after a state, given the sum of all rows before. */
static uint64_t row(uint64_t state, int32_t token, uint64_t sum)
{
    return mix(state ^ (sum * UINT64_C(0xd6e8feb86659fd93)), token);
}

int32_t ds4_scripted_next(int32_t vocab, const int32_t *token, int32_t n)
{
    uint64_t h = 1, sum = 0;

    for (int32_t t = 0; t < n; t++) {
        h = row(h, token[t], sum);
        sum += h;
    }
    return pick_token(vocab, h);
}

static void object(struct ds4_scripted_stage *stage, const char *what, int64_t step, int64_t a,
                   int64_t b)
{
    if (stage->err.code == DS4_OK)
        ds4_fail(&stage->err, DS4_E_PROTOCOL, "step %" PRId64 ": %s (%" PRId64 ", %" PRId64 ")",
                 step, what, a, b);
}

static int32_t *copy_tokens(const int32_t *token, int32_t n)
{
    int32_t *out = malloc(((size_t)n + 1) * sizeof(*out));

    if (out == NULL)
        abort();
    memcpy(out, token, (size_t)n * sizeof(*out));
    return out;
}

/* Copies behind each other, 8-byte aligned, into what copy_step has counted. */
static void *put(uint8_t **at, const void *src, int32_t n, size_t size)
{
    void *dst = *at;

    if (n > 0)
        memcpy(dst, src, (size_t)n * size);
    *at += ((size_t)n * size + 7) / 8 * 8;
    return dst;
}

/* The step and all it points to in one piece: the scheduler's benchmark must not measure malloc. */
static struct ds4_step *copy_step(const struct ds4_step *step)
{
    size_t bytes = sizeof(*step) + 64 + (size_t)step->n_open * sizeof(*step->open) +
                   (size_t)step->n_close * sizeof(*step->close_slot) +
                   (size_t)step->n_op * (sizeof(*step->op) + 8) +
                   (size_t)step->n_entry * (sizeof(*step->entry) + 8) +
                   (size_t)step->n_tok * sizeof(*step->token);
    struct ds4_step *out;
    uint8_t *at;

    for (int32_t i = 0; i < step->n_op; i++)
        bytes += (size_t)step->op[i].n_block * sizeof(int32_t);
    for (int32_t i = 0; i < step->n_entry; i++)
        bytes += (size_t)step->entry[i].n_block * sizeof(int32_t);
    at = malloc(bytes);
    if (at == NULL)
        abort();
    out = put(&at, step, 1, sizeof(*step));
    out->open = put(&at, step->open, step->n_open, sizeof(*step->open));
    out->close_slot = put(&at, step->close_slot, step->n_close, sizeof(*step->close_slot));
    out->op = put(&at, step->op, step->n_op, sizeof(*step->op));
    for (int32_t i = 0; i < step->n_op; i++)
        out->op[i].block = put(&at, step->op[i].block, step->op[i].n_block, sizeof(int32_t));
    out->entry = put(&at, step->entry, step->n_entry, sizeof(*step->entry));
    out->token = put(&at, step->token, step->n_tok, sizeof(*step->token));
    for (int32_t i = 0; i < step->n_entry; i++)
        out->entry[i].block =
            put(&at, step->entry[i].block, step->entry[i].n_block, sizeof(int32_t));
    return out;
}

static void clear(struct ds4_scripted_stage *stage)
{
    for (int32_t s = 0; s < stage->form.n_slots; s++) {
        DS4_VEC_DEINIT(&stage->slot[s].hash);
        DS4_VEC_DEINIT(&stage->slot[s].token);
        free(stage->slot[s].block);
    }
    for (size_t i = 0; i < stage->point.len; i++)
        free(stage->point.ptr[i].token);
    DS4_VEC_DEINIT(&stage->point);
    free(stage->slot);
    free(stage->cell);
    free(stage->users);
    free(stage->answer);
    for (size_t i = 0; i < stage->queue.len; i++)
        free(stage->queue.ptr[i]);
    DS4_VEC_DEINIT(&stage->queue);
}

void ds4_scripted_form(struct ds4_scripted_stage *stage, const struct ds4_form *form, int32_t vocab,
                       int32_t hot_window_tok)
{
    struct ds4_err err = stage->err;

    clear(stage);
    *stage = (struct ds4_scripted_stage){
        .form = *form,
        .vocab = vocab,
        .hot_window_tok = hot_window_tok,
        .check_cells = true,
        .shape = stage->shape,
        .unit_bytes = stage->unit_bytes,
        .n_saves = stage->n_saves,
        .n_installs = stage->n_installs,
        .n_copies = stage->n_copies,
        .n_replays = stage->n_replays,
        .replay_tok = stage->replay_tok,
        .n_drafted = stage->n_drafted,
        .n_accepted = stage->n_accepted,
        .n_quenched = stage->n_quenched,
        .n_bad = stage->n_bad,
        .err = err,
        .last_close = -1,
        .next = stage->next,
        .next_owner = stage->next_owner,
        .disk = stage->disk,
    };
    stage->slot = calloc((size_t)form->n_slots, sizeof(*stage->slot));
    stage->cell = calloc((size_t)form->n_blocks * DS4_BLOCK_TOK, sizeof(*stage->cell));
    stage->users = calloc((size_t)form->n_blocks, sizeof(*stage->users));
    stage->answer = calloc((size_t)form->max_seqs, sizeof(*stage->answer));
    if (stage->slot == NULL || stage->cell == NULL || stage->users == NULL || stage->answer == NULL)
        abort();
    for (int32_t s = 0; s < form->n_slots; s++)
        stage->slot[s].block =
            calloc((size_t)ds4_budget_blocks(form->context_tok), sizeof(int32_t));
}

void ds4_scripted_deinit(struct ds4_scripted_stage *stage)
{
    clear(stage);
    *stage = (struct ds4_scripted_stage){0};
}

int ds4_scripted_send(void *owner, const struct ds4_step *step, struct ds4_err *err)
{
    struct ds4_scripted_stage *stage = owner;

    if (stage->fail_sends > 0) {
        stage->fail_sends--;
        return ds4_fail(err, DS4_E_IO, "the scripted pipe is broken");
    }
    if (ds4_check_step(step, err) != 0)
        object(stage, err->msg, step->step_no, 0, 0);
    if (step->step_no != stage->next_step || step->generation != stage->form.generation)
        object(stage, "out of order", step->step_no, stage->next_step, step->generation);
    stage->next_step = step->step_no + 1;
    if (step->n_entry < 1 || step->n_entry > stage->form.max_seqs ||
        step->n_tok > stage->form.max_step_tok)
        object(stage, "shape", step->step_no, step->n_entry, step->n_tok);
    if (DS4_VEC_PUSH(&stage->queue, copy_step(step)) != 0)
        abort();
    if ((int32_t)stage->queue.len > stage->max_queued)
        stage->max_queued = (int32_t)stage->queue.len;
    return 0;
}

static int32_t pos_of(const struct ds4_scripted_slot *slot)
{
    return slot->install_pos + (int32_t)slot->hash.len - 1;
}

/* The slot stands at pos with nothing before it in its rings; token [pos] or NULL. */
static void stand_at(struct ds4_scripted_slot *slot, int32_t pos, uint64_t hash,
                     const int32_t *token)
{
    slot->token.len = 0;
    if (token != NULL && DS4_VEC_RESERVE(&slot->token, (size_t)pos) != 0)
        abort();
    for (int32_t t = 0; token != NULL && t < pos; t++)
        slot->token.ptr[slot->token.len++] = token[t];
    slot->install_pos = pos;
    slot->hi = pos;
    slot->hash.len = 0;
    slot->sum = 0;
    if (DS4_VEC_PUSH(&slot->hash, hash) != 0)
        abort();
}

/* The slot names no blocks any more. */
static void drop_table(struct ds4_scripted_stage *stage, struct ds4_scripted_slot *slot)
{
    while (slot->n_block > 0)
        stage->users[slot->block[--slot->n_block]]--;
}

/* The step is gone when its sequences sample: what they need of it is copied. */
static void keep_open(struct ds4_scripted_slot *slot, const struct ds4_seq_open *open)
{
    struct ds4_sampling *sampling = &slot->how.sampling;

    slot->how = *open;
    for (int32_t i = 0; i < sampling->n_forced; i++)
        slot->forced_id[i] = sampling->forced_id[i];
    sampling->forced_id = slot->forced_id;
    sampling->n_bias = sampling->n_allowed = 0; /* a script samples nothing */
    sampling->bias_id = sampling->allowed_id = NULL;
    sampling->bias = NULL;
}

static void close_and_open(struct ds4_scripted_stage *stage, const struct ds4_step *step)
{
    for (int32_t i = 0; i < step->n_close; i++) {
        struct ds4_scripted_slot *slot = &stage->slot[step->close_slot[i]];

        if (!slot->open)
            object(stage, "close of a free slot", step->step_no, step->close_slot[i], 0);
        slot->open = false;
        drop_table(stage, slot);
        stage->last_close = step->step_no;
    }
    for (int32_t i = 0; i < step->n_open; i++) {
        const struct ds4_seq_open *open = &step->open[i];
        struct ds4_scripted_slot *slot = &stage->slot[open->slot];

        if (slot->open && slot->epoch == open->epoch)
            object(stage, "open under an old epoch", step->step_no, open->slot, open->epoch);
        slot->fresh = !slot->open;
        if (!slot->open)
            stand_at(slot, 0, 1, NULL);
        slot->open = true;
        slot->seq = open->seq;
        slot->epoch = open->epoch;
        keep_open(slot, open);
        slot->ended_at = -1;
        slot->sampled_at = -1;
        slot->replay_to = 0;
        drop_table(stage, slot);
    }
}

static uint64_t *cell_of(struct ds4_scripted_stage *stage, const struct ds4_scripted_slot *slot,
                         int32_t pos)
{
    return &stage->cell[(size_t)slot->block[pos / DS4_BLOCK_TOK] * DS4_BLOCK_TOK +
                        (size_t)(pos % DS4_BLOCK_TOK)];
}

static struct ds4_scripted_point *find_point(struct ds4_scripted_stage *stage, uint64_t id)
{
    for (size_t i = 0; i < stage->point.len; i++)
        if (stage->point.ptr[i].id == id)
            return &stage->point.ptr[i];
    return NULL;
}

static int64_t point_cost(const struct ds4_scripted_stage *stage, int32_t pos)
{
    return ds4_unit_round(ds4_point_bytes(&stage->shape, pos), stage->unit_bytes);
}

static struct ds4_scripted_slot *slot_of(struct ds4_scripted_stage *stage,
                                         const struct ds4_kv_op *op, int64_t step)
{
    struct ds4_scripted_slot *slot = &stage->slot[op->slot];

    if (slot->open && slot->seq == op->seq && slot->epoch == op->epoch)
        return slot;
    object(stage, "operation on a slot of somebody else", step, op->slot, (int64_t)op->seq);
    return NULL;
}

/* Is it an anchor inside of the rows of the slot's entry? */
static bool is_inner(const struct ds4_step *step, const struct ds4_kv_op *op)
{
    for (int32_t e = 0; e < step->n_entry; e++)
        if (step->entry[e].slot == op->slot && op->pos % DS4_ANCHOR_TOK == 0 &&
            step->entry[e].base_pos < op->pos &&
            op->pos < step->entry[e].base_pos + step->entry[e].n_tok)
            return true;
    return false;
}

static void save_point(struct ds4_scripted_stage *stage, const struct ds4_kv_op *op,
                       const struct ds4_step *in)
{
    int64_t step = in->step_no;
    const struct ds4_scripted_slot *slot = slot_of(stage, op, step);
    struct ds4_scripted_point point = {.id = op->point, .pos = op->pos};

    if (slot == NULL)
        return;
    if (op->pos < slot->install_pos || op->pos > pos_of(slot) ||
        (slot->hi - op->pos > stage->hot_window_tok && !is_inner(in, op))) {
        object(stage, "point outside of the rings", step, op->pos, slot->hi);
        return;
    }
    point.hash = slot->hash.ptr[op->pos - slot->install_pos];
    stage->point_bytes += point_cost(stage, op->pos);
    if (stage->point_bytes > stage->form.host_bytes || find_point(stage, op->point) != NULL)
        object(stage, "no room for a point, or it exists", step, (int64_t)op->point,
               stage->point_bytes);
    if (stage->next != NULL)
        point.token = copy_tokens(slot->token.ptr, op->pos);
    if (DS4_VEC_PUSH(&stage->point, point) != 0)
        abort();
    stage->n_saves++;
}

uint64_t ds4_scripted_point_hash(struct ds4_scripted_stage *stage, uint64_t id, int32_t pos)
{
    const struct ds4_scripted_point *point = find_point(stage, id);

    if (point != NULL && point->pos == pos)
        return point->hash;
    object(stage, "a write of a point that is not there", -1, (int64_t)id, pos);
    return 0;
}

void ds4_scripted_add_point(struct ds4_scripted_stage *stage, uint64_t id, int32_t pos,
                            uint64_t hash)
{
    const struct ds4_scripted_point point = {.id = id, .pos = pos, .hash = hash};

    stage->point_bytes += point_cost(stage, pos);
    if (find_point(stage, id) != NULL || DS4_VEC_PUSH(&stage->point, point) != 0)
        object(stage, "a point that exists", -1, (int64_t)id, pos);
}

static void run_op(struct ds4_scripted_stage *stage, const struct ds4_kv_op *op, int64_t step)
{
    struct ds4_scripted_point *point = find_point(stage, op->point);
    struct ds4_scripted_slot *slot;
    const char *what;

    switch (op->kind) {
    case DS4_KV_POINT_SAVE:
        break; /* after the entries */
    case DS4_KV_POINT_DROP:
        if (point == NULL) {
            object(stage, "drop of an unknown point", step, (int64_t)op->point, 0);
            break;
        }
        stage->point_bytes -= point_cost(stage, point->pos);
        free(point->token);
        *point = stage->point.ptr[--stage->point.len];
        break;
    case DS4_KV_INSTALL:
        slot = slot_of(stage, op, step);
        if (slot == NULL || point == NULL || point->pos != op->pos || !slot->fresh)
            object(stage, "install that cannot be", step, (int64_t)op->point, op->pos);
        else
            stand_at(slot, op->pos, point->hash, point->token);
        stage->n_installs++;
        break;
    case DS4_KV_PARK:
        slot = slot_of(stage, op, step);
        if (slot != NULL)
            drop_table(stage, slot);
        break;
    case DS4_KV_REPLAY:
        slot = slot_of(stage, op, step);
        if (slot == NULL || !slot->fresh || op->pos - op->from_pos < stage->replay_tok)
            object(stage, "replay that cannot be", step, op->from_pos, op->pos);
        else {
            slot->replay_at = op->from_pos;
            slot->replay_to = op->pos;
        }
        stage->n_replays++;
        break;
    case DS4_KV_BLOCK_COPY:
        if (stage->users[op->block_dst] > 0)
            object(stage, "copy onto a block in use", step, op->block_src, op->block_dst);
        memcpy(&stage->cell[(size_t)op->block_dst * DS4_BLOCK_TOK],
               &stage->cell[(size_t)op->block_src * DS4_BLOCK_TOK],
               DS4_BLOCK_TOK * sizeof(*stage->cell));
        stage->n_copies++;
        break;
    case DS4_KV_STAGED_INSTALL:
    case DS4_KV_STAGED_DROP:
        what = stage->disk == NULL ? "no disk" : ds4_scripted_disk_op(stage->disk, op);
        if (what != NULL)
            object(stage, what, step, (int64_t)op->staging, op->first_block);
        break;
    default:
        object(stage, "operation not known here", step, op->kind, 0);
    }
}

/* The sum of all rows below `base`, read through the table of blocks. */
static uint64_t sum_rows(struct ds4_scripted_stage *stage, const struct ds4_scripted_slot *slot,
                         int32_t base, int64_t step)
{
    uint64_t sum = 0;

    for (int32_t p = 0; p < base; p++) {
        uint64_t cell = *cell_of(stage, slot, p);

        if (p + 1 >= slot->install_pos && cell != slot->hash.ptr[p + 1 - slot->install_pos])
            object(stage, "a row was overwritten", step, p, (int64_t)slot->seq);
        sum += cell;
    }
    return sum;
}

/* Tokens of a replay: no row is written, and at its end the rings are what the last row says (a cell is the
 * hash after its token).  Returns how many tokens of the entry were that. */
static int32_t replay(struct ds4_scripted_stage *stage, struct ds4_scripted_slot *slot,
                      const struct ds4_step_entry *entry, int64_t step)
{
    int32_t n = slot->replay_to - entry->base_pos;

    if (slot->replay_to == 0)
        return 0;
    if (entry->base_pos != slot->replay_at)
        object(stage, "a replay with a gap", step, entry->base_pos, slot->replay_at);
    n = n < entry->n_tok ? n : entry->n_tok;
    slot->replay_at += n;
    if (slot->replay_at < slot->replay_to)
        return n;
    stand_at(slot, slot->replay_to, *cell_of(stage, slot, slot->replay_to - 1), NULL);
    slot->replay_to = 0;
    slot->fresh = true; /* so that its sum is made */
    return n;
}

static void truncate_to(struct ds4_scripted_stage *stage, struct ds4_scripted_slot *slot,
                        int32_t base, int64_t step)
{
    int32_t pos = pos_of(slot);

    if (base > pos)
        object(stage, "base above the position", step, base, pos);
    else if (base < pos && base == 0)
        stand_at(slot, 0, 1, NULL);
    else if (base < pos && (slot->hi - base > stage->hot_window_tok || base < slot->install_pos))
        object(stage, "cut below the hot window", step, base, slot->hi);
    else
        slot->hash.len = (size_t)(base - slot->install_pos) + 1;
    if (stage->next != NULL && slot->token.len > (size_t)base)
        slot->token.len = (size_t)base;
    if (stage->check_cells || (base < pos || slot->fresh))
        slot->sum = sum_rows(stage, slot, base, step);
    slot->fresh = false;
}

static bool is_stop(const struct ds4_scripted_slot *slot, int32_t token, int32_t pos)
{
    if (pos >= slot->how.max_pos - 1)
        return true;
    for (int32_t i = 0; i < slot->how.n_stop && !slot->how.ignore_stop; i++)
        if (slot->how.stop_id[i] == token)
            return true;
    return false;
}

/* The token for position `pos`, which is not above the slot's; false: the row was not finite, or it is the
 * last one. */
static bool sample(struct ds4_scripted_stage *stage, struct ds4_scripted_slot *slot, int32_t pos,
                   struct ds4_token_entry *out, int64_t step)
{
    int32_t token = stage->next != NULL
                        ? stage->next(stage->next_owner, slot)
                        : pick_token(stage->vocab, slot->hash.ptr[pos - slot->install_pos]);

    if (slot->seq == stage->nonfinite_seq || token < 0) {
        stage->nonfinite_seq = 0;
        slot->ended_at = step;
        out->flags |= DS4_TOKEN_NONFINITE | DS4_TOKEN_ENDED;
        return false;
    }
    out->flags |= DS4_TOKEN_SAMPLED;
    out->token[out->n_token++] = token;
    slot->sampled_at = step;
    slot->ended_at = -1; /* the newest record counts: a splice revives a sequence */
    slot->sampled = token;
    if (!is_stop(slot, token, pos))
        return true;
    slot->ended_at = step;
    out->flags |= DS4_TOKEN_ENDED;
    return false;
}

/* Back to `pos`: what lies above was rows of wrong drafts. */
static void undo(struct ds4_scripted_slot *slot, int32_t pos)
{
    while (pos_of(slot) > pos)
        slot->sum -= slot->hash.ptr[--slot->hash.len];
    if (slot->token.len > (size_t)pos)
        slot->token.len = (size_t)pos;
}

/* Row after row of a VERIFY entry while the draft behind it is right. */
static void verify(struct ds4_scripted_stage *stage, struct ds4_scripted_slot *slot, int32_t base,
                   int32_t n_row, const int32_t *run, struct ds4_token_entry *out, int64_t step)
{
    int32_t r = 0;

    while (sample(stage, slot, base + r + 1, out, step) && r + 1 < n_row &&
           run[r + 1] == slot->sampled)
        r++;
    out->pos = base + r + 1;
    out->n_undone = n_row - r - 1;
    stage->n_drafted += (uint64_t)(n_row - 1);
    stage->n_accepted += (uint64_t)ds4_accepted_drafts(out);
    undo(slot, out->pos);
}

/* Drafts to follow what was just sampled: at first what the model will say, then something else. */
static void propose(struct ds4_scripted_stage *stage, struct ds4_scripted_slot *slot,
                    struct ds4_token_entry *out)
{
    uint64_t h = slot->hash.ptr[slot->hash.len - 1], sum = slot->sum, dice = mix(h, 12345);
    int32_t n = (int32_t)(dice % (uint64_t)(slot->how.max_draft + 1));
    int32_t n_right = (int32_t)(dice >> 20) % (n + 1);
    int32_t room = slot->how.max_pos - 1 - (out->pos + 1), token = slot->sampled;

    slot->n_draft = 0;
    if (slot->how.max_draft == 0 || stage->next != NULL || (out->flags & DS4_TOKEN_ENDED) != 0)
        return;
    n = n < room ? n : room;
    for (int32_t i = 0; i < n; i++) {
        h = row(h, token, sum);
        sum += h;
        token = pick_token(stage->vocab, h);
        if (i >= n_right)
            token = (token + 1) % stage->vocab;
        slot->draft[slot->n_draft++] = token;
    }
    if (dice % 50 == 7) {
        out->n_bad_draft = 1;
        stage->n_bad++;
    }
    if (dice % 90 == 11) {
        out->flags |= DS4_TOKEN_QUENCHED;
        stage->n_quenched++;
    }
}

static void run_entry(struct ds4_scripted_stage *stage, const struct ds4_step *step,
                      const struct ds4_step_entry *entry, struct ds4_token_entry *out)
{
    struct ds4_scripted_slot *slot = &stage->slot[entry->slot];
    int32_t run[1 + DS4_MAX_DRAFT] = {0}, n_row = entry->n_tok;
    int32_t base = entry->base_pos, begin;

    *out = (struct ds4_token_entry){.seq = entry->seq, .epoch = entry->epoch};
    if (!slot->open || slot->seq != entry->seq || slot->epoch != entry->epoch) {
        object(stage, "entry of a stranger", step->step_no, (int64_t)entry->seq, entry->epoch);
        return;
    }
    if (entry->first_block != slot->n_block && entry->n_block > 0)
        object(stage, "hole in the block table", step->step_no, entry->first_block, slot->n_block);
    for (int32_t i = 0; i < entry->n_block; i++) {
        slot->block[slot->n_block++] = entry->block[i];
        stage->users[entry->block[i]]++;
    }
    if (entry->from_step >= 0 && slot->ended_at >= 0 && slot->ended_at <= entry->from_step) {
        out->flags = DS4_TOKEN_SKIPPED;
        out->pos = pos_of(slot);
        stage->n_skipped++;
        return;
    }
    if (entry->from_step >= 0) {
        base = pos_of(slot);
        if (base < entry->base_pos)
            object(stage, "ring entry above the position", step->step_no, entry->base_pos, base);
        n_row = entry->kind == DS4_ENTRY_VERIFY ? entry->n_tok : 1;
        n_row = n_row < 1 + slot->n_draft ? n_row : 1 + slot->n_draft;
        run[0] = slot->sampled;
        memcpy(run + 1, slot->draft, (size_t)(n_row - 1) * sizeof(*run));
    }
    begin = base + replay(stage, slot, entry, step->step_no);
    if (begin == base + n_row) {
        out->pos = begin;
        return;
    }
    truncate_to(stage, slot, begin, step->step_no);
    if (base + n_row > entry->cap_tok || base + n_row >= slot->how.max_pos ||
        entry->cap_tok > slot->n_block * DS4_BLOCK_TOK)
        object(stage, "rows outside the lease", step->step_no, entry->base_pos, entry->cap_tok);
    if (entry->from_step >= 0 && entry->from_step != slot->sampled_at)
        object(stage, "token from the wrong step", step->step_no, entry->from_step,
               slot->sampled_at);
    for (int32_t b = begin / DS4_BLOCK_TOK;
         b < ds4_budget_blocks(base + n_row) && b < slot->n_block; b++)
        if (stage->users[slot->block[b]] > 1)
            object(stage, "rows in a block that others name", step->step_no, entry->base_pos,
                   slot->block[b]);
    for (int32_t t = begin - base; t < n_row; t++) {
        int32_t pos = base + t;
        int32_t token = entry->from_step >= 0 ? run[t] : step->token[entry->first_tok + t];
        uint64_t h = row(slot->hash.ptr[slot->hash.len - 1], token, slot->sum);

        slot->sum += h;
        if (DS4_VEC_PUSH(&slot->hash, h) != 0 ||
            (stage->next != NULL && DS4_VEC_PUSH(&slot->token, token) != 0))
            abort();
        *cell_of(stage, slot, pos) = h;
        stage->n_rows++;
    }
    out->pos = pos_of(slot);
    if (out->pos > slot->hi)
        slot->hi = out->pos;
    if (!entry->sample)
        return;
    if (entry->kind == DS4_ENTRY_VERIFY)
        verify(stage, slot, base, n_row, run, out, step->step_no);
    else
        (void)sample(stage, slot, out->pos, out, step->step_no);
    propose(stage, slot, out);
}

bool ds4_scripted_answer(struct ds4_scripted_stage *stage, struct ds4_tokens_out *out)
{
    struct ds4_step *step;

    if (stage->queue.len == 0)
        return false;
    step = stage->queue.ptr[0];
    stage->queue.len--;
    memmove(stage->queue.ptr, stage->queue.ptr + 1, stage->queue.len * sizeof(*stage->queue.ptr));
    close_and_open(stage, step);
    for (int32_t i = 0; i < step->n_op; i++)
        run_op(stage, &step->op[i], step->step_no);
    for (int32_t i = 0; i < step->n_entry; i++)
        run_entry(stage, step, &step->entry[i], &stage->answer[i]);
    for (int32_t i = 0; i < step->n_op; i++)
        if (step->op[i].kind == DS4_KV_POINT_SAVE)
            save_point(stage, &step->op[i], step);
    *out = (struct ds4_tokens_out){
        .generation = step->generation,
        .step_no = step->step_no,
        .n_entry = step->n_entry,
        .entry = stage->answer,
        .compute_ns = 1000,
    };
    free(step);
    return true;
}
