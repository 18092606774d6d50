/* Exact selection of the k largest scores (step 9: indexer rows, experts).
 *
 * Scores become unsigned keys of the same order; four passes over 8-bit digits find the key of rank k,
 * one more pass collects in rising index: everything above it and the first of those equal to it.
 * Linear in n, no sorting, and the result does not depend on how equal scores lie in memory. */
#include "kernels/cpu/cpu.h"

#define DS4_DIGIT_BITS 8
#define DS4_DIGITS     (1 << DS4_DIGIT_BITS)

/* Rising with the score; NaN is 0, below -inf. */
static uint32_t key_of(float score)
{
    uint32_t bits = ds4_bits_from_f32(score + 0.0f); /* -0 + 0 = +0 */

    if ((bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000))
        return 0;
    return (bits & UINT32_C(0x80000000)) != 0 ? ~bits : bits | UINT32_C(0x80000000);
}

/* The key of rank k, and how many equal to it belong to the k largest. */
static uint32_t kth_key(const float *score, int32_t n, int32_t k, int32_t *n_equal)
{
    uint32_t prefix = 0, mask = 0;

    for (int shift = 32 - DS4_DIGIT_BITS; shift >= 0; shift -= DS4_DIGIT_BITS) {
        int32_t count[DS4_DIGITS] = {0};
        int digit = DS4_DIGITS - 1;

        for (int32_t i = 0; i < n; i++) {
            uint32_t key = key_of(score[i]);

            if ((key & mask) == prefix)
                count[key >> shift & (DS4_DIGITS - 1)]++;
        }
        for (; digit > 0 && count[digit] < k; digit--)
            k -= count[digit];
        prefix |= (uint32_t)digit << shift;
        mask |= (uint32_t)(DS4_DIGITS - 1) << shift;
    }
    *n_equal = k;
    return prefix;
}

int32_t ds4_cpu_top_k(const float *score, int32_t n, int32_t k, int32_t *sel)
{
    int32_t n_equal, n_sel = 0;
    uint32_t least;

    if (n <= k) {
        for (int32_t i = 0; i < n; i++)
            sel[i] = i;
        return n;
    }
    least = kth_key(score, n, k, &n_equal);
    for (int32_t i = 0; i < n && n_sel < k; i++) {
        uint32_t key = key_of(score[i]);

        if (key > least || (key == least && n_equal-- > 0))
            sel[n_sel++] = i;
    }
    return n_sel;
}
