/* Frames common to the streams of chat and completions (step 15). */
#include "router/api/openai_stream.h"

#include "router/api/side_field.h"
#include "router/sse.h"

void ds4_openai_write_head(const struct ds4_answer *answer, const char *object, struct ds4_jw *w)
{
    ds4_jw_object(w);
    ds4_jw_key(w, "id");
    ds4_jw_text(w, answer->id);
    ds4_jw_key(w, "object");
    ds4_jw_text(w, object);
    ds4_jw_key(w, "created");
    ds4_jw_int(w, answer->created_unix_s);
    ds4_jw_key(w, "model");
    ds4_jw_str(w, answer->choice[0].req->model);
    ds4_jw_key(w, "system_fingerprint");
    ds4_jw_text(w, answer->context->fingerprint);
}

void ds4_openai_stream_done(struct ds4_answer *answer, const char *object)
{
    struct ds4_buf buf;
    struct ds4_jw w;

    if (answer->include_usage) {
        ds4_buf_init(&buf, DS4_OPENAI_FRAME_BYTES);
        ds4_jw_init(&w, &buf);
        ds4_openai_write_head(answer, object, &w);
        ds4_jw_key(&w, "choices");
        ds4_jw_array(&w);
        ds4_jw_end(&w);
        ds4_usage_write(answer, &w);
        ds4_side_field_write(answer, &w);
        ds4_jw_end(&w);
        ds4_sse_send_data(answer->sse, ds4_buf_view(&buf));
        ds4_buf_deinit(&buf);
    }
    ds4_sse_send_data(answer->sse, DS4_STR("[DONE]"));
}

void ds4_openai_stream_error(struct ds4_answer *answer, const struct ds4_api_error *error)
{
    struct ds4_buf buf;

    ds4_buf_init(&buf, DS4_OPENAI_FRAME_BYTES);
    ds4_api_error_write(error, DS4_STYLE_OPENAI, "", &buf);
    ds4_sse_send_data(answer->sse, ds4_buf_view(&buf));
    ds4_sse_send_data(answer->sse, DS4_STR("[DONE]"));
    ds4_buf_deinit(&buf);
}

void ds4_openai_stream_ping(struct ds4_answer *answer)
{
    ds4_sse_send_comment(answer->sse,
                         answer->progress_text[0] != '\0' ? answer->progress_text : "keep-alive");
}
