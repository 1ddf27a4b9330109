/*
 * The sandbox's root: an overlay of idmapped layers under an idmapped upper, with proc, sys, dev and the walls on top.
 *
 * The mount namespace belongs to the initial user namespace, the workload to its own: root inside has no right over any mount, whatever
 * capabilities it holds. Nothing is ever mounted in the host's namespace.
 */
#define _GNU_SOURCE
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/securebits.h>

#define CLOSED (MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)

struct option {
    const char *key, *value;
};

int host_open(const struct host *h, const char *path, int flags) {
    while (*path == '/')
        path++;
    return openat(h->root, *path ? path : ".", flags | O_CLOEXEC, 0);
}

static int open_resolved(int root, const char *path, int flags, int mode, uint64_t resolve) {
    struct open_how how = {
        .flags = (uint64_t)(flags | O_CLOEXEC), .mode = (uint64_t)mode, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | resolve};
    while (*path == '/')
        path++;
    return open_steady(root, *path ? path : ".", &how);
}

static int open_in_root(int root, const char *path, int flags, int mode) {
    return open_resolved(root, path, flags, mode, 0);
}

_Noreturn static void sleep_for_ever(void) {
    for (;;)
        pause();
}

static int userns_child(void *unused) {
    (void)unused;
    sleep_for_ever();
}

static int map_write(const struct host *h, int pid, const char *which, int64_t base, int64_t count) {
    char path[64], map[64];
    snprintf(path, sizeof path, "%d/%s", pid, which);
    int n = snprintf(map, sizeof map, "0 %lld %lld\n", (long long)base, (long long)count);
    int fd = openat(h->proc, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t done = write(fd, map, (size_t)n);
    int error = errno;
    close(fd);
    errno = error;
    return done == n ? 0 : -1;
}

int namespace_fd(const struct host *h, int pid, const char *name) {
    char path[64];
    snprintf(path, sizeof path, "%d/ns/%s", pid, name);
    return openat(h->proc, path, O_RDONLY | O_CLOEXEC);
}

/*
 * A user namespace lives as long as something refers to it, so the process that made it is a passing one and shares our memory. Its end is
 * not waited for, as that would wait for its turn on a processor: aether reaps it with whatever else ends.
 */
int userns_make(struct sandbox *s, struct trouble *t) {
    const struct host *h = s->host;
    const int64_t base = s->spec.uid_base, count = s->spec.uid_count;
    int pid = clone(userns_child, s->carrier + sizeof s->carrier, CLONE_VM | CLONE_NEWUSER | SIGCHLD, NULL);
    if (pid < 0)
        return fail(t, "internal", NULL, -1, "cannot make a user namespace");
    int ns = -1;
    if (map_write(h, pid, "uid_map", base, count) == 0 && map_write(h, pid, "gid_map", base, count) == 0)
        ns = namespace_fd(h, pid, "user");
    int error = errno;
    kill(pid, SIGKILL);
    if (ns < 0)
        return fail(t, "internal", NULL, error, "cannot map ids %lld+%lld", (long long)base, (long long)count);
    return ns;
}

/* A detached copy of a mounted tree's root that shows ids through the sandbox's range. */
static int idmapped_clone(const struct host *h, const char *path, int userns, uint64_t attributes, struct trouble *t) {
    while (*path == '/')
        path++;
    int fd = open_tree(h->root, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (fd < 0)
        return fail(t, "sandbox_failed", NULL, -1, "cannot reach layer or scratch /%s", path);
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP | attributes, .userns_fd = (uint64_t)userns};
    if (mount_setattr(fd, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0) {
        fail(t, "internal", NULL, -1, "cannot map the ids of /%s", path);
        close(fd);
        return -1;
    }
    return fd;
}

/* By descriptor (Linux 6.13), else by its path in /proc (6.5). */
static int overlay_set(int fs, const char *key, int fd) {
    if (fsconfig(fs, FSCONFIG_SET_FD, key, NULL, fd) == 0)
        return 0;
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return fsconfig(fs, FSCONFIG_SET_STRING, key, path, 0);
}

static int overlay_options(int fs, const struct sandbox *s, int *layers, int upper, int work, struct trouble *t) {
    static const struct option options[] = {{"redirect_dir", "on"}, {"index", "off"}, {"metacopy", "off"}, {"xino", "off"}};
    if (fsconfig(fs, FSCONFIG_SET_STRING, "source", "overlay", 0) < 0)
        return fail(t, "internal", NULL, -1, "overlay refuses a source");
    for (int i = s->spec.layers.count - 1; i >= 0; i--)
        if (overlay_set(fs, "lowerdir+", layers[i]) < 0)
            return fail(t, "internal", "environment", -1, "overlay refuses layer %s", s->spec.layers.items[i]);
    if (overlay_set(fs, "upperdir", upper) < 0 || overlay_set(fs, "workdir", work) < 0)
        return fail(t, "internal", NULL, -1, "overlay refuses the scratch folder");
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (fsconfig(fs, FSCONFIG_SET_STRING, options[i].key, options[i].value, 0) < 0)
            return fail(t, "internal", NULL, -1, "overlay refuses %s", options[i].key);
    /* The upper lives no longer than the sandbox: a host's crash ends both, so the guest's fsync need not reach the disk. */
    fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0);
    return 0;
}

/* overlayfs keeps the credentials of the one who creates it and acts on the upper with them, so they must be ids that the idmapped upper
 * knows. */
static int overlay_create(int fs, int64_t base) {
    prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP);
    setfsgid((gid_t)base);
    setfsuid((uid_t)base);
    int rc = fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
    int error = errno;
    setfsuid(0);
    setfsgid(0);
    prctl(PR_SET_SECUREBITS, 0);
    errno = error;
    return rc;
}

int overlay_make(const struct sandbox *s, struct trouble *t) {
    int count = s->spec.layers.count, upper = -1, work = -1, fs = -1, mount = -1, scratch = -1, i = 0;
    int *layers = calloc((size_t)count, sizeof *layers);
    if (!layers)
        return fail(t, "internal", NULL, ENOMEM, "no memory for %d layers", count);
    for (; i < count; i++)
        if ((layers[i] = idmapped_clone(s->host, s->spec.layers.items[i], s->userns, 0, t)) < 0)
            goto out;
    if ((scratch = idmapped_clone(s->host, s->spec.scratch, s->userns, 0, t)) < 0)
        goto out;
    upper = openat(scratch, "upper", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    work = openat(scratch, "work", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    fs = fsopen("overlay", FSOPEN_CLOEXEC);
    if (upper < 0 || work < 0 || fs < 0) {
        fail(t, "internal", NULL, -1, "cannot open the scratch folder or overlayfs");
        goto out;
    }
    if (overlay_options(fs, s, layers, upper, work, t) < 0)
        goto out;
    if (overlay_create(fs, s->spec.uid_base) < 0) {
        fail(t, "internal", NULL, -1, "cannot create the overlay of %d layers", count);
        goto out;
    }
    if ((mount = fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NODEV)) < 0)
        fail(t, "internal", NULL, -1, "cannot mount the overlay");
out:
    /*
     * The clones that the overlay was made of stay open as long as aether lives. The overlay has its own by now, but to close one that was
     * never attached waits for a grace period of the whole host.
     */
    free(layers);
    int fds[] = {upper, work, fs};
    for (size_t k = 0; k < sizeof fds / sizeof *fds; k++)
        if (fds[k] >= 0)
            close(fds[k]);
    return mount;
}

static int mount_new(const char *type, const struct option *options, unsigned attributes) {
    int fs = fsopen(type, FSOPEN_CLOEXEC);
    if (fs < 0)
        return -1;
    int mount = -1;
    for (; options && options->key; options++)
        if (fsconfig(fs, FSCONFIG_SET_STRING, options->key, options->value, 0) < 0)
            goto out;
    if (fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        mount = fsmount(fs, FSMOUNT_CLOEXEC, attributes);
out:;
    int error = errno;
    close(fs);
    errno = error;
    return mount;
}

static int file_make(int dir, const char *name, int mode, const void *content, size_t length) {
    int fd = openat(dir, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0)
        return -1;
    if (fchmod(fd, (mode_t)mode) < 0 || (length && pwrite(fd, content, length, 0) != (ssize_t)length)) {
        close(fd);
        return -1;
    }
    return fd;
}

static int folders_make(int dir, const char *path) {
    char part[512];
    for (const char *slash = strchr(path, '/');; slash = strchr(slash + 1, '/')) {
        size_t n = slash ? (size_t)(slash - path) : strlen(path);
        if (n >= sizeof part)
            return -1;
        memcpy(part, path, n);
        part[n] = 0;
        if (mkdirat(dir, part, 0755) < 0 && errno != EEXIST)
            return -1;
        if (!slash)
            return 0;
    }
}

/* The first n processors of /proc/cpuinfo. */
static size_t cpuinfo_cut(const char *all, int64_t n) {
    const char *at = all;
    for (int64_t i = 0; i < n && at; i++) {
        const char *gap = strstr(at, "\n\n");
        if (!gap)
            return strlen(all);
        at = gap + 2;
    }
    return (size_t)(at - all);
}

static int64_t meminfo_usage(const struct sandbox *s) {
    char buf[32] = "";
    ssize_t n = s->usage < 0 ? -1 : pread(s->usage, buf, sizeof buf - 1, 0);
    return n > 0 ? atoll(buf) : 0;
}

/* Fixed width, so that a refresh overwrites exactly. */
void meminfo_refresh(const struct sandbox *s) {
    if (s->meminfo < 0)
        return;
    int64_t total = s->spec.memory_bytes / 1024, used = meminfo_usage(s) / 1024;
    int64_t left = used < total ? total - used : 0;
    char text[512];
    int n = snprintf(text, sizeof text,
                     "MemTotal:       %12lld kB\nMemFree:        %12lld kB\nMemAvailable:   %12lld kB\nBuffers:        %12d kB\n"
                     "Cached:         %12d kB\nSwapCached:     %12d kB\nActive:         %12lld kB\nInactive:       %12d kB\n"
                     "SwapTotal:      %12d kB\nSwapFree:       %12d kB\nShmem:          %12d kB\nSReclaimable:   %12d kB\n",
                     (long long)total, (long long)left, (long long)left, 0, 0, 0, (long long)used, 0, 0, 0, 0, 0);
    if (pwrite(s->meminfo, text, (size_t)n, 0) < 0)
        return;
}

static int text_file_once(const char *path, const void *text, size_t length) {
    char fresh[64];
    if (access(path, F_OK) == 0)
        return 0;
    snprintf(fresh, sizeof fresh, "%s.%d", path, getpid());
    int fd = file_make(AT_FDCWD, fresh, 0444, text, length);
    if (fd < 0)
        return -1;
    close(fd);
    return rename(fresh, path);
}

/* What sandboxes of one size show alike is made once, in the launcher's namespace, by the first that needs it. */
int shared_faces_make(const struct sandbox *s, struct trouble *t) {
    char path[64], online[32], made[64];
    snprintf(made, sizeof made, "/faces/made-%lld-%d", (long long)s->spec.cpus, s->spec.sys_shown.count);
    if (access(made, F_OK) == 0)
        return 0;
    int bad = folders_make(AT_FDCWD, "faces/sys/fs/cgroup");
    for (int i = 0; i < s->spec.sys_shown.count; i++) {
        char shown[512];
        bad |= snprintf(shown, sizeof shown, "faces/sys/%s", s->spec.sys_shown.items[i]) >= (int)sizeof shown ||
               folders_make(AT_FDCWD, shown) < 0;
    }
    if (s->spec.cpus > 0) {
        long long n = (long long)s->spec.cpus;
        int length = n > 1 ? snprintf(online, sizeof online, "0-%lld\n", n - 1) : snprintf(online, sizeof online, "0\n");
        snprintf(path, sizeof path, "/faces/online-%lld", n);
        bad |= text_file_once(path, online, (size_t)length);
        snprintf(path, sizeof path, "/faces/cpuinfo-%lld", n);
        bad |= text_file_once(path, s->host->cpuinfo, cpuinfo_cut(s->host->cpuinfo, n));
    }
    if (!bad)
        bad = text_file_once(made, "", 0);
    return bad ? fail(t, "internal", NULL, -1, "cannot write what sandboxes of this size show") : 0;
}

static int attach(int mount, int dir, const char *path) {
    return move_mount(mount, "", dir, path, MOVE_MOUNT_F_EMPTY_PATH);
}

/*
 * The sandbox's own tmpfs: its /dev, /dev/shm, /proc/meminfo and the files that edge places. One file system for all of them: each one more
 * would cost every memory cgroup of the host an entry among its shrinkers.
 */
static int own_make(struct sandbox *s, struct trouble *t) {
    char name[32], size[32];
    snprintf(size, sizeof size, "%lld", (long long)(s->spec.shm_bytes > 0 ? s->spec.shm_bytes : 64 << 20) + (1 << 20));
    struct option options[] = {{"mode", "0755"}, {"size", size}, {NULL, NULL}};
    int dir = mount_new("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC), bad = 0;
    if (dir < 0)
        return fail(t, "internal", NULL, -1, "cannot mount a tmpfs");
    if (s->spec.memory_bytes > 0) {
        s->meminfo = file_make(dir, "meminfo", 0444, "", 0);
        bad |= s->meminfo < 0;
        meminfo_refresh(s);
    }
    for (int i = 0; i < s->spec.files.count; i++) {
        struct blob *b = &s->spec.files.items[i];
        snprintf(name, sizeof name, "f%d", i);
        int fd = file_make(dir, name, b->mode, b->value, b->length);
        bad |= fd < 0 || fchown(fd, (uid_t)s->spec.uid_base, (gid_t)s->spec.uid_base) < 0;
        if (fd >= 0)
            close(fd);
    }
    if (bad || attach(dir, AT_FDCWD, "/own") < 0)
        return fail(t, "internal", NULL, -1, "cannot write the sandbox's own files");
    return 0;
}

/* Attach at a path of the image, which may be hostile: it is resolved inside the root and missing folders are made. */
static int attach_in_root(int mount, int root, const char *path) {
    int at = open_in_root(root, path, O_PATH | O_NOFOLLOW | O_DIRECTORY, 0);
    if (at < 0 && errno == ENOENT && mkdirat(root, path, 0755) == 0)
        at = open_in_root(root, path, O_PATH | O_NOFOLLOW | O_DIRECTORY, 0);
    if (at < 0)
        return -1;
    int rc = move_mount(mount, "", at, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
    int error = errno;
    close(at);
    errno = error;
    return rc;
}

/* source (in dir) bound over path in root with these attributes; 1 if the path is not there. Descriptors are closed with all others at the
 * end. */
static int bind_over(int dir, const char *source, int root, const char *path, uint64_t attributes) {
    int at = open_in_root(root, path, O_PATH, 0);
    if (at < 0)
        return errno == ENOENT || errno == ENOTDIR ? 1 : -1;
    int fd = open_tree(dir, source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW);
    struct mount_attr attr = {.attr_set = attributes};
    if (fd < 0 || (attributes && mount_setattr(fd, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0))
        return -1;
    return move_mount(fd, "", at, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}

/* One of our files bound over that of the image, or of whoever lived in its files before: only over a regular file on the root itself.
 * Links lead to /dev, and a folder may lie there; what is no such file shows as it is. */
static int file_over(const char *source, int root, const char *path) {
    struct stat st;
    int at = open_resolved(root, path, O_PATH, 0, RESOLVE_NO_XDEV);
    if (at < 0)
        return errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == EXDEV ? 0 : -1;
    int rc = fstat(at, &st);
    if (rc == 0 && S_ISREG(st.st_mode)) {
        int fd = open_tree(AT_FDCWD, source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW);
        struct mount_attr attr = {.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
        rc = fd < 0 || mount_setattr(fd, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0 ||
                     move_mount(fd, "", at, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) < 0
                 ? -1
                 : 0;
    }
    close(at);
    return rc;
}

static int dev_make(const struct sandbox *s, struct devices *made) {
    static const struct {
        const char *name;
        unsigned minor, major;
    } nodes[] = {{"null", 3, 1}, {"zero", 5, 1}, {"full", 7, 1}, {"random", 8, 1}, {"urandom", 9, 1}, {"tty", 0, 5}};
    static const struct option links[] = {{"fd", "/proc/self/fd"},
                                          {"stdin", "/proc/self/fd/0"},
                                          {"stdout", "/proc/self/fd/1"},
                                          {"stderr", "/proc/self/fd/2"},
                                          {"ptmx", "pts/ptmx"}};
    char gid[24];
    snprintf(gid, sizeof gid, "%lld", (long long)s->spec.uid_base + 5);
    struct option options[] = {{"mode", "0620"}, {"ptmxmode", "0666"}, {"gid", gid}, {"max", "64"}, {NULL, NULL}};
    if (mkdir("/own/dev", 0755) < 0)
        return -1;
    int dev = open("/own/dev", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++)
        if (mknodat(dev, nodes[i].name, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0)
            return -1;
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlinkat(links[i].value, dev, links[i].key) < 0)
            return -1;
    if (mkdirat(dev, "pts", 0755) < 0 || mkdirat(dev, "shm", 01777) < 0)
        return -1;
    made->pts = mount_new("devpts", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
    /* Not the host's: a lock on it, or a watch, would reach beyond the sandbox. And not later: the guest may put something else there. */
    made->null = openat(dev, "null", O_RDWR | O_CLOEXEC);
    return made->pts < 0 || made->null < 0 ? -1 : 0;
}

static int dev_show(const struct devices *made, int root) {
    int view = open_tree(AT_FDCWD, "/own/dev", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (view < 0 || attach_in_root(view, root, "dev") < 0)
        return -1;
    return attach(made->pts, view, "pts");
}

/*
 * Below /proc and /sys, which are ours, a path of the root is taken as it stands, from the root as the working directory: one call, where a
 * path of the image has to be resolved with care.
 */
static bool is_ours(const char *path) {
    return strncmp(path, "/proc/", 6) == 0 || strncmp(path, "/sys/", 5) == 0;
}

/* What is closed already and bound over a path of ours stays closed; 1 if the path is not there. */
static int show(const char *closed, const char *path) {
    if (mount(closed, path + 1, NULL, MS_BIND, NULL) == 0)
        return 0;
    return errno == ENOENT ? 1 : -1;
}

static int close_path(const char *path) {
    const unsigned long closed = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC;
    return mount("", path + 1, NULL, MS_REMOUNT | MS_BIND | closed, NULL);
}

/* A folder is hidden by /empty, all else by the empty file /null: the launcher has closed both, and copies of them stay so. */
static int mask_over(int root, const char *path) {
    struct stat st;
    /* A mount that does not fit would not only fail: to give it up waits for a grace period of the host. */
    if (is_ours(path) && stat(path + 1, &st) == 0)
        return show(S_ISDIR(st.st_mode) ? "/empty" : "/null", path);
    if (is_ours(path))
        return errno == ENOENT || errno == ENOTDIR ? 0 : -1;
    int at = open_in_root(root, path, O_PATH | O_NOFOLLOW, 0);
    if (at < 0)
        return errno == ENOENT || errno == ENOTDIR ? 0 : -1;
    if (fstat(at, &st) < 0)
        return -1;
    int fd = open_tree(AT_FDCWD, S_ISDIR(st.st_mode) ? "/empty" : "/null", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    return fd < 0 ? -1 : move_mount(fd, "", at, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}

/* What is known to be a file, or a folder, is not looked at: that would be a third of what hiding it takes. */
static int mask_known(int root, const struct list *paths, const char *closed, struct trouble *t) {
    for (int i = 0; i < paths->count; i++) {
        const char *path = paths->items[i];
        if (!is_ours(path) || (show(closed, path) < 0 && (errno != ENOTDIR || mask_over(root, path) < 0)))
            return fail(t, "internal", NULL, -1, "cannot mask %s", path);
    }
    return 0;
}

static int make_readonly(int root, const char *path) {
    if (!is_ours(path))
        return bind_over(root, path, root, path, CLOSED);
    int rc = show(path + 1, path);
    return rc == 0 ? close_path(path) : rc;
}

static int walls_make(const struct sandbox *s, int root, struct trouble *t) {
    for (int i = 0; i < s->spec.readonly.count; i++)
        if (make_readonly(root, s->spec.readonly.items[i]) < 0)
            return fail(t, "internal", NULL, -1, "cannot make %s read-only", s->spec.readonly.items[i]);
    for (int i = 0; i < s->spec.masks.count; i++)
        if (mask_over(root, s->spec.masks.items[i]) < 0)
            return fail(t, "internal", NULL, -1, "cannot mask %s", s->spec.masks.items[i]);
    return mask_known(root, &s->spec.mask_files, "/null", t) < 0 ? -1 : mask_known(root, &s->spec.mask_folders, "/empty", t);
}

/* /sys is a skeleton of ours that shows the parts that were asked for, read-only, rather than a sysfs with holes in it. */
static int sys_show(const struct sandbox *s, int root, struct trouble *t) {
    char shown[512];
    int view = open_tree(AT_FDCWD, "/shown/sys", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (view < 0 || attach_in_root(view, root, "sys") < 0)
        return fail(t, "internal", "environment", -1, "the image's /sys is not a folder");
    for (int i = 0; i < s->spec.sys_shown.count; i++) {
        snprintf(shown, sizeof shown, "/sys/%s", s->spec.sys_shown.items[i]);
        if (show(shown, shown) < 0)
            return fail(t, "internal", NULL, -1, "cannot show %s", shown);
    }
    return 0;
}

static int face_show(const char *name, int64_t number, const char *path, struct trouble *t) {
    char face[64];
    snprintf(face, sizeof face, "/shown/%s-%lld", name, (long long)number);
    return show(face, path) < 0 ? fail(t, "internal", NULL, -1, "cannot show %s", path) : 0;
}

static int faces_show(const struct sandbox *s, int root, struct trouble *t) {
    char name[64];
    int64_t cpus = s->spec.cpus;
    if (cpus > 0 &&
        (face_show("cpuinfo", cpus, "/proc/cpuinfo", t) < 0 || face_show("online", cpus, "/sys/devices/system/cpu/online", t) < 0))
        return -1;
    if (s->spec.memory_bytes > 0 && (show("/own/meminfo", "/proc/meminfo") != 0 || close_path("/proc/meminfo") < 0))
        return fail(t, "internal", NULL, -1, "cannot show /proc/meminfo");
    for (int i = 0; i < s->spec.files.count; i++) {
        snprintf(name, sizeof name, "/own/f%d", i);
        if (file_over(name, root, s->spec.files.items[i].path) < 0)
            return fail(t, "internal", NULL, -1, "cannot place %s", s->spec.files.items[i].path);
    }
    return 0;
}

/* By the sandbox's own proc: in the host's, each network namespace adds an entry of the same name to one hash chain. */
static int sysctls_set(const struct sandbox *s, int proc, struct trouble *t) {
    char path[256];
    for (int i = 0; i < s->spec.sysctls.count; i++) {
        struct blob *b = &s->spec.sysctls.items[i];
        snprintf(path, sizeof path, "sys/%s", b->path);
        int fd = openat(proc, path, O_WRONLY | O_CLOEXEC);
        if (fd < 0 || write(fd, b->value, b->length) != (ssize_t)b->length)
            return fail(t, "internal", NULL, -1, "cannot set sysctl %s", b->path);
        close(fd);
    }
    return 0;
}

/*
 * The assembled root is moved over the namespace's first one, as an initramfs does it. pivot_root would look at every thread of the host
 * for those whose root it has to change, which with thousands of sandboxes costs more than all the rest; here only this process's root
 * changes, and who enters the namespace later lands in the topmost mount. See docs/decisions/0008.
 */
static int root_switch(int root) {
    if (fchdir(root) < 0 || move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0 || chroot(".") < 0)
        return -1;
    return chdir("/");
}

/* What is made from now on belongs to the root of the sandbox; our capabilities stay. */
static void act_as(int64_t id) {
    setfsgid((gid_t)id);
    setfsuid((uid_t)id);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a change of ids clears it, and until init has joined its groups nobody else finds it */
}

int root_prepare(struct sandbox *s, struct devices *made, struct trouble *t) {
    prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP);
    umask(0);
    if (own_make(s, t) < 0)
        return -1;
    made->meminfo = s->meminfo;
    if ((made->proc = mount_new("proc", NULL, CLOSED & ~MOUNT_ATTR_RDONLY)) < 0)
        return fail(t, "internal", NULL, -1, "cannot mount proc");
    if (sysctls_set(s, made->proc, t) < 0)
        return -1;
    act_as(s->spec.uid_base);
    if (dev_make(s, made) < 0)
        return fail(t, "internal", NULL, -1, "cannot make /dev");
    act_as(0);
    return 0;
}

int root_assemble(const struct sandbox *s, int overlay, const struct devices *made, struct trouble *t) {
    if (attach(overlay, AT_FDCWD, "/root") < 0)
        return fail(t, "internal", NULL, -1, "cannot attach the overlay");
    int root = open("/root", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 || fchdir(root) < 0)
        return fail(t, "internal", NULL, -1, "cannot open the overlay");
    act_as(s->spec.uid_base);
    if (attach_in_root(made->proc, root, "proc") < 0)
        return fail(t, "internal", "environment", -1, "the image's /proc is not a folder");
    if (mkdirat(root, "sys", 0755) < 0 && errno != EEXIST)
        return fail(t, "internal", "environment", -1, "cannot make /sys");
    if (dev_show(made, root) < 0)
        return fail(t, "internal", "environment", -1, "the image's /dev is not a folder");
    if (mkdirat(root, "tmp", 01777) < 0 && errno != EEXIST)
        return fail(t, "internal", "environment", -1, "cannot make /tmp");
    act_as(0);
    if (sys_show(s, root, t) < 0 || walls_make(s, root, t) < 0 || faces_show(s, root, t) < 0)
        return -1;
    if (root_switch(root) < 0)
        return fail(t, "internal", NULL, -1, "cannot switch to the root");
    return 0;
}
