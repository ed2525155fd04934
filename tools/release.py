"""Build the wheel and the sdist of the current commit, and test them in bare environments. Called by scripts/release.

    python -m tools.release [--tools PYTHON]... PYTHON...

PYTHON is the path of an interpreter to test with: with pip, or after --tools with uvx and pipx. The distributions are
in dist/.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
MODEL = "examples/digits/digits_cnn.onnx"
EXAMPLE = "example:digits_cnn"  # the same model, from the wheel
# Environment variables of hil, Python and pytest, which the bare environments must not have.
_PRIVATE = re.compile(r"HIL_|PYTHON|VIRTUAL_ENV|PYTEST_")


class ReleaseError(Exception):
    """The commit cannot be released. The message contains the reason."""


def read_version(root: Path) -> str:
    """Return the version in pyproject.toml.

    Raises:
        ReleaseError: CHANGELOG.md has no section for the version.
    """
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    if not re.search(rf"^## .*\b{re.escape(version)}\b", (root / "CHANGELOG.md").read_text(), re.M):
        raise ReleaseError(f"CHANGELOG.md has no section for version {version}")
    return version


def check_clean(root: Path) -> None:
    """Raise ReleaseError if tracked files differ from the commit."""
    if changed := _run_git(root, "status", "--porcelain", "--untracked-files=no").splitlines():
        raise ReleaseError(f"commit or discard the changes first: {', '.join(line[3:] for line in changed[:5])}")


def build_distributions(root: Path, out: Path) -> list[Path]:
    """Build the wheel and the sdist from the files of a commit. Return the paths of both.

    The archives contain the time of the commit, so that the same commit gives the same bytes.
    """
    with TemporaryDirectory() as directory:
        archive = Path(directory, "source.tar")
        _run_git(root, "archive", f"--output={archive}", "HEAD")
        source = Path(directory, "source")
        with tarfile.open(archive) as files:
            files.extractall(source, filter="data")
        epoch = _run_git(root, "log", "-1", "--format=%ct").strip()
        command = [str(Path(sys.executable).with_name("uv")), "build", "--quiet", "--out-dir", str(out), str(source)]
        _run(command, os.environ | {"SOURCE_DATE_EPOCH": epoch})
    return sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])


def check_same(first: Sequence[Path], second: Sequence[Path]) -> None:
    """Raise ReleaseError if two builds differ. The message contains the first file that differs."""
    if [path.name for path in first] != [path.name for path in second]:
        raise ReleaseError(f"two builds have different files: {_join_names(first)}; {_join_names(second)}")
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            ours, theirs = _digest_members(one), _digest_members(other)
            different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            raise ReleaseError(f"two builds of {one.name} differ: {', '.join(different[:5]) or 'order or metadata'}")


def check_distribution(python: str, wheel: Path, sdist: Path) -> None:
    """Install the wheel in a new environment, and run the README's main command and the pytest plugin there.

    Raises:
        ReleaseError: a command failed.
    """
    with TemporaryDirectory() as directory:
        home = Path(directory)
        with tarfile.open(sdist) as files:
            files.extractall(home / "sdist", filter="data")
        [unpacked] = (home / "sdist").iterdir()
        work = home / "work"
        (work / MODEL).parent.mkdir(parents=True)
        shutil.copy(unpacked / MODEL, work / MODEL)
        env = make_bare_environment(os.environ, home)
        _run([python, "-m", "venv", str(home / "venv")], env)
        tools = home / "venv/bin"
        constraints = ["-c", str(ROOT / "constraints.txt")]
        _run([str(tools / "pip"), "install", "--quiet", *constraints, f"hil[pytest] @ {wheel.as_uri()}"], env)
        run = _run([str(tools / "hil"), "run", MODEL, "--runtime-hw-type", "sim"], env, work)
        if not run.startswith("PASS  digits_cnn"):
            raise ReleaseError(f"hil run did not pass:\n{run}")
        (work / "pytest.toml").write_text('[pytest]\nhil_models = ["examples/digits"]\n')
        tests = _run([str(tools / "pytest"), "--runtime-hw-type=sim", "-k", "digits"], env, work)
        if not re.search(r"\b\d+ passed\b", tests):
            raise ReleaseError(f"pytest ran no test:\n{tests}")


def check_tools(python: str, wheel: Path) -> None:
    """Run the wheel without an installation: with uvx and with pipx. Both create an environment for the command.

    Raises:
        ReleaseError: a command failed.
    """
    uv = str(Path(sys.executable).with_name("uv"))
    constraints = str(ROOT / "constraints.txt")
    for tool, command in {
        "uvx": [uv, "tool", "run", "--quiet", "--python", python, "--constraints", constraints, "--from", str(wheel)],
        "pipx": [
            *(uv, "tool", "run", "--quiet", "pipx", "run", "--python", python),
            *(f"--pip-args=--constraint={constraints}", "--spec", str(wheel)),
        ],
    }.items():
        with TemporaryDirectory() as directory:
            # Share downloads between the versions of Python.
            caches = {"UV_CACHE_DIR": _run([uv, "cache", "dir"], os.environ).strip()}
            env = make_bare_environment(os.environ, Path(directory)) | caches
            run = _run([*command, "hil", "run", EXAMPLE, "--runtime-hw-type", "sim"], env, Path(directory))
        if not run.startswith("PASS  digits_cnn"):
            raise ReleaseError(f"hil run did not pass with {tool}:\n{run}")


def make_bare_environment(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return environment variables with an empty home directory, and without variables of hil, Python and pytest."""
    kept = {name: value for name, value in environment.items() if not _PRIVATE.match(name)}
    # Keep pip's settings (index, certificates), which may be in the real home directory.
    config = Path(environment.get("XDG_CONFIG_HOME", Path(environment.get("HOME", "/"), ".config")), "pip/pip.conf")
    more = {"PIP_CONFIG_FILE": str(config)} if config.is_file() and "PIP_CONFIG_FILE" not in kept else {}
    return kept | more | {"HOME": str(home)}


def main(arguments: list[str]) -> int:
    """Build, compare and test. Return 1 if the commit cannot be released."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tools", metavar="PYTHON", action="append", default=[])
    parser.add_argument("pythons", metavar="PYTHON", nargs="*")
    given = parser.parse_args(arguments)
    try:
        version = read_version(ROOT)
        check_clean(ROOT)
        out = ROOT / "dist"
        shutil.rmtree(out, ignore_errors=True)
        built = build_distributions(ROOT, out)
        with TemporaryDirectory() as directory:
            check_same(built, build_distributions(ROOT, Path(directory)))
        sdist, wheel = sorted(built, key=lambda path: path.suffix)
        print(f"built hil {version}, twice with the same bytes", flush=True)
        for python in given.pythons:
            check_distribution(python, wheel, sdist)
            print(f"tested with pip and {_read_python_version(python)}", flush=True)
        for python in given.tools:
            check_tools(python, wheel)
            print(f"tested with uvx, pipx and {_read_python_version(python)}", flush=True)
    except ReleaseError as error:
        print(f"hil: {error}", file=sys.stderr)
        return 1
    for path in built:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  dist/{path.name}")
    return 0


def _read_python_version(python: str) -> str:
    return _run([python, "--version"], os.environ).strip()


def _digest_members(path: Path) -> dict[str, str]:
    """Return the digest of every file in an archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in wheel.namelist()}
    with tarfile.open(path) as sdist:
        files = [(member.name, sdist.extractfile(member)) for member in sdist if member.isfile()]
        return {name: hashlib.sha256(file.read()).hexdigest() for name, file in files if file}


def _join_names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _run_git(root: Path, *words: str) -> str:
    return _run(["git", "-C", str(root), *words], os.environ)


def _run(command: list[str], env: Mapping[str, str], cwd: Path | None = None) -> str:
    """Run a command and return its stdout. If the command fails, raise ReleaseError with the output."""
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        output = f"{done.stdout}\n{done.stderr}".strip()
        raise ReleaseError(f"exit code {done.returncode} of {' '.join(command[:4])} ...:\n{output}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
