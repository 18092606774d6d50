/* Units of host memory (see kv_host.h).
 *
 * A free list through an index table: taking and giving touch n_unit integers and no memory of the arena;
 * a unit that was never used costs no physical page, nor does its place in the table.  Upstream servers grow such pools on demand and
 * then write where growing had failed; here the size is fixed and the count is the proof.
 *
 * Invariant: every unit is in exactly one chain; n_used counts those of blobs. */
#include "worker/kv_host.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static int32_t units_of(const struct ds4_kv_host *host, size_t bytes)
{
    return (int32_t)((bytes + host->unit_bytes - 1) / host->unit_bytes);
}

int ds4_kv_host_init(struct ds4_kv_host *host, void *base, size_t unit_bytes, int32_t n_unit,
                     struct ds4_err *err)
{
    memset(host, 0, sizeof(*host));
    host->base = base;
    host->unit_bytes = unit_bytes;
    host->n_unit = n_unit;
    pthread_mutex_init(&host->lock, NULL);
    host->next = calloc(n_unit > 0 ? (size_t)n_unit : 1, sizeof(*host->next));
    if (host->next == NULL) {
        ds4_kv_host_deinit(host);
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a table of %d units", n_unit);
    }
    ds4_kv_host_reset(host, 0);
    return 0;
}

void ds4_kv_host_deinit(struct ds4_kv_host *host)
{
    if (host->unit_bytes == 0)
        return;
    free(host->next);
    pthread_mutex_destroy(&host->lock);
    memset(host, 0, sizeof(*host));
}

void ds4_kv_host_reset(struct ds4_kv_host *host, int64_t budget_bytes)
{
    int64_t n_limit = budget_bytes / (int64_t)host->unit_bytes;

    pthread_mutex_lock(&host->lock);
    host->first_free = -1;
    host->n_fresh = 0;
    host->n_used = 0;
    host->n_limit = n_limit < host->n_unit ? (int32_t)n_limit : host->n_unit;
    pthread_mutex_unlock(&host->lock);
}

/* There is one: n_fresh - n_used units are in the free chain, and n_used < n_unit. */
static int32_t pop_unit(struct ds4_kv_host *host)
{
    int32_t u = host->first_free;

    if (u < 0)
        return host->n_fresh++;
    host->first_free = host->next[u];
    return u;
}

int ds4_kv_host_take(struct ds4_kv_host *host, size_t bytes, struct ds4_kv_blob *blob,
                     struct ds4_err *err)
{
    int32_t n_unit = units_of(host, bytes);
    int32_t n_free, last;

    memset(blob, 0, sizeof(*blob));
    if (n_unit == 0)
        return 0;
    pthread_mutex_lock(&host->lock);
    n_free = host->n_limit - host->n_used;
    if (n_unit > n_free) {
        pthread_mutex_unlock(&host->lock);
        return ds4_fail(err, DS4_E_NOMEM,
                        "%zu bytes of host memory are %d units of %zu, the budget has %d left",
                        bytes, n_unit, host->unit_bytes, n_free);
    }
    last = pop_unit(host);
    *blob = (struct ds4_kv_blob){last, n_unit, bytes};
    for (int32_t u = 1; u < n_unit; u++) {
        host->next[last] = pop_unit(host);
        last = host->next[last];
    }
    host->next[last] = -1;
    host->n_used += n_unit;
    pthread_mutex_unlock(&host->lock);
    return 0;
}

void ds4_kv_host_give(struct ds4_kv_host *host, struct ds4_kv_blob *blob)
{
    int32_t last = blob->first;

    if (blob->n_unit == 0)
        return;
    pthread_mutex_lock(&host->lock);
    for (int32_t u = 1; u < blob->n_unit; u++)
        last = host->next[last];
    assert(host->next[last] == -1 && host->n_used >= blob->n_unit);
    host->next[last] = host->first_free;
    host->first_free = blob->first;
    host->n_used -= blob->n_unit;
    pthread_mutex_unlock(&host->lock);
    memset(blob, 0, sizeof(*blob));
}

int64_t ds4_kv_host_used_bytes(struct ds4_kv_host *host)
{
    int64_t bytes;

    pthread_mutex_lock(&host->lock);
    bytes = (int64_t)host->n_used * (int64_t)host->unit_bytes;
    pthread_mutex_unlock(&host->lock);
    return bytes;
}

struct ds4_kv_cursor ds4_kv_cursor_at(const struct ds4_kv_host *host,
                                      const struct ds4_kv_blob *blob, size_t offset)
{
    struct ds4_kv_cursor c = {.host = host, .unit = blob->first, .left = blob->bytes - offset};

    assert(offset <= blob->bytes);
    if (c.left == 0)
        return c;
    for (; offset >= host->unit_bytes; offset -= host->unit_bytes)
        c.unit = host->next[c.unit];
    c.used = offset;
    return c;
}

uint8_t *ds4_kv_cursor_next(struct ds4_kv_cursor *c, size_t max, size_t *n)
{
    size_t here;
    uint8_t *at;

    if (c->left > 0 && c->used == c->host->unit_bytes) {
        c->unit = c->host->next[c->unit];
        c->used = 0;
    }
    here = c->host->unit_bytes - c->used;
    *n = max < here ? max : here;
    if (*n > c->left)
        *n = c->left;
    at = c->host->base + (size_t)c->unit * c->host->unit_bytes + c->used;
    c->used += *n;
    c->left -= *n;
    return at;
}
