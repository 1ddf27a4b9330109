/* dsec-native launcher: forks an aether for each LAUNCH. It is small, so a fork of it is cheap, and nothing is executed. */
#define _GNU_SOURCE
#include "aether.h"
#include "blobcache.h"
#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define EDGE_SOCKET     3
#define MAX_WAITING_FDS 64

static int die(const char *what) {
    fprintf(stderr, "dsec-native: %s: %s\n", what, strerror(errno));
    return -1;
}

/* Mounts one path on another so that copies of it inherit: nothing under it can be written, run or used as a device. */
static int close_over(const char *path, const char *target) {
    const unsigned long closed = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC;
    return mount(path, target, NULL, MS_BIND, NULL) < 0 ? -1 : mount("", target, NULL, MS_REMOUNT | MS_BIND | closed, NULL);
}

/* What all sandboxes show alike is written below /faces and shown from /shown. */
static int empty_namespace_enter(void) {
    static const char *const folders[] = {"root", "own", "sys", "faces", "shown", "empty"};
    if (unshare(CLONE_NEWNS) < 0 || mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return -1;
    int sys = open_tree(AT_FDCWD, "/sys", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=16m,mode=0755") < 0 || chdir("/tmp") < 0)
        return -1;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        if (mkdir(folders[i], 0755) < 0)
            return -1;
    if (sys < 0 || move_mount(sys, "", AT_FDCWD, "sys", MOVE_MOUNT_F_EMPTY_PATH) < 0 || mknod("null", S_IFREG | 0444, 0) < 0)
        return -1;
    if (syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        return -1;
    return close_over("/empty", "/empty") < 0 || close_over("/null", "/null") < 0 || close_over("/sys", "/sys") < 0 ||
                   close_over("/faces", "/shown") < 0
               ? -1
               : 0;
}

/* Sandboxes copy this namespace instead of the host's, whose mounts may be thousands. It lives by our descriptor of it. */
static int empty_namespace(struct host *h) {
    int ready[2], ns = -1, launcher = getpid();
    char byte = 0;
    if (pipe2(ready, O_CLOEXEC) < 0)
        return -1;
    int pid = fork();
    if (pid == 0) {
        /* Edge sees by its socket whether the launcher lives. */
        close(EDGE_SOCKET);
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != launcher)
            _exit(1);
        if (empty_namespace_enter() == 0 && write(ready[1], &byte, 1) == 1)
            pause();
        die("cannot make an empty mount namespace");
        _exit(1);
    }
    close(ready[1]);
    if (pid > 0 && read(ready[0], &byte, 1) == 1)
        ns = namespace_fd(h, pid, "mnt");
    close(ready[0]);
    if (pid > 0) {
        kill(pid, SIGKILL);
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    return ns;
}

static char *read_all(int fd) {
    size_t len = 0, cap = 0;
    char *text = NULL;
    for (;;) {
        if (len + 4096 > cap) {
            char *more = realloc(text, cap = cap ? 2 * cap : 16384);
            if (!more)
                break;
            text = more;
        }
        ssize_t n = read(fd, text + len, cap - len - 1);
        if (n <= 0)
            break;
        len += (size_t)n;
    }
    if (text)
        text[len] = 0;
    return text;
}

static int host_look(struct host *h) {
    cpu_set_t ours;
    h->all_cpus = sched_getaffinity(0, sizeof ours, &ours) == 0 && CPU_COUNT(&ours) == sysconf(_SC_NPROCESSORS_ONLN);
    int cpuinfo = openat(h->proc, "cpuinfo", O_RDONLY | O_CLOEXEC);
    if (cpuinfo < 0 || !(h->cpuinfo = read_all(cpuinfo)))
        return die("cannot read /proc/cpuinfo");
    close(cpuinfo);
    if ((h->empty_ns = empty_namespace(h)) < 0)
        return die("cannot make an empty mount namespace");
    return 0;
}

static void limits_raise(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

/* What edge ignores (Python does SIGPIPE and SIGXFSZ) would be ignored by every command: none of our processes has a handler to reset. */
static void signals_reset(void) {
    struct sigaction plain = {.sa_handler = SIG_DFL};
    for (int sig = 1; sig < NSIG; sig++)
        if (sig != SIGKILL && sig != SIGSTOP)
            sigaction(sig, &plain, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void standard_streams_close(void) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd <= 2 && null >= 0; fd++)
        dup2(null, fd);
    if (null > 2)
        close(null);
}

#define BURST_NS  3000000 /* launches closer than this are a burst */
#define QUIET_MS  6       /* nothing asked for so long: time to make something ahead */
#define PERIOD_MS 1000    /* to the next try, where that failed */

static void launch(struct host *h, struct inbox *in, struct frame *f, const int *fds, int count) {
    int64_t now = now_ns(CLOCK_MONOTONIC);
    h->burst = now - h->last_launch < BURST_NS;
    h->last_launch = now;
    struct ahead ahead = ahead_take(h);
    filter_note(h->filter, f);
    int pid = fork();
    if (pid == 0) {
        close(EDGE_SOCKET);
        ahead_close_all(h);
        for (int i = 1; i < count; i++)
            close(fds[i]);
        aether_main(h, in, f, fds[0], ahead);
    }
    ahead_close(&ahead);
    if (pid < 0) {
        struct trouble t = {0};
        fail(&t, "overloaded", NULL, -1, "cannot fork");
        send_trouble(fds[0], &t);
    }
}

/* Uses the time until edge asks for something. */
static void wait_for_edge(struct host *h) {
    struct pollfd p = {.fd = EDGE_SOCKET, .events = POLLIN};
    int quiet = QUIET_MS;
    while (!ahead_full(h) && poll(&p, 1, quiet) == 0)
        quiet = ahead_make(h) < 0 ? PERIOD_MS : QUIET_MS;
}

static int serve(struct host *h) {
    struct inbox in = {0};
    struct frame f;
    int fds[MAX_WAITING_FDS], count = 0;
    for (;;) {
        int fd = -1;
        wait_for_edge(h);
        long n = inbox_fill(&in, EDGE_SOCKET, &fd);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN) {
            struct pollfd p = {.fd = EDGE_SOCKET, .events = POLLIN};
            poll(&p, 1, -1);
            continue;
        }
        if (n <= 0)
            return 0;
        if (fd >= 0 && count < MAX_WAITING_FDS)
            fds[count++] = fd;
        else if (fd >= 0)
            close(fd);
        int got;
        while ((got = inbox_next(&in, &f)) > 0) {
            if (f.kind != K_LAUNCH || !count)
                return die("a frame that is no LAUNCH with a descriptor");
            launch(h, &in, &f, fds, count);
            close(fds[0]);
            memmove(fds, fds + 1, sizeof *fds * (size_t)--count);
        }
        if (got < 0)
            return die("malformed frame from edge");
    }
}

static int start(struct host *h) {
    if (host_look(h) < 0)
        return -1;
    signal(SIGCHLD, SIG_IGN);
    standard_streams_close();
    return serve(h);
}

int main(int argc, char **argv) {
    /* With aether's own, which comes next in memory, on one page; not among the initialised, where ps could not read its title. */
    static struct host host __attribute__((aligned(PAGE)));
    if (argc == 2 && strcmp(argv[1], "--version") == 0)
        return puts("dsec-native " DSEC_VERSION) < 0;
    if (argc > 1 && strcmp(argv[1], "blobcache") == 0)
        return blobcache_main(argc - 1, argv + 1);
    if (argc != 3 || strcmp(argv[1], "launcher") != 0) {
        fprintf(stderr, "usage: dsec-native launcher " LAUNCH_VERSION "   (edge's socket as descriptor 3; see docs/channel.md)\n"
                        "       dsec-native blobcache --help\n");
        return 2;
    }
    if (strcmp(argv[2], LAUNCH_VERSION) != 0) {
        fprintf(stderr, "dsec-native: edge has version %s of LAUNCH, this is built for " LAUNCH_VERSION "; build it anew\n", argv[2]);
        return 2;
    }
    /* Neither memory nor descriptors of ours can be reached from a sandbox, whatever it runs. */
    if (prctl(PR_SET_DUMPABLE, 0) < 0 || fcntl(EDGE_SOCKET, F_SETFD, FD_CLOEXEC) < 0)
        return die("cannot start"), 1;
    close_range(EDGE_SOCKET + 1, ~0U, 0);
    prctl(PR_SET_NAME, "dsec-launcher");
    signals_reset();
    limits_raise();
    /* Its memory becomes every aether's and init's: nothing of edge's environment stays in it. */
    for (char **e = environ; *e; e++)
        memset(*e, 0, strlen(*e));
    if ((host.root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0 || (host.proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0)
        return die("cannot open / and /proc"), 1;
    if (!(host.filter = calloc(1, sizeof *host.filter)))
        return die("cannot start"), 1;
    snprintf(host.title, sizeof host.title, "dsec-native launcher");
    host.argv_at = argv[0];
    host.argv_len = (size_t)(argv[1] + strlen(argv[1]) - argv[0]);
    lean_run(&host, start);
}
