/* aether: one a sandbox, on the host. It owns the sandbox's init and its sessions, and hands each connection to the chronus that it
 * concerns. */
#define _GNU_SOURCE
#include "aether.h"
#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SPARES   4                  /* chronuses that wait for a session */
#define START_NS (5 * 1000000000LL) /* how long a command may take to be executed; a guest can hold it up */
#define SPARE_NS (3 * 1000000000LL) /* and for how long */

enum what { LISTENER, CHILDREN, WATCHER, STRANGER, SESSION, SPARE };

struct node {
    enum what what;
    int fd;
    struct node *next;
    int64_t since; /* STRANGER, SPARE */
    /* SESSION */
    char id[ID_MAX + 1];
    int pid;
    bool lost;
    bool starting, running, shell, background; /* starting: its program is not executed yet */
    int64_t leader, started_real;
};

struct aether {
    struct sandbox s;
    int epoll, floor;
    struct node listener, children;
    struct node *watchers, *strangers, *sessions, *spares;
    int session_count, spare_count, starting_count;
    int *helpers; /* pids of files and connect processes */
    int helper_count, helper_cap;
    bool dead;       /* init is gone */
    char room[1536]; /* what stays of the spec */
};

static void watch(struct aether *a, struct node *n, uint32_t events) {
    struct epoll_event e = {.events = events, .data.ptr = n};
    epoll_ctl(a->epoll, EPOLL_CTL_ADD, n->fd, &e);
}

static struct node *node_add(struct aether *a, struct node **list, enum what what, int fd, uint32_t events) {
    struct node *n = calloc(1, sizeof *n);
    if (!n)
        return NULL;
    *n = (struct node){.what = what, .fd = fd, .next = *list};
    *list = n;
    if (fd >= 0 && events)
        watch(a, n, events);
    return n;
}

/* The descriptor may live on in another process, so closing it would not take it out of the epoll set. */
static void node_remove(struct aether *a, struct node **list, struct node *n, bool close_fd) {
    if (n->fd >= 0)
        epoll_ctl(a->epoll, EPOLL_CTL_DEL, n->fd, NULL);
    for (struct node **at = list; *at; at = &(*at)->next)
        if (*at == n) {
            *at = n->next;
            break;
        }
    if (n->fd >= 0 && close_fd)
        close(n->fd);
    free(n);
}

static void ready_frame(const struct aether *a, struct out *o) {
    out_begin(o, K_READY, 0);
    out_text(o, T_SANDBOX_ID, a->s.spec.sandbox_id);
    out_number(o, T_GENERATION, a->s.spec.generation);
    out_number(o, T_AETHER_PID, getpid());
    out_number(o, T_INIT_PID, a->s.init_pid);
    out_end(o);
}

static void tell_watchers(struct aether *a, int kind, const char *detail, const char *session) {
    struct out o = {0};
    out_begin(&o, K_EVENT, 0);
    out_number(&o, T_EVENT_KIND, kind);
    out_text(&o, T_DETAIL, detail);
    if (session)
        out_text(&o, T_SESSION_ID, session);
    out_end(&o);
    for (struct node *w = a->watchers, *next; w; w = next) {
        next = w->next;
        /* A watcher that does not read loses its connection rather than holding up the sandbox. */
        if (o.failed || send(w->fd, o.buf, o.len, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)o.len)
            node_remove(a, &a->watchers, w, w->fd != a->s.birth);
    }
    out_free(&o);
}

/* --- children --- */

/* In a fork of aether: nothing of aether's own stays open, but what was opened before its first connection and the two given, of which one
 * may be -1. */
static void child_begin(struct aether *a, int *conn, int *ctl) {
    close(a->epoll);
    close(a->s.listener);
    close(a->children.fd);
    close(a->s.birth);
    int kept[2] = {*conn < *ctl ? *conn : *ctl, *conn < *ctl ? *ctl : *conn}, from = a->floor;
    for (int i = 0; i < 2; i++) {
        if (kept[i] > from)
            close_range((unsigned)from, (unsigned)kept[i] - 1, 0);
        if (kept[i] >= from)
            from = kept[i] + 1;
    }
    close_range((unsigned)from, ~0U, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int aether = getppid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != aether)
        _exit(1);
}

static void helper_start(struct aether *a, int conn, void (*run)(struct sandbox *, int)) {
    if (a->helper_count == a->helper_cap) {
        int cap = a->helper_cap ? 2 * a->helper_cap : 8;
        int *more = realloc(a->helpers, sizeof *more * (size_t)cap);
        if (!more)
            return refuse(conn, "overloaded", 0, "no memory for another conversation");
        a->helpers = more;
        a->helper_cap = cap;
    }
    if (a->helper_count >= a->s.spec.session_limit)
        return refuse(conn, "overloaded", 0, "too many conversations at once");
    int pid = fork();
    if (pid == 0) {
        int none = -1;
        child_begin(a, &conn, &none);
        run(&a->s, conn);
        _exit(0);
    }
    if (pid < 0)
        refuse(conn, "overloaded", 0, "cannot fork");
    else
        a->helpers[a->helper_count++] = pid;
}

static struct node *session_find(struct aether *a, const char *id) {
    for (struct node *n = a->sessions; n; n = n->next)
        if (strcmp(n->id, id) == 0)
            return n;
    return NULL;
}

static void list_remove(struct node **list, struct node *n) {
    for (struct node **at = list; *at; at = &(*at)->next)
        if (*at == n) {
            *at = n->next;
            return;
        }
}

/* A chronus that has nothing to do: the next session need not wait for a fork, nor for what a process touches for the first time. */
static void spare_keep(struct aether *a, struct node *n) {
    n->what = SPARE;
    n->since = now_ns(CLOCK_MONOTONIC);
    n->next = a->spares;
    a->spares = n;
    a->spare_count++;
}

static void spare_drop(struct aether *a, struct node *n) {
    a->spare_count--;
    node_remove(a, &a->spares, n, true);
}

/* NULL with errno if there can be none. With `conn` the new process begins with that connection. */
static struct node *chronus_fork(struct aether *a, int conn, const char *id) {
    int ctl[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ctl) < 0)
        return NULL;
    int pid = fork();
    if (pid == 0) {
        char copy[ID_MAX + 1] = "";
        if (id)
            snprintf(copy, sizeof copy, "%s", id);
        child_begin(a, &conn, &ctl[1]);
        /* It sees aether's end by its line; killing it would lose what it has to clean. */
        prctl(PR_SET_PDEATHSIG, 0);
        chronus_main(&a->s, ctl[1], conn, id ? copy : NULL);
    }
    close(ctl[1]);
    struct node *n = pid < 0 ? NULL : calloc(1, sizeof *n);
    if (!n) {
        close(ctl[0]);
        return NULL;
    }
    *n = (struct node){.what = SESSION, .fd = ctl[0], .pid = pid};
    watch(a, n, EPOLLIN);
    return n;
}

static struct node *spare_use(struct aether *a, int conn, const char *id) {
    char message[ID_MAX + 2];
    size_t length = (size_t)snprintf(message, sizeof message, "%c%s", CTL_NEW, id);
    while (a->spares) {
        struct node *n = a->spares;
        if (send_now(n->fd, message, length, conn) == 0) {
            a->spares = n->next;
            a->spare_count--;
            return n;
        }
        spare_drop(a, n);
    }
    return NULL;
}

static void session_start(struct aether *a, int conn, const char *id) {
    if (a->session_count >= a->s.spec.session_limit)
        return refuse(conn, "overloaded", 0, "too many sessions at once");
    struct node *n = spare_use(a, conn, id);
    if (!n && !(n = chronus_fork(a, conn, id)))
        return refuse(conn, "overloaded", 0, "cannot fork");
    n->what = SESSION;
    snprintf(n->id, sizeof n->id, "%s", id);
    /* Until its chronus says otherwise: whoever asks must not take a session that is just starting for one that has ended. */
    n->running = n->starting = true;
    n->since = now_ns(CLOCK_MONOTONIC);
    a->starting_count++;
    n->leader = 0;
    n->started_real = now_ns(CLOCK_REALTIME);
    n->next = a->sessions;
    a->sessions = n;
    a->session_count++;
}

static void session_began(struct aether *a, struct node *n) {
    a->starting_count -= n->starting;
    n->starting = false;
}

static void session_remove(struct aether *a, struct node *n) {
    session_began(a, n);
    a->session_count--;
    node_remove(a, &a->sessions, n, true);
}

/* chronus died of itself: what ran is ended, and how is not known. */
static void session_lost(struct aether *a, struct node *n) {
    epoll_ctl(a->epoll, EPOLL_CTL_DEL, n->fd, NULL);
    close(n->fd);
    n->fd = -1;
    int group = session_group_make(&a->s, n->pid);
    if (group >= 0) {
        session_group_kill(group);
        close(group);
    }
    session_group_remove(&a->s, n->pid);
    session_began(a, n);
    n->lost = true;
    n->running = false;
    tell_watchers(a, 3, "lost", n->id);
}

static void session_forgotten(struct aether *a, struct node *n, bool leaving) {
    if (leaving || a->dead || a->spare_count >= SPARES)
        return session_remove(a, n);
    a->session_count--;
    session_began(a, n);
    list_remove(&a->sessions, n);
    spare_keep(a, n);
}

/* What its chronus has said since, until there is no more: 0 the session lives, -1 it is no longer in the list. */
static int session_notes(struct aether *a, struct node *n) {
    struct ctl_note note;
    for (;;) {
        ssize_t got = n->lost ? -1 : recv(n->fd, &note, sizeof note, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR && !n->lost)
            continue;
        if (n->lost || (got < 0 && errno == EAGAIN))
            return 0;
        if (got != (ssize_t)sizeof note) {
            session_lost(a, n);
            return 0;
        }
        if (note.kind == CTL_FORGOTTEN || note.kind == CTL_LEAVING) {
            session_forgotten(a, n, note.kind == CTL_LEAVING);
            return -1;
        }
        session_began(a, n);
        n->leader = note.pid;
        n->background = note.background;
        n->shell = note.is_shell;
        if (note.started_real)
            n->started_real = note.started_real;
        if (note.kind == CTL_ENDED) {
            n->running = false;
            tell_watchers(a, 3, "", n->id);
        }
    }
}

/*
 * Until its program is executed a chronus sleeps in vfork, and a guest can hold that up: by stopping our child, or by a lease on the
 * program. What is in the group is killed then, and chronus wakes to say so.
 */
static void starts_watch(struct aether *a, int64_t now) {
    for (struct node *n = a->sessions; a->starting_count && n; n = n->next) {
        int group = n->starting && now - n->since > START_NS ? session_group_make(&a->s, n->pid) : -1;
        if (group < 0)
            continue;
        session_group_kill(group);
        close(group);
    }
}

/* A spare says nothing: that its line can be read means that it has died. */
static void spares_expire(struct aether *a, int64_t now) {
    for (struct node *n = a->spares, *next; n; n = next) {
        next = n->next;
        if (now - n->since > SPARE_NS)
            spare_drop(a, n);
    }
}

static void children_reap(struct aether *a) {
    struct signalfd_siginfo info;
    while (read(a->children.fd, &info, sizeof info) > 0)
        ;
    int pid, status;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == a->s.init_pid && !a->dead) {
            a->dead = true;
            tell_watchers(a, 1, oom_kills(&a->s) > 0 ? "oom" : "", NULL);
        }
        for (int i = 0; i < a->helper_count; i++)
            if (a->helpers[i] == pid)
                a->helpers[i] = a->helpers[--a->helper_count];
    }
}

/* --- requests --- */

static void hello(struct aether *a, struct node *x) {
    struct frame f;
    struct inbox in = {0};
    struct out o = {0};
    int rc = recv_frame(x->fd, &in, &f, 1000);
    inbox_free(&in);
    if (rc < 0)
        return node_remove(a, &a->strangers, x, true);
    ready_frame(a, &o);
    for (struct node *n = a->sessions, *next; n; n = next) {
        next = n->next;
        if (session_notes(a, n) < 0)
            continue;
        out_begin(&o, K_SESSION, 0);
        out_text(&o, T_SESSION_ID, n->id);
        out_number(&o, T_SESSION_KIND, n->shell ? 2 : 1);
        out_number(&o, T_RUNNING, n->running);
        out_number(&o, T_PID, n->leader);
        out_number(&o, T_STARTED_NS, n->started_real);
        out_number(&o, T_BACKGROUND, n->background);
        out_end(&o);
    }
    out_begin(&o, K_OK, 0);
    out_end(&o);
    int fd = x->fd;
    node_remove(a, &a->strangers, x, false);
    if (send_out(fd, &o, -1) < 0 || !node_add(a, &a->watchers, WATCHER, fd, EPOLLIN))
        close(fd);
    out_free(&o);
    if (a->dead)
        tell_watchers(a, 1, oom_kills(&a->s) > 0 ? "oom" : "", NULL);
}

static bool wait_child(int pid, int64_t deadline) {
    while (waitpid(pid, NULL, WNOHANG) == 0) {
        if (now_ns(CLOCK_MONOTONIC) > deadline)
            return false;
        poll(NULL, 0, 1);
    }
    return true;
}

_Noreturn static void stop(struct aether *a, int conn) {
    struct node *lists[] = {a->sessions, a->spares};
    bool gone = true;
    if (!a->dead)
        kill(a->s.init_pid, SIGKILL);
    for (int i = 0; i < a->helper_count; i++)
        kill(a->helpers[i], SIGKILL);
    /* Before init is waited for: it cannot end while a chronus has children of its namespace to reap. */
    for (int i = 0; i < 2; i++)
        for (struct node *n = lists[i]; n; n = n->next)
            if (n->fd >= 0)
                close(n->fd);
    int64_t soon = now_ns(CLOCK_MONOTONIC) + 2000000000LL;
    for (int i = 0; i < 2; i++)
        for (struct node *n = lists[i]; n; n = n->next)
            if (!n->lost && !wait_child(n->pid, soon)) {
                kill(n->pid, SIGKILL);
                wait_child(n->pid, soon + 1000000000LL);
            }
    if (!a->dead)
        gone = wait_child(a->s.init_pid, now_ns(CLOCK_MONOTONIC) + 10000000000LL);
    a->s.init_pid = 0;
    int left = cgroups_remove(&a->s);
    sandbox_undo(&a->s);
    struct trouble t = {.ran = 1};
    if (!gone)
        fail(&t, "internal", NULL, 0, "a process of %s does not end", a->s.spec.sandbox_id);
    else if (left)
        fail(&t, "internal", NULL, 0, "%d cgroups of %s could not be removed", left, a->s.spec.sandbox_id);
    if (conn >= 0 && t.code)
        send_trouble(conn, &t);
    else if (conn >= 0)
        send_ok(conn);
    _exit(t.code ? 1 : 0);
}

/* SESSION_ID as the first field of the frame at the front, without taking it. */
static bool peek_id(const uint8_t *p, size_t n, char *id) {
    if (n < 16 || p[8] != T_SESSION_ID || p[9])
        return false;
    size_t length = (size_t)p[12] | (size_t)p[13] << 8 | (size_t)p[14] << 16 | (size_t)p[15] << 24;
    if (length == 0 || length > ID_MAX || n < 16 + length)
        return false;
    memcpy(id, p + 16, length);
    id[length] = 0;
    return strlen(id) == length && !strchr(id, '/');
}

static void route(struct aether *a, struct node *x, int kind, const char *id) {
    const char handed = CTL_HANDED;
    struct node *n = id ? session_find(a, id) : NULL;
    if (n && session_notes(a, n) < 0)
        n = NULL;
    if (a->dead && kind != K_ATTACH && kind != K_ACK)
        return refuse(x->fd, "sandbox_failed", 0, "the sandbox's init has died");
    switch (kind) {
    case K_FILES: return helper_start(a, x->fd, chronus_files);
    case K_CONNECT: return helper_start(a, x->fd, chronus_connect);
    case K_EXEC:
    case K_SHELL:
        if (!id)
            return refuse(x->fd, "invalid_argument", 0, "SESSION_ID must come first, without a slash and at most 128 bytes");
        return n ? refuse(x->fd, "conflict", 0, "this session exists") : session_start(a, x->fd, id);
    case K_ATTACH:
    case K_SIGNAL:
    case K_ACK:
    case K_RUN:
    case K_CLOSE:
        if (!n)
            return refuse(x->fd, "not_found", 0, "no such session");
        if (n->lost) {
            if (kind == K_ACK || kind == K_CLOSE) {
                session_remove(a, n);
                send_ok(x->fd);
                return;
            }
            return refuse(x->fd, "outcome_unknown", 2, "the session's chronus died; how its command ended is not known");
        }
        if (send_now(n->fd, &handed, 1, x->fd) < 0)
            refuse(x->fd, errno == EAGAIN ? "overloaded" : "not_found", 0,
                   errno == EAGAIN ? "the session does not take its requests" : "the session has just ended");
        return;
    default: return refuse(x->fd, "invalid_argument", 0, "unknown request");
    }
}

/* True while more of its request has to come. */
static bool stranger_look(struct aether *a, struct node *x) {
    uint8_t buf[FRAME_HEADER + 8 + ID_MAX];
    char id[ID_MAX + 1];
    ssize_t n = recv(x->fd, buf, sizeof buf, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (n <= 0)
        return node_remove(a, &a->strangers, x, true), false;
    size_t length = n >= FRAME_HEADER ? (size_t)buf[4] | (size_t)buf[5] << 8 | (size_t)buf[6] << 16 | (size_t)buf[7] << 24 : 0;
    size_t needed = FRAME_HEADER + length < sizeof buf ? FRAME_HEADER + length : sizeof buf;
    if (n >= 1 && (buf[0] != FRAME_VERSION || length > FRAME_MAX)) {
        refuse(x->fd, "invalid_argument", 0, "malformed frame or another version of the channel");
        return node_remove(a, &a->strangers, x, true), false;
    }
    if ((size_t)n < FRAME_HEADER || (size_t)n < needed)
        return true; /* edge triggered: more will wake us */
    int kind = buf[1];
    if (kind == K_HELLO)
        return hello(a, x), false;
    if (kind == K_STOP)
        stop(a, x->fd);
    route(a, x, kind, peek_id(buf, (size_t)n, id) ? id : NULL);
    node_remove(a, &a->strangers, x, true);
    return false;
}

/* One at a time: if more wait, the listener says so again. Mostly the request is there already. */
static void accept_one(struct aether *a) {
    int fd = accept4(a->s.listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return;
    struct node *x = node_add(a, &a->strangers, STRANGER, fd, 0);
    if (!x) {
        close(fd);
        return;
    }
    x->since = now_ns(CLOCK_MONOTONIC);
    if (stranger_look(a, x))
        watch(a, x, EPOLLIN | EPOLLET | EPOLLRDHUP);
}

static void watcher_read(struct aether *a, struct node *w) {
    char drop[256];
    ssize_t n = recv(w->fd, drop, sizeof drop, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        /* The birth connection's number stays taken: all below `floor` is what a child inherits. */
        node_remove(a, &a->watchers, w, w->fd != a->s.birth);
    }
}

static void handle(struct aether *a, struct node *n) {
    switch (n->what) {
    case LISTENER: return accept_one(a);
    case CHILDREN: return children_reap(a);
    case WATCHER: return watcher_read(a, n);
    case STRANGER: stranger_look(a, n); return;
    case SESSION: session_notes(a, n); return;
    case SPARE: return spare_drop(a, n);
    }
}

#define STACK_BYTES 65536UL /* nothing of ours goes deeper */
#define STACK_SPARE 128UL   /* what waiting takes */

/* Most of thousands of aethers only wait: what a birth or a command dirtied, and nothing needs any more, goes back. */
__attribute__((noinline)) static void memory_settle(void) {
    const unsigned long here = (unsigned long)__builtin_frame_address(0), below = (here - STACK_SPARE) & ~(PAGE - 1);
    malloc_trim(0);
    madvise((void *)(below - STACK_BYTES), STACK_BYTES, MADV_DONTNEED);
}

_Noreturn static void serve(struct aether *a) {
    struct epoll_event e;
    bool settled = false;
    for (;;) {
        const bool idle = !a->spares && !a->starting_count && !a->strangers;
        if (idle && !settled)
            memory_settle();
        settled = idle;
        /* One at a time: handling one may free another. */
        int n = epoll_wait(a->epoll, &e, 1, a->spares || a->starting_count ? 1000 : a->strangers ? 10000 : -1);
        if (n == 1)
            handle(a, e.data.ptr);
        int64_t now = now_ns(CLOCK_MONOTONIC);
        for (struct node *x = a->strangers, *next; x; x = next) {
            next = x->next;
            if (now - x->since > 10000000000LL)
                node_remove(a, &a->strangers, x, true);
        }
        spares_expire(a, now);
        starts_watch(a, now);
    }
}

/* Above all that a child inherits. Gaps below are filled, so that whatever is opened from here on lies above. */
static int floor_of(const struct aether *a) {
    const struct sandbox *s = &a->s;
    const int kept[] = {s->host->root, s->host->proc, s->host->empty_ns, s->init_pidfd, s->userns, s->root,
                        s->devpts,     s->null,       s->meminfo,        s->cgroups,    s->oom,    s->usage};
    int highest = a->children.fd > a->epoll ? a->children.fd : a->epoll, fd;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (kept[i] > highest)
            highest = kept[i];
    for (int i = 0; i < s->join_count; i++)
        if (s->joins[i] > highest)
            highest = s->joins[i];
    while ((fd = fcntl(0, F_DUPFD_CLOEXEC, 0)) >= 0 && fd <= highest)
        ;
    if (fd >= 0)
        close(fd);
    return highest + 1;
}

_Noreturn void aether_main(const struct host *h, struct inbox *in, struct frame *launch, int birth, struct ahead ahead) {
    static struct aether a;
    struct trouble t = {0};
    struct out o = {0};
    sigset_t child;
    a.s = (struct sandbox){.spec.known = h->filter,
                           .host = h,
                           .ahead = ahead,
                           .birth = birth,
                           .listener = -1,
                           .init_pidfd = -1,
                           .userns = -1,
                           .root = -1,
                           .devpts = -1,
                           .null = -1,
                           .meminfo = -1,
                           .cgroups = -1,
                           .oom = -1,
                           .usage = -1};
    /* It stays in the launcher's session: for one of its own the kernel would make a scheduling group, 7 KB that each quota's write walks
     * past. */
    signal(SIGCHLD, SIG_DFL);
    signal(SIGPIPE, SIG_IGN);
    rename_process(h, "aether", "aether");
    if (spec_parse(&a.s.spec, launch, &t) < 0 || sandbox_start(&a.s, &t) < 0) {
        sandbox_undo(&a.s);
        send_trouble(birth, &t);
        _exit(1);
    }
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    a.epoll = epoll_create1(EPOLL_CLOEXEC);
    a.children = (struct node){.what = CHILDREN, .fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK)};
    a.listener = (struct node){.what = LISTENER, .fd = a.s.listener};
    watch(&a, &a.listener, EPOLLIN);
    watch(&a, &a.children, EPOLLIN);
    a.floor = floor_of(&a);
    ready_frame(&a, &o);
    if (send_out(birth, &o, -1) < 0)
        stop(&a, -1);
    out_free(&o);
    /* Before anything that stays is allocated behind it. */
    inbox_free(in);
    spec_settle(&a.s.spec, a.room, sizeof a.room);
    node_add(&a, &a.watchers, WATCHER, birth, EPOLLIN);
    children_reap(&a);
    /* The first command comes soon, mostly: while READY is on its way, its chronus is made. In a burst that would only keep others waiting.
     */
    struct node *first = h->burst ? NULL : chronus_fork(&a, -1, NULL);
    if (first)
        spare_keep(&a, first);
    serve(&a);
}
