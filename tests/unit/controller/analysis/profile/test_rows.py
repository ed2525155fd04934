"""Read and write the operations table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.made_profiles import row, run_on

from hil.controller.analysis.profile.rows import COLUMNS, join_list, read_csv, split_list, write_csv, write_parquet
from hil.core.timeline import OpRow
from hil.errors import UsageError

# UTF-8 has no lone surrogates; names of boards, runtimes and operations contain neither NUL nor CR.
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"))
NODES = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.text(";\\,\"'\n\r\0en")), max_size=4
).map(tuple)
COUNTS = st.integers(0, 2**63 - 1)
ROWS = st.builds(
    OpRow,
    run=NAMES,
    iteration=COUNTS,
    board=NAMES,
    runtime=NAMES,
    op=NAMES,
    kind=st.sampled_from(["compute", "runtime"]),
    onnx_nodes=NODES,
    op_types=NODES,
    start_ns=st.integers(-(2**63), 2**63 - 1),
    duration_ns=COUNTS,
    tiles=st.none() | COUNTS,
    tile_time_ns=st.none() | COUNTS,
    shapes=NAMES,
    bytes=st.none() | COUNTS,
    flops=st.none() | COUNTS,
    bound_estimate=st.sampled_from(["", "compute", "memory"]),
)
# Each example rewrites its file.
ANEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@given(NODES)
def test_join_list_round_trips_any_names(names):
    assert split_list(join_list(names)) == names


@pytest.mark.parametrize(
    ("names", "cell"),
    [
        ((), ""),
        (("conv1", "relu1"), "conv1;relu1"),
        (("",), "\\e"),
        (("a;b", "c\\"), "a\\;b;c\\\\"),
        (("a\nb",), "a\\nb"),
    ],
)
def test_join_list_writes_readable_cell(names, cell):
    assert join_list(names) == cell


@ANEW
@given(rows=st.lists(ROWS, max_size=4))
def test_csv_round_trips_rows(tmp_path, rows):
    assert write_csv(rows, tmp_path / "ops.csv") == len(rows)
    assert list(read_csv(tmp_path / "ops.csv")) == rows


@ANEW
@given(rows=st.lists(ROWS, max_size=4))
def test_parquet_round_trips_rows(tmp_path, rows):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(rows, tmp_path / "ops.parquet")
    table = parquet.read_table(tmp_path / "ops.parquet")
    assert tuple(table.column_names) == COLUMNS
    lists = ("onnx_nodes", "op_types")
    read = [OpRow(**{**cells, **{name: tuple(cells[name]) for name in lists}}) for cells in table.to_pylist()]
    assert read == rows


def test_csv_has_named_columns_and_plain_cells(tmp_path):
    rows = run_on(iterations=1).rows
    write_csv(rows, tmp_path / "ops.csv")
    with (tmp_path / "ops.csv").open(newline="", encoding="utf-8") as file:
        first, *_, last = csv.DictReader(file)
    assert (first["op"], first["onnx_nodes"], first["tiles"]) == ("dispatch_0", "conv0;relu0", "16")
    assert first["shapes"] == "1x8x8xf32, 3x3xf32 -> 1x8x8xf32"
    assert (last["kind"], last["onnx_nodes"], last["tiles"], last["bytes"]) == ("runtime", "", "", "")


def test_read_csv_rejects_table_truncated_in_a_row(tmp_path):
    rows = [row('a\n"b"', 5, 7, shapes="1x2 -> 3"), row("c", 12, 1)]
    path = tmp_path / "ops.csv"
    write_csv(rows, path)
    whole = path.read_bytes()
    ends = [len(whole)]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        try:
            assert list(read_csv(path)) == rows[: len(ends) - 1]
            ends.append(size)
        except UsageError as error:
            assert str(path) in error.message
    # Only complete lines parse as a table: the header, and each row.
    assert len(ends) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got columns none"),
        ("name,time\nconv,3\n", "got columns name, time"),
        (",".join(COLUMNS) + "\nmade,0\n", "line 2: expected 17 cells, got 2"),
        (",".join(COLUMNS) + "\nr,one,b,iree,op,compute,,,1,2,board,,,,,,\n", "line 2: invalid literal for int"),
        (
            ",".join(COLUMNS) + f"\nr,1,b,iree,op,compute,,,1,2,board,,,,,{400 * '9'},\n",
            "line 2: 9+ is not an integer of 64",
        ),
        (",".join(COLUMNS) + '\nr,1,"b', "is truncated"),
        ("\xff\xfe\n", "got columns"),
    ],
)
def test_read_csv_rejects_other_tables(tmp_path, text, said):
    path = tmp_path / "ops.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        list(read_csv(path))


def test_read_csv_rejects_binary_and_missing_files(tmp_path):
    (tmp_path / "ops.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not an operation table of a profile"):
        list(read_csv(tmp_path / "ops.csv"))
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_csv(tmp_path / "missing.csv"))


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_failed_write_preserves_previous_table(tmp_path: Path, write):
    if write is write_parquet:
        pytest.importorskip("pyarrow")
    path = tmp_path / "ops"
    write([row("a", 1, 2)], path)
    before = path.read_bytes()

    def failing():
        yield row("b", 1, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(failing(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["ops"]
    assert path.read_bytes() == before


def test_split_list_takes_linear_time() -> None:
    long = "a" * 130_000
    assert split_list(f"x;{long}\\") == ("x", f"{long}\\")
