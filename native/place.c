#define _GNU_SOURCE
#include "place.h"

#include <linux/prctl.h>
#include <string.h>
#include <sys/prctl.h>

static uint64_t at(const void *p) {
    return (uint64_t)(uintptr_t)p;
}

int place_tell(const struct place *p) {
    struct prctl_mm_map map = {.start_code = at(__executable_start),
                               .end_code = at(etext),
                               .start_data = at(p->data),
                               .end_data = at(end),
                               .start_brk = p->heap,
                               .brk = p->heap_end,
                               .start_stack = at(p->stack),
                               .arg_start = at(p->title),
                               .arg_end = at(p->title) + strlen(p->title) + 1,
                               .env_start = at(p->title),
                               .env_end = at(p->title),
                               .exe_fd = (unsigned)-1};
    return prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0);
}

_Noreturn void stack_change(char *top, void (*run)(void)) {
#if defined(__x86_64__)
    __asm__ volatile("mov %0, %%rsp\n\txor %%ebp, %%ebp\n\tcall *%1" : : "a"(top), "c"(run) : "memory");
#else
    __asm__ volatile("mov sp, %0\n\tmov x29, xzr\n\tblr %1" : : "r"(top), "r"(run) : "memory");
#endif
    __builtin_unreachable();
}
