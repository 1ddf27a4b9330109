/*
 * chronus: one session of a sandbox, outside of it. A command session runs one command and ends with it; a shell session feeds a shell that
 * keeps its working directory and environment. What was written is kept until edge says that it has recorded it.
 */
#define _GNU_SOURCE
#include "chronus.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
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
    if (c->current && c->current->blocked_since && c->current->blocked_since + STALL_NS < at)
        at = c->current->blocked_since + STALL_NS;
    if (c->current && c->current->held_until && c->current->held_until < at)
        at = c->current->held_until;
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (!x->waiting && x->since + GREETING_NS < at)
            at = x->since + GREETING_NS;
    if (!c->over && c->s->meminfo >= 0 && now + MEMINFO_NS < at)
        at = now + MEMINFO_NS;
    return at == INT64_MAX ? -1 : at <= now ? 0 : (at - now + 999999) / 1000000;
}

/* Time that the sandbox spent frozen is not the command's: its deadline moves on by as much. Linux before 6.18 does not count it, only
 * tells. */
static bool deadline_moves(struct chronus *c, int64_t now) {
    int64_t frozen = group_frozen_ns(c->group, now), more = frozen - c->frozen_before;
    if (more <= 0)
        return false;
    c->frozen_before = frozen;
    c->deadline += more;
    if (c->deadline < now + 100000000)
        c->deadline = now + 100000000;
    return true;
}

static void clock_tick(struct chronus *c) {
    int64_t now = clock_now();
    int shell_pid = c->shell ? c->child.pid : 0;
    if (c->deadline && now >= c->deadline && !deadline_moves(c, now)) {
        c->deadline = 0;
        c->kill_at = now + c->request.grace_ns;
        if (c->current)
            c->current->timed_out = true;
        session_group_signal(c->group, SIGTERM, shell_pid);
    }
    if (c->kill_at && now >= c->kill_at) {
        c->kill_at = 0;
        if (!c->shell) {
            session_group_kill(c->group);
        } else if (session_group_signal(c->group, SIGKILL, shell_pid) == 0) {
            /* Nothing but the shell itself is left, and it does not stop: the session ends with it. */
            session_group_kill(c->group);
        } else {
            c->kill_at = now + 500000000;
        }
    }
    if (c->drain_until && (now >= c->drain_until || !sources_open(c)))
        leader_finish(c);
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
    if (!op || op_has_room(op, stream))
        wait_for(w, fd, POLLIN);
    else if (!op->blocked_since)
        op->blocked_since = clock_now();
}

static void wait_build(struct chronus *c, struct wait *w) {
    w->count = 0;
    /* Sending first makes room for what is still in the pipes. */
    for (struct op *op = c->ops; op; op = op->next)
        for (struct reader *r = op->readers; r; r = r->next)
            r->full = !r->dead && reader_push(op, r);
    wait_for(w, c->ctl, POLLIN);
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

static void ctl_read(struct chronus *c) {
    struct inbox in = {0};
    int fd = -1;
    long n = inbox_fill(&in, c->ctl, &fd);
    inbox_free(&in);
    if (n == 0) {
        /* aether has gone, and the sandbox with it */
        session_group_kill(c->group);
        _exit(1);
    }
    if (fd >= 0)
        stranger_add(c, fd);
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

_Noreturn static void serve(struct chronus *c) {
    struct wait w;
    for (;;) {
        wait_build(c, &w);
        int n = poll(w.fds, (nfds_t)w.count, (int)next_wake(c));
        if (n > 0)
            wait_handle(c, &w);
        else if (!c->over && c->s->meminfo >= 0)
            meminfo_refresh(c->s);
        clock_tick(c);
        shell_feed(c);
        sweep(c);
    }
}

_Noreturn static void give_up(struct chronus *c, int conn, struct trouble *t) {
    if (c->child.pid > 0)
        while (waitpid(c->child.pid, NULL, __WALL) < 0 && errno == EINTR)
            ;
    if (c->group >= 0)
        session_group_remove(c->s, c->id);
    /* aether first: whoever has our answer may use the id again at once. */
    notify(c, CTL_FORGOTTEN);
    send_trouble(conn, t);
    _exit(0);
}

static void command_begin(struct chronus *c, int conn, struct inbox *in) {
    struct op *op = c->current;
    struct request *r = &c->request;
    op->pid = c->child.pid;
    c->deadline = r->timeout_ns ? op->started + r->timeout_ns : 0;
    c->frozen_before = 0;
    struct reader *reader = reader_new(op, conn, r->live, r->credit);
    if (!reader)
        _exit(1);
    reader->in = *in;
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
    c->input_eof = false;
}

void chronus_session(struct sandbox *s, int conn, int ctl, const char *id) {
    struct chronus c = {.s = s, .ctl = ctl, .id = id, .group = -1};
    struct inbox in = {0};
    struct frame f;
    struct trouble t = {0};
    prctl(PR_SET_NAME, "chronus");
    signal(SIGPIPE, SIG_IGN);
    if (recv_frame(conn, &in, &f, 30000) < 0) {
        fail(&t, "invalid_argument", NULL, -1, "cannot read the request");
        give_up(&c, conn, &t);
    }
    c.shell = f.kind == K_SHELL;
    if (request_parse(&c.request, &f, &t) < 0)
        give_up(&c, conn, &t);
    c.background = c.shell || c.request.background;
    if ((c.group = session_group_make(s, id)) < 0) {
        fail(&t, "overloaded", NULL, -1, "cannot make the session's cgroup");
        give_up(&c, conn, &t);
    }
    meminfo_refresh(s);
    if (!c.shell) {
        c.current = c.ops = op_new(id, (size_t)c.request.output_limit);
        if (!c.current)
            _exit(1);
        c.current->oom_before = oom_kills(s);
    }
    if (spawn(s, &c.request, c.group, c.shell, &c.child, &t) < 0)
        give_up(&c, conn, &t);
    notify(&c, CTL_STARTED);
    if (c.shell)
        shell_begin(&c, conn);
    else
        command_begin(&c, conn, &in);
    serve(&c);
}
