/* Threads that claim items one by one. Not a scheduler: one job at a time, and the caller always works too, so a job
 * ends even if no worker wakes (or none exists any more, after a fork).
 *
 * Claiming instead of a fixed share each: on a busy machine a late worker's items are taken by the others. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define CACHE_LINE 64
#define PAUSES_PER_LOOK 16

struct pool {
    /* The number of items (upper half) and the next to be claimed (lower half), in one word so that a claim is atomic:
     * whoever moves it holds an item of a job that cannot end, or be replaced, before that item is done. */
    _Alignas(CACHE_LINE) _Atomic uint64_t claims;
    _Alignas(CACHE_LINE) _Atomic uint32_t num_pending;
    _Alignas(CACHE_LINE) _Atomic int num_sleeping;
    _Atomic int caller_waits;
    _Atomic int stopping;
    item_function work;
    const void *job;
    pthread_mutex_t one_job;
    pthread_mutex_t lock;
    pthread_cond_t work_came;
    pthread_cond_t work_done;
    pid_t owner;
    int64_t spin_ns;
    int num_workers;
    pthread_t workers[];
};

int pool_num_threads(const pool *threads) { return threads->num_workers + 1; }

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int has_items(pool *threads) {
    uint64_t seen = atomic_load(&threads->claims);
    return (uint32_t)seen < (uint32_t)(seen >> 32);
}

static int claim(pool *threads, uint32_t *item) {
    uint64_t seen = atomic_load(&threads->claims);
    while ((uint32_t)seen < (uint32_t)(seen >> 32)) {
        if (atomic_compare_exchange_weak(&threads->claims, &seen, seen + 1)) {
            *item = (uint32_t)seen;
            return 1;
        }
    }
    return 0;
}

static void work_off(pool *threads) {
    uint32_t item;
    while (claim(threads, &item)) {
        threads->work(threads->job, item);
        if (atomic_fetch_sub(&threads->num_pending, 1) == 1 && atomic_load(&threads->caller_waits)) {
            pthread_mutex_lock(&threads->lock);
            pthread_cond_signal(&threads->work_done);
            pthread_mutex_unlock(&threads->lock);
        }
    }
}

static int spin_until(pool *threads, int (*ready)(pool *)) {
    int64_t end = now_ns() + threads->spin_ns;
    do {
        for (int turn = 0; turn < PAUSES_PER_LOOK; turn++) {
            if (ready(threads)) return 1;
            pause_briefly();
        }
    } while (now_ns() < end);
    return 0;
}

static int has_items_or_stops(pool *threads) { return has_items(threads) || atomic_load(&threads->stopping); }

static int is_done(pool *threads) { return atomic_load(&threads->num_pending) == 0; }

static void *worker(void *argument) {
    pool *threads = argument;
    while (!atomic_load(&threads->stopping)) {
        work_off(threads);
        /* The next operation of a forward comes within microseconds; after a forward the processor is given back. */
        if (spin_until(threads, has_items_or_stops)) continue;
        pthread_mutex_lock(&threads->lock);
        atomic_fetch_add(&threads->num_sleeping, 1);
        while (!has_items_or_stops(threads)) pthread_cond_wait(&threads->work_came, &threads->lock);
        atomic_fetch_sub(&threads->num_sleeping, 1);
        pthread_mutex_unlock(&threads->lock);
    }
    return NULL;
}

static void wait_for_the_rest(pool *threads) {
    if (spin_until(threads, is_done)) return;
    pthread_mutex_lock(&threads->lock);
    atomic_store(&threads->caller_waits, 1);
    while (!is_done(threads)) pthread_cond_wait(&threads->work_done, &threads->lock);
    atomic_store(&threads->caller_waits, 0);
    pthread_mutex_unlock(&threads->lock);
}

void pool_run(pool *threads, item_function work, const void *job, uint32_t num_items) {
    if (num_items <= 1 || threads->num_workers == 0 || threads->owner != getpid()) {
        for (uint32_t item = 0; item < num_items; item++) work(job, item);
        return;
    }
    pthread_mutex_lock(&threads->one_job);
    threads->work = work;
    threads->job = job;
    atomic_store(&threads->num_pending, num_items);
    atomic_store(&threads->claims, (uint64_t)num_items << 32);
    if (atomic_load(&threads->num_sleeping)) {
        pthread_mutex_lock(&threads->lock);
        pthread_cond_broadcast(&threads->work_came);
        pthread_mutex_unlock(&threads->lock);
    }
    work_off(threads);
    wait_for_the_rest(threads);
    pthread_mutex_unlock(&threads->one_job);
}

void pool_run_costing(pool *threads, item_function work, const void *job, uint32_t num_items, double cost) {
    if (cost >= WORTH_SHARING) {
        pool_run(threads, work, job, num_items);
        return;
    }
    for (uint32_t item = 0; item < num_items; item++) work(job, item);
}

/* Signals belong to the interpreter's own threads: a worker must not run their handlers. */
static void start_workers(pool *threads, int num_workers) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (threads->num_workers < num_workers) {
        if (pthread_create(&threads->workers[threads->num_workers], NULL, worker, threads) != 0) break;
        threads->num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Returns NULL without memory; has fewer threads than asked for where the system grants no more. */
pool *outrider_pool_create(int num_threads, int spin_us) {
    size_t size = sizeof(pool) + (size_t)num_threads * sizeof(pthread_t);
    pool *threads = aligned_alloc(CACHE_LINE, (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (threads == NULL) return NULL;
    atomic_init(&threads->claims, 0);
    atomic_init(&threads->num_pending, 0);
    atomic_init(&threads->num_sleeping, 0);
    atomic_init(&threads->caller_waits, 0);
    atomic_init(&threads->stopping, 0);
    pthread_mutex_init(&threads->one_job, NULL);
    pthread_mutex_init(&threads->lock, NULL);
    pthread_cond_init(&threads->work_came, NULL);
    pthread_cond_init(&threads->work_done, NULL);
    threads->owner = getpid();
    threads->spin_ns = (int64_t)spin_us * 1000;
    threads->num_workers = 0;
    start_workers(threads, num_threads - 1);
    return threads;
}

/* Joins the workers. In a forked child they do not exist, and their locks may be held for ever: nothing is touched. */
void outrider_pool_destroy(pool *threads) {
    if (threads->owner != getpid()) return;
    pthread_mutex_lock(&threads->lock);
    atomic_store(&threads->stopping, 1);
    pthread_cond_broadcast(&threads->work_came);
    pthread_mutex_unlock(&threads->lock);
    for (int index = 0; index < threads->num_workers; index++) pthread_join(threads->workers[index], NULL);
    pthread_mutex_destroy(&threads->one_job);
    pthread_mutex_destroy(&threads->lock);
    pthread_cond_destroy(&threads->work_came);
    pthread_cond_destroy(&threads->work_done);
    free(threads);
}
