/* A shell session: commands are fed one at a time, and say their status on a descriptor of their own. */
#define _GNU_SOURCE
#include "chronus.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The command as one word for eval; its stdin is /dev/null and the status descriptor is not its own. */
static bool shell_write(struct chronus *c, const char *text) {
    size_t n = strlen(text);
    bool ok = input_append(c, "command eval '", 14);
    for (size_t at = 0; ok && at < n;) {
        size_t run = strcspn(text + at, "'");
        ok = input_append(c, text + at, run);
        at += run;
        if (ok && text[at] == '\'') {
            ok = input_append(c, "'\\''", 4);
            at++;
        }
    }
    return ok && input_append(c, "' </dev/null 9>&-\nprintf '%d\\n' $? >&9\n", 40);
}

/* What came before is the command's own first output, as on a terminal. */
static void early_give(struct chronus *c, struct op *op) {
    for (int i = 0; c->early && i < 2; i++) {
        struct keep *k = &c->early->keep[i];
        size_t n;
        for (uint64_t at = keep_from(k, 0, true); at < k->total; at = keep_from(k, at + n, true)) {
            const uint8_t *data = keep_at(k, at, &n);
            op_append(op, i, data, n);
        }
    }
    if (c->early)
        op_free(c->early);
    c->early = NULL;
}

static void run_begin(struct chronus *c, struct stranger *x) {
    const struct request *r = &x->run;
    const char *id = r->op_id ? r->op_id : r->id;
    struct op *op = op_new(id, (size_t)r->output_limit);
    if (!op)
        return refuse(x->sock, "overloaded", 0, "no memory to keep output");
    early_give(c, op);
    op->started_real = now_ns(CLOCK_REALTIME);
    op->started = clock_now();
    op->oom_before = oom_kills(c->s);
    op->pid = c->child.pid;
    op->next = c->ops;
    c->ops = c->current = op;
    c->group_cpu_at_start = group_cpu_ns(c->group);
    c->frozen_before = group_frozen_ns(c->group, op->started);
    c->deadline = r->timeout_ns ? op->started + r->timeout_ns : 0;
    c->kill_at = 0;
    c->request.grace_ns = r->grace_ns;
    meminfo_refresh(c->s);
    struct reader *reader = reader_new(op, x->sock, r->live, r->credit);
    if (reader) {
        reader->in = x->in;
        x->in = (struct inbox){0};
        x->sock = -1;
        if (r->live)
            reader_started(op, reader, c->id);
    }
    shell_write(c, r->shell_text);
    input_flush(c);
}

void shell_feed(struct chronus *c) {
    if (c->current || c->over)
        return;
    struct stranger *first = NULL;
    for (struct stranger *x = c->strangers; x; x = x->next)
        if (x->waiting)
            first = x; /* newest first in the list: the last is the oldest */
    if (!first)
        return;
    first->waiting = false;
    run_begin(c, first);
}

void shell_status(struct chronus *c) {
    ssize_t n = read(c->child.status, c->status + c->status_len, sizeof c->status - 1 - c->status_len);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        close_fd(&c->child.status);
        return;
    }
    c->status_len += (size_t)n;
    c->status[c->status_len] = 0;
    char *end = strchr(c->status, '\n');
    if (!end) {
        if (c->status_len == sizeof c->status - 1)
            c->status_len = 0;
        return;
    }
    struct op *op = c->current;
    c->status_len = 0;
    if (!op)
        return;
    if (op->timed_out)
        /* What ignored TERM: the shell is all that may outlive a deadline. */
        for (int i = 0; i < 100 && session_group_signal(c->group, SIGKILL, c->child.pid) > 0; i++)
            poll(NULL, 0, 1);
    while (drain_sources(c))
        ;
    op->exit_code = atoi(c->status) & 255;
    op->cpu_ns = group_cpu_ns(c->group) - c->group_cpu_at_start;
    c->deadline = c->kill_at = 0;
    op_end(c, op);
    shell_feed(c);
}

void run_queue(struct chronus *c, struct stranger *x, const struct frame *f) {
    struct trouble t = {0};
    if (request_parse(&x->run, f, &t) < 0)
        send_trouble(x->sock, &t);
    else if (!c->shell || !x->run.shell_text)
        refuse(x->sock, "invalid_argument", 0, "RUN needs a shell session and a text");
    else if (c->over)
        refuse(x->sock, "not_found", 0, "the session's shell has ended");
    else if (op_find(c, x->run.op_id))
        refuse(x->sock, "conflict", 0, "a command of this id has run in this session");
    else {
        x->waiting = true;
        shell_feed(c);
        return;
    }
    close_fd(&x->sock);
}
