/* Requests become chats by the rules: whole prompts of the vectors, then each rule at its edges. */
#include "router/text/normalise.h"

#include "router/text/chat_json.h"
#include "tests/support/text_vectors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#define N_CASE       64
#define ARENA_BYTES  ((size_t)64 << 20)
#define PROMPT_BYTES ((size_t)16 << 20)

static enum ds4_media media;

struct bench {
    struct ds4_arena arena;
    struct ds4_conversation conversation;
    struct ds4_param param;
    struct ds4_err err;
    struct ds4_prompt prompt;
};

static void open_bench(struct bench *b)
{
    memset(b, 0, sizeof(*b));
    ds4_arena_init(&b->arena, ARENA_BYTES);
    ds4_prompt_init(&b->prompt, PROMPT_BYTES);
}

static void close_bench(struct bench *b)
{
    ds4_prompt_deinit(&b->prompt);
    ds4_arena_deinit(&b->arena);
}

static int read_request(struct bench *b, enum ds4_release release, const char *request)
{
    const struct ds4_jt_node *root =
        ds4_jt_parse(ds4_str_view(request), DS4_JT_MAX_DEPTH, &b->arena, &b->err);

    if (root == NULL)
        fail_msg("%s: %s", request, b->err.msg);
    return ds4_chat_json_read(root, release, media, &b->arena, &b->conversation, &b->param,
                              &b->err);
}

/* The prompt of a request must contain (or end with) what the test says. */
static void render(struct bench *b, enum ds4_release release, const char *request)
{
    struct ds4_effort_policy policy = {.release = release,
                                       .default_effort = DS4_THINK_LOW,
                                       .context_tok = 1048576,
                                       .max_min_context = 0};
    struct ds4_effort effort;

    open_bench(b);
    if (read_request(b, release, request) != 0)
        fail_msg("%s: %s", request, b->err.msg);
    effort = ds4_effort_resolve(&b->conversation.wish, &policy);
    assert_int_equal(ds4_normalise(&b->conversation, &effort, &b->arena, &b->err), 0);
    assert_int_equal(ds4_template_render(&b->conversation.chat, &b->arena, &b->prompt, &b->err), 0);
}

static void prompt_ends(const char *request, const char *end)
{
    struct bench b;

    render(&b, DS4_RELEASE_V4_0731, request);
    if (!ds4_str_ends(ds4_prompt_view(&b.prompt), ds4_str_view(end)))
        fail_msg("got %s", b.prompt.text.ptr);
    close_bench(&b);
}

static void refused(const char *request, const char *path)
{
    struct bench b;

    open_bench(&b);
    assert_int_equal(read_request(&b, DS4_RELEASE_V4_0731, request), -1);
    assert_int_equal(b.err.code, DS4_E_INVALID);
    assert_string_equal(b.param.path, path);
    close_bench(&b);
}

static void requests_give_the_prompts_of_the_vectors(void **state)
{
    size_t n_case;

    (void)state;
    assert_int_equal(text_vectors_render("tests/data/encoding/request_to_prompt.json", &n_case), 0);
    assert_true(n_case >= N_CASE);
}

static void wrong_types_are_refused_by_their_path(void **state)
{
    (void)state;
    refused("{}", "messages");
    refused("{\"messages\": []}", "messages");
    refused("{\"messages\": {}}", "messages");
    refused("{\"messages\": [1]}", "messages[0]");
    refused("{\"messages\": [{\"content\": \"x\"}]}", "messages[0].role");
    refused("{\"messages\": [{\"role\": 1}]}", "messages[0].role");
    refused("{\"messages\": [{\"role\": \"critic\"}]}", "messages[0].role");
    refused("{\"messages\": [{\"role\": \"user\", \"content\": 5}]}", "messages[0].content");
    refused("{\"messages\": [{\"role\": \"user\", \"content\": [\"x\"]}]}",
            "messages[0].content[0]");
    refused("{\"messages\": [{\"role\": \"user\", \"content\": [{\"text\": \"x\"}]}]}",
            "messages[0].content[0].type");
    refused("{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\"}]}]}",
            "messages[0].content[0].text");
    refused("{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}",
            "messages[0].content[0].type");
    refused("{\"messages\": [{\"role\": \"assistant\", \"reasoning\": {}}]}",
            "messages[0].reasoning");
    refused("{\"messages\": [{\"role\": \"assistant\", \"tool_calls\": {}}]}",
            "messages[0].tool_calls");
    refused("{\"messages\": [{\"role\": \"assistant\", \"tool_calls\": [{\"id\": \"1\"}]}]}",
            "messages[0].tool_calls[0].function");
    refused("{\"messages\": [{\"role\": \"tool\", \"tool_call_id\": 7}]}",
            "messages[0].tool_call_id");
    refused("{\"messages\": [{\"role\": \"user\"}], \"tools\": {}}", "tools");
    refused("{\"messages\": [{\"role\": \"user\"}], \"tools\": [{\"type\": \"function\"}]}",
            "tools[0].function");
    refused("{\"messages\": [{\"role\": \"user\"}], \"tool_choice\": \"maybe\"}", "tool_choice");
    refused("{\"messages\": [{\"role\": \"user\"}], \"tool_choice\": {\"type\": \"function\", "
            "\"function\": {\"name\": \"x\"}}}",
            "tool_choice");
    refused("{\"messages\": [{\"role\": \"user\"}], \"response_format\": {\"type\": \"xml\"}}",
            "response_format.type");
    refused("{\"messages\": [{\"role\": \"user\"}], \"reasoning_effort\": \"banana\"}",
            "reasoning_effort");
    refused("{\"messages\": [{\"role\": \"user\"}], \"chat_template_kwargs\": {\"thinking\": 1}}",
            "chat_template_kwargs.thinking");
    refused("{\"messages\": [{\"role\": \"user\"}], \"continue_final_message\": true}",
            "continue_final_message");
}

static void a_guided_schema_is_a_response_format(void **state)
{
    static const char *const forms[] = {
        "\"guided_json\": {\"type\": \"object\", \"x\": 1.50}",
        "\"guided_json\": \"{\\\"type\\\": \\\"object\\\", \\\"x\\\": 1.50}\"",
        "\"structured_outputs\": {\"json\": {\"type\": \"object\", \"x\": 1.50}}",
        "\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": "
        "{\"type\": \"object\", \"x\": 1.50}}}",
    };
    char request[512];
    struct bench b;

    (void)state;
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        (void)snprintf(request, sizeof(request), "{\"messages\": [{\"role\": \"user\"}], %s}",
                       forms[i]);
        render(&b, DS4_RELEASE_V4_0731, request);
        assert_true(b.conversation.answer_json);
        assert_non_null(strstr(b.prompt.text.ptr, "{\"type\": \"object\", \"x\": 1.5}"));
        close_bench(&b);
    }
    render(
        &b, DS4_RELEASE_V4_0731,
        "{\"messages\": [{\"role\": \"user\"}], \"structured_outputs\": {\"json_object\": true}}");
    assert_true(b.conversation.answer_json);
    assert_null(b.conversation.answer_schema);
    close_bench(&b);
}

static void what_only_a_grammar_could_keep_is_refused_by_name(void **state)
{
    static const char *const fields[][2] = {
        {"guided_choice", "[\"a\", \"b\"]"},
        {"guided_regex", "\"a+\""},
        {"guided_grammar", "\"x\""},
        {"choice", "[\"a\"]"},
        {"regex", "\"a\""},
        {"grammar", "\"x\""},
        {"structural_tag", "\"x\""},
    };
    char request[256], path[64];

    (void)state;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        bool inside = i >= 3;
        (void)snprintf(request, sizeof(request),
                       "{\"messages\": [{\"role\": \"user\"}], %s\"%s\": %s%s}",
                       inside ? "\"structured_outputs\": {" : "", fields[i][0], fields[i][1],
                       inside ? "}" : "");
        (void)snprintf(path, sizeof(path), "%s%s", inside ? "structured_outputs." : "",
                       fields[i][0]);
        refused(request, path);
    }
    refused("{\"messages\": [{\"role\": \"user\"}], \"guided_json\": \"no schema\"}",
            "guided_json");
    refused("{\"messages\": [{\"role\": \"user\"}], \"guided_json\": {}, \"response_format\": "
            "{\"type\": \"json_object\"}}",
            "guided_json");
}

static void null_means_absent(void **state)
{
    (void)state;
    prompt_ends("{\"messages\": [{\"role\": \"user\", \"content\": null, \"name\": null}], "
                "\"tools\": null, \"reasoning_effort\": null, \"thinking\": null, "
                "\"response_format\": null, \"chat_template_kwargs\": null}",
                "<｜User｜><｜Assistant｜><think>");
}

static void the_last_of_duplicate_keys_counts(void **state)
{
    (void)state;
    prompt_ends("{\"messages\": [{\"role\": \"user\", \"content\": \"a\", \"content\": \"b\"}]}",
                "<｜User｜>b<｜Assistant｜><think>");
}

static void half_a_surrogate_pair_becomes_a_replacement(void **state)
{
    (void)state;
    prompt_ends("{\"messages\": [{\"role\": \"user\", \"content\": \"x\\ud83dy\"}]}",
                "<｜User｜>x\xEF\xBF\xBDy<｜Assistant｜><think>");
}

static void parts_without_text_show_in_tool_results_only(void **state)
{
    (void)state;
    prompt_ends("{\"messages\": [{\"role\": \"tool\", \"content\": [{\"type\": \"image_url\"}, "
                "{\"type\": \"text\", \"text\": \"t\"}]}]}",
                "<tool_result>[Unsupported image_url]\n\nt</tool_result><｜Assistant｜><think>");
    prompt_ends("{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", "
                "\"text\": \"\"}, {\"type\": \"input_text\", \"text\": \"b\"}]}]}",
                "<｜User｜>\n\nb<｜Assistant｜><think>");
}

/* One assistant turn with the given arguments value, rendered. */
static void arguments_render(const char *arguments, const char *params)
{
    char request[512], end[512];

    snprintf(request, sizeof(request),
             "{\"messages\": [{\"role\": \"user\"}, {\"role\": \"assistant\", \"tool_calls\": "
             "[{\"function\": {\"name\": \"f\", \"arguments\": %s}}]}]}",
             arguments);
    snprintf(end, sizeof(end),
             "<｜DSML｜invoke name=\"f\">\n%s\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
             "<｜end▁of▁sentence｜><｜Assistant｜><think>",
             params);
    prompt_ends(request, end);
}

#define PARAM(name, string, value)                                                                 \
    "<｜DSML｜parameter name=\"" name "\" string=\"" string "\">" value "</｜DSML｜parameter>"

static void arguments_of_any_shape_become_an_object(void **state)
{
    (void)state;
    arguments_render("null", "");
    arguments_render("\"\"", "");
    arguments_render("\" \\n\"", "");
    arguments_render("\"{}\"", "");
    arguments_render("{\"a\": 1e3}", PARAM("a", "false", "1000.0"));
    arguments_render("\"{\\\"a\\\": 12345678901234567890}\"",
                     PARAM("a", "false", "12345678901234567890"));
    arguments_render("\"\\\"{\\\\\\\"a\\\\\\\": true}\\\"\"", PARAM("a", "false", "true"));
    arguments_render("\"[1]\"", PARAM("arguments", "true", "[1]"));
    arguments_render("[1]", PARAM("arguments", "true", "[1]"));
    arguments_render("7", PARAM("arguments", "true", "7"));
    arguments_render("\"null\"", PARAM("arguments", "true", "null"));
    arguments_render("\"{broken\"", PARAM("arguments", "true", "{broken"));
    arguments_render("\"{\\\"a\\\": NaN}\"", PARAM("arguments", "true", "{\"a\": NaN}"));
}

static void think_markup_in_old_content_becomes_reasoning(void **state)
{
    (void)state;
    prompt_ends("{\"messages\": [{\"role\": \"user\"}, {\"role\": \"assistant\", \"content\": "
                "\"<think>a</think>b<think>c</think>d\"}]}",
                "<think>abc</think>d<｜end▁of▁sentence｜><｜Assistant｜><think>");
    prompt_ends("{\"messages\": [{\"role\": \"user\"}, {\"role\": \"assistant\", \"content\": "
                "\"x</think>d\", \"reasoning_content\": \"r\"}]}",
                "<think>r</think>d<｜end▁of▁sentence｜><｜Assistant｜><think>");
    prompt_ends("{\"messages\": [{\"role\": \"user\"}, {\"role\": \"assistant\", \"content\": "
                "\"<think>open\"}]}",
                "<think></think><think>open<｜end▁of▁sentence｜><｜Assistant｜><think>");
}

#define BLOCK                                                                                           \
    "<｜DSML｜tool_calls>\\n<｜DSML｜invoke name=\\\"f\\\">\\n<｜DSML｜parameter name=\\\"a\\\" " \
    "string=\\\"%s\\\">%s</｜DSML｜parameter>\\n</｜DSML｜invoke>\\n</｜DSML｜tool_calls>"

static size_t calls_found(const char *content)
{
    char request[2048];
    struct bench b;
    size_t n;

    snprintf(request, sizeof(request),
             "{\"messages\": [{\"role\": \"assistant\", \"content\": \"%s\"}]}", content);
    render(&b, DS4_RELEASE_V4_0731, request);
    n = b.conversation.counts.lifted_calls;
    close_bench(&b);
    return n;
}

static void only_complete_leaked_calls_are_lifted(void **state)
{
    char content[800], two[1000];

    (void)state;
    snprintf(content, sizeof(content), BLOCK, "true", "x");
    assert_int_equal(calls_found(content), 1);
    snprintf(two, sizeof(two), "say %.380s then %.380s end", content, content);
    assert_int_equal(calls_found(two), 2);
    content[strlen(content) - 1] = '\0'; /* the wrapper is not closed */
    assert_int_equal(calls_found(content), 0);
    snprintf(content, sizeof(content), BLOCK, "false", "[1, 2]");
    assert_int_equal(calls_found(content), 1);
    snprintf(content, sizeof(content), BLOCK, "false", "not json");
    assert_int_equal(calls_found(content), 0);
    snprintf(content, sizeof(content), BLOCK, "maybe", "x");
    assert_int_equal(calls_found(content), 0);
    assert_int_equal(
        calls_found("<｜DSML｜tool_calls><｜DSML｜invoke name=\\\"f\\\"><｜DSML｜parameter "
                    "name=\\\"a\\\" string=\\\"false\\\">no json</｜DSML｜parameter>"
                    "</｜DSML｜invoke></｜DSML｜tool_calls>"),
        0);
    assert_int_equal(calls_found("<｜DSML｜tool_calls>\\n</｜DSML｜tool_calls>"), 0);
    assert_int_equal(calls_found("<｜DSML｜tool_calls>\\nprose</｜DSML｜tool_calls>"), 0);
}

/* The outer block is refused for its repeated name; the one inside its value counts. */
static void a_refused_block_may_hold_a_larger_one(void **state)
{
    static const char tag[] = "<｜DSML｜invoke name=\\\"g\\\"></｜DSML｜invoke>";
    char content[900];

    (void)state;
    snprintf(
        content, sizeof(content),
        "<｜DSML｜tool_calls><｜DSML｜invoke name=\\\"f\\\"><｜DSML｜parameter name=\\\"a\\\" "
        "string=\\\"true\\\"><｜DSML｜tool_calls>%s%s%s</｜DSML｜tool_calls></｜DSML｜parameter>"
        "<｜DSML｜parameter name=\\\"a\\\" string=\\\"true\\\">x</｜DSML｜parameter>"
        "</｜DSML｜invoke></｜DSML｜tool_calls>",
        tag, tag, tag);
    assert_int_equal(calls_found(content), 3);
}

static void legacy_functions_and_calls_are_tools(void **state)
{
    (void)state;
    prompt_ends("{\"functions\": [{\"name\": \"f\"}], \"messages\": [{\"role\": \"user\"}, "
                "{\"role\": \"assistant\", \"function_call\": {\"name\": \"f\", \"arguments\": "
                "\"{}\"}}, {\"role\": \"function\", \"name\": \"f\", \"content\": \"r\"}]}",
                "<tool_result>r</tool_result><｜Assistant｜><think>");
}

static void foreign_and_deferred_tools_are_not_rendered(void **state)
{
    struct bench b;

    (void)state;
    render(&b, DS4_RELEASE_V4_0731,
           "{\"messages\": [{\"role\": \"user\"}], \"tools\": [{\"type\": \"web_search\"}, "
           "{\"type\": \"function\", \"defer_loading\": true, \"function\": {\"name\": \"g\"}}]}");
    assert_int_equal(b.conversation.n_tool, 0);
    assert_int_equal(b.conversation.counts.ignored_tools, 1);
    assert_string_equal(b.prompt.text.ptr,
                        "<｜begin▁of▁sentence｜><｜User｜><｜Assistant｜><think>");
    close_bench(&b);
}

static void tool_choice_has_many_spellings(void **state)
{
    static const char *const named[] = {
        "{\"type\": \"function\", \"function\": {\"name\": \"f\"}}",
        "{\"type\": \"function\", \"name\": \"f\"}",
        "{\"type\": \"tool\", \"name\": \"f\"}",
    };
    struct bench b;
    char request[512];

    (void)state;
    for (size_t i = 0; i < sizeof(named) / sizeof(named[0]); i++) {
        snprintf(request, sizeof(request),
                 "{\"messages\": [{\"role\": \"user\"}], \"tools\": [{\"type\": \"function\", "
                 "\"function\": {\"name\": \"f\"}}], \"tool_choice\": %s}",
                 named[i]);
        render(&b, DS4_RELEASE_V4_0731, request);
        assert_int_equal(b.conversation.tool_choice, DS4_TOOL_CHOICE_NAMED);
        assert_true(ds4_str_equal(b.conversation.tool_name, DS4_STR("f")));
        close_bench(&b);
    }
    render(&b, DS4_RELEASE_V4_0731,
           "{\"messages\": [{\"role\": \"user\"}], \"tools\": [{\"function\": {\"name\": \"f\"}}], "
           "\"tool_choice\": {\"type\": \"any\"}}");
    assert_int_equal(b.conversation.tool_choice, DS4_TOOL_CHOICE_REQUIRED);
    close_bench(&b);
}

/* The opener of a call was forced all the same, and its markup was the answer. */
static void a_call_demanded_without_tools_is_refused(void **state)
{
    (void)state;
    refused("{\"messages\": [{\"role\": \"user\"}], \"tool_choice\": \"required\"}", "tool_choice");
    refused("{\"messages\": [{\"role\": \"user\"}], \"tools\": [{\"type\": \"web_search\"}], "
            "\"tool_choice\": {\"type\": \"any\"}}",
            "tool_choice");
    refused(
        "{\"messages\": [{\"role\": \"user\"}], \"tools\": [{\"function\": {\"name\": \"f\"}}], "
        "\"tool_choice\": {\"type\": \"allowed_tools\", \"mode\": \"auto\", \"tools\": [{\"type\": "
        "\"function\", \"name\": \"g\"}]}}",
        "tool_choice.tools");
    prompt_ends("{\"messages\": [{\"role\": \"user\"}], \"tools\": [], \"tool_choice\": \"auto\"}",
                "<｜User｜><｜Assistant｜><think>");
}

/* A client that once sent a picture sends it again with every turn: refused, the talk is over for good. */
static void pictures_leave_a_mark_where_the_setting_says_so(void **state)
{
    static const char request[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"}, "
        "{\"type\": \"image_url\", \"image_url\": {\"url\": \"x\"}}, {\"type\": \"input_audio\"}, "
        "{\"type\": \"file\"}]}]}";

    (void)state;
    refused(request, "messages[0].content[1].type");
    media = DS4_MEDIA_PLACEHOLDER;
    prompt_ends(request, "<｜User｜>a\n\n[image omitted]\n\n[audio omitted]\n\n[file omitted]"
                         "<｜Assistant｜><think>");
    refused("{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"smell\"}]}]}",
            "messages[0].content[0].type");
    media = DS4_MEDIA_REFUSE;
}

static void no_turn_is_opened_where_no_answer_is_wanted(void **state)
{
    (void)state;
    prompt_ends("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], "
                "\"add_generation_prompt\": false}",
                "<｜User｜>a");
    prompt_ends(
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
        "\"content\": \"b\"}], \"add_generation_prompt\": false}",
        "b<｜end▁of▁sentence｜>");
    prompt_ends(
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
        "\"content\": \"b\"}], \"add_generation_prompt\": false, "
        "\"continue_final_message\": true}",
        "<think></think>b");
    refused("{\"messages\": [{\"role\": \"user\"}], \"add_generation_prompt\": 0}",
            "add_generation_prompt");
}

/* `reasoning` as aggregators' clients write it: enabled and max_tokens beside effort. */
static void a_reasoning_object_can_switch_thinking_off(void **state)
{
    (void)state;
    prompt_ends("{\"messages\": [{\"role\": \"user\"}], \"reasoning\": {\"enabled\": false}}",
                "<｜Assistant｜></think>");
    prompt_ends("{\"messages\": [{\"role\": \"user\"}], \"thinking\": true, \"reasoning\": "
                "{\"enabled\": false}}",
                "<｜Assistant｜><think>");
    refused("{\"messages\": [{\"role\": \"user\"}], \"reasoning\": {\"enabled\": \"no\"}}",
            "reasoning.enabled");
    refused("{\"messages\": [{\"role\": \"user\"}], \"reasoning\": {\"max_tokens\": -1}}",
            "reasoning.max_tokens");
}

static void later_system_messages_of_v41_open_one_turn_only(void **state)
{
    struct bench b;

    (void)state;
    render(&b, DS4_RELEASE_V41,
           "{\"messages\": [{\"role\": \"system\", \"content\": \"a\"}, {\"role\": \"system\", "
           "\"content\": \"b\"}], \"reasoning_effort\": \"none\"}");
    assert_string_equal(b.prompt.text.ptr, "<｜begin▁of▁sentence｜><｜System｜>a<｜System｜>b"
                                           "<｜Assistant｜></think>");
    close_bench(&b);
}

static void a_continued_turn_says_where_it_continues(void **state)
{
    struct bench b;

    (void)state;
    render(&b, DS4_RELEASE_V4_0731,
           "{\"continue_final_message\": true, \"messages\": [{\"role\": \"user\"}, {\"role\": "
           "\"assistant\", \"reasoning\": \"First\"}]}");
    assert_true(b.prompt.in_reasoning);
    close_bench(&b);
    render(&b, DS4_RELEASE_V4_0731,
           "{\"messages\": [{\"role\": \"user\"}, {\"role\": \"assistant\", \"content\": \"Sure\", "
           "\"prefix\": true}]}");
    assert_false(b.prompt.in_reasoning);
    close_bench(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_give_the_prompts_of_the_vectors),
        cmocka_unit_test(a_call_demanded_without_tools_is_refused),
        cmocka_unit_test(pictures_leave_a_mark_where_the_setting_says_so),
        cmocka_unit_test(no_turn_is_opened_where_no_answer_is_wanted),
        cmocka_unit_test(a_reasoning_object_can_switch_thinking_off),
        cmocka_unit_test(wrong_types_are_refused_by_their_path),
        cmocka_unit_test(null_means_absent),
        cmocka_unit_test(the_last_of_duplicate_keys_counts),
        cmocka_unit_test(half_a_surrogate_pair_becomes_a_replacement),
        cmocka_unit_test(parts_without_text_show_in_tool_results_only),
        cmocka_unit_test(arguments_of_any_shape_become_an_object),
        cmocka_unit_test(think_markup_in_old_content_becomes_reasoning),
        cmocka_unit_test(only_complete_leaked_calls_are_lifted),
        cmocka_unit_test(a_refused_block_may_hold_a_larger_one),
        cmocka_unit_test(legacy_functions_and_calls_are_tools),
        cmocka_unit_test(foreign_and_deferred_tools_are_not_rendered),
        cmocka_unit_test(tool_choice_has_many_spellings),
        cmocka_unit_test(a_guided_schema_is_a_response_format),
        cmocka_unit_test(what_only_a_grammar_could_keep_is_refused_by_name),
        cmocka_unit_test(later_system_messages_of_v41_open_one_turn_only),
        cmocka_unit_test(a_continued_turn_says_where_it_continues),
    };

    return cmocka_run_group_tests_name("normalise", tests, NULL, NULL);
}
