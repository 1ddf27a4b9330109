/* Blocking and non-blocking transfer of frames and descriptors over Unix stream sockets. */
#ifndef DSEC_IO_H
#define DSEC_IO_H

#include "frame.h"

/* What went wrong, as it goes on the wire. `ran`: 0 not run, 1 ran, 2 unknown. */
struct trouble {
    const char *code;
    const char *field;
    int error;
    int ran;
    char message[256];
};

/* Fills t and returns -1, so that a failing call can `return fail(...)`. errno is taken as the cause when error is -1. */
int fail(struct trouble *t, const char *code, const char *field, int error, const char *format, ...) __attribute__((format(printf, 5, 6)));

struct inbox {
    uint8_t *buf;
    size_t start, len, cap;
};

/* Next whole frame already received: its size, 0 none, -1 malformed. The frame is valid until the next inbox call. */
int inbox_next(struct inbox *in, struct frame *out);
/* One recv into the inbox: bytes, 0 at the peer's end, -1 with errno. A descriptor that came along is put in *fd (else untouched); further
 * ones are closed. */
long inbox_fill(struct inbox *in, int sock, int *fd);
void inbox_free(struct inbox *in);

/* Waits for one frame; -1 with errno (EPROTO malformed, ETIMEDOUT). */
int recv_frame(int sock, struct inbox *in, struct frame *out, int timeout_ms);

/* Sends all; with fd >= 0 the descriptor goes along. Never raises SIGPIPE. -1 with errno. */
int send_all(int sock, const void *buf, size_t len, int fd);
/* Descriptors with one byte; at most FDS_MAX. */
#define FDS_MAX 32
/* One message with a descriptor, or -1 at once. */
int send_now(int sock, const void *buf, size_t len, int fd);
int send_fds(int sock, const int *fds, int count);
int recv_fds(int sock, int *fds, int max);
int send_out(int sock, struct out *o, int fd);
int send_trouble(int sock, const struct trouble *t);
void refuse(int sock, const char *code, int ran, const char *message);
int send_ok(int sock);

int64_t now_ns(int clock);
void set_timeouts(int sock, int seconds);
int open_pidfd(int pid);
/* openat2, again where a rename or a mount anywhere on the host kept the kernel from proving that a `..` stayed inside. */
struct open_how;
int open_steady(int root, const char *path, const struct open_how *how);

#endif
