/* The way of one of our processes into the sandbox. */
#define _GNU_SOURCE
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ACCOUNTS_MAX (1 << 20)

/* A small regular file of the image, as data; NULL if it is not that. `st` tells which file it was, and of when. */
static char *image_file(int root, const char *path, struct stat *st) {
    struct open_how how = {.flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV};
    int fd = open_steady(root, path, &how);
    char *text = NULL;
    *st = (struct stat){0};
    if (fd < 0)
        return NULL;
    if (fstat(fd, st) == 0 && S_ISREG(st->st_mode) && st->st_size <= ACCOUNTS_MAX && (text = malloc((size_t)st->st_size + 1))) {
        ssize_t n = read(fd, text, (size_t)st->st_size);
        text[n > 0 ? n : 0] = 0;
    }
    close(fd);
    return text;
}

/* What was found last, and in which two files: the next command is mostly the same user's. */
static struct {
    bool known;
    char wanted[128];
    struct stat files[2];
    struct user user;
} last;

static const char *const accounts[] = {"etc/passwd", "etc/group"};

/* Whether the path still leads to the very same file, unchanged. It may lead anywhere: only what is found there is compared. */
static bool file_stands(int root, const char *path, const struct stat *known) {
    struct stat now;
    return fstatat(root, path, &now, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(now.st_mode) && now.st_dev == known->st_dev &&
           now.st_ino == known->st_ino && now.st_size == known->st_size && now.st_ctim.tv_sec == known->st_ctim.tv_sec &&
           now.st_ctim.tv_nsec == known->st_ctim.tv_nsec;
}

/* A file that was changed just before it was read might be changed again without a later time. */
static bool files_stand(int root, const struct stat files[2], int64_t settled) {
    for (int i = 0; i < 2; i++)
        if (files[i].st_ctim.tv_sec >= settled || !file_stands(root, accounts[i], &files[i]))
            return false;
    return true;
}

int user_find(const struct sandbox *s, const char *wanted, struct user *u, struct trouble *t) {
    if (last.known && strcmp(wanted, last.wanted) == 0 && files_stand(s->root, last.files, INT64_MAX)) {
        *u = last.user;
        return 0;
    }
    struct stat files[2];
    char *passwd = image_file(s->root, accounts[0], &files[0]), *groups = image_file(s->root, accounts[1], &files[1]);
    int rc = user_parse(passwd, groups, wanted, s->spec.uid_count, u, t);
    last.known = rc == 0 && passwd && groups && strlen(wanted) < sizeof last.wanted &&
                 files_stand(s->root, files, now_ns(CLOCK_REALTIME) / 1000000000 - 1);
    if (last.known) {
        snprintf(last.wanted, sizeof last.wanted, "%s", wanted);
        memcpy(last.files, files, sizeof files);
        last.user = *u;
    }
    free(passwd);
    free(groups);
    return rc;
}

static int capabilities_bound(int64_t allowed) {
    for (int cap = 0; cap <= CAP_LAST_CAP; cap++)
        if (!(allowed >> cap & 1) && prctl(PR_CAPBSET_DROP, cap) < 0 && errno != EINVAL)
            return -1;
    return 0;
}

static int capabilities_limit(int64_t allowed) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &header, data) < 0)
        return -1;
    for (int i = 0; i < 2; i++) {
        data[i].permitted &= (uint32_t)(allowed >> 32 * i);
        data[i].effective &= data[i].permitted;
        data[i].inheritable = 0;
    }
    return (int)syscall(SYS_capset, &header, data);
}

int enter_sandbox(const struct sandbox *s, const struct user *u, bool filter, struct trouble *t) {
    const int all = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWCGROUP;
    if (setns(s->init_pidfd, all) < 0)
        return fail(t, "sandbox_failed", NULL, -1, "cannot enter the sandbox");
    if (syscall(SYS_setgroups, u->group_count, u->groups) < 0 || syscall(SYS_setresgid, u->gid, u->gid, u->gid) < 0)
        return fail(t, "internal", "user", -1, "cannot take group %lld", (long long)u->gid);
    if (capabilities_bound(s->spec.caps) < 0)
        return fail(t, "internal", NULL, -1, "cannot bound the capabilities");
    if (filter && s->spec.seccomp) {
        struct sock_fprog program = {.len = (unsigned short)s->spec.seccomp_count, .filter = (struct sock_filter *)s->spec.seccomp};
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0)
            return fail(t, "internal", NULL, -1, "cannot install the system call filter");
    }
    /* By way of the namespace's root: leaving any other id would not drop the capabilities. */
    if (syscall(SYS_setresuid, 0, 0, 0) < 0 || syscall(SYS_setresuid, u->uid, u->uid, u->uid) < 0)
        return fail(t, "internal", "user", -1, "cannot take user %lld", (long long)u->uid);
    /* The change of user has set it to what fs.suid_dumpable says, which may be more than nothing. */
    if (prctl(PR_SET_DUMPABLE, 0) < 0)
        return fail(t, "internal", NULL, -1, "cannot close our memory");
    if (capabilities_limit(s->spec.caps) < 0)
        return fail(t, "internal", NULL, -1, "cannot limit the capabilities");
    return 0;
}
