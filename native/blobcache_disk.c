/* The node's cache of chunks: `blocks`, slots of CHUNK bytes, and `index`, which says what each slot holds.
 *
 * An entry counts only if its own check is right, and a block only if its sum is: whatever a crash of this process or of the machine
 * leaves, a block is either whole or not there. So nothing is ever synced. Least recently used goes first; the order survives in the
 * entries.
 */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NONE  UINT32_MAX
#define MAGIC 0x314b434c42534544ULL

struct entry {
    uint8_t digest[DIGEST];
    uint32_t chunk, length;
    uint64_t sum, check, stamp;
};

struct header {
    uint64_t magic;
    uint32_t chunk, slots;
    uint8_t reserved[sizeof(struct entry) - 16];
};

struct link {
    uint32_t next, previous, chain;
};

struct disk {
    pthread_mutex_t lock;
    int blocks;
    uint32_t slots, buckets, used, newest, oldest, next_free;
    uint64_t stamp, evicted, bad;
    struct header *header;
    struct entry *entry;
    struct link *link;
    uint8_t *busy; /* readers and writers in the slot now; such a slot is not given to another */
    uint32_t *bucket;
};

static uint64_t entry_check(const struct entry *e) {
    return block_sum(e, offsetof(struct entry, check));
}

static uint32_t *chain_of(struct disk *d, const uint8_t digest[DIGEST], uint32_t chunk) {
    uint64_t key;
    memcpy(&key, digest, sizeof key);
    key = (key ^ chunk * 0x9e3779b97f4a7c15ULL) * 0xff51afd7ed558ccdULL;
    return &d->bucket[(key >> 32) & (d->buckets - 1)];
}

static void list_take(struct disk *d, uint32_t slot) {
    struct link *l = &d->link[slot];
    *(l->previous == NONE ? &d->newest : &d->link[l->previous].next) = l->next;
    *(l->next == NONE ? &d->oldest : &d->link[l->next].previous) = l->previous;
}

static void list_put(struct disk *d, uint32_t slot) {
    d->link[slot].previous = NONE;
    d->link[slot].next = d->newest;
    *(d->newest == NONE ? &d->oldest : &d->link[d->newest].previous) = slot;
    d->newest = slot;
}

static uint32_t find(struct disk *d, const uint8_t digest[DIGEST], uint32_t chunk) {
    uint32_t slot = *chain_of(d, digest, chunk);
    while (slot != NONE && (d->entry[slot].chunk != chunk || memcmp(d->entry[slot].digest, digest, DIGEST) != 0))
        slot = d->link[slot].chain;
    return slot;
}

static void enter(struct disk *d, uint32_t slot) {
    uint32_t *at = chain_of(d, d->entry[slot].digest, d->entry[slot].chunk);
    d->link[slot].chain = *at;
    *at = slot;
    list_put(d, slot);
    d->used++;
}

/* The slot holds nothing any more, in memory and in the index. */
static void leave(struct disk *d, uint32_t slot) {
    uint32_t *at = chain_of(d, d->entry[slot].digest, d->entry[slot].chunk);
    while (*at != slot)
        at = &d->link[*at].chain;
    *at = d->link[slot].chain;
    list_take(d, slot);
    d->entry[slot].check = 0;
    d->used--;
}

static struct entry *sorting;

static int by_stamp(const void *a, const void *b) {
    uint64_t x = sorting[*(const uint32_t *)a].stamp, y = sorting[*(const uint32_t *)b].stamp;
    return x < y ? -1 : x > y;
}

/* Take up what an earlier process has left, oldest first. */
static int load(struct disk *d) {
    uint32_t *order = malloc(sizeof *order * (d->slots + 1)), count = 0;
    if (!order)
        return -1;
    for (uint32_t slot = 0; slot < d->slots; slot++) {
        struct entry *e = &d->entry[slot];
        if (e->check && e->check == entry_check(e) && e->length && e->length <= CHUNK)
            order[count++] = slot;
        else
            e->check = 0;
    }
    sorting = d->entry;
    qsort(order, count, sizeof *order, by_stamp);
    for (uint32_t i = 0; i < count; i++) {
        struct entry *e = &d->entry[order[i]];
        if (find(d, e->digest, e->chunk) != NONE) {
            e->check = 0;
            continue;
        }
        enter(d, order[i]);
        d->stamp = e->stamp;
    }
    free(order);
    return 0;
}

static int map_index(struct disk *d, int folder) {
    size_t bytes = sizeof(struct header) + sizeof(struct entry) * d->slots;
    int fd = openat(folder, "index", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -1;
    struct header seen = {0};
    bool known = pread(fd, &seen, sizeof seen, 0) == (ssize_t)sizeof seen && seen.magic == MAGIC && seen.chunk == CHUNK;
    if ((!known && ftruncate(fd, 0) < 0) || ftruncate(fd, (off_t)bytes) < 0) {
        close(fd);
        return -1;
    }
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return -1;
    d->header = at;
    d->entry = (struct entry *)(d->header + 1);
    *d->header = (struct header){.magic = MAGIC, .chunk = CHUNK, .slots = d->slots};
    return 0;
}

void disk_close(struct disk *d) {
    if (!d)
        return;
    if (d->header)
        munmap(d->header, sizeof(struct header) + sizeof(struct entry) * d->slots);
    if (d->blocks >= 0)
        close(d->blocks);
    free(d->link);
    free(d->busy);
    free(d->bucket);
    free(d);
}

struct disk *disk_open(const char *folder, uint64_t bytes) {
    struct disk *d = calloc(1, sizeof *d);
    if (d)
        d->blocks = -1;
    int at = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    uint64_t slots = bytes / (CHUNK + sizeof(struct entry));
    if (!d || at < 0 || slots < JOB_CHUNKS || slots > 1u << 30) {
        errno = errno ? errno : EINVAL;
        goto out;
    }
    pthread_mutex_init(&d->lock, NULL);
    d->slots = (uint32_t)slots;
    d->newest = d->oldest = NONE;
    for (d->buckets = 1024; d->buckets < d->slots; d->buckets *= 2)
        ;
    d->link = malloc(sizeof *d->link * d->slots);
    d->busy = calloc(d->slots, 1);
    d->bucket = malloc(sizeof *d->bucket * d->buckets);
    d->blocks = openat(at, "blocks", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (!d->link || !d->busy || !d->bucket || d->blocks < 0 || map_index(d, at) < 0)
        goto out;
    memset(d->bucket, 0xff, sizeof *d->bucket * d->buckets);
    off_t end = lseek(d->blocks, 0, SEEK_END);
    if (end > (off_t)d->slots * CHUNK && ftruncate(d->blocks, (off_t)d->slots * CHUNK) < 0)
        goto out;
    if (load(d) == 0) {
        close(at);
        return d;
    }
out:
    if (at >= 0)
        close(at);
    disk_close(d);
    return NULL;
}

bool disk_has(struct disk *d, const uint8_t digest[DIGEST], uint32_t chunk) {
    if (!d)
        return false;
    pthread_mutex_lock(&d->lock);
    bool there = find(d, digest, chunk) != NONE;
    pthread_mutex_unlock(&d->lock);
    return there;
}

bool disk_read(struct disk *d, const uint8_t digest[DIGEST], uint32_t chunk, void *buf, uint32_t len) {
    if (!d)
        return false;
    pthread_mutex_lock(&d->lock);
    uint32_t slot = find(d, digest, chunk);
    if (slot == NONE || d->entry[slot].length != len || d->busy[slot] == UINT8_MAX) {
        pthread_mutex_unlock(&d->lock);
        return false;
    }
    d->busy[slot]++;
    uint64_t sum = d->entry[slot].sum;
    list_take(d, slot);
    list_put(d, slot);
    d->entry[slot].stamp = ++d->stamp;
    pthread_mutex_unlock(&d->lock);

    bool whole = pread(d->blocks, buf, len, (off_t)slot * CHUNK) == (ssize_t)len && block_sum(buf, len) == sum;

    pthread_mutex_lock(&d->lock);
    d->busy[slot]--;
    if (!whole && d->entry[slot].check) {
        d->bad++;
        leave(d, slot);
    }
    pthread_mutex_unlock(&d->lock);
    return whole;
}

/* A slot that is free or whose chunk was used longest ago; its entry is void on return. */
static uint32_t slot_take(struct disk *d) {
    if (d->used < d->slots)
        for (uint32_t tried = 0; tried < d->slots; tried++) {
            uint32_t slot = d->next_free++ % d->slots;
            if (!d->entry[slot].check && !d->busy[slot])
                return slot;
        }
    for (uint32_t slot = d->oldest; slot != NONE; slot = d->link[slot].previous)
        if (!d->busy[slot]) {
            leave(d, slot);
            d->evicted++;
            return slot;
        }
    return NONE;
}

void disk_write(struct disk *d, const uint8_t digest[DIGEST], uint32_t chunk, const void *buf, uint32_t len) {
    if (!d)
        return;
    pthread_mutex_lock(&d->lock);
    uint32_t slot = find(d, digest, chunk) == NONE ? slot_take(d) : NONE;
    if (slot != NONE)
        d->busy[slot]++;
    pthread_mutex_unlock(&d->lock);
    if (slot == NONE)
        return;

    bool written = pwrite(d->blocks, buf, len, (off_t)slot * CHUNK) == (ssize_t)len;
    uint64_t sum = block_sum(buf, len);

    pthread_mutex_lock(&d->lock);
    d->busy[slot]--;
    if (written && find(d, digest, chunk) == NONE) {
        struct entry *e = &d->entry[slot];
        memcpy(e->digest, digest, DIGEST);
        e->chunk = chunk;
        e->length = len;
        e->sum = sum;
        e->stamp = ++d->stamp;
        __atomic_store_n(&e->check, entry_check(e), __ATOMIC_RELEASE);
        enter(d, slot);
    }
    pthread_mutex_unlock(&d->lock);
}

void disk_usage(struct disk *d, uint64_t *used, uint64_t *limit, uint64_t *evicted, uint64_t *bad) {
    *used = *limit = *evicted = *bad = 0;
    if (!d)
        return;
    pthread_mutex_lock(&d->lock);
    *used = (uint64_t)d->used * CHUNK;
    *limit = (uint64_t)d->slots * CHUNK;
    *evicted = d->evicted;
    *bad = d->bad;
    pthread_mutex_unlock(&d->lock);
}
