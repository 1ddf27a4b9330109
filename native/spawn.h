/* One workload process, started into a session's group with no copy of our memory. */
#ifndef DSEC_SPAWN_H
#define DSEC_SPAWN_H

#include "aether.h"

struct request {
    char *id, *op_id, *shell_text, *cwd, *user;
    struct list args, env, rlimits;
    const uint8_t *stdin_data;
    size_t stdin_length;
    int64_t tty, rows, cols, stdin_open, timeout_ns, grace_ns, output_limit, background, live, credit, cwd_fallback;
};

int request_parse(struct request *r, const struct frame *f, struct trouble *t);
void request_free(struct request *r);

struct child {
    int pid, pidfd, guest_pid;
    int in, out, err; /* our ends; out is the terminal's master and err -1 with a tty; in -1 when there is none */
    int status;       /* read end of the shell's descriptor 9, or -1 */
};

/* interactive: an argv-less shell that reads commands from its stdin and has descriptor 9 to say their status on. */
int spawn(struct sandbox *s, const struct request *r, int group, bool shell, struct child *c, struct trouble *t);

#endif
