/* Opens model files: one GGUF or a split set, mapped or read with pread.
 *
 * gguf.c has checked every file alone; here the set is checked as a whole (equal counts, indices in
 * order, the announced total, no name twice) and the tables are merged.  Names are found by binary
 * search in a sorted index: a thousand names need no hash table, and no file can make it slow.
 * A synthetic model is a set of one whose header lies in memory and whose data is generated on reading.
 * Invariant: every extent handed out lies inside the file as it was at open. */
#include "common/weights_file.h"

#include "common/log.h"
#include "common/synth_gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHARD_SUFFIX_BYTES 20 /* "-00001-of-00003.gguf" */
#define SHARD_DIGITS       5

struct shard {
    int fd; /* -1 before it is open */
    const uint8_t *map;
    struct ds4_gguf gguf;
};

struct ds4_weights_file {
    enum ds4_weights_access access;
    int32_t n_shard;
    struct shard *shard;
    size_t n_tensor;
    struct ds4_tensor_info *tensor;
    const struct ds4_tensor_info **by_name;
    struct ds4_synth_recipe *recipe; /* [n_tensor] of a synthetic model, else NULL */
};

/* ---- SIGBUS ------------------------------------------------------------------------------------ */

/* The mappings a SIGBUS may come from.  Read by the signal handler: only atomics. */
static struct {
    _Atomic uintptr_t base; /* 0 = free */
    _Atomic size_t bytes;
} mappings[DS4_WEIGHTS_MAX_SHARDS];

/* Size before base: a handler that sees the base sees a valid size.  A full table only means that a
 * fault there takes the default action. */
static void register_mapping(const void *base, size_t bytes)
{
    for (size_t i = 0; i < DS4_WEIGHTS_MAX_SHARDS; i++) {
        uintptr_t none = 0;

        if (atomic_load(&mappings[i].base) != 0)
            continue;
        if (!atomic_compare_exchange_strong(&mappings[i].base, &none, 1)) /* 1: being filled */
            continue;
        atomic_store(&mappings[i].bytes, bytes);
        atomic_store(&mappings[i].base, (uintptr_t)base);
        return;
    }
}

static void forget_mapping(const void *base)
{
    for (size_t i = 0; i < DS4_WEIGHTS_MAX_SHARDS; i++) {
        if (atomic_load(&mappings[i].base) == (uintptr_t)base) {
            atomic_store(&mappings[i].bytes, 0);
            atomic_store(&mappings[i].base, 0);
            return;
        }
    }
}

static void on_sigbus(int signo, siginfo_t *info, void *context)
{
    static const char line[] =
        "model file: a mapped page could not be read (the file shrank or its "
        "disk failed); the process ends\n";
    uintptr_t at = (uintptr_t)info->si_addr;
    ssize_t written;

    (void)context;
    for (size_t i = 0; i < DS4_WEIGHTS_MAX_SHARDS; i++) {
        uintptr_t base = atomic_load(&mappings[i].base);

        if (base > 1 && at >= base && at - base < atomic_load(&mappings[i].bytes)) {
            written = write(STDERR_FILENO, line, sizeof(line) - 1);
            (void)written;
            _exit(DS4_WEIGHTS_EXIT_SIGBUS);
        }
    }
    /* Not ours: with the default action restored the faulting access repeats and ends the process. */
    signal(signo, SIG_DFL);
}

int ds4_weights_sigbus_install(struct ds4_err *err)
{
    struct sigaction action = {0};

    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, NULL) != 0)
        return ds4_fail(err, DS4_E_BUG, "could not install the SIGBUS handler: %s",
                        strerror(errno));
    return 0;
}

/* ---- names of a split set ---------------------------------------------------------------------- */

static int parse_number(const char *text)
{
    int value = 0;

    for (int i = 0; i < SHARD_DIGITS; i++) {
        if (text[i] < '0' || text[i] > '9')
            return -1;
        value = value * 10 + (text[i] - '0');
    }
    return value;
}

/* True if the path ends like "-00001-of-00003.gguf"; *count = 3. */
static bool parse_shard_name(const char *path, int *count)
{
    size_t len = strlen(path);
    const char *tail = path + len - SHARD_SUFFIX_BYTES;

    if (len < SHARD_SUFFIX_BYTES || tail[0] != '-' || memcmp(tail + 6, "-of-", 4) != 0 ||
        strcmp(tail + 15, ".gguf") != 0 || parse_number(tail + 1) < 0)
        return false;
    *count = parse_number(tail + 10);
    return *count >= 0;
}

/* The path of another member of the set; the caller frees it. */
static char *sibling_path(const char *path, int32_t index, int32_t count)
{
    char *sibling;
    int prefix = (int)(strlen(path) - SHARD_SUFFIX_BYTES);

    if (asprintf(&sibling, "%.*s-%05" PRId32 "-of-%05" PRId32 ".gguf", prefix, path, index + 1,
                 count) < 0)
        return NULL;
    return sibling;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash == NULL ? path : slash + 1;
}

/* ---- opening ----------------------------------------------------------------------------------- */

static void close_shard(struct shard *shard)
{
    if (shard->map != NULL) {
        forget_mapping(shard->map);
        munmap((void *)shard->map, (size_t)shard->gguf.file_bytes);
    }
    ds4_gguf_deinit(&shard->gguf);
    if (shard->fd >= 0)
        close(shard->fd);
    *shard = (struct shard){.fd = -1};
}

static int open_shard(struct shard *shard, const char *path, enum ds4_weights_access access,
                      struct ds4_err *err)
{
    void *map;

    /* O_NONBLOCK: a FIFO must fail as "no regular file", not hang. */
    shard->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (shard->fd < 0) {
        ds4_fail(err, DS4_E_IO, "could not open: %s", strerror(errno));
        return ds4_err_wrap(err, "%s", base_name(path));
    }
    if (ds4_gguf_read(shard->fd, &shard->gguf, err))
        return ds4_err_wrap(err, "%s", base_name(path));
    if (access != DS4_WEIGHTS_MMAP)
        return 0;
    map = mmap(NULL, (size_t)shard->gguf.file_bytes, PROT_READ, MAP_SHARED, shard->fd, 0);
    if (map == MAP_FAILED) {
        ds4_fail(err, DS4_E_IO, "could not map %" PRIu64 " bytes: %s", shard->gguf.file_bytes,
                 strerror(errno));
        return ds4_err_wrap(err, "%s", base_name(path));
    }
    shard->map = map;
    register_mapping(map, (size_t)shard->gguf.file_bytes);
    return 0;
}

/* Number of files of the set and the index of this one; a single file is 0 of 1. */
static int read_split_keys(const struct ds4_gguf *gguf, int32_t *no, int32_t *count,
                           struct ds4_err *err)
{
    *no = 0;
    *count = 1;
    if (ds4_gguf_has(gguf, "split.count") &&
        ds4_gguf_get_i32(gguf, "split.count", 0, DS4_WEIGHTS_MAX_SHARDS, count, err))
        return -1;
    if (*count <= 1) {
        *count = 1;
        return 0;
    }
    return ds4_gguf_get_i32(gguf, "split.no", 0, *count - 1, no, err);
}

static int open_sibling(struct ds4_weights_file *wf, const char *path, int32_t index,
                        struct ds4_err *err)
{
    struct shard *shard = &wf->shard[index];
    char *sibling = sibling_path(path, index, wf->n_shard);
    int32_t no;
    int32_t count;
    int rc = -1;

    if (sibling == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "out of memory for a file name");
    if (open_shard(shard, sibling, wf->access, err)) {
        ds4_err_wrap(err, "incomplete split set of %" PRId32 " files", wf->n_shard);
        goto out;
    }
    if (read_split_keys(&shard->gguf, &no, &count, err)) {
        ds4_err_wrap(err, "%s", base_name(sibling));
        goto out;
    }
    if (count != wf->n_shard || no != index) {
        ds4_fail(err, DS4_E_CORRUPT,
                 "%s: split.no %" PRId32 " of %" PRId32 ", expected %" PRId32 " of %" PRId32,
                 base_name(sibling), no, count, index, wf->n_shard);
        goto out;
    }
    rc = 0;
out:
    free(sibling);
    return rc;
}

/* Opens the file at `path` and, if it belongs to a set, all the others. */
static int open_set(struct ds4_weights_file *wf, const char *path, struct ds4_err *err)
{
    struct shard first = {.fd = -1};
    int32_t no;
    int32_t count;
    int named = 1;
    bool is_shard_name = parse_shard_name(path, &named);

    if (open_shard(&first, path, wf->access, err))
        goto fail;
    if (read_split_keys(&first.gguf, &no, &count, err)) {
        ds4_err_wrap(err, "%s", base_name(path));
        goto fail;
    }
    if ((is_shard_name || count > 1) && (!is_shard_name || named != count)) {
        ds4_fail(err, DS4_E_CORRUPT,
                 "%s: the metadata says a set of %" PRId32 " files, the name says %d",
                 base_name(path), count, is_shard_name ? named : 1);
        goto fail;
    }
    wf->shard = calloc((size_t)count, sizeof(*wf->shard));
    if (wf->shard == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "out of memory for %" PRId32 " files", count);
        goto fail;
    }
    wf->n_shard = count;
    for (int32_t i = 0; i < count; i++)
        wf->shard[i].fd = -1;
    if (count == 1) {
        wf->shard[0] = first;
        return 0;
    }
    close_shard(&first);
    for (int32_t i = 0; i < count; i++) {
        if (open_sibling(wf, path, i, err))
            return -1;
    }
    return 0;
fail:
    close_shard(&first);
    return -1;
}

/* ---- synthetic models -------------------------------------------------------------------------- */

/* The header in a memory file that is as long as the model would be: the rest is a hole nobody reads. */
static int open_header(struct shard *shard, const struct ds4_synth *synth, struct ds4_err *err)
{
    const struct ds4_model_part all = ds4_model_all(&synth->shape);
    struct ds4_buf header;
    uint64_t data_bytes;
    int rc = -1;

    ds4_buf_init(&header, DS4_SYNTH_HEADER_MAX_BYTES);
    if (ds4_synth_header(synth, &all, &header, &data_bytes, err) != 0)
        goto out;
    shard->fd = memfd_create("ds4-synth", MFD_CLOEXEC);
    if (shard->fd < 0 || ftruncate(shard->fd, (off_t)(header.len + data_bytes)) != 0 ||
        pwrite(shard->fd, header.ptr, header.len, 0) != (ssize_t)header.len) {
        ds4_fail(err, DS4_E_IO, "could not keep a header of %zu bytes: %s", header.len,
                 strerror(errno));
        goto out;
    }
    rc = ds4_gguf_read(shard->fd, &shard->gguf, err);
out:
    ds4_buf_deinit(&header);
    return rc;
}

struct recipe_walk {
    struct ds4_weights_file *wf;
    const struct ds4_synth *synth;
    size_t at; /* the table lists tensors in the order of the catalogue */
};

static int add_recipe(void *arg, const struct ds4_tensor_want *want)
{
    struct recipe_walk *walk = arg;

    ds4_synth_recipe_of(walk->synth->seed, want, walk->wf->tensor[walk->at].dtype,
                        &walk->wf->recipe[walk->at]);
    walk->at++;
    return 0;
}

static int open_synth(struct ds4_weights_file *wf, const char *path, struct ds4_synth *synth,
                      struct ds4_err *err)
{
    if (ds4_synth_parse(path, synth, err) != 0)
        return -1;
    wf->shard = calloc(1, sizeof(*wf->shard));
    if (wf->shard == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "out of memory for a synthetic model");
    wf->n_shard = 1;
    wf->shard[0].fd = -1;
    return open_header(&wf->shard[0], synth, err);
}

static int set_recipes(struct ds4_weights_file *wf, const struct ds4_synth *synth,
                       struct ds4_err *err)
{
    const struct ds4_model_part all = ds4_model_all(&synth->shape);
    struct recipe_walk walk = {wf, synth, 0};

    wf->recipe = calloc(wf->n_tensor + 1, sizeof(*wf->recipe));
    if (wf->recipe == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "out of memory for %zu recipes", wf->n_tensor);
    return ds4_model_each_tensor(&synth->shape, &all, add_recipe, &walk);
}

/* Bytes [offset, offset + n) of a generated tensor: whole blocks straight to dst, cut ones aside. */
static void generate(const struct ds4_synth_recipe *r, uint64_t offset, size_t n, uint8_t *dst)
{
    uint8_t block[DS4_SYNTH_MAX_BLOCK_BYTES];
    size_t size = r->block_bytes;

    while (n > 0) {
        size_t skip = (size_t)(offset % size);
        size_t part = n;

        if (skip == 0 && n >= size) {
            part = n / size * size;
            ds4_synth_fill(r, offset / size, part / size, dst);
        } else {
            part = n < size - skip ? n : size - skip;
            ds4_synth_fill(r, offset / size, 1, block);
            memcpy(dst, block + skip, part);
        }
        dst += part;
        offset += part;
        n -= part;
    }
}

/* ---- tables ------------------------------------------------------------------------------------ */

static int compare_name(const void *a, const void *b)
{
    const struct ds4_tensor_info *x = *(const struct ds4_tensor_info *const *)a;
    const struct ds4_tensor_info *y = *(const struct ds4_tensor_info *const *)b;

    return strcmp(x->name, y->name);
}

/* One table over all files, indexed by name. */
static int merge_tables(struct ds4_weights_file *wf, struct ds4_err *err)
{
    int64_t total = 0;
    size_t at = 0;

    for (int32_t s = 0; s < wf->n_shard; s++)
        wf->n_tensor += wf->shard[s].gguf.n_tensor;
    if (wf->n_shard > 1) {
        if (ds4_gguf_get_i64(&wf->shard[0].gguf, "split.tensors.count", 0, INT32_MAX, &total, err))
            return -1;
        if ((size_t)total != wf->n_tensor)
            return ds4_fail(err, DS4_E_CORRUPT,
                            "the split set has %zu tensors, split.tensors.count says %" PRId64,
                            wf->n_tensor, total);
    }
    wf->tensor = calloc(wf->n_tensor + 1, sizeof(*wf->tensor));
    wf->by_name = calloc(wf->n_tensor + 1, sizeof(*wf->by_name));
    if (wf->tensor == NULL || wf->by_name == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "out of memory for %zu tensors", wf->n_tensor);
    for (int32_t s = 0; s < wf->n_shard; s++) {
        for (size_t i = 0; i < wf->shard[s].gguf.n_tensor; i++) {
            wf->tensor[at] = wf->shard[s].gguf.tensor[i];
            wf->tensor[at].shard = s;
            wf->by_name[at] = &wf->tensor[at];
            at++;
        }
    }
    qsort(wf->by_name, wf->n_tensor, sizeof(*wf->by_name), compare_name);
    for (size_t i = 1; i < wf->n_tensor; i++) {
        if (strcmp(wf->by_name[i]->name, wf->by_name[i - 1]->name) == 0)
            return ds4_fail(err, DS4_E_CORRUPT,
                            "tensor %s occurs in files %" PRId32 " and %" PRId32 " of the set",
                            wf->by_name[i]->name, wf->by_name[i - 1]->shard + 1,
                            wf->by_name[i]->shard + 1);
    }
    return 0;
}

struct ds4_weights_file *ds4_weights_open(const char *path, enum ds4_weights_access access,
                                          struct ds4_err *err)
{
    struct ds4_weights_file *wf = calloc(1, sizeof(*wf));
    bool is_synth = ds4_synth_is_path(path);
    struct ds4_synth synth;

    if (wf == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "out of memory for a model file");
        return NULL;
    }
    wf->access = access;
    if (is_synth ? open_synth(wf, path, &synth, err) : open_set(wf, path, err)) {
        ds4_weights_close(wf);
        return NULL;
    }
    if (merge_tables(wf, err) || (is_synth && set_recipes(wf, &synth, err))) {
        ds4_err_wrap(err, "%s", base_name(path));
        ds4_weights_close(wf);
        return NULL;
    }
    for (int32_t s = 0; s < wf->n_shard; s++) {
        const struct ds4_gguf *gguf = &wf->shard[s].gguf;

        if (gguf->n_holes != 0 || gguf->n_reordered != 0)
            ds4_log(DS4_LOG_INFO, "weights.layout", "shard=%" PRId32 " holes=%zu reordered=%zu", s,
                    gguf->n_holes, gguf->n_reordered);
    }
    return wf;
}

void ds4_weights_close(struct ds4_weights_file *wf)
{
    if (wf == NULL)
        return;
    for (int32_t s = 0; s < wf->n_shard; s++)
        close_shard(&wf->shard[s]);
    free(wf->shard);
    free(wf->tensor);
    free(wf->by_name);
    free(wf->recipe);
    free(wf);
}

/* ---- reading ----------------------------------------------------------------------------------- */

const struct ds4_synth_recipe *ds4_weights_recipe(const struct ds4_weights_file *wf,
                                                  const struct ds4_tensor_info *info)
{
    return wf->recipe == NULL ? NULL : &wf->recipe[info - wf->tensor];
}

const struct ds4_gguf *ds4_weights_meta(const struct ds4_weights_file *wf)
{
    return &wf->shard[0].gguf;
}

int32_t ds4_weights_n_shard(const struct ds4_weights_file *wf)
{
    return wf->n_shard;
}

const struct ds4_tensor_info *ds4_weights_find(const struct ds4_weights_file *wf, const char *name)
{
    size_t low = 0;
    size_t high = wf->n_tensor;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int order = strcmp(wf->by_name[mid]->name, name);

        if (order == 0)
            return wf->by_name[mid];
        if (order < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return NULL;
}

size_t ds4_weights_n_tensor(const struct ds4_weights_file *wf)
{
    return wf->n_tensor;
}

const struct ds4_tensor_info *ds4_weights_at(const struct ds4_weights_file *wf, size_t i)
{
    return &wf->tensor[i];
}

const void *ds4_weights_data(const struct ds4_weights_file *wf, const struct ds4_tensor_info *info,
                             struct ds4_err *err)
{
    const struct shard *shard = &wf->shard[info->shard];
    struct stat st;

    if (shard->map == NULL) {
        ds4_fail(err, DS4_E_BUG, "tensor %s: the file is not mapped", info->name);
        return NULL;
    }
    if (info->bytes == 0) {
        ds4_fail(err, DS4_E_INVALID, "tensor %s: the size of type %" PRIu32 " is unknown",
                 info->name, info->gguf_type);
        return NULL;
    }
    if (fstat(shard->fd, &st) != 0 || (uint64_t)st.st_size < info->offset + info->bytes) {
        ds4_fail(err, DS4_E_IO, "tensor %s: the file shrank after it was opened", info->name);
        return NULL;
    }
    return shard->map + info->offset;
}

int ds4_weights_read(const struct ds4_weights_file *wf, const struct ds4_tensor_info *info,
                     uint64_t offset, size_t n, void *dst, struct ds4_err *err)
{
    const struct shard *shard = &wf->shard[info->shard];
    uint8_t *to = dst;
    size_t done = 0;
    ssize_t got;

    if (offset > info->bytes || n > info->bytes - offset)
        return ds4_fail(err, DS4_E_INVALID,
                        "tensor %s: %zu bytes at %" PRIu64 " lie outside its %" PRIu64, info->name,
                        n, offset, info->bytes);
    if (wf->recipe != NULL) {
        generate(ds4_weights_recipe(wf, info), offset, n, to);
        return 0;
    }
    while (done < n) {
        got = pread(shard->fd, to + done, n - done, (off_t)(info->offset + offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return ds4_fail(err, DS4_E_IO, "tensor %s: could not be read: %s", info->name,
                            strerror(errno));
        if (got == 0)
            return ds4_fail(err, DS4_E_IO, "tensor %s: the file shrank after it was opened",
                            info->name);
        done += (size_t)got;
    }
    return 0;
}
