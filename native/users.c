/* Who a command runs as, from the image's own /etc/passwd and /etc/group. Pure: the texts are the guest's and may hold anything. */
#define _GNU_SOURCE
#include "users.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Splits "a:b:c" in place; how many fields. */
static int split(char *line, char **parts, int max) {
    int n = 0;
    while (line && n < max)
        parts[n++] = strsep(&line, ":");
    return n;
}

static bool is_number(const char *s) {
    return *s && strspn(s, "0123456789") == strlen(s) && strlen(s) < 11;
}

static void copy_text(char *to, size_t size, const char *from) {
    snprintf(to, size, "%.*s", (int)size - 1, from);
}

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

int user_parse(const char *passwd, const char *groups, const char *wanted, int64_t limit, struct user *u, struct trouble *t) {
    char name[128];
    if (strlen(wanted) >= sizeof name || !*wanted || *wanted == ':')
        return fail(t, "invalid_argument", "user", 0, "user has no name or is longer than %zu bytes", sizeof name - 1);
    copy_text(name, sizeof name, wanted);
    char *group = strchr(name, ':');
    if (group)
        *group++ = 0;
    *u = (struct user){.home = "/", .shell = "/bin/sh"};
    char *scratch = passwd ? strdup(passwd) : NULL;
    bool numeric = is_number(name), found = scratch && passwd_find(scratch, numeric ? NULL : name, numeric ? atoll(name) : 0, u);
    free(scratch);
    if (!found && numeric) {
        u->uid = u->gid = atoll(name);
        copy_text(u->name, sizeof u->name, name);
    } else if (!found && strcmp(name, "root") == 0) {
        copy_text(u->name, sizeof u->name, "root");
        copy_text(u->home, sizeof u->home, "/root");
    } else if (!found) {
        return fail(t, "invalid_argument", "user", 0, "user %s is not in the image's /etc/passwd", name);
    }
    if (found)
        passwd_details(passwd, u);
    scratch = groups ? strdup(groups) : NULL;
    bool known = true;
    if (group && is_number(group))
        u->gid = atoll(group);
    else if (group)
        known = scratch && group_find(scratch, group, &u->gid);
    else if (scratch && found)
        groups_collect(scratch, u);
    free(scratch);
    if (!known)
        return fail(t, "invalid_argument", "user", 0, "group %s is not in the image's /etc/group", group);
    if (u->uid >= limit || u->gid >= limit)
        return fail(t, "invalid_argument", "user", 0, "uid and gid must be below %lld", (long long)limit);
    for (int i = 0; i < u->group_count; i++)
        if (u->groups[i] >= limit)
            u->groups[i] = (gid_t)u->gid;
    return 0;
}
