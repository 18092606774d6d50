/* The line of a finished request.
 *
 *   received --parse--> queued --queue--> admitted --prefill--> first token --decode--> last token --> done
 *
 * Everything in it is a number, a word from a list, or the request's id. */
#include "router/api/request_log.h"

#include "common/clock.h"
#include "common/log.h"
#include "router/api/answer.h"

#include <inttypes.h>

/* From one moment to a later one; -1 if either did not come. */
static int64_t ms(int64_t from_ns, int64_t to_ns)
{
    return from_ns == 0 || to_ns == 0 ? -1 : (to_ns - from_ns) / DS4_NS_PER_MS;
}

/* Tokens per second after the first; 0 where there is no second. */
static double rate(const struct ds4_usage *usage, const struct ds4_timing *at)
{
    int64_t ns = at->last_token_ns - at->first_token_ns;

    if (usage->completion_tok < 2 || ns <= 0)
        return 0;
    return (usage->completion_tok - 1) / ((double)ns / (double)DS4_NS_PER_SEC);
}

static bool passed(int32_t limit_s, int64_t from_ns, int64_t to_ns)
{
    return limit_s > 0 && to_ns - from_ns > limit_s * DS4_NS_PER_SEC;
}

/* One that never had a first token is judged by when it ended. */
static bool is_slow(const struct ds4_config *config, const struct ds4_timing *at)
{
    int64_t first_ns = at->first_token_ns == 0 ? at->done_ns : at->first_token_ns;

    return passed(config->log.slow_first_s, at->received_ns, first_ns) ||
           passed(config->log.slow_total_s, at->received_ns, at->done_ns);
}

void ds4_request_log(const struct ds4_choice *choice)
{
    const struct ds4_request *req = choice->req;
    const struct ds4_request_result *r = &choice->result;
    const struct ds4_timing *at = &r->timing;
    bool slow = is_slow(choice->answer->context->config, at);

    ds4_log(slow ? DS4_LOG_WARN : DS4_LOG_INFO, slow ? "request.slow" : "request.done",
            "id=%s api=%s stream=%s end=%s reason=%s prompt=%d cached=%d completion=%d "
            "reasoning=%d drafts=%d accepted=%d parse_ms=%" PRId64 " queue_ms=%" PRId64
            " prefill_ms=%" PRId64 " decode_ms=%" PRId64 " ttft_ms=%" PRId64 " total_ms=%" PRId64
            " tok_s=%.1f effort_requested=%.*s effort_applied=%.*s effort_source=%.*s thinking=%s "
            "downgraded=%s",
            req->id, ds4_api_text(req->api), req->stream ? "yes" : "no", ds4_end_text(r->end),
            r->end == DS4_END_CANCELLED    ? ds4_cancel_text(req->cancel)
            : r->reason == DS4_REASON_NONE ? "none"
                                           : ds4_reason_text(r->reason),
            r->usage.prompt_tok, r->usage.cached_tok, r->usage.completion_tok,
            r->usage.reasoning_tok, r->usage.draft_tok, r->usage.accepted_tok,
            ms(at->received_ns, at->queued_ns), ms(at->queued_ns, at->admitted_ns),
            ms(at->admitted_ns, at->first_token_ns), ms(at->first_token_ns, at->last_token_ns),
            ms(at->received_ns, at->first_token_ns), ms(at->received_ns, at->done_ns),
            rate(&r->usage, at), DS4_STR_ARG(req->effort.requested),
            DS4_STR_ARG(req->effort.applied), DS4_STR_ARG(req->effort.source),
            req->effort.thinking ? "on" : "off", req->effort.downgraded ? "yes" : "no");
}
