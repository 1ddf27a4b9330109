/* What a LAUNCH frame asks for. All texts are copies of its own. */
#ifndef DSEC_SPEC_H
#define DSEC_SPEC_H

#include "io.h"

#include <linux/filter.h>

struct list {
    char **items;
    int count;
};

struct blob {
    char *path;
    uint8_t *value;
    size_t length;
    int mode;
};

struct blobs {
    struct blob *items;
    int count;
};

/* Of the last LAUNCH that the launcher saw: mostly the same for all, so one copy serves them. */
struct filter {
    struct sock_filter program[BPF_MAXINSNS];
    size_t count;
};

struct spec {
    char *sandbox_id, *socket_path, *hostname, *scratch, *user, *cwd;
    char *cgroup_v2, *oom_file, *memory_usage_file;
    int64_t generation, uid_base, uid_count, caps, cpus, shm_bytes, memory_bytes, session_limit, cwd_asked, user_asked;
    struct list layers, cgroup_dirs, cgroup_joins, masks, mask_files, mask_folders, readonly, env, sys_shown;
    struct blobs cgroup_writes, files, sysctls;
    const struct sock_filter *seccomp;
    size_t seccomp_count;
    const struct filter *known; /* `seccomp` may point into it; or NULL */
};

/* Keeps the frame's filter, if it has a sound one. */
void filter_note(struct filter *known, const struct frame *f);
int spec_parse(struct spec *s, const struct frame *f, struct trouble *t);
/* The frame that follows a LAUNCH which names no layers. */
int spec_layers(struct spec *s, const struct frame *f, struct trouble *t);
/* Lets go of what only a birth needs, and moves what stays into `room`, as far as it goes: what is scattered over the heap keeps whole
 * pages. */
void spec_settle(struct spec *s, void *room, size_t size);
int list_add(struct list *l, const struct field *f, size_t max);
void list_free(struct list *l);

#endif
