/* How a command and its session end: the leader is reaped, its output drained, its tree killed, and aether told. */
#define _GNU_SOURCE
#include "chronus.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void notify(struct chronus *c, enum ctl_kind kind) {
    struct ctl_note note = {kind, c->child.pid, c->current ? c->current->started_real : 0, c->background, c->shell};
    if (send(c->ctl, &note, sizeof note, MSG_NOSIGNAL) < 0 && errno == EPIPE)
        _exit(1);
}

/* The number after `key` in a flat-keyed file of the group, 0 if it is not there. */
static int64_t group_number(int group, const char *file, const char *key) {
    char buf[512];
    int fd = openat(group, file, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, buf, sizeof buf - 1);
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return 0;
    buf[n] = 0;
    char *at = strstr(buf, key);
    return at ? atoll(at + strlen(key)) : 0;
}

int64_t group_cpu_ns(int group) {
    return group_number(group, "cpu.stat", "usage_usec ") * 1000;
}

int64_t group_frozen_ns(int group, int64_t now) {
    int64_t counted = group_number(group, "cgroup.stat.local", "frozen_usec ") * 1000;
    return counted ? counted : group_number(group, "cgroup.events", "frozen ") ? now : 0;
}

void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

struct op *op_find(struct chronus *c, const char *id) {
    for (struct op *op = c->ops; op; op = op->next)
        if (!id || strcmp(op->id, id) == 0)
            return op;
    return NULL;
}

void op_end(struct chronus *c, struct op *op) {
    op->closed[0] = op->closed[1] = true;
    op->ended = true;
    op->wall_ns = clock_now() - op->started;
    /* However it ended: a pipe's last program does well with what the first could write. */
    op->oom = oom_kills(c->s) > op->oom_before;
    if (c->current == op)
        c->current = NULL;
    op_push(op);
}

/*
 * A group that was once killed is not used again: the kernel ends a process that is cloned into it from a group whose count of kills is
 * another (seen on Linux 6.18).
 */
int kill_tree(struct chronus *c) {
    c->unfit = true;
    return session_group_kill(c->group);
}

void leader_wait(struct chronus *c) {
    int64_t until = clock_now() + UNREAPED_NS;
    while (c->child.pid > 0 && waitpid(c->child.pid, NULL, __WALL | WNOHANG) == 0) {
        if (clock_now() > until) {
            c->unfit = true;
            return;
        }
        poll(NULL, 0, 1);
    }
    c->child.pid = -1;
}

/* Whether nothing is left of what was killed; it is waited for. */
static bool group_drained(const struct chronus *c) {
    int64_t until = clock_now() + 1000000000;
    bool empty;
    while (!(empty = session_group_empty(c->group)) && clock_now() < until)
        poll(NULL, 0, 1);
    return empty;
}

void session_forget(struct chronus *c) {
    if (!c->emptied) {
        if (!session_group_empty(c->group))
            kill_tree(c);
        leader_wait(c);
        if (!group_drained(c))
            c->unfit = true;
    }
    int *fds[] = {&c->child.out, &c->child.err, &c->child.in, &c->child.status, &c->child.pidfd};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        close_fd(fds[i]);
    while (c->ops) {
        struct op *op = c->ops;
        c->ops = op->next;
        op_free(op);
    }
    if (c->early)
        op_free(c->early);
    free(c->input);
    request_free(&c->request);
    /* aether first: whoever has our answer may use the id again at once. */
    notify(c, c->unfit ? CTL_LEAVING : CTL_FORGOTTEN);
    for (struct stranger *x = c->strangers, *next; x; x = next) {
        next = x->next;
        if (x->closing)
            send_ok(x->sock);
        else if (x->sock >= 0)
            refuse(x->sock, "not_found", 0, "no such session");
        stranger_free(x);
    }
    c->strangers = NULL;
}

void session_over(struct chronus *c) {
    if (c->over)
        return;
    c->over = true;
    close_fd(&c->child.out);
    close_fd(&c->child.err);
    close_fd(&c->child.in);
    close_fd(&c->child.status);
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (x->waiting) {
            refuse(x->sock, "not_found", 0, "the session's shell has ended");
            x->waiting = false;
            close_fd(&x->sock);
        }
    c->start_untold = false;
    c->end_untold = true;
    end_tell(c);
}

/* True while somebody has the result in hand who has not said yet that it is recorded. */
static bool result_in_hand(const struct chronus *c) {
    for (const struct op *op = c->ops; op; op = op->next)
        for (const struct reader *r = op->readers; r; r = r->next)
            if (r->exited_sent && !r->pending.len && !r->dead)
                return true;
    return false;
}

/* A command's end is no news where its result has just gone out, unless whoever has it leaves without having recorded it; nor where it was
 * recorded: then the whole session is forgotten. */
void end_tell(struct chronus *c) {
    if (!c->end_untold || (!c->shell && (result_in_hand(c) || !c->ops)))
        return;
    c->end_untold = false;
    notify(c, CTL_ENDED);
}

/* Between two commands of a shell: kept for the next one, where there is anything. */
static long early_take(struct chronus *c, int stream, int fd) {
    char buf[4096];
    ssize_t n = read(fd, buf, sizeof buf);
    if (n > 0 && (c->early || (c->early = op_new("", EARLY_KEEPS))))
        op_append(c->early, stream, buf, (size_t)n);
    return n;
}

bool drain_sources(struct chronus *c) {
    int *sources[] = {&c->child.out, &c->child.err};
    bool more = false;
    for (int i = 0; i < 2; i++) {
        for (int round = 0; *sources[i] >= 0 && round < 8; round++) {
            long n = c->current ? op_take(c->current, i, *sources[i]) : early_take(c, i, *sources[i]);
            if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
                close_fd(sources[i]);
                if (c->current)
                    c->current->closed[i] = true;
            }
            if (n <= 0)
                break;
            more = more || round == 7;
        }
    }
    return more;
}

bool sources_open(const struct chronus *c) {
    return c->child.out >= 0 || c->child.err >= 0;
}

/* The leader is reaped and its output drained, or given up on: whatever it left behind dies now. */
void leader_finish(struct chronus *c) {
    struct op *op = c->current;
    c->emptied = session_group_empty(c->group);
    if (!c->emptied) {
        kill_tree(c);
        group_drained(c);
        if (op) {
            int64_t cpu = group_cpu_ns(c->group) - c->group_cpu_at_start;
            if (cpu > op->cpu_ns)
                op->cpu_ns = cpu;
        }
    }
    while (drain_sources(c))
        ;
    c->drain_until = 0;
    c->unreaped_since = 0;
    if (op)
        op_end(c, op);
    session_over(c);
}

static void leader_outcome(struct chronus *c, const siginfo_t *info, const struct rusage *usage) {
    struct op *op = c->current;
    if (!op)
        return;
    op->signal = info->si_code == CLD_EXITED ? 0 : info->si_status;
    op->exit_code = info->si_code == CLD_EXITED ? info->si_status : -1;
    if (c->shell)
        return;
    op->cpu_ns =
        (usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) * 1000000000LL + (usage->ru_utime.tv_usec + usage->ru_stime.tv_usec) * 1000LL;
    op->maxrss = usage->ru_maxrss * 1024LL;
    c->leader_cpu = op->cpu_ns;
}

/* Whoever traces the leader may keep it unreaped: its outcome is then not known, and what was its tree dies. */
void leader_reap(struct chronus *c) {
    siginfo_t info = {0};
    struct rusage usage = {0};
    int64_t now = clock_now();
    if (c->child.pidfd < 0)
        return;
    if (syscall(SYS_waitid, P_PIDFD, c->child.pidfd, &info, WEXITED | WNOHANG, &usage) < 0)
        return;
    if (!info.si_pid) {
        if (!c->unreaped_since)
            c->unreaped_since = now;
        if (now - c->unreaped_since < UNREAPED_NS)
            return;
        c->unfit = true;
    } else {
        c->child.pid = -1;
        leader_outcome(c, &info, &usage);
    }
    if (c->current && c->deadline && now >= c->deadline)
        c->current->timed_out = true;
    c->unreaped_since = 0;
    close_fd(&c->child.pidfd);
    c->deadline = c->kill_at = 0;
    drain_sources(c);
    if (sources_open(c))
        c->drain_until = now + DRAIN_NS;
    else
        leader_finish(c);
}
