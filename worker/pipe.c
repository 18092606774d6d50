/* What all pipes share: look-up by name, limits of a configuration, the token record's checks.  The only
 * file that sees whether NCCL is built in.
 *
 * A record has the same size at every step of a generation, whatever is in it: a transport that does
 * not negotiate sizes hangs at the first that differs. */
#include "worker/pipe.h"

#include "common/crc32c.h"

#include <inttypes.h>
#include <string.h>

#ifdef DS4_HAVE_NCCL
extern const struct ds4_pipe_ops ds4_pipe_nccl;
#endif

const struct ds4_pipe_ops *ds4_pipe_find(const char *name)
{
    if (strcmp(name, "shm") == 0)
        return &ds4_pipe_shm;
#ifdef DS4_HAVE_NCCL
    if (strcmp(name, "nccl") == 0)
        return &ds4_pipe_nccl;
#endif
    return NULL;
}

int ds4_pipe_check_config(const struct ds4_pipe_config *c, struct ds4_err *err)
{
    size_t slot_bytes;

    if (c->n_stage < 1 || c->n_stage > DS4_MAX_STAGES || c->stage < 0 || c->stage >= c->n_stage ||
        c->row_bytes < 1 || c->max_step_tok < 1 || c->max_step_tok > DS4_MAX_STEP_TOK ||
        c->max_seqs < 1 || c->max_seqs > DS4_MAX_STEP_ENTRIES || c->depth < 1 ||
        c->depth > DS4_MAX_STAGES)
        return ds4_fail(err, DS4_E_INVALID,
                        "pipe of stage %d of %d: rows of %zu bytes, %d per step, %d sequences, "
                        "depth %d",
                        (int)c->stage, (int)c->n_stage, c->row_bytes, (int)c->max_step_tok,
                        (int)c->max_seqs, (int)c->depth);
    return ds4_mul_size((size_t)c->max_step_tok, c->row_bytes, "pipe slot", &slot_bytes, err);
}

size_t ds4_pipe_record_bytes(const struct ds4_pipe_config *config)
{
    return offsetof(struct ds4_token_record, entry) +
           (size_t)config->max_seqs * sizeof(struct ds4_record_entry);
}

int ds4_pipe_check_publish(const struct ds4_pipe_config *config,
                           const struct ds4_token_record *record, struct ds4_err *err)
{
    if (record->generation != config->generation || record->n_entry > (uint32_t)config->max_seqs)
        return ds4_fail(err, DS4_E_BUG,
                        "record of %u entries of generation %u published by stage %d",
                        record->n_entry, record->generation, (int)config->stage);
    return 0;
}

void ds4_pipe_seal_record(const struct ds4_pipe_config *config,
                          const struct ds4_token_record *record, struct ds4_token_record *to)
{
    size_t bytes = ds4_pipe_record_bytes(config);

    memcpy(to, record, bytes);
    to->crc = 0;
    to->crc = ds4_crc32c(0, to, bytes);
}

int ds4_pipe_check_record(const struct ds4_pipe_config *config, struct ds4_token_record *record,
                          int64_t step_no, struct ds4_err *err)
{
    uint32_t crc = record->crc;

    record->crc = 0;
    if (ds4_crc32c(0, record, ds4_pipe_record_bytes(config)) != crc)
        return ds4_fail(err, DS4_E_CORRUPT, "token record of step %" PRId64 ": wrong checksum",
                        record->step_no);
    record->crc = crc;
    if (record->generation != config->generation || record->step_no != step_no ||
        record->n_entry > (uint32_t)config->max_seqs)
        return ds4_fail(err, DS4_E_PROTOCOL,
                        "token record of generation %u step %" PRId64 " with %u entries, expected "
                        "generation %u step %" PRId64,
                        record->generation, record->step_no, record->n_entry, config->generation,
                        step_no);
    return 0;
}
