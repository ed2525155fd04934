/* Whether the C verifier reads bundles: of each on stdin (its size in 8 bytes, then the file) a line, "1" or "0 MESSAGE". */
#include "verifier.h"

#include <stdlib.h>

struct input {
    const uint8_t *data;
    uint64_t size;
};

static void read_it(void *context)
{
    const struct input *input = context;
    struct bundle bundle = {0};
    if (!is_hilb(input->data, input->size))
        refuse("", "it is no bundle");
    read_hilb(&bundle, input->data, input->size);
}

int main(void)
{
    struct input input;
    while (fread(&input.size, 8, 1, stdin) == 1) {
        uint8_t *data = malloc(input.size + 1);
        char message[1200] = "";
        const char *hint;
        if (!data || fread(data, 1, input.size, stdin) != input.size)
            return EXIT_USAGE;
        input.data = data;
        bool fine = attempt(read_it, &input, message, sizeof message, &hint);
        printf(fine ? "1\n" : "0 %s\n", message);
        fflush(stdout);
        free_after(NULL);
        free(data);
    }
    return 0;
}
