/* JSON in the form of hil's manifests: ASCII, without spaces, with sorted keys. */
#ifndef HIL_JSON_H
#define HIL_JSON_H

#include "verifier.h"

/* Node of a parsed JSON text. Nodes are in an array in the order of the text: the content of a list or an object
 * follows its node. */
struct node {
    char kind; /* {, [, ", 0 for a number, t, f or n */
    uint32_t start, end; /* range in the text; for a string or a key, without the quotes */
    uint32_t count;      /* number of items or, for an object, of keys */
    uint32_t next;       /* next node after this node and its content */
};

struct json {
    const char *text;
    struct node *nodes;
    uint32_t count;
};

void parse_json(struct json *json, const char *text, uint32_t size);
/* Return the fields of an object, which must have exactly these names, in sorted order. ``kinds`` has a character per
 * field: {, [, ", i for an integer of at least 0, d for a float, D for a float or null. */
void take(const struct json *json, uint32_t object, const char *where, const char *const *names, const char *kinds,
          uint32_t *found);
/* Return a string with resolved escapes. */
const char *string_at(const struct json *json, uint32_t node);
/* Return the character at position ``at`` of a JSON text, and move ``at`` behind it. */
uint32_t character(const char *text, uint32_t *at, uint32_t end);
bool is_string(const struct json *json, uint32_t node, const char *text);
uint64_t size_at(const struct json *json, uint32_t node, const char *where, uint64_t most);
double number_at(const struct json *json, uint32_t node, const char *where);

/* ---- names.c */

/* Reject a string that is not printable, or has more than ``most`` characters. */
void check_text(const struct json *json, uint32_t node, const char *where, uint32_t most, bool may_be_empty);
/* Return a name. file_name_at returns the name of a program's file. */
const char *name_at(const struct json *json, uint32_t node, const char *where);
const char *file_name_at(const struct json *json, uint32_t node);
bool go_together(const char *one, const char *other);
void check_runtime(const char *name);

#endif
