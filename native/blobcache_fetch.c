/* The threads that bring chunks, and the clock that sees to it that nobody waits too long. */
#define _GNU_SOURCE
#include "blobcache_tables.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TICK_MS     50
#define BACKOFF_MS  100
#define BACKOFF_MAX 250
#define STACK       (128u << 10)

pthread_cond_t work, tick;
struct store_state store_state;
static int threads, abandoned, low_running;

static void wait_until(pthread_cond_t *cond, int64_t ms) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    pthread_cond_timedwait(cond, &tables, &t);
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
    pthread_mutex_lock(&tables);
    for (struct request *r = first_request; r; r = r->next)
        if (r->unique == unique)
            r->interrupted = true;
    pthread_mutex_unlock(&tables);
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
    pthread_mutex_lock(&tables);
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
            pthread_mutex_unlock(&tables);
            while (late) {
                struct request *r = late;
                late = r->later;
                r->later = NULL;
                if (r->lookup)
                    lookup_finish(r, r->error);
                else
                    requests_finish(r);
            }
            pthread_mutex_lock(&tables);
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
            pthread_mutex_unlock(&tables);
            lookup_finish(r, outcome == GOT ? 0 : outcome == LOST ? ENOENT : EIO);
            pthread_mutex_lock(&tables);
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
    struct request *ready = job_settle(job, outcome == GOT ? 0 : job->error == ENODATA || job->error == EILSEQ ? job->error : EIO);
    pthread_mutex_unlock(&tables);
    requests_finish(ready);
    keep_on_disk(job, kept);
    pthread_mutex_lock(&tables);
    for (int i = 0; i < job->count; i++)
        if (kept[i])
            chunk_release(kept[i]);
    job_free(job);
    struct job *local = NULL;
    ready = backlog_run(&local);
    if (ready || local) {
        pthread_mutex_unlock(&tables);
        requests_finish(ready);
        locals_do(local);
        pthread_mutex_lock(&tables);
    }
}

static void *fetcher_main(void *unused) {
    (void)unused;
    pthread_mutex_lock(&tables);
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
        pthread_mutex_unlock(&tables);
        enum outcome outcome = job->count ? store_read(job) : store_size(job, &size);
        pthread_mutex_lock(&tables);
        running_leave(job);
        abandoned -= job->abandoned;
        job_end(job, outcome, size);
    }
    threads--;
    pthread_mutex_unlock(&tables);
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
    if (chunks_start() < 0)
        return -1;
    pthread_mutex_lock(&tables);
    for (int i = 0; i < settings.parallel; i++)
        fetcher_start();
    int got = threads;
    pthread_mutex_unlock(&tables);
    return got && thread_start(clock_main) == 0 ? 0 : -1;
}

void fetch_state(struct fetch_state *out) {
    *out = (struct fetch_state){.threads = threads, .stuck = abandoned, .memory_bytes = (uint64_t)(memory_buffers - memory_spare) * CHUNK};
    for (const struct request *r = first_request; r; r = r->next)
        out->waiting++;
}
