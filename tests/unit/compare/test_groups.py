"""Groups of elements: counts, sums, maxima and limits are computed per group."""

from __future__ import annotations

import numpy as np
import pytest

from hil.compare.groups import Channels, Groups, Magnitudes
from hil.compare.values import CHUNK
from hil.core.tensors import Array

SHAPE = (3, 5, 2, CHUNK // 8)
RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal(SHAPE) * 10.0 ** RNG.integers(-9, 9, SHAPE)
VALUES[0, 0, 0, :4] = 0.0, np.nan, np.inf, 5e-324


def masks(axis: int) -> list[Array]:
    places = np.arange(SHAPE[axis]).reshape([-1 if one == axis else 1 for one in range(len(SHAPE))])
    return [places == place for place in range(SHAPE[axis])]


def exponents() -> Array:
    with np.errstate(divide="ignore"):
        found = np.floor(np.log2(np.abs(VALUES)) / 4)
    return np.where(np.isfinite(found), found, np.nan)


BY_MAGNITUDE = Magnitudes(VALUES.reshape(-1))
CASES: dict[str, tuple[Groups, list[Array]]] = {
    "all": (Channels(SHAPE), [np.ones(SHAPE, np.bool_)]),
    **{f"axis {axis}": (Channels(SHAPE, axis), masks(axis)) for axis in range(3)},
    "magnitudes": (BY_MAGNITUDE, [exponents() == one for one in BY_MAGNITUDE.exponents]),
}


def test_magnitudes_use_exponents_of_16() -> None:
    assert BY_MAGNITUDE.exponents == np.unique(exponents()[~np.isnan(exponents())]).tolist()


@pytest.mark.parametrize("name", CASES)
def test_groups_reduce_elements_per_group(name: str) -> None:
    groups, chosen = CASES[name]
    sizes = np.abs(RNG.standard_normal(SHAPE))
    flat, wide = sizes.reshape(-1).copy(), [np.broadcast_to(one, SHAPE) for one in chosen]
    assert groups.count().tolist() == [np.count_nonzero(one) for one in wide]
    assert groups.sum_squares(flat) == pytest.approx([np.sum(sizes[one] ** 2) for one in wide])
    assert groups.find_largest(flat).tolist() == [sizes[one].max() for one in wide]
    limits, expected = np.linspace(0.1, 0.9, len(wide)), sizes.copy()
    for one, limit in zip(wide, limits, strict=True):
        expected[one] = np.minimum(expected[one], limit)
    groups.clip(flat, limits)
    assert (flat == expected.reshape(-1)).all()
