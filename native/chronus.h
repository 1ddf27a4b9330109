/* The inside of a chronus, shared by its files: session.c (how it ends), input.c, shell.c, requests.c and chronus.c (the loop). */
#ifndef DSEC_CHRONUS_H
#define DSEC_CHRONUS_H

#include "op.h"

#include <time.h>

#define DRAIN_NS    (100 * 1000000LL)   /* how long a grandchild may hold the pipes after the leader is gone */
#define STALL_NS    (30 * 1000000000LL) /* how long a live reader may keep a command waiting */
#define REAP_NS     (20 * 1000000LL)
#define UNREAPED_NS (1 * 1000000000LL) /* how long a tracer may keep a dead leader */
#define MAX_READERS 40
#define TAKEOVER_NS (2 * 1000000000LL)  /* how long the output of a live reader that left waits for another */
#define GREETING_NS (10 * 1000000000LL) /* how long a connection may take to say what it wants */
#define MEMINFO_NS  (2 * 1000000000LL)  /* how old /proc/meminfo may be while something runs */
#define EARLY_KEEPS (256 << 10)         /* of what a shell's background jobs write between two commands */
#define NEWS_NS     (20 * 1000000LL)    /* what ends sooner than this is not worth a word to aether that it has begun */
#define SHELL_KEEPS 256                 /* finished commands of a shell that nobody has acknowledged */

/* A connection that has not said yet what it wants, or a RUN that waits for its turn. */
struct stranger {
    struct stranger *next;
    int sock;
    struct inbox in;
    int64_t since;
    bool closing; /* it asked to close the session */
    bool waiting; /* its RUN, already parsed, waits */
    struct request run;
};

struct chronus {
    struct sandbox *s;
    const char *id;
    int ctl, group;
    bool shell, background, over; /* over: the leader has gone */
    bool emptied;                 /* the group was seen empty after that: nothing enters it any more */
    bool start_untold, end_untold;
    bool close_wanted, unfit; /* unfit: the group was killed or something stays in it, so this process takes no other session */
    struct child child;
    struct op *ops, *current, *early; /* early: output of a shell between two commands, which the next one gets */
    struct stranger *strangers;
    struct request request;
    uint8_t *input; /* stdin not yet taken by the guest */
    size_t input_len, input_cap, input_owed;
    bool input_eof;
    int64_t deadline, kill_at, drain_until, told_by;
    int64_t unreaped_since; /* the leader has ended, but somebody traces it */
    int64_t frozen_before;  /* of the group's frozen time, what the deadline has in it */
    int64_t group_cpu_at_start, leader_cpu;
    char status[64];
    size_t status_len;
};

static inline int64_t clock_now(void) {
    return now_ns(CLOCK_MONOTONIC);
}

/* session.c */
bool sources_open(const struct chronus *c);
void notify(struct chronus *c, enum ctl_kind kind);
int64_t group_cpu_ns(int group);
int64_t group_frozen_ns(int group, int64_t now);
void close_fd(int *fd);
struct op *op_find(struct chronus *c, const char *id);
void op_end(struct chronus *c, struct op *op);
int kill_tree(struct chronus *c);
/* Kills what is left, frees what was kept, tells aether, answers whoever asked for the end. */
void session_forget(struct chronus *c);
void session_over(struct chronus *c);
void end_tell(struct chronus *c);
/* True if there may be more at once. */
bool drain_sources(struct chronus *c);
void leader_finish(struct chronus *c);
void leader_reap(struct chronus *c);
/* The leader, where it is dead or dying, bounded in time. */
void leader_wait(struct chronus *c);

/* input.c */
bool input_append(struct chronus *c, const void *data, size_t len);
void input_flush(struct chronus *c);
void stdin_welcome(struct chronus *c, struct reader *r);

/* shell.c */
void shell_feed(struct chronus *c);
void shell_status(struct chronus *c);
void run_queue(struct chronus *c, struct stranger *x, const struct frame *f);

/* requests.c */
void stranger_add(struct chronus *c, int sock);
void stranger_free(struct stranger *x);
void stranger_read(struct chronus *c, struct stranger *x);
void reader_frames(struct chronus *c, struct op *op, struct reader *r);
void reader_read(struct chronus *c, struct op *op, struct reader *r);
void sweep(struct chronus *c);

#endif
