/* Errors in files and command lines, and memory allocation. */
#include "verifier.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static struct {
    jmp_buf back;
    bool is_set;
    char message[1024];
    const char *hint;
} handler;

void refuse(const char *hint, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(handler.message, sizeof handler.message, format, values);
    va_end(values);
    handler.hint = hint;
    if (!handler.is_set)
        abort(); /* internal error: every call that may refuse runs inside attempt() */
    longjmp(handler.back, 1);
}

bool attempt(void (*work)(void *), void *context, char *message, size_t size, const char **hint)
{
    handler.is_set = true;
    if (setjmp(handler.back) == 0) {
        work(context);
        handler.is_set = false;
        return true;
    }
    handler.is_set = false;
    snprintf(message, size, "%s", handler.message);
    *hint = handler.hint;
    return false;
}

/* Allocated memory is freed at the end: the content of a bundle, and texts about it. */
struct block {
    struct block *next;
    max_align_t data[];
};
static struct block *blocks;

static void *taken(struct block *block)
{
    if (!block)
        refuse("", "out of memory");
    block->next = blocks;
    blocks = block;
    return block->data;
}

void *allocate(uint64_t count, uint64_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX / 2)
        refuse("", "out of memory");
    return taken(calloc(1, sizeof(struct block) + bytes));
}

void *enlarged(void *old, size_t count, size_t more, size_t size)
{
    void *made = allocate(count + more, size);
    if (count)
        memcpy(made, old, count * size);
    return made;
}

char *text_of(const char *format, ...)
{
    va_list values, again;
    va_start(values, format);
    va_copy(again, values);
    int length = vsnprintf(NULL, 0, format, values);
    va_end(values);
    char *made = allocate((size_t)length + 1, 1);
    vsnprintf(made, (size_t)length + 1, format, again);
    va_end(again);
    return made;
}

void *last_allocated(void)
{
    return blocks;
}

void free_after(void *last)
{
    while (blocks != last) {
        struct block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
}
