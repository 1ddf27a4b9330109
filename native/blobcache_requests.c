/* Reads and lookups of the kernel: what they wait for, and their answers. */
#define _GNU_SOURCE
#include "blobcache_tables.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define AWAY_MS 1000

struct request *first_request;
static struct request *last_request, *first_backlog, *last_backlog;

/* --- requests --- */

static void request_enter(struct request *r) {
    r->previous = last_request;
    *(last_request ? &last_request->next : &first_request) = r;
    last_request = r;
    pthread_cond_signal(&tick);
}

void request_leave(struct request *r) {
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

void wait_no_more(struct request *r, struct chunk *c) {
    struct request **at = &c->waiters;
    while (*at && *at != r)
        at = &(*at)->next_waiter[c->number - (*at)->first];
    if (*at)
        *at = r->next_waiter[c->number - r->first];
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

/* Requests that waited for memory, in their order, as far as it goes now. Called and left with the lock. */
struct request *backlog_run(struct job **local) {
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

void backlog_leave(struct request *r) {
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
struct request *job_settle(struct job *job, int error) {
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
        pthread_mutex_lock(&tables);
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
        pthread_mutex_unlock(&tables);
        requests_finish(ready);
    }
    pthread_mutex_lock(&tables);
    job_free(job);
    pthread_mutex_unlock(&tables);
}

void locals_do(struct job *local) {
    while (local) {
        struct job *job = local;
        local = job->next;
        local_do(job);
    }
}

static const char *reason_of(int error) {
    switch (error) {
    case ETIMEDOUT: return "deadline";
    case ENODATA: return "truncated";
    case EILSEQ: return "corrupt";
    case ENOMEM: return "memory";
    default: return "unreadable";
    }
}

/* Answer, let go of the chunks, and go on with those that waited for memory. Without the lock. */
void requests_finish(struct request *ready) {
    while (ready) {
        struct request *r = ready;
        struct job *local = NULL;
        ready = r->later;
        if (r->error) {
            if (!r->low && r->error != EINTR)
                seen_failure(r, r->error, reason_of(r->error));
            reply_error(r->unique, r->error == EINTR ? EINTR : EIO);
        } else
            answer_read(r);
        pthread_mutex_lock(&tables);
        request_leave(r);
        for (int i = 0; i < r->chunks; i++)
            if (r->held[i])
                chunk_release(r->held[i]);
        struct request *more = backlog_run(&local);
        pthread_mutex_unlock(&tables);
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
    pthread_mutex_lock(&tables);
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
    pthread_mutex_unlock(&tables);
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
    pthread_mutex_lock(&tables);
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
    pthread_mutex_unlock(&tables);
    if (known)
        reply_entry(call->unique, node);
    else if (!job) {
        free(r);
        reply_error(call->unique, p ? ENOMEM : ENFILE);
    }
}

void lookup_finish(struct request *r, int error) {
    if (error) {
        seen_failure(r, error, error == ETIMEDOUT ? "deadline" : "missing");
        reply_error(r->unique, error == ENOENT ? ENOENT : EIO);
        node_forget(r->node, 1);
    } else
        reply_entry(r->unique, r->node);
    free(r);
}
