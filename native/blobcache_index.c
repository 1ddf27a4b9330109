/* A pack's index, as written by dsec.environments.packs.index. Pure. */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define HEADER 32
#define ENTRY  40

void segments_free(struct segments *s) {
    if (!s)
        return;
    free(s->file);
    free(s->start);
    free(s);
}

static uint64_t number_at(const uint8_t *p) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | p[i];
    return value;
}

struct segments *segments_parse(uint8_t *file, size_t len, const uint8_t digest[DIGEST]) {
    uint8_t found[DIGEST];
    struct sha256 sum;
    sha256_begin(&sum);
    sha256_add(&sum, file, len);
    sha256_end(&sum, found);
    struct segments *s = calloc(1, sizeof *s);
    if (!s || memcmp(found, digest, DIGEST) != 0 || len < HEADER || memcmp(file, "DSECPACK\1\0\0\0", 12) != 0 || (len - HEADER) % ENTRY)
        goto bad;
    s->count = (uint32_t)((len - HEADER) / ENTRY);
    if (number_at(file + 16) != s->count || !(s->start = malloc(sizeof *s->start * (s->count + 1ul))))
        goto bad;
    s->start[0] = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        uint64_t size = number_at(file + HEADER + (size_t)i * ENTRY + DIGEST);
        if (size > INT64_MAX / 2 || s->start[i] > INT64_MAX / 2)
            goto bad;
        s->start[i + 1] = s->start[i] + (size + PACK_BLOCK - 1) / PACK_BLOCK * PACK_BLOCK;
    }
    s->file = file;
    return s;
bad:
    segments_free(s);
    errno = EILSEQ;
    return NULL;
}

uint32_t segments_after(const struct segments *s, uint64_t at) {
    uint32_t low = 0, high = s->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (s->start[middle + 1] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

const uint8_t *segment_at(const struct segments *s, uint32_t i, uint64_t *size) {
    const uint8_t *entry = s->file + HEADER + (size_t)i * ENTRY;
    *size = number_at(entry + DIGEST);
    return entry;
}
