/* Run a program with the runtime's command: write a case's inputs to files, start the command without a shell, and read
 * its output files. */
#define _GNU_SOURCE
#include "verifier.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern volatile sig_atomic_t interrupted;

const char *const runtime_help =
    "COMMAND is the runtime's program (default: iree-run-module, executor_runner), or a full command line. The verifier\n"
    "replaces {module}, {function}, {device}, {folder}, {case}, {data} and {inputs,} (the files, separated by commas). It\n"
    "replaces the words {inputs}, {outputs} and {parameters} with one flag for each. The command starts without a shell. It\n"
    "writes output N to {folder}/o-N.npy, or to o-N.bin (only the elements) for ExecuTorch and dtypes that .npy lacks.\n";

static const char *const IREE[] = {"iree-run-module", "--module={module}", "--device={device}", "--function={function}",
                                   "{parameters}",    "{inputs}",          "{outputs}",         NULL};
static const char *const EXECUTORCH[] = {"executor_runner",    "--model_path={module}",     "{method}", "{shapes}",
                                         "--inputs={inputs,}", "--output_file={folder}/o", "{weights}", NULL};

static struct {
    const struct bundle *bundle;
    struct settings settings;
    const char *const *words;
    size_t words_count;
    char folder[512];   /* directory of the program */
    char run[600];      /* directory of a case, in ``folder`` */
    bool is_iree, is_executorch;
    struct mapping *outputs; /* output files of the last case */
    size_t outputs_count;
} state;

/* ---- directories */

static const char *scratch(void)
{
    const char *place = getenv("TMPDIR");
    return place && *place ? place : "/tmp";
}

void runtime_open(const struct bundle *bundle, const struct settings *settings)
{
    state.bundle = bundle;
    state.settings = *settings;
    state.is_iree = !strcmp(bundle->runtime, "iree");
    state.is_executorch = !strcmp(bundle->runtime, "executorch");
    state.words = state.is_iree ? IREE : state.is_executorch ? EXECUTORCH : NULL;
    if (settings->arguments_count > 1 || !state.words)
        state.words = (const char *const *)settings->arguments;
    if (settings->arguments_count < (state.words == IREE || state.words == EXECUTORCH ? 0 : 2))
        refuse("add a command line after the bundle, see --help",
               "missing command for the runtime '%s'", bundle->runtime);
    for (state.words_count = 0; state.words[state.words_count];)
        state.words_count++;
    if (snprintf(state.folder, sizeof state.folder, "%s/hil-verify-XXXXXX", scratch()) >= (int)sizeof state.folder ||
        !mkdtemp(state.folder)) {
        *state.folder = 0;
        refuse("set TMPDIR to a directory with free space", "cannot create a directory in %s: %s", scratch(),
               strerror(errno));
    }
    for (size_t i = 0; i < bundle->files_count; i++) {
        const struct program_file *file = &bundle->files[i];
        if (!write_file(state.folder, text_of("program/%s", file->name), file->data, file->size))
            refuse("set TMPDIR to a directory with free space", "%s/program/%s cannot be written: %s", state.folder,
                   file->name, strerror(errno));
    }
    snprintf(state.run, sizeof state.run, "%s/run", state.folder);
}

static void forget_outputs(void)
{
    for (size_t i = 0; i < state.outputs_count; i++)
        unmap(state.outputs[i]);
    state.outputs_count = 0;
}

void runtime_close(void)
{
    forget_outputs();
    free(state.outputs);
    state.outputs = NULL;
    if (*state.folder)
        remove_folder(state.folder);
    *state.folder = 0;
}

/* ---- tensors as files */

static size_t packed_size(const struct tensor *tensor)
{
    return (tensor->count * tensor->dtype->bits + 7) / 8;
}

static const uint8_t *packed(const struct tensor *tensor)
{
    unsigned bits = tensor->dtype->bits, lanes = 8 / bits;
    uint8_t *made = allocate(packed_size(tensor), 1);
    for (uint64_t i = 0; i < tensor->count; i++)
        made[i / lanes] = (uint8_t)(made[i / lanes] | (tensor->data[i] & ((1u << bits) - 1)) << (i % lanes * bits));
    return made;
}

static const uint8_t *unpacked(const struct tensor *tensor, const uint8_t *data)
{
    unsigned bits = tensor->dtype->bits, lanes = 8 / bits;
    uint8_t *made = allocate(tensor->count, 1);
    for (uint64_t i = 0; i < tensor->count; i++)
        made[i] = data[i / lanes] >> (i % lanes * bits) & ((1u << bits) - 1);
    return made;
}

/* Return true if an input of an IREE function is a number instead of a tensor. The declaration is ``sync func @main(%x:
 * tensor<2x?xf32>, %n: i32) -> (...)``. Names may contain almost any character. */
static bool is_number(const char *function, size_t place)
{
    const struct program_file *file = main_file(state.bundle);
    const char *end = (const char *)file->data + file->size, *at = NULL;
    for (int form = 0; form < 2 && !at; form++) {
        const char *begin = form ? text_of("func @\"%s\"(", function) : text_of("func @%s(", function);
        at = memmem(file->data, file->size, begin, strlen(begin));
        at = at ? at + strlen(begin) : NULL;
    }
    for (size_t number = 0; at; number++) {
        const char *type = memmem(at, (size_t)(end - at), ": ", 2), *next = type;
        for (int depth = 0; type && next < end; next++) {
            depth += *next == '<' ? 1 : *next == '>' ? -1 : 0;
            if (!depth && end - next > 3 && (!memcmp(next, ", %", 3) || !memcmp(next, ") -", 3)))
                break;
        }
        if (!type || next >= end || *next == ')' || number == place)
            return number == place && type && end - type > 9 && memcmp(type + 2, "tensor<", 7) &&
                   memcmp(type + 2, "!", 1);
        at = next + 3;
    }
    return false;
}

static _Noreturn void cannot_write(void)
{
    refuse("set TMPDIR to a directory with free space", "%s cannot be written: %s", state.run, strerror(errno));
}

struct words {
    char **items;
    size_t count, room;
};

static void add(struct words *words, char *word)
{
    if (words->count + 1 >= words->room) {
        words->items = enlarged(words->items, words->room, words->room + 32, sizeof *words->items);
        words->room = 2 * words->room + 32;
    }
    words->items[words->count++] = word;
}

static void write_raw(const char *name, const uint8_t *data, uint64_t size)
{
    if (!write_file(state.folder, name, data, size))
        cannot_write();
}

/* Write the file of an input and, for IREE, add the flag for it. */
static void write_input(const struct method *method, const struct tensor *tensor, size_t place, struct words *files,
                        struct words *flags)
{
    const struct dtype *dtype = tensor->dtype;
    char shape[768], value[64];
    if (state.is_iree && !tensor->rank && is_number(method->name, place)) {
        double parts[2];
        element(dtype, tensor->data, 0, parts);
        if (is_exact(dtype) && dtype->kind != 'u')
            snprintf(value, sizeof value, "%lld", (long long)integer(dtype, tensor->data, 0));
        else if (is_exact(dtype))
            show_element(value, sizeof value, dtype, tensor->data, 0, false);
        else
            snprintf(value, sizeof value, "%.17g", parts[0]);
        add(flags, text_of("--input=%s", value));
        return;
    }
    bool npy = !state.is_executorch && *dtype->npy && (!state.is_iree || dtype->kind == 'c');
    char *name = text_of("run/i-%zu.%s", place, npy ? "npy" : "bin"), *path = text_of("%s/%s", state.folder, name);
    add(files, path);
    show_shape(shape, sizeof shape, tensor);
    if (npy) {
        if (!write_npy(state.folder, name, tensor))
            cannot_write();
        add(flags, text_of("--input=@%s", path));
        return;
    }
    if (state.is_executorch) {
        uint64_t room = 1;
        for (unsigned axis = 0; axis < tensor->rank; axis++)
            if (__builtin_mul_overflow(room, tensor->room[axis], &room) || room > MAX_ELEMENTS)
                refuse("", "input %zu exceeds the element limit", place);
        write_raw(name, reordered(tensor, tensor->order, tensor->data, room, false), room * dtype->bytes);
    } else if (dtype->bits)
        write_raw(name, packed(tensor), packed_size(tensor));
    else
        write_raw(name, tensor->data, tensor->count * dtype->bytes);
    add(flags, text_of("--input=%s%s%s=@%s", tensor->rank ? shape : "", tensor->rank ? "x" : "", dtype->mlir, path));
}

static const char *output_name(const struct tensor *expected, size_t place)
{
    bool npy = !state.is_executorch && *expected->dtype->npy;
    return text_of("o-%zu.%s", place, npy ? "npy" : "bin");
}

/* Convert a number from the type of IREE's ABI, which is at least as wide, and in which integers have no sign. */
static void take_number_type(struct tensor *output, const struct dtype *wanted)
{
    const struct dtype *found = output->dtype;
    bool whole = strchr("bui", found->kind) && strchr("bui", wanted->kind);
    if (found == wanted)
        return;
    if (found->bytes == wanted->bytes && strchr("iu", found->kind) && strchr("iu", wanted->kind)) {
        output->dtype = wanted;
        return;
    }
    if (output->rank || found->bytes < wanted->bytes || (!whole && (found->kind != 'f' || wanted->kind != 'f')))
        return;
    uint8_t *data = allocate(1, 8);
    double parts[2];
    element(found, output->data, 0, parts);
    if (whole) {
        int64_t value = integer(found, output->data, 0);
        memcpy(data, &value, wanted->bytes);
    } else if (wanted->bytes == 4) {
        float value = (float)parts[0];
        memcpy(data, &value, 4);
    } else
        return;
    output->dtype = wanted;
    output->data = data;
}

static enum outcome read_output(struct tensor *output, const struct tensor *expected, size_t place, char *message,
                                size_t size)
{
    const char *name = output_name(expected, place);
    struct mapping file = map_file(text_of("%s/%s", state.run, name));
    state.outputs[state.outputs_count++] = file;
    bool is_empty = !file.data && errno == ENODATA;
    if (!file.data && !is_empty) {
        snprintf(message, size, "the command exited with 0 but did not write output %s (%s): %s", expected->name, name,
                 strerror(errno));
        return RUN_ERROR;
    }
    *output = *expected;
    output->data = file.data;
    if (strstr(name, ".npy")) {
        const char *wrong = is_empty ? "the file is empty" : read_npy(output, file);
        if (*wrong) {
            snprintf(message, size, "output %s cannot be read: %s", expected->name, wrong);
            return RUN_ERROR;
        }
        if (state.is_iree)
            take_number_type(output, expected->dtype);
        return PASS;
    }
    uint64_t wanted = expected->dtype->bits ? packed_size(expected) : expected->count * expected->dtype->bytes;
    if (file.size != wanted) {
        snprintf(message, size, "output %s has %llu bytes, expected %llu", expected->name,
                 (unsigned long long)file.size, (unsigned long long)wanted);
        return FAIL;
    }
    if (expected->dtype->bits)
        output->data = unpacked(expected, file.data);
    else if (state.is_executorch)
        output->data = reordered(expected, expected->order, file.data, expected->count, true);
    return PASS;
}

/* ---- the command */

static char *filled(const char *word, const char *const *names, const char *const *values)
{
    char *made = text_of("%s", "");
    while (*word) {
        size_t plain = strcspn(word, "{"), which = 0;
        made = text_of("%s%.*s", made, (int)plain, word);
        word += plain;
        if (!*word)
            break;
        while (names[which] && strncmp(word, names[which], strlen(names[which])))
            which++;
        made = text_of("%s%s", made, names[which] ? values[which] : "{");
        word += names[which] ? strlen(names[which]) : 1;
    }
    return made;
}

static char *by_commas(const struct words *words)
{
    size_t length = 1;
    for (size_t i = 0; i < words->count; i++)
        length += strlen(words->items[i]) + 1;
    char *made = allocate(length, 1), *to = made;
    for (size_t i = 0; i < words->count; i++)
        to += sprintf(to, i ? ",%s" : "%s", words->items[i]);
    return made;
}

/* Return the shapes of the inputs for the command, if an input is smaller than its maximum size. */
static char *input_shapes(const struct test_case *one)
{
    struct words shapes = {0};
    bool is_smaller = false;
    for (size_t i = 0; i < one->inputs_count; i++) {
        const struct tensor *tensor = &one->inputs[i];
        char shape[768] = "";
        if (tensor->rank)
            show_shape(shape, sizeof shape, tensor);
        add(&shapes, text_of("%s", shape));
        for (unsigned axis = 0; axis < tensor->rank; axis++)
            is_smaller |= tensor->shape[axis] != tensor->room[axis];
    }
    return is_smaller ? text_of("--input_shapes=%s", by_commas(&shapes)) : NULL;
}

static void add_parameters(struct words *words)
{
    for (size_t i = 0; i < state.bundle->files_count; i++) {
        const char *name = state.bundle->files[i].name;
        if (strcmp(name, state.bundle->main) && strlen(name) > 5 && !strcmp(name + strlen(name) - 5, ".irpa"))
            add(words, text_of("--parameters=model=%s/program/%s", state.folder, name));
    }
    if (*state.settings.data)
        add(words, text_of("--parameters=model=%s", state.settings.data));
}

/* Return the path of a .ptd file next to the program. */
static const char *weights(void)
{
    for (size_t i = 0; i < state.bundle->files_count && !*state.settings.data; i++) {
        const char *name = state.bundle->files[i].name;
        if (strlen(name) > 4 && !strcmp(name + strlen(name) - 4, ".ptd"))
            return text_of("%s/program/%s", state.folder, name);
    }
    return state.settings.data;
}

static char **command_line(const struct method *method, const struct test_case *one, const struct words *files,
                           const struct words *flags)
{
    const char *device = *state.settings.device || !state.is_iree ? state.settings.device : "local-task";
    const char *const names[] = {"{module}", "{function}", "{device}", "{folder}", "{case}", "{data}", "{inputs,}", NULL};
    const char *const values[] = {text_of("%s/program/%s", state.folder, state.bundle->main),
                                  method->name, device, state.run, one->name, weights(), by_commas(files)};
    struct words words = {0};
    for (size_t i = 0; i < state.words_count; i++) {
        const char *word = state.words[i];
        char *shapes;
        if (!i && state.settings.arguments_count == 1)
            word = state.settings.arguments[0];
        if (!strcmp(word, "{inputs}"))
            for (size_t j = 0; j < flags->count; j++)
                add(&words, flags->items[j]);
        else if (!strcmp(word, "{outputs}"))
            for (size_t j = 0; j < one->outputs_count; j++)
                add(&words, text_of("--output=@%s/%s", state.run, output_name(&one->outputs[j], j)));
        else if (!strcmp(word, "{parameters}"))
            add_parameters(&words);
        else if (!strcmp(word, "{method}")) {
            if (strcmp(method->name, "forward")) /* older runners do not have this flag */
                add(&words, text_of("--method_name=%s", method->name));
        } else if (!strcmp(word, "{shapes}")) {
            if ((shapes = input_shapes(one)))
                add(&words, shapes);
        } else if (!strcmp(word, "{weights}")) {
            if (*weights())
                add(&words, text_of("--data_path=%s", weights()));
        } else
            add(&words, filled(word, names, values));
    }
    add(&words, NULL);
    return words.items;
}

/* Return the end of the command's output, without characters that control a terminal. */
static const char *last_words(void)
{
    struct mapping log = map_file(text_of("%s/log", state.run));
    uint64_t length = log.size < 600 ? log.size : 600;
    char *made = allocate(length + 1, 1);
    if (log.data)
        memcpy(made, log.data + log.size - length, length);
    unmap(log);
    for (unsigned char *c = (unsigned char *)made; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = ' ';
    for (size_t end = strlen(made); end && made[end - 1] == ' ';)
        made[--end] = 0;
    return made;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void become(char **words, int failed)
{
    int log = open(text_of("%s/log", state.run), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    setpgid(0, 0);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    if (log >= 0 && nothing >= 0 && dup2(nothing, 0) >= 0 && dup2(log, 1) >= 0 && dup2(log, 2) >= 0 && !chdir(state.run))
        execvp(words[0], words);
    int error = errno;
    if (write(failed, &error, sizeof error) < 0)
        _exit(126);
    _exit(127);
}

static enum outcome execute(char **words, char *message, size_t size)
{
    int pipes[2], status = 0, error = 0;
    if (strchr(words[0], '/') && words[0][0] != '/') { /* the command starts in another directory */
        char *here = realpath(words[0], NULL);
        if (here)
            words[0] = text_of("%s", here);
        free(here);
    }
    if (pipe2(pipes, O_CLOEXEC))
        refuse("", "cannot create a pipe: %s", strerror(errno));
    fflush(NULL);
    pid_t child = fork();
    if (child < 0)
        refuse("", "cannot start a process: %s", strerror(errno));
    if (!child)
        become(words, pipes[1]);
    setpgid(child, child); /* also in the parent, because either process may be first */
    close(pipes[1]);
    bool failed = read(pipes[0], &error, sizeof error) == sizeof error;
    close(pipes[0]);
    double end = now() + state.settings.timeout_s;
    bool late = false;
    for (long pause = 200000; waitpid(child, &status, WNOHANG) == 0; pause = pause < 10000000 ? pause * 2 : pause) {
        late = now() > end;
        if (late || interrupted) {
            kill(-child, SIGKILL);
            waitpid(child, &status, 0);
            break;
        }
        nanosleep(&(struct timespec){0, pause}, NULL);
    }
    kill(-child, SIGKILL); /* kill remaining child processes */
    if (failed)
        snprintf(message, size, "%s cannot be started: %s", words[0], strerror(error));
    else if (late)
        snprintf(message, size, "timeout after %g s", state.settings.timeout_s);
    else if (WIFSIGNALED(status))
        snprintf(message, size, "the command was killed by signal %d: %s", WTERMSIG(status), last_words());
    else if (WEXITSTATUS(status))
        snprintf(message, size, "the command failed with exit code %d: %s", WEXITSTATUS(status), last_words());
    else
        return PASS;
    return failed ? LOAD_ERROR : late ? TIMEOUT : WIFSIGNALED(status) ? RUN_CRASH : RUN_ERROR;
}

enum outcome runtime_run(const struct method *method, const struct test_case *one, struct tensor *outputs, char *message,
                         size_t size)
{
    struct words files = {0}, flags = {0};
    forget_outputs();
    remove_folder(state.run);
    if (mkdir(state.run, 0700))
        cannot_write();
    for (int side = 0; side < 2; side++) {
        const struct tensor *tensors = side ? one->outputs : one->inputs;
        for (size_t i = 0; i < (side ? one->outputs_count : one->inputs_count); i++) {
            bool is_text = tensors[i].dtype->kind == 's';
            if (is_text || (side && tensors[i].is_number)) {
                snprintf(message, size, "%s: commands cannot %s %s", tensors[i].name, side ? "return" : "take",
                         is_text ? "strings" : "numbers");
                return LOAD_ERROR;
            }
        }
    }
    for (size_t i = 0; i < one->inputs_count; i++)
        write_input(method, &one->inputs[i], i, &files, &flags);
    enum outcome outcome = execute(command_line(method, one, &files, &flags), message, size);
    struct mapping *room = realloc(state.outputs, one->outputs_count * sizeof *room);
    if (!room)
        refuse("", "out of memory");
    state.outputs = room;
    for (size_t i = 0; i < one->outputs_count && outcome == PASS; i++)
        outcome = read_output(&outputs[i], &one->outputs[i], i, message, size);
    return outcome;
}
