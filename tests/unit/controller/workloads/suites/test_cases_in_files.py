"""Cases stored in files; tests/frameworks/executorch tests files written by ExecuTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bundle_files import bundle, case

from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.formats import write_format
from hil.controller.workloads.suites.cases.model_scan import group_by_program, make_flagfile_cases, read_own_cases
from hil.errors import UsageError

FILES = Path(__file__).parents[3] / "executorch_files"


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RunContext]:
    with Isolated(1) as isolated:
        yield RunContext(Cache(tmp_path / "cache"), isolated)


def test_cases_in_rejects_damaged_file(tmp_path, context):
    for name, data in {"net.bpte": b"\0\0\0\0BP08" + b"\xff" * 40, "net.hilb": b"\x89HILB" + b"\xff" * 40}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match=r"net\.(bpte|hilb)"):
            read_own_cases(tmp_path / name, context)


def test_cases_in_accepts_program_without_cases(tmp_path, context):
    file = tmp_path / "net.bpte"
    file.write_bytes(b"\x10\0\0\0ET12" + b"\0" * 40)
    assert read_own_cases(file, context) == []


def test_cases_in_reads_bundled_executorch_cases(tmp_path, context):
    found = read_own_cases(FILES / "mixed.bpte", context)
    assert [one.name for one in found] == ["forward_0", "forward_1", "forward_2"]
    begun = found[2].make(tmp_path).begin(Options(), tmp_path)
    assert begun.options.runtime == begun.artifact.runtime == "executorch" and begun.options.function == "forward"
    assert list(begun.inputs) == ["input0"] and begun.references[0].source == "mixed.bpte"
    # Same tolerance as ExecuTorch's verifier unless the user overrides it.
    assert begun.options.rtol == pytest.approx(1e-5, rel=1e-4)
    assert found[2].make(tmp_path).begin(Options(rtol=0.5), tmp_path).options.rtol == 0.5


def test_cases_of_same_program_share_files(tmp_path, context):
    made = bundle(tmp_path, *(case(size, name=f"case {size}") for size in (1, 2, 3)))
    made.save(tmp_path / "a.hilb")
    write_format("golden", made, tmp_path / "golden", context=context)
    programs = set()
    for file in (tmp_path / "a.hilb", tmp_path / "golden" / "golden.json"):
        found = read_own_cases(file, context)
        assert [one.name for one in found] == ["f_case 1", "f_case 2", "f_case 3"]
        for number, one in enumerate(found, 1):
            begun = one.make(tmp_path).begin(Options(), tmp_path)
            assert begun.inputs["x"].shape == (number, 2)
            programs.add(begun.artifact.files["main.bin"])
    (program,) = programs
    assert program.read_bytes() == b"main.bin" * 7


def test_flagfiles_are_grouped_by_program(tmp_path):
    for name, text in {
        "a": "--module=net.vmfb\n--expected_output=1xf32=1\n",
        "below/b": "--module=../net.vmfb\n--expected_output=1xf32=1\n",
        "odd": "--module=net.vmfb\n--expected_output=1xf32=1\n--frobnicate=1\n",
        "silent": "--module=net.vmfb\n",
        "other": "--some_flag_of_another_tool=1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.flagfile").write_text(text)
    files = sorted(tmp_path.rglob("*.flagfile"))
    found, left_out = group_by_program(files)
    program = (tmp_path / "net.vmfb").resolve()
    assert [file.name for file in found.pop(program)] == ["a.flagfile", "b.flagfile"]
    assert [file.name for file in found] == ["odd.flagfile"]
    assert len(left_out) == 1 and "silent.flagfile" in left_out[0]
    assert [one.name for one in make_flagfile_cases(files[:2], tmp_path, None)] == ["a", "below.b"]
