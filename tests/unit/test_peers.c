/* Refusals per address: who is told to wait, and that others are not. */
#include "router/peers.h"

#include "common/clock.h"

#include <arpa/inet.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define NOW (1000 * DS4_NS_PER_SEC)

static bool refused(struct ds4_peers *peers, const char *text, int64_t now_ns)
{
    struct sockaddr_storage address = {0};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    struct sockaddr_in v4 = {.sin_family = AF_INET};

    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1) {
        memcpy(&address, &v4, sizeof(v4));
    } else {
        assert_int_equal(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
        memcpy(&address, &v6, sizeof(v6));
    }
    return ds4_peers_refused(peers, (struct sockaddr *)&address, now_ns);
}

static void an_address_is_limited_after_its_free_refusals_and_for_a_minute(void **state)
{
    struct ds4_peers *peers = calloc(1, sizeof(*peers));

    (void)state;
    for (int i = 0; i < DS4_PEER_FREE; i++)
        assert_false(refused(peers, "192.0.2.7", NOW + i));
    assert_true(refused(peers, "192.0.2.7", NOW + 100));
    assert_true(refused(peers, "192.0.2.7", NOW + 59 * DS4_NS_PER_SEC));
    assert_false(refused(peers, "192.0.2.8", NOW + 59 * DS4_NS_PER_SEC));
    assert_false(refused(peers, "192.0.2.7", NOW + 61 * DS4_NS_PER_SEC));
    free(peers);
}

static void addresses_of_one_v6_net_are_one_client(void **state)
{
    struct ds4_peers *peers = calloc(1, sizeof(*peers));
    char text[64];

    (void)state;
    for (int i = 0; i < DS4_PEER_FREE; i++) {
        (void)snprintf(text, sizeof(text), "2001:db8:1:2::%x", i + 1);
        assert_false(refused(peers, text, NOW));
    }
    assert_true(refused(peers, "2001:db8:1:2:ffff::1", NOW));
    assert_false(refused(peers, "2001:db8:1:3::1", NOW));
    free(peers);
}

static void a_v4_client_is_the_same_on_a_v6_socket(void **state)
{
    struct ds4_peers *peers = calloc(1, sizeof(*peers));

    (void)state;
    for (int i = 0; i < DS4_PEER_FREE; i++)
        assert_false(refused(peers, i % 2 ? "192.0.2.7" : "::ffff:192.0.2.7", NOW));
    assert_true(refused(peers, "192.0.2.7", NOW));
    assert_false(refused(peers, "::ffff:192.0.2.9", NOW));
    free(peers);
}

static void many_addresses_take_each_others_places_and_nothing_else(void **state)
{
    struct ds4_peers *peers = calloc(1, sizeof(*peers));
    char text[32];
    int n_limited = 0;

    (void)state;
    for (int i = 0; i < 100000; i++) {
        (void)snprintf(text, sizeof(text), "10.%d.%d.%d", i >> 16, i >> 8 & 255, i & 255);
        n_limited += refused(peers, text, NOW);
    }
    assert_int_equal(n_limited, 0);
    free(peers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_address_is_limited_after_its_free_refusals_and_for_a_minute),
        cmocka_unit_test(addresses_of_one_v6_net_are_one_client),
        cmocka_unit_test(a_v4_client_is_the_same_on_a_v6_socket),
        cmocka_unit_test(many_addresses_take_each_others_places_and_nothing_else),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
