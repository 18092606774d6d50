/* Which members each dialect knows.  What is refused is known as well: the refusal names it.
 *
 * The lists follow the documentation of the three vendors and what coding assistants really send. */
#include "router/api/fields.h"

#include "common/metrics.h"

#include <string.h>

#define DS4_FIELD_BYTES 64

enum {
    CHAT = 1 << DS4_API_CHAT,
    COMPLETIONS = 1 << DS4_API_COMPLETIONS,
    RESPONSES = 1 << DS4_API_RESPONSES,
    MESSAGES = 1 << DS4_API_MESSAGES,
    OPENAI = CHAT | COMPLETIONS,
    TALK = CHAT | RESPONSES | MESSAGES,
    EVERY = OPENAI | RESPONSES | MESSAGES
};

struct field {
    const char *name;
    int honoured; /* in these dialects it means something, or is refused by name */
    int ignored;  /* in these it is taken and does nothing */
};

static const struct field fields[] = {
    {"model", EVERY, 0},
    {"messages", CHAT | MESSAGES, 0},
    {"prompt", COMPLETIONS | RESPONSES, 0},
    {"suffix", COMPLETIONS, 0},
    {"input", RESPONSES, 0},
    {"instructions", RESPONSES, 0},
    {"system", MESSAGES, 0},
    {"stream", EVERY, 0},
    {"stream_options", OPENAI, RESPONSES},
    {"max_tokens", OPENAI | MESSAGES, 0},
    {"max_completion_tokens", CHAT, 0},
    {"max_output_tokens", RESPONSES, 0},
    {"n_predict", OPENAI, 0},
    {"min_tokens", EVERY, 0},
    {"temperature", EVERY, 0},
    {"top_p", EVERY, 0},
    {"top_k", EVERY, 0},
    {"min_p", EVERY, 0},
    {"presence_penalty", EVERY, 0},
    {"frequency_penalty", EVERY, 0},
    {"repetition_penalty", EVERY, 0},
    {"logit_bias", EVERY, 0},
    {"seed", EVERY, 0},
    {"n", OPENAI, 0},
    {"best_of", OPENAI, 0},
    {"use_beam_search", OPENAI, 0},
    {"length_penalty", OPENAI, 0},
    {"stop", OPENAI | RESPONSES, 0},
    {"stop_sequences", MESSAGES, 0},
    {"stop_token_ids", EVERY, 0},
    {"include_stop_str_in_output", EVERY, 0},
    {"ignore_eos", EVERY, 0},
    {"logprobs", OPENAI, 0},
    {"top_logprobs", CHAT | RESPONSES, 0},
    {"prompt_logprobs", OPENAI, 0},
    {"echo", OPENAI, 0},
    {"allowed_token_ids", EVERY, 0},
    {"bad_words", EVERY, 0},
    {"tools", TALK, 0},
    {"tool_choice", TALK, 0},
    {"parallel_tool_calls", CHAT | RESPONSES, 0},
    {"functions", CHAT, 0},
    {"function_call", CHAT, 0},
    {"response_format", OPENAI, 0},
    {"text", RESPONSES, 0},
    {"structured_outputs", OPENAI, 0},
    {"guided_json", OPENAI, 0},
    {"guided_regex", OPENAI, 0},
    {"guided_choice", OPENAI, 0},
    {"guided_grammar", OPENAI, 0},
    {"grammar", OPENAI, 0},
    {"reasoning_effort", TALK, COMPLETIONS},
    {"thinking", TALK, COMPLETIONS},
    {"think", TALK, COMPLETIONS},
    {"enable_thinking", TALK, COMPLETIONS},
    {"output_config", TALK, 0},
    {"output_format", MESSAGES, 0},
    {"chat_template_kwargs", TALK, COMPLETIONS},
    {"include_reasoning", CHAT, 0},
    {"reasoning", TALK, 0},
    {"thinking_token_budget", TALK, COMPLETIONS},
    {"chat_template", CHAT, 0},
    {"add_generation_prompt", CHAT, 0},
    {"continue_final_message", CHAT, 0},
    {"add_special_tokens", 0, OPENAI},
    {"parse_special", COMPLETIONS, 0},
    {"cache_prompt", EVERY, 0},
    {"cache_salt", EVERY, 0},
    {"session_id", EVERY, 0},
    {"ds4", TALK, 0},
    {"return_progress", OPENAI, 0},
    {"previous_response_id", RESPONSES, 0},
    {"conversation", RESPONSES, 0},
    {"store", RESPONSES, CHAT},
    {"include", RESPONSES, 0},
    {"truncation", RESPONSES, 0},
    {"background", RESPONSES, 0},
    {"modalities", CHAT, 0},
    {"audio", CHAT, 0},
    {"request_id", EVERY, 0},
    {"prompt_cache_key", 0, EVERY},
    {"user", 0, EVERY},
    {"metadata", RESPONSES, CHAT | COMPLETIONS | MESSAGES},
    {"service_tier", 0, EVERY},
    {"safety_identifier", 0, EVERY},
    {"verbosity", 0, CHAT},
    {"prediction", 0, CHAT},
    {"web_search_options", 0, CHAT},
    {"priority", 0, EVERY},
    {"documents", 0, CHAT},
    {"media_io_kwargs", 0, CHAT},
    {"id_slot", 0, OPENAI},
    {"timings_per_token", 0, OPENAI},
    {"sse_ping_interval", 0, OPENAI},
    {"client_metadata", 0, RESPONSES},
    {"max_tool_calls", 0, RESPONSES},
    {"prompt_cache_retention", 0, CHAT | RESPONSES},
    {"context_management", 0, MESSAGES},
    {"container", 0, MESSAGES},
    {"mcp_servers", 0, MESSAGES},
    {"betas", 0, MESSAGES},
    {"cache_control", 0, MESSAGES},
};

static const struct field *find_field(struct ds4_str name)
{
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (ds4_str_equal(ds4_str_view(fields[i].name), name))
            return &fields[i];
    return NULL;
}

/* The metric has a list of names that are worth knowing; what is not on it counts as `other`. */
static void count_unknown(struct ds4_metrics *m, struct ds4_str key)
{
    char name[DS4_FIELD_BYTES];

    if (key.len >= sizeof(name))
        key = DS4_STR("other");
    memcpy(name, key.ptr, key.len);
    name[key.len] = '\0';
    ds4_metric_add(m, DS4_M_UNKNOWN_FIELDS, 1, name);
}

void ds4_fields_count(struct ds4_metrics *m, enum ds4_api api, const struct ds4_json *body)
{
    const int here = 1 << api;

    for (struct ds4_json_member member = ds4_json_first(body); member.value != NULL;
         member = ds4_json_next(member)) {
        const struct field *field = find_field(member.key);

        if (field != NULL && (field->honoured & here) != 0)
            continue;
        if (field != NULL && (field->ignored & here) != 0)
            ds4_metric_add(m, DS4_M_PARAM_IGNORED, 1, field->name);
        else
            count_unknown(m, member.key);
    }
}
