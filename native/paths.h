#ifndef DSEC_PATHS_H
#define DSEC_PATHS_H

#include "io.h"

/* Fills t from errno: which kind of error it is, and what could not be done to which path. */
int fail_errno(struct trouble *t, const char *field, const char *path, const char *doing);
int open_inside(int root, const char *path, int flags, int mode);
/* The folder that holds path's last part, and that part in `base`. "/" has none. With `make`, missing folders are made. */
int open_parent(int root, const char *path, char *base, size_t size, bool make, struct trouble *t);

#endif
