/* dsec-native blobcache: a FUSE server that stands between EROFS and a store of packs that may be slow, stall or vanish.
 *
 * It shows `<hex>.data` of the store's packs, read-only, and reads the store in pieces of BLOCK bytes and more, each only once however many
 * ask. A read that the store does not answer within the deadline fails with EIO; nobody ever waits longer. Three kinds of threads:
 *
 *   readers   take requests from /dev/fuse; answer from memory or the disk cache; else queue a job and go on
 *   fetchers  do the jobs; only they touch the store; one that hangs in it is abandoned and another takes its place, up to a bound
 *   clock     answers what is overdue, abandons jobs, spawns fetchers
 *
 * One lock guards all tables. No store call, no reply and no disk access is made under it.
 */
#ifndef DSEC_BLOBCACHE_H
#define DSEC_BLOBCACHE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#define CHUNK       (64u << 10) /* the unit of caching */
#define READ_MAX    (1u << 20)  /* of one FUSE request */
#define WAIT_CHUNKS (READ_MAX / CHUNK + 1)
#define JOB_CHUNKS  32
#define PACKS_MAX   16384
#define DIGEST      32
#define ROOT_NODE   1
#define FIRST_NODE  2

struct settings {
    const char *store, *mount, *control, *cache;
    uint64_t cache_bytes, memory_bytes;
    uint32_t block;
    int parallel, spare, deadline_ms, readahead_kb;
    bool verify;
};

/* What must outlive a worker: node ids stand for packs for as long as the kernel knows them. Shared by keeper and workers. */
struct pack {
    uint8_t digest[DIGEST];
    int64_t size; /* -1: not known yet */
    uint64_t lookups;
    uint64_t generation;
    uint32_t used;
};

struct shared {
    uint32_t minor, max_pages;
    uint64_t worker_starts, heartbeat;
    int32_t keeper, worker;
    int32_t unmounted; /* nothing is to be started any more */
    uint32_t packs;
    struct pack pack[PACKS_MAX];
};

/* --- shape of the protocol: pure --- */
struct fuse_call {
    uint32_t opcode, size, flags, pid;
    uint64_t unique, node, offset, handle, lookups, target;
    const char *name;
    const uint8_t *rest; /* BATCH_FORGET: `count` pairs of u64 */
    uint32_t count;
};

/* 0, or an errno for a message that is not as it must be. */
int call_parse(const uint8_t *buf, size_t len, struct fuse_call *out);
/* The digest in `<64 hex digits>.data`; -1 for any other name. */
int pack_name_parse(const char *name, uint8_t digest[DIGEST]);
void pack_name(const uint8_t digest[DIGEST], char out[DIGEST * 2 + 6]);
uint64_t block_sum(const void *data, size_t len);

struct sha256 {
    uint32_t h[8];
    uint64_t length;
    uint8_t rest[64];
};

void sha256_begin(struct sha256 *s);
void sha256_add(struct sha256 *s, const void *data, size_t len);
void sha256_end(struct sha256 *s, uint8_t out[DIGEST]);

/* --- a pack's index: pure --- */
#define PACK_BLOCK 4096u

struct segments {
    uint32_t node, count, users;
    uint64_t generation, used;
    uint8_t *file;   /* the index as it is */
    uint64_t *start; /* of each segment in the data, and the end of the last */
};

/* Takes `file`; NULL with EILSEQ, and `file` left to the caller, where it is not the index of the pack `digest`. */
struct segments *segments_parse(uint8_t *file, size_t len, const uint8_t digest[DIGEST]);
void segments_free(struct segments *s);
/* The first one that ends after `at`. */
uint32_t segments_after(const struct segments *s, uint64_t at);
/* Its digest and size. */
const uint8_t *segment_at(const struct segments *s, uint32_t i, uint64_t *size);

/* --- disk cache --- */
struct disk;
struct disk *disk_open(const char *folder, uint64_t bytes);
void disk_close(struct disk *d);
/* True when `len` bytes of the chunk were there, whole, and are in buf now. */
bool disk_read(struct disk *d, const uint8_t digest[DIGEST], uint32_t chunk, void *buf, uint32_t len);
bool disk_has(struct disk *d, const uint8_t digest[DIGEST], uint32_t chunk);
void disk_write(struct disk *d, const uint8_t digest[DIGEST], uint32_t chunk, const void *buf, uint32_t len);
void disk_usage(struct disk *d, uint64_t *used, uint64_t *limit, uint64_t *evicted, uint64_t *bad);

/* --- chunks in memory, jobs, deadlines --- */
struct request {
    uint64_t unique, offset;
    uint32_t size, pid, node, first;
    int chunks, pending, error;
    bool low, lookup, interrupted, in_backlog;
    int64_t deadline;
    struct chunk *held[WAIT_CHUNKS];
    struct request *next_waiter[WAIT_CHUNKS];
    struct request *next, *previous; /* of all that are not answered yet, oldest first */
    struct request *later;           /* of the backlog, or of those to be answered now */
};

enum outcome { GOT, AWAY, LOST };

struct job {
    uint32_t node, first;
    int count, tries, error;
    uint64_t generation;
    bool low, abandoned;
    int64_t started, not_before;
    struct request *lookup;
    struct job *next, *previous;
    uint8_t *buffers[JOB_CHUNKS];
};

/* The store, as the fetchers use it: no lock is held, and any of it may take for ever. */
enum outcome store_read(struct job *job);
/* Whether the `len` bytes that the job has read are what the pack's index says. */
enum outcome verify(struct job *job, int fd, size_t len);
enum outcome store_size(struct job *job, int64_t *size);

extern struct settings settings;
extern struct shared *shared;
extern int fuse_fd;

int fetch_start(struct disk *disk);
void fetch_read(const struct fuse_call *call);
void fetch_lookup(const struct fuse_call *call, const uint8_t digest[DIGEST]);
/* The size of a pack, by somebody who has seen it: the store need not be asked. With the lock. */
void fetch_know(const uint8_t digest[DIGEST], int64_t size);
void fetch_interrupt(uint64_t unique);
/* By node id, or NULL. */
struct pack *node_pack(uint64_t node);
void node_forget(uint64_t node, uint64_t lookups);
int64_t clock_ms(void);

void reply_error(uint64_t unique, int error);
void reply_bytes(uint64_t unique, const void *data, size_t len);
struct iovec;
void reply_vector(uint64_t unique, struct iovec *parts, int count, size_t len);
void reply_entry(uint64_t unique, uint32_t node);

uint32_t chunks_of(const struct pack *p);

struct fetch_state {
    int threads, stuck, waiting;
    uint64_t memory_bytes;
};

/* When the store last began not to answer (0: it answers), by clock_ms, and with what. */
struct store_state {
    int64_t away_since;
    int error;
};

extern struct store_state store_state;
extern pthread_mutex_t tables; /* guards all of the above but the disk cache */
void fetch_state(struct fetch_state *out);

/* --- what happened, for those who ask over the control socket. All but seen_failure with the lock. --- */
enum count { ASKED, ASKED_BYTES, HIT_BYTES, DISK_BYTES, STORE_READS, STORE_BYTES, STORE_ERRORS, COUNTS };
int seen_start(struct disk *disk);
void seen_add(uint32_t node, enum count what, uint64_t by);
/* For the trace: which chunks were asked for, in the order of the first time. Those of a prefetch too: once they are in the kernel's cache
 * nobody tells whether they were wanted, and a trace that was replayed must not shrink. */
void seen_touch(uint32_t node, uint32_t chunk);
/* A reader is about to be told that its read failed. It still waits, so its cgroup, which names the sandbox, can be read. */
void seen_failure(const struct request *r, int error, const char *reason);
/* The answer to one line of the control socket, as JSON; takes the lock itself. */
void seen_answer(char *line, FILE *out);

int control_listen(const char *path);
int control_start(int listener);
int fuse_serve(int threads);

int blobcache_main(int argc, char **argv);

#endif
