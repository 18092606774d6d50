/* Open addressing with linear probing, at most half full; removal shifts the run back, so there are no
 * marks of removed ids and a table that lives for months stays as fast as a new one.  Our own because the
 * packaged tables allocate per entry, and nothing is allocated after "ready". */
#include "worker/kv_ids.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* splitmix64's finisher: the router counts its ids up, which must not become runs. */
static uint32_t home_of(const struct ds4_kv_ids *ids, uint64_t id)
{
    id = (id ^ (id >> 30)) * 0xbf58476d1ce4e5b9;
    id = (id ^ (id >> 27)) * 0x94d049bb133111eb;
    return (uint32_t)(id ^ (id >> 31)) & ids->mask;
}

int ds4_kv_ids_init(struct ds4_kv_ids *ids, int32_t max, struct ds4_err *err)
{
    uint32_t cap = 16;

    while (cap < 2 * (uint32_t)max)
        cap *= 2;
    *ids = (struct ds4_kv_ids){.at = calloc(cap, sizeof(*ids->at)), .mask = cap - 1, .max = max};
    if (ids->at == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a table of %d ids", max);
    return 0;
}

void ds4_kv_ids_deinit(struct ds4_kv_ids *ids)
{
    free(ids->at);
    memset(ids, 0, sizeof(*ids));
}

void ds4_kv_ids_clear(struct ds4_kv_ids *ids)
{
    if (ids->n > 0) /* an empty table is all zero, and may never have been touched */
        memset(ids->at, 0, ((size_t)ids->mask + 1) * sizeof(*ids->at));
    ids->n = 0;
}

/* The place of an id, or of the free place where its search ends. */
static uint32_t place_of(const struct ds4_kv_ids *ids, uint64_t id)
{
    uint32_t p = home_of(ids, id);

    while (ids->at[p].id != 0 && ids->at[p].id != id)
        p = (p + 1) & ids->mask;
    return p;
}

int32_t ds4_kv_ids_find(const struct ds4_kv_ids *ids, uint64_t id)
{
    const struct ds4_kv_id *at = &ids->at[place_of(ids, id)];

    return id != 0 && at->id == id ? at->value : -1;
}

int ds4_kv_ids_put(struct ds4_kv_ids *ids, uint64_t id, int32_t value, struct ds4_err *err)
{
    uint32_t p = place_of(ids, id);

    if (id == 0 || ids->at[p].id == id)
        return ds4_fail(err, DS4_E_PROTOCOL, "id %" PRIu64 " is in use", id);
    if (ids->n == ids->max)
        return ds4_fail(err, DS4_E_NOMEM, "more than %d ids", ids->max);
    ids->at[p] = (struct ds4_kv_id){id, value};
    ids->n++;
    return 0;
}

int32_t ds4_kv_ids_take(struct ds4_kv_ids *ids, uint64_t id)
{
    uint32_t hole = place_of(ids, id);
    int32_t value = ids->at[hole].value;

    if (id == 0 || ids->at[hole].id != id)
        return -1;
    for (uint32_t p = (hole + 1) & ids->mask; ids->at[p].id != 0; p = (p + 1) & ids->mask) {
        uint32_t home = home_of(ids, ids->at[p].id);

        /* An entry may move back to the hole unless its home lies behind the hole. */
        if (((p - home) & ids->mask) >= ((p - hole) & ids->mask)) {
            ids->at[hole] = ids->at[p];
            hole = p;
        }
    }
    ids->at[hole] = (struct ds4_kv_id){0};
    ids->n--;
    return value;
}
