/* Operations on the sequence state that travel inside steps (house list, step 8): points, installs, copies
 * of blocks, rows that came from disk.
 *
 * The router decided and reserved; the stage checks that what it asks for exists and is legal, and does it
 * in step order, on every stage at the same step.  What cannot be right ends the generation, exactly as a
 * lease that does not cover its rows does: there is no "install failed, go on with the old rows".
 *
 * Invariant: ids are the router's; this file keeps none beyond the operation. */
#include "worker/stage_state.h"

/* The slot an operation names is that sequence's, in that epoch (invariant I2). */
static int check_slot(struct ds4_stage *st, const struct ds4_kv_op *op, struct ds4_err *err)
{
    const struct ds4_kv_lease lease = {.seq = op->seq, .slot = op->slot, .epoch = op->epoch};

    return ds4_kv_find(&st->kv, &lease, err) == NULL ? -1 : 0;
}

static int run_op(struct ds4_stage *st, const struct ds4_kv_op *op, struct ds4_err *err)
{
    switch (op->kind) {
    case DS4_KV_POINT_SAVE:
        return 0; /* after the entries */
    case DS4_KV_POINT_DROP:
        return ds4_kv_point_drop(&st->store, op->point, err);
    case DS4_KV_INSTALL:
        if (check_slot(st, op, err) != 0)
            return -1;
        if (st->last)
            ds4_draft_start(&st->draft, op->slot, op->pos);
        return ds4_kv_point_install(&st->store, op->slot, op->pos, op->point, err);
    case DS4_KV_REPLAY:
        if (check_slot(st, op, err) != 0)
            return -1;
        if (st->last)
            ds4_draft_start(&st->draft, op->slot, op->from_pos);
        return ds4_kv_point_replay(&st->store, op->slot, op->from_pos, op->pos, err);
    case DS4_KV_BLOCK_COPY:
        return ds4_kv_block_copy(&st->store, op->block_src, op->block_dst, err);
    case DS4_KV_PARK:
        if (check_slot(st, op, err) != 0)
            return -1;
        ds4_kv_park(&st->kv, op->slot);
        return 0;
    case DS4_KV_STAGED_INSTALL:
        return ds4_kv_tier_install(st->tier, op, err);
    case DS4_KV_STAGED_DROP:
        return ds4_kv_tier_drop(st->tier, op->staging, err);
    }
    return ds4_fail(err, DS4_E_PROTOCOL, "unknown kind of operation %d", (int)op->kind);
}

int ds4_stage_run_ops(struct ds4_stage *st, const struct ds4_step *step, struct ds4_err *err)
{
    for (int32_t i = 0; i < step->n_op; i++)
        if (run_op(st, &step->op[i], err) != 0)
            return ds4_err_wrap(err, "operation %d", i);
    return 0;
}

/* Which points lie so deep inside an entry that the rings will not have them when the step is over. */
int ds4_stage_find_inner(struct ds4_stage *st, const struct ds4_step *step, struct ds4_err *err)
{
    ds4_kv_keeper_begin(&st->keeper);
    for (int32_t i = 0; i < step->n_op; i++) {
        const struct ds4_kv_op *op = &step->op[i];

        if (op->kind != DS4_KV_POINT_SAVE)
            continue;
        if (check_slot(st, op, err) != 0)
            return ds4_err_wrap(err, "operation %d", i);
        if (ds4_kv_reaches(&st->kv, &st->kv.slot[op->slot], op->pos))
            continue;
        for (int32_t e = 0; e < st->batch.n_entry; e++)
            if (st->entry[e].slot == op->slot && st->entry[e].active &&
                op->pos >= st->kv.slot[op->slot].install_pos &&
                ds4_kv_keeper_add(&st->keeper, &st->entry[e], op->pos, op->point, err) != 0)
                return ds4_err_wrap(err, "operation %d", i);
    }
    return 0;
}

int ds4_stage_save_points(struct ds4_stage *st, const struct ds4_step *step, struct ds4_err *err)
{
    for (int32_t i = 0; i < step->n_op; i++) {
        const struct ds4_kv_op *op = &step->op[i];

        if (op->kind != DS4_KV_POINT_SAVE)
            continue;
        if (ds4_kv_keeper_has(&st->keeper, op->point)
                ? ds4_kv_keeper_save(&st->keeper, op->point, err) != 0
                : check_slot(st, op, err) != 0 ||
                      ds4_kv_point_save(&st->store, op->slot, op->pos, op->point, err) != 0)
            return ds4_err_wrap(err, "operation %d", i);
    }
    return 0;
}

void ds4_stage_kv_write(struct ds4_stage *st, const struct ds4_kv_write *write)
{
    ds4_kv_tier_write(st->tier, write);
}

void ds4_stage_kv_read(struct ds4_stage *st, const struct ds4_kv_read *read)
{
    ds4_kv_tier_read(st->tier, read);
}

void ds4_stage_kv_unlink(struct ds4_stage *st, const struct ds4_kv_unlink *unlink)
{
    ds4_kv_tier_unlink(st->tier, unlink);
}
