/* A store that is far away: a folder seen through FUSE at a set bandwidth and a set time for each request.
 *
 *   slowstore SOURCE TARGET MB_PER_S REQUEST_US COUNTERS
 *
 * It passes everything through to SOURCE. A request is answered when the time for a request has gone by and its bytes have crossed the
 * line, which all requests share in the order in which they came; any number of them may wait at once, as on a network. COUNTERS is a file
 * of the 64-bit numbers in `struct counters`, written as they change. Ends when TARGET is unmounted, or with the process that started it.
 *
 * Nothing but the kernel's own headers is needed: it speaks the protocol of /dev/fuse (linux/fuse.h, minor 31 and later).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    THREADS = 64,   /* requests under way at once */
    MOST = 1 << 20, /* bytes of one read or write */
    BUFFER = MOST + (64 << 10) /* one with its headers */,
    BUCKETS = 4096,
    CACHE_SECONDS = 60, /* how long the kernel may believe names and attributes: nobody else writes here */
};

struct counters {
    _Atomic uint64_t requests, reads, bytes_read, writes, bytes_written, busy_ns;
};

/* One inode of SOURCE that the kernel knows: its address is the number that the kernel has for it. */
struct node {
    struct node *next;
    dev_t dev;
    ino_t ino;
    int fd; /* O_PATH */
    uint64_t lookups;
};

static struct node root, *buckets[BUCKETS];
static pthread_mutex_t nodes_lock = PTHREAD_MUTEX_INITIALIZER, line_lock = PTHREAD_MUTEX_INITIALIZER;
static struct counters *counters;
static uint64_t line_free_ns, request_ns;
static double ns_per_byte;
static int device;

static void die(const char *what) {
    fprintf(stderr, "slowstore: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* -- the line -- */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Wait until a request that came now would be answered: its bytes behind those of all before it, then the time of a request. */
static void cross(uint64_t arrived, uint64_t bytes) {
    uint64_t cost = (uint64_t)((double)bytes * ns_per_byte);
    pthread_mutex_lock(&line_lock);
    line_free_ns = (line_free_ns > arrived ? line_free_ns : arrived) + cost;
    uint64_t done = line_free_ns + request_ns;
    pthread_mutex_unlock(&line_lock);
    counters->busy_ns += cost;
    counters->requests++;
    struct timespec t = {.tv_sec = (time_t)(done / 1000000000u), .tv_nsec = (long)(done % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

/* -- inodes -- */

static struct node *node_of(uint64_t id) {
    return id == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)id;
}

static struct node **bucket_of(dev_t dev, ino_t ino) {
    return &buckets[(ino ^ dev * 31) % BUCKETS];
}

/* Takes `fd` over. */
static struct node *remember(int fd, const struct stat *st) {
    pthread_mutex_lock(&nodes_lock);
    struct node **bucket = bucket_of(st->st_dev, st->st_ino), *node = *bucket;
    while (node && (node->dev != st->st_dev || node->ino != st->st_ino))
        node = node->next;
    if (node) {
        close(fd);
    } else if ((node = calloc(1, sizeof *node))) {
        *node = (struct node){.next = *bucket, .dev = st->st_dev, .ino = st->st_ino, .fd = fd};
        *bucket = node;
    } else {
        die("memory");
    }
    node->lookups++;
    pthread_mutex_unlock(&nodes_lock);
    return node;
}

static void forget(uint64_t id, uint64_t count) {
    struct node *node = node_of(id);
    if (node == &root)
        return;
    pthread_mutex_lock(&nodes_lock);
    if ((node->lookups -= count) == 0) {
        struct node **link = bucket_of(node->dev, node->ino);
        while (*link != node)
            link = &(*link)->next;
        *link = node->next;
        close(node->fd);
        free(node);
    }
    pthread_mutex_unlock(&nodes_lock);
}

static const char *magic(const struct node *node, char path[static 64]) {
    snprintf(path, 64, "/proc/self/fd/%d", node->fd);
    return path;
}

static void fill_attr(struct fuse_attr *attr, const struct stat *st) {
    *attr = (struct fuse_attr){
        .ino = st->st_ino,
        .size = (uint64_t)st->st_size,
        .blocks = (uint64_t)st->st_blocks,
        .atime = (uint64_t)st->st_atim.tv_sec,
        .mtime = (uint64_t)st->st_mtim.tv_sec,
        .ctime = (uint64_t)st->st_ctim.tv_sec,
        .atimensec = (uint32_t)st->st_atim.tv_nsec,
        .mtimensec = (uint32_t)st->st_mtim.tv_nsec,
        .ctimensec = (uint32_t)st->st_ctim.tv_nsec,
        .mode = st->st_mode,
        .nlink = (uint32_t)st->st_nlink,
        .uid = st->st_uid,
        .gid = st->st_gid,
        .rdev = (uint32_t)st->st_rdev,
        .blksize = 4096,
    };
}

static int look_up(const struct node *folder, const char *name, struct fuse_entry_out *out) {
    struct stat st;
    int fd = openat(folder->fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) < 0) {
        close(fd);
        return -EIO;
    }
    *out = (struct fuse_entry_out){.nodeid = (uintptr_t)remember(fd, &st), .entry_valid = CACHE_SECONDS, .attr_valid = CACHE_SECONDS};
    fill_attr(&out->attr, &st);
    return 0;
}

static int get_attr(const struct node *node, struct fuse_attr_out *out) {
    struct stat st;
    if (fstatat(node->fd, "", &st, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    *out = (struct fuse_attr_out){.attr_valid = CACHE_SECONDS};
    fill_attr(&out->attr, &st);
    return 0;
}

static int set_attr(const struct node *node, const struct fuse_setattr_in *in) {
    char path[64];
    magic(node, path);
    if (in->valid & FATTR_MODE && chmod(path, in->mode & 07777) < 0)
        return -errno;
    if (in->valid & (FATTR_UID | FATTR_GID)) {
        uid_t uid = in->valid & FATTR_UID ? in->uid : (uid_t)-1;
        gid_t gid = in->valid & FATTR_GID ? in->gid : (gid_t)-1;
        if (fchownat(node->fd, "", uid, gid, AT_EMPTY_PATH) < 0)
            return -errno;
    }
    if (in->valid & FATTR_SIZE && truncate(path, (off_t)in->size) < 0)
        return -errno;
    if (in->valid & (FATTR_ATIME | FATTR_MTIME)) {
        struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_OMIT}};
        if (in->valid & FATTR_ATIME)
            times[0] = (struct timespec){(time_t)in->atime, in->atimensec};
        if (in->valid & FATTR_MTIME)
            times[1] = (struct timespec){(time_t)in->mtime, in->mtimensec};
        if (in->valid & FATTR_ATIME_NOW)
            times[0].tv_nsec = UTIME_NOW;
        if (in->valid & FATTR_MTIME_NOW)
            times[1].tv_nsec = UTIME_NOW;
        if (utimensat(AT_FDCWD, path, times, 0) < 0)
            return -errno;
    }
    return 0;
}

/* -- requests: each fills `out` and returns its length, or a negative error number -- */

static int open_node(const struct node *node, uint32_t flags, bool folder, struct fuse_open_out *out) {
    char path[64];
    int fd = open(magic(node, path), (int)(flags & ~(uint32_t)(O_NOFOLLOW | O_CREAT | O_EXCL | O_DIRECT)) | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    DIR *stream = folder ? fdopendir(fd) : NULL;
    if (folder && !stream) {
        close(fd);
        return -ENOMEM;
    }
    *out = (struct fuse_open_out){.fh = folder ? (uintptr_t)stream : (uint64_t)fd, .open_flags = folder ? 0 : FOPEN_KEEP_CACHE};
    return sizeof *out;
}

static int create_node(const struct node *folder, const struct fuse_create_in *in, char *out) {
    const char *name = (const char *)(in + 1);
    int fd = openat(folder->fd, name, (int)(in->flags & ~(uint32_t)O_DIRECT) | O_CREAT | O_NOFOLLOW | O_CLOEXEC, in->mode & ~in->umask);
    if (fd < 0)
        return -errno;
    int result = look_up(folder, name, (struct fuse_entry_out *)out);
    if (result < 0) {
        close(fd);
        return result;
    }
    struct fuse_open_out opened = {.fh = (uint64_t)fd, .open_flags = FOPEN_KEEP_CACHE};
    memcpy(out + sizeof(struct fuse_entry_out), &opened, sizeof opened);
    return sizeof(struct fuse_entry_out) + sizeof opened;
}

static int read_folder(DIR *stream, uint64_t offset, uint32_t room, char *out) {
    uint32_t used = 0;
    if ((uint64_t)telldir(stream) != offset)
        seekdir(stream, (long)offset);
    for (struct dirent *entry;;) {
        long before = telldir(stream);
        errno = 0;
        if (!(entry = readdir(stream)))
            return errno ? -errno : (int)used;
        uint32_t length = (uint32_t)strlen(entry->d_name), size = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length);
        if (used + size > room) {
            seekdir(stream, before);
            return (int)used;
        }
        struct fuse_dirent *to = (struct fuse_dirent *)(out + used);
        memset(to, 0, size);
        *to = (struct fuse_dirent){.ino = entry->d_ino, .off = (uint64_t)telldir(stream), .namelen = length, .type = entry->d_type};
        memcpy(to->name, entry->d_name, length);
        used += size;
    }
}

static int stat_fs(struct fuse_statfs_out *out) {
    struct statvfs st;
    if (fstatvfs(root.fd, &st) < 0)
        return -errno;
    *out = (struct fuse_statfs_out){.st = {.blocks = st.f_blocks,
                                           .bfree = st.f_bfree,
                                           .bavail = st.f_bavail,
                                           .files = st.f_files,
                                           .ffree = st.f_ffree,
                                           .bsize = (uint32_t)st.f_bsize,
                                           .frsize = (uint32_t)st.f_frsize,
                                           .namelen = 255}};
    return sizeof *out;
}

static int greet(const struct fuse_init_in *in, struct fuse_init_out *out) {
    const uint32_t wanted = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_AUTO_INVAL_DATA;
    *out = (struct fuse_init_out){.major = FUSE_KERNEL_VERSION,
                                  .minor = in->minor < FUSE_KERNEL_MINOR_VERSION ? in->minor : FUSE_KERNEL_MINOR_VERSION,
                                  .max_readahead = MOST,
                                  .flags = in->flags & wanted,
                                  .max_background = THREADS,
                                  .congestion_threshold = THREADS * 3 / 4,
                                  .max_write = MOST,
                                  .time_gran = 1,
                                  .max_pages = MOST / 4096};
    return sizeof *out;
}

static int entry_of(int made, const struct node *folder, const char *name, char *out) {
    if (made < 0)
        return -errno;
    int result = look_up(folder, name, (struct fuse_entry_out *)out);
    return result < 0 ? result : (int)sizeof(struct fuse_entry_out);
}

static int make_node(const struct fuse_in_header *head, const char *in, char *out) {
    const struct node *folder = node_of(head->nodeid);
    const char *name = in;
    int made = -1;
    if (head->opcode == FUSE_MKDIR) {
        const struct fuse_mkdir_in *how = (const void *)in;
        name = (const char *)(how + 1);
        made = mkdirat(folder->fd, name, how->mode & ~how->umask);
    } else if (head->opcode == FUSE_MKNOD) {
        const struct fuse_mknod_in *how = (const void *)in;
        name = (const char *)(how + 1);
        made = mknodat(folder->fd, name, how->mode & ~how->umask, how->rdev);
    } else if (head->opcode == FUSE_SYMLINK) {
        made = symlinkat(in + strlen(in) + 1, folder->fd, name);
    } else {
        char path[64];
        name = in + sizeof(struct fuse_link_in);
        made = linkat(AT_FDCWD, magic(node_of(((const struct fuse_link_in *)(const void *)in)->oldnodeid), path), folder->fd, name,
                      AT_SYMLINK_FOLLOW);
    }
    return entry_of(made, folder, name, out);
}

static int move_node(const struct fuse_in_header *head, const char *in) {
    bool second = head->opcode == FUSE_RENAME2;
    const struct fuse_rename2_in *how = (const void *)in;
    const char *from = in + (second ? sizeof(struct fuse_rename2_in) : sizeof(struct fuse_rename_in));
    const char *to = from + strlen(from) + 1;
    int done = renameat2(node_of(head->nodeid)->fd, from, node_of(how->newdir)->fd, to, second ? how->flags : 0);
    return done < 0 ? -errno : 0;
}

static int transfer(const struct fuse_in_header *head, const char *in, char *out) {
    if (head->opcode == FUSE_READ) {
        const struct fuse_read_in *how = (const void *)in;
        ssize_t got = pread((int)how->fh, out, how->size < MOST ? how->size : MOST, (off_t)how->offset);
        if (got < 0)
            return -errno;
        counters->reads++;
        counters->bytes_read += (uint64_t)got;
        return (int)got;
    }
    const struct fuse_write_in *how = (const void *)in;
    ssize_t put = pwrite((int)how->fh, how + 1, how->size, (off_t)how->offset);
    if (put < 0)
        return -errno;
    counters->writes++;
    counters->bytes_written += (uint64_t)put;
    *(struct fuse_write_out *)out = (struct fuse_write_out){.size = (uint32_t)put};
    return sizeof(struct fuse_write_out);
}

/* Length of the answer, or a negative error number. What costs a request on a network is charged by the caller. */
static int serve(const struct fuse_in_header *head, const char *in, char *out) {
    struct node *node = node_of(head->nodeid);
    int result;
    switch (head->opcode) {
    case FUSE_INIT: return greet((const void *)in, (void *)out);
    case FUSE_LOOKUP: return (result = look_up(node, in, (void *)out)) < 0 ? result : (int)sizeof(struct fuse_entry_out);
    case FUSE_GETATTR: return (result = get_attr(node, (void *)out)) < 0 ? result : (int)sizeof(struct fuse_attr_out);
    case FUSE_SETATTR:
        if ((result = set_attr(node, (const void *)in)) < 0)
            return result;
        return (result = get_attr(node, (void *)out)) < 0 ? result : (int)sizeof(struct fuse_attr_out);
    case FUSE_READLINK: return (result = (int)readlinkat(node->fd, "", out, 4095)) < 0 ? -errno : result;
    case FUSE_SYMLINK:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_LINK: return make_node(head, in, out);
    case FUSE_UNLINK: return unlinkat(node->fd, in, 0) < 0 ? -errno : 0;
    case FUSE_RMDIR: return unlinkat(node->fd, in, AT_REMOVEDIR) < 0 ? -errno : 0;
    case FUSE_RENAME:
    case FUSE_RENAME2: return move_node(head, in);
    case FUSE_OPEN: return open_node(node, ((const struct fuse_open_in *)(const void *)in)->flags, false, (void *)out);
    case FUSE_OPENDIR: return open_node(node, O_RDONLY | O_DIRECTORY, true, (void *)out);
    case FUSE_CREATE: return create_node(node, (const void *)in, out);
    case FUSE_READ:
    case FUSE_WRITE: return transfer(head, in, out);
    case FUSE_READDIR: {
        const struct fuse_read_in *how = (const void *)in;
        return read_folder((DIR *)(uintptr_t)how->fh, how->offset, how->size < MOST ? how->size : MOST, out);
    }
    case FUSE_FLUSH: return 0;
    case FUSE_RELEASE: return close((int)((const struct fuse_release_in *)(const void *)in)->fh), 0;
    case FUSE_RELEASEDIR: return closedir((DIR *)(uintptr_t)((const struct fuse_release_in *)(const void *)in)->fh), 0;
    case FUSE_FSYNC: return fsync((int)((const struct fuse_fsync_in *)(const void *)in)->fh) < 0 ? -errno : 0;
    case FUSE_FSYNCDIR: return fsync(dirfd((DIR *)(uintptr_t)((const struct fuse_fsync_in *)(const void *)in)->fh)) < 0 ? -errno : 0;
    case FUSE_STATFS: return stat_fs((void *)out);
    case FUSE_DESTROY: return 0;
    default: return -ENOSYS;
    }
}

static bool needs_no_answer(const struct fuse_in_header *head, const char *in) {
    if (head->opcode == FUSE_FORGET) {
        forget(head->nodeid, ((const struct fuse_forget_in *)(const void *)in)->nlookup);
    } else if (head->opcode == FUSE_BATCH_FORGET) {
        const struct fuse_batch_forget_in *all = (const void *)in;
        const struct fuse_forget_one *one = (const void *)(all + 1);
        for (uint32_t i = 0; i < all->count; i++)
            forget(one[i].nodeid, one[i].nlookup);
    } else {
        return head->opcode == FUSE_INTERRUPT;
    }
    return true;
}

static bool is_local(uint32_t opcode) {
    return opcode == FUSE_INIT || opcode == FUSE_FLUSH || opcode == FUSE_RELEASE || opcode == FUSE_RELEASEDIR || opcode == FUSE_DESTROY;
}

static void *work(void *unused) {
    (void)unused;
    char *in = malloc(BUFFER + 1), *out = malloc(BUFFER);
    if (!in || !out)
        die("memory");
    prctl(PR_SET_TIMERSLACK, 1000);
    for (;;) {
        ssize_t got = read(device, in, BUFFER);
        if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            continue;
        if (got < (ssize_t)sizeof(struct fuse_in_header))
            exit(errno == ENODEV ? 0 : 1);
        uint64_t arrived = now_ns();
        in[got] = 0;
        const struct fuse_in_header *head = (const void *)in;
        const char *body = in + sizeof *head;
        if (needs_no_answer(head, body))
            continue;
        int result = serve(head, body, out);
        if (!is_local(head->opcode))
            cross(arrived, head->opcode == FUSE_WRITE ? (uint64_t)got : result > 0 ? (uint64_t)result : 0);
        struct fuse_out_header answer = {.unique = head->unique, .error = result < 0 ? result : 0};
        answer.len = (uint32_t)sizeof answer + (result > 0 ? (uint32_t)result : 0);
        struct iovec parts[] = {{&answer, sizeof answer}, {out, answer.len - sizeof answer}};
        if (writev(device, parts, 2) < 0 && errno != ENOENT && errno != EINTR)
            exit(errno == ENODEV ? 0 : 1);
    }
}

int main(int argc, char **argv) {
    if (argc != 6 || atof(argv[3]) <= 0) {
        fprintf(stderr, "usage: slowstore SOURCE TARGET MB_PER_S REQUEST_US COUNTERS\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    umask(0);
    ns_per_byte = 1e3 / atof(argv[3]);
    request_ns = (uint64_t)(atof(argv[4]) * 1e3);
    struct stat st;
    root.fd = open(argv[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root.fd < 0 || fstat(root.fd, &st) < 0)
        die(argv[1]);
    int file = open(argv[5], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, 4096) < 0)
        die(argv[5]);
    counters = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (counters == MAP_FAILED)
        die("mmap");
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (device < 0)
        die("/dev/fuse");
    char options[128];
    snprintf(options, sizeof options, "fd=%d,rootmode=%o,user_id=0,group_id=0,default_permissions,allow_other,max_read=%d", device,
             st.st_mode & S_IFMT, MOST);
    if (mount("slowstore", argv[2], "fuse.slowstore", MS_NOSUID | MS_NODEV, options) < 0)
        die(argv[2]);
    for (int i = 1; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL) != 0)
            die("pthread_create");
    }
    puts("ready");
    fflush(stdout);
    work(NULL);
}
