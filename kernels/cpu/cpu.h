/* What the files of the CPU backend share: the device, its scratch, rows of tensors as f32, and the
 * operations of the table (documented in kernels/backend.h). */
#ifndef DS4_KERNELS_CPU_CPU_H
#define DS4_KERNELS_CPU_CPU_H

#include "kernels/backend.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd.h"

#include <assert.h>
#include <stdatomic.h>

#define DS4_MAX_HYPER 8 /* residual streams */

/* Which int8 blocks a product wants its activations in; NONE: it takes f32. */
enum ds4_act_kind { DS4_ACT_NONE, DS4_ACT_32, DS4_ACT_256 };

struct ds4_cpu_block; /* one allocation */

struct ds4_device {
    const struct ds4_simd *simd;
    struct ds4_pool *pool;
    enum ds4_products products;
    struct ds4_cpu_block *blocks;
    uint8_t *scratch; /* borrowed */
    size_t scratch_bytes;
    _Atomic(const char *) wrong; /* see struct ds4_backend; NULL: nothing */
    char about[160];
};

/* ---- scratch: one part that all threads see, one part for each -------------------------------------
 * Every operation computes its need from its arguments, and ds4_cpu_scratch_bytes the largest need
 * from the limits, with the same functions. */
struct ds4_need {
    size_t shared_bytes;
    size_t thread_bytes;
};
struct ds4_scratch {
    uint8_t *shared;
    uint8_t *thread;
    size_t thread_bytes;
};

/* Lays the need out over the device's scratch.  A need above what the limits promised would write over
 * foreign memory: that ends the process. */
struct ds4_scratch ds4_cpu_scratch(struct ds4_device *dev, struct ds4_need need);

static inline void *ds4_scratch_of(const struct ds4_scratch *scratch, int32_t thread)
{
    return scratch->thread + (size_t)thread * scratch->thread_bytes;
}

static inline size_t ds4_cpu_align(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

struct ds4_need ds4_cpu_gemm_need(int32_t n_tok, int32_t n_col_all, int32_t n_col);
struct ds4_need ds4_cpu_hyper_need(int32_t n_tok, int32_t n_hyper, int32_t d);
struct ds4_need ds4_cpu_compress_need(int32_t d);
struct ds4_need ds4_cpu_index_need(int32_t n_row, int32_t d);
struct ds4_need ds4_cpu_attention_need(int32_t n_row, int32_t d_head);
struct ds4_need ds4_cpu_moe_need(int32_t n_tok, const struct ds4_limits *limits);

/* ---- rows of tensors ----------------------------------------------------------------------------- */

/* n values from element `offset` on as f32: in place for F32, else converted (BF16, F16) into buf. */
const float *ds4_cpu_load(const struct ds4_tensor *t, int64_t offset, int32_t n, float *buf);
/* Rounds n values into the tensor (F32, BF16, F16). */
void ds4_cpu_store(const struct ds4_tensor *t, int64_t offset, int32_t n, const float *x);

/* Row r of plane `stack` of a weight. */
static inline const uint8_t *ds4_weight_row(const struct ds4_weight *w, int32_t stack, int32_t row)
{
    return (const uint8_t *)w->data +
           ((size_t)stack * (size_t)w->n_row + (size_t)row) * w->row_bytes;
}

/* Rows row .. row + n_row - 1 of plane `stack` for the inner loops. */
struct ds4_rows ds4_cpu_rows(const struct ds4_weight *w, int32_t stack, int32_t row, int32_t n_row);
/* out[t][r] = row r times input t: f32 values for DS4_ACT_NONE, else blocks of that kind. */
void ds4_cpu_multiply(const struct ds4_simd *simd, enum ds4_act_kind kind, const struct ds4_rows *w,
                      const void *const *x, int32_t n_x, float (*out)[DS4_TILE_ROWS]);

/* ---- cache rows (row.c) -------------------------------------------------------------------------- */

/* The checkpoint's rounding of one row in place; lossless to pack afterwards. */
void ds4_cpu_round_row(enum ds4_row_format format, int32_t d, int32_t d_rope, float *x);
void ds4_cpu_pack_row(enum ds4_row_format format, int32_t d, int32_t d_rope, const float *x,
                      void *row);
void ds4_cpu_unpack_row(enum ds4_row_format format, int32_t d, int32_t d_rope, const void *row,
                        float *x);

static inline uint8_t *ds4_ring_row(const struct ds4_ring *ring, int32_t slot, int32_t pos)
{
    return (uint8_t *)ring->data +
           ((size_t)slot * (size_t)ring->cap + (size_t)(pos % ring->cap)) * ring->row_bytes;
}

/* Row j of an entry's sequence; NULL when its block table does not reach that far. */
uint8_t *ds4_cpu_page_row(const struct ds4_pages *pages, const struct ds4_batch_entry *entry,
                          int32_t j);

/* Row j as f32 values; NaNs where the block table leads nowhere, which nobody mistakes for data. */
void ds4_cpu_read_page(const struct ds4_pages *pages, const struct ds4_batch_entry *entry,
                       int32_t j, float *x);

/* ---- int8 activations (act.c) -------------------------------------------------------------------- */

/* Of a weight's fast product; NONE for scalar weights, which stay exact. */
enum ds4_act_kind ds4_cpu_act_kind(enum ds4_dtype weight);
size_t ds4_cpu_act_bytes(enum ds4_act_kind kind, int32_t n);
void ds4_cpu_act_quantise(enum ds4_act_kind kind, const float *x, int32_t n, void *act);

/* ---- selection (topk.c) -------------------------------------------------------------------------- */

/* The min(k, n) largest of score[0..n) as rising indices; ties go to the lower index, -0 equals +0, a
 * NaN ranks below everything.  Returns how many. */
int32_t ds4_cpu_top_k(const float *score, int32_t n, int32_t k, int32_t *sel);

/* ---- shared parts of operations ------------------------------------------------------------------ */

/* y[i][r] = W x[row ? row[i] : i] with f32 activations, W [1, n_row, n_col]; y is f32 with y_stride. */
struct ds4_exact_args {
    const struct ds4_weight *w;
    int32_t n_group;
    const struct ds4_tensor *x;
    const int32_t *row;
    int32_t n;
    float *y;
    int64_t y_stride;
};
void ds4_cpu_exact(struct ds4_device *dev, const struct ds4_exact_args *a,
                   const struct ds4_scratch *scratch);

/* cos and sin of every pair at one position; table [d_rope]: cos, sin interleaved. */
void ds4_cpu_rope_table(const struct ds4_rope *rope, int32_t pos, float *table);
/* Rotates the d_rope values at x; inverse by minus the angle. */
void ds4_cpu_rope_apply(const float *table, int32_t d_rope, bool inverse, float *x);

/* ---- operations ---------------------------------------------------------------------------------- */

void ds4_cpu_embed(struct ds4_device *dev, const struct ds4_embed_args *a);
void ds4_cpu_rmsnorm(struct ds4_device *dev, const struct ds4_rmsnorm_args *a);
void ds4_cpu_hyper_read(struct ds4_device *dev, const struct ds4_hyper_read_args *a);
void ds4_cpu_hyper_write(struct ds4_device *dev, const struct ds4_hyper_write_args *a);
void ds4_cpu_hyper_head(struct ds4_device *dev, const struct ds4_hyper_head_args *a);
void ds4_cpu_gemm(struct ds4_device *dev, const struct ds4_gemm_args *a);
void ds4_cpu_rope(struct ds4_device *dev, const struct ds4_rope_args *a);
void ds4_cpu_latent(struct ds4_device *dev, const struct ds4_latent_args *a);
void ds4_cpu_round(struct ds4_device *dev, const struct ds4_round_args *a);
void ds4_cpu_ring_write(struct ds4_device *dev, const struct ds4_ring_write_args *a);
void ds4_cpu_keep(struct ds4_device *dev, const struct ds4_keep_args *a);
void ds4_cpu_compress(struct ds4_device *dev, const struct ds4_compress_args *a);
void ds4_cpu_index(struct ds4_device *dev, const struct ds4_index_args *a);
void ds4_cpu_attention(struct ds4_device *dev, const struct ds4_attention_args *a);
void ds4_cpu_route(struct ds4_device *dev, const struct ds4_route_args *a);
void ds4_cpu_moe(struct ds4_device *dev, const struct ds4_moe_args *a);
void ds4_cpu_moe_uses(struct ds4_device *dev, const struct ds4_moe_args *a);
void ds4_cpu_moe_join(struct ds4_device *dev, const struct ds4_moe_args *a);
void ds4_cpu_spread(struct ds4_device *dev, const struct ds4_spread_args *a);
void ds4_cpu_probe(struct ds4_device *dev, struct ds4_probe *out);
void ds4_cpu_pattern_write(struct ds4_device *dev, void *area, size_t bytes, uint64_t seed);
void ds4_cpu_pattern_check(struct ds4_device *dev, const void *area, size_t bytes, uint64_t seed,
                           struct ds4_memory_faults *faults);
void ds4_cpu_synth(struct ds4_device *dev, const struct ds4_synth_recipe *recipe, uint64_t n_block,
                   void *dst);

/* True when row t of the step belongs to an active entry. */
static inline bool ds4_cpu_active(const struct ds4_batch *batch, int32_t t)
{
    return batch->entry[batch->entry_of[t]].active;
}

#endif
