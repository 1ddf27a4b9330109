/*
 * What an init is when all is made: a loop of two system calls. It is there as long as the sandbox, so nothing else of our memory stays:
 * the heap, the stack, our data, the kernel's own pages and the tables for all of them are some 60 KB that would only wait.
 */
#define _GNU_SOURCE
#include "aether.h"
#include "place.h"

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__has_include)
#if __has_include(<sys/rseq.h>)
#include <sys/rseq.h>
#endif
#endif

/* From here on there is no C library: it keeps errno, and the stack's guard, in memory that is gone. */
static inline __attribute__((always_inline)) long call(long number, long a, long b, long c, long d) {
#if defined(__x86_64__)
    long rc;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(rc) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return rc;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x1), "r"(x2), "r"(x3), "r"(x8) : "memory");
    return x0;
#else
#error "bare.c knows x86_64 and aarch64"
#endif
}

/* The stack of the loop, and all that stays beside the code; ps reads our name from its other end. */
static char page[PAGE] __attribute__((aligned(PAGE)));

/* All signals are blocked, and stay so: none may be taken here. Where unmapping is refused, as of sealed pages, they stay. */
__attribute__((noreturn, noinline, used, no_stack_protector)) static void bare_loop(void) {
    const unsigned long code_end = ((unsigned long)etext + PAGE - 1) & ~(PAGE - 1), kept = (unsigned long)page;
    const uint64_t child = 1ULL << (SIGCHLD - 1);
    call(SYS_munmap, (long)code_end, (long)(kept - code_end), 0, 0);
    call(SYS_munmap, (long)(kept + PAGE), (long)((1UL << 47) - PAGE - kept - PAGE), 0, 0);
    for (;;) {
        while (call(SYS_wait4, -1, 0, WNOHANG | __WALL, 0) > 0)
            ;
        call(SYS_rt_sigtimedwait, (long)&child, 0, 0, sizeof child);
    }
}

/* The kernel writes to the C library's area of restartable sequences whenever it puts another process in our place, and kills us if it
 * cannot: true if it does so no more. The library may have registered another size than we know. */
static bool rseq_leave(void) {
#if defined(RSEQ_SIG) && defined(SYS_rseq)
    if (__rseq_size)
        return syscall(SYS_rseq, (char *)__builtin_thread_pointer() + __rseq_offset, 32, RSEQ_FLAG_UNREGISTER, RSEQ_SIG) == 0;
#endif
    return true;
}

_Noreturn static void ordinary_loop(void) {
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    for (;;) {
        while (waitpid(-1, NULL, WNOHANG | __WALL) > 0)
            ;
        sigwaitinfo(&child, NULL);
    }
}

_Noreturn void init_loop(void) {
    if (!rseq_leave())
        ordinary_loop();
    memcpy(page, "init", 5);
    /* Best effort, it is for the eye. */
    place_tell(&(struct place){page, page, (uint64_t)(uintptr_t)end, (uint64_t)(uintptr_t)end, page});
    stack_change(page + sizeof page, bare_loop);
}
