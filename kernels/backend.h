/* The C ABI between the worker and its compute: one table of operations, a CPU and a CUDA
 * implementation.
 *
 * Operations are void: arguments are the worker's duty (asserted in debug builds) and device faults
 * are fatal by design.  They are queued in call order on the device's one stream; only sync() and
 * download() wait.  Pointers in argument structs must stay valid until the next sync().  kernels/cpu
 * is the specification: same formulas, one reduction order for every batch, chunk, partition and
 * instruction set (16 lanes, products and sums unfused, lanes combined as a fixed tree), so its
 * results are equal bit for bit whatever the step looked like.
 *
 * Dimension words: n_tok rows of the step, d = d_model, n_hyper residual streams, n_head query heads
 * of d_head, d_rope rotated tail dims of a head.  "paper" = the DeepSeek V4 description as fixed by
 * the checkpoint's own inference code. */
#ifndef DS4_KERNELS_BACKEND_H
#define DS4_KERNELS_BACKEND_H

#include "common/choices.h"
#include "common/err.h"
#include "common/synth_block.h"
#include "kernels/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DS4_NORETURN __attribute__((noreturn))

struct ds4_device; /* opaque; one per worker */

struct ds4_device_config {
    const char *card; /* cuda: number, PCI address or UUID of the card; NULL or "": the next */
    int32_t ordinal;  /* cuda: the card of this number, counted round over those visible */
    int32_t n_thread; /* cpu pool size incl. the caller; 0 = all cores */
    enum ds4_isa isa; /* cpu only; one the machine lacks is DS4_E_INVALID */
    enum ds4_products products;
};

/* How a cache row is stored.  F32 and BF16 keep d values.  FP8 (kv.quant_sim): dims [0, d - d_rope)
 * as e4m3 bytes, then ceil((d - d_rope) / 64) ue8m0 scale bytes, padded to even, then d_rope bf16:
 * 584 B for Flash.  FP4 (indexer): d / 2 bytes of e2m1 pairs (element 2i in the low nibble), then
 * d / 32 ue8m0 scales: 68 B for Flash.  Both are lossless for values that went through the matching
 * rounding. */
#define DS4_FP8_BLOCK 64
#define DS4_FP4_BLOCK 32
enum ds4_row_format { DS4_ROW_F32, DS4_ROW_BF16, DS4_ROW_FP8, DS4_ROW_FP4 };

/* Bytes of one stored row of d values. */
size_t ds4_row_bytes(enum ds4_row_format format, int32_t d, int32_t d_rope);

/* Position-addressed ring per slot: the row of position p of slot s lives at index s * cap + p % cap.
 * No search, no counters. */
struct ds4_ring {
    void *data; /* [n_slot, cap] rows of row_bytes */
    int32_t n_slot;
    int32_t cap;
    int32_t d; /* values per row */
    int32_t d_rope;
    enum ds4_row_format format;
    size_t row_bytes;
};

/* Paged append-only rows: row j of a sequence lives in block table[j / rows_per_block] at index
 * j % rows_per_block; rows_per_block = DS4_BLOCK_TOK / ratio. */
#define DS4_BLOCK_TOK 256
struct ds4_pages {
    void *data; /* [n_block, rows_per_block] rows of row_bytes */
    int32_t n_block;
    int32_t rows_per_block;
    int32_t d;
    int32_t d_rope;
    enum ds4_row_format format;
    size_t row_bytes;
};

/* The rows of one step as every operation sees them.  Host memory, borrowed until sync(). */
struct ds4_batch_entry {
    int32_t slot;
    int32_t base_pos;  /* position of the entry's first row; earlier rows are in the rings */
    int32_t first_row; /* index of its first row in the step */
    int32_t n_row;
    bool active;      /* false: its rows may hold anything, nothing is written for them */
    int32_t cap_tok;  /* lease: rows of positions >= cap_tok must never be written */
    int32_t seal_tok; /* compressed rows that tokens below close exist and must not be written */
    const int32_t *block; /* [n_block] block table of the sequence */
    int32_t n_block;
};
struct ds4_batch {
    int32_t n_tok;
    const int32_t *token;    /* [n_tok] ids, < n_vocab */
    const int32_t *pos;      /* [n_tok] */
    const int32_t *entry_of; /* [n_tok] index into entry[] */
    int32_t n_entry;
    const struct ds4_batch_entry *entry;
    int32_t n_out;          /* rows whose logits are wanted */
    const int32_t *out_row; /* [n_out] */
};

/* Rotary table: the angle of pair i at position p is (float)p * freq[i], rounded to f32, then an
 * accurate sine and cosine with full range reduction.  Pairs are interleaved (2i, 2i + 1) over the
 * last d_rope dims. */
struct ds4_rope {
    const float *freq; /* [d_rope / 2], device */
    int32_t d_rope;
};

/* X[t][k][:] = W[token[t]][:] for every stream k.   x [n_tok, n_hyper, d] f32 or bf16 */
struct ds4_embed_args {
    const struct ds4_batch *batch;
    struct ds4_weight w; /* [n_vocab, d] */
    struct ds4_tensor x;
};

/* y = w * x * rsqrt(mean(x^2) + eps), in f32 with one final rounding; w NULL = all ones.
 * x, y [n_row, d]; in place allowed. */
struct ds4_rmsnorm_args {
    struct ds4_tensor x;
    const float *w; /* [d] f32 device */
    float eps;
    struct ds4_tensor y;
};

/* What products of a layer's two latent rows become (paper 3.3, 3.4), in place: q is normed; kv is normed,
 * rotated, and rounded as a cache row of `format`.
 *   q [n_tok, q_rank] f32, q_norm [q_rank] f32;  kv [n_tok, d_head] f32, kv_norm [d_head] f32 */
struct ds4_latent_args {
    const struct ds4_batch *batch;
    struct ds4_tensor q;
    const float *q_norm;
    struct ds4_tensor kv;
    const float *kv_norm;
    float eps;
    struct ds4_rope rope;
    enum ds4_row_format format;
};

/* Hyper-connections, read half (paper 2.3): from X [n_tok, n_hyper, d] the mixes
 * m = (fn . x) * rsqrt(mean(x^2) + rms_eps), then pre = sigmoid(.) + hyper_eps, post = 2 sigmoid(.),
 * comb = Sinkhorn(row softmax + eps, column step first), u = sum_j pre_j X_j.
 * With `norm` u is then normed: u = norm * u * rsqrt(mean(u^2) + rms_eps).
 * With `o` the write half of the row before comes first: hyper_write of o by the post and comb at hand,
 * which the new ones then replace; the same bits as the two operations.
 *   o [n_tok, d] f32, data NULL: none;  fn [(2 + n_hyper) * n_hyper, n_hyper * d];  base f32 [(2 + n_hyper) * n_hyper];  scale f32 [3]
 *   norm [d] f32 or NULL
 *   u [n_tok, d] f32;  post [n_tok, n_hyper] f32;  comb [n_tok, n_hyper, n_hyper] f32, first index =
 *   source stream */
struct ds4_hyper_read_args {
    struct ds4_tensor x;
    struct ds4_tensor o;
    struct ds4_weight fn;
    const float *base;
    const float *scale;
    int32_t sinkhorn_iters;
    float hyper_eps;
    float rms_eps;
    const float *norm;
    struct ds4_tensor u;
    float *post;
    float *comb;
};

/* Write half: X'_k = post_k * o + sum_j comb_jk X_j, in place on x.   o [n_tok, d] f32 */
struct ds4_hyper_write_args {
    struct ds4_tensor o;
    const float *post;
    const float *comb;
    struct ds4_tensor x;
};

/* Head: h = sum_j (sigmoid(m_j * scale[0] + base_j) + hyper_eps) X_j for n_row chosen rows.
 *   row [n_row] indices into x's first dimension, host: the batch's out_row, or in a step that is
 *   never replayed any others;  h [n_row, d] f32 */
struct ds4_hyper_head_args {
    struct ds4_tensor x;
    const int32_t *row;
    int32_t n_row;
    struct ds4_weight fn; /* [n_hyper, n_hyper * d] */
    const float *base;
    const float *scale;
    float hyper_eps;
    float rms_eps;
    struct ds4_tensor h;
};

/* y = W x for every row.  n_group > 1 is the block-diagonal product of the grouped output projection:
 * x [n, n_group * n_col]; W rows [g * n_row / n_group, ...) see only group g's inputs.
 *   x [n, n_group * n_col] f32;  y [n, n_row] f32.  `exact` forces f32 activations whatever the
 *   device's products mode (router, mixers, compressors, head); in fast mode a GPU keeps to it up to 32
 *   rows and gives more rows to its tensor units as bf16, as the checkpoint's own code does.
 * w2 (data NULL: none) is a second matrix of the same input: y2 = W2 x, n_group 1. */
struct ds4_gemm_args {
    struct ds4_weight w;
    int32_t n_group; /* >= 1 */
    bool exact;
    struct ds4_tensor x;
    struct ds4_tensor y;
    struct ds4_weight w2;
    struct ds4_tensor y2;
};

/* Rotates the last d_rope dims of every head in place: x [n_tok, n_head, d_head] f32; inverse rotates
 * by minus the angle.  unit_rms first scales each head by rsqrt(mean(x^2) + eps). */
struct ds4_rope_args {
    const struct ds4_batch *batch;
    struct ds4_tensor x;
    struct ds4_rope rope;
    bool inverse;
    bool unit_rms;
    float eps;
};

/* The checkpoint's cache rounding in place on x [n_row, d] f32 (paper 3.8).  FP8 rounds blocks of
 * min(64, rest) over the first d - d_rope dims through e4m3 with power-of-two scales and the tail to
 * bf16; FP4 applies the Hadamard transform of size d (factor d^-0.5), bf16, then e2m1 in blocks of 32;
 * BF16 rounds; F32 leaves x alone. */
struct ds4_round_args {
    struct ds4_tensor x;
    enum ds4_row_format format;
    int32_t d_rope;
};

/* Stores rows of the step into a ring, the last min(n_row, cap) of each active entry: called after the
 * layer has read the ring's history.   x [n_tok, d] f32, already rounded for the ring's format */
struct ds4_ring_write_args {
    const struct ds4_batch *batch;
    struct ds4_tensor x;
    struct ds4_ring ring;
};

/* Keeps rows of the step beside the rings, as a ring would hold them: dst[i] = the first n_col values of row
 * first_row + i of x, plus ape[(pos + i) % ratio] where ape.data is set, packed.  For gates that is what
 * compress puts into its ring, so it comes before compress, which may change them.
 *   x [n_tok, >= n_col] f32;  dst [n_row] rows of ds4_row_bytes(format, n_col, d_rope), device */
struct ds4_keep_args {
    struct ds4_tensor x;
    int32_t first_row;
    int32_t n_row;
    int32_t n_col;
    int32_t pos;           /* of the first row */
    struct ds4_weight ape; /* [ratio, >= n_col]; with F32 rows only */
    int32_t ratio;
    enum ds4_row_format format;
    int32_t d_rope;
    void *dst;
};

/* One compressor (paper 3.6) over the step: adds ape[pos % ratio] to g, pools every block completed
 * inside the step (history from the rings, own rows from k and g), norms, rotates at the block's first
 * position, rounds for the page format, stores row (pos + 1) / ratio - 1, then persists k and g into
 * the rings.  Width c * d with c = 2 when `overlap` (ratio 4), else 1.  Softmax per dimension over
 * 2 * ratio (overlap) or ratio candidates; block 0 has no left half.
 *   k, g [n_tok, c * d] f32 (g is overwritten with g + ape);  ring rows are c * d f32 values */
struct ds4_compress_args {
    const struct ds4_batch *batch;
    struct ds4_tensor k;
    struct ds4_tensor g;
    struct ds4_weight ape; /* [ratio, c * d] */
    int32_t ratio;
    bool overlap;
    const float *norm; /* [d] */
    float eps;
    struct ds4_rope rope;
    struct ds4_ring ring_k;
    struct ds4_ring ring_g;
    struct ds4_pages pages; /* destination */
};

/* Lightning indexer (paper 3.7): score_j = sum_h w_h relu(q_h . key_j) over rows j < (pos + 1) / ratio;
 * keeps the top_k largest (ties: lower row first) and writes them ascending.
 *   q [n_tok, n_head, d] f32, first rotated by `rope` and rounded as the pages' rows, in place (freq NULL:
 *   it comes so);  w [n_tok, n_head] f32, already scaled
 *   sel [n_tok, top_k] i32 device;  n_sel [n_tok] i32 device */
struct ds4_index_args {
    const struct ds4_batch *batch;
    struct ds4_tensor q;
    struct ds4_rope rope;
    struct ds4_tensor w;
    struct ds4_pages pages;
    int32_t ratio;
    int32_t top_k;
    int32_t *sel;
    int32_t *n_sel;
};

/* Attention of one layer (paper 3.9): a query at p sees window positions max(0, p - window_tok + 1)..p
 * (history in `ring`, the step's own rows in `kv`) and compressed rows: none (ratio 0), all rows
 * j < (p + 1) / ratio (sel NULL), or the selected ones.  One softmax over both parts, scale
 * d_head^-0.5, with a per-head sink in the denominator only; values are the same rows as keys.
 * Then, with `rope` (freq NULL: not), o is rotated back, and with `store` the ring takes the rows kv.
 *   q, o [n_tok, n_head, d_head] f32;  kv [n_tok, d_head] f32 rounded;  sink [n_head] f32 */
struct ds4_attention_args {
    const struct ds4_batch *batch;
    struct ds4_tensor q;
    struct ds4_tensor kv;
    struct ds4_ring ring;
    struct ds4_pages pages; /* data NULL when ratio is 0 */
    int32_t ratio;
    int32_t window_tok;
    const int32_t *sel;
    const int32_t *n_sel;
    int32_t top_k;
    const float *sink;
    struct ds4_rope rope;
    bool store;
    struct ds4_tensor o;
};

/* Expert choice (paper 4.2): s_e = sqrt(softplus(logit_e)); ids from table[token] when `table` is set
 * (hash layers), else the n_used largest of s_e + bias_e (ties: lower id); weight = scale * s_e / sum
 * of the chosen s.
 *   logits [n_tok, n_expert] f32;  table [n_vocab, n_used] i32 or NULL;  bias [n_expert] f32 or NULL
 *   id [n_tok, n_used] i32, ascending;  weight [n_tok, n_used] f32 */
struct ds4_route_args {
    const struct ds4_batch *batch;
    struct ds4_tensor logits;
    const int32_t *table;
    const float *bias;
    int32_t n_used;
    float scale;
    int32_t *id;
    float *weight;
};

/* How wide routing spreads: adds 1 to count[0] and to count[1] the number of distinct experts in the
 * rows of active entries.   id [n_tok, n_used] i32, each < n_expert;  count [2] u64 device */
#define DS4_SPREAD_MAX_EXPERTS 4096
struct ds4_spread_args {
    const struct ds4_batch *batch;
    const int32_t *id;
    int32_t n_used;
    int32_t n_expert;
    uint64_t *count;
};

/* An id of moe_uses that is no expert of the stacks at hand, on purpose. */
#define DS4_EXPERT_ELSEWHERE INT32_MIN

/* Experts (paper 4.3): y = sum_e w2_e (silu(min(g, clamp)) * bound(u, -clamp, clamp) * weight_e) over
 * the chosen experts in ascending id, then the shared expert (no weight, own clamp).
 *   x, y [n_tok, d] f32;  gate, up [n_expert, d_expert, d];  down [n_expert, d, d_expert] */
struct ds4_moe_args {
    const struct ds4_batch *batch;
    struct ds4_tensor x;
    const int32_t *id;
    const float *weight;
    int32_t n_used;
    struct ds4_weight gate;
    struct ds4_weight up;
    struct ds4_weight down;
    struct ds4_weight shared_gate;
    struct ds4_weight shared_up;
    struct ds4_weight shared_down;
    float clamp;
    float shared_clamp;
    struct ds4_tensor y;
    float *part; /* [n_tok, n_used, d] f32, of moe_uses and moe_join only */
};

/* What a step can need at most; sizes the device's scratch. */
struct ds4_limits {
    int32_t max_tok;     /* rows per step */
    int32_t max_context; /* positions of a sequence */
    int32_t d_model;
    int32_t n_hyper;
    int32_t n_head;
    int32_t d_head;
    int32_t n_index_head;
    int32_t d_index;
    int32_t top_k;
    int32_t n_expert;
    int32_t n_used;
    int32_t d_expert;
    int32_t max_cols; /* widest gemm input */
};

/* What a device turns out to do.  Rates of 0: not measured. */
enum ds4_probe_verdict {
    DS4_PROBE_NONE,      /* not probed */
    DS4_PROBE_FULL,      /* arithmetic at its full rate */
    DS4_PROBE_THROTTLED, /* products run at a fraction: a card locked by its maker */
    DS4_PROBE_BRAKE,     /* the board's power brake holds clock and memory down */
};
struct ds4_probe {
    enum ds4_probe_verdict verdict;
    double memory_bytes_per_s; /* streaming reads of the device's memory */
    double link_bytes_per_s;   /* host to device, pinned; cpu: 0 */
    double back_bytes_per_s;   /* device to host */
    double flops;              /* f32 products and sums; cuda: fused */
    double mma_cycles;         /* latency of a bf16 tensor product; cpu: 0 */
    double dp4a_per_dp2a;      /* rate of one by that of the other; cpu: 0 */
    double clock_hz;           /* of the processors under load; cpu: 0 */
};

/* Words that did not come back as written: how many, and where the first found lie. */
#define DS4_MEMORY_FAULTS_KEPT 16
struct ds4_memory_faults {
    uint64_t n;
    uint64_t at[DS4_MEMORY_FAULTS_KEPT]; /* bytes from the area's start, in no order */
};
enum ds4_side { DS4_SIDE_START, DS4_SIDE_BACK, DS4_SIDE_JOIN };

struct ds4_backend {
    const char *name; /* "cpu" | "cuda" */
    /* True when weights may be used in place from host memory (cpu over an mmap). */
    bool host_weights;

    /* Opens the device; NULL with err on failure.  close() frees everything allocated from it. */
    struct ds4_device *(*open)(const struct ds4_device_config *config, struct ds4_err *err);
    void (*close)(struct ds4_device *dev);
    /* For log lines and health: processor name and instruction set, or card and capability. */
    const char *(*describe)(const struct ds4_device *dev);
    /* The card's PCI address, "0000:01:00.0", into text; "" on cpu. */
    void (*address)(const struct ds4_device *dev, char *text, size_t size);
    int32_t (*n_device)(void);
    /* Bytes free and total on the device (host memory on cpu). */
    void (*memory)(struct ds4_device *dev, size_t *free_bytes, size_t *total_bytes);

    /* Start-up only.  256-byte aligned, zeroed.  NULL with DS4_E_NOMEM naming the size. */
    void *(*alloc)(struct ds4_device *dev, size_t bytes, const char *what, struct ds4_err *err);
    void (*upload)(struct ds4_device *dev, void *dst, const void *host_src, size_t bytes);
    void (*download)(struct ds4_device *dev, void *host_dst, const void *src, size_t bytes);
    void (*sync)(struct ds4_device *dev);

    /* Sequence state in host memory.  alloc_host: start-up only; page-aligned memory that fetch and upload
     * copy to and from without the processor (pinned on cuda; untouched pages cost nothing on cpu).
     * Contents undefined.  NULL with DS4_E_NOMEM.  free_host takes it back. */
    void *(*alloc_host)(struct ds4_device *dev, size_t bytes, const char *what,
                        struct ds4_err *err);
    void (*free_host)(struct ds4_device *dev, void *data, size_t bytes);
    /* Queued download into memory of alloc_host, readable after the next sync(). */
    void (*fetch)(struct ds4_device *dev, void *host_dst, const void *src, size_t bytes);
    /* Queued copy on the device of n_row rows of row_bytes; row r is at r * pitch on either side. */
    void (*copy_rows)(struct ds4_device *dev, void *dst, size_t dst_pitch, const void *src,
                      size_t src_pitch, size_t row_bytes, int32_t n_row);
    /* Start-up only: blocks [0, n_block) of a synthetic tensor to dst, the same bytes on every device. */
    void (*synth)(struct ds4_device *dev, const struct ds4_synth_recipe *recipe, uint64_t n_block,
                  void *dst);
    /* What the operations done so far found wrong with indices that other operations gave them (an
     * expert, a selected row), NULL if nothing.  They go on without the index; whoever asks must not:
     * only broken memory makes such a number. */
    const char *(*wrong)(const struct ds4_device *dev);
    /* Makes host memory one that the device copies from and to without a buffer between, until unpin.
     * A hint: where it cannot be done, copies are slower. */
    void (*pin)(struct ds4_device *dev, void *host, size_t bytes);
    void (*unpin)(struct ds4_device *dev, void *host);
    /* The native queue of operations (a cudaStream_t) and the device's number, for a transport that
     * works on the device itself; NULL on cpu. */
    void *(*queue)(struct ds4_device *dev, int32_t *ordinal);

    /* Start-up only, under 100 ms (cpu: 50): measures the device with memory of its own, given back. */
    void (*probe)(struct ds4_device *dev, struct ds4_probe *out);
    /* Start-up only: fills an area (a multiple of 8 bytes) with words that follow from seed and place,
     * seed 0: zeros; and adds to *faults what differs from that.  check waits for the device. */
    void (*pattern_write)(struct ds4_device *dev, void *area, size_t bytes, uint64_t seed);
    void (*pattern_check)(struct ds4_device *dev, const void *area, size_t bytes, uint64_t seed,
                          struct ds4_memory_faults *faults);

    /* Scratch bytes the operations need below those limits; handed over once, before the first
     * operation.  On cuda they are the same for every card: dev may be NULL, for plans without one. */
    size_t (*scratch_bytes)(const struct ds4_device *dev, const struct ds4_limits *limits);
    void (*set_scratch)(struct ds4_device *dev, void *scratch, size_t bytes);

    /* First call of a step: what the operations below see of its rows.  Borrowed until sync(). */
    void (*begin)(struct ds4_device *dev, const struct ds4_batch *batch);
    /* Around the operations of a step, after begin().  enter() true: a device that knows steps of this
     * shape has queued all operations up to leave() itself, the caller must not; the operations of a
     * shape, their order and arguments (but what the batch holds) must therefore not change as long as
     * the device is open.  No upload, download or sync between the two. */
    bool (*enter)(struct ds4_device *dev);
    void (*leave)(struct ds4_device *dev);

    void (*embed)(struct ds4_device *dev, const struct ds4_embed_args *a);
    void (*rmsnorm)(struct ds4_device *dev, const struct ds4_rmsnorm_args *a);
    void (*hyper_read)(struct ds4_device *dev, const struct ds4_hyper_read_args *a);
    void (*hyper_write)(struct ds4_device *dev, const struct ds4_hyper_write_args *a);
    void (*hyper_head)(struct ds4_device *dev, const struct ds4_hyper_head_args *a);
    void (*gemm)(struct ds4_device *dev, const struct ds4_gemm_args *a);
    void (*rope)(struct ds4_device *dev, const struct ds4_rope_args *a);
    void (*latent)(struct ds4_device *dev, const struct ds4_latent_args *a);
    void (*round)(struct ds4_device *dev, const struct ds4_round_args *a);
    void (*ring_write)(struct ds4_device *dev, const struct ds4_ring_write_args *a);
    void (*keep)(struct ds4_device *dev, const struct ds4_keep_args *a);
    void (*compress)(struct ds4_device *dev, const struct ds4_compress_args *a);
    void (*index)(struct ds4_device *dev, const struct ds4_index_args *a);
    void (*attention)(struct ds4_device *dev, const struct ds4_attention_args *a);
    void (*route)(struct ds4_device *dev, const struct ds4_route_args *a);
    void (*moe)(struct ds4_device *dev, const struct ds4_moe_args *a);
    /* The same in pieces, where the experts of a layer do not lie in one place.  moe_uses writes the
     * row part[t][i] of every use whose id is in [0, gate.n_stack), weight and all, and no other;
     * moe_join makes y: the parts of a token in rising i where id >= 0, then the shared expert.  With
     * ids rising in i that is moe's own order: the same bits. */
    void (*moe_uses)(struct ds4_device *dev, const struct ds4_moe_args *a);
    void (*moe_join)(struct ds4_device *dev, const struct ds4_moe_args *a);
    void (*spread)(struct ds4_device *dev, const struct ds4_spread_args *a);

    /* Work beside work: what is called between DS4_SIDE_START and DS4_SIDE_BACK may run at the same time
     * as what is called between DS4_SIDE_BACK and DS4_SIDE_JOIN, and must neither read nor write what
     * that writes; START may come again before JOIN, behind what was called since.  Only gemm, compress and
     * index may stand on the side.  A device may as well run everything in call order. */
    void (*side)(struct ds4_device *dev, enum ds4_side side);
};

/* "cpu" or "cuda"; NULL if not built in. */
const struct ds4_backend *ds4_backend_find(const char *name);

/* Devices this process sees: 1 for cpu, 0 for a backend that is not built in or has none. */
int32_t ds4_backend_n_device(const char *name);

/* A device fault, and where our code noticed it: a device reports late, so `kernel`, the one launched
 * last, is a hint.  Must not return. */
struct ds4_device_fault {
    const char *file;
    int line;
    const char *what; /* the call */
    const char *why;  /* its error */
    const char *kernel;
};
typedef void (*ds4_device_fault_fn)(const struct ds4_device_fault *fault);
/* Called for every fault from now on; without it the text goes to stderr and the process aborts. */
void ds4_backend_on_fault(ds4_device_fault_fn hook);
/* For backends: a fault ends the process. */
DS4_NORETURN void ds4_backend_fault(const char *file, int line, const char *what, const char *why);
/* For backends: the newest kernel's name, a literal. */
extern const char *volatile ds4_backend_kernel;

#ifdef __cplusplus
}
#endif

#endif
