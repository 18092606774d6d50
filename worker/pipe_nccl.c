/* The pipe over NCCL (steps 10 and 11): one GPU per stage, one host or several.  Rows never touch the
 * host.
 *
 * Communicators: one of all stages, on which the last broadcasts the token records, and one of two
 * ranks for each pair of neighbours, split from it.  Operations of one communicator run in the order of
 * their launch; with one for both neighbours a stage that waits for rows early would hold up the rows it
 * sends.  Each has a stream of its own; the compute stream never waits for any of them, so whatever
 * else waits for the device there cannot be held up by a peer.
 *
 * Transfers: two slots per direction.  Sending copies the rows into a slot behind the compute work and
 * goes on; receiving posts the receive into a slot (expect() may do so one step early, beside the
 * work of the step before), waits on the host, then queues the copy out.  Row counts are not
 * negotiated: both sides know them from the step, and a tail behind the rows names generation, step
 * and count.
 *
 * Waiting is polling with a deadline, and looks for cancellation and for errors of the communicators.
 * All are non-blocking: a call returns at once, and while it is in progress nothing else is called but
 * the question how it went, and abort.  abort() comes from the control thread; `lock` makes sure that
 * no call of ours uses a communicator that is being aborted.  Each abort runs in a thread of its own
 * and raises its flag first: one after the other could wait for ever, because freeing memory waits for
 * the device, and the kernels of the next communicator are still spinning there.  A communicator is
 * always aborted, never destroyed, since a generation ends on each side at its own time. */
#include "worker/pipe.h"

#include "worker/fatal.h"

#include "common/crc32c.h"
#include "common/log.h"
#include "common/service.h"

#include <nccl.h>

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define N_SLOT       2
#define ALIGN_BYTES  ((size_t)256)
#define TEST_BYTES   ((size_t)1 << 20)
#define ABORT_MS     5000
#define TIMER_NS     1000 /* how late a nap may end */
#define SPIN_TRIES   200  /* some hundred microseconds: what a decode hop takes */
#define NAP_TRIES    3000
#define SHORT_NAP_NS 10000
#define LONG_NAP_NS  200000
#define TEST_STEP    (-1) /* step number of the self-test's record */
#define RANK_LOWER   0    /* of a pair: the stage that sends */
#define RANK_HIGHER  1

enum which_comm { COMM_ALL, COMM_IN, COMM_OUT, N_COMM };

/* Behind a step's rows. */
struct row_tail {
    uint32_t generation;
    int32_t n_row;
    int64_t step_no;
};

struct row_slot {
    uint8_t *dev;
    struct row_tail *tail; /* pinned host memory */
    cudaEvent_t moved;     /* the transfer is done */
    cudaEvent_t copied;    /* the copy between slot and stage is done */
    int64_t step_no;
    int32_t n_row;
};

/* One neighbour. */
struct lane {
    cudaStream_t stream;
    struct row_slot slot[N_SLOT];
    uint64_t n_posted; /* transfers so far: number k uses slot k % N_SLOT */
    uint64_t n_taken;  /* receives delivered so far */
};

struct record_slot {
    uint8_t *dev;
    struct ds4_token_record *host; /* pinned */
    cudaEvent_t done;
};

struct ds4_pipe {
    struct ds4_pipe_config config;
    int32_t ordinal;
    cudaStream_t compute; /* the device's own queue */

    pthread_mutex_t lock; /* guards comm[] against abort; held for calls that return at once */
    ncclComm_t comm[N_COMM];
    atomic_bool aborted;

    struct lane in;  /* stage > 0 */
    struct lane out; /* not on the last */
    cudaStream_t tokens;
    struct record_slot record[DS4_MAX_STAGES + 1];
    uint64_t n_record;   /* broadcasts so far */
    int64_t next_record; /* step whose record comes next */
    uint8_t *pinned;     /* host memory of tails, records and the self-test */
    uint8_t *test;       /* [2, test_bytes], in `pinned` */
};

/* ---- sizes ---- */

static bool is_first(const struct ds4_pipe_config *c)
{
    return c->stage == 0;
}

static bool is_last(const struct ds4_pipe_config *c)
{
    return c->stage == c->n_stage - 1;
}

static size_t align_up(size_t bytes)
{
    return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

static size_t slot_bytes(const struct ds4_pipe_config *c)
{
    return align_up((size_t)c->max_step_tok * c->row_bytes + sizeof(struct row_tail));
}

static size_t record_stride(const struct ds4_pipe_config *c)
{
    return align_up(ds4_pipe_record_bytes(c));
}

static int32_t n_record_slot(const struct ds4_pipe_config *c)
{
    return c->depth + 1;
}

static size_t nccl_area_bytes(const struct ds4_pipe_config *c)
{
    size_t lanes = (is_first(c) ? 0 : 1) + (is_last(c) ? 0 : 1);

    if (c->n_stage < 2)
        return 0;
    return lanes * N_SLOT * slot_bytes(c) + (size_t)n_record_slot(c) * record_stride(c);
}

/* Rows of the self-test, at least one. */
static int32_t test_rows(const struct ds4_pipe_config *c)
{
    size_t n = TEST_BYTES / c->row_bytes;

    if (n > (size_t)c->max_step_tok)
        n = (size_t)c->max_step_tok;
    return n < 1 ? 1 : (int32_t)n;
}

static size_t test_bytes(const struct ds4_pipe_config *c)
{
    return (size_t)test_rows(c) * c->row_bytes;
}

/* ---- errors and waiting ---- */

static void cuda_must(cudaError_t rc, const char *what)
{
    if (rc != cudaSuccess)
        ds4_backend_fault("worker/pipe_nccl.c", 0, what, cudaGetErrorString(rc));
}

static bool is_cancelled(const struct ds4_pipe *pipe)
{
    return atomic_load(&pipe->aborted) ||
           (pipe->config.cancel != NULL && atomic_load(pipe->config.cancel));
}

static int cancelled(struct ds4_err *err)
{
    return ds4_fail(err, DS4_E_CANCELLED, "the pipe was aborted");
}

/* A broken device ends the process; what a peer or the network did ends the generation. */
static int nccl_failed(struct ds4_pipe *pipe, ncclResult_t rc, const char *what,
                       struct ds4_err *err)
{
    cudaError_t device = cudaStreamQuery(pipe->compute);

    if (device != cudaSuccess && device != cudaErrorNotReady)
        cuda_must(device, what);
    if (is_cancelled(pipe))
        return cancelled(err);
    return ds4_fail(err, DS4_E_UNAVAILABLE, "nccl: %s: %s (%s)", what, ncclGetErrorString(rc),
                    ncclGetLastError(NULL));
}

/* Between two looks: spins for as long as a hop takes, then naps, longer after a while. */
static void rest(int *tries)
{
    struct timespec nap = {0, *tries < NAP_TRIES ? SHORT_NAP_NS : LONG_NAP_NS};

    ++*tries;
    if (*tries < SPIN_TRIES)
        __builtin_ia32_pause();
    else
        nanosleep(&nap, NULL);
}

/* How the communicator is.  Success also when abort took it away: is_cancelled tells. */
static ncclResult_t ask(struct ds4_pipe *pipe, enum which_comm which)
{
    ncclResult_t state = ncclSuccess;

    pthread_mutex_lock(&pipe->lock);
    if (pipe->comm[which] != NULL && ncclCommGetAsyncError(pipe->comm[which], &state) != 0)
        state = ncclInternalError;
    pthread_mutex_unlock(&pipe->lock);
    return state;
}

/* Waits until the last call on the communicator, which returned rc, is no longer in progress.  Not every
 * call returns that it is (a split says success at once): the communicator is asked in any case. */
static int finish_call(struct ds4_pipe *pipe, enum which_comm which, ncclResult_t rc,
                       const char *what, struct ds4_deadline deadline, struct ds4_err *err)
{
    int tries = 0;

    if (rc == ncclSuccess)
        rc = ask(pipe, which);
    while (rc == ncclInProgress) {
        if (is_cancelled(pipe))
            return cancelled(err);
        if (ds4_deadline_passed(deadline))
            return ds4_fail(err, DS4_E_TIMEOUT, "nccl: %s did not end in time", what);
        rest(&tries);
        rc = ask(pipe, which);
    }
    if (is_cancelled(pipe))
        return cancelled(err);
    return rc == ncclSuccess ? 0 : nccl_failed(pipe, rc, what, err);
}

static int check_comms(struct ds4_pipe *pipe, struct ds4_err *err)
{
    for (int which = 0; which < N_COMM; which++) {
        ncclResult_t state = ask(pipe, (enum which_comm)which);

        if (state != ncclSuccess && state != ncclInProgress)
            return nccl_failed(pipe, state, "communicator", err);
    }
    return is_cancelled(pipe) ? cancelled(err) : 0;
}

/* Waits for an event of one of our streams.  After an abort events come, but what they announce is
 * nothing. */
static int wait_event(struct ds4_pipe *pipe, cudaEvent_t event, const char *what,
                      struct ds4_deadline deadline, struct ds4_err *err)
{
    cudaError_t rc;
    int tries = 0;

    while ((rc = cudaEventQuery(event)) == cudaErrorNotReady) {
        if (is_cancelled(pipe))
            return cancelled(err);
        if (tries >= SPIN_TRIES && tries % SPIN_TRIES == 0 && check_comms(pipe, err))
            return -1;
        if (ds4_deadline_passed(deadline))
            return ds4_fail(err, DS4_E_TIMEOUT, "%s did not come in time", what);
        rest(&tries);
    }
    cuda_must(rc, what);
    return is_cancelled(pipe) ? cancelled(err) : 0;
}

/* Begins a call on the communicator: the lock is held if the answer is not NULL. */
static ncclComm_t take_comm(struct ds4_pipe *pipe, enum which_comm which)
{
    pthread_mutex_lock(&pipe->lock);
    if (pipe->comm[which] == NULL || is_cancelled(pipe)) {
        pthread_mutex_unlock(&pipe->lock);
        return NULL;
    }
    return pipe->comm[which];
}

/* ---- leaving ---- */

static void *abort_one(void *comm)
{
    (void)ncclCommAbort(comm);
    return NULL;
}

static void give_up(const char *what)
{
    ds4_fatal_leave(DS4_EXIT_DEVICE, "%s did not end within %d ms", what, ABORT_MS);
}

static void abort_comms(struct ds4_pipe *pipe)
{
    struct timespec until = ds4_deadline_timespec(ds4_deadline_in_ms(ABORT_MS));
    pthread_t thread[N_COMM];
    int n_thread = 0;

    atomic_store(&pipe->aborted, true);
    if (pthread_mutex_clocklock(&pipe->lock, CLOCK_MONOTONIC, &until) != 0)
        give_up("a call of nccl");
    for (int which = 0; which < N_COMM; which++) {
        if (pipe->comm[which] == NULL)
            continue;
        if (pthread_create(&thread[n_thread], NULL, abort_one, pipe->comm[which]) != 0)
            give_up("an abort that has no thread");
        n_thread++;
        pipe->comm[which] = NULL;
    }
    pthread_mutex_unlock(&pipe->lock);
    for (int t = 0; t < n_thread; t++)
        if (pthread_clockjoin_np(thread[t], NULL, CLOCK_MONOTONIC, &until) != 0)
            give_up("the abort of a communicator");
}

static void nccl_abort(struct ds4_pipe *pipe)
{
    abort_comms(pipe);
}

/* After an abort the kernels leave; a stream that does not come to its end belongs to a device that
 * needs a new process. */
static void drain(cudaStream_t stream)
{
    struct ds4_deadline deadline = ds4_deadline_in_ms(ABORT_MS);
    cudaError_t rc;
    int tries = SPIN_TRIES;

    while (stream != NULL && (rc = cudaStreamQuery(stream)) != cudaSuccess) {
        if (rc != cudaErrorNotReady)
            cuda_must(rc, "after an abort");
        if (ds4_deadline_passed(deadline))
            give_up("a stream after an abort");
        rest(&tries);
    }
}

static void close_lane(struct lane *lane)
{
    for (int i = 0; i < N_SLOT; i++) {
        if (lane->slot[i].moved != NULL)
            cuda_must(cudaEventDestroy(lane->slot[i].moved), "event");
        if (lane->slot[i].copied != NULL)
            cuda_must(cudaEventDestroy(lane->slot[i].copied), "event");
    }
    if (lane->stream != NULL)
        cuda_must(cudaStreamDestroy(lane->stream), "stream");
}

static void nccl_close(struct ds4_pipe *pipe)
{
    if (pipe == NULL)
        return;
    if (pipe->config.n_stage > 1) {
        abort_comms(pipe);
        drain(pipe->in.stream);
        drain(pipe->out.stream);
        drain(pipe->tokens);
        drain(pipe->compute); /* copies from and to the slots */
        close_lane(&pipe->in);
        close_lane(&pipe->out);
        for (int32_t i = 0; i < n_record_slot(&pipe->config); i++)
            if (pipe->record[i].done != NULL)
                cuda_must(cudaEventDestroy(pipe->record[i].done), "event");
        if (pipe->tokens != NULL)
            cuda_must(cudaStreamDestroy(pipe->tokens), "stream");
        if (pipe->pinned != NULL)
            cuda_must(cudaFreeHost(pipe->pinned), "pinned memory");
    }
    pthread_mutex_destroy(&pipe->lock);
    free(pipe);
}

/* ---- rows ---- */

/* The transfer of `slot`, sized by its rows and the tail, on its lane's stream. */
static int post_rows(struct ds4_pipe *pipe, enum which_comm which, struct lane *lane,
                     struct row_slot *slot, struct ds4_deadline deadline, struct ds4_err *err)
{
    size_t bytes = (size_t)slot->n_row * pipe->config.row_bytes + sizeof(struct row_tail);
    ncclComm_t comm = take_comm(pipe, which);
    ncclResult_t rc;

    if (comm == NULL)
        return cancelled(err);
    if (which == COMM_IN)
        rc = ncclRecv(slot->dev, bytes, ncclUint8, RANK_LOWER, comm, lane->stream);
    else
        rc = ncclSend(slot->dev, bytes, ncclUint8, RANK_HIGHER, comm, lane->stream);
    pthread_mutex_unlock(&pipe->lock);
    return finish_call(pipe, which, rc, which == COMM_IN ? "receive" : "send", deadline, err);
}

static int check_rows(const struct ds4_pipe *pipe, const struct lane *lane, int32_t n_row,
                      struct ds4_err *err)
{
    if (lane->stream == NULL)
        return ds4_fail(err, DS4_E_BUG, "stage %d has no neighbour there", (int)pipe->config.stage);
    if (n_row < 1 || n_row > pipe->config.max_step_tok)
        return ds4_fail(err, DS4_E_BUG, "%d rows, must be 1 to %d", (int)n_row,
                        (int)pipe->config.max_step_tok);
    return 0;
}

static int nccl_send(struct ds4_pipe *pipe, int64_t step_no, const void *rows, int32_t n_row,
                     struct ds4_deadline deadline, struct ds4_err *err)
{
    struct lane *lane = &pipe->out;
    struct row_slot *slot = &lane->slot[lane->n_posted % N_SLOT];
    size_t bytes = (size_t)n_row * pipe->config.row_bytes;

    if (check_rows(pipe, lane, n_row, err) ||
        wait_event(pipe, slot->moved, "the next stage's receive", deadline, err))
        return -1;
    *slot->tail = (struct row_tail){pipe->config.generation, n_row, step_no};
    slot->n_row = n_row;
    cuda_must(cudaMemcpyAsync(slot->dev, rows, bytes, cudaMemcpyDeviceToDevice, pipe->compute),
              "copy of rows");
    cuda_must(cudaMemcpyAsync(slot->dev + bytes, slot->tail, sizeof(*slot->tail),
                              cudaMemcpyHostToDevice, pipe->compute),
              "copy of a tail");
    cuda_must(cudaEventRecord(slot->copied, pipe->compute), "event");
    cuda_must(cudaStreamWaitEvent(lane->stream, slot->copied, 0), "event");
    if (post_rows(pipe, COMM_OUT, lane, slot, deadline, err))
        return -1;
    cuda_must(cudaEventRecord(slot->moved, lane->stream), "event");
    lane->n_posted++;
    return 0;
}

/* Posts the receive of the next step's rows.  The slot's last rows may still be on their way to the
 * stage: the stream waits for them, not the host. */
static int post_receive(struct ds4_pipe *pipe, int64_t step_no, int32_t n_row,
                        struct ds4_deadline deadline, struct ds4_err *err)
{
    struct lane *lane = &pipe->in;
    struct row_slot *slot = &lane->slot[lane->n_posted % N_SLOT];
    size_t bytes = (size_t)n_row * pipe->config.row_bytes;

    if (check_rows(pipe, lane, n_row, err))
        return -1;
    if (lane->n_posted - lane->n_taken == N_SLOT)
        return ds4_fail(err, DS4_E_BUG, "rows of step %" PRId64 " are expected too early", step_no);
    slot->step_no = step_no;
    slot->n_row = n_row;
    cuda_must(cudaStreamWaitEvent(lane->stream, slot->copied, 0), "event");
    if (post_rows(pipe, COMM_IN, lane, slot, deadline, err))
        return -1;
    cuda_must(cudaMemcpyAsync(slot->tail, slot->dev + bytes, sizeof(*slot->tail),
                              cudaMemcpyDeviceToHost, lane->stream),
              "copy of a tail");
    cuda_must(cudaEventRecord(slot->moved, lane->stream), "event");
    lane->n_posted++;
    return 0;
}

static int nccl_expect(struct ds4_pipe *pipe, int64_t step_no, int32_t n_row, struct ds4_err *err)
{
    return post_receive(pipe, step_no, n_row, ds4_deadline_in_ms(ABORT_MS), err);
}

static int nccl_recv(struct ds4_pipe *pipe, int64_t step_no, void *rows, int32_t n_row,
                     struct ds4_deadline deadline, struct ds4_err *err)
{
    struct lane *lane = &pipe->in;
    struct row_slot *slot = &lane->slot[lane->n_taken % N_SLOT];
    const struct row_tail *tail;

    if (lane->n_posted == lane->n_taken && post_receive(pipe, step_no, n_row, deadline, err))
        return -1;
    if (slot->step_no != step_no || slot->n_row != n_row)
        return ds4_fail(err, DS4_E_BUG, "%d rows of step %" PRId64 ", expected %d of step %" PRId64,
                        (int)n_row, step_no, (int)slot->n_row, slot->step_no);
    if (wait_event(pipe, slot->moved, "rows of the stage before", deadline, err))
        return -1;
    tail = slot->tail;
    if (tail->generation != pipe->config.generation || tail->step_no != step_no ||
        tail->n_row != n_row)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "stage %d sent %d rows of step %" PRId64 " of generation %u, expected %d "
                        "of step %" PRId64 " of %u",
                        (int)pipe->config.stage - 1, (int)tail->n_row, tail->step_no,
                        tail->generation, (int)n_row, step_no, pipe->config.generation);
    cuda_must(cudaMemcpyAsync(rows, slot->dev, (size_t)n_row * pipe->config.row_bytes,
                              cudaMemcpyDeviceToDevice, pipe->compute),
              "copy of rows");
    cuda_must(cudaEventRecord(slot->copied, pipe->compute), "event");
    lane->n_taken++;
    return 0;
}

/* ---- token records ---- */

static int broadcast(struct ds4_pipe *pipe, struct record_slot *slot, struct ds4_deadline deadline,
                     struct ds4_err *err)
{
    ncclComm_t comm = take_comm(pipe, COMM_ALL);
    ncclResult_t rc;

    if (comm == NULL)
        return cancelled(err);
    rc = ncclBroadcast(slot->dev, slot->dev, ds4_pipe_record_bytes(&pipe->config), ncclUint8,
                       pipe->config.n_stage - 1, comm, pipe->tokens);
    pthread_mutex_unlock(&pipe->lock);
    return finish_call(pipe, COMM_ALL, rc, "broadcast", deadline, err);
}

static struct record_slot *next_slot(struct ds4_pipe *pipe)
{
    return &pipe->record[pipe->n_record++ % (uint64_t)n_record_slot(&pipe->config)];
}

static int nccl_publish(struct ds4_pipe *pipe, const struct ds4_token_record *record,
                        struct ds4_deadline deadline, struct ds4_err *err)
{
    size_t bytes = ds4_pipe_record_bytes(&pipe->config);
    struct record_slot *slot;

    if (!is_last(&pipe->config))
        return ds4_fail(err, DS4_E_BUG, "record published by stage %d", (int)pipe->config.stage);
    if (ds4_pipe_check_publish(&pipe->config, record, err))
        return -1;
    if (pipe->config.n_stage == 1)
        return 0;
    slot = next_slot(pipe);
    if (wait_event(pipe, slot->done, "the other stages' taking of a record", deadline, err))
        return -1;
    ds4_pipe_seal_record(&pipe->config, record, slot->host);
    cuda_must(cudaMemcpyAsync(slot->dev, slot->host, bytes, cudaMemcpyHostToDevice, pipe->tokens),
              "copy of a record");
    if (broadcast(pipe, slot, deadline, err))
        return -1;
    cuda_must(cudaEventRecord(slot->done, pipe->tokens), "event");
    return 0;
}

static int nccl_take(struct ds4_pipe *pipe, struct ds4_token_record *record,
                     struct ds4_deadline deadline, struct ds4_err *err)
{
    size_t bytes = ds4_pipe_record_bytes(&pipe->config);
    struct record_slot *slot;

    if (is_last(&pipe->config))
        return ds4_fail(err, DS4_E_BUG, "stage %d keeps its own records", (int)pipe->config.stage);
    slot = next_slot(pipe);
    if (broadcast(pipe, slot, deadline, err))
        return -1;
    cuda_must(cudaMemcpyAsync(slot->host, slot->dev, bytes, cudaMemcpyDeviceToHost, pipe->tokens),
              "copy of a record");
    cuda_must(cudaEventRecord(slot->done, pipe->tokens), "event");
    if (wait_event(pipe, slot->done, "the token record", deadline, err))
        return -1;
    memcpy(record, slot->host, bytes);
    if (ds4_pipe_check_record(&pipe->config, record, pipe->next_record, err))
        return -1;
    pipe->next_record++;
    return 0;
}

static int nccl_check(struct ds4_pipe *pipe, struct ds4_err *err)
{
    return pipe->config.n_stage == 1 ? 0 : check_comms(pipe, err);
}

/* ---- forming ---- */

static int init_all(struct ds4_pipe *pipe, struct ds4_deadline deadline, struct ds4_err *err)
{
    const struct ds4_pipe_exchange *exchange = pipe->config.exchange;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    struct ds4_pipe_id message = {.n_byte = sizeof(ncclUniqueId)};
    ncclUniqueId id;
    ncclResult_t rc = ncclSuccess;

    _Static_assert(sizeof(id) <= DS4_MAX_PIPE_ID, "a unique id fits the message");
    if (is_first(&pipe->config)) {
        rc = ncclGetUniqueId(&id);
        if (rc != ncclSuccess)
            return nccl_failed(pipe, rc, "unique id", err);
        memcpy(message.byte, &id, sizeof(id));
        if (exchange->offer(exchange->owner, &message, err))
            return -1;
    } else {
        if (exchange->await(exchange->owner, &message, deadline, err))
            return -1;
        if (message.n_byte != (int32_t)sizeof(id))
            return ds4_fail(err, DS4_E_PROTOCOL, "pipe id of %d bytes, nccl's has %zu",
                            (int)message.n_byte, sizeof(id));
        memcpy(&id, message.byte, sizeof(id));
    }
    config.blocking = 0;
    pthread_mutex_lock(&pipe->lock);
    rc = ncclCommInitRankConfig(&pipe->comm[COMM_ALL], pipe->config.n_stage, id, pipe->config.stage,
                                &config);
    pthread_mutex_unlock(&pipe->lock);
    return finish_call(pipe, COMM_ALL, rc, "forming", deadline, err);
}

/* A split's result is written when it is there, which is not when the parent says so. */
static int await_comm(struct ds4_pipe *pipe, enum which_comm which, struct ds4_deadline deadline,
                      struct ds4_err *err)
{
    int tries = 0;

    while (__atomic_load_n(&pipe->comm[which], __ATOMIC_ACQUIRE) == NULL) {
        if (is_cancelled(pipe))
            return cancelled(err);
        if (ds4_deadline_passed(deadline))
            return ds4_fail(err, DS4_E_TIMEOUT, "nccl: pairing did not end in time");
        if (finish_call(pipe, COMM_ALL, ncclSuccess, "pairing", deadline, err))
            return -1;
        rest(&tries);
    }
    return finish_call(pipe, which, ncclSuccess, "pairing", deadline, err);
}

/* The communicators of neighbours: first of the pairs (0,1) (2,3) ..., then of (1,2) (3,4) ...; all
 * stages take part in both splits, one that has no partner without a result. */
static int split_pairs(struct ds4_pipe *pipe, int32_t first, struct ds4_deadline deadline,
                       struct ds4_err *err)
{
    int32_t stage = pipe->config.stage;
    int32_t pair = (stage - first) / 2;
    bool sends = stage >= first && (stage - first) % 2 == 0; /* towards the higher of its pair */
    int32_t partner = sends ? stage + 1 : stage - 1;
    bool alone = stage < first || partner >= pipe->config.n_stage;
    enum which_comm which = sends ? COMM_OUT : COMM_IN;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t none = NULL;
    ncclComm_t parent = take_comm(pipe, COMM_ALL);
    ncclResult_t rc;

    if (parent == NULL)
        return cancelled(err);
    config.blocking = 0;
    rc = ncclCommSplit(parent, alone ? NCCL_SPLIT_NOCOLOR : pair, stage,
                       alone ? &none : &pipe->comm[which], &config);
    pthread_mutex_unlock(&pipe->lock);
    if (finish_call(pipe, COMM_ALL, rc, "pairing", deadline, err))
        return -1;
    return alone ? 0 : await_comm(pipe, which, deadline, err);
}

static void fill_test(uint8_t *at, size_t bytes, uint32_t generation, int32_t sender)
{
    uint32_t x = generation * 2654435761U + (uint32_t)sender * 40503U + 1;

    for (size_t i = 0; i < bytes; i++) {
        x = x * 1664525U + 1013904223U;
        at[i] = (uint8_t)(x >> 24);
    }
}

/* A known pattern over every hop and a record to all: opens the connections, which are made at the
 * first use, and finds links that do not carry what is put in. */
static int test_hops(struct ds4_pipe *pipe, struct ds4_deadline deadline, struct ds4_err *err)
{
    const struct ds4_pipe_config *c = &pipe->config;
    size_t bytes = test_bytes(c);
    int32_t n_row = test_rows(c);
    uint8_t *sent = pipe->test, *got = pipe->test + bytes;

    if (!is_first(c) && post_receive(pipe, TEST_STEP, n_row, deadline, err))
        return -1;
    if (!is_last(c)) {
        struct row_slot *slot = &pipe->out.slot[1];

        fill_test(sent, bytes, c->generation, c->stage);
        cuda_must(cudaMemcpyAsync(slot->dev, sent, bytes, cudaMemcpyHostToDevice, pipe->compute),
                  "copy of the test");
        if (nccl_send(pipe, TEST_STEP, slot->dev, n_row, deadline, err))
            return -1;
    }
    if (is_first(c))
        return 0;
    if (nccl_recv(pipe, TEST_STEP, pipe->in.slot[1].dev, n_row, deadline, err))
        return -1;
    cuda_must(
        cudaMemcpyAsync(got, pipe->in.slot[1].dev, bytes, cudaMemcpyDeviceToHost, pipe->compute),
        "copy of the test");
    cuda_must(cudaEventRecord(pipe->in.slot[0].copied, pipe->compute), "event");
    if (wait_event(pipe, pipe->in.slot[0].copied, "the test's rows", deadline, err))
        return -1;
    fill_test(sent, bytes, c->generation, c->stage - 1);
    if (ds4_crc32c(0, got, bytes) != ds4_crc32c(0, sent, bytes))
        return ds4_fail(err, DS4_E_CORRUPT,
                        "the link from stage %d does not carry what it is given",
                        (int)c->stage - 1);
    return 0;
}

static int test_record(struct ds4_pipe *pipe, struct ds4_deadline deadline, struct ds4_err *err)
{
    struct ds4_token_record record = {.generation = pipe->config.generation, .step_no = TEST_STEP};

    pipe->next_record = TEST_STEP;
    if (is_last(&pipe->config) ? nccl_publish(pipe, &record, deadline, err)
                               : nccl_take(pipe, &record, deadline, err))
        return -1;
    pipe->next_record = 0;
    return 0;
}

static void open_lane(struct ds4_pipe *pipe, struct lane *lane, uint8_t **dev, uint8_t **pinned)
{
    int least, greatest;

    cuda_must(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
    cuda_must(cudaStreamCreateWithPriority(&lane->stream, cudaStreamNonBlocking, greatest),
              "stream");
    for (int i = 0; i < N_SLOT; i++) {
        struct row_slot *slot = &lane->slot[i];

        slot->dev = *dev;
        *dev += slot_bytes(&pipe->config);
        slot->tail = (struct row_tail *)(void *)*pinned;
        *pinned += ALIGN_BYTES;
        cuda_must(cudaEventCreateWithFlags(&slot->moved, cudaEventDisableTiming), "event");
        cuda_must(cudaEventCreateWithFlags(&slot->copied, cudaEventDisableTiming), "event");
    }
}

/* Streams, events and the carving of memory. */
static int open_memory(struct ds4_pipe *pipe, struct ds4_err *err)
{
    const struct ds4_pipe_config *c = &pipe->config;
    size_t n_record = (size_t)n_record_slot(c);
    size_t host_bytes = 2 * N_SLOT * ALIGN_BYTES + n_record * record_stride(c) + 2 * test_bytes(c);
    uint8_t *dev = c->dev_area, *host;

    if (cudaHostAlloc((void **)&pipe->pinned, host_bytes, cudaHostAllocDefault) != cudaSuccess) {
        (void)cudaGetLastError();
        return ds4_fail(err, DS4_E_NOMEM, "no %zu bytes of pinned host memory", host_bytes);
    }
    memset(pipe->pinned, 0, host_bytes);
    host = pipe->pinned;
    if (!is_first(c))
        open_lane(pipe, &pipe->in, &dev, &host);
    if (!is_last(c))
        open_lane(pipe, &pipe->out, &dev, &host);
    cuda_must(cudaStreamCreateWithFlags(&pipe->tokens, cudaStreamNonBlocking), "stream");
    for (size_t i = 0; i < n_record; i++) {
        pipe->record[i].dev = dev;
        dev += record_stride(c);
        pipe->record[i].host = (struct ds4_token_record *)(void *)host;
        host += record_stride(c);
        cuda_must(cudaEventCreateWithFlags(&pipe->record[i].done, cudaEventDisableTiming), "event");
    }
    pipe->test = host;
    return 0;
}

static int form(struct ds4_pipe *pipe, struct ds4_deadline deadline, struct ds4_err *err)
{
    int64_t begin_ns = ds4_clock_ns(), formed_ns;

    cuda_must(cudaSetDevice(pipe->ordinal), "device");
    (void)prctl(PR_SET_TIMERSLACK, TIMER_NS, 0, 0, 0);
    if (open_memory(pipe, err) || init_all(pipe, deadline, err) ||
        split_pairs(pipe, 0, deadline, err) ||
        (pipe->config.n_stage > 2 && split_pairs(pipe, 1, deadline, err)))
        return -1;
    formed_ns = ds4_clock_ns();
    if (test_hops(pipe, deadline, err) || test_record(pipe, deadline, err))
        return ds4_err_wrap(err, "self-test of the pipe");
    ds4_log(DS4_LOG_INFO, "pipe.formed",
            "pipe=nccl generation=%u form_ms=%" PRId64 " test_ms=%" PRId64, pipe->config.generation,
            (formed_ns - begin_ns) / DS4_NS_PER_MS, (ds4_clock_ns() - formed_ns) / DS4_NS_PER_MS);
    return 0;
}

static struct ds4_pipe *nccl_open(const struct ds4_pipe_config *config,
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
    pipe->config.exchange = NULL;
    pthread_mutex_init(&pipe->lock, NULL);
    if (config->n_stage == 1)
        return pipe;
    pipe->config.exchange = config->exchange;
    if (config->backend != NULL)
        pipe->compute = config->backend->queue(config->dev, &pipe->ordinal);
    if (pipe->compute == NULL || config->dev_area == NULL || config->exchange == NULL) {
        ds4_fail(err, DS4_E_INVALID, "the nccl pipe needs stages on GPUs");
        pipe->config.n_stage = 1; /* nothing was opened */
    } else if (form(pipe, deadline, err) == 0) {
        pipe->config.exchange = NULL;
        return pipe;
    }
    nccl_close(pipe);
    return NULL;
}

extern const struct ds4_pipe_ops ds4_pipe_nccl;
const struct ds4_pipe_ops ds4_pipe_nccl = {
    .name = "nccl",
    .area_bytes = nccl_area_bytes,
    .open = nccl_open,
    .close = nccl_close,
    .abort = nccl_abort,
    .send = nccl_send,
    .recv = nccl_recv,
    .expect = nccl_expect,
    .publish = nccl_publish,
    .take = nccl_take,
    .check = nccl_check,
};
