/* Mutated bundles for the C verifier: fuzz FILE SEED COUNT. Whatever a file says, it is read or refused.
 *
 * The file ends where memory does, and so does every block that the verifier allocates: one byte too far ends the process.
 * It is built with -fsanitize=undefined, -Dcalloc=guarded_calloc and -Dfree=guarded_free. */
#define _GNU_SOURCE
#include "blake3.h"
#include "verifier.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#undef calloc
#undef free

enum { PAGE = 4096, SLOTS = 1 << 14, HEADER = 192 };
static uint8_t *slots;
static size_t slot;
static uint64_t random_state;

static uint8_t *mapped(size_t bytes)
{
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    uint8_t *found = mmap(NULL, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED || mprotect(found + whole, PAGE, PROT_NONE))
        return NULL;
    return found;
}

void *guarded_calloc(size_t count, size_t size)
{
    size_t bytes = (count * size + 15) / 16 * 16;
    if (count * size > (size_t)1 << 28)
        return NULL; /* as a small board would say */
    if (bytes > PAGE - 16 || slot == SLOTS) {
        size_t whole = (bytes + 16 + PAGE - 1) / PAGE * PAGE;
        uint8_t *found = mapped(whole);
        if (!found)
            return NULL;
        memcpy(found + whole - bytes - 16, &whole, sizeof whole);
        return found + whole - bytes;
    }
    uint8_t *page = slots + 2 * PAGE * slot++;
    memset(page, 0, PAGE);
    return page + PAGE - bytes;
}

void guarded_free(void *block)
{
    uint8_t *at = block;
    if (at >= slots && at < slots + 2 * PAGE * (size_t)SLOTS)
        return;
    size_t whole;
    memcpy(&whole, at - 16, sizeof whole);
    munmap(at - ((uintptr_t)(at - 16) % PAGE) - 16, whole + PAGE);
}

static uint64_t chosen(uint64_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return below ? random_state % below : 0;
}

/* Changes some bytes of data[from..size); returns the new size, which may be ``room`` at most. */
static uint64_t mutate(uint8_t *data, uint64_t from, uint64_t size, uint64_t room, bool is_text)
{
    static const char letters[] = "{}[]\",:0123456789-.eEntfu\\ blob";
    static const uint32_t numbers[] = {0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x10000};
    for (uint64_t times = 1 + chosen(4); times && size > from + 8; times--) {
        uint64_t at = from + chosen(size - from), other = from + chosen(size - from);
        uint64_t length = 1 + chosen(24);
        switch (chosen(is_text ? 5 : 6)) {
        case 0:
            data[at] = is_text ? (uint8_t)letters[chosen(sizeof letters - 1)] : (uint8_t)chosen(256);
            break;
        case 1: /* leave out */
            if (at + length < size) {
                memmove(data + at, data + at + length, size - at - length);
                size -= length;
            }
            break;
        case 2: /* say again */
            if (other + length < size && size + length <= room) {
                memmove(data + at + length, data + at, size - at);
                memmove(data + at, data + other, length);
                size += length;
            }
            break;
        case 3:
            if (other + length < size && at + length < size)
                memmove(data + at, data + other, length);
            break;
        case 4:
            if (is_text && data[at] >= '0' && data[at] <= '9')
                data[at] = (uint8_t)('0' + chosen(10));
            else
                data[at] ^= (uint8_t)(1u << chosen(is_text ? 7 : 8));
            break;
        default:
            at &= ~(uint64_t)3;
            if (at + 4 <= size)
                memcpy(data + at, &numbers[chosen(sizeof numbers / sizeof *numbers)], 4);
        }
    }
    return chosen(16) ? size : from + chosen(size - from);
}

/* A .hilb with its manifest changed, and all that stands for it in the header: else no change would get further. */
static uint64_t mutate_hilb(uint8_t *made, const uint8_t *data, uint64_t size)
{
    uint64_t manifest, rest;
    memcpy(&manifest, data + 24, 8);
    rest = (HEADER + manifest + 63) / 64 * 64;
    memcpy(made, data, HEADER + manifest);
    uint64_t text = mutate(made, HEADER, HEADER + manifest, HEADER + manifest + 200, true) - HEADER;
    uint64_t start = (HEADER + text + 63) / 64 * 64, whole = start + size - rest;
    memset(made + HEADER + text, 0, start - HEADER - text);
    memcpy(made + start, data + rest, size - rest);
    memcpy(made + 16, &whole, 8);
    memcpy(made + 24, &text, 8);
    blake3(made + HEADER, text, made + 32);
    if (!chosen(8))
        made[chosen(HEADER)] ^= (uint8_t)(1u << chosen(8));
    return whole;
}

struct input {
    const uint8_t *data;
    uint64_t size;
};

static void use(const struct test_case *one)
{
    char text[512];
    struct comparison found;
    for (size_t i = 0; i < one->outputs_count; i++)
        for (size_t j = 0; j < one->outputs_count + one->inputs_count; j++) {
            const struct tensor *actual = j < one->outputs_count ? &one->outputs[j] : &one->inputs[j - one->outputs_count];
            if (actual->dtype->kind == 's' || one->outputs[i].dtype->kind == 's')
                continue;
            compare_output(&found, actual, &one->outputs[i], one->rtol, one->atol, &one->noise[i]);
            show_shape(text, sizeof text, actual);
            if (found.has_worst)
                show_index(text, sizeof text, actual, found.worst);
        }
}

static void read_it(void *context)
{
    const struct input *input = context;
    struct bundle bundle = {0};
    if (is_hilb(input->data, input->size))
        read_hilb(&bundle, input->data, input->size);
    else if (is_bpte(input->data, input->size))
        read_bpte(&bundle, input->data, input->size);
    else
        refuse("", "it is no bundle");
    for (size_t m = 0; m < bundle.methods_count; m++)
        for (size_t c = 0; c < bundle.methods[m].cases_count; c++)
            use(&bundle.methods[m].cases[c]);
}

int main(int count, char **words)
{
    if (count != 4)
        return EXIT_USAGE;
    slots = mmap(NULL, 2 * PAGE * (size_t)SLOTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (size_t i = 0; i < SLOTS; i++)
        mprotect(slots + (2 * i + 1) * PAGE, PAGE, PROT_NONE);
    struct mapping file = map_file(words[1]);
    uint64_t room = file.size + 1024, whole = (room + PAGE - 1) / PAGE * PAGE;
    uint8_t *end = mapped(whole) + whole, *made = malloc(room);
    unsigned long read = 0, times = strtoul(words[3], NULL, 10);
    char message[1200];
    const char *hint;
    random_state = strtoul(words[2], NULL, 10) * 0x9E3779B97F4A7C15u + 1;
    for (unsigned long i = 0; i < times; i++) {
        uint64_t size = file.size;
        if (i && is_hilb(file.data, file.size))
            size = mutate_hilb(made, file.data, file.size);
        else {
            memcpy(made, file.data, size);
            size = i ? mutate(made, 0, size, room, false) : size; /* the first is the file as it is: it must be read */
        }
        memcpy(end - size, made, size);
        struct input input = {end - size, size};
        bool fine = attempt(read_it, &input, message, sizeof message, &hint);
        if (!i && !fine)
            return fprintf(stderr, "%s\n", message), EXIT_STAGE;
        read += fine;
        if (!fine && !*message)
            return EXIT_STAGE;
        free_after(NULL);
        slot = 0;
    }
    printf("%lu files, %lu read\n", times, read);
    return 0;
}
