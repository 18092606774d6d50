/* Sampler (house list, step 10): the only place where a token is born.
 *
 * Penalty counts are not kept but taken from the history of the call: a walk over the tokens costs
 * little beside a head product, only sequences with penalties pay it, and a truncation can then never
 * leave a count behind.  Randomness is counter-based (Philox 4x32-10, Salmon et al. 2011), so the
 * number of a position does not depend on how many were drawn before.
 *
 * top_k and top_p need a best-first prefix, not an order: a selection (keep_best) finds it in linear
 * time, where sorting 130 thousand values would cost more than the step of a small model.  Masked ids
 * are -inf and weigh nothing.  The exponential is the kernels' own, so that the same seed gives the same
 * text on every machine; sums run in double, in a fixed order.
 *
 * Invariant: s->count is all zero between calls. */
#include "worker/sampler.h"

#include "kernels/cpu/math.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GREEDY_BELOW 1e-5f

static size_t allowed_bytes(int32_t n_vocab)
{
    return ((size_t)n_vocab + 7) / 8;
}

size_t ds4_sampler_bytes(int32_t n_vocab, int32_t n_slot)
{
    size_t per_slot = sizeof(struct ds4_sampler_seq) + allowed_bytes(n_vocab) +
                      DS4_MAX_LOGIT_BIAS * (sizeof(int32_t) + sizeof(float));
    size_t scratch = (size_t)n_vocab * (2 * sizeof(float) + 2 * sizeof(int32_t));

    return (size_t)n_slot * per_slot + scratch;
}

int ds4_sampler_init(struct ds4_sampler *s, int32_t n_vocab, int32_t n_slot, struct ds4_err *err)
{
    size_t n = (size_t)n_vocab;
    bool ok;

    memset(s, 0, sizeof(*s));
    s->n_vocab = n_vocab;
    s->n_slot = n_slot;
    s->seq = calloc((size_t)n_slot, sizeof(*s->seq));
    s->logit = calloc(n, sizeof(*s->logit));
    s->weight = calloc(n, sizeof(*s->weight));
    s->order = calloc(n, sizeof(*s->order));
    s->count = calloc(n, sizeof(*s->count));
    ok = s->seq != NULL && s->logit != NULL && s->weight != NULL && s->order != NULL &&
         s->count != NULL;
    for (int32_t i = 0; ok && i < n_slot; i++) {
        s->seq[i].bias_id = calloc(DS4_MAX_LOGIT_BIAS, sizeof(int32_t));
        s->seq[i].bias = calloc(DS4_MAX_LOGIT_BIAS, sizeof(float));
        s->seq[i].allowed = calloc(allowed_bytes(n_vocab), 1);
        ok = s->seq[i].bias_id != NULL && s->seq[i].bias != NULL && s->seq[i].allowed != NULL;
    }
    if (ok)
        return 0;
    ds4_sampler_deinit(s);
    return ds4_fail(err, DS4_E_NOMEM, "no memory for the sampler: %zu bytes",
                    ds4_sampler_bytes(n_vocab, n_slot));
}

void ds4_sampler_deinit(struct ds4_sampler *s)
{
    for (int32_t i = 0; s->seq != NULL && i < s->n_slot; i++) {
        free(s->seq[i].allowed);
        free(s->seq[i].bias);
        free(s->seq[i].bias_id);
    }
    free(s->count);
    free(s->order);
    free(s->weight);
    free(s->logit);
    free(s->seq);
    memset(s, 0, sizeof(*s));
}

/* ---- parameters --------------------------------------------------------------------------------- */

static int check_id(const struct ds4_sampler *s, const char *what, int32_t id, struct ds4_err *err)
{
    if (id < 0 || id >= s->n_vocab)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s %d, the vocabulary has %d ids", what, id,
                        s->n_vocab);
    return 0;
}

static int check_numbers(const struct ds4_sampling *p, struct ds4_err *err)
{
    if (!isfinite(p->temperature) || p->temperature < 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "temperature %g", (double)p->temperature);
    if (!(p->top_p >= 0 && p->top_p <= 1) || !(p->min_p >= 0 && p->min_p <= 1) || p->top_k < 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "top_k %d, top_p %g, min_p %g", p->top_k,
                        (double)p->top_p, (double)p->min_p);
    if (!isfinite(p->presence_penalty) || !isfinite(p->frequency_penalty) ||
        !isfinite(p->repetition_penalty) || p->repetition_penalty <= 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "penalties %g, %g, %g", (double)p->presence_penalty,
                        (double)p->frequency_penalty, (double)p->repetition_penalty);
    if (p->n_logprobs < -1 || p->n_logprobs > DS4_MAX_TOP_LOGPROBS)
        return ds4_fail(err, DS4_E_PROTOCOL, "%d logprobs, at most %d", p->n_logprobs,
                        DS4_MAX_TOP_LOGPROBS);
    return 0;
}

static int take_ids(struct ds4_sampler *s, struct ds4_sampler_seq *q,
                    const struct ds4_seq_open *open, struct ds4_err *err)
{
    const struct ds4_sampling *p = &open->sampling;

    if (open->n_stop < 0 || open->n_stop > DS4_MAX_STOP_IDS || p->n_bias < 0 ||
        p->n_bias > DS4_MAX_LOGIT_BIAS || p->n_allowed < 0 || p->n_forced < 0 ||
        p->n_forced > DS4_MAX_FORCED_IDS)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "%d stop ids, %d biases, %d allowed ids, %d forced ids", open->n_stop,
                        p->n_bias, p->n_allowed, p->n_forced);
    for (int32_t i = 0; i < p->n_forced; i++) {
        if (check_id(s, "forced id", p->forced_id[i], err) != 0)
            return -1;
        q->forced_id[i] = p->forced_id[i];
    }
    for (int32_t i = 0; i < open->n_stop; i++) {
        if (check_id(s, "stop id", open->stop_id[i], err) != 0)
            return -1;
        q->stop_id[i] = open->stop_id[i];
    }
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (check_id(s, "bias id", p->bias_id[i], err) != 0)
            return -1;
        if (!isfinite(p->bias[i]))
            return ds4_fail(err, DS4_E_PROTOCOL, "bias of id %d is not finite", p->bias_id[i]);
        q->bias_id[i] = p->bias_id[i];
        q->bias[i] = p->bias[i];
    }
    memset(q->allowed, p->n_allowed > 0 ? 0 : 0xff, allowed_bytes(s->n_vocab));
    for (int32_t i = 0; i < p->n_allowed; i++) {
        if (check_id(s, "allowed id", p->allowed_id[i], err) != 0)
            return -1;
        q->allowed[p->allowed_id[i] / 8] |= (uint8_t)(1 << p->allowed_id[i] % 8);
    }
    if (p->think_close_id != -1 && check_id(s, "think close id", p->think_close_id, err) != 0)
        return -1;
    if (open->n_prompt < 0 || open->max_pos < 1)
        return ds4_fail(err, DS4_E_PROTOCOL, "prompt of %d tokens, last position %d",
                        open->n_prompt, open->max_pos);
    if (p->think_close_id == -1 && p->force_close_at >= 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "forced close at %d without an id", p->force_close_at);
    return 0;
}

int ds4_sampler_open(struct ds4_sampler *s, const struct ds4_seq_open *open, struct ds4_err *err)
{
    struct ds4_sampler_seq *q;

    if (open->slot < 0 || open->slot >= s->n_slot)
        return ds4_fail(err, DS4_E_PROTOCOL, "open of slot %d, there are %d", open->slot,
                        s->n_slot);
    q = &s->seq[open->slot];
    if (check_numbers(&open->sampling, err) != 0 || take_ids(s, q, open, err) != 0)
        return -1;
    q->param = open->sampling;
    q->param.bias_id = q->bias_id;
    q->param.bias = q->bias;
    q->param.allowed_id = NULL; /* the bits in q->allowed stand for them */
    q->param.forced_id = q->forced_id;
    q->n_prompt = open->n_prompt;
    q->n_stop = open->n_stop;
    q->ignore_stop = open->ignore_stop;
    q->max_pos = open->max_pos;
    return 0;
}

/* ---- randomness --------------------------------------------------------------------------------- */

double ds4_sampler_uniform(uint64_t seed, uint64_t position)
{
    uint32_t key0 = (uint32_t)seed;
    uint32_t key1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)position;
    uint32_t c1 = (uint32_t)(position >> 32);
    uint32_t c2 = 0;
    uint32_t c3 = 0;
    uint64_t bits;

    for (int round = 0; round < 10; round++) {
        uint64_t p0 = UINT64_C(0xD2511F53) * c0;
        uint64_t p1 = UINT64_C(0xCD9E8D57) * c2;

        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ key0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ key1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        key0 += UINT32_C(0x9E3779B9);
        key1 += UINT32_C(0xBB67AE85);
    }
    bits = (uint64_t)c0 << 32 | c1;
    return (double)(bits >> 11) * 0x1p-53;
}

/* ---- rows --------------------------------------------------------------------------------------- */

static bool all_finite(const float *logit, int32_t n)
{
    uint32_t bad = 0;

    for (int32_t i = 0; i < n; i++) /* without a branch, so that it runs as vectors */
        bad |= (ds4_bits_from_f32(logit[i]) & UINT32_C(0x7f800000)) == UINT32_C(0x7f800000);
    return bad == 0;
}

bool ds4_sampler_is_finite(const struct ds4_sampler *s, const float *logits)
{
    return all_finite(logits, s->n_vocab);
}

static int32_t argmax(const float *logit, int32_t n)
{
    int32_t best = 0;

    for (int32_t i = 1; i < n; i++)
        if (logit[i] > logit[best])
            best = i;
    return best;
}

/* weight = exp((logit - max) / temperature); the best weighs 1. */
static void weigh(const float *logit, int32_t n, float max, float temperature, float *weight)
{
    for (int32_t i = 0; i < n; i++)
        weight[i] = ds4_expf((logit[i] - max) / temperature);
}

static double sum_of(const float *weight, int32_t n)
{
    double sum = 0;

    for (int32_t i = 0; i < n; i++)
        sum += (double)weight[i];
    return sum;
}

/* ---- selection ---------------------------------------------------------------------------------- */

/* The order of preference: heavier first, then the lower id. */
static bool before(const float *value, int32_t a, int32_t b)
{
    return value[a] > value[b] || (value[a] == value[b] && a < b);
}

static int32_t median_of(const float *value, int32_t a, int32_t b, int32_t c)
{
    if (before(value, a, b) == before(value, b, c))
        return b;
    return before(value, b, a) == before(value, a, c) ? a : c;
}

static void swap(int32_t *a, int32_t *b)
{
    int32_t kept = *a;

    *a = *b;
    *b = kept;
}

/* Moves what stands before the pivot to the front of ids[0..n), the pivot after it; returns the pivot's
 * place. */
static int32_t split(const float *value, int32_t *ids, int32_t n)
{
    int32_t pivot = median_of(value, ids[0], ids[n / 2], ids[n - 1]);
    int32_t front = 0;

    for (int32_t i = 0; i < n; i++) {
        if (ids[i] == pivot) {
            swap(&ids[i], &ids[n - 1]);
            break;
        }
    }
    for (int32_t i = 0; i < n - 1; i++)
        if (before(value, ids[i], pivot))
            swap(&ids[i], &ids[front++]);
    swap(&ids[front], &ids[n - 1]);
    return front;
}

/* Reorders ids[0..n), n >= 1, so that the shortest best-first prefix that reaches `want` comes first,
 * in no particular order; returns its length, at least 1.  An id counts its share, or 1 without
 * shares. */
static int32_t keep_best(const float *value, const float *share, int32_t *ids, int32_t n,
                         double want)
{
    int32_t lo = 0; /* ids before lo are in, those from hi on are out */
    int32_t hi = n;
    double have = 0;

    while (lo < hi && (lo == 0 || have < want)) {
        int32_t pivot = lo + split(value, ids + lo, hi - lo);
        double upper = 0;

        for (int32_t i = lo; i < pivot; i++)
            upper += share != NULL ? (double)share[ids[i]] : 1;
        if (pivot > lo && have + upper >= want) {
            hi = pivot;
        } else {
            have += upper + (share != NULL ? (double)share[ids[pivot]] : 1);
            lo = pivot + 1;
        }
    }
    return lo;
}

/* ---- logprobs: log softmax of the raw row ------------------------------------------------------- */

static void fill_logprobs(struct ds4_sampler *s, const float *logits, int32_t token, int32_t n_top,
                          struct ds4_token_entry *out)
{
    int32_t *ids = s->order;
    float max = logits[argmax(logits, s->n_vocab)];
    double norm;

    weigh(logits, s->n_vocab, max, 1, s->weight);
    norm = (double)max + log(sum_of(s->weight, s->n_vocab));
    out->logprob[0] = (struct ds4_logprob){token, (float)((double)logits[token] - norm)};
    out->n_logprob = 1;
    if (n_top == 0)
        return;
    for (int32_t i = 0; i < s->n_vocab; i++)
        ids[i] = i;
    n_top = keep_best(logits, NULL, ids, s->n_vocab, n_top);
    for (int32_t i = 0; i < n_top; i++) {
        for (int32_t j = i; j > 0 && before(logits, ids[j], ids[j - 1]); j--)
            swap(&ids[j], &ids[j - 1]);
    }
    for (int32_t i = 0; i < n_top; i++)
        out->logprob[out->n_logprob++] =
            (struct ds4_logprob){ids[i], (float)((double)logits[ids[i]] - norm)};
}

/* ---- penalties, bias, masks --------------------------------------------------------------------- */

/* Presence and frequency look at new tokens (as the hosted APIs do), repetition at all. */
static void penalise(struct ds4_sampler *s, const struct ds4_sampler_seq *q, const int32_t *history,
                     int32_t n_history)
{
    const struct ds4_sampling *p = &q->param;

    if (p->repetition_penalty != 1) {
        for (int32_t t = 0; t < n_history; t++) {
            int32_t id = history[t];

            if (s->count[id]++ == 0)
                s->logit[id] = s->logit[id] > 0 ? s->logit[id] / p->repetition_penalty
                                                : s->logit[id] * p->repetition_penalty;
        }
        for (int32_t t = 0; t < n_history; t++)
            s->count[history[t]] = 0;
    }
    if (p->presence_penalty == 0 && p->frequency_penalty == 0)
        return;
    for (int32_t t = q->n_prompt; t < n_history; t++)
        s->count[history[t]]++;
    for (int32_t t = q->n_prompt; t < n_history; t++) {
        int32_t id = history[t];

        if (s->count[id] > 0)
            s->logit[id] -= p->presence_penalty + p->frequency_penalty * (float)s->count[id];
        s->count[id] = 0;
    }
}

/* Penalties on finite logits stay finite but for overflow; clamping keeps the row ordered. */
static void clamp_finite(float *logit, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (logit[i] > 1e30f)
            logit[i] = 1e30f;
        else if (!(logit[i] >= -1e30f))
            logit[i] = -1e30f;
    }
}

static void mask_disallowed(struct ds4_sampler *s, const struct ds4_sampler_seq *q)
{
    for (int32_t id = 0; id < s->n_vocab; id++)
        if ((q->allowed[id / 8] >> id % 8 & 1) == 0)
            s->logit[id] = -INFINITY;
}

static bool is_stop(const struct ds4_sampler_seq *q, int32_t id)
{
    for (int32_t i = 0; i < q->n_stop; i++)
        if (q->stop_id[i] == id)
            return true;
    return false;
}

/* Ids that are hidden for now, though allowed in general. */
struct guard {
    int32_t n;
    int32_t id[DS4_MAX_STOP_IDS + 1];
    float kept[DS4_MAX_STOP_IDS + 1];
};

static struct guard guard_of(const struct ds4_sampler_seq *q, int32_t n_new)
{
    struct guard guard = {0};

    for (int32_t i = 0; n_new < q->param.min_new_tok && i < q->n_stop; i++)
        guard.id[guard.n++] = q->stop_id[i];
    if (n_new < q->param.think_close_guard && q->param.think_close_id >= 0)
        guard.id[guard.n++] = q->param.think_close_id;
    return guard;
}

/* The row to choose from, and its best id.  A row that nothing changes is used as it is. */
static const float *make_row(struct ds4_sampler *s, const struct ds4_sampler_seq *q,
                             const float *logits, const int32_t *history, int32_t n_history,
                             int32_t *best)
{
    const struct ds4_sampling *p = &q->param;
    struct guard guard = guard_of(q, n_history - q->n_prompt);
    bool penalties =
        p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;

    *best = argmax(logits, s->n_vocab);
    if (!penalties && p->n_bias == 0 && p->n_allowed == 0 && guard.n == 0)
        return logits;
    memcpy(s->logit, logits, (size_t)s->n_vocab * sizeof(*s->logit));
    if (penalties)
        penalise(s, q, history, n_history);
    for (int32_t i = 0; i < p->n_bias; i++)
        s->logit[p->bias_id[i]] += p->bias[i];
    if (penalties || p->n_bias > 0)
        clamp_finite(s->logit, s->n_vocab);
    if (p->n_allowed > 0)
        mask_disallowed(s, q);
    for (int32_t i = 0; i < guard.n; i++) {
        guard.kept[i] = s->logit[guard.id[i]];
        s->logit[guard.id[i]] = -INFINITY;
    }
    *best = argmax(s->logit, s->n_vocab);
    if (s->logit[*best] == -INFINITY) { /* nothing left: the guards give way, last set first */
        for (int32_t i = guard.n - 1; i >= 0; i--)
            s->logit[guard.id[i]] = guard.kept[i];
        *best = argmax(s->logit, s->n_vocab);
    }
    return s->logit;
}

/* ---- choice ------------------------------------------------------------------------------------- */

/* The first of n whose running weight passes u of the whole; ids NULL: all ids in order.  Should
 * rounding keep the sum below the mark, the last one with any weight is it. */
static int32_t draw(const float *weight, const int32_t *ids, int32_t n, double total, double u)
{
    double mark = u * total;
    double sum = 0;
    int32_t last = ids != NULL ? ids[0] : 0;

    for (int32_t i = 0; i < n; i++) {
        int32_t id = ids != NULL ? ids[i] : i;

        if (weight[id] > 0)
            last = id;
        sum += (double)weight[id];
        if (sum > mark)
            break;
    }
    return last;
}

/* Draws among what min_p, top_k and top_p leave. */
static int32_t choose(struct ds4_sampler *s, const struct ds4_sampling *p, const float *row,
                      int32_t best, double u)
{
    float *weight = s->weight;
    int32_t *ids = s->order;
    int32_t n = 0;
    double total, least;

    weigh(row, s->n_vocab, row[best], p->temperature, weight);
    for (int32_t id = 0; p->min_p > 0 && id < s->n_vocab; id++)
        if (weight[id] < p->min_p)
            weight[id] = 0;
    total = sum_of(weight, s->n_vocab);
    if (p->top_k == 0 && p->top_p >= 1)
        return draw(weight, NULL, s->n_vocab, total, u);

    /* Ids lighter than that weigh less together than what top_p drops, so that it drops them all:
     * selection then looks at few. */
    least = p->top_k == 0 ? (1 - (double)p->top_p) * total / s->n_vocab : 0;
    for (int32_t id = 0; id < s->n_vocab; id++)
        if (weight[id] > 0 && (double)weight[id] >= least)
            ids[n++] = id;
    if (p->top_k > 0) { /* top_p is then a share of what top_k leaves */
        n = keep_best(row, NULL, ids, n, p->top_k);
        total = 0;
        for (int32_t i = 0; i < n; i++)
            total += (double)weight[ids[i]];
    }
    if (p->top_p < 1) {
        n = keep_best(row, weight, ids, n, (double)p->top_p * total);
        total = 0;
        for (int32_t i = 0; i < n; i++)
            total += (double)weight[ids[i]];
    }
    return draw(weight, ids, n, total, u);
}

/* Index of the first new `id` of the sequence, or -1. */
static int32_t find_new(const struct ds4_sampler_seq *q, const int32_t *history, int32_t n_history,
                        int32_t id)
{
    for (int32_t i = q->n_prompt; i < n_history; i++)
        if (history[i] == id)
            return i;
    return -1;
}

/* The token that position n_history must have, or -1: a function of the history alone, so that it holds
 * after a truncation as well. */
static int32_t forced_token(const struct ds4_sampler_seq *q, const int32_t *history,
                            int32_t n_history)
{
    const struct ds4_sampling *p = &q->param;
    int32_t start = q->n_prompt;

    if (p->force_close_at >= 0 && p->force_close_at == n_history &&
        find_new(q, history, n_history, p->think_close_id) < 0)
        return p->think_close_id;
    if (p->n_forced == 0)
        return -1;
    if (p->forced_after_id >= 0) {
        start = find_new(q, history, n_history, p->forced_after_id);
        if (start < 0)
            return -1;
        start++;
    }
    return n_history - start < p->n_forced && n_history >= start ? p->forced_id[n_history - start]
                                                                 : -1;
}

void ds4_sampler_pick(struct ds4_sampler *s, int32_t slot, const float *logits,
                      const int32_t *history, int32_t n_history, struct ds4_token_entry *out)
{
    const struct ds4_sampler_seq *q = &s->seq[slot];
    int32_t token;

    out->flags = 0;
    out->n_token = 0;
    out->n_logprob = 0;
    if (!all_finite(logits, s->n_vocab)) {
        out->flags = DS4_TOKEN_NONFINITE | DS4_TOKEN_ENDED;
        return;
    }
    token = forced_token(q, history, n_history);
    if (token < 0) {
        const float *row = make_row(s, q, logits, history, n_history, &token);

        if (q->param.temperature >= GREEDY_BELOW)
            token = choose(s, &q->param, row, token,
                           ds4_sampler_uniform(q->param.seed, (uint64_t)n_history));
    }
    if (q->param.n_logprobs >= 0)
        fill_logprobs(s, logits, token, q->param.n_logprobs, out);
    out->flags = DS4_TOKEN_SAMPLED;
    out->n_token = 1;
    out->token[0] = token;
    if ((is_stop(q, token) && !q->ignore_stop) || n_history >= q->max_pos - 1)
        out->flags |= DS4_TOKEN_ENDED;
}
