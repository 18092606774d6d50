/* The tool memory: what comes back is what was sampled, unless the client meant something else. */
#include "router/tool_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static const int32_t ids[] = {11, 12, 13, 14};

struct fixture {
    struct ds4_tool_memory *memory;
    struct ds4_arena arena;
};

static int start(void **state)
{
    static struct fixture f;

    ds4_arena_init(&f.arena, (size_t)64 << 20);
    f.memory = ds4_tool_memory_new(4, 1 << 20, NULL);
    *state = &f;
    return f.memory == NULL ? -1 : 0;
}

static int stop(void **state)
{
    struct fixture *f = *state;

    ds4_tool_memory_free(f->memory);
    ds4_arena_deinit(&f->arena);
    return 0;
}

/* A turn with one call that thought "why" and said "so". */
static void put(struct fixture *f, const char *id, const char *arguments, bool exact)
{
    struct ds4_tool_call call = {ds4_str_view(id), DS4_STR("get"), ds4_str_view(arguments)};
    struct ds4_tool_turn turn = {
        .reasoning = DS4_STR("why"), .content = DS4_STR("so"), .calls = &call, .n_call = 1};

    if (exact)
        turn.exact = (struct ds4_exact_turn){ids, 4, DS4_STR("why</think>so"), true};
    ds4_tool_memory_put(f->memory, &turn, 1);
}

/* The same turn as a client sends it back. */
static struct ds4_message sent(struct fixture *f, struct ds4_call *call, const char *id,
                               const char *arguments)
{
    *call = (struct ds4_call){
        .id = ds4_str_view(id),
        .name = DS4_STR("get"),
        .node = ds4_jt_parse(ds4_str_view(arguments), DS4_JT_MAX_DEPTH, &f->arena, NULL),
    };
    if (call->node == NULL) {
        call->kind = DS4_ARGUMENTS_RAW;
        call->raw = ds4_str_view(arguments);
    }
    return (struct ds4_message){
        .role = DS4_ROLE_ASSISTANT, .content = DS4_STR("so"), .calls = call, .n_call = 1};
}

static enum ds4_replay restore(struct fixture *f, struct ds4_message *message)
{
    enum ds4_replay replay;

    assert_int_equal(ds4_tool_memory_restore(f->memory, message, &f->arena, 2, &replay, NULL), 0);
    return replay;
}

static void a_turn_comes_back_with_reasoning_and_tokens(void **state)
{
    struct fixture *f = *state;
    struct ds4_message m;
    struct ds4_call call;

    put(f, "a", "{\"q\": 1, \"r\": [true, null, \"x\"]}", true);
    m = sent(f, &call, "a", "{\"r\":[true,null,\"\\u0078\"], \"q\":1.0}");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EXACT);
    assert_true(ds4_str_equal(m.reasoning, DS4_STR("why")));
    assert_int_equal(m.exact->n_id, 4);
    assert_memory_equal(m.exact->id, ids, sizeof(ids));
    assert_true(m.exact->in_reasoning);
    assert_true(ds4_str_equal(m.exact->text, DS4_STR("why</think>so")));
}

static void what_is_restored_outlives_the_memory(void **state)
{
    struct fixture *f = *state;
    struct ds4_message m;
    struct ds4_call call;
    char id[16];

    put(f, "a", "{}", true);
    m = sent(f, &call, "a", "{}");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EXACT);
    for (int i = 0; i < 20; i++) {
        snprintf(id, sizeof(id), "b%d", i);
        put(f, id, "{}", true);
    }
    assert_true(ds4_str_equal(m.reasoning, DS4_STR("why")));
    assert_memory_equal(m.exact->id, ids, sizeof(ids));
}

static void every_change_but_the_writing_is_an_edit(void **state)
{
    static const char *const changed[] = {
        "{\"q\": 2, \"r\": {\"s\": \"t\"}}",           "{\"q\": 1}",
        "{\"q\": 1, \"r\": {\"s\": \"t\"}, \"u\": 0}", "{\"q\": \"1\", \"r\": {\"s\": \"t\"}}",
        "{\"q\": 1, \"r\": {\"s\": \"T\"}}",           "not json"};
    struct fixture *f = *state;
    struct ds4_message m;
    struct ds4_call call;

    put(f, "a", "{\"q\": 1, \"r\": {\"s\": \"t\"}}", true);
    for (size_t i = 0; i < sizeof(changed) / sizeof(changed[0]); i++) {
        m = sent(f, &call, "a", changed[i]);
        assert_int_equal(restore(f, &m), DS4_REPLAY_EDITED);
        assert_null(m.exact);
        assert_true(ds4_str_equal(m.reasoning, DS4_STR("why"))); /* still the thought behind it */
    }
    m = sent(f, &call, "a", "{\"q\": 1, \"r\": {\"s\": \"t\"}}");
    call.name = DS4_STR("put");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EDITED);
    call.name = DS4_STR("get");
    m.content = DS4_STR("something else");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EDITED);
    m.content = DS4_STR(" so\n");
    m.reasoning = DS4_STR("another thought");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EDITED);
    assert_true(ds4_str_equal(m.reasoning, DS4_STR("another thought")));
    m.reasoning = DS4_STR("why\n");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EXACT);
}

static void unfinished_arguments_are_compared_as_text(void **state)
{
    struct fixture *f = *state;
    struct ds4_message m;
    struct ds4_call call;

    put(f, "a", "{\"q\": \"cut", true);
    m = sent(f, &call, "a", "{\"q\": \"cut");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EXACT);
    m = sent(f, &call, "a", "{\"q\": \"cu");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EDITED);
    m = sent(f, &call, "a", "{\"q\": \"cut\"}");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EDITED);
}

static void a_turn_without_tokens_still_has_its_reasoning(void **state)
{
    struct fixture *f = *state;
    struct ds4_message m;
    struct ds4_call call;

    put(f, "a", "{}", false);
    m = sent(f, &call, "a", "{}");
    assert_int_equal(restore(f, &m), DS4_REPLAY_CANONICAL);
    assert_true(ds4_str_equal(m.reasoning, DS4_STR("why")));
    assert_null(m.exact);
}

static void several_calls_must_come_back_in_order(void **state)
{
    struct ds4_tool_call known[2] = {{DS4_STR("a"), DS4_STR("get"), DS4_STR("{}")},
                                     {DS4_STR("b"), DS4_STR("put"), DS4_STR("{\"x\": 1}")}};
    struct ds4_tool_turn turn = {
        .calls = known, .n_call = 2, .exact = {ids, 4, DS4_STR("text"), false}};
    struct fixture *f = *state;
    struct ds4_message m;
    struct ds4_call calls[3];

    ds4_tool_memory_put(f->memory, &turn, 1);
    (void)sent(f, &calls[1], "b", "{\"x\":1}");
    calls[1].name = DS4_STR("put");
    m = sent(f, &calls[0], "a", "{}");
    m.content = DS4_STR("");
    m.n_call = 2;
    assert_int_equal(restore(f, &m), DS4_REPLAY_EXACT);
    m.n_call = 1;
    assert_int_equal(restore(f, &m), DS4_REPLAY_EDITED);
    m.calls = &calls[1];
    assert_int_equal(restore(f, &m), DS4_REPLAY_MISSING);
    m.calls[0].id = DS4_STR("");
    assert_int_equal(restore(f, &m), DS4_REPLAY_MISSING);
}

static void the_oldest_turn_leaves_first_and_bytes_are_bounded(void **state)
{
    struct fixture *f = *state;
    struct ds4_message m;
    struct ds4_call call;
    char id[16], *big = calloc(1, 700000);

    for (int i = 0; i < 5; i++) {
        snprintf(id, sizeof(id), "t%d", i);
        put(f, id, "{}", true);
    }
    assert_int_equal(ds4_tool_memory_count(f->memory), 4);
    m = sent(f, &call, "t0", "{}");
    assert_int_equal(restore(f, &m), DS4_REPLAY_MISSING);
    m = sent(f, &call, "t4", "{}");
    assert_int_equal(restore(f, &m), DS4_REPLAY_EXACT);
    assert_non_null(big);
    memset(big, 'x', 699999);
    put(f, "big1", big, false);
    put(f, "big2", big, false);
    assert_true(ds4_tool_memory_bytes(f->memory) <= 1 << 20);
    m = sent(f, &call, "big1", "{}");
    assert_int_equal(restore(f, &m), DS4_REPLAY_MISSING);
    free(big);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_turn_comes_back_with_reasoning_and_tokens),
        TEST(what_is_restored_outlives_the_memory),
        TEST(every_change_but_the_writing_is_an_edit),
        TEST(unfinished_arguments_are_compared_as_text),
        TEST(a_turn_without_tokens_still_has_its_reasoning),
        TEST(several_calls_must_come_back_in_order),
        TEST(the_oldest_turn_leaves_first_and_bytes_are_bounded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
