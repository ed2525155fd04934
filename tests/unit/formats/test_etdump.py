"""ETDumps of ExecuTorch's runtime: parsing, and errors for damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import flatbuffers
import pytest
from click.testing import CliRunner
from support.schemas import check_document

from hil.controller.analysis.profile.store import read_profile
from hil.controller.cli.main import cli
from hil.formats.etdump import EXECUTE, read_etdump
from hil.formats.executorch_file import Damaged

FILES = Path(__file__).parents[1] / "executorch_files"


def data(name: str) -> bytes:
    return (FILES / name).read_bytes()


def test_read_etdump_lists_each_operation_per_run() -> None:
    events = read_etdump(memoryview(data("portable.etdp")))
    assert [event.run for event in events if event.name == EXECUTE] == [0, 1, 2]
    for run in (0, 1, 2):
        operations = [event.name for event in events if event.run == run and event.is_operation]
        assert operations == [
            *("convolution.out", "relu.out", "convolution.out", "relu.out", "add.out"),
            *("max_pool2d_with_indices.out", "permute_copy.out", "addmm.out", "_softmax.out"),
        ]
    assert all(event.end >= event.start for event in events)
    assert not any(event.is_operation for event in events if event.run < 0)  # these events belong to loading


def test_read_etdump_lists_delegate_operations_under_call() -> None:
    run = [event for event in read_etdump(memoryview(data("xnnpack.etdp"))) if event.run == 2]
    assert "Convolution (NHWC, F32) IGEMM #2" in [event.name for event in run if event.is_operation]
    assert all(event.delegate for event in run if event.is_operation)
    (call,) = [event for event in run if event.name == "DELEGATE_CALL"]
    assert not call.is_operation


def test_read_etdump_accepts_size_prefix() -> None:
    plain = data("xnnpack.etdp")
    plain = plain[4:] if plain[8:12] == b"ED00" else plain
    sized = len(plain).to_bytes(4, "little") + plain
    assert read_etdump(memoryview(sized)) == read_etdump(memoryview(plain))


@pytest.mark.ci
def test_read_etdump_raises_damaged_for_damaged_files() -> None:
    whole = data("portable.etdp")
    for size in range(0, len(whole), 37):
        with pytest.raises(Damaged):
            read_etdump(memoryview(whole[:size]))
    messages = []
    for at in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[at] ^= 0xFF
        try:
            read_etdump(memoryview(bytes(changed)))
        except Damaged as error:
            messages.append(str(error))
    assert len(messages) > len(whole) // 5 // 2  # other bytes are names and times, whose damage is invisible
    assert "truncated or corrupt file" in messages
    assert any("'OPERATOR_CALL'" in message for message in messages)


def make_etdump(*events: tuple[str, int, int]) -> bytes:
    """Return an ETDump of one block. An event has a name, a start and an end; equal events share bytes."""
    builder = flatbuffers.Builder()

    def make_table(field: int, value: int, fields: int, *numbers: tuple[int, int]) -> int:
        builder.StartObject(fields)
        builder.PrependUOffsetTRelativeSlot(field, value, 0)
        for slot, number in numbers:
            builder.PrependUint64Slot(slot, number, 0)
        return builder.EndObject()

    def make_vector(tables: list[int]) -> int:
        builder.StartVector(4, len(tables), 4)
        for table in reversed(tables):
            builder.PrependUOffsetTRelative(table)
        return builder.EndVector()

    made = {
        (name, start, end): make_table(0, make_table(0, builder.CreateString(name), 8, (6, start), (7, end)), 1)
        for name, start, end in dict.fromkeys(events)
    }
    block = make_table(3, make_vector([made[one] for one in events]), 4)
    builder.Finish(make_table(1, make_vector([block]), 2), b"ED00")
    return bytes(builder.Output())


@pytest.mark.ci
def test_read_etdump_handles_many_runs_quickly() -> None:
    many = [(EXECUTE, 1, 2)] * 20_000 + [("add.out", 3, 4)] * 20_000
    events = read_etdump(memoryview(make_etdump(*many)))
    assert {event.run for event in events if event.name == "add.out"} == {-1}


def test_profile_import_reads_etdump(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    arguments = ["profile", "import", str(FILES / "portable.etdp"), "-o", str(folder), "--model", "cnn", "--unit", "us"]
    document = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    check_document(document, "profile import")
    profile = read_profile(folder)
    assert (profile.model, profile.board, len(profile.calls[0].iterations_ns)) == ("cnn", "elsewhere", 3)
    assert {row.kind for row in profile.rows} == {"compute", "runtime"}
    shown = CliRunner().invoke(cli, ["profile", "show", str(folder)])
    assert "max_pool2d_with_indices.out" in shown.output, shown.output


@pytest.mark.parametrize(("content", "said"), [(b"", "the file is empty"), (b"no etdump" * 9, "not an ETDump")])
def test_profile_import_rejects_invalid_etdump(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.etdp"
    file.write_bytes(content)
    from hil.errors import UsageError

    result = CliRunner().invoke(cli, ["profile", "import", str(file), "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, UsageError) and said in str(result.exception)
    assert not (tmp_path / "out").exists()
