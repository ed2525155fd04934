/* Read .hilb files. hil/bundles/layout.py and hil/bundles/manifest.py define the format. */
#include "blake3.h"
#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const BROKEN = "copy the file from its source, or create it: hil bundle create";
static const char *const HINT = "the file was not written by hil, or is corrupt: copy it from its source";
enum { HEADER_BYTES = 192, ALIGN = 64, MAX_BLOBS = 1000000, MAX_MANIFEST_BYTES = 16 << 20 };
#define MAX_SHARED_BYTES ((uint64_t)4 << 30)

struct blob {
    const char *digest;
    const uint8_t *data;
    uint64_t size;
    bool is_used;
};

struct reader {
    struct json json;
    struct blob *blobs;
    size_t blobs_count;
    struct bundle *bundle;
    uint64_t left; /* remaining bytes that cases may refer to, because many cases may refer to the same blob */
};

/* Input or output of a method. */
struct spec {
    const char *name;
    const struct dtype *dtype;
    unsigned rank;
    uint64_t shape[MAX_RANK];
    const char *symbol[MAX_RANK]; /* "" for a dimension of any size; NULL for a fixed size */
    uint32_t number[MAX_RANK];    /* index of the symbol in the method */
};

/* A name and its position. */
struct place {
    const char *name;
    size_t at;
};

struct signature {
    size_t counts[2];
    struct spec *specs[2];
    struct place *places[2]; /* positions of the specs, sorted by name */
    size_t symbols;
    uint64_t *sizes; /* sizes of the symbols in a case; NOT_SEEN before the first tensor with the symbol */
};

#define NOT_SEEN UINT64_MAX

bool is_hilb(const uint8_t *data, uint64_t size)
{
    return size >= 8 && !memcmp(data, "\x89HILB\r\n\x1a", 8);
}

static uint64_t aligned(uint64_t size)
{
    return (size + ALIGN - 1) / ALIGN * ALIGN;
}

static bool are_zeros(const uint8_t *data, uint64_t size)
{
    for (uint64_t i = 0; i < size; i++)
        if (data[i])
            return false;
    return true;
}

uint64_t elements_of(unsigned rank, const uint64_t *shape, const char *where)
{
    uint64_t room = 1;
    bool empty = false;
    for (unsigned axis = 0; axis < rank; axis++) {
        empty |= !shape[axis];
        if (shape[axis] && (__builtin_mul_overflow(room, shape[axis], &room) || room > MAX_ELEMENTS))
            refuse(HINT, "%s exceeds the element limit", where);
    }
    return empty ? 0 : room;
}

static uint32_t limited(const struct json *json, uint32_t list, const char *where, uint32_t most)
{
    uint32_t count = json->nodes[list].count;
    if (count > most)
        refuse(HINT, "the bundle's manifest: %s has %u entries, at most %u are allowed", where, count, most);
    return count;
}

/* ---- header and blobs */

static int by_digest(const void *one, const void *other)
{
    return strcmp(((const struct blob *)one)->digest, ((const struct blob *)other)->digest);
}

static void read_blobs(struct reader *reader, uint32_t list, const uint8_t *data, uint64_t size, uint64_t at)
{
    static const char *const fields[] = {"digest", "size"};
    const struct json *json = &reader->json;
    reader->blobs_count = limited(json, list, "blobs", MAX_BLOBS);
    reader->blobs = allocate(reader->blobs_count, sizeof *reader->blobs);
    uint32_t item = list + 1;
    for (size_t i = 0; i < reader->blobs_count; i++, item = json->nodes[item].next) {
        struct blob *blob = &reader->blobs[i];
        uint32_t found[2];
        take(json, item, "blobs", fields, "\"i", found);
        blob->digest = string_at(json, found[0]);
        blob->size = size_at(json, found[1], "blobs.size", MAX_ELEMENTS);
        if (blob->size > size - at || aligned(blob->size) > size - at)
            refuse(BROKEN, "the bundle is truncated or has extra data");
        blob->data = data + at;
        char digest[8 + 64];
        uint8_t bytes[32];
        blake3(blob->data, blob->size, bytes);
        for (int b = 0; b < 32; b++)
            snprintf(digest + 7 + 2 * b, 3, "%02x", bytes[b]);
        memcpy(digest, "blake3:", 7);
        if (strcmp(digest, blob->digest) || !are_zeros(blob->data + blob->size, aligned(blob->size) - blob->size))
            refuse(BROKEN, "blob %zu of the bundle is corrupt: digest mismatch", i);
        at += aligned(blob->size);
    }
    if (at != size)
        refuse(BROKEN, "the bundle is truncated or has extra data");
    if (reader->blobs_count)
        qsort(reader->blobs, reader->blobs_count, sizeof *reader->blobs, by_digest);
    for (size_t i = 1; i < reader->blobs_count; i++)
        if (!by_digest(&reader->blobs[i - 1], &reader->blobs[i]))
            refuse(HINT, "the bundle's manifest: blobs contains a duplicate blob");
}

static const struct blob *blob_at(struct reader *reader, uint32_t node, const char *where)
{
    struct blob wanted = {.digest = string_at(&reader->json, node)}, *found = NULL;
    if (reader->blobs_count)
        found = bsearch(&wanted, reader->blobs, reader->blobs_count, sizeof wanted, by_digest);
    if (!found)
        refuse(HINT, "the bundle's manifest: %s refers to a missing blob", where);
    found->is_used = true;
    return found;
}

/* ---- the program */

static void read_program(struct reader *reader, uint32_t program)
{
    static const char *const fields[] = {"compiler", "files", "flags", "main", "runtime"};
    static const char *const of_file[] = {"blob", "name"};
    const struct json *json = &reader->json;
    struct bundle *bundle = reader->bundle;
    uint32_t found[5], file[2];
    take(json, program, "program", fields, "\"[[\"\"", found);
    bundle->files_count = limited(json, found[1], "program.files", MAX_FILES);
    bundle->files = allocate(bundle->files_count, sizeof *bundle->files);
    uint32_t item = found[1] + 1;
    for (size_t i = 0; i < bundle->files_count; i++, item = json->nodes[item].next) {
        take(json, item, "program.files", of_file, "\"\"", file);
        const struct blob *blob = blob_at(reader, file[0], "program.files");
        bundle->files[i] = (struct program_file){file_name_at(json, file[1]), blob->data, blob->size};
        for (size_t j = 0; j < i; j++)
            if (!go_together(bundle->files[j].name, bundle->files[i].name))
                refuse(HINT, "the bundle's manifest: program.files contains two conflicting file names");
    }
    check_text(json, found[0], "program.compiler", MAX_TEXT, true);
    uint32_t flags = limited(json, found[2], "program.flags", MAX_TENSORS), flag = found[2] + 1;
    for (uint32_t i = 0; i < flags; i++, flag = json->nodes[flag].next)
        check_text(json, flag, "program.flags", MAX_TEXT, true);
    bundle->main = name_at(json, found[3], "program.main");
    bundle->runtime = name_at(json, found[4], "program.runtime");
    check_runtime(bundle->runtime);
    if (!main_file(bundle))
        refuse(HINT, "the bundle's manifest: program.main is missing from program.files");
}

const struct program_file *main_file(const struct bundle *bundle)
{
    for (size_t i = 0; i < bundle->files_count; i++)
        if (!strcmp(bundle->files[i].name, bundle->main))
            return &bundle->files[i];
    return NULL;
}

/* ---- methods and cases */

static const struct dtype *dtype_at(const struct json *json, uint32_t node, const char *where)
{
    const struct dtype *dtype = dtype_named(string_at(json, node));
    if (!dtype)
        refuse(HINT, "the bundle's manifest: %s has a dtype that this verifier does not support", where);
    return dtype;
}

static void read_spec(struct spec *spec, const struct json *json, uint32_t item, const char *where)
{
    static const char *const fields[] = {"dtype", "name", "shape"};
    uint32_t found[3];
    take(json, item, where, fields, "\"\"[", found);
    spec->dtype = dtype_at(json, found[0], where);
    spec->name = name_at(json, found[1], where);
    spec->rank = limited(json, found[2], where, MAX_RANK);
    uint32_t dim = found[2] + 1;
    uint64_t known[MAX_RANK];
    unsigned count = 0;
    for (unsigned axis = 0; axis < spec->rank; axis++, dim = json->nodes[dim].next) {
        char kind = json->nodes[dim].kind;
        if (kind == '"')
            spec->symbol[axis] = name_at(json, dim, where);
        else if (kind == 'n')
            spec->symbol[axis] = "";
        else
            known[count++] = spec->shape[axis] = size_at(json, dim, where, MAX_ELEMENTS);
    }
    elements_of(count, known, where);
}

/* Return the number of bytes of a UTF-8 character; 0 if it is invalid. */
static uint64_t character_bytes(const uint8_t *data, uint64_t size)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    unsigned bytes = *data < 0x80 ? 1 : *data >> 5 == 6 ? 2 : *data >> 4 == 14 ? 3 : *data >> 3 == 30 ? 4 : 0;
    if (!bytes || bytes > size)
        return 0;
    uint32_t code = bytes == 1 ? *data : *data & (0x7Fu >> bytes);
    for (unsigned i = 1; i < bytes; i++) {
        if (data[i] >> 6 != 2)
            return 0;
        code = code << 6 | (data[i] & 63);
    }
    return code < least[bytes] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF) ? 0 : bytes;
}

/* Check a sequence of strings. A length of four bytes precedes each string. */
static void check_strings(const uint8_t *data, uint64_t size, uint64_t count, const char *where)
{
    uint64_t at = 0, found = 0;
    bool fine = true;
    for (; fine && at < size; found++) {
        uint32_t length = 0;
        fine = size - at >= 4;
        if (fine)
            memcpy(&length, data + at, 4);
        at += 4;
        fine = fine && size - at >= length;
        for (uint64_t end = at + length, bytes; fine && at < end; at += bytes)
            fine = (bytes = character_bytes(data + at, end - at)) != 0;
    }
    if (!fine || found != count)
        refuse(HINT, "the bundle's manifest: %s does not match its description", where);
}

static void read_tensor(struct tensor *tensor, struct reader *reader, uint32_t item, const char *where)
{
    static const char *const fields[] = {"blob", "dtype", "name", "shape"};
    const struct json *json = &reader->json;
    uint32_t found[4];
    take(json, item, where, fields, "\"\"\"[", found);
    const struct blob *blob = blob_at(reader, found[0], where);
    tensor->dtype = dtype_at(json, found[1], where);
    tensor->name = name_at(json, found[2], where);
    tensor->rank = limited(json, found[3], where, MAX_RANK);
    uint32_t dim = found[3] + 1;
    for (unsigned axis = 0; axis < tensor->rank; axis++, dim = json->nodes[dim].next) {
        tensor->shape[axis] = tensor->room[axis] = size_at(json, dim, where, MAX_ELEMENTS);
        tensor->order[axis] = (uint8_t)axis;
    }
    tensor->count = elements_of(tensor->rank, tensor->shape, where);
    if (blob->size > reader->left)
        refuse(HINT, "the bundle's manifest: cases exceed the limit for shared blobs");
    reader->left -= blob->size;
    if (tensor->dtype->kind == 's') { /* commands do not support strings; runtime_run reports this */
        check_strings(blob->data, blob->size, tensor->count, where);
        return;
    }
    if (tensor->count * tensor->dtype->bytes != blob->size)
        refuse(HINT, "the bundle's manifest: %s does not match its description", where);
    tensor->data = blob->data;
    for (uint64_t i = 0; tensor->dtype->kind == 'b' && i < tensor->count; i++)
        if (tensor->data[i] > 1)
            refuse(HINT, "the bundle's manifest: %s contains invalid bool bytes", where);
}

static int by_place_name(const void *one, const void *other)
{
    return strcmp(((const struct place *)one)->name, ((const struct place *)other)->name);
}

static const struct place *place_named(const struct place *places, size_t count, const char *name)
{
    const struct place wanted = {name, 0};
    return count ? bsearch(&wanted, places, count, sizeof wanted, by_place_name) : NULL;
}

/* Check that a symbolic dimension has the same size in all tensors of a case. */
static void check_symbol(struct signature *signature, const struct spec *spec, unsigned axis, uint64_t size,
                         const char *where)
{
    uint64_t *known = &signature->sizes[spec->number[axis]];
    if (*known != NOT_SEEN && *known != size)
        refuse(HINT, "%s has %llu for dimension '%s', expected %llu", where, (unsigned long long)size,
               spec->symbol[axis], (unsigned long long)*known);
    *known = size;
}

static void check_fits(struct signature *signature, const struct spec *spec, const struct tensor *tensor,
                       const char *where)
{
    bool fits = tensor->dtype == spec->dtype && tensor->rank == spec->rank;
    for (unsigned axis = 0; fits && axis < spec->rank; axis++)
        fits = spec->symbol[axis] || spec->shape[axis] == tensor->shape[axis];
    if (!fits)
        refuse(HINT, "%s: dtype or shape of '%s' does not match the method", where, spec->name);
    for (unsigned axis = 0; axis < spec->rank; axis++)
        if (spec->symbol[axis] && *spec->symbol[axis])
            check_symbol(signature, spec, axis, tensor->shape[axis], where);
}

/* Read the inputs or outputs of a case, in the order of the method. */
static struct tensor *read_tensors(struct reader *reader, uint32_t list, struct signature *signature, int side,
                                   const char *where)
{
    const struct json *json = &reader->json;
    const struct spec *specs = signature->specs[side];
    size_t count = signature->counts[side];
    if (limited(json, list, where, MAX_TENSORS) != count)
        refuse(HINT, "%s: got %u tensors, the method has %zu", where, json->nodes[list].count, count);
    struct tensor *tensors = allocate(count, sizeof *tensors);
    uint32_t item = list + 1;
    for (size_t i = 0; i < count; i++, item = json->nodes[item].next) {
        struct tensor tensor = {0};
        read_tensor(&tensor, reader, item, where);
        const struct place *place = place_named(signature->places[side], count, tensor.name);
        if (!place || tensors[place->at].name)
            refuse(HINT, "%s: unknown or duplicate tensor '%s'", where, tensor.name);
        tensors[place->at] = tensor;
    }
    for (size_t i = 0; i < count; i++)
        check_fits(signature, &specs[i], &tensors[i], where);
    return tensors;
}

static void read_noise(struct test_case *made, struct reader *reader, uint32_t list, const struct signature *signature,
                       const char *where)
{
    const struct json *json = &reader->json;
    if (json->nodes[list].kind == '{')
        refuse("create a new bundle",
               "%s: an earlier version of hil measured the noise; this noise can hide wrong outputs", where);
    if (json->nodes[list].kind != '[' || !json->nodes[list].count)
        refuse(HINT, "%s: noise has the wrong type", where);
    uint32_t item = list + 1, count = limited(json, list, where, MAX_TENSORS);
    for (uint32_t i = 0; i < count; i++, item = json->nodes[item].next) {
        struct tensor noise = {0};
        read_tensor(&noise, reader, item, where);
        const struct place *place = place_named(signature->places[1], made->outputs_count, noise.name);
        if (!place || made->noise[place->at].dtype)
            refuse(HINT, "%s: unknown or duplicate output '%s' in noise", where, noise.name);
        const struct tensor *output = &made->outputs[place->at];
        bool fits = !strcmp(noise.dtype->name, "float8_e8m0fnu") && noise.rank == output->rank;
        for (unsigned axis = 0; fits && axis < noise.rank; axis++)
            fits = noise.shape[axis] == output->shape[axis];
        for (uint64_t one = 0; fits && one < noise.count; one++)
            fits = noise.data[one] != 0xff;
        if (!fits)
            refuse(HINT, "%s: noise of '%s' must have the output's shape and no NaN", where, noise.name);
        made->noise[place->at] = noise;
    }
}

static double tolerance_at(const struct json *json, uint32_t node, const char *where)
{
    return json->nodes[node].kind == 'n' ? NAN : number_at(json, node, where);
}

static bool has_field(const struct json *json, uint32_t object, const char *name)
{
    if (json->nodes[object].kind != '{')
        return false;
    uint32_t key = object + 1;
    for (uint32_t i = 0; i < json->nodes[object].count; i++, key = json->nodes[key + 1].next)
        if (!strcmp(string_at(json, key), name))
            return true;
    return false;
}

static void read_case(struct test_case *made, struct reader *reader, uint32_t item, const char *method,
                      struct signature *signature)
{
    enum { ATOL, INPUTS, NAME, NOISE, OUTPUTS, RELATION, RTOL, SOURCE, FIELDS };
    static const char *const names[] = {"atol", "inputs", "name", "noise", "outputs", "relation", "rtol", "source"};
    static const char kinds[] = "D[\"C[\"D\"";
    const struct json *json = &reader->json;
    const char *where = text_of("method '%s', a case", method);
    if (has_field(json, item, "accept"))
        refuse("verify it with `python -m hil.agent verify` or `hil bundle run`",
               "%s: this verifier supports tolerances only, the case has criteria", where);
    if (has_field(json, item, "control"))
        refuse("verify it with `python -m hil.agent verify` or `hil bundle run`",
               "%s: this verifier supports tolerances only, the case has a control", where);
    /* The fields for noise and relation are optional. */
    const char *wanted[FIELDS];
    char wanted_kinds[FIELDS + 1] = "";
    uint32_t taken[FIELDS], found[FIELDS] = {0};
    size_t places[FIELDS], count = 0;
    for (size_t field = 0; field < FIELDS; field++) {
        if ((field == NOISE || field == RELATION) && !has_field(json, item, names[field]))
            continue;
        wanted[count] = names[field];
        wanted_kinds[count] = kinds[field];
        places[count++] = field;
    }
    take(json, item, where, wanted, wanted_kinds, taken);
    for (size_t i = 0; i < count; i++)
        found[places[i]] = taken[i];
    made->name = name_at(json, found[NAME], where);
    where = text_of("method '%s', case '%s'", method, made->name);
    made->relation = found[RELATION] ? name_at(json, found[RELATION], where) : "independent";
    if (strcmp(made->relation, "independent") && strcmp(made->relation, "same library") &&
        strcmp(made->relation, SELF_CHECK))
        refuse(HINT, "%s: unknown relation '%s'", where, made->relation);
    made->atol = tolerance_at(json, found[ATOL], where);
    made->rtol = tolerance_at(json, found[RTOL], where);
    check_text(json, found[SOURCE], where, MAX_TEXT, true);
    for (size_t i = 0; i < signature->symbols; i++)
        signature->sizes[i] = NOT_SEEN;
    made->inputs_count = signature->counts[0];
    made->outputs_count = signature->counts[1];
    made->inputs = read_tensors(reader, found[INPUTS], signature, 0, where);
    made->outputs = read_tensors(reader, found[OUTPUTS], signature, 1, where);
    made->noise = allocate(made->outputs_count, sizeof *made->noise);
    if (found[NOISE])
        read_noise(made, reader, found[NOISE], signature, where);
    check_tolerances(method, made);
}

static int by_name(const void *one, const void *other)
{
    return strcmp(*(const char *const *)one, *(const char *const *)other);
}

static void refuse_twins(const char **names, size_t count, const char *where)
{
    if (count)
        qsort(names, count, sizeof *names, by_name);
    for (size_t i = 1; i < count; i++)
        if (!strcmp(names[i - 1], names[i]))
            refuse(HINT, "the bundle's manifest: %s contains a duplicate name", where);
}

/* Number the symbols of a method, so that reading a case needs no search. */
static void number_symbols(struct signature *signature)
{
    size_t count = 0;
    for (int side = 0; side < 2; side++)
        for (size_t i = 0; i < signature->counts[side]; i++)
            for (unsigned axis = 0; axis < signature->specs[side][i].rank; axis++)
                count += signature->specs[side][i].symbol[axis] && *signature->specs[side][i].symbol[axis];
    struct place *found = allocate(count, sizeof *found);
    count = 0;
    for (int side = 0; side < 2; side++)
        for (size_t i = 0; i < signature->counts[side]; i++)
            for (unsigned axis = 0; axis < signature->specs[side][i].rank; axis++)
                if (signature->specs[side][i].symbol[axis] && *signature->specs[side][i].symbol[axis])
                    found[count++] = (struct place){signature->specs[side][i].symbol[axis],
                                                    (i * 2 + (size_t)side) * MAX_RANK + axis};
    if (count)
        qsort(found, count, sizeof *found, by_place_name);
    for (size_t i = 0; i < count; i++) {
        if (!i || strcmp(found[i - 1].name, found[i].name))
            signature->symbols++;
        size_t at = found[i].at / MAX_RANK;
        signature->specs[at % 2][at / 2].number[found[i].at % MAX_RANK] = (uint32_t)signature->symbols - 1;
    }
    signature->sizes = allocate(signature->symbols, sizeof *signature->sizes);
}

static void read_method(struct method *made, struct reader *reader, uint32_t item)
{
    static const char *const fields[] = {"cases", "inputs", "name", "outputs"};
    const struct json *json = &reader->json;
    struct signature signature = {0};
    uint32_t found[4];
    take(json, item, "methods", fields, "[[\"[", found);
    made->name = name_at(json, found[2], "methods.name");
    for (int side = 0; side < 2; side++) {
        uint32_t list = found[side ? 3 : 1], spec = list + 1;
        size_t count = signature.counts[side] = limited(json, list, "methods", MAX_TENSORS);
        signature.specs[side] = allocate(count, sizeof **signature.specs);
        struct place *places = signature.places[side] = allocate(count, sizeof *places);
        for (size_t i = 0; i < count; i++, spec = json->nodes[spec].next) {
            read_spec(&signature.specs[side][i], json, spec, side ? "methods.outputs" : "methods.inputs");
            places[i] = (struct place){signature.specs[side][i].name, i};
        }
        if (count)
            qsort(places, count, sizeof *places, by_place_name);
        for (size_t i = 1; i < count; i++)
            if (!by_place_name(&places[i - 1], &places[i]))
                refuse(HINT, "the bundle's manifest: methods.%s contains a duplicate name",
                       side ? "outputs" : "inputs");
    }
    number_symbols(&signature);
    made->cases_count = limited(json, found[0], "methods.cases", MAX_CASES);
    made->cases = allocate(made->cases_count, sizeof *made->cases);
    const char **names = allocate(made->cases_count, sizeof *names);
    uint32_t one = found[0] + 1;
    for (size_t i = 0; i < made->cases_count; i++, one = json->nodes[one].next) {
        read_case(&made->cases[i], reader, one, made->name, &signature);
        names[i] = made->cases[i].name;
    }
    refuse_twins(names, made->cases_count, "methods.cases");
}

/* Check the depth of a JSON value. The description of a bundle's creation may be any JSON up to the maximum depth. */
static void check_depth(const struct json *json, uint32_t node, unsigned depth)
{
    const struct node *found = &json->nodes[node];
    if (depth > MAX_DEPTH)
        refuse(HINT, "the bundle's manifest: made exceeds the nesting limit");
    uint32_t inside = node + 1;
    for (uint32_t i = 0; (found->kind == '{' || found->kind == '[') && i < found->count; i++) {
        if (found->kind == '{')
            check_depth(json, inside++, depth + 1); /* skip the key */
        check_depth(json, inside, depth + 1);
        inside = json->nodes[inside].next;
    }
}

static uint64_t number_in(const uint8_t *data, unsigned bytes)
{
    uint64_t value = 0;
    memcpy(&value, data, bytes);
    return value;
}

void read_hilb(struct bundle *bundle, const uint8_t *data, uint64_t size)
{
    static const char *const fields[] = {"blobs", "made", "methods", "program"};
    struct reader reader = {.bundle = bundle, .left = 4 * size + MAX_SHARED_BYTES};
    if (size < HEADER_BYTES)
        refuse(BROKEN, "the bundle is truncated in the header");
    uint64_t version = number_in(data + 8, 4), flags = number_in(data + 12, 4), manifest = number_in(data + 24, 8);
    if (version != 1)
        refuse("use the version of hil that created the bundle", "unsupported bundle version %u: this verifier reads version 1",
               (unsigned)version);
    if (number_in(data + 16, 8) != size || manifest > MAX_MANIFEST_BYTES || aligned(HEADER_BYTES + manifest) > size)
        refuse(BROKEN, "the bundle is truncated or has extra data");
    uint8_t digest[32];
    blake3(data + HEADER_BYTES, manifest, digest);
    if (memcmp(digest, data + 32, 32))
        refuse(BROKEN, "the manifest is corrupt: digest mismatch");
    uint64_t start = aligned(HEADER_BYTES + manifest);
    if (flags > 1 || !are_zeros(data + 160, 32) || (!flags && !are_zeros(data + 64, 96)) ||
        !are_zeros(data + HEADER_BYTES + manifest, start - HEADER_BYTES - manifest))
        refuse(BROKEN, "the bundle's header is corrupt");
    bundle->is_signed = flags == 1;
    parse_json(&reader.json, (const char *)data + HEADER_BYTES, (uint32_t)manifest);
    uint32_t found[4];
    take(&reader.json, 0, "document", fields, "[{[{", found);
    check_depth(&reader.json, found[1], 0);
    read_blobs(&reader, found[0], data, size, start);
    read_program(&reader, found[3]);
    bundle->methods_count = limited(&reader.json, found[2], "methods", MAX_METHODS);
    bundle->methods = allocate(bundle->methods_count, sizeof *bundle->methods);
    const char **names = allocate(bundle->methods_count, sizeof *names);
    uint32_t item = found[2] + 1;
    for (size_t i = 0; i < bundle->methods_count; i++, item = reader.json.nodes[item].next) {
        read_method(&bundle->methods[i], &reader, item);
        names[i] = bundle->methods[i].name;
    }
    refuse_twins(names, bundle->methods_count, "methods");
    if (!bundle->methods_count)
        refuse(HINT, "the bundle's manifest: methods is empty");
    for (size_t i = 0; i < reader.blobs_count; i++)
        if (!reader.blobs[i].is_used)
            refuse(HINT, "the bundle's manifest: blobs contains an unused blob");
    if (!strcmp(bundle->runtime, "executorch"))
        take_layouts(bundle);
}
