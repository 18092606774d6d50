/* Deliberate faults: which text arms them, when they act.  In a build without them, that they are gone. */
#include "common/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#ifdef DS4_FAULTS

static void set(const char *text, int32_t stage)
{
    struct ds4_err err = {0};

    assert_int_equal(ds4_fault_set(text, stage, &err), 0);
}

static void a_point_acts_at_its_nth_passage_only(void **state)
{
    (void)state;
    set("step_msg_drop:3:1", 1);
    for (int passage = 1; passage <= 5; passage++)
        assert_int_equal(DS4_FAULT_POINT(STEP_MSG_DROP), passage == 3);
    assert_false(DS4_FAULT_POINT(STEP_MSG_DUP));
}

static void a_plus_makes_it_act_from_then_on(void **state)
{
    (void)state;
    set("step_msg_drop:2+:0", 0);
    for (int passage = 1; passage <= 4; passage++)
        assert_int_equal(DS4_FAULT_POINT(STEP_MSG_DROP), passage >= 2);
}

static void other_stages_are_left_alone(void **state)
{
    (void)state;
    set("step_msg_drop:1:1", 0);
    assert_false(DS4_FAULT_POINT(STEP_MSG_DROP));
    set("step_msg_drop:1:router,step_msg_dup:1:2", DS4_FAULT_ROUTER);
    assert_true(DS4_FAULT_POINT(STEP_MSG_DROP));
    assert_false(DS4_FAULT_POINT(STEP_MSG_DUP));
}

static void several_points_are_armed_at_once(void **state)
{
    (void)state;
    set("step_msg_drop:1:4,step_msg_dup:2:4", 4);
    assert_true(DS4_FAULT_POINT(STEP_MSG_DROP));
    assert_false(DS4_FAULT_POINT(STEP_MSG_DUP));
    assert_true(DS4_FAULT_POINT(STEP_MSG_DUP));
}

static void text_that_arms_nothing_is_refused(void **state)
{
    static const char *const wrong[] = {
        "",
        "step_msg_drop",
        "step_msg_drop:1",
        "step_msg_drop:0:1",
        "step_msg_drop:-1:1",
        "step_msg_drop:1:one",
        "step_msg_drop:1:1 ",
        "no_such_point:1:1",
        "step_msg:1:1",
        "step_msg_drop:99999999999999999999:1",
        "step_msg_drop:1:1,",
        "step_msg_drop:1:1,no_such_point:1:1",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct ds4_err err = {0};

        assert_int_equal(ds4_fault_set(wrong[i], 1, &err), -1);
        assert_int_equal(err.code, DS4_E_INVALID);
    }
    set(NULL, 1);
    assert_false(DS4_FAULT_POINT(STEP_MSG_DROP));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_point_acts_at_its_nth_passage_only),
        cmocka_unit_test(a_plus_makes_it_act_from_then_on),
        cmocka_unit_test(other_stages_are_left_alone),
        cmocka_unit_test(several_points_are_armed_at_once),
        cmocka_unit_test(text_that_arms_nothing_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

static void this_build_has_no_faults(void **state)
{
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(setenv("DS4_FAULT", "step_msg_drop:1:0", 1), 0);
    assert_int_equal(ds4_fault_init(0, &err), 0);
    assert_false(DS4_FAULT_POINT(STEP_MSG_DROP));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(this_build_has_no_faults)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
