/* One sandbox: what aether knows of it. Host paths are reached through host_root, since aether lives in an empty mount namespace. */
#ifndef DSEC_AETHER_H
#define DSEC_AETHER_H

#include "spec.h"
#include "users.h"

#include <sys/types.h>

#define MAX_JOINS 16

#define AHEAD 2 /* some 200 KB of the kernel's memory each */

/* Namespaces that nothing is in yet; -1 each where there are none. */
struct ahead {
    int net, ipc;
};

/* Made once by the launcher, inherited by every aether. */
struct host {
    int root;      /* O_PATH of / */
    int proc;      /* O_PATH of /proc */
    int empty_ns;  /* a mount namespace with only a tmpfs of empty mount points */
    char *cpuinfo; /* /proc/cpuinfo as read at start */
    char *argv_at; /* where the kernel reads the command line from */
    size_t argv_len;
    char title[32];
    bool all_cpus; /* we may run on every processor that is online */
    bool burst;    /* this launch is one of many in a row */
    int64_t last_launch;
    struct ahead ahead[AHEAD];
    int ahead_count;
    struct filter *filter;
};

struct sandbox {
    struct spec spec;
    const struct host *host;
    int birth, listener;
    bool bound;
    int init_pid, init_pidfd;
    int userns;
    int root;    /* O_PATH of the sandbox's / */
    int devpts;  /* its devpts mount */
    int null;    /* its /dev/null */
    int meminfo; /* write end of what /proc/meminfo shows, or -1 */
    int cgroups; /* O_PATH of the folder in which sessions make theirs, or -1 */
    int oom;     /* read end of OOM_FILE, or -1 */
    int usage;   /* read end of MEMORY_USAGE_FILE, or -1 */
    int joins[MAX_JOINS];
    int join_count;
    struct ahead ahead; /* for its init */
    /* The stack of the process that makes the user namespace: one system call deep, and on a page that is in use anyway. */
    char carrier[1024] __attribute__((aligned(16)));
};

/* openat below the host's root, for an absolute host path. */
int host_open(const struct host *h, const char *path, int flags);

/* cgroups.c */
int cgroups_make_first(struct sandbox *s, struct trouble *t);
int cgroups_make_next(struct sandbox *s, int *at, struct trouble *t);
int cgroups_join(const struct sandbox *s, struct trouble *t);
/* Removes what was made; 0 when nothing is left, else the number of folders that stay. */
int cgroups_remove(struct sandbox *s);
int64_t oom_kills(const struct sandbox *s);
/* The group of a chronus and what it runs, by chronus' pid. -1 with errno. */
int session_group_make(const struct sandbox *s, int pid);
int session_group_kill(int group);
/* SIGTERM or so to each process in the group but `except`; how many. */
int session_group_signal(int group, int signum, int except);
bool session_group_empty(int group);
void session_group_remove(const struct sandbox *s, int pid);

/* rootfs.c */
int userns_make(struct sandbox *s, struct trouble *t);
int overlay_make(const struct sandbox *s, struct trouble *t);
int shared_faces_make(const struct sandbox *s, struct trouble *t);
struct devices {
    int pts, null, meminfo, proc;
};
/* In the new init: what of the root needs no overlay; then the root, and the switch to it. */
int root_prepare(struct sandbox *s, struct devices *made, struct trouble *t);
int root_assemble(const struct sandbox *s, int overlay, const struct devices *made, struct trouble *t);
void meminfo_refresh(const struct sandbox *s);

/* ahead.c */
bool ahead_full(const struct host *h);
int ahead_make(struct host *h);
struct ahead ahead_take(struct host *h);
void ahead_close(struct ahead *one);
void ahead_close_all(struct host *h);
int ahead_enter(const struct ahead *one);

/* bare.c */
/* Reaps whatever is left to it, for ever. All signals are blocked and no descriptor is open. */
_Noreturn void init_loop(void);

/* lean.c */
/* Runs it on a stack beside our data, with all above the heap unmapped, and exits: 0, or 1 where it returns less than 0. No time() or
 * clock_gettime() of the C library from then on, and nothing kept that points into the environment or the arguments. */
_Noreturn void lean_run(struct host *h, int (*run)(struct host *));

/* born.c */
int sandbox_start(struct sandbox *s, struct trouble *t);
void sandbox_undo(struct sandbox *s);
/* As ps shows it; `title` is cut to the room that the launcher's own command line takes. */
void rename_process(const struct host *h, const char *name, const char *title);

/* aether.c */
_Noreturn void aether_main(const struct host *h, struct inbox *in, struct frame *launch, int birth, struct ahead ahead);

/* enter.c */
int user_find(const struct sandbox *s, const char *name, struct user *u, struct trouble *t);
/* In a process of ours that becomes the sandbox's: its namespaces but the pid one, its user, its capabilities. */
int enter_sandbox(const struct sandbox *s, const struct user *u, bool filter, struct trouble *t);
int namespace_fd(const struct host *h, int pid, const char *name);

/* What a forked chronus is. None returns; `conn` is the connection whose first frame is still unread. chronus_main serves sessions one
 * after the other, beginning with `conn` and `id` where there is one, until `ctl`, its line to aether, ends. */
_Noreturn void chronus_main(struct sandbox *s, int ctl, int conn, const char *id); /* chronus.c */
_Noreturn void chronus_files(struct sandbox *s, int conn);                         /* files.c */
_Noreturn void chronus_connect(struct sandbox *s, int conn);                       /* connect.c */

/* On the ctl line, chronus to aether: what happened to the session; FORGOTTEN: ready for another, LEAVING: it exits. Aether to chronus,
 * each with a connection: HANDED for its session, or NEW and an id for the next one. */
enum ctl_kind { CTL_STARTED = 1, CTL_ENDED = 2, CTL_FORGOTTEN = 3, CTL_LEAVING = 4 };
enum { CTL_HANDED = 'h', CTL_NEW = 'n' };
struct ctl_note {
    int64_t kind, pid, started_real, background, is_shell;
};

#endif
