#define _GNU_SOURCE
#include "keep.h"

#include <sys/mman.h>

#define SPARES      4
#define SPARE_BYTES (64 << 10)

/* Spans of a stream that wrote little are used again: a command costs no change of our address space then. */
static struct {
    void *at;
    size_t size;
} spares[SPARES];

/* Address space, not memory: pages come when they are written. */
static void *reserve(size_t size) {
    for (int i = 0; i < SPARES; i++)
        if (spares[i].at && spares[i].size == size) {
            void *at = spares[i].at;
            spares[i].at = NULL;
            return at;
        }
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void give_back(void *at, size_t size, bool small) {
    for (int i = 0; small && i < SPARES; i++)
        if (!spares[i].at) {
            spares[i].at = at;
            spares[i].size = size;
            return;
        }
    munmap(at, size);
}

int keep_open(struct keep *k, size_t limit, size_t ring) {
    *k = (struct keep){.head_size = limit / 2, .tail_limit = limit - limit / 2};
    k->tail_size = k->tail_limit > ring ? k->tail_limit : ring;
    if (k->tail_size < 4096)
        k->tail_size = 4096;
    k->tail = reserve(k->tail_size);
    if (k->head_size)
        k->head = reserve(k->head_size);
    return k->tail && (k->head || !k->head_size) ? 0 : -1;
}

void keep_close(struct keep *k) {
    bool small = k->total <= SPARE_BYTES;
    if (k->head)
        give_back(k->head, k->head_size, small);
    if (k->tail)
        give_back(k->tail, k->tail_size, small);
    *k = (struct keep){0};
}

uint8_t *keep_space(struct keep *k, uint64_t oldest_unsent, size_t *size) {
    if (k->total < k->head_size) {
        *size = k->head_size - (size_t)k->total;
        return k->head + k->total;
    }
    uint64_t in_ring = k->total - k->head_size;
    if (oldest_unsent < k->head_size)
        oldest_unsent = k->head_size;
    uint64_t held = oldest_unsent < k->total ? k->total - oldest_unsent : 0;
    size_t at = (size_t)(in_ring % k->tail_size), room = k->tail_size - at;
    if (held >= k->tail_size)
        room = 0;
    else if (room > k->tail_size - (size_t)held)
        room = k->tail_size - (size_t)held;
    *size = room;
    return k->tail + at;
}

void keep_wrote(struct keep *k, size_t n) {
    k->total += n;
}

uint64_t keep_from(const struct keep *k, uint64_t from, bool ended) {
    if (from > k->total)
        return k->total;
    if (from < k->head_size)
        return from;
    uint64_t span = ended ? k->tail_limit : k->tail_size;
    uint64_t first = k->total > span ? k->total - span : 0;
    if (first < k->head_size)
        first = k->head_size;
    return from > first ? from : first;
}

const uint8_t *keep_at(const struct keep *k, uint64_t offset, size_t *size) {
    uint64_t end = k->total < k->head_size ? k->total : k->head_size;
    if (offset < end) {
        *size = (size_t)(end - offset);
        return k->head + offset;
    }
    size_t at = (size_t)((offset - k->head_size) % k->tail_size);
    uint64_t left = k->total - offset;
    *size = left < k->tail_size - at ? (size_t)left : k->tail_size - at;
    return k->tail + at;
}
