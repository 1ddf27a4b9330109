/*
 * chronus: one session of a sandbox, outside of it. A command session runs one command and ends with it; a shell session feeds a shell that keeps its
 * working directory and environment. What was written is kept until edge says that it has recorded it.
 */
#define _GNU_SOURCE
#include "op.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define DRAIN_NS (100 * 1000000LL)     /* how long a grandchild may hold the pipes after the leader is gone */
#define STALL_NS (30 * 1000000000LL)   /* how long a live reader may keep a command waiting */
#define GREETING_NS (10 * 1000000000LL)
#define MEMINFO_NS (2 * 1000000000LL) /* how old /proc/meminfo may be while something runs */
#define SHELL_KEEPS 256                /* finished commands of a shell that nobody has acknowledged */
#define MAX_POLL 64

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
    struct child child;
    struct op *ops, *current, *early; /* early: output of a shell between two commands, which the next one gets */
    struct stranger *strangers;
    struct request request;
    uint8_t *input; /* stdin not yet taken by the guest */
    size_t input_len, input_cap, input_owed;
    bool input_eof;
    int64_t deadline, kill_at, drain_until;
    int64_t group_cpu_at_start;
    char status[64];
    size_t status_len;
};

static int64_t clock_now(void) { return now_ns(CLOCK_MONOTONIC); }

static void notify(struct chronus *c, enum ctl_kind kind) {
    struct ctl_note note = {kind, c->child.pid, c->current ? c->current->started_real : 0, c->background, c->shell};
    if (send(c->ctl, &note, sizeof note, MSG_NOSIGNAL) < 0 && errno == EPIPE)
        _exit(1);
}

static int64_t group_cpu_ns(int group) {
    char buf[256];
    int fd = openat(group, "cpu.stat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, buf, sizeof buf - 1);
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return 0;
    buf[n] = 0;
    char *at = strstr(buf, "usage_usec ");
    return at ? atoll(at + strlen("usage_usec ")) * 1000 : 0;
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* --- stdin --- */

static bool input_append(struct chronus *c, const void *data, size_t len) {
    if (c->input_eof || c->child.in < 0 || len == 0)
        return true; /* a command that closed its stdin takes no more, and that is no fault of the writer */
    if (c->input_len + len > c->input_cap) {
        uint8_t *buf = realloc(c->input, c->input_len + len);
        if (!buf)
            return false;
        c->input = buf;
        c->input_cap = c->input_len + len;
    }
    memcpy(c->input + c->input_len, data, len);
    c->input_len += len;
    return true;
}

static void credit_stdin(struct chronus *c) {
    if (!c->current || !c->input_owed)
        return;
    for (struct reader *r = c->current->readers; r; r = r->next) {
        if (!r->stdin_told)
            continue;
        uint8_t bytes[8];
        for (int i = 0; i < 8; i++)
            bytes[i] = (uint8_t)((uint64_t)c->input_owed >> 8 * i);
        out_begin(&r->pending, K_CREDIT, 0);
        out_raw(&r->pending, bytes, 8);
        out_end(&r->pending);
    }
    c->input_owed = 0;
}

static void input_flush(struct chronus *c) {
    size_t done = 0;
    while (c->child.in >= 0 && done < c->input_len) {
        ssize_t n = write(c->child.in, c->input + done, c->input_len - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0) {
            close_fd(&c->child.in);
            done = c->input_len;
            break;
        }
        done += (size_t)n;
    }
    memmove(c->input, c->input + done, c->input_len - done);
    c->input_len -= done;
    if (!c->shell)
        c->input_owed += done;
    if (!c->input_len && c->input_eof && c->child.in >= 0) {
        /* A terminal has no half-close: end of file is a character. */
        char eof = 4;
        if (c->request.tty && write(c->child.in, &eof, 1) < 0)
            errno = 0;
        close_fd(&c->child.in);
    }
    credit_stdin(c);
}

static void stdin_welcome(struct chronus *c, struct reader *r) {
    if (c->shell || c->child.in < 0 || c->request.stdin_data)
        return;
    r->stdin_told = true;
    uint8_t bytes[8];
    size_t window = c->input_len < STDIN_WINDOW ? STDIN_WINDOW - c->input_len : 0;
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)((uint64_t)window >> 8 * i);
    out_begin(&r->pending, K_CREDIT, 0);
    out_raw(&r->pending, bytes, 8);
    out_end(&r->pending);
}

/* --- the end of a command, of the session --- */

static void op_end(struct chronus *c, struct op *op) {
    op->closed[0] = op->closed[1] = true;
    op->ended = true;
    op->wall_ns = clock_now() - op->started;
    op->oom = oom_kills(c->s) > op->oom_before;
    if (c->current == op)
        c->current = NULL;
    op_push(op);
}

static void shell_feed(struct chronus *c);
static void sweep(struct chronus *c);

_Noreturn static void session_forget(struct chronus *c) {
    if (!c->over) {
        session_group_kill(c->group);
        while (waitpid(-1, NULL, __WALL) < 0 && errno == EINTR)
            ;
    }
    session_group_kill(c->group);
    session_group_remove(c->s, c->id);
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (x->closing)
            send_ok(x->sock);
    notify(c, CTL_FORGOTTEN);
    _exit(0);
}

static void refuse(int sock, const char *code, const char *message) {
    struct trouble t = {0};
    fail(&t, code, NULL, 0, "%s", message);
    send_trouble(sock, &t);
}

static void session_over(struct chronus *c) {
    if (c->over)
        return;
    c->over = true;
    close_fd(&c->child.out);
    close_fd(&c->child.err);
    close_fd(&c->child.in);
    close_fd(&c->child.status);
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (x->waiting) {
            refuse(x->sock, "not_found", "the session's shell has ended");
            x->waiting = false;
            close_fd(&x->sock);
        }
    notify(c, CTL_ENDED);
}

static void drain_sources(struct chronus *c) {
    int *sources[] = {&c->child.out, &c->child.err};
    for (int i = 0; i < 2; i++) {
        for (int round = 0; *sources[i] >= 0 && round < 8; round++) {
            struct op *op = c->current ? c->current : c->early;
            if (!op && !(op = c->early = op_new("", (size_t)4 << 20)))
                return;
            long n = op_take(op, i, *sources[i]);
            if (n > 0)
                continue;
            if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
                close_fd(sources[i]);
                op->closed[i] = true;
            }
            break;
        }
    }
}

static bool sources_open(const struct chronus *c) { return c->child.out >= 0 || c->child.err >= 0; }

/* The leader is reaped and its output drained, or given up on: whatever it left behind dies now. */
static void leader_finish(struct chronus *c) {
    char folder[ID_MAX + 8];
    struct op *op = c->current;
    snprintf(folder, sizeof folder, "s-%s", c->id);
    if (unlinkat(c->s->cgroups, folder, AT_REMOVEDIR) < 0) {
        session_group_kill(c->group);
        int64_t until = clock_now() + 1000000000;
        while (!session_group_empty(c->group) && clock_now() < until)
            poll(NULL, 0, 1);
        if (op) {
            int64_t cpu = group_cpu_ns(c->group) - c->group_cpu_at_start;
            if (cpu > op->cpu_ns)
                op->cpu_ns = cpu;
        }
        session_group_remove(c->s, c->id);
    }
    drain_sources(c);
    c->drain_until = 0;
    if (op)
        op_end(c, op);
    session_over(c);
}

static void leader_reap(struct chronus *c) {
    siginfo_t info = {0};
    struct rusage usage = {0};
    if (syscall(SYS_waitid, P_PIDFD, c->child.pidfd, &info, WEXITED | WNOHANG, &usage) < 0 || !info.si_pid)
        return;
    close_fd(&c->child.pidfd);
    c->deadline = c->kill_at = 0;
    struct op *op = c->current;
    if (op) {
        op->signal = info.si_code == CLD_EXITED ? 0 : info.si_status;
        op->exit_code = info.si_code == CLD_EXITED ? info.si_status : -1;
        if (!c->shell) {
            op->cpu_ns = (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000000LL + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000LL;
            op->maxrss = usage.ru_maxrss * 1024LL;
        }
    }
    drain_sources(c);
    if (sources_open(c))
        c->drain_until = clock_now() + DRAIN_NS;
    else
        leader_finish(c);
}

/* --- the shell --- */

/* The command as one word for eval; its stdin is /dev/null and the status descriptor is not its own. */
static bool shell_write(struct chronus *c, const char *text) {
    size_t n = strlen(text);
    bool ok = input_append(c, "command eval '", 14);
    for (size_t at = 0; ok && at < n;) {
        size_t run = strcspn(text + at, "'");
        ok = input_append(c, text + at, run);
        at += run;
        if (ok && text[at] == '\'') {
            ok = input_append(c, "'\\''", 4);
            at++;
        }
    }
    return ok && input_append(c, "' </dev/null 9>&-\nprintf '%d\\n' $? >&9\n", 40);
}

static void run_begin(struct chronus *c, struct stranger *x) {
    const struct request *r = &x->run;
    const char *id = r->op_id ? r->op_id : r->id;
    struct op *op = c->early;
    c->early = NULL;
    if (!op && !(op = op_new(id, (size_t)r->output_limit)))
        return refuse(x->sock, "overloaded", "no memory to keep output");
    char *copy = strdup(id);
    if (copy) {
        free(op->id);
        op->id = copy;
    }
    op->started_real = now_ns(CLOCK_REALTIME);
    op->started = clock_now();
    op->oom_before = oom_kills(c->s);
    op->pid = c->child.pid;
    op->next = c->ops;
    c->ops = c->current = op;
    c->group_cpu_at_start = group_cpu_ns(c->group);
    c->deadline = r->timeout_ns ? op->started + r->timeout_ns : 0;
    c->kill_at = 0;
    c->request.grace_ns = r->grace_ns;
    meminfo_refresh(c->s);
    struct reader *reader = reader_new(op, x->sock, r->live, r->credit);
    if (reader) {
        reader->in = x->in;
        x->in = (struct inbox){0};
        x->sock = -1;
        if (r->live)
            reader_started(op, reader, c->id);
    }
    shell_write(c, r->shell_text);
    input_flush(c);
}

static void shell_feed(struct chronus *c) {
    if (c->current || c->over)
        return;
    struct stranger *first = NULL;
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (x->waiting)
            first = x; /* newest first in the list: the last is the oldest */
    if (!first)
        return;
    first->waiting = false;
    run_begin(c, first);
}

static void shell_status(struct chronus *c) {
    ssize_t n = read(c->child.status, c->status + c->status_len, sizeof c->status - 1 - c->status_len);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        close_fd(&c->child.status);
        return;
    }
    c->status_len += (size_t)n;
    c->status[c->status_len] = 0;
    char *end = strchr(c->status, '\n');
    if (!end) {
        if (c->status_len == sizeof c->status - 1)
            c->status_len = 0;
        return;
    }
    struct op *op = c->current;
    c->status_len = 0;
    if (!op)
        return;
    drain_sources(c);
    op->exit_code = atoi(c->status);
    op->cpu_ns = group_cpu_ns(c->group) - c->group_cpu_at_start;
    c->deadline = c->kill_at = 0;
    op_end(c, op);
    shell_feed(c);
}

/* --- requests of connections --- */

static struct op *op_find(struct chronus *c, const char *id) {
    for (struct op *op = c->ops; op; op = op->next)
        if (!id || strcmp(op->id, id) == 0)
            return op;
    return NULL;
}

static void op_forget(struct chronus *c, const char *id) {
    struct op *op = op_find(c, c->shell ? id : NULL);
    if (op)
        op->acked = true;
}

static int deliver(struct chronus *c, int signum, bool tree, struct trouble *t) {
    if (c->over || c->child.pidfd < 0)
        return fail(t, "conflict", NULL, 0, "the process has ended");
    if (signum < 1 || signum >= 65)
        return fail(t, "invalid_argument", "signal", 0, "there is no signal %d", signum);
    if (tree && signum == SIGKILL)
        return session_group_kill(c->group);
    if (tree)
        return session_group_signal(c->group, signum, 0), 0;
    if (syscall(SYS_pidfd_send_signal, c->child.pidfd, signum, NULL, 0) < 0)
        return fail(t, "conflict", NULL, -1, "cannot signal the process");
    return 0;
}

struct order {
    int64_t signum, tree, rows, cols, live, credit, at[2];
    char *op_id;
};

static int order_parse(struct order *o, const struct frame *f) {
    struct fields fs = fields_of(f);
    struct field field;
    int n;
    *o = (struct order){.live = 1, .credit = 1 << 20};
    while ((n = field_next(&fs, &field)) == 1) {
        switch (field.tag) {
        case T_SIGNUM: o->signum = field_number(&field); break;
        case T_TREE: o->tree = field_number(&field); break;
        case T_ROWS: o->rows = field_number(&field); break;
        case T_COLS: o->cols = field_number(&field); break;
        case T_LIVE: o->live = field_number(&field); break;
        case T_CREDIT_BYTES: o->credit = field_number(&field); break;
        case T_STDOUT_OFFSET: o->at[0] = field_number(&field); break;
        case T_STDERR_OFFSET: o->at[1] = field_number(&field); break;
        case T_OP_ID:
            free(o->op_id);
            o->op_id = field_text(&field, ID_MAX);
            break;
        default: break;
        }
    }
    return n;
}

static int64_t number_at(const struct frame *f) {
    uint64_t v = 0;
    for (int i = 7; i >= 0 && f->length >= 8; i--)
        v = v << 8 | f->payload[i];
    return (int64_t)v;
}

/* A frame on the connection of an EXEC, RUN or ATTACH. false: malformed, close it. */
static bool reader_frame(struct chronus *c, struct op *op, struct reader *r, const struct frame *f) {
    struct trouble t = {0};
    struct order o;
    switch (f->kind) {
    case K_CREDIT:
        if (f->length != 8 || f->stream < 1 || f->stream > 2 || number_at(f) < 0 || r->credit[f->stream - 1] > INT64_MAX / 2)
            return false;
        r->credit[f->stream - 1] += number_at(f) & (INT64_MAX >> 2);
        return true;
    case K_DATA:
        if (f->length < 8 || c->shell || op != c->current || c->input_len > 4 * STDIN_WINDOW + DATA_MAX)
            return f->length >= 8 && !c->shell && op != c->current;
        return input_append(c, f->payload + 8, f->length - 8);
    case K_EOF:
        if (op == c->current && !c->shell)
            c->input_eof = true;
        return true;
    case K_SIGNAL:
    case K_RESIZE:
        if (order_parse(&o, f) < 0)
            return free(o.op_id), false;
        free(o.op_id);
        if (f->kind == K_RESIZE && c->request.tty && c->child.out >= 0) {
            struct winsize size = {.ws_row = (unsigned short)o.rows, .ws_col = (unsigned short)o.cols};
            ioctl(c->child.out, TIOCSWINSZ, &size);
        } else if (f->kind == K_SIGNAL && op == c->current) {
            deliver(c, (int)o.signum, o.tree != 0, &t);
        }
        return true;
    case K_ACK:
        if (op->ended) {
            op->acked = true;
            send_ok(r->sock);
        }
        return true;
    default: return false;
    }
}

static void reader_frames(struct chronus *c, struct op *op, struct reader *r);

static void attach(struct chronus *c, struct stranger *x, const struct order *o) {
    struct op *op = op_find(c, c->shell ? o->op_id : NULL);
    struct reader *r = op ? reader_new(op, x->sock, o->live != 0, o->credit) : NULL;
    if (!r)
        return refuse(x->sock, "not_found", "no such command in this session");
    r->offset[0] = (uint64_t)(o->at[0] > 0 ? o->at[0] : 0);
    r->offset[1] = (uint64_t)(o->at[1] > 0 ? o->at[1] : 0);
    r->in = x->in;
    x->in = (struct inbox){0};
    x->sock = -1;
    reader_started(op, r, c->id);
    if (op == c->current)
        stdin_welcome(c, r);
    reader_frames(c, op, r);
}

static void run_queue(struct chronus *c, struct stranger *x, const struct frame *f) {
    struct trouble t = {0};
    if (request_parse(&x->run, f, &t) < 0)
        send_trouble(x->sock, &t);
    else if (!c->shell || !x->run.shell_text)
        refuse(x->sock, "invalid_argument", "RUN needs a shell session and a text");
    else if (c->over)
        refuse(x->sock, "not_found", "the session's shell has ended");
    else if (op_find(c, x->run.op_id))
        refuse(x->sock, "conflict", "a command of this id has run in this session");
    else {
        x->waiting = true;
        shell_feed(c);
        return;
    }
    close_fd(&x->sock);
}

/* The first frame of a connection that aether handed over. */
static void greet(struct chronus *c, struct stranger *x, const struct frame *f) {
    struct trouble t = {0};
    struct order o;
    if (f->kind == K_RUN)
        return run_queue(c, x, f);
    int bad = order_parse(&o, f);
    if (bad < 0)
        refuse(x->sock, "invalid_argument", "malformed request");
    else if (f->kind == K_ATTACH)
        attach(c, x, &o);
    else if (f->kind == K_SIGNAL && deliver(c, (int)o.signum, o.tree != 0, &t) < 0)
        send_trouble(x->sock, &t);
    else if (f->kind == K_SIGNAL)
        send_ok(x->sock);
    else if (f->kind == K_ACK) {
        op_forget(c, o.op_id);
        send_ok(x->sock);
    } else if (f->kind == K_CLOSE) {
        x->closing = true;
        session_forget(c);
    } else
        refuse(x->sock, "invalid_argument", "not a request to a session");
    free(o.op_id);
    if (!x->closing)
        close_fd(&x->sock);
}

static void stranger_add(struct chronus *c, int sock) {
    struct stranger *x = calloc(1, sizeof *x);
    if (!x) {
        close(sock);
        return;
    }
    *x = (struct stranger){.next = c->strangers, .sock = sock, .since = clock_now()};
    c->strangers = x;
}

static void stranger_read(struct chronus *c, struct stranger *x) {
    struct frame f;
    long n = inbox_fill(&x->in, x->sock, NULL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    int got = n > 0 ? inbox_next(&x->in, &f) : -1;
    if (got < 0 && n > 0)
        refuse(x->sock, "invalid_argument", "malformed frame");
    if (got < 0)
        close_fd(&x->sock);
    else if (got > 0)
        greet(c, x, &f);
}

static void reader_frames(struct chronus *c, struct op *op, struct reader *r) {
    struct frame f;
    int got;
    while ((got = inbox_next(&r->in, &f)) > 0)
        if (!reader_frame(c, op, r, &f))
            break;
    if (got != 0)
        r->dead = true;
}

static void reader_read(struct chronus *c, struct op *op, struct reader *r) {
    long n = inbox_fill(&r->in, r->sock, NULL);
    if (n > 0)
        reader_frames(c, op, r);
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        r->dead = true;
}

/* Connections and ops that are done with leave their lists here, after the loop has looked at all. */
static void sweep(struct chronus *c) {
    for (struct stranger **at = &c->strangers, *x; (x = *at);) {
        if (x->sock >= 0 && (x->waiting || clock_now() - x->since < GREETING_NS)) {
            at = &x->next;
            continue;
        }
        *at = x->next;
        if (x->sock >= 0)
            close(x->sock);
        inbox_free(&x->in);
        free(x);
    }
    int kept = 0;
    for (struct op **at = &c->ops, *op; (op = *at);) {
        for (struct reader *r = op->readers, *next; r; r = next) {
            next = r->next;
            if (r->dead)
                reader_free(op, r);
        }
        if (op != c->current && (op->acked || (c->shell && ++kept > SHELL_KEEPS))) {
            *at = op->next;
            op_free(op);
        } else {
            at = &op->next;
        }
    }
    if (c->over && !c->ops)
        session_forget(c);
}

/* --- time --- */

static int64_t next_wake(const struct chronus *c) {
    int64_t at = INT64_MAX, now = clock_now();
    const int64_t times[] = {c->deadline, c->kill_at, c->drain_until};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++)
        if (times[i] && times[i] < at)
            at = times[i];
    if (c->current && c->current->blocked_since && c->current->blocked_since + STALL_NS < at)
        at = c->current->blocked_since + STALL_NS;
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (!x->waiting && x->since + GREETING_NS < at)
            at = x->since + GREETING_NS;
    if (!c->over && c->s->meminfo >= 0 && now + MEMINFO_NS < at)
        at = now + MEMINFO_NS;
    return at == INT64_MAX ? -1 : at <= now ? 0 : (at - now + 999999) / 1000000;
}

static void clock_tick(struct chronus *c) {
    int64_t now = clock_now();
    int shell_pid = c->shell ? c->child.pid : 0;
    if (c->deadline && now >= c->deadline) {
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

/* --- the loop --- */

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

static void wait_build(struct chronus *c, struct wait *w) {
    w->count = 0;
    wait_for(w, c->ctl, POLLIN);
    wait_for(w, c->child.pidfd, POLLIN);
    wait_for(w, c->child.status, POLLIN);
    struct op *op = c->current ? c->current : c->early;
    if (!op || op_has_room(op, 0))
        wait_for(w, c->child.out, POLLIN);
    else if (!op->blocked_since)
        op->blocked_since = clock_now();
    if (!op || op_has_room(op, 1))
        wait_for(w, c->child.err, POLLIN);
    if (c->input_len || (c->input_eof && c->child.in >= 0))
        wait_for(w, c->child.in, POLLOUT);
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (!x->waiting && wait_for(w, x->sock, POLLIN))
            w->who[w->count - 1].stranger = x;
    for (op = c->ops; op; op = op->next)
        for (struct reader *r = op->readers; r; r = r->next) {
            short events = (short)(POLLIN | (reader_push(op, r) ? POLLOUT : 0));
            if (r->dead || !wait_for(w, r->sock, events))
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

/* --- the beginning --- */

_Noreturn static void give_up(struct chronus *c, int conn, struct trouble *t) {
    send_trouble(conn, t);
    if (c->child.pid > 0)
        while (waitpid(c->child.pid, NULL, __WALL) < 0 && errno == EINTR)
            ;
    if (c->group >= 0)
        session_group_remove(c->s, c->id);
    notify(c, CTL_FORGOTTEN);
    _exit(0);
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
