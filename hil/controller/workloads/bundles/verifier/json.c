#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const HINT = "the file was not written by hil, or is damaged: get it again";
enum { MAX_DEPTH = 40 };

struct parser {
    struct json *json;
    uint32_t at, size, room;
};

static _Noreturn void damaged(void)
{
    refuse(HINT, "the manifest is not written as canonical JSON");
}

static char here(const struct parser *parser)
{
    return parser->at < parser->size ? parser->json->text[parser->at] : 0;
}

static void expect(struct parser *parser, char wanted)
{
    if (here(parser) != wanted)
        damaged();
    parser->at++;
}

static uint32_t new_node(struct parser *parser, char kind)
{
    struct json *json = parser->json;
    if (json->count == parser->room) {
        uint32_t more = parser->room + 64;
        json->nodes = enlarged(json->nodes, parser->room, more, sizeof *json->nodes);
        parser->room += more;
    }
    json->nodes[json->count] = (struct node){.kind = kind, .start = parser->at, .end = parser->at};
    return json->count++;
}

static void parse_string(struct parser *parser)
{
    expect(parser, '"');
    uint32_t node = new_node(parser, '"');
    for (char c; (c = here(parser)) != '"'; parser->at++) {
        if (c < ' ' || c > '~')
            damaged();
        if (c != '\\')
            continue;
        parser->at++;
        c = here(parser);
        if (c == 'u') {
            for (int i = 0; i < 4; i++) {
                parser->at++;
                c = here(parser);
                if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f')))
                    damaged();
            }
        } else if (!c || !strchr("\"\\bfnrt", c))
            damaged();
    }
    parser->json->nodes[node].end = parser->at++;
    parser->json->nodes[node].next = parser->json->count;
}

static uint32_t code_unit(const char *text)
{
    uint32_t unit = 0;
    for (int i = 0; i < 4; i++)
        unit = unit * 16 + (uint32_t)(text[i] <= '9' ? text[i] - '0' : text[i] - 'a' + 10);
    return unit;
}

/* The character at ``at`` of a string, which moves behind it. */
static uint32_t character(const char *text, uint32_t *at, uint32_t end)
{
    char c = text[(*at)++];
    if (c != '\\')
        return (uint32_t)c;
    c = text[(*at)++];
    if (c != 'u') {
        const char *plain = "\"\\bfnrt", *meant = "\"\\\b\f\n\r\t";
        return (uint32_t)meant[strchr(plain, c) - plain];
    }
    uint32_t unit = code_unit(text + *at);
    *at += 4;
    if (unit < 0xD800 || unit > 0xDFFF)
        return unit;
    if (unit > 0xDBFF || end - *at < 6 || text[*at] != '\\' || text[*at + 1] != 'u')
        refuse(HINT, "the manifest holds half a character");
    uint32_t low = code_unit(text + *at + 2);
    if (low < 0xDC00 || low > 0xDFFF)
        refuse(HINT, "the manifest holds half a character");
    *at += 6;
    return 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
}

/* Keys are in the order of their characters, so that none stands twice. */
static bool follows(const struct json *json, uint32_t before, uint32_t after)
{
    const struct node *a = &json->nodes[before], *b = &json->nodes[after];
    uint32_t i = a->start, j = b->start;
    while (i < a->end && j < b->end) {
        uint32_t one = character(json->text, &i, a->end), other = character(json->text, &j, b->end);
        if (one != other)
            return one < other;
    }
    return j < b->end;
}

static void parse_value(struct parser *parser, int depth);

static void parse_items(struct parser *parser, char kind, char closing, int depth)
{
    uint32_t node = new_node(parser, kind), count = 0, key = 0;
    if (depth == MAX_DEPTH)
        refuse(HINT, "the manifest is too deep");
    parser->at++;
    while (here(parser) != closing) {
        if (count++)
            expect(parser, ',');
        if (kind == '{') {
            uint32_t before = key;
            key = parser->json->count;
            parse_string(parser);
            if (count > 1 && !follows(parser->json, before, key))
                damaged();
            expect(parser, ':');
        }
        parse_value(parser, depth + 1);
    }
    parser->at++;
    parser->json->nodes[node].count = count;
    parser->json->nodes[node].end = parser->at;
    parser->json->nodes[node].next = parser->json->count;
}

static void parse_plain(struct parser *parser)
{
    uint32_t node = new_node(parser, 0);
    while (here(parser) && strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", here(parser)))
        parser->at++;
    struct node *made = &parser->json->nodes[node];
    made->end = parser->at;
    made->next = parser->json->count;
    const char *text = parser->json->text + made->start;
    uint32_t length = made->end - made->start;
    if ((length == 4 && (!memcmp(text, "true", 4) || !memcmp(text, "null", 4))) ||
        (length == 5 && !memcmp(text, "false", 5)))
        made->kind = *text;
    else if (!length || !strchr("-0123456789", *text))
        damaged();
}

static void parse_value(struct parser *parser, int depth)
{
    char c = here(parser);
    if (c == '{')
        parse_items(parser, '{', '}', depth);
    else if (c == '[')
        parse_items(parser, '[', ']', depth);
    else if (c == '"')
        parse_string(parser);
    else
        parse_plain(parser);
}

void parse_json(struct json *json, const char *text, uint32_t size)
{
    *json = (struct json){.text = text};
    struct parser parser = {.json = json, .size = size};
    parse_value(&parser, 0);
    if (parser.at != size)
        damaged();
}

static bool is_whole(const struct json *json, uint32_t node)
{
    const struct node *found = &json->nodes[node];
    if (found->kind || found->end - found->start > 18)
        return false;
    for (uint32_t i = found->start; i < found->end; i++)
        if (json->text[i] < '0' || json->text[i] > '9')
            return false;
    return true;
}

static bool fits(const struct json *json, uint32_t node, char wanted)
{
    char kind = json->nodes[node].kind;
    switch (wanted) {
    case 'i':
        return is_whole(json, node);
    case 'D':
        if (kind == 'n')
            return true; /* fall through */
    case 'd':
        return !kind && !is_whole(json, node);
    case 'C': /* a container */
        return kind == '[' || kind == '{';
    default:
        return kind == wanted;
    }
}

void take(const struct json *json, uint32_t object, const char *where, const char *const *names, const char *kinds,
          uint32_t *found)
{
    size_t count = strlen(kinds);
    if (json->nodes[object].kind != '{' || json->nodes[object].count != count)
        refuse(HINT, "the bundle's manifest: %s must be an object of %zu fields", where, count);
    uint32_t node = object + 1;
    for (size_t i = 0; i < count; i++) {
        if (!is_string(json, node, names[i]))
            refuse(HINT, "the bundle's manifest: %s has no %s", where, names[i]);
        found[i] = node + 1;
        if (!fits(json, found[i], kinds[i]))
            refuse(HINT, "the bundle's manifest: %s.%s is of the wrong type", where, names[i]);
        node = json->nodes[found[i]].next;
    }
}

const char *string_at(const struct json *json, uint32_t number)
{
    const struct node *node = &json->nodes[number];
    char *made = allocate((size_t)(node->end - node->start) + 1, 1), *to = made;
    for (uint32_t at = node->start; at < node->end;) {
        uint32_t c = character(json->text, &at, node->end);
        if (c < 0x80)
            *to++ = (char)c;
        else if (c < 0x800) {
            *to++ = (char)(0xC0 | c >> 6);
            *to++ = (char)(0x80 | (c & 63));
        } else if (c < 0x10000) { /* six bytes of text make three */
            *to++ = (char)(0xE0 | c >> 12);
            *to++ = (char)(0x80 | (c >> 6 & 63));
            *to++ = (char)(0x80 | (c & 63));
        } else {
            *to++ = (char)(0xF0 | c >> 18);
            *to++ = (char)(0x80 | (c >> 12 & 63));
            *to++ = (char)(0x80 | (c >> 6 & 63));
            *to++ = (char)(0x80 | (c & 63));
        }
        if (!c)
            refuse(HINT, "the manifest holds a text with a zero in it");
    }
    return made;
}

const char *name_at(const struct json *json, uint32_t node, const char *where, bool may_be_empty)
{
    const char *name = string_at(json, node);
    bool shown = strlen(name) <= MAX_NAME_BYTES && (*name || may_be_empty);
    for (const unsigned char *c = (const unsigned char *)name; *c && shown; c++)
        shown = *c >= ' ' && *c != 0x7F && !(c[0] == 0xC2 && c[1] >= 0x80 && c[1] < 0xA1);
    if (!shown)
        refuse(HINT, "the bundle's manifest: %s is empty, too long, or holds characters that cannot be shown", where);
    return name;
}

bool is_string(const struct json *json, uint32_t node, const char *text)
{
    const struct node *found = &json->nodes[node];
    size_t length = strlen(text);
    return found->kind == '"' && found->end - found->start == length &&
           !memcmp(json->text + found->start, text, length);
}

uint64_t size_at(const struct json *json, uint32_t node, const char *where, uint64_t most)
{
    uint64_t value = 0;
    if (is_whole(json, node))
        for (uint32_t i = json->nodes[node].start; i < json->nodes[node].end; i++)
            value = value * 10 + (uint64_t)(json->text[i] - '0');
    if (!is_whole(json, node) || value > most)
        refuse(HINT, "the bundle's manifest: %s is no size", where);
    return value;
}

double number_at(const struct json *json, uint32_t node, const char *where)
{
    char text[64], *end;
    const struct node *found = &json->nodes[node];
    uint32_t length = found->end - found->start;
    if (length >= sizeof text)
        refuse(HINT, "the bundle's manifest: %s is no number", where);
    memcpy(text, json->text + found->start, length);
    text[length] = 0;
    double value = strtod(text, &end);
    if (*end || !isfinite(value))
        refuse(HINT, "the bundle's manifest: %s is no number", where);
    return value;
}
