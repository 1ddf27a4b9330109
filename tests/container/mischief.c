/* What a guest does to hinder us. Each says "ready" or what it met, then stays until it is killed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

static int say(const char *text) {
    printf("%s\n", text);
    fflush(stdout);
    return 0;
}

_Noreturn static void stay(long result) {
    say(result < 0 ? strerror(errno) : "ready");
    for (;;)
        pause();
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "", *argument = count > 2 ? words[2] : "";
    if (!strcmp(what, "lease")) { /* whoever opens the file waits until the lease is given back, which is never */
        signal(SIGIO, SIG_IGN);
        stay(fcntl(open(argument, O_RDWR), F_SETLEASE, F_WRLCK));
    }
    if (!strcmp(what, "lock"))
        stay(flock(0, LOCK_EX | LOCK_NB));
    if (!strcmp(what, "trace"))
        stay(ptrace(PTRACE_SEIZE, atoi(argument), 0, 0));
    if (!strcmp(what, "terminals")) {
        int made = 0;
        while (made < atoi(argument) && open("/dev/ptmx", O_RDWR | O_NOCTTY) >= 0)
            made++;
        printf("%d\n", made);
        stay(0);
    }
    if (!strcmp(what, "sibling")) {
        long pid = syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
        return pid == 0 ? 0 : say(pid < 0 ? strerror(errno) : "made");
    }
    if (!strcmp(what, "aio")) {
        unsigned long context = 0;
        return say(syscall(SYS_io_setup, 1, &context) < 0 ? strerror(errno) : "made");
    }
    return 2;
}
