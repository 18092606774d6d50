/* Refusals by address, in a table that does not grow. */
#include "router/peers.h"

#include "common/clock.h"

#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#include <xxhash.h>

#define DS4_V6_NET_BYTES 8 /* a customer has a /64 to choose addresses from */

/* IPv4 addresses stand where IPv6 maps them to. */
static void key_of(const struct sockaddr *address, uint8_t key[DS4_PEER_ADDR_BYTES])
{
    struct sockaddr_in6 v6;
    struct sockaddr_in v4;

    memset(key, 0, DS4_PEER_ADDR_BYTES);
    if (address->sa_family == AF_INET) {
        memcpy(&v4, address, sizeof(v4));
        memset(key + 10, 0xff, 2);
        memcpy(key + 12, &v4.sin_addr, sizeof(v4.sin_addr));
    } else if (address->sa_family == AF_INET6) {
        memcpy(&v6, address, sizeof(v6));
        memcpy(key, &v6.sin6_addr,
               IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) ? DS4_PEER_ADDR_BYTES : DS4_V6_NET_BYTES);
    }
}

bool ds4_peers_refused(struct ds4_peers *peers, const struct sockaddr *address, int64_t now_ns)
{
    uint8_t key[DS4_PEER_ADDR_BYTES];
    size_t at;

    key_of(address, key);
    at = XXH3_64bits_withSeed(key, sizeof(key), peers->seed) % DS4_PEERS;
    if (peers->place[at].since_ns == 0 || memcmp(peers->place[at].address, key, sizeof(key)) != 0 ||
        now_ns - peers->place[at].since_ns >= DS4_PEER_WINDOW_MS * DS4_NS_PER_MS) {
        memcpy(peers->place[at].address, key, sizeof(key));
        peers->place[at].since_ns = now_ns;
        peers->place[at].n = 0;
    }
    if (peers->place[at].n < UINT32_MAX)
        peers->place[at].n++;
    return peers->place[at].n > DS4_PEER_FREE;
}
