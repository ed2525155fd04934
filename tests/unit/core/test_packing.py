from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.core.tensors import SUB_BYTE_BITS, pack, parse_dtype, unpack


@given(st.sampled_from(sorted(SUB_BYTE_BITS)), st.lists(st.integers(0, 5), max_size=3), st.randoms())
def test_pack_round_trips_every_value(name: str, shape: list[int], random: object) -> None:
    bits = SUB_BYTE_BITS[name]
    raw = np.random.default_rng(random.getrandbits(32)).integers(0, 1 << bits, shape).astype(np.uint8)
    if name.startswith("int"):
        raw = ((raw << (8 - bits)).view(np.int8) >> (8 - bits)).view(np.uint8)
    array = raw.view(parse_dtype(name))
    packed = pack(array)
    assert packed.dtype == np.uint8 and packed.size == math.ceil(array.size * bits / 8)
    again = unpack(packed, name, array.shape)
    assert again.dtype == array.dtype and again.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("name", "values", "packed"), [("int4", [1, -1, 2], [0xF1, 0x02]), ("uint2", [1, 2, 3, 0, 1], [0x39, 0x01])]
)
def test_pack_stores_first_element_in_lowest_bits(name: str, values: list[int], packed: list[int]) -> None:
    assert pack(np.array(values).astype(parse_dtype(name))).tolist() == packed
