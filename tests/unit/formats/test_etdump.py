"""ETDumps of ExecuTorch's runtime: what is read of them, and what is said of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from hil.controller.analysis.profile.store import read_profile
from hil.controller.cli.main import cli
from hil.formats.etdump import EXECUTE, read_etdump
from hil.formats.executorch_file import Damaged

SCHEMA = Path(__file__).parents[3] / "docs" / "commands.schema.json"
FILES = Path(__file__).parents[1] / "executorch_files"


def data(name: str) -> bytes:
    return (FILES / name).read_bytes()


def test_each_operation_is_told_once_a_run() -> None:
    events = read_etdump(memoryview(data("portable.etdp")))
    assert [event.run for event in events if event.name == EXECUTE] == [0, 1, 2]
    for run in (0, 1, 2):
        operations = [event.name for event in events if event.run == run and event.is_operation]
        assert operations == [
            *("convolution.out", "relu.out", "convolution.out", "relu.out", "add.out"),
            *("max_pool2d_with_indices.out", "permute_copy.out", "addmm.out", "_softmax.out"),
        ]
    assert all(event.end >= event.start for event in events)
    assert not any(event.is_operation for event in events if event.run < 0)  # loading


def test_what_a_delegate_tells_are_operations_and_its_call_holds_them() -> None:
    run = [event for event in read_etdump(memoryview(data("xnnpack.etdp"))) if event.run == 2]
    assert "Convolution (NHWC, F32) IGEMM #2" in [event.name for event in run if event.is_operation]
    assert all(event.delegate for event in run if event.is_operation)
    (call,) = [event for event in run if event.name == "DELEGATE_CALL"]
    assert not call.is_operation


def test_a_size_in_front_is_taken_as_well() -> None:
    plain = data("xnnpack.etdp")
    plain = plain[4:] if plain[8:12] == b"ED00" else plain
    sized = len(plain).to_bytes(4, "little") + plain
    assert read_etdump(memoryview(sized)) == read_etdump(memoryview(plain))


def test_damaged_files_are_told_and_never_a_traceback() -> None:
    whole = data("portable.etdp")
    for size in range(0, len(whole), 37):
        with pytest.raises(Damaged):
            read_etdump(memoryview(whole[:size]))
    for at in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[at] ^= 0xFF
        try:
            read_etdump(memoryview(bytes(changed)))
        except Damaged as error:
            assert str(error)


def test_a_file_from_elsewhere_becomes_a_profile(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    arguments = ["profile", "import", str(FILES / "portable.etdp"), "-o", str(folder), "--model", "cnn", "--unit", "us"]
    document = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    jsonschema.validate(document, json.loads(SCHEMA.read_text())["$defs"]["profile import"])
    profile = read_profile(folder)
    assert (profile.model, profile.board, len(profile.calls[0].iterations_ns)) == ("cnn", "elsewhere", 3)
    assert {row.kind for row in profile.rows} == {"compute", "runtime"}
    shown = CliRunner().invoke(cli, ["profile", "show", str(folder)])
    assert "max_pool2d_with_indices.out" in shown.output, shown.output


@pytest.mark.parametrize(("content", "said"), [(b"", "it is empty"), (b"no etdump" * 9, "it is no ETDump")])
def test_what_is_no_etdump_is_bad_usage(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.etdp"
    file.write_bytes(content)
    from hil.errors import UsageError

    result = CliRunner().invoke(cli, ["profile", "import", str(file), "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, UsageError) and said in str(result.exception)
    assert not (tmp_path / "out").exists()
