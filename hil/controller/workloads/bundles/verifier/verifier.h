/* The verifier of bundles (docs/bundles.md): what its parts share. */
#ifndef HIL_VERIFIER_H
#define HIL_VERIFIER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus /* runtimes' libraries are often of C++ */
extern "C" {
#endif

/* The limits of hil/bundles/manifest.py. */
enum { MAX_RANK = 32, MAX_NAME = 255, MAX_TEXT = 1 << 16, MAX_DEPTH = 16, MAX_FILES = 1000, MAX_METHODS = 1000, MAX_CASES = 100000, MAX_TENSORS = 10000 };
#define MAX_ELEMENTS ((uint64_t)1 << 48)

/* ---- errors.c: what is wrong with a file or a command line; memory, all of it freed at the end */

/* Exit codes are hil's. */
enum { EXIT_ALL_PASSED = 0, EXIT_DIFFERS = 1, EXIT_USAGE = 2, EXIT_STAGE = 3, EXIT_NOTHING_RAN = 5, EXIT_INTERRUPTED = 130 };

/* Ends the reading of a file, or the program, with a message; it does not return. */
void refuse(const char *hint, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));
/* Calls ``work``; false where it was refused, with message and hint. */
bool attempt(void (*work)(void *), void *context, char *message, size_t size, const char **hint);
void *allocate(uint64_t count, uint64_t size); /* 64 bits on boards of 32 too: what is too much is refused, not cut off */
/* A larger array that begins as the old one. */
void *enlarged(void *old, size_t count, size_t more, size_t size);
char *text_of(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Frees all that was allocated since; NULL is the beginning. */
void *last_allocated(void);
void free_after(void *last);

/* ---- dtypes.c: the dtypes of hil/core/tensors.py, with what hil/compare/tolerance.py says of each */

struct dtype {
    const char *name;
    char kind; /* b: bool, i, u: integers, f: float, c: complex, s: texts */
    uint8_t bytes; /* of an element */
    uint8_t bits;  /* of an element where a runtime packs several into a byte; else 0 */
    const char *mlir, *npy; /* its name in IREE's types and in .npy files; "" where there is none */
    double rtol, atol, eps, smallest, largest; /* of floats; complex ones have those of their parts */
};

const struct dtype *dtype_named(const char *name);
/* By its name in .npy files, without the order of bytes: "f4". */
const struct dtype *dtype_of_npy(const char *name);
/* ExecuTorch's ScalarType; NULL where hil has none for it. */
const struct dtype *dtype_of_scalar_type(int number);
bool is_exact(const struct dtype *dtype);
bool is_wide_integer(const struct dtype *dtype);
/* The real and the imaginary part of an element. */
void element(const struct dtype *dtype, const uint8_t *data, size_t index, double parts[2]);
/* An element of an integer or a bool; unsigned ones as their bits. */
int64_t integer(const struct dtype *dtype, const uint8_t *data, size_t index);
/* An element for people and, with ``json``, for JSON. */
void show_element(char *text, size_t size, const struct dtype *dtype, const uint8_t *data, size_t index, bool json);

/* ---- what a file holds */

struct tensor {
    const char *name;
    const struct dtype *dtype;
    unsigned rank;
    uint64_t shape[MAX_RANK];
    const uint8_t *data; /* in C order; one byte an element where the dtype is narrower; NULL for texts */
    uint64_t count;      /* elements */
    /* How its dimensions lie in the runtime's memory, the outermost first, and the sizes of that memory. Only of
     * ExecuTorch's tensors, whose program says so: else 0, 1, 2... and the shape. */
    uint8_t order[MAX_RANK];
    uint64_t room[MAX_RANK];
    bool is_number; /* ExecuTorch: an int, bool or double, no tensor; IREE: see program_takes_numbers */
};

/* A case whose expected outputs were computed by the compiler of the program: it cannot pass. */
#define SELF_CHECK "self-check"

struct test_case {
    const char *name;
    const char *relation; /* of who computed what is expected to the program */
    size_t inputs_count, outputs_count;
    struct tensor *inputs, *outputs;
    struct tensor *noise; /* one an output; those without a dtype are not known */
    double rtol, atol;   /* NaN is the dtype's default */
};

struct method {
    const char *name;
    size_t cases_count;
    struct test_case *cases;
    const struct entry *entry; /* of a .hilb for ExecuTorch: what the program says of the method */
};

struct program_file {
    const char *name;
    const uint8_t *data;
    uint64_t size;
};

struct bundle {
    const char *runtime, *main;
    bool is_signed;
    size_t files_count, methods_count;
    struct program_file *files;
    struct method *methods;
};

/* bundle.c: a .hilb file. executorch.c: a .bpte file. Both refuse what is damaged; names and data point into it. */
bool is_hilb(const uint8_t *data, uint64_t size);
bool is_bpte(const uint8_t *data, uint64_t size);
void read_hilb(struct bundle *bundle, const uint8_t *data, uint64_t size);
void read_bpte(struct bundle *bundle, const uint8_t *data, uint64_t size);
/* How the tensors of a .hilb for ExecuTorch lie in its memory. */
void take_layouts(struct bundle *bundle);
/* A case as it is run: in a .hilb the numbers that an ExecuTorch program was exported with are no inputs; the command is
 * given them all the same. */
struct test_case with_constants(const struct method *method, const struct test_case *given);
/* Elements in C order as they lie in such an order of dimensions or, with ``back``, the other way; ``room`` elements. */
const uint8_t *reordered(const struct tensor *tensor, const uint8_t *order, const uint8_t *data, uint64_t room, bool back);
/* Refuse a case whose tolerances could not fail. */
void check_tolerances(const char *method, const struct test_case *test_case);
const struct program_file *main_file(const struct bundle *bundle);
uint64_t elements_of(unsigned rank, const uint64_t *shape, const char *where);

/* ---- compare.c: hil/compare */

struct comparison {
    bool passed, blind;
    char reason[768]; /* why not; "" where it passed */
    char tolerance[96];
    bool has_stats, has_first, has_worst;
    uint64_t elements, mismatches, nonfinite, masked, first, worst;
    double max_abs, max_rel; /* NaN where they are not known */
};

void compare_output(struct comparison *found, const struct tensor *actual, const struct tensor *expected, double rtol,
                    double atol, const struct tensor *noise);
/* "[0, 3]" */
void show_index(char *text, size_t size, const struct tensor *tensor, uint64_t flat);
void show_shape(char *text, size_t size, const struct tensor *tensor);

/* ---- allowance.c: hil/compare/allowance.py, hil/compare/small.py */

struct allowance {
    const struct tensor *noise; /* NULL: none */
    double share, rms, largest, widest;
    bool is_rare;
};

struct allowance allowance_of(const struct tensor *noise, const struct tensor *expected, double rms, double eps);
/* What an element may differ by over and above the tolerance; ``all``: whatever the ceiling is. */
double allowed_at(const struct allowance *allowance, const struct tensor *expected, uint64_t index, bool all);
/* The share of a small value that it may be off by. */
double relative_limit(const struct dtype *dtype, double rtol, bool given);
/* Whether small values differ by more than they may: how many, and the first; none where noise is as large as they are. */
bool has_small_loss(const struct tensor *actual, const struct tensor *expected, double rtol, double atol, bool given,
                    const struct allowance *allowance, uint64_t *lost, uint64_t *first);

/* ---- files.c */

struct mapping {
    const uint8_t *data;
    uint64_t size;
};

struct mapping map_file(const char *path);
void unmap(struct mapping mapping);
/* A new file below a folder, with the folders that its name asks for. False: errno tells. */
bool write_file(const char *folder, const char *name, const uint8_t *data, uint64_t size);
void remove_folder(const char *folder);
/* A tensor as a .npy file. */
bool write_npy(const char *folder, const char *name, const struct tensor *tensor);
/* The tensor in a .npy file, which stays mapped; "" or what is wrong. */
const char *read_npy(struct tensor *tensor, struct mapping file);

#include "runtime.h"

#ifdef __cplusplus
}
#endif

#endif
