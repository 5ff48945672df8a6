/* A persistent pool of threads that share out the items of one job. Items are independent: which thread computes an
 * item, and when, never changes a result. */
#ifndef OUTRIDER_POOL_H
#define OUTRIDER_POOL_H

#include <stdint.h>

typedef struct pool pool;
typedef void (*item_function)(const void *job, uint32_t item);

/* Multiply-adds below which waking a thread costs more than it saves. */
#define WORTH_SHARING 65536

pool *outrider_pool_create(int num_threads, int spin_us);
void outrider_pool_destroy(pool *threads);

/* The caller and the workers. */
int pool_num_threads(const pool *threads);

/* Calls work(job, i) for every i < num_items, on the caller and on the workers, and returns when all are done. */
void pool_run(pool *threads, item_function work, const void *job, uint32_t num_items);

/* The same on the caller alone where `cost`, in multiply-adds, is too small to share. */
void pool_run_costing(pool *threads, item_function work, const void *job, uint32_t num_items, double cost);

#endif
