/* Dtypes of hil/core/tensors.py, access to elements, and default tolerances of hil/compare/tolerance.py. */
#include "verifier.h"

#include <math.h>
#include <string.h>

/* IREE's integer types have no sign. tests/integration/test_verifier.py compares this table with hil's dtypes. */
static const struct dtype DTYPES[] = {
    {"bool", 'b', 1, 0, "i1", "b1", 0, 0, 0, 0, 0},
    {"int8", 'i', 1, 0, "i8", "i1", 0, 0, 0, 0, 0},
    {"int16", 'i', 2, 0, "i16", "i2", 0, 0, 0, 0, 0},
    {"int32", 'i', 4, 0, "i32", "i4", 0, 0, 0, 0, 0},
    {"int64", 'i', 8, 0, "i64", "i8", 0, 0, 0, 0, 0},
    {"uint8", 'u', 1, 0, "i8", "u1", 0, 0, 0, 0, 0},
    {"uint16", 'u', 2, 0, "i16", "u2", 0, 0, 0, 0, 0},
    {"uint32", 'u', 4, 0, "i32", "u4", 0, 0, 0, 0, 0},
    {"uint64", 'u', 8, 0, "i64", "u8", 0, 0, 0, 0, 0},
    {"float16", 'f', 2, 0, "f16", "f2", 1e-3, 1e-5, 0x1p-10, 0x1p-24, 65504},
    {"float32", 'f', 4, 0, "f32", "f4", 1.3e-6, 1e-5, 0x1p-23, 0x1p-149, 0x1.fffffep+127},
    {"float64", 'f', 8, 0, "f64", "f8", 1e-7, 1e-7, 0x1p-52, 0x1p-1074, 0x1.fffffffffffffp+1023},
    {"complex64", 'c', 8, 0, "", "c8", 1.3e-6, 1e-5, 0x1p-23, 0x1p-149, 0x1.fffffep+127},
    {"complex128", 'c', 16, 0, "", "c16", 1e-7, 1e-7, 0x1p-52, 0x1p-1074, 0x1.fffffffffffffp+1023},
    {"bfloat16", 'f', 2, 0, "bf16", "", 1.6e-2, 1e-5, 0x1p-7, 0x1p-133, 0x1.fep+127},
    {"float8_e4m3fn", 'f', 1, 0, "f8E4M3FN", "", 0x1p-3, 0x1p-9, 0, 0x1p-9, 448},
    {"float8_e4m3fnuz", 'f', 1, 0, "f8E4M3FNUZ", "", 0x1p-3, 0x1p-10, 0, 0x1p-10, 240},
    {"float8_e5m2", 'f', 1, 0, "f8E5M2", "", 0x1p-2, 0x1p-16, 0, 0x1p-16, 57344},
    {"float8_e5m2fnuz", 'f', 1, 0, "f8E5M2FNUZ", "", 0x1p-2, 0x1p-17, 0, 0x1p-17, 57344},
    {"float8_e8m0fnu", 'f', 1, 0, "f8E8M0FNU", "", 0, 0, 0, 0x1p-127, 0x1p+127},
    {"float8_e4m3", 'f', 1, 0, "f8E4M3", "", 0x1p-3, 0x1p-9, 0, 0x1p-9, 240},
    {"float8_e3m4", 'f', 1, 0, "f8E3M4", "", 0x1p-4, 0x1p-6, 0, 0x1p-6, 15.5},
    {"float4_e2m1fn", 'f', 1, 4, "f4E2M1FN", "", 0.375, 0.5, 0, 0.5, 6},
    {"int4", 'i', 1, 4, "i4", "", 0, 0, 0, 0, 0},
    {"uint4", 'u', 1, 4, "i4", "", 0, 0, 0, 0, 0},
    {"int2", 'i', 1, 2, "i2", "", 0, 0, 0, 0, 0},
    {"uint2", 'u', 1, 2, "i2", "", 0, 0, 0, 0, 0},
    {"string", 's', 0, 0, "", "", 0, 0, 0, 0, 0},
};

enum flavour { IEEE, FN, FNUZ, FINITE };
/* Floats of at most 16 bits. FN: NaN has all bits set. FNUZ: NaN is the code of -0. FINITE: no NaN and no infinity. */
static const struct small_float {
    const char *name;
    int exponent, mantissa, bias;
    enum flavour flavour;
} SMALL_FLOATS[] = {
    {"float16", 5, 10, 15, IEEE},        {"bfloat16", 8, 7, 127, IEEE},      {"float8_e4m3fn", 4, 3, 7, FN},
    {"float8_e4m3fnuz", 4, 3, 8, FNUZ},  {"float8_e5m2", 5, 2, 15, IEEE},    {"float8_e5m2fnuz", 5, 2, 16, FNUZ},
    {"float8_e4m3", 4, 3, 7, IEEE},      {"float8_e3m4", 3, 4, 3, IEEE},     {"float4_e2m1fn", 2, 1, 1, FINITE},
};

const struct dtype *dtype_named(const char *name)
{
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (!strcmp(DTYPES[i].name, name))
            return &DTYPES[i];
    return NULL;
}

const struct dtype *dtype_of_npy(const char *name)
{
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (*DTYPES[i].npy && !strcmp(DTYPES[i].npy, name))
            return &DTYPES[i];
    return NULL;
}

const struct dtype *dtype_of_scalar_type(int number)
{
    static const char *const first[] = {"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"};
    static const char *const later[] = {"float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz",
                                        "uint16",      "uint32",        "uint64"};
    if (number >= 0 && number < 8)
        return dtype_named(first[number]);
    if (number >= 23 && number < 30)
        return dtype_named(later[number - 23]);
    return number == 11 ? dtype_named("bool") : number == 15 ? dtype_named("bfloat16") : NULL;
}

bool is_exact(const struct dtype *dtype)
{
    return strchr("bius", dtype->kind) != NULL;
}

bool is_wide_integer(const struct dtype *dtype)
{
    return (dtype->kind == 'i' || dtype->kind == 'u') && dtype->bytes == 8;
}

static double small_float(const struct dtype *dtype, uint16_t bits)
{
    if (!strcmp(dtype->name, "float8_e8m0fnu"))
        return bits == 255 ? NAN : ldexp(1, bits - 127);
    const struct small_float *form = SMALL_FLOATS;
    while (strcmp(form->name, dtype->name))
        form++;
    int exponent = bits >> form->mantissa & ((1 << form->exponent) - 1);
    int mantissa = bits & ((1 << form->mantissa) - 1);
    bool negative = bits >> (form->exponent + form->mantissa) & 1;
    bool all_ones = exponent == (1 << form->exponent) - 1;
    if (form->flavour == IEEE && all_ones)
        return mantissa ? NAN : negative ? -INFINITY : INFINITY;
    if (form->flavour == FN && all_ones && mantissa == (1 << form->mantissa) - 1)
        return NAN;
    if (form->flavour == FNUZ && negative && !exponent && !mantissa)
        return NAN;
    int whole = exponent ? mantissa + (1 << form->mantissa) : mantissa;
    double value = ldexp(whole, (exponent ? exponent : 1) - form->bias - form->mantissa);
    return negative ? -value : value;
}

static double real(const struct dtype *dtype, unsigned bytes, const uint8_t *at)
{
    uint16_t two;
    float single;
    double wide;
    switch (bytes) {
    case 8:
        memcpy(&wide, at, 8);
        return wide;
    case 4:
        memcpy(&single, at, 4);
        return single;
    case 2:
        memcpy(&two, at, 2);
        return small_float(dtype, two);
    default:
        return small_float(dtype, *at);
    }
}

int64_t integer(const struct dtype *dtype, const uint8_t *data, size_t index)
{
    uint64_t bits = 0;
    memcpy(&bits, data + index * dtype->bytes, dtype->bytes); /* all supported boards are little-endian */
    unsigned width = dtype->bits ? dtype->bits : dtype->bytes * 8;
    if (width == 64)
        return (int64_t)bits;
    bits &= ((uint64_t)1 << width) - 1;
    if (dtype->kind == 'i' && bits >> (width - 1))
        return (int64_t)bits - ((int64_t)1 << width);
    return (int64_t)bits;
}

void element(const struct dtype *dtype, const uint8_t *data, size_t index, double parts[2])
{
    parts[1] = 0;
    if (is_exact(dtype)) {
        int64_t value = integer(dtype, data, index);
        parts[0] = dtype->kind == 'u' ? (double)(uint64_t)value : (double)value;
        return;
    }
    const uint8_t *at = data + index * dtype->bytes;
    unsigned bytes = dtype->kind == 'c' ? dtype->bytes / 2 : dtype->bytes;
    parts[0] = real(dtype, bytes, at);
    if (dtype->kind == 'c')
        parts[1] = real(dtype, bytes, at + bytes);
}

static void show_real(char *text, size_t size, double value, const char *format)
{
    if (isnan(value) || isinf(value))
        snprintf(text, size, "%s", isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
    else
        snprintf(text, size, format, value);
}

void show_element(char *text, size_t size, const struct dtype *dtype, const uint8_t *data, size_t index, bool json)
{
    if (is_exact(dtype)) {
        int64_t value = integer(dtype, data, index);
        if (dtype->kind == 'b')
            snprintf(text, size, "%s", json ? (value ? "true" : "false") : (value ? "True" : "False"));
        else if (dtype->kind == 'u')
            snprintf(text, size, "%llu", (unsigned long long)value);
        else
            snprintf(text, size, "%lld", (long long)value);
        return;
    }
    double parts[2];
    char first[40], second[40];
    element(dtype, data, index, parts);
    const char *format = json ? "%.17g" : "%.9g";
    show_real(first, sizeof first, parts[0], format);
    show_real(second, sizeof second, parts[1], format);
    bool quoted = json && (dtype->kind == 'c' || !isfinite(parts[0]));
    if (dtype->kind == 'c')
        snprintf(text, size, quoted ? "\"%s%s%sj\"" : "%s%s%sj", first, signbit(parts[1]) ? "" : "+", second);
    else
        snprintf(text, size, quoted ? "\"%s\"" : "%s", first);
}
