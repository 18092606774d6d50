/* Metrics of the request path: which numbers change when, in one place.
 *
 * Gauges (queue depth, blocks, ready) are set where they are shown, from ds4_sched_stats and
 * ds4_cluster_view; here are only the counters and histograms that need the moment. */
#include "common/clock.h"
#include "common/metrics.h"
#include "router/parse/stream.h"
#include "router/sched/engine.h"

#include <stdio.h>
#include <string.h>

#define DS4_SPEC_METHOD "ngram" /* the only drafter there is */

static double seconds(int64_t from_ns, int64_t to_ns)
{
    return (double)(to_ns - from_ns) / (double)DS4_NS_PER_SEC;
}

void ds4_count_refused(struct ds4_metrics *m, enum ds4_api api, enum ds4_reason reason)
{
    const char *why = ds4_reason_text(reason);

    if (reason == DS4_REASON_CONTEXT)
        why = "context";
    else if (reason == DS4_REASON_POISONED)
        why = "poisoned";
    else if (reason == DS4_REASON_LOADING || reason == DS4_REASON_STAGE_DOWN ||
             reason == DS4_REASON_RESTARTED)
        why = "not_ready";
    else if (reason == DS4_REASON_INVALID)
        why = "invalid";
    ds4_metric_add(m, DS4_M_REQUESTS_STARTED, 1, ds4_api_text(api));
    ds4_metric_add(m, DS4_M_ADMIT_REJECTS, 1, why);
    ds4_metric_add(m, DS4_M_REQUESTS, 1, ds4_api_text(api), "refused");
}

void ds4_count_started(struct ds4_metrics *m, const struct ds4_request *req)
{
    ds4_metric_add(m, DS4_M_REQUESTS_STARTED, 1, ds4_api_text(req->api));
}

void ds4_count_admitted(struct ds4_metrics *m, const struct ds4_request *req,
                        const struct ds4_prefix_hit *hit)
{
    int32_t computed = req->n_prompt - hit->run;
    int32_t most = hit->lcp < req->n_prompt ? hit->lcp : req->n_prompt - 1;
    const char *kind = "cold", *result = "miss";

    if (hit->run > 0) {
        bool full = hit->run == most && req->n_prompt - most == 1;
        bool on_device = hit->source == DS4_SOURCE_HOT || hit->source == DS4_SOURCE_REPLAY;
        const char *tier = on_device ? "hbm" : hit->source == DS4_SOURCE_DISK ? "disk" : "host";

        kind = full ? "partial_truncate" : "warm";
        result = full ? "hit_full" : "hit_partial";
        ds4_metric_add(m, DS4_M_KV_HIT_TOKENS, hit->run, tier);
        ds4_metric_add(m, DS4_M_PROMPT_TOKENS_SOURCE, hit->run, tier);
    }
    ds4_metric_add(m, DS4_M_ADMITS, 1, kind);
    ds4_metric_add(m, DS4_M_KV_LOOKUPS, 1, result);
    ds4_metric_add(m, DS4_M_PROMPT_TOKENS_SOURCE, computed, "computed");
    ds4_metric_add(m, DS4_M_KV_DIVERGED_TOKENS, req->n_prompt - most, NULL);
    ds4_metric_add(m, DS4_M_KV_RECOMPUTED_TOKENS, computed, ds4_kv_source_text(hit->source));
    ds4_metric_observe(m, DS4_M_KV_EXTRA_TOKENS, most - hit->run, NULL);
    ds4_metric_observe(m, DS4_M_QUEUE_SECONDS,
                       seconds(req->timing.queued_ns, req->timing.admitted_ns),
                       ds4_api_text(req->api));
    ds4_metric_observe(m, DS4_M_PROMPT_TOKENS, req->n_prompt, ds4_api_text(req->api));
    ds4_metric_observe(m, DS4_M_VLLM_QUEUE_TIME,
                       seconds(req->timing.queued_ns, req->timing.admitted_ns), NULL);
    ds4_metric_observe(m, DS4_M_VLLM_PROMPT_TOKENS, req->n_prompt, NULL);
    ds4_metric_observe(m, DS4_M_VLLM_MAX_TOKENS, req->max_new, NULL);
    ds4_metric_observe(m, DS4_M_VLLM_PARAMS_N, req->n_choice, NULL);
}

void ds4_count_step(struct ds4_metrics *m, int32_t n_entry, int32_t n_prompt_row, int32_t n_row,
                    int64_t took_ns)
{
    int32_t n_decode = n_row - n_prompt_row; /* rows */
    const char *kind = "mixed";

    if (n_decode == 0)
        kind = "prefill";
    else if (n_prompt_row == 0)
        kind = n_decode == n_entry ? "decode" : "verify";

    ds4_metric_add(m, DS4_M_STEPS, 1, kind);
    if (n_decode > 0)
        ds4_metric_add(m, DS4_M_DECODE_STEPS, 1, NULL);
    ds4_metric_observe(m, DS4_M_BATCH_SEQUENCES, n_entry, kind);
    ds4_metric_observe(m, DS4_M_BATCH_TOKENS, n_row, kind);
    ds4_metric_observe(m, DS4_M_STEP_SECONDS, seconds(0, took_ns), kind);
    ds4_metric_observe(m, DS4_M_VLLM_ITERATION_TOKENS, n_row, NULL);
}

void ds4_count_broken(struct ds4_metrics *m, const char *id)
{
    static const char *const of_grants[] = {"I1", "I2", "I3", "I4", "I7"};

    ds4_metric_add(m, DS4_M_KV_INVARIANT_FAILURES, 1, id);
    /* Rows without a grant, or beyond it, or a refusal that left traces: what once began with a refusal that
     * somebody did not look at. */
    for (size_t i = 0; i < sizeof(of_grants) / sizeof(of_grants[0]); i++)
        if (strcmp(id, of_grants[i]) == 0)
            ds4_metric_add(m, DS4_M_ADMIT_AFTER_REJECT, 1, id);
}

void ds4_count_drafts(struct ds4_metrics *m, int32_t n_stage, const struct ds4_token_entry *entry)
{
    int32_t n_accepted = ds4_accepted_drafts(entry), n_run = n_accepted + entry->n_undone;
    char label[16];

    if (entry->n_bad_draft > 0)
        ds4_metric_add(m, DS4_M_SPEC_BAD_DRAFTS, entry->n_bad_draft, "out_of_vocab");
    if ((entry->flags & DS4_TOKEN_QUENCHED) != 0)
        ds4_metric_add(m, DS4_M_SPEC_DISABLED, 1, "quench");
    if (n_run == 0)
        return;
    ds4_metric_add(m, DS4_M_SPEC_DRAFTS, 1, DS4_SPEC_METHOD);
    ds4_metric_add(m, DS4_M_SPEC_DRAFT_TOKENS, n_run, DS4_SPEC_METHOD);
    ds4_metric_add(m, DS4_M_SPEC_ACCEPTED_TOKENS, n_accepted, DS4_SPEC_METHOD);
    for (int32_t i = 0; i < n_accepted; i++) {
        (void)snprintf(label, sizeof(label), "%d", (int)i);
        ds4_metric_add(m, DS4_M_SPEC_ACCEPTED_PER_POS, 1, DS4_SPEC_METHOD, label);
    }
    ds4_metric_observe(m, DS4_M_SPEC_ACCEPT_LENGTH, 1 + n_accepted, DS4_SPEC_METHOD);
    if (entry->n_nan_draft > 0) {
        (void)snprintf(label, sizeof(label), "%d", (int)n_stage - 1);
        ds4_metric_add(m, DS4_M_SPEC_BAD_DRAFTS, entry->n_nan_draft, "nan_row");
        ds4_metric_add(m, DS4_M_NONFINITE_ROWS, entry->n_nan_draft, label, "draft");
    }
}

void ds4_count_no_room(struct ds4_metrics *m)
{
    ds4_metric_add(m, DS4_M_SPEC_DISABLED, 1, "context");
}

void ds4_count_preempted(struct ds4_metrics *m, const char *reason)
{
    ds4_metric_add(m, DS4_M_PREEMPTIONS, 1, reason);
}

void ds4_count_parked(struct ds4_metrics *m, const char *reason)
{
    ds4_metric_add(m, DS4_M_SEQS_PARKED, 1, reason);
    ds4_count_preempted(m, reason);
}

static const char *mode_text(const struct ds4_request *req)
{
    return req->watch->recovery->knobs.recovery == DS4_RECOVERY_REOPEN ? "reopen" : "nudge";
}

void ds4_count_trip(struct ds4_metrics *m, const struct ds4_request *req,
                    const struct ds4_accept *accept)
{
    bool again = accept->verdict == DS4_VERDICT_SPLICE;

    if (req->watch->last.kind == DS4_TRIP_SOUP)
        ds4_metric_add(m, DS4_M_PARSER_LEAKS, 1, "control_tag");
    ds4_metric_add(m, DS4_M_TRIPWIRES, 1, ds4_trip_text(req->watch->last.kind));
    /* What this trip says about the recovery before it. */
    if (req->watch->guard.n_recovered > (again ? 1 : 0))
        ds4_metric_add(m, DS4_M_NUDGES, 1, mode_text(req), again ? "again" : "exhausted");
}

void ds4_count_burst(struct ds4_metrics *m, int32_t n_token, int64_t gap_ns)
{
    if (gap_ns <= 0 || n_token < 1)
        return;
    ds4_metric_observe(m, DS4_M_STEP_GAP_SECONDS, seconds(0, gap_ns), NULL);
    ds4_metric_observe(m, DS4_M_INTER_TOKEN_SECONDS, seconds(0, gap_ns) / n_token, NULL);
    ds4_metric_observe(m, DS4_M_VLLM_INTER_TOKEN, seconds(0, gap_ns) / n_token, NULL);
}

static const char *outcome(enum ds4_end end, enum ds4_reason reason)
{
    if (end == DS4_END_CANCELLED)
        return "cancelled";
    if (end != DS4_END_ERROR)
        return "completed";
    return reason == DS4_REASON_QUEUE_TIMEOUT ? "timeout" : "failed";
}

static const char *phase_text(enum ds4_request_state phase)
{
    if (phase == DS4_REQUEST_PREFILL)
        return "prefill";
    return phase == DS4_REQUEST_DECODE ? "decode" : "queued";
}

/* Where each deviation is counted: its own metric, the summary by kind, what became of the call. */
static const struct {
    enum ds4_metric id;
    const char *label;
    const char *kind;   /* of ds4_parser_recoveries_total, NULL = none */
    const char *result; /* of ds4_tool_calls_total, NULL = none */
} rule_counts[DS4_N_PARSE_RULES] = {
    [DS4_RULE_BLOCK_EXACT] = {DS4_M_DSML_BLOCKS, "exact", NULL, NULL},
    [DS4_RULE_BLOCK_NEAR] = {DS4_M_DSML_BLOCKS, "near", "wrapper_variant", NULL},
    [DS4_RULE_RECOVERED_INVOKE] = {DS4_M_DSML_RECOVERED, "invoke", "orphan_invoke", "recovered"},
    [DS4_RULE_RECOVERED_FUSED] = {DS4_M_DSML_RECOVERED, "fused", "hybrid_xml", "recovered"},
    [DS4_RULE_RECOVERED_HEADLESS] = {DS4_M_DSML_RECOVERED, "headless", "headless", "recovered"},
    [DS4_RULE_RECOVERED_NAMELESS] = {DS4_M_DSML_RECOVERED, "nameless", "headless", "recovered"},
    [DS4_RULE_REJECTED_UNDECLARED] = {DS4_M_DSML_REJECTED, "undeclared", NULL, "rejected"},
    [DS4_RULE_REJECTED_REQUIRED] = {DS4_M_DSML_REJECTED, "required", NULL, "rejected"},
    [DS4_RULE_REJECTED_AMBIGUOUS] = {DS4_M_DSML_REJECTED, "ambiguous", NULL, "rejected"},
    [DS4_RULE_REJECTED_FENCE] = {DS4_M_DSML_REJECTED, "fence", NULL, "rejected"},
    [DS4_RULE_REJECTED_PROSE] = {DS4_M_DSML_REJECTED, "prose", NULL, "rejected"},
    [DS4_RULE_REJECTED_UNCLOSED] = {DS4_M_DSML_REJECTED, "unclosed", NULL, "rejected"},
    [DS4_RULE_REJECTED_INLINE] = {DS4_M_DSML_REJECTED, "inline", NULL, "rejected"},
    [DS4_RULE_STRAY_CLOSER] = {DS4_M_DSML_STRAY_CLOSERS, NULL, "misspelled_close", NULL},
    [DS4_RULE_EMPTY_BLOCK] = {DS4_M_DSML_EMPTY_BLOCKS, NULL, NULL, NULL},
    [DS4_RULE_UNDECLARED] = {DS4_M_DSML_UNDECLARED, NULL, NULL, NULL},
    [DS4_RULE_DUP_PARAM] = {DS4_M_DSML_DUP_PARAMS, NULL, NULL, NULL},
    [DS4_RULE_TRUNCATED] = {DS4_M_DSML_TRUNCATED, NULL, NULL, NULL},
    [DS4_RULE_COERCED_PARAM] = {DS4_M_DSML_COERCED_PARAMS, NULL, "bad_json", NULL},
};

/* What the parser met in the answer. */
static void count_parser(struct ds4_metrics *m, const struct ds4_request *req, enum ds4_end end)
{
    const uint64_t *used = ds4_stream_rules(req->parser);
    const char *api = ds4_api_text(req->api);
    bool cut = end == DS4_END_LENGTH || end == DS4_END_CONTEXT;
    uint32_t n_complete, n_call = ds4_stream_n_calls(req->parser, &n_complete);
    uint64_t recovered = 0;

    for (size_t r = 0; r < DS4_N_PARSE_RULES; r++) {
        if (used[r] == 0)
            continue;
        ds4_metric_add(m, rule_counts[r].id, (double)used[r], rule_counts[r].label);
        if (rule_counts[r].kind != NULL)
            ds4_metric_add(m, DS4_M_PARSER_RECOVERIES, (double)used[r], rule_counts[r].kind);
        if (rule_counts[r].result != NULL)
            ds4_metric_add(m, DS4_M_TOOL_CALLS, (double)used[r], api, rule_counts[r].result);
        if (rule_counts[r].id == DS4_M_DSML_RECOVERED)
            recovered += used[r];
    }
    if (n_complete > recovered)
        ds4_metric_add(m, DS4_M_TOOL_CALLS, (double)(n_complete - recovered), api, "ok");
    if (req->finish.truncated_tool_args)
        ds4_metric_add(m, DS4_M_TOOL_CALLS, 1, api, "truncated");
    if (req->finish.pseudo_tag) {
        ds4_metric_add(m, DS4_M_ENVELOPE_MISSING, 1, "pseudo_tag");
        ds4_metric_add(m, DS4_M_PARSER_LEAKS, 1, "dsml_in_content");
    }
    if (cut && n_call == 0 && ds4_stream_expects_calls(req->parser))
        ds4_metric_add(m, DS4_M_ENVELOPE_MISSING, 1, "budget_burn");
}

void ds4_count_done(struct ds4_metrics *m, const struct ds4_request *req, enum ds4_end end,
                    enum ds4_reason reason, enum ds4_request_state phase)
{
    const char *api = ds4_api_text(req->api);
    const struct ds4_timing *at = &req->timing;
    const struct ds4_usage *usage = &req->usage;
    const char *cache = usage->cached_tok == 0 ? "cold" : "warm";

    if (usage->cached_tok > 0 && usage->cached_tok < req->n_prompt / 2)
        cache = "partial";
    ds4_metric_add(m, DS4_M_REQUESTS, 1, api, outcome(end, reason));
    if (req->parser != NULL)
        count_parser(m, req, end);
    if (req->watch != NULL && req->watch->guard.n_recovered > 0 && end != DS4_END_ERROR &&
        end != DS4_END_CANCELLED && end != DS4_END_REPETITION)
        ds4_metric_add(m, DS4_M_NUDGES, 1, mode_text(req), "recovered");
    ds4_metric_add(m, DS4_M_FINISH, 1, api, ds4_end_text(end));
    if (end == DS4_END_CANCELLED)
        ds4_metric_add(m, DS4_M_REQUESTS_CANCELLED, 1, phase_text(phase),
                       ds4_cancel_text(req->cancel));
    if (reason == DS4_REASON_RESTARTED || reason == DS4_REASON_STAGE_DOWN ||
        reason == DS4_REASON_POISONED)
        ds4_metric_add(m, DS4_M_REQUESTS_FAILED_BY_RESTART, 1, NULL);
    ds4_metric_observe(m, DS4_M_E2E_SECONDS, seconds(at->received_ns, at->done_ns), api);
    ds4_metric_observe(m, DS4_M_VLLM_E2E, seconds(at->received_ns, at->done_ns), NULL);
    if (at->first_token_ns == 0)
        return;
    ds4_metric_observe(m, DS4_M_TTFT_SECONDS, seconds(at->received_ns, at->first_token_ns), api,
                       cache);
    ds4_metric_observe(m, DS4_M_PREFILL_SECONDS, seconds(at->admitted_ns, at->first_token_ns), api);
    ds4_metric_observe(m, DS4_M_DECODE_SECONDS, seconds(at->first_token_ns, at->last_token_ns),
                       api);
    ds4_metric_observe(m, DS4_M_VLLM_TTFT, seconds(at->received_ns, at->first_token_ns), NULL);
    ds4_metric_observe(m, DS4_M_VLLM_PREFILL_TIME, seconds(at->admitted_ns, at->first_token_ns),
                       NULL);
    ds4_metric_observe(m, DS4_M_VLLM_DECODE_TIME, seconds(at->first_token_ns, at->last_token_ns),
                       NULL);
    ds4_metric_observe(m, DS4_M_VLLM_INFERENCE_TIME, seconds(at->admitted_ns, at->last_token_ns),
                       NULL);
    ds4_metric_observe(m, DS4_M_VLLM_GENERATION_LENGTH, usage->completion_tok, NULL);
    ds4_metric_observe(m, DS4_M_COMPLETION_TOKENS, usage->completion_tok, api);
    ds4_metric_observe(m, DS4_M_REASONING_TOKENS, usage->reasoning_tok, api);
    ds4_metric_add(m, DS4_M_GENERATED_TOKENS, usage->reasoning_tok, "reasoning");
    ds4_metric_add(m, DS4_M_GENERATED_TOKENS, usage->completion_tok - usage->reasoning_tok,
                   "content");
    ds4_metric_add(m, DS4_M_GENERATED_TOKENS, usage->recovery_tok, "nudge");
}
