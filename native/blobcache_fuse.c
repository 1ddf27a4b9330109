/* Requests from /dev/fuse and their answers: one flat folder of read-only files. */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <linux/fuse.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FOR_EVER 86400 /* seconds; packs never change */
#define INBOX    (64u << 10)

static void send_parts(uint64_t unique, int error, struct iovec *parts, int count, size_t len) {
    struct fuse_out_header header = {.len = (uint32_t)(sizeof header + len), .error = -error, .unique = unique};
    parts[0] = (struct iovec){&header, sizeof header};
    /* ENOENT: the one who asked is gone. Nothing else can be done about any other failure either. */
    while (writev(fuse_fd, parts, count) < 0 && errno == EINTR)
        ;
}

void reply_error(uint64_t unique, int error) {
    struct iovec parts[1];
    send_parts(unique, error, parts, 1, 0);
}

void reply_vector(uint64_t unique, struct iovec *parts, int count, size_t len) {
    send_parts(unique, 0, parts, count, len);
}

void reply_bytes(uint64_t unique, const void *data, size_t len) {
    struct iovec parts[2] = {[1] = {(void *)data, len}};
    send_parts(unique, 0, parts, len ? 2 : 1, len);
}

static struct fuse_attr attributes(uint64_t node) {
    const struct pack *p = node_pack(node);
    struct fuse_attr a = {.ino = node, .nlink = 1, .mode = S_IFDIR | 0500, .blksize = CHUNK};
    if (p) {
        a.mode = S_IFREG | 0400;
        a.size = (uint64_t)p->size;
        a.blocks = a.size / 512;
    }
    return a;
}

void reply_entry(uint64_t unique, uint32_t node) {
    struct fuse_entry_out out = {
        .nodeid = node, .generation = node_pack(node)->generation, .entry_valid = FOR_EVER, .attr_valid = FOR_EVER};
    out.attr = attributes(node);
    reply_bytes(unique, &out, sizeof out);
}

static bool known(uint64_t node) {
    const struct pack *p = node_pack(node);
    pthread_mutex_lock(&tables);
    bool there = node == ROOT_NODE || (p && p->used && p->size >= 0);
    pthread_mutex_unlock(&tables);
    return there;
}

static void get_attributes(const struct fuse_call *call) {
    struct fuse_attr_out out = {.attr_valid = FOR_EVER, .attr = attributes(call->node)};
    if (known(call->node))
        reply_bytes(call->unique, &out, sizeof out);
    else
        reply_error(call->unique, ESTALE);
}

/* O_NOATIME marks the handle of a prefetch: its reads come after everybody else's. */
static void open_pack(const struct fuse_call *call) {
    struct fuse_open_out out = {.fh = (call->flags & 01000000) != 0, .open_flags = FOPEN_KEEP_CACHE};
    if (!known(call->node))
        reply_error(call->unique, ESTALE);
    else if ((call->flags & 3) != 0)
        reply_error(call->unique, EROFS);
    else
        reply_bytes(call->unique, &out, sizeof out);
}

static void look_up(const struct fuse_call *call) {
    uint8_t digest[DIGEST];
    if (call->node != ROOT_NODE)
        reply_error(call->unique, ENOTDIR);
    else if (pack_name_parse(call->name, digest) < 0)
        reply_error(call->unique, ENOENT);
    else
        fetch_lookup(call, digest);
}

static void forget_all(const struct fuse_call *call) {
    for (uint32_t i = 0; i < call->count; i++) {
        struct fuse_forget_one one;
        memcpy(&one, call->rest + i * sizeof one, sizeof one);
        node_forget(one.nodeid, one.nlookup);
    }
}

static void state_of(const struct fuse_call *call) {
    struct fuse_statfs_out out = {.st = {.bsize = 4096, .namelen = 255, .frsize = 4096}};
    reply_bytes(call->unique, &out, sizeof out);
}

static void handle(const struct fuse_call *call) {
    struct fuse_open_out folder = {0};
    switch (call->opcode) {
    case FUSE_LOOKUP: look_up(call); return;
    case FUSE_FORGET: node_forget(call->node, call->lookups); return;
    case FUSE_BATCH_FORGET: forget_all(call); return;
    case FUSE_INTERRUPT: fetch_interrupt(call->target); return;
    case FUSE_GETATTR: get_attributes(call); return;
    case FUSE_OPEN: open_pack(call); return;
    case FUSE_READ: fetch_read(call); return;
    case FUSE_OPENDIR: reply_bytes(call->unique, &folder, sizeof folder); return;
    /* Which packs there are is the store's to tell. */
    case FUSE_READDIR:
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
    case FUSE_FLUSH:
    case FUSE_DESTROY: reply_bytes(call->unique, NULL, 0); return;
    case FUSE_STATFS: state_of(call); return;
    default: reply_error(call->unique, ENOSYS); return;
    }
}

static void *serve(void *unused) {
    static __thread uint8_t inbox[INBOX];
    (void)unused;
    /* A thread that is killed as it takes a request fails it if the page is not there yet; else the next worker gets it again. */
    memset(inbox, 0, sizeof inbox);
    for (;;) {
        ssize_t n = read(fuse_fd, inbox, sizeof inbox);
        if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            continue;
        if (n <= 0)
            return NULL; /* ENODEV: unmounted */
        struct fuse_call call;
        int error = call_parse(inbox, (size_t)n, &call);
        if (error)
            reply_error(call.unique, error);
        else
            handle(&call);
    }
}

int fuse_serve(int threads) {
    pthread_t thread;
    for (int i = 1; i < threads; i++)
        if (pthread_create(&thread, NULL, serve, NULL) != 0)
            return -1;
    serve(NULL);
    return 0;
}
