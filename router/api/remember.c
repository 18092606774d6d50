/* Keeping and restoring turns with tool calls (around steps 2 and 15).
 *
 * Exact tokens are kept only of turns that are exactly what a later prompt holds between header and end
 * token: begun by us, ended by the model's own end token, without splices in between.  Of others the
 * reasoning is kept. */
#include "router/api/remember.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "router/text/bpe.h"
#include "router/text/detok.h"
#include "router/turn_memory.h"

#include <stdlib.h>

#define DS4_TURN_TEXT_BYTES ((size_t)16 << 20)

/* The tokens of the turn, its end token excepted, and their text; nothing if they are not exact. */
static void set_exact(const struct ds4_choice *choice, struct ds4_buf *text,
                      struct ds4_tool_turn *turn)
{
    const struct ds4_vocab *vocab = choice->answer->context->vocab;
    struct ds4_detok detok;

    if (choice->req->turn_start == DS4_TURN_CONTINUED || choice->tokens.len < 2 ||
        choice->tokens.len != (size_t)choice->result.usage.completion_tok ||
        choice->result.stop_id != ds4_vocab_special(vocab, DS4_SPECIAL_EOS) ||
        choice->result.usage.recovery_tok > 0)
        return;
    ds4_detok_init(&detok, vocab, false);
    for (size_t t = 0; t + 1 < choice->tokens.len; t++)
        if (ds4_detok_push(&detok, choice->tokens.ptr[t], text, NULL) != 0)
            return;
    if (text->len == 0)
        return;
    turn->exact = (struct ds4_exact_turn){
        .id = choice->tokens.ptr,
        .n_id = (int32_t)choice->tokens.len - 1,
        .text = ds4_buf_view(text),
        .in_reasoning = choice->req->turn_start == DS4_TURN_THINKING,
    };
}

/* Sampled in other tokens than its text is read in: the text alone would not find the cached rows. */
static void remember_tokens(const struct ds4_choice *choice, const struct ds4_exact_turn *exact)
{
    const struct ds4_api_context *context = choice->answer->context;
    struct ds4_ids ids = {0};

    if (context->turn_memory != NULL && exact->n_id > 0 &&
        ds4_bpe_encode(context->bpe, exact->text, DS4_BPE_SPECIAL, &ids, NULL) == 0 &&
        (ids.len != (size_t)exact->n_id ||
         memcmp(ids.ptr, exact->id, ids.len * sizeof(*ids.ptr)) != 0))
        ds4_turn_memory_put(context->turn_memory, exact->text, exact->id, exact->n_id);
    DS4_VEC_DEINIT(&ids);
}

void ds4_remember_turn(const struct ds4_choice *choice)
{
    const struct ds4_api_context *context = choice->answer->context;
    struct ds4_tool_turn turn = {
        .reasoning = ds4_buf_view(&choice->reasoning),
        .content = ds4_buf_view(&choice->content),
        .n_call = choice->calls.len,
    };
    struct ds4_tool_call *calls;
    struct ds4_buf text;

    ds4_buf_init(&text, DS4_TURN_TEXT_BYTES);
    set_exact(choice, &text, &turn);
    remember_tokens(choice, &turn.exact);
    calls = context->tool_memory == NULL || turn.n_call == 0 ? NULL
                                                             : calloc(turn.n_call, sizeof(*calls));
    if (calls == NULL) { /* a turn not remembered is no failure of the answer */
        ds4_buf_deinit(&text);
        return;
    }
    for (size_t c = 0; c < turn.n_call; c++)
        calls[c] = (struct ds4_tool_call){
            .id = ds4_str_view(choice->calls.ptr[c].id),
            .name = ds4_buf_view(&choice->calls.ptr[c].name),
            .arguments = ds4_buf_view(&choice->calls.ptr[c].arguments),
        };
    turn.calls = calls;
    ds4_tool_memory_put(context->tool_memory, &turn, ds4_clock_ns());
    ds4_buf_deinit(&text);
    free(calls);
    ds4_metric_set(context->metrics, DS4_M_TOOL_MEMORY_ENTRIES,
                   (double)ds4_tool_memory_count(context->tool_memory), NULL);
    ds4_metric_set(context->metrics, DS4_M_TOOL_MEMORY_BYTES,
                   (double)ds4_tool_memory_bytes(context->tool_memory), NULL);
}

int ds4_remember_restore(const struct ds4_api_context *context, struct ds4_arena *arena,
                         struct ds4_chat_prompt *prompt, struct ds4_err *err)
{
    struct ds4_chat *chat = &prompt->conversation.chat;
    int64_t now_ns = ds4_clock_ns();

    for (size_t i = 0; i < chat->n_message; i++) {
        struct ds4_message *message = &chat->messages[i];
        bool silent = message->reasoning.len == 0;
        enum ds4_replay replay = DS4_REPLAY_MISSING;

        if (message->role != DS4_ROLE_ASSISTANT || message->n_call == 0)
            continue;
        if (context->tool_memory != NULL &&
            ds4_tool_memory_restore(context->tool_memory, message, arena, now_ns, &replay, err) !=
                0)
            return -1;
        prompt->replayed.calls[replay] += message->n_call;
        /* A known turn that had none is complete without. */
        if (silent && prompt->effort.thinking &&
            (message->reasoning.len > 0 || replay == DS4_REPLAY_MISSING))
            prompt->replayed.without_reasoning++;
    }
    return 0;
}

void ds4_remember_count(const struct ds4_chat_prompt *prompt, enum ds4_api api,
                        struct ds4_metrics *metrics)
{
    for (int replay = DS4_REPLAY_EXACT; replay <= DS4_REPLAY_MISSING; replay++)
        if (prompt->replayed.calls[replay] > 0)
            ds4_metric_add(metrics, DS4_M_TOOL_REPLAY, (double)prompt->replayed.calls[replay],
                           ds4_replay_text((enum ds4_replay)replay));
    if (prompt->replayed.without_reasoning > 0)
        ds4_metric_add(metrics, DS4_M_REPLAY_MISSING_REASONING,
                       (double)prompt->replayed.without_reasoning, ds4_api_text(api));
}
