/* Paths of the sandbox, resolved in its own root: links are followed as the sandbox would, and lead nowhere else. */
#define _GNU_SOURCE
#include "paths.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int fail_errno(struct trouble *t, const char *field, const char *path, const char *doing) {
    switch (errno) {
    case ENOENT: return fail(t, "not_found", field, -1, "cannot %s %.150s", doing, path);
    case EACCES:
    case EPERM:
    case EROFS: return fail(t, "denied", field, -1, "cannot %s %.150s", doing, path);
    case EDQUOT:
    case ENOSPC:
    case EFBIG: return fail(t, "quota_exceeded", "disk_limit_mb", -1, "cannot %s %.150s", doing, path);
    case EEXIST:
    case ENOTEMPTY:
    case EBUSY:
    case ETXTBSY: return fail(t, "conflict", field, -1, "cannot %s %.150s", doing, path);
    default: return fail(t, "invalid_argument", field, -1, "cannot %s %.150s", doing, path);
    }
}

int open_inside(int root, const char *path, int flags, int mode) {
    struct open_how how = {
        .flags = (uint64_t)(flags | O_CLOEXEC), .mode = (uint64_t)mode, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    return open_steady(root, path, &how);
}

static int make_parents(int root, const char *dir, struct trouble *t) {
    char copy[4096];
    if (snprintf(copy, sizeof copy, "%s", dir) >= (int)sizeof copy)
        return errno = ENAMETOOLONG, fail_errno(t, "path", dir, "make");
    for (char *at = copy + 1; *at; at++) {
        if (*at != '/')
            continue;
        *at = 0;
        char base[256];
        int parent = open_parent(root, copy, base, sizeof base, false, t);
        if (parent >= 0) {
            int rc = mkdirat(parent, base, 0755);
            int error = errno;
            close(parent);
            errno = error;
            if (rc < 0 && errno != EEXIST)
                return fail_errno(t, "path", copy, "make");
        } else if (base[0]) {
            return -1;
        }
        *at = '/';
    }
    return 0;
}

int open_parent(int root, const char *path, char *base, size_t size, bool make, struct trouble *t) {
    char copy[4096];
    base[0] = 0;
    if (snprintf(copy, sizeof copy, "%s", path) >= (int)sizeof copy)
        return errno = ENAMETOOLONG, fail_errno(t, "path", path, "open");
    size_t n = strlen(copy);
    while (n > 1 && copy[n - 1] == '/')
        copy[--n] = 0;
    char *slash = strrchr(copy, '/');
    const char *name = slash ? slash + 1 : copy;
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return fail(t, "invalid_argument", "path", 0, "%.150s has no name of its own", path);
    if (snprintf(base, size, "%s", name) >= (int)size)
        return errno = ENAMETOOLONG, fail_errno(t, "path", path, "open");
    if (slash)
        slash[slash == copy] = 0;
    const char *dir = slash ? copy : "/";
    int fd = open_inside(root, dir, O_PATH | O_DIRECTORY, 0);
    if (fd < 0 && errno == ENOENT && make) {
        char with_slash[4200];
        snprintf(with_slash, sizeof with_slash, "%s/", dir);
        if (make_parents(root, with_slash, t) < 0)
            return -1;
        fd = open_inside(root, dir, O_PATH | O_DIRECTORY, 0);
    }
    if (fd < 0)
        return fail_errno(t, "path", path, "open the folder of");
    return fd;
}
