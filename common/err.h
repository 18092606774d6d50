/* The one error type of the house: a code for programs, a message for people.
 *
 * A fallible function takes `struct ds4_err *err` last, returns 0 or -1 (or a pointer or NULL), and
 * fills *err once, at the place that knows most.  Callers pass err through untouched or prefix
 * context with ds4_err_wrap().  err may be NULL everywhere. */
#ifndef DS4_COMMON_ERR_H
#define DS4_COMMON_ERR_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DS4_MUST_CHECK __attribute__((warn_unused_result))

/* X(code, text) */
#define DS4_CODES(X)                                                                               \
    X(DS4_OK, "ok")                                                                                \
    X(DS4_E_INVALID, "invalid request")                                                            \
    X(DS4_E_TOO_LONG, "exceeds the context")                                                       \
    X(DS4_E_BUSY, "no capacity now")                                                               \
    X(DS4_E_UNAVAILABLE, "cluster not ready")                                                      \
    X(DS4_E_TIMEOUT, "deadline passed")                                                            \
    X(DS4_E_CANCELLED, "cancelled by client")                                                      \
    X(DS4_E_NOMEM, "out of memory")                                                                \
    X(DS4_E_IO, "input/output")                                                                    \
    X(DS4_E_CORRUPT, "damaged data")                                                               \
    X(DS4_E_PROTOCOL, "peer broke protocol")                                                       \
    X(DS4_E_BUG, "internal error")

enum ds4_code {
#define DS4_CODE_ENUM(code, text) code,
    DS4_CODES(DS4_CODE_ENUM)
#undef DS4_CODE_ENUM
        DS4_N_CODES
};

#define DS4_ERR_MSG_BYTES 256

struct ds4_err {
    enum ds4_code code;
    char msg[DS4_ERR_MSG_BYTES];
};

/* Fills *err (which may be NULL) and is -1, so a failing function ends with
 * `return ds4_fail(err, DS4_E_INVALID, "top_p is %g, must be in (0, 1]", top_p);`
 * A macro, because the compiler and the analyzer must see that the value is -1: otherwise every output
 * of a failing callee looks like it might be read. */
#define ds4_fail(...) (ds4_err_fill(__VA_ARGS__), ds4_failed())
/* The same for a va_list. */
int ds4_vfail(struct ds4_err *err, enum ds4_code code, const char *fmt, va_list args)
    __attribute__((format(printf, 3, 0)));
/* Puts "context: " before the message; keeps the code; is -1. */
#define ds4_err_wrap(...) (ds4_err_prefix(__VA_ARGS__), ds4_failed())

/* What the macros call. */
static inline int ds4_failed(void)
{
    return -1;
}
void ds4_err_fill(struct ds4_err *err, enum ds4_code code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void ds4_err_prefix(struct ds4_err *err, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* The text of a code; "unknown code" for a value outside the table. */
const char *ds4_code_text(enum ds4_code code);

/* *out = a * b (or a + b).  0, or -1 with DS4_E_INVALID naming `what` on overflow; *out is untouched then. */
int ds4_mul_size(size_t a, size_t b, const char *what, size_t *out,
                 struct ds4_err *err) DS4_MUST_CHECK;
int ds4_add_size(size_t a, size_t b, const char *what, size_t *out,
                 struct ds4_err *err) DS4_MUST_CHECK;

#ifdef __cplusplus
}
#endif

#endif
