/* Command line of the verifier: run every case of a bundle and compare the outputs. */
#include "verifier.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

#ifndef HIL_VERSION
#define HIL_VERSION "?"
#endif

volatile sig_atomic_t interrupted;

static const char *const OUTCOMES[] = {"PASS", "FAIL", "BLIND", "LOAD_ERROR", "RUN_ERROR", "RUN_CRASH", "TIMEOUT", "REFERENCE_ERROR"};

static struct {
    const char *path, *method, *which;
    double rtol, atol;
    bool json, list;
    struct settings settings;
    struct bundle bundle;
    struct mapping file;
    size_t ran, passed;
    int code;
} job = {.method = "", .which = "", .rtol = NAN, .atol = NAN, .settings = {.device = "", .timeout_s = 60, .data = ""}};

static const char *const USAGE =
    "Usage: verify [OPTIONS] BUNDLE [COMMAND...]\n"
    "\n"
    "Run every case of a BUNDLE (.hilb, or ExecuTorch's .bpte) on this machine, and compare the outputs with the expected\n"
    "outputs.\n"
    "\n"
    "  --list         list the cases without running them\n"
    "  --method M     only this entry point\n"
    "  --case C       only this case: name, number, or METHOD/NAME\n"
    "  --rtol R       relative tolerance, instead of the bundle's\n"
    "  --atol A       absolute tolerance, instead of the bundle's\n"
    "  --device D     the runtime's device\n"
    "  --data FILE    the program's weights (.ptd, .irpa)\n"
    "  --timeout S    timeout of a case in seconds (default: 60)\n"
    "  --json         print one JSON document\n"
    "  --version      print the version of hil\n"
    "\n";

static const char *const EXIT_CODES =
    "\nExit codes: 0 all passed, 1 an output differs, 2 invalid bundle or usage, 3 a case failed to run, 5 no case to run,\n"
    "130 interrupted.\n"
    "Example: verify digits.hilb ./iree-run-module\n";

static void put_json(const char *text)
{
    putchar('"');
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if (*c == '"' || *c == '\\')
            printf("\\%c", *c);
        else if (*c < ' ')
            printf("\\u%04x", *c);
        else
            putchar(*c);
    putchar('"');
}

static void put_number(const char *key, double value)
{
    if (isnan(value))
        printf(", \"%s\": null", key);
    else if (isinf(value))
        printf(", \"%s\": \"inf\"", key);
    else
        printf(", \"%s\": %.17g", key, value);
}

static void put_shape(const char *key, const struct tensor *tensor)
{
    printf(", \"%s\": [", key);
    for (unsigned axis = 0; axis < tensor->rank; axis++)
        printf(axis ? ", %llu" : "%llu", (unsigned long long)tensor->shape[axis]);
    printf("]");
}

static void put_place(const char *what, bool known, uint64_t flat, const struct tensor *actual, const struct tensor *expected)
{
    char index[512], a[128], b[128];
    if (!known) {
        printf(", \"%s_index\": null, \"%s_values\": null", what, what);
        return;
    }
    show_index(index, sizeof index, actual, flat);
    show_element(a, sizeof a, actual->dtype, actual->data, flat, true);
    show_element(b, sizeof b, expected->dtype, expected->data, flat, true);
    printf(", \"%s_index\": %s, \"%s_values\": [%s, %s]", what, index, what, a, b);
}

static void put_output(const struct comparison *found, const struct tensor *actual, const struct tensor *expected)
{
    printf("{\"name\": ");
    put_json(expected->name);
    printf(", \"passed\": %s, \"reason\": ", found->passed ? "true" : "false");
    put_json(found->reason);
    printf(", \"dtype\": \"%s\"", actual->dtype->name);
    put_shape("shape", actual);
    printf(", \"reference_dtype\": \"%s\"", expected->dtype->name);
    put_shape("reference_shape", expected);
    printf(", \"tolerance\": %s, \"blind\": %s", *found->tolerance ? found->tolerance : "null",
           found->blind ? "true" : "false");
    if (found->has_stats)
        printf(", \"elements\": %llu, \"mismatches\": %llu, \"nonfinite\": %llu, \"masked\": %llu",
               (unsigned long long)found->elements, (unsigned long long)found->mismatches,
               (unsigned long long)found->nonfinite, (unsigned long long)found->masked);
    else
        printf(", \"elements\": null, \"mismatches\": null, \"nonfinite\": null, \"masked\": null");
    put_number("max_abs", found->max_abs);
    put_number("max_rel", found->max_rel);
    put_place("first", found->has_first, found->first, actual, expected);
    put_place("worst", found->has_worst, found->worst, actual, expected);
    printf("}");
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Count an outcome. The exit code is the most severe one, as in hil. */
static void count(enum outcome outcome)
{
    int code = outcome == PASS ? EXIT_ALL_PASSED : outcome <= BLIND ? EXIT_DIFFERS : EXIT_STAGE;
    job.code = job.ran++ && job.code > code ? job.code : code;
    job.passed += outcome == PASS;
}

static enum outcome outcome_of(const struct comparison *found, size_t count, const struct test_case *one, char *message,
                               size_t size)
{
    enum outcome outcome = PASS;
    for (size_t i = 0; i < count; i++) {
        enum outcome this = found[i].passed ? PASS : found[i].blind ? BLIND : FAIL;
        if (this != PASS && (outcome == PASS || (outcome == BLIND && this == FAIL))) {
            outcome = this;
            snprintf(message, size, "output %s: %s", one->outputs[i].name, found[i].reason);
        }
    }
    if (outcome == PASS && !strcmp(one->relation, SELF_CHECK)) {
        outcome = REFERENCE_ERROR;
        snprintf(message, size, "expected outputs computed by the program's own compiler");
    }
    return outcome;
}

static void report(const struct method *method, const struct test_case *one, enum outcome outcome, const char *message,
                   double seconds, const struct comparison *found, const struct tensor *outputs)
{
    if (job.json) {
        printf(job.ran > 1 ? ",\n  {\"method\": " : "\n  {\"method\": ");
        put_json(method->name);
        printf(", \"case\": ");
        put_json(one->name);
        printf(", \"relation\": \"%s\", \"outcome\": \"%s\", \"reason\": ", one->relation, OUTCOMES[outcome]);
        put_json(message);
        printf(", \"wall_s\": %.6f, \"outputs\": [", seconds);
        for (size_t i = 0; found && i < one->outputs_count; i++) {
            printf(i ? ", " : "");
            put_output(&found[i], &outputs[i], &one->outputs[i]);
        }
        printf("]}");
        return;
    }
    printf("%s  %s/%s", OUTCOMES[outcome], method->name, one->name);
    if (strcmp(one->relation, "independent"))
        printf(" (%s)", one->relation);
    if (found) {
        uint64_t elements = 0, mismatches = 0;
        double most = 0;
        for (size_t i = 0; i < one->outputs_count; i++) {
            elements += found[i].elements;
            mismatches += found[i].mismatches;
            most = fmax(most, found[i].max_abs);
        }
        printf("  %llu of %llu out of tolerance, max abs %.3g", (unsigned long long)mismatches,
               (unsigned long long)elements, most);
    }
    printf(*message ? "\n      %s\n" : "%s\n", message);
    fflush(stdout);
}

static void run_case(const struct method *method, struct test_case *one)
{
    char message[1600] = "";
    void *before = last_allocated();
    if (!isnan(job.rtol))
        one->rtol = job.rtol;
    if (!isnan(job.atol))
        one->atol = job.atol;
    check_tolerances(method->name, one);
    struct tensor *outputs = allocate(one->outputs_count, sizeof *outputs);
    struct comparison *found = allocate(one->outputs_count, sizeof *found);
    double begin = now();
    struct test_case whole = with_constants(method, one);
    enum outcome outcome = runtime_run(method, &whole, outputs, message, sizeof message);
    double seconds = now() - begin;
    if (interrupted)
        return;
    bool is_compared = outcome == PASS;
    if (is_compared) {
        for (size_t i = 0; i < one->outputs_count; i++)
            compare_output(&found[i], &outputs[i], &one->outputs[i], one->rtol, one->atol, &one->noise[i]);
        outcome = outcome_of(found, one->outputs_count, one, message, sizeof message);
    }
    count(outcome);
    report(method, one, outcome, message, seconds, is_compared ? found : NULL, outputs);
    free_after(before);
}

static bool has_case_named(const struct method *method, const char *name)
{
    for (size_t i = 0; i < method->cases_count; i++)
        if (!strcmp(name, method->cases[i].name))
            return true;
    return false;
}

/* ``by_number``: also accept the number of a case, because no case has the requested name. */
static bool is_chosen(const struct method *method, size_t number, bool by_number)
{
    const char *name = method->cases[number].name;
    void *before = last_allocated();
    bool found = !*job.which || !strcmp(job.which, name) || !strcmp(job.which, text_of("%s/%s", method->name, name)) ||
                 (by_number && !strcmp(job.which, text_of("%zu", number)));
    free_after(before);
    return found;
}

static void list_case(const struct method *method, const struct test_case *given)
{
    char shape[768];
    void *before = last_allocated();
    const struct test_case whole = with_constants(method, given), *one = &whole;
    if (job.json) {
        printf(job.ran ? ",\n  {\"method\": " : "\n  {\"method\": ");
        put_json(method->name);
        printf(", \"case\": ");
        put_json(one->name);
        printf("}");
    } else {
        printf("%s/%s:", method->name, one->name);
        for (size_t i = 0; i < one->inputs_count + one->outputs_count; i++) {
            bool out = i >= one->inputs_count;
            const struct tensor *tensor = out ? &one->outputs[i - one->inputs_count] : &one->inputs[i];
            show_shape(shape, sizeof shape, tensor);
            printf("%s %s: %s %s", i == one->inputs_count ? " ->" : i ? "," : "", tensor->name, shape, tensor->dtype->name);
        }
        printf("\n");
    }
    job.ran++;
    free_after(before);
}

static void each_case(void *unused)
{
    (void)unused;
    bool known = !*job.method, found = !*job.which;
    for (size_t m = 0; m < job.bundle.methods_count; m++) {
        const struct method *method = &job.bundle.methods[m];
        if (*job.method && strcmp(job.method, method->name))
            continue;
        known = true;
        bool by_number = !has_case_named(method, job.which);
        for (size_t c = 0; c < method->cases_count && !interrupted; c++) {
            if (!is_chosen(method, c, by_number))
                continue;
            found = true;
            if (job.list)
                list_case(method, &method->cases[c]);
            else
                run_case(method, &method->cases[c]);
        }
    }
    if (!known)
        refuse("list them with verify --list", "the bundle has no method '%s'", job.method);
    if (!found)
        refuse("list them with verify --list", "the bundle has no case '%s'", job.which);
}

static void open_bundle(void *unused)
{
    (void)unused;
    job.file = map_file(job.path);
    if (!job.file.data)
        refuse("expected a .hilb or a .bpte file", "%s cannot be read: %s", job.path,
               errno == ENODATA ? "the file is empty" : errno == EINVAL ? "not a regular file" : strerror(errno));
    if (is_hilb(job.file.data, job.file.size))
        read_hilb(&job.bundle, job.file.data, job.file.size);
    else if (is_bpte(job.file.data, job.file.size))
        read_bpte(&job.bundle, job.file.data, job.file.size);
    else
        refuse("expected a .hilb or a .bpte file", "%s is not a bundle", job.path);
    if (!job.list)
        runtime_open(&job.bundle, &job.settings);
}

static double seconds_or_tolerance(const char *option, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (!*text || *end || !isfinite(value) || value < 0)
        refuse("see --help", "invalid %s '%s': expected a number of 0 or more", option, text);
    return value;
}

static void parse(void *context)
{
    char **words = context;
    for (words++; *words && **words == '-' && strcmp(*words, "--"); words++) {
        const char *option = *words;
        if (!strcmp(option, "--json") || !strcmp(option, "--list")) {
            *(option[2] == 'j' ? &job.json : &job.list) = true;
            continue;
        }
        const char *value = words[1];
        const struct {
            const char *name, **text;
            double *number;
        } known[] = {{"--method", &job.method, NULL},          {"--case", &job.which, NULL},
                     {"--rtol", NULL, &job.rtol},              {"--atol", NULL, &job.atol},
                     {"--device", &job.settings.device, NULL}, {"--data", &job.settings.data, NULL},
                     {"--timeout", NULL, &job.settings.timeout_s}};
        size_t which = 0;
        while (which < sizeof known / sizeof *known && strcmp(known[which].name, option))
            which++;
        if (which == sizeof known / sizeof *known)
            refuse("see --help", "unknown option %s", option);
        if (!value)
            refuse("see --help", "%s requires a value", option);
        if (known[which].text)
            *known[which].text = value;
        else
            *known[which].number = seconds_or_tolerance(option, value);
        words++;
    }
    if (*words && !strcmp(*words, "--"))
        words++;
    if (!*words)
        refuse("see --help", "missing argument BUNDLE");
    job.path = *words++;
    if (*words && !strcmp(*words, "--"))
        words++;
    job.settings.arguments = words;
    while (words[job.settings.arguments_count])
        job.settings.arguments_count++;
}

static int end_with(int code, const char *message, const char *hint)
{
    fflush(stdout);
    fprintf(stderr, "verify: %s\n", message);
    if (*hint)
        fprintf(stderr, "  hint: %s\n", hint);
    return code;
}

static void interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

int main(int count, char **words)
{
    char message[1200];
    const char *hint = "";
    struct utsname machine = {0};
    if (count > 1 && (!strcmp(words[1], "--help") || !strcmp(words[1], "-h")))
        return printf("%s%s%s", USAGE, runtime_help, EXIT_CODES) < 0;
    if (count > 1 && !strcmp(words[1], "--version"))
        return printf("hil %s\n", HIL_VERSION) < 0;
    struct sigaction action = {.sa_handler = interrupt};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    uname(&machine);
    job.code = EXIT_NOTHING_RAN;
    bool fine = attempt(parse, words, message, sizeof message, &hint);
    if (fine && (fine = attempt(open_bundle, NULL, message, sizeof message, &hint))) {
        if (job.json) {
            printf("{\"schema\": 1, \"bundle\": ");
            put_json(job.path);
            printf(", \"runtime\": ");
            put_json(job.bundle.runtime);
            printf(", \"machine\": {\"hostname\": ");
            put_json(machine.nodename);
            printf(", \"arch\": ");
            put_json(machine.machine);
            printf("}, \"cases\": [");
        } else if (job.bundle.is_signed && !job.list)
            printf("the bundle is signed: this verifier does not check signatures\n");
        fine = attempt(each_case, NULL, message, sizeof message, &hint);
        if (job.list)
            job.code = EXIT_ALL_PASSED;
        if (!fine)
            job.code = EXIT_USAGE;
        if (interrupted)
            job.code = EXIT_INTERRUPTED;
        if (job.json) {
            printf("], \"error\": ");
            if (fine)
                printf("null");
            else
                put_json(message);
            printf(", \"exit_code\": %d}\n", job.code);
        } else if (fine && !job.list)
            printf("%zu of %zu cases passed on %s (%s)\n", job.passed, job.ran, machine.nodename, machine.machine);
    } else
        job.code = EXIT_USAGE;
    if (!job.list)
        runtime_close();
    free_after(NULL);
    unmap(job.file);
    if (!fine)
        return end_with(EXIT_USAGE, message, hint);
    return interrupted ? end_with(EXIT_INTERRUPTED, "interrupted", "") : job.code;
}
