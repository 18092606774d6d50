/* The arithmetic of common/synth_block.h, for every compiler that makes weights: common/synth_block.c
 * and the GPU's kernel include it, and the bytes must be the same.  The includer defines
 *
 *   SYNTH_FN             how a function is declared
 *   SYNTH_HALF(x)        f32 -> f16 bits, to nearest even
 *   SYNTH_MUL_ADD(a,b,c) a * b + c with two roundings
 *
 * Apart from that only operations that round once and alike everywhere: no sum of products outside
 * SYNTH_MUL_ADD but where the product is exact. */

/* Root mean squares of a uniformly drawn code. */
#define SYNTH_RMS_I8 73.9f /* -128..127 */
#define SYNTH_RMS_IQ2                                                                              \
    427.0f /* (2 s + 1) over s = 0..15 is 18.47, the codebook's magnitudes 23.12 */
#define SYNTH_RMS_Q2_K 10.15f /* s over 1..15 is 9.07 (15 twice), (v - 1.5) over 0..3 is 1.118 */

/* splitmix64 */
SYNTH_FN uint64_t synth_next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Uniform in [-1, 1), from 24 bits: the product is exact. */
SYNTH_FN float synth_uniform(uint64_t *state)
{
    return (float)(synth_next(state) >> 40) * 0x1p-23f - 1.0f;
}

SYNTH_FN void synth_u16(uint8_t *dst, uint32_t value)
{
    dst[0] = (uint8_t)value;
    dst[1] = (uint8_t)(value >> 8);
}

SYNTH_FN void synth_bytes(uint64_t *state, uint8_t *dst, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += 8) {
        uint64_t bits = synth_next(state);

        for (uint32_t b = i; b < i + 8 && b < n; b++) {
            dst[b] = (uint8_t)bits;
            bits >>= 8;
        }
    }
}

/* Experts of token t: distinct, evenly spread (start and stride are drawn per token). */
SYNTH_FN uint32_t synth_hash_entry(const struct ds4_synth_recipe *r, uint64_t index)
{
    uint64_t state = r->key + index / r->n_used;
    uint64_t start = synth_next(&state) % r->n_expert;
    uint64_t stride = 1 + synth_next(&state) % (r->n_expert / r->n_used);

    return (uint32_t)((start + index % r->n_used * stride) % r->n_expert);
}

/* Block `index`; an odd multiplier, so that no two blocks share a start. */
SYNTH_FN void synth_block(const struct ds4_synth_recipe *r, uint64_t index, uint8_t *dst)
{
    uint64_t state = r->key + index * UINT64_C(0xd1342543de82ef95);
    float wobble = 1 + 0.25f * synth_uniform(&state); /* real scales differ from block to block */
    uint32_t bits;
    float value;

    switch (r->dtype) {
    case DS4_DTYPE_Q8_0:
        synth_bytes(&state, dst + 2, r->block_bytes - 2);
        synth_u16(dst, SYNTH_HALF(r->deviation * wobble / SYNTH_RMS_I8));
        return;
    case DS4_DTYPE_IQ2_XXS: /* y = d / 8 * (2 s + 1) * magnitude */
        synth_bytes(&state, dst + 2, r->block_bytes - 2);
        synth_u16(dst, SYNTH_HALF(r->deviation * wobble * 8 / SYNTH_RMS_IQ2));
        return;
    case DS4_DTYPE_Q2_K: /* equal nibbles and dmin = 1.5 d centre the four levels on zero */
        synth_bytes(&state, dst, r->block_bytes - 4);
        for (int g = 0; g < 16; g++) {
            uint32_t s = dst[g] % 15u + 1;

            dst[g] = (uint8_t)(s | s << 4);
        }
        synth_u16(dst + 80, SYNTH_HALF(r->deviation * wobble / SYNTH_RMS_Q2_K));
        synth_u16(dst + 82, SYNTH_HALF(1.5f * r->deviation * wobble / SYNTH_RMS_Q2_K));
        return;
    case DS4_DTYPE_MXFP4:
        synth_bytes(&state, dst + 1, r->block_bytes - 1);
        value = (float)(synth_next(&state) >> 40) * 0x1p-24f;
        dst[0] = (uint8_t)(r->e8m0 + (value < r->above ? 1 : 0));
        return;
    case DS4_DTYPE_I32:
        bits = synth_hash_entry(r, index);
        synth_u16(dst, bits);
        synth_u16(dst + 2, bits >> 16);
        return;
    default:
        break;
    }
    value = SYNTH_MUL_ADD(r->half, synth_uniform(&state), r->centre);
    if (r->block_bytes == 2) {
        synth_u16(dst, SYNTH_HALF(value));
        return;
    }
    memcpy(&bits, &value, sizeof(bits));
    synth_u16(dst, bits);
    synth_u16(dst + 2, bits >> 16);
}
