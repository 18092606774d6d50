/* The catalogue of the disk tier (see the header).
 *
 * Two tables: commits by the chain key of the last whole chunk below their position, so that a look-up is
 * one walk of hashing over the prompt; objects by their key.  Values are computed when somebody has to go:
 * that is rare, and there are thousands of commits, not millions.
 * Invariant: an object's refs are the commits that list it plus the saves that hold it; `bytes` is the sum
 * over all objects and manifests. */
#include "router/disk/catalog.h"

#include "router/sched/chain.h"

#include <stdlib.h>
#include <string.h>

#define N_BUCKET         65536
#define HALF_LIFE_NS     (INT64_C(6) * 3600 * 1000000000)
#define SHARED_BOOST     4.0
#define DEPTH_DOUBLE_TOK 65536.0 /* so deep, a token costs twice as much to compute */
#define MUCH_BETTER      2.0 /* what comes pushes out what is fresh only if worth so much more */

struct ds4_catalog {
    uint64_t max_bytes;
    uint64_t bytes;
    int64_t reserved_bytes;
    struct ds4_commits commit;
    struct ds4_commit **bucket;      /* [N_BUCKET] by floor key */
    struct ds4_commit **by_id;       /* [N_BUCKET] */
    struct ds4_disk_object **object; /* [N_BUCKET] by key */
};

static size_t slot_of(const uint8_t key[DS4_ID_BYTES])
{
    return (size_t)key[0] | (size_t)key[1] << 8;
}

struct ds4_catalog *ds4_catalog_new(uint64_t max_bytes, struct ds4_err *err)
{
    struct ds4_catalog *c = calloc(1, sizeof(*c));

    if (c == NULL)
        goto fail;
    c->max_bytes = max_bytes;
    c->bucket = calloc(N_BUCKET, sizeof(struct ds4_commit *));
    c->by_id = calloc(N_BUCKET, sizeof(struct ds4_commit *));
    c->object = calloc(N_BUCKET, sizeof(struct ds4_disk_object *));
    if (c->bucket != NULL && c->by_id != NULL && c->object != NULL)
        return c;
fail:
    ds4_catalog_free(c);
    ds4_fail(err, DS4_E_NOMEM, "no memory for the catalogue of the disk tier");
    return NULL;
}

static void free_commit(struct ds4_commit *commit)
{
    free(commit->object);
    free(commit);
}

void ds4_disk_object_free(struct ds4_disk_object *object)
{
    if (object == NULL)
        return;
    free(object->file);
    free(object);
}

void ds4_catalog_free(struct ds4_catalog *c)
{
    if (c == NULL)
        return;
    for (size_t i = 0; i < c->commit.len; i++)
        free_commit(c->commit.ptr[i]);
    for (size_t i = 0; i < N_BUCKET && c->object != NULL; i++)
        while (c->object[i] != NULL) {
            struct ds4_disk_object *object = c->object[i];

            c->object[i] = object->next;
            ds4_disk_object_free(object);
        }
    DS4_VEC_DEINIT(&c->commit);
    free(c->bucket);
    free(c->by_id);
    free(c->object);
    free(c);
}

/* ---- looking up ------------------------------------------------------------------------------------- */

static bool is_named(const struct ds4_commit *commit, XXH128_hash_t floor, const int32_t *token,
                     int32_t floor_pos)
{
    XXH128_hash_t tail;

    if (commit->pos / DS4_CHUNK_TOK * DS4_CHUNK_TOK != floor_pos ||
        memcmp(commit->floor_key, &floor, DS4_ID_BYTES) != 0)
        return false;
    tail = ds4_chain_next(floor, token + floor_pos, commit->pos - floor_pos);
    return memcmp(commit->object[commit->n_object - 1]->key, &tail, DS4_ID_BYTES) == 0;
}

struct ds4_commit *ds4_catalog_find(const struct ds4_catalog *c, const int32_t *token, int32_t most,
                                    XXH128_hash_t root, int32_t least)
{
    XXH128_hash_t key = root;
    struct ds4_commit *best = NULL;

    for (int32_t at = 0; at <= most && c->commit.len > 0; at += DS4_CHUNK_TOK) {
        uint8_t name[DS4_ID_BYTES];

        memcpy(name, &key, sizeof(name));
        for (struct ds4_commit *commit = c->bucket[slot_of(name)]; commit != NULL;
             commit = commit->next)
            if (commit->pos > least && commit->pos <= most && !commit->denied &&
                (best == NULL || commit->pos > best->pos) && is_named(commit, key, token, at))
                best = commit;
        if (most - at < DS4_CHUNK_TOK)
            break;
        key = ds4_chain_next(key, token + at, DS4_CHUNK_TOK);
    }
    return best;
}

struct ds4_commit *ds4_catalog_by_id(const struct ds4_catalog *c, const uint8_t id[DS4_ID_BYTES])
{
    struct ds4_commit *commit = c->by_id[slot_of(id)];

    while (commit != NULL && memcmp(commit->id, id, DS4_ID_BYTES) != 0)
        commit = commit->next_id;
    return commit;
}

static double decayed(const struct ds4_commit *commit, int64_t now_ns)
{
    double hits = commit->hits;

    for (int64_t age = now_ns - commit->used_ns; age >= HALF_LIFE_NS && hits > 0.01;
         age -= HALF_LIFE_NS)
        hits /= 2;
    return hits;
}

void ds4_catalog_use(struct ds4_catalog *c, struct ds4_commit *commit, int64_t now_ns)
{
    (void)c;
    commit->hits = decayed(commit, now_ns) + 1;
    commit->used_ns = now_ns;
}

/* ---- objects ---------------------------------------------------------------------------------------- */

struct ds4_disk_object *ds4_catalog_object(const struct ds4_catalog *c,
                                           const uint8_t key[DS4_ID_BYTES], bool tail)
{
    struct ds4_disk_object *object = c->object[slot_of(key)];

    while (object != NULL &&
           (memcmp(object->key, key, DS4_ID_BYTES) != 0 || (object->kind != DS4_KV_EXTENT) != tail))
        object = object->next;
    return object;
}

void ds4_catalog_hold(struct ds4_disk_object *object)
{
    object->refs++;
}

void ds4_catalog_let_go(struct ds4_catalog *c, struct ds4_disk_object *object,
                        struct ds4_disk_objects *garbage)
{
    struct ds4_disk_object **at = &c->object[slot_of(object->key)];

    if (--object->refs > 0)
        return;
    while (*at != object)
        at = &(*at)->next;
    *at = object->next;
    c->bytes -= object->bytes;
    /* Without memory its files stay until a later start finds them. */
    if (DS4_VEC_PUSH(garbage, object) != 0)
        ds4_disk_object_free(object);
}

struct ds4_disk_object *ds4_catalog_put_object(struct ds4_catalog *c,
                                               const struct ds4_disk_object *like,
                                               struct ds4_err *err)
{
    struct ds4_disk_object *object = calloc(1, sizeof(*object));
    struct ds4_disk_object **bucket = &c->object[slot_of(like->key)];

    if (object != NULL) {
        *object = *like;
        object->file = malloc((size_t)like->n_file * sizeof(*like->file));
    }
    if (object == NULL || object->file == NULL) {
        free(object);
        ds4_fail(err, DS4_E_NOMEM, "no memory for an object of the disk tier");
        return NULL;
    }
    memcpy(object->file, like->file, (size_t)like->n_file * sizeof(*like->file));
    object->bytes = 0;
    for (int32_t i = 0; i < object->n_file; i++)
        object->bytes += object->file[i].bytes;
    object->refs = 1;
    object->next = *bucket;
    *bucket = object;
    c->bytes += object->bytes;
    return object;
}

/* ---- commits ---------------------------------------------------------------------------------------- */

static struct ds4_disk_object *take_object(struct ds4_catalog *c, const struct ds4_manifest *m,
                                           int32_t i, struct ds4_err *err)
{
    bool tail = i == m->n_object - 1;
    struct ds4_disk_object like = {
        .kind = tail ? m->kind : DS4_KV_EXTENT,
        .begin = i * DS4_EXTENT_TOK,
        .end = tail ? m->pos : (i + 1) * DS4_EXTENT_TOK,
        .n_file = m->object[i].n_file,
        .file = m->file + m->object[i].first_file,
    };
    struct ds4_disk_object *object = ds4_catalog_object(c, m->object[i].key, tail);

    if (object == NULL) {
        memcpy(like.key, m->object[i].key, DS4_ID_BYTES);
        return ds4_catalog_put_object(c, &like, err);
    }
    /* One name has one content: two lists of files mean that one of them is of another time. */
    if (object->end != like.end || object->n_file != like.n_file ||
        memcmp(object->file, like.file, (size_t)like.n_file * sizeof(*like.file)) != 0) {
        ds4_fail(err, DS4_E_INVALID, "another commit has other files of the same part");
        return NULL;
    }
    ds4_catalog_hold(object);
    return object;
}

struct ds4_commit *ds4_catalog_add(struct ds4_catalog *c, const struct ds4_manifest *m,
                                   int64_t now_ns, struct ds4_err *err)
{
    struct ds4_commit *commit;
    struct ds4_disk_objects garbage = {0};
    size_t slot = slot_of(m->floor_key);

    if (ds4_catalog_by_id(c, m->commit) != NULL) {
        ds4_fail(err, DS4_E_INVALID, "a commit of that id is known already");
        return NULL;
    }
    commit = calloc(1, sizeof(*commit));
    if (commit != NULL)
        commit->object = calloc((size_t)m->n_object, sizeof(struct ds4_disk_object *));
    if (commit == NULL || commit->object == NULL ||
        DS4_VEC_RESERVE(&c->commit, c->commit.len + 1) != 0) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a commit");
        goto fail;
    }
    memcpy(commit->id, m->commit, DS4_ID_BYTES);
    memcpy(commit->floor_key, m->floor_key, DS4_ID_BYTES);
    commit->pos = m->pos;
    commit->shared = m->shared;
    commit->bytes = m->bytes;
    commit->used_ns = now_ns;
    for (int32_t i = 0; i < m->n_object; i++) {
        commit->object[i] = take_object(c, m, i, err);
        if (commit->object[i] == NULL)
            goto fail;
        commit->n_object++;
    }
    commit->index = (int32_t)c->commit.len;
    c->commit.ptr[c->commit.len++] = commit;
    commit->next = c->bucket[slot];
    c->bucket[slot] = commit;
    commit->next_id = c->by_id[slot_of(commit->id)];
    c->by_id[slot_of(commit->id)] = commit;
    c->bytes += commit->bytes;
    return commit;

fail:
    /* Objects that were new with it are forgotten: their files are the caller's to judge. */
    for (int32_t i = 0; commit != NULL && commit->object != NULL && i < commit->n_object; i++)
        ds4_catalog_let_go(c, commit->object[i], &garbage);
    for (size_t i = 0; i < garbage.len; i++)
        ds4_disk_object_free(garbage.ptr[i]);
    DS4_VEC_DEINIT(&garbage);
    if (commit != NULL)
        free_commit(commit);
    return NULL;
}

void ds4_catalog_remove(struct ds4_catalog *c, struct ds4_commit *commit,
                        struct ds4_disk_objects *garbage)
{
    struct ds4_commit **at = &c->bucket[slot_of(commit->floor_key)];

    while (*at != commit)
        at = &(*at)->next;
    *at = commit->next;
    at = &c->by_id[slot_of(commit->id)];
    while (*at != commit)
        at = &(*at)->next_id;
    *at = commit->next_id;
    c->commit.ptr[commit->index] = c->commit.ptr[--c->commit.len];
    c->commit.ptr[commit->index]->index = commit->index;
    c->bytes -= commit->bytes;
    for (int32_t i = 0; i < commit->n_object; i++)
        ds4_catalog_let_go(c, commit->object[i], garbage);
    free_commit(commit);
}

/* ---- who goes --------------------------------------------------------------------------------------- */

/* What its own part is worth: cost of computing it again, per byte that goes with it.  Who branches off where
 * many conversations begin has no use for the longer commits of others: all of it counts as its own. */
static double density(double own_tok, int32_t pos, uint64_t bytes, bool shared)
{
    double each = 1 + (double)pos / DEPTH_DOUBLE_TOK;

    if (shared)
        own_tok = pos;
    else if (own_tok < DS4_CHUNK_TOK)
        own_tok = DS4_CHUNK_TOK;
    return own_tok * each * (shared ? SHARED_BOOST : 1) / (double)(bytes + 1);
}

/* References of this commit itself and of others already on the list of victims do not count. */
static bool is_own(const struct ds4_disk_object *object, const struct ds4_commits *gone)
{
    int32_t refs = object->refs;

    for (size_t v = 0; gone != NULL && v < gone->len; v++) {
        const struct ds4_commit *other = gone->ptr[v];
        int32_t i = object->begin / DS4_EXTENT_TOK;

        refs -= i < other->n_object && other->object[i] == object;
    }
    return refs <= 1;
}

static uint64_t freed_by(const struct ds4_commit *commit, const struct ds4_commits *gone,
                         double *own_tok)
{
    uint64_t bytes = commit->bytes;

    *own_tok = 0;
    for (int32_t i = 0; i < commit->n_object; i++)
        if (is_own(commit->object[i], gone)) {
            bytes += commit->object[i]->bytes;
            *own_tok += commit->object[i]->end - commit->object[i]->begin;
        }
    return bytes;
}

static double value_of(const struct ds4_commit *commit, const struct ds4_commits *gone,
                       int64_t now_ns)
{
    double own_tok, value;
    uint64_t bytes = freed_by(commit, gone, &own_tok);

    value = density(own_tok, commit->pos, bytes, commit->shared) * (decayed(commit, now_ns) + 1);
    for (int64_t age = now_ns - commit->used_ns; age >= HALF_LIFE_NS && value > 0;
         age -= HALF_LIFE_NS)
        value /= 2; /* what nobody asks for grows old */
    return value;
}

static bool listed(const struct ds4_commits *list, const struct ds4_commit *commit)
{
    for (size_t i = 0; list != NULL && i < list->len; i++)
        if (list->ptr[i] == commit)
            return true;
    return false;
}

/* The least of those that may go for something worth `better`; *value is its own. */
static struct ds4_commit *least(const struct ds4_catalog *c, const struct ds4_commits *gone,
                                int64_t now_ns, double better)
{
    struct ds4_commit *victim = NULL;
    double lowest = 0;

    for (size_t i = 0; i < c->commit.len; i++) {
        struct ds4_commit *commit = c->commit.ptr[i];
        double value;

        if (commit->pins > 0 || commit->wanted_ns > now_ns || listed(gone, commit))
            continue;
        value = value_of(commit, gone, now_ns);
        if (now_ns - commit->used_ns < DS4_CATALOG_KEEP_NS ? value * MUCH_BETTER > better
                                                           : value > better * MUCH_BETTER)
            continue;
        if (victim == NULL || value < lowest) {
            victim = commit;
            lowest = value;
        }
    }
    return victim;
}

int32_t ds4_catalog_least(const struct ds4_catalog *c, int64_t now_ns,
                          struct ds4_commit *victim[DS4_CATALOG_MANY])
{
    double value[DS4_CATALOG_MANY];
    int32_t n = 0;

    for (size_t i = 0; i < c->commit.len; i++) {
        struct ds4_commit *commit = c->commit.ptr[i];
        double own = value_of(commit, NULL, now_ns);
        int32_t at;

        if (commit->pins > 0 || (n == DS4_CATALOG_MANY && own >= value[n - 1]))
            continue;
        at = n < DS4_CATALOG_MANY ? n++ : n - 1;
        for (; at > 0 && own < value[at - 1]; at--) {
            value[at] = value[at - 1];
            victim[at] = victim[at - 1];
        }
        value[at] = own;
        victim[at] = commit;
    }
    return n;
}

bool ds4_catalog_make_room(struct ds4_catalog *c, const struct ds4_catalog_ask *ask,
                           struct ds4_commits *victims)
{
    double better = density(ask->pos - ask->own_begin, ask->pos, ask->bytes, ask->shared);
    uint64_t used = c->bytes + (uint64_t)(c->reserved_bytes > 0 ? c->reserved_bytes : 0);

    victims->len = 0;
    if (ask->bytes > c->max_bytes)
        return false;
    while (used > c->max_bytes - ask->bytes) {
        struct ds4_commit *next = NULL;
        double own_tok;

        while (next == NULL && ask->superseded != NULL && ask->superseded->len > 0) {
            next = DS4_VEC_POP(ask->superseded);
            if (next->pins > 0 || next->wanted_ns > ask->now_ns || listed(victims, next))
                next = NULL;
        }
        if (next == NULL)
            next = least(c, victims, ask->now_ns, better);
        if (next == NULL)
            return false;
        used -= freed_by(next, victims, &own_tok);
        if (DS4_VEC_PUSH(victims, next) != 0)
            return false;
    }
    return true;
}

/* ---- sums ------------------------------------------------------------------------------------------- */

void ds4_catalog_reserve(struct ds4_catalog *c, int64_t bytes)
{
    c->reserved_bytes += bytes;
}

bool ds4_catalog_is_over(const struct ds4_catalog *c)
{
    return c->bytes > c->max_bytes;
}

uint64_t ds4_catalog_bytes(const struct ds4_catalog *c)
{
    return c->bytes;
}

int32_t ds4_catalog_n(const struct ds4_catalog *c)
{
    return (int32_t)c->commit.len;
}

struct ds4_commit *ds4_catalog_at(const struct ds4_catalog *c, int32_t i)
{
    return c->commit.ptr[i];
}

int ds4_catalog_check(const struct ds4_catalog *c, struct ds4_err *err)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < c->commit.len; i++)
        bytes += c->commit.ptr[i]->bytes;
    for (size_t b = 0; b < N_BUCKET; b++)
        for (const struct ds4_disk_object *object = c->object[b]; object != NULL;
             object = object->next) {
            int32_t refs = 0;

            bytes += object->bytes;
            for (size_t i = 0; i < c->commit.len; i++)
                for (int32_t o = 0; o < c->commit.ptr[i]->n_object; o++)
                    refs += c->commit.ptr[i]->object[o] == object;
            if (object->refs < refs || object->refs < 1)
                return ds4_fail(err, DS4_E_BUG, "an object at %d has %d references, %d counted",
                                object->begin, object->refs, refs);
        }
    if (bytes != c->bytes)
        return ds4_fail(err, DS4_E_BUG, "%llu bytes, the books say %llu", (unsigned long long)bytes,
                        (unsigned long long)c->bytes);
    return 0;
}
