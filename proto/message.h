/* The plain C structs router and worker both think in.  The wire form (proto/ds4.proto) is read and
 * written only by proto/codec.c; limits live there.
 *
 * Order is everything: the router numbers steps 0, 1, 2, ... within a generation; a worker executes
 * them in that order and never decides.  All state a step needs travels with it: sequences are opened
 * and closed inside steps, leases (slot, epoch, block table, cap) come with the entries they allow. */
#ifndef DS4_PROTO_MESSAGE_H
#define DS4_PROTO_MESSAGE_H

#include "common/err.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_WIRE_VERSION     3
#define DS4_MAX_STAGES       64
#define DS4_MAX_STEP_ENTRIES 256
#define DS4_MAX_STEP_TOK     8192
#define DS4_MAX_STOP_IDS     16
#define DS4_MAX_LOGIT_BIAS   1024
#define DS4_MAX_TOP_LOGPROBS 20
#define DS4_MAX_DRAFT        8
#define DS4_MAX_SLOTS        4096
#define DS4_MAX_ALLOWED_IDS  4096
#define DS4_MAX_FORCED_IDS   64
#define DS4_MAX_SEQ_BLOCKS   8192      /* block ids of one entry: 2 Mi positions */
#define DS4_MAX_POS          (1 << 24) /* positions, context and prompt lengths */
#define DS4_ID_BYTES         16
#define DS4_MAX_STEP_OPS     1024
#define DS4_ANCHOR_TOK       128  /* between two places at which points are small */
#define DS4_MAX_INNER_POINTS 16   /* POINT_SAVE of a step inside of its entries */
#define DS4_EXTENT_TOK       1024 /* tokens of an extent part on disk */
#define DS4_PART_BLOCKS      4    /* cache blocks of an extent, and at most of a tail */
#define DS4_MAX_KV_JOBS      64   /* KV_WRITE, KV_READ and KV_UNLINK a stage may have unanswered */
#define DS4_MAX_KV_WRITES    4    /* of them KV_WRITE: each holds a buffer */
#define DS4_POINT_GROUPS     8    /* kinds of compressor in one model */
#define DS4_MAX_PIPE_ID      256  /* bytes */

/* How the last stage picks a token.  Values were range-checked by the router. */
struct ds4_sampling {
    float temperature; /* < 1e-5: greedy */
    int32_t top_k;     /* 0 = off */
    float top_p;       /* 1 = off */
    float min_p;       /* 0 = off */
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty; /* 1 = off; also over the prompt */
    uint64_t seed;            /* counter-based: random number = f(seed, position) */
    int32_t n_logprobs;       /* -1 none, 0 chosen token only, else the top n as well */
    int32_t n_bias;
    const int32_t *bias_id;
    const float *bias;
    int32_t n_allowed; /* 0 = all ids */
    const int32_t *allowed_id;
    int32_t min_new_tok;       /* stop ids are masked before that many new tokens */
    int32_t think_close_id;    /* -1 = none */
    int32_t think_close_guard; /* first N new tokens: think_close_id is masked */
    /* Position whose token is forced to think_close_id unless the sequence has closed its thinking
     * before; -1 = never. */
    int32_t force_close_at;
    /* The first n_forced tokens after the first new forced_after_id (-1: of all new tokens) are these:
     * the opener of a call the client demands. */
    int32_t n_forced;
    const int32_t *forced_id;
    int32_t forced_after_id;
};

/* Opens a sequence on every stage: binds slot and epoch, gives sampling and stop conditions. */
struct ds4_seq_open {
    uint64_t seq;
    int32_t slot;
    uint32_t epoch;
    int32_t n_prompt; /* prompt length: tokens from there on are new */
    int32_t max_pos;  /* a token sampled for position max_pos - 1 ends the sequence */
    bool ignore_stop;
    int32_t n_stop;
    int32_t stop_id[DS4_MAX_STOP_IDS];
    int32_t
        max_draft; /* tokens the last stage may propose at once for its VERIFY entries; 0 = none */
    struct ds4_sampling sampling;
};

enum ds4_entry_kind { DS4_ENTRY_PREFILL, DS4_ENTRY_DECODE, DS4_ENTRY_VERIFY };

/* One sequence's rows in a step.  base_pos below the sequence's position means truncate first; above
 * it is a protocol violation.
 *
 * With from_step >= 0 tokens and place come from the ring: the entry starts where that step's record left
 * the sequence (base_pos is the least that can be) with the newest token it gave.  A VERIFY entry, always
 * from the ring, goes on with the drafts of that record, at most n_tok - 1 of them: n_tok is what the entry may
 * take, and rows of drafts that were not made do not exist on any stage.  Each of its rows is
 * sampled in order while the draft after it is what was sampled; what lies beyond is undone. */
struct ds4_step_entry {
    uint64_t seq;
    int32_t slot;
    uint32_t epoch;
    enum ds4_entry_kind kind;
    int32_t base_pos;
    int32_t n_tok;
    bool sample; /* the last row's logits are sampled; of VERIFY, every row's */
    int64_t
        from_step; /* >= 0: the newest token is what that earlier step sampled for this sequence */
    /* Index into ds4_step.token (0 is stored there when from_step >= 0).  Entries follow each other
     * without gaps: first_tok is the sum of n_tok before, and all together are the step's n_tok. */
    int32_t first_tok;
    /* The lease: rows may be written for positions < cap_tok.  The block table takes n_block ids
     * from index first_block on (earlier ones stay). */
    int32_t cap_tok;
    int32_t first_block;
    int32_t n_block;
    const int32_t *block;
};

/* What a step does to the sequence state beside appending.  All stages do it at the same step; every
 * id (slot, block, point, staging) is the router's, the only allocator.  Order within a step: closes,
 * opens, operations in their order but POINT_SAVE, entries, POINT_SAVE in their order.
 *
 *   POINT_SAVE      seq slot epoch pos point   keeps in host memory, under a new id, what is needed to go
 *                   on at `pos`: window rows [pos - 127, pos) and open compressor inputs of every layer.
 *                   install_pos <= pos <= position of the slot after the entries, and one past the
 *                   highest position ever written minus pos <= hot window.  A no-op entry (its sequence
 *                   had ended) leaves the slot where it was: save only positions known to be reached.
 *                   Or at a multiple of DS4_ANCHOR_TOK inside of the rows of the slot's entry in this step
 *                   (base_pos < pos < base_pos + n_tok), at most ds4_point_inner_max of them per step.
 *   POINT_DROP      point                      forgets it; its host memory is free from here on
 *   INSTALL         seq slot epoch pos point   the slot, opened in this step or before and without
 *                   entries since, stands at `pos`, the point's own position (install_pos = hi = pos).
 *                   The block table comes with the next entry; blocks below `pos` may be shared, that of
 *                   `pos` itself may not be, unless pos is its first position.
 *   BLOCK_COPY      block_src block_dst        all rows of a block, all layers: copy-on-write
 *   STAGED_INSTALL  staging point first_block block[]
 *                   what a KV_READ brought goes to the device: block[i] takes the staged rows of tokens
 *                   from (first_block + i) * DS4_BLOCK_TOK on; all staged blocks or none (n_block 0).  A
 *                   staged tail becomes point `point` (0: not wanted).  The staging is gone after.
 *   STAGED_DROP     staging                    forgets it; one that a stage failed to read is not there, which
 *                   is fine: the others may have it
 *   PARK            seq slot epoch             the slot names no blocks any more and keeps its rings: they
 *                   can be saved as points, and gone on with when the slot is opened again
 *   REPLAY          seq slot epoch from_pos pos   the slot, as for INSTALL, stands at from_pos with empty rings,
 *                   and rows below `pos` exist: entries up to there are run for the rings alone, and no
 *                   compressed row that a token below `pos` closes is written, so that their blocks may be
 *                   shared.  With pos - from_pos >= (window - 1) x layers of the model the state at `pos` is
 *                   exact; nothing can be saved or cut back to below it (install_pos = pos).
 *
 * A read or write of another thread that still runs (no KV_DONE yet) must not be touched: the router
 * pins the point and the blocks of a KV_WRITE, and leaves the staging of a KV_READ alone. */
enum ds4_kv_op_kind {
    DS4_KV_POINT_SAVE,
    DS4_KV_POINT_DROP,
    DS4_KV_INSTALL,
    DS4_KV_BLOCK_COPY,
    DS4_KV_STAGED_INSTALL,
    DS4_KV_STAGED_DROP,
    DS4_KV_PARK,
    DS4_KV_REPLAY
};

struct ds4_kv_op {
    enum ds4_kv_op_kind kind;
    uint64_t seq;
    int32_t slot;
    uint32_t epoch;
    int32_t pos;
    int32_t from_pos;
    uint64_t point;   /* never 0 where one is named */
    uint64_t staging; /* never 0 where one is named */
    int32_t block_src;
    int32_t block_dst;
    int32_t first_block;
    int32_t n_block; /* at most DS4_PART_BLOCKS */
    const int32_t *block;
};

struct ds4_step {
    uint32_t generation;
    int64_t step_no;
    int32_t n_open;
    struct ds4_seq_open *open;
    int32_t n_close;
    const int32_t *close_slot; /* slots released before opens and entries */
    int32_t n_op;
    struct ds4_kv_op *op;
    int32_t n_entry;
    struct ds4_step_entry *entry;
    int32_t n_tok;
    const int32_t *token;
};

enum ds4_token_flag {
    DS4_TOKEN_SAMPLED = 1, /* token[] holds n_token new ids */
    DS4_TOKEN_ENDED = 2,   /* stop id or last allowed position: later posted entries are no-ops */
    DS4_TOKEN_SKIPPED = 4, /* this entry was such a no-op */
    DS4_TOKEN_NONFINITE =
        8, /* the logits row held NaN or Inf: the sequence must end with an error; tokens of rows before
            * it, of a VERIFY entry, are there all the same */
    DS4_TOKEN_QUENCHED = 16, /* its drafts were wrong too often: none for a while */
};

struct ds4_logprob {
    int32_t token;
    float logprob;
};

/* What the last stage tells the router about one entry. */
struct ds4_token_entry {
    uint64_t seq;
    uint32_t epoch;
    int32_t pos; /* sequence position after the step (tokens whose state exists) */
    uint32_t flags;
    int32_t n_token;
    int32_t token[1 + DS4_MAX_DRAFT];
    int32_t n_undone;    /* rows of drafts that were wrong: written up to pos + n_undone */
    int32_t n_bad_draft; /* drafts no token can be, dropped before they were run */
    int32_t n_nan_draft; /* undone rows that held NaN or Inf */
    int32_t n_logprob;   /* of each token; the chosen token first, then the top ones */
    /* [n_token, n_logprob]: token by token */
    struct ds4_logprob logprob[(1 + DS4_MAX_DRAFT) * (1 + DS4_MAX_TOP_LOGPROBS)];
};

/* Drafts of an entry that were right. */
static inline int32_t ds4_accepted_drafts(const struct ds4_token_entry *entry)
{
    if ((entry->flags & DS4_TOKEN_NONFINITE) != 0)
        return entry->n_token;
    return entry->n_token > 0 ? entry->n_token - 1 : 0;
}

/* Every stage but the last answers every step with one of these, after its operations and cache writes
 * (POINT_SAVE included); the last stage's answer is ds4_tokens_out.  A step is done on all stages when
 * both have come from all: only then may anything outside the steps' order rely on it.  (A GPU may still
 * have the work queued: whatever that stage is told later runs behind it.) */
struct ds4_step_done {
    uint32_t generation;
    int64_t step_no;
    /* What the stage wrote in the step: ds4_pos_digest over the entries, in their order, of the position
     * behind the last row run (of a no-op, where the slot stands).  The router
     * computes the same from ds4_tokens_out; a difference means that the stages have diverged. */
    uint32_t pos_digest;
};

struct ds4_tokens_out {
    uint32_t generation;
    int64_t
        step_no; /* acknowledges the step for this stage; of a step with rows, for all stages but
                      * their POINT_SAVE: activations leave a stage only after its cache writes */
    int32_t n_entry;
    struct ds4_token_entry *entry;
    int64_t compute_ns; /* last stage's own time for the step */
};

/* Rows of a step that may be there for drafts, and all that may be sampled, prompts' last rows included: room
 * for logits is planned for so many.  Beyond DS4_DRAFT_ROWS there are none: kernels are slowest at steps of
 * many decodes, and who has so many sequences has no idle arithmetic to spend on guesses. */
#define DS4_DRAFT_ROWS 64
static inline int32_t ds4_draft_rows(int32_t max_seqs, int32_t max_draft)
{
    return max_seqs * max_draft < DS4_DRAFT_ROWS ? max_seqs * max_draft : DS4_DRAFT_ROWS;
}
static inline int32_t ds4_head_rows(int32_t max_seqs, int32_t max_draft)
{
    return max_seqs + ds4_draft_rows(max_seqs, max_draft);
}

enum ds4_worker_state {
    DS4_WORKER_STARTING,
    DS4_WORKER_LOADING,
    DS4_WORKER_IDLE, /* weights loaded, no generation */
    DS4_WORKER_FORMING,
    DS4_WORKER_READY,
    DS4_WORKER_DRAINING,
    DS4_WORKER_FAILED
};

/* What a point of one stage weighs, see ds4_point_bytes (proto/point.h). */
struct ds4_point_group {
    int32_t ratio;
    int64_t prev_bytes; /* per token of the block before the open one, over the group's layers */
    int64_t open_bytes; /* per token of the open block */
};
struct ds4_point_shape {
    int32_t window_tok;  /* a point holds the newest window_tok - 1 rows */
    int64_t row_bytes;   /* of one window row over the stage's layers */
    int64_t fixed_bytes; /* of every point, whatever its position */
    int32_t n_group;
    struct ds4_point_group group[DS4_POINT_GROUPS];
};

/* First message of a worker, and again after every reconnect. */
struct ds4_hello {
    int32_t stage;
    int32_t n_stage;
    int32_t first_layer;
    int32_t last_layer; /* exclusive */
    int32_t n_layer;
    uint8_t boot_id[DS4_ID_BYTES];
    uint8_t model_digest[DS4_ID_BYTES];
    int32_t max_blocks; /* cache blocks this stage can hold beside its weights */
    int32_t max_slots;
    int32_t max_context;
    int64_t pid;
    char backend[16];
    char device[96];
    char host[64];

    /* Same on all stages of one model: part of the name of everything on disk. */
    uint8_t kv_fingerprint[DS4_ID_BYTES];
    int32_t hot_tok;     /* hot window: tokens that can be taken back in place */
    int64_t host_bytes;  /* host memory this stage can give to points and stagings */
    int32_t unit_bytes;  /* it is given away in units of this size (a power of two); 0: none */
    int64_t block_bytes; /* of one cache block over this stage's layers */
    struct ds4_point_shape point;
    bool disk;         /* the stage has a disk tier: KV_WRITE, KV_READ, KV_UNLINK work */
    int32_t max_draft; /* drafts per VERIFY entry it has planned for; 0: it takes no such entry */
};

/* Router -> worker: join generation `generation`. */
struct ds4_form {
    uint32_t generation;
    int32_t n_stage;
    int32_t n_blocks;
    int32_t n_slots;
    int32_t max_seqs;     /* entries per step at most */
    int32_t max_step_tok; /* rows per step at most */
    int32_t context_tok;
    uint8_t pipe_key[DS4_ID_BYTES]; /* names the generation's pipes; random */
    /* What points and stagings of this stage may take together, each rounded up to its unit_bytes; at
     * most what HELLO offered.  Below it no operation can fail for memory.  Forming drops all of them. */
    int64_t host_bytes;
    int32_t max_draft; /* drafts per VERIFY entry at most; 0: no such entries */
};

/* Where a generation's stages meet, made by stage 0 and passed on by the router: for pipes whose meeting
 * point cannot be derived from pipe_key.  Good for one formation; a new one gets a new id. */
struct ds4_pipe_id {
    int32_t n_byte;
    uint8_t byte[DS4_MAX_PIPE_ID];
};

/* The computing times of steps: how many of each duration (the last is "longer than all bounds"), and
 * their sum. */
#define DS4_STEP_BUCKETS 20
struct ds4_step_times {
    double seconds;
    uint64_t bucket[DS4_STEP_BUCKETS];
};
enum ds4_timed_kind { DS4_TIMED_PREFILL, DS4_TIMED_DECODE }; /* PREFILL: has prompt rows */
#define DS4_N_TIMED 2

/* What a worker says of its card, where the driver's library is there to ask. */
enum ds4_card_sensor {
    DS4_CARD_CORE_C,
    DS4_CARD_MEMORY_C,
    DS4_CARD_CORE_LIMIT_C, /* where the card slows itself down */
    DS4_CARD_MEMORY_LIMIT_C,
    DS4_CARD_WATT,
    DS4_CARD_LIMIT_WATT,
    DS4_CARD_SM_HZ,
    DS4_CARD_MEMORY_HZ,
    DS4_CARD_LINK_GENERATION, /* of PCIe, now: an idle link may rest at a lower one */
    DS4_CARD_LINK_WIDTH,
    DS4_CARD_REPLAYS,    /* of the link, since the driver was loaded */
    DS4_CARD_ECC_ERRORS, /* uncorrected, since the driver was loaded */
    DS4_CARD_SLOW_HEAT,  /* 0 or 1, as the two below: what holds the clocks down now */
    DS4_CARD_SLOW_BRAKE,
    DS4_CARD_SLOW_POWER,
    DS4_CARD_FREE_BYTES,
    DS4_CARD_USED_BYTES,
    DS4_N_CARD_SENSOR
};
#define DS4_CARD_NOT_TOLD (-1.0) /* by this card or driver */

/* X(number, lasting, meaning): the driver's fault reports that are counted by number.  After a lasting one
 * no restart helps, a person must; the others end the worker from within, as device faults, or are
 * consequences of something else. */
#define DS4_XIDS(X)                                                                                \
    X(13, false, "exception in a kernel")                                                          \
    X(31, false, "memory access fault")                                                            \
    X(43, false, "channel reset after a fault in a kernel")                                        \
    X(45, false, "cleaned up after a process that was killed")                                     \
    X(48, true, "memory fault")                                                                    \
    X(62, true, "power controller halted: power off fully")                                        \
    X(63, true, "memory row remapping")                                                            \
    X(64, true, "memory row remapping")                                                            \
    X(74, false, "NVLink")                                                                         \
    X(79, true, "the card has fallen off the bus: seating, power plug, riser")                     \
    X(94, true, "memory fault")                                                                    \
    X(95, true, "memory fault")                                                                    \
    X(109, true, "timeout of a context switch")                                                    \
    X(119, true, "the driver's processor does not answer: reboot")                                 \
    X(120, true, "the driver's processor failed: reboot")                                          \
    X(154, true, "the driver asks for a reset or reboot")

enum ds4_xid {
#define DS4_XID_ENUM(number, lasting, meaning) DS4_XID_##number,
    DS4_XIDS(DS4_XID_ENUM)
#undef DS4_XID_ENUM
        DS4_XID_OTHER,
    DS4_N_XID
};

struct ds4_card_state {
    bool told; /* false: nothing below means anything */
    double value[DS4_N_CARD_SENSOR];
    uint64_t xid[DS4_N_XID]; /* seen by this worker */
};

/* Heartbeat, every 500 ms and at every state change. */
#define DS4_MAX_PROBE 3

struct ds4_health {
    int32_t stage;
    uint32_t generation; /* 0 = none */
    enum ds4_worker_state state;
    int64_t step_no; /* newest step begun, -1 none */
    int64_t step_age_ms;
    int64_t loaded_bytes;
    int64_t total_bytes;
    uint64_t steps_done;
    double busy_seconds;
    double wait_recv_seconds;
    double wait_token_seconds;
    double wait_command_seconds;
    double wait_send_seconds;
    struct ds4_step_times step_time[DS4_N_TIMED];
    uint64_t sent_bytes; /* rows to the next stage */
    uint64_t received_bytes;
    double cpu_seconds; /* of the process */
    int64_t started_unix_s;
    uint64_t nonfinite_rows;
    uint64_t rss_bytes;
    uint64_t weights_bytes;
    uint64_t kv_bytes;
    uint64_t expert_steps;     /* steps in which experts were counted */
    uint64_t experts_touched;  /* distinct experts in them, of the stage's last layer */
    int32_t probe;             /* 0 not probed, 1 full rate, 2 throttled, 3 power brake */
    double memory_bytes_per_s; /* the device, as measured at start; 0 = not measured */
    double link_bytes_per_s;
    double link_latency_s; /* of one word from the device */
    double flops;
    uint64_t uses_on_device; /* of experts, where some stay in host memory; all 0 otherwise */
    uint64_t uses_streamed;
    uint64_t uses_on_host;
    uint64_t experts_moved; /* from host memory to the device, for good */
    struct ds4_card_state card;
    char message[128];
};

/* ---- disk tier: outside the steps, answered by KV_DONE per stage ---- */

/* The numbers are those of the part file (worker/kv_part.h). */
enum ds4_kv_part_kind {
    DS4_KV_EXTENT = 1, /* rows of DS4_EXTENT_TOK tokens */
    DS4_KV_ANCHOR =
        2, /* a point at a multiple of the largest ratio, and the rows since the last extent */
    DS4_KV_TAIL = 3 /* the same at any position */
};

/* Router -> worker: store one part.  Runs between the steps posted before and after it: the rows and the
 * point must exist then.  The router pins blocks and point until KV_DONE.  A part of this name that is
 * there and sound is not written again (KV_DONE.existed). */
struct ds4_kv_write {
    uint32_t generation;
    uint64_t job;                 /* the router's; unique among those unanswered */
    uint8_t key[DS4_ID_BYTES];    /* chain hash of all tokens up to `end` */
    uint8_t commit[DS4_ID_BYTES]; /* tails; zero for extents */
    enum ds4_kv_part_kind kind;
    /* Tokens whose compressed rows the part holds: [begin, end), begin a multiple of DS4_EXTENT_TOK.  An
     * extent ends at the next one; a tail's end is its position. */
    int32_t begin;
    int32_t end;
    uint64_t point; /* tails */
    uint32_t flags; /* none yet: drafter rows and logits have bits 0 and 1 of the file's flags */
    int32_t n_block;
    const int32_t *block; /* those of [begin, end) */
};

/* One file of a part: the layers it holds and what the manifest says of it. */
struct ds4_kv_part_ref {
    int32_t first_layer;
    int32_t last_layer; /* exclusive */
    uint64_t bytes;
    uint8_t digest[DS4_ID_BYTES];
};

/* Router -> worker: read what this stage's layers need out of those parts, verify all of it, keep it in
 * host memory under `staging`.  The router has reserved for it, of host_bytes: n_block x block_bytes and,
 * for tails, ds4_point_bytes(end), each rounded up to units, n_block = blocks of [begin, end).  After a
 * KV_DONE that is not ok nothing is held. */
struct ds4_kv_read {
    uint32_t generation;
    uint64_t job;
    uint64_t staging; /* new, not 0 */
    uint8_t key[DS4_ID_BYTES];
    uint8_t commit[DS4_ID_BYTES]; /* not compared: an equal tail may be of another commit */
    enum ds4_kv_part_kind kind;
    int32_t begin;
    int32_t end;
    int32_t n_part; /* together they must have all layers of this stage */
    struct ds4_kv_part_ref *part;
};

/* Router -> worker: the part is not wanted any more, or (quarantine) must not be used again: it becomes
 * NAME.bad, or goes if that fails.  Ok also when there is none. */
struct ds4_kv_unlink {
    uint32_t generation;
    uint64_t job;
    uint8_t key[DS4_ID_BYTES];
    enum ds4_kv_part_kind kind;
    int32_t first_layer; /* of the file; last exclusive */
    int32_t last_layer;
    bool quarantine;
};

/* Why a job failed; the label of ds4_kv_disk_rejects_total is the text. */
#define DS4_KV_REASONS(X)                                                                          \
    X(DS4_KV_OK, "ok")                                                                             \
    X(DS4_KV_BAD_MAGIC, "magic")                                                                   \
    X(DS4_KV_BAD_VERSION, "version")                                                               \
    X(DS4_KV_BAD_FINGERPRINT, "fingerprint")                                                       \
    X(DS4_KV_BAD_SIZE, "size")                                                                     \
    X(DS4_KV_BAD_CRC, "crc")                                                                       \
    X(DS4_KV_BAD_TOKENS, "tokens")         /* key or token range is another one */                 \
    X(DS4_KV_MISSING_PART, "missing_part") /* no file, or layers that no file has */               \
    X(DS4_KV_IO, "io")                                                                             \
    X(DS4_KV_NO_SPACE, "no_space") /* refused before or while writing */                           \
    X(DS4_KV_REFUSED, "refused")   /* no disk tier, too many jobs, unknown ids */                  \
    X(DS4_KV_CANCELLED, "cancelled")

enum ds4_kv_reason {
#define DS4_KV_REASON_ENUM(name, text) name,
    DS4_KV_REASONS(DS4_KV_REASON_ENUM)
#undef DS4_KV_REASON_ENUM
        DS4_KV_N_REASON
};

/* Worker -> router: a job is over.  A file that failed a check was renamed to NAME.bad first. */
struct ds4_kv_done {
    uint32_t generation;
    uint64_t job;
    enum ds4_kv_reason reason; /* DS4_KV_OK: done */
    bool existed;              /* write: a sound part was there already */
    uint64_t bytes;            /* write: size of the file; read: bytes read; at most 1 GiB */
    uint8_t
        digest[DS4_ID_BYTES]; /* write: XXH3-128 of the file's header, which holds all checksums */
    int64_t duration_ns;      /* from the start of the work, not counting the wait before it */
    char text[128];           /* why not; empty when done */
};

/* A reason in words: payload of FORM_FAILED and REFUSED. */
struct ds4_note {
    char text[256];
};

/* Worker -> router, best effort before it leaves. */
struct ds4_fatal_report {
    int32_t stage;
    uint32_t generation;
    int32_t exit_code;
    int64_t step_no;
    int32_t layer; /* -1 unknown */
    char message[256];
};

#endif
