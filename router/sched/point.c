/* Restore points in the stages' host memory (step 4).
 *
 * The idea of kv-cache.md 1.5: rings reach back a hot window only, so what lies further back is saved
 * while it passes by, and a cut computes again from the nearest point below it.
 * The oldest of the lowest class goes first, so a flood of routine points cannot push out what a shared system
 * prompt begins with.  Those that cannot go now (not saved yet, still their sequence's, pinned) wait in a list of
 * their own, because with many running sequences they are most. */
#include "router/sched/point.h"

#include "common/metrics.h"
#include "proto/point.h"
#include "router/sched/prefix.h"

#include <stdlib.h>

void ds4_points_init(struct ds4_points *p, const struct ds4_kv_host *host,
                     struct ds4_metrics *metrics)
{
    *p = (struct ds4_points){.next_id = 1, .metrics = metrics};
    if (host != NULL)
        p->host = *host;
}

static int64_t cost(const struct ds4_points *p, int32_t stage, int32_t pos)
{
    return ds4_unit_round(ds4_point_bytes(&p->host.stage[stage].shape, pos),
                          p->host.stage[stage].unit_bytes);
}

/* Is there room for so much on every stage, once freed[stage] bytes more are free (NULL: none)? */
static bool has_bytes(const struct ds4_points *p, const int64_t *bytes, const int64_t *freed)
{
    for (int32_t s = 0; s < p->host.n_stage; s++)
        if (p->host.stage[s].used_bytes + p->host.stage[s].held_bytes + bytes[s] -
                (freed == NULL ? 0 : freed[s]) >
            p->host.stage[s].max_bytes)
            return false;
    return p->host.n_stage > 0;
}

static void costs(const struct ds4_points *p, int32_t pos, int64_t *bytes)
{
    for (int32_t s = 0; s < p->host.n_stage; s++)
        bytes[s] = cost(p, s, pos);
}

static void charge(struct ds4_points *p, int32_t pos, int32_t sign)
{
    for (int32_t s = 0; s < p->host.n_stage; s++)
        p->host.stage[s].used_bytes += sign * cost(p, s, pos);
    p->n_point += sign;
}

void ds4_points_deinit(struct ds4_points *p)
{
    for (int32_t c = 0; c < DS4_N_POINT_LIST; c++)
        while (p->oldest[c] != NULL) {
            struct ds4_point *point = p->oldest[c];

            p->oldest[c] = point->newer;
            free(point);
        }
    DS4_VEC_DEINIT(&p->wanted);
    DS4_VEC_DEINIT(&p->saving);
    DS4_VEC_DEINIT(&p->dropped);
    DS4_VEC_DEINIT(&p->fresh);
    *p = (struct ds4_points){0};
}

enum ds4_point_class ds4_point_class_at(int32_t pos)
{
    return pos <= DS4_ANCHOR_EARLY_TOK || pos % DS4_ANCHOR_SPARSE_TOK == 0 ? DS4_POINT_SPARSE
                                                                           : DS4_POINT_DENSE;
}

static void unlink_point(struct ds4_points *p, struct ds4_point *point)
{
    *(point->older != NULL ? &point->older->newer : &p->oldest[point->list]) = point->newer;
    *(point->newer != NULL ? &point->newer->older : &p->newest[point->list]) = point->older;
}

static int32_t list_of(const struct ds4_point *point)
{
    bool can_go = point->pins == 0 && point->node != NULL && point->ready;

    return can_go ? (int32_t)point->class : DS4_POINT_HELD;
}

static void link_newest(struct ds4_points *p, struct ds4_point *point)
{
    point->list = list_of(point);
    point->newer = NULL;
    point->older = p->newest[point->list];
    *(point->older != NULL ? &point->older->newer : &p->oldest[point->list]) = point;
    p->newest[point->list] = point;
}

/* After a change of what list_of looks at. */
static void relist(struct ds4_points *p, struct ds4_point *point)
{
    if (point->list == list_of(point))
        return;
    unlink_point(p, point);
    link_newest(p, point);
}

/* The next to be given up for one of `class`; NULL if all that is left is in use, or worth more. */
static struct ds4_point *victim(const struct ds4_points *p, enum ds4_point_class class)
{
    for (int32_t c = 0; c <= (int32_t) class; c++)
        if (p->oldest[c] != NULL)
            return p->oldest[c];
    return NULL;
}

/* Would giving up victims in turn make room?  Asked first, so that who is refused has cost nobody a point. */
static bool can_make_room(const struct ds4_points *p, const int64_t *bytes,
                          enum ds4_point_class class)
{
    int64_t freed[DS4_MAX_STAGES] = {0};

    for (int32_t c = 0; c <= (int32_t) class; c++)
        for (const struct ds4_point *point = p->oldest[c]; point != NULL; point = point->newer) {
            for (int32_t s = 0; s < p->host.n_stage; s++)
                freed[s] += cost(p, s, point->pos);
            if (has_bytes(p, bytes, freed))
                return true;
        }
    return false;
}

static bool make_room(struct ds4_points *p, const int64_t *bytes, enum ds4_point_class class)
{
    if (!has_bytes(p, bytes, NULL) && !can_make_room(p, bytes, class))
        return false;
    while (!has_bytes(p, bytes, NULL)) {
        struct ds4_point *point = victim(p, class);

        p->n_thinned++;
        ds4_metric_add(p->metrics, DS4_M_KV_EVICTIONS, 1, "host", "capacity");
        ds4_metric_add(p->metrics, DS4_M_KV_EVICTED_BYTES,
                       (double)ds4_points_bytes_at(p, point->pos), "host", "capacity");
        ds4_points_drop(p, point);
    }
    return true;
}

bool ds4_points_hold(struct ds4_points *p, const int64_t *bytes)
{
    if (!make_room(p, bytes, DS4_POINT_TAIL))
        return false;
    for (int32_t s = 0; s < p->host.n_stage; s++)
        p->host.stage[s].held_bytes += bytes[s];
    return true;
}

void ds4_points_let_go(struct ds4_points *p, const int64_t *bytes)
{
    for (int32_t s = 0; s < p->host.n_stage; s++)
        p->host.stage[s].held_bytes -= bytes[s];
}

static struct ds4_point *new_point(struct ds4_points *p, int32_t pos, enum ds4_point_class class)
{
    struct ds4_point *point = calloc(1, sizeof(*point));

    if (point == NULL)
        return NULL;
    point->id = p->next_id++;
    point->pos = pos;
    point->class = class;
    point->save_step = -1;
    charge(p, pos, 1);
    link_newest(p, point);
    return point;
}

struct ds4_point *ds4_points_adopt(struct ds4_points *p, int32_t pos, enum ds4_point_class class,
                                   int64_t step_no)
{
    struct ds4_point *point = new_point(p, pos, class);

    if (point == NULL)
        return NULL;
    point->save_step = step_no;
    point->ready = true; /* whoever uses it is told later than who makes it */
    return point;
}

struct ds4_point *ds4_points_want(struct ds4_points *p, const struct ds4_save *where, int32_t pos,
                                  enum ds4_point_class class)
{
    struct ds4_save save = *where;
    int64_t bytes[DS4_MAX_STAGES] = {0};

    costs(p, pos, bytes);
    if (!make_room(p, bytes, class) || DS4_VEC_RESERVE(&p->wanted, p->wanted.len + 1) != 0)
        return NULL;
    save.point = new_point(p, pos, class);
    if (save.point == NULL)
        return NULL;
    p->wanted.ptr[p->wanted.len++] = save;
    return save.point;
}

void ds4_points_posted(struct ds4_points *p, int32_t n, int64_t step_no)
{
    if (n == 0)
        return;
    for (int32_t i = 0; i < n; i++) {
        struct ds4_point *point = p->wanted.ptr[i].point;

        point->save_step = step_no;
        ds4_metric_add(p->metrics, DS4_M_KV_IO_BYTES, (double)ds4_points_bytes_at(p, point->pos),
                       "host", "write");
        /* Without memory it never becomes ready and waits for its node's end. */
        (void)DS4_VEC_PUSH(&p->saving, point);
    }
    p->wanted.len -= (size_t)n;
    memmove(p->wanted.ptr, p->wanted.ptr + n, p->wanted.len * sizeof(*p->wanted.ptr));
}

void ds4_points_acked(struct ds4_points *p, int64_t step_no)
{
    size_t n = 0;

    for (size_t i = 0; i < p->saving.len; i++) {
        struct ds4_point *point = p->saving.ptr[i];

        if (point->save_step > step_no) {
            p->saving.ptr[n++] = point;
            continue;
        }
        point->ready = true;
        point->fresh = p->watched && DS4_VEC_PUSH(&p->fresh, point) == 0;
        relist(p, point);
    }
    p->saving.len = n;
}

bool ds4_points_waits_for(const struct ds4_points *p, int32_t slot)
{
    for (size_t i = 0; i < p->wanted.len; i++)
        if (p->wanted.ptr[i].slot == slot)
            return true;
    return false;
}

void ds4_points_forget_slot(struct ds4_points *p, int32_t slot)
{
    for (size_t i = p->wanted.len; i > 0; i--)
        if (p->wanted.ptr[i - 1].slot == slot)
            ds4_points_drop(p, p->wanted.ptr[i - 1].point);
}

void ds4_points_pin(struct ds4_points *p, struct ds4_point *point)
{
    point->pins++;
    relist(p, point);
}

void ds4_points_unpin(struct ds4_points *p, struct ds4_point *point)
{
    point->pins--;
    relist(p, point);
}

void ds4_points_hang(struct ds4_points *p, struct ds4_point *point, struct ds4_prefix_node *node)
{
    point->node = node;
    relist(p, point);
}

void ds4_points_touch(struct ds4_points *p, struct ds4_point *point)
{
    unlink_point(p, point);
    link_newest(p, point);
}

/* No list may go on pointing to it. */
static void forget_save(struct ds4_points *p, const struct ds4_point *point)
{
    for (size_t i = 0; point->fresh && i < p->fresh.len; i++)
        if (p->fresh.ptr[i] == point) {
            p->fresh.ptr[i] = p->fresh.ptr[--p->fresh.len];
            break;
        }

    for (size_t i = 0; i < p->wanted.len; i++)
        if (p->wanted.ptr[i].point == point) {
            p->wanted.len--;
            memmove(p->wanted.ptr + i, p->wanted.ptr + i + 1,
                    (p->wanted.len - i) * sizeof(*p->wanted.ptr));
            break;
        }
    for (size_t i = 0; i < p->saving.len; i++)
        if (p->saving.ptr[i] == point) {
            p->saving.ptr[i] = p->saving.ptr[--p->saving.len];
            break;
        }
}

void ds4_points_drop(struct ds4_points *p, struct ds4_point *point)
{
    if (point->node != NULL)
        ds4_prefix_detach(point);
    if (!point->ready || point->fresh)
        forget_save(p, point);
    /* A stage that never hears of the drop only keeps some bytes longer. */
    if (point->save_step >= 0)
        (void)DS4_VEC_PUSH(&p->dropped, point->id);
    unlink_point(p, point);
    charge(p, point->pos, -1);
    free(point);
}

int64_t ds4_points_used_bytes(const struct ds4_points *p)
{
    int64_t most = 0;

    for (int32_t s = 0; s < p->host.n_stage; s++)
        if (p->host.stage[s].used_bytes > most)
            most = p->host.stage[s].used_bytes;
    return most;
}

int64_t ds4_points_all_bytes(const struct ds4_points *p)
{
    int64_t bytes = 0;

    for (int32_t s = 0; s < p->host.n_stage; s++)
        bytes += p->host.stage[s].used_bytes + p->host.stage[s].held_bytes;
    return bytes;
}

int64_t ds4_points_bytes_at(const struct ds4_points *p, int32_t pos)
{
    int64_t bytes = 0;

    for (int32_t s = 0; s < p->host.n_stage; s++)
        bytes += cost(p, s, pos);
    return bytes;
}

int64_t ds4_points_block_bytes(const struct ds4_points *p)
{
    int64_t bytes = 0;

    for (int32_t s = 0; s < p->host.n_stage; s++)
        bytes += p->host.stage[s].block_bytes;
    return bytes;
}

int ds4_points_check(const struct ds4_points *p, struct ds4_err *err)
{
    int64_t used[DS4_MAX_STAGES] = {0};
    int32_t n = 0;

    for (int32_t c = 0; c < DS4_N_POINT_LIST; c++)
        for (const struct ds4_point *point = p->oldest[c]; point != NULL; point = point->newer) {
            if (point->list != c || point->list != list_of(point))
                return ds4_fail(err, DS4_E_BUG, "point at %d is in list %d of %d", point->pos, c,
                                list_of(point));
            for (int32_t s = 0; s < p->host.n_stage; s++)
                used[s] += cost(p, s, point->pos);
            n++;
        }
    if (n != p->n_point)
        return ds4_fail(err, DS4_E_BUG, "%d points, the books say %d", n, p->n_point);
    for (int32_t s = 0; s < p->host.n_stage; s++)
        if (used[s] != p->host.stage[s].used_bytes || p->host.stage[s].held_bytes < 0 ||
            used[s] + p->host.stage[s].held_bytes > p->host.stage[s].max_bytes)
            return ds4_fail(err, DS4_E_BUG, "points of stage %d take %lld bytes, books %lld", s,
                            (long long)used[s], (long long)p->host.stage[s].used_bytes);
    return 0;
}
