#define _GNU_SOURCE
#include "spec.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_MAX 65536

int list_add(struct list *l, const struct field *f, size_t max) {
    char **items = realloc(l->items, sizeof *items * (size_t)(l->count + 2));
    if (!items)
        return -1;
    l->items = items;
    char *text = field_text(f, max);
    if (!text)
        return -1;
    items[l->count++] = text;
    items[l->count] = NULL;
    return 0;
}

void list_free(struct list *l) {
    for (int i = 0; i < l->count; i++)
        free(l->items[i]);
    free(l->items);
    *l = (struct list){0};
}

/* "path NUL value" or, with_mode, "path NUL mode NUL value". The value keeps its NULs. */
static int blob_add(struct blobs *bs, const struct field *f, bool with_mode) {
    const uint8_t *at = f->value, *end = f->value + f->length;
    const uint8_t *cut = memchr(at, 0, (size_t)(end - at));
    if (!cut || cut == at)
        return -1;
    struct blob b = {.mode = 0644};
    b.path = strndup((const char *)at, (size_t)(cut - at));
    at = cut + 1;
    if (with_mode) {
        cut = memchr(at, 0, (size_t)(end - at));
        if (!cut)
            return free(b.path), -1;
        b.mode = (int)strtol((const char *)at, NULL, 8) & 07777;
        at = cut + 1;
    }
    b.length = (size_t)(end - at);
    b.value = malloc(b.length + 1);
    struct blob *items = realloc(bs->items, sizeof *items * (size_t)(bs->count + 1));
    if (!b.value || !b.path || !items)
        return free(b.path), free(b.value), -1;
    memcpy(b.value, at, b.length);
    b.value[b.length] = 0;
    bs->items = items;
    items[bs->count++] = b;
    return 0;
}

static char **text_slot(struct spec *s, int tag) {
    switch (tag) {
    case T_SANDBOX_ID: return &s->sandbox_id;
    case T_SOCKET_PATH: return &s->socket_path;
    case T_HOSTNAME: return &s->hostname;
    case T_SCRATCH: return &s->scratch;
    case T_USER: return &s->user;
    case T_CWD: return &s->cwd;
    case T_CGROUP_V2: return &s->cgroup_v2;
    case T_OOM_FILE: return &s->oom_file;
    case T_MEMORY_USAGE_FILE: return &s->memory_usage_file;
    default: return NULL;
    }
}

static int64_t *number_slot(struct spec *s, int tag) {
    switch (tag) {
    case T_GENERATION: return &s->generation;
    case T_UID_BASE: return &s->uid_base;
    case T_UID_COUNT: return &s->uid_count;
    case T_CAPS: return &s->caps;
    case T_CPUS: return &s->cpus;
    case T_SHM_BYTES: return &s->shm_bytes;
    case T_MEMORY_BYTES: return &s->memory_bytes;
    case T_SESSION_LIMIT: return &s->session_limit;
    case T_CWD_ASKED: return &s->cwd_asked;
    case T_USER_ASKED: return &s->user_asked;
    default: return NULL;
    }
}

static struct list *list_slot(struct spec *s, int tag) {
    switch (tag) {
    case T_LAYER: return &s->layers;
    case T_CGROUP_DIR: return &s->cgroup_dirs;
    case T_CGROUP_JOIN: return &s->cgroup_joins;
    case T_MASK: return &s->masks;
    case T_MASK_FILE: return &s->mask_files;
    case T_MASK_FOLDER: return &s->mask_folders;
    case T_READONLY: return &s->readonly;
    case T_ENV: return &s->env;
    case T_SYS_SHOWN: return &s->sys_shown;
    default: return NULL;
    }
}

static bool is_filter(const struct field *f) {
    return f->length > 0 && f->length % sizeof(struct sock_filter) == 0 && f->length / sizeof(struct sock_filter) <= BPF_MAXINSNS;
}

static bool is_known(const struct filter *known, const struct field *f) {
    return known && known->count * sizeof(struct sock_filter) == f->length && memcmp(known->program, f->value, f->length) == 0;
}

void filter_note(struct filter *known, const struct frame *f) {
    struct fields fs = fields_of(f);
    struct field field;
    while (field_next(&fs, &field) == 1)
        if (field.tag == T_SECCOMP && is_filter(&field) && !is_known(known, &field)) {
            memcpy(known->program, field.value, field.length);
            known->count = field.length / sizeof(struct sock_filter);
        }
}

static int seccomp_set(struct spec *s, const struct field *f) {
    if (!is_filter(f) || s->seccomp)
        return -1;
    s->seccomp_count = f->length / sizeof(struct sock_filter);
    if (is_known(s->known, f)) {
        s->seccomp = s->known->program;
        return 0;
    }
    struct sock_filter *copy = malloc(f->length);
    if (!copy)
        return -1;
    memcpy(copy, f->value, f->length);
    s->seccomp = copy;
    return 0;
}

static int spec_field(struct spec *s, const struct field *f) {
    char **text = text_slot(s, f->tag);
    int64_t *number = number_slot(s, f->tag);
    struct list *list = list_slot(s, f->tag);
    if (text)
        return *text ? -1 : (*text = field_text(f, TEXT_MAX)) ? 0 : -1;
    if (number)
        return field_is_number(f) ? (*number = field_number(f), 0) : -1;
    if (list)
        return list_add(list, f, TEXT_MAX);
    switch (f->tag) {
    case T_CGROUP_WRITE: return blob_add(&s->cgroup_writes, f, false);
    case T_SYSCTL: return blob_add(&s->sysctls, f, false);
    case T_FILE: return blob_add(&s->files, f, true);
    case T_SECCOMP: return seccomp_set(s, f);
    default: return -1; /* of an edge that is newer than we are: what it wants and we leave out may be a wall */
    }
}

int spec_parse(struct spec *s, const struct frame *f, struct trouble *t) {
    struct fields fs = fields_of(f);
    struct field field;
    int n;
    while ((n = field_next(&fs, &field)) == 1)
        if (spec_field(s, &field) < 0)
            return fail(t, "invalid_argument", NULL, 0, "LAUNCH field %d is malformed", field.tag);
    if (n < 0)
        return fail(t, "invalid_argument", NULL, 0, "LAUNCH frame is malformed");
    if (!s->sandbox_id || !s->socket_path || !s->scratch || s->uid_base <= 0 || s->uid_count < 1)
        return fail(t, "invalid_argument", NULL, 0, "LAUNCH lacks SANDBOX_ID, SOCKET_PATH, SCRATCH or the uid range");
    if ((s->cwd_asked && !s->cwd) || (s->user_asked && !s->user))
        return fail(t, "invalid_argument", NULL, 0, "LAUNCH asks for a CWD or a USER that it does not name");
    if (s->session_limit <= 0)
        s->session_limit = 1024;
    return 0;
}

int spec_layers(struct spec *s, const struct frame *f, struct trouble *t) {
    struct fields fs = fields_of(f);
    struct field field;
    int n;
    while ((n = field_next(&fs, &field)) == 1)
        if (field.tag == T_LAYER && list_add(&s->layers, &field, TEXT_MAX) < 0)
            return fail(t, "invalid_argument", NULL, 0, "a LAYER is malformed");
    return n < 0 || !s->layers.count ? fail(t, "invalid_argument", NULL, 0, "LAYERS is malformed or has none") : 0;
}

static void blobs_free(struct blobs *bs) {
    for (int i = 0; i < bs->count; i++) {
        free(bs->items[i].path);
        free(bs->items[i].value);
    }
    free(bs->items);
    *bs = (struct blobs){0};
}

struct room {
    char *at, *end;
};

/* What does not fit stays where it is. */
static void *moved(struct room *r, void *from, size_t size, size_t align) {
    char *at = (char *)(((uintptr_t)r->at + align - 1) & ~(uintptr_t)(align - 1));
    if (!from || at > r->end || size > (size_t)(r->end - at))
        return from;
    memcpy(at, from, size);
    free(from);
    r->at = at + size;
    return at;
}

static char *text_moved(struct room *r, char *text) {
    return text ? moved(r, text, strlen(text) + 1, 1) : NULL;
}

static void list_move(struct room *r, struct list *l) {
    for (int i = 0; i < l->count; i++)
        l->items[i] = text_moved(r, l->items[i]);
    l->items = moved(r, l->items, sizeof *l->items * (size_t)(l->count + 1), _Alignof(char *));
}

void spec_settle(struct spec *s, void *room, size_t size) {
    struct list *done[] = {&s->layers, &s->masks, &s->mask_files, &s->mask_folders, &s->readonly, &s->sys_shown, &s->cgroup_joins};
    struct blobs *blobs[] = {&s->cgroup_writes, &s->files, &s->sysctls};
    char **texts[] = {&s->hostname, &s->scratch, &s->oom_file, &s->memory_usage_file};
    char **kept[] = {&s->sandbox_id, &s->socket_path, &s->user, &s->cwd, &s->cgroup_v2};
    struct room r = {room, (char *)room + size};
    for (size_t i = 0; i < sizeof done / sizeof *done; i++)
        list_free(done[i]);
    for (size_t i = 0; i < sizeof blobs / sizeof *blobs; i++)
        blobs_free(blobs[i]);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        free(*texts[i]);
        *texts[i] = NULL;
    }
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        *kept[i] = text_moved(&r, *kept[i]);
    list_move(&r, &s->cgroup_dirs);
    list_move(&r, &s->env);
}
