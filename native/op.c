#define _GNU_SOURCE
#include "op.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SMALL  (16 << 10)
#define CHUNK  (256 << 10)
#define GATHER (64 << 10)

struct op *op_new(const char *id, size_t limit) {
    struct op *op = calloc(1, sizeof *op);
    if (!op || !(op->id = strdup(id)) || keep_open(&op->keep[0], limit, LIVE_RING) < 0 || keep_open(&op->keep[1], limit, LIVE_RING) < 0) {
        if (op)
            op_free(op);
        return NULL;
    }
    op->started_real = now_ns(CLOCK_REALTIME);
    op->started = now_ns(CLOCK_MONOTONIC);
    op->exit_code = -1;
    return op;
}

void op_free(struct op *op) {
    while (op->readers)
        reader_free(op, op->readers);
    keep_close(&op->keep[0]);
    keep_close(&op->keep[1]);
    free(op->id);
    free(op);
}

struct reader *reader_new(struct op *op, int sock, bool live, int64_t credit) {
    struct reader *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->sock = sock;
    r->live = live;
    r->credit[0] = r->credit[1] = credit;
    r->next = op->readers;
    op->readers = r;
    return r;
}

void reader_free(struct op *op, struct reader *r) {
    for (struct reader **at = &op->readers; *at; at = &(*at)->next)
        if (*at == r) {
            *at = r->next;
            break;
        }
    close(r->sock);
    inbox_free(&r->in);
    out_free(&r->pending);
    free(r);
}

void reader_started(struct op *op, struct reader *r, const char *session) {
    out_begin(&r->pending, K_STARTED, 0);
    out_text(&r->pending, T_SESSION_ID, session);
    out_number(&r->pending, T_PID, op->pid);
    out_number(&r->pending, T_STARTED_NS, op->started_real);
    out_end(&r->pending);
}

static void exited_frame(const struct op *op, struct out *o) {
    out_begin(o, K_EXITED, 0);
    if (op->signal)
        out_number(o, T_SIGNAL, op->signal);
    else if (op->exit_code >= 0)
        out_number(o, T_EXIT_CODE, op->exit_code);
    out_number(o, T_TIMED_OUT, op->timed_out);
    out_number(o, T_OOM, op->oom);
    out_number(o, T_WALL_NS, op->wall_ns);
    out_number(o, T_CPU_NS, op->cpu_ns);
    out_number(o, T_MAXRSS, op->maxrss);
    out_number(o, T_STDOUT_TOTAL, (int64_t)op->keep[0].total);
    out_number(o, T_STDERR_TOTAL, (int64_t)op->keep[1].total);
    out_number(o, T_STARTED_NS, op->started_real);
    out_end(o);
}

static void data_header(uint8_t *to, int stream, uint64_t offset, uint32_t size) {
    struct out o = {.buf = to, .cap = 16};
    out_begin(&o, K_DATA, (uint16_t)(stream + 1));
    uint8_t at[8];
    for (int i = 0; i < 8; i++)
        at[i] = (uint8_t)(offset >> 8 * i);
    out_raw(&o, at, 8);
    o.len += size; /* the length counts the bytes that follow from elsewhere */
    out_end(&o);
}

/* 1 sent whole, 0 the socket is full, -1 the reader is gone. */
static int flush_pending(struct reader *r) {
    while (r->pending_sent < r->pending.len) {
        ssize_t n = send(r->sock, r->pending.buf + r->pending_sent, r->pending.len - r->pending_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0)
            return errno == EAGAIN ? 0 : errno == EINTR ? 1 : -1;
        r->pending_sent += (size_t)n;
    }
    out_reset(&r->pending);
    r->pending_sent = 0;
    return 1;
}

static int flush_chunk(struct op *op, struct reader *r) {
    int s = r->chunk_stream;
    while (r->chunk) {
        uint8_t header[16];
        uint32_t whole = r->chunk + 16;
        size_t size;
        const uint8_t *data = keep_at(&op->keep[s], r->offset[s], &size);
        struct iovec iov[2];
        int count = 0;
        if (r->chunk_sent < 16) {
            data_header(header, s, r->offset[s], r->chunk);
            iov[count++] = (struct iovec){header + r->chunk_sent, 16 - r->chunk_sent};
            iov[count++] = (struct iovec){(void *)data, r->chunk};
        } else {
            iov[count++] = (struct iovec){(void *)(data + (r->chunk_sent - 16)), whole - r->chunk_sent};
        }
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)count};
        ssize_t n = sendmsg(r->sock, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : -1;
        r->chunk_sent += (uint32_t)n;
        if (r->chunk_sent == whole) {
            r->offset[s] += r->chunk;
            r->chunk = r->chunk_sent = 0;
        }
    }
    return 1;
}

/* Puts the next output of a stream under way: 1 something was added, 0 nothing to send. */
static int next_data(struct op *op, struct reader *r, int s) {
    struct keep *k = &op->keep[s];
    size_t size;
    if ((!r->live && !op->ended) || (r->live && r->credit[s] <= 0))
        return 0;
    r->offset[s] = keep_from(k, r->offset[s], op->ended && !r->live);
    if (r->offset[s] >= k->total)
        return 0;
    const uint8_t *data = keep_at(k, r->offset[s], &size);
    if (size > CHUNK)
        size = CHUNK;
    if (r->live && (int64_t)size > r->credit[s])
        size = (size_t)r->credit[s];
    r->credit[s] -= (int64_t)size;
    if (size > SMALL) {
        r->chunk_stream = s;
        r->chunk = (uint32_t)size;
        return 1;
    }
    uint8_t header[16];
    data_header(header, s, r->offset[s], (uint32_t)size);
    out_raw(&r->pending, header, 16);
    out_raw(&r->pending, data, size);
    r->offset[s] += size;
    return 1;
}

static void next_eof(struct op *op, struct reader *r, int s) {
    if (r->eof_sent[s] || !op->closed[s] || (!r->live && !op->ended) ||
        keep_from(&op->keep[s], r->offset[s], op->ended && !r->live) < op->keep[s].total)
        return;
    out_begin(&r->pending, K_EOF, (uint16_t)(s + 1));
    out_end(&r->pending);
    r->eof_sent[s] = true;
}

bool reader_push(struct op *op, struct reader *r) {
    for (;;) {
        int rc = r->chunk && (r->chunk_sent || r->pending.len == 0) ? flush_chunk(op, r) : 1;
        if (rc == 1 && !r->chunk && r->pending.len < GATHER) {
            bool more = next_data(op, r, 0) || next_data(op, r, 1);
            if (more && !r->chunk)
                continue;
            if (!more) {
                next_eof(op, r, 0);
                next_eof(op, r, 1);
                if (op->ended && r->eof_sent[0] && r->eof_sent[1] && !r->exited_sent) {
                    exited_frame(op, &r->pending);
                    r->exited_sent = true;
                }
            }
        }
        if (rc == 1 && r->pending.len)
            rc = flush_pending(r);
        else if (rc == 1 && !r->chunk)
            return false;
        if (rc < 0 || r->pending.failed)
            r->dead = true;
        if (rc <= 0)
            return rc == 0;
        if (!r->chunk && r->exited_sent && !r->pending.len)
            return false;
    }
}

void op_push(struct op *op) {
    /* The dead are only marked: whoever is handling events may still hold one of them. */
    for (struct reader *r = op->readers; r; r = r->next)
        reader_push(op, r);
}

static uint64_t oldest_unsent(const struct op *op, int s) {
    uint64_t oldest = op->held_until ? op->held_offset[s] : UINT64_MAX;
    for (const struct reader *r = op->readers; r; r = r->next)
        if (r->live && r->offset[s] < oldest) /* of the dead too: until the sweep it is theirs that another takes over */
            oldest = r->offset[s];
    return oldest;
}

bool op_has_room(struct op *op, int stream) {
    size_t size;
    keep_space(&op->keep[stream], oldest_unsent(op, stream), &size);
    return size > 0;
}

bool op_blocked(struct op *op, int stream, int64_t now) {
    if (op_has_room(op, stream))
        op->blocked_since[stream] = 0;
    else if (!op->blocked_since[stream])
        op->blocked_since[stream] = now;
    return op->blocked_since[stream] != 0;
}

long op_take(struct op *op, int stream, int fd) {
    size_t size;
    uint8_t *at = keep_space(&op->keep[stream], oldest_unsent(op, stream), &size);
    if (!size) {
        errno = EAGAIN;
        return -1;
    }
    ssize_t n = read(fd, at, size > DATA_MAX ? DATA_MAX : size);
    if (n > 0)
        keep_wrote(&op->keep[stream], (size_t)n);
    return n;
}

void op_append(struct op *op, int stream, const void *data, size_t size) {
    const uint8_t *from = data;
    while (size) {
        size_t room;
        uint8_t *at = keep_space(&op->keep[stream], UINT64_MAX, &room);
        size_t n = size < room ? size : room;
        memcpy(at, from, n);
        keep_wrote(&op->keep[stream], n);
        from += n;
        size -= n;
    }
}

/* Then nothing has to be held for whoever takes its place: another reader needs all that it needed. */
static bool another_needs_it(const struct op *op, const struct reader *gone) {
    for (const struct reader *r = op->readers; r; r = r->next)
        if (r != gone && r->live && !r->dead && r->offset[0] <= gone->offset[0] && r->offset[1] <= gone->offset[1])
            return true;
    return false;
}

void op_sweep(struct op *op, int64_t now, int64_t hold_ns) {
    if (op->held_until && now >= op->held_until)
        op->held_until = 0;
    for (struct reader *r = op->readers, *next; r; r = next) {
        next = r->next;
        if (!r->dead)
            continue;
        if (r->live && !op->ended && !another_needs_it(op, r)) {
            for (int s = 0; s < 2; s++)
                if (!op->held_until || r->offset[s] < op->held_offset[s])
                    op->held_offset[s] = r->offset[s];
            op->held_until = now + hold_ns;
        }
        reader_free(op, r);
    }
}

void op_drop_stalled(struct op *op, int64_t now, int64_t limit_ns) {
    bool due = false;
    for (int s = 0; s < 2; s++)
        if (op->blocked_since[s] && now - op->blocked_since[s] >= limit_ns) {
            due = true;
            op->blocked_since[s] = 0;
        }
    if (!due)
        return;
    struct reader *worst = NULL;
    uint64_t lag, most = 0;
    for (struct reader *r = op->readers; r; r = r->next) {
        if (!r->live)
            continue;
        lag = op->keep[0].total - r->offset[0] + op->keep[1].total - r->offset[1];
        if (!worst || lag > most) {
            worst = r;
            most = lag;
        }
    }
    if (worst)
        reader_free(op, worst);
}
