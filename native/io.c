#define _GNU_SOURCE
#include "io.h"

#include <errno.h>
#include <linux/openat2.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define STEADY_TRIES 1000

int fail(struct trouble *t, const char *code, const char *field, int error, const char *format, ...) {
    if (error == -1)
        error = errno;
    t->code = code;
    t->field = field;
    t->error = error;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->message, sizeof t->message, format, args);
    va_end(args);
    if (error > 0 && n > 0 && (size_t)n < sizeof t->message)
        snprintf(t->message + n, sizeof t->message - (size_t)n, ": %s", strerror(error));
    return -1;
}

int inbox_next(struct inbox *in, struct frame *out) {
    int n = frame_parse(in->buf + in->start, in->len - in->start, out);
    if (n > 0)
        in->start += (size_t)n;
    return n;
}

/* Room for what is missing of the frame at the front, at least a page, without moving bytes more than once a frame. */
static int inbox_room(struct inbox *in) {
    size_t have = in->len - in->start, want = 4096;
    if (have >= FRAME_HEADER) {
        uint32_t length = 0;
        for (int i = 3; i >= 0; i--)
            length = length << 8 | in->buf[in->start + 4 + (size_t)i];
        if (length <= FRAME_MAX && FRAME_HEADER + (size_t)length > have)
            want = FRAME_HEADER + (size_t)length - have;
    }
    if (want < 4096)
        want = 4096;
    if (in->cap - in->len >= want)
        return 0;
    if (in->start) {
        memmove(in->buf, in->buf + in->start, have);
        in->start = 0;
        in->len = have;
        if (in->cap - in->len >= want)
            return 0;
    }
    uint8_t *buf = realloc(in->buf, have + want);
    if (!buf)
        return -1;
    in->buf = buf;
    in->cap = have + want;
    return 0;
}

static long fill(struct inbox *in, int sock, int *fd, int flags) {
    if (inbox_room(in) < 0)
        return -1;
    union {
        char bytes[CMSG_SPACE(4 * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {in->buf + in->len, in->cap - in->len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC | flags);
    if (n <= 0)
        return n;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int got;
            memcpy(&got, CMSG_DATA(c) + i * sizeof(int), sizeof got);
            if (fd && *fd < 0)
                *fd = got;
            else
                close(got);
        }
    }
    in->len += (size_t)n;
    return n;
}

long inbox_fill(struct inbox *in, int sock, int *fd) {
    return fill(in, sock, fd, 0);
}

void inbox_free(struct inbox *in) {
    free(in->buf);
    *in = (struct inbox){0};
}

int recv_frame(int sock, struct inbox *in, struct frame *out, int timeout_ms) {
    int64_t deadline = now_ns(CLOCK_MONOTONIC) + (int64_t)timeout_ms * 1000000;
    for (;;) {
        int n = inbox_next(in, out);
        if (n < 0) {
            errno = EPROTO;
            return -1;
        }
        if (n > 0)
            return 0;
        long got = fill(in, sock, NULL, MSG_DONTWAIT);
        if (got > 0)
            continue;
        if (got == 0) {
            errno = ECONNRESET;
            return -1;
        }
        if (errno != EAGAIN && errno != EINTR)
            return -1;
        int64_t left = timeout_ms < 0 ? -1 : (deadline - now_ns(CLOCK_MONOTONIC)) / 1000000;
        struct pollfd p = {.fd = sock, .events = POLLIN};
        if (timeout_ms >= 0 && left <= 0) {
            errno = ETIMEDOUT;
            return -1;
        }
        if (poll(&p, 1, (int)left) < 0 && errno != EINTR)
            return -1;
    }
}

static ssize_t send_some(int sock, const void *buf, size_t len, int fd, int flags) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {(void *)buf, len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    return sendmsg(sock, &msg, MSG_NOSIGNAL | flags);
}

int send_now(int sock, const void *buf, size_t len, int fd) {
    return send_some(sock, buf, len, fd, MSG_DONTWAIT) == (ssize_t)len ? 0 : -1;
}

int send_all(int sock, const void *buf, size_t len, int fd) {
    const uint8_t *p = buf;
    while (len) {
        ssize_t n = send_some(sock, p, len, fd, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN) {
            struct pollfd pf = {.fd = sock, .events = POLLOUT};
            if (poll(&pf, 1, 30000) == 0) {
                errno = ETIMEDOUT;
                return -1;
            }
            continue;
        }
        if (n < 0)
            return -1;
        fd = -1;
        p += n;
        len -= (size_t)n;
    }
    return 0;
}

int send_fds(int sock, const int *fds, int count) {
    union {
        char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
        struct cmsghdr align;
    } control;
    char byte = 0;
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes};
    if (count > FDS_MAX)
        return errno = EINVAL, -1;
    if (count == 0)
        return send(sock, &byte, 1, MSG_NOSIGNAL) == 1 ? 0 : -1;
    msg.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
    memcpy(CMSG_DATA(c), fds, (size_t)count * sizeof(int));
    return sendmsg(sock, &msg, MSG_NOSIGNAL) == 1 ? 0 : -1;
}

int recv_fds(int sock, int *fds, int max) {
    union {
        char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
        struct cmsghdr align;
    } control;
    char byte;
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n;
    while ((n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        ;
    struct cmsghdr *c = n == 1 ? CMSG_FIRSTHDR(&msg) : NULL;
    if (n == 1 && !c && !(msg.msg_flags & MSG_CTRUNC))
        return 0;
    if (!c || c->cmsg_type != SCM_RIGHTS || (msg.msg_flags & MSG_CTRUNC))
        return -1;
    int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(fds, CMSG_DATA(c), sizeof(int) * (size_t)(count < max ? count : max));
    return count;
}

int send_out(int sock, struct out *o, int fd) {
    if (o->failed) {
        errno = ENOMEM;
        return -1;
    }
    int rc = send_all(sock, o->buf, o->len, fd);
    out_reset(o);
    return rc;
}

int send_trouble(int sock, const struct trouble *t) {
    struct out o = {0};
    out_begin(&o, K_ERROR, 0);
    out_text(&o, T_CODE, t->code ? t->code : "internal");
    out_text(&o, T_MESSAGE, t->message);
    out_number(&o, T_RAN, t->ran);
    out_number(&o, T_ERRNO, t->error);
    if (t->field)
        out_text(&o, T_FIELD, t->field);
    out_end(&o);
    int rc = send_out(sock, &o, -1);
    out_free(&o);
    return rc;
}

void refuse(int sock, const char *code, int ran, const char *message) {
    struct trouble t = {.ran = ran};
    fail(&t, code, NULL, 0, "%s", message);
    send_trouble(sock, &t);
}

int send_ok(int sock) {
    struct out o = {0};
    out_begin(&o, K_OK, 0);
    out_end(&o);
    int rc = send_out(sock, &o, -1);
    out_free(&o);
    return rc;
}

int64_t now_ns(int clock) {
    struct timespec t;
    /* Not the C library's way, which is by the vdso: see lean.c. */
    syscall(SYS_clock_gettime, clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void set_timeouts(int sock, int seconds) {
    struct timeval tv = {.tv_sec = seconds};
    setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
    setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv);
}

int open_pidfd(int pid) {
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

int open_steady(int root, const char *path, const struct open_how *how) {
    int fd, tries = 0;
    do
        fd = (int)syscall(SYS_openat2, root, path, how, sizeof *how);
    while (fd < 0 && errno == EAGAIN && ++tries < STEADY_TRIES);
    return fd;
}
