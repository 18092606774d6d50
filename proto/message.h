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

#define DS4_WIRE_VERSION     1
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
    struct ds4_sampling sampling;
};

enum ds4_entry_kind { DS4_ENTRY_PREFILL, DS4_ENTRY_DECODE, DS4_ENTRY_VERIFY };

/* One sequence's rows in a step.  base_pos below the sequence's position means truncate first; above
 * it is a protocol violation. */
struct ds4_step_entry {
    uint64_t seq;
    int32_t slot;
    uint32_t epoch;
    enum ds4_entry_kind kind;
    int32_t base_pos;
    int32_t n_tok;
    bool sample;       /* the last row's logits are sampled */
    int64_t from_step; /* >= 0: the one token is what that earlier step sampled for this sequence */
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

struct ds4_step {
    uint32_t generation;
    int64_t step_no;
    int32_t n_open;
    struct ds4_seq_open *open;
    int32_t n_close;
    const int32_t *close_slot; /* slots released before opens and entries */
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
        8, /* the logits row held NaN or Inf: the sequence must end with an error */
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
    int32_t n_logprob; /* of token[0]; the chosen token first, then the top ones */
    struct ds4_logprob logprob[1 + DS4_MAX_TOP_LOGPROBS];
};

struct ds4_tokens_out {
    uint32_t generation;
    int64_t step_no; /* also acknowledges the step for all stages: activations leave a stage only
                      * after its cache writes */
    int32_t n_entry;
    struct ds4_token_entry *entry;
    int64_t compute_ns; /* last stage's own time for the step */
};

enum ds4_worker_state {
    DS4_WORKER_STARTING,
    DS4_WORKER_LOADING,
    DS4_WORKER_IDLE, /* weights loaded, no generation */
    DS4_WORKER_FORMING,
    DS4_WORKER_READY,
    DS4_WORKER_DRAINING,
    DS4_WORKER_FAILED
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
};

/* Heartbeat, every 500 ms and at every state change. */
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
    uint64_t nonfinite_rows;
    uint64_t rss_bytes;
    uint64_t weights_bytes;
    uint64_t kv_bytes;
    uint64_t expert_steps;    /* steps in which experts were counted */
    uint64_t experts_touched; /* distinct experts in them, of the stage's last layer */
    char message[128];
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
