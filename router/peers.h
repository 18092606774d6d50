/* Who keeps knocking with wrong keys: counts refusals per client address, so that a client that repeats
 * them for ever gets 429 and waits, and the log is not its to fill.
 *
 * The table is fixed: an address has one place by its hash and takes it from whoever had it, so many
 * addresses cost no memory and the worst that happens is a count that starts again.  IPv6 clients are told
 * apart by their /64.  A right key is never refused for what others of that address did. */
#ifndef DS4_ROUTER_PEERS_H
#define DS4_ROUTER_PEERS_H

#include <stdbool.h>
#include <stdint.h>

#define DS4_PEERS           1024
#define DS4_PEER_FREE       100 /* refusals of one address that are answered as what they are ... */
#define DS4_PEER_WINDOW_MS  60000 /* ... within so long */
#define DS4_PEER_ADDR_BYTES 16

struct ds4_peers {
    struct {
        uint8_t address[DS4_PEER_ADDR_BYTES];
        int64_t since_ns; /* of the window; 0 = the place is free */
        uint32_t n;
    } place[DS4_PEERS];
    uint64_t seed; /* random: nobody can choose whom to displace */
};

struct sockaddr;
/* Counts a refusal; true if the address has had more than DS4_PEER_FREE in its window. */
bool ds4_peers_refused(struct ds4_peers *peers, const struct sockaddr *address, int64_t now_ns);

#endif
