/* What the tests of the wire's codec share: memory, and random legal values from a seed. */
#ifndef DS4_TESTS_SUPPORT_WIRE_H
#define DS4_TESTS_SUPPORT_WIRE_H

#include "common/arena.h"
#include "common/buf.h"
#include "proto/message.h"

struct ds4_wire_fixture {
    struct ds4_arena arena; /* decoded messages */
    struct ds4_arena made;  /* random messages */
    struct ds4_buf buf;     /* the encoded one */
    uint64_t random;
};

/* cmocka's group set-up and tear-down: *state is the fixture. */
int ds4_wire_set_up(void **state);
int ds4_wire_tear_down(void **state);

/* Forgets messages and bytes, not the random state. */
void ds4_wire_start_over(struct ds4_wire_fixture *f);
struct ds4_str ds4_wire_payload(const struct ds4_wire_fixture *f);

uint64_t ds4_wire_next(struct ds4_wire_fixture *f);
int32_t ds4_wire_pick(struct ds4_wire_fixture *f, int32_t min, int32_t max);
float ds4_wire_pick_real(struct ds4_wire_fixture *f, float min, float max);
/* n ids from 0 to max, in `made`. */
int32_t *ds4_wire_pick_ids(struct ds4_wire_fixture *f, int32_t n, int32_t max);
/* Printable text of any length below cap, padded with NULs. */
void ds4_wire_pick_text(struct ds4_wire_fixture *f, char *text, size_t cap);
void ds4_wire_pick_id(struct ds4_wire_fixture *f, uint8_t id[DS4_ID_BYTES]);

#endif
