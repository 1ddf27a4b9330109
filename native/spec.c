#define _GNU_SOURCE
#include "spec.h"

#include <errno.h>
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
    default: return NULL;
    }
}

static struct list *list_slot(struct spec *s, int tag) {
    switch (tag) {
    case T_LAYER: return &s->layers;
    case T_CGROUP_DIR: return &s->cgroup_dirs;
    case T_CGROUP_JOIN: return &s->cgroup_joins;
    case T_MASK: return &s->masks;
    case T_READONLY: return &s->readonly;
    case T_ENV: return &s->env;
    case T_SYS_SHOWN: return &s->sys_shown;
    default: return NULL;
    }
}

static int seccomp_set(struct spec *s, const struct field *f) {
    if (f->length == 0 || f->length % sizeof(struct sock_filter) || f->length / sizeof(struct sock_filter) > BPF_MAXINSNS || s->seccomp)
        return -1;
    s->seccomp = malloc(f->length);
    if (!s->seccomp)
        return -1;
    memcpy(s->seccomp, f->value, f->length);
    s->seccomp_count = f->length / sizeof(struct sock_filter);
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
    default: return 0;
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

void spec_settle(struct spec *s) {
    struct list *lists[] = {&s->layers, &s->masks, &s->readonly, &s->sys_shown};
    struct blobs *blobs[] = {&s->cgroup_writes, &s->files, &s->sysctls};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        list_free(lists[i]);
    for (size_t i = 0; i < sizeof blobs / sizeof *blobs; i++)
        blobs_free(blobs[i]);
}
