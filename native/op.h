/* One command's outcome in the making: what it wrote, who reads it live, how it ended. */
#ifndef DSEC_OP_H
#define DSEC_OP_H

#include "keep.h"
#include "spawn.h"

#define STDIN_WINDOW (256 << 10)
#define LIVE_RING    (2 << 20)

/* A connection that follows an op. Frames gather in `pending`; large output is sent from where it is kept, as one chunk at a time. */
struct reader {
    struct reader *next;
    int sock;
    struct inbox in;
    bool live, stdin_told, exited_sent, dead, full; /* full: the socket takes no more now */
    bool eof_sent[2];
    uint64_t offset[2];
    int64_t credit[2];
    struct out pending;
    size_t pending_sent;
    uint32_t chunk, chunk_sent;
    int chunk_stream;
};

struct op {
    struct op *next;
    char *id;
    struct keep keep[2];
    bool closed[2]; /* the stream's end was seen */
    bool ended, acked, timed_out, oom;
    int exit_code, signal;
    int64_t started_real, started, wall_ns, cpu_ns, maxrss, oom_before;
    int pid;
    struct reader *readers;
    int64_t blocked_since[2]; /* since when a live reader keeps the stream waiting, 0 if none does */
    /* A live reader has just left: what it had not been sent is kept for one that takes over. */
    int64_t held_until;
    uint64_t held_offset[2];
};

struct op *op_new(const char *id, size_t limit);
void op_free(struct op *op);
struct reader *reader_new(struct op *op, int sock, bool live, int64_t credit);
void reader_free(struct op *op, struct reader *r);
/* Sends what can be sent now; true if it waits for the socket. */
bool reader_push(struct op *op, struct reader *r);
void op_push(struct op *op);
void reader_started(struct op *op, struct reader *r, const char *session);
/* One read from a source into the op: bytes, 0 at its end, -1 with EAGAIN (nothing there, or no room). */
long op_take(struct op *op, int stream, int fd);
/* Output that was read elsewhere. */
void op_append(struct op *op, int stream, const void *data, size_t size);
bool op_has_room(struct op *op, int stream);
/* True while a live reader leaves no room for more of a stream; it is noted since when. */
bool op_blocked(struct op *op, int stream, int64_t now);
/* Takes out the readers that are gone. */
void op_sweep(struct op *op, int64_t now, int64_t hold_ns);
/* Where a live reader has kept the command waiting for `limit_ns`, the one that is furthest behind is let go. */
void op_drop_stalled(struct op *op, int64_t now, int64_t limit_ns);

#endif
