/* Framing and fields of docs/channel.md: parsing touches no memory outside what it was given, writing goes to one growing buffer. */
#ifndef DSEC_FRAME_H
#define DSEC_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FRAME_VERSION 1
/* Of what LAUNCH may say. A launcher of another one is none: it might leave out a wall. */
#define LAUNCH_VERSION "3"
#define FRAME_HEADER   8
#define FRAME_MAX      (4u << 20)
#define DATA_MAX       (1u << 20)
#define ID_MAX         128

enum kind {
    K_LAUNCH = 1,
    K_READY = 2,
    K_ERROR = 3,
    K_HELLO = 4,
    K_SESSION = 5,
    K_EVENT = 6,
    K_EXEC = 7,
    K_STARTED = 8,
    K_DATA = 9,
    K_EOF = 10,
    K_CREDIT = 11,
    K_EXITED = 12,
    K_ATTACH = 13,
    K_SIGNAL = 14,
    K_RESIZE = 15,
    K_ACK = 16,
    K_OK = 17,
    K_SHELL = 18,
    K_RUN = 19,
    K_CLOSE = 20,
    K_FILES = 21,
    K_FILE = 22,
    K_FILE_REPLY = 23,
    K_CONNECT = 24,
    K_STOP = 25,
    K_WATCH = 26,
    K_LAYERS = 27,
};

enum tag {
    T_SANDBOX_ID = 1,
    T_GENERATION = 2,
    T_AETHER_PID = 3,
    T_INIT_PID = 4,
    T_CODE = 5,
    T_MESSAGE = 6,
    T_RAN = 7,
    T_ERRNO = 8,
    T_FIELD = 9,
    T_SESSION_ID = 10,
    T_ARG = 11,
    T_SHELL_TEXT = 12,
    T_CWD = 13,
    T_USER = 14,
    T_ENV = 15,
    T_TTY = 16,
    T_ROWS = 17,
    T_COLS = 18,
    T_STDIN_OPEN = 19,
    T_TIMEOUT_NS = 20,
    T_GRACE_NS = 21,
    T_OUTPUT_LIMIT = 22,
    T_RLIMIT = 23,
    T_BACKGROUND = 24,
    T_LIVE = 25,
    T_CREDIT_BYTES = 26,
    T_OP_ID = 27,
    T_STDIN_DATA = 28,
    T_CWD_FALLBACK = 29,
    T_STDOUT_OFFSET = 30,
    T_STDERR_OFFSET = 31,
    T_SIGNUM = 32,
    T_TREE = 33,
    T_EXIT_CODE = 40,
    T_SIGNAL = 41,
    T_TIMED_OUT = 42,
    T_OOM = 43,
    T_WALL_NS = 44,
    T_CPU_NS = 45,
    T_MAXRSS = 46,
    T_STDOUT_TOTAL = 47,
    T_STDERR_TOTAL = 48,
    T_STARTED_NS = 49,
    T_PID = 50,
    T_SESSION_KIND = 51,
    T_RUNNING = 52,
    T_EVENT_KIND = 53,
    T_DETAIL = 54,
    T_PORT = 55,
    T_ADDRESS = 56,
    T_FILE_OP = 60,
    T_PATH = 61,
    T_TARGET = 62,
    T_MODE = 63,
    T_UID = 64,
    T_GID = 65,
    T_FLAGS = 66,
    T_SIZE = 67,
    T_MTIME_NS = 68,
    T_KIND = 69,
    T_INODE = 70,
    T_NLINK = 71,
    T_ENTRY = 72,
    T_TOKEN = 73,
    T_MORE = 74,
    T_WATCH_MASK = 75,
    T_SOCKET_PATH = 100,
    T_HOSTNAME = 101,
    T_UID_BASE = 102,
    T_UID_COUNT = 103,
    T_LAYER = 104,
    T_SCRATCH = 105,
    T_CGROUP_DIR = 106,
    T_CGROUP_WRITE = 107,
    T_CGROUP_JOIN = 108,
    T_CGROUP_V2 = 109,
    T_OOM_FILE = 110,
    T_CAPS = 111,
    T_SECCOMP = 112,
    T_MASK = 113,
    T_READONLY = 114,
    T_FILE = 115,
    T_CPUS = 116,
    T_SHM_BYTES = 117,
    T_SYSCTL = 118,
    T_MEMORY_BYTES = 121,
    T_MEMORY_USAGE_FILE = 122,
    T_SESSION_LIMIT = 125,
    T_SYS_SHOWN = 126,
    T_MASK_FILE = 127,
    T_MASK_FOLDER = 128,
    T_CWD_ASKED = 129,
    T_USER_ASKED = 130,
};

struct frame {
    uint8_t kind;
    uint16_t stream;
    uint32_t length;
    const uint8_t *payload;
};

struct field {
    uint16_t tag;
    uint32_t length;
    const uint8_t *value;
};

struct fields {
    const uint8_t *at, *end;
};

/* Bytes of the first whole frame in buf, 0 if more are needed, -1 if it is malformed. */
int frame_parse(const uint8_t *buf, size_t len, struct frame *out);

struct fields fields_of(const struct frame *f);
/* 1 and a field, 0 at the end, -1 malformed. */
int field_next(struct fields *fs, struct field *out);
bool field_is_number(const struct field *f);
int64_t field_number(const struct field *f);
/* A NUL-free text, copied; NULL if it holds a NUL, is longer than max or memory is short. */
char *field_text(const struct field *f, size_t max);

struct out {
    uint8_t *buf;
    size_t len, cap;
    size_t frame_at;
    bool failed;
};

void out_begin(struct out *o, enum kind kind, uint16_t stream);
void out_bytes(struct out *o, enum tag tag, const void *value, size_t len);
void out_text(struct out *o, enum tag tag, const char *value);
void out_number(struct out *o, enum tag tag, int64_t value);
void out_raw(struct out *o, const void *value, size_t len);
void out_end(struct out *o);
/* A field that holds fields: begin gives a position for end. */
size_t out_nest(struct out *o, enum tag tag);
void out_unnest(struct out *o, size_t at);
void out_reset(struct out *o);
void out_free(struct out *o);

#endif
