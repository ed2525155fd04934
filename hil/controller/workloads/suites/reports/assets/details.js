// Details of a case, shown when its row is expanded.

function table(columns, rows) {
  const classes = (column, base) => [base, column.number && "number", column.wrap && "wrap"].filter(Boolean).join(" ") || null;
  return el("div", { class: "scroll" }, el("table", { class: "inner" },
    el("thead", {}, el("tr", {}, columns.map(one => el("th", { scope: "col", class: classes(one) }, one.title)))),
    el("tbody", {}, rows.map(row => el("tr", {}, columns.map(one => el("td", { class: classes(one) }, one.of(row))))))));
}

const OUTPUTS = [
  { title: "output", of: one => one.name },
  { title: "", of: one => el("span", { class: `badge ${one.passed ? "pass" : "fail"}` }, one.passed ? "agrees" : "differs") },
  { title: "type", of: one => `${one.dtype || "?"}[${(one.shape || []).join(",")}]` },
  { title: "mismatches", number: true, of: one => (one.mismatches === undefined ? "-" : `${one.mismatches} of ${one.elements}`) },
  ...DATA.statistics.map(statistic => ({ title: statistic.title, number: true,
    of: one => (statistic.unit === "dB" ? decibels(number(one[statistic.key])) : digits(one[statistic.key], statistic.digits)) })),
  { title: "tolerance", of: one => (one.criteria ? one.criteria.join("; ") : one.tolerance ? `rtol ${digits(one.tolerance.rtol)}, atol ${digits(one.tolerance.atol)}` : "exact") },
  { title: "worst at", of: one => (one.worst_index ? `[${one.worst_index.join(",")}]: ${(one.worst_values || []).map(value => digits(value, 6)).join(", reference ")}` : "-") },
];
const ATTEMPTS = [
  { title: "reason", of: one => one.why },
  { title: "board", of: one => one.board || "-" },
  { title: "outcome", of: one => one.outcome },
  { title: "message", wrap: true, of: one => one.message || "" },
];

function outputs(title, against, rows, told) {
  return rows && el("section", {}, el("h3", {}, `${title}${against ? `: ${against}` : ""}`), table(OUTPUTS, rows),
    rows.filter(one => one.reason && !told.includes(one.reason)).map(one => el("p", { class: "why" }, `${one.name}: ${one.reason}`)));
}

function command(title, text) {
  if (!text) return null;
  const button = el("button", { type: "button", "aria-label": `Copy the command: ${title}` }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text)) ? "Copied" : "Select and copy";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return el("section", {}, el("h3", {}, title), el("div", { class: "command" }, el("pre", {}, text), button));
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP, the page has no access to the clipboard.
    const area = el("textarea", { readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function issue(text) {
  if (!text) return null;
  return /^https?:\/\//i.test(text) ? el("a", { href: text, rel: "noreferrer" }, text) : text;
}

function facts(one) {
  const timings = Object.entries(one.timings || {}).map(([stage, value]) => `${stage} ${duration(value)}`).join(", ");
  const link = (where, text) => el("a", { href: `./${where.split("/").map(encodeURIComponent).join("/")}` }, text);
  const folder = one.folder && link(one.folder, one.folder);
  const left = (one.links || []).map(([what, where]) => [link(where, what), " "]).flat();
  const rows = [
    ["ended", [one.outcome, one.ended && ` (without expectations: ${one.ended})`, one.stage && `, stage ${one.stage}`]],
    ["model", [one.model, one.layer && `, layer ${one.layer}`, one.op && `, ${one.op}`]],
    ["board", [one.board, one.hw_type && ` (${one.hw_type})`]],
    ["without an agent", [one.agentless]],
    ...(one.evidence || []).map(([title, text]) => [title, [text]]),
    ["rerun", [one.confirmed]],
    ["expected", one.expectation ? [one.expectation.outcome, one.expectation.reason && `: ${one.expectation.reason} `, issue(one.expectation.issue)] : []],
    ["device, median", [one.p50 && `${duration(one.p50 / 1e9)} of ${iterations(one)}`]],
    ["host", [timings]],
    ["program", [one.bytes && bytes(one.bytes), one.cached !== undefined && (one.cached ? ", from the cache" : ", compiled")]],
    ["delegated", [one.delegated, one.delegated && one.lowering && `; ${one.lowering}`]],
    ["parameters", [Object.entries(one.params || {}).map(([name, value]) => `${name} ${value}`).join(", ")]],
    ["directory", [folder]],
    ["files", left],
  ];
  return el("section", {}, el("dl", {}, rows.filter(([, words]) => words.some(Boolean))
    .map(([name, words]) => [el("dt", {}, name), el("dd", {}, words.filter(Boolean))]).flat()));
}

function details(one) {
  return [
    one.message && el("p", {}, one.message),
    one.hint && el("p", {}, el("strong", {}, "hint: "), one.hint),
    command("Repeat the case", one.repeat),
    command("Show the difference", one.diff),
    outputs("Compared with the reference", one.against, one.outputs, one.message),
    (one.otherReferences || []).map(other => outputs("Compared with an additional reference", other.against, other.outputs, one.message)),
    outputs("Compared with the model before the recipe", one.plainAgainst, one.plainOutputs, one.message),
    one.attempts && el("section", {}, el("h3", {}, "Other attempts"), table(ATTEMPTS, one.attempts)),
    one.detail && el("section", {}, el("h3", {}, "Tool output"), el("pre", { tabindex: 0 }, one.detail)),
    facts(one),
  ].flat().filter(Boolean);
}
