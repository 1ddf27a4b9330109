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
#include <unistd.h>

#define ACCOUNTS_MAX (1 << 20)

/* A small regular file of the image, as data; NULL if it is not that. */
static char *image_file(int root, const char *path) {
    struct open_how how = {.flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV};
    int fd = (int)syscall(SYS_openat2, root, path, &how, sizeof how);
    struct stat st;
    char *text = NULL;
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size <= ACCOUNTS_MAX && (text = malloc((size_t)st.st_size + 1))) {
        ssize_t n = read(fd, text, (size_t)st.st_size);
        text[n > 0 ? n : 0] = 0;
    }
    close(fd);
    return text;
}

int user_find(const struct sandbox *s, const char *wanted, struct user *u, struct trouble *t) {
    char *passwd = image_file(s->root, "etc/passwd"), *groups = image_file(s->root, "etc/group");
    int rc = user_parse(passwd, groups, wanted, s->spec.uid_count, u, t);
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
        struct sock_fprog program = {.len = (unsigned short)s->spec.seccomp_count, .filter = s->spec.seccomp};
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
