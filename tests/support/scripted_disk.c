/* Parts without files (see the header). */
#include "tests/support/scripted_disk.h"

#include "proto/check.h"
#include "proto/point.h"
#include "router/sched/budget.h"
#include "tests/support/scripted_stage.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#define HEADER_BYTES 4096
#define PAD_BYTES    8192 /* sections of two layers begin at pages */

static struct ds4_scripted_part copy_part(const struct ds4_scripted_part *from)
{
    struct ds4_scripted_part part = *from;
    size_t bytes = (size_t)(from->end - from->begin) * sizeof(*part.cell);

    part.cell = malloc(bytes + 1);
    if (part.cell == NULL)
        abort();
    memcpy(part.cell, from->cell, bytes);
    return part;
}

void ds4_scripted_disk_form(struct ds4_scripted_disk *disk, struct ds4_scripted_stage *stage)
{
    for (size_t i = 0; i < disk->staging.len; i++)
        free(disk->staging.ptr[i].part.cell);
    disk->staging.len = 0;
    disk->queue.len = 0;
    disk->owed.len = 0;
    disk->staged_bytes = 0;
    disk->stage = stage;
    stage->disk = disk;
}

void ds4_scripted_disk_deinit(struct ds4_scripted_disk *disk)
{
    for (size_t i = 0; i < disk->staging.len; i++)
        free(disk->staging.ptr[i].part.cell);
    for (size_t i = 0; i < disk->part.len; i++)
        free(disk->part.ptr[i].cell);
    DS4_VEC_DEINIT(&disk->staging);
    DS4_VEC_DEINIT(&disk->part);
    DS4_VEC_DEINIT(&disk->queue);
    DS4_VEC_DEINIT(&disk->owed);
}

static struct ds4_scripted_part *find_part(struct ds4_scripted_disk *disk, const uint8_t *key,
                                           bool tail)
{
    for (size_t i = 0; i < disk->part.len; i++)
        if (disk->part.ptr[i].tail == tail && memcmp(disk->part.ptr[i].key, key, DS4_ID_BYTES) == 0)
            return &disk->part.ptr[i];
    return NULL;
}

/* ---- the port --------------------------------------------------------------------------------------- */

static struct ds4_scripted_job *add_job(struct ds4_scripted_stage *stage, enum ds4_kv_job_of kind)
{
    struct ds4_scripted_disk *disk = stage->disk;
    struct ds4_scripted_job job = {.kind = kind, .after_step = stage->next_step};

    if (disk->queue.len >= DS4_MAX_KV_JOBS || DS4_VEC_PUSH(&disk->queue, job) != 0)
        abort();
    return &disk->queue.ptr[disk->queue.len - 1];
}

int ds4_scripted_kv_write(void *owner, const struct ds4_kv_write *write, struct ds4_err *err)
{
    struct ds4_scripted_job *job;

    if (ds4_check_kv_write(write, err) != 0)
        return -1;
    job = add_job(owner, DS4_SCRIPTED_WRITE);
    job->write = *write;
    memcpy(job->block, write->block, (size_t)write->n_block * sizeof(*job->block));
    return 0;
}

int ds4_scripted_kv_read(void *owner, const struct ds4_kv_read *read, struct ds4_err *err)
{
    struct ds4_scripted_job *job;

    if (ds4_check_kv_read(read, err) != 0)
        return -1;
    job = add_job(owner, DS4_SCRIPTED_READ);
    job->read = *read;
    memcpy(job->ref, read->part, (size_t)read->n_part * sizeof(*job->ref));
    return 0;
}

int ds4_scripted_kv_unlink(void *owner, const struct ds4_kv_unlink *unlink, struct ds4_err *err)
{
    if (ds4_check_kv_unlink(unlink, err) != 0)
        return -1;
    add_job(owner, DS4_SCRIPTED_UNLINK)->unlink = *unlink;
    return 0;
}

/* ---- jobs ------------------------------------------------------------------------------------------- */

static struct ds4_kv_done run_write(struct ds4_scripted_disk *disk,
                                    const struct ds4_scripted_job *job)
{
    const struct ds4_kv_write *w = &job->write;
    struct ds4_scripted_part part = {
        .tail = w->kind != DS4_KV_EXTENT, .begin = w->begin, .end = w->end};
    struct ds4_kv_done done = {.generation = w->generation, .job = w->job};
    const struct ds4_scripted_part *old = find_part(disk, w->key, part.tail);
    XXH128_hash_t digest;

    if (old != NULL) {
        disk->n_existed++;
        done.existed = true;
        done.bytes = old->bytes;
        memcpy(done.digest, old->digest, DS4_ID_BYTES);
        return done;
    }
    memcpy(part.key, w->key, DS4_ID_BYTES);
    part.cell = malloc((size_t)(w->end - w->begin + 1) * sizeof(*part.cell));
    if (part.cell == NULL)
        abort();
    for (int32_t p = w->begin; p < w->end; p++)
        part.cell[p - w->begin] =
            disk->stage->cell[(size_t)job->block[(p - w->begin) / DS4_BLOCK_TOK] * DS4_BLOCK_TOK +
                              (size_t)(p % DS4_BLOCK_TOK)];
    if (part.tail)
        part.hash = ds4_scripted_point_hash(disk->stage, w->point, w->end);
    digest = XXH3_128bits_withSeed(part.cell, (size_t)(w->end - w->begin) * sizeof(*part.cell),
                                   part.hash);
    memcpy(part.digest, &digest, DS4_ID_BYTES);
    part.bytes = HEADER_BYTES + PAD_BYTES + 8 * (uint64_t)(w->end - w->begin);
    memcpy(done.digest, part.digest, DS4_ID_BYTES);
    done.bytes = part.bytes;
    if (DS4_VEC_PUSH(&disk->part, part) != 0)
        abort();
    disk->n_written++;
    disk->rows_written += (uint64_t)(w->end - w->begin);
    return done;
}

static struct ds4_kv_done run_read(struct ds4_scripted_disk *disk,
                                   const struct ds4_scripted_job *job)
{
    const struct ds4_kv_read *r = &job->read;
    const struct ds4_scripted_part *part = find_part(disk, r->key, r->kind != DS4_KV_EXTENT);
    struct ds4_kv_done done = {.generation = r->generation, .job = r->job};
    struct ds4_scripted_staging staging = {.id = r->staging};

    if (part == NULL)
        done.reason = DS4_KV_MISSING_PART;
    else if (part->begin != r->begin || part->end != r->end)
        done.reason = DS4_KV_BAD_TOKENS;
    else if (job->ref[0].bytes != part->bytes ||
             memcmp(job->ref[0].digest, part->digest, DS4_ID_BYTES) != 0)
        done.reason = DS4_KV_BAD_CRC;
    if (done.reason != DS4_KV_OK)
        return done;
    staging.part = copy_part(part);
    staging.held_bytes = ds4_unit_round(ds4_budget_blocks(r->end - r->begin) * disk->block_bytes,
                                        disk->stage->unit_bytes);
    if (part->tail)
        staging.held_bytes +=
            ds4_unit_round(ds4_point_bytes(&disk->stage->shape, r->end), disk->stage->unit_bytes);
    disk->staged_bytes += staging.held_bytes;
    if (disk->staged_bytes + disk->stage->point_bytes > disk->stage->form.host_bytes) {
        fprintf(stderr, "scripted_disk: more is staged than the stages can hold\n");
        abort();
    }
    if (DS4_VEC_PUSH(&disk->staging, staging) != 0)
        abort();
    done.bytes = part->bytes;
    disk->n_read++;
    return done;
}

static struct ds4_kv_done run_unlink(struct ds4_scripted_disk *disk,
                                     const struct ds4_scripted_job *job)
{
    const struct ds4_kv_unlink *u = &job->unlink;
    struct ds4_scripted_part *part = find_part(disk, u->key, u->kind != DS4_KV_EXTENT);

    if (part != NULL) {
        free(part->cell);
        *part = disk->part.ptr[--disk->part.len];
        disk->n_unlinked++;
    }
    return (struct ds4_kv_done){.generation = u->generation, .job = u->job};
}

static struct ds4_scripted_staging *find_staging(struct ds4_scripted_disk *disk, uint64_t id)
{
    for (size_t i = 0; i < disk->staging.len; i++)
        if (disk->staging.ptr[i].id == id)
            return &disk->staging.ptr[i];
    return NULL;
}

static void drop_staging(struct ds4_scripted_disk *disk, struct ds4_scripted_staging *staging)
{
    disk->staged_bytes -= staging->held_bytes;
    free(staging->part.cell);
    *staging = disk->staging.ptr[--disk->staging.len];
}

bool ds4_scripted_disk_run(struct ds4_scripted_disk *disk, int32_t n_stage,
                           struct ds4_kv_done *done)
{
    struct ds4_scripted_job job;
    bool fails;

    if (disk->silent || disk->queue.len == 0 ||
        disk->queue.ptr[0].after_step > disk->stage->next_step - (int64_t)disk->stage->queue.len)
        return false;
    job = disk->queue.ptr[0];
    memmove(disk->queue.ptr, disk->queue.ptr + 1, --disk->queue.len * sizeof(job));
    fails =
        disk->fail_reason != DS4_KV_OK && disk->fail_kind == job.kind && disk->fail_after-- <= 0;
    switch (job.kind) {
    case DS4_SCRIPTED_WRITE:
        done[0] = run_write(disk, &job);
        break;
    case DS4_SCRIPTED_READ:
        done[0] = run_read(disk, &job);
        break;
    case DS4_SCRIPTED_UNLINK:
        done[0] = run_unlink(disk, &job);
        break;
    }
    for (int32_t s = 1; s < n_stage; s++)
        done[s] = done[0];
    if (fails) {
        done[disk->fail_stage].reason = disk->fail_reason;
        snprintf(done[disk->fail_stage].text, sizeof(done[0].text), "as the test asked");
        disk->fail_reason = DS4_KV_OK;
    }
    return true;
}

/* ---- operations ------------------------------------------------------------------------------------- */

const char *ds4_scripted_disk_op(struct ds4_scripted_disk *disk, const struct ds4_kv_op *op)
{
    struct ds4_scripted_staging *staging = find_staging(disk, op->staging);
    struct ds4_scripted_stage *stage = disk->stage;
    const struct ds4_scripted_part *part;

    if (op->kind == DS4_KV_STAGED_DROP) {
        if (staging != NULL)
            drop_staging(disk, staging);
        return NULL;
    }
    if (staging == NULL)
        return "install of a staging that is not there";
    part = &staging->part;
    if (op->n_block != 0 && (op->n_block != ds4_budget_blocks(part->end - part->begin) ||
                             op->first_block != part->begin / DS4_BLOCK_TOK))
        return "other blocks than the staging has";
    for (int32_t b = 0; b < op->n_block; b++)
        if (stage->users[op->block[b]] > 0)
            return "rows from disk into a block in use";
    for (int32_t p = part->begin; p < part->end && op->n_block > 0; p++)
        stage->cell[(size_t)op->block[(p - part->begin) / DS4_BLOCK_TOK] * DS4_BLOCK_TOK +
                    (size_t)(p % DS4_BLOCK_TOK)] = part->cell[p - part->begin];
    if (op->point != 0) {
        if (!part->tail)
            return "a point out of an extent";
        ds4_scripted_add_point(stage, op->point, part->end, part->hash);
    }
    drop_staging(disk, staging);
    return NULL;
}
