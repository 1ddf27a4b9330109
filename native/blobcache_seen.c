/* What happened: counts, failures, the order in which chunks were first asked for. It is told as JSON over the control socket. */
#define _GNU_SOURCE
#include "blobcache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EVENTS 256

struct seen {
    uint64_t count[COUNTS], generation;
    uint8_t *touched;
    struct touch {
        uint32_t chunk, sequence;
    } * order;
    uint32_t ordered, room;
};

struct event {
    uint64_t sequence, at;
    int error;
    uint8_t digest[DIGEST];
    const char *reason;
    char group[256];
};

static const char *const names[COUNTS] = {"asked", "asked_bytes", "hit_bytes", "disk_bytes", "store_reads", "store_bytes", "store_errors"};
static struct seen *seen;
static struct disk *disk;
static uint64_t total[COUNTS], event_sequence, failed;
static uint32_t touches;
static struct event events[EVENTS];

int seen_start(struct disk *cache) {
    disk = cache;
    /* The next worker's events do not repeat the numbers of this one's. */
    event_sequence = __atomic_load_n(&shared->worker_starts, __ATOMIC_RELAXED) << 32;
    return (seen = calloc(PACKS_MAX, sizeof *seen)) ? 0 : -1;
}

static struct seen *seen_of(uint32_t node) {
    struct seen *s = &seen[node - FIRST_NODE];
    uint64_t generation = node_pack(node)->generation;
    if (s->generation != generation) {
        free(s->touched);
        free(s->order);
        *s = (struct seen){.generation = generation};
    }
    return s;
}

void seen_add(uint32_t node, enum count what, uint64_t by) {
    seen_of(node)->count[what] += by;
    total[what] += by;
}

void seen_touch(uint32_t node, uint32_t chunk) {
    struct seen *s = seen_of(node);
    if (!s->touched && !(s->touched = calloc(chunks_of(node_pack(node)) / 8 + 1, 1)))
        return;
    if (s->touched[chunk / 8] & 1 << chunk % 8)
        return;
    if (s->ordered == s->room) {
        uint32_t room = s->room ? s->room * 2 : 64;
        struct touch *order = realloc(s->order, sizeof *order * room);
        if (!order)
            return;
        s->order = order;
        s->room = room;
    }
    s->touched[chunk / 8] |= (uint8_t)(1 << chunk % 8);
    s->order[s->ordered++] = (struct touch){chunk, touches++};
}

/* The hierarchies of a hybrid host agree on the sandbox; the longest path says most. */
static void group_of(uint32_t pid, char *group, size_t room) {
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%u/cgroup", pid);
    FILE *f = pid ? fopen(path, "re") : NULL;
    *group = 0;
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        const char *at = strchr(line, '/');
        if (at && strlen(at) > strlen(group) && strlen(at) < room)
            strcpy(group, at);
    }
    if (f)
        fclose(f);
}

void seen_failure(const struct request *r, int error, const char *reason) {
    char group[sizeof events[0].group];
    group_of(r->pid, group, sizeof group);
    pthread_mutex_lock(&tables);
    failed++;
    struct event *e = &events[event_sequence % EVENTS];
    *e = (struct event){.sequence = ++event_sequence, .at = (uint64_t)time(NULL), .error = error, .reason = reason};
    memcpy(e->digest, node_pack(r->node)->digest, DIGEST);
    memcpy(e->group, group, sizeof group);
    pthread_mutex_unlock(&tables);
}

static const char *hex(const uint8_t digest[DIGEST]) {
    static char name[DIGEST * 2 + 6];
    pack_name(digest, name);
    name[DIGEST * 2] = 0;
    return name;
}

static void put_text(FILE *out, const char *text) {
    fputc('"', out);
    for (; *text; text++)
        if (*text == '"' || *text == '\\' || (unsigned char)*text < 32)
            fprintf(out, "\\u%04x", (unsigned char)*text);
        else
            fputc(*text, out);
    fputc('"', out);
}

static void put_counts(FILE *out, const uint64_t *count) {
    for (int i = 0; i < COUNTS; i++)
        fprintf(out, "%s\"%s\":%llu", i ? "," : "", names[i], (unsigned long long)count[i]);
}

static void put_status(FILE *out) {
    struct fetch_state state;
    uint64_t used, limit, evicted, bad;
    disk_usage(disk, &used, &limit, &evicted, &bad);
    fetch_state(&state);
    fprintf(out, "{\"keeper\":%d,\"worker\":%d,\"starts\":%llu,\"sequence\":%llu,\"failed\":%llu,", shared->keeper, (int)getpid(),
            (unsigned long long)shared->worker_starts, (unsigned long long)event_sequence, (unsigned long long)failed);
    fprintf(out, "\"away_ms\":%lld,\"away_error\":", store_state.away_since ? (long long)(clock_ms() - store_state.away_since) : 0);
    put_text(out, store_state.away_since ? strerror(store_state.error) : "");
    fprintf(out, ",\"waiting\":%d,\"fetchers\":%d,\"stuck\":%d,\"memory_bytes\":%llu,", state.waiting, state.threads, state.stuck,
            (unsigned long long)state.memory_bytes);
    fprintf(out, "\"cache_bytes\":%llu,\"cache_limit_bytes\":%llu,\"cache_evicted\":%llu,\"cache_damaged\":%llu,", (unsigned long long)used,
            (unsigned long long)limit, (unsigned long long)evicted, (unsigned long long)bad);
    put_counts(out, total);
    fputs("}\n", out);
}

static void put_packs(FILE *out) {
    const char *comma = "";
    fputc('{', out);
    for (uint32_t at = 0; at < PACKS_MAX; at++) {
        const struct pack *p = &shared->pack[at];
        if (!p->used || p->size < 0)
            continue;
        const struct seen *s = seen_of(at + FIRST_NODE);
        fprintf(out, "%s\"%s\":{\"size\":%lld,\"touched_bytes\":%llu,", comma, hex(p->digest), (long long)p->size,
                (unsigned long long)s->ordered * CHUNK);
        put_counts(out, s->count);
        fputc('}', out);
        comma = ",";
    }
    fputs("}\n", out);
}

static void put_events(FILE *out, uint64_t after) {
    const char *comma = "";
    uint64_t from = event_sequence > EVENTS ? event_sequence - EVENTS : 0;
    fprintf(out, "{\"sequence\":%llu,\"events\":[", (unsigned long long)event_sequence);
    for (uint64_t i = from > after ? from : after; i < event_sequence; i++) {
        const struct event *e = &events[i % EVENTS];
        if (e->sequence != i + 1)
            continue;
        fprintf(out, "%s{\"sequence\":%llu,\"at\":%llu,\"error\":", comma, (unsigned long long)e->sequence, (unsigned long long)e->at);
        put_text(out, strerror(e->error));
        fprintf(out, ",\"pack\":\"%s\",\"reason\":\"%s\",\"group\":", hex(e->digest), e->reason);
        put_text(out, e->group);
        fputc('}', out);
        comma = ",";
    }
    fputs("]}\n", out);
}

struct piece {
    uint32_t node;
    struct touch touch;
};

static int by_sequence(const void *a, const void *b) {
    uint32_t x = ((const struct piece *)a)->touch.sequence, y = ((const struct piece *)b)->touch.sequence;
    return x < y ? -1 : x > y;
}

/* `[pack, chunk, chunks]` in the order of reading; all packs, or those named. */
static void put_trace(FILE *out, const char *only) {
    struct piece *pieces = NULL;
    size_t count = 0, room = 0;
    for (uint32_t at = 0; at < PACKS_MAX; at++)
        room += seen[at].ordered;
    if (room && !(pieces = malloc(room * sizeof *pieces)))
        room = 0;
    for (uint32_t at = 0; at < PACKS_MAX && room; at++)
        if (shared->pack[at].used && seen[at].ordered && (!*only || strstr(only, hex(shared->pack[at].digest))))
            for (uint32_t i = 0; i < seen[at].ordered; i++)
                pieces[count++] = (struct piece){at, seen[at].order[i]};
    if (count)
        qsort(pieces, count, sizeof *pieces, by_sequence);
    fprintf(out, "{\"chunk_bytes\":%u,\"reads\":[", CHUNK);
    for (size_t i = 0, next; i < count; i = next) {
        for (next = i + 1; next < count && pieces[next].node == pieces[i].node; next++)
            if (pieces[next].touch.chunk != pieces[next - 1].touch.chunk + 1)
                break;
        fprintf(out, "%s[\"%s\",%u,%zu]", i ? "," : "", hex(shared->pack[pieces[i].node].digest), pieces[i].touch.chunk, next - i);
    }
    fputs("]}\n", out);
    free(pieces);
}

/* `HEX.data SIZE ...` */
static void know(char *words, FILE *out) {
    int known = 0;
    for (char *rest = words, *name; (name = strsep(&rest, " ")) && rest;) {
        char *size = strsep(&rest, " ");
        uint8_t digest[DIGEST];
        int64_t bytes = strtoll(size, NULL, 10);
        if (pack_name_parse(name, digest) == 0 && bytes > 0) {
            fetch_know(digest, bytes);
            known++;
        }
    }
    fprintf(out, "{\"known\":%d}\n", known);
}

void seen_answer(char *line, FILE *out) {
    pthread_mutex_lock(&tables);
    if (strcmp(line, "status") == 0)
        put_status(out);
    else if (strcmp(line, "packs") == 0)
        put_packs(out);
    else if (strncmp(line, "events ", 7) == 0)
        put_events(out, strtoull(line + 7, NULL, 10));
    else if (strncmp(line, "know ", 5) == 0)
        know(line + 5, out);
    else if (strncmp(line, "trace", 5) == 0)
        put_trace(out, line + 5);
    else
        fputs("{\"error\":\"status, packs, events AFTER, know NAME SIZE..., trace [PACK...]\"}\n", out);
    pthread_mutex_unlock(&tables);
}
