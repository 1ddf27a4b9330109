/* The floor: what the kernel alone charges for a sandbox, and for a command in a living one.
 *
 *   floor create -n COUNT -c WORKERS [--no-net] [--no-user] LOWER SCRATCH
 *   floor exec -n COUNT LOWER SCRATCH
 *
 * LOWER is a mounted root (the EROFS layer that the sandboxes use), SCRATCH an empty folder. Prints one latency in microseconds a line,
 * then `wall MICROSECONDS` and `failures COUNT`. No cgroup, no seccomp, no channel, no record: what a sandbox takes beyond this is the
 * system's own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <linux/securebits.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANGE_BASE = 0x7f000000, RANGE_COUNT = 65536, PATH_BYTES = 4096 };

static const uint64_t NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWCGROUP;

struct options {
    long count;
    int workers;
    bool net, user;
    const char *lower, *scratch;
};

/* A sandbox being born: the child waits at the gate for the number of its root's descriptor. */
struct birth {
    int gate[2];
    int overlay;
    bool pause;
};

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void warn_once(const char *what) {
    static bool said;
    if (!said) fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
    said = true;
}

static int clone_tree(const char *path, int userns) {
    int tree = (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)userns};
    if (tree >= 0 && userns >= 0 && syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0) {
        warn_once("mount_setattr idmap");
        close(tree);
        return -1;
    }
    return tree;
}

static int set_folder(int fs, const char *key, int tree, const char *name) {
    int fd = openat(tree, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int result = fd < 0 ? -1 : (int)syscall(SYS_fsconfig, fs, FSCONFIG_SET_FD, key, NULL, fd);
    if (fd >= 0) close(fd);
    return result;
}

/* The way that the sandboxes' own roots are composed: idmapped clones of layer and upper, overlay by descriptors. With `userns` < 0
 * neither is idmapped. overlayfs keeps the credentials of FSCONFIG_CMD_CREATE, so they must be the range's first id. */
static int compose(const char *lower, const char *folder, int userns) {
    int result = -1;
    int below = clone_tree(lower, userns), above = clone_tree(folder, userns);
    int fs = (int)syscall(SYS_fsopen, "overlay", FSOPEN_CLOEXEC);
    if (below < 0 || above < 0 || fs < 0) goto out;
    if (set_folder(fs, "lowerdir+", below, ".") < 0 || set_folder(fs, "upperdir", above, "upper") < 0 ||
        set_folder(fs, "workdir", above, "work") < 0)
        goto out;
    if (userns >= 0) {
        setfsgid(RANGE_BASE);
        setfsuid(RANGE_BASE);
    }
    if (syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0) result = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, 0);
    if (userns >= 0) {
        setfsuid(0);
        setfsgid(0);
    }
out:
    if (result < 0) warn_once("overlay");
    if (below >= 0) close(below);
    if (above >= 0) close(above);
    if (fs >= 0) close(fs);
    return result;
}

static int write_map(pid_t pid, const char *name) {
    char path[64], line[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int length = snprintf(line, sizeof line, "0 %d %d\n", RANGE_BASE, RANGE_COUNT);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int result = fd >= 0 && write(fd, line, (size_t)length) == length ? 0 : -1;
    if (fd >= 0) close(fd);
    return result;
}

/* The root is attached on /tmp, which everybody may reach: the range's first id need not be able to walk to the scratch folder.
 * /proc is mounted while the old root is still there: a user namespace may mount one only where one is already visible. */
static void be_sandbox(const struct birth *birth) {
    int overlay;
    if (read(birth->gate[0], &overlay, sizeof overlay) != sizeof overlay) _exit(101);
    if (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0) _exit(102);
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) _exit(103);
    if (syscall(SYS_move_mount, overlay, "", AT_FDCWD, "/tmp", MOVE_MOUNT_F_EMPTY_PATH) < 0) _exit(104);
    if (chdir("/tmp") < 0 || syscall(SYS_pivot_root, ".", ".") < 0) _exit(105);
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) _exit(106);
    if (umount2(".", MNT_DETACH) < 0 || chdir("/") < 0) _exit(107);
    if (mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") < 0) _exit(108);
    while (birth->pause) pause();
    char *argv[] = {"true", NULL}, *envp[] = {NULL};
    execve("/usr/bin/true", argv, envp);
    _exit(109);
}

/* Clones, maps, composes and lets go. Returns the pid or -1; CLONE_FILES saves handing the overlay's descriptor over. */
static pid_t bear(const struct options *o, struct birth *birth, const char *folder) {
    struct clone_args args = {.flags = NAMESPACES | CLONE_FILES, .exit_signal = SIGCHLD};
    args.flags |= (o->net ? CLONE_NEWNET : 0) | (o->user ? CLONE_NEWUSER : 0);
    birth->overlay = -1;
    if (pipe2(birth->gate, O_CLOEXEC) < 0) return -1;
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    if (pid == 0) be_sandbox(birth);
    if (pid < 0) {
        warn_once("clone3");
        goto out;
    }
    char path[64];
    int userns = -1;
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    if (o->user && (write_map(pid, "uid_map") < 0 || write_map(pid, "gid_map") < 0 || (userns = open(path, O_RDONLY | O_CLOEXEC)) < 0))
        warn_once("uid_map");
    else
        birth->overlay = compose(o->lower, folder, userns);
    if (userns >= 0) close(userns);
    if (birth->overlay < 0 || write(birth->gate[1], &birth->overlay, sizeof birth->overlay) != sizeof birth->overlay) kill(pid, SIGKILL);
    return pid;
out:
    close(birth->gate[0]);
    close(birth->gate[1]);
    return pid;
}

static void let_go(struct birth *birth) {
    close(birth->gate[0]);
    close(birth->gate[1]);
    if (birth->overlay >= 0) close(birth->overlay);
}

static void make_folder(char *folder, const char *scratch, int worker, long index) {
    char path[PATH_BYTES + 16];
    snprintf(folder, PATH_BYTES, "%s/%d-%ld", scratch, worker, index);
    mkdir(folder, 0755);
    snprintf(path, sizeof path, "%s/upper", folder);
    mkdir(path, 0755);
    snprintf(path, sizeof path, "%s/work", folder);
    mkdir(path, 0755);
}

static void remove_folder(const char *folder) {
    static const char *const names[] = {"/work/work", "/work", "/upper", ""};
    char path[PATH_BYTES + 16];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s%s", folder, names[i]);
        rmdir(path);
    }
}

static int wait_for(pid_t pid) {
    int status;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) return -1;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        static bool said;
        if (!said) fprintf(stderr, "floor: child ended with status 0x%x\n", status);
        said = true;
        return -1;
    }
    return 0;
}

static void create_many(const struct options *o, int worker, double *samples) {
    char folder[PATH_BYTES];
    for (long i = worker; i < o->count; i += o->workers) {
        struct birth birth = {.pause = false};
        double start = now_us();
        make_folder(folder, o->scratch, worker, i);
        pid_t pid = bear(o, &birth, folder);
        bool good = pid > 0 && wait_for(pid) == 0;
        samples[i] = good ? now_us() - start : -1;
        if (pid > 0) let_go(&birth);
        remove_folder(folder);
    }
}

/* One command the way a session enters a sandbox: setns by pidfd, then a child inside the pid namespace that execs. */
static int run_inside(int pidfd, uint64_t namespaces) {
    pid_t outer = fork();
    if (outer == 0) {
        if (setns(pidfd, (int)namespaces) < 0 || setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0) _exit(110);
        pid_t inner = vfork();
        if (inner == 0) {
            char *argv[] = {"true", NULL}, *envp[] = {NULL};
            execve("/usr/bin/true", argv, envp);
            _exit(109);
        }
        _exit(inner > 0 && wait_for(inner) == 0 ? 0 : 111);
    }
    return outer > 0 ? wait_for(outer) : -1;
}

static void exec_many(const struct options *o, double *samples) {
    char folder[PATH_BYTES];
    struct birth birth = {.pause = true};
    make_folder(folder, o->scratch, 0, 0);
    pid_t pid = bear(o, &birth, folder);
    int pidfd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    uint64_t namespaces = NAMESPACES | CLONE_NEWNET | CLONE_NEWUSER;
    /* The first commands may meet a root that is not pivoted yet: they fail and are tried again. */
    for (int tries = 0; pidfd >= 0 && tries < 1000 && run_inside(pidfd, namespaces) < 0; tries++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    for (long i = 0; pidfd >= 0 && i < o->count; i++) {
        double start = now_us();
        samples[i] = run_inside(pidfd, namespaces) == 0 ? now_us() - start : -1;
    }
    if (pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        let_go(&birth);
    }
    remove_folder(folder);
}

static bool parse(int argc, char **argv, struct options *o) {
    static const struct option names[] = {{"no-net", no_argument, NULL, 'N'}, {"no-user", no_argument, NULL, 'U'}, {0}};
    *o = (struct options){.count = 100, .workers = 1, .net = true, .user = true};
    for (int c; (c = getopt_long(argc, argv, "n:c:", names, NULL)) != -1;) {
        if (c == 'n')
            o->count = atol(optarg);
        else if (c == 'c')
            o->workers = atoi(optarg);
        else if (c == 'N')
            o->net = false;
        else if (c == 'U')
            o->user = false;
        else
            return false;
    }
    if (argc - optind != 3 || o->count < 1 || o->workers < 1) return false;
    o->lower = argv[optind + 1];
    o->scratch = argv[optind + 2];
    return true;
}

int main(int argc, char **argv) {
    struct options o;
    if (!parse(argc, argv, &o)) {
        fprintf(stderr, "usage: floor [-n COUNT] [-c WORKERS] [--no-net] [--no-user] create|exec LOWER SCRATCH\n");
        return 2;
    }
    size_t bytes = (size_t)o.count * sizeof(double);
    double *samples = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (samples == MAP_FAILED || prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) < 0) {
        fprintf(stderr, "floor: set-up: %s\n", strerror(errno));
        return 1;
    }
    double start = now_us();
    if (strcmp(argv[optind], "exec") == 0) {
        exec_many(&o, samples);
    } else {
        for (int w = 0; w < o.workers; w++)
            if (fork() == 0) {
                create_many(&o, w, samples);
                _exit(0);
            }
        while (wait(NULL) > 0)
            ;
    }
    double wall = now_us() - start;
    long failures = 0;
    for (long i = 0; i < o.count; i++) {
        if (samples[i] > 0)
            printf("%.1f\n", samples[i]);
        else
            failures++;
    }
    printf("wall %.1f\nfailures %ld\n", wall, failures);
    return 0;
}
