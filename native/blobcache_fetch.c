/* Chunks in memory, who waits for them, and the threads that bring them. */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BUCKETS     8192
#define TICK_MS     50
#define BACKOFF_MS  100
#define BACKOFF_MAX 250
#define AWAY_MS     1000
#define PROBE       64
#define STACK       (128u << 10)

enum state { FETCHING, READY, FAILED };

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

#define lock tables
pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work, tick;
static struct disk *disk;
static struct chunk *bucket[BUCKETS], *newest, *oldest;
static struct request *first_request, *last_request, *first_backlog, *last_backlog;
static struct job *queue[2], *queue_end[2], *running;
static uint8_t **pool;
static int pool_count, buffers, buffers_max;
static int threads, abandoned, low_running;
struct store_state store_state;

int64_t clock_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void wait_until(pthread_cond_t *cond, int64_t ms) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    pthread_cond_timedwait(cond, &lock, &t);
}

/* --- packs --- */

struct pack *node_pack(uint64_t node) {
    return node >= FIRST_NODE && node < FIRST_NODE + PACKS_MAX ? &shared->pack[node - FIRST_NODE] : NULL;
}

/* The pack's place, found or taken from one that nobody knows any more; 0 when all near are in use. */
static uint32_t node_for(const uint8_t digest[DIGEST]) {
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
    pthread_mutex_lock(&lock);
    struct pack *p = node_pack(node);
    if (p)
        p->lookups -= lookups < p->lookups ? lookups : p->lookups;
    pthread_mutex_unlock(&lock);
}

uint32_t chunks_of(const struct pack *p) {
    return (uint32_t)((p->size + CHUNK - 1) / CHUNK);
}

static uint32_t length_of(const struct pack *p, uint32_t number) {
    int64_t left = p->size - (int64_t)number * CHUNK;
    return left < CHUNK ? (uint32_t)left : CHUNK;
}

/* --- buffers and chunks --- */

static void lru_take(struct chunk *c) {
    *(c->newer ? &c->newer->older : &newest) = c->older;
    *(c->older ? &c->older->newer : &oldest) = c->newer;
    c->newer = c->older = NULL;
}

static void lru_put(struct chunk *c) {
    c->older = newest;
    c->newer = NULL;
    *(newest ? &newest->newer : &oldest) = c;
    newest = c;
}

static struct chunk **chunk_at(uint32_t node, uint32_t number) {
    uint64_t generation = node_pack(node)->generation;
    uint64_t key = ((uint64_t)node << 32 | number) * 0x9e3779b97f4a7c15ULL;
    struct chunk **at = &bucket[key >> 51];
    while (*at && ((*at)->number != number || (*at)->node != node || (*at)->generation != generation))
        at = &(*at)->chain;
    return at;
}

static void unchain(struct chunk *c) {
    uint64_t key = ((uint64_t)c->node << 32 | c->number) * 0x9e3779b97f4a7c15ULL;
    struct chunk **at = &bucket[key >> 51];
    while (*at && *at != c)
        at = &(*at)->chain;
    if (*at)
        *at = c->chain;
}

static void buffer_put(uint8_t *data) {
    if (data)
        pool[pool_count++] = data;
}

static uint8_t *buffer_get(void) {
    if (pool_count)
        return pool[--pool_count];
    if (buffers < buffers_max) {
        uint8_t *data = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data != MAP_FAILED) {
            buffers++;
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

static void chunk_drop(struct chunk *c) {
    buffer_put(c->data);
    free(c);
}

static void chunk_release(struct chunk *c) {
    if (--c->held)
        return;
    if (c->state == READY)
        lru_put(c);
    else if (c->state == FAILED)
        chunk_drop(c);
}

/* --- jobs --- */

static void job_queue(struct job *job) {
    int which = job->low;
    job->next = NULL;
    job->previous = queue_end[which];
    *(queue_end[which] ? &queue_end[which]->next : &queue[which]) = job;
    queue_end[which] = job;
    pthread_cond_signal(&work);
}

static void job_unqueue(struct job *job) {
    int which = job->low;
    *(job->previous ? &job->previous->next : &queue[which]) = job->next;
    *(job->next ? &job->next->previous : &queue_end[which]) = job->previous;
}

static void job_free(struct job *job) {
    for (int i = 0; i < job->count; i++)
        buffer_put(job->buffers[i]);
    free(job);
}

static bool job_wanted(const struct job *job) {
    if (!job->count)
        return job->lookup;
    for (int i = 0; i < job->count; i++) {
        struct chunk *c = *chunk_at(job->node, job->first + (uint32_t)i);
        if (c && c->job == job && c->waiters)
            return true;
    }
    return false;
}

static struct job *job_new(uint32_t node, uint32_t first, bool low) {
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
static struct chunk *job_extend(struct job *job) {
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
static void job_round(struct job *job) {
    const struct pack *p = node_pack(job->node);
    uint32_t end = job->first + settings.block / CHUNK;
    while (!job->low && job->first + (uint32_t)job->count < end) {
        uint32_t next = job->first + (uint32_t)job->count;
        if (next >= chunks_of(p) || *chunk_at(job->node, next) || disk_has(disk, p->digest, next) || !job_extend(job))
            return;
    }
}

/* --- requests --- */

static void request_enter(struct request *r) {
    r->previous = last_request;
    *(last_request ? &last_request->next : &first_request) = r;
    last_request = r;
    pthread_cond_signal(&tick);
}

static void request_leave(struct request *r) {
    *(r->previous ? &r->previous->next : &first_request) = r->next;
    *(r->next ? &r->next->previous : &last_request) = r->previous;
    r->next = r->previous = NULL;
}

/* Patience is with the store, not with each read: while it is away for longer, a read gets a moment, in which it may be back. A reader that
 * was told of a failure tries again, through more than one layer of caches. */
static int64_t deadline_of(int64_t now) {
    int64_t usual = now + settings.deadline_ms, soon = now + (settings.deadline_ms < AWAY_MS ? settings.deadline_ms : AWAY_MS);
    if (!store_state.away_since)
        return usual;
    int64_t end = store_state.away_since + settings.deadline_ms;
    return end > soon ? end < usual ? end : usual : soon;
}

static void wait_for(struct request *r, struct chunk *c) {
    r->next_waiter[c->number - r->first] = c->waiters;
    c->waiters = r;
    r->pending++;
}

static void wait_no_more(struct request *r, struct chunk *c) {
    struct request **at = &c->waiters;
    while (*at && *at != r)
        at = &(*at)->next_waiter[c->number - (*at)->first];
    if (*at)
        *at = r->next_waiter[c->number - r->first];
}

/* Buffers that the request needs are there or can be had. */
static bool room_for(int missing) {
    int have = pool_count + (buffers_max - buffers);
    for (struct chunk *c = oldest; c && have < missing; c = c->newer)
        have++;
    return have >= missing;
}

/* Take the request's chunks; those that nobody brings yet become jobs. `local` are jobs for the disk cache, which the caller does. False,
 * and nothing is taken, where there is no memory for it now. */
static bool plan(struct request *r, struct job **local) {
    struct pack *p = node_pack(r->node);
    int missing = 0;
    for (int i = 0; i < r->chunks; i++)
        missing += !*chunk_at(r->node, r->first + (uint32_t)i);
    if (!room_for(missing))
        return false;
    /* Those that are there must not be evicted for those that are not. */
    for (int i = 0; i < r->chunks; i++) {
        struct chunk *c = *chunk_at(r->node, r->first + (uint32_t)i);
        if ((r->held[i] = c) && c->held++ == 0 && c->state == READY)
            lru_take(c);
        if (c && c->state == FETCHING)
            wait_for(r, c);
        if (c && c->state == READY)
            seen_add(r->node, HIT_BYTES, CHUNK);
        seen_touch(r->node, r->first + (uint32_t)i);
    }
    struct job *job = NULL;
    bool on_disk = false;
    for (int i = 0; i < r->chunks; i++) {
        uint32_t number = r->first + (uint32_t)i;
        if (r->held[i]) {
            job = NULL;
            continue;
        }
        /* An earlier job's rounding may have brought it into being. */
        struct chunk *c = *chunk_at(r->node, number);
        if (!c) {
            bool here = disk_has(disk, p->digest, number);
            if (!job || here != on_disk || job->count == JOB_CHUNKS) {
                if (!(job = job_new(r->node, number, r->low))) {
                    r->error = ENOMEM;
                    return true;
                }
                on_disk = here;
                if (here) {
                    job->next = *local;
                    *local = job;
                } else
                    job_queue(job);
            }
            if (!(c = job_extend(job))) {
                r->error = ENOMEM;
                return true;
            }
            if (!here && (i + 1 == r->chunks || r->held[i + 1]))
                job_round(job);
        }
        r->held[i] = c;
        c->held++;
        wait_for(r, c);
    }
    return true;
}

static void answer_read(const struct request *r) {
    struct iovec parts[WAIT_CHUNKS + 1];
    int count = 1;
    uint64_t at = r->offset, end = r->offset + r->size;
    for (int i = 0; i < r->chunks; i++) {
        uint64_t stop = ((uint64_t)r->first + (uint64_t)i + 1) * CHUNK;
        if (stop > end)
            stop = end;
        parts[count++] = (struct iovec){r->held[i]->data + at % CHUNK, stop - at};
        at = stop;
    }
    reply_vector(r->unique, parts, count, r->size);
}

static void requests_finish(struct request *ready);

/* Requests that waited for memory, in their order, as far as it goes now. Called and left with the lock. */
static struct request *backlog_run(struct job **local) {
    struct request *ready = NULL;
    while (first_backlog && plan(first_backlog, local)) {
        struct request *r = first_backlog;
        first_backlog = r->later;
        if (!first_backlog)
            last_backlog = NULL;
        r->in_backlog = false;
        r->later = NULL;
        if (!r->pending) {
            r->later = ready;
            ready = r;
        }
    }
    return ready;
}

static void backlog_leave(struct request *r) {
    struct request **at = &first_backlog, *before = NULL;
    while (*at != r) {
        before = *at;
        at = &(*at)->later;
    }
    *at = r->later;
    if (last_backlog == r)
        last_backlog = before;
    r->in_backlog = false;
}

/* The chunks of a job are there, or cannot be had. Returns the requests that have all they waited for. With the lock. */
static struct request *job_settle(struct job *job, int error) {
    struct request *ready = NULL;
    for (int i = 0; i < job->count; i++) {
        struct chunk *c = *chunk_at(job->node, job->first + (uint32_t)i);
        if (!c || c->job != job || c->generation != job->generation)
            continue;
        c->job = NULL;
        c->state = error ? FAILED : READY;
        if (!error) {
            c->data = job->buffers[i];
            job->buffers[i] = NULL;
        } else
            unchain(c);
        for (struct request *r = c->waiters, *next; r; r = next) {
            next = r->next_waiter[c->number - r->first];
            r->error = r->error ? r->error : error;
            if (--r->pending == 0) {
                r->later = ready;
                ready = r;
            }
        }
        c->waiters = NULL;
        if (!c->held) {
            if (error)
                chunk_drop(c);
            else
                lru_put(c);
        }
    }
    return ready;
}

/* A job that the disk cache was to do: what it turns out not to have becomes jobs for the store. */
static void local_do(struct job *job) {
    const struct pack *p = node_pack(job->node);
    for (int i = 0; i < job->count; i++) {
        uint32_t number = job->first + (uint32_t)i, length = length_of(p, number);
        bool got = disk_read(disk, p->digest, number, job->buffers[i], length);
        struct job one = {.node = job->node, .first = number, .count = 1, .generation = job->generation, .buffers = {job->buffers[i]}};
        job->buffers[i] = NULL;
        pthread_mutex_lock(&lock);
        struct chunk *c = *chunk_at(job->node, number);
        struct request *ready = NULL;
        struct job *again = NULL;
        if (c && c->job == job) {
            if (got || !(again = job_new(job->node, number, job->low))) {
                c->job = &one;
                ready = job_settle(&one, got ? 0 : ENOMEM);
                if (got)
                    seen_add(job->node, DISK_BYTES, length);
            } else {
                again->count = 1;
                again->buffers[0] = one.buffers[0];
                one.buffers[0] = NULL;
                c->job = again;
                job_queue(again);
            }
        }
        buffer_put(one.buffers[0]);
        pthread_mutex_unlock(&lock);
        requests_finish(ready);
    }
    pthread_mutex_lock(&lock);
    job_free(job);
    pthread_mutex_unlock(&lock);
}

static void locals_do(struct job *local) {
    while (local) {
        struct job *job = local;
        local = job->next;
        local_do(job);
    }
}

/* Answer, let go of the chunks, and go on with those that waited for memory. Without the lock. */
static void requests_finish(struct request *ready) {
    while (ready) {
        struct request *r = ready;
        struct job *local = NULL;
        ready = r->later;
        if (r->error) {
            if (!r->low && r->error != EINTR)
                seen_failure(r, r->error, r->error == ETIMEDOUT ? "deadline" : r->error == ENODATA ? "truncated" : "unreadable");
            reply_error(r->unique, r->error == EINTR ? EINTR : EIO);
        } else
            answer_read(r);
        pthread_mutex_lock(&lock);
        request_leave(r);
        for (int i = 0; i < r->chunks; i++)
            if (r->held[i])
                chunk_release(r->held[i]);
        struct request *more = backlog_run(&local);
        pthread_mutex_unlock(&lock);
        free(r);
        locals_do(local);
        for (struct request **end = &ready; more; more = NULL) {
            while (*end)
                end = &(*end)->later;
            *end = more;
        }
    }
}

void fetch_read(const struct fuse_call *call) {
    struct pack *p = node_pack(call->node);
    uint64_t size = p && p->used && p->size > 0 ? (uint64_t)p->size : 0, offset = call->offset;
    if (offset >= size || !call->size) {
        reply_bytes(call->unique, NULL, 0);
        return;
    }
    struct request *r = call->size <= READ_MAX ? calloc(1, sizeof *r) : NULL;
    if (!r) {
        reply_error(call->unique, call->size <= READ_MAX ? ENOMEM : EINVAL);
        return;
    }
    r->unique = call->unique;
    r->offset = offset;
    r->size = size - offset < call->size ? (uint32_t)(size - offset) : call->size;
    r->pid = call->pid;
    r->node = (uint32_t)call->node;
    r->first = (uint32_t)(offset / CHUNK);
    r->chunks = (int)((offset + r->size - 1) / CHUNK - r->first + 1);
    r->low = call->handle;
    struct job *local = NULL;
    pthread_mutex_lock(&lock);
    r->deadline = deadline_of(clock_ms());
    seen_add(r->node, ASKED, 1);
    seen_add(r->node, ASKED_BYTES, r->size);
    request_enter(r);
    bool ready = false;
    if (first_backlog || !plan(r, &local)) {
        r->in_backlog = true;
        *(last_backlog ? &last_backlog->later : &first_backlog) = r;
        last_backlog = r;
    } else
        ready = !r->pending;
    pthread_mutex_unlock(&lock);
    if (ready)
        requests_finish(r);
    locals_do(local);
}

void fetch_know(const uint8_t digest[DIGEST], int64_t size) {
    struct pack *p = node_pack(node_for(digest));
    if (p && !p->lookups)
        p->size = size;
}

void fetch_lookup(const struct fuse_call *call, const uint8_t digest[DIGEST]) {
    pthread_mutex_lock(&lock);
    uint32_t node = node_for(digest);
    struct pack *p = node_pack(node);
    bool known = p && p->size >= 0;
    if (known)
        p->lookups++;
    struct request *r = p && !known ? calloc(1, sizeof *r) : NULL;
    struct job *job = r ? job_new(node, 0, false) : NULL;
    if (job) {
        *r = (struct request){.unique = call->unique, .pid = call->pid, .node = node, .lookup = true, .pending = 1};
        r->deadline = deadline_of(clock_ms());
        p->lookups++; /* of this request; given back if it fails, so that the place stays the pack's meanwhile */
        job->lookup = r;
        request_enter(r);
        job_queue(job);
    }
    pthread_mutex_unlock(&lock);
    if (known)
        reply_entry(call->unique, node);
    else if (!job) {
        free(r);
        reply_error(call->unique, p ? ENOMEM : ENFILE);
    }
}

static void lookup_finish(struct request *r, int error) {
    if (error) {
        seen_failure(r, error, error == ETIMEDOUT ? "deadline" : "missing");
        reply_error(r->unique, error == ENOENT ? ENOENT : EIO);
        node_forget(r->node, 1);
    } else
        reply_entry(r->unique, r->node);
    free(r);
}

/* --- the clock: what is overdue --- */

static bool being_killed(uint32_t pid) {
    char path[64], line[256];
    bool killed = false;
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    FILE *f = pid ? fopen(path, "re") : NULL;
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "SigPnd:", 7) == 0 || strncmp(line, "ShdPnd:", 7) == 0)
            killed |= strtoull(line + 7, NULL, 16) >> 8 & 1;
    if (f)
        fclose(f);
    return killed;
}

/* The kernel lets a killed process wait for its answer, uninterruptible; so it gets one. */
void fetch_interrupt(uint64_t unique) {
    pthread_mutex_lock(&lock);
    for (struct request *r = first_request; r; r = r->next)
        if (r->unique == unique)
            r->interrupted = true;
    pthread_mutex_unlock(&lock);
}

static struct job *lookup_job(const struct request *r) {
    for (struct job *job = running; job; job = job->next)
        if (job->lookup == r)
            return job;
    for (struct job *job = queue[0]; job; job = job->next)
        if (job->lookup == r)
            return job;
    return NULL;
}

/* Give up one that still waits. It is the caller's to answer. */
static void request_give_up(struct request *r, int error) {
    r->error = error;
    if (r->lookup) {
        struct job *job = lookup_job(r);
        if (job)
            job->lookup = NULL;
        request_leave(r);
        return;
    }
    if (r->in_backlog)
        backlog_leave(r);
    for (int i = 0; i < r->chunks; i++)
        if (r->held[i] && r->held[i]->state == FETCHING)
            wait_no_more(r, r->held[i]);
    r->pending = 0;
}

static struct request *overdue(int64_t now) {
    struct request *found = NULL;
    for (struct request *r = first_request, *next; r; r = next) {
        next = r->next;
        if (!r->pending && !r->in_backlog)
            continue; /* being answered */
        if (r->deadline > now && !(r->interrupted && being_killed(r->pid)))
            continue;
        request_give_up(r, r->deadline > now ? EINTR : ETIMEDOUT);
        r->later = found;
        found = r;
    }
    return found;
}

static void fetcher_start(void);

/* The thread is the store's for as long as that likes. What others still wait for is asked for anew. */
static void job_abandon(struct job *job) {
    job->abandoned = true;
    abandoned++;
    low_running -= job->low;
    struct job *again = NULL;
    for (int i = 0; i < job->count; i++) {
        struct chunk *c = *chunk_at(job->node, job->first + (uint32_t)i);
        if (!c || c->job != job) {
            again = NULL;
            continue;
        }
        if (!c->waiters) {
            unchain(c);
            c->state = FAILED;
            c->job = NULL;
            if (!c->held)
                chunk_drop(c);
            again = NULL;
            continue;
        }
        uint8_t *data = buffer_get();
        if (!again && (again = job_new(job->node, c->number, job->low)))
            job_queue(again);
        if (!again || !data) {
            /* It stays this job's: those who wait have their deadlines. */
            buffer_put(data);
            again = NULL;
            continue;
        }
        again->buffers[again->count++] = data;
        c->job = again;
    }
    if (threads < settings.parallel + settings.spare)
        fetcher_start();
}

static void mark_away(const struct job *job, int error) {
    if (!store_state.away_since)
        store_state.away_since = job->started;
    store_state.error = error;
}

static void *clock_main(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        int64_t now = clock_ms();
        __atomic_store_n(&shared->heartbeat, (uint64_t)now, __ATOMIC_RELAXED);
        for (struct job *job = running; job; job = job->next)
            if (!job->abandoned && now - job->started > settings.deadline_ms / 2) {
                mark_away(job, ETIMEDOUT);
                job_abandon(job);
            }
        struct request *late = overdue(now);
        if (late) {
            pthread_mutex_unlock(&lock);
            while (late) {
                struct request *r = late;
                late = r->later;
                r->later = NULL;
                if (r->lookup)
                    lookup_finish(r, r->error);
                else
                    requests_finish(r);
            }
            pthread_mutex_lock(&lock);
            continue;
        }
        wait_until(&tick, now + (first_request || running ? TICK_MS : 1000));
    }
    return NULL;
}

/* --- fetchers --- */

static struct job *pick(int64_t now, int64_t *wake) {
    for (int which = 0; which < 2; which++) {
        if (which && low_running >= (settings.parallel + 1) / 2)
            break;
        for (struct job *job = queue[which], *next; job; job = next) {
            next = job->next;
            if (job->tries && !job_wanted(job)) {
                job_unqueue(job);
                struct request *none = job_settle(job, EIO);
                (void)none; /* nobody waits */
                job_free(job);
                continue;
            }
            if (job->not_before <= now) {
                job_unqueue(job);
                return job;
            }
            if (job->not_before < *wake)
                *wake = job->not_before;
        }
    }
    return NULL;
}

static void running_enter(struct job *job) {
    job->previous = NULL;
    job->next = running;
    if (running)
        running->previous = job;
    running = job;
}

static void running_leave(struct job *job) {
    *(job->previous ? &job->previous->next : &running) = job->next;
    if (job->next)
        job->next->previous = job->previous;
}

static void keep_on_disk(struct job *job, struct chunk **kept) {
    const struct pack *p = node_pack(job->node);
    for (int i = 0; i < job->count; i++)
        if (kept[i])
            disk_write(disk, p->digest, kept[i]->number, kept[i]->data, length_of(p, kept[i]->number));
}

/* What came of a job. Called and left with the lock. */
static void job_end(struct job *job, enum outcome outcome, int64_t size) {
    if (outcome == AWAY)
        mark_away(job, job->error);
    else
        store_state.away_since = 0;
    seen_add(job->node, STORE_READS, job->count > 0);
    seen_add(job->node, STORE_ERRORS, outcome != GOT);
    if (job->count && outcome == GOT)
        seen_add(job->node, STORE_BYTES,
                 (uint64_t)(job->count - 1) * CHUNK + length_of(node_pack(job->node), job->first + (uint32_t)job->count - 1));
    if (job->count && job->abandoned) {
        job_free(job);
        return;
    }
    low_running -= job->low && !job->abandoned;
    if (outcome == AWAY && job_wanted(job)) {
        job->abandoned = false;
        int wait = BACKOFF_MS << (job->tries < 5 ? job->tries : 5);
        job->tries++;
        job->not_before = clock_ms() + (wait < BACKOFF_MAX ? wait : BACKOFF_MAX);
        job_queue(job);
        return;
    }
    if (!job->count) {
        struct request *r = job->lookup;
        if (outcome == GOT)
            node_pack(job->node)->size = size;
        job_free(job);
        if (r) {
            request_leave(r);
            pthread_mutex_unlock(&lock);
            lookup_finish(r, outcome == GOT ? 0 : outcome == LOST ? ENOENT : EIO);
            pthread_mutex_lock(&lock);
        }
        return;
    }
    struct chunk *kept[JOB_CHUNKS] = {0};
    for (int i = 0; i < job->count && outcome == GOT && disk; i++) {
        struct chunk *c = *chunk_at(job->node, job->first + (uint32_t)i);
        if (c && c->job == job) {
            kept[i] = c;
            c->held++;
        }
    }
    struct request *ready = job_settle(job, outcome == GOT ? 0 : job->error == ENODATA ? ENODATA : EIO);
    pthread_mutex_unlock(&lock);
    requests_finish(ready);
    keep_on_disk(job, kept);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < job->count; i++)
        if (kept[i])
            chunk_release(kept[i]);
    job_free(job);
    struct job *local = NULL;
    ready = backlog_run(&local);
    if (ready || local) {
        pthread_mutex_unlock(&lock);
        requests_finish(ready);
        locals_do(local);
        pthread_mutex_lock(&lock);
    }
}

static void *fetcher_main(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    while (threads - abandoned <= settings.parallel) {
        int64_t now = clock_ms(), wake = now + 60000, size = -1;
        struct job *job = pick(now, &wake);
        if (!job) {
            wait_until(&work, wake);
            continue;
        }
        job->started = now;
        low_running += job->low;
        running_enter(job);
        pthread_cond_signal(&tick);
        pthread_mutex_unlock(&lock);
        enum outcome outcome = job->count ? store_read(job) : store_size(job, &size);
        pthread_mutex_lock(&lock);
        running_leave(job);
        abandoned -= job->abandoned;
        job_end(job, outcome, size);
    }
    threads--;
    pthread_mutex_unlock(&lock);
    return NULL;
}

static int thread_start(void *(*function)(void *)) {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK);
    int error = pthread_create(&thread, &attributes, function, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

static void fetcher_start(void) {
    if (thread_start(fetcher_main) == 0)
        threads++;
}

int fetch_start(struct disk *cache) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&work, &monotonic);
    pthread_cond_init(&tick, &monotonic);
    disk = cache;
    buffers_max = (int)(settings.memory_bytes / CHUNK);
    pool = malloc(sizeof *pool * (size_t)buffers_max);
    if (!pool)
        return -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < settings.parallel; i++)
        fetcher_start();
    int got = threads;
    pthread_mutex_unlock(&lock);
    return got && thread_start(clock_main) == 0 ? 0 : -1;
}

void fetch_state(struct fetch_state *out) {
    *out = (struct fetch_state){.threads = threads, .stuck = abandoned, .memory_bytes = (uint64_t)(buffers - pool_count) * CHUNK};
    for (const struct request *r = first_request; r; r = r->next)
        out->waiting++;
}
