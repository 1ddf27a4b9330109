/* What clients ask on their connections. */
#define _GNU_SOURCE
#include "chronus.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

static void op_forget(struct chronus *c, const char *id) {
    struct op *op = c->shell && !id ? NULL : op_find(c, c->shell ? id : NULL);
    if (op)
        op->acked = true;
}

static int deliver(struct chronus *c, int signum, bool tree, struct trouble *t) {
    if (c->over || c->child.pidfd < 0)
        return fail(t, "conflict", NULL, 0, "the process has ended");
    if (signum < 1 || signum >= 65)
        return fail(t, "invalid_argument", "signal", 0, "there is no signal %d", signum);
    if (tree && signum == SIGKILL)
        return kill_tree(c);
    if (tree)
        return session_group_signal(c->group, signum, 0), 0;
    if (syscall(SYS_pidfd_send_signal, c->child.pidfd, signum, NULL, 0) < 0)
        return fail(t, "conflict", NULL, -1, "cannot signal the process");
    return 0;
}

struct order {
    int64_t signum, tree, rows, cols, live, credit, at[2];
    char *op_id;
};

static int order_parse(struct order *o, const struct frame *f) {
    struct fields fs = fields_of(f);
    struct field field;
    int n;
    *o = (struct order){.live = 1, .credit = 1 << 20};
    while ((n = field_next(&fs, &field)) == 1) {
        switch (field.tag) {
        case T_SIGNUM: o->signum = field_number(&field); break;
        case T_TREE: o->tree = field_number(&field); break;
        case T_ROWS: o->rows = field_number(&field); break;
        case T_COLS: o->cols = field_number(&field); break;
        case T_LIVE: o->live = field_number(&field); break;
        case T_CREDIT_BYTES: o->credit = field_number(&field); break;
        case T_STDOUT_OFFSET: o->at[0] = field_number(&field); break;
        case T_STDERR_OFFSET: o->at[1] = field_number(&field); break;
        case T_OP_ID:
            free(o->op_id);
            o->op_id = field_text(&field, ID_MAX);
            break;
        default: break;
        }
    }
    return n;
}

static int64_t number_at(const struct frame *f) {
    uint64_t v = 0;
    for (int i = 7; i >= 0 && f->length >= 8; i--)
        v = v << 8 | f->payload[i];
    return (int64_t)v;
}

/* A frame on the connection of an EXEC, RUN or ATTACH. false: malformed, close it. */
static bool reader_frame(struct chronus *c, struct op *op, struct reader *r, const struct frame *f) {
    struct trouble t = {0};
    struct order o;
    switch (f->kind) {
    case K_CREDIT:
        if (f->length != 8 || f->stream < 1 || f->stream > 2 || number_at(f) < 0 || r->credit[f->stream - 1] > INT64_MAX / 2)
            return false;
        r->credit[f->stream - 1] += number_at(f) & (INT64_MAX >> 2);
        return true;
    case K_DATA:
        if (f->length < 8 || c->shell || op != c->current || c->input_len > 4 * STDIN_WINDOW + DATA_MAX)
            return f->length >= 8 && !c->shell && op != c->current;
        return input_append(c, f->payload + 8, f->length - 8);
    case K_EOF:
        if (op == c->current && !c->shell)
            c->input_eof = true;
        return true;
    case K_SIGNAL:
    case K_RESIZE:
        if (order_parse(&o, f) < 0)
            return free(o.op_id), false;
        free(o.op_id);
        if (f->kind == K_RESIZE && c->request.tty && c->child.out >= 0) {
            struct winsize size = {.ws_row = (unsigned short)o.rows, .ws_col = (unsigned short)o.cols};
            ioctl(c->child.out, TIOCSWINSZ, &size);
        } else if (f->kind == K_SIGNAL && op == c->current) {
            deliver(c, (int)o.signum, o.tree != 0, &t);
        }
        return true;
    case K_ACK:
        if (!r->exited_sent || r->chunk || r->pending.len)
            return false;
        op->acked = true;
        send_ok(r->sock);
        return true;
    default: return false;
    }
}

static int readers_of(const struct op *op) {
    int n = 0;
    for (const struct reader *r = op->readers; r; r = r->next)
        n++;
    return n;
}

static void attach(struct chronus *c, struct stranger *x, const struct order *o) {
    struct op *op = op_find(c, c->shell ? o->op_id : NULL);
    for (struct stranger *y = c->strangers; !op && o->op_id && y; y = y->next)
        if (y->waiting && y->run.op_id && strcmp(y->run.op_id, o->op_id) == 0) {
            /* It has not begun: whoever asks last gets its answer. */
            close(y->sock);
            y->sock = x->sock;
            x->sock = -1;
            return;
        }
    if (op && readers_of(op) >= MAX_READERS)
        return refuse(x->sock, "overloaded", 0, "too many follow this command");
    struct reader *r = op ? reader_new(op, x->sock, o->live != 0, o->credit) : NULL;
    if (!r)
        return refuse(x->sock, "not_found", 0, "no such command in this session");
    if (r->live)
        op->held_until = 0; /* from here on it holds what it needs itself */
    r->offset[0] = (uint64_t)(o->at[0] > 0 ? o->at[0] : 0);
    r->offset[1] = (uint64_t)(o->at[1] > 0 ? o->at[1] : 0);
    r->in = x->in;
    x->in = (struct inbox){0};
    x->sock = -1;
    reader_started(op, r, c->id);
    if (op == c->current)
        stdin_welcome(c, r);
    reader_frames(c, op, r);
}

/* The first frame of a connection that aether handed over. */
static void greet(struct chronus *c, struct stranger *x, const struct frame *f) {
    struct trouble t = {0};
    struct order o;
    if (f->kind == K_RUN)
        return run_queue(c, x, f);
    int bad = order_parse(&o, f);
    if (bad < 0)
        refuse(x->sock, "invalid_argument", 0, "malformed request");
    else if (f->kind == K_ATTACH)
        attach(c, x, &o);
    else if (f->kind == K_SIGNAL && deliver(c, (int)o.signum, o.tree != 0, &t) < 0)
        send_trouble(x->sock, &t);
    else if (f->kind == K_SIGNAL)
        send_ok(x->sock);
    else if (f->kind == K_ACK) {
        op_forget(c, o.op_id);
        send_ok(x->sock);
    } else if (f->kind == K_CLOSE) {
        x->closing = true;
        c->close_wanted = true;
    } else
        refuse(x->sock, "invalid_argument", 0, "not a request to a session");
    free(o.op_id);
    if (!x->closing)
        close_fd(&x->sock);
}

void stranger_add(struct chronus *c, int sock) {
    struct stranger *x = calloc(1, sizeof *x);
    if (!x) {
        close(sock);
        return;
    }
    *x = (struct stranger){.next = c->strangers, .sock = sock, .since = clock_now()};
    c->strangers = x;
}

void stranger_free(struct stranger *x) {
    if (x->sock >= 0)
        close(x->sock);
    inbox_free(&x->in);
    request_free(&x->run);
    free(x);
}

void stranger_read(struct chronus *c, struct stranger *x) {
    struct frame f;
    long n = inbox_fill(&x->in, x->sock, NULL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    int got = n > 0 ? inbox_next(&x->in, &f) : -1;
    if (got < 0 && n > 0)
        refuse(x->sock, "invalid_argument", 0, "malformed frame");
    if (got < 0)
        close_fd(&x->sock);
    else if (got > 0)
        greet(c, x, &f);
}

void reader_frames(struct chronus *c, struct op *op, struct reader *r) {
    struct frame f;
    int got;
    while ((got = inbox_next(&r->in, &f)) > 0)
        if (!reader_frame(c, op, r, &f))
            break;
    if (got != 0)
        r->dead = true;
}

void reader_read(struct chronus *c, struct op *op, struct reader *r) {
    long n = inbox_fill(&r->in, r->sock, NULL);
    if (n > 0)
        reader_frames(c, op, r);
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        r->dead = true;
}

/* Connections and ops that are done with leave their lists here, after the loop has looked at all. */
void sweep(struct chronus *c) {
    for (struct stranger **at = &c->strangers, *x; (x = *at);) {
        if (x->sock >= 0 && (x->waiting || x->closing || clock_now() - x->since < GREETING_NS)) {
            at = &x->next;
            continue;
        }
        *at = x->next;
        stranger_free(x);
    }
    int kept = 0;
    int64_t now = clock_now();
    for (struct op **at = &c->ops, *op; (op = *at);) {
        op_sweep(op, now, TAKEOVER_NS);
        if (op != c->current && (op->acked || (c->shell && ++kept > SHELL_KEEPS))) {
            *at = op->next;
            op_free(op);
        } else {
            at = &op->next;
        }
    }
}
