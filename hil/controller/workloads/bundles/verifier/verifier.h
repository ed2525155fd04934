/* Shared declarations of the bundle verifier (docs/bundles.md). */
#ifndef HIL_VERIFIER_H
#define HIL_VERIFIER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus /* libraries of runtimes are often in C++ */
extern "C" {
#endif

/* The limits of hil/bundles/manifest.py. */
enum { MAX_RANK = 32, MAX_NAME = 255, MAX_TEXT = 1 << 16, MAX_DEPTH = 16, MAX_FILES = 1000, MAX_METHODS = 1000, MAX_CASES = 100000, MAX_TENSORS = 10000 };
#define MAX_ELEMENTS ((uint64_t)1 << 48)

/* ---- errors.c: errors in files and command lines; memory, which is freed at the end */

/* Same exit codes as hil. */
enum { EXIT_ALL_PASSED = 0, EXIT_DIFFERS = 1, EXIT_USAGE = 2, EXIT_STAGE = 3, EXIT_NOTHING_RAN = 5, EXIT_INTERRUPTED = 130 };

/* Stop reading a file, or exit the program, with a message. Does not return. */
void refuse(const char *hint, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));
/* Call ``work``. Returns false, with message and hint, if ``work`` called refuse(). */
bool attempt(void (*work)(void *), void *context, char *message, size_t size, const char **hint);
void *allocate(uint64_t count, uint64_t size); /* 64-bit arguments, so that 32-bit boards do not truncate large sizes */
/* Return a larger array that starts with the elements of the old one. */
void *enlarged(void *old, size_t count, size_t more, size_t size);
char *text_of(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* free_after frees all later allocations. NULL frees everything. */
void *last_allocated(void);
void free_after(void *last);

/* ---- dtypes.c: the dtypes of hil/core/tensors.py, with the values of hil/compare/tolerance.py */

struct dtype {
    const char *name;
    char kind; /* b: bool, i, u: integers, f: float, c: complex, s: strings */
    uint8_t bytes; /* bytes per element */
    uint8_t bits;  /* per element, if a runtime packs multiple elements into a byte; else 0 */
    const char *mlir, *npy; /* name in IREE types and in .npy files; "" if there is none */
    double rtol, atol, eps, smallest, largest; /* for floats; complex dtypes have the values of their parts */
};

const struct dtype *dtype_named(const char *name);
/* Find a dtype by the name in .npy files, without the byte order: "f4". */
const struct dtype *dtype_of_npy(const char *name);
/* Find the dtype of an ExecuTorch ScalarType; NULL if hil does not support it. */
const struct dtype *dtype_of_scalar_type(int number);
bool is_exact(const struct dtype *dtype);
bool is_wide_integer(const struct dtype *dtype);
/* Return the real and the imaginary part of an element. */
void element(const struct dtype *dtype, const uint8_t *data, size_t index, double parts[2]);
/* Return an element of an integer or bool tensor; unsigned values as bits. */
int64_t integer(const struct dtype *dtype, const uint8_t *data, size_t index);
/* Format an element as text or, with ``json``, as JSON. */
void show_element(char *text, size_t size, const struct dtype *dtype, const uint8_t *data, size_t index, bool json);

/* ---- content of a file */

struct tensor {
    const char *name;
    const struct dtype *dtype;
    unsigned rank;
    uint64_t shape[MAX_RANK];
    const uint8_t *data; /* in C order; one byte per element for narrower dtypes; NULL for strings */
    uint64_t count;      /* elements */
    /* Order of the dimensions in the runtime's memory, outermost first, and their sizes in memory. Only ExecuTorch
     * programs define them. For other tensors: 0, 1, 2... and the shape. */
    uint8_t order[MAX_RANK];
    uint64_t room[MAX_RANK];
    bool is_number; /* ExecuTorch: an int, bool or double instead of a tensor; IREE: see program_takes_numbers */
};

/* A case whose expected outputs were computed by the compiler of the program: it cannot pass. */
#define SELF_CHECK "self-check"

struct test_case {
    const char *name;
    const char *relation; /* relation of the reference for the expected outputs to the program */
    size_t inputs_count, outputs_count;
    struct tensor *inputs, *outputs;
    struct tensor *noise; /* one per output; without a dtype if unknown */
    double rtol, atol;   /* NaN selects the dtype's default */
};

struct method {
    const char *name;
    size_t cases_count;
    struct test_case *cases;
    const struct entry *entry; /* .hilb for ExecuTorch: description of the method in the program */
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

/* bundle.c: a .hilb file. executorch.c: a .bpte file. Both reject damaged files. Names and data point into the file. */
bool is_hilb(const uint8_t *data, uint64_t size);
bool is_bpte(const uint8_t *data, uint64_t size);
void read_hilb(struct bundle *bundle, const uint8_t *data, uint64_t size);
void read_bpte(struct bundle *bundle, const uint8_t *data, uint64_t size);
/* Set the memory order of the tensors in a .hilb for ExecuTorch. */
void take_layouts(struct bundle *bundle);
/* Return a case with all arguments for a run. In a .hilb, the constants of an exported ExecuTorch program are not inputs,
 * but the command needs them. */
struct test_case with_constants(const struct method *method, const struct test_case *given);
/* Convert elements from C order to this order of dimensions or, with ``back``, to C order. Returns ``room`` elements. */
const uint8_t *reordered(const struct tensor *tensor, const uint8_t *order, const uint8_t *data, uint64_t room, bool back);
/* Reject a case with tolerances that cannot fail. */
void check_tolerances(const char *method, const struct test_case *test_case);
const struct program_file *main_file(const struct bundle *bundle);
uint64_t elements_of(unsigned rank, const uint64_t *shape, const char *where);

/* ---- compare.c: hil/compare */

struct comparison {
    bool passed, blind;
    char reason[768]; /* reason for a failure; "" if passed */
    char tolerance[96];
    bool has_stats, has_first, has_worst;
    uint64_t elements, mismatches, nonfinite, masked, first, worst;
    double max_abs, max_rel; /* NaN if unknown */
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
/* Return the allowed difference of an element in addition to the tolerance; with ``all``, ignore the ceiling. */
double allowed_at(const struct allowance *allowance, const struct tensor *expected, uint64_t index, bool all);
/* Return the allowed relative error of a small value. */
double relative_limit(const struct dtype *dtype, double rtol, bool given);
/* Return true if small values differ by more than allowed; set their number and the first. Ignores values that are not
 * larger than the noise. */
bool has_small_loss(const struct tensor *actual, const struct tensor *expected, double rtol, double atol, bool given,
                    const struct allowance *allowance, uint64_t *lost, uint64_t *first);

/* ---- files.c */

struct mapping {
    const uint8_t *data;
    uint64_t size;
};

struct mapping map_file(const char *path);
void unmap(struct mapping mapping);
/* Create a file below a directory, and the directories in the name. Returns false and sets errno on failure. */
bool write_file(const char *folder, const char *name, const uint8_t *data, uint64_t size);
void remove_folder(const char *folder);
/* Write a tensor as a .npy file. */
bool write_npy(const char *folder, const char *name, const struct tensor *tensor);
/* Read the tensor in a .npy file. The file must stay mapped. Returns "" or an error text. */
const char *read_npy(struct tensor *tensor, struct mapping file);

#include "runtime.h"

#ifdef __cplusplus
}
#endif

#endif
