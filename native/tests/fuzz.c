/* Every byte that a peer or a guest can send goes through these parsers. The first byte of the input chooses which. */
#define _GNU_SOURCE
#include "keep.h"
#include "spawn.h"
#include "users.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void free_blobs(struct blobs *bs) {
    for (int i = 0; i < bs->count; i++) {
        free(bs->items[i].path);
        free(bs->items[i].value);
    }
    free(bs->items);
}

static void fuzz_spec(const struct frame *f) {
    struct spec s = {0};
    struct trouble t = {0};
    if (spec_parse(&s, f, &t) < 0)
        assert(t.code && t.message[0]);
    else
        assert(s.sandbox_id && s.uid_base > 0);
    if (spec_layers(&s, f, &t) == 0)
        assert(s.layers.count > 0);
    char *texts[] = {s.sandbox_id, s.socket_path, s.hostname, s.scratch, s.user, s.cwd, s.cgroup_v2, s.oom_file, s.memory_usage_file};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        free(texts[i]);
    struct list *lists[] = {&s.layers,       &s.cgroup_dirs, &s.cgroup_joins, &s.masks,    &s.mask_files,
                            &s.mask_folders, &s.readonly,    &s.env,          &s.sys_shown};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        list_free(lists[i]);
    free_blobs(&s.cgroup_writes);
    free_blobs(&s.files);
    free_blobs(&s.sysctls);
    free((void *)s.seccomp);
}

static void fuzz_request(const struct frame *f) {
    struct request r;
    struct trouble t = {0};
    if (request_parse(&r, f, &t) < 0)
        assert(t.code && t.message[0]);
    else
        assert(r.id && r.output_limit >= 0);
    request_free(&r);
}

static void fuzz_inbox(const uint8_t *data, size_t size) {
    struct inbox in = {.buf = malloc(size ? size : 1), .len = size, .cap = size};
    struct frame f;
    memcpy(in.buf, data, size);
    while (inbox_next(&in, &f) > 0) {
        struct fields fs = fields_of(&f);
        struct field field;
        while (field_next(&fs, &field) == 1) {
            free(field_text(&field, 1000));
            field_number(&field);
        }
    }
    inbox_free(&in);
}

static void fuzz_users(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1);
    memcpy(text, data, size);
    text[size] = 0;
    size_t cut = strcspn(text, "\1");
    const char *groups = text[cut] ? text + cut + 1 : NULL;
    text[cut] = 0;
    static const char *wanted[] = {"root", "user", "1000", "user:staff", "0:0", "99999999999:1", ":", "a:"};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        struct user u;
        struct trouble t = {0};
        if (user_parse(text, groups, wanted[i], 65536, &u, &t) < 0)
            assert(t.code);
        else
            assert(u.uid >= 0 && u.uid < 65536 && u.gid >= 0 && u.gid < 65536 && u.group_count <= 64);
    }
    free(text);
}

/* What is kept must be the stream's own bytes at their offsets, whatever the sizes of writes. */
static void fuzz_keep(const uint8_t *data, size_t size) {
    struct keep k;
    if (size < 2 || keep_open(&k, (size_t)data[0] * 64, (size_t)data[1] * 64) < 0)
        return;
    for (size_t i = 2; i < size; i++) {
        size_t want = (size_t)data[i] * 37 + 1, room;
        while (want) {
            uint8_t *at = keep_space(&k, UINT64_MAX, &room);
            size_t n = want < room ? want : room;
            assert(room > 0);
            for (size_t j = 0; j < n; j++)
                at[j] = (uint8_t)((k.total + j) * 31);
            keep_wrote(&k, n);
            want -= n;
        }
        for (int ended = 0; ended < 2; ended++)
            for (uint64_t at = keep_from(&k, 0, ended); at < k.total;) {
                size_t n;
                const uint8_t *p = keep_at(&k, at, &n);
                assert(n > 0 && at + n <= k.total && p[0] == (uint8_t)(at * 31) && p[n - 1] == (uint8_t)((at + n - 1) * 31));
                at = keep_from(&k, at + n, ended);
            }
    }
    keep_close(&k);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2)
        return 0;
    struct frame f = {.kind = K_EXEC, .length = (uint32_t)(size - 1), .payload = data + 1};
    switch (data[0] % 5) {
    case 0: fuzz_inbox(data + 1, size - 1); break;
    case 1: fuzz_spec(&f); break;
    case 2: fuzz_request(&f); break;
    case 3: fuzz_users(data + 1, size - 1); break;
    default: fuzz_keep(data + 1, size - 1 > 48 ? 48 : size - 1); break;
    }
    return 0;
}
