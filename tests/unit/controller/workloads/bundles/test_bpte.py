"""Convert a .bpte to a bundle without ExecuTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.executorch_crafted import bundled

from hil.bundles import Bundle
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.bpte import read_bpte
from hil.errors import UsageError
from hil.formats.executorch_file import read_methods

FILES = Path(__file__).parents[3] / "executorch_files"


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RunContext]:
    with Isolated(1) as isolated:
        yield RunContext(Cache(tmp_path / "cache"), isolated)


def test_read_bpte_converts_program_to_bundle(context: RunContext, tmp_path: Path):
    bundle = read_bpte(FILES / "mixed.bpte", context=context)
    bundle.save(tmp_path / "mixed.hilb")
    (method,) = Bundle.open(tmp_path / "mixed.hilb").methods
    assert method.name == "forward"
    assert [case.name for case in method.cases] == ["0", "1", "2"]
    for case in method.cases:
        np.testing.assert_array_equal(case.expected_outputs["output1"], case.inputs["input0"] > 0)
        # The tolerance of ExecuTorch's verifier, relative to the expected outputs.
        assert (case.rtol, case.atol) == (pytest.approx(1e-5, rel=2e-5), pytest.approx(1e-8, rel=2e-5))
        assert case.rtol < 1e-5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "the file is empty"),
        (b"\0" * 64, "not a bundled program"),
        (b"\0\0\0\0BP99" + b"\0" * 64, "version 'BP99'"),
    ],
)
def test_read_bpte_rejects_other_files(context: RunContext, tmp_path: Path, content: bytes | None, said: str):
    path = tmp_path / "a.bpte"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.bpte") as error:
        read_bpte(path, context=context)
    assert said in error.value.message


def test_read_bpte_rejects_truncated_file(context: RunContext, tmp_path: Path):
    path = tmp_path / "a.bpte"
    whole = (FILES / "mixed.bpte").read_bytes()
    for size in range(8, len(whole) - 1, 97):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=r"a\.bpte"):
            read_bpte(path, context=context)


def test_read_bpte_rejects_tensor_in_place_of_scalar(context: RunContext, tmp_path: Path):
    path = tmp_path / "a.bpte"
    program = (FILES / "numbers.pte").read_bytes()
    places = len(read_methods(memoryview(program))["forward"].inputs)
    path.write_bytes(bundled([(2, 4)] * places, program))
    with pytest.raises(UsageError, match="is a tensor, expected the constant"):
        read_bpte(path, context=context)
