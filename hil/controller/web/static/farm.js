"use strict";
// Pages of a farm: update them after events, append to logs, and draw charts.

// Minimum time between two updates of a page. While the user works in a part of the page, the update waits.
const PACE_MS = 1000;
let stale = false, drawing = false;

async function refreshFarm() {
  stale = true;
  const part = document.getElementById("farm");
  if (drawing || !part || isAtWork(part)) return;
  drawing = true;
  stale = false;
  try {
    if (!(await drawAnew(part, part.dataset.farm))) stale = true;
    await new Promise((done) => setTimeout(done, PACE_MS));
  } finally {
    drawing = false;
  }
  catchUpFarm();
}

// Make an update that was delayed.
function catchUpFarm() {
  if (stale) refreshFarm();
}

if (!hil.saved && document.getElementById("farm")) {
  let first = true;
  listen("/farm/events", { farm() { if (!first) refreshFarm(); first = false; } });
  afterWork(catchUpFarm);
}

// Maximum length of a followed log in characters. Only the end of a log is shown, because a page that grows without
// limit would block the browser.
const MOST_CHARS = 1 << 20;

function followLog(log) {
  const state = document.getElementById("log-state");
  const events = new EventSource(log.dataset.log);
  let size = 0;
  state.textContent = "Following.";
  events.addEventListener("message", (event) => {
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
    const text = JSON.parse(event.data);
    log.append(text);
    size += text.length;
    while (size > MOST_CHARS && log.childNodes.length > 1) {
      size -= log.firstChild.textContent.length;
      log.firstChild.remove();
    }
    if (atEnd) log.scrollTop = log.scrollHeight;
    // Also show newly finished cases. The page of an ended job already contains all cases.
    if ("runs" in log.dataset) refreshFarm();
  });
  events.addEventListener("over", (event) => {
    events.close();
    state.textContent = JSON.parse(event.data) || (size ? "End of log." : "The log is empty.");
  });
  events.addEventListener("error", () => { state.textContent = "Connection lost. Retrying."; });
  events.addEventListener("open", () => { state.textContent = "Following."; });
  addEventListener("pagehide", () => events.close());
}

if (!hil.saved) document.querySelectorAll("[data-log]").forEach(followLog);

// Charts with one line per board or per quantile of the jobs. Dashes distinguish the lines without colors.
const LINES = ["--link", "--fail", "--pass", "--board", "--error", "--quiet"];
const DASHES = [[], [6, 3], [2, 3], [10, 4, 2, 4]];

const charts = new Map();
const resized = new ResizeObserver((seen) => {
  for (const { target } of seen) charts.get(target).setSize({ width: target.clientWidth, height: 240 });
});

function drawChart(place) {
  const { times, lines, until } = JSON.parse(place.dataset.chart);
  const unit = place.dataset.unit;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const grid = { stroke: colour("--line"), width: 1 };
  const series = Object.keys(lines).map((label, number) => ({
    label,
    stroke: colour(LINES[number % LINES.length]),
    dash: DASHES[Math.floor(number / LINES.length + (number % LINES.length)) % DASHES.length],
    width: 2,
    paths: uPlot.paths.stepped({ align: 1 }),
    points: { show: true, size: 6, filter: (chart, row) => times.flatMap((_, at) => (chart.data[row][at] == null ? [] : [at])) },
    value: (_, value) => (value === null || value === undefined ? "-" : `${value} ${unit}`),
  }));
  // A value belongs to a time span: draw it from the start to the end of the span, also in the last one.
  const edges = [...times, until];
  const span = (at) => `${hil.time(edges[Math.min(at, times.length - 1)])} to ${hil.time(edges[Math.min(at + 1, times.length)])} UTC`;
  series.unshift({ label: "from", value: (_, time, __, at) => (at == null ? "-" : span(at)) });
  const options = {
    width: place.clientWidth,
    height: 240,
    scales: { x: { range: () => [edges[0], until] }, y: { range: (_, low, high) => (unit === "%" ? [0, 100] : [0, Math.max(high ?? 1, 1) * 1.05]) } },
    axes: [
      { stroke: colour("--text"), grid, space: 80, values: hil.timeTicks },
      { stroke: colour("--text"), grid, size: 60, values: (_, ticks) => ticks.map((tick) => `${tick} ${unit}`) },
    ],
    series,
    tzDate: hil.utc,
    legend: { show: series.length <= 13 },
  };
  place.replaceChildren();
  charts.set(place, new uPlot(options, [edges, ...Object.values(lines).map((line) => [...line, line.at(-1)])], place));
}

const places = document.querySelectorAll("[data-chart]");
places.forEach((place) => { drawChart(place); resized.observe(place); });
// The colors of the charts depend on the theme.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => places.forEach(drawChart));
