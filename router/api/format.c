/* Reading, checking and showing the form an answer was to have (steps 2 and 15). */
#include "router/api/format.h"

#include "common/metrics.h"
#include "router/parse/conform.h"

#include <stdio.h>

int ds4_format_read(struct ds4_answer *answer, const struct ds4_chat_prompt *prompt,
                    struct ds4_api_error *error)
{
    static const char *const params[DS4_N_API] = {"response_format", "response_format",
                                                  "text.format", "output_config.format"};
    const struct ds4_jt_node *schema = prompt->conversation.answer_schema;
    const char *param = prompt->conversation.answer_param;
    struct ds4_err err = {0};

    answer->wants_json = prompt->conversation.answer_json;
    if (!answer->wants_json || schema == NULL)
        return 0;
    if (ds4_conform_check_schema(schema, &err) != 0)
        return ds4_api_fail(error, "schema_unsupported",
                            param != NULL ? param : params[answer->dialect->api], "%s", err.msg);
    answer->answer_schema = ds4_arena_copy(&answer->choice[0].req->arena, schema->raw);
    return answer->answer_schema.ptr != NULL
               ? 0
               : ds4_api_fail(error, "internal_error", NULL, "no memory for the schema");
}

void ds4_format_check(struct ds4_choice *choice)
{
    const struct ds4_answer *answer = choice->answer;
    struct ds4_err err = {0};

    if (!answer->wants_json || choice->calls.len > 0)
        return;
    if (ds4_conform(answer->answer_schema, ds4_buf_view(&choice->content), &err) == 0)
        return;
    (void)snprintf(choice->format_problem, sizeof(choice->format_problem), "%s", err.msg);
    ds4_metric_add(answer->context->metrics, DS4_M_GRAMMAR_FAILURES, 1, "abandoned");
}

void ds4_format_write(const struct ds4_answer *answer, struct ds4_jw *w)
{
    const char *problem = NULL;

    ds4_jw_key(w, "format");
    if (!answer->wants_json) {
        ds4_jw_null(w);
        return;
    }
    for (int32_t i = 0; i < answer->n_choice && problem == NULL; i++)
        if (answer->choice[i].format_problem[0] != '\0')
            problem = answer->choice[i].format_problem;
    ds4_jw_object(w);
    ds4_jw_key(w, "valid");
    ds4_jw_bool(w, problem == NULL);
    ds4_jw_key(w, "problem");
    ds4_jw_text(w, problem);
    ds4_jw_end(w);
}
