/* The canonical request: legal states, tokens to events, exactly one end. */
#include "router/request.h"

#include "common/metrics.h"
#include "router/parse/stream.h"
#include "router/sched/engine.h"
#include "router/text/bpe.h"
#include "router/text/vocab_load.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct ds4_vocab *vocab;
static struct ds4_bpe *bpe;

struct heard {
    struct ds4_request *req;
    struct ds4_buf reasoning, content, args;
    int32_t n_token, n_finish, n_done, n_lists;
    struct ds4_finish finish;
    struct ds4_request_result result;
    bool cancel_in_events;
};

static void on_token(void *owner, const struct ds4_token_entry *entry, int32_t index)
{
    struct heard *h = owner;

    assert_true(index < entry->n_token);
    h->n_token++;
}

static void on_events(void *owner, const struct ds4_events *events)
{
    struct heard *h = owner;

    assert_true(events->list.len > 0);
    assert_true(h->req->delivering);
    h->n_lists++;
    for (size_t i = 0; i < events->list.len; i++) {
        const struct ds4_event *e = &events->list.ptr[i];
        struct ds4_str text = ds4_event_text(events, e);

        if (e->kind == DS4_EVENT_REASONING)
            ds4_buf_append_str(&h->reasoning, text);
        else if (e->kind == DS4_EVENT_CONTENT)
            ds4_buf_append_str(&h->content, text);
        else if (e->kind == DS4_EVENT_CALL_ARGS)
            ds4_buf_append_str(&h->args, text);
        else if (e->kind == DS4_EVENT_FINISH) {
            h->n_finish++;
            h->finish = e->finish;
        }
    }
    if (h->cancel_in_events)
        h->req->cancel_asked = true;
}

static void on_done(void *owner, const struct ds4_request_result *result)
{
    struct heard *h = owner;

    h->n_done++;
    h->result = *result;
    assert_int_equal(h->req->state, DS4_REQUEST_DONE);
    ds4_request_free(h->req);
    h->req = NULL;
}

static void fake_random(void *ctx, void *out, size_t n)
{
    (void)ctx;
    memset(out, 7, n);
}

/* A request in PREFILL that listens into *h.  The stop ids are EOS (the model's) and "~" (the
 * client's). */
static struct ds4_request *fresh(struct heard *h, const struct ds4_parse_config *how)
{
    struct ds4_err err = {0};
    struct ds4_parse_config *config;

    *h = (struct heard){0};
    ds4_buf_init(&h->reasoning, 1 << 20);
    ds4_buf_init(&h->content, 1 << 20);
    ds4_buf_init(&h->args, 1 << 20);
    h->req = ds4_request_new(DS4_API_CHAT, 1, (size_t)1 << 20, &err);
    assert_non_null(h->req);
    config = ds4_arena_take(&h->req->arena, sizeof(*config));
    *config = *how;
    config->random = fake_random;
    assert_int_equal(ds4_request_set_parser(h->req, vocab, config, &err), 0);
    h->req->sink = (struct ds4_request_sink){
        .owner = h, .token = on_token, .events = on_events, .done = on_done};
    h->req->max_new = 1000;
    h->req->n_model_stop_id = 1;
    h->req->n_stop_id = 2;
    h->req->stop_id[0] = ds4_vocab_special(vocab, DS4_SPECIAL_EOS);
    h->req->stop_id[1] = vocab->byte_id['~'];
    assert_int_equal(ds4_request_move(h->req, DS4_REQUEST_CHECKED, &err), 0);
    assert_int_equal(ds4_request_move(h->req, DS4_REQUEST_QUEUED, &err), 0);
    assert_int_equal(ds4_request_move(h->req, DS4_REQUEST_PREFILL, &err), 0);
    return h->req;
}

static void heard_free(struct heard *h)
{
    if (h->req != NULL)
        h->req->state = DS4_REQUEST_DONE;
    ds4_request_free(h->req);
    ds4_buf_deinit(&h->reasoning);
    ds4_buf_deinit(&h->content);
    ds4_buf_deinit(&h->args);
}

static struct ds4_accept accept_id(struct ds4_request *req, int32_t id)
{
    struct ds4_token_entry entry = {.n_token = 1, .token = {id}, .flags = DS4_TOKEN_SAMPLED};
    struct ds4_err err = {0};

    return ds4_request_accept(req, &entry, req->max_new, 5, &err);
}

/* Every byte as its own token until the answer ends; how many were used. */
static struct ds4_accept accept_text(struct ds4_request *req, const char *text)
{
    struct ds4_accept accept = {.verdict = DS4_VERDICT_GO};

    for (size_t i = 0; text[i] != '\0' && accept.verdict == DS4_VERDICT_GO; i++) {
        accept = accept_id(req, vocab->byte_id[(uint8_t)text[i]]);
        if (accept.verdict == DS4_VERDICT_END)
            accept.n_used = (int32_t)i + 1;
    }
    return accept;
}

static void end_as(struct heard *h, enum ds4_end end, int32_t stop_id, const struct ds4_err *err)
{
    struct ds4_request_result result;

    ds4_request_finish(h->req, end, DS4_REASON_NONE, stop_id, 9, err, &result);
    ds4_request_deliver(h->req, &result);
    assert_int_equal(h->n_done, 1);
}

static void assert_text(const struct ds4_buf *buf, const char *text)
{
    assert_string_equal(buf->len == 0 ? "" : buf->ptr, text);
}

static void only_the_transitions_of_the_diagram_are_legal(void **state)
{
    enum { N = DS4_REQUEST_DONE + 1 };
    static const char legal[N][N + 1] = {
        /*             rcqpddD */
        [DS4_REQUEST_RECEIVED] = ".x...x.", [DS4_REQUEST_CHECKED] = "..x..x.",
        [DS4_REQUEST_QUEUED] = "...x.x.",   [DS4_REQUEST_PREFILL] = "..x.xx.",
        [DS4_REQUEST_DECODE] = "..x..x.",   [DS4_REQUEST_DRAINING] = "......x",
        [DS4_REQUEST_DONE] = ".......",
    };
    struct ds4_request *req = ds4_request_new(DS4_API_CHAT, 1, 1000, NULL);
    struct ds4_err err = {0};

    (void)state;
    for (int from = 0; from < N; from++)
        for (int to = 0; to < N; to++) {
            int rc;

            req->state = (enum ds4_request_state)from;
            rc = ds4_request_move(req, (enum ds4_request_state)to, &err);
            assert_int_equal(rc == 0, legal[from][to] == 'x');
            assert_int_equal(req->state, rc == 0 ? to : from);
            if (rc != 0)
                assert_int_equal(err.code, DS4_E_BUG);
        }
    req->state = DS4_REQUEST_DONE;
    ds4_request_free(req);
}

static void reasoning_and_content_arrive_with_their_counts(void **state)
{
    const struct ds4_parse_config how = {.starts_in_reasoning = true};
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    fresh(&h, &how);
    assert_int_equal(accept_text(h.req, "hmm").verdict, DS4_VERDICT_GO);
    assert_int_equal(h.req->state, DS4_REQUEST_DECODE);
    accept_id(h.req, ds4_vocab_special(vocab, DS4_SPECIAL_THINK_CLOSE));
    accept_text(h.req, "Yes.");
    accept = accept_id(h.req, ds4_vocab_special(vocab, DS4_SPECIAL_EOS));
    assert_int_equal(accept.verdict, DS4_VERDICT_END);
    assert_int_equal(accept.end, DS4_END_EOS);
    end_as(&h, accept.end, accept.stop_id, NULL);
    assert_text(&h.reasoning, "hmm");
    assert_text(&h.content, "Yes.");
    assert_int_equal(h.n_token, 9);
    assert_int_equal(h.result.usage.completion_tok, 9);
    assert_int_equal(h.result.usage.reasoning_tok, 4); /* the closing tag is the last of them */
    assert_int_equal(h.result.end, DS4_END_EOS);
    assert_int_equal(h.result.stop_id, ds4_vocab_special(vocab, DS4_SPECIAL_EOS));
    assert_int_equal(h.n_finish, 1);
    assert_int_equal(h.result.timing.first_token_ns, 5);
    assert_int_equal(h.result.timing.done_ns, 9);
    heard_free(&h);
}

static void a_stop_string_ends_the_answer_and_is_not_shown(void **state)
{
    struct ds4_str stops[] = {DS4_STR("STOP"), DS4_STR("\nUser:")};
    const struct ds4_parse_config how = {.stops = stops, .n_stops = 2};
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    fresh(&h, &how);
    accept = accept_text(h.req, "one STO two\nUser: three");
    assert_int_equal(accept.verdict, DS4_VERDICT_END);
    assert_int_equal(accept.n_used, (int)strlen("one STO two\nUser:"));
    end_as(&h, accept.end, -1, NULL);
    assert_text(&h.content, "one STO two");
    assert_int_equal(h.result.end, DS4_END_STOP);
    assert_true(h.finish.stop_string);
    heard_free(&h);
}

static void a_stop_string_that_was_to_be_included_is_the_last_text(void **state)
{
    struct ds4_str stops[] = {DS4_STR("STOP"), DS4_STR("\nUser:")};
    const struct ds4_parse_config how = {.stops = stops, .n_stops = 2, .keep_stop = true};
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    fresh(&h, &how);
    accept = accept_text(h.req, "one STO two\nUser: three");
    assert_int_equal(accept.verdict, DS4_VERDICT_END);
    end_as(&h, accept.end, -1, NULL);
    assert_text(&h.content, "one STO two\nUser:");
    assert_int_equal(h.result.end, DS4_END_STOP);
    heard_free(&h);
}

/* The opener that was forced came out as the answer's text, with finish_reason stop. */
static void a_demanded_call_that_is_not_made_is_an_error_without_markup(void **state)
{
    static const char opener[] = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"";
    struct ds4_parse_tool tools[] = {{.name = DS4_STR("f"), .parameters = DS4_STR("{}")}};
    const struct ds4_parse_config how = {.tools = tools, .n_tools = 1};
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    for (int must = 0; must < 2; must++) {
        fresh(&h, &how);
        h.req->must_call = must == 1;
        accept_text(h.req, opener);
        accept = accept_id(h.req, ds4_vocab_special(vocab, DS4_SPECIAL_EOS));
        end_as(&h, accept.end, accept.stop_id, NULL);
        assert_int_equal(h.result.end, must == 1 ? DS4_END_ERROR : DS4_END_EOS);
        assert_int_equal(h.result.reason, must == 1 ? DS4_REASON_UNSATISFIED : DS4_REASON_NONE);
        assert_text(&h.content, must == 1 ? "" : opener);
        heard_free(&h);
    }
}

static void stop_ids_of_model_and_client_differ_in_name(void **state)
{
    const struct ds4_parse_config how = {0};
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    fresh(&h, &how);
    accept = accept_text(h.req, "abc~def");
    assert_int_equal(accept.end, DS4_END_STOP);
    assert_int_equal(accept.stop_id, vocab->byte_id['~']);
    end_as(&h, accept.end, accept.stop_id, NULL);
    assert_text(&h.content, "abc");
    assert_int_equal(h.result.end, DS4_END_STOP);
    heard_free(&h);

    fresh(&h, &how);
    h.req->ignore_stop = true; /* the model's; the client's own still count */
    accept = accept_id(h.req, ds4_vocab_special(vocab, DS4_SPECIAL_EOS));
    assert_int_equal(accept.verdict, DS4_VERDICT_GO);
    accept = accept_text(h.req, "~");
    assert_int_equal(accept.verdict, DS4_VERDICT_END);
    heard_free(&h);
}

static void the_limit_ends_for_length_or_for_context(void **state)
{
    const struct ds4_parse_config how = {0};
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    for (int32_t reduced = 0; reduced < 2; reduced++) {
        fresh(&h, &how);
        h.req->max_new = 5;
        h.req->max_new_reduced = reduced == 1;
        accept = accept_text(h.req, "123456789");
        assert_int_equal(accept.n_used, 5);
        assert_int_equal(accept.end, reduced ? DS4_END_CONTEXT : DS4_END_LENGTH);
        end_as(&h, accept.end, -1, NULL);
        assert_text(&h.content, "12345");
        assert_int_equal(h.finish.reason, DS4_FINISH_LENGTH);
        heard_free(&h);
    }
}

static void a_burst_is_cut_where_the_answer_ends(void **state)
{
    const struct ds4_parse_config how = {0};
    struct ds4_token_entry entry = {.n_token = 4};
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    fresh(&h, &how);
    entry.token[0] = vocab->byte_id['a'];
    entry.token[1] = vocab->byte_id['b'];
    entry.token[2] = ds4_vocab_special(vocab, DS4_SPECIAL_EOS);
    entry.token[3] = vocab->byte_id['c'];
    accept = ds4_request_accept(h.req, &entry, 1000, 5, NULL);
    assert_int_equal(accept.verdict, DS4_VERDICT_END);
    assert_int_equal(accept.n_used, 3);
    assert_int_equal(h.n_token, 3);
    end_as(&h, accept.end, accept.stop_id, NULL);
    assert_text(&h.content, "ab");
    assert_int_equal(h.result.usage.completion_tok, 3);
    heard_free(&h);
}

static void a_cut_character_comes_out_as_one_replacement(void **state)
{
    const struct ds4_parse_config how = {0};
    struct heard h;

    (void)state;
    fresh(&h, &how);
    accept_text(h.req, "x\xe4\xbd");
    assert_text(&h.content, "x");
    end_as(&h, DS4_END_LENGTH, -1, NULL);
    assert_text(&h.content, "x\xef\xbf\xbd");
    heard_free(&h);
}

static void complete_calls_turn_eos_into_tool_calls(void **state)
{
    struct ds4_parse_tool tool = {
        .name = DS4_STR("get"),
        .parameters = DS4_STR("{\"type\":\"object\",\"properties\":{\"q\":{\"type\":\"string\"}}}"),
    };
    const struct ds4_parse_config how = {.tools = &tool, .n_tools = 1};
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    fresh(&h, &how);
    accept =
        accept_text(h.req, "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get\">\n"
                           "<｜DSML｜parameter name=\"q\" string=\"true\">hi</｜DSML｜parameter>\n"
                           "</｜DSML｜invoke>\n</｜DSML｜tool_calls>");
    if (accept.verdict == DS4_VERDICT_GO)
        accept = accept_id(h.req, ds4_vocab_special(vocab, DS4_SPECIAL_EOS));
    assert_int_equal(accept.verdict, DS4_VERDICT_END);
    end_as(&h, accept.end, accept.stop_id, NULL);
    assert_text(&h.args, "{\"q\": \"hi\"}");
    assert_int_equal(h.result.end, DS4_END_TOOL_CALLS);
    heard_free(&h);
}

static void one_call_ends_the_turn_behind_its_first_complete_call(void **state)
{
    struct ds4_parse_tool tool = {
        .name = DS4_STR("get"),
        .parameters = DS4_STR("{\"type\":\"object\",\"properties\":{\"q\":{\"type\":\"string\"}}}"),
    };
    const struct ds4_parse_config how = {.tools = &tool, .n_tools = 1};
    static const char first[] =
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get\">\n"
        "<｜DSML｜parameter name=\"q\" string=\"true\">1</｜DSML｜parameter>\n"
        "</｜DSML｜invoke>";
    static const char second[] =
        "\n<｜DSML｜invoke name=\"get\">\n"
        "<｜DSML｜parameter name=\"q\" string=\"true\">2</｜DSML｜parameter>\n"
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    struct ds4_accept accept;
    struct heard h;
    char both[sizeof(first) + sizeof(second)];

    (void)state;
    (void)snprintf(both, sizeof(both), "%s%s", first, second);
    fresh(&h, &how);
    h.req->one_call = true;
    accept = accept_text(h.req, both);
    assert_int_equal(accept.verdict, DS4_VERDICT_END);
    assert_int_equal(accept.n_used, sizeof(first) - 1);
    end_as(&h, accept.end, accept.stop_id, NULL);
    assert_text(&h.args, "{\"q\": \"1\"}");
    assert_int_equal(h.result.end, DS4_END_TOOL_CALLS);
    assert_int_equal(h.finish.reason, DS4_FINISH_TOOL_CALLS);
    assert_text(&h.content, "");
    heard_free(&h);
}

static void errors_and_cancellations_release_nothing_more(void **state)
{
    struct ds4_str stops[] = {DS4_STR("abcdef")};
    const struct ds4_parse_config how = {.stops = stops, .n_stops = 1};
    const struct ds4_err why = {.code = DS4_E_UNAVAILABLE, .msg = "stage 2 is lost"};
    struct heard h;

    (void)state;
    fresh(&h, &how);
    accept_text(h.req, "xyzabc"); /* "abc" is held back: it may become a stop string */
    assert_text(&h.content, "xyz");
    end_as(&h, DS4_END_ERROR, -1, &why);
    assert_text(&h.content, "xyz");
    assert_int_equal(h.n_finish, 0);
    assert_int_equal(h.result.end, DS4_END_ERROR);
    assert_string_equal(h.result.err.msg, "stage 2 is lost");
    heard_free(&h);
}

static void a_cancellation_from_a_callback_is_left_to_the_caller(void **state)
{
    const struct ds4_parse_config how = {0};
    struct heard h;

    (void)state;
    fresh(&h, &how);
    h.cancel_in_events = true;
    accept_text(h.req, "a");
    assert_true(h.req->cancel_asked);
    assert_false(h.req->delivering);
    assert_int_equal(h.n_done, 0);
    heard_free(&h);
}

/* A watched request over byte tokens; `how` and the mode of recovery are the test's. */
static void watched(struct heard *h, const struct ds4_parse_config *how,
                    enum ds4_recovery_mode mode, struct ds4_recovery *recovery)
{
    struct ds4_loop_knobs knobs;
    struct ds4_err err = {0};

    ds4_loop_knobs_default(&knobs);
    knobs.recovery = mode;
    assert_int_equal(ds4_recovery_init(recovery, &knobs, DS4_STR(""), bpe, &err), 0);
    fresh(h, how);
    h->req->max_new = 100000;
    assert_int_equal(ds4_request_set_watch(h->req, recovery, &err), 0);
}

/* Lines until something happens. */
static struct ds4_accept accept_lines(struct ds4_request *req, const char *line)
{
    struct ds4_accept accept = {.verdict = DS4_VERDICT_GO};

    for (int32_t i = 0; i < 1000 && accept.verdict == DS4_VERDICT_GO; i++)
        accept = accept_text(req, line);
    return accept;
}

static void a_loop_is_nudged_twice_and_then_ends_the_turn(void **state)
{
    const struct ds4_parse_config how = {0};
    struct ds4_recovery recovery;
    struct ds4_accept accept;
    struct heard h;
    int32_t n_nudge;

    (void)state;
    watched(&h, &how, DS4_RECOVERY_NUDGE, &recovery);
    n_nudge = (int32_t)recovery.text[0].len;
    assert_true(n_nudge > 5);
    assert_int_equal(ds4_request_splice_room(h.req), 2 * n_nudge);
    for (int32_t round = 1; round <= 2; round++) {
        accept = accept_lines(h.req, "Go.\n");
        assert_int_equal(accept.verdict, DS4_VERDICT_SPLICE);
        assert_true(accept.tripped);
        assert_ptr_equal(accept.splice.text, &recovery.text[0]);
        assert_int_equal(accept.splice.n_drop, 0);
        assert_int_equal(h.req->usage.recovery_tok, round * n_nudge);
        assert_int_equal(h.req->usage.completion_tok, h.n_token);
        accept_text(h.req, "Then something else entirely, which is no loop at all.\n");
    }
    accept = accept_lines(h.req, "Go.\n");
    assert_int_equal(accept.verdict, DS4_VERDICT_END);
    assert_int_equal(accept.end, DS4_END_REPETITION);
    assert_int_equal(h.req->watch->last.kind, DS4_TRIP_EXACT);
    assert_string_equal(h.req->watch->last.evidence, "Go.");
    end_as(&h, accept.end, -1, NULL);
    assert_int_equal(h.result.end, DS4_END_REPETITION);
    assert_null(strstr(h.content.ptr, "Stop repeating"));
    heard_free(&h);
    ds4_recovery_deinit(&recovery);
}

static void a_held_tag_is_taken_back_with_its_tokens(void **state)
{
    struct ds4_parse_tool tool = {.name = DS4_STR("get"), .parameters = DS4_STR("{}")};
    const struct ds4_parse_config how = {.tools = &tool, .n_tools = 1};
    struct ds4_recovery recovery;
    struct ds4_accept accept;
    struct heard h;
    int32_t n = 0;

    (void)state;
    watched(&h, &how, DS4_RECOVERY_NUDGE, &recovery);
    recovery.knobs.streak = 1;
    accept_text(h.req, "Go.\nGo.\nGo.\nGo.\n"); /* one line short of a hit */
    accept = accept_text(h.req, "Go.\n");
    assert_int_equal(accept.verdict, DS4_VERDICT_SPLICE);
    recovery.knobs.streak = 1000;
    accept = accept_lines(h.req, "Go.\n"); /* a hit in every block, but no trip */
    assert_int_equal(accept.verdict, DS4_VERDICT_GO);
    recovery.knobs.streak = 1;
    accept = accept_text(h.req, "<tool_c"); /* the parser holds this: it may become a call */
    assert_int_equal(accept.verdict, DS4_VERDICT_SPLICE);
    n = accept.splice.n_drop;
    assert_true(n >= 1 && n <= 5);
    assert_int_equal(h.req->usage.completion_tok, h.n_token - n);
    accept_text(h.req, " x");
    end_as(&h, DS4_END_EOS, -1, NULL);
    assert_null(strchr(h.content.ptr, '<'));
    assert_string_equal(h.content.ptr + h.content.len - 2, " x");
    heard_free(&h);
    ds4_recovery_deinit(&recovery);
}

static void a_reopened_turn_thinks_again(void **state)
{
    const struct ds4_parse_config how = {.starts_in_reasoning = true};
    struct ds4_recovery recovery;
    struct ds4_accept accept;
    struct heard h;

    (void)state;
    watched(&h, &how, DS4_RECOVERY_REOPEN, &recovery);
    accept_text(h.req, "plan");
    accept_id(h.req, ds4_vocab_special(vocab, DS4_SPECIAL_THINK_CLOSE));
    accept = accept_lines(h.req, "Go.\n");
    assert_int_equal(accept.verdict, DS4_VERDICT_SPLICE);
    assert_int_equal(accept.splice.mode, DS4_RECOVERY_REOPEN);
    assert_ptr_equal(accept.splice.text, &recovery.text[1]);
    assert_int_equal(recovery.text[1].ptr[0], ds4_vocab_special(vocab, DS4_SPECIAL_EOS));
    assert_int_equal(recovery.text[1].ptr[recovery.text[1].len - 1],
                     ds4_vocab_special(vocab, DS4_SPECIAL_THINK_OPEN));
    accept_text(h.req, " again");
    accept_id(h.req, ds4_vocab_special(vocab, DS4_SPECIAL_THINK_CLOSE));
    accept_text(h.req, "done");
    end_as(&h, DS4_END_EOS, -1, NULL);
    assert_text(&h.reasoning, "plan again");
    assert_string_equal(h.content.ptr + h.content.len - 6, "Godone");
    heard_free(&h);
    ds4_recovery_deinit(&recovery);
}

static void code_and_arguments_are_not_watched(void **state)
{
    struct ds4_parse_tool tool = {
        .name = DS4_STR("get"),
        .parameters = DS4_STR("{\"type\":\"object\",\"properties\":{\"q\":{\"type\":\"string\"}}}"),
    };
    const struct ds4_parse_config how = {.tools = &tool, .n_tools = 1};
    struct ds4_recovery recovery;
    struct heard h;

    (void)state;
    watched(&h, &how, DS4_RECOVERY_NUDGE, &recovery);
    accept_text(h.req, "```\n");
    assert_int_equal(accept_lines(h.req, "},\n").verdict, DS4_VERDICT_GO);
    accept_text(h.req, "```\n");
    accept_text(h.req, "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get\">\n"
                       "<｜DSML｜parameter name=\"q\" string=\"true\">");
    assert_int_equal(accept_lines(h.req, "},\n").verdict, DS4_VERDICT_GO);
    end_as(&h, DS4_END_EOS, -1, NULL);
    assert_int_equal(h.result.usage.recovery_tok, 0);
    heard_free(&h);
    ds4_recovery_deinit(&recovery);
}

static double counted(struct ds4_metrics *m, enum ds4_metric id, const char *a, const char *b)
{
    return ds4_metric_value(m, id, ds4_metric_labels(a, b));
}

static void what_the_parser_met_is_counted_when_the_answer_is_over(void **state)
{
    struct ds4_parse_tool tool = {
        .name = DS4_STR("get"),
        .parameters = DS4_STR("{\"type\":\"object\",\"properties\":{\"q\":{\"type\":\"string\"}}}"),
    };
    const struct ds4_parse_config how = {.tools = &tool, .n_tools = 1};
    static const char invoke[] = "<｜DSML｜invoke name=\"get\">\n<｜DSML｜parameter name=\"q\" "
                                 "string=\"true\">hi</｜DSML｜parameter>\n</｜DSML｜invoke>\n";
    struct ds4_metrics *m = ds4_metrics_new("m", NULL);
    struct ds4_request_result result;
    struct heard h;

    (void)state;
    /* a whole block, then an invoke without its wrapper */
    fresh(&h, &how);
    accept_text(h.req, "<｜DSML｜tool_calls>\n");
    accept_text(h.req, invoke);
    accept_text(h.req, "</｜DSML｜tool_calls>\n");
    accept_text(h.req, invoke);
    ds4_request_finish(h.req, DS4_END_EOS, DS4_REASON_NONE, -1, 9, NULL, &result);
    ds4_count_done(m, h.req, result.end, DS4_REASON_NONE, DS4_REQUEST_DECODE);
    assert_true(counted(m, DS4_M_DSML_BLOCKS, "exact", NULL) == 1);
    assert_true(counted(m, DS4_M_DSML_RECOVERED, "invoke", NULL) == 1);
    assert_true(counted(m, DS4_M_PARSER_RECOVERIES, "orphan_invoke", NULL) == 1);
    assert_true(counted(m, DS4_M_TOOL_CALLS, "chat", "ok") == 1);
    assert_true(counted(m, DS4_M_TOOL_CALLS, "chat", "recovered") == 1);
    heard_free(&h);

    /* tools are there, the text looks like a call, the budget is burnt */
    fresh(&h, &how);
    accept_text(h.req, "I will <bash ls -l");
    ds4_request_finish(h.req, DS4_END_LENGTH, DS4_REASON_NONE, -1, 9, NULL, &result);
    ds4_count_done(m, h.req, result.end, DS4_REASON_NONE, DS4_REQUEST_DECODE);
    assert_true(counted(m, DS4_M_ENVELOPE_MISSING, "pseudo_tag", NULL) == 1);
    assert_true(counted(m, DS4_M_ENVELOPE_MISSING, "budget_burn", NULL) == 1);
    assert_true(counted(m, DS4_M_PARSER_LEAKS, "dsml_in_content", NULL) == 1);
    heard_free(&h);

    /* cut inside a value */
    fresh(&h, &how);
    accept_text(h.req, "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get\">\n<｜DSML｜parameter "
                       "name=\"q\" string=\"true\">hal");
    ds4_request_finish(h.req, DS4_END_LENGTH, DS4_REASON_NONE, -1, 9, NULL, &result);
    ds4_count_done(m, h.req, result.end, DS4_REASON_NONE, DS4_REQUEST_DECODE);
    assert_true(counted(m, DS4_M_TOOL_CALLS, "chat", "truncated") == 1);
    assert_true(counted(m, DS4_M_TOOL_CALLS, "chat", "ok") == 1);
    assert_true(counted(m, DS4_M_ENVELOPE_MISSING, "budget_burn", NULL) == 1);
    heard_free(&h);
    ds4_metrics_free(m);
}

static int load(void **state)
{
    struct ds4_err err = {0};

    (void)state;
    vocab = ds4_vocab_load("tests/data/ds4-tiny.gguf", NULL, &err);
    if (vocab == NULL)
        print_error("%s\n", err.msg);
    bpe = vocab == NULL ? NULL : ds4_bpe_new(vocab, &err);
    return bpe == NULL ? -1 : 0;
}

static int unload(void **state)
{
    (void)state;
    ds4_bpe_free(bpe);
    ds4_vocab_free(vocab);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_the_transitions_of_the_diagram_are_legal),
        cmocka_unit_test(reasoning_and_content_arrive_with_their_counts),
        cmocka_unit_test(a_stop_string_ends_the_answer_and_is_not_shown),
        cmocka_unit_test(a_stop_string_that_was_to_be_included_is_the_last_text),
        cmocka_unit_test(a_demanded_call_that_is_not_made_is_an_error_without_markup),
        cmocka_unit_test(stop_ids_of_model_and_client_differ_in_name),
        cmocka_unit_test(the_limit_ends_for_length_or_for_context),
        cmocka_unit_test(a_burst_is_cut_where_the_answer_ends),
        cmocka_unit_test(a_cut_character_comes_out_as_one_replacement),
        cmocka_unit_test(complete_calls_turn_eos_into_tool_calls),
        cmocka_unit_test(one_call_ends_the_turn_behind_its_first_complete_call),
        cmocka_unit_test(errors_and_cancellations_release_nothing_more),
        cmocka_unit_test(a_cancellation_from_a_callback_is_left_to_the_caller),
        cmocka_unit_test(a_loop_is_nudged_twice_and_then_ends_the_turn),
        cmocka_unit_test(a_held_tag_is_taken_back_with_its_tokens),
        cmocka_unit_test(a_reopened_turn_thinks_again),
        cmocka_unit_test(code_and_arguments_are_not_watched),
        cmocka_unit_test(what_the_parser_met_is_counted_when_the_answer_is_over),
    };

    return cmocka_run_group_tests(tests, load, unload);
}
