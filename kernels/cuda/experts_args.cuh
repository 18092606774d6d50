/* The experts of a decode step as moe.cu hands them to the kernels of experts.cuh. */
#ifndef DS4_KERNELS_CUDA_EXPERTS_ARGS_CUH
#define DS4_KERNELS_CUDA_EXPERTS_ARGS_CUH

#include "kernels/cuda/product.cuh"

#define DS4_EXPERTS_MAX_TOK 64

/* All device memory; packed rows are int8.  d_expert and d_shared are multiples of 32. */
struct ds4_experts {
    struct ds4_dev_batch batch;
    int32_t n_tok;
    int32_t d;
    int32_t d_expert;
    int32_t d_shared;
    const struct ds4_dev_group *group; /* touched experts first, rising; the rest has n = 0 */
    int32_t n_group;
    const int32_t *token; /* of a slot */
    const float *weight;  /* of a slot */
    /* One token: its uses as routed, instead of the three above; every warp makes its slots from them. */
    const int32_t *id;
    const float *id_weight;
    int32_t n_used;
    int32_t n_expert;
    struct ds4_packed x; /* [n_tok] rows of d */
    const uint8_t *gate;
    const uint8_t *up;
    size_t gate_row_bytes;
    float clamp;
    struct ds4_packed middle; /* [slots] rows of d_expert */
    const uint8_t *down;
    size_t down_row_bytes;

    const float *shared_gate; /* [n_tok, d_shared] products */
    const float *shared_up;
    float shared_clamp;
    struct ds4_packed shared_middle; /* [n_tok] rows of d_shared */
    const uint8_t *shared_down;      /* Q8_0 */
    size_t shared_row_bytes;

    struct ds4_dev_mat y;
    float *part; /* [slots, d]: several tokens' down products, summed by moe.cu */
};

/* The slots of a step of one token: lane l holds slot l's expert and weight, experts rising. */
#define DS4_ONE_SLOTS 32
struct ds4_one_slots {
    int32_t expert;
    float weight;
    int32_t n; /* in every lane */
};

static __device__ __forceinline__ struct ds4_one_slots ds4_one_slots_of(const struct ds4_experts &p)
{
    const int lane = threadIdx.x % 32;
    const bool use = lane < p.n_used;
    const int32_t e = use ? p.id[lane] : 0;
    const float w = use ? p.id_weight[lane] : 0.0f;
    bool valid = use && e != DS4_EXPERT_ELSEWHERE && p.batch.entry[p.batch.entry_of[0]].active;
    struct ds4_one_slots slots = {0, 0.0f, 0};
    int32_t rank = 0;
    uint32_t all;

    if (valid && (e < 0 || e >= p.n_expert)) {
        *p.batch.wrong = DS4_DEV_WRONG_EXPERT;
        valid = false;
    }
    all = __ballot_sync(0xffffffffu, valid);
    for (int32_t u = 0; u < p.n_used; u++) {
        const int32_t other = __shfl_sync(0xffffffffu, e, u);

        rank += (all >> u & 1) != 0 && (other < e || (other == e && u < lane));
    }
    for (int32_t u = 0; u < p.n_used; u++) {
        const int32_t at = __shfl_sync(0xffffffffu, rank, u);
        const int32_t expert = __shfl_sync(0xffffffffu, e, u);
        const float weight = __shfl_sync(0xffffffffu, w, u);

        if ((all >> u & 1) != 0 && at == lane) {
            slots.expert = expert;
            slots.weight = weight;
        }
    }
    slots.n = __popc(all);
    return slots;
}

/* As on the CPU: comparisons that let a NaN pass. */
static __device__ __forceinline__ float ds4_middle_value(float g, float u, float clamp,
                                                         float weight)
{
    g = g > clamp ? clamp : g; /* from above only */
    u = u > clamp ? clamp : u;
    u = u < -clamp ? -clamp : u;
    return g / (1.0f + expf(-g)) * u * weight;
}

/* The experts of a chunk (slab.cuh): a product over groups of slots, its inputs packed as bf16 (FORM_TILE).
 * With `middle` its two matrices are gate and up, and the middle rows of the slots leave packed in the same
 * form; without, f32 leaves to p.y. */
struct ds4_slab {
    struct ds4_product p;
    float clamp;
    const float *weight; /* of a slot */
    struct ds4_packed middle;
};

typedef void (*ds4_slab_fn)(struct ds4_device *dev, const struct ds4_slab *a);

typedef void (*ds4_experts_fn)(struct ds4_device *dev, const struct ds4_experts *p);

#define DS4_EXPERT_FNS(X)                                                                          \
    X(q8_0, DS4_DTYPE_Q8_0)                                                                        \
    X(q2_k, DS4_DTYPE_Q2_K)                                                                        \
    X(q4_k, DS4_DTYPE_Q4_K)                                                                        \
    X(iq2_xxs, DS4_DTYPE_IQ2_XXS)                                                                  \
    X(mxfp4, DS4_DTYPE_MXFP4)
#define DS4_DECLARE(name, dtype)                                                                   \
    void ds4_cuda_gate_##name(struct ds4_device *dev, const struct ds4_experts *p);                \
    void ds4_cuda_down_##name(struct ds4_device *dev, const struct ds4_experts *p);                \
    void ds4_cuda_slab_##name(struct ds4_device *dev, const struct ds4_slab *a);
DS4_EXPERT_FNS(DS4_DECLARE)
#undef DS4_DECLARE

#endif
