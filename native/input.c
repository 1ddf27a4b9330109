/* Standard input: what clients have sent and the guest has not taken yet. */
#define _GNU_SOURCE
#include "chronus.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool input_append(struct chronus *c, const void *data, size_t len) {
    if (c->input_eof || c->child.in < 0 || len == 0)
        return true; /* a command that closed its stdin takes no more, and that is no fault of the writer */
    if (c->input_len + len > c->input_cap) {
        uint8_t *buf = realloc(c->input, c->input_len + len);
        if (!buf)
            return false;
        c->input = buf;
        c->input_cap = c->input_len + len;
    }
    memcpy(c->input + c->input_len, data, len);
    c->input_len += len;
    return true;
}

static void credit_stdin(struct chronus *c) {
    if (!c->current || !c->input_owed)
        return;
    for (struct reader *r = c->current->readers; r; r = r->next) {
        if (!r->stdin_told)
            continue;
        uint8_t bytes[8];
        for (int i = 0; i < 8; i++)
            bytes[i] = (uint8_t)((uint64_t)c->input_owed >> 8 * i);
        out_begin(&r->pending, K_CREDIT, 0);
        out_raw(&r->pending, bytes, 8);
        out_end(&r->pending);
    }
    c->input_owed = 0;
}

void input_flush(struct chronus *c) {
    size_t done = 0;
    while (c->child.in >= 0 && done < c->input_len) {
        ssize_t n = write(c->child.in, c->input + done, c->input_len - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0) {
            close_fd(&c->child.in);
            done = c->input_len;
            break;
        }
        done += (size_t)n;
    }
    memmove(c->input, c->input + done, c->input_len - done);
    c->input_len -= done;
    if (!c->shell)
        c->input_owed += done;
    if (!c->input_len && c->input_eof && c->child.in >= 0) {
        /* A terminal has no half-close: end of file is a character. */
        char eof = 4;
        if (c->request.tty && write(c->child.in, &eof, 1) < 0)
            errno = 0;
        close_fd(&c->child.in);
    }
    credit_stdin(c);
}

void stdin_welcome(struct chronus *c, struct reader *r) {
    if (c->shell || c->child.in < 0 || c->request.stdin_data)
        return;
    r->stdin_told = true;
    uint8_t bytes[8];
    size_t window = c->input_len < STDIN_WINDOW ? STDIN_WINDOW - c->input_len : 0;
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)((uint64_t)window >> 8 * i);
    out_begin(&r->pending, K_CREDIT, 0);
    out_raw(&r->pending, bytes, 8);
    out_end(&r->pending);
}
