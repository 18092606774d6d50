/* Shared-memory ring with peers that may die (steps 10 and 11).
 *
 * Counters only grow (modulo 2^32): n_sent by the producer, n_taken by each consumer; each side keeps
 * its own in private memory and only publishes it.  A slot is free when all n_taken have passed it.
 * The counters are the futex words.
 *
 * Who is alive: each side holds an open-file-description lock on its own byte of the segment.  The
 * kernel drops it with the process, however that ends, so "is the byte locked" has no pid reuse and
 * works across pid namespaces.  It is asked once per time slice of a wait.
 *
 * What is left behind: the segment is made without a name (O_TMPFILE), locked, then linked, and
 * unlinked when all have joined.  Only a producer killed between link and unlink leaves a file; its
 * byte is not locked, and the next create sweeps it. */
#include "worker/shm_ring.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SHM_DIR       "/dev/shm"
#define NAME_PREFIX   "ds4-"
#define RING_VERSION  1
#define PRODUCER      (-1) /* in place of a consumer's index */
#define PAGE_BYTES    ((size_t)4096)
#define LINE_BYTES    64
#define SLICE_NS      (100 * DS4_NS_PER_MS)
#define JOIN_RETRY_NS (2 * DS4_NS_PER_MS)

static const char magic[8] = "ds4ring";

/* One side's published state, on a cache line of its own. */
struct ring_side {
    _Alignas(LINE_BYTES) _Atomic uint32_t count; /* n_sent or n_taken */
    _Atomic uint32_t joined;
    _Atomic uint32_t left;
};

/* What both sides must agree on; compared as a whole. */
struct ring_shape {
    char magic[sizeof(magic)];
    uint32_t version;
    uint32_t generation;
    uint8_t key[DS4_ID_BYTES];
    int32_t producer_stage;
    int32_t first_consumer_stage;
    int32_t n_consumer;
    int32_t n_slot;
    uint64_t slot_bytes;
};

struct slot_head {
    int64_t tag;
    uint64_t bytes;
};

struct ring_head {
    struct ring_shape shape;
    struct ring_side producer;
    struct ring_side consumer[DS4_MAX_STAGES];
    struct slot_head slot[]; /* [n_slot]; the slots follow on the next page */
};

struct ds4_shm_ring {
    struct ds4_shm_ring_config config;
    struct ring_head *head;
    uint8_t *slots;
    size_t map_bytes;
    size_t stride; /* from slot to slot */
    int fd;
    int32_t self;   /* PRODUCER or consumer index */
    uint32_t count; /* own counter */
    int32_t index;  /* of the slot it stands at: count % n_slot would jump when count wraps */
    bool named;
    atomic_bool aborted;
};

/* ---- waiting ---- */

static struct ring_side *side_of(struct ds4_shm_ring *ring, int32_t who)
{
    return who == PRODUCER ? &ring->head->producer : &ring->head->consumer[who];
}

static int32_t stage_of(const struct ds4_shm_ring *ring, int32_t who)
{
    return who == PRODUCER ? ring->config.producer_stage : ring->config.first_consumer_stage + who;
}

static void wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static struct flock lock_byte(int32_t who)
{
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1 + (off_t)who, .l_len = 1};
}

/* Whether another open of the file holds `who`'s byte.  An error counts as alive: deadlines remain. */
static bool is_locked(int fd, int32_t who)
{
    struct flock lock = lock_byte(who);

    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static bool is_cancelled(const struct ds4_shm_ring *ring)
{
    return atomic_load(&ring->aborted) ||
           (ring->config.cancel != NULL && atomic_load(ring->config.cancel));
}

/* Fails if `who` left, or, with `ask_lock`, died; asking costs a system call. */
static int check_peer(struct ds4_shm_ring *ring, int32_t who, bool ask_lock, struct ds4_err *err)
{
    struct ring_side *peer = side_of(ring, who);

    if (atomic_load(&peer->left) != 0)
        return ds4_fail(err, DS4_E_UNAVAILABLE, "stage %d left the pipe", (int)stage_of(ring, who));
    if (ask_lock && atomic_load(&peer->joined) != 0 && !is_locked(ring->fd, who))
        return ds4_fail(err, DS4_E_UNAVAILABLE, "stage %d died", (int)stage_of(ring, who));
    return 0;
}

/* Sleeps until *word is no longer `seen`.  `who` is the side that changes it. */
static int wait_change(struct ds4_shm_ring *ring, int32_t who, _Atomic uint32_t *word,
                       uint32_t seen, struct ds4_deadline deadline, struct ds4_err *err)
{
    bool slept_in_vain = false;

    while (atomic_load(word) == seen) {
        int64_t left_ns = deadline.at_ns - ds4_clock_ns();
        struct timespec slice;

        if (is_cancelled(ring))
            return ds4_fail(err, DS4_E_CANCELLED, "the pipe was aborted");
        if (left_ns <= 0)
            return ds4_fail(err, DS4_E_TIMEOUT, "stage %d did not answer in time",
                            (int)stage_of(ring, who));
        /* What it did last still counts. */
        if (check_peer(ring, who, slept_in_vain, err) && atomic_load(word) == seen)
            return -1;
        if (left_ns > SLICE_NS)
            left_ns = SLICE_NS;
        slice = (struct timespec){.tv_sec = 0, .tv_nsec = (long)left_ns};
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
        slept_in_vain = true;
    }
    return 0;
}

/* ---- the segment ---- */

static struct ring_shape shape_of(const struct ds4_shm_ring_config *config)
{
    struct ring_shape shape;

    memset(&shape, 0, sizeof(shape)); /* compared as bytes */
    memcpy(shape.magic, magic, sizeof(magic));
    shape.version = RING_VERSION;
    shape.generation = config->generation;
    memcpy(shape.key, config->key, sizeof(shape.key));
    shape.producer_stage = config->producer_stage;
    shape.first_consumer_stage = config->first_consumer_stage;
    shape.n_consumer = config->n_consumer;
    shape.n_slot = config->n_slot;
    shape.slot_bytes = config->slot_bytes;
    return shape;
}

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static size_t slots_offset(const struct ds4_shm_ring_config *config)
{
    return round_up(sizeof(struct ring_head) + (size_t)config->n_slot * sizeof(struct slot_head),
                    PAGE_BYTES);
}

static struct ds4_shm_ring *ring_new(const struct ds4_shm_ring_config *config, int32_t self,
                                     struct ds4_err *err)
{
    struct ds4_shm_ring *ring = NULL;
    size_t all_slots;

    if (config->n_consumer < 1 || config->n_consumer > DS4_MAX_STAGES || config->n_slot < 1 ||
        config->slot_bytes < 1 || config->slot_bytes > SIZE_MAX / 2) {
        ds4_fail(err, DS4_E_INVALID, "ring of %d slots of %zu bytes for %d stages",
                 (int)config->n_slot, config->slot_bytes, (int)config->n_consumer);
        return NULL;
    }
    if (ds4_mul_size(round_up(config->slot_bytes, LINE_BYTES), (size_t)config->n_slot, "ring",
                     &all_slots, err))
        return NULL;
    ring = calloc(1, sizeof(*ring));
    if (ring == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for a ring");
        return NULL;
    }
    ring->config = *config;
    ring->stride = round_up(config->slot_bytes, LINE_BYTES);
    ring->fd = -1;
    ring->self = self;
    if (ds4_add_size(slots_offset(config), all_slots, "ring", &ring->map_bytes, err)) {
        free(ring);
        return NULL;
    }
    return ring;
}

static int map_segment(struct ds4_shm_ring *ring, struct ds4_err *err)
{
    void *map = mmap(NULL, ring->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, 0);

    if (map == MAP_FAILED)
        return ds4_fail(err, DS4_E_IO, "could not map %zu bytes of shared memory: %s",
                        ring->map_bytes, strerror(errno));
    ring->head = map;
    ring->slots = (uint8_t *)map + slots_offset(&ring->config);
    return 0;
}

static void path_of(const char *name, char path[DS4_SHM_RING_NAME_BYTES + sizeof(SHM_DIR)])
{
    snprintf(path, DS4_SHM_RING_NAME_BYTES + sizeof(SHM_DIR), SHM_DIR "/%s", name);
}

static void unlink_name(const char *name)
{
    char path[DS4_SHM_RING_NAME_BYTES + sizeof(SHM_DIR)];

    path_of(name, path);
    unlink(path);
}

/* Removes segments of ours whose producer is gone. */
static void sweep_dead(void)
{
    DIR *dir = opendir(SHM_DIR);
    struct dirent *entry;
    struct stat st;
    int fd;

    if (dir == NULL)
        return;
    while ((entry = readdir(dir)) != NULL) {
        if (strncmp(entry->d_name, NAME_PREFIX, strlen(NAME_PREFIX)) != 0 ||
            strlen(entry->d_name) >= DS4_SHM_RING_NAME_BYTES)
            continue;
        fd = openat(dirfd(dir), entry->d_name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            continue;
        if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
            !is_locked(fd, PRODUCER))
            unlinkat(dirfd(dir), entry->d_name, 0);
        close(fd);
    }
    closedir(dir);
}

static int link_segment(struct ds4_shm_ring *ring, struct ds4_err *err)
{
    char self[64], path[DS4_SHM_RING_NAME_BYTES + sizeof(SHM_DIR)];

    snprintf(self, sizeof(self), "/proc/self/fd/%d", ring->fd);
    path_of(ring->config.name, path);
    if (linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) != 0)
        return ds4_fail(err, DS4_E_IO, "could not name shared memory: %s", strerror(errno));
    ring->named = true;
    return 0;
}

static int create_segment(struct ds4_shm_ring *ring, struct ds4_err *err)
{
    struct flock lock = lock_byte(PRODUCER);
    int rc;

    ring->fd = open(SHM_DIR, O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (ring->fd < 0)
        return ds4_fail(err, DS4_E_IO, "could not create shared memory: %s", strerror(errno));
    /* All pages now: a full /dev/shm is an error here and a SIGBUS later. */
    rc = posix_fallocate(ring->fd, 0, (off_t)ring->map_bytes);
    if (rc != 0)
        return ds4_fail(err, DS4_E_NOMEM, "could not take %zu bytes of shared memory: %s",
                        ring->map_bytes, strerror(rc));
    if (map_segment(ring, err))
        return -1;
    ring->head->shape = shape_of(&ring->config);
    atomic_store(&ring->head->producer.joined, 1);
    if (fcntl(ring->fd, F_OFD_SETLK, &lock) != 0)
        return ds4_fail(err, DS4_E_IO, "could not lock shared memory: %s", strerror(errno));
    return link_segment(ring, err);
}

struct ds4_shm_ring *ds4_shm_ring_create(const struct ds4_shm_ring_config *config,
                                         struct ds4_err *err)
{
    struct ds4_shm_ring *ring = ring_new(config, PRODUCER, err);

    if (ring == NULL)
        return NULL;
    sweep_dead();
    if (create_segment(ring, err)) {
        ds4_shm_ring_close(ring);
        return NULL;
    }
    return ring;
}

int ds4_shm_ring_meet(struct ds4_shm_ring *ring, struct ds4_deadline deadline, struct ds4_err *err)
{
    for (int32_t k = 0; k < ring->config.n_consumer; k++)
        if (wait_change(ring, k, &ring->head->consumer[k].joined, 0, deadline, err))
            return err != NULL && err->code == DS4_E_TIMEOUT
                       ? ds4_fail(err, DS4_E_TIMEOUT, "stage %d did not join the pipe",
                                  (int)stage_of(ring, k))
                       : -1;
    unlink_name(ring->config.name);
    ring->named = false;
    return 0;
}

static int open_segment(struct ds4_shm_ring *ring, struct ds4_deadline deadline,
                        struct ds4_err *err)
{
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = JOIN_RETRY_NS};
    char path[DS4_SHM_RING_NAME_BYTES + sizeof(SHM_DIR)];

    path_of(ring->config.name, path);
    for (;;) {
        ring->fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
        if (ring->fd >= 0)
            return 0;
        if (errno != ENOENT)
            return ds4_fail(err, DS4_E_IO, "could not open shared memory of stage %d: %s",
                            (int)ring->config.producer_stage, strerror(errno));
        if (is_cancelled(ring))
            return ds4_fail(err, DS4_E_CANCELLED, "the pipe was aborted");
        if (ds4_deadline_passed(deadline))
            return ds4_fail(err, DS4_E_TIMEOUT, "stage %d did not join the pipe",
                            (int)ring->config.producer_stage);
        nanosleep(&pause, NULL);
    }
}

static int join_segment(struct ds4_shm_ring *ring, struct ds4_err *err)
{
    struct ring_shape want = shape_of(&ring->config);
    struct flock lock = lock_byte(ring->self);
    struct stat st;

    if (fstat(ring->fd, &st) != 0 || st.st_uid != geteuid() ||
        (uint64_t)st.st_size != (uint64_t)ring->map_bytes)
        return ds4_fail(err, DS4_E_PROTOCOL, "shared memory of stage %d has another owner or size",
                        (int)ring->config.producer_stage);
    if (map_segment(ring, err))
        return -1;
    if (memcmp(&ring->head->shape, &want, sizeof(want)) != 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "shared memory of stage %d was made for another shape",
                        (int)ring->config.producer_stage);
    if (fcntl(ring->fd, F_OFD_SETLK, &lock) != 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "another process joined as stage %d",
                        (int)stage_of(ring, ring->self));
    if (!is_locked(ring->fd, PRODUCER)) {
        unlink_name(ring->config.name);
        return ds4_fail(err, DS4_E_UNAVAILABLE, "stage %d died", (int)ring->config.producer_stage);
    }
    atomic_store(&ring->head->consumer[ring->self].joined, 1);
    wake(&ring->head->consumer[ring->self].joined);
    return 0;
}

struct ds4_shm_ring *ds4_shm_ring_join(const struct ds4_shm_ring_config *config, int32_t consumer,
                                       struct ds4_deadline deadline, struct ds4_err *err)
{
    struct ds4_shm_ring *ring = ring_new(config, consumer, err);

    if (ring == NULL)
        return NULL;
    if (open_segment(ring, deadline, err) || join_segment(ring, err)) {
        ds4_shm_ring_close(ring);
        return NULL;
    }
    return ring;
}

void ds4_shm_ring_close(struct ds4_shm_ring *ring)
{
    if (ring == NULL)
        return;
    if (ring->head != NULL && atomic_load(&side_of(ring, ring->self)->joined)) {
        atomic_store(&side_of(ring, ring->self)->left, 1);
        wake(&side_of(ring, ring->self)->count);
    }
    if (ring->named)
        unlink_name(ring->config.name);
    if (ring->head != NULL)
        munmap(ring->head, ring->map_bytes);
    if (ring->fd >= 0)
        close(ring->fd);
    free(ring);
}

void *ds4_shm_ring_slots(struct ds4_shm_ring *ring, size_t *bytes)
{
    *bytes = ring->map_bytes - (size_t)(ring->slots - (uint8_t *)ring->head);
    return ring->slots;
}

int ds4_shm_ring_check(struct ds4_shm_ring *ring, struct ds4_err *err)
{
    if (ring->self != PRODUCER)
        return check_peer(ring, PRODUCER, true, err);
    for (int32_t k = 0; k < ring->config.n_consumer; k++)
        if (check_peer(ring, k, true, err))
            return -1;
    return 0;
}

void ds4_shm_ring_abort(struct ds4_shm_ring *ring)
{
    atomic_store(&ring->aborted, true);
    /* A waiter between its check and its sleep misses this wake and sees the flag a slice later. */
    wake(&ring->head->producer.count);
    for (int32_t k = 0; k < ring->config.n_consumer; k++) {
        wake(&ring->head->consumer[k].count);
        wake(&ring->head->consumer[k].joined);
    }
}

/* ---- slots ---- */

/* Slots between two counters; more than the ring has is a peer's lie. */
static int count_between(const struct ds4_shm_ring *ring, int32_t who, uint32_t sent,
                         uint32_t taken, uint32_t *out, struct ds4_err *err)
{
    *out = sent - taken;
    if (*out <= (uint32_t)ring->config.n_slot)
        return 0;
    return ds4_fail(err, DS4_E_PROTOCOL, "stage %d claims %u slots in a ring of %d",
                    (int)stage_of(ring, who), *out, (int)ring->config.n_slot);
}

static void *slot_here(struct ds4_shm_ring *ring)
{
    return ring->slots + (size_t)ring->index * ring->stride;
}

/* Steps to the next slot and tells the peers. */
static void advance(struct ds4_shm_ring *ring)
{
    struct ring_side *self = side_of(ring, ring->self);

    ring->count++;
    ring->index = (ring->index + 1) % ring->config.n_slot;
    atomic_store(&self->count, ring->count);
    wake(&self->count);
}

void *ds4_shm_ring_reserve(struct ds4_shm_ring *ring, struct ds4_deadline deadline,
                           struct ds4_err *err)
{
    for (int32_t k = 0; k < ring->config.n_consumer; k++) {
        _Atomic uint32_t *word = &ring->head->consumer[k].count;
        uint32_t taken = atomic_load(word), in_use;

        if (count_between(ring, k, ring->count, taken, &in_use, err))
            return NULL;
        if (in_use < (uint32_t)ring->config.n_slot)
            continue;
        if (wait_change(ring, k, word, taken, deadline, err))
            return NULL;
        if (count_between(ring, k, ring->count, atomic_load(word), &in_use, err))
            return NULL;
    }
    if (is_cancelled(ring)) {
        ds4_fail(err, DS4_E_CANCELLED, "the pipe was aborted");
        return NULL;
    }
    return slot_here(ring);
}

void ds4_shm_ring_commit(struct ds4_shm_ring *ring, int64_t tag, size_t bytes)
{
    ring->head->slot[ring->index] = (struct slot_head){tag, bytes};
    advance(ring);
}

const void *ds4_shm_ring_peek(struct ds4_shm_ring *ring, int64_t *tag, size_t *bytes,
                              struct ds4_deadline deadline, struct ds4_err *err)
{
    _Atomic uint32_t *word = &ring->head->producer.count;
    struct slot_head slot;
    uint32_t ready;

    if (wait_change(ring, PRODUCER, word, ring->count, deadline, err) ||
        count_between(ring, PRODUCER, atomic_load(word), ring->count, &ready, err))
        return NULL;
    if (is_cancelled(ring)) {
        ds4_fail(err, DS4_E_CANCELLED, "the pipe was aborted");
        return NULL;
    }
    slot = ring->head->slot[ring->index];
    if (slot.bytes > ring->config.slot_bytes) {
        ds4_fail(err, DS4_E_PROTOCOL, "stage %d filled %llu bytes of a slot of %zu",
                 (int)ring->config.producer_stage, (unsigned long long)slot.bytes,
                 ring->config.slot_bytes);
        return NULL;
    }
    *tag = slot.tag;
    *bytes = (size_t)slot.bytes;
    return slot_here(ring);
}

void ds4_shm_ring_release(struct ds4_shm_ring *ring)
{
    advance(ring);
}
