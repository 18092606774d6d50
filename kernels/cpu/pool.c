/* The compute pool of the CPU backend.
 *
 * Helpers sleep on a condition variable between operations: a rig's host CPU is small and mostly
 * waits for cards, so nothing spins but a few hundred pauses after each operation, because operations
 * of a step follow each other within microseconds.  Items are handed out one by one from a shared
 * counter; the caller takes part and then waits for the helpers that are still inside an item.
 *
 * The lock guards round, n_busy and stop; job fields are written under it before the round rises. */
#include "kernels/cpu/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#define DS4_POOL_SPIN 400 /* pauses before sleeping: below 20 us */

struct ds4_pool_thread {
    struct ds4_pool *pool;
    pthread_t id;
    int32_t index;
};

struct ds4_pool {
    pthread_mutex_t lock;
    pthread_cond_t work; /* a new round, or stop */
    pthread_cond_t done; /* n_busy fell to 0 */
    atomic_uint round;
    atomic_int n_busy; /* helpers that have not finished the round */
    bool stop;
    ds4_pool_fn fn;
    void *ctx;
    int32_t n_item;
    atomic_int next;
    int32_t n_thread;
    int32_t n_started; /* helpers to join */
    struct ds4_pool_thread *thread;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void do_items(struct ds4_pool *pool, int32_t thread)
{
    int32_t item;

    while ((item = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed)) < pool->n_item)
        pool->fn(pool->ctx, item, thread);
}

static void *helper(void *arg)
{
    struct ds4_pool_thread *self = arg;
    struct ds4_pool *pool = self->pool;
    unsigned int seen = 0;

    for (;;) {
        for (int i = 0; i < DS4_POOL_SPIN && atomic_load(&pool->round) == seen; i++)
            relax();
        pthread_mutex_lock(&pool->lock);
        while (atomic_load(&pool->round) == seen && !pool->stop)
            pthread_cond_wait(&pool->work, &pool->lock);
        seen = atomic_load(&pool->round);
        if (pool->stop) {
            pthread_mutex_unlock(&pool->lock);
            return NULL;
        }
        pthread_mutex_unlock(&pool->lock);
        do_items(pool, self->index);
        pthread_mutex_lock(&pool->lock);
        if (atomic_fetch_sub(&pool->n_busy, 1) == 1)
            pthread_cond_signal(&pool->done);
        pthread_mutex_unlock(&pool->lock);
    }
}

struct ds4_pool *ds4_pool_new(int32_t n_thread, struct ds4_err *err)
{
    struct ds4_pool *pool = calloc(1, sizeof(*pool));

    if (pool == NULL || (pool->thread = calloc((size_t)n_thread, sizeof(*pool->thread))) == NULL) {
        free(pool);
        ds4_fail(err, DS4_E_NOMEM, "no memory for a pool of %d threads", n_thread);
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->n_thread = n_thread;
    for (int32_t i = 1; i < n_thread; i++) {
        struct ds4_pool_thread *thread = &pool->thread[i];

        thread->pool = pool;
        thread->index = i;
        if (pthread_create(&thread->id, NULL, helper, thread) != 0) {
            ds4_pool_free(pool);
            ds4_fail(err, DS4_E_UNAVAILABLE, "cannot start compute thread %d of %d", i, n_thread);
            return NULL;
        }
        pool->n_started++;
    }
    return pool;
}

void ds4_pool_free(struct ds4_pool *pool)
{
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 1; i <= pool->n_started; i++)
        pthread_join(pool->thread[i].id, NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool->thread);
    free(pool);
}

int32_t ds4_pool_threads(const struct ds4_pool *pool)
{
    return pool->n_thread;
}

void ds4_pool_run(struct ds4_pool *pool, int32_t n_item, ds4_pool_fn fn, void *ctx)
{
    if (pool->n_thread == 1 || n_item <= 1) {
        for (int32_t i = 0; i < n_item; i++)
            fn(ctx, i, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->ctx = ctx;
    pool->n_item = n_item;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->n_busy, pool->n_thread - 1);
    atomic_fetch_add(&pool->round, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);

    do_items(pool, 0);
    for (int i = 0; i < DS4_POOL_SPIN && atomic_load(&pool->n_busy) != 0; i++)
        relax();
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->n_busy) != 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
