/* The tables that chunks, requests and fetchers share. All with the lock `tables`. */
#ifndef DSEC_BLOBCACHE_TABLES_H
#define DSEC_BLOBCACHE_TABLES_H

#include "blobcache.h"

enum state { FETCHING, READY, FAILED };

/* A piece of a pack. FETCHING: `job` brings it; READY: in memory, on the list of the least used while nobody holds it; FAILED: those who
 * hold it let go. */
struct chunk {
    uint32_t node, number;
    uint64_t generation;
    enum state state;
    int held;
    uint8_t *data;
    struct job *job;
    struct request *waiters;
    struct chunk *chain, *newer, *older;
};

extern struct disk *disk;
extern pthread_cond_t work, tick; /* for fetchers: a job is queued; for the clock: something has begun */
extern struct request *first_request;
extern struct job *queue[2], *running; /* queue[1]: of prefetches */
extern int memory_buffers, memory_spare, memory_limit;

/* --- packs, chunks, jobs --- */
int chunks_start(void);
/* The pack's place, found or taken from one that nobody knows any more; 0 when all near are in use. */
uint32_t node_for(const uint8_t digest[DIGEST]);
uint32_t length_of(const struct pack *p, uint32_t number);
void lru_take(struct chunk *c);
void lru_put(struct chunk *c);
struct chunk **chunk_at(uint32_t node, uint32_t number);
void unchain(struct chunk *c);
void buffer_put(uint8_t *data);
uint8_t *buffer_get(void);
void chunk_drop(struct chunk *c);
void chunk_release(struct chunk *c);
void job_queue(struct job *job);
void job_unqueue(struct job *job);
void job_free(struct job *job);
bool job_wanted(const struct job *job);
struct job *job_new(uint32_t node, uint32_t first, bool low);
struct chunk *job_extend(struct job *job);
void job_round(struct job *job);
bool room_for(int missing);

/* --- requests --- */
void request_leave(struct request *r);
void wait_no_more(struct request *r, struct chunk *c);
struct request *backlog_run(struct job **local);
void backlog_leave(struct request *r);
struct request *job_settle(struct job *job, int error);
void locals_do(struct job *local);
void requests_finish(struct request *ready);
void lookup_finish(struct request *r, int error);

#endif
