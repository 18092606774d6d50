/* What is on disk, as the router knows it: commits, and the objects (extents and tails) they are made of.
 *
 * Objects are shared: a conversation that goes on adds extents and a tail, and a commit refers to all it
 * needs.  An object that no commit refers to any more is garbage: the caller is told its files and has the
 * stages remove them.  The cap counts every file once, and what is being written before it is there.
 *
 * Who goes (kv-cache.md 2.3, 3.5): the commit of least value, which is what computing its own tokens again
 * would cost, over the bytes that only it holds, times how often it was wanted; more where many
 * conversations begin.  Not one in use, one wanted lately, nor one that was stored or used within
 * DS4_CATALOG_KEEP_NS unless it is worth less than half of what comes: two conversations that fit only one
 * at a time would otherwise push each other out for ever.  Later it may be worth up to twice as much.
 *
 * Pure; one thread; time is handed in (unix, so that it outlives the process). */
#ifndef DS4_ROUTER_DISK_CATALOG_H
#define DS4_ROUTER_DISK_CATALOG_H

#include "common/err.h"
#include "common/vec.h"
#include "router/disk/manifest.h"

#include <stdbool.h>
#include <stdint.h>

#include <xxhash.h>

#define DS4_CATALOG_KEEP_NS (INT64_C(600) * 1000000000)

struct ds4_catalog;

/* An extent or a tail that is on disk, or on its way there. */
struct ds4_disk_object {
    uint8_t key[DS4_ID_BYTES];
    enum ds4_kv_part_kind kind;
    int32_t begin; /* tokens whose rows it has */
    int32_t end;
    int32_t n_file;
    struct ds4_kv_part_ref *file; /* owned */
    uint64_t bytes;
    int32_t refs; /* commits, and a save under way */
    struct ds4_disk_object *next;
};

struct ds4_commit {
    uint8_t id[DS4_ID_BYTES];
    uint8_t floor_key[DS4_ID_BYTES];
    int32_t pos;
    bool shared;   /* many conversations may begin so */
    bool denied;   /* could not be read: not tried again before the tier's owner says so */
    bool bad;      /* failed a check: goes once nobody is at it */
    int32_t pins;  /* reads under way */
    int32_t n_bad; /* generations that ended right after it was installed */
    int32_t n_object;
    struct ds4_disk_object **object; /* owned array; the last is the tail */
    uint64_t bytes;                  /* of the manifest */
    double hits;                     /* at used_ns; halves with time */
    int64_t used_ns;                 /* stored or used last */
    int64_t wanted_ns;               /* a waiting prompt has it until then */
    struct ds4_commit *next;         /* of its bucket */
    struct ds4_commit *next_id;      /* of the bucket of its id */
    int32_t index;
};

DS4_VEC_TYPE(ds4_commits, struct ds4_commit *);
DS4_VEC_TYPE(ds4_disk_objects, struct ds4_disk_object *);

/* max_bytes: the cap.  NULL with DS4_E_NOMEM. */
struct ds4_catalog *ds4_catalog_new(uint64_t max_bytes, struct ds4_err *err);
void ds4_catalog_free(struct ds4_catalog *c);

/* The longest commit of the first tokens, of at least least + 1 and at most `most` of them, in the chain that
 * begins at `root` (a salt's); NULL if there is none.  By names: whoever uses it compares the manifest's
 * tokens. */
struct ds4_commit *ds4_catalog_find(const struct ds4_catalog *c, const int32_t *token, int32_t most,
                                    XXH128_hash_t root, int32_t least);
struct ds4_commit *ds4_catalog_by_id(const struct ds4_catalog *c, const uint8_t id[DS4_ID_BYTES]);
/* It is used now. */
void ds4_catalog_use(struct ds4_catalog *c, struct ds4_commit *commit, int64_t now_ns);

/* A manifest that is on disk, with the files it names; takes references to its objects.  DS4_E_NOMEM, and
 * DS4_E_INVALID if one object has other files under the same name already, or the id is known. */
struct ds4_commit *ds4_catalog_add(struct ds4_catalog *c, const struct ds4_manifest *m,
                                   int64_t now_ns, struct ds4_err *err);
/* Forgets it; objects nobody refers to any more are moved to `garbage`, whose elements the caller frees with
 * ds4_disk_object_free. */
void ds4_catalog_remove(struct ds4_catalog *c, struct ds4_commit *commit,
                        struct ds4_disk_objects *garbage);

struct ds4_disk_object *ds4_catalog_object(const struct ds4_catalog *c,
                                           const uint8_t key[DS4_ID_BYTES], bool tail);
/* A save refers to an object, or stops to. */
void ds4_catalog_hold(struct ds4_disk_object *object);
void ds4_catalog_let_go(struct ds4_catalog *c, struct ds4_disk_object *object,
                        struct ds4_disk_objects *garbage);
/* An object that was written just now, with one reference.  DS4_E_NOMEM. */
struct ds4_disk_object *ds4_catalog_put_object(struct ds4_catalog *c,
                                               const struct ds4_disk_object *like,
                                               struct ds4_err *err);
void ds4_disk_object_free(struct ds4_disk_object *object);

/* What a new commit asks for. */
struct ds4_catalog_ask {
    uint64_t bytes;    /* it adds */
    int32_t own_begin; /* tokens from here on are on disk in no other commit */
    int32_t pos;       /* of the commit */
    bool shared;
    struct ds4_commits
        *superseded; /* NULL, or room for commits of its own chain, which go for free */
    int64_t now_ns;
};
/* The commits that have to go for it, into `victims` in the order of their going (none, if there is room).
 * False: it is not worth that, and nothing is to be written. */
bool ds4_catalog_make_room(struct ds4_catalog *c, const struct ds4_catalog_ask *ask,
                           struct ds4_commits *victims);
/* Bytes on their way to the disk, or (negative) no longer. */
void ds4_catalog_reserve(struct ds4_catalog *c, int64_t bytes);
/* True while the sum is above the cap. */
bool ds4_catalog_is_over(const struct ds4_catalog *c);
/* The least ones at any price, the first to go first; their number, 0 if all are in use.  One pass over all
 * commits: for a cap that has become smaller. */
#define DS4_CATALOG_MANY 64
int32_t ds4_catalog_least(const struct ds4_catalog *c, int64_t now_ns,
                          struct ds4_commit *victim[DS4_CATALOG_MANY]);

uint64_t ds4_catalog_bytes(const struct ds4_catalog *c); /* files and manifests */
int32_t ds4_catalog_n(const struct ds4_catalog *c);
struct ds4_commit *ds4_catalog_at(const struct ds4_catalog *c, int32_t i); /* any order */

/* Recounts references and bytes; -1 with DS4_E_BUG naming what is off. */
int ds4_catalog_check(const struct ds4_catalog *c, struct ds4_err *err) DS4_MUST_CHECK;

#endif
