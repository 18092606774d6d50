/* Dialect of /v1/completions. */
#ifndef DS4_ROUTER_API_OPENAI_COMPLETIONS_H
#define DS4_ROUTER_API_OPENAI_COMPLETIONS_H

#include "router/api/dialect.h"

extern const struct ds4_dialect ds4_dialect_completions;

#endif
