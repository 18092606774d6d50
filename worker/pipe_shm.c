/* The pipe over shared memory (steps 10 and 11): CPU stages, several stages on one GPU, rigs without
 * NCCL; one host.
 *
 * Two rings (shm_ring.h): stage k's activations for stage k + 1, and the last stage's token records
 * for all others.  A slot holds one step's rows; they are copied in and out once, by the backend, which
 * costs less than the memory traffic of one layer over them.  A device's copy needs no buffer between:
 * the rings are pinned.
 *
 * Token records have room for as many steps as can be in flight, so the last stage never waits for a
 * stage that is busy: a stage takes the records of step s - depth and older before it begins step s.
 * An activation ring may be shorter (two slots suffice for overlap) to bound memory. */
#include "worker/pipe.h"

#include "worker/shm_ring.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RING_BYTES ((size_t)256 << 20)
#define MIN_SLOTS      2

struct ds4_pipe {
    struct ds4_pipe_config config;
    bool pinned; /* the activation rings are: the device copies straight from and to them */
    struct ds4_shm_ring *in;     /* from the previous stage; NULL on stage 0 */
    struct ds4_shm_ring *out;    /* to the next stage; NULL on the last */
    struct ds4_shm_ring *tokens; /* producer on the last stage, consumer elsewhere; NULL if alone */
    int64_t next_record;         /* step whose record comes next */
};

static bool is_last(const struct ds4_pipe *pipe)
{
    return pipe->config.stage == pipe->config.n_stage - 1;
}

static struct ds4_shm_ring_config ring_config(const struct ds4_pipe *pipe, const char *channel)
{
    const struct ds4_pipe_config *config = &pipe->config;
    struct ds4_shm_ring_config ring = {
        .generation = config->generation,
        .n_consumer = 1,
        .cancel = config->cancel,
    };
    char hex[2 * DS4_ID_BYTES + 1];

    for (size_t i = 0; i < DS4_ID_BYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", config->key[i]);
    snprintf(ring.name, sizeof(ring.name), "ds4-%s-%" PRIu32 "-%s", hex, config->generation,
             channel);
    memcpy(ring.key, config->key, sizeof(ring.key));
    return ring;
}

/* Activations from `stage` to the next. */
static struct ds4_shm_ring_config hop_config(const struct ds4_pipe *pipe, int32_t stage)
{
    char channel[16];
    struct ds4_shm_ring_config ring;
    size_t fitting;

    snprintf(channel, sizeof(channel), "hop%d", (int)stage);
    ring = ring_config(pipe, channel);
    ring.producer_stage = stage;
    ring.first_consumer_stage = stage + 1;
    ring.slot_bytes = (size_t)pipe->config.max_step_tok * pipe->config.row_bytes;
    fitting = MAX_RING_BYTES / ring.slot_bytes;
    ring.n_slot = pipe->config.depth + 1;
    if ((size_t)ring.n_slot > fitting)
        ring.n_slot = fitting < MIN_SLOTS ? MIN_SLOTS : (int32_t)fitting;
    return ring;
}

static struct ds4_shm_ring_config tokens_config(const struct ds4_pipe *pipe)
{
    struct ds4_shm_ring_config ring = ring_config(pipe, "tok");

    ring.producer_stage = pipe->config.n_stage - 1;
    ring.first_consumer_stage = 0;
    ring.n_consumer = pipe->config.n_stage - 1;
    ring.slot_bytes = ds4_pipe_record_bytes(&pipe->config);
    ring.n_slot = pipe->config.depth + 1;
    return ring;
}

/* Everyone creates before anyone waits, so the order of arrival does not matter. */
static int meet_neighbours(struct ds4_pipe *pipe, struct ds4_deadline deadline, struct ds4_err *err)
{
    struct ds4_shm_ring_config tokens = tokens_config(pipe);
    struct ds4_shm_ring_config hop;
    int32_t stage = pipe->config.stage;

    if (is_last(pipe)) {
        pipe->tokens = ds4_shm_ring_create(&tokens, err);
        if (pipe->tokens == NULL)
            return -1;
    } else {
        hop = hop_config(pipe, stage);
        pipe->out = ds4_shm_ring_create(&hop, err);
        if (pipe->out == NULL)
            return -1;
        pipe->tokens = ds4_shm_ring_join(&tokens, stage, deadline, err);
        if (pipe->tokens == NULL)
            return -1;
    }
    if (stage > 0) {
        hop = hop_config(pipe, stage - 1);
        pipe->in = ds4_shm_ring_join(&hop, 0, deadline, err);
        if (pipe->in == NULL)
            return -1;
    }
    return ds4_shm_ring_meet(is_last(pipe) ? pipe->tokens : pipe->out, deadline, err);
}

/* A ring that cannot be pinned works, only slower. */
static void pin_rings(struct ds4_pipe *pipe, bool pin)
{
    struct ds4_shm_ring *rings[] = {pipe->in, pipe->out};
    const struct ds4_backend *backend = pipe->config.backend;

    for (size_t i = 0; backend != NULL && i < sizeof(rings) / sizeof(rings[0]); i++) {
        size_t bytes;
        void *memory;

        if (rings[i] == NULL)
            continue;
        memory = ds4_shm_ring_slots(rings[i], &bytes);
        if (pin)
            backend->pin(pipe->config.dev, memory, bytes);
        else
            backend->unpin(pipe->config.dev, memory);
    }
    pipe->pinned = pin;
}

static size_t shm_area_bytes(const struct ds4_pipe_config *config)
{
    (void)config;
    return 0;
}

static void shm_close(struct ds4_pipe *pipe)
{
    if (pipe == NULL)
        return;
    if (pipe->pinned)
        pin_rings(pipe, false);
    ds4_shm_ring_close(pipe->in);
    ds4_shm_ring_close(pipe->out);
    ds4_shm_ring_close(pipe->tokens);
    free(pipe);
}

static struct ds4_pipe *shm_open_pipe(const struct ds4_pipe_config *config,
                                      struct ds4_deadline deadline, struct ds4_err *err)
{
    struct ds4_pipe *pipe;

    if (ds4_pipe_check_config(config, err))
        return NULL;
    pipe = calloc(1, sizeof(*pipe));
    if (pipe == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a pipe");
        return NULL;
    }
    pipe->config = *config;
    if (config->n_stage > 1 && meet_neighbours(pipe, deadline, err)) {
        shm_close(pipe);
        return NULL;
    }
    pin_rings(pipe, true);
    return pipe;
}

static void shm_abort(struct ds4_pipe *pipe)
{
    struct ds4_shm_ring *rings[] = {pipe->in, pipe->out, pipe->tokens};

    for (size_t i = 0; i < sizeof(rings) / sizeof(rings[0]); i++)
        if (rings[i] != NULL)
            ds4_shm_ring_abort(rings[i]);
}

static int check_rows(const struct ds4_pipe *pipe, const struct ds4_shm_ring *ring, int32_t n_row,
                      struct ds4_err *err)
{
    if (ring == NULL)
        return ds4_fail(err, DS4_E_BUG, "stage %d has no neighbour there", (int)pipe->config.stage);
    if (n_row < 1 || n_row > pipe->config.max_step_tok)
        return ds4_fail(err, DS4_E_BUG, "%d rows, must be 1 to %d", (int)n_row,
                        (int)pipe->config.max_step_tok);
    return 0;
}

static int shm_send(struct ds4_pipe *pipe, int64_t step_no, const void *rows, int32_t n_row,
                    struct ds4_deadline deadline, struct ds4_err *err)
{
    size_t bytes = (size_t)n_row * pipe->config.row_bytes;
    void *slot;

    if (check_rows(pipe, pipe->out, n_row, err))
        return -1;
    slot = ds4_shm_ring_reserve(pipe->out, deadline, err);
    if (slot == NULL)
        return -1;
    if (pipe->config.backend == NULL)
        memcpy(slot, rows, bytes);
    else
        pipe->config.backend->download(pipe->config.dev, slot, rows, bytes);
    ds4_shm_ring_commit(pipe->out, step_no, bytes);
    return 0;
}

static int shm_recv(struct ds4_pipe *pipe, int64_t step_no, void *rows, int32_t n_row,
                    struct ds4_deadline deadline, struct ds4_err *err)
{
    const void *slot;
    size_t bytes;
    int64_t tag;

    if (check_rows(pipe, pipe->in, n_row, err))
        return -1;
    slot = ds4_shm_ring_peek(pipe->in, &tag, &bytes, deadline, err);
    if (slot == NULL)
        return -1;
    if (tag != step_no || bytes != (size_t)n_row * pipe->config.row_bytes)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "stage %d sent %zu bytes of step %" PRId64 ", expected %d rows of %zu of "
                        "step %" PRId64,
                        (int)pipe->config.stage - 1, bytes, tag, (int)n_row, pipe->config.row_bytes,
                        step_no);
    if (pipe->config.backend == NULL) {
        memcpy(rows, slot, bytes);
    } else {
        pipe->config.backend->upload(pipe->config.dev, rows, slot, bytes);
        pipe->config.backend->sync(pipe->config.dev); /* the slot is the peer's after this */
    }
    ds4_shm_ring_release(pipe->in);
    return 0;
}

/* The producer runs ahead into free slots by itself. */
static int shm_expect(struct ds4_pipe *pipe, int64_t step_no, int32_t n_row, struct ds4_err *err)
{
    (void)pipe;
    (void)step_no;
    (void)n_row;
    (void)err;
    return 0;
}

static int shm_publish(struct ds4_pipe *pipe, const struct ds4_token_record *record,
                       struct ds4_deadline deadline, struct ds4_err *err)
{
    struct ds4_token_record *slot;
    size_t bytes = ds4_pipe_record_bytes(&pipe->config);

    if (!is_last(pipe))
        return ds4_fail(err, DS4_E_BUG, "record published by stage %d", (int)pipe->config.stage);
    if (ds4_pipe_check_publish(&pipe->config, record, err))
        return -1;
    if (pipe->tokens == NULL)
        return 0;
    slot = ds4_shm_ring_reserve(pipe->tokens, deadline, err);
    if (slot == NULL)
        return -1;
    ds4_pipe_seal_record(&pipe->config, record, slot);
    ds4_shm_ring_commit(pipe->tokens, record->step_no, bytes);
    return 0;
}

static int shm_take(struct ds4_pipe *pipe, struct ds4_token_record *record,
                    struct ds4_deadline deadline, struct ds4_err *err)
{
    const void *slot;
    size_t bytes;
    int64_t tag;

    if (pipe->tokens == NULL || is_last(pipe))
        return ds4_fail(err, DS4_E_BUG, "stage %d keeps its own records", (int)pipe->config.stage);
    slot = ds4_shm_ring_peek(pipe->tokens, &tag, &bytes, deadline, err);
    if (slot == NULL)
        return -1;
    if (bytes != ds4_pipe_record_bytes(&pipe->config))
        return ds4_fail(err, DS4_E_PROTOCOL, "token record of %zu bytes, must be %zu", bytes,
                        ds4_pipe_record_bytes(&pipe->config));
    memcpy(record, slot, bytes);
    ds4_shm_ring_release(pipe->tokens);
    if (ds4_pipe_check_record(&pipe->config, record, pipe->next_record, err))
        return -1;
    pipe->next_record++;
    return 0;
}

static int shm_check(struct ds4_pipe *pipe, struct ds4_err *err)
{
    struct ds4_shm_ring *rings[] = {pipe->in, pipe->out, pipe->tokens};

    for (size_t i = 0; i < sizeof(rings) / sizeof(rings[0]); i++)
        if (rings[i] != NULL && ds4_shm_ring_check(rings[i], err))
            return -1;
    return 0;
}

const struct ds4_pipe_ops ds4_pipe_shm = {
    .name = "shm",
    .area_bytes = shm_area_bytes,
    .open = shm_open_pipe,
    .close = shm_close,
    .abort = shm_abort,
    .send = shm_send,
    .recv = shm_recv,
    .expect = shm_expect,
    .publish = shm_publish,
    .take = shm_take,
    .check = shm_check,
};
