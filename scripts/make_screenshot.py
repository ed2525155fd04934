"""Draws docs/images/run.svg: what the terminal shows for two real runs. Called by scripts/make_screenshot."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

MODEL = "examples/digits/digits_cnn.onnx"
COMMANDS = [
    ["run", MODEL, "--runtime-hw-type", "sim"],
    ["run", MODEL, "--runtime-hw-type", "sim-undeclared", "--iterations", "100", "--warmup", "10"],
]


def main(root: Path) -> None:
    console = Console(record=True, width=84, file=io.StringIO(), force_terminal=True)
    environment = {**os.environ, "COLUMNS": "84", "FORCE_COLOR": "1", "TERM": "xterm-256color", "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(root / "examples")
        for arguments in COMMANDS:
            console.print(Text(f"$ scripts/hil {' '.join(arguments)}", style="bold"))
            command = [sys.executable, "-m", "hil.controller.cli.main", *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode not in (0, 1):
                sys.exit(f"{' '.join(arguments)} ended with exit code {done.returncode}")
            console.print(Text.from_ansi(done.stdout.rstrip()))
    svg = console.export_svg(title="hil")
    # rich has the font fetched from a server; whoever looks at the picture has a monospaced one.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)
    target = root / "docs" / "images" / "run.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(re.sub(r"[ \t]+\n", "\n", svg))
    print(target.relative_to(root))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
