/* From a spec to a running, empty sandbox: its init is up in its own namespaces and waits for children to reap. */
#define _GNU_SOURCE
#include "aether.h"
#include "paths.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/sched.h>

static int capabilities_drop_all(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{0}};
    return (int)syscall(SYS_capset, &header, data);
}

void rename_process(const struct host *h, const char *name, const char *title) {
    prctl(PR_SET_NAME, name);
    if (h->argv_len) {
        memset(h->argv_at, 0, h->argv_len);
        strncpy(h->argv_at, title, h->argv_len - 1);
    }
}

/* What aether makes while init makes its namespaces and /dev. The groups to join follow, while init puts the root together. */
enum { OVERLAY, USERNS, PARTS };

#define EDGE_MS 60000 /* how long edge may take for the layers: a store may be slow, and if edge dies the connection ends */

static int init_prepare(struct sandbox *s, int status, struct devices *made, struct trouble *t) {
    int fds[PARTS];
    if (setns(s->host->empty_ns, CLONE_NEWNS) < 0 || unshare(CLONE_NEWNS | CLONE_NEWUTS) < 0 || ahead_enter(&s->ahead) < 0)
        return fail(t, "overloaded", NULL, -1, "cannot make the sandbox's namespaces");
    const char *name = s->spec.hostname ? s->spec.hostname : "sandbox";
    if (sethostname(name, strlen(name)) < 0)
        return fail(t, "invalid_argument", "hostname", -1, "cannot set hostname %s", name);
    if (root_prepare(s, made, t) < 0)
        return -1;
    if (recv_fds(status, fds, PARTS) != PARTS)
        return fail(t, "internal", NULL, 0, "aether gave up while the sandbox was made");
    s->userns = fds[USERNS];
    if (root_assemble(s, fds[OVERLAY], made, t) < 0)
        return -1;
    if ((s->join_count = recv_fds(status, s->joins, MAX_JOINS)) < 0 || s->join_count > MAX_JOINS)
        return fail(t, "internal", NULL, 0, "aether gave up while the sandbox was made");
    if (cgroups_join(s, t) < 0)
        return -1;
    if (unshare(CLONE_NEWCGROUP) < 0)
        return fail(t, "internal", NULL, -1, "cannot make a cgroup namespace");
    if (setns(s->userns, CLONE_NEWUSER) < 0 || setgroups(0, NULL) < 0 || setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)
        return fail(t, "internal", NULL, -1, "cannot enter the user namespace");
    /* Only now: a change of ids clears it. */
    if (prctl(PR_SET_DUMPABLE, 0) < 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || capabilities_drop_all() < 0)
        return fail(t, "internal", NULL, -1, "cannot drop capabilities");
    return 0;
}

_Noreturn static void init_main(struct sandbox *s, int status) {
    struct trouble t = {0};
    sigset_t all;
    struct devices made = {-1, -1, -1, -1};
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    signal(SIGCHLD, SIG_DFL);
    rename_process(s->host, "init", "init");
    int rc = init_prepare(s, status, &made, &t);
    if (rc < 0)
        t.ran = 1; /* marks "there is trouble" for aether, which sets it right */
    int count = made.meminfo >= 0 ? 3 : 2;
    if (send_all(status, &t, sizeof t, -1) < 0 || rc < 0 || send_fds(status, (int[]){made.pts, made.null, made.meminfo}, count) < 0)
        _exit(1);
    close_range(0, ~0U, 0);
    /* Its memory is that of aether and stays closed to the guest: not dumpable, and owned by the initial user namespace. */
    init_loop();
}

static int init_clone(struct sandbox *s) {
    struct clone_args args = {.flags = CLONE_NEWPID | CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)&s->init_pidfd, .exit_signal = SIGCHLD};
    if (s->spec.cgroup_v2) {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)s->cgroups;
    }
    return (int)syscall(SYS_clone3, &args, sizeof args);
}

/*
 * Init has as much to do as we have, at the same time. Some schedulers leave a child on its parent's processor though others are idle, so
 * it is sent away for the time. In a burst all of them are busy. True if it has to be let back. Not where somebody has chosen processors
 * for us: a choice of one's own replaces the one that was inherited.
 */
static bool init_send_away(const struct sandbox *s) {
    cpu_set_t others;
    unsigned here;
    if (s->host->burst || !s->host->all_cpus || s->init_pid <= 0 || sched_getaffinity(0, sizeof others, &others) < 0 ||
        syscall(SYS_getcpu, &here, NULL, NULL) < 0 || here >= CPU_SETSIZE)
        return false;
    CPU_CLR(here, &others);
    return CPU_COUNT(&others) && sched_setaffinity(s->init_pid, sizeof others, &others) == 0;
}

/* To all that there are and will be: the kernel takes away what the cpuset does not have. */
static void init_let_back(const struct sandbox *s) {
    cpu_set_t all;
    memset(&all, 0xff, sizeof all);
    sched_setaffinity(s->init_pid, sizeof all, &all);
}

static int init_await(struct sandbox *s, int status, struct trouble *t) {
    int fds[3] = {-1, -1, -1};
    set_timeouts(status, 30);
    if (recv(status, t, sizeof *t, MSG_WAITALL) != (ssize_t)sizeof *t)
        return fail(t, "internal", NULL, 0, "the sandbox's init died while it was set up");
    int failed = t->ran;
    t->ran = 0;
    if (failed)
        return -1;
    if (recv_fds(status, fds, 3) < 2)
        return fail(t, "internal", NULL, 0, "the sandbox's init died when it was set up");
    s->devpts = fds[0];
    s->null = fds[1];
    s->meminfo = fds[2];
    return 0;
}

static int socket_bind(struct sandbox *s, struct trouble *t) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if (strlen(s->spec.socket_path) >= sizeof a.sun_path)
        return fail(t, "invalid_argument", "run", 0, "socket path is longer than %zu bytes", sizeof a.sun_path - 1);
    memcpy(a.sun_path, s->spec.socket_path, strlen(s->spec.socket_path) + 1);
    s->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    umask(0177);
    int rc = s->listener < 0 ? -1 : bind(s->listener, (struct sockaddr *)&a, sizeof a);
    umask(022);
    if (rc < 0)
        return fail(t, "internal", NULL, -1, "cannot bind %s", s->spec.socket_path);
    s->bound = true;
    return 0;
}

/* Where LAUNCH names no layers, edge is still mounting them, or making the scratch folder: it says when they are there. */
static int layers_await(struct sandbox *s, struct trouble *t) {
    struct inbox in = {0};
    struct frame f;
    int rc = 0;
    if (s->spec.layers.count)
        return 0;
    if (recv_frame(s->birth, &in, &f, EDGE_MS) < 0 || f.kind != K_LAYERS)
        rc = fail(t, "internal", NULL, -1, "edge gave the sandbox up before it was made");
    else
        rc = spec_layers(&s->spec, &f, t);
    inbox_free(&in);
    return rc;
}

static bool layers_are_here(const struct sandbox *s) {
    struct pollfd p = {.fd = s->birth, .events = POLLIN};
    return s->spec.layers.count || poll(&p, 1, 0) != 0;
}

/* In the host's mount namespace, then in the empty one. What fails at init's end is for init to say: it is on its way. */
static int parts_hand_over(struct sandbox *s, int status, struct trouble *t) {
    int fds[PARTS] = {[USERNS] = s->userns}, rc = 0;
    if (layers_await(s, t) < 0 || (fds[OVERLAY] = overlay_make(s, t)) < 0)
        return -1;
    if (setns(s->host->empty_ns, CLONE_NEWNS) < 0)
        rc = fail(t, "internal", NULL, -1, "cannot leave the host's mount namespace");
    else if (shared_faces_make(s, t) < 0)
        rc = -1;
    else if (send_fds(status, fds, PARTS) < 0 && errno != EPIPE)
        rc = fail(t, "internal", NULL, -1, "cannot hand the sandbox's parts to its init");
    close(fds[OVERLAY]);
    return rc;
}

/* All that init needs. What it needs first is made as soon as edge has the layers; the groups before, while it has not, or after. */
static int parts_make(struct sandbox *s, int status, struct trouble *t) {
    bool handed = false;
    int at = 0, more = 1;
    if ((s->userns = userns_make(s, t)) < 0)
        return -1;
    while (more || !handed)
        if (!handed && (!more || layers_are_here(s))) {
            if (parts_hand_over(s, status, t) < 0)
                return -1;
            handed = true;
        } else if ((more = cgroups_make_next(s, &at, t)) < 0)
            return -1;
    if (send_fds(status, s->joins, s->join_count) < 0 && errno != EPIPE)
        return fail(t, "internal", NULL, -1, "cannot hand the sandbox's groups to its init");
    return 0;
}

/* What the caller asked for must be there. What only the image says is not looked at: commands fall back to "/" without its folder. */
static int asked_find(const struct sandbox *s, struct trouble *t) {
    if (s->spec.cwd_asked) {
        int fd = open_inside(s->root, s->spec.cwd, O_PATH | O_DIRECTORY, 0);
        if (fd < 0)
            return fail(t, "invalid_argument", "workdir", -1, "workdir %.150s is no folder in the sandbox", s->spec.cwd);
        close(fd);
    }
    struct user user;
    if (s->spec.user_asked && user_find(s, s->spec.user, &user, t) < 0) {
        t->field = "init_user";
        return -1;
    }
    return 0;
}

int sandbox_start(struct sandbox *s, struct trouble *t) {
    int rc = -1, status[2] = {-1, -1};
    if (socket_bind(s, t) < 0 || cgroups_make_first(s, t) < 0)
        return -1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, status) < 0)
        return fail(t, "overloaded", NULL, -1, "out of descriptors");
    s->init_pid = init_clone(s);
    if (s->init_pid == 0) {
        close(status[0]);
        init_main(s, status[1]);
    }
    const bool away = init_send_away(s);
    close(status[1]);
    ahead_close(&s->ahead);
    if (s->init_pid < 0) {
        fail(t, "overloaded", NULL, -1, "cannot clone the sandbox's init");
        goto out;
    }
    if (parts_make(s, status[0], t) < 0 || init_await(s, status[0], t) < 0)
        goto out;
    if (away)
        init_let_back(s);
    char path[32];
    snprintf(path, sizeof path, "%d/root", s->init_pid);
    if ((s->root = openat(s->host->proc, path, O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0 || listen(s->listener, 128) < 0) {
        fail(t, "internal", NULL, -1, "cannot reach the sandbox's root");
        goto out;
    }
    rc = asked_find(s, t);
out:
    close(status[0]);
    return rc;
}

void sandbox_undo(struct sandbox *s) {
    if (s->init_pid > 0) {
        kill(s->init_pid, SIGKILL);
        while (waitpid(s->init_pid, NULL, 0) < 0 && errno == EINTR)
            ;
        s->init_pid = 0;
    }
    cgroups_remove(s);
    const char *path = s->spec.socket_path;
    while (path && *path == '/')
        path++;
    if (s->bound && path)
        unlinkat(s->host->root, path, 0);
}
