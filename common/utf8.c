/* UTF-8 validation and replacement.
 *
 * One function, ds4_utf8_decode, knows the table of well-formed sequences (Unicode 15, table 3-7):
 * the first byte fixes the length and the range of the second byte, later bytes are 80..BF.  The
 * others walk over it and skip runs of ASCII eight bytes at a time, which is most of what a coding
 * assistant sends and receives. */
#include "common/utf8.h"

#include <string.h>

#define DS4_UTF8_HIGH_BITS UINT64_C(0x8080808080808080)

/* What a lead byte announces; n_bytes 0 = no character starts with it. */
struct lead {
    uint32_t n_bytes;
    uint8_t second_min, second_max;
    uint8_t bits; /* the payload mask of the lead byte */
};

static struct lead read_lead(uint8_t byte)
{
    if (byte < 0x80)
        return (struct lead){1, 0, 0, 0x7f};
    if (byte < 0xc2)
        return (struct lead){0}; /* continuation bytes, and C0 C1 which only start overlong forms */
    if (byte < 0xe0)
        return (struct lead){2, 0x80, 0xbf, 0x1f};
    if (byte == 0xe0)
        return (struct lead){3, 0xa0, 0xbf, 0x0f}; /* no overlong */
    if (byte == 0xed)
        return (struct lead){3, 0x80, 0x9f, 0x0f}; /* no surrogates */
    if (byte < 0xf0)
        return (struct lead){3, 0x80, 0xbf, 0x0f};
    if (byte == 0xf0)
        return (struct lead){4, 0x90, 0xbf, 0x07}; /* no overlong */
    if (byte < 0xf4)
        return (struct lead){4, 0x80, 0xbf, 0x07};
    if (byte == 0xf4)
        return (struct lead){4, 0x80, 0x8f, 0x07}; /* not above U+10FFFF */
    return (struct lead){0};
}

struct ds4_utf8_char ds4_utf8_decode(struct ds4_str s)
{
    const uint8_t *bytes = (const uint8_t *)s.ptr;
    struct lead lead;
    uint32_t code;
    uint8_t min, max;

    if (s.len == 0)
        return (struct ds4_utf8_char){DS4_UTF8_CUT, DS4_UTF8_REPLACEMENT, 0};
    lead = read_lead(bytes[0]);
    if (lead.n_bytes == 0)
        return (struct ds4_utf8_char){DS4_UTF8_BAD, DS4_UTF8_REPLACEMENT, 1};
    code = bytes[0] & lead.bits;
    for (uint32_t i = 1; i < lead.n_bytes; i++) {
        min = i == 1 ? lead.second_min : 0x80;
        max = i == 1 ? lead.second_max : 0xbf;
        if (i >= s.len)
            return (struct ds4_utf8_char){DS4_UTF8_CUT, DS4_UTF8_REPLACEMENT, i};
        if (bytes[i] < min || bytes[i] > max)
            return (struct ds4_utf8_char){DS4_UTF8_BAD, DS4_UTF8_REPLACEMENT, i};
        code = code << 6 | (bytes[i] & 0x3f);
    }
    return (struct ds4_utf8_char){DS4_UTF8_CHAR, code, lead.n_bytes};
}

size_t ds4_utf8_encode(uint32_t code, char out[DS4_UTF8_MAX_BYTES])
{
    uint8_t *bytes = (uint8_t *)out;

    if (code < 0x80) {
        bytes[0] = (uint8_t)code;
        return 1;
    }
    if (code < 0x800) {
        bytes[0] = (uint8_t)(0xc0 | code >> 6);
        bytes[1] = (uint8_t)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        if (code >= 0xd800 && code <= 0xdfff)
            return 0;
        bytes[0] = (uint8_t)(0xe0 | code >> 12);
        bytes[1] = (uint8_t)(0x80 | (code >> 6 & 0x3f));
        bytes[2] = (uint8_t)(0x80 | (code & 0x3f));
        return 3;
    }
    if (code > 0x10ffff)
        return 0;
    bytes[0] = (uint8_t)(0xf0 | code >> 18);
    bytes[1] = (uint8_t)(0x80 | (code >> 12 & 0x3f));
    bytes[2] = (uint8_t)(0x80 | (code >> 6 & 0x3f));
    bytes[3] = (uint8_t)(0x80 | (code & 0x3f));
    return 4;
}

static size_t ascii_len(const char *ptr, size_t len)
{
    size_t i = 0;
    uint64_t word;

    while (len - i >= sizeof(word)) {
        memcpy(&word, ptr + i, sizeof(word));
        if ((word & DS4_UTF8_HIGH_BITS) != 0)
            return i + (size_t)(__builtin_ctzll(word & DS4_UTF8_HIGH_BITS) / 8);
        i += sizeof(word);
    }
    while (i < len && (uint8_t)ptr[i] < 0x80)
        i++;
    return i;
}

size_t ds4_utf8_valid_len(struct ds4_str s)
{
    size_t i = 0;
    struct ds4_utf8_char c;

    while (i < s.len) {
        if ((uint8_t)s.ptr[i] < 0x80) {
            i += ascii_len(s.ptr + i, s.len - i);
            continue;
        }
        c = ds4_utf8_decode(ds4_str_skip(s, i));
        if (c.kind != DS4_UTF8_CHAR)
            return i;
        i += c.n_bytes;
    }
    return i;
}

size_t ds4_utf8_cut_tail(struct ds4_str s)
{
    struct ds4_utf8_char c;

    /* An unfinished character has at most 3 bytes here, and none of them but the first is a lead. */
    for (size_t n = 1; n < DS4_UTF8_MAX_BYTES && n <= s.len; n++) {
        if ((s.ptr[s.len - n] & 0xc0) == 0x80)
            continue;
        c = ds4_utf8_decode(ds4_str_skip(s, s.len - n));
        return c.kind == DS4_UTF8_CUT ? n : 0;
    }
    return 0;
}

int ds4_utf8_append_replaced(struct ds4_buf *buf, struct ds4_str s)
{
    char replacement[DS4_UTF8_MAX_BYTES];
    size_t n_replacement = ds4_utf8_encode(DS4_UTF8_REPLACEMENT, replacement);
    size_t valid;

    while (s.len > 0) {
        valid = ds4_utf8_valid_len(s);
        if (ds4_buf_append(buf, s.ptr, valid) != 0)
            return -1;
        s = ds4_str_skip(s, valid);
        if (s.len == 0)
            break;
        if (ds4_buf_append(buf, replacement, n_replacement) != 0)
            return -1;
        s = ds4_str_skip(s, ds4_utf8_decode(s).n_bytes);
    }
    return 0;
}
