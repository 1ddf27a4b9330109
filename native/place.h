/* Where a process of ours lives in its address space, once that is no longer where the kernel put it. */
#ifndef DSEC_PLACE_H
#define DSEC_PLACE_H

#include <stdint.h>

#define PAGE 4096UL

/* The linker's: where our code and our data begin and end. */
extern char __executable_start[], etext[], end[];

struct place {
    const void *data, *stack;
    uint64_t heap, heap_end;
    const char *title; /* what ps shows as the command line */
};

/* 0, or -1 where the kernel takes no such thing. */
int place_tell(const struct place *p);
/* Goes on there with a stack that ends at `top`, which is as aligned as a stack has to be. Nothing of the old one is used any more. */
_Noreturn void stack_change(char *top, void (*run)(void));

#endif
