"use strict";
// Charts of histories: samples, medians, noise bands, changes, and the outcome of each sample below the chart.

const COLOURS = { pass: "--pass", fail: "--fail", error: "--error", board: "--board", unfinished: "--unfinished", quiet: "--quiet" };
const HEIGHT = 280;
const STRIP = 10;
// Numbers from this share of a unit round to the whole unit with four digits.
const ROUNDS_UP = 0.99995;

function inUnit(value, unit) {
  if (value === null || value === undefined) return "-";
  const [steps, names] = unit === "ns" ? [1000, ["ns", "us", "ms", "s"]] : unit === "B" ? [1000, ["B", "kB", "MB", "GB"]] : [0, [unit]];
  let number = value, at = 0;
  while (steps && Math.abs(number) >= steps * ROUNDS_UP && at < names.length - 1) { number /= steps; at += 1; }
  return `${Number(number.toPrecision(4))} ${names[at]}`.trim();
}

function drawHistory(place) {
  const data = JSON.parse(place.dataset.history);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const grid = { stroke: colour("--line"), width: 1 };
  const isTime = data.labels.length === 0;
  const shownX = (x) => (x === null || x === undefined ? "-" : isTime ? `${hil.time(x)} UTC` : data.labels[x] ?? "");
  const label = (x) => (Number.isInteger(x) && data.labels[x]) || "";
  const value = (_, number) => inUnit(number, data.unit);
  const dots = (stroke, fill) => ({ paths: () => null, points: { show: true, size: 6, stroke, fill }, value, stroke });
  // The points are in order. A single point is shown in the middle.
  const first = data.x[0] ?? 0, last = data.x[data.x.length - 1] ?? 0;
  const beside = last > first ? (last - first) * 0.02 : isTime ? 43200 : 1;
  const ends = [first - beside, last + beside];
  // The axis of a percentage ends at 100. By default, uPlot extends an axis with only the value 100 to 200.
  const share = (_, least) => [Math.max(0, Math.floor((least ?? 0) - Math.max(1, (100 - (least ?? 0)) / 10))), 100];
  const hidden = (label) => ({ label, stroke: "transparent", points: { show: false }, paths: () => null, value });
  const bars = data.bars ?? [];
  const options = {
    cursor: { drag: { x: false, y: false } },
    width: place.clientWidth,
    height: HEIGHT,
    padding: [8, 8, STRIP + 8, 0],
    // Ticks of a time axis are at full days or hours in UTC, like the times in the tables.
    tzDate: hil.utc,
    scales: { x: { time: isTime, range: () => ends }, ...(data.unit === "%" && { y: { range: share } }) },
    axes: [
      { stroke: colour("--text"), grid, space: 90, ...(isTime ? { values: hil.timeTicks } : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500], values: (_, ticks) => ticks.map(label) }) },
      { stroke: colour("--text"), grid, size: 80, values: (_, ticks) => ticks.map((number) => inUnit(number, data.unit)) },
    ],
    series: [
      { label: "at", value: (_, x, __, index) => `${shownX(x)} ${data.names?.[index] ?? ""}`.trim() },
      { label: "sample", ...dots(colour("--link"), colour("--link")) },
      { label: "not judged", ...dots(colour("--quiet"), colour("--ground")) },
      { label: "median", stroke: colour("--text"), width: 2, points: { show: false }, spanGaps: true, paths: uPlot.paths.stepped({ align: 1 }), value },
      { label: "noise from", stroke: "transparent", points: { show: false }, spanGaps: true, paths: uPlot.paths.stepped({ align: 1 }), value },
      { label: "to", stroke: "transparent", points: { show: false }, spanGaps: true, paths: uPlot.paths.stepped({ align: 1 }), value },
      ...bars.map((_, end) => hidden(end ? "interval to" : "interval from")),
    ],
    bands: [{ series: [5, 4], fill: `${colour("--link")}26` }],
    hooks: { draw: [(chart) => drawMarks(chart, data, colour)] },
  };
  const chart = new uPlot(options, [data.x, data.values, data.others, data.median, data.low, data.high, ...bars], place);
  new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
}

// Draw changes as dashed lines, remarks as triangles, intervals as bars, confirmed runs as rings, and outcomes as a strip
// below the axis.
function drawMarks(chart, data, colour) {
  const { ctx, bbox } = chart;
  const scale = devicePixelRatio;
  const at = (index) => chart.valToPos(data.x[index], "x", true);
  ctx.save();
  ctx.lineWidth = 2 * scale;
  ctx.setLineDash([5 * scale, 4 * scale]);
  for (const step of data.steps) {
    ctx.strokeStyle = colour(step.worse ? "--fail" : "--pass");
    ctx.beginPath();
    ctx.moveTo(at(step.at), bbox.top);
    ctx.lineTo(at(step.at), bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.setLineDash([]);
  ctx.fillStyle = colour("--text");
  for (const index of data.remarks) {
    const x = at(index), size = 6 * scale;
    ctx.beginPath();
    ctx.moveTo(x - size, bbox.top);
    ctx.lineTo(x + size, bbox.top);
    ctx.lineTo(x, bbox.top + 1.5 * size);
    ctx.fill();
  }
  const height = (number) => chart.valToPos(number, "y", true);
  const [lows, highs] = data.bars ?? [[], []];
  ctx.strokeStyle = colour("--link");
  ctx.lineWidth = scale;
  lows.forEach((low, index) => {
    if (low === null) return;
    ctx.beginPath();
    ctx.moveTo(at(index), height(low));
    ctx.lineTo(at(index), height(highs[index]));
    ctx.stroke();
  });
  ctx.strokeStyle = colour("--pass");
  ctx.lineWidth = 2 * scale;
  for (const index of data.confirmed ?? []) {
    const number = data.values[index] ?? data.others[index];
    if (number === null) continue;
    ctx.beginPath();
    ctx.arc(at(index), height(number), 7 * scale, 0, 2 * Math.PI);
    ctx.stroke();
  }
  const wide = Math.max(2 * scale, Math.min(8 * scale, bbox.width / Math.max(data.x.length, 1) - scale));
  const top = ctx.canvas.height - STRIP * scale;
  data.kinds.forEach((kind, index) => {
    const tall = kind === "pass" ? 5 : STRIP;
    ctx.fillStyle = colour(COLOURS[kind] ?? "--quiet");
    ctx.fillRect(at(index) - wide / 2, top + (STRIP - tall) * scale, wide, tall * scale);
  });
  ctx.restore();
}

function drawAll() {
  for (const place of document.querySelectorAll("[data-history]")) {
    place.replaceChildren();
    drawHistory(place);
  }
}

drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
