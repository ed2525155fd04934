/* What runs a bundle's program. command.c starts a command for each case; another source with these functions, linked in
 * its place (hil bundle verifier --runtime), calls a runtime's library. */
#ifndef HIL_RUNTIME_H
#define HIL_RUNTIME_H

#include <stddef.h>

struct bundle;
struct method;
struct test_case;
struct tensor;

enum outcome { PASS, FAIL, BLIND, LOAD_ERROR, RUN_ERROR, RUN_CRASH, TIMEOUT, REFERENCE_ERROR };

struct settings {
    const char *device; /* "" is the runtime's default */
    double timeout_s;   /* of a case */
    const char *data;   /* a file of weights beside the program (.ptd, .irpa); "" where there is none */
    char **arguments;   /* what follows the bundle on the command line */
    size_t arguments_count;
};

/* Take a program; called once, before all else. Refuses (verifier.h) a command line that it cannot use. */
void runtime_open(const struct bundle *bundle, const struct settings *settings);

/* Run a case.
 *
 * outputs: one for each that the case expects, to be filled in: dtype, rank, shape, count and data, in C order, which must
 *     stay until the next call. What the runtime does not tell of a tensor is taken from what is expected.
 * message: why it is not PASS.
 * Returns PASS where the outputs are there: whether they are right is not the runtime's business. */
enum outcome runtime_run(const struct method *method, const struct test_case *test_case, struct tensor *outputs,
                         char *message, size_t size);

void runtime_close(void);

/* What follows the bundle on the command line, for --help. */
extern const char *const runtime_help;

#endif
