/* The backend's own functions against libm in double precision, and at the edges. */
#include "kernels/cpu/math.h"

#include "tests/support/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

/* Distance in units of the last place of the expected value's f32. */
static double ulps(float got, double want)
{
    double magnitude = fabs(want);
    int exponent;

    if ((double)got == want)
        return 0.0;
    frexp(magnitude < 0x1p-126 ? 0x1p-126 : magnitude, &exponent);
    return fabs((double)got - want) / ldexp(1.0, exponent - 24);
}

static void exp_is_within_two_ulps(void **state)
{
    double worst = 0.0;

    (void)state;
    for (double x = -103.0; x < 88.7; x += 0.000731) {
        float xf = (float)x;
        double error = ulps(ds4_expf(xf), exp((double)xf));

        worst = error > worst ? error : worst;
    }
    print_message("exp: at most %.3f ulp\n", worst);
    assert_true(worst <= 2.0);
    assert_true(ds4_expf(0.0f) == 1.0f);
    assert_true(ds4_expf(-INFINITY) == 0.0f);
    assert_true(ds4_expf(-200.0f) == 0.0f);
    assert_true(ds4_expf(INFINITY) == INFINITY);
    assert_true(ds4_expf(89.0f) == INFINITY);
    assert_true(isnan(ds4_expf(NAN)));
}

static void softplus_and_log_are_within_two_ulps(void **state)
{
    double worst_log = 0.0, worst_soft = 0.0;

    (void)state;
    for (float y = 0x1p-40f; y <= 1.0f; y *= 1.00037f) {
        double error = ulps(ds4_log1p_unit(y), log1p((double)y));

        worst_log = error > worst_log ? error : worst_log;
    }
    for (double x = -80.0; x < 80.0; x += 0.00173) {
        float xf = (float)x;
        double want = xf > 0 ? (double)xf + log1p(exp(-(double)xf)) : log1p(exp((double)xf));
        double error = ulps(ds4_softplus(xf), want);

        worst_soft = error > worst_soft ? error : worst_soft;
    }
    print_message("log1p: at most %.3f ulp; softplus: %.3f\n", worst_log, worst_soft);
    assert_true(worst_log <= 2.0);
    assert_true(worst_soft <= 4.0); /* exp and log in a row */
    assert_true(ds4_log1p_unit(0.0f) == 0.0f);
    assert_true(ds4_softplus(INFINITY) == INFINITY);
    assert_true(ds4_softplus(-INFINITY) == 0.0f);
    assert_true(isnan(ds4_softplus(NAN)));
}

static void route_strengths_match_the_published_values(void **state)
{
    static const struct {
        float logit;
        double strength;
    } rows[] = {{-2.0f, 0.356270}, {0.0f, 0.832555}, {1.5f, 1.304382}, {3.0f, 1.746020}};

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        assert_true(fabs(sqrt((double)ds4_softplus(rows[i].logit)) - rows[i].strength) < 1e-6);
}

static void sigmoid_and_silu_follow_their_formulas(void **state)
{
    (void)state;
    for (double x = -85.0; x < 85.0; x += 0.0057) {
        float xf = (float)x;
        double s = 1.0 / (1.0 + exp(-(double)xf));

        assert_true(ulps(ds4_sigmoid(xf), s) <= 3.0);
        assert_true(ulps(ds4_silu(xf), (double)xf * s) <= 3.0);
    }
    assert_true(ds4_silu(-1000.0f) == 0.0f);
    assert_true(ds4_silu(1000.0f) == 1000.0f);
    assert_true(isnan(ds4_silu(NAN)));
}

/* Angles of every size a position can make, multiples of pi/2 among them. */
static void sine_and_cosine_are_exact_over_the_whole_range(void **state)
{
    uint32_t seed = 1;
    double worst = 0.0;

    (void)state;
    for (int i = 0; i < 400000; i++) {
        float angle = (float)(ds4_test_next(&seed) >> 8) * 0x1p-24f;
        float s, c;
        double e;

        if (i % 4 == 0)
            angle *= 1048576.0f;
        else if (i % 4 == 1)
            angle *= 100.0f;
        else if (i % 4 == 2)
            angle = (float)((double)(i % 600000) * 1.5707963267948966);
        if (i % 8 >= 4)
            angle = -angle;
        ds4_sincosf(angle, &s, &c);
        e = ulps(s, sin((double)angle));
        worst = e > worst ? e : worst;
        e = ulps(c, cos((double)angle));
        worst = e > worst ? e : worst;
    }
    print_message("sine, cosine: at most %.4f ulp\n", worst);
    assert_true(worst <= 0.51);
}

static void sine_of_a_non_finite_angle_is_nan(void **state)
{
    float s, c;

    (void)state;
    ds4_sincosf(INFINITY, &s, &c);
    assert_true(isnan(s) && isnan(c));
    ds4_sincosf(NAN, &s, &c);
    assert_true(isnan(s) && isnan(c));
    ds4_sincosf(0.0f, &s, &c);
    assert_true(s == 0.0f && c == 1.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_two_ulps),
        cmocka_unit_test(softplus_and_log_are_within_two_ulps),
        cmocka_unit_test(route_strengths_match_the_published_values),
        cmocka_unit_test(sigmoid_and_silu_follow_their_formulas),
        cmocka_unit_test(sine_and_cosine_are_exact_over_the_whole_range),
        cmocka_unit_test(sine_of_a_non_finite_angle_is_nan),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
