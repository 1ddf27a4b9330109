/* Packs by node id, their chunks in memory, and the jobs that bring them. */
#define _GNU_SOURCE
#include "blobcache_tables.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define BUCKETS 8192
#define PROBE   64

pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;
struct disk *disk;
struct job *queue[2], *running;
int memory_buffers, memory_spare, memory_limit;
static struct job *queue_end[2];
static struct chunk *bucket[BUCKETS], *newest, *oldest;
static uint8_t **pool;

int chunks_start(void) {
    memory_limit = (int)(settings.memory_bytes / CHUNK);
    pool = malloc(sizeof *pool * (size_t)memory_limit);
    return pool ? 0 : -1;
}

int64_t clock_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}
/* --- packs --- */

struct pack *node_pack(uint64_t node) {
    return node >= FIRST_NODE && node < FIRST_NODE + PACKS_MAX ? &shared->pack[node - FIRST_NODE] : NULL;
}

/* The pack's place, found or taken from one that nobody knows any more; 0 when all near are in use. */
uint32_t node_for(const uint8_t digest[DIGEST]) {
    uint32_t start, spare = PACKS_MAX;
    memcpy(&start, digest, sizeof start);
    for (uint32_t i = 0; i < PROBE; i++) {
        uint32_t at = (start + i) % PACKS_MAX;
        struct pack *p = &shared->pack[at];
        if (p->used && memcmp(p->digest, digest, DIGEST) == 0)
            return at + FIRST_NODE;
        if (!p->used || !p->lookups) {
            if (spare == PACKS_MAX || (shared->pack[spare].used && !p->used))
                spare = at;
        }
    }
    if (spare == PACKS_MAX)
        return 0;
    struct pack *p = &shared->pack[spare];
    memcpy(p->digest, digest, DIGEST);
    p->size = -1;
    p->generation++;
    p->used = 1;
    return spare + FIRST_NODE;
}

void node_forget(uint64_t node, uint64_t lookups) {
    pthread_mutex_lock(&tables);
    struct pack *p = node_pack(node);
    if (p)
        p->lookups -= lookups < p->lookups ? lookups : p->lookups;
    pthread_mutex_unlock(&tables);
}

uint32_t chunks_of(const struct pack *p) {
    return (uint32_t)((p->size + CHUNK - 1) / CHUNK);
}

uint32_t length_of(const struct pack *p, uint32_t number) {
    int64_t left = p->size - (int64_t)number * CHUNK;
    return left < CHUNK ? (uint32_t)left : CHUNK;
}

/* --- buffers and chunks --- */

void lru_take(struct chunk *c) {
    *(c->newer ? &c->newer->older : &newest) = c->older;
    *(c->older ? &c->older->newer : &oldest) = c->newer;
    c->newer = c->older = NULL;
}

void lru_put(struct chunk *c) {
    c->older = newest;
    c->newer = NULL;
    *(newest ? &newest->newer : &oldest) = c;
    newest = c;
}

struct chunk **chunk_at(uint32_t node, uint32_t number) {
    uint64_t generation = node_pack(node)->generation;
    uint64_t key = ((uint64_t)node << 32 | number) * 0x9e3779b97f4a7c15ULL;
    struct chunk **at = &bucket[key >> 51];
    while (*at && ((*at)->number != number || (*at)->node != node || (*at)->generation != generation))
        at = &(*at)->chain;
    return at;
}

void unchain(struct chunk *c) {
    uint64_t key = ((uint64_t)c->node << 32 | c->number) * 0x9e3779b97f4a7c15ULL;
    struct chunk **at = &bucket[key >> 51];
    while (*at && *at != c)
        at = &(*at)->chain;
    if (*at)
        *at = c->chain;
}

void buffer_put(uint8_t *data) {
    if (data)
        pool[memory_spare++] = data;
}

uint8_t *buffer_get(void) {
    if (memory_spare)
        return pool[--memory_spare];
    if (memory_buffers < memory_limit) {
        uint8_t *data = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data != MAP_FAILED) {
            memory_buffers++;
            return data;
        }
    }
    struct chunk *c = oldest;
    if (!c)
        return NULL;
    uint8_t *data = c->data;
    lru_take(c);
    unchain(c);
    free(c);
    return data;
}

void chunk_drop(struct chunk *c) {
    buffer_put(c->data);
    free(c);
}

void chunk_release(struct chunk *c) {
    if (--c->held)
        return;
    if (c->state == READY)
        lru_put(c);
    else if (c->state == FAILED)
        chunk_drop(c);
}

/* Whether so many buffers are there or can be had. */
bool room_for(int missing) {
    int have = memory_spare + (memory_limit - memory_buffers);
    for (struct chunk *c = oldest; c && have < missing; c = c->newer)
        have++;
    return have >= missing;
}

/* --- jobs --- */

void job_queue(struct job *job) {
    int which = job->low;
    job->next = NULL;
    job->previous = queue_end[which];
    *(queue_end[which] ? &queue_end[which]->next : &queue[which]) = job;
    queue_end[which] = job;
    pthread_cond_signal(&work);
}

void job_unqueue(struct job *job) {
    int which = job->low;
    *(job->previous ? &job->previous->next : &queue[which]) = job->next;
    *(job->next ? &job->next->previous : &queue_end[which]) = job->previous;
}

void job_free(struct job *job) {
    for (int i = 0; i < job->count; i++)
        buffer_put(job->buffers[i]);
    free(job);
}

bool job_wanted(const struct job *job) {
    if (!job->count)
        return job->lookup;
    for (int i = 0; i < job->count; i++) {
        struct chunk *c = *chunk_at(job->node, job->first + (uint32_t)i);
        if (c && c->job == job && c->waiters)
            return true;
    }
    return false;
}

struct job *job_new(uint32_t node, uint32_t first, bool low) {
    struct job *job = calloc(1, sizeof *job);
    if (job) {
        job->node = node;
        job->first = first;
        job->low = low;
        job->generation = node_pack(node)->generation;
    }
    return job;
}

/* One more chunk, absent till now, for the job to bring. */
struct chunk *job_extend(struct job *job) {
    uint8_t *data = job->count < JOB_CHUNKS ? buffer_get() : NULL;
    struct chunk *c = data ? calloc(1, sizeof *c) : NULL;
    if (!c) {
        buffer_put(data);
        return NULL;
    }
    uint32_t number = job->first + (uint32_t)job->count;
    *c = (struct chunk){.node = job->node, .number = number, .generation = job->generation, .state = FETCHING, .job = job};
    *chunk_at(job->node, number) = c;
    job->buffers[job->count++] = data;
    return c;
}

/* What follows comes along, so that the store is asked for BLOCK bytes at least; of a prefetch only what was asked. */
void job_round(struct job *job) {
    const struct pack *p = node_pack(job->node);
    uint32_t end = job->first + settings.block / CHUNK;
    while (!job->low && job->first + (uint32_t)job->count < end) {
        uint32_t next = job->first + (uint32_t)job->count;
        if (next >= chunks_of(p) || *chunk_at(job->node, next) || disk_has(disk, p->digest, next) || !job_extend(job))
            return;
    }
}
