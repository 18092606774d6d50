/* Envelope of the wire (steps 6, 7 and 12).
 *
 * The envelope is written byte by byte: no struct is ever laid over wire bytes, so alignment and
 * byte order of the host do not matter.  Version is looked at before kind and sizes: a peer of
 * another version must hear "wire version 2, this side speaks 1", not "unknown kind 9". */
#include "proto/frame.h"

#include "proto/message.h"

#include <string.h>

static const uint8_t magic[4] = {'D', 'S', '4', 'W'};

enum { AT_VERSION = 4, AT_KIND = 6, AT_GENERATION = 8, AT_SEQUENCE = 12, AT_PAYLOAD = 20 };

struct kind_row {
    enum ds4_frame_kind kind;
    const char *text;
    enum ds4_frame_sender sender;
};

static const struct kind_row kinds[] = {
#define SENDER_W                             DS4_FROM_WORKER
#define SENDER_R                             DS4_FROM_ROUTER
#define KIND_ROW(kind, text, number, sender) {kind, text, SENDER_##sender},
    DS4_FRAME_KINDS(KIND_ROW)
#undef KIND_ROW
};

static const struct kind_row *find_kind(uint64_t number)
{
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if ((uint64_t)kinds[i].kind == number)
            return &kinds[i];
    return NULL;
}

static void put(uint8_t *at, uint64_t value, size_t n)
{
    for (size_t i = 0; i < n; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t *at, size_t n)
{
    uint64_t value = 0;

    for (size_t i = 0; i < n; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

const char *ds4_frame_kind_name(enum ds4_frame_kind kind)
{
    const struct kind_row *row = find_kind((uint64_t)kind);

    return row == NULL ? "?" : row->text;
}

void ds4_frame_write(const struct ds4_frame *frame, uint8_t envelope[DS4_ENVELOPE_BYTES])
{
    memcpy(envelope, magic, sizeof(magic));
    put(envelope + AT_VERSION, DS4_WIRE_VERSION, 2);
    put(envelope + AT_KIND, (uint64_t)frame->kind, 2);
    put(envelope + AT_GENERATION, frame->generation, 4);
    put(envelope + AT_SEQUENCE, frame->sequence, 8);
    put(envelope + AT_PAYLOAD, frame->payload_bytes, 4);
}

int ds4_frame_read(const void *envelope, size_t n, size_t n_payload, enum ds4_frame_sender sender,
                   struct ds4_frame *out, struct ds4_err *err)
{
    const uint8_t *at = envelope;
    const struct kind_row *row;
    unsigned version, number;
    uint32_t announced;

    if (n != DS4_ENVELOPE_BYTES)
        return ds4_fail(err, DS4_E_PROTOCOL, "envelope of %zu bytes, must be %d", n,
                        DS4_ENVELOPE_BYTES);
    if (memcmp(at, magic, sizeof(magic)) != 0)
        return ds4_fail(err, DS4_E_PROTOCOL, "not a ds4 frame: wrong magic");
    version = (unsigned)get(at + AT_VERSION, 2);
    if (version != DS4_WIRE_VERSION)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s speaks wire version %u, this %s speaks %d",
                        sender == DS4_FROM_WORKER ? "worker" : "router", version,
                        sender == DS4_FROM_WORKER ? "router" : "worker", DS4_WIRE_VERSION);
    number = (unsigned)get(at + AT_KIND, 2);
    row = find_kind(number);
    if (row == NULL)
        return ds4_fail(err, DS4_E_PROTOCOL, "unknown frame kind %u", number);
    if (row->sender != sender)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s frame from a %s", row->text,
                        sender == DS4_FROM_WORKER ? "worker" : "router");
    announced = (uint32_t)get(at + AT_PAYLOAD, 4);
    if (announced != n_payload)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s frame announces %u payload bytes, has %zu",
                        row->text, announced, n_payload);
    if (n_payload > DS4_MAX_FRAME_BYTES)
        return ds4_fail(err, DS4_E_PROTOCOL, "%s frame of %zu bytes, at most %zu", row->text,
                        n_payload, DS4_MAX_FRAME_BYTES);
    *out = (struct ds4_frame){
        .kind = row->kind,
        .generation = (uint32_t)get(at + AT_GENERATION, 4),
        .sequence = get(at + AT_SEQUENCE, 8),
        .payload_bytes = announced,
    };
    return 0;
}

static bool needs_generation(enum ds4_frame_kind kind)
{
    switch (kind) {
    case DS4_FRAME_STEP:
    case DS4_FRAME_TOKENS:
    case DS4_FRAME_STEP_DONE:
    case DS4_FRAME_KV_WRITE:
    case DS4_FRAME_KV_READ:
    case DS4_FRAME_KV_UNLINK:
    case DS4_FRAME_KV_DONE:
        return true;
    default:
        return false;
    }
}

bool ds4_frame_admit(struct ds4_frame_gate *gate, const struct ds4_frame *frame)
{
    if (frame->sequence != 0 && frame->sequence > gate->next_sequence)
        gate->n_lost += frame->sequence - gate->next_sequence;
    gate->next_sequence = frame->sequence + 1;
    if (!needs_generation(frame->kind))
        return true;
    if (frame->generation != 0 && frame->generation == gate->generation)
        return true;
    gate->n_stale++;
    return false;
}
