/*
 * A files conversation: a process of ours that has become the sandbox's user in the sandbox's mount namespace, but is in nobody's pid
 * namespace inside. Paths are resolved in the sandbox's own root; contents never pass through here: edge gets the descriptor.
 */
#define _GNU_SOURCE
#include "aether.h"
#include "paths.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define MAX_OPEN_WRITES 64
#define LIST_BATCH      (192 << 10)
#define KERNEL_FILE_MAX (4 << 20)
#define MAX_DEPTH       2048 /* of folders in folders; the path itself may have 16 KiB */

enum op { STAT = 1, LIST, OPEN_READ, OPEN_WRITE, COMMIT, ABORT, MKDIR, MOVE, REMOVE, SET, SYMLINK, READLINK };
enum flag { PARENTS = 1, RECURSIVE = 2, FOLLOW = 4, OVERWRITE = 8 };

struct job {
    int64_t op, flags, token;
    int64_t mode, uid, gid, mtime; /* -1: not given */
    char *path, *target;
};

/* A temporary file beside the one that it becomes. */
struct write {
    int dir;
    char name[48];
    char final[256];
};

struct conversation {
    struct sandbox *s;
    int conn, root;
    struct write writes[MAX_OPEN_WRITES];
    struct out out;
    char walk[16384 + 256], target[4096];
    struct stat st; /* of the entry that is listed: not on the stack, where each folder in a folder would have one */
};

/* An open file of ours, by its name in the host's /proc: for calls that need a path but must not resolve one again. */
static void own_path(int fd, char *to, size_t size) {
    snprintf(to, size, "self/fd/%d", fd);
}

static void out_stat(struct out *o, const char *path, const struct stat *st, const char *target) {
    out_text(o, T_PATH, path);
    out_number(o, T_KIND, st->st_mode & S_IFMT);
    out_number(o, T_MODE, st->st_mode & 07777);
    out_number(o, T_UID, st->st_uid);
    out_number(o, T_GID, st->st_gid);
    out_number(o, T_SIZE, st->st_size);
    out_number(o, T_MTIME_NS, (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec);
    out_number(o, T_INODE, (int64_t)st->st_ino);
    out_number(o, T_NLINK, (int64_t)st->st_nlink);
    if (target)
        out_text(o, T_TARGET, target);
}

static char *link_target(int fd, char *buf, size_t size) {
    ssize_t n = readlinkat(fd, "", buf, size - 1);
    if (n < 0)
        return NULL;
    buf[n] = 0;
    return buf;
}

static int do_stat(struct conversation *c, const struct job *j, struct trouble *t) {
    struct stat st;
    char target[4096];
    int fd = open_inside(c->root, j->path, O_PATH | (j->flags & FOLLOW ? 0 : O_NOFOLLOW), 0);
    if (fd < 0 || fstat(fd, &st) < 0) {
        fail_errno(t, "path", j->path, "stat");
        if (fd >= 0)
            close(fd);
        return -1;
    }
    out_begin(&c->out, K_FILE_REPLY, 0);
    out_stat(&c->out, j->path, &st, S_ISLNK(st.st_mode) ? link_target(fd, target, sizeof target) : NULL);
    out_end(&c->out);
    close(fd);
    return 0;
}

static void list_flush(struct conversation *c, bool last) {
    out_number(&c->out, T_MORE, !last);
    out_end(&c->out);
    if (send_out(c->conn, &c->out, -1) < 0)
        _exit(0);
    if (!last)
        out_begin(&c->out, K_FILE_REPLY, 0);
}

/* c->walk holds the folder's path, `length` long; entries are put behind it for a moment. Takes dirfd. */
static int list_dir(struct conversation *c, int dirfd, size_t length, const struct job *j, int depth, struct trouble *t) {
    DIR *d = fdopendir(dirfd);
    struct dirent *e;
    int rc = 0;
    if (!d) {
        close(dirfd);
        return fail_errno(t, "path", c->walk, "list");
    }
    while (rc == 0 && (e = readdir(d))) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (fstatat(dirfd, e->d_name, &c->st, AT_SYMLINK_NOFOLLOW) < 0)
            continue; /* it went while we looked */
        int n = snprintf(c->walk + length, sizeof c->walk - length, "%s%s", length > 1 ? "/" : "", e->d_name);
        if (n < 0 || (size_t)n >= sizeof c->walk - length) {
            errno = ENAMETOOLONG;
            rc = fail_errno(t, "path", j->path, "list all below");
            break;
        }
        ssize_t to = S_ISLNK(c->st.st_mode) ? readlinkat(dirfd, e->d_name, c->target, sizeof c->target - 1) : -1;
        if (to >= 0)
            c->target[to] = 0;
        size_t at = out_nest(&c->out, T_ENTRY);
        out_stat(&c->out, c->walk, &c->st, to >= 0 ? c->target : NULL);
        out_unnest(&c->out, at);
        if (c->out.len > LIST_BATCH)
            list_flush(c, false);
        if (!S_ISDIR(c->st.st_mode) || !(j->flags & RECURSIVE))
            continue;
        int sub = openat(dirfd, e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (sub >= 0 && depth >= MAX_DEPTH) {
            close(sub);
            errno = ELOOP;
            rc = fail_errno(t, "path", j->path, "list all below");
        } else if (sub >= 0) {
            rc = list_dir(c, sub, length + (size_t)n, j, depth + 1, t);
        }
    }
    c->walk[length] = 0;
    closedir(d);
    return rc;
}

static int do_list(struct conversation *c, const struct job *j, struct trouble *t) {
    int fd = open_inside(c->root, j->path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0)
        return fail_errno(t, "path", j->path, "list");
    out_begin(&c->out, K_FILE_REPLY, 0);
    size_t n = (size_t)snprintf(c->walk, sizeof c->walk, "%s", j->path);
    while (n > 1 && c->walk[n - 1] == '/')
        c->walk[--n] = 0;
    if (list_dir(c, fd, n, j, 0, t) < 0) {
        out_reset(&c->out);
        return -1;
    }
    list_flush(c, true);
    return 0;
}

static int regular_only(int fd, const char *path, struct stat *st, struct trouble *t) {
    if (fstat(fd, st) < 0)
        return fail_errno(t, "path", path, "stat");
    if (!S_ISREG(st->st_mode))
        return fail(t, "invalid_argument", "path", 0, "%.150s is not a regular file", path);
    return 0;
}

static int send_fd(struct conversation *c, int fd, const char *path, const struct stat *st, int64_t token) {
    out_begin(&c->out, K_FILE_REPLY, 0);
    out_stat(&c->out, path, st, NULL);
    out_number(&c->out, T_TOKEN, token);
    out_end(&c->out);
    if (send_out(c->conn, &c->out, fd) < 0)
        _exit(0);
    close(fd);
    return 0;
}

/* Files of proc and sysfs ask who reads them, and edge would as the host's root: what the sandbox's user may see of them is read here. */
static int kernel_copy(int fd, struct stat *st) {
    struct statfs fs;
    char buf[16384];
    ssize_t n = -1, all = 0;
    if (fstatfs(fd, &fs) == 0 && fs.f_type != PROC_SUPER_MAGIC && fs.f_type != SYSFS_MAGIC)
        return fd;
    int copy = memfd_create("dsec", MFD_CLOEXEC);
    while (copy >= 0 && all < KERNEL_FILE_MAX && (n = read(fd, buf, sizeof buf)) > 0 && write(copy, buf, (size_t)n) == n)
        all += n;
    int error = errno;
    close(fd);
    if (n < 0 || lseek(copy, 0, SEEK_SET) < 0) {
        if (copy >= 0)
            close(copy);
        errno = error;
        return -1;
    }
    st->st_size = all;
    return copy;
}

static int do_open_read(struct conversation *c, const struct job *j, struct trouble *t) {
    struct stat st;
    int fd = open_inside(c->root, j->path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0)
        return fail_errno(t, "path", j->path, "read");
    if (regular_only(fd, j->path, &st, t) < 0 || (fd = kernel_copy(fd, &st)) < 0) {
        if (fd >= 0)
            close(fd);
        return t->code ? -1 : fail_errno(t, "path", j->path, "read");
    }
    return send_fd(c, fd, j->path, &st, 0);
}

static int attributes_set(int fd, const char *path, const struct job *j, struct trouble *t) {
    if ((j->uid >= 0 || j->gid >= 0) && fchownat(fd, "", (uid_t)j->uid, (gid_t)j->gid, AT_EMPTY_PATH) < 0)
        return fail_errno(t, "owner", path, "change the owner of");
    return 0;
}

/* Where writing to `path` lands: at the end of its links, if it is there, so that a link is written through. */
static int write_place(struct conversation *c, const struct job *j, struct write *w, struct stat *old, struct trouble *t) {
    char real[4096], proc[32];
    const char *path = j->path;
    int fd = open_inside(c->root, path, O_PATH, 0);
    old->st_mode = 0;
    if (fd >= 0) {
        own_path(fd, proc, sizeof proc);
        ssize_t n = readlinkat(c->s->host->proc, proc, real, sizeof real - 1);
        if (fstat(fd, old) < 0)
            old->st_mode = 0;
        close(fd);
        if (old->st_mode && !S_ISREG(old->st_mode))
            return fail(t, "invalid_argument", "path", 0, "%.150s is there and is not a regular file", path);
        if (n > 0) {
            real[n] = 0;
            path = real;
        }
    } else if (errno != ENOENT) {
        return fail_errno(t, "path", path, "write");
    }
    w->dir = open_parent(c->root, path, w->final, sizeof w->final, j->flags & PARENTS, t);
    return w->dir < 0 ? -1 : 0;
}

static int do_open_write(struct conversation *c, const struct job *j, struct trouble *t) {
    struct stat st, old;
    int slot = 0;
    while (slot < MAX_OPEN_WRITES && c->writes[slot].dir >= 0)
        slot++;
    if (slot == MAX_OPEN_WRITES)
        return fail(t, "overloaded", NULL, 0, "more than %d files are being written in this conversation", MAX_OPEN_WRITES);
    struct write *w = &c->writes[slot];
    if (write_place(c, j, w, &old, t) < 0)
        return -1;
    uint64_t random = 0;
    /* Not the C library's, which is by the vdso where it is new: see lean.c. */
    if (syscall(SYS_getrandom, &random, sizeof random, 0) < 0)
        random = (uint64_t)now_ns(CLOCK_MONOTONIC);
    snprintf(w->name, sizeof w->name, ".dsec-%016llx", (unsigned long long)random);
    int64_t mode = j->mode >= 0 ? j->mode : old.st_mode ? old.st_mode & 07777 : 0644;
    int fd = openat(w->dir, w->name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
        fail_errno(t, "path", j->path, "write");
        goto out;
    }
    struct job owner = *j;
    if (owner.uid < 0 && owner.gid < 0 && old.st_mode) {
        /* The owner of what is replaced, where we may. */
        if (fchown(fd, old.st_uid, old.st_gid) < 0)
            errno = 0;
    }
    if (attributes_set(fd, j->path, &owner, t) < 0)
        goto undo;
    if (fchmod(fd, (mode_t)mode) < 0 || fstat(fd, &st) < 0) {
        fail_errno(t, "mode", j->path, "set the mode of");
        goto undo;
    }
    return send_fd(c, fd, j->path, &st, slot + 1);
undo:
    close(fd);
    unlinkat(w->dir, w->name, 0);
out:
    close(w->dir);
    w->dir = -1;
    return -1;
}

static struct write *write_of(struct conversation *c, int64_t token) {
    if (token < 1 || token > MAX_OPEN_WRITES || c->writes[token - 1].dir < 0)
        return NULL;
    return &c->writes[token - 1];
}

static void reply_ok(struct conversation *c) {
    out_begin(&c->out, K_FILE_REPLY, 0);
    out_end(&c->out);
}

/* Over a file that is a mount of ours (/etc/hosts) nothing can be renamed: it gets the new content instead. */
static int write_into(struct write *w) {
    int from = openat(w->dir, w->name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC),
        to = openat(w->dir, w->final, O_WRONLY | O_TRUNC | O_NOFOLLOW | O_CLOEXEC);
    ssize_t n = -1;
    while (from >= 0 && to >= 0 && (n = sendfile(to, from, NULL, 1 << 20)) > 0)
        ;
    int error = errno;
    if (from >= 0)
        close(from);
    if (to >= 0)
        close(to);
    if (n == 0)
        unlinkat(w->dir, w->name, 0);
    errno = error;
    return n == 0 ? 0 : -1;
}

static int do_finish(struct conversation *c, const struct job *j, struct trouble *t) {
    struct write *w = write_of(c, j->token);
    if (!w)
        return fail(t, "not_found", "token", 0, "no such write is open");
    int rc = 0;
    if (j->op == ABORT) {
        unlinkat(w->dir, w->name, 0);
    } else if (renameat(w->dir, w->name, w->dir, w->final) < 0 && (errno != EBUSY || write_into(w) < 0)) {
        rc = fail_errno(t, "path", w->final, "replace");
        unlinkat(w->dir, w->name, 0);
    }
    close(w->dir);
    w->dir = -1;
    if (rc < 0)
        return -1;
    reply_ok(c);
    return 0;
}

static int do_mkdir(struct conversation *c, const struct job *j, struct trouble *t) {
    char base[256];
    int dir = open_parent(c->root, j->path, base, sizeof base, j->flags & PARENTS, t);
    if (dir < 0)
        return -1;
    int64_t mode = j->mode >= 0 ? j->mode : 0755;
    int rc = mkdirat(dir, base, (mode_t)mode), fd = -1;
    struct stat st;
    if (rc < 0 && errno == EEXIST && j->flags & PARENTS && fstatat(dir, base, &st, 0) == 0 && S_ISDIR(st.st_mode)) {
        rc = 0;
    } else if (rc < 0) {
        fail_errno(t, "path", j->path, "make");
    } else if ((fd = openat(dir, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) >= 0) {
        rc = fchmod(fd, (mode_t)mode) < 0 ? fail_errno(t, "mode", j->path, "set the mode of") : attributes_set(fd, j->path, j, t);
        close(fd);
    }
    close(dir);
    if (rc < 0)
        return -1;
    reply_ok(c);
    return 0;
}

static int do_move(struct conversation *c, const struct job *j, struct trouble *t) {
    char from_name[256], to_name[256];
    if (!j->target)
        return fail(t, "invalid_argument", "target", 0, "move needs a target");
    int from = open_parent(c->root, j->path, from_name, sizeof from_name, false, t), to = -1, rc = -1;
    if (from < 0 || (to = open_parent(c->root, j->target, to_name, sizeof to_name, j->flags & PARENTS, t)) < 0)
        goto out;
    rc = j->flags & OVERWRITE ? renameat(from, from_name, to, to_name) : renameat2(from, from_name, to, to_name, RENAME_NOREPLACE);
    if (rc < 0)
        fail_errno(t, errno == EEXIST ? "target" : "path", j->path, "move");
out:
    if (from >= 0)
        close(from);
    if (to >= 0)
        close(to);
    if (rc < 0)
        return -1;
    reply_ok(c);
    return 0;
}

static int remove_tree(int dir, const char *name, int depth) {
    if (unlinkat(dir, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return -1;
    if (unlinkat(dir, name, AT_REMOVEDIR) == 0)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return -1;
    if (depth > MAX_DEPTH) {
        errno = ELOOP;
        return -1;
    }
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d)
        return -1;
    int rc = 0, error = 0;
    struct dirent *e;
    while ((e = readdir(d)))
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && remove_tree(fd, e->d_name, depth + 1) < 0) {
            rc = -1;
            error = errno;
        }
    closedir(d);
    errno = error;
    return rc < 0 ? -1 : unlinkat(dir, name, AT_REMOVEDIR);
}

static int do_remove(struct conversation *c, const struct job *j, struct trouble *t) {
    char base[256];
    struct stat st;
    int dir = open_parent(c->root, j->path, base, sizeof base, false, t), rc;
    if (dir < 0)
        return -1;
    if (j->flags & RECURSIVE)
        rc = remove_tree(dir, base, 0);
    else if ((rc = fstatat(dir, base, &st, AT_SYMLINK_NOFOLLOW)) == 0)
        rc = unlinkat(dir, base, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0);
    if (rc < 0)
        fail_errno(t, "path", j->path, "remove");
    close(dir);
    if (rc < 0)
        return -1;
    reply_ok(c);
    return 0;
}

static int do_set(struct conversation *c, const struct job *j, struct trouble *t) {
    char proc[32];
    int fd = open_inside(c->root, j->path, O_PATH, 0), rc = -1;
    if (fd < 0)
        return fail_errno(t, "path", j->path, "change");
    if (attributes_set(fd, j->path, j, t) < 0)
        goto out;
    own_path(fd, proc, sizeof proc);
    if (j->mode >= 0 && fchmodat(c->s->host->proc, proc, (mode_t)j->mode, 0) < 0) {
        fail_errno(t, "mode", j->path, "set the mode of");
        goto out;
    }
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = j->mtime / 1000000000, .tv_nsec = j->mtime % 1000000000}};
    if (j->mtime >= 0 && utimensat(c->s->host->proc, proc, times, 0) < 0) {
        fail_errno(t, "mtime_ns", j->path, "set the time of");
        goto out;
    }
    reply_ok(c);
    rc = 0;
out:
    close(fd);
    return rc;
}

static int do_symlink(struct conversation *c, const struct job *j, struct trouble *t) {
    char base[256];
    if (!j->target)
        return fail(t, "invalid_argument", "target", 0, "a symbolic link needs a target");
    int dir = open_parent(c->root, j->path, base, sizeof base, j->flags & PARENTS, t);
    if (dir < 0)
        return -1;
    int rc = symlinkat(j->target, dir, base);
    if (rc < 0)
        fail_errno(t, "path", j->path, "link");
    else if (j->uid >= 0 || j->gid >= 0)
        rc = fchownat(dir, base, (uid_t)j->uid, (gid_t)j->gid, AT_SYMLINK_NOFOLLOW) < 0
                 ? fail_errno(t, "owner", j->path, "change the owner of")
                 : 0;
    close(dir);
    if (rc < 0)
        return -1;
    reply_ok(c);
    return 0;
}

static int do_readlink(struct conversation *c, const struct job *j, struct trouble *t) {
    char target[4096];
    int fd = open_inside(c->root, j->path, O_PATH | O_NOFOLLOW, 0);
    if (fd < 0)
        return fail_errno(t, "path", j->path, "read the link");
    char *text = link_target(fd, target, sizeof target);
    close(fd);
    if (!text)
        return fail(t, "invalid_argument", "path", 0, "%.150s is not a symbolic link", j->path);
    out_begin(&c->out, K_FILE_REPLY, 0);
    out_text(&c->out, T_TARGET, text);
    out_end(&c->out);
    return 0;
}

static int job_do(struct conversation *c, const struct job *j, struct trouble *t) {
    if (j->op != COMMIT && j->op != ABORT && (!j->path || j->path[0] != '/'))
        return fail(t, "invalid_argument", "path", 0, "path must be absolute and without NUL");
    switch (j->op) {
    case STAT: return do_stat(c, j, t);
    case LIST: return do_list(c, j, t);
    case OPEN_READ: return do_open_read(c, j, t);
    case OPEN_WRITE: return do_open_write(c, j, t);
    case COMMIT:
    case ABORT: return do_finish(c, j, t);
    case MKDIR: return do_mkdir(c, j, t);
    case MOVE: return do_move(c, j, t);
    case REMOVE: return do_remove(c, j, t);
    case SET: return do_set(c, j, t);
    case SYMLINK: return do_symlink(c, j, t);
    case READLINK: return do_readlink(c, j, t);
    default: return fail(t, "invalid_argument", NULL, 0, "there is no file operation %lld", (long long)j->op);
    }
}

static int job_parse(struct job *j, const struct frame *f, char **user) {
    struct fields fs = fields_of(f);
    struct field field;
    int n;
    *j = (struct job){.mode = -1, .uid = -1, .gid = -1, .mtime = -1};
    while ((n = field_next(&fs, &field)) == 1) {
        char **text = field.tag == T_PATH ? &j->path : field.tag == T_TARGET ? &j->target : field.tag == T_USER ? user : NULL;
        if (text && (*text || !(*text = field_text(&field, 65536))))
            return -1;
        switch (field.tag) {
        case T_FILE_OP: j->op = field_number(&field); break;
        case T_FLAGS: j->flags = field_number(&field); break;
        case T_TOKEN: j->token = field_number(&field); break;
        case T_MODE: j->mode = field_number(&field) & 07777; break;
        case T_UID: j->uid = field_number(&field); break;
        case T_GID: j->gid = field_number(&field); break;
        case T_MTIME_NS: j->mtime = field_number(&field); break;
        default: break;
        }
    }
    return n;
}

static void job_free(struct job *j) {
    free(j->path);
    free(j->target);
}

static void writes_abort(struct conversation *c) {
    for (int i = 0; i < MAX_OPEN_WRITES; i++)
        if (c->writes[i].dir >= 0)
            unlinkat(c->writes[i].dir, c->writes[i].name, 0);
}

/* Events until the peer closes. */
_Noreturn static void watch_path(struct conversation *c, const struct job *j) {
    struct trouble t = {0};
    char buf[16384] __attribute__((aligned(8))), proc[64];
    int fd = j->path && j->path[0] == '/' ? open_inside(c->root, j->path, O_PATH, 0) : (errno = EINVAL, -1);
    int in = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (fd < 0 || in < 0) {
        fail_errno(&t, "path", j->path ? j->path : "", "watch");
        goto bad;
    }
    /* inotify takes only paths; this one names the file that was just opened. */
    own_path(fd, proc, sizeof proc);
    if (fchdir(c->s->host->proc) < 0 || inotify_add_watch(in, proc,
                                                          IN_CREATE | IN_MODIFY | IN_CLOSE_WRITE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO |
                                                              IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF) < 0) {
        fail_errno(&t, "path", j->path, "watch");
        goto bad;
    }
    if (send_ok(c->conn) < 0)
        _exit(0);
    for (;;) {
        struct pollfd p[2] = {{.fd = in, .events = POLLIN}, {.fd = c->conn, .events = POLLIN}};
        if (poll(p, 2, -1) < 0)
            continue;
        if (p[1].revents)
            _exit(0);
        ssize_t n = read(in, buf, sizeof buf);
        for (ssize_t at = 0; at < n;) {
            struct inotify_event *e = (struct inotify_event *)(buf + at);
            out_begin(&c->out, K_FILE_REPLY, 0);
            out_number(&c->out, T_WATCH_MASK, e->mask);
            out_text(&c->out, T_PATH, e->len ? e->name : "");
            out_end(&c->out);
            at += (ssize_t)(sizeof *e + e->len);
        }
        if (n > 0 && send_out(c->conn, &c->out, -1) < 0)
            _exit(0);
    }
bad:
    send_trouble(c->conn, &t);
    _exit(0);
}

static void files_serve(struct conversation *c) {
    struct inbox in = {0};
    struct frame f;
    struct job j;
    while (recv_frame(c->conn, &in, &f, -1) == 0) {
        struct trouble t = {0};
        char *user = NULL;
        int rc = job_parse(&j, &f, &user);
        if (rc < 0 || (f.kind != K_FILE && f.kind != K_WATCH))
            rc = fail(&t, "invalid_argument", "path", 0, "the request is malformed or a text holds a NUL");
        else if (f.kind == K_WATCH)
            watch_path(c, &j);
        else
            rc = job_do(c, &j, &t);
        job_free(&j);
        free(user);
        if (rc < 0) {
            out_reset(&c->out);
            if (send_trouble(c->conn, &t) < 0)
                break;
        } else if (c->out.len && send_out(c->conn, &c->out, -1) < 0) {
            break;
        }
    }
}

void chronus_files(struct sandbox *s, int conn) {
    static struct conversation c;
    struct inbox in = {0};
    struct frame f;
    struct job j;
    struct user u;
    struct trouble t = {0};
    char *name = NULL;
    c = (struct conversation){.s = s, .conn = conn, .root = -1};
    for (int i = 0; i < MAX_OPEN_WRITES; i++)
        c.writes[i].dir = -1;
    prctl(PR_SET_NAME, "chronus-files");
    int aether = getppid();
    if (recv_frame(conn, &in, &f, 10000) < 0)
        _exit(1);
    if (job_parse(&j, &f, &name) < 0)
        fail(&t, "invalid_argument", "user", 0, "malformed request");
    else if (user_find(s,
                       name && *name  ? name
                       : s->spec.user ? s->spec.user
                                      : "root",
                       &u, &t) == 0 &&
             cgroups_join(s, &t) == 0 && enter_sandbox(s, &u, false, &t) == 0) {
        umask(0);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* cleared by the change of user */
        if (getppid() != aether)
            _exit(1);
        c.root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    }
    if (c.root < 0) {
        if (!t.code)
            fail(&t, "sandbox_failed", NULL, -1, "cannot open the sandbox's root");
        send_trouble(conn, &t);
        _exit(0);
    }
    if (send_ok(conn) == 0)
        files_serve(&c);
    writes_abort(&c);
    _exit(0);
}
