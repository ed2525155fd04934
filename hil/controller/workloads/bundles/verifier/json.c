#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const HINT = "the file was not written by hil, or is corrupt: copy it from its source";
enum { MAX_LEVELS = 40, MAX_DIGITS = 4300 /* limit for integers, as in Python */ };

struct parser {
    struct json *json;
    uint32_t at, size, room;
};

static _Noreturn void damaged(void)
{
    refuse(HINT, "the manifest is not canonical JSON");
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

static uint32_t code_unit(const char *text)
{
    uint32_t unit = 0;
    for (int i = 0; i < 4; i++)
        unit = unit * 16 + (uint32_t)(text[i] <= '9' ? text[i] - '0' : text[i] - 'a' + 10);
    return unit;
}

uint32_t character(const char *text, uint32_t *at, uint32_t end)
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
        refuse(HINT, "the manifest contains an unpaired surrogate");
    uint32_t low = code_unit(text + *at + 2);
    if (low < 0xDC00 || low > 0xDFFF)
        refuse(HINT, "the manifest contains an unpaired surrogate");
    *at += 6;
    return 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
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
            /* Only characters without another form may be escaped. */
            uint32_t unit = code_unit(parser->json->text + parser->at - 3);
            if ((unit >= ' ' && unit <= '~') || (unit && unit < 128 && strchr("\b\f\n\r\t", (char)unit)))
                damaged();
        } else if (!c || !strchr("\"\\bfnrt", c))
            damaged();
    }
    uint32_t end = parser->at++;
    parser->json->nodes[node].end = end;
    parser->json->nodes[node].next = parser->json->count;
    for (uint32_t at = parser->json->nodes[node].start; at < end;)
        character(parser->json->text, &at, end); /* rejects an incomplete character */
}

/* Return true if keys are in order of their characters, which also excludes duplicates. */
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
    if (depth == MAX_LEVELS)
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

/* Return true if the text of a float is the text that Python writes: the shortest text for this number. */
static bool is_shortest(const char *text, uint32_t length)
{
    char copy[40], digits[40], made[40];
    if (length >= sizeof copy)
        return false;
    memcpy(copy, text, length);
    copy[length] = 0;
    double value = strtod(copy, NULL);
    if (!isfinite(value))
        return false;
    const char *sign = *copy == '-' ? "-" : "";
    value = fabs(value);
    /* Digits of the text, without leading and trailing zeros. */
    size_t count = 0;
    for (const char *c = copy; *c && *c != 'e'; c++)
        if (*c >= '0' && *c <= '9' && (count || *c != '0'))
            digits[count++] = *c;
    while (count && digits[count - 1] == '0')
        count--;
    if (!count)
        return !strcmp(copy + strlen(sign), "0.0");
    int precision = (int)count;
    if (precision > 17)
        return false;
    for (int less = precision > 1 ? precision - 1 : 1; less <= precision; less++) {
        char other[17];
        size_t places = 0;
        snprintf(made, sizeof made, "%.*e", less - 1, value);
        if (strtod(made, NULL) != value)
            continue;
        if (less < precision)
            return false;
        for (const char *c = made; *c != 'e'; c++)
            if (*c != '.')
                other[places++] = *c;
        if (memcmp(other, digits, count))
            return false;
    }
    /* Find the exponent with printf. */
    snprintf(made, sizeof made, "%.*e", precision - 1, value);
    int exponent = atoi(strchr(made, 'e') + 1);
    digits[count] = 0;
    char wanted[64];
    if (exponent < -4 || exponent >= 16)
        snprintf(wanted, sizeof wanted, "%s%c%s%se%c%02d", sign, *digits, count > 1 ? "." : "", digits + 1,
                 exponent < 0 ? '-' : '+', abs(exponent));
    else if (exponent < 0)
        snprintf(wanted, sizeof wanted, "%s0.%.*s%s", sign, -exponent - 1, "000", digits);
    else if ((int)count <= exponent + 1)
        snprintf(wanted, sizeof wanted, "%s%s%.*s.0", sign, digits, exponent + 1 - (int)count, "000000000000000");
    else
        snprintf(wanted, sizeof wanted, "%s%.*s.%s", sign, exponent + 1, digits, digits + exponent + 1);
    return !strcmp(wanted, copy);
}

static bool is_number(const char *text, uint32_t length)
{
    uint32_t at = length && *text == '-', digits = 0;
    while (at + digits < length && text[at + digits] >= '0' && text[at + digits] <= '9')
        digits++;
    if (!digits || (digits > 1 && text[at] == '0'))
        return false;
    if (at + digits == length) /* the integer 0 has no sign */
        return digits <= MAX_DIGITS && !(at && text[at] == '0');
    return is_shortest(text, length);
}

static void parse_plain(struct parser *parser)
{
    uint32_t node = new_node(parser, 0);
    while (here(parser) && strchr("+-.0123456789abcdefghijklmnopqrstuvwxyz", here(parser)))
        parser->at++;
    struct node *made = &parser->json->nodes[node];
    made->end = parser->at;
    made->next = parser->json->count;
    const char *text = parser->json->text + made->start;
    uint32_t length = made->end - made->start;
    if ((length == 4 && (!memcmp(text, "true", 4) || !memcmp(text, "null", 4))) ||
        (length == 5 && !memcmp(text, "false", 5)))
        made->kind = *text;
    else if (!is_number(text, length))
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

static bool is_float(const struct json *json, uint32_t node)
{
    const struct node *found = &json->nodes[node];
    const char *text = json->text + found->start;
    return memchr(text, '.', found->end - found->start) || memchr(text, 'e', found->end - found->start);
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
        return !kind && is_float(json, node);
    case 'C': /* list or object */
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
            refuse(HINT, "the bundle's manifest: %s: missing field %s", where, names[i]);
        found[i] = node + 1;
        if (!fits(json, found[i], kinds[i]))
            refuse(HINT, "the bundle's manifest: %s.%s has the wrong type", where, names[i]);
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
        } else if (c < 0x10000) { /* six bytes of text become three bytes */
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
            refuse(HINT, "the manifest contains a string with a null character");
    }
    return made;
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
        refuse(HINT, "the bundle's manifest: %s is not a valid size", where);
    return value;
}

double number_at(const struct json *json, uint32_t node, const char *where)
{
    char text[64], *end;
    const struct node *found = &json->nodes[node];
    uint32_t length = found->end - found->start;
    if (length >= sizeof text)
        refuse(HINT, "the bundle's manifest: %s is not a number", where);
    memcpy(text, json->text + found->start, length);
    text[length] = 0;
    double value = strtod(text, &end);
    if (*end || !isfinite(value))
        refuse(HINT, "the bundle's manifest: %s is not a number", where);
    return value;
}
