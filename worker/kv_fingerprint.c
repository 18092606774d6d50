/* Fingerprint of the sequence state (plan 3.2): XXH3-128 over texts that name every value, so that neither
 * padding nor byte order of a struct can leak in; each text is hashed behind the digest of those before.
 *
 * Rows of another quantisation, another backend or another rounding are those of another model: they are
 * not "close enough", since a continuation would depend on where its prefix was computed. */
#include "worker/kv_fingerprint.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

/* Raise it whenever a kernel changes the values of cache rows. */
#define KV_NUMERICS_VERSION 1

#define TEXT_BYTES 512

/* digest = hash of (digest, text). */
static void add(uint8_t digest[DS4_ID_BYTES], const void *text, size_t n)
{
    uint8_t bytes[DS4_ID_BYTES + TEXT_BYTES];
    XXH128_canonical_t canonical;

    if (n > TEXT_BYTES)
        n = TEXT_BYTES;
    memcpy(bytes, digest, DS4_ID_BYTES);
    memcpy(bytes + DS4_ID_BYTES, text, n);
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, DS4_ID_BYTES + n));
    memcpy(digest, canonical.digest, DS4_ID_BYTES);
}

static void add_text(uint8_t digest[DS4_ID_BYTES], const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

static void add_text(uint8_t digest[DS4_ID_BYTES], const char *fmt, ...)
{
    char text[TEXT_BYTES];
    va_list args;
    int n;

    va_start(args, fmt);
    n = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    add(digest, text, n < TEXT_BYTES ? (size_t)n : TEXT_BYTES - 1);
}

static void add_model(uint8_t digest[DS4_ID_BYTES], const struct ds4_model_shape *m)
{
    add_text(digest, "deepseek4 layers %d vocab %d d %d head %d %d rope %d q %d o %d %d window %d",
             m->n_layer, m->n_vocab, m->d_model, m->n_head, m->d_head, m->d_rope, m->q_rank,
             m->o_rank, m->n_group, m->window_tok);
    add_text(digest, "index %d %d %d hyper %d %d %a eps %a", m->n_index_head, m->d_index,
             m->index_topk, m->n_hyper, m->sinkhorn_iters, (double)m->hyper_eps,
             (double)m->rms_eps);
    add_text(digest, "base %a %a yarn %a %d %a %a", (double)m->rope_base,
             (double)m->compress_rope_base, (double)m->yarn_factor, m->yarn_orig_tok,
             (double)m->yarn_beta_fast, (double)m->yarn_beta_slow);
    add_text(digest, "experts %d %d %d hash %d scale %a", m->n_expert_used, m->n_shared,
             m->d_expert, m->n_hash_layer, (double)m->route_scale);
    for (int32_t l = 0; l < m->n_layer; l++)
        add_text(digest, "layer %d %d %a %a", m->ratio[l], m->n_expert[l], (double)m->clamp[l],
                 (double)m->clamp_shared[l]);
}

void ds4_kv_fingerprint(const struct ds4_model_shape *model,
                        const uint8_t model_digest[DS4_ID_BYTES],
                        const struct ds4_kv_numerics *numerics, uint8_t out[DS4_ID_BYTES])
{
    memset(out, 0, DS4_ID_BYTES);
    add_text(out, "ds4 kv %d %s products %d stream %d rows %d %d", KV_NUMERICS_VERSION,
             numerics->backend, (int)numerics->products, (int)numerics->stream,
             (int)numerics->row_format, (int)numerics->index_format);
    add_model(out, model);
    add(out, model_digest, DS4_ID_BYTES);
}
