/* The router's end of the wire (steps 6 and 12): one ZeroMQ ROUTER socket driven from the uv loop.
 *
 *   <endpoint_dir>/router.sock   ipc; the folder belongs to us alone (mode 0700), unless an endpoint
 *                                is given: tcp for workers on other hosts, by key (bus_auth.h)
 *   <endpoint_dir>/router.lock   held while a router runs: two would steal each other's workers
 *
 * Workers are DEALERs named "stage-<N>-<boot id in hex>"; the name is checked against what they say.
 * Every frame is checked (proto/frame.h, proto/codec.h) before the cluster hears of it; what does not
 * pass is counted and dropped.  Each turn of the loop ends with ds4_cluster_tick, and a timer makes ten
 * turns a second certain.  Sends never block: a peer whose queue is full counts as gone. */
#ifndef DS4_ROUTER_BUS_H
#define DS4_ROUTER_BUS_H

#include "common/err.h"
#include "router/cluster.h"
#include "router/sched/sched.h"

struct ds4_bus;
struct uv_loop_s;

/* Creates the folder if needed and binds.  NULL with DS4_E_BUSY (another router holds the lock),
 * DS4_E_INVALID (a folder that others can enter, a path too long, keys), DS4_E_IO.  `loop` is borrowed and must
 * outlive the bus; metrics may be NULL. */
struct ds4_bus_config {
    const char *endpoint_dir;
    const char *endpoint;  /* "" or NULL = ipc in endpoint_dir */
    const char *curve_dir; /* of the keys; required with an endpoint that is not ipc */
    struct ds4_metrics *metrics;
};
struct ds4_bus *ds4_bus_open(struct uv_loop_s *loop, const struct ds4_bus_config *config,
                             struct ds4_err *err);

/* Where scheduler and cluster send; both ports point to the bus. */
struct ds4_sched_port ds4_bus_sched_port(struct ds4_bus *bus);
struct ds4_cluster_port ds4_bus_cluster_port(struct ds4_bus *bus);

/* From now on messages go to `cluster` (borrowed; NULL detaches) and it is ticked. */
void ds4_bus_attach(struct ds4_bus *bus, struct ds4_cluster *cluster);

/* Sends what is queued (for at most half a second), closes and frees.  The loop must run once more
 * afterwards to forget the handles. */
void ds4_bus_close(struct ds4_bus *bus);

#endif
