/*
 * chronus: one session of a sandbox, outside of it. A command session runs one command and ends with it; a shell session feeds a shell that
 * keeps its working directory and environment. What was written is kept until edge says that it has recorded it.
 */
#define _GNU_SOURCE
#include "chronus.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_POLL 64

static int64_t next_wake(const struct chronus *c) {
    int64_t at = INT64_MAX, now = clock_now();
    const int64_t times[] = {c->deadline, c->kill_at, c->drain_until};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++)
        if (times[i] && times[i] < at)
            at = times[i];
    if (c->start_untold && c->told_by < at)
        at = c->told_by;
    for (int i = 0; i < 2 && c->current; i++)
        if (c->current->blocked_since[i] && c->current->blocked_since[i] + STALL_NS < at)
            at = c->current->blocked_since[i] + STALL_NS;
    if (c->unreaped_since && now + REAP_NS < at)
        at = now + REAP_NS;
    if (c->current && c->current->held_until && c->current->held_until < at)
        at = c->current->held_until;
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (!x->waiting && x->since + GREETING_NS < at)
            at = x->since + GREETING_NS;
    if (!c->over && c->s->meminfo >= 0 && now + MEMINFO_NS < at)
        at = now + MEMINFO_NS;
    if (at == INT64_MAX)
        return -1;
    /* poll counts in int milliseconds */
    int64_t ms = at <= now ? 0 : (at - now + 999999) / 1000000;
    return ms > 3600000 ? 3600000 : ms;
}

/* Time that the sandbox spent frozen is not the command's: its deadline moves on by as much. Linux before 6.18 does not count it, only
 * tells. */
static bool deadline_moves(struct chronus *c, int64_t *deadline, int64_t now) {
    int64_t frozen = group_frozen_ns(c->group, now), more = frozen - c->frozen_before;
    if (more <= 0)
        return false;
    c->frozen_before = frozen;
    *deadline += more;
    if (*deadline < now + 100000000)
        *deadline = now + 100000000;
    return true;
}

/* A source that a live reader keeps waiting is not at its end, though nothing comes from it. */
static bool source_blocked(struct chronus *c, int64_t now) {
    return c->current && ((c->child.out >= 0 && op_blocked(c->current, 0, now)) || (c->child.err >= 0 && op_blocked(c->current, 1, now)));
}

static void grace_over(struct chronus *c, int64_t now) {
    int shell_pid = c->shell ? c->child.pid : 0;
    c->kill_at = 0;
    if (c->shell && session_group_signal(c->group, SIGKILL, shell_pid) > 0)
        c->kill_at = now + 500000000;
    else
        /* Of a shell session nothing but the shell itself is left, and it does not stop: the session ends with it. */
        kill_tree(c);
}

static void start_tell(struct chronus *c) {
    c->start_untold = false;
    notify(c, CTL_STARTED);
}

static void clock_tick(struct chronus *c) {
    int64_t now = clock_now();
    if (c->start_untold && now >= c->told_by)
        start_tell(c);
    if (c->deadline && now >= c->deadline && !deadline_moves(c, &c->deadline, now)) {
        c->deadline = 0;
        c->kill_at = now + c->request.grace_ns;
        if (c->current)
            c->current->timed_out = true;
        session_group_signal(c->group, SIGTERM, c->shell ? c->child.pid : 0);
    }
    if (c->kill_at && now >= c->kill_at && !deadline_moves(c, &c->kill_at, now))
        grace_over(c, now);
    if (c->unreaped_since)
        leader_reap(c);
    if (c->drain_until && (now >= c->drain_until || !sources_open(c))) {
        if (source_blocked(c, now))
            c->drain_until = now + DRAIN_NS;
        else
            leader_finish(c);
    }
    if (c->current)
        op_drop_stalled(c->current, now, STALL_NS);
}

struct wait {
    struct pollfd fds[MAX_POLL];
    struct {
        struct op *op;
        struct reader *reader;
        struct stranger *stranger;
    } who[MAX_POLL];
    int count;
};

static struct pollfd *wait_for(struct wait *w, int fd, short events) {
    if (fd < 0 || w->count == MAX_POLL)
        return NULL;
    w->who[w->count].op = NULL;
    w->who[w->count].reader = NULL;
    w->who[w->count].stranger = NULL;
    w->fds[w->count] = (struct pollfd){.fd = fd, .events = events};
    return &w->fds[w->count++];
}

static void wait_source(struct wait *w, struct op *op, int stream, int fd) {
    if (fd >= 0 && (!op || !op_blocked(op, stream, clock_now())))
        wait_for(w, fd, POLLIN);
}

static void wait_build(struct chronus *c, struct wait *w) {
    w->count = 0;
    /* Sending first makes room for what is still in the pipes. */
    for (struct op *op = c->ops; op; op = op->next)
        for (struct reader *r = op->readers; r; r = r->next)
            r->full = !r->dead && reader_push(op, r);
    wait_for(w, c->ctl, POLLIN);
    if (!c->unreaped_since)
        wait_for(w, c->child.pidfd, POLLIN);
    wait_for(w, c->child.status, POLLIN);
    struct op *op = c->current ? c->current : c->early;
    wait_source(w, op, 0, c->child.out);
    wait_source(w, op, 1, c->child.err);
    if (c->input_len || (c->input_eof && c->child.in >= 0))
        wait_for(w, c->child.in, POLLOUT);
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (!x->waiting && wait_for(w, x->sock, POLLIN))
            w->who[w->count - 1].stranger = x;
    for (op = c->ops; op; op = op->next)
        for (struct reader *r = op->readers; r; r = r->next) {
            if (r->dead || !wait_for(w, r->sock, (short)(POLLIN | (r->full ? POLLOUT : 0))))
                continue;
            w->who[w->count - 1].op = op;
            w->who[w->count - 1].reader = r;
        }
}

/* The next message of aether and the connection that came with it. Ends this process where aether's end of the line has. */
static char ctl_take(const struct sandbox *s, int ctl, char *id, int *conn, int group) {
    struct inbox in = {0};
    *conn = -1;
    long n = inbox_fill(&in, ctl, conn);
    if (n == 0) {
        /* aether has gone, and the sandbox with it; or it needs this chronus no more, and then nothing runs */
        session_group_kill(group);
        session_group_remove(s, getpid());
        _exit(0);
    }
    char kind = n > 0 ? (char)in.buf[0] : 0;
    if (kind == CTL_NEW && id && n - 1 <= ID_MAX) {
        memcpy(id, in.buf + 1, (size_t)n - 1);
        id[n - 1] = 0;
    }
    inbox_free(&in);
    return kind;
}

/* What aether has still sent to a chronus that leaves. */
static void ctl_refuse(int ctl) {
    for (;;) {
        struct inbox in = {0};
        int conn = -1;
        struct pollfd p = {.fd = ctl, .events = POLLIN};
        long n = poll(&p, 1, 0) == 1 ? inbox_fill(&in, ctl, &conn) : -1;
        inbox_free(&in);
        if (n <= 0)
            return;
        if (conn >= 0) {
            refuse(conn, "not_found", 0, "no such session");
            close(conn);
        }
    }
}

static void ctl_read(struct chronus *c) {
    int conn;
    ctl_take(c->s, c->ctl, NULL, &conn, c->group);
    if (conn >= 0)
        stranger_add(c, conn);
}

static void wait_handle(struct chronus *c, struct wait *w) {
    bool exited = false;
    for (int i = 0; i < w->count; i++) {
        struct pollfd *p = &w->fds[i];
        if (!p->revents)
            continue;
        if (w->who[i].stranger)
            stranger_read(c, w->who[i].stranger);
        else if (w->who[i].reader) {
            if (p->revents & (POLLIN | POLLHUP | POLLERR))
                reader_read(c, w->who[i].op, w->who[i].reader);
        } else if (p->fd == c->ctl)
            ctl_read(c);
        else if (p->fd == c->child.pidfd)
            exited = true;
        else if (p->fd == c->child.status)
            shell_status(c);
        else if (p->fd == c->child.in && p->revents & (POLLERR | POLLHUP) && !c->request.tty)
            close_fd(&c->child.in);
    }
    drain_sources(c);
    if (c->input_len || c->input_eof)
        input_flush(c);
    if (exited)
        leader_reap(c);
}

static void serve(struct chronus *c) {
    struct wait w;
    while (!c->close_wanted && !(c->over && !c->ops)) {
        wait_build(c, &w);
        int n = poll(w.fds, (nfds_t)w.count, (int)next_wake(c));
        if (n > 0)
            wait_handle(c, &w);
        else if (!c->over && c->s->meminfo >= 0)
            meminfo_refresh(c->s);
        clock_tick(c);
        shell_feed(c);
        sweep(c);
        end_tell(c);
    }
}

static void give_up(struct chronus *c, int conn, struct trouble *t) {
    c->over = true;
    leader_wait(c);
    /* aether first: whoever has our answer may use the id again at once. */
    session_forget(c);
    send_trouble(conn, t);
    close(conn);
}

static void command_begin(struct chronus *c, int conn, struct inbox *in) {
    struct op *op = c->current;
    struct request *r = &c->request;
    op->pid = c->child.pid;
    c->deadline = r->timeout_ns ? op->started + r->timeout_ns : 0;
    struct reader *reader = reader_new(op, conn, r->live, r->credit);
    if (!reader)
        _exit(1);
    reader->in = *in;
    *in = (struct inbox){0};
    if (r->live || r->background)
        reader_started(op, reader, c->id);
    if (r->stdin_data) {
        input_append(c, r->stdin_data, r->stdin_length);
        c->input_eof = true;
        input_flush(c);
    }
    stdin_welcome(c, reader);
    reader_frames(c, op, reader);
}

static void shell_begin(struct chronus *c, int conn) {
    struct op told = {.pid = c->child.pid, .started_real = now_ns(CLOCK_REALTIME)};
    struct reader *r = reader_new(&told, conn, false, 0);
    if (!r)
        _exit(1);
    reader_started(&told, r, c->id);
    reader_push(&told, r);
    reader_free(&told, r);
}

/* From the request to a running leader; 0, or the trouble. */
static int begin(struct chronus *c, int conn, struct inbox *in, bool reused, struct trouble *t) {
    struct frame f;
    if (recv_frame(conn, in, &f, 30000) < 0)
        return fail(t, "invalid_argument", NULL, -1, "cannot read the request");
    c->shell = f.kind == K_SHELL;
    if (request_parse(&c->request, &f, t) < 0)
        return -1;
    c->background = c->shell || c->request.background;
    if (c->group < 0)
        return fail(t, "overloaded", NULL, 0, "cannot make the session's cgroup");
    meminfo_refresh(c->s);
    if (!c->shell) {
        if (!(c->current = c->ops = op_new(c->id, (size_t)c->request.output_limit)))
            return fail(t, "overloaded", NULL, ENOMEM, "no memory to keep output");
        c->current->oom_before = oom_kills(c->s);
    }
    if (reused && c->request.timeout_ns)
        c->frozen_before = group_frozen_ns(c->group, clock_now());
    return spawn(c->s, &c->request, c->group, c->shell, &c->child, t);
}

/* `spent`: CPU time that what ran in the group before has taken; added to. */
static bool session(struct sandbox *s, int ctl, int conn, const char *id, int group, int64_t *spent, bool reused) {
    struct chronus c = {
        .s = s, .ctl = ctl, .id = id, .group = group, .child = {.pid = -1, .pidfd = -1, .in = -1, .out = -1, .err = -1, .status = -1}};
    c.group_cpu_at_start = *spent;
    struct inbox in = {0};
    struct trouble t = {0};
    if (begin(&c, conn, &in, reused, &t) < 0) {
        give_up(&c, conn, &t);
        inbox_free(&in);
        return !c.unfit;
    }
    /* Who waits for nothing but its end hears of it by that. */
    c.told_by = clock_now() + (c.background || c.request.live ? 0 : NEWS_NS);
    c.start_untold = true;
    if (c.told_by <= clock_now())
        start_tell(&c);
    if (c.shell)
        shell_begin(&c, conn);
    else
        command_begin(&c, conn, &in);
    inbox_free(&in);
    serve(&c);
    *spent = c.shell ? group_cpu_ns(group) : *spent + c.leader_cpu;
    session_forget(&c);
    return !c.unfit;
}

void chronus_main(struct sandbox *s, int ctl, int conn, const char *id) {
    char next[ID_MAX + 1];
    int pid = getpid();
    bool reused = false;
    int64_t spent = 0;
    prctl(PR_SET_NAME, "chronus");
    int group = session_group_make(s, pid);
    if (id)
        snprintf(next, sizeof next, "%s", id);
    for (;;) {
        if (conn >= 0) {
            if (!session(s, ctl, conn, next, group, &spent, reused))
                break;
            reused = true;
        }
        struct pollfd p = {.fd = ctl, .events = POLLIN};
        if (poll(&p, 1, -1) < 0)
            continue;
        if (ctl_take(s, ctl, next, &conn, group) != CTL_NEW && conn >= 0) {
            /* for a session that has just been forgotten */
            refuse(conn, "not_found", 0, "no such session");
            close(conn);
            conn = -1;
        }
    }
    ctl_refuse(ctl);
    session_group_remove(s, pid);
    _exit(0);
}
