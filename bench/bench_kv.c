/* Sequence state: what it weighs, what keeping and bringing back costs.
 *
 *   bench_kv [FOLDER [SESSION_TOK]]      a folder below /tmp, 56000
 *
 * No model runs: caches of the given shapes on the CPU backend are filled with bytes, and worker/kv_point.c
 * and kv_tier.c work on them as they do in a stage.
 *
 * bytes    compressed rows per token, a point at a multiple of 128 and the largest one, from the layout
 * point    save and install of one point, an anchor and an exact tail: median of REPEATS
 * session  all extents and the tail of SESSION_TOK tokens written (no rate limit), then read, verified and
 *          installed into other blocks, up to the point where the next token could run.  The files come
 *          out of the page cache: on a cold disk add bytes / rate.
 *
 * Flash in one stage is the work of all its stages together; with S of them on disks and links of their
 * own, each has about 1/S.  Printed, nothing is asserted. */
#include "common/clock.h"
#include "common/log.h"
#include "proto/point.h"
#include "worker/kv_tier.h"

#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REPEATS   51
#define MAX_LAYER 64
#define MIB       (1024.0 * 1024.0)

/* A part's size and digest, as the router's manifest would have them. */
struct written {
    uint64_t bytes;
    uint8_t digest[DS4_ID_BYTES];
};

struct rig {
    const char *name;
    struct ds4_kv_layer_shape layer[MAX_LAYER];
    struct ds4_kv_shape shape;
    const struct ds4_backend *backend;
    struct ds4_device *dev;
    struct ds4_kv kv;
    struct ds4_kv_store store;
    struct ds4_kv_tier *tier;
    int32_t n_block;         /* of the session */
    struct written *written; /* [parts], while writing; by job */
    pthread_mutex_t lock;    /* guards the three below */
    pthread_cond_t told;
    int32_t n_done;
    uint64_t n_bytes;
    bool failed;
};

static int32_t session_tok = 56000;

static void must(int rc, const struct ds4_err *err)
{
    if (rc == 0)
        return;
    fprintf(stderr, "%s\n", err->msg);
    exit(1);
}

static double ms_since(int64_t start_ns)
{
    return (double)(ds4_clock_ns() - start_ns) / (double)DS4_NS_PER_MS;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *v, size_t n)
{
    qsort(v, n, sizeof(*v), compare);
    return v[n / 2];
}

/* ---- rigs ------------------------------------------------------------------------------------------- */

static void note_done(void *arg, const struct ds4_kv_done *done)
{
    struct rig *r = arg;

    if (r->written != NULL) {
        r->written[done->job].bytes = done->bytes;
        memcpy(r->written[done->job].digest, done->digest, DS4_ID_BYTES);
    }
    pthread_mutex_lock(&r->lock);
    r->n_done++;
    r->n_bytes += done->bytes;
    if (done->reason != DS4_KV_OK) {
        r->failed = true;
        fprintf(stderr, "job %llu: %s\n", (unsigned long long)done->job, done->text);
    }
    pthread_cond_signal(&r->told);
    pthread_mutex_unlock(&r->lock);
}

static void await(struct rig *r, int32_t n)
{
    pthread_mutex_lock(&r->lock);
    while (r->n_done < n)
        pthread_cond_wait(&r->told, &r->lock);
    if (r->failed)
        exit(1);
    pthread_mutex_unlock(&r->lock);
}

/* Layers [first, end) of a model whose layers from the third on alternate 4, 128. */
static void set_layers(struct rig *r, int32_t first, int32_t end)
{
    for (int32_t l = first; l < end; l++)
        r->layer[l - first] = (struct ds4_kv_layer_shape){.ratio = l < 2        ? 0
                                                                   : l % 2 == 0 ? 4
                                                                                : 128,
                                                          .overlap = l >= 2 && l % 2 == 0,
                                                          .indexer = l >= 2 && l % 2 == 0};
    r->shape.n_layer = end - first;
    r->shape.layer = r->layer;
}

static void open_rig(struct rig *r, const char *dir)
{
    const struct ds4_device_config config = {.n_thread = 1};
    struct ds4_kv_tier_config tier = {.store = &r->store, .dir = dir, .done = note_done};
    struct ds4_point_shape point;
    struct ds4_err err = {0};
    int64_t unit, budget;
    void *rings, *pages, *area, *arena;

    r->n_block = (session_tok + DS4_BLOCK_TOK - 1) / DS4_BLOCK_TOK;
    r->shape.window_tok = 128;
    r->shape.hot_tok = 120;
    r->shape.n_slot = 2;
    r->shape.n_block = 2 * r->n_block;
    r->shape.table_blocks = r->n_block + 1;
    r->backend = ds4_backend_find("cpu");
    r->dev = r->backend->open(&config, &err);
    must(r->dev == NULL ? -1 : 0, &err);
    must(ds4_kv_point_shape(&r->shape, &point, &err), &err);
    unit = ds4_kv_unit_bytes(&point);
    budget =
        ds4_unit_round((int64_t)ds4_kv_block_bytes(&r->shape) * (r->n_block + 8), (int32_t)unit) +
        8 * ds4_unit_round(ds4_point_bytes_max(&point), (int32_t)unit) + unit * r->n_block;
    rings = r->backend->alloc(r->dev, ds4_kv_rings_bytes(&r->shape), "rings", &err);
    pages = r->backend->alloc(r->dev, ds4_kv_pages_bytes(&r->shape), "pages", &err);
    area = r->backend->alloc(r->dev, ds4_kv_store_area_bytes(&r->shape), "area", &err);
    arena = r->backend->alloc_host(r->dev, (size_t)budget, "points", &err);
    must(rings == NULL || pages == NULL || area == NULL || arena == NULL ? -1 : 0, &err);
    must(ds4_kv_init(&r->kv, &r->shape, rings, pages, &err), &err);
    must(ds4_kv_store_init(&r->store, r->backend, r->dev, &r->kv, area, arena,
                           (int32_t)(budget / unit), &err),
         &err);
    ds4_kv_store_reset(&r->store, budget);
    memset(rings, 0x3c, ds4_kv_rings_bytes(&r->shape));
    for (size_t i = 0, n = ds4_kv_pages_bytes(&r->shape); i < n; i++)
        ((uint8_t *)pages)[i] = (uint8_t)(i * 2654435761u >> 13);
    tier.done_arg = r;
    tier.fingerprint[0] = (uint8_t)r->shape.n_layer;
    tier.fingerprint[1] = (uint8_t)r->shape.d_head;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->told, NULL);
    r->tier = ds4_kv_tier_open(&tier, &err);
    must(r->tier == NULL ? -1 : 0, &err);
}

static void close_rig(struct rig *r)
{
    ds4_kv_tier_close(r->tier);
    ds4_kv_store_deinit(&r->store);
    ds4_kv_deinit(&r->kv);
    r->backend->close(r->dev);
}

/* ---- measurements ------------------------------------------------------------------------------------ */

static void print_bytes(const struct rig *r)
{
    struct ds4_kv_section section[2 * MAX_LAYER];
    int32_t n = ds4_kv_row_sections(&r->shape, 0, DS4_EXTENT_TOK, section);

    printf("%-14s bytes: %.2f per token, block %.2f MiB, anchor %.2f MiB, largest point %.2f MiB\n",
           r->name, (double)ds4_kv_sections_bytes(section, n) / DS4_EXTENT_TOK,
           (double)ds4_kv_block_bytes(&r->shape) / MIB,
           (double)ds4_point_bytes(&r->store.shape, 1 << 20) / MIB,
           (double)ds4_point_bytes_max(&r->store.shape) / MIB);
}

/* Slot 0 as if it had run to pos. */
static void stand_at(struct rig *r, int32_t pos, uint32_t epoch)
{
    struct ds4_err err = {0};

    must(ds4_kv_open(&r->kv, 0, 1, epoch, &err), &err);
    must(ds4_kv_install(&r->kv.slot[0], pos, &err), &err);
}

static void measure_point(struct rig *r, const char *what, int32_t pos)
{
    static uint32_t epoch;
    double save_us[REPEATS], install_us[REPEATS];
    struct ds4_err err = {0};

    for (int i = 0; i < REPEATS; i++) {
        int64_t start_ns;

        stand_at(r, pos, ++epoch);
        start_ns = ds4_clock_ns();
        must(ds4_kv_point_save(&r->store, 0, pos, 1, &err), &err);
        ds4_kv_store_settle(&r->store);
        save_us[i] = ms_since(start_ns) * 1000;
        must(ds4_kv_open(&r->kv, 0, 1, ++epoch, &err), &err);
        start_ns = ds4_clock_ns();
        must(ds4_kv_point_install(&r->store, 0, pos, 1, &err), &err);
        ds4_kv_store_settle(&r->store);
        install_us[i] = ms_since(start_ns) * 1000;
        must(ds4_kv_point_drop(&r->store, 1, &err), &err);
    }
    must(ds4_kv_close(&r->kv, 0, &err), &err);
    printf("%-14s point, %s: %.2f MiB, save %.0f us, install %.0f us\n", r->name, what,
           (double)ds4_point_bytes(&r->store.shape, pos) / MIB, median(save_us, REPEATS),
           median(install_us, REPEATS));
}

static struct ds4_kv_write part_of(int32_t i, const int32_t *block)
{
    int32_t begin = i * DS4_EXTENT_TOK;
    bool tail = begin + DS4_EXTENT_TOK > session_tok;
    struct ds4_kv_write w = {.generation = 1,
                             .job = (uint64_t)i,
                             .key = {(uint8_t)i, (uint8_t)(i >> 8), 1},
                             .kind = tail ? DS4_KV_TAIL : DS4_KV_EXTENT,
                             .begin = begin,
                             .end = tail ? session_tok : begin + DS4_EXTENT_TOK,
                             .point = tail ? 1 : 0,
                             .block = block + begin / DS4_BLOCK_TOK};

    w.n_block = (w.end - w.begin + DS4_BLOCK_TOK - 1) / DS4_BLOCK_TOK;
    return w;
}

static void write_session(struct rig *r, struct written *written, const int32_t *block,
                          int32_t n_part)
{
    int64_t start_ns = ds4_clock_ns();
    double ms;

    r->n_done = 0;
    r->n_bytes = 0;
    r->written = written;
    for (int32_t i = 0; i < n_part; i++) {
        struct ds4_kv_write w = part_of(i, block);

        await(r, i - DS4_MAX_KV_WRITES + 1);
        ds4_kv_tier_write(r->tier, &w);
    }
    await(r, n_part);
    r->written = NULL;
    ms = ms_since(start_ns);
    printf("%-14s session of %d tokens: %.1f MiB written and synced in %.0f ms, %.0f MiB/s\n",
           r->name, (int)session_tok, (double)r->n_bytes / MIB, ms,
           (double)r->n_bytes / MIB / ms * 1000);
}

static void restore_session(struct rig *r, const struct written *written, const int32_t *block,
                            int32_t n_part)
{
    int64_t start_ns = ds4_clock_ns();
    double read_ms, ms;
    struct ds4_err err = {0};

    r->n_done = 0;
    r->n_bytes = 0;
    for (int32_t i = 0; i < n_part; i++) {
        struct ds4_kv_write w = part_of(i, block);
        struct ds4_kv_part_ref ref = {.last_layer = r->shape.n_layer, .bytes = written[i].bytes};
        struct ds4_kv_read read = {.generation = 1,
                                   .job = (uint64_t)i,
                                   .staging = (uint64_t)i + 1,
                                   .kind = w.kind,
                                   .begin = w.begin,
                                   .end = w.end,
                                   .n_part = 1,
                                   .part = &ref};

        memcpy(read.key, w.key, sizeof(read.key));
        memcpy(ref.digest, written[i].digest, sizeof(ref.digest));
        await(r, i - DS4_MAX_KV_JOBS + 1);
        ds4_kv_tier_read(r->tier, &read);
    }
    await(r, n_part);
    read_ms = ms_since(start_ns);
    for (int32_t i = 0; i < n_part; i++) {
        struct ds4_kv_write w = part_of(i, block);
        struct ds4_kv_op op = {.kind = DS4_KV_STAGED_INSTALL,
                               .staging = (uint64_t)i + 1,
                               .point = w.kind == DS4_KV_TAIL ? 2 : 0,
                               .first_block = w.begin / DS4_BLOCK_TOK,
                               .n_block = w.n_block,
                               .block = w.block};

        must(ds4_kv_tier_install(r->tier, &op, &err), &err);
    }
    must(ds4_kv_open(&r->kv, 1, 2, 1, &err), &err);
    must(ds4_kv_point_install(&r->store, 1, session_tok, 2, &err), &err);
    ds4_kv_store_settle(&r->store);
    ms = ms_since(start_ns);
    printf("%-14s restored in %.0f ms (read and verified %.0f, installed %.0f), %.0f MiB/s\n",
           r->name, ms, read_ms, ms - read_ms, (double)r->n_bytes / MIB / ms * 1000);
}

static void run(struct rig *r, const char *dir)
{
    int32_t n_part = session_tok / DS4_EXTENT_TOK + 1;
    struct written *written;
    int32_t *block;
    struct ds4_err err = {0};

    open_rig(r, dir);
    print_bytes(r);
    measure_point(r, "anchor", 128);
    measure_point(r, "exact tail", 255);
    block = calloc(2 * (size_t)r->n_block, sizeof(*block));
    written = calloc((size_t)n_part, sizeof(*written));
    if (block == NULL || written == NULL)
        exit(1);
    for (int32_t b = 0; b < 2 * r->n_block; b++)
        block[b] = b;
    stand_at(r, session_tok, 1u << 20);
    must(ds4_kv_point_save(&r->store, 0, session_tok, 1, &err), &err);
    write_session(r, written, block, n_part);
    restore_session(r, written, block + r->n_block, n_part);
    free(written);
    free(block);
    close_rig(r);
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    return remove(path);
}

int main(int argc, char **argv)
{
    char dir[] = "/tmp/ds4-bench-kv-XXXXXX";
    static struct rig tiny = {.name = "tiny f32"}, flash = {.name = "Flash packed"},
                      stage = {.name = "its stage 0-14"};
    const char *folder = argc > 1 ? argv[1] : mkdtemp(dir);

    if (argc > 2)
        session_tok = (int32_t)strtol(argv[2], NULL, 10);
    if (folder == NULL || session_tok < 256 || session_tok > DS4_MAX_POS)
        return 2;
    ds4_log_set_level(DS4_LOG_WARN);
    set_layers(&tiny, 0, 8);
    tiny.shape.d_head = 64;
    tiny.shape.d_rope = 16;
    tiny.shape.d_index = 32;
    set_layers(&flash, 0, 43);
    set_layers(&stage, 0, 15);
    flash.shape.d_head = stage.shape.d_head = 512;
    flash.shape.d_rope = stage.shape.d_rope = 64;
    flash.shape.d_index = stage.shape.d_index = 128;
    flash.shape.row_format = stage.shape.row_format = DS4_ROW_FP8;
    flash.shape.index_format = stage.shape.index_format = DS4_ROW_FP4;
    run(&tiny, folder);
    run(&flash, folder);
    run(&stage, folder);
    if (argc <= 1)
        (void)nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return 0;
}
