#ifndef DSEC_USERS_H
#define DSEC_USERS_H

#include "io.h"

#include <sys/types.h>

struct user {
    int64_t uid, gid; /* inside */
    gid_t groups[64];
    int group_count;
    char name[128], home[256], shell[128];
};

/* `wanted`: name, uid, name:group or uid:gid. Either text may be NULL: the image has none. Ids must be below `limit`. */
int user_parse(const char *passwd, const char *groups, const char *wanted, int64_t limit, struct user *u, struct trouble *t);

#endif
