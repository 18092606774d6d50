/* The error type: fill once, wrap on the way up.
 *
 * Messages are cut at DS4_ERR_MSG_BYTES - 1 bytes, and never inside a character: they quote input and
 * end up in JSON answers.  Wrapping formats into a scratch buffer first because the old message is
 * both source and destination. */
#include "common/err.h"

#include "common/utf8.h"

#include <stdio.h>
#include <string.h>

/* Drops the unfinished character that cutting may have left at the end. */
static void end_at_character(char *msg)
{
    struct ds4_str text = ds4_str_view(msg);

    msg[text.len - ds4_utf8_cut_tail(text)] = '\0';
}

int ds4_vfail(struct ds4_err *err, enum ds4_code code, const char *fmt, va_list args)
{
    if (err == NULL)
        return -1;
    err->code = code;
    (void)vsnprintf(err->msg, sizeof(err->msg), fmt, args);
    end_at_character(err->msg);
    return -1;
}

void ds4_err_fill(struct ds4_err *err, enum ds4_code code, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    (void)ds4_vfail(err, code, fmt, args);
    va_end(args);
}

void ds4_err_prefix(struct ds4_err *err, const char *fmt, ...)
{
    char whole[DS4_ERR_MSG_BYTES + sizeof(": ") + DS4_ERR_MSG_BYTES];
    va_list args;
    int used;

    if (err == NULL)
        return;
    va_start(args, fmt);
    used = vsnprintf(whole, DS4_ERR_MSG_BYTES, fmt, args);
    va_end(args);
    if (used < 0)
        return;
    if (used >= DS4_ERR_MSG_BYTES)
        used = DS4_ERR_MSG_BYTES - 1;
    (void)snprintf(whole + used, sizeof(whole) - (size_t)used, ": %s", err->msg);
    memcpy(err->msg, whole, sizeof(err->msg));
    err->msg[sizeof(err->msg) - 1] = '\0';
    end_at_character(err->msg);
}

const char *ds4_code_text(enum ds4_code code)
{
    static const char *const texts[DS4_N_CODES] = {
#define DS4_CODE_TEXT(code, text) [code] = text,
        DS4_CODES(DS4_CODE_TEXT)
#undef DS4_CODE_TEXT
    };

    if ((int)code < 0 || code >= DS4_N_CODES)
        return "unknown code";
    return texts[code];
}

int ds4_mul_size(size_t a, size_t b, const char *what, size_t *out, struct ds4_err *err)
{
    size_t product;

    if (__builtin_mul_overflow(a, b, &product))
        return ds4_fail(err, DS4_E_INVALID, "%s: %zu times %zu overflows", what, a, b);
    *out = product;
    return 0;
}

int ds4_add_size(size_t a, size_t b, const char *what, size_t *out, struct ds4_err *err)
{
    size_t sum;

    if (__builtin_add_overflow(a, b, &sum))
        return ds4_fail(err, DS4_E_INVALID, "%s: %zu plus %zu overflows", what, a, b);
    *out = sum;
    return 0;
}
