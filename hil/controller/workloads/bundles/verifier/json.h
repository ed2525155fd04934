/* JSON as hil writes its manifests: ASCII, no spaces, keys in order. */
#ifndef HIL_JSON_H
#define HIL_JSON_H

#include "verifier.h"

/* An array of nodes in the order of the text: what a list or an object holds follows it. */
struct node {
    char kind; /* {, [, ", 0 for a number, t, f or n */
    uint32_t start, end; /* of the text; of a string or a key without its quotes */
    uint32_t count;      /* items; of an object, keys */
    uint32_t next;       /* the node after this one and all that it holds */
};

struct json {
    const char *text;
    struct node *nodes;
    uint32_t count;
};

void parse_json(struct json *json, const char *text, uint32_t size);
/* The fields of an object, which must be these, in the order of their names; ``kinds`` has a character for each: {, [, ",
 * i for a whole number of 0 or more, d for a float, D for a float or null. */
void take(const struct json *json, uint32_t object, const char *where, const char *const *names, const char *kinds,
          uint32_t *found);
/* A string, its escapes resolved; the name of something that can be shown. */
const char *string_at(const struct json *json, uint32_t node);
const char *name_at(const struct json *json, uint32_t node, const char *where, bool may_be_empty);
bool is_string(const struct json *json, uint32_t node, const char *text);
uint64_t size_at(const struct json *json, uint32_t node, const char *where, uint64_t most);
double number_at(const struct json *json, uint32_t node, const char *where);

#endif
