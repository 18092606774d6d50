/* Who may connect over tcp: ZeroMQ CURVE keys in a folder, as 40 characters a file (Z85).
 *
 *   router.secret, router.public     the router's pair
 *   worker.secret, worker.public     the workers' pair, one for all of them
 *
 * The router needs router.secret and worker.public, a worker router.public and worker.secret.  CURVE by
 * itself lets any client in that knows the router's public key; a responder to libzmq's questions (ZAP)
 * admits only the workers' key. */
#ifndef DS4_ROUTER_BUS_AUTH_H
#define DS4_ROUTER_BUS_AUTH_H

#include "common/err.h"

struct ds4_bus_auth;

/* Makes `socket`, which is not bound yet, a CURVE server of `context` and starts the responder, a thread.
 * NULL with DS4_E_IO or DS4_E_INVALID naming the file. */
struct ds4_bus_auth *ds4_bus_auth_start(void *context, void *socket, const char *dir,
                                        struct ds4_err *err) DS4_MUST_CHECK;
/* After zmq_ctx_shutdown, which ends the thread, and before zmq_ctx_term.  NULL is fine. */
void ds4_bus_auth_free(struct ds4_bus_auth *auth);

/* Writes both pairs into `dir`, which must exist; secrets are readable by the owner only.  Files that are
 * there are left alone: DS4_E_INVALID. */
int ds4_bus_auth_make_keys(const char *dir, struct ds4_err *err) DS4_MUST_CHECK;

#endif
