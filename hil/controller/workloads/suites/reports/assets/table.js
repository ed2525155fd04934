// Table of cases, filters, and start of the page.

const STEP = 200;
const differs = field => new Set(DATA.cases.map(one => one[field]).filter(Boolean)).size > 1;
const groups = field => differs(field) && new Set(DATA.cases.map(one => one[field])).size < DATA.cases.length;
const allCold = () => DATA.cases.every(one => one.cold || !one.p50);
// Formats of the columns with a title in hil/controller/workloads/suites/reports/tables.py.
const UNITS = { text: value => value ?? "", number: value => digits(value), bytes, seconds: duration };
const COLUMNS = [
  { name: "id", title: "Case", of: one => one.id },
  { name: "outcome", title: "Outcome", of: one => one.rank },
  { name: "stage", title: "Stage", css: "wide middle", of: one => (kind(one.outcome) === "pass" ? null : DATA.stages.indexOf(one.stage)),
    show: one => (kind(one.outcome) === "pass" ? "" : one.stage) },
  { name: "op", title: "Operator", css: "wide", of: one => one.group.toLowerCase(), show: one => one.group, keep: () => differs("group") },
  { name: "model", title: "Model", css: "wide last", of: one => one.model, show: one => one.model, keep: () => groups("model") },
  { name: "board", title: "Board", css: "wide", of: one => one.board || null, show: one => one.board, keep: () => differs("board") },
  { name: "max_abs", title: "Max abs", css: "wide middle number", of: one => one.maxAbs, show: one => digits(one.maxAbs) },
  { name: "sqnr", title: "SQNR", css: "wide number", of: one => one.sqnr, show: one => decibels(one.sqnr) },
  { name: "p50", title: allCold() ? "Device, cold" : "Device p50", css: "wide number", of: one => one.p50 ?? null,
    show: one => duration(one.p50 && one.p50 / 1e9) + (one.cold && !allCold() ? " cold" : "") },
  { name: "host", title: "Host", css: "wide late number", of: one => one.host ?? null, show: one => duration(one.host) },
  ...DATA.columns.map(column => ({ name: column.name, title: column.title, css: `wide last${column.unit === "text" ? "" : " number"}`,
    of: one => one.cells?.[column.name] ?? null, show: one => UNITS[column.unit](one.cells?.[column.name]) })),
  { name: "place", title: "#", css: "wide last number", of: one => one.place, show: one => one.place + 1 },
].filter(column => !column.keep || column.keep());

function sorted(rows) {
  const column = COLUMNS.find(one => one.name === state.sort) || COLUMNS[1];
  const sign = state.dir === "desc" ? -1 : 1;
  const none = value => value === null || Number.isNaN(value);
  const keyed = rows.map(one => [column.of(one), one]);
  // Cases without a value are last in both directions. Cases with equal values keep the order of the suite.
  keyed.sort(([a, first], [b, second]) => (none(a) || none(b) ? none(a) - none(b)
    : a < b ? -sign : a > b ? sign : 0) || first.place - second.place);
  return keyed.map(([, one]) => one);
}

function sortBy(name, direction) {
  const numbers = COLUMNS.find(one => one.name === name)?.css?.includes("number") && !["sqnr", "place"].includes(name);
  state.dir = direction || (state.sort === name ? (state.dir === "asc" ? "desc" : "asc") : numbers ? "desc" : "asc");
  state.sort = name;
  update();
  document.querySelector(`.cases > thead th[aria-sort] button`)?.focus();
}

function tableRow(one, wide) {
  const open = state.open.has(one.id);
  const below = `case-${one.place}`;
  const button = el("button", { type: "button", class: "id", "aria-expanded": String(open), "aria-controls": below }, breakable(one.id));
  const cells = COLUMNS.map((column, place) => {
    const css = [column.css, column.name === state.sort && "sorted"].filter(Boolean).join(" ") || null;
    if (place === 0) return el("th", { scope: "row", class: css }, button, one.message && el("div", { class: "message" }, one.message));
    if (column.name === "outcome") {
      return el("td", { class: css }, el("span", { class: `badge ${kind(one.outcome)}` }, one.outcome),
        one.confirmed && el("div", { class: "confirmed" }, one.confirmed));
    }
    return el("td", { class: css }, breakable(String(column.show(one) ?? "")));
  });
  const row = el("tr", { class: `row ${kind(one.outcome)}` }, cells);
  const unfold = () => {
    const now = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(now));
    if (now) state.open.add(one.id);
    else state.open.delete(one.id);
    if (now) row.after(detailRow(one, below, wide));
    else row.nextElementSibling.remove();
    writeAddress();
  };
  row.addEventListener("click", event => {
    if (event.target.closest("button") === button || (!event.target.closest("a, button") && !String(getSelection()))) unfold();
  });
  return open ? [row, detailRow(one, below, wide)] : [row];
}
const detailRow = (one, id, wide) => el("tr", { class: "detail", id }, el("td", { colspan: wide }, el("div", { class: "inside" }, details(one))));

function drawTable(shown) {
  const rows = sorted(shown);
  const header = COLUMNS.map(column => el("th", { scope: "col", class: [column.css, column.name === state.sort && "sorted"].filter(Boolean).join(" ") || null,
    "aria-sort": column.name === state.sort ? (state.dir === "desc" ? "descending" : "ascending") : null },
  el("button", { type: "button", onclick: () => sortBy(column.name) }, column.title)));
  // Create only visible rows, so that thousands of cases stay fast.
  const made = rows.slice(0, state.rows);
  $("table").replaceChildren(rows.length ? el("table", { class: "cases" }, el("caption", { class: "skip" }, "The cases of this run"),
    el("thead", {}, el("tr", {}, header)), el("tbody", {}, made.map(one => tableRow(one, COLUMNS.length)).flat()))
    : el("p", { class: "nothing" }, DATA.cases.length ? "no matching cases" : "no finished cases"));
  $("count").textContent = rows.length === DATA.cases.length ? cases(rows.length) : `${rows.length} of ${cases(DATA.cases.length)}`;
  const more = rows.length - made.length;
  $("more").replaceChildren(...(more > 0 ? [
    el("button", { type: "button", onclick: () => { state.rows += STEP; drawTable(chosen()); } }, `Show ${Math.min(STEP, more)} more`), " ",
    el("button", { type: "button", onclick: () => { state.rows = rows.length; drawTable(chosen()); } }, `Show all ${rows.length}`)] : []));
}

function fillFilters() {
  for (const [name, field] of Object.entries(FILTERS)) {
    const counts = new Map();
    for (const one of DATA.cases) counts.set(one[field] || "", (counts.get(one[field] || "") || 0) + 1);
    counts.delete("");
    const order = { outcome: DATA.outcomes, stage: DATA.stages }[name];
    const words = [...counts.keys()].sort((a, b) => (order ? order.indexOf(a) - order.indexOf(b) : a.localeCompare(b)));
    const all = [el("option", { value: "" }, "all"), name === "outcome" && DATA.failing && el("option", { value: FAILING }, `all failures (${DATA.failing})`)];
    $(name).replaceChildren(...all.filter(Boolean), ...words.map(word => el("option", { value: word }, `${word} (${counts.get(word)})`)));
    $(name).closest("label").hidden = words.length < 2 || (name === "model" && !groups("model"));
    $(name).addEventListener("change", () => { state[name] = $(name).value; update(); });
  }
  $("sort").replaceChildren(...COLUMNS.map(one => el("option", { value: one.name }, one.title === "#" ? "Suite's order" : one.title)));
  $("sort").addEventListener("change", () => sortBy($("sort").value));
  let waiting = 0;
  $("q").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.q = $("q").value; update(); }, 80);
  });
  $("filters").addEventListener("submit", event => event.preventDefault());
  $("clear").addEventListener("click", () => {
    for (const name of ["q", ...Object.keys(FILTERS)]) state[name] = "";
    update();
  });
}

function update(show) {
  for (const name of ["q", ...Object.keys(FILTERS), "sort"]) if ($(name).value !== state[name]) $(name).value = state[name];
  const shown = chosen();
  const place = show ? sorted(shown).findIndex(one => one.id === show) : 0;
  state.rows = Math.max(100, place + 1);
  drawOutcomes();
  drawGroups("by-stage", "stage", DATA.byStage);
  drawGroups("by-op", "op", DATA.byOp, DATA.runByOp);
  drawErrors(shown);
  drawDevice(shown);
  drawTable(shown);
  writeAddress();
  if (show) {
    const button = [...document.querySelectorAll(".cases .id")].find(one => one.textContent === show);
    button?.focus();
    button?.scrollIntoView({ block: "center" });
  }
}

function begin() {
  const when = DATA.started && `${new Date(DATA.started * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;
  const took = DATA.started && DATA.finished && duration(DATA.finished - DATA.started);
  $("facts").textContent = [DATA.boards?.length && `on ${DATA.boards.join(", ")}`, when, took].filter(Boolean).join(" · ");
  $("versions").append(...Object.entries(DATA.facts).filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => [el("dt", {}, name), el("dd", {}, name === "resume" ? el("code", {}, value) : String(value))]).flat());
  $("notes").replaceChildren(...DATA.notes.map(note => el("p", { class: "note" }, note)));
  $("remarks").replaceChildren(...DATA.remarks.map(remark => el("li", {}, remark)));
  fillFilters();
  errorChoices();
  readAddress();
  update();
  addEventListener("hashchange", () => {
    if (location.hash === "#cases") return; // the skip link
    readAddress();
    update();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth) return; // the address bar of a phone changes only the height
    width = innerWidth;
    const shown = chosen();
    drawOutcomes();
    drawErrors(shown);
    drawDevice(shown);
  });
}
begin();
