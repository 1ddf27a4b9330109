#define _GNU_SOURCE
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

#include <linux/securebits.h>

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

struct plan {
    struct sandbox *s;
    const struct request *r;
    struct user user;
    char **env, **script;
    char user_env[4][300];
    const char *cwd;
    bool shell;
    int group, in, out, err, status; /* the child's ends */
    struct child *child;
    struct trouble *t;
};

/* Later wins: a name that is already there is replaced in place. */
static void env_set(char **env, int *count, char *entry) {
    char *equal = strchr(entry, '=');
    if (!equal)
        return;
    size_t name = (size_t)(equal - entry) + 1;
    for (int i = 0; i < *count; i++)
        if (strncmp(env[i], entry, name) == 0) {
            env[i] = entry;
            return;
        }
    env[(*count)++] = entry;
    env[*count] = NULL;
}

static char **env_build(struct plan *p) {
    const struct list *a = &p->s->spec.env, *b = &p->r->env;
    char **env = calloc((size_t)(a->count + b->count + 8), sizeof *env);
    int count = 0;
    if (!env)
        return NULL;
    env_set(env, &count, (char *)"PATH=" DEFAULT_PATH);
    const struct {
        const char *name, *value;
    } user[] = {{"HOME", p->user.home}, {"USER", p->user.name}, {"LOGNAME", p->user.name}, {"SHELL", p->user.shell}};
    for (size_t i = 0; i < sizeof user / sizeof *user; i++)
        if (snprintf(p->user_env[i], sizeof p->user_env[i], "%s=%s", user[i].name, user[i].value) > 0)
            env_set(env, &count, p->user_env[i]);
    if (p->r->tty)
        env_set(env, &count, (char *)"TERM=xterm-256color");
    for (int i = 0; i < a->count; i++)
        env_set(env, &count, a->items[i]);
    for (int i = 0; i < b->count; i++)
        env_set(env, &count, b->items[i]);
    return env;
}

static int rlimits_set(const struct list *l, struct trouble *t) {
    static const struct {
        const char *name;
        int resource;
    } known[] = {{"as", RLIMIT_AS},         {"core", RLIMIT_CORE},   {"cpu", RLIMIT_CPU},
                 {"data", RLIMIT_DATA},     {"fsize", RLIMIT_FSIZE}, {"memlock", RLIMIT_MEMLOCK},
                 {"nofile", RLIMIT_NOFILE}, {"nproc", RLIMIT_NPROC}, {"sigpending", RLIMIT_SIGPENDING},
                 {"stack", RLIMIT_STACK},   {"rss", RLIMIT_RSS}};
    for (int i = 0; i < l->count; i++) {
        char name[32];
        long long soft, hard;
        int resource = -1;
        if (sscanf(l->items[i], "%31s %lld %lld", name, &soft, &hard) != 3)
            return fail(t, "invalid_argument", "rlimits", 0, "rlimit '%.60s' is not NAME SOFT HARD", l->items[i]);
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            if (strcmp(known[k].name, name) == 0)
                resource = known[k].resource;
        struct rlimit limit = {soft < 0 ? RLIM_INFINITY : (rlim_t)soft, hard < 0 ? RLIM_INFINITY : (rlim_t)hard};
        if (resource < 0 || setrlimit((__rlimit_resource_t)resource, &limit) < 0)
            return fail(t, "invalid_argument", "rlimits", resource < 0 ? 0 : -1, "cannot set rlimit %s to %lld:%lld", name, soft, hard);
    }
    return 0;
}

/* A program without "#!" that the kernel will not run is a shell script, as POSIX has it for execvp. `script` has room for one argument
 * more than `argv`, and is not on the stack: the caller chooses how many there are. */
static void exec_one(const char *path, char **argv, char **script, char **env) {
    execve(path, argv, env);
    if (errno != ENOEXEC)
        return;
    script[0] = (char *)"/bin/sh";
    script[1] = (char *)path;
    for (int i = 1; (script[i + 1] = argv[i]); i++)
        ;
    execve("/bin/sh", script, env);
    errno = ENOEXEC;
}

static const char *path_of(char **env) {
    for (; *env; env++)
        if (strncmp(*env, "PATH=", 5) == 0)
            return *env + 5;
    return DEFAULT_PATH;
}

static void exec_search(char **argv, char **script, char **env) {
    if (strchr(argv[0], '/')) {
        exec_one(argv[0], argv, script, env);
        return;
    }
    char path[4096];
    int error = ENOENT;
    for (const char *at = path_of(env); at; at = *at == ':' ? at + 1 : NULL) {
        size_t n = strcspn(at, ":");
        struct stat st;
        /* A look first: what execve does before it finds nothing costs ten times as much. */
        if (snprintf(path, sizeof path, "%.*s%s%s", (int)n, at, n ? "/" : "", argv[0]) < (int)sizeof path &&
            (stat(path, &st) == 0 || (errno != ENOENT && errno != ENOTDIR))) {
            exec_one(path, argv, script, env);
            if (errno == EACCES)
                error = EACCES;
            else if (errno != ENOENT && errno != ENOTDIR) {
                error = errno;
                break;
            }
        }
        at += n;
        if (!*at)
            break;
    }
    errno = error;
}

static int run(const struct plan *p) {
    const struct request *r = p->r;
    if (r->shell_text || p->shell) {
        char *one[] = {(char *)"bash", (char *)"-c", r->shell_text, NULL};
        char *session[] = {(char *)"bash", (char *)"--noprofile", (char *)"--norc", NULL};
        execve("/bin/bash", p->shell ? session : one, p->env);
        if (errno == ENOENT || errno == ENOTDIR) {
            one[0] = (char *)"sh";
            session[0] = (char *)"sh";
            session[1] = NULL;
            execve("/bin/sh", p->shell ? session : one, p->env);
        }
        if (errno == ENOENT)
            return fail(p->t, "not_found", "shell", -1, "the image has neither /bin/bash nor /bin/sh; use argv");
        return fail(p->t, errno == E2BIG ? "invalid_argument" : "internal", "shell", -1, "cannot run the shell");
    }
    exec_search(r->args.items, p->script, p->env);
    if (errno == ENOENT || errno == ENOTDIR)
        return fail(p->t, "not_found", "argv", -1, "no program %.150s in the sandbox", r->args.items[0]);
    if (errno == EACCES)
        return fail(p->t, "denied", "argv", -1, "%.150s may not be run", r->args.items[0]);
    return fail(p->t, "invalid_argument", "argv", -1, "cannot run %.150s", r->args.items[0]);
}

static int child_files(const struct plan *p) {
    /* Ends are above 9, so none is overwritten before it is copied. */
    if (dup2(p->in, 0) < 0 || dup2(p->out, 1) < 0 || dup2(p->err, 2) < 0)
        return fail(p->t, "internal", NULL, -1, "cannot place the standard streams");
    if (p->status >= 0 && dup2(p->status, 9) < 0)
        return fail(p->t, "internal", NULL, -1, "cannot place the status stream");
    if (p->status >= 0) {
        close_range(3, 8, 0);
        close_range(10, ~0U, 0);
    } else {
        close_range(3, ~0U, 0);
    }
    return 0;
}

static void child_placement(const struct plan *p) {
    int fd = openat(p->s->host->proc, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        /* The kernel takes a workload before the sandbox's init. */
        if (write(fd, "500", 3) < 0)
            errno = 0;
        close(fd);
    }
    if (p->s->spec.cpus > 0) {
        cpu_set_t have, want;
        CPU_ZERO(&want);
        if (sched_getaffinity(0, sizeof have, &have) == 0 && CPU_COUNT(&have) > p->s->spec.cpus) {
            /* Which ones is spread by the id range, so that small sandboxes do not crowd the first CPUs. */
            int have_count = CPU_COUNT(&have), first = (int)(p->s->spec.uid_base / 65536 % have_count), seen = 0;
            for (int round = 0; round < 2; round++)
                for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
                    if (CPU_ISSET(cpu, &have) && CPU_COUNT(&want) < p->s->spec.cpus && seen++ >= first)
                        CPU_SET(cpu, &want);
            sched_setaffinity(0, sizeof want, &want);
        }
    }
}

/* Where there is no v2 to be cloned into: the thread that writes "0" moves. Without it a session's tree could not be told from the others.
 */
static int session_join(const struct plan *p) {
    if (p->group < 0 || p->s->spec.cgroup_v2)
        return 0;
    int fd = openat(p->group, "tasks", O_WRONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : write(fd, "0", 1);
    if (fd >= 0)
        close(fd);
    return n == 1 ? 0 : fail(p->t, "internal", NULL, -1, "cannot join the session's cgroup");
}

static int child_prepare(const struct plan *p) {
    p->child->guest_pid = (int)syscall(SYS_getpid);
    if (cgroups_join(p->s, p->t) < 0 || session_join(p) < 0)
        return -1;
    child_placement(p);
    if (syscall(SYS_setsid) < 0)
        return fail(p->t, "internal", NULL, -1, "cannot make a session");
    if (p->r->tty && ioctl(p->in, TIOCSCTTY, 0) < 0)
        return fail(p->t, "internal", "tty", -1, "cannot take the terminal");
    if (enter_sandbox(p->s, &p->user, true, p->t) < 0 || rlimits_set(&p->r->rlimits, p->t) < 0)
        return -1;
    if (chdir(p->cwd) < 0 && !(p->r->cwd_fallback && chdir("/") == 0))
        return fail(p->t, "invalid_argument", "cwd", -1, "cannot work in %.150s", p->cwd);
    return child_files(p);
}

/* Runs on the parent's memory while the parent stands still: what it says of failure is simply there afterwards. */
_Noreturn static __attribute__((noinline)) void child_main(const struct plan *p) {
    struct sigaction plain = {.sa_handler = SIG_DFL};
    sigset_t none;
    /* The only one that chronus does not take as it comes. */
    sigaction(SIGPIPE, &plain, NULL);
    umask(022);
    if (child_prepare(p) == 0) {
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        run(p);
    }
    _exit(127);
}

/*
 * vfork with clone3's flags. The child must not return through a frame of ours, so the system call is made in line and the child goes on
 * below this frame's stack; the parent sleeps until the child has executed or gone.
 */
static __attribute__((noinline)) long clone_vfork(struct clone_args *args, const struct plan *p) {
    long rc;
#if defined(__x86_64__)
    __asm__ volatile("syscall" : "=a"(rc) : "a"((long)SYS_clone3), "D"(args), "S"(sizeof *args) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = SYS_clone3;
    register long x0 __asm__("x0") = (long)args;
    register long x1 __asm__("x1") = sizeof *args;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x1), "r"(x8) : "memory");
    rc = x0;
#else
#error "clone_vfork knows x86_64 and aarch64"
#endif
    if (rc == 0)
        child_main(p);
    return rc;
}

static int high(int fd) {
    if (fd < 0 || fd > 9)
        return fd;
    int up = fcntl(fd, F_DUPFD_CLOEXEC, 10);
    close(fd);
    return up;
}

static int pipe_make(int64_t owner, int64_t group, int *ours, int *theirs, bool we_read) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    *ours = ends[we_read ? 0 : 1];
    *theirs = high(ends[we_read ? 1 : 0]);
    /* So that the guest may open /dev/stdout, which is the pipe again by way of /proc. */
    if (*theirs < 0 || fchown(*theirs, (uid_t)owner, (gid_t)group) < 0 || fcntl(*ours, F_SETFL, O_NONBLOCK) < 0)
        return -1;
    return 0;
}

static int terminal_make(struct plan *p, struct child *c) {
    int64_t base = p->s->spec.uid_base, uid = base + p->user.uid;
    prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP);
    setfsuid((uid_t)uid);
    int master = openat(p->s->devpts, "ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), zero = 0;
    setfsuid(0);
    prctl(PR_SET_SECUREBITS, 0);
    if (master < 0)
        return -1;
    c->out = master;
    struct winsize size = {.ws_row = (unsigned short)p->r->rows, .ws_col = (unsigned short)p->r->cols};
    struct termios mode;
    if (ioctl(master, TIOCSPTLCK, &zero) < 0 || ioctl(master, TIOCSWINSZ, &size) < 0)
        return -1;
    int slave = high(ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC));
    if (slave < 0)
        return -1;
    if (tcgetattr(slave, &mode) == 0) {
        mode.c_iflag |= IUTF8;
        tcsetattr(slave, TCSANOW, &mode);
    }
    p->in = p->out = p->err = slave;
    c->in = fcntl(master, F_DUPFD_CLOEXEC, 10);
    return c->in < 0 ? -1 : 0;
}

static int streams_make(struct plan *p, struct child *c) {
    int64_t uid = p->s->spec.uid_base + p->user.uid, gid = p->s->spec.uid_base + p->user.gid;
    if (p->r->tty)
        return terminal_make(p, c);
    if (pipe_make(uid, gid, &c->out, &p->out, true) < 0 || pipe_make(uid, gid, &c->err, &p->err, true) < 0)
        return -1;
    if (p->shell && pipe_make(uid, gid, &c->status, &p->status, true) < 0)
        return -1;
    if (p->r->stdin_open || p->r->stdin_data || p->shell)
        return pipe_make(uid, gid, &c->in, &p->in, false);
    char path[32];
    /* Opened anew: what a command does to its descriptor is not the next one's. */
    snprintf(path, sizeof path, "self/fd/%d", p->s->null);
    return (p->in = high(openat(p->s->host->proc, path, O_RDONLY | O_CLOEXEC))) < 0 ? -1 : 0;
}

int spawn(struct sandbox *s, const struct request *r, int group, bool shell, struct child *c, struct trouble *t) {
    static bool within;
    struct plan p = {.s = s, .r = r, .shell = shell, .group = group, .in = -1, .out = -1, .err = -1, .status = -1, .child = c, .t = t};
    *c = (struct child){.pid = -1, .pidfd = -1, .in = -1, .out = -1, .err = -1, .status = -1};
    const char *name = r->user ? r->user : s->spec.user ? s->spec.user : "root";
    if (user_find(s, name, &p.user, t) < 0)
        return -1;
    p.cwd = r->cwd && *r->cwd ? r->cwd : s->spec.cwd && *s->spec.cwd ? s->spec.cwd : "/";
    int rc = -1;
    p.script = calloc((size_t)r->args.count + 2, sizeof *p.script);
    if (!p.script || !(p.env = env_build(&p)) || streams_make(&p, c) < 0) {
        fail(t, "overloaded", NULL, -1, "cannot make the streams of a command");
        goto out;
    }
    /* Only our children are moved by this, from now on: chronus itself stays outside. */
    if (!within && setns(s->init_pidfd, CLONE_NEWPID) < 0) {
        fail(t, "sandbox_failed", NULL, -1, "the sandbox's pid namespace is gone");
        goto out;
    }
    within = true;
    struct clone_args args = {
        .flags = CLONE_VM | CLONE_VFORK | CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)&c->pidfd, .exit_signal = SIGCHLD};
    if (group >= 0 && s->spec.cgroup_v2) {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)group;
    }
    t->code = NULL;
    long pid = clone_vfork(&args, &p);
    if (pid < 0) {
        fail(t, errno == EAGAIN ? "quota_exceeded" : "sandbox_failed", errno == EAGAIN ? "pids_limit" : NULL, -1, "cannot start a process");
        goto out;
    }
    c->pid = (int)pid;
    rc = t->code ? -1 : 0;
out:
    free(p.script);
    free(p.env);
    int ends[] = {p.in, p.out, p.err, p.status};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (ends[i] >= 0 && (i == 0 || ends[i] != ends[i - 1]))
            close(ends[i]);
    return rc;
}
