#include "frame.h"

#include <stdlib.h>
#include <string.h>

static uint16_t get16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}
static uint32_t get32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static void put16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}
static void put32(uint8_t *p, uint32_t v) {
    put16(p, (uint16_t)v);
    put16(p + 2, (uint16_t)(v >> 16));
}

int frame_parse(const uint8_t *buf, size_t len, struct frame *out) {
    if (len < FRAME_HEADER)
        return 0;
    uint32_t length = get32(buf + 4);
    if (buf[0] != FRAME_VERSION || length > FRAME_MAX || (buf[1] == K_DATA && length > DATA_MAX + 8))
        return -1;
    if (len < FRAME_HEADER + (size_t)length)
        return 0;
    out->kind = buf[1];
    out->stream = get16(buf + 2);
    out->length = length;
    out->payload = buf + FRAME_HEADER;
    return (int)(FRAME_HEADER + length);
}

struct fields fields_of(const struct frame *f) {
    return (struct fields){f->payload, f->payload + f->length};
}

int field_next(struct fields *fs, struct field *out) {
    size_t left = (size_t)(fs->end - fs->at);
    if (left == 0)
        return 0;
    if (left < 8)
        return -1;
    uint32_t length = get32(fs->at + 4);
    if (length > left - 8)
        return -1;
    out->tag = get16(fs->at);
    out->length = length;
    out->value = fs->at + 8;
    fs->at += 8 + (size_t)length;
    return 1;
}

bool field_is_number(const struct field *f) {
    return f->length == 8;
}

int64_t field_number(const struct field *f) {
    if (f->length != 8)
        return 0;
    return (int64_t)((uint64_t)get32(f->value) | (uint64_t)get32(f->value + 4) << 32);
}

char *field_text(const struct field *f, size_t max) {
    if (f->length > max || memchr(f->value, 0, f->length))
        return NULL;
    char *s = malloc((size_t)f->length + 1);
    if (!s)
        return NULL;
    memcpy(s, f->value, f->length);
    s[f->length] = 0;
    return s;
}

static uint8_t *out_room(struct out *o, size_t n) {
    if (o->failed)
        return NULL;
    if (o->len + n > o->cap) {
        size_t cap = o->cap ? o->cap : 512;
        while (cap < o->len + n)
            cap *= 2;
        uint8_t *buf = realloc(o->buf, cap);
        if (!buf) {
            o->failed = true;
            return NULL;
        }
        o->buf = buf;
        o->cap = cap;
    }
    uint8_t *p = o->buf + o->len;
    o->len += n;
    return p;
}

void out_begin(struct out *o, enum kind kind, uint16_t stream) {
    o->frame_at = o->len;
    uint8_t *p = out_room(o, FRAME_HEADER);
    if (!p)
        return;
    p[0] = FRAME_VERSION;
    p[1] = (uint8_t)kind;
    put16(p + 2, stream);
    put32(p + 4, 0);
}

void out_raw(struct out *o, const void *value, size_t len) {
    uint8_t *p = out_room(o, len);
    if (p && len)
        memcpy(p, value, len);
}

void out_bytes(struct out *o, enum tag tag, const void *value, size_t len) {
    uint8_t *p = out_room(o, 8);
    if (!p)
        return;
    put16(p, (uint16_t)tag);
    put16(p + 2, 0);
    put32(p + 4, (uint32_t)len);
    out_raw(o, value, len);
}

void out_text(struct out *o, enum tag tag, const char *value) {
    out_bytes(o, tag, value, strlen(value));
}

void out_number(struct out *o, enum tag tag, int64_t value) {
    uint8_t b[8];
    put32(b, (uint32_t)(uint64_t)value);
    put32(b + 4, (uint32_t)((uint64_t)value >> 32));
    out_bytes(o, tag, b, sizeof b);
}

void out_end(struct out *o) {
    if (!o->failed)
        put32(o->buf + o->frame_at + 4, (uint32_t)(o->len - o->frame_at - FRAME_HEADER));
}

size_t out_nest(struct out *o, enum tag tag) {
    uint8_t *p = out_room(o, 8);
    if (!p)
        return 0;
    put16(p, (uint16_t)tag);
    put16(p + 2, 0);
    return o->len;
}

void out_unnest(struct out *o, size_t at) {
    if (!o->failed)
        put32(o->buf + at - 4, (uint32_t)(o->len - at));
}

void out_reset(struct out *o) {
    o->len = 0;
}

void out_free(struct out *o) {
    free(o->buf);
    *o = (struct out){0};
}
