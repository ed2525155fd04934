/* hil/compare/allowance.py and hil/compare/small.py in C: differences allowed for noise, and values below the
 * tolerance. */
#include "verifier.h"

#include <math.h>

static const double CEILING_EPS = 1e4, CEILING = 0x1p-5, UNSTEADY_SHARE = 0x1p-3, NO_NOISE = 0x1p-127;
static const double SMALL_SHARE = 0.0625, GIVEN_SHARE = 0.25, GROUP_SHARE = 0.5, LOST_SHARE = 0.25;

static double magnitude_at(const struct tensor *tensor, uint64_t index)
{
    double parts[2] = {0, 0};
    element(tensor->dtype, tensor->data, index, parts);
    return tensor->dtype->kind == 'c' ? hypot(parts[0], parts[1]) : fabs(parts[0]);
}

static double noise_at(const struct allowance *allowance, uint64_t index)
{
    double size = allowance->noise ? magnitude_at(allowance->noise, index) : 0;
    return size > NO_NOISE ? size : 0;
}

static double ceiling_at(const struct allowance *allowance, const struct tensor *expected, uint64_t index)
{
    double size = magnitude_at(expected, index);
    return allowance->share * fmax(isfinite(size) ? size : 0, allowance->rms);
}

double allowed_at(const struct allowance *allowance, const struct tensor *expected, uint64_t index, bool all)
{
    double size = noise_at(allowance, index);
    return all || allowance->is_rare ? size : fmin(size, ceiling_at(allowance, expected, index));
}

struct allowance allowance_of(const struct tensor *noise, const struct tensor *expected, double rms, double eps)
{
    struct allowance found = {.noise = noise, .rms = rms, .share = eps ? fmin(CEILING_EPS * eps, CEILING) : CEILING};
    uint64_t unsteady = 0;
    double clipped = 0;
    for (uint64_t i = 0; i < expected->count; i++) {
        double size = noise_at(&found, i), ceiling = ceiling_at(&found, expected, i);
        found.largest = fmax(found.largest, size);
        clipped = fmax(clipped, fmin(size, ceiling));
        if (size > ceiling)
            unsteady++;
        else
            found.widest = fmax(found.widest, size);
    }
    found.is_rare = (double)unsteady <= UNSTEADY_SHARE * (double)expected->count;
    if (!found.is_rare)
        found.widest = clipped;
    return found;
}

static bool has_eps(const struct dtype *dtype)
{
    return !is_exact(dtype) && dtype->bytes >= 2;
}

double relative_limit(const struct dtype *dtype, double rtol, bool given)
{
    return given || !has_eps(dtype) ? 0.5 : fmax(rtol, sqrt(dtype->eps));
}

/* Counts over the values at an index of an axis, or over all values: nonzero, small, lost, and hidden by noise. */
struct group {
    uint64_t nonzero, small, lost, hidden;
};

enum { IS_NONZERO = 1, IS_SMALL = 2, IS_LOST = 4, IS_HIDDEN = 8 };

static unsigned kind_at(const struct tensor *actual, const struct tensor *expected, double rtol, double atol, double share,
                        bool with_zeros, const struct allowance *allowance, uint64_t index)
{
    double a[2] = {0, 0}, b[2] = {0, 0}, size = magnitude_at(expected, index), noise = noise_at(allowance, index);
    if (!(size <= atol / (1 - rtol)))
        return IS_NONZERO;
    element(actual->dtype, actual->data, index, a);
    element(expected->dtype, expected->data, index, b);
    bool is_complex = actual->dtype->kind == 'c' || expected->dtype->kind == 'c';
    double distance = is_complex ? hypot(a[0] - b[0], a[1] - b[1]) : fabs(a[0] - b[0]);
    double tiny = has_eps(expected->dtype) ? expected->dtype->smallest / expected->dtype->eps : 0;
    if (size == 0 && (!with_zeros || !(distance > tiny)))
        return 0;
    unsigned found = IS_NONZERO | IS_SMALL;
    if (!(distance > fmax(share * size, tiny)))
        return found;
    if (size == 0) /* there is no relative error: the value may be rounding, or should not exist */
        return found | (distance > noise ? IS_HIDDEN : 0);
    return found | (distance > noise ? IS_LOST : noise > size / 2 ? IS_HIDDEN : 0);
}

bool has_small_loss(const struct tensor *actual, const struct tensor *expected, double rtol, double atol, bool given,
                    const struct allowance *allowance, uint64_t *lost, uint64_t *first)
{
    double share = relative_limit(expected->dtype, rtol, given);
    bool is_coarse = given || !has_eps(expected->dtype);
    double least = is_coarse ? LOST_SHARE : 0, share_of_all = is_coarse ? GIVEN_SHARE : SMALL_SHARE;
    int rank = (int)expected->rank, count = rank > 1 ? rank + 1 : 1;
    for (int place = 0; place < count; place++) {
        void *before = last_allocated();
        /* first the last axis, then the other axes, then all elements together */
        int axis = place == count - 1 ? -1 : place ? place - 1 : rank - 1;
        uint64_t size = axis < 0 ? 1 : expected->shape[axis], stride = axis < 0 ? expected->count : 1;
        for (unsigned later = (unsigned)axis + 1; axis >= 0 && later < expected->rank; later++)
            stride *= expected->shape[later];
        struct group *groups = allocate(size, sizeof *groups);
        /* A given tolerance limits the distance of a float from 0. For integers, a distance of one step is a whole
         * value. */
        bool with_zeros = !given || (!has_eps(expected->dtype) && axis < 0);
        for (uint64_t i = 0; i < expected->count; i++) {
            unsigned kind = kind_at(actual, expected, rtol, atol, share, with_zeros, allowance, i);
            struct group *group = &groups[i / stride % size];
            group->nonzero += (kind & IS_NONZERO) != 0;
            group->small += (kind & IS_SMALL) != 0;
            group->lost += (kind & IS_LOST) != 0;
            group->hidden += (kind & IS_HIDDEN) != 0;
        }
        double many = axis < 0 ? share_of_all : GROUP_SHARE;
        bool is_hidden = false;
        *lost = 0;
        for (uint64_t i = 0; i < size; i++) {
            struct group group = groups[i];
            bool counts = group.nonzero >= 2 && group.small && (double)group.small >= many * (double)group.nonzero;
            groups[i].nonzero = counts && (double)group.lost > least * (double)group.small; /* now: whether the group is bad */
            *lost += groups[i].nonzero ? group.lost : 0;
            is_hidden |= counts && group.hidden && (double)group.hidden >= GROUP_SHARE * (double)group.nonzero;
        }
        for (uint64_t i = 0; *lost && i < expected->count; i++)
            if (groups[i / stride % size].nonzero &&
                kind_at(actual, expected, rtol, atol, share, with_zeros, allowance, i) & IS_LOST) {
                *first = i;
                break;
            }
        free_after(before);
        if (*lost || is_hidden)
            return true;
    }
    return false;
}
