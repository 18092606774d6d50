/* Checks a model file against every rule of the loader, reporting all findings. */
#ifndef DS4_WORKER_GGUF_CHECK_H
#define DS4_WORKER_GGUF_CHECK_H

#include "common/model_tensors.h"

/* Calls report once per finding and returns their number; 0 = a good file.  A broken container is one
 * finding, because nothing behind it can be trusted.  `tensors` also reads all weights and looks for
 * scales and values that are NaN or infinite (minutes for a large file). */
int32_t ds4_gguf_check(const char *path, bool tensors, ds4_finding_fn report, void *arg);

#endif
