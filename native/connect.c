/* A TCP connection into the sandbox's network namespace; the socket itself goes to edge. */
#define _GNU_SOURCE
#include "aether.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECT_MS 5000

static int dial(int family, const void *address, socklen_t length) {
    int sock = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;
    socklen_t size = sizeof error;
    if (sock < 0)
        return -1;
    if (connect(sock, address, length) == 0)
        return sock;
    if (errno == EINPROGRESS) {
        struct pollfd p = {.fd = sock, .events = POLLOUT};
        if (poll(&p, 1, CONNECT_MS) <= 0)
            error = ETIMEDOUT;
        else if (getsockopt(sock, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && !error)
            return sock;
        errno = error;
    }
    error = errno;
    close(sock);
    errno = error;
    return -1;
}

static int dial_text(const char *address, int port, struct trouble *t) {
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    int sock;
    if (port < 1 || port > 65535)
        return fail(t, "invalid_argument", "port", 0, "port must be 1 to 65535");
    if (inet_pton(AF_INET, address, &v4.sin_addr) == 1)
        sock = dial(AF_INET, &v4, sizeof v4);
    else if (inet_pton(AF_INET6, address, &v6.sin6_addr) == 1)
        sock = dial(AF_INET6, &v6, sizeof v6);
    else
        return fail(t, "invalid_argument", "address", 0, "%.60s is not an IP address", address);
    if (sock < 0)
        return fail(t, "not_found", "port", -1, "nothing answers on port %d in the sandbox", port);
    return sock;
}

void chronus_connect(struct sandbox *s, int conn) {
    struct inbox in = {0};
    struct frame f;
    struct field field;
    struct trouble t = {0};
    char *address = NULL;
    int port = 0, n = -1;
    prctl(PR_SET_NAME, "chronus-connect");
    if (recv_frame(conn, &in, &f, 10000) < 0)
        _exit(1);
    struct fields fs = fields_of(&f);
    while ((n = field_next(&fs, &field)) == 1) {
        if (field.tag == T_PORT)
            port = (int)(field_number(&field) & 0xfffff);
        else if (field.tag == T_ADDRESS && !address)
            address = field_text(&field, 64);
    }
    int sock = -1;
    if (n < 0)
        fail(&t, "invalid_argument", NULL, 0, "malformed request");
    else if (setns(s->init_pidfd, CLONE_NEWNET) < 0)
        fail(&t, "sandbox_failed", NULL, -1, "the sandbox's network namespace is gone");
    else
        sock = dial_text(address ? address : "127.0.0.1", port, &t);
    if (sock < 0) {
        send_trouble(conn, &t);
        _exit(0);
    }
    struct out o = {0};
    out_begin(&o, K_OK, 0);
    out_end(&o);
    send_out(conn, &o, sock);
    _exit(0);
}
