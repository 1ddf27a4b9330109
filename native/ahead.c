/*
 * Namespaces made ahead: a network namespace is half of what a sandbox's init takes, nearly all of it the kernel's own tables. The launcher
 * makes a few while nothing is asked of it, and gives each away once; they hold nothing of a sandbox, and end with the launcher's
 * descriptors of them if nobody takes them. In a burst there are none, and each init makes its own.
 */
#define _GNU_SOURCE
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define KINDS (CLONE_NEWNET | CLONE_NEWIPC)

int loopback_up(void) {
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock < 0)
        return -1;
    struct ifreq ifr = {.ifr_name = "lo"};
    ifr.ifr_flags = IFF_UP | IFF_RUNNING;
    int rc = ioctl(sock, SIOCSIFFLAGS, &ifr);
    close(sock);
    return rc;
}

static int own_namespace(const struct host *h, const char *name) {
    char path[32];
    snprintf(path, sizeof path, "self/ns/%s", name);
    return openat(h->proc, path, O_RDONLY | O_CLOEXEC);
}

void ahead_close(struct ahead *one) {
    if (one->net >= 0)
        close(one->net);
    if (one->ipc >= 0)
        close(one->ipc);
    *one = (struct ahead){-1, -1};
}

/* In the caller's place: it goes into new ones and comes back. */
static int make(const struct host *h, struct ahead *one) {
    const struct ahead home = {own_namespace(h, "net"), own_namespace(h, "ipc")};
    struct ahead closing = home;
    int rc = -1;
    *one = (struct ahead){-1, -1};
    if (home.net < 0 || home.ipc < 0 || unshare(KINDS) < 0)
        goto out;
    if (loopback_up() == 0 && (one->net = own_namespace(h, "net")) >= 0 && (one->ipc = own_namespace(h, "ipc")) >= 0)
        rc = 0;
    /* Not back where it was, it would be the wrong place for all that follows. */
    if (setns(home.net, CLONE_NEWNET) < 0 || setns(home.ipc, CLONE_NEWIPC) < 0)
        _exit(1);
out:
    ahead_close(&closing);
    if (rc < 0)
        ahead_close(one);
    return rc;
}

bool ahead_full(const struct host *h) {
    return h->ahead_count >= AHEAD;
}

int ahead_make(struct host *h) {
    return make(h, &h->ahead[h->ahead_count]) < 0 ? -1 : (h->ahead_count++, 0);
}

struct ahead ahead_take(struct host *h) {
    return h->ahead_count ? h->ahead[--h->ahead_count] : (struct ahead){-1, -1};
}

void ahead_close_all(struct host *h) {
    while (h->ahead_count)
        ahead_close(&h->ahead[--h->ahead_count]);
}

/* The caller leaves its network and its means of communication between processes for others: these, or new ones. */
int ahead_enter(const struct ahead *one) {
    if (one->net < 0)
        return unshare(KINDS) < 0 ? -1 : loopback_up();
    return setns(one->net, CLONE_NEWNET) < 0 ? -1 : setns(one->ipc, CLONE_NEWIPC);
}
