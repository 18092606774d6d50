/* Writing JSON: the one place that escapes strings and prints doubles.
 *
 * Both follow Python (json.dumps with ensure_ascii off, repr of a float), because the same text goes
 * into prompts, where the reference is Python.  Escaping copies runs of plain bytes in one piece;
 * output passes here for every streamed token.  Steps 3, 14 and 15. */
#include "common/json_write.h"

#include "common/utf8.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DS4_JW_SAFE_DIGITS   15 /* DBL_DIG: so many digits survive a double unchanged */
#define DS4_JW_MAX_DIGITS    17 /* so many digits identify every double */
#define DS4_JW_PLAIN_MIN_EXP (-4)
#define DS4_JW_PLAIN_MAX_EXP 16 /* repr(float) prints exponents from -4 to 15 without "e" */

/* ---- strings ------------------------------------------------------------------------------- */

/* The bytes of `s` up to the first one that must be escaped. */
static size_t plain_len(struct ds4_str s)
{
    size_t i = 0;

    while (i < s.len && (unsigned char)s.ptr[i] >= ' ' && s.ptr[i] != '"' && s.ptr[i] != '\\')
        i++;
    return i;
}

static void append_escape(struct ds4_buf *out, char c)
{
    static const char escaped[] = "\"\\\n\r\t\b\f", letters[] = "\"\\nrtbf";
    const char *hit = memchr(escaped, c, sizeof(escaped) - 1);
    char pair[2] = {'\\', hit == NULL ? 'u' : letters[hit - escaped]};

    (void)ds4_buf_append(out, pair, sizeof(pair));
    if (hit == NULL)
        (void)ds4_buf_appendf(out, "%04x", (unsigned char)c);
}

static void append_valid(struct ds4_buf *out, struct ds4_str s)
{
    size_t n;

    while (s.len > 0) {
        n = plain_len(s);
        (void)ds4_buf_append(out, s.ptr, n);
        s = ds4_str_skip(s, n);
        if (s.len == 0)
            return;
        append_escape(out, s.ptr[0]);
        s = ds4_str_skip(s, 1);
    }
}

int ds4_jw_append_escaped(struct ds4_buf *out, struct ds4_str s)
{
    size_t valid;

    while (s.len > 0) {
        valid = ds4_utf8_valid_len(s);
        append_valid(out, ds4_str_head(s, valid));
        s = ds4_str_skip(s, valid);
        if (s.len == 0)
            break;
        valid = ds4_utf8_decode(s).n_bytes;
        (void)ds4_utf8_append_replaced(out, ds4_str_head(s, valid));
        s = ds4_str_skip(s, valid);
    }
    return out->failed ? -1 : 0;
}

int ds4_jw_append_string(struct ds4_buf *out, struct ds4_str s)
{
    (void)ds4_buf_append_byte(out, '"');
    (void)ds4_jw_append_escaped(out, s);
    return ds4_buf_append_byte(out, '"');
}

/* ---- numbers ------------------------------------------------------------------------------- */

/* The shortest decimal digits that read back as `value` (positive, finite), without trailing zeros,
 * and the exponent of the first digit. */
struct decimal {
    char digits[DS4_JW_MAX_DIGITS + 1];
    int n;
    int exponent;
};

/* True if digits * 10^(exponent - n + 1) reads back as value. */
static bool reads_back(const struct decimal *d, double value)
{
    char text[40];

    (void)snprintf(text, sizeof(text), "%.*se%d", d->n, d->digits, d->exponent - d->n + 1);
    return strtod(text, NULL) == value;
}

/* Adds one unit in the last digit. */
static void round_up(struct decimal *d)
{
    int i = d->n - 1;

    while (i >= 0 && d->digits[i] == '9')
        d->digits[i--] = '0';
    if (i >= 0) {
        d->digits[i]++;
        return;
    }
    d->digits[0] = '1'; /* 99 -> 100: one digit less counts, the exponent grows */
    d->exponent++;
}

static struct decimal shortest_decimal(double value)
{
    char text[40];
    struct decimal d = {0};
    /* With up to 15 digits the nearest decimal is the shortest one padded with zeros, except that
     * subnormals have fewer bits than that. */
    int first = fpclassify(value) == FP_SUBNORMAL ? 1 : DS4_JW_SAFE_DIGITS;

    for (int n = first; n <= DS4_JW_MAX_DIGITS; n++) {
        (void)snprintf(text, sizeof(text), "%.*e", n - 1, value);
        d.n = n;
        d.digits[0] = text[0];
        memcpy(d.digits + 1, text + 2, (size_t)n - 1);
        d.exponent = (int)strtol(strchr(text, 'e') + 1, NULL, 10);
        if (reads_back(&d, value))
            break;
        /* Below a power of two doubles lie closer: the nearest decimal may be off there while the
         * next one above still reads back (2^-44). */
        round_up(&d);
        if (reads_back(&d, value))
            break;
    }
    while (d.n > 1 && d.digits[d.n - 1] == '0')
        d.n--;
    return d;
}

static void append_zeros(struct ds4_buf *out, int n)
{
    while (n-- > 0)
        (void)ds4_buf_append_byte(out, '0');
}

static void append_plain(struct ds4_buf *out, const struct decimal *d)
{
    int whole = d->exponent + 1; /* digits before the point */

    if (whole <= 0) {
        (void)ds4_buf_append_text(out, "0.");
        append_zeros(out, -whole);
        (void)ds4_buf_append(out, d->digits, (size_t)d->n);
        return;
    }
    if (whole >= d->n) {
        (void)ds4_buf_append(out, d->digits, (size_t)d->n);
        append_zeros(out, whole - d->n);
        (void)ds4_buf_append_text(out, ".0");
        return;
    }
    (void)ds4_buf_append(out, d->digits, (size_t)whole);
    (void)ds4_buf_append_byte(out, '.');
    (void)ds4_buf_append(out, d->digits + whole, (size_t)(d->n - whole));
}

int ds4_jw_append_double(struct ds4_buf *out, double value)
{
    struct decimal d;

    if (isnan(value))
        return ds4_buf_append_text(out, "NaN");
    if (signbit(value))
        (void)ds4_buf_append_byte(out, '-');
    value = fabs(value);
    if (isinf(value))
        return ds4_buf_append_text(out, "Infinity");
    if (value == 0)
        return ds4_buf_append_text(out, "0.0");
    d = shortest_decimal(value);
    if (d.exponent >= DS4_JW_PLAIN_MIN_EXP && d.exponent < DS4_JW_PLAIN_MAX_EXP) {
        append_plain(out, &d);
    } else {
        (void)ds4_buf_append_byte(out, d.digits[0]);
        if (d.n > 1) {
            (void)ds4_buf_append_byte(out, '.');
            (void)ds4_buf_append(out, d.digits + 1, (size_t)d.n - 1);
        }
        (void)ds4_buf_appendf(out, "e%c%02d", d.exponent < 0 ? '-' : '+', abs(d.exponent));
    }
    return out->failed ? -1 : 0;
}

/* ---- the writer ---------------------------------------------------------------------------- */

static bool in_object(const struct ds4_jw *w)
{
    return w->depth > 0 && (w->objects >> (w->depth - 1) & 1) != 0;
}

/* Before each value: the comma, unless a key (which wrote it) stands before it. */
static void start_value(struct ds4_jw *w)
{
    assert(w->has_key == in_object(w) && "a value in an object needs a key");
    assert((w->depth > 0 || !w->has_items) && "one value at the top");
    if (w->has_items && !w->has_key)
        (void)ds4_buf_append_byte(w->out, ',');
    w->has_items = true;
    w->has_key = false;
}

static void open_level(struct ds4_jw *w, bool is_object)
{
    uint64_t bit;

    start_value(w);
    assert(w->depth < DS4_JW_MAX_DEPTH);
    bit = UINT64_C(1) << w->depth;
    w->objects = is_object ? w->objects | bit : w->objects & ~bit;
    w->depth++;
    w->has_items = false;
    (void)ds4_buf_append_byte(w->out, is_object ? '{' : '[');
}

void ds4_jw_init(struct ds4_jw *w, struct ds4_buf *out)
{
    *w = (struct ds4_jw){.out = out};
}

void ds4_jw_object(struct ds4_jw *w)
{
    open_level(w, true);
}

void ds4_jw_array(struct ds4_jw *w)
{
    open_level(w, false);
}

void ds4_jw_end(struct ds4_jw *w)
{
    bool is_object = in_object(w);

    assert(w->depth > 0 && !w->has_key);
    w->depth--;
    w->has_items = true;
    (void)ds4_buf_append_byte(w->out, is_object ? '}' : ']');
}

void ds4_jw_key_str(struct ds4_jw *w, struct ds4_str key)
{
    assert(in_object(w) && !w->has_key && "keys belong into objects");
    if (w->has_items)
        (void)ds4_buf_append_byte(w->out, ',');
    (void)ds4_jw_append_string(w->out, key);
    (void)ds4_buf_append_byte(w->out, ':');
    w->has_key = true;
}

void ds4_jw_key(struct ds4_jw *w, const char *key)
{
    ds4_jw_key_str(w, ds4_str_view(key));
}

void ds4_jw_str(struct ds4_jw *w, struct ds4_str s)
{
    start_value(w);
    (void)ds4_jw_append_string(w->out, s);
}

void ds4_jw_text(struct ds4_jw *w, const char *text)
{
    if (text == NULL)
        ds4_jw_null(w);
    else
        ds4_jw_str(w, ds4_str_view(text));
}

void ds4_jw_int(struct ds4_jw *w, int64_t value)
{
    start_value(w);
    (void)ds4_buf_appendf(w->out, "%" PRId64, value);
}

void ds4_jw_double(struct ds4_jw *w, double value)
{
    if (!isfinite(value)) {
        ds4_jw_null(w);
        return;
    }
    start_value(w);
    (void)ds4_jw_append_double(w->out, value);
}

void ds4_jw_bool(struct ds4_jw *w, bool value)
{
    start_value(w);
    (void)ds4_buf_append_text(w->out, value ? "true" : "false");
}

void ds4_jw_null(struct ds4_jw *w)
{
    start_value(w);
    (void)ds4_buf_append_text(w->out, "null");
}

void ds4_jw_raw(struct ds4_jw *w, struct ds4_str json)
{
    start_value(w);
    (void)ds4_buf_append_str(w->out, json);
}

bool ds4_jw_done(const struct ds4_jw *w)
{
    return w->depth == 0 && w->has_items;
}
