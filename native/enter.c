/* Who a command runs as, and the way of one of our processes into the sandbox. */
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
    struct open_how how = {.flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
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

/* Splits "a:b:c" in place; how many fields. */
static int split(char *line, char **parts, int max) {
    int n = 0;
    while (line && n < max)
        parts[n++] = strsep(&line, ":");
    return n;
}

static bool is_number(const char *s) { return *s && strspn(s, "0123456789") == strlen(s) && strlen(s) < 11; }

static void copy_text(char *to, size_t size, const char *from) { snprintf(to, size, "%s", from); }

static bool passwd_find(char *text, const char *name, int64_t uid, struct user *u) {
    char *parts[7], *line;
    while ((line = strsep(&text, "\n"))) {
        if (split(line, parts, 7) < 4 || !is_number(parts[2]) || !is_number(parts[3]))
            continue;
        if (name ? strcmp(parts[0], name) != 0 : atoll(parts[2]) != uid)
            continue;
        u->uid = atoll(parts[2]);
        u->gid = atoll(parts[3]);
        copy_text(u->name, sizeof u->name, parts[0]);
        /* parts[5] and [6] exist only on a full line */
        return true;
    }
    return false;
}

static void passwd_details(const char *text, struct user *u) {
    char *copy = strdup(text), *rest = copy, *parts[7], *line;
    while (copy && (line = strsep(&rest, "\n"))) {
        int n = split(line, parts, 7);
        if (n < 6 || strcmp(parts[0], u->name) != 0)
            continue;
        if (*parts[5])
            copy_text(u->home, sizeof u->home, parts[5]);
        if (n == 7 && *parts[6])
            copy_text(u->shell, sizeof u->shell, parts[6]);
        break;
    }
    free(copy);
}

static bool group_find(char *text, const char *name, int64_t *gid) {
    char *parts[4], *line;
    while ((line = strsep(&text, "\n")))
        if (split(line, parts, 4) >= 3 && strcmp(parts[0], name) == 0 && is_number(parts[2])) {
            *gid = atoll(parts[2]);
            return true;
        }
    return false;
}

static void groups_collect(char *text, struct user *u) {
    char *parts[4], *line, *member;
    while ((line = strsep(&text, "\n"))) {
        if (split(line, parts, 4) < 4 || !is_number(parts[2]))
            continue;
        while ((member = strsep(&parts[3], ",")))
            if (strcmp(member, u->name) == 0 && u->group_count < 64)
                u->groups[u->group_count++] = (gid_t)atoll(parts[2]);
    }
}

int user_find(const struct sandbox *s, const char *wanted, struct user *u, struct trouble *t) {
    char name[128];
    if (strlen(wanted) >= sizeof name || !*wanted)
        return fail(t, "invalid_argument", "user", 0, "user is empty or longer than %zu bytes", sizeof name - 1);
    copy_text(name, sizeof name, wanted);
    char *group = strchr(name, ':');
    if (group)
        *group++ = 0;
    *u = (struct user){.home = "/", .shell = "/bin/sh"};
    char *passwd = image_file(s->root, "etc/passwd"), *groups = image_file(s->root, "etc/group");
    char *scratch = passwd ? strdup(passwd) : NULL;
    bool numeric = is_number(name), found = scratch && passwd_find(scratch, numeric ? NULL : name, numeric ? atoll(name) : 0, u);
    free(scratch);
    int rc = 0;
    if (!found && numeric) {
        u->uid = u->gid = atoll(name);
        copy_text(u->name, sizeof u->name, name);
    } else if (!found && strcmp(name, "root") == 0) {
        copy_text(u->name, sizeof u->name, "root");
        copy_text(u->home, sizeof u->home, "/root");
    } else if (!found) {
        rc = fail(t, "invalid_argument", "user", 0, "user %s is not in the image's /etc/passwd", name);
    }
    if (found)
        passwd_details(passwd, u);
    if (rc == 0 && group) {
        scratch = groups ? strdup(groups) : NULL;
        if (is_number(group))
            u->gid = atoll(group);
        else if (!scratch || !group_find(scratch, group, &u->gid))
            rc = fail(t, "invalid_argument", "user", 0, "group %s is not in the image's /etc/group", group);
        free(scratch);
    } else if (rc == 0 && groups && found) {
        groups_collect(groups, u);
    }
    if (rc == 0 && (u->uid >= s->spec.uid_count || u->gid >= s->spec.uid_count))
        rc = fail(t, "invalid_argument", "user", 0, "uid and gid must be below %lld", (long long)s->spec.uid_count);
    for (int i = 0; i < u->group_count; i++)
        if (u->groups[i] >= s->spec.uid_count)
            u->groups[i] = (gid_t)u->gid;
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
    if (capabilities_limit(s->spec.caps) < 0)
        return fail(t, "internal", NULL, -1, "cannot limit the capabilities");
    return 0;
}
