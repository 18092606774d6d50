/* Restore points: positions whose rings the stages keep in host memory under a number of ours.
 *
 *   wanted --post--> saving --acknowledged--> ready --drop--> gone
 *
 * An anchor lies at a multiple of DS4_ANCHOR_TOK and is small, because no block of any compressor is
 * open there; a tail lies anywhere.  Every stage keeps every point and has a budget of its own, which is
 * counted here with the formula of proto/point.h: below it no save can fail.  What does not fit pushes
 * out others, never pinned ones: first the oldest of those that are far apart, then the dense ones, then
 * tails, and those at message boundaries last.
 *
 * Invariant: each stage's used_bytes is the sum over all points; a point is at most on one node, and in the list
 * of its class exactly while it can be given up: who looks for a victim passes by no other. */
#ifndef DS4_ROUTER_SCHED_POINT_H
#define DS4_ROUTER_SCHED_POINT_H

#include "common/err.h"
#include "common/vec.h"
#include "proto/message.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_ANCHOR_SPARSE_TOK 1024 /* kept everywhere */
#define DS4_ANCHOR_DENSE_TOK  8192 /* every anchor is kept over the newest tokens, */
#define DS4_ANCHOR_EARLY_TOK  4096 /* and over the first, where system prompts part */

/* In the order in which they are given up. */
enum ds4_point_class {
    DS4_POINT_SPARSE,
    DS4_POINT_DENSE,
    DS4_POINT_TAIL,     /* exact: end of a prompt or a turn */
    DS4_POINT_BOUNDARY, /* where a message begins */
    DS4_N_POINT_CLASS,
    DS4_POINT_HELD = DS4_N_POINT_CLASS, /* the list of those that cannot be given up now */
    DS4_N_POINT_LIST
};

struct ds4_prefix_node;

struct ds4_point {
    uint64_t id;
    int32_t pos;
    enum ds4_point_class class;
    int64_t save_step; /* the step that saves it; -1 = not posted yet */
    bool turn_end;     /* the whole of an answer's end: worth keeping on disk */
    bool fresh;        /* in the list of that name */
    bool
        ready; /* the step that saves it is acknowledged; a stage that saves later is told to use it later
                 * still, for all obey steps in their order */
    int32_t pins;                    /* admitted requests that will start from it */
    int32_t list;                    /* its class, or DS4_POINT_HELD */
    struct ds4_prefix_node *node;    /* where it hangs; NULL = its sequence has it still */
    struct ds4_point *next;          /* of the same node */
    struct ds4_point *older, *newer; /* of the same list */
};

/* A point to be saved by the next step, from this slot. */
struct ds4_save {
    struct ds4_point *point;
    uint64_t seq;
    int32_t slot;
    uint32_t epoch;
};

/* Host memory of the stages, and what they say of their disks, from HELLO and FORM. */
struct ds4_kv_host {
    int32_t n_stage;    /* 0: no points */
    int32_t hot_tok;    /* the least hot window of the stages; 0 = not said */
    int32_t replay_tok; /* tokens after which rings that began empty are exact; 0 = not said */
    bool disk;          /* every stage has a disk tier, all of one fingerprint */
    bool local;         /* all on the router's host */
    uint8_t fingerprint[DS4_ID_BYTES];
    struct {
        struct ds4_point_shape shape;
        int32_t unit_bytes;
        int64_t max_bytes;
        int64_t used_bytes; /* by points */
        int64_t held_bytes; /* by what is read from disk */
        int64_t block_bytes;
        int32_t first_layer;
        int32_t last_layer; /* exclusive */
    } stage[DS4_MAX_STAGES];
};

struct ds4_points {
    struct ds4_kv_host host;
    uint64_t next_id;
    int32_t n_point;
    struct ds4_point *oldest[DS4_N_POINT_LIST], *newest[DS4_N_POINT_LIST];
    DS4_VEC(struct ds4_save) wanted;
    DS4_VEC(struct ds4_point *) saving;
    DS4_VEC(uint64_t) dropped; /* ids the stages are to forget */
    bool watched;              /* somebody looks at the list below: those that became ready */
    DS4_VEC(struct ds4_point *) fresh;
    uint64_t n_thinned;          /* dropped for room */
    struct ds4_metrics *metrics; /* borrowed; NULL: nobody counts */
};

/* host may be NULL: no points at all; metrics too. */
void ds4_points_init(struct ds4_points *points, const struct ds4_kv_host *host,
                     struct ds4_metrics *metrics);
/* Frees all points, those of nodes and sequences too. */
void ds4_points_deinit(struct ds4_points *points);

/* Which class a point at `pos` has, tails and boundaries told apart by the caller. */
enum ds4_point_class ds4_point_class_at(int32_t pos);

/* A point that the next step will save from the given slot; NULL if there is no room for it or no
 * memory, which costs computing later and nothing else. */
struct ds4_point *ds4_points_want(struct ds4_points *points, const struct ds4_save *where,
                                  int32_t pos, enum ds4_point_class class);
/* The first n wanted ones are in step step_no. */
void ds4_points_posted(struct ds4_points *points, int32_t n, int64_t step_no);
/* The last stage has acknowledged all steps up to step_no. */
void ds4_points_acked(struct ds4_points *points, int64_t step_no);

/* A point the stages get from a staging in step step_no: what was held for it becomes the point's.  NULL
 * without memory. */
struct ds4_point *ds4_points_adopt(struct ds4_points *points, int32_t pos,
                                   enum ds4_point_class class, int64_t step_no);
/* Memory beside the points, bytes[n_stage] in whole units; gives up points for it, boundaries excepted.
 * False: it cannot be had, and nothing was given up. */
bool ds4_points_hold(struct ds4_points *points, const int64_t *bytes);
void ds4_points_let_go(struct ds4_points *points, const int64_t *bytes);

/* Does a save from this slot wait for its step? */
bool ds4_points_waits_for(const struct ds4_points *points, int32_t slot);

/* The slot is to be closed: what was still to be saved from it is dropped. */
void ds4_points_forget_slot(struct ds4_points *points, int32_t slot);

/* Somebody will start from it: it stays until as many have let go. */
void ds4_points_pin(struct ds4_points *points, struct ds4_point *point);
void ds4_points_unpin(struct ds4_points *points, struct ds4_point *point);
/* It hangs on this node from now on (ds4_prefix_attach). */
void ds4_points_hang(struct ds4_points *points, struct ds4_point *point,
                     struct ds4_prefix_node *node);
/* It was of use. */
void ds4_points_touch(struct ds4_points *points, struct ds4_point *point);
/* Takes it off its node and frees it; the stages are told if they know it. */
void ds4_points_drop(struct ds4_points *points, struct ds4_point *point);
/* What the fullest stage uses of its budget. */
int64_t ds4_points_used_bytes(const struct ds4_points *points);
/* Of all stages: points and what is held beside them; a point at `pos`; a cache block on the devices. */
int64_t ds4_points_all_bytes(const struct ds4_points *points);
int64_t ds4_points_bytes_at(const struct ds4_points *points, int32_t pos);
int64_t ds4_points_block_bytes(const struct ds4_points *points);
/* Recounts; -1 with DS4_E_BUG. */
int ds4_points_check(const struct ds4_points *points, struct ds4_err *err) DS4_MUST_CHECK;

#endif
