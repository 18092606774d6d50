/* One thread between the driver's library and the control thread.
 *
 * It opens the library as well: with a driver that is dead already the very first call never returns.
 * Then it waits for Xids, a second at most, and reads the sensors every fifth turn; what it found is
 * copied under a lock that is never held over a call of the library.  What an Xid means for a rig is one
 * table (DS4_XIDS, rig notes and NVIDIA's list): those without a way back other than an operator's stay
 * in `trouble` for good. */
#include "worker/card_watch.h"

#include "common/clock.h"
#include "common/log.h"
#include "worker/nvml.h"
#include "worker/stage.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TURN_MS  1000
#define READ_MS  5000
#define STALE_MS 15000
#define END_MS   2500

struct ds4_card_watch {
    const char *library;
    char address[DS4_CARD_ADDRESS_BYTES];
    struct ds4_nvml *nvml; /* the thread's; NULL until the driver has answered */
    pthread_t thread;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    bool stop;
    bool ended;      /* the thread is on its last lines */
    int64_t read_ns; /* when `card` was filled */
    struct ds4_card_state card;
    struct ds4_err trouble; /* DS4_OK: none */
};

struct xid_rule {
    uint64_t number;
    bool lasting; /* no restart helps */
    const char *meaning;
};

/* In the order of enum ds4_xid; the last is every other. */
static const struct xid_rule rules[DS4_N_XID] = {
#define RULE(number, lasting, meaning) {number, lasting, meaning},
    DS4_XIDS(RULE)
#undef RULE
        {0, true, "see NVIDIA's list"}};

static int32_t index_of(uint64_t number)
{
    int32_t i = 0;

    while (i < DS4_XID_OTHER && rules[i].number != number)
        i++;
    return i;
}

static void take_xid(struct ds4_card_watch *watch, uint64_t number)
{
    int32_t at = index_of(number);

    ds4_log(DS4_LOG_ERROR, "card.xid", "xid=%" PRIu64 " lasting=%s message=\"%s\"", number,
            rules[at].lasting ? "yes" : "no", rules[at].meaning);
    pthread_mutex_lock(&watch->lock);
    watch->card.xid[at]++;
    if (rules[at].lasting && watch->trouble.code == DS4_OK)
        (void)ds4_fail(&watch->trouble, DS4_E_CORRUPT, "Xid %" PRIu64 ": %s", number,
                       rules[at].meaning);
    pthread_mutex_unlock(&watch->lock);
}

static void take_values(struct ds4_card_watch *watch)
{
    double value[DS4_N_CARD_SENSOR];
    struct ds4_err err = {0};
    int rc = ds4_nvml_read(watch->nvml, value, &err);

    pthread_mutex_lock(&watch->lock);
    memcpy(watch->card.value, value, sizeof(value));
    watch->card.told = true;
    watch->read_ns = ds4_clock_ns();
    if (rc != 0 && watch->trouble.code == DS4_OK)
        (void)ds4_fail(&watch->trouble, DS4_E_CORRUPT, "%s", err.msg);
    pthread_mutex_unlock(&watch->lock);
}

/* Whether to go on, after the rest of a turn that began with a wait for Xids. */
static bool rest(struct ds4_card_watch *watch, struct ds4_deadline turn)
{
    struct timespec until = ds4_deadline_timespec(turn);
    bool stop;

    pthread_mutex_lock(&watch->lock);
    while (!watch->stop && pthread_cond_clockwait(&watch->changed, &watch->lock, CLOCK_MONOTONIC,
                                                  &until) != ETIMEDOUT)
        continue;
    stop = watch->stop;
    pthread_mutex_unlock(&watch->lock);
    return !stop;
}

static bool open_library(struct ds4_card_watch *watch)
{
    struct ds4_err err = {0};

    watch->nvml = ds4_nvml_open(watch->library, watch->address, &err);
    if (watch->nvml == NULL)
        ds4_log(DS4_LOG_INFO, "card.watch",
                "card=%s message=\"%s: no temperatures, clocks, Xids of it\"", watch->address,
                err.msg);
    else
        ds4_log(DS4_LOG_INFO, "card.watch", "card=%s xids=%s", watch->address,
                ds4_nvml_tells_xids(watch->nvml) ? "yes" : "no");
    return watch->nvml != NULL;
}

static void watch_card(struct ds4_card_watch *watch)
{
    struct ds4_deadline due = ds4_deadline_in_ms(READ_MS), turn;
    uint64_t xid;

    take_values(watch);
    do {
        turn = ds4_deadline_in_ms(TURN_MS);
        xid = ds4_nvml_next_xid(watch->nvml, TURN_MS);
        if (xid != 0) {
            take_xid(watch, xid);
            turn = ds4_deadline_in_ms(0); /* the next may be there already */
        }
        if (ds4_deadline_passed(due)) {
            due = ds4_deadline_in_ms(READ_MS);
            take_values(watch);
        }
    } while (rest(watch, turn));
}

static void *run(void *arg)
{
    struct ds4_card_watch *watch = arg;

    if (open_library(watch))
        watch_card(watch);
    pthread_mutex_lock(&watch->lock);
    watch->ended = true;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->lock);
    return NULL;
}

struct ds4_card_watch *ds4_card_watch_new(const char *library, const char *pci_address,
                                          struct ds4_err *err)
{
    struct ds4_card_watch *watch = calloc(1, sizeof(*watch));

    if (watch == NULL) {
        (void)ds4_fail(err, DS4_E_NOMEM, "no memory to watch the card");
        return NULL;
    }
    watch->library = library;
    (void)snprintf(watch->address, sizeof(watch->address), "%s", pci_address);
    (void)pthread_mutex_init(&watch->lock, NULL);
    (void)pthread_cond_init(&watch->changed, NULL);
    if (pthread_create(&watch->thread, NULL, run, watch) == 0)
        return watch;
    (void)ds4_fail(err, DS4_E_NOMEM, "no thread to watch the card");
    free(watch);
    return NULL;
}

void ds4_card_watch_free(struct ds4_card_watch *watch)
{
    struct timespec until = ds4_deadline_timespec(ds4_deadline_in_ms(END_MS));
    bool ended;

    if (watch == NULL)
        return;
    pthread_mutex_lock(&watch->lock);
    watch->stop = true;
    pthread_cond_broadcast(&watch->changed);
    while (!watch->ended && pthread_cond_clockwait(&watch->changed, &watch->lock, CLOCK_MONOTONIC,
                                                   &until) != ETIMEDOUT)
        continue;
    ended = watch->ended;
    pthread_mutex_unlock(&watch->lock);
    if (!ended) {
        (void)pthread_detach(watch->thread);
        return;
    }
    (void)pthread_join(watch->thread, NULL);
    ds4_nvml_close(watch->nvml);
    (void)pthread_cond_destroy(&watch->changed);
    (void)pthread_mutex_destroy(&watch->lock);
    free(watch);
}

int ds4_card_watch_get(struct ds4_card_watch *watch, struct ds4_card_state *card,
                       struct ds4_err *err)
{
    int rc = 0;

    pthread_mutex_lock(&watch->lock);
    *card = watch->card;
    if (ds4_clock_ns() - watch->read_ns > (int64_t)STALE_MS * DS4_NS_PER_MS)
        for (int32_t i = 0; i < DS4_N_CARD_SENSOR; i++)
            card->value[i] = DS4_CARD_NOT_TOLD;
    if (watch->trouble.code != DS4_OK)
        rc = ds4_fail(err, watch->trouble.code, "%s", watch->trouble.msg);
    pthread_mutex_unlock(&watch->lock);
    return rc;
}
