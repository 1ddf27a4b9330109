/* Messages from /dev/fuse and names of packs, taken apart. Pure: everything here is fuzzed. */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <linux/fuse.h>
#include <string.h>

static int name_at(const uint8_t *body, size_t len, struct fuse_call *out) {
    if (!len || !memchr(body, 0, len))
        return EINVAL;
    out->name = (const char *)body;
    return 0;
}

static int forgets_at(const uint8_t *body, size_t len, struct fuse_call *out) {
    struct fuse_batch_forget_in in;
    if (len < sizeof in)
        return EINVAL;
    memcpy(&in, body, sizeof in);
    if (in.count > (len - sizeof in) / sizeof(struct fuse_forget_one))
        return EINVAL;
    out->count = in.count;
    out->rest = body + sizeof in;
    return 0;
}

static int read_at(const uint8_t *body, size_t len, struct fuse_call *out) {
    struct fuse_read_in in;
    if (len < sizeof in)
        return EINVAL;
    memcpy(&in, body, sizeof in);
    out->offset = in.offset;
    out->size = in.size;
    out->handle = in.fh;
    return in.offset > INT64_MAX - READ_MAX ? EINVAL : 0;
}

int call_parse(const uint8_t *buf, size_t len, struct fuse_call *out) {
    struct fuse_in_header header;
    *out = (struct fuse_call){0};
    if (len < sizeof header)
        return EINVAL;
    memcpy(&header, buf, sizeof header);
    out->opcode = header.opcode;
    out->unique = header.unique;
    out->node = header.nodeid;
    out->pid = header.pid;
    if (header.len != len)
        return EINVAL;
    const uint8_t *body = buf + sizeof header;
    size_t rest = len - sizeof header;
    switch (header.opcode) {
    case FUSE_LOOKUP: return name_at(body, rest, out);
    case FUSE_BATCH_FORGET: return forgets_at(body, rest, out);
    case FUSE_READ:
    case FUSE_READDIR: return read_at(body, rest, out);
    case FUSE_FORGET:
    case FUSE_INTERRUPT:
        if (rest < sizeof(uint64_t))
            return EINVAL;
        memcpy(header.opcode == FUSE_FORGET ? &out->lookups : &out->target, body, sizeof(uint64_t));
        return 0;
    case FUSE_OPEN:
        if (rest < sizeof(struct fuse_open_in))
            return EINVAL;
        memcpy(&out->flags, body, sizeof out->flags);
        return 0;
    default: return 0;
    }
}

static int digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int pack_name_parse(const char *name, uint8_t digest[DIGEST]) {
    for (int i = 0; i < DIGEST; i++) {
        int high = digit(name[i * 2]), low = high < 0 ? -1 : digit(name[i * 2 + 1]);
        if (low < 0)
            return -1;
        digest[i] = (uint8_t)(high << 4 | low);
    }
    return strcmp(name + DIGEST * 2, ".data") == 0 ? 0 : -1;
}

void pack_name(const uint8_t digest[DIGEST], char out[DIGEST * 2 + 6]) {
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < DIGEST; i++) {
        out[i * 2] = digits[digest[i] >> 4];
        out[i * 2 + 1] = digits[digest[i] & 15];
    }
    memcpy(out + DIGEST * 2, ".data", 6);
}

static inline uint64_t turn(uint64_t x, int by) {
    return x << by | x >> (64 - by);
}

/* Against torn and rotten blocks, not against people: four independent lanes, so that it keeps up with memory. */
uint64_t block_sum(const void *data, size_t len) {
    const uint64_t odd = 0x9e3779b97f4a7c15;
    uint64_t lane[4] = {odd, odd << 1, ~odd, len * odd};
    const uint8_t *p = data;
    for (; len >= 32; p += 32, len -= 32)
        for (int i = 0; i < 4; i++) {
            uint64_t word;
            memcpy(&word, p + i * 8, 8);
            lane[i] = turn(lane[i] ^ word, 29) * odd;
        }
    for (; len; p++, len--)
        lane[len & 3] = turn(lane[len & 3] ^ *p, 29) * odd;
    uint64_t sum = 0;
    for (int i = 0; i < 4; i++)
        sum = turn(sum ^ lane[i], 31) * odd;
    sum ^= sum >> 32;
    return sum ? sum : 1;
}
