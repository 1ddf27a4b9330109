/* dsec-native blobcache: a keeper, which holds the mount and nothing else, and its worker, which serves.
 *
 * The keeper's descriptors of /dev/fuse and of the table of nodes are what a mount lives by. When the worker dies the keeper starts
 * another, which asks the kernel for the requests that were under way and goes on: readers wait a moment. When the keeper dies the worker,
 * still serving, starts another keeper, which watches it. Only when both die at once is the mount dead.
 */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define FUSE_FD      3
#define TABLE_FD     4
#define LISTENER_FD  5
#define STATUS_FD    6 /* the starter's: one byte when the mount is served */
#define STALE_MS     3000
#define BUSY_WAITERS 1024

#ifndef FUSE_NOTIFY_RESEND
#define FUSE_NOTIFY_RESEND 7
#endif
#define FLAG_INIT_EXT    (1u << 30)
#define FLAG2_HAS_RESEND (1u << 7)  /* bit 39 */
#define FLAG2_TIMEOUT    (1u << 10) /* bit 42 */

/* INIT's answer as Linux 6.15 knows it; older ones read the fields that they know. */
struct init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth;
    uint16_t request_timeout, unused[11];
};

struct settings settings;
struct shared *shared;
int fuse_fd = FUSE_FD;
static int resume_pid;
static char **arguments;

static int die(const char *what) {
    fprintf(stderr, "dsec-native blobcache: %s: %s\n", what, strerror(errno));
    return -1;
}

/* --- options --- */

static uint64_t number(const char *text) {
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno || *end || end == text) {
        fprintf(stderr, "dsec-native blobcache: %s is not a number\n", text);
        exit(2);
    }
    return value;
}

static const char *group;

static int options_parse(int argc, char **argv) {
    static const struct option known[] = {
        {"store", required_argument, NULL, 's'},
        {"mount", required_argument, NULL, 'm'},
        {"control", required_argument, NULL, 'c'},
        {"cache", required_argument, NULL, 'd'},
        {"cache-bytes", required_argument, NULL, 'D'},
        {"memory-bytes", required_argument, NULL, 'M'},
        {"block-bytes", required_argument, NULL, 'b'},
        {"parallel", required_argument, NULL, 'p'},
        {"spare", required_argument, NULL, 'x'},
        {"deadline-ms", required_argument, NULL, 't'},
        {"readahead-kb", required_argument, NULL, 'r'},
        {"cgroup", required_argument, NULL, 'g'},
        {"resume", required_argument, NULL, 'R'},
        {"verify", no_argument, NULL, 'v'},
        {0},
    };
    settings = (struct settings){
        .memory_bytes = 64 << 20, .block = 256 << 10, .parallel = 16, .spare = 32, .deadline_ms = 30000, .readahead_kb = 1024};
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;)
        switch (c) {
        case 's': settings.store = optarg; break;
        case 'm': settings.mount = optarg; break;
        case 'c': settings.control = optarg; break;
        case 'd': settings.cache = optarg; break;
        case 'D': settings.cache_bytes = number(optarg); break;
        case 'M': settings.memory_bytes = number(optarg); break;
        case 'b': settings.block = (uint32_t)number(optarg); break;
        case 'p': settings.parallel = (int)number(optarg); break;
        case 'x': settings.spare = (int)number(optarg); break;
        case 't': settings.deadline_ms = (int)number(optarg); break;
        case 'r': settings.readahead_kb = (int)number(optarg); break;
        case 'g': group = optarg; break;
        case 'v': settings.verify = true; break;
        case 'R': resume_pid = (int)number(optarg); break;
        default: return -1;
        }
    bool bad = optind != argc || !settings.store || !settings.mount || !settings.control || settings.parallel < 1 ||
               settings.parallel > 256 || settings.spare < 0 || settings.spare > 256 || settings.deadline_ms < 100 ||
               settings.deadline_ms > 3600000 || settings.block < CHUNK || settings.block > JOB_CHUNKS * CHUNK || settings.block % CHUNK ||
               settings.memory_bytes < 8 << 20 || settings.memory_bytes > (uint64_t)1 << 40 || settings.readahead_kb < 4 ||
               settings.readahead_kb > 65536;
    if (bad)
        fprintf(stderr,
                "usage: dsec-native blobcache --store DIR --mount DIR --control SOCKET [--cache DIR --cache-bytes N] [--memory-bytes N]\n"
                "  [--block-bytes N] [--parallel N] [--spare N] [--deadline-ms N] [--readahead-kb N] [--cgroup DIR] [--verify]\n");
    return bad ? -1 : 0;
}

/* --- the mount --- */

static int mount_packs(void) {
    char text[64];
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return die("cannot open /dev/fuse");
    snprintf(text, sizeof text, "fd=%d,rootmode=40500,user_id=0,group_id=0,allow_other", fd);
    if (mount("dsec-packs", settings.mount, "fuse", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME, text) < 0) {
        close(fd);
        return die("cannot mount");
    }
    return fd;
}

static int greet(void) {
    uint8_t buf[8192];
    struct fuse_in_header header;
    struct fuse_init_in in;
    ssize_t n;
    do
        n = read(FUSE_FD, buf, sizeof buf);
    while (n < 0 && errno == EINTR);
    if (n < (ssize_t)(sizeof header + 16))
        return die("no greeting from the kernel");
    memset(&in, 0, sizeof in);
    memcpy(&header, buf, sizeof header);
    memcpy(&in, buf + sizeof header, (size_t)n - sizeof header < sizeof in ? (size_t)n - sizeof header : sizeof in);
    if (header.opcode != FUSE_INIT || in.major != 7 || in.minor < 31) {
        errno = EPROTO;
        return die("the kernel's FUSE is too old");
    }
    struct init_out out = {
        .major = 7, .minor = in.minor < 38 ? in.minor : 38, .max_readahead = READ_MAX * 4, .max_background = BUSY_WAITERS};
    out.congestion_threshold = BUSY_WAITERS;
    out.max_write = 4096;
    out.time_gran = 1;
    out.max_pages = READ_MAX / 4096;
    out.flags =
        in.flags & (FUSE_ASYNC_READ | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_ASYNC_DIO | FUSE_NO_OPENDIR_SUPPORT | FLAG_INIT_EXT);
    if (in.flags & FLAG_INIT_EXT) {
        /* Should keeper and worker both stand still, the kernel ends what waits for them. */
        int seconds = settings.deadline_ms / 250 + 60;
        out.flags2 = in.flags2 & (FLAG2_HAS_RESEND | FLAG2_TIMEOUT);
        out.request_timeout = (uint16_t)(seconds < UINT16_MAX ? seconds : UINT16_MAX);
    }
    struct fuse_out_header answer = {.len = sizeof answer + sizeof out, .unique = header.unique};
    struct iovec parts[2] = {{&answer, sizeof answer}, {&out, sizeof out}};
    return writev(FUSE_FD, parts, 2) < 0 ? die("cannot greet the kernel") : 0;
}

/* Of this mount alone: its device number is in the name of what the kernel keeps for it. */
static void readahead_set(void) {
    struct stat st;
    char path[64], text[16];
    if (stat(settings.mount, &st) < 0)
        return;
    snprintf(path, sizeof path, "/sys/class/bdi/%u:%u/read_ahead_kb", major(st.st_dev), minor(st.st_dev));
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int n = snprintf(text, sizeof text, "%d", settings.readahead_kb);
    if (fd < 0 || write(fd, text, (size_t)n) < 0)
        die("readahead stays as it is");
    if (fd >= 0)
        close(fd);
}

static int listen_at(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || chmod(path, 0600) < 0 || listen(fd, 64) < 0)
        return -1;
    return fd;
}

/* --- control --- */

static void converse(int fd) {
    char line[65536 + 1];
    size_t len = 0;
    struct timeval limit = {.tv_sec = 2};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    while (len < sizeof line - 1 && !memchr(line, '\n', len)) {
        ssize_t n = recv(fd, line + len, sizeof line - 1 - len, 0);
        if (n <= 0)
            break;
        len += (size_t)n;
    }
    line[len] = 0;
    line[strcspn(line, "\n")] = 0;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (out) {
        seen_answer(line, out);
        fclose(out);
        for (size_t sent = 0; sent < size;) {
            ssize_t n = send(fd, text + sent, size - sent, MSG_NOSIGNAL);
            if (n <= 0)
                break;
            sent += (size_t)n;
        }
    }
    free(text);
}

static int keeper_again(void);

static void *control_main(void *unused) {
    (void)unused;
    int keeper = (int)syscall(SYS_pidfd_open, shared->keeper, 0);
    for (;;) {
        struct pollfd wait[2] = {{.fd = LISTENER_FD, .events = POLLIN}, {.fd = keeper, .events = POLLIN}};
        if (poll(wait, 2, -1) < 0)
            continue;
        if (wait[0].revents) {
            int fd = accept4(LISTENER_FD, NULL, NULL, SOCK_CLOEXEC);
            if (fd >= 0) {
                converse(fd);
                close(fd);
            }
        }
        if (wait[1].revents) {
            close(keeper);
            keeper = __atomic_load_n(&shared->unmounted, __ATOMIC_ACQUIRE) ? -1 : keeper_again();
        }
    }
    return NULL;
}

/* --- worker --- */

static struct disk *cache_open(void) {
    if (!settings.cache || !settings.cache_bytes)
        return NULL;
    /* Of a worker that was killed and hangs in the store still, the lock is the same: keepers pass theirs on. */
    struct disk *disk = disk_open(settings.cache, settings.cache_bytes);
    if (!disk)
        die("the cache cannot be used, serving without it");
    return disk;
}

static void names_set(const char *name) {
    prctl(PR_SET_NAME, name);
}

static int worker_main(bool first) {
    static const struct fuse_out_header resend = {.len = sizeof resend, .error = FUSE_NOTIFY_RESEND};
    pthread_t thread;
    pthread_attr_t attributes;
    names_set("dsec-packs");
    struct disk *disk = cache_open();
    if (seen_start(disk) < 0 || fetch_start(disk) < 0)
        return 1;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    if (pthread_create(&thread, &attributes, control_main, NULL) != 0)
        return 1;
    if (!first && write(FUSE_FD, &resend, sizeof resend) < 0) {
        /* Linux before 6.9. Nobody would ever answer them; so the mount dies, and they with it. */
        die("requests of before are lost");
        umount2(settings.mount, MNT_FORCE);
    }
    fuse_serve(3);
    /* Fetchers that the store holds do not end; nothing waits for them. */
    __atomic_store_n(&shared->unmounted, 1, __ATOMIC_RELEASE);
    _exit(0);
}

/* --- keeper --- */

static void standard_streams(void) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(null, 0);
    dup2(null, 1);
    if (null > 2)
        close(null);
}

static int worker_start(bool first) {
    shared->worker_starts++;
    __atomic_store_n(&shared->heartbeat, (uint64_t)clock_ms(), __ATOMIC_RELAXED);
    int pid = fork();
    if (pid == 0)
        _exit(worker_main(first));
    shared->worker = pid;
    return pid;
}

/* Killed, but a thread of it hangs in the store: as a process it is not gone, and it never serves again. */
static bool beyond_help(int pid) {
    char path[64], line[256];
    bool killed = false;
    if ((uint64_t)clock_ms() - __atomic_load_n(&shared->heartbeat, __ATOMIC_RELAXED) < STALE_MS)
        return false;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "State:", 6) == 0)
            killed |= strchr(line, 'Z') || strchr(line, 'X');
        if (strncmp(line, "SigPnd:", 7) == 0 || strncmp(line, "ShdPnd:", 7) == 0)
            killed |= strtoull(line + 7, NULL, 16) >> 8 & 1;
    }
    if (f)
        fclose(f);
    return killed;
}

static int keep(int worker) {
    int64_t started = clock_ms();
    int pidfd = worker > 0 ? (int)syscall(SYS_pidfd_open, worker, 0) : -1;
    for (;;) {
        struct pollfd wait = {.fd = pidfd, .events = POLLIN};
        bool gone = worker <= 0 || pidfd < 0 || poll(&wait, 1, 1000) > 0;
        if (__atomic_load_n(&shared->unmounted, __ATOMIC_ACQUIRE))
            break;
        if (!gone && !beyond_help(worker))
            continue;
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
        if (pidfd >= 0)
            close(pidfd);
        /* One that dies as it starts must not keep a processor busy. */
        if (clock_ms() - started < 200)
            usleep(200000);
        started = clock_ms();
        worker = worker_start(false);
        pidfd = worker > 0 ? (int)syscall(SYS_pidfd_open, worker, 0) : -1;
    }
    unlink(settings.control);
    return 0;
}

/* By the worker, whose keeper died: the new one is a fresh image, so that it is as small as the first. Returns a descriptor to watch it by.
 */
static int keeper_again(void) {
    char resume[32];
    char *argv[64];
    int count = 0;
    snprintf(resume, sizeof resume, "--resume=%d", (int)getpid());
    for (char **a = arguments; *a && count < 61; a++)
        if (strncmp(*a, "--resume", 8) != 0)
            argv[count++] = *a;
    argv[count++] = resume;
    argv[count] = NULL;
    int pid = fork();
    if (pid == 0) {
        setsid();
        for (int fd = FUSE_FD; fd <= LISTENER_FD; fd++)
            fcntl(fd, F_SETFD, 0);
        char *image[66] = {"/proc/self/exe"};
        memcpy(image + 1, argv, sizeof *argv * (size_t)(count + 1));
        execve("/proc/self/exe", image, environ);
        _exit(1);
    }
    if (pid < 0)
        return -1;
    shared->keeper = pid;
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

static int keeper_prepare(void) {
    struct rlimit limit;
    signal(SIGPIPE, SIG_IGN);
    names_set("dsec-packs-keep");
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (prctl(PR_SET_DUMPABLE, 0) < 0 || chdir("/") < 0)
        return die("cannot start");
    return 0;
}

/* Everything that a keeper holds, at its fixed place. */
static int place(int fd, int at) {
    if (fd < 0 || (fd != at && (dup3(fd, at, O_CLOEXEC) < 0 || close(fd) < 0)))
        return -1;
    return 0;
}

static int table_map(void) {
    void *at = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, TABLE_FD, 0);
    shared = at == MAP_FAILED ? NULL : at;
    return shared ? 0 : die("cannot map the table of packs");
}

static int high(int fd) {
    int up = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 16);
    if (fd >= 0)
        close(fd);
    return up;
}

static int open_all(void) {
    int table = high(memfd_create("dsec-packs", MFD_CLOEXEC));
    if (table < 0 || ftruncate(table, sizeof *shared) < 0)
        return die("cannot make the table of packs");
    int listener = high(listen_at(settings.control));
    if (listener < 0)
        return die("cannot listen");
    int fuse = high(mount_packs());
    if (fuse < 0)
        return -1;
    close_range(FUSE_FD, LISTENER_FD, 0);
    if (place(fuse, FUSE_FD) < 0 || place(table, TABLE_FD) < 0 || place(listener, LISTENER_FD) < 0 || table_map() < 0 || greet() < 0) {
        umount2(settings.mount, MNT_DETACH);
        return die("cannot serve");
    }
    return 0;
}

static void group_enter(void) {
    char path[PATH_MAX];
    if (!group)
        return;
    snprintf(path, sizeof path, "%s/cgroup.procs", group);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "0", 1) < 0)
        die("cannot enter the daemons' cgroup");
    if (fd >= 0)
        close(fd);
}

/* The keeper is nobody's child; the starter ends when the mount is served. */
static int detach(void) {
    int ready[2];
    char byte = 0;
    if (pipe2(ready, O_CLOEXEC) < 0)
        return die("cannot make a pipe");
    int pid = fork();
    if (pid < 0)
        return die("cannot fork");
    if (pid > 0) {
        close(ready[1]);
        _exit(read(ready[0], &byte, 1) == 1 ? 0 : 1);
    }
    close(ready[0]);
    setsid();
    group_enter();
    return high(ready[1]);
}

int blobcache_main(int argc, char **argv) {
    arguments = argv;
    if (options_parse(argc, argv) < 0)
        return 2;
    if (resume_pid) {
        if (keeper_prepare() < 0 || table_map() < 0)
            return 1;
        for (int fd = FUSE_FD; fd <= LISTENER_FD; fd++)
            fcntl(fd, F_SETFD, FD_CLOEXEC);
        return keep(resume_pid);
    }
    int ready = detach();
    if (ready < 0 || keeper_prepare() < 0 || open_all() < 0)
        return 1;
    shared->keeper = (int)getpid();
    int worker = worker_start(true);
    readahead_set();
    if (worker < 0 || write(ready, "", 1) < 0)
        return 1;
    close(ready);
    standard_streams();
    return keep(worker);
}
