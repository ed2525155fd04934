"""The signature of a library for the runtime xla-aot."""

from __future__ import annotations

import numpy as np
import pytest

from hil.core.tensors import TensorSpec
from hil.formats.xla_program import Argument, LibrarySignature, read_signature, write_signature

SIGNATURE = LibrarySignature(
    "step",
    (
        Argument(TensorSpec("x", "float32", (2, 3))),
        Argument(TensorSpec("scope/kernel", "float32", (3,)), variable=True, assigned=True),
        Argument(TensorSpec("fixed", "int32", ()), variable=True),
    ),
    (TensorSpec("loss", "float32", ()),),
)


def test_xla_signature_round_trips_text():
    text = write_signature(SIGNATURE)
    assert text.isascii()
    assert read_signature(text) == SIGNATURE


def test_xla_variables_become_inputs_unless_stored_with_program():
    assert [spec.name for spec in SIGNATURE.inputs(variables=False)] == ["x"]
    assert [spec.name for spec in SIGNATURE.inputs(variables=True)] == ["x", "scope/kernel", "fixed"]
    assert [spec.name for spec in SIGNATURE.list_results()] == ["loss", "variable scope/kernel"]


def test_xla_values_splits_file_into_variables():
    values = SIGNATURE.values(np.arange(3, dtype=np.float32).tobytes() + np.int32(7).tobytes())
    assert values["scope/kernel"].tolist() == [0, 1, 2]
    assert values["fixed"].shape == () and values["fixed"] == 7
    with pytest.raises(ValueError, match="has 15 bytes, but the program's variables need 16"):
        SIGNATURE.values(bytes(15))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"abi": 1}', '{"abi": 99}', '{"abi": 1, "arguments": [1]}'])
def test_read_xla_signature_rejects_invalid_text(text):
    with pytest.raises(ValueError):
        read_signature(text)
