/* The dialect of POST /v1/chat/completions. */
#ifndef DS4_ROUTER_API_OPENAI_CHAT_H
#define DS4_ROUTER_API_OPENAI_CHAT_H

#include "router/api/dialect.h"

extern const struct ds4_dialect ds4_dialect_openai_chat;

#endif
