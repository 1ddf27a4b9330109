/* Directed and random tests of the cache of blocks and of the messages from the kernel; built with sanitizers. */
#define _GNU_SOURCE
#include "blobcache.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOTS 40

static char folder[] = "/tmp/dsec-blobcache-XXXXXX";

static struct disk *reopen(void) {
    static struct disk *before;
    disk_close(before);
    struct disk *d = before = disk_open(folder, SLOTS * (CHUNK + 64));
    assert(d);
    return d;
}

static void block(uint8_t digest[DIGEST], uint8_t data[CHUNK], int number) {
    memset(digest, number, DIGEST);
    for (uint32_t i = 0; i < CHUNK; i++)
        data[i] = (uint8_t)(i * 7 + (uint32_t)number * 13);
}

static bool holds(struct disk *d, int number) {
    static uint8_t data[CHUNK], found[CHUNK];
    uint8_t digest[DIGEST];
    block(digest, data, number);
    if (!disk_read(d, digest, (uint32_t)number, found, CHUNK))
        return false;
    assert(memcmp(data, found, CHUNK) == 0);
    return true;
}

static void put(struct disk *d, int number) {
    static uint8_t data[CHUNK];
    uint8_t digest[DIGEST];
    block(digest, data, number);
    disk_write(d, digest, (uint32_t)number, data, CHUNK);
}

static void the_least_used_goes_first_also_after_a_restart(void) {
    struct disk *d = reopen();
    for (int i = 0; i < SLOTS; i++)
        put(d, i);
    for (int i = 0; i < SLOTS; i++)
        assert(holds(d, i));
    assert(holds(d, 0));
    d = reopen();
    put(d, 100);
    put(d, 101);
    assert(holds(d, 0) && !holds(d, 1) && !holds(d, 2) && holds(d, 3) && holds(d, 100) && holds(d, 101));
    uint64_t used, limit, evicted, bad;
    disk_usage(d, &used, &limit, &evicted, &bad);
    assert(used == limit && limit == SLOTS * CHUNK && evicted == 2 && bad == 0);
}

static void overwrite(const char *name, off_t at, const void *bytes, size_t len) {
    int dir = open(folder, O_PATH), fd = openat(dir, name, O_WRONLY);
    assert(fd >= 0 && pwrite(fd, bytes, len, at) == (ssize_t)len);
    close(fd);
    close(dir);
}

static void damage_is_noticed(void) {
    struct disk *d = reopen();
    overwrite("blocks", 3 * CHUNK + 1000, "rot", 3);
    int there = 0;
    for (int i = 0; i < 102; i++)
        there += holds(d, i);
    assert(there == SLOTS - 1);
    uint64_t used, limit, evicted, bad;
    disk_usage(d, &used, &limit, &evicted, &bad);
    assert(bad == 1 && used == limit - CHUNK);
}

/* Whatever stands in the index, what is given out is whole. */
static void any_index_is_survived(unsigned seed) {
    srandom(seed);
    uint8_t junk[64];
    for (int i = 0; i < 40; i++) {
        for (size_t j = 0; j < sizeof junk; j++)
            junk[j] = (uint8_t)random();
        overwrite("index", 64 + random() % (SLOTS * 64 - 64), junk, (size_t)(random() % 64) + 1);
        struct disk *d = reopen();
        for (int number = 0; number < 102; number++)
            holds(d, number);
        put(d, (int)(random() % 102));
    }
    overwrite("index", 0, "nonsense", 8);
    struct disk *d = reopen();
    assert(!holds(d, 0));
    put(d, 0);
    assert(holds(d, 0));
    disk_close(d);
}

static void names_of_packs(void) {
    uint8_t digest[DIGEST];
    char name[DIGEST * 2 + 6];
    memset(digest, 0xa5, sizeof digest);
    pack_name(digest, name);
    memset(digest, 0, sizeof digest);
    assert(strlen(name) == 69 && pack_name_parse(name, digest) == 0 && digest[31] == 0xa5);
    name[3] = 'G';
    assert(pack_name_parse(name, digest) < 0 && pack_name_parse("", digest) < 0 && pack_name_parse("..", digest) < 0);
    pack_name(digest, name);
    strcpy(name + 64, ".dat");
    assert(pack_name_parse(name, digest) < 0);
}

static void messages_of_any_kind_are_parsed_or_refused(unsigned seed) {
    srandom(seed);
    for (int i = 0; i < 200000; i++) {
        size_t len = (size_t)random() % 200;
        /* On the heap and no longer than it is, so that a read past its end is seen. */
        uint8_t *buf = malloc(len ? len : 1);
        for (size_t j = 0; j < len; j++)
            buf[j] = (uint8_t)random();
        if (len >= sizeof(struct fuse_in_header)) {
            struct fuse_in_header header;
            memcpy(&header, buf, sizeof header);
            header.len = random() % 8 ? (uint32_t)len : (uint32_t)random();
            header.opcode = (uint32_t)random() % 50;
            memcpy(buf, &header, sizeof header);
            if (header.opcode == FUSE_BATCH_FORGET && len > sizeof header)
                buf[sizeof header] = (uint8_t)(random() % 16),
                           memset(buf + sizeof header + 1, 0, len - sizeof header - 1 < 3 ? len - sizeof header - 1 : 3);
        }
        struct fuse_call call;
        if (call_parse(buf, len, &call) == 0) {
            uint64_t sum = call.name ? strlen(call.name) : 0;
            for (uint32_t j = 0; j < call.count * sizeof(struct fuse_forget_one); j++)
                sum += call.rest[j];
            assert(call.offset <= INT64_MAX || call.opcode != FUSE_READ || sum == 0);
        }
        free(buf);
    }
}

static void sum_of(const void *data, size_t len, uint8_t out[DIGEST]) {
    struct sha256 sum;
    sha256_begin(&sum);
    sha256_add(&sum, data, len);
    sha256_end(&sum, out);
}

static void digests_are_sha256(void) {
    static const uint8_t abc[4] = {0xba, 0x78, 0x16, 0xbf}, empty[4] = {0xe3, 0xb0, 0xc4, 0x42}, million[4] = {0xcd, 0xc7, 0x6e, 0x5c};
    static char as[1000000];
    uint8_t out[DIGEST], whole[DIGEST];
    sum_of("abc", 3, out);
    assert(memcmp(out, abc, 4) == 0 && out[31] == 0xad);
    sum_of("", 0, out);
    assert(memcmp(out, empty, 4) == 0 && out[31] == 0x55);
    memset(as, 'a', sizeof as);
    sum_of(as, sizeof as, whole);
    assert(memcmp(whole, million, 4) == 0 && whole[31] == 0xd0);
    struct sha256 sum;
    sha256_begin(&sum);
    for (size_t at = 0, n = 1; at < sizeof as; at += n, n = n % 200 + 1)
        sha256_add(&sum, as + at, at + n > sizeof as ? sizeof as - at : n);
    sha256_end(&sum, out);
    assert(memcmp(out, whole, DIGEST) == 0);
}

/* The digest is right, so that what is behind it is reached. */
static void any_index_of_a_pack_is_survived(unsigned seed) {
    srandom(seed);
    for (int i = 0; i < 20000; i++) {
        size_t count = (size_t)random() % 5, len = 32 + count * 40 + (random() % 8 ? 0 : (size_t)random() % 40);
        uint8_t *file = calloc(1, len), digest[DIGEST];
        for (size_t j = 32; j < len; j++)
            file[j] = (j - 32) % 40 < 35 || random() % 2 ? (uint8_t)random() : 0;
        memcpy(file, "DSECPACK\1\0\0\0\0\20\0\0", 16);
        file[16] = (uint8_t)(random() % 8 ? count : (size_t)random());
        sum_of(file, len, digest);
        struct segments *s = segments_parse(file, len, digest);
        if (!s) {
            assert(errno == EILSEQ);
            free(file);
            continue;
        }
        assert(s->count == count);
        for (uint32_t j = 0; j < s->count; j++) {
            uint64_t size;
            segment_at(s, j, &size);
            assert(s->start[j + 1] - s->start[j] >= size && s->start[j] % PACK_BLOCK == 0);
            if (size)
                assert(segments_after(s, s->start[j]) == j && segments_after(s, s->start[j + 1] - 1) == j);
        }
        assert(segments_after(s, s->start[s->count]) == s->count);
        segments_free(s);
    }
}

int main(void) {
    unsigned seed = 20260101;
    assert(mkdtemp(folder));
    names_of_packs();
    digests_are_sha256();
    any_index_of_a_pack_is_survived(seed);
    messages_of_any_kind_are_parsed_or_refused(seed);
    the_least_used_goes_first_also_after_a_restart();
    damage_is_noticed();
    any_index_is_survived(seed);
    int dir = open(folder, O_PATH);
    unlinkat(dir, "blocks", 0);
    unlinkat(dir, "index", 0);
    close(dir);
    rmdir(folder);
    puts("blobcache: 7 passed");
    return 0;
}
