"use strict";
// Shared parts of the page: the run's data, functions that create elements, number formats, and the state of the view.
// Names and messages never become HTML: they are set as text nodes and attributes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== "") made.append(child);
  }
  return made;
}
// Return a long name with possible line breaks after separators and before capital letters.
const breakable = text => text.replace(/[_.+/:-]|[a-z](?=[A-Z])/g, "$&\0").split("\0").map((part, place) => (place ? [document.createElement("wbr"), part] : part)).flat();
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// JSON has no infinity and no NaN, so Python's names stand for them.
const WORDS = { inf: Infinity, "-inf": -Infinity, nan: NaN };
const number = value => (typeof value === "string" ? WORDS[value] ?? NaN : value ?? null);

function digits(value, count = 3) {
  value = number(value);
  if (value === null) return "-";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(count - 1) : String(Number(value.toPrecision(count)));
}
function scaled(value, units) {
  for (const [unit, size] of units) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return value ? `${Number((value / units.at(-1)[1]).toPrecision(3))} ${units.at(-1)[0]}` : "0";
}
const duration = value => (value === null || value === undefined ? "-"
  : value >= 60 ? `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`
    : scaled(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]));
const bytes = value => (value === undefined ? "-" : scaled(value, [["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]]));
const cases = count => `${count} case${count === 1 ? "" : "s"}`;
const iterations = one => (one.cold ? "1 cold iteration" : `${one.iterations} iteration${one.iterations === 1 ? "" : "s"}`);
const decibels = value => (value === null ? "-" : value === Infinity ? "exact" : `${digits(value)} dB`);

const kind = outcome => DATA.kinds[outcome] || "error";
const FAILING = "failing";
const failing = one => !["pass", "quiet"].includes(kind(one.outcome));
const RANKS = { fail: 0, error: 1, board: 2, quiet: 3, pass: 4 };

DATA.cases.forEach((one, place) => {
  const worst = one.outputs?.[one.worst] || {};
  Object.assign(one, {
    place,
    message: one.message || "",
    group: one.op || DATA.wholeModel,
    maxAbs: number(worst.max_abs),
    sqnr: number(worst.sqnr_db),
    // Sort order: mismatches, errors, expected failures, then passes.
    rank: RANKS[kind(one.outcome)] * 100 + DATA.outcomes.indexOf(one.outcome),
  });
  one.text = [one.id, one.model, one.layer, one.group, one.board, one.outcome, one.stage, one.message, one.confirmed,
    one.expectation?.reason, one.expectation?.issue].filter(Boolean).join("\n").toLowerCase();
});

// The URL contains the state of the view, so that users can share a view, and a reload keeps it.
const FILTERS = { outcome: "outcome", stage: "stage", op: "group", model: "model", board: "board" };
const state = { q: "", sort: "outcome", dir: "asc", open: new Set(), rows: 100 };
for (const name in FILTERS) state[name] = "";

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of ["q", ...Object.keys(FILTERS)]) state[name] = given.get(name) || "";
  state.sort = given.get("sort") || "outcome";
  state.dir = given.get("dir") === "desc" ? "desc" : "asc";
  state.open = new Set(given.getAll("open"));
}
function writeAddress() {
  const given = new URLSearchParams();
  for (const name of ["q", ...Object.keys(FILTERS)]) if (state[name]) given.set(name, state[name]);
  if (state.sort !== "outcome" || state.dir !== "asc") {
    given.set("sort", state.sort);
    given.set("dir", state.dir);
  }
  for (const id of state.open) given.append("open", id);
  try {
    history.replaceState(null, "", `#${given}`);
  } catch {
    // Some browsers forbid this, for example in a sandboxed preview. The page also works without.
  }
}
function chosen() {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = Object.entries(FILTERS).filter(([name]) => state[name]);
  return DATA.cases.filter(one => wanted.every(([name, field]) => (state[name] === FAILING ? failing(one) : (one[field] || "") === state[name]))
    && words.every(word => one.text.includes(word)));
}
function toggleFilter(name, value) {
  state[name] = state[name] === value ? "" : value;
  update();
}
function showCase(id) {
  state.open.add(id);
  if (!chosen().some(one => one.id === id)) {
    for (const name of ["q", ...Object.keys(FILTERS)]) state[name] = "";
  }
  update(id);
}
