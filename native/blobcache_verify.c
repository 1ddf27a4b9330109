/* What comes from the store is what the pack's index says: each segment's SHA-256 is there, and the index's own is the pack's name.
 *
 * A segment that lies in a piece only partly is read whole for this. One of more than SEGMENT_MAX is not verified here: it would have to be
 * read whole before its first byte is given to anybody; `dsec store verify` does that.
 */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEGMENT_MAX (2u << 20)
#define INDEX_MAX   (256u << 20)
#define INDEXES     64
#define BLOCK       PACK_BLOCK

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct segments *known[INDEXES];
static uint64_t uses;

static struct segments *segments_load(const struct job *job) {
    char path[PATH_MAX], name[DIGEST * 2 + 6];
    const uint8_t *digest = node_pack(job->node)->digest;
    pack_name(digest, name);
    snprintf(path, sizeof path, "%s/%.64s.index", settings.store, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0) {
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    size_t len = st.st_size > 0 && st.st_size <= INDEX_MAX ? (size_t)st.st_size : 0, got = 0;
    uint8_t *file = len ? malloc(len) : NULL;
    while (file && got < len) {
        ssize_t n = pread(fd, file + got, len - got, (off_t)got);
        if (n <= 0)
            break;
        got += (size_t)n;
    }
    int error = file ? errno : EILSEQ;
    close(fd);
    struct segments *s = file && got == len ? segments_parse(file, len, digest) : NULL;
    if (!s) {
        errno = file && got == len ? EILSEQ : error;
        free(file);
        return NULL;
    }
    s->node = job->node;
    s->generation = job->generation;
    return s;
}

/* The caller uses it until it puts it back; the least recently used goes when there are too many. */
static struct segments *segments_get(const struct job *job) {
    struct segments *s = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < INDEXES; i++)
        if (known[i] && known[i]->node == job->node && known[i]->generation == job->generation) {
            s = known[i];
            s->users++;
            s->used = ++uses;
        }
    pthread_mutex_unlock(&lock);
    if (s || !(s = segments_load(job)))
        return s;
    s->users = 1;
    pthread_mutex_lock(&lock);
    int place = -1;
    for (int i = 0; i < INDEXES; i++)
        if (!known[i] || (!known[i]->users && (place < 0 || (known[place] && known[i]->used < known[place]->used))))
            place = i;
    s->used = ++uses;
    if (place >= 0) {
        segments_free(known[place]);
        known[place] = s;
    }
    pthread_mutex_unlock(&lock);
    return s;
}

static void segments_put(struct segments *s) {
    bool kept = false;
    pthread_mutex_lock(&lock);
    s->users--;
    for (int i = 0; i < INDEXES; i++)
        kept |= known[i] == s;
    pthread_mutex_unlock(&lock);
    if (!kept)
        segments_free(s);
}

/* Of bytes that the job has read. */
static void add_read(struct sha256 *sum, const struct job *job, uint64_t at, uint64_t end) {
    for (uint64_t base = (uint64_t)job->first * CHUNK; at < end;) {
        uint64_t offset = at - base, n = CHUNK - offset % CHUNK;
        if (n > end - at)
            n = end - at;
        sha256_add(sum, job->buffers[offset / CHUNK] + offset % CHUNK, n);
        at += n;
    }
}

static int add_whole(struct sha256 *sum, int fd, uint64_t at, uint64_t size) {
    size_t room = (size + BLOCK - 1) / BLOCK * BLOCK;
    uint8_t *data = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return -1;
    ssize_t n = pread(fd, data, room, (off_t)at);
    int error = n < 0 ? errno : EIO;
    if (n >= (ssize_t)size)
        sha256_add(sum, data, size);
    munmap(data, room);
    errno = error;
    return n >= (ssize_t)size ? 0 : -1;
}

enum outcome verify(struct job *job, int fd, size_t len) {
    struct segments *s = segments_get(job);
    if (!s) {
        job->error = errno;
        return errno == EILSEQ ? LOST : AWAY;
    }
    enum outcome outcome = GOT;
    uint64_t from = (uint64_t)job->first * CHUNK, to = from + len;
    for (uint32_t i = segments_after(s, from); outcome == GOT && i < s->count && s->start[i] < to; i++) {
        uint64_t size, at = s->start[i];
        const uint8_t *expected = segment_at(s, i, &size);
        if (size > SEGMENT_MAX || !size)
            continue;
        struct sha256 sum;
        uint8_t digest[DIGEST];
        sha256_begin(&sum);
        if (at >= from && at + size <= to)
            add_read(&sum, job, at, at + size);
        else if (add_whole(&sum, fd, at, size) < 0) {
            job->error = errno;
            outcome = AWAY;
            continue;
        }
        sha256_end(&sum, digest);
        if (memcmp(digest, expected, DIGEST) != 0) {
            job->error = EILSEQ;
            outcome = LOST;
        }
    }
    segments_put(s);
    return outcome;
}
