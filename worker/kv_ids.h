/* Ids of the router -> small numbers of ours: a hash table of fixed size that never allocates. */
#ifndef DS4_WORKER_KV_IDS_H
#define DS4_WORKER_KV_IDS_H

#include "common/err.h"

#include <stdint.h>

struct ds4_kv_id {
    uint64_t id; /* 0: the place is free */
    int32_t value;
};
struct ds4_kv_ids {
    struct ds4_kv_id *at; /* [mask + 1], owned */
    uint32_t mask;
    int32_t n;
    int32_t max;
};

/* Room for `max` ids.  DS4_E_NOMEM. */
int ds4_kv_ids_init(struct ds4_kv_ids *ids, int32_t max, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_kv_ids_deinit(struct ds4_kv_ids *ids);
void ds4_kv_ids_clear(struct ds4_kv_ids *ids);

/* The value of an id, or -1. */
int32_t ds4_kv_ids_find(const struct ds4_kv_ids *ids, uint64_t id);
/* DS4_E_PROTOCOL if the id is 0 or there already; DS4_E_NOMEM above `max`. */
int ds4_kv_ids_put(struct ds4_kv_ids *ids, uint64_t id, int32_t value,
                   struct ds4_err *err) DS4_MUST_CHECK;
/* Removes the id and returns its value, or -1. */
int32_t ds4_kv_ids_take(struct ds4_kv_ids *ids, uint64_t id);

#endif
