/* worker/loop.c with the real ds4-tiny: stages as processes over shared memory, steps from a script
 * that posts everything ahead, as the router's run-ahead does. */
#include "worker/loop.h"

#include "common/service.h"
#include "proto/codec.h"
#include "tests/support/chain.h"
#include "worker/fatal.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include <cmocka.h>

#define GREEDY    "tests/data/model/ds4-tiny-greedy.json"
#define CHUNK_TOK 100
#define MAX_OUT   60
#define BLOCKS    3 /* of each sequence */
#define CAP_TOK   (BLOCKS * DS4_BLOCK_TOK)
#define N_SEQ     2
#define LONG_MS   60000
#define EOS_ID    1

/* ---- the script ---- */

struct ids {
    int32_t id[1024];
    int32_t n;
};

static void read_ids(json_t *list, struct ids *out)
{
    out->n = (int32_t)json_array_size(list);
    assert_true(out->n > 0 && out->n <= 1024);
    for (int32_t i = 0; i < out->n; i++)
        out->id[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
}

static void read_case(size_t which, struct ids *prompt, struct ids *output)
{
    json_error_t error;
    json_t *cases = json_load_file(GREEDY, 0, &error);
    json_t *one = json_array_get(cases, which);

    if (one == NULL)
        fail_msg("%s: %s", GREEDY, error.text);
    read_ids(json_object_get(one, "prompt_ids"), prompt);
    read_ids(json_object_get(one, "output_ids"), output);
    json_decref(cases);
}

/* Steps of N_SEQ sequences in turn, so that a sequence's next step is posted long before its token is
 * known to anyone but the last stage: for each the prompt in chunks, then n_out - 1 decodes that take
 * their token from the sequence's step before. */
struct script {
    const struct ids *prompt[N_SEQ];
    int32_t n_out;
    struct ds4_seq_open open;
    struct ds4_step_entry entry;
    int32_t block[BLOCKS];
    int32_t token[CHUNK_TOK];
    int32_t done_tok[N_SEQ];  /* prompt tokens posted */
    int32_t n_decode[N_SEQ];  /* decodes posted */
    int64_t last_step[N_SEQ]; /* newest step of the sequence */
    int64_t step_no;
    uint32_t generation;
};

static void script_init(struct script *s, uint32_t generation, const struct ids *a,
                        const struct ids *b, int32_t n_out)
{
    memset(s, 0, sizeof(*s));
    s->prompt[0] = a;
    s->prompt[1] = b;
    s->n_out = n_out;
    s->generation = generation;
}

static int32_t next_seq(const struct script *s)
{
    for (int64_t i = 0; i < N_SEQ; i++) {
        int32_t seq = (int32_t)((s->step_no + i) % N_SEQ);

        if (s->prompt[seq] != NULL &&
            (s->done_tok[seq] < s->prompt[seq]->n || s->n_decode[seq] < s->n_out - 1))
            return seq;
    }
    return -1;
}

/* The next step of the script, valid until the one after; false at its end. */
static bool script_next(struct script *s, struct ds4_step *step)
{
    int32_t seq = next_seq(s), left;

    if (seq < 0)
        return false;
    left = s->prompt[seq]->n - s->done_tok[seq];
    *step = (struct ds4_step){.generation = s->generation,
                              .step_no = s->step_no,
                              .n_entry = 1,
                              .entry = &s->entry,
                              .n_tok = 1,
                              .token = s->token};
    s->entry = (struct ds4_step_entry){.seq = 100 + (uint64_t)seq,
                                       .slot = seq,
                                       .epoch = 1,
                                       .kind = DS4_ENTRY_DECODE,
                                       .n_tok = 1,
                                       .sample = true,
                                       .from_step = s->last_step[seq],
                                       .cap_tok = CAP_TOK};
    memset(s->token, 0, sizeof(s->token));
    if (left > 0) {
        s->entry.kind = DS4_ENTRY_PREFILL;
        s->entry.base_pos = s->done_tok[seq];
        s->entry.n_tok = step->n_tok = left < CHUNK_TOK ? left : CHUNK_TOK;
        s->entry.sample = left <= CHUNK_TOK;
        s->entry.from_step = -1;
        memcpy(s->token, s->prompt[seq]->id + s->done_tok[seq],
               (size_t)step->n_tok * sizeof(int32_t));
        if (s->done_tok[seq] == 0) {
            s->open = chain_greedy(seq, 100 + (uint64_t)seq, 1, s->prompt[seq]->n);
            s->open.n_stop = 1;
            s->open.stop_id[0] = EOS_ID;
            s->open.max_pos = CAP_TOK;
            step->n_open = 1;
            step->open = &s->open;
            for (int32_t i = 0; i < BLOCKS; i++)
                s->block[i] = seq * BLOCKS + i;
            s->entry.n_block = BLOCKS;
            s->entry.block = s->block;
        }
        s->done_tok[seq] += step->n_tok;
    } else {
        s->entry.base_pos = s->prompt[seq]->n + s->n_decode[seq]++;
    }
    s->last_step[seq] = s->step_no++;
    return true;
}

/* ---- a worker's step thread, driven ---- */

static struct ds4_loop_config loop_config(int32_t stage, int32_t n_stage)
{
    struct chain_options options = {.n_stage = n_stage, .n_thread = 1, .context_tok = CAP_TOK};

    return (struct ds4_loop_config){.stage = chain_config(&options, stage),
                                    .pipe = &ds4_pipe_shm,
                                    .depth = n_stage + 1,
                                    .form_ms = LONG_MS,
                                    .check_ms = 50,
                                    .pipe_wait_ms = LONG_MS};
}

static void wait_event(struct ds4_loop *loop, struct ds4_loop_event *event)
{
    struct pollfd fd = {.fd = ds4_loop_event_fd(loop), .events = POLLIN};

    if (poll(&fd, 1, LONG_MS) != 1 || !ds4_loop_next_event(loop, event))
        fail_msg("no event");
}

static void expect_event(struct ds4_loop *loop, enum ds4_loop_event_kind kind,
                         struct ds4_loop_event *event)
{
    wait_event(loop, event);
    if (event->kind != kind)
        fail_msg("event %d, expected %d: %s", (int)event->kind, (int)kind, event->err.msg);
}

static struct ds4_loop *start_loop(int32_t stage, int32_t n_stage)
{
    struct ds4_loop_config config = loop_config(stage, n_stage);
    struct ds4_loop_event event;
    struct ds4_err err = {0};
    struct ds4_loop *loop = ds4_loop_new(&config, &err);

    if (loop == NULL)
        fail_msg("%s", err.msg);
    expect_event(loop, DS4_LOOP_PLANNED, &event);
    assert_int_equal(event.hello.stage, stage);
    expect_event(loop, DS4_LOOP_LOADED, &event);
    return loop;
}

static struct ds4_form form_of(const struct ds4_loop *loop, uint32_t generation, pid_t group)
{
    struct ds4_hello hello = {0};
    struct ds4_form form;

    ds4_stage_hello(ds4_loop_stage(loop), &hello);
    form = (struct ds4_form){.generation = generation,
                             .n_stage = hello.n_stage,
                             .n_blocks = N_SEQ * BLOCKS,
                             .n_slots = N_SEQ,
                             .max_seqs = N_SEQ,
                             .max_step_tok = CHUNK_TOK,
                             .context_tok = CAP_TOK};
    snprintf((char *)form.pipe_key, sizeof(form.pipe_key), "%d", (int)group);
    return form;
}

static void post_form(struct ds4_loop *loop, uint32_t generation, pid_t group)
{
    struct ds4_form form = form_of(loop, generation, group);
    struct ds4_err err = {0};

    assert_int_equal(ds4_loop_post_form(loop, &form, &err), 0);
}

static void form(struct ds4_loop *loop, uint32_t generation, pid_t group)
{
    struct ds4_loop_event event;

    post_form(loop, generation, group);
    expect_event(loop, DS4_LOOP_FORMED, &event);
    assert_int_equal(event.generation, generation);
}

/* Through the codec, as from the wire. */
static void post_step(struct ds4_loop *loop, const struct ds4_step *step)
{
    struct ds4_step_packet *packet = ds4_loop_take_packet(loop);
    struct ds4_arena scratch;
    struct ds4_buf bytes;
    struct ds4_err err = {0};

    assert_non_null(packet);
    ds4_arena_init(&scratch, DS4_CODEC_ARENA_BYTES);
    ds4_buf_init(&bytes, 1 << 22);
    if (ds4_codec_encode_step(step, &scratch, &bytes, &err) ||
        ds4_codec_decode_step(ds4_buf_view(&bytes), step->generation, &packet->arena, &packet->step,
                              &err) ||
        ds4_loop_post_step(loop, packet, &err))
        fail_msg("%s", err.msg);
    ds4_buf_deinit(&bytes);
    ds4_arena_deinit(&scratch);
}

static int64_t post_script(struct ds4_loop *loop, struct script *script)
{
    struct ds4_step step;

    while (script_next(script, &step))
        post_step(loop, &step);
    return script->step_no;
}

/* Takes the TOKENS of n_step steps; output[s] gets what sequence s was given. */
static void collect(struct ds4_loop *loop, int64_t n_step, struct ids output[N_SEQ])
{
    struct ds4_loop_event event;
    struct ds4_tokens_out out;
    struct ds4_arena arena;
    struct ds4_err err = {0};

    ds4_arena_init(&arena, DS4_CODEC_ARENA_BYTES);
    memset(output, 0, N_SEQ * sizeof(output[0]));
    for (int64_t step = 0; step < n_step; step++) {
        expect_event(loop, DS4_LOOP_TOKENS, &event);
        if (ds4_codec_decode_tokens(ds4_buf_view(&event.payload), event.generation, &arena, &out,
                                    &err))
            fail_msg("%s", err.msg);
        assert_int_equal(out.step_no, step);
        for (int32_t i = 0; i < out.n_entry; i++)
            for (int32_t t = 0; t < out.entry[i].n_token; t++) {
                struct ids *ids = &output[out.entry[i].seq - 100];

                ids->id[ids->n++] = out.entry[i].token[t];
            }
        ds4_buf_deinit(&event.payload);
        ds4_arena_reset(&arena, (struct ds4_arena_mark){0});
    }
    ds4_arena_deinit(&arena);
}

/* ---- stages as processes ---- */

/* A child that dies with the test. */
static pid_t fork_child(void)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
}

static void wait_steps(struct ds4_loop *loop, int64_t n_step)
{
    struct ds4_loop_status status;

    for (;;) {
        ds4_loop_get_status(loop, &status);
        if (status.steps_done >= (uint64_t)n_step)
            return;
        usleep(1000);
    }
}

/* Runs the script as `stage` and leaves. */
static void run_child(int32_t stage, int32_t n_stage, pid_t group, struct script *script)
{
    struct ds4_loop *loop = start_loop(stage, n_stage);

    form(loop, script->generation, group);
    wait_steps(loop, post_script(loop, script));
    ds4_loop_free(loop);
    _exit(0);
}

static void compare(size_t which, const struct ids *got)
{
    struct ids prompt, want;

    read_case(which, &prompt, &want);
    assert_int_equal(got->n, want.n < MAX_OUT / 2 ? want.n : MAX_OUT / 2);
    for (int32_t i = 0; i < got->n; i++)
        if (got->id[i] != want.id[i])
            fail_msg("case %zu token %d is %d, expected %d", which, (int)i, (int)got->id[i],
                     (int)want.id[i]);
}

/* Two conversations at once over n_stage processes; the last stage is this one. */
static void run_cases(int32_t n_stage, size_t case_a, size_t case_b)
{
    struct ids a, b, unused, output[N_SEQ];
    struct script script;
    struct ds4_loop *loop;
    pid_t child[4], group = getpid();
    int status;

    read_case(case_a, &a, &unused);
    read_case(case_b, &b, &unused);
    script_init(&script, 5, &a, &b, MAX_OUT / 2);
    for (int32_t s = 0; s < n_stage - 1; s++) {
        child[s] = fork_child();
        if (child[s] == 0)
            run_child(s, n_stage, group, &script);
    }
    loop = start_loop(n_stage - 1, n_stage);
    form(loop, 5, group);
    collect(loop, post_script(loop, &script), output);
    ds4_loop_free(loop);
    for (int32_t s = 0; s < n_stage - 1; s++) {
        assert_int_equal(waitpid(child[s], &status, 0), child[s]);
        assert_int_equal(status, 0);
    }
    compare(case_a, &output[0]);
    compare(case_b, &output[1]);
}

static void posted_ahead_answers_are_the_golden_ones_on_one_stage(void **state)
{
    (void)state;
    run_cases(1, 0, 3);
}

static void posted_ahead_answers_are_the_golden_ones_over_two_stages(void **state)
{
    (void)state;
    run_cases(2, 1, 6); /* 11 tokens beside 325 in four chunks */
}

static void posted_ahead_answers_are_the_golden_ones_over_four_stages(void **state)
{
    (void)state;
    run_cases(4, 2, 5);
}

static void many_steps_without_any_token_do_not_fill_the_record_ring(void **state)
{
    struct ids prompt = {.n = 60}, output[N_SEQ];
    struct script script;
    struct ds4_step step;
    struct ds4_loop *loop;
    pid_t child, group = getpid();
    int status;

    (void)state;
    for (int32_t i = 0; i < prompt.n; i++)
        prompt.id[i] = 10 + i;
    child = fork_child();
    loop = start_loop(child == 0 ? 0 : 1, 2);
    form(loop, 5, group);
    script_init(&script, 5, &prompt, NULL, 1);
    for (int32_t i = 0; i < prompt.n; i++) { /* one-token chunks: far more steps than ring slots */
        assert_true(script_next(&script, &step));
        step.n_tok = step.entry[0].n_tok = 1;
        step.entry[0].sample = false;
        script.done_tok[0] = i + 1;
        post_step(loop, &step);
    }
    if (child == 0) {
        wait_steps(loop, 60);
        ds4_loop_free(loop);
        _exit(0);
    }
    collect(loop, 60, output);
    assert_int_equal(output[0].n, 0);
    ds4_loop_free(loop);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* ---- what breaks ---- */

static void expect_exit(pid_t pid, int code)
{
    int status;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), code);
}

/* A child with one stage that is given the script's first step after `spoil`. */
static void expect_violation(void (*spoil)(struct ds4_step *step))
{
    struct ids prompt = {.id = {0, 4080, 1078}, .n = 3};
    struct script script;
    struct ds4_step step;
    pid_t pid = fork_child();

    if (pid == 0) {
        struct ds4_loop *loop;

        ds4_fatal_init(0);
        loop = start_loop(0, 1);
        form(loop, 5, getpid());
        script_init(&script, 5, &prompt, NULL, 2);
        script_next(&script, &step);
        spoil(&step);
        post_step(loop, &step);
        for (;;)
            pause();
    }
    expect_exit(pid, DS4_EXIT_PROTOCOL);
}

static void skip_a_step(struct ds4_step *step)
{
    step->step_no = 1;
}

static void leave_out_the_blocks(struct ds4_step *step)
{
    step->entry[0].n_block = 1;
}

static void begin_past_the_end(struct ds4_step *step)
{
    step->entry[0].base_pos = 7;
}

static void use_a_slot_that_is_not_open(struct ds4_step *step)
{
    step->n_open = 0;
}

static void what_a_correct_router_would_not_send_ends_the_process_with_72(void **state)
{
    (void)state;
    expect_violation(skip_a_step);
    expect_violation(leave_out_the_blocks);
    expect_violation(begin_past_the_end);
    expect_violation(use_a_slot_that_is_not_open);
}

static void a_killed_peer_ends_the_generation_and_the_next_one_works(void **state)
{
    struct ids prompt, want, output[N_SEQ];
    struct ds4_loop_event event;
    struct script script;
    struct ds4_loop *loop;
    pid_t child[2], group = getpid();
    int go[2];
    char byte;

    (void)state;
    read_case(0, &prompt, &want);
    assert_int_equal(pipe(go), 0);
    for (int i = 0; i < 2; i++) {
        child[i] = fork_child();
        if (child[i] == 0 && i == 0) {
            loop = start_loop(0, 2);
            form(loop, 1, group);
            for (;;)
                pause();
        } else if (child[i] == 0) {
            assert_int_equal(read(go[0], &byte, 1), 1);
            script_init(&script, 2, &prompt, NULL, MAX_OUT / 2);
            run_child(0, 2, group, &script);
        }
    }
    loop = start_loop(1, 2);
    form(loop, 1, group);
    script_init(&script, 1, &prompt, NULL, MAX_OUT / 2);
    post_script(loop, &script);
    kill(child[0], SIGKILL);
    expect_event(loop, DS4_LOOP_IDLE, &event);
    assert_int_equal(event.generation, 1);
    assert_int_equal(event.err.code, DS4_E_UNAVAILABLE);
    assert_non_null(strstr(event.err.msg, "stage 0 died"));
    waitpid(child[0], NULL, 0);

    assert_int_equal(write(go[1], "g", 1), 1);
    form(loop, 2, group); /* steps of generation 1 that are still posted are dropped */
    script_init(&script, 2, &prompt, NULL, MAX_OUT / 2);
    collect(loop, post_script(loop, &script), output);
    compare(0, &output[0]);
    ds4_loop_free(loop);
    expect_exit(child[1], 0);
    close(go[0]);
    close(go[1]);
}

static void a_peer_killed_while_this_stage_is_idle_is_noticed_at_once(void **state)
{
    struct ds4_loop_event event;
    struct ds4_loop *loop;
    pid_t child, group = getpid();

    (void)state;
    child = fork_child();
    loop = start_loop(child == 0 ? 1 : 0, 2);
    form(loop, 1, group);
    while (child == 0)
        pause();
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    expect_event(loop, DS4_LOOP_IDLE,
                 &event); /* no wait of the loop's is so short as to end by itself */
    assert_int_equal(event.generation, 1);
    assert_non_null(strstr(event.err.msg, "stage 1 died"));
    ds4_loop_free(loop);
}

static void abort_ends_waits_for_rows_and_for_neighbours(void **state)
{
    struct ids prompt, want;
    struct ds4_loop_event event;
    struct script script;
    struct ds4_loop *loop;
    pid_t child, group = getpid();

    (void)state;
    read_case(0, &prompt, &want);
    child = fork_child();
    loop = start_loop(child == 0 ? 0 : 1, 2);
    form(loop, 1, group);
    while (child == 0)
        pause();
    script_init(&script, 1, &prompt, NULL, 3);
    post_script(loop, &script);
    ds4_loop_abort(loop);
    expect_event(loop, DS4_LOOP_IDLE, &event);
    assert_int_equal(event.generation, 1);
    assert_int_equal(event.err.code, DS4_E_CANCELLED);
    post_form(loop, 2, group); /* nobody else joins */
    usleep(20000);
    ds4_loop_abort(loop);
    expect_event(loop, DS4_LOOP_FORM_FAILED, &event);
    assert_int_equal(event.generation, 2);
    assert_int_equal(event.err.code, DS4_E_CANCELLED);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    ds4_loop_free(loop);
}

static void a_generation_of_another_size_is_refused(void **state)
{
    struct ds4_loop *loop = start_loop(0, 1);
    struct ds4_form wrong = form_of(loop, 3, getpid());
    struct ds4_loop_event event;
    struct ds4_err err = {0};

    (void)state;
    wrong.n_stage = 2;
    assert_int_equal(ds4_loop_post_form(loop, &wrong, &err), 0);
    expect_event(loop, DS4_LOOP_FORM_FAILED, &event);
    assert_non_null(strstr(event.err.msg, "2 stages"));
    wrong.n_stage = 1;
    wrong.max_step_tok = DS4_MAX_STEP_TOK;
    assert_int_equal(ds4_loop_post_form(loop, &wrong, &err), 0);
    expect_event(loop, DS4_LOOP_FORM_FAILED, &event);
    form(loop, 4, getpid());
    ds4_loop_free(loop);
}

static void drain_runs_what_is_posted_and_stop_does_not(void **state)
{
    struct ids prompt, want, output[N_SEQ];
    struct ds4_loop_event event;
    struct script script;
    int n_tokens = 0;

    (void)state;
    for (int drain = 0; drain < 2; drain++) {
        struct ds4_loop *loop = start_loop(0, 1);
        int64_t n_step;

        read_case(drain == 1 ? 6 : 0, &prompt, &want);
        form(loop, 1, getpid());
        /* More than can be told while nobody listens: some are not run when the stop comes. */
        script_init(&script, 1, &prompt, NULL, drain == 1 ? 3 : DS4_LOOP_EVENTS + 8);
        n_step = post_script(loop, &script);
        ds4_loop_stop(loop, drain == 1);
        if (drain == 1) {
            collect(loop, n_step, output);
            expect_event(loop, DS4_LOOP_STOPPED, &event);
        } else {
            for (wait_event(loop, &event); event.kind == DS4_LOOP_TOKENS; n_tokens++) {
                ds4_buf_deinit(&event.payload);
                wait_event(loop, &event);
            }
            assert_int_equal(event.kind, DS4_LOOP_STOPPED);
            assert_true(n_tokens < n_step);
        }
        ds4_loop_free(loop);
    }
}

static void a_stop_is_told_even_if_nobody_read_what_came_before(void **state)
{
    struct ds4_loop *loop = start_loop(0, 1);
    struct ids prompt, want;
    struct ds4_loop_event event;
    struct script script;

    (void)state;
    read_case(0, &prompt, &want);
    form(loop, 1, getpid());
    script_init(&script, 1, &prompt, NULL, DS4_LOOP_EVENTS);
    post_script(loop, &script);
    wait_steps(loop, DS4_LOOP_EVENTS - 1); /* as many events wait as ever may */
    usleep(100000);                        /* one more would be there by now, had it a place */
    ds4_loop_stop(loop, false);
    usleep(100000); /* the thread says its last word to nobody */
    for (wait_event(loop, &event); event.kind == DS4_LOOP_TOKENS; wait_event(loop, &event))
        ds4_buf_deinit(&event.payload);
    assert_int_equal(event.kind, DS4_LOOP_STOPPED);
    ds4_loop_free(loop);
}

static void a_model_that_is_not_there_is_a_failed_load(void **state)
{
    struct ds4_loop_config config = loop_config(0, 1);
    struct ds4_loop_event event;
    struct ds4_err err = {0};
    struct ds4_loop *loop;

    (void)state;
    config.stage.model_path = "tests/data/no-such-file.gguf";
    loop = ds4_loop_new(&config, &err);
    assert_non_null(loop);
    expect_event(loop, DS4_LOOP_LOAD_FAILED, &event);
    assert_int_equal(event.err.code, DS4_E_IO);
    assert_null(ds4_loop_stage(loop));
    ds4_loop_free(loop);
}

static void packets_are_bounded_and_come_back(void **state)
{
    struct ds4_loop *loop = start_loop(0, 1);
    struct ds4_step_packet *packet[DS4_LOOP_COMMANDS];

    (void)state;
    for (int i = 0; i < DS4_LOOP_COMMANDS; i++)
        assert_non_null(packet[i] = ds4_loop_take_packet(loop));
    assert_null(ds4_loop_take_packet(loop));
    ds4_loop_drop_packet(loop, packet[7]);
    assert_ptr_equal(ds4_loop_take_packet(loop), packet[7]);
    for (int i = 0; i < DS4_LOOP_COMMANDS; i++)
        ds4_loop_drop_packet(loop, packet[i]);
    ds4_loop_free(loop);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(posted_ahead_answers_are_the_golden_ones_on_one_stage),
        cmocka_unit_test(posted_ahead_answers_are_the_golden_ones_over_two_stages),
        cmocka_unit_test(posted_ahead_answers_are_the_golden_ones_over_four_stages),
        cmocka_unit_test(many_steps_without_any_token_do_not_fill_the_record_ring),
        cmocka_unit_test(what_a_correct_router_would_not_send_ends_the_process_with_72),
        cmocka_unit_test(a_killed_peer_ends_the_generation_and_the_next_one_works),
        cmocka_unit_test(a_peer_killed_while_this_stage_is_idle_is_noticed_at_once),
        cmocka_unit_test(abort_ends_waits_for_rows_and_for_neighbours),
        cmocka_unit_test(a_generation_of_another_size_is_refused),
        cmocka_unit_test(drain_runs_what_is_posted_and_stop_does_not),
        cmocka_unit_test(a_stop_is_told_even_if_nobody_read_what_came_before),
        cmocka_unit_test(a_model_that_is_not_there_is_a_failed_load),
        cmocka_unit_test(packets_are_bounded_and_come_back),
    };

    chain_take_args(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
