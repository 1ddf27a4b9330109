/* Reading packs from the store: opened by path, past the page cache where the file system can, opened again after any failure. */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define OPEN_MAX_FILES 512

struct file {
    int fd, users;
    uint32_t node;
    uint64_t generation, used;
    bool stale;
    struct file *next;
};

static pthread_mutex_t files_lock = PTHREAD_MUTEX_INITIALIZER;
static struct file *files;
static int file_count;
static uint64_t uses;
static bool buffered; /* the store cannot read past the page cache */

static void file_free(struct file **at) {
    struct file *f = *at;
    *at = f->next;
    file_count--;
    /* Closing may wait for the store; nobody else can reach it any more. */
    pthread_mutex_unlock(&files_lock);
    close(f->fd);
    free(f);
    pthread_mutex_lock(&files_lock);
}

static void files_shrink(void) {
    while (file_count > OPEN_MAX_FILES) {
        struct file **oldest = NULL;
        for (struct file **at = &files; *at; at = &(*at)->next)
            if (!(*at)->users && (!oldest || (*at)->used < (*oldest)->used))
                oldest = at;
        if (!oldest)
            return;
        file_free(oldest);
    }
}

static struct file *file_find(const struct job *job) {
    for (struct file *f = files; f; f = f->next)
        if (f->node == job->node && f->generation == job->generation && !f->stale) {
            f->users++;
            f->used = ++uses;
            return f;
        }
    return NULL;
}

static int pack_open(const struct job *job) {
    char path[PATH_MAX], name[DIGEST * 2 + 6];
    pack_name(node_pack(job->node)->digest, name);
    if (snprintf(path, sizeof path, "%s/%s", settings.store, name) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = __atomic_load_n(&buffered, __ATOMIC_RELAXED) ? -1 : open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_DIRECT);
    if (fd < 0 && (errno == EINVAL || __atomic_load_n(&buffered, __ATOMIC_RELAXED))) {
        __atomic_store_n(&buffered, true, __ATOMIC_RELAXED);
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    }
    return fd;
}

static struct file *file_get(const struct job *job) {
    pthread_mutex_lock(&files_lock);
    struct file *f = file_find(job);
    pthread_mutex_unlock(&files_lock);
    if (f)
        return f;
    int fd = pack_open(job);
    if (fd < 0 || !(f = calloc(1, sizeof *f))) {
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    *f = (struct file){.fd = fd, .users = 1, .node = job->node, .generation = job->generation};
    pthread_mutex_lock(&files_lock);
    f->used = ++uses;
    f->next = files;
    files = f;
    file_count++;
    files_shrink();
    pthread_mutex_unlock(&files_lock);
    return f;
}

static void file_put(struct file *f, bool failed) {
    pthread_mutex_lock(&files_lock);
    f->users--;
    if (failed)
        f->stale = true;
    if (f->stale && !f->users)
        for (struct file **at = &files; *at; at = &(*at)->next)
            if (*at == f) {
                file_free(at);
                break;
            }
    pthread_mutex_unlock(&files_lock);
}

/* A pack that is missing from a store that is there is lost; one in a store that cannot be reached may come back. */
static enum outcome judge(int error) {
    struct stat folder;
    if (error != ENOENT && error != ELOOP && error != EISDIR && error != ENOTDIR)
        return AWAY;
    return stat(settings.store, &folder) == 0 && S_ISDIR(folder.st_mode) ? LOST : AWAY;
}

static enum outcome fill(int fd, struct job *job, size_t want) {
    struct iovec parts[JOB_CHUNKS];
    off_t at = (off_t)job->first * CHUNK;
    size_t got = 0;
    while (got < want) {
        int count = 0;
        for (int i = (int)(got / CHUNK); i < job->count; i++) {
            size_t skip = count ? 0 : got % CHUNK;
            parts[count++] = (struct iovec){job->buffers[i] + skip, CHUNK - skip};
        }
        ssize_t n = preadv(fd, parts, count, at + (off_t)got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            job->error = n ? errno : ENODATA;
            return n ? AWAY : LOST;
        }
        got += (size_t)n;
    }
    return GOT;
}

enum outcome store_read(struct job *job) {
    int64_t size = node_pack(job->node)->size, from = (int64_t)job->first * CHUNK;
    size_t want = (size_t)job->count * CHUNK;
    if (size - from < (int64_t)want)
        want = (size_t)(size - from);
    enum outcome outcome = AWAY;
    /* Twice: a descriptor of before may be stale, or the store may turn out to read through the page cache only. */
    for (int attempt = 0; attempt < 2; attempt++) {
        struct file *f = file_get(job);
        if (!f) {
            job->error = errno;
            return judge(job->error);
        }
        outcome = fill(f->fd, job, want);
        if (outcome == GOT && settings.verify)
            outcome = verify(job, f->fd, want);
        if (outcome == AWAY && job->error == EINVAL)
            __atomic_store_n(&buffered, true, __ATOMIC_RELAXED);
        file_put(f, outcome != GOT);
        if (outcome == GOT)
            break;
    }
    return outcome;
}

enum outcome store_size(struct job *job, int64_t *size) {
    for (int attempt = 0; attempt < 2; attempt++) {
        struct file *f = file_get(job);
        if (!f) {
            job->error = errno;
            return judge(job->error);
        }
        struct stat st;
        int result = fstat(f->fd, &st);
        job->error = result < 0 ? errno : 0;
        file_put(f, result < 0);
        if (result == 0) {
            *size = st.st_size;
            return S_ISREG(st.st_mode) ? GOT : LOST;
        }
    }
    return AWAY;
}
