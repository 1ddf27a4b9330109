"""Which system calls a sandbox may make. Data; dsec.isolation.seccomp makes the filter of it.

An allowlist: what is not named is refused. The workload is other people's whole development stack (compilers, debuggers, package
managers, services), so ordinary calls are all there; what is missing are the doors into the kernel that have no use inside.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ALLOWED", "CONDITIONS", "MISSING", "Check"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOWED: Final = _names(
    """
    read write open close stat fstat lstat newfstatat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn
    pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 access faccessat faccessat2 pipe pipe2 select pselect6 ppoll
    sched_yield mremap msync mincore madvise process_madvise shmget shmat shmctl shmdt dup dup2 dup3 pause nanosleep clock_nanosleep
    getitimer setitimer alarm getpid sendfile connect accept accept4 sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown bind
    listen getsockname getpeername socketpair setsockopt getsockopt fork vfork execve execveat exit exit_group wait4 waitid kill
    tkill tgkill uname semget semop semctl semtimedop msgget msgsnd msgrcv msgctl fcntl flock fsync fdatasync sync syncfs
    sync_file_range truncate ftruncate fallocate getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat
    rmdir creat link linkat unlink unlinkat symlink symlinkat readlink readlinkat chmod fchmod fchmodat fchmodat2 chown fchown
    lchown fchownat umask gettimeofday time times getrlimit setrlimit prlimit64 getrusage sysinfo ptrace getuid getgid setuid setgid
    geteuid getegid setpgid getppid getpgrp getpgid getsid setsid setreuid setregid getgroups setgroups setresuid getresuid
    setresgid getresgid setfsuid setfsgid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo
    rt_sigsuspend sigaltstack utime utimes utimensat futimesat mknod mknodat statfs fstatfs statx getpriority setpriority ioprio_get
    ioprio_set sched_setparam sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min
    sched_rr_get_interval sched_setattr sched_getattr sched_setaffinity sched_getaffinity mlock mlock2 munlock mlockall munlockall
    prctl arch_prctl chroot gettid readahead setxattr lsetxattr fsetxattr setxattrat getxattr lgetxattr fgetxattr getxattrat
    listxattr llistxattr flistxattr listxattrat removexattr lremovexattr fremovexattr removexattrat file_getattr futex futex_waitv
    futex_wake futex_wait futex_requeue get_robust_list set_robust_list set_thread_area get_thread_area set_tid_address
    restart_syscall rseq membarrier epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 fadvise64
    timer_create timer_settime timer_gettime timer_getoverrun timer_delete clock_gettime clock_getres inotify_init inotify_init1
    inotify_add_watch inotify_rm_watch openat openat2 splice tee vmsplice copy_file_range signalfd signalfd4 eventfd eventfd2
    timerfd_create timerfd_settime timerfd_gettime process_vm_readv process_vm_writev seccomp getrandom memfd_create memfd_secret
    pkey_mprotect pkey_alloc pkey_free pidfd_open pidfd_getfd pidfd_send_signal close_range landlock_create_ruleset
    landlock_add_rule landlock_restrict_self process_mrelease cachestat map_shadow_stack mseal remap_file_pages getcpu mbind
    get_mempolicy set_mempolicy set_mempolicy_home_node mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    """
)

MISSING: Final = _names(
    """
    clone3 statmount listmount io_setup io_destroy io_getevents io_pgetevents io_submit io_cancel
    """
)
"""Answered ENOSYS though the kernel has them: libraries then take the older way, which for clone has its flags in a register where the
filter sees them. Those of asynchronous I/O draw on one stock of the whole host (fs.aio-max-nr), which a single guest could use up; what
would use them falls back to threads."""

CLONE_NEW: Final = 0x7E020080
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET and TIME."""

CLONE_PARENT: Final = 0x8000
"""The child is its maker's sibling: for a command's leader a child of chronus, on the host, which does not know to reap it."""

TIOCSTI: Final = 0x5412
TIOCLINUX: Final = 0x541C
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE: Final = 0
PER_LINUX: Final = 0
PER_LINUX32: Final = 0x8
ADDR_NO_RANDOMIZE: Final = 0x0040000
PERSONALITY_READ: Final = 0xFFFFFFFF

Operator = Literal["in", "not-in", "any-bit"]


@dataclass(frozen=True, slots=True)
class Check:
    """The call is refused with `errno` if argument `argument` stands in this relation to `values`, and `when`'s (argument, value) holds.

    Only the low 32 bits are compared: the kernel itself takes these arguments as int, or refuses higher bits.
    """

    argument: int
    operator: Operator
    values: tuple[int, ...]
    errno: int = errno.EPERM
    when: tuple[int, int] | None = None


CONDITIONS: Final[dict[str, tuple[Check, ...]]] = {
    "clone": (Check(0, "any-bit", (CLONE_NEW & ~0xFF | CLONE_PARENT,)),),
    "unshare": (Check(0, "any-bit", (CLONE_NEW,)),),
    "ioctl": (Check(1, "in", (TIOCSTI, TIOCLINUX)),),
    "socket": (
        Check(0, "not-in", (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK), errno.EAFNOSUPPORT),
        Check(2, "not-in", (NETLINK_ROUTE,), errno.EPROTONOSUPPORT, when=(0, AF_NETLINK)),
    ),
    "personality": (Check(0, "not-in", (PER_LINUX, PER_LINUX32, ADDR_NO_RANDOMIZE, ADDR_NO_RANDOMIZE | PER_LINUX32, PERSONALITY_READ)),),
}
"""Calls that are allowed unless one of their checks refuses. In clone, the bit of CLONE_NEWTIME belongs to the exit signal."""
