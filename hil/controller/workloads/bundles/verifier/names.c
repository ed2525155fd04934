/* Check names and texts in bundles, with the rules of hil/bundles/names.py. */
#include "json.h"

#include <string.h>

static const char *const HINT = "the file was not written by hil, or is corrupt: copy it from its source";

/* Same ranges as HIDDEN in names.py. */
static const uint32_t HIDDEN[][2] = {
    {0x00, 0x1F}, {0x7F, 0xA0}, {0xAD, 0xAD}, {0x600, 0x605}, {0x61C, 0x61C}, {0x6DD, 0x6DD}, {0x70F, 0x70F},
    {0x890, 0x891}, {0x8E2, 0x8E2}, {0x1680, 0x1680}, {0x180E, 0x180E}, {0x2000, 0x200F}, {0x2028, 0x202F},
    {0x205F, 0x206F}, {0x3000, 0x3000}, {0xD800, 0xF8FF}, {0xFDD0, 0xFDEF}, {0xFEFF, 0xFEFF}, {0xFFF9, 0xFFFB},
    {0x110BD, 0x110BD}, {0x110CD, 0x110CD}, {0x13430, 0x1343F}, {0x1BCA0, 0x1BCA3}, {0x1D173, 0x1D17A},
    {0xE0000, 0xE007F}, {0xF0000, 0x10FFFF},
};

static bool is_hidden(uint32_t code)
{
    size_t low = 0, high = sizeof HIDDEN / sizeof *HIDDEN;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code > HIDDEN[middle][1])
            low = middle + 1;
        else
            high = middle;
    }
    return (low < sizeof HIDDEN / sizeof *HIDDEN && code >= HIDDEN[low][0]) || (code & 0xFFFE) == 0xFFFE;
}

void check_text(const struct json *json, uint32_t node, const char *where, uint32_t most, bool may_be_empty)
{
    const struct node *found = &json->nodes[node];
    bool is_shown = found->kind == '"';
    uint32_t count = 0, at = found->start;
    for (; is_shown && at < found->end; count++)
        is_shown = !is_hidden(character(json->text, &at, found->end)) && count < most;
    if (!is_shown || !(count || may_be_empty))
        refuse(HINT, "the bundle's manifest: %s is empty, too long, or contains unprintable characters", where);
}

const char *name_at(const struct json *json, uint32_t node, const char *where)
{
    check_text(json, node, where, MAX_NAME, false);
    return string_at(json, node);
}

void check_runtime(const char *name)
{
    static const char *const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    size_t length = strlen(name);
    bool is_word = length && length <= 64 && strchr(letters, *name);
    for (const char *c = name; is_word && *c; c++)
        is_word = strchr(letters, *c) || strchr("._-", *c);
    if (!is_word)
        refuse(HINT, "the bundle's manifest: program.runtime is not a valid runtime name");
}

static char folded(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

/* Return true if two files can be in the same directory, also if the file system ignores case: they have different
 * names, and neither is a directory that contains the other. */
bool go_together(const char *one, const char *other)
{
    while (*one && folded(*one) == folded(*other))
        one++, other++;
    return !((!*one && (!*other || *other == '/')) || (!*other && *one == '/'));
}

const char *file_name_at(const struct json *json, uint32_t node)
{
    const char *name = name_at(json, node, "program.files");
    bool fine = strlen(name) <= MAX_NAME && *name != '/' && !strpbrk(name, "\\:");
    for (const char *part = name; fine; part++) {
        size_t length = strcspn(part, "/");
        fine = length && !(length == 1 && *part == '.') && !(length == 2 && !memcmp(part, "..", 2));
        part += length;
        if (!*part)
            break;
    }
    if (!fine)
        refuse(HINT, "the bundle's manifest: program.files has a name that is not a path inside the program's directory");
    return name;
}
