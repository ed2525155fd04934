"""Contents of the files of a new project."""

from __future__ import annotations

import glob
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

REPORTS = "hil-reports"
# Versions of actions, as in the workflows of hil's repository.
ACTIONS = {"checkout": "v6", "setup-python": "v6", "upload-artifact": "v6"}
_PYTHON = "3.12"


@dataclass(frozen=True)
class ProjectTexts:
    """Values for the files of a project.

    Attributes:
        model: path of the model, relative to the project.
        board: value of --board.
        is_simulator: True if CI needs no hardware.
        config: path of the board's config in the project, if the config needs trust; otherwise "".
        package: requirement that CI installs with pip.
        place: path of the project in its git repository; "." if the project is the repository.
        dims: file name of a model -> size of each symbolic dimension.
    """

    model: PurePosixPath
    board: str
    is_simulator: bool
    config: str
    package: str
    place: PurePosixPath
    dims: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def models(self) -> str:
        """The directory with the model."""
        return str(self.model.parent)

    @property
    def reports(self) -> PurePosixPath:
        """The directory for reports, relative to the repository."""
        return self.place / REPORTS


def write_project(texts: ProjectTexts) -> str:
    """Return hil.toml."""
    dims = {name: _write_dims(sizes) for name, sizes in texts.dims.items()}
    own = dims.pop(texts.model.name, "")
    others = "".join(f"\n[models.{_quote(glob.escape(name))}]\n{text}" for name, text in dims.items())
    return f"""\
# Options of the hil commands in this directory. `hil config show --describe` lists all options.

[defaults]
# Board of commands without --board. The variable HIL_BOARD overrides this value.
board = {_quote(texts.board)}

# Options of this model. A key is a file name or a pattern, such as "*_int8.onnx".
[models.{_quote(glob.escape(texts.model.name))}]
# Number of timed runs. hil compares the outputs of all runs with the reference.
iterations = 10
{own}{others}"""


def _write_dims(sizes: Mapping[str, int]) -> str:
    texts = ", ".join(_quote(f"{name}={size}") for name, size in sizes.items())
    return f"# Sizes of the symbolic dimensions.\ndims = [{texts}]\n"


def write_tests(texts: ProjectTexts) -> str:
    """Return the pytest file."""
    return '''\
"""Tests of the models. pytest also tests each model and each layer without a test in this file."""

import pytest

# Time limit for a call of a model on the board, in seconds. Reduce the limit to detect slow programs.
MAX_SECONDS = 10.0


@pytest.mark.hil(layers=False)
def test_outputs_match_the_reference(hil_compare):
    hil_compare()


@pytest.mark.hil(layers=False)
def test_call_is_fast_enough(hil_result):
    assert min(hil_result.device_ns) <= MAX_SECONDS * 1e9
'''


def write_pytest_settings(texts: ProjectTexts) -> str:
    """Return pytest.ini."""
    return f"""\
[pytest]
# hil turns the models in these directories into tests.
hil_models = {shlex.quote(texts.models)}
testpaths = tests
"""


def write_ignored() -> str:
    """Return .gitignore."""
    names = ("hil-runs/", "hil-suites/", "hil-gates/", f"{REPORTS}/", ".hil/", "__pycache__/", ".pytest_cache/")
    return "".join(f"{name}\n" for name in names)


def write_github(texts: ProjectTexts) -> str:
    """Return the GitHub workflow."""
    runner = "ubuntu-24.04" if texts.is_simulator else "[self-hosted, linux]  # a runner that reaches the board"
    # A self-hosted runner must not run the code of strangers.
    guard = (
        ""
        if texts.is_simulator
        else """
    # Pull requests of forks do not run on the self-hosted runner.
    if: github.event_name != 'pull_request' || github.event.pull_request.head.repo.full_name == github.repository"""
    )
    folder = (
        ""
        if texts.place == PurePosixPath()
        else f"""
    defaults:
      run:
        working-directory: {_quote(str(texts.place))}"""
    )
    trust = (
        f"""
      - name: Trust the board config of this repository
        run: {_trust_config(texts)}"""
        if texts.config
        else ""
    )
    return f"""\
name: {_quote(f"Models of {texts.place}") if folder else "Models"}
on:
  push:
    branches: [main]
  pull_request:

permissions:
  contents: read

jobs:
  models:
    runs-on: {runner}{guard}
    timeout-minutes: 30{folder}
    env:
      HIL_PACKAGE: {_quote(texts.package)}
      HIL_BOARD: {_quote(texts.board)}
    steps:
      - uses: actions/checkout@{ACTIONS["checkout"]}
      - uses: actions/setup-python@{ACTIONS["setup-python"]}
        with:
          python-version: "{_PYTHON}"
      - name: Install hil
        run: python -m pip install "$HIL_PACKAGE"
      - name: Check the environment
        run: hil doctor{trust}
      - name: Test the models
        run: pytest --hil-out={REPORTS}
      - name: Store the reports
        if: ${{{{ !cancelled() }}}}
        uses: actions/upload-artifact@{ACTIONS["upload-artifact"]}
        with:
          name: {REPORTS}
          path: {_quote(str(texts.reports))}
          if-no-files-found: ignore
"""


def write_gitlab(texts: ProjectTexts) -> str:
    """Return .gitlab-ci.yml."""
    runner = (
        f"image: python:{_PYTHON}-bookworm"
        if texts.is_simulator
        else "tags: [board]  # a runner that reaches the board, with Python"
    )
    enter = (
        ""
        if texts.place == PurePosixPath()
        else f"""
    - {_quote(f"cd {shlex.quote(str(texts.place))}")}"""
    )
    trust = f"\n    - {_trust_config(texts)}" if texts.config else ""
    return f"""\
models:
  {runner}
  timeout: 30 minutes
  rules:
    - if: $CI_PIPELINE_SOURCE == "merge_request_event"
    - if: $CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH
  variables:
    HIL_PACKAGE: {_quote(texts.package)}
    HIL_BOARD: {_quote(texts.board)}
  before_script:
    - python3 -m venv .venv
    - . .venv/bin/activate
    - python -m pip install "$HIL_PACKAGE"{enter}
  script:
    - hil doctor{trust}
    - pytest --hil-out={REPORTS}
  artifacts:
    when: always
    paths: [{_quote(str(texts.reports))}]
    reports:
      junit: {_quote(f"{texts.reports}/**/junit.xml")}
"""


def _trust_config(texts: ProjectTexts) -> str:
    return _quote(f"hil board trust {shlex.quote(str(PurePosixPath(texts.config).parent))}")


def _quote(text: str) -> str:
    """Return a string for TOML and YAML, which both accept JSON strings."""
    return json.dumps(text, ensure_ascii=False)
