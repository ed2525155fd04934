"""What a library of the runtime xla-aot says of itself."""

from __future__ import annotations

import numpy as np
import pytest

from hil.core.tensors import TensorSpec
from hil.formats.xla_program import Argument, Signature, read_signature, write_signature

SIGNATURE = Signature(
    "step",
    (
        Argument(TensorSpec("x", "float32", (2, 3))),
        Argument(TensorSpec("scope/kernel", "float32", (3,)), variable=True, assigned=True),
        Argument(TensorSpec("fixed", "int32", ()), variable=True),
    ),
    (TensorSpec("loss", "float32", ()),),
)


def test_a_signature_is_read_as_it_was_written():
    text = write_signature(SIGNATURE)
    assert text.isascii()
    assert read_signature(text) == SIGNATURE


def test_variables_are_inputs_only_where_they_are_not_kept_with_the_program_and_their_new_values_outputs():
    assert [spec.name for spec in SIGNATURE.inputs(variables=False)] == ["x"]
    assert [spec.name for spec in SIGNATURE.inputs(variables=True)] == ["x", "scope/kernel", "fixed"]
    assert [spec.name for spec in SIGNATURE.results()] == ["loss", "variable scope/kernel"]


def test_the_variables_values_lie_one_after_the_other():
    values = SIGNATURE.values(np.arange(3, dtype=np.float32).tobytes() + np.int32(7).tobytes())
    assert values["scope/kernel"].tolist() == [0, 1, 2]
    assert values["fixed"].shape == () and values["fixed"] == 7
    with pytest.raises(ValueError, match="has 15 bytes, the program's variables take 16"):
        SIGNATURE.values(bytes(15))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"abi": 1}', '{"abi": 99}', '{"abi": 1, "arguments": [1]}'])
def test_what_is_no_signature_is_refused(text):
    with pytest.raises(ValueError):
        read_signature(text)
