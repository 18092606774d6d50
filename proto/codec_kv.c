/* Structs <-> protobuf for what concerns the sequence state outside the steps: step acknowledgements and
 * the disk tier (see codec.c for memory and order; every range is proto/check.c's). */
#include "proto/codec.h"

#include "proto/check.h"
#include "proto/codec_parts.h"

#include "proto/ds4.pb-c.h"

#include <inttypes.h>
#include <string.h>

/* ---- step done ---- */

int ds4_codec_encode_step_done(const struct ds4_step_done *done, struct ds4_buf *out,
                               struct ds4_err *err)
{
    Ds4__Wire__StepDone wire = DS4__WIRE__STEP_DONE__INIT;

    if (ds4_check_step_done(done, err))
        return ds4_err_wrap(err, "step done");
    wire.step_no = done->step_no;
    wire.pos_digest = done->pos_digest;
    return ds4_codec_pack(&wire.base, "step done", out, err);
}

int ds4_codec_decode_step_done(struct ds4_str payload, uint32_t generation,
                               struct ds4_arena *scratch, struct ds4_step_done *out,
                               struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__StepDone *wire =
        ds4_codec_unpack(&ds4__wire__step_done__descriptor, "step done", payload, scratch, err);
    int rc = -1;

    if (wire != NULL) {
        *out = (struct ds4_step_done){generation, wire->step_no, wire->pos_digest};
        rc = ds4_check_step_done(out, err) ? ds4_err_wrap(err, "step done") : 0;
    }
    ds4_arena_reset(scratch, mark);
    return rc;
}

/* ---- write, read ---- */

static int get_part_kind(uint32_t from, enum ds4_kv_part_kind *to, struct ds4_err *err)
{
    if (from < DS4_KV_EXTENT || from > DS4_KV_TAIL)
        return ds4_fail(err, DS4_E_PROTOCOL, "unknown kind of part %" PRIu32, from);
    *to = (enum ds4_kv_part_kind)from;
    return 0;
}

int ds4_codec_encode_kv_write(const struct ds4_kv_write *write, struct ds4_buf *out,
                              struct ds4_err *err)
{
    Ds4__Wire__KvWrite wire = DS4__WIRE__KV_WRITE__INIT;

    if (ds4_check_kv_write(write, err))
        return ds4_err_wrap(err, "part to write");
    wire.job = write->job;
    wire.key = ds4_codec_put_id(write->key);
    wire.commit = ds4_codec_put_id(write->commit);
    wire.kind = (uint32_t)write->kind;
    wire.begin = write->begin;
    wire.end = write->end;
    wire.point = write->point;
    wire.flags = write->flags;
    wire.n_block = (size_t)write->n_block;
    wire.block = (int32_t *)(uintptr_t)write->block;
    return ds4_codec_pack(&wire.base, "part to write", out, err);
}

static int get_write(const Ds4__Wire__KvWrite *from, struct ds4_kv_write *to, struct ds4_err *err)
{
    to->job = from->job;
    to->begin = from->begin;
    to->end = from->end;
    to->point = from->point;
    to->flags = from->flags;
    to->block = from->block;
    if (ds4_codec_get_id("key", from->key, to->key, err) ||
        ds4_codec_get_id("commit", from->commit, to->commit, err) ||
        get_part_kind(from->kind, &to->kind, err) ||
        ds4_codec_get_count("blocks", from->n_block, DS4_PART_BLOCKS, &to->n_block, err))
        return -1;
    return ds4_check_kv_write(to, err);
}

int ds4_codec_decode_kv_write(struct ds4_str payload, uint32_t generation, struct ds4_arena *arena,
                              struct ds4_kv_write *out, struct ds4_err *err)
{
    const Ds4__Wire__KvWrite *wire =
        ds4_codec_unpack(&ds4__wire__kv_write__descriptor, "part to write", payload, arena, err);

    if (wire == NULL)
        return -1;
    *out = (struct ds4_kv_write){.generation = generation};
    return get_write(wire, out, err) ? ds4_err_wrap(err, "part to write") : 0;
}

static int encode_kv_read(const struct ds4_kv_read *read, struct ds4_arena *scratch,
                          struct ds4_buf *out, struct ds4_err *err)
{
    Ds4__Wire__KvRead wire = DS4__WIRE__KV_READ__INIT;
    size_t n = (size_t)read->n_part;
    Ds4__Wire__KvPartRef *part = ds4_arena_take_array(scratch, n, sizeof(*part));

    wire.part = ds4_arena_take_array(scratch, n, sizeof(wire.part[0]));
    if (part == NULL || wire.part == NULL)
        return ds4_codec_no_memory("part to read", err);
    for (size_t i = 0; i < n; i++) {
        part[i] = (Ds4__Wire__KvPartRef)DS4__WIRE__KV_PART_REF__INIT;
        part[i].first_layer = read->part[i].first_layer;
        part[i].last_layer = read->part[i].last_layer;
        part[i].bytes = read->part[i].bytes;
        part[i].digest = ds4_codec_put_id(read->part[i].digest);
        wire.part[i] = &part[i];
    }
    wire.n_part = n;
    wire.job = read->job;
    wire.staging = read->staging;
    wire.key = ds4_codec_put_id(read->key);
    wire.commit = ds4_codec_put_id(read->commit);
    wire.kind = (uint32_t)read->kind;
    wire.begin = read->begin;
    wire.end = read->end;
    return ds4_codec_pack(&wire.base, "part to read", out, err);
}

int ds4_codec_encode_kv_read(const struct ds4_kv_read *read, struct ds4_arena *scratch,
                             struct ds4_buf *out, struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    int rc;

    if (ds4_check_kv_read(read, err))
        return ds4_err_wrap(err, "part to read");
    rc = encode_kv_read(read, scratch, out, err);
    ds4_arena_reset(scratch, mark);
    return rc;
}

static int get_read(const Ds4__Wire__KvRead *from, struct ds4_arena *arena, struct ds4_kv_read *to,
                    struct ds4_err *err)
{
    to->job = from->job;
    to->staging = from->staging;
    to->begin = from->begin;
    to->end = from->end;
    if (ds4_codec_get_id("key", from->key, to->key, err) ||
        ds4_codec_get_id("commit", from->commit, to->commit, err) ||
        get_part_kind(from->kind, &to->kind, err) ||
        ds4_codec_get_count("parts", from->n_part, DS4_MAX_STAGES, &to->n_part, err))
        return -1;
    to->part = ds4_arena_take_array(arena, from->n_part, sizeof(to->part[0]));
    if (to->part == NULL)
        return ds4_codec_no_memory("part to read", err);
    for (int32_t i = 0; i < to->n_part; i++) {
        to->part[i].first_layer = from->part[i]->first_layer;
        to->part[i].last_layer = from->part[i]->last_layer;
        to->part[i].bytes = from->part[i]->bytes;
        if (ds4_codec_get_id("digest", from->part[i]->digest, to->part[i].digest, err))
            return -1;
    }
    return ds4_check_kv_read(to, err);
}

int ds4_codec_decode_kv_read(struct ds4_str payload, uint32_t generation, struct ds4_arena *arena,
                             struct ds4_kv_read *out, struct ds4_err *err)
{
    const Ds4__Wire__KvRead *wire =
        ds4_codec_unpack(&ds4__wire__kv_read__descriptor, "part to read", payload, arena, err);

    if (wire == NULL)
        return -1;
    *out = (struct ds4_kv_read){.generation = generation};
    return get_read(wire, arena, out, err) ? ds4_err_wrap(err, "part to read") : 0;
}

/* ---- unlink, done ---- */

int ds4_codec_encode_kv_unlink(const struct ds4_kv_unlink *unlink, struct ds4_buf *out,
                               struct ds4_err *err)
{
    Ds4__Wire__KvUnlink wire = DS4__WIRE__KV_UNLINK__INIT;

    if (ds4_check_kv_unlink(unlink, err))
        return ds4_err_wrap(err, "part to unlink");
    wire.job = unlink->job;
    wire.key = ds4_codec_put_id(unlink->key);
    wire.kind = (uint32_t)unlink->kind;
    wire.first_layer = unlink->first_layer;
    wire.last_layer = unlink->last_layer;
    wire.quarantine = unlink->quarantine;
    return ds4_codec_pack(&wire.base, "part to unlink", out, err);
}

static int get_unlink(const Ds4__Wire__KvUnlink *from, struct ds4_kv_unlink *to,
                      struct ds4_err *err)
{
    to->job = from->job;
    to->first_layer = from->first_layer;
    to->last_layer = from->last_layer;
    to->quarantine = from->quarantine != 0;
    if (ds4_codec_get_id("key", from->key, to->key, err) ||
        get_part_kind(from->kind, &to->kind, err))
        return -1;
    return ds4_check_kv_unlink(to, err);
}

int ds4_codec_decode_kv_unlink(struct ds4_str payload, uint32_t generation,
                               struct ds4_arena *scratch, struct ds4_kv_unlink *out,
                               struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__KvUnlink *wire = ds4_codec_unpack(&ds4__wire__kv_unlink__descriptor,
                                                       "part to unlink", payload, scratch, err);
    int rc = -1;

    *out = (struct ds4_kv_unlink){.generation = generation};
    if (wire != NULL)
        rc = get_unlink(wire, out, err) ? ds4_err_wrap(err, "part to unlink") : 0;
    ds4_arena_reset(scratch, mark);
    return rc;
}

int ds4_codec_encode_kv_done(const struct ds4_kv_done *done, struct ds4_buf *out,
                             struct ds4_err *err)
{
    Ds4__Wire__KvDone wire = DS4__WIRE__KV_DONE__INIT;
    struct ds4_kv_done d = *done;

    wire.job = d.job;
    wire.reason = (uint32_t)d.reason;
    wire.existed = d.existed;
    wire.bytes = d.bytes;
    wire.digest = ds4_codec_put_id(d.digest);
    wire.duration_ns = d.duration_ns;
    wire.text = ds4_codec_put_text(d.text, sizeof(d.text));
    if (ds4_check_kv_done(&d, err))
        return ds4_err_wrap(err, "finished job");
    return ds4_codec_pack(&wire.base, "finished job", out, err);
}

static int get_done(const Ds4__Wire__KvDone *from, struct ds4_kv_done *to, struct ds4_err *err)
{
    if (from->reason >= DS4_KV_N_REASON)
        return ds4_fail(err, DS4_E_PROTOCOL, "unknown reason %" PRIu32, from->reason);
    to->job = from->job;
    to->reason = (enum ds4_kv_reason)from->reason;
    to->existed = from->existed != 0;
    to->bytes = from->bytes;
    to->duration_ns = from->duration_ns;
    if (ds4_codec_get_id("digest", from->digest, to->digest, err) ||
        ds4_codec_get_text("text", from->text, to->text, sizeof(to->text), err))
        return -1;
    return ds4_check_kv_done(to, err);
}

int ds4_codec_decode_kv_done(struct ds4_str payload, uint32_t generation, struct ds4_arena *scratch,
                             struct ds4_kv_done *out, struct ds4_err *err)
{
    struct ds4_arena_mark mark = ds4_arena_mark(scratch);
    const Ds4__Wire__KvDone *wire =
        ds4_codec_unpack(&ds4__wire__kv_done__descriptor, "finished job", payload, scratch, err);
    int rc = -1;

    *out = (struct ds4_kv_done){.generation = generation};
    if (wire != NULL)
        rc = get_done(wire, out, err) ? ds4_err_wrap(err, "finished job") : 0;
    ds4_arena_reset(scratch, mark);
    return rc;
}
