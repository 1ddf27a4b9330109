/*
 * The launcher's address space, cut down before it forks. All that it has is in each aether too, and the tables of pages count: a stack at
 * one end of the address space, the kernel's vdso at another and our code at a third need three of each kind, some 30 KB a sandbox. So the
 * stack moves beside our data and the other two go.
 */
#define _GNU_SOURCE
#include "aether.h"
#include "place.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define STACK_BYTES (512 * 1024UL) /* the deepest is a listing of a tree of MAX_DEPTH, 280 KB */
#define HOLE        65536UL        /* a whole page where pages are largest */

#if defined(__aarch64__)
#define ADDRESSES_END (1UL << 48)
#else
#define ADDRESSES_END ((1UL << 47) - PAGE)
#endif

extern char *program_invocation_name, *program_invocation_short_name;

/* It begins with a hole: what goes too deep dies of it rather than writing over our data. */
static char stack[HOLE + STACK_BYTES] __attribute__((aligned(HOLE)));
static char *no_environment[1];

static struct {
    struct host *host;
    int (*run)(struct host *);
} next;

/* Where the heap began: the kernel lets it shrink to there. Field 47 of stat; the second, the name, may hold anything. 0 if it is not told.
 */
static uint64_t heap_start(const struct host *h) {
    char text[2048] = "";
    int fd = openat(h->proc, "self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, text, sizeof text - 1) < 0)
        text[0] = 0;
    close(fd);
    char *at = strrchr(text, ')');
    for (int field = 2; at && field < 47; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

/* On the new stack: nothing above the heap is in use any more. Where the kernel keeps some of it, as where it is sealed, it only costs. */
__attribute__((noreturn, noinline, used)) static void settled(void) {
    const unsigned long above = ((unsigned long)sbrk(0) + HOLE - 1) & ~(HOLE - 1);
    munmap((void *)above, ADDRESSES_END - above);
    munmap(stack, HOLE);
    _exit(next.run(next.host) < 0);
}

_Noreturn void lean_run(struct host *h, int (*run)(struct host *)) {
    next.host = h;
    next.run = run;
    /* A heap below our code, as position-independent programs may have it, leaves nothing to gain. */
    if ((char *)sbrk(0) < end)
        _exit(run(h) < 0);
    free(malloc(1)); /* the C library asks for the time as it sets its heap up, and later on there is no vdso that it could ask */
    const struct place place = {stack, stack + sizeof stack, heap_start(h), (uint64_t)(uintptr_t)sbrk(0), h->title};
    if (!place.heap || place_tell(&place) < 0)
        _exit(run(h) < 0);
    h->argv_at = h->title;
    h->argv_len = strlen(h->title) + 1;
    environ = no_environment;
    program_invocation_name = program_invocation_short_name = h->title;
    stack_change(stack + sizeof stack, settled);
}
