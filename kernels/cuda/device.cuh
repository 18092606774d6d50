/* The CUDA device behind struct ds4_device, and what every kernel file shares.
 *
 * One stream per device: operations run in call order, nothing waits but sync and download.  begin()
 * mirrors the step's batch into fixed device buffers, so that a kernel reads positions, slots and block
 * tables from memory and a captured graph of the same shape can be replayed for another step. */
#ifndef DS4_KERNELS_CUDA_DEVICE_CUH
#define DS4_KERNELS_CUDA_DEVICE_CUH

#include "kernels/backend.h"
#include "kernels/cuda/async.cuh"
#include "kernels/cuda/check.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* One batch entry as kernels see it. */
struct ds4_dev_entry {
    int32_t slot;
    int32_t base_pos;
    int32_t first_row;
    int32_t n_row;
    int32_t active;
    int32_t cap_tok;
    int32_t seal_tok;
    int32_t n_block;
    int32_t first_block; /* index into ds4_dev_batch.block */
};

/* Device pointers, passed to kernels by value. */
struct ds4_dev_batch {
    int32_t n_tok;
    int32_t n_entry;
    const int32_t *token;
    const int32_t *pos;
    const int32_t *entry_of;
    const struct ds4_dev_entry *entry;
    const int32_t *block;
    int32_t *wrong;         /* kernels put an enum ds4_dev_wrong here, in host memory */
    const int32_t *out_row; /* [n_out] */
};

/* All that launches may depend on: two steps of equal shape are the same launches. */
struct ds4_dev_shape {
    int32_t n_tok;
    int32_t n_entry;
    int32_t n_out;
    int32_t max_row; /* of an entry */
    int32_t horizon; /* a power of two no active row's position reaches */
};

/* A step that was seen, and its launches once it was seen twice. */
#define DS4_DEV_MAX_REPLAYS 32
struct ds4_dev_replay {
    struct ds4_dev_shape shape;
    cudaGraphExec_t exec; /* NULL: seen once */
    uint64_t used;        /* 0: free */
};

/* Rows that the operation which made them has packed for the int8 products of those that follow (act.cu):
 * an operation that writes over the rows, or the next step, ends that. */
struct ds4_dev_kept {
    const void *from; /* the rows, dense f32; NULL: none */
    int32_t n;
    int32_t n_col;
    uint8_t *packed;
};
enum ds4_dev_keep { DS4_DEV_KEEP_HIDDEN, DS4_DEV_KEEP_RANK, DS4_DEV_KEEP_HEADS, DS4_DEV_N_KEEP };
#define DS4_DEV_KEEP_ROWS  64
#define DS4_DEV_KEEP_BYTES ((size_t)64 * 40960) /* 64 rows of 32,768 int8 values and their scales */

/* Which index was out of range. */
enum ds4_dev_wrong { DS4_DEV_WRONG_NONE, DS4_DEV_WRONG_EXPERT, DS4_DEV_WRONG_ROW };

#define DS4_DEV_MAX_TOK    8192
#define DS4_DEV_MAX_ENTRY  256
#define DS4_DEV_MAX_BLOCKS (1 << 20)
#define DS4_DEV_MAX_ALLOCS 4096

struct ds4_device {
    int32_t ordinal;
    int32_t n_sm;
    int32_t cc; /* compute capability, 80 for 8.0 */
    char name[320];
    enum ds4_products products;
    cudaStream_t stream;
    cublasHandle_t blas;

    void *alloc[DS4_DEV_MAX_ALLOCS]; /* freed by close */
    int32_t n_alloc;

    unsigned char *scratch; /* handed over by set_scratch; carved by each op from its start */
    size_t scratch_bytes;
    struct ds4_dev_kept kept[DS4_DEV_N_KEEP];

    struct ds4_dev_batch batch; /* of the running step */
    unsigned char *host_batch;  /* pinned image of the arrays behind it */
    unsigned char *dev_batch;
    size_t batch_bytes;
    size_t batch_used;       /* of the running step */
    cudaEvent_t batch_taken; /* the upload of the previous step has left the pinned image */
    const int32_t *host_out_row;

    bool overlap;               /* kernels may start before their predecessors end */
    struct ds4_dev_shape shape; /* of the running step */
    bool replays;               /* equal steps are recorded and replayed */
    struct ds4_dev_replay replay[DS4_DEV_MAX_REPLAYS];
    struct ds4_dev_replay *recording;
    uint64_t replay_clock;

    volatile int32_t *wrong; /* pinned and mapped; see batch.wrong */

    cudaStream_t main_stream; /* `stream` is this one but on the side */
    cudaStream_t side_stream;
    cudaEvent_t side_event;
};

/* Carves n elements of T from scratch at *used, 256-byte aligned.  The sizes were promised by
 * scratch_bytes; running over is a bug and fatal. */
void *ds4_dev_carve(struct ds4_device *dev, size_t bytes, size_t *used);
#define DS4_CARVE(dev, T, n, used) ((T *)ds4_dev_carve((dev), sizeof(T) * (size_t)(n), (used)))

/* Small host arrays (row lists): copied through the pinned image at once, valid until the next step. */
const int32_t *ds4_dev_put_ids(struct ds4_device *dev, const int32_t *host, int32_t n);

/* Where the operation that makes `rows` is to pack them; NULL: nobody wants them packed.  Marks them kept. */
uint8_t *ds4_dev_keep(struct ds4_device *dev, enum ds4_dev_keep what,
                      const struct ds4_tensor *rows);
/* Kept rows that `rows` overlaps are no longer. */
void ds4_dev_spoil(struct ds4_device *dev, const struct ds4_tensor *rows);
void ds4_dev_spoil_bytes(struct ds4_device *dev, const void *data, size_t bytes);

static inline int ds4_div_up(int64_t a, int64_t b)
{
    return (int)((a + b - 1) / b);
}

/* The card that the settings mean; DS4_E_INVALID if it is not there. */
int ds4_cuda_find_card(const struct ds4_device_config *config, int32_t *ordinal,
                       struct ds4_err *err);
/* 0, or -1 with why a CUDA call said no before anything is at stake; DS4_E_BUSY if waiting may help. */
int ds4_cuda_refused(cudaError_t rc, const char *what, struct ds4_err *err);

/* Replaying steps (replay.cu). */
bool ds4_cuda_enter(struct ds4_device *dev);
void ds4_cuda_leave(struct ds4_device *dev);
void ds4_cuda_forget(struct ds4_device *dev);

/* One function per operation, named as in struct ds4_backend; each in the file of its name. */
void ds4_cuda_embed(struct ds4_device *dev, const struct ds4_embed_args *a);
void ds4_cuda_rmsnorm(struct ds4_device *dev, const struct ds4_rmsnorm_args *a);
void ds4_cuda_hyper_read(struct ds4_device *dev, const struct ds4_hyper_read_args *a);
void ds4_cuda_hyper_write(struct ds4_device *dev, const struct ds4_hyper_write_args *a);
void ds4_cuda_hyper_head(struct ds4_device *dev, const struct ds4_hyper_head_args *a);
void ds4_cuda_gemm(struct ds4_device *dev, const struct ds4_gemm_args *a);
void ds4_cuda_rope(struct ds4_device *dev, const struct ds4_rope_args *a);
void ds4_cuda_latent(struct ds4_device *dev, const struct ds4_latent_args *a);
void ds4_cuda_round(struct ds4_device *dev, const struct ds4_round_args *a);
void ds4_cuda_ring_write(struct ds4_device *dev, const struct ds4_ring_write_args *a);
void ds4_cuda_keep(struct ds4_device *dev, const struct ds4_keep_args *a);
void ds4_cuda_compress(struct ds4_device *dev, const struct ds4_compress_args *a);
void ds4_cuda_index(struct ds4_device *dev, const struct ds4_index_args *a);
void ds4_cuda_attention(struct ds4_device *dev, const struct ds4_attention_args *a);
void ds4_cuda_route(struct ds4_device *dev, const struct ds4_route_args *a);
void ds4_cuda_moe(struct ds4_device *dev, const struct ds4_moe_args *a);
void ds4_cuda_moe_uses(struct ds4_device *dev, const struct ds4_moe_args *a);
void ds4_cuda_moe_join(struct ds4_device *dev, const struct ds4_moe_args *a);
void ds4_cuda_spread(struct ds4_device *dev, const struct ds4_spread_args *a);
void *ds4_cuda_alloc_host(struct ds4_device *dev, size_t bytes, const char *what,
                          struct ds4_err *err);
void ds4_cuda_free_host(struct ds4_device *dev, void *data, size_t bytes);
void ds4_cuda_fetch(struct ds4_device *dev, void *host_dst, const void *src, size_t bytes);
void ds4_cuda_copy_rows(struct ds4_device *dev, void *dst, size_t dst_pitch, const void *src,
                        size_t src_pitch, size_t row_bytes, int32_t n_row);
void ds4_cuda_probe(struct ds4_device *dev, struct ds4_probe *out);
void ds4_cuda_pattern_write(struct ds4_device *dev, void *area, size_t bytes, uint64_t seed);
void ds4_cuda_pattern_check(struct ds4_device *dev, const void *area, size_t bytes, uint64_t seed,
                            struct ds4_memory_faults *faults);
void ds4_cuda_synth(struct ds4_device *dev, const struct ds4_synth_recipe *recipe, uint64_t n_block,
                    void *dst);

/* What each file needs of scratch for steps below `limits`; the largest wins. */
size_t ds4_cuda_gemm_scratch(const struct ds4_device *dev, const struct ds4_limits *limits);
size_t ds4_cuda_moe_scratch(const struct ds4_device *dev, const struct ds4_limits *limits);
size_t ds4_cuda_hyper_scratch(const struct ds4_device *dev, const struct ds4_limits *limits);
size_t ds4_cuda_compress_scratch(const struct ds4_device *dev, const struct ds4_limits *limits);
size_t ds4_cuda_index_scratch(const struct ds4_device *dev, const struct ds4_limits *limits);
size_t ds4_cuda_attention_scratch(const struct ds4_device *dev, const struct ds4_limits *limits);

#endif
