"""Draws docs/images/profile.png: a real run's trace in Perfetto's UI. Called by make_profile_screenshot."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from screenshots import IMAGES, ROOT, installed_browser, run_hil, tell_size

MODEL = "examples/digits/digits_cnn.onnx"
COMMAND = ["run", MODEL, "--runtime-hw-type", "sim", "--iterations", "20", "--warmup", "5", "--profile", "out"]
SIZE = (1400, 1000)
LARGEST = 300_000  # bytes
UI = "document.querySelector('iframe').contentWindow"
LOADED = "document.body.dataset.look === 'done'"
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


def main() -> None:
    from support.browser import Page

    from hil.controller.analysis.profile.perfetto import TraceViewer

    browser = installed_browser()
    target = IMAGES / "profile.png"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        run_hil(COMMAND, folder)
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
    tell_size(target, LARGEST)


if __name__ == "__main__":
    main()
