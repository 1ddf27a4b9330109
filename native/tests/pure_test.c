/* Directed tests of the pure parts; built with sanitizers. */
#define _GNU_SOURCE
#include "keep.h"
#include "spawn.h"
#include "spec.h"
#include "users.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void frames_round_trip(void) {
    struct out o = {0};
    out_begin(&o, K_EXEC, 0);
    out_text(&o, T_SESSION_ID, "op-1");
    out_number(&o, T_TIMEOUT_NS, -5);
    size_t at = out_nest(&o, T_ENTRY);
    out_text(&o, T_PATH, "/a");
    out_unnest(&o, at);
    out_end(&o);
    struct frame f;
    for (size_t n = 0; n < o.len; n++)
        assert(frame_parse(o.buf, n, &f) == 0);
    assert(frame_parse(o.buf, o.len, &f) == (int)o.len && f.kind == K_EXEC);
    struct fields fs = fields_of(&f), inner;
    struct field field;
    assert(field_next(&fs, &field) == 1 && field.tag == T_SESSION_ID && field.length == 4);
    assert(field_next(&fs, &field) == 1 && field_number(&field) == -5);
    assert(field_next(&fs, &field) == 1 && field.tag == T_ENTRY);
    inner = (struct fields){field.value, field.value + field.length};
    assert(field_next(&inner, &field) == 1 && field.tag == T_PATH && field_next(&inner, &field) == 0);
    assert(field_next(&fs, &field) == 0);
    o.buf[0] = 9;
    assert(frame_parse(o.buf, o.len, &f) == -1);
    out_free(&o);
}

static void oversized_frames_are_malformed(void) {
    uint8_t header[8] = {1, K_EXEC, 0, 0, 1, 0, 0x40, 0}, data[8] = {1, K_DATA, 1, 0, 9, 0, 0x10, 0};
    struct frame f;
    assert(frame_parse(header, 8, &f) == -1);
    assert(frame_parse(data, 8, &f) == -1);
}

static void texts_with_nul_are_refused(void) {
    struct field f = {.tag = T_CWD, .length = 3, .value = (const uint8_t *)"a\0b"};
    assert(field_text(&f, 10) == NULL);
    f = (struct field){.tag = T_CWD, .length = 3, .value = (const uint8_t *)"abc"};
    assert(field_text(&f, 2) == NULL);
}

static void empty_argv_is_named(void) {
    struct out o = {0};
    struct frame f;
    struct request r;
    struct trouble t = {0};
    out_begin(&o, K_EXEC, 0);
    out_text(&o, T_SESSION_ID, "x");
    out_end(&o);
    assert(frame_parse(o.buf, o.len, &f) > 0 && request_parse(&r, &f, &t) == -1 && strcmp(t.field, "argv") == 0);
    free(r.id);
    out_free(&o);
}

static void head_and_tail_are_kept(void) {
    struct keep k;
    size_t room, n;
    assert(keep_open(&k, 20, 0) == 0);
    for (int i = 0; i < 100000; i++) {
        uint8_t *at = keep_space(&k, UINT64_MAX, &room);
        *at = (uint8_t)i;
        keep_wrote(&k, 1);
    }
    assert(keep_from(&k, 0, true) == 0 && keep_at(&k, 0, &n)[9] == 9 && n == 10);
    assert(keep_from(&k, 10, true) == 100000 - 10);
    assert(keep_at(&k, 99999, &n)[0] == (uint8_t)99999 && n == 1);
    keep_close(&k);
}

static void live_reader_holds_the_ring(void) {
    struct keep k;
    size_t room;
    assert(keep_open(&k, 0, 4096) == 0);
    keep_space(&k, 0, &room);
    assert(room == 4096);
    keep_wrote(&k, 4096);
    keep_space(&k, 0, &room);
    assert(room == 0);
    keep_space(&k, 100, &room);
    assert(room == 100);
    keep_close(&k);
}

static void users_are_found(void) {
    const char *passwd = "root:x:0:0:root:/root:/bin/bash\nbad line\nuser:x:1000:1001:,,,:/home/user:/bin/sh\nhuge:x:70000:1::/:\n";
    const char *groups = "root:x:0:\nstaff:x:50:user,root\nwide:x:70001:user\n";
    struct user u;
    struct trouble t = {0};
    assert(user_parse(passwd, groups, "user", 65536, &u, &t) == 0);
    assert(u.uid == 1000 && u.gid == 1001 && strcmp(u.home, "/home/user") == 0 && strcmp(u.shell, "/bin/sh") == 0);
    assert(u.group_count == 2 && u.groups[0] == 50 && u.groups[1] == 1001);
    assert(user_parse(passwd, groups, "user:staff", 65536, &u, &t) == 0 && u.gid == 50 && u.group_count == 0);
    assert(user_parse(passwd, groups, "1000", 65536, &u, &t) == 0 && strcmp(u.name, "user") == 0);
    assert(user_parse(passwd, groups, "4242:7", 65536, &u, &t) == 0 && u.uid == 4242 && u.gid == 7 && strcmp(u.home, "/") == 0);
    assert(user_parse(passwd, groups, "huge", 65536, &u, &t) == -1 && strcmp(t.field, "user") == 0);
    assert(user_parse(passwd, groups, "nobody", 65536, &u, &t) == -1);
    assert(user_parse(passwd, groups, "user:none", 65536, &u, &t) == -1);
    assert(user_parse(NULL, NULL, "root", 65536, &u, &t) == 0 && u.uid == 0 && strcmp(u.home, "/root") == 0);
    assert(user_parse(NULL, NULL, "", 65536, &u, &t) == -1);
}

static void launch_of(struct out *o, struct frame *f, const struct sock_filter *filter, size_t size) {
    out_begin(o, K_LAUNCH, 0);
    out_text(o, T_SANDBOX_ID, "sb-1");
    out_text(o, T_SOCKET_PATH, "/s");
    out_text(o, T_SCRATCH, "/scratch");
    out_text(o, T_HOSTNAME, "h");
    out_number(o, T_UID_BASE, 65536);
    out_number(o, T_UID_COUNT, 65536);
    out_text(o, T_LAYER, "/layer");
    out_text(o, T_ENV, "A=1");
    out_text(o, T_ENV, "B=2");
    out_text(o, T_CGROUP_DIR, "/g/a");
    out_text(o, T_CGROUP_DIR, "/g/b");
    out_bytes(o, T_SECCOMP, filter, size);
    out_end(o);
    assert(frame_parse(o->buf, o->len, f) > 0);
}

/* With any room, too little included: what stays is there, in it as far as it goes, and the rest is freed once (the sanitizer looks). */
static void a_settled_spec_keeps_what_outlives_the_birth(void) {
    static const struct sock_filter filter[2] = {{.k = 1}, {.k = 2}};
    for (size_t size = 0; size < 256; size++) {
        char *room = malloc(size + 1);
        struct out o = {0};
        struct frame f;
        struct spec s = {0};
        struct trouble t = {0};
        launch_of(&o, &f, filter, sizeof filter);
        assert(spec_parse(&s, &f, &t) == 0);
        out_free(&o);
        spec_settle(&s, room, size);
        assert(!strcmp(s.sandbox_id, "sb-1") && !strcmp(s.socket_path, "/s") && !s.user && !s.hostname && !s.scratch);
        assert(s.env.count == 2 && !strcmp(s.env.items[0], "A=1") && !strcmp(s.env.items[1], "B=2") && !s.env.items[2]);
        assert(s.cgroup_dirs.count == 2 && !strcmp(s.cgroup_dirs.items[1], "/g/b") && !s.layers.count);
        assert(s.seccomp_count == 2 && s.seccomp[1].k == 2);
        char *kept[] = {s.sandbox_id,
                        s.socket_path,
                        s.env.items[0],
                        s.env.items[1],
                        s.cgroup_dirs.items[0],
                        s.cgroup_dirs.items[1],
                        (char *)s.cgroup_dirs.items,
                        (char *)s.env.items};
        size_t inside = 0;
        for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
            if (kept[i] >= room && kept[i] < room + size)
                inside++;
            else
                free(kept[i]);
        assert(size < 200 || inside == sizeof kept / sizeof *kept);
        free((void *)s.seccomp);
        free(room);
    }
}

static void a_filter_that_is_known_is_not_copied(void) {
    static struct filter known;
    static const struct sock_filter one[2] = {{.k = 1}, {.k = 2}}, other[2] = {{.k = 1}, {.k = 3}};
    for (int i = 0; i < 2; i++) {
        struct out o = {0};
        struct frame f;
        struct spec s = {.known = &known};
        struct trouble t = {0};
        launch_of(&o, &f, i ? other : one, sizeof one);
        if (i == 0)
            filter_note(&known, &f);
        assert(known.count == 2 && spec_parse(&s, &f, &t) == 0);
        assert((s.seccomp == known.program) == (i == 0) && s.seccomp[1].k == (i ? 3U : 2U));
        if (i)
            free((void *)s.seccomp);
        s.seccomp = NULL;
        spec_settle(&s, NULL, 0);
        char *kept[] = {s.sandbox_id, s.socket_path};
        for (size_t k = 0; k < sizeof kept / sizeof *kept; k++)
            free(kept[k]);
        list_free(&s.env);
        list_free(&s.cgroup_dirs);
        out_free(&o);
    }
}

int main(void) {
    frames_round_trip();
    oversized_frames_are_malformed();
    texts_with_nul_are_refused();
    empty_argv_is_named();
    head_and_tail_are_kept();
    live_reader_holds_the_ring();
    users_are_found();
    a_settled_spec_keeps_what_outlives_the_birth();
    a_filter_that_is_known_is_not_copied();
    puts("native: 9 passed");
    return 0;
}
