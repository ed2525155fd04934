"""Suites and pytest workers on boards leased from an in-process farm gateway."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from support.commands import Ended, whole_lines
from support.fake_farm import CONFIG, FakeFarm, start_hil
from support.models import save_model
from support.plugin_runs import Project
from support.waiting import eventually

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint

OPS = ["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softplus"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Save models of six layers each in a directory."""
    folder = tmp_path / "models"
    folder.mkdir()
    for size in range(8, 14):
        nodes = [helper.make_node(op, [f"t{n}"], [f"t{n + 1}"], f"{op.lower()}{n}") for n, op in enumerate(OPS)]
        ends = [(name, TensorProto.FLOAT, [size]) for name in ("t0", f"t{len(OPS)}")]
        save_model(folder / f"net{size}.onnx", nodes, ends[:1], ends[1:])
    return folder


def test_suite_spreads_over_farm_boards(
    fake_farm: FakeFarm, hil: Callable[..., Ended], start_agent: Callable[..., str], models: Path
) -> None:
    for number in range(3):
        # Slow enough that both boards take cases.
        fake_farm.add(f"lab1-sim-{number}", start_agent("--fault", "pace:seconds=0.2", module="hil.sim"))
    ended = hil("suite", "run", models, "--flow", "onnxruntime", "--board", "farm:", "-j", 2, "--json")
    assert ended.code == 0, ended.err
    cases = ended.document["cases"]
    assert len(cases) == 6 * 7
    assert {case["outcome"] for case in cases} == {"PASS"}
    used = {case["board"] for case in cases}
    assert used <= {"lab1-sim-0", "lab1-sim-1", "lab1-sim-2"}
    assert len(used) == 2 == len(fake_farm.leases)
    assert {case["hw_type"] for case in cases} == {"sim"}
    assert sorted(used) == ended.document["boards"]
    assert all("lease" in info for info in ended.document["board_info"].values())
    assert fake_farm.is_free()


@pytest.mark.slow
def test_suite_adds_and_replaces_farm_boards(
    fake_farm: FakeFarm, environment: dict[str, str], start_agent: Callable[..., str], models: Path, tmp_path: Path
) -> None:
    slow = [start_agent("--fault", "pace:seconds=0.4", module="hil.sim") for _ in range(3)]
    fake_farm.add("lab1-sim-0", slow[0])
    out = tmp_path / "out"
    words = ["suite", "run", models, "--flow", "onnxruntime", "--board", "farm:", "-j", 2, "--out", out]
    process = start_hil(environment, tmp_path, *words)

    def records() -> list[dict]:
        return whole_lines(out / "results.jsonl")

    eventually(lambda: len(records()) >= 4)
    fake_farm.add("lab1-sim-1", slow[1])
    eventually(lambda: any(record["board"] == "lab1-sim-1" for record in records()))
    fake_farm.add("lab1-sim-2", slow[2])
    fake_farm.remove("lab1-sim-0", "its host is gone")
    eventually(lambda: any(lease.told for lease in fake_farm.leases))
    client = AgentClient(AgentEndpoint(slow[0]), "host")
    client.describe()
    client.open_session("ended", fence=100, wait_s=5, on_wait=print)
    told = process.communicate(timeout=120)
    client.close()
    assert process.returncode == 0, told
    boards = [record["board"] for record in records()]
    assert len(boards) == 6 * 7
    assert set(boards) == {"lab1-sim-0", "lab1-sim-1", "lab1-sim-2"}
    lost = [record for record in records() if record["attempts"]]
    assert [record["attempts"][0]["board"] for record in lost] == ["lab1-sim-0"]
    assert {record["outcome"] for record in records()} == {"PASS"}
    assert fake_farm.is_free()


@pytest.mark.slow
def test_suite_skips_boards_with_other_compile_flags(
    fake_farm: FakeFarm, hil: Callable[..., Ended], farm_agents: list[str], models: Path
) -> None:
    fake_farm.add("lab1-sim-0", farm_agents[0])
    fake_farm.add("lab1-old", farm_agents[1], CONFIG.replace("target-cpu=host", "target-cpu=generic"))
    ended = hil("suite", "run", models, "--filter", "*full_model", "--board", "farm:", "-j", 2, "--json")
    assert ended.code == 0, ended.err
    assert "removed from the run: the board requires code compiled with" in ended.err
    assert len({case["board"] for case in ended.document["cases"]}) == 1
    assert fake_farm.is_free()


def test_suite_without_matching_board_leaves_directory_unchanged(
    fake_farm: FakeFarm, hil: Callable[..., Ended], models: Path, tmp_path: Path
) -> None:
    ended = hil("suite", "run", models, "--board", "farm:impossible", "-j", 2, "--out", "out")
    assert ended.code == 4
    assert "the nearest: sim-1" in ended.err
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    assert hil("suite", "run", models, "--board", "farm:impossible", "--out", "mine").code == 4
    assert (tmp_path / "mine" / "notes").exists()


def test_suite_reports_busy_boards_after_wait_timeout(
    fake_farm: FakeFarm, hil: Callable[..., Ended], models: Path
) -> None:
    ended = hil("suite", "run", models, "--board", "farm:", "--wait", 1, "--flow", "onnxruntime", "--json")
    assert ended.code == 4, ended.err
    assert {case["outcome"] for case in ended.document["cases"]} == {"BOARD_BUSY"}


@pytest.mark.slow
def test_resumed_suite_leases_new_board(
    fake_farm: FakeFarm,
    hil: Callable[..., Ended],
    environment: dict[str, str],
    models: Path,
    tmp_path: Path,
    start_agent: Callable[..., str],
) -> None:
    fake_farm.add("lab1-sim-0", start_agent("--fault", "pace:seconds=0.2", module="hil.sim"))
    out = tmp_path / "out"
    words = ["suite", "run", models, "--flow", "onnxruntime", "--board", "farm:", "--out", out]
    process = start_hil(environment, tmp_path, *words)
    eventually(lambda: (out / "results.jsonl").exists() and (out / "results.jsonl").read_text().count("\n") > 3, 60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert fake_farm.is_free()
    ended = hil("suite", "run", "--resume", out, "--json")
    assert ended.code == 0, ended.err
    assert len(fake_farm.leases) == 2
    assert {case["board"] for case in ended.document["cases"]} == {"lab1-sim-0"}


@pytest.mark.slow
def test_expected_failures_use_type_of_leased_board(
    fake_farm: FakeFarm, hil: Callable[..., Ended], farm_agents: list[str], models: Path
) -> None:
    fake_farm.add("lab1-sim-0", farm_agents[0])
    (models / "expected.toml").write_text(
        '[[run]]\ncases = ["net8_full_model"]\nboard = "sim"\noutcome = "FAIL"\nreason = "a test"\n'
    )
    ended = hil("suite", "run", models, "--flow", "onnxruntime", "--board", "farm:", "--filter", "*full*", "--json")
    assert ended.code == 1, ended.err
    assert [one["outcome"] for one in ended.document["cases"]].count("XPASS") == 1
    words = ["suite", "run", models, "--flow", "onnxruntime", "--board", "farm:", "--only-expected-failures", "--json"]
    refused = hil(*words)
    assert refused.code == 2
    assert "--runtime-hw-type TYPE" in refused.err
    chosen = hil(*words, "--runtime-hw-type", "sim")
    assert [case["id"] for case in chosen.document["cases"]] == ["net8_full_model"]
    assert fake_farm.leases[-1].order.selector == 'hw_type="sim"'


@pytest.mark.slow
def test_xdist_workers_lease_farm_boards(
    fake_farm: FakeFarm, farm_agents: list[str], models: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    for number, agent in enumerate(farm_agents):
        fake_farm.add(f"lab1-sim-{number}", agent)
    project = Project(tmp_path / "project", environment).set_up(*models.glob("*.onnx"), ini="hil_flow = onnxruntime")
    run = project.test("-n", 3, "--board", "farm:")
    assert run.code == 0, run.out
    assert len(run.outcomes) == 6 * 7
    assert len({told["hil_board"] for told in run.properties.values()}) <= len(fake_farm.leases) <= 3
    assert {told["hil_hw_type"] for told in run.properties.values()} == {"sim"}
    assert all(lease.over == "released" for lease in fake_farm.leases)
