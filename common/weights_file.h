/* A model file, or a split set of them, opened read-only: name -> {dtype, shape, bytes}.
 *
 * ds4_weights_open takes any file of a set PREFIX-00001-of-00003.gguf and opens all of it; metadata is
 * that of the first file.  The object owns descriptors, mappings and metadata; every pointer obtained
 * from it is borrowed until ds4_weights_close.  After open it is read-only: any thread may use it.
 *
 * "synth:SHAPE:QUANT:SEED" opens a synthetic model as if it were a file (common/synth.h): metadata and
 * tensor table are those of the file that `ds4-gguf synth` would write, tensors are generated as they
 * are read.  Nothing is stored, and nothing can be mapped.
 *
 * A file that shrinks later: ds4_weights_read reports it as an error.  Through a mapping the kernel
 * sends SIGBUS instead, which no return value can express, so a program that uses DS4_WEIGHTS_MMAP
 * calls ds4_weights_sigbus_install() once at start. */
#ifndef DS4_COMMON_WEIGHTS_FILE_H
#define DS4_COMMON_WEIGHTS_FILE_H

#include "common/gguf.h"
#include "common/synth_block.h"

#define DS4_WEIGHTS_MAX_SHARDS  1024
#define DS4_WEIGHTS_EXIT_SIGBUS 78 /* "model error": restarting does not help */

enum ds4_weights_access {
    DS4_WEIGHTS_MMAP,  /* ds4_weights_data and ds4_weights_read */
    DS4_WEIGHTS_PREAD, /* ds4_weights_read only; nothing is mapped */
};

struct ds4_weights_file;

/* NULL with DS4_E_IO (cannot be opened or read), DS4_E_CORRUPT (breaks the format, an incomplete or
 * inconsistent set) or DS4_E_NOMEM; the message begins with the file's name. */
struct ds4_weights_file *ds4_weights_open(const char *path, enum ds4_weights_access access,
                                          struct ds4_err *err) DS4_MUST_CHECK;
void ds4_weights_close(struct ds4_weights_file *wf); /* NULL is fine */

/* How to make the tensor, for devices that generate it themselves; NULL for tensors of a file. */
const struct ds4_synth_recipe *ds4_weights_recipe(const struct ds4_weights_file *wf,
                                                  const struct ds4_tensor_info *info);

/* Metadata of the first file; read it with the ds4_gguf_get_* functions. */
const struct ds4_gguf *ds4_weights_meta(const struct ds4_weights_file *wf);
int32_t ds4_weights_n_shard(const struct ds4_weights_file *wf);

/* Tensors by name (NULL if there is none) and by index, in file order over all shards. */
const struct ds4_tensor_info *ds4_weights_find(const struct ds4_weights_file *wf, const char *name);
size_t ds4_weights_n_tensor(const struct ds4_weights_file *wf);
const struct ds4_tensor_info *ds4_weights_at(const struct ds4_weights_file *wf, size_t i);

/* The tensor's bytes in the mapping (info->bytes of them, aligned to the file's alignment), or NULL:
 * DS4_E_BUG without a mapping (generated ones have none), DS4_E_INVALID for a tensor of unknown size, DS4_E_IO if the file is
 * now shorter than it was. */
const void *ds4_weights_data(const struct ds4_weights_file *wf, const struct ds4_tensor_info *info,
                             struct ds4_err *err) DS4_MUST_CHECK;

/* Copies bytes [offset, offset + n) of the tensor to dst.  DS4_E_INVALID outside the tensor, DS4_E_IO
 * if the file is shorter than it was or cannot be read. */
int ds4_weights_read(const struct ds4_weights_file *wf, const struct ds4_tensor_info *info,
                     uint64_t offset, size_t n, void *dst, struct ds4_err *err) DS4_MUST_CHECK;

/* Installs a SIGBUS handler: a fault inside one of our mappings prints one line and ends the process
 * with DS4_WEIGHTS_EXIT_SIGBUS; any other SIGBUS takes its default action. */
int ds4_weights_sigbus_install(struct ds4_err *err) DS4_MUST_CHECK;

#endif
