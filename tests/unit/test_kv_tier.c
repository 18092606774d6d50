/* The disk tier from stage to stage (worker/kv_tier.c): what three stages wrote, two others restore, and the
 * sequence goes on as if it had never stopped.  What is not whole and sound leaves no trace in the cache.
 *
 * A session is tokens [0, N_TOK): one extent of 1024 and a tail with the rest and the point. */
#include "proto/point.h"
#include "tests/support/chain.h"
#include "tests/support/golden.h"
#include "worker/stage_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define GOLDEN     "tests/data/model/ds4-tiny-golden.safetensors"
#define N_TOK      1061 /* open blocks of both kinds */
#define SUFFIX_TOK 9
#define EXTENT     1 /* ids of jobs and stagings */
#define TAIL       2
#define POINT      77

static struct {
    struct golden *g;
    const int32_t *ids;
    char dir[32];
    struct chain *writer;
    struct ds4_kv_done done[3][CHAIN_MAX]; /* by job and stage */
    uint8_t *want;                         /* the suffix' rows */
    size_t want_bytes;
} rig;

static const int32_t parts[] = {2, 3, 3};

/* ---- the session ------------------------------------------------------------------------------------- */

static void open_at(struct chain *c, int32_t pos)
{
    struct ds4_seq_open open = chain_greedy(0, 5, c->owner[0].epoch + 1, 1);

    if (pos > 0)
        chain_install(c, 0, pos, POINT);
    chain_step(c, &open, 1, NULL, 0);
}

static void feed(struct chain *c, int32_t base, int32_t n)
{
    chain_feed(c, 0, rig.ids + base, base, n, n, false);
}

static struct ds4_kv_write write_of(const struct chain *c, uint64_t job)
{
    struct ds4_kv_write w = {.generation = c->generation,
                             .job = job,
                             .key = {0x5a, (uint8_t)job},
                             .kind = job == EXTENT ? DS4_KV_EXTENT : DS4_KV_TAIL,
                             .begin = job == EXTENT ? 0 : DS4_EXTENT_TOK,
                             .end = job == EXTENT ? DS4_EXTENT_TOK : N_TOK,
                             .point = job == EXTENT ? 0 : POINT,
                             .n_block = job == EXTENT ? DS4_PART_BLOCKS : 1,
                             .block = c->table[0] + (job == EXTENT ? 0 : DS4_PART_BLOCKS)};

    if (job == TAIL)
        w.commit[0] = 0xcc;
    return w;
}

static int write_session(void **state)
{
    struct chain_options options = {.quant_sim = DS4_ON, .n_stage = 3, .partition = parts};
    struct golden_tensor ids;

    (void)state;
    rig.g = golden_open(GOLDEN);
    ids = golden_get(rig.g, "long_ids", "I32");
    rig.ids = ids.data;
    snprintf(rig.dir, sizeof(rig.dir), "/tmp/ds4-kv-XXXXXX");
    assert_non_null(mkdtemp(rig.dir));
    options.disk_dir = rig.dir;
    rig.writer = chain_new(&options);
    open_at(rig.writer, 0);
    chain_save(rig.writer, 0, N_TOK, POINT);
    feed(rig.writer, 0, N_TOK);
    for (uint64_t job = EXTENT; job <= TAIL; job++)
        for (int32_t s = 0; s < 3; s++) {
            struct ds4_kv_write w = write_of(rig.writer, job);

            ds4_stage_kv_write(rig.writer->stage[s], &w);
        }
    feed(rig.writer, N_TOK, SUFFIX_TOK); /* compute goes on while the disk works */
    rig.want_bytes = SUFFIX_TOK * rig.writer->row_bytes;
    rig.want = malloc(rig.want_bytes);
    chain_residual(rig.writer, SUFFIX_TOK, rig.want);
    for (uint64_t job = EXTENT; job <= TAIL; job++)
        for (int32_t s = 0; s < 3; s++) {
            rig.done[job][s] = chain_await(rig.writer, s, job);
            if (rig.done[job][s].reason != DS4_KV_OK)
                fail_msg("%s", rig.done[job][s].text);
        }
    return 0;
}

static int drop_session(void **state)
{
    (void)state;
    chain_free(rig.writer);
    golden_close(rig.g);
    free(rig.want);
    if (fork() == 0) {
        execlp("rm", "rm", "-rf", rig.dir, (char *)NULL);
        _exit(1);
    }
    wait(NULL);
    return 0;
}

/* ---- restoring --------------------------------------------------------------------------------------- */

static struct ds4_kv_part_ref refs[3];

static struct ds4_kv_read read_of(const struct chain *c, uint64_t job)
{
    struct ds4_kv_write w = write_of(c, job);
    struct ds4_kv_read r = {.generation = c->generation,
                            .job = job,
                            .staging = job,
                            .kind = w.kind,
                            .begin = w.begin,
                            .end = w.end,
                            .n_part = 3,
                            .part = refs};
    int32_t first = 0;

    memcpy(r.key, w.key, sizeof(r.key));
    memcpy(r.commit, w.commit, sizeof(r.commit));
    for (int32_t s = 0; s < 3; s++) {
        refs[s] = (struct ds4_kv_part_ref){
            .first_layer = first, .last_layer = first + parts[s], .bytes = rig.done[job][s].bytes};
        memcpy(refs[s].digest, rig.done[job][s].digest, DS4_ID_BYTES);
        first += parts[s];
    }
    return r;
}

static void read_all(struct chain *c, uint64_t job)
{
    for (int32_t s = 0; s < c->n_stage; s++) {
        struct ds4_kv_read r = read_of(c, job);
        struct ds4_kv_done done;

        ds4_stage_kv_read(c->stage[s], &r);
        done = chain_await(c, s, job);
        if (done.reason != DS4_KV_OK)
            fail_msg("stage %d: %s", s, done.text);
    }
}

static void add_staged_install(struct chain *c, uint64_t staging, const int32_t *block,
                               int32_t n_block)
{
    c->op[c->n_op++] = (struct ds4_kv_op){.kind = DS4_KV_STAGED_INSTALL,
                                          .staging = staging,
                                          .point = staging == TAIL ? POINT : 0,
                                          .first_block = staging == TAIL ? DS4_PART_BLOCKS : 0,
                                          .n_block = n_block,
                                          .block = block};
}

/* The blocks of the restored sequence are others than those of the writer, and not in order. */
static void shuffle_table(struct chain *c)
{
    for (int32_t b = 0; b < c->seq_blocks; b++)
        c->table[0][b] = 3 + (b * 5 + 2) % c->seq_blocks;
}

static void check_restored(int32_t n_stage, const int32_t *partition)
{
    struct chain_options options = {
        .quant_sim = DS4_ON, .n_stage = n_stage, .partition = partition, .disk_dir = rig.dir};
    struct chain *c = chain_new(&options);
    uint8_t *got = malloc(rig.want_bytes);

    shuffle_table(c);
    read_all(c, EXTENT);
    read_all(c, TAIL);
    add_staged_install(c, EXTENT, c->table[0], DS4_PART_BLOCKS);
    add_staged_install(c, TAIL, c->table[0] + DS4_PART_BLOCKS, 1);
    open_at(c, N_TOK);
    feed(c, N_TOK, SUFFIX_TOK);
    chain_residual(c, SUFFIX_TOK, got);
    assert_memory_equal(got, rig.want, rig.want_bytes);
    for (int32_t s = 0; s < n_stage; s++) { /* the stagings are gone, the point is there */
        struct ds4_hello hello = {0};

        ds4_stage_hello(c->stage[s], &hello);
        assert_true(hello.disk);
        assert_int_equal(ds4_kv_host_used_bytes(&c->stage[s]->store.host),
                         ds4_unit_round(ds4_point_bytes(&hello.point, N_TOK), hello.unit_bytes));
    }
    chain_drop(c, POINT);
    chain_step(c, NULL, 0, NULL, 0);
    for (int32_t s = 0; s < n_stage; s++)
        assert_int_equal(ds4_kv_host_used_bytes(&c->stage[s]->store.host), 0);
    free(got);
    chain_free(c);
}

static void a_session_is_restored_by_any_partition(void **state)
{
    static const int32_t even[] = {4, 4};

    (void)state;
    check_restored(2, even);
    check_restored(3, parts);
    check_restored(1, NULL);
}

static void parts_of_one_run_have_the_same_fingerprint_on_all_stages(void **state)
{
    struct chain_options options = {.quant_sim = DS4_OFF};
    struct chain *other = chain_new(&options);
    struct ds4_hello hello[3] = {0}, plain = {0};

    (void)state;
    for (int32_t s = 0; s < 3; s++) {
        ds4_stage_hello(rig.writer->stage[s], &hello[s]);
        assert_memory_equal(hello[s].kv_fingerprint, hello[0].kv_fingerprint, DS4_ID_BYTES);
    }
    ds4_stage_hello(other->stage[0], &plain); /* other rows: another fingerprint */
    assert_memory_not_equal(plain.kv_fingerprint, hello[0].kv_fingerprint, DS4_ID_BYTES);
    assert_false(plain.disk);
    chain_free(other);
}

/* ---- refusals ---------------------------------------------------------------------------------------- */

static struct chain *reader(void)
{
    static const int32_t even[] = {4, 4};
    struct chain_options options = {
        .quant_sim = DS4_ON, .n_stage = 2, .partition = even, .disk_dir = rig.dir};

    return chain_new(&options);
}

static void expect_read(struct chain *c, const struct ds4_kv_read *r, enum ds4_kv_reason reason)
{
    struct ds4_kv_done done;

    ds4_stage_kv_read(c->stage[1], r);
    done = chain_await(c, 1, r->job);
    if (done.reason != reason)
        fail_msg("reason %d: %s", (int)done.reason, done.text);
}

static void a_read_that_cannot_be_served_holds_nothing(void **state)
{
    struct chain *c = reader();
    struct ds4_kv_host *host = &c->stage[1]->store.host;
    struct ds4_kv_read r = read_of(c, TAIL);

    (void)state;
    r.n_part = 2; /* nobody has layers 5 to 7 */
    expect_read(c, &r, DS4_KV_MISSING_PART);
    r = read_of(c, TAIL);
    r.key[9]++;
    expect_read(c, &r, DS4_KV_MISSING_PART);
    assert_int_equal(ds4_kv_host_used_bytes(host), 0);
    r = read_of(c, TAIL);
    expect_read(c, &r, DS4_KV_OK);
    expect_read(c, &r, DS4_KV_REFUSED); /* that staging is taken */
    ds4_kv_host_reset(host, 4096);      /* a budget for one unit */
    r.staging++;
    expect_read(c, &r, DS4_KV_REFUSED);
    chain_free(c);
}

static void a_write_that_makes_no_sense_is_refused(void **state)
{
    struct chain *c = rig.writer;
    struct ds4_kv_write w;
    const int32_t outside[] = {0, 1, 2, c->stage[0]->kv.n_block};

    (void)state;
    for (int i = 0; i < 4; i++) {
        w = write_of(c, i == 3 ? EXTENT : TAIL);
        if (i == 0)
            w.point++; /* no such point */
        else if (i == 1)
            w.end++; /* the point is not there */
        else if (i == 2)
            w.n_block = 2;
        else
            w.block = outside;
        ds4_stage_kv_write(c->stage[0], &w);
        assert_int_equal(chain_await(c, 0, w.job).reason, DS4_KV_REFUSED);
    }
}

static void an_install_that_is_wrong_is_a_violation(void **state)
{
    (void)state;
    for (int i = 0; i < 5; i++) {
        struct chain *c = reader();
        int32_t block[] = {9, 8, 7, c->table[0][0]};

        read_all(c, EXTENT);
        open_at(c, 0);
        feed(c, 0, 5); /* uses table[0][0] */
        add_staged_install(c, EXTENT, block, DS4_PART_BLOCKS);
        if (i == 1)
            c->op[0].n_block = 3;
        if (i == 2)
            c->op[0].first_block = 4;
        if (i == 3)
            block[3] = c->stage[0]->kv.n_block;
        if (i == 4)
            c->op[0].point = 6;
        chain_refuse(c, chain_build(c, NULL, 0, NULL, 0), DS4_E_PROTOCOL);
        chain_free(c);
    }
}

static void a_new_generation_has_no_stagings(void **state)
{
    struct chain *c = reader();

    (void)state;
    read_all(c, EXTENT);
    chain_form(c);
    for (int32_t s = 0; s < c->n_stage; s++)
        assert_int_equal(ds4_kv_host_used_bytes(&c->stage[s]->store.host), 0);
    add_staged_install(c, EXTENT, NULL, 0);
    chain_refuse(c, chain_build(c, NULL, 0, NULL, 0), DS4_E_PROTOCOL);
    chain_form(c);
    read_all(c, EXTENT);
    c->op[c->n_op++] = (struct ds4_kv_op){.kind = DS4_KV_STAGED_DROP, .staging = EXTENT};
    chain_step(c, NULL, 0, NULL, 0);
    assert_int_equal(ds4_kv_host_used_bytes(&c->stage[0]->store.host), 0);
    chain_free(c);
}

static void without_a_folder_every_job_is_refused(void **state)
{
    struct chain_options options = {.quant_sim = DS4_ON};
    struct chain *c = chain_new(&options);
    struct ds4_kv_write w = write_of(c, EXTENT);
    struct ds4_kv_read r = read_of(c, TAIL);
    struct ds4_kv_unlink u = {.generation = 1, .job = 9, .kind = DS4_KV_TAIL, .last_layer = 1};

    (void)state;
    ds4_stage_kv_write(c->stage[0], &w);
    assert_int_equal(chain_await(c, 0, w.job).reason, DS4_KV_REFUSED);
    ds4_stage_kv_read(c->stage[0], &r);
    assert_int_equal(chain_await(c, 0, r.job).reason, DS4_KV_REFUSED);
    ds4_stage_kv_unlink(c->stage[0], &u);
    assert_int_equal(chain_await(c, 0, u.job).reason, DS4_KV_REFUSED);
    chain_free(c);
}

/* A step goes to all stages: the one that failed is told to drop what the others have. */
static void a_drop_of_what_this_stage_could_not_read_is_no_violation(void **state)
{
    struct chain *c = reader();
    struct ds4_kv_read r = read_of(c, TAIL);

    (void)state;
    r.key[0] ^= 1;
    expect_read(c, &r, DS4_KV_MISSING_PART);
    r = read_of(c, TAIL);
    r.staging = 77;
    r.job = 77;
    ds4_stage_kv_read(c->stage[0], &r);
    assert_int_equal(chain_await(c, 0, 77).reason, DS4_KV_OK);
    c->op[c->n_op++] = (struct ds4_kv_op){.kind = DS4_KV_STAGED_DROP, .staging = TAIL};
    c->op[c->n_op++] = (struct ds4_kv_op){.kind = DS4_KV_STAGED_DROP, .staging = 77};
    chain_step(c, NULL, 0, NULL, 0);
    for (int32_t s = 0; s < c->n_stage; s++)
        assert_int_equal(ds4_kv_host_used_bytes(&c->stage[s]->store.host), 0);
    chain_free(c);
}

/* Last: it takes a part away. */
static void an_unlinked_part_is_missing(void **state)
{
    struct chain *c = reader();
    struct ds4_kv_read r = read_of(c, TAIL);
    struct ds4_kv_unlink u = {.generation = c->generation,
                              .job = 9,
                              .kind = DS4_KV_TAIL,
                              .first_layer = 5,
                              .last_layer = 8};

    (void)state;
    memcpy(u.key, r.key, sizeof(u.key));
    ds4_stage_kv_unlink(c->stage[1], &u);
    assert_int_equal(chain_await(c, 1, u.job).reason, DS4_KV_OK);
    expect_read(c, &r, DS4_KV_MISSING_PART);
    chain_free(c);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_session_is_restored_by_any_partition),
        cmocka_unit_test(parts_of_one_run_have_the_same_fingerprint_on_all_stages),
        cmocka_unit_test(a_read_that_cannot_be_served_holds_nothing),
        cmocka_unit_test(a_write_that_makes_no_sense_is_refused),
        cmocka_unit_test(an_install_that_is_wrong_is_a_violation),
        cmocka_unit_test(a_new_generation_has_no_stagings),
        cmocka_unit_test(a_drop_of_what_this_stage_could_not_read_is_no_violation),
        cmocka_unit_test(without_a_folder_every_job_is_refused),
        cmocka_unit_test(an_unlinked_part_is_missing),
    };

    chain_take_args(argc, argv);
    return cmocka_run_group_tests(tests, write_session, drop_session);
}
