/* Writes small GGUF files for tests: correct ones by default, wrong ones on request.
 *
 * Two levels: raw little-endian pieces into a buffer (for files that must be wrong), and a writer that
 * collects metadata and tensors and lays them out.  Running out of memory ends the test program. */
#ifndef DS4_TESTS_GGUF_WRITER_H
#define DS4_TESTS_GGUF_WRITER_H

#include "common/buf.h"
#include "common/gguf.h"

/* ---- raw pieces -------------------------------------------------------------------------------- */
void ds4_gguf_put_u16(struct ds4_buf *out, uint16_t value);
void ds4_gguf_put_u32(struct ds4_buf *out, uint32_t value);
void ds4_gguf_put_u64(struct ds4_buf *out, uint64_t value);
void ds4_gguf_put_f32(struct ds4_buf *out, float value);
void ds4_gguf_put_text(struct ds4_buf *out, const char *text); /* length, bytes */
/* Magic, version 3 and the two counts. */
void ds4_gguf_put_prefix(struct ds4_buf *out, uint64_t n_tensor, uint64_t n_kv);

/* ---- writer ------------------------------------------------------------------------------------ */
struct ds4_gguf_writer {
    struct ds4_buf kv;
    struct ds4_buf tensors;
    uint64_t n_kv;
    uint64_t n_tensor;
    uint64_t data_bytes; /* extent of the data section so far, padded */
    uint64_t last_bytes; /* unpadded end of the last tensor */
};

void ds4_gguf_writer_init(struct ds4_gguf_writer *w);
void ds4_gguf_writer_deinit(struct ds4_gguf_writer *w);

void ds4_gguf_write_u16(struct ds4_gguf_writer *w, const char *key, uint16_t value);
void ds4_gguf_write_u32(struct ds4_gguf_writer *w, const char *key, uint32_t value);
void ds4_gguf_write_i32(struct ds4_gguf_writer *w, const char *key, int32_t value);
void ds4_gguf_write_u64(struct ds4_gguf_writer *w, const char *key, uint64_t value);
void ds4_gguf_write_f32(struct ds4_gguf_writer *w, const char *key, float value);
void ds4_gguf_write_bool(struct ds4_gguf_writer *w, const char *key, uint8_t value);
void ds4_gguf_write_text(struct ds4_gguf_writer *w, const char *key, const char *value);
void ds4_gguf_write_i32s(struct ds4_gguf_writer *w, const char *key, const int32_t *v, uint64_t n);
void ds4_gguf_write_f32s(struct ds4_gguf_writer *w, const char *key, const float *v, uint64_t n);
void ds4_gguf_write_texts(struct ds4_gguf_writer *w, const char *key, const char *const *v,
                          uint64_t n);
/* An entry of another file, as it is. */
void ds4_gguf_write_copy(struct ds4_gguf_writer *w, const struct ds4_gguf_kv *kv);

/* A tensor of `type` at the next free offset; its size follows from the type (0 if unknown). */
void ds4_gguf_write_tensor(struct ds4_gguf_writer *w, const char *name, uint32_t type, int n_dims,
                           const int64_t *ne);

/* Writes the file; tensor data is zero (a hole).  Returns the offset of the data section. */
uint64_t ds4_gguf_writer_save(const struct ds4_gguf_writer *w, const char *path);
/* The header alone, padded to the data section. */
void ds4_gguf_writer_header(const struct ds4_gguf_writer *w, struct ds4_buf *out);

/* ---- files ------------------------------------------------------------------------------------- */
/* Bytes as a file in memory; *fd must be closed by the caller. Writes "/proc/self/fd/N" to path. */
void ds4_gguf_memory_file(const void *bytes, size_t n, char path[32], int *fd);

#endif
