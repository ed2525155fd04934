"""Draws docs/images/profile.png: a real run's trace in Perfetto's UI. Called by make_profile_screenshot."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

MODEL = "examples/digits/digits_cnn.onnx"
COMMAND = ["run", MODEL, "--runtime-hw-type", "sim", "--iterations", "20", "--warmup", "5", "--profile", "out"]
SIZE = (1400, 1000)
LARGEST = 300_000  # bytes
UI = "document.querySelector('iframe').contentWindow"
LOADED = f"{UI}.app && {UI}.app.trace && !{UI}.app.isLoadingTrace"
# The board's tracks unfolded, the time line on the dispatches of one iteration, and the longest of them selected.
LOOK = f"""(async () => {{
  const ui = {UI}, trace = ui.app.trace;
  const ask = async (sql) => (await trace.engine.query(sql)).iter({{}});
  for (const track of trace.workspace.flatTracks) {{
    if (/^board|^operations/.test(track.name)) track.expand(); else track.collapse();
  }}
  const around = await ask(`
    select ts - dur / 2 as start, ts + dur * 3 / 2 as end from slice join track on track.id = track_id
    where slice.name = 'execute' and track.name = 'operations' order by dur limit 1`);
  trace.timeline.setViewportTime(around.get('start'), around.get('end'));
  const longest = await ask(`
    select slice.id from slice join track on track.id = track_id
    where slice.name like '%dispatch%' and track.name = 'operations'
    and ts between ${{around.get('start')}} and ${{around.get('end')}} order by dur desc limit 1`);
  trace.selection.selectSqlEvent('slice', Number(longest.get('id')), {{switchToCurrentSelectionTab: true}});
  await ui.waitForPerfettoIdle();
}})()"""


def main(root: Path) -> None:
    sys.path.insert(0, str(root / "tests"))
    from browser import NAMES, Page, find_browser

    from hil.controller.profile.viewer import TraceViewer

    browser = find_browser()
    if browser is None:
        sys.exit(f"no browser on PATH ({', '.join(NAMES)}); on Debian and Ubuntu: apt install chromium")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(root / "examples")
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run([sys.executable, "-m", "hil.controller.cli.main", *COMMAND], cwd=folder, env=environment)
        if done.returncode:
            sys.exit(f"hil {' '.join(COMMAND)} ended with exit code {done.returncode}")
        target = root / "docs" / "images" / "profile.png"
        trace = Path(folder) / "out" / "trace.pftrace.gz"
        with (
            TraceViewer(trace, title="digits_cnn on sim") as viewer,
            Page(browser, width=SIZE[0], height=SIZE[1]) as page,
        ):
            thread = threading.Thread(target=viewer.serve)
            thread.start()
            try:
                page.open(viewer.address)
                page.wait(LOADED)
                page.run(LOOK)
                page.screenshot(target)
            finally:
                viewer.stop()
                thread.join()
    size = target.stat().st_size
    if size > LARGEST:
        sys.exit(f"{target.relative_to(root)} has {size} bytes, more than {LARGEST}")
    print(f"{target.relative_to(root)}: {size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
