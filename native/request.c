/* From an EXEC, SHELL or RUN frame to what is to be run. */
#define _GNU_SOURCE
#include "spawn.h"

#include <errno.h>
#include <stdlib.h>

static char **text_slot(struct request *r, int tag) {
    switch (tag) {
    case T_SESSION_ID: return &r->id;
    case T_OP_ID: return &r->op_id;
    case T_SHELL_TEXT: return &r->shell_text;
    case T_CWD: return &r->cwd;
    case T_USER: return &r->user;
    default: return NULL;
    }
}

static int64_t *number_slot(struct request *r, int tag) {
    switch (tag) {
    case T_TTY: return &r->tty;
    case T_ROWS: return &r->rows;
    case T_COLS: return &r->cols;
    case T_STDIN_OPEN: return &r->stdin_open;
    case T_TIMEOUT_NS: return &r->timeout_ns;
    case T_GRACE_NS: return &r->grace_ns;
    case T_OUTPUT_LIMIT: return &r->output_limit;
    case T_BACKGROUND: return &r->background;
    case T_LIVE: return &r->live;
    case T_CREDIT_BYTES: return &r->credit;
    case T_CWD_FALLBACK: return &r->cwd_fallback;
    default: return NULL;
    }
}

static const char *field_name(int tag) {
    switch (tag) {
    case T_ARG: return "argv";
    case T_SHELL_TEXT: return "shell";
    case T_CWD: return "cwd";
    case T_USER: return "user";
    case T_ENV: return "env";
    case T_RLIMIT: return "rlimits";
    default: return NULL;
    }
}

static int request_field(struct request *r, const struct field *f) {
    char **text = text_slot(r, f->tag);
    int64_t *number = number_slot(r, f->tag);
    if (text)
        return *text ? -1 : (*text = field_text(f, FRAME_MAX)) ? 0 : -1;
    if (number)
        return field_is_number(f) && (*number = field_number(f)) >= 0 ? 0 : -1;
    switch (f->tag) {
    case T_ARG: return list_add(&r->args, f, FRAME_MAX);
    case T_ENV: return list_add(&r->env, f, FRAME_MAX);
    case T_RLIMIT: return list_add(&r->rlimits, f, 128);
    case T_STDIN_DATA:
        r->stdin_data = f->value;
        r->stdin_length = f->length;
        return 0;
    default: return 0;
    }
}

int request_parse(struct request *r, const struct frame *f, struct trouble *t) {
    *r = (struct request){.grace_ns = 2000000000, .output_limit = 4 << 20, .credit = 1 << 20, .rows = 24, .cols = 80};
    struct fields fs = fields_of(f);
    struct field field;
    int n;
    while ((n = field_next(&fs, &field)) == 1)
        if (request_field(r, &field) < 0)
            return fail(t, "invalid_argument", field_name(field.tag), 0, "field %d is malformed, holds a NUL or is given twice", field.tag);
    if (n < 0 || !r->id)
        return fail(t, "invalid_argument", NULL, 0, "the request is malformed or has no SESSION_ID");
    if (f->kind == K_EXEC && !r->args.count && !r->shell_text)
        return fail(t, "invalid_argument", "argv", 0, "argv is empty");
    /* Far beyond any life of a sandbox, and far from where sums of times overflow. */
    const int64_t for_ever = 1LL << 58;
    if (r->timeout_ns > for_ever)
        r->timeout_ns = for_ever;
    if (r->grace_ns > for_ever)
        r->grace_ns = for_ever;
    if (r->rows > 65535 || r->cols > 65535)
        return fail(t, "invalid_argument", "rows", 0, "a terminal has at most 65535 rows and columns");
    return 0;
}

void request_free(struct request *r) {
    char *texts[] = {r->id, r->op_id, r->shell_text, r->cwd, r->user};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        free(texts[i]);
    list_free(&r->args);
    list_free(&r->env);
    list_free(&r->rlimits);
    *r = (struct request){0};
}
