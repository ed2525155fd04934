/* hil/compare in C. The verdict on two tensors is the same as in Python. */
#include "verifier.h"

#include <math.h>
#include <string.h>

static const double STEPS = 4, CONSTANT_EPS = 4;

/* Magnitudes of a tensor's values. */
struct scale {
    double rms, largest, spread, least_extreme, eps;
};

struct tolerance {
    bool is_exact;
    double rtol, atol;
};

/* Type for sums of squares. Squares of float64 overflow above 1e154 and become 0 below 1e-162. long double is too slow
 * if the CPU does not support it. */
#if defined __x86_64__ || defined __i386__
typedef long double sum;
#else
typedef double sum;
#endif

struct stats {
    uint64_t mismatches, nonfinite, masked, finite, first, worst;
    bool has_first, has_worst;
    sum aa, ab, bb, dd;
    double max_abs, max_rel;
    bool zeroed, beside_zero;
};

static double mask_limit(const struct dtype *dtype)
{
    return is_exact(dtype) || dtype->bytes == 1 ? INFINITY : dtype->largest / 2;
}

static double magnitude(const struct dtype *dtype, const double parts[2])
{
    return dtype->kind == 'c' ? hypot(parts[0], parts[1]) : fabs(parts[0]);
}

static struct scale scale_of(const struct tensor *tensor)
{
    const struct dtype *dtype = tensor->dtype;
    int count = dtype->kind == 'c' ? 2 : 1;
    double low[2] = {INFINITY, INFINITY}, high[2] = {-INFINITY, -INFINITY}, limit = mask_limit(dtype), parts[2];
    struct scale scale = {0};
    sum squares = 0;
    uint64_t nonzero = 0, seen = 0;
    for (uint64_t i = 0; i < tensor->count; i++) {
        element(dtype, tensor->data, i, parts);
        double size = magnitude(dtype, parts);
        if (!(size < limit)) /* also skips NaN */
            continue;
        seen++;
        for (int part = 0; part < count; part++) {
            low[part] = fmin(low[part], parts[part]);
            high[part] = fmax(high[part], parts[part]);
        }
        scale.largest = fmax(scale.largest, size);
        squares += (sum)size * size;
        nonzero += size != 0;
    }
    if (!seen)
        return scale;
    scale.rms = (double)sqrtl(squares / (nonzero ? nonzero : 1));
    scale.spread = fmax(high[0] - low[0], count == 2 ? high[1] - low[1] : 0);
    scale.least_extreme = count == 2 ? scale.largest : fmin(fabs(low[0]), fabs(high[0]));
    scale.eps = is_exact(dtype) || dtype->bytes < 2 ? 0 : dtype->eps;
    return scale;
}

/* Return the largest possible difference between two finite values. */
static double span(const struct dtype *dtype)
{
    if (dtype->kind == 'b')
        return 1;
    if (is_exact(dtype))
        return ldexp(1, dtype->bits ? dtype->bits : dtype->bytes * 8) - 1;
    return 2 * dtype->largest * (dtype->kind == 'c' ? sqrt(2) : 1);
}

static struct tolerance tolerance_for(const struct dtype *dtype, double rtol, double atol)
{
    struct tolerance found = {false, isnan(rtol) ? dtype->rtol : rtol, isnan(atol) ? dtype->atol : atol};
    found.is_exact = dtype->kind == 's' || (is_exact(dtype) && isnan(rtol) && isnan(atol));
    return found;
}

static struct tolerance fitted(const struct dtype *actual, const struct tensor *expected, double rtol, double atol,
                               struct scale *scale)
{
    struct tolerance one = tolerance_for(actual, rtol, atol), other = tolerance_for(expected->dtype, rtol, atol);
    struct tolerance found = one.is_exact ? other : one;
    if (!one.is_exact && !other.is_exact) {
        found.rtol = fmax(one.rtol, other.rtol);
        found.atol = fmax(one.atol, other.atol);
    }
    *scale = (struct scale){0};
    if (found.is_exact)
        return found;
    *scale = scale_of(expected);
    if (!isnan(atol) || found.atol == 0)
        return found;
    double factor = scale->largest ? fmin(scale->rms, 1) : 1;
    found.atol = fmax(found.atol * factor, fmax(actual->smallest, expected->dtype->smallest));
    return found;
}

/* Return true, with the reason, if a tolerance cannot distinguish right from wrong outputs. */
static bool is_blind(char *why, size_t size, struct tolerance tolerance, const struct scale *scale,
                     const struct allowance *allowed, bool given)
{
    double steps = given ? 1 : STEPS, rtol = tolerance.rtol, atol = tolerance.atol, largest = scale->largest;
    char measured[64] = "";
    if (!largest)
        return false;
    if (allowed)
        snprintf(measured, sizeof measured, " (noise %.2g)", allowed->widest);
    const char *then = (2 - rtol) * largest <= atol   ? "flipped signs would agree"
                       : (1 - rtol) * largest <= atol ? "zeros would agree"
                       : largest <= steps * atol      ? "right and wrong answers cannot be distinguished"
                                                      : NULL;
    if (then) {
        snprintf(why, size, "atol is %.3g, but the largest value is %.3g%s: %s", atol, largest, measured, then);
        return true;
    }
    double constant = CONSTANT_EPS * scale->eps * largest;
    if (allowed)
        constant = fmax(constant, allowed->widest);
    if (!(constant < scale->spread && scale->spread <= steps * (atol + rtol * scale->least_extreme)))
        return false;
    snprintf(why, size,
             "values differ by at most %.3g, which is within the tolerance (rtol %.3g, atol %.3g)%s: the values would agree in "
             "any order",
             scale->spread, rtol, atol, measured);
    return true;
}

void check_tolerances(const char *method, const struct test_case *one)
{
    static const char *const hint = "use a smaller tolerance for the case";
    double given[] = {one->rtol, one->atol};
    for (int i = 0; i < 2; i++)
        if (!isnan(given[i]) && !(isfinite(given[i]) && given[i] >= 0))
            refuse("a tolerance is a number of 0 or more", "method '%s', case '%s': %s is %g", method, one->name,
                   i ? "atol" : "rtol", given[i]);
    if (one->rtol >= 1)
        refuse("rtol is relative to the reference's value: 0.01 is one percent",
               "method '%s', case '%s': rtol is %g: with an rtol of 1 or more, zeros would agree with every reference", method,
               one->name, one->rtol);
    if (!one->outputs_count)
        refuse("", "method '%s', case '%s': the method has no outputs, so the case could not fail", method,
               one->name);
    if (isnan(one->rtol) && isnan(one->atol))
        return;
    for (size_t i = 0; i < one->outputs_count; i++) {
        const struct tensor *output = &one->outputs[i];
        char why[512];
        struct scale scale;
        if (output->dtype->kind == 's')
            continue;
        if (one->atol >= span(output->dtype))
            refuse(hint, "method '%s', case '%s': atol is %g: no two %s values differ by more than %g", method, one->name,
                   one->atol, output->dtype->name, span(output->dtype));
        struct tolerance tolerance = fitted(output->dtype, output, one->rtol, one->atol, &scale);
        if (isnan(one->atol))
            tolerance.atol = 0;
        if (!tolerance.is_exact && is_blind(why, sizeof why, tolerance, &scale, NULL, true))
            refuse(hint, "method '%s', case '%s': output %s: %s", method, one->name, output->name, why);
    }
}

static void add_mismatch(struct stats *stats, uint64_t index, bool is_worse)
{
    stats->mismatches++;
    if (!stats->has_first) {
        stats->has_first = true;
        stats->first = index;
    }
    if (is_worse) {
        stats->has_worst = true;
        stats->worst = index;
    }
}

static bool same(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

/* Measure the differences. With ``all``, allow the full noise, otherwise only noise below its ceiling. */
static struct stats measure(const struct tensor *actual, const struct tensor *expected, struct tolerance tolerance,
                            const struct allowance *allowed, bool all)
{
    const struct dtype *da = actual->dtype, *db = expected->dtype;
    bool wide = is_wide_integer(da) || is_wide_integer(db);
    bool is_unsigned = (is_wide_integer(da) && da->kind == 'u') || (is_wide_integer(db) && db->kind == 'u');
    double rtol = tolerance.is_exact ? 0 : tolerance.rtol, atol = tolerance.is_exact ? 0 : tolerance.atol;
    double limit_a = mask_limit(da), limit_b = mask_limit(db), worst = 0;
    uint64_t worst_distance = 0;
    struct stats stats = {0};
    int parts = da->kind == 'c' || db->kind == 'c' ? 2 : 1;
    for (uint64_t i = 0; i < actual->count; i++) {
        double a[2], b[2], difference[2] = {0, 0};
        element(da, actual->data, i, a);
        element(db, expected->data, i, b);
        bool finite = true, equal = true, masked = false;
        for (int part = 0; part < parts; part++) {
            finite &= isfinite(a[part]) && isfinite(b[part]);
            equal &= same(a[part], b[part]);
            difference[part] = a[part] - b[part];
            masked |= fabs(a[part]) >= limit_a && fabs(b[part]) >= limit_b && !signbit(a[part]) == !signbit(b[part]);
        }
        if (!finite) {
            if (!equal) {
                stats.nonfinite++;
                add_mismatch(&stats, i, worst < INFINITY);
                worst = INFINITY;
            }
            continue;
        }
        stats.finite++;
        double distance = parts == 2 ? hypot(difference[0], difference[1]) : fabs(difference[0]);
        double size = parts == 2 ? hypot(b[0], b[1]) : fabs(b[0]);
        stats.masked += masked;
        for (int part = 0; part < parts && !masked; part++) {
            stats.aa += (sum)a[part] * a[part];
            stats.ab += (sum)a[part] * b[part];
            stats.bb += (sum)b[part] * b[part];
            stats.dd += (sum)difference[part] * difference[part];
        }
        if (wide) { /* compare as integers, because float64 rounds 64-bit integers */
            int64_t x = integer(da, actual->data, i), y = integer(db, expected->data, i);
            bool larger = is_unsigned ? (uint64_t)x > (uint64_t)y : x > y;
            uint64_t whole = larger ? (uint64_t)x - (uint64_t)y : (uint64_t)y - (uint64_t)x;
            double limit = floor(size * rtol + atol);
            distance = (double)whole;
            if (limit < 0x1p64 && whole > (uint64_t)limit) {
                uint64_t excess = whole - (uint64_t)limit;
                add_mismatch(&stats, i, excess > worst_distance);
                if (excess > worst_distance)
                    worst_distance = excess;
            }
        } else {
            double limit = size * rtol + atol + (allowed ? allowed_at(allowed, expected, i, all) : 0);
            if (distance > limit) {
                add_mismatch(&stats, i, distance - limit > worst);
                worst = fmax(worst, distance - limit);
            }
        }
        stats.max_abs = fmax(stats.max_abs, distance);
        stats.beside_zero |= size == 0 && distance > 0;
        if (size > 0)
            stats.max_rel = fmax(stats.max_rel, distance / size);
    }
    stats.zeroed = stats.aa == 0 && stats.bb > 0 && !stats.masked;
    return stats;
}

static bool is_comparable(const struct dtype *a, const struct dtype *b)
{
    if (a->kind == 's' || b->kind == 's')
        return false;
    if (!is_wide_integer(a) && !is_wide_integer(b))
        return true;
    if (!strchr("iu", a->kind) || !strchr("iu", b->kind))
        return false;
    /* No integer type contains all int64 and uint64 values, or the values of any other signed type and uint64. */
    return a->kind == b->kind || (a->kind == 'i' ? is_wide_integer(a) && !is_wide_integer(b)
                                                 : is_wide_integer(b) && !is_wide_integer(a));
}

void show_shape(char *text, size_t size, const struct tensor *tensor)
{
    size_t length = (size_t)snprintf(text, size, "%s", tensor->rank ? "" : "scalar");
    for (unsigned axis = 0; axis < tensor->rank && length < size; axis++)
        length += (size_t)snprintf(text + length, size - length, axis ? "x%llu" : "%llu",
                                   (unsigned long long)tensor->shape[axis]);
}

void show_index(char *text, size_t size, const struct tensor *tensor, uint64_t flat)
{
    uint64_t index[MAX_RANK];
    for (unsigned axis = tensor->rank; axis-- > 0; flat /= tensor->shape[axis])
        index[axis] = flat % tensor->shape[axis];
    size_t length = (size_t)snprintf(text, size, "[");
    for (unsigned axis = 0; axis < tensor->rank && length < size; axis++)
        length += (size_t)snprintf(text + length, size - length, axis ? ", %llu" : "%llu", (unsigned long long)index[axis]);
    if (length < size)
        snprintf(text + length, size - length, "]");
}

static void show_place(char *text, size_t size, const struct tensor *actual, const struct tensor *expected, uint64_t flat)
{
    char index[256], a[96], b[96];
    show_index(index, sizeof index, actual, flat);
    show_element(a, sizeof a, actual->dtype, actual->data, flat, false);
    show_element(b, sizeof b, expected->dtype, expected->data, flat, false);
    snprintf(text, size, "at %s: %s, the reference has %s", index, a, b);
}

static void say_values(char *text, size_t size, const struct tensor *actual, const struct tensor *expected,
                       struct tolerance tolerance, const struct stats *stats)
{
    char first[512], worst[512], within[96] = "";
    unsigned long long mismatches = stats->mismatches, count = actual->count, nonfinite = stats->nonfinite;
    *text = 0;
    if (stats->zeroed) {
        snprintf(text, size, "every value is 0, but the reference has other values");
        return;
    }
    if (!mismatches)
        return;
    show_place(first, sizeof first, actual, expected, stats->first);
    show_place(worst, sizeof worst, actual, expected, stats->worst);
    if (nonfinite) {
        snprintf(text, size, "%llu value%s NaN or infinite on one side only, first %s", nonfinite,
                 nonfinite == 1 ? "" : "s", worst);
        return;
    }
    if (!tolerance.is_exact)
        snprintf(within, sizeof within, " (rtol %g, atol %g)", tolerance.rtol, tolerance.atol);
    const char *differ = !tolerance.is_exact ? "out of tolerance" : mismatches == 1 ? "differs" : "differ";
    int length = snprintf(text, size, "%llu of %llu value%s %s%s", mismatches, count, count == 1 ? "" : "s", differ, within);
    if (stats->first == stats->worst)
        snprintf(text + length, size - (size_t)length, ", first and worst %s", worst);
    else
        snprintf(text + length, size - (size_t)length, ", first %s; worst %s", first, worst);
}

/* Return true, with the reason, if an output is not acceptable although it is within the tolerance. */
static bool has_more_error(char *why, size_t size, const struct stats *stats, const struct scale *scale, bool given)
{
    if (given && !scale->largest)
        return false;
    sum aa = stats->aa, bb = stats->bb, dd = stats->dd;
    if (dd != 0) {
        double sqnr = (double)(10 * (log10l(bb) - log10l(dd)));
        if (sqnr < 0) {
            snprintf(why, size, "within tolerance, but the error exceeds the signal (SQNR %.3g dB)", sqnr);
            return true;
        }
    }
    double cosine = aa == 0 || bb == 0 ? aa == bb : (double)(stats->ab / (sqrtl(aa) * sqrtl(bb)));
    if (cosine < 0) {
        snprintf(why, size, "within tolerance, but in the opposite direction of the reference (cosine %.3g)", fmax(cosine, -1));
        return true;
    }
    return false;
}

static bool is_all_nan(const struct tensor *tensor, const struct scale *scale)
{
    double parts[2];
    if (!tensor->count || scale->largest)
        return false;
    for (uint64_t i = 0; i < tensor->count; i++) {
        element(tensor->dtype, tensor->data, i, parts);
        if (!isnan(parts[0]) && !isnan(parts[1]))
            return false;
    }
    return true;
}

/* Return true, with the reason, if wrong values would also be within the tolerance. */
static bool is_doubtful(char *why, size_t size, struct tolerance tolerance, const struct stats *stats,
                        const struct scale *scale, const struct allowance *allowed, bool given)
{
    if (allowed)
        tolerance.atol += allowed->widest;
    return is_blind(why, size, tolerance, scale, allowed, given) || has_more_error(why, size, stats, scale, given);
}

/* Judge two tensors of the same shape. ``reason``: why the values are wrong. ``doubt``: why wrong values would also
 * agree. */
static struct stats judge_values(char *reason, char *doubt, size_t size, const struct tensor *actual,
                                 const struct tensor *expected, struct tolerance *tolerance, const struct scale *scale,
                                 const struct allowance *allowed, bool given)
{
    struct tolerance plain = *tolerance;
    struct stats stats = measure(actual, expected, plain, allowed, false);
    char again[512];
    if (allowed)
        tolerance->atol += allowed->widest;
    say_values(reason, size, actual, expected, *tolerance, &stats);
    if (plain.is_exact)
        return stats;
    if (*reason) {
        if (!allowed || stats.nonfinite)
            return stats;
        struct stats all = measure(actual, expected, plain, allowed, true);
        if (all.mismatches)
            return stats;
        snprintf(doubt, size,
                 "%llu of %llu value%s out of tolerance, but within the rounding noise of the reference ("
                 "%.2g): cannot be judged",
                 (unsigned long long)stats.mismatches, (unsigned long long)actual->count, actual->count == 1 ? "" : "s",
                 allowed->largest);
        *reason = 0;
        tolerance->atol = plain.atol + allowed->largest;
        return all;
    }
    if (is_all_nan(expected, scale))
        snprintf(doubt, size, "every value is NaN on both sides: no number was compared");
    else if (stats.max_abs > 0 && is_doubtful(doubt, size, plain, &stats, scale, allowed, given)) {
        struct tolerance closer = {false, 0, CONSTANT_EPS * scale->eps * scale->largest};
        struct stats near = measure(actual, expected, closer, allowed, false);
        if (!allowed || near.mismatches || is_doubtful(again, sizeof again, closer, &near, scale, allowed, false))
            return stats;
        *doubt = 0;
        *tolerance = closer;
        tolerance->atol += allowed->widest;
        return near;
    } else if (stats.bb > 0 && (stats.beside_zero || stats.max_rel > relative_limit(expected->dtype, plain.rtol, given))) {
        struct allowance none = {0};
        uint64_t lost, first;
        if (!has_small_loss(actual, expected, plain.rtol, plain.atol, given, allowed ? allowed : &none, &lost, &first))
            return stats;
        const char *more = allowed ? " and the noise of the reference" : "";
        snprintf(allowed && lost ? reason : doubt, size,
                 "of the values that are smaller than the tolerance (rtol %.3g, atol %.3g), %llu differ by more than %.2g of "
                 "their value%s",
                 plain.rtol, plain.atol, (unsigned long long)lost, relative_limit(expected->dtype, plain.rtol, given), more);
        if (allowed && lost) {
            stats.mismatches = lost;
            stats.has_first = stats.has_worst = true;
            stats.first = stats.worst = first;
        }
    }
    return stats;
}

static void judge(struct comparison *found, const struct tensor *actual, const struct tensor *expected, double rtol,
                  double atol, const struct tensor *noise)
{
    char reason[512] = "", doubt[512] = "";
    bool same_shape = actual->rank == expected->rank, has_noise = noise != NULL;
    struct scale scale;
    struct tolerance tolerance = fitted(actual->dtype, expected, rtol, atol, &scale);
    struct stats stats = {0};
    *found = (struct comparison){.max_abs = NAN, .max_rel = NAN};
    for (unsigned axis = 0; same_shape && axis < actual->rank; axis++)
        same_shape = actual->shape[axis] == expected->shape[axis];
    bool comparable = same_shape && is_comparable(actual->dtype, expected->dtype);
    has_noise &= !tolerance.is_exact;
    struct allowance allowed = has_noise ? allowance_of(noise, expected, scale.rms, scale.eps) : (struct allowance){0};
    if (comparable)
        stats = judge_values(reason, doubt, sizeof reason, actual, expected, &tolerance, &scale, has_noise ? &allowed : NULL,
                             !isnan(atol));
    if (!same_shape) {
        char mine[256], theirs[256];
        show_shape(mine, sizeof mine, actual);
        show_shape(theirs, sizeof theirs, expected);
        snprintf(found->reason, sizeof found->reason, "shape %s, the reference has %s", mine, theirs);
    } else if (actual->dtype == expected->dtype)
        snprintf(found->reason, sizeof found->reason, "%s", reason);
    else
        snprintf(found->reason, sizeof found->reason, "dtype %s, the reference has %s%s%s", actual->dtype->name,
                 expected->dtype->name, comparable ? "; " : "", !comparable ? "" : *reason ? reason : "the values agree");
    if (*found->reason)
        *doubt = 0;
    found->passed = !*found->reason && !*doubt;
    found->blind = *doubt;
    if (*doubt)
        snprintf(found->reason, sizeof found->reason, "%s", doubt);
    if (!tolerance.is_exact)
        snprintf(found->tolerance, sizeof found->tolerance, "{\"rtol\": %.17g, \"atol\": %.17g}", tolerance.rtol,
                 tolerance.atol);
    found->has_stats = comparable;
    if (!comparable)
        return;
    found->elements = actual->count;
    found->mismatches = stats.mismatches;
    found->nonfinite = stats.nonfinite;
    found->masked = stats.masked;
    found->has_first = stats.has_first;
    found->first = stats.first;
    found->has_worst = stats.has_worst;
    found->worst = stats.worst;
    if (stats.finite || !stats.mismatches) {
        found->max_abs = stats.max_abs;
        if (!(stats.bb == 0 && stats.dd > 0 && !stats.masked))
            found->max_rel = stats.max_rel;
    }
}

void compare_output(struct comparison *found, const struct tensor *actual, const struct tensor *expected, double rtol,
                    double atol, const struct tensor *noise)
{
    judge(found, actual, expected, rtol, atol, NULL);
    /* Allow for noise only if necessary: values that agree without noise need no wider tolerance. */
    if (noise && noise->dtype && isnan(atol) && !found->passed)
        judge(found, actual, expected, rtol, atol, noise);
}
