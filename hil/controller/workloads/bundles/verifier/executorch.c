/* ExecuTorch's files: the cases of a .bpte, and how a program's tensors lie in memory. Flatbuffers, whose fields are
 * numbered as in ExecuTorch's program.fbs and bundled_program_schema.fbs; see hil/formats/executorch_file.py. */
#include "verifier.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const HINT = "expected a serialized ExecuTorch BundledProgram";
enum { KIND_NONE = 1, KIND_INT = 2, KIND_BOOL = 3, KIND_DOUBLE = 4, KIND_TENSOR = 5 };
enum { BUNDLED_TENSOR = 1, BUNDLED_INT = 2, BUNDLED_BOOL = 3, BUNDLED_DOUBLE = 4 };

struct buffer {
    const uint8_t *data;
    uint64_t size;
    uint64_t left; /* bytes left to read, because a file may refer to the same part many times */
};

struct table {
    struct buffer *buffer;
    uint64_t at; /* position; 0 if the table is missing */
};

struct vector {
    uint64_t at; /* position of the first item */
    uint64_t count;
};

static _Noreturn void damaged(void)
{
    refuse(HINT, "the file is truncated or corrupt");
}

static void spend(struct buffer *buffer, uint64_t bytes)
{
    if (buffer->left < bytes)
        refuse(HINT, "the file is corrupt: too many repeated references");
    buffer->left -= bytes;
}

static uint64_t number(const struct buffer *buffer, uint64_t at, unsigned bytes)
{
    uint64_t value = 0;
    if (at > buffer->size || buffer->size - at < bytes)
        damaged();
    memcpy(&value, buffer->data + at, bytes);
    return value;
}

static struct table table_at(struct buffer *buffer, uint64_t at)
{
    spend(buffer, 4);
    uint64_t place = at + number(buffer, at, 4);
    number(buffer, place, 4);
    return (struct table){buffer, place};
}

/* Return the position of a field's value; 0 if the table does not have the field. */
static uint64_t field(struct table table, unsigned index)
{
    if (!table.at)
        return 0;
    int64_t to = (int64_t)table.at - (int32_t)number(table.buffer, table.at, 4);
    if (to < 0)
        damaged();
    if (4 + 2 * (uint64_t)index + 2 > number(table.buffer, (uint64_t)to, 2))
        return 0;
    uint64_t offset = number(table.buffer, (uint64_t)to + 4 + 2 * index, 2);
    return offset ? table.at + offset : 0;
}

static uint64_t scalar(struct table table, unsigned index, unsigned bytes)
{
    uint64_t at = field(table, index);
    return at ? number(table.buffer, at, bytes) : 0;
}

static struct table sub_table(struct table table, unsigned index)
{
    uint64_t at = field(table, index);
    return at ? table_at(table.buffer, at) : (struct table){table.buffer, 0};
}

static struct vector vector(struct table table, unsigned index, unsigned item_bytes)
{
    uint64_t at = field(table, index);
    if (!at)
        return (struct vector){0, 0};
    at += number(table.buffer, at, 4);
    uint64_t count = number(table.buffer, at, 4);
    if (count * item_bytes > table.buffer->size - at - 4) /* the count before the items has 4 bytes */
        damaged();
    return (struct vector){at + 4, count};
}

static struct table item(struct table table, struct vector list, uint64_t index)
{
    return table_at(table.buffer, list.at + 4 * index);
}

static const char *text(struct table table, unsigned index)
{
    struct vector found = vector(table, index, 1);
    if (found.count > MAX_NAME)
        refuse(HINT, "the file is corrupt: it has a name of %llu bytes", (unsigned long long)found.count);
    spend(table.buffer, found.count);
    char *made = allocate(found.count + 1, 1);
    if (found.count)
        memcpy(made, table.buffer->data + found.at, found.count);
    for (unsigned char *c = (unsigned char *)made; c < (unsigned char *)made + found.count; c++)
        if (*c < ' ' || *c > '~')
            *c = '?'; /* names are Python identifiers; replace other characters, which could control a terminal */
    return made;
}

static struct table root(struct buffer *buffer, const char *identifier)
{
    if (buffer->size < 8 || memcmp(buffer->data + 4, identifier, 4))
        refuse(HINT, "the file is not an ExecuTorch %s of version %s", *identifier == 'B' ? "bundled program" : "program",
               identifier);
    buffer->left = 16 * buffer->size;
    return table_at(buffer, 0);
}

/* ---- what a program says of its methods */

struct value {
    unsigned kind;
    const struct dtype *dtype; /* dtype of a tensor; NULL if hil does not support it */
    unsigned rank;
    uint64_t sizes[MAX_RANK]; /* maximum sizes for dynamic dimensions */
    uint8_t order[MAX_RANK];
    bool is_dynamic;
    uint64_t bits; /* value of a number */
};

struct entry {
    const char *name;
    size_t counts[2];
    struct value *sides[2]; /* values of the inputs and of the outputs */
    size_t tensors_count, *tensors; /* indices of the inputs that are tensors */
};

static void read_shape(struct table table, unsigned sizes_field, unsigned order_field, unsigned *rank, uint64_t *sizes,
                       uint8_t *order)
{
    struct vector listed = vector(table, sizes_field, 4), ordered = vector(table, order_field, 1);
    bool seen[MAX_RANK] = {false};
    if (listed.count > MAX_RANK || (ordered.count && ordered.count != listed.count))
        refuse(HINT, "the file is corrupt: invalid tensor shape");
    *rank = (unsigned)listed.count;
    for (unsigned axis = 0; axis < *rank; axis++) {
        int32_t size = (int32_t)number(table.buffer, listed.at + 4 * axis, 4);
        uint8_t place = ordered.count ? table.buffer->data[ordered.at + axis] : (uint8_t)axis;
        if (size < 0 || place >= *rank || seen[place])
            refuse(HINT, "the file is corrupt: invalid tensor shape");
        seen[place] = true;
        sizes[axis] = (uint64_t)size;
        order[axis] = place;
    }
    elements_of(*rank, sizes, "a tensor");
}

static struct value read_value(struct table table)
{
    struct value value = {.kind = (unsigned)scalar(table, 0, 1)};
    struct table held = sub_table(table, 1);
    if (!held.at)
        value.kind = KIND_NONE;
    else if (value.kind == KIND_TENSOR) {
        value.dtype = dtype_of_scalar_type((int8_t)scalar(held, 0, 1));
        read_shape(held, 2, 3, &value.rank, value.sizes, value.order);
        value.is_dynamic = scalar(held, 8, 1) != 0;
    } else if (value.kind == KIND_INT || value.kind == KIND_BOOL || value.kind == KIND_DOUBLE)
        value.bits = scalar(held, 0, value.kind == KIND_BOOL ? 1 : 8);
    return value;
}

/* Read the methods of a program. Returns their number. */
static size_t read_entries(struct buffer *buffer, struct entry **found)
{
    struct table program = root(buffer, "ET12");
    struct vector plans = vector(program, 1, 4);
    if (plans.count > MAX_METHODS)
        refuse(HINT, "the program has %llu methods, at most %d are allowed", (unsigned long long)plans.count, MAX_METHODS);
    struct entry *entries = *found = allocate(plans.count, sizeof *entries);
    for (uint64_t i = 0; i < plans.count; i++) {
        struct table plan = item(program, plans, i);
        struct vector values = vector(plan, 2, 4);
        entries[i].name = text(plan, 0);
        for (int side = 0; side < 2; side++) {
            struct vector places = vector(plan, side ? 4 : 3, 4);
            if (places.count > MAX_TENSORS)
                damaged();
            spend(buffer, 4 * places.count);
            entries[i].counts[side] = places.count;
            entries[i].sides[side] = allocate(places.count, sizeof(struct value));
            for (uint64_t j = 0; j < places.count; j++) {
                uint64_t place = number(buffer, places.at + 4 * j, 4);
                if (place >= values.count)
                    refuse(HINT, "the file is corrupt: a method refers to missing values");
                entries[i].sides[side][j] = read_value(item(plan, values, place));
            }
        }
    }
    return plans.count;
}

static struct entry *entry_named(struct entry *entries, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(entries[i].name, name))
            return &entries[i];
    refuse(HINT, "the file has cases for unknown method '%s'", name);
}

static void take_layout(struct tensor *tensor, const struct value *value, const char *where)
{
    bool fits = value->kind == KIND_TENSOR && value->dtype == tensor->dtype && value->rank == tensor->rank;
    for (unsigned axis = 0; fits && axis < tensor->rank; axis++)
        fits = value->is_dynamic ? tensor->shape[axis] <= value->sizes[axis]
                                 : tensor->shape[axis] == value->sizes[axis];
    if (!fits)
        refuse(HINT, "%s: dtype or shape of '%s' does not match the program", where, tensor->name);
    memcpy(tensor->order, value->order, sizeof value->order);
    memcpy(tensor->room, value->sizes, sizeof value->sizes);
}

static bool is_scalar_kind(unsigned kind)
{
    return kind == KIND_INT || kind == KIND_BOOL || kind == KIND_DOUBLE;
}

/* Store a number as a tensor without dimensions. */
static void fill_number(struct tensor *tensor, unsigned kind, const void *bits)
{
    tensor->dtype = dtype_named(kind == KIND_INT ? "int64" : kind == KIND_BOOL ? "bool" : "float64");
    uint8_t *data = allocate(1, 8);
    memcpy(data, bits, tensor->dtype->bytes);
    if (kind == KIND_BOOL)
        *data = *data != 0;
    tensor->data = data;
    tensor->count = 1;
    tensor->rank = 0;
    tensor->is_number = true;
}

/* Set the memory order of a case's tensors as in the program. Other inputs get the numbers from the export. */
static void take_layout_of(struct test_case *one, const struct entry *entry, const char *where)
{
    size_t taken = 0;
    for (size_t i = 0; i < entry->tensors_count; i++)
        if (taken == one->inputs_count)
            refuse(HINT, "%s: the program takes more inputs", where);
        else
            take_layout(&one->inputs[taken++], &entry->sides[0][entry->tensors[i]], where);
    if (taken != one->inputs_count)
        refuse(HINT, "%s: the program takes fewer inputs", where);
    taken = 0;
    for (size_t place = 0; place < entry->counts[1] && taken < one->outputs_count; place++)
        if (entry->sides[1][place].kind == KIND_TENSOR)
            take_layout(&one->outputs[taken++], &entry->sides[1][place], where);
}

/* Find the inputs that are tensors. The other inputs are numbers. */
static void find_tensors(struct entry *entry)
{
    entry->tensors = allocate(entry->counts[0], sizeof *entry->tensors);
    for (size_t place = 0; place < entry->counts[0]; place++)
        if (entry->sides[0][place].kind == KIND_TENSOR)
            entry->tensors[entry->tensors_count++] = place;
        else if (!is_scalar_kind(entry->sides[0][place].kind))
            refuse(HINT, "method '%s' has an unsupported input: expected tensors and numbers", entry->name);
}

void take_layouts(struct bundle *bundle)
{
    const struct program_file *main = main_file(bundle);
    struct buffer buffer = {main->data, main->size, 0};
    struct entry *entries;
    size_t count = read_entries(&buffer, &entries);
    for (size_t m = 0; m < bundle->methods_count; m++) {
        struct method *method = &bundle->methods[m];
        struct entry *entry = entry_named(entries, count, method->name);
        find_tensors(entry);
        method->entry = entry;
        for (size_t c = 0; c < method->cases_count; c++) {
            struct test_case *one = &method->cases[c];
            take_layout_of(one, entry, text_of("method '%s', case '%s'", method->name, one->name));
        }
    }
}

struct test_case with_constants(const struct method *method, const struct test_case *given)
{
    struct test_case made = *given;
    const struct entry *entry = method->entry;
    if (!entry)
        return made;
    made.inputs_count = entry->counts[0];
    made.inputs = allocate(made.inputs_count, sizeof *made.inputs);
    for (size_t place = 0; place < made.inputs_count; place++) {
        const struct value *value = &entry->sides[0][place];
        if (is_scalar_kind(value->kind)) {
            made.inputs[place].name = "a number";
            fill_number(&made.inputs[place], value->kind, &value->bits);
        }
    }
    for (size_t i = 0; i < entry->tensors_count; i++)
        made.inputs[entry->tensors[i]] = given->inputs[i];
    return made;
}

/* ---- the cases of a bundled program */

const uint8_t *reordered(const struct tensor *tensor, const uint8_t *order, const uint8_t *data, uint64_t room, bool back)
{
    uint64_t strides[MAX_RANK], stride = 1, index[MAX_RANK] = {0};
    size_t bytes = tensor->dtype->bytes;
    bool is_plain = room == tensor->count;
    for (unsigned axis = 0; axis < tensor->rank; axis++)
        is_plain &= order[axis] == axis;
    if (is_plain)
        return data;
    for (unsigned i = tensor->rank; i-- > 0;) {
        strides[order[i]] = stride;
        stride *= tensor->shape[order[i]];
    }
    uint8_t *made = allocate(room, bytes);
    for (uint64_t flat = 0; flat < tensor->count; flat++) {
        uint64_t place = 0;
        for (unsigned axis = 0; axis < tensor->rank; axis++)
            place += index[axis] * strides[axis];
        memcpy(made + (back ? flat : place) * bytes, data + (back ? place : flat) * bytes, bytes);
        for (unsigned axis = tensor->rank; axis-- > 0;) {
            if (++index[axis] < tensor->shape[axis])
                break;
            index[axis] = 0;
        }
    }
    return made;
}

static void read_bundled(struct tensor *tensor, struct table value, const char *where)
{
    static const unsigned kinds[] = {0, KIND_TENSOR, KIND_INT, KIND_BOOL, KIND_DOUBLE};
    unsigned kind = (unsigned)scalar(value, 0, 1);
    struct table held = sub_table(value, 1);
    uint8_t order[MAX_RANK];
    if (!held.at || !kind || kind > BUNDLED_DOUBLE)
        refuse(HINT, "%s: the file is corrupt: unknown type of a value", where);
    if (kind != BUNDLED_TENSOR) {
        uint64_t bits = scalar(held, 0, kind == BUNDLED_BOOL ? 1 : 8);
        fill_number(tensor, kinds[kind], &bits);
        return;
    }
    tensor->dtype = dtype_of_scalar_type((int8_t)scalar(held, 0, 1));
    if (!tensor->dtype)
        refuse(HINT, "%s has a tensor of a dtype that this verifier does not support", where);
    read_shape(held, 1, 3, &tensor->rank, tensor->shape, order);
    tensor->count = elements_of(tensor->rank, tensor->shape, where);
    struct vector data = vector(held, 2, 1);
    if (data.count != tensor->count * tensor->dtype->bytes)
        refuse(HINT, "%s: the data of a tensor does not match the dtype and shape", where);
    spend(held.buffer, data.count);
    tensor->data = reordered(tensor, order, held.buffer->data + data.at, tensor->count, true);
}

/* Read the outputs of a case that are compared, without numbers that never change. */
static size_t read_side(struct tensor **found, struct table test_case, unsigned index, const struct value *values,
                        size_t count, const char *where)
{
    struct vector listed = vector(test_case, index, 4);
    const char *side = index ? "output" : "input";
    size_t taken = 0;
    if (listed.count != count)
        refuse(listed.count ? "" : "add the missing tensors to the case",
               "%s: got %llu %ss, the method has %zu", where, (unsigned long long)listed.count, side, count);
    *found = allocate(count, sizeof **found);
    for (size_t place = 0; place < count; place++) {
        struct tensor *tensor = &(*found)[taken];
        *tensor = (struct tensor){.name = text_of("%s%zu", side, taken)};
        read_bundled(tensor, item(test_case, listed, place), where);
        if (values[place].kind == KIND_TENSOR)
            take_layout(tensor, &values[place], where);
        else if (!is_scalar_kind(values[place].kind) || !tensor->is_number)
            refuse(HINT, "%s: %s %zu does not match the type in the program", where, side, place);
        else if (!index && memcmp(&values[place].bits, tensor->data, tensor->dtype->bytes))
            refuse(HINT, "%s: input %zu does not match the constant in the program", where, place);
        taken++;
    }
    return taken;
}

/* Set the default tolerance of ExecuTorch's verifier: |a-b| <= 1e-8 + 1e-5*|a|, where a is the program's output. This
 * tolerance is relative to |b|, and a value within it is always within ExecuTorch's. Integers stay exact, also in a
 * case with floats. */
static void choose_tolerance(struct test_case *made)
{
    double most = 1, rtol = 1e-5 / (1 + 1e-5), atol = 1e-8 / (1 + 1e-5), parts[2];
    size_t exact = 0;
    for (size_t i = 0; i < made->outputs_count; i++) {
        const struct tensor *tensor = &made->outputs[i];
        double largest = 0;
        for (uint64_t at = 0; at < tensor->count; at++) {
            element(tensor->dtype, tensor->data, at, parts);
            if (isfinite(parts[0]) && fabs(parts[0]) > largest)
                largest = fabs(parts[0]);
        }
        if (is_exact(tensor->dtype)) {
            exact++;
            most = fmax(most, largest);
        }
        if (largest > 0) /* limit atol: a tolerance above all values could never fail */
            atol = fmin(atol, largest);
    }
    made->rtol = exact == made->outputs_count ? NAN : fmin(rtol, 0.5 / most);
    made->atol = exact == made->outputs_count ? NAN : atol;
}

bool is_bpte(const uint8_t *data, uint64_t size)
{
    return size >= 8 && !memcmp(data + 4, "BP", 2);
}

void read_bpte(struct bundle *bundle, const uint8_t *data, uint64_t size)
{
    struct buffer buffer = {data, size, 0};
    struct table file = root(&buffer, "BP08");
    struct vector program = vector(file, 2, 1), suites = vector(file, 1, 4);
    struct buffer inner = {program.at ? data + program.at : data, program.count, 0};
    struct entry *entries;
    size_t count = read_entries(&inner, &entries);
    *bundle = (struct bundle){.runtime = "executorch", .main = "program.pte", .files_count = 1};
    bundle->files = allocate(1, sizeof *bundle->files);
    *bundle->files = (struct program_file){bundle->main, inner.data, inner.size};
    if (suites.count > MAX_METHODS)
        damaged();
    bundle->methods_count = suites.count;
    bundle->methods = allocate(suites.count, sizeof *bundle->methods);
    for (uint64_t m = 0; m < suites.count; m++) {
        struct table suite = item(file, suites, m);
        struct method *method = &bundle->methods[m];
        struct vector cases = vector(suite, 1, 4);
        method->name = text(suite, 0);
        const struct entry *entry = entry_named(entries, count, method->name);
        if (cases.count > MAX_CASES)
            damaged();
        method->cases_count = cases.count;
        method->cases = allocate(cases.count, sizeof *method->cases);
        for (uint64_t c = 0; c < cases.count; c++) {
            struct test_case *made = &method->cases[c];
            struct table one = item(suite, cases, c);
            made->name = text_of("%llu", (unsigned long long)c);
            made->relation = "independent";
            const char *where = text_of("method '%s', case %s", method->name, made->name);
            made->inputs_count = read_side(&made->inputs, one, 0, entry->sides[0], entry->counts[0], where);
            made->outputs_count = read_side(&made->outputs, one, 1, entry->sides[1], entry->counts[1], where);
            made->noise = allocate(made->outputs_count, sizeof *made->noise);
            choose_tolerance(made);
            check_tolerances(method->name, made);
        }
    }
}
