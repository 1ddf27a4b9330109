/* Does what its standard input says to files, a line each: an operation and its arguments in hexadecimal. Stops at the first failure. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

static char *words[8];
static size_t lengths[8];

static int digit(char c) {
    return c <= '9' ? c - '0' : c - 'a' + 10;
}

static int split(char *line) {
    int count = 0;
    for (char *word = strtok(line, " \n"); word && count < 8; word = strtok(NULL, " \n"), count++) {
        words[count] = word;
        if (count == 0)
            continue;
        size_t n = 0;
        char *from = word + 1; /* each begins with an x, so that none is empty */
        for (; from[0] && from[1]; from += 2)
            word[n++] = (char)(digit(from[0]) << 4 | digit(from[1]));
        word[n] = 0;
        lengths[count] = n;
    }
    return count;
}

static long number(int i) {
    return strtol(words[i], NULL, 10);
}

static int put(const char *path, int flags, long offset, const char *data, size_t length) {
    int fd = open(path, O_WRONLY | O_CLOEXEC | flags, 0644);
    if (fd < 0)
        return -1;
    ssize_t done = offset >= 0 ? pwrite(fd, data, length, offset) : write(fd, data, length);
    return close(fd) < 0 || done != (ssize_t)length ? -1 : 0;
}

static int punch(const char *path, long offset, long length) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int rc = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
    close(fd);
    return rc;
}

static int stamp(const char *path, long seconds, long nanoseconds) {
    struct timespec times[2] = {{seconds, nanoseconds}, {seconds, nanoseconds}};
    return utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}

static int show(const char *path, const char *name) {
    unsigned char value[256];
    ssize_t n = lgetxattr(path, name, value, sizeof value);
    for (ssize_t i = 0; i < n; i++)
        printf("%02x", value[i]);
    printf("\n");
    return n < 0 ? -1 : 0;
}

static int act(const char *op) {
    const char *path = words[1];
    if (!strcmp(op, "create"))
        return put(path, O_CREAT | O_EXCL, -1, words[2], lengths[2]);
    if (!strcmp(op, "append"))
        return put(path, O_APPEND, -1, words[2], lengths[2]);
    if (!strcmp(op, "write"))
        return put(path, 0, number(2), words[3], lengths[3]);
    if (!strcmp(op, "truncate"))
        return truncate(path, number(2));
    if (!strcmp(op, "punch"))
        return punch(path, number(2), number(3));
    if (!strcmp(op, "chmod"))
        return chmod(path, (mode_t)number(2));
    if (!strcmp(op, "chown"))
        return lchown(path, (uid_t)number(2), (gid_t)number(3));
    if (!strcmp(op, "mkdir"))
        return mkdir(path, 0755);
    if (!strcmp(op, "rmdir"))
        return rmdir(path);
    if (!strcmp(op, "unlink"))
        return unlink(path);
    if (!strcmp(op, "rename"))
        return rename(path, words[2]);
    if (!strcmp(op, "link"))
        return link(path, words[2]);
    if (!strcmp(op, "symlink"))
        return symlink(words[2], path);
    if (!strcmp(op, "mkfifo"))
        return mkfifo(path, 0644);
    if (!strcmp(op, "setxattr"))
        return lsetxattr(path, words[2], words[3], lengths[3], 0);
    if (!strcmp(op, "removexattr"))
        return lremovexattr(path, words[2]);
    if (!strcmp(op, "getxattr"))
        return show(path, words[2]);
    if (!strcmp(op, "stamp"))
        return stamp(path, number(2), number(3));
    errno = ENOSYS;
    return -1;
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    umask(0);
    for (int at = 1; getline(&line, &room, stdin) > 0; at++)
        if (split(line) < 1 || act(words[0]) < 0) {
            printf("line %d, %s: %s\n", at, words[0], strerror(errno));
            return 1;
        }
    return 0;
}
