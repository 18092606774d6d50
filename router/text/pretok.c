/* Pre-tokenizer.  Step 3 of the request path (text -> pieces; bpe.c turns pieces into ids).
 *
 * The three Split steps of the model's tokenizer are run as one pass: a number or a CJK character ends
 * whatever piece is open, because the earlier steps would have cut the text there.  Every character
 * has one byte of class bits, so a test such as "letter or mark, and not CJK" is a mask.  The classes
 * come from utf8proc's general categories, folded into a two-stage table on first use.
 *
 * The regular expression of the third step, alternatives in order:
 *   a  [ASCII punctuation][A-Za-z]+            d  \s*[\r\n]+
 *   b  [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+    e  \s+(?!\S)
 *   c   ?[\p{P}\p{S}]+[\r\n]*                  f  \s+
 * Characters that no alternative takes (format, control, private use) gather into a piece that ends
 * where the next match starts. */
#include "router/text/pretok.h"

#include <assert.h>
#include <pthread.h>
#include <stddef.h>
#include <utf8proc.h>

enum {
    LETTER = 1,
    MARK = 2,
    PUNCT = 4, /* \p{P} or \p{S} */
    SPACE = 8, /* White_Space, CR and LF included */
    CRLF = 16,
    NUMBER = 32,
    CJK = 64, /* U+4E00-9FA5, U+3040-309F, U+30A0-30FF; set besides the bits above */
    ASCII_ALPHA = 128,
};

#define WORD           (LETTER | MARK)
#define RUN_BORDER     (NUMBER | CJK)
#define N_CODEPOINT    0x110000
#define PAGE_CHARS     256
#define N_PAGE         (N_CODEPOINT / PAGE_CHARS)
#define MAX_PAGE       512 /* distinct pages; Unicode 15 needs about 200 */
#define NUMBER_GROUP   3
#define REPLACED_CLASS 0

static uint16_t page_of[N_PAGE];
static uint8_t pages[MAX_PAGE][PAGE_CHARS];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static bool is_white_space(int32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

static uint8_t classify(int32_t c)
{
    uint8_t bits = 0;

    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
        bits = LETTER;
        break;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
        bits = MARK;
        break;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        bits = NUMBER;
        break;
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
    case UTF8PROC_CATEGORY_SM:
    case UTF8PROC_CATEGORY_SC:
    case UTF8PROC_CATEGORY_SK:
    case UTF8PROC_CATEGORY_SO:
        bits = PUNCT;
        break;
    default:
        break;
    }
    if (is_white_space(c))
        bits |= SPACE;
    if (c == '\r' || c == '\n')
        bits |= CRLF;
    if ((c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF))
        bits |= CJK;
    if ((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'))
        bits |= ASCII_ALPHA;
    return bits;
}

/* Equal pages are stored once; most of the planes are one page of letters or of nothing. */
static void build_table(void)
{
    int n_page = 0;

    for (int p = 0; p < N_PAGE; p++) {
        uint8_t *page = pages[n_page];
        int same = 0;

        for (int i = 0; i < PAGE_CHARS; i++)
            page[i] = classify(p * PAGE_CHARS + i);
        while (same < n_page && memcmp(pages[same], page, PAGE_CHARS) != 0)
            same++;
        page_of[p] = (uint16_t)same;
        if (same == n_page)
            n_page++;
        assert(n_page < MAX_PAGE);
    }
}

void ds4_pretok_init(struct ds4_pretok *it, struct ds4_str text)
{
    pthread_once(&table_once, build_table);
    it->pos = (const uint8_t *)(text.ptr == NULL ? "" : text.ptr);
    it->text_end = it->pos + text.len;
    it->run_end = it->text_end;
    it->class_mask = 0xFF;
}

/* Class and byte length of the character beyond ASCII at p; a damaged one counts as one byte. */
static unsigned wide_class(const uint8_t *p, const uint8_t *end, int *n_byte)
{
    static const uint8_t mask_of[] = {0, 0, 0x1F, 0x0F, 0x07};
    int n = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    uint32_t c;

    *n_byte = 1;
    if (p[0] < 0xC2 || p[0] > 0xF4 || end - p < n)
        return REPLACED_CLASS;
    c = p[0] & mask_of[n];
    for (int i = 1; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80)
            return REPLACED_CLASS;
        c = c << 6 | (p[i] & 0x3F);
    }
    if (c >= N_CODEPOINT)
        return REPLACED_CLASS;
    *n_byte = n;
    return pages[page_of[c / PAGE_CHARS]][c % PAGE_CHARS];
}

static inline unsigned class_at(const struct ds4_pretok *it, const uint8_t *p, int *n_byte)
{
    if (p[0] < 0x80) {
        *n_byte = 1;
        return pages[0][p[0]];
    }
    return wide_class(p, it->run_end, n_byte) & it->class_mask;
}

/* Behind the run of characters that have a bit of `want`; stops before a number or CJK. */
static inline const uint8_t *skip_run(const struct ds4_pretok *it, const uint8_t *p, unsigned want)
{
    int n_byte;

    while (p < it->run_end) {
        unsigned bits = class_at(it, p, &n_byte);

        if (!(bits & want) || (bits & RUN_BORDER))
            break;
        p += n_byte;
    }
    return p;
}

static const uint8_t *skip_crlf(const struct ds4_pretok *it, const uint8_t *p)
{
    while (p < it->run_end && (*p == '\r' || *p == '\n'))
        p++;
    return p;
}

/* Alternatives d, e, f at a blank: [p, run_end) starts with white space. */
static const uint8_t *match_space(const struct ds4_pretok *it, const uint8_t *p)
{
    const uint8_t *q = p;
    const uint8_t *last = p;       /* start of the last blank of the run */
    const uint8_t *newline = NULL; /* behind the last CR or LF of the run */
    int n_byte;
    unsigned bits = 0;

    while (q < it->run_end) {
        bits = class_at(it, q, &n_byte);
        if (!(bits & SPACE))
            break;
        last = q;
        q += n_byte;
        if (bits & CRLF)
            newline = q;
    }
    if (newline != NULL)
        return newline;
    if (q == it->run_end || (bits & RUN_BORDER) || last == p)
        return q;
    return last;
}

/* End of the match of the third pattern at p, or NULL when no alternative takes the character. */
static const uint8_t *match_at(const struct ds4_pretok *it, const uint8_t *p, unsigned bits,
                               int n_byte)
{
    const uint8_t *next = p + n_byte;
    unsigned next_bits = 0;
    int next_n = 0;

    if (bits & LETTER)
        return skip_run(it, next, WORD);
    if (next < it->run_end) {
        next_bits = class_at(it, next, &next_n);
        if (next_bits & RUN_BORDER)
            next_bits = 0;
    }
    if (bits & PUNCT) {
        if (*p < 0x80 && (next_bits & ASCII_ALPHA)) { /* a: ASCII letters only */
            while (next < it->run_end && *next < 0x80 && (pages[0][*next] & ASCII_ALPHA))
                next++;
            return next;
        }
        return skip_crlf(it, skip_run(it, next, PUNCT)); /* c */
    }
    if (!(bits & CRLF) && (next_bits & WORD)) /* b with its one leading character */
        return skip_run(it, next + next_n, WORD);
    if (bits & MARK)
        return next;
    if (*p == ' ' && (next_bits & PUNCT)) /* c with its blank */
        return skip_crlf(it, skip_run(it, next + next_n, PUNCT));
    return bits & SPACE ? match_space(it, p) : NULL;
}

static const uint8_t *number_group(const struct ds4_pretok *it, const uint8_t *p)
{
    int n_byte;

    for (int n = 0; n < NUMBER_GROUP && p < it->run_end; n++) {
        if (!(class_at(it, p, &n_byte) & NUMBER))
            break;
        p += n_byte;
    }
    return p;
}

/* Enters the CJK run at pos: until its end the third pattern sees nothing else. */
static void enter_cjk(struct ds4_pretok *it)
{
    const uint8_t *p = it->pos;
    int n_byte;

    while (p < it->text_end && (class_at(it, p, &n_byte) & CJK))
        p += n_byte;
    it->run_end = p;
    it->class_mask = (uint8_t)~CJK;
}

bool ds4_pretok_next(struct ds4_pretok *it, struct ds4_str *piece)
{
    const uint8_t *start = it->pos;
    const uint8_t *p = start;
    const uint8_t *match = NULL;
    unsigned bits;
    int n_byte;

    if (p == it->run_end) {
        if (p == it->text_end)
            return false;
        it->run_end = it->text_end;
        it->class_mask = 0xFF;
    }
    bits = class_at(it, p, &n_byte);
    if (bits & CJK) {
        enter_cjk(it);
        bits &= ~(unsigned)CJK;
    }
    if (bits & NUMBER) {
        p = number_group(it, p);
    } else {
        /* Unmatched characters gather until a match, a number, CJK or the end. */
        while ((match = match_at(it, p, bits, n_byte)) == NULL) {
            p += n_byte;
            if (p == it->run_end)
                break;
            bits = class_at(it, p, &n_byte);
            if (bits & RUN_BORDER)
                break;
        }
        if (p == start)
            p = match;
    }
    it->pos = p;
    *piece = (struct ds4_str){(const char *)start, (size_t)(p - start)};
    return true;
}
