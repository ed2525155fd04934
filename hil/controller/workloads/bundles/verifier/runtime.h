/* Functions that run the program of a bundle. command.c implements them with a command per case. To call the library of a
 * runtime instead, link a different source file with these functions (hil bundle verifier --runtime). */
#ifndef HIL_RUNTIME_H
#define HIL_RUNTIME_H

#include <stddef.h>

struct bundle;
struct method;
struct test_case;
struct tensor;

enum outcome { PASS, FAIL, BLIND, LOAD_ERROR, RUN_ERROR, RUN_CRASH, TIMEOUT, REFERENCE_ERROR };

struct settings {
    const char *device; /* "" selects the runtime's default */
    double timeout_s;   /* time limit of a case */
    const char *data;   /* file with weights next to the program (.ptd, .irpa); "" if there is none */
    char **arguments;   /* command-line arguments after the bundle */
    size_t arguments_count;
};

/* Prepare a program. The verifier calls this function once, before any other function. Call refuse() (verifier.h) for an
 * invalid command line. */
void runtime_open(const struct bundle *bundle, const struct settings *settings);

/* Run a case.
 *
 * outputs: a tensor for each expected output. Set dtype, rank, shape, count and data (C order). The data must stay valid
 *     until the next call. For values that the runtime does not know, copy those of the expected output.
 * message: the reason, if the result is not PASS.
 * Returns PASS if the outputs are available. The verifier then compares them with the expected outputs. */
enum outcome runtime_run(const struct method *method, const struct test_case *test_case, struct tensor *outputs,
                         char *message, size_t size);

void runtime_close(void);

/* Help text for the command-line arguments after the bundle. */
extern const char *const runtime_help;

#endif
