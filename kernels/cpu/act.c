/* Activations to int8 blocks for fast products (step 9).
 *
 * By 32: d = amax / 127, q = rint(x / d) as x * (1 / d), ties to even; the scale stays f32 (ggml
 * stores f16 and loses up to 2^-11 of it).  By 256, the K-quants' form: scaled by the signed value of
 * largest magnitude (the first on ties) so that it becomes -127, plus sums of 16.  A block with a
 * non-finite value gets a NaN scale: the product is NaN, never a plausible number. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/math.h"

#include <string.h>

enum ds4_act_kind ds4_cpu_act_kind(enum ds4_dtype weight)
{
    switch (weight) {
    case DS4_DTYPE_Q8_0:
    case DS4_DTYPE_Q4_0:
    case DS4_DTYPE_MXFP4:
        return DS4_ACT_32;
    case DS4_DTYPE_Q2_K:
    case DS4_DTYPE_Q3_K:
    case DS4_DTYPE_Q4_K:
    case DS4_DTYPE_Q5_K:
    case DS4_DTYPE_Q6_K:
    case DS4_DTYPE_IQ2_XXS:
        return DS4_ACT_256;
    case DS4_DTYPE_F32:
    case DS4_DTYPE_F16:
    case DS4_DTYPE_BF16:
    case DS4_DTYPE_I8:
    case DS4_DTYPE_I32:
    case DS4_N_DTYPES:
        break;
    }
    return DS4_ACT_NONE;
}

size_t ds4_cpu_act_bytes(enum ds4_act_kind kind, int32_t n)
{
    switch (kind) {
    case DS4_ACT_32:
        return ((size_t)n + 31) / 32 * sizeof(struct ds4_act32);
    case DS4_ACT_256:
        return ((size_t)n + 255) / 256 * sizeof(struct ds4_act256);
    case DS4_ACT_NONE:
        break;
    }
    return 0;
}

/* The value of largest magnitude, the first on ties; NaN if any value is not finite. */
static float extreme(const float *x, int32_t n)
{
    float most = 0.0f, top = 0.0f;
    int finite = 1;

    for (int32_t i = 0; i < n; i++) {
        float magnitude = fabsf(x[i]);

        finite &= magnitude <= 0x1.fffffep127f;
        if (magnitude > most) {
            most = magnitude;
            top = x[i];
        }
    }
    return finite ? top : NAN;
}

static void quantise_32(const float *x, struct ds4_act32 *b)
{
    float most = fabsf(extreme(x, 32)), inverse;

    memset(b->q, 0, sizeof(b->q));
    b->d = most / 127.0f;
    inverse = b->d > 0.0f ? 1.0f / b->d : 0.0f; /* 0 too for NaN */
    if (!(inverse > 0.0f && inverse <= 0x1.fffffep127f)) {
        /* Below 1e-38 the inverse overflows: such a block is zero.  A NaN scale stays. */
        b->d = isnan(b->d) ? b->d : 0.0f;
        return;
    }
    for (int i = 0; i < 32; i++)
        b->q[i] = (int8_t)ds4_rint_f32(x[i] * inverse);
}

static void quantise_256(const float *x, struct ds4_act256 *b)
{
    float top = extreme(x, 256), inverse = -127.0f / top;

    memset(b, 0, sizeof(*b));
    if (!(fabsf(inverse) <= 0x1.fffffep127f)) { /* 0, tiny or NaN */
        b->d = isnan(top) ? top : 0.0f;
        return;
    }
    b->d = 1.0f / inverse;
    for (int i = 0; i < 256; i++) {
        float q = ds4_rint_f32(x[i] * inverse);

        b->q[i] = (int8_t)(q > 127.0f ? 127.0f : q);
        b->bsum[i / 16] = (int16_t)(b->bsum[i / 16] + b->q[i]);
    }
}

void ds4_cpu_act_quantise(enum ds4_act_kind kind, const float *x, int32_t n, void *act)
{
    struct ds4_act32 *small = act;
    struct ds4_act256 *super = act;

    if (kind == DS4_ACT_32) {
        for (int32_t b = 0; b < n / 32; b++)
            quantise_32(x + 32 * b, &small[b]);
    } else if (kind == DS4_ACT_256) {
        for (int32_t b = 0; b < n / 256; b++)
            quantise_256(x + 256 * b, &super[b]);
    }
}
