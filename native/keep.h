/* What is kept of one output stream: its first bytes in `head`, its last in the ring `tail`. Offsets are absolute in the stream. */
#ifndef DSEC_KEEP_H
#define DSEC_KEEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct keep {
    uint8_t *head, *tail;
    size_t head_size, tail_size;
    size_t tail_limit; /* of the ring, what counts as kept once the stream has ended; the ring may be larger, for live readers */
    uint64_t total;
};

int keep_open(struct keep *k, size_t limit, size_t ring);
void keep_close(struct keep *k);
/* The next span that may be written without overwriting bytes at or after `oldest_unsent`. Commit with keep_wrote. */
uint8_t *keep_space(struct keep *k, uint64_t oldest_unsent, size_t *size);
void keep_wrote(struct keep *k, size_t n);
/* The first offset at or after `from` that is still there. With `ended`, by the limit rather than by the ring. */
uint64_t keep_from(const struct keep *k, uint64_t from, bool ended);
/* The contiguous bytes at `offset`, which keep_from has given. */
const uint8_t *keep_at(const struct keep *k, uint64_t offset, size_t *size);

#endif
