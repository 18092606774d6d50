/* Members that answers share (step 15): the object `ds4`, and usage in OpenAI's old form. */
#include "router/api/side_field.h"

#include "router/api/format.h"

static void write_repetition(const struct ds4_request *req, struct ds4_jw *w)
{
    ds4_jw_key(w, "recovery_tokens");
    ds4_jw_int(w, req->usage.recovery_tok);
    ds4_jw_key(w, "repetition");
    if (req->watch == NULL || req->watch->last.kind == DS4_TRIP_NONE) {
        ds4_jw_null(w);
        return;
    }
    ds4_jw_object(w);
    ds4_jw_key(w, "detector");
    ds4_jw_text(w, ds4_trip_text(req->watch->last.kind));
    ds4_jw_key(w, "evidence");
    ds4_jw_text(w, req->watch->last.evidence);
    ds4_jw_key(w, "recoveries");
    ds4_jw_int(w, req->watch->guard.n_recovered);
    ds4_jw_end(w);
}

/* Drafts are the house's own: no predictions of the client's. */
static void write_drafts(const struct ds4_request *req, struct ds4_jw *w)
{
    if (req->usage.draft_tok == 0)
        return;
    ds4_jw_key(w, "spec");
    ds4_jw_object(w);
    ds4_jw_key(w, "draft_tokens");
    ds4_jw_int(w, req->usage.draft_tok);
    ds4_jw_key(w, "accepted_tokens");
    ds4_jw_int(w, req->usage.accepted_tok);
    ds4_jw_end(w);
}

/* What was asked, what was done, and why: nothing is changed silently. */
void ds4_side_field_write(const struct ds4_answer *answer, struct ds4_jw *w)
{
    const struct ds4_choice *choice = &answer->choice[0];
    const struct ds4_request_effort *effort = &choice->req->effort;
    struct ds4_buf list;

    if (!answer->context->config->http.ds4_field)
        return;
    ds4_jw_key(w, "ds4");
    ds4_jw_object(w);
    ds4_jw_key(w, "thinking");
    ds4_jw_str(w, effort->applied);
    ds4_jw_key(w, "effort_requested");
    if (effort->requested.len > 0)
        ds4_jw_str(w, effort->requested);
    else
        ds4_jw_null(w);
    ds4_jw_key(w, "effort_applied");
    ds4_jw_str(w, effort->applied);
    ds4_jw_key(w, "effort_source");
    ds4_jw_str(w, effort->source);
    ds4_jw_key(w, "downgraded");
    ds4_jw_bool(w, effort->downgraded);
    ds4_jw_key(w, "downgrade_reason");
    if (effort->downgraded)
        ds4_jw_str(w, effort->why);
    else
        ds4_jw_null(w);
    ds4_jw_key(w, "stop_detail");
    ds4_jw_text(w, ds4_end_text(choice->result.end));
    write_repetition(choice->req, w);
    ds4_jw_key(w, "seed");
    ds4_jw_int(w, (int64_t)choice->req->sampling.seed);
    ds4_jw_key(w, "truncated_tool_args");
    ds4_jw_bool(w, choice->finish.truncated_tool_args);
    ds4_jw_key(w, "truncated_in_reasoning");
    ds4_jw_bool(w, choice->finish.truncated_in_reasoning);
    write_drafts(choice->req, w);
    ds4_format_write(answer, w);
    ds4_jw_key(w, "downgrades");
    ds4_buf_init(&list, SIZE_MAX / 2);
    (void)ds4_buf_append_byte(&list, '[');
    (void)ds4_buf_append_str(&list, ds4_buf_view(&answer->notes));
    (void)ds4_buf_append_byte(&list, ']');
    ds4_jw_raw(w, ds4_buf_view(&list));
    ds4_buf_deinit(&list);
    ds4_jw_end(w);
}

void ds4_usage_write(const struct ds4_answer *answer, struct ds4_jw *w)
{
    struct ds4_usage u = ds4_answer_usage(answer);

    ds4_jw_key(w, "usage");
    ds4_jw_object(w);
    ds4_jw_key(w, "prompt_tokens");
    ds4_jw_int(w, u.prompt_tok);
    ds4_jw_key(w, "completion_tokens");
    ds4_jw_int(w, u.completion_tok);
    ds4_jw_key(w, "total_tokens");
    ds4_jw_int(w, (int64_t)u.prompt_tok + u.completion_tok);
    ds4_jw_key(w, "prompt_tokens_details");
    ds4_jw_object(w);
    ds4_jw_key(w, "cached_tokens");
    ds4_jw_int(w, u.cached_tok);
    ds4_jw_end(w);
    ds4_jw_key(w, "completion_tokens_details");
    ds4_jw_object(w);
    ds4_jw_key(w, "reasoning_tokens");
    ds4_jw_int(w, u.reasoning_tok);
    ds4_jw_key(w, "accepted_prediction_tokens");
    ds4_jw_int(w, 0);
    ds4_jw_key(w, "rejected_prediction_tokens");
    ds4_jw_int(w, 0);
    ds4_jw_end(w);
    ds4_jw_key(w, "prompt_cache_hit_tokens");
    ds4_jw_int(w, u.cached_tok);
    ds4_jw_key(w, "prompt_cache_miss_tokens");
    ds4_jw_int(w, (int64_t)u.prompt_tok - u.cached_tok);
    ds4_jw_end(w);
}
