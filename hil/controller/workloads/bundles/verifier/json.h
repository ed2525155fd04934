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
/* A string, its escapes resolved. */
const char *string_at(const struct json *json, uint32_t node);
/* The character at ``at`` of a text of JSON, which moves behind it. */
uint32_t character(const char *text, uint32_t *at, uint32_t end);
bool is_string(const struct json *json, uint32_t node, const char *text);
uint64_t size_at(const struct json *json, uint32_t node, const char *where, uint64_t most);
double number_at(const struct json *json, uint32_t node, const char *where);

/* ---- names.c */

/* Refuse a string that cannot be shown, or has more characters than it may have. */
void check_text(const struct json *json, uint32_t node, const char *where, uint32_t most, bool may_be_empty);
/* The name of something; the name of a program's file. */
const char *name_at(const struct json *json, uint32_t node, const char *where);
const char *file_name_at(const struct json *json, uint32_t node);
bool go_together(const char *one, const char *other);
void check_runtime(const char *name);

#endif
