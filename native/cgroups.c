/* The cgroups that edge planned: made, joined, watched for OOM kills, killed and removed. */
#define _GNU_SOURCE
#include "aether.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *below_root(const char *path) {
    while (*path == '/')
        path++;
    return path;
}

static int host_write(const struct host *h, const char *path, const void *value, size_t length) {
    int fd = host_open(h, path, O_WRONLY);
    if (fd < 0)
        return -1;
    ssize_t n = write(fd, value, length);
    int error = errno;
    close(fd);
    errno = error;
    return n == (ssize_t)length ? 0 : -1;
}

/* The one that init is cloned into; with no v2 there is none, and sessions make theirs in the last. */
int cgroups_make_first(struct sandbox *s, struct trouble *t) {
    const char *base = s->spec.cgroup_v2;
    if (!base)
        return 0;
    if (mkdirat(s->host->root, below_root(base), 0755) < 0 && errno != EEXIST)
        return fail(t, "internal", NULL, -1, "cannot make cgroup %s", base);
    if ((s->cgroups = host_open(s->host, base, O_RDONLY | O_DIRECTORY)) < 0)
        return fail(t, "internal", NULL, -1, "cannot open cgroup %s", base);
    return 0;
}

static int cgroups_fill(struct sandbox *s, struct trouble *t) {
    struct spec *spec = &s->spec;
    for (int i = 0; i < spec->cgroup_writes.count; i++) {
        struct blob *b = &spec->cgroup_writes.items[i];
        if (host_write(s->host, b->path, b->value, b->length) < 0)
            return fail(t, "internal", NULL, -1, "cannot set %s to %.40s", b->path, (char *)b->value);
    }
    if (spec->cgroup_joins.count > MAX_JOINS)
        return fail(t, "invalid_argument", NULL, 0, "more than %d CGROUP_JOIN", MAX_JOINS);
    for (int i = 0; i < spec->cgroup_joins.count; i++) {
        int fd = host_open(s->host, spec->cgroup_joins.items[i], O_WRONLY);
        if (fd < 0)
            return fail(t, "internal", NULL, -1, "cannot open %s", spec->cgroup_joins.items[i]);
        s->joins[s->join_count++] = fd;
    }
    if (s->cgroups < 0 && spec->cgroup_dirs.count) {
        const char *last = spec->cgroup_dirs.items[spec->cgroup_dirs.count - 1];
        if ((s->cgroups = host_open(s->host, last, O_RDONLY | O_DIRECTORY)) < 0)
            return fail(t, "internal", NULL, -1, "cannot open cgroup %s", last);
    }
    if (spec->memory_usage_file && (s->usage = host_open(s->host, spec->memory_usage_file, O_RDONLY)) < 0)
        return fail(t, "internal", NULL, -1, "cannot open %s", spec->memory_usage_file);
    if (spec->oom_file && (s->oom = host_open(s->host, spec->oom_file, O_RDONLY)) < 0)
        return fail(t, "internal", NULL, -1, "cannot open %s", spec->oom_file);
    return 0;
}

/* One step of what there is to make; `at` counts them from 0. 1 while there is more, 0 when all is there. */
int cgroups_make_next(struct sandbox *s, int *at, struct trouble *t) {
    const struct list *dirs = &s->spec.cgroup_dirs;
    if (*at == dirs->count)
        return cgroups_fill(s, t);
    const char *path = dirs->items[(*at)++];
    if (mkdirat(s->host->root, below_root(path), 0755) < 0 && errno != EEXIST)
        return fail(t, "internal", NULL, -1, "cannot make cgroup %s", path);
    return 1;
}

/* A single thread that moves itself by writing "0" to a v1 `tasks` file takes no global lock and waits for no grace period. */
int cgroups_join(const struct sandbox *s, struct trouble *t) {
    for (int i = 0; i < s->join_count; i++)
        if (write(s->joins[i], "0", 1) != 1)
            return fail(t, "internal", NULL, -1, "cannot join %s",
                        i < s->spec.cgroup_joins.count ? s->spec.cgroup_joins.items[i] : "one of the sandbox's groups");
    return 0;
}

int64_t oom_kills(const struct sandbox *s) {
    char buf[512];
    if (s->oom < 0)
        return 0;
    ssize_t n = pread(s->oom, buf, sizeof buf - 1, 0);
    if (n <= 0)
        return 0;
    buf[n] = 0;
    char *line = strstr(buf, "oom_kill ");
    return line ? atoll(line + strlen("oom_kill ")) : 0;
}

int session_group_make(const struct sandbox *s, int pid) {
    if (s->cgroups < 0) {
        errno = ENOENT;
        return -1;
    }
    char folder[24];
    snprintf(folder, sizeof folder, "s-%d", pid);
    if (mkdirat(s->cgroups, folder, 0755) < 0 && errno != EEXIST)
        return -1;
    return openat(s->cgroups, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

#define AT_ONCE 256

/* Up to `max` pids of the group but `except`. */
static int group_pids(int group, int *pids, int max, int except) {
    char buf[4096];
    size_t have = 0;
    int count = 0, fd = openat(group, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    ssize_t n;
    while (fd >= 0 && count < max && (n = read(fd, buf + have, sizeof buf - 1 - have)) > 0) {
        have += (size_t)n;
        buf[have] = 0;
        char *at = buf, *end;
        while (count < max && (end = strchr(at, '\n'))) {
            int pid = atoi(at);
            at = end + 1;
            if (pid > 0 && pid != except)
                pids[count++] = pid;
        }
        have -= (size_t)(at - buf);
        memmove(buf, at, have);
    }
    if (fd >= 0)
        close(fd);
    return count;
}

/*
 * A pid that was read may be another process' when it is used. So descriptors are opened first and the group is read again: where a pid is
 * still in it, its descriptor is of that process, or of one that has gone in between, which no signal reaches.
 */
int session_group_signal(int group, int signum, int except) {
    int first[AT_ONCE], again[AT_ONCE], pidfds[AT_ONCE];
    int count = group_pids(group, first, AT_ONCE, except);
    for (int i = 0; i < count; i++)
        pidfds[i] = open_pidfd(first[i]);
    int still = group_pids(group, again, AT_ONCE, except);
    for (int i = 0; i < count; i++) {
        for (int k = 0; pidfds[i] >= 0 && k < still; k++)
            if (again[k] == first[i]) {
                syscall(SYS_pidfd_send_signal, pidfds[i], signum, NULL, 0);
                break;
            }
        if (pidfds[i] >= 0)
            close(pidfds[i]);
    }
    return count;
}

bool session_group_empty(int group) {
    int pid;
    return group_pids(group, &pid, 1, 0) == 0;
}

/* cgroup.kill (v2, Linux 5.14), else kill what is there until nothing is. */
int session_group_kill(int group) {
    int fd = openat(group, "cgroup.kill", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = write(fd, "1", 1);
        close(fd);
        if (n == 1)
            return 0;
    }
    for (int i = 0; i < 100 && session_group_signal(group, SIGKILL, 0) > 0; i++)
        poll(NULL, 0, 1);
    return 0;
}

void session_group_remove(const struct sandbox *s, int pid) {
    char folder[24];
    if (s->cgroups < 0)
        return;
    snprintf(folder, sizeof folder, "s-%d", pid);
    /* A killed process leaves its group a moment after its death is seen. */
    for (int i = 0; i < 200; i++) {
        if (unlinkat(s->cgroups, folder, AT_REMOVEDIR) == 0 || errno == ENOENT)
            return;
        poll(NULL, 0, i < 10 ? 1 : 10);
    }
}

static void remove_children(int dir) {
    int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = copy >= 0 ? fdopendir(copy) : NULL;
    if (!d)
        return;
    struct dirent *e;
    while ((e = readdir(d)))
        if (e->d_type == DT_DIR && strncmp(e->d_name, "s-", 2) == 0)
            unlinkat(dir, e->d_name, AT_REMOVEDIR);
    closedir(d);
}

/* The first folder named may be the instance's own and is shared: it stays while others are in it (ENOTEMPTY, EBUSY), without being a leak.
 */
int cgroups_remove(struct sandbox *s) {
    int left = 0;
    for (int try = 0; try < 150; try++) {
        left = 0;
        if (s->cgroups >= 0)
            remove_children(s->cgroups);
        for (int i = s->spec.cgroup_dirs.count - 1; i >= 0; i--) {
            const char *path = s->spec.cgroup_dirs.items[i];
            const char *slash = strrchr(path, '/');
            bool own = slash && strcmp(slash + 1, s->spec.sandbox_id) == 0;
            if (unlinkat(s->host->root, below_root(path), AT_REMOVEDIR) < 0 && errno != ENOENT && own)
                left++;
        }
        if (!left)
            return 0;
        poll(NULL, 0, try < 20 ? 1 : 10);
    }
    return left;
}
