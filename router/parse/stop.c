/* Step 14: stop strings (see the header for the automaton and the tie rule). */
#include "router/parse/stop.h"

#include <stdlib.h>

static int build(struct ds4_stop_string *s, struct ds4_str text, struct ds4_err *err)
{
    uint32_t border = 0;

    if (text.len > UINT32_MAX)
        return ds4_fail(err, DS4_E_INVALID, "stop string has %zu bytes", text.len);
    s->text = text;
    s->fail = calloc(text.len, sizeof(*s->fail));
    if (s->fail == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "could not allocate %zu bytes for a stop string",
                        text.len * sizeof(*s->fail));
    for (size_t i = 1; i < text.len; i++) {
        while (border > 0 && text.ptr[i] != text.ptr[border])
            border = s->fail[border - 1];
        if (text.ptr[i] == text.ptr[border])
            border++;
        s->fail[i] = border;
    }
    return 0;
}

int ds4_stop_init(struct ds4_stop *stop, const struct ds4_str *strings, size_t n_strings,
                  struct ds4_err *err)
{
    *stop = (struct ds4_stop){0};
    if (n_strings == 0)
        return 0;
    stop->strings = calloc(n_strings, sizeof(*stop->strings));
    if (stop->strings == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "could not allocate %zu stop strings", n_strings);
    for (size_t i = 0; i < n_strings; i++) {
        if (strings[i].len == 0)
            continue;
        if (build(&stop->strings[stop->n_strings], strings[i], err) != 0) {
            ds4_stop_deinit(stop);
            return -1;
        }
        stop->n_strings++;
    }
    return 0;
}

void ds4_stop_deinit(struct ds4_stop *stop)
{
    for (size_t i = 0; i < stop->n_strings; i++)
        free(stop->strings[i].fail);
    free(stop->strings);
    *stop = (struct ds4_stop){0};
}

void ds4_stop_reset(struct ds4_stop *stop)
{
    for (size_t i = 0; i < stop->n_strings; i++)
        stop->strings[i].matched = 0;
}

struct ds4_stop_result ds4_stop_feed(struct ds4_stop *stop, struct ds4_str text)
{
    struct ds4_stop_result out = {.used = text.len};

    for (size_t i = 0; i < text.len; i++) {
        size_t longest = 0;
        struct ds4_str which = {NULL, 0};

        for (size_t k = 0; k < stop->n_strings; k++) {
            struct ds4_stop_string *s = &stop->strings[k];
            while (s->matched > 0 && text.ptr[i] != s->text.ptr[s->matched])
                s->matched = s->fail[s->matched - 1];
            if (text.ptr[i] == s->text.ptr[s->matched])
                s->matched++;
            if (s->matched == s->text.len && s->matched > longest) {
                longest = s->matched;
                which = s->text;
            }
        }
        if (longest > 0)
            return (struct ds4_stop_result){
                .hit = true, .text = which, .used = i + 1, .held = longest};
    }
    for (size_t k = 0; k < stop->n_strings; k++)
        if (stop->strings[k].matched > out.held)
            out.held = stop->strings[k].matched;
    return out;
}
