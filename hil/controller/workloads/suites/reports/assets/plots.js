// Plots, drawn with the available width.

function drawOutcomes() {
  const counts = new Map();
  for (const one of DATA.cases) counts.set(one.outcome, (counts.get(one.outcome) || 0) + 1);
  const words = [...counts.keys()].sort((a, b) => DATA.outcomes.indexOf(a) - DATA.outcomes.indexOf(b));
  const width = $("outcomes").clientWidth || 600;
  const total = DATA.cases.length || 1;
  const told = words.map(word => `${counts.get(word)} ${word}`).join(", ");
  const picture = draw("svg", { width, height: 22, role: "img", "aria-label": told || "no cases" });
  let at = 0;
  for (const word of words) {
    const wide = Math.max(2, width * counts.get(word) / total);
    picture.append(draw("rect", { x: at, y: 0, width: wide, height: 22, class: `edge ${kind(word)}`, onclick: () => toggleFilter("outcome", word) },
      draw("title", {}, `${counts.get(word)} ${word}`)));
    at += wide;
  }
  const legend = words.map(word => el("button", { type: "button", class: kind(word), "aria-pressed": String(state.outcome === word),
    onclick: () => toggleFilter("outcome", word) }, `${counts.get(word)} ${word}`));
  $("outcomes").replaceChildren(picture, el("div", { class: "legend" }, legend));
}

function drawGroups(place, name, groups, of) {
  if (!groups.length) return $(place).replaceChildren(el("p", { class: "nothing" }, "no failures"));
  const most = Math.max(...groups.map(([, count]) => count));
  return $(place).replaceChildren(el("ul", { class: "groups" }, groups.map(([word, count]) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${100 * count / most}%`;
    return el("li", {}, el("button", { type: "button", class: "fail", title: word, "aria-pressed": String(state[name] === word),
      onclick: () => {
        // The bar counts failed cases, so a click also selects only failed cases.
        state.outcome = state[name] === word ? "" : FAILING;
        toggleFilter(name, word);
      } },
    bar, el("span", { class: "word" }, word), el("span", { class: "of" }, of ? `${count} of ${of[word]}` : count)));
  })));
}

const MEASURES = {
  sqnr: { title: "SQNR, dB", of: one => one.sqnr, best: Infinity, bestWord: "exact", log: false },
  maxAbs: { title: "largest error", of: one => one.maxAbs, best: 0, bestWord: "0", log: true },
};
const SHOWN = "the cases shown below";

function errorChoices() {
  const layers = new Map();
  for (const one of DATA.cases) if (one.layer) layers.set(one.model, (layers.get(one.model) || 0) + 1);
  const models = [...layers].filter(([, count]) => count > 2).map(([model]) => model);
  models.sort((a, b) => layers.get(b) - layers.get(a));
  const first = models.find(model => DATA.cases.some(one => one.model === model && failing(one))) || models[0];
  $("error-model").replaceChildren(el("option", { value: "" }, SHOWN),
    ...[...models].sort().map(model => el("option", { value: model, selected: model === first }, `layers of ${model}`)));
  $("error-what").replaceChildren(...Object.entries(MEASURES).map(([name, one]) => el("option", { value: name }, one.title)));
  for (const name of ["error-model", "error-what"]) $(name).addEventListener("change", () => drawErrors(chosen()));
}

function drawErrors(shown) {
  const model = $("error-model").value;
  const what = MEASURES[$("error-what").value];
  const rows = (model ? DATA.cases.filter(one => one.layer && one.model === model) : [...shown].sort((a, b) => a.place - b.place));
  const scale = value => (what.log ? Math.log10(value) : value);
  const onAxis = value => Number.isFinite(value) && !(what.log && value === 0);
  const numbers = rows.map(what.of).filter(onAxis).map(scale);
  if (!rows.some(one => what.of(one) !== null)) {
    return $("error-plot").replaceChildren(el("p", { class: "nothing" }, "no compared cases"));
  }
  const width = $("error-plot").clientWidth || 460;
  const height = 210, left = 46, right = 10, top = 10, bottom = 36;
  let low = Math.min(...numbers), high = Math.max(...numbers);
  if (!numbers.length) [low, high] = [0, 1];
  const margin = (high - low) * 0.08 || 1;
  [low, high] = [low - margin, high + margin];
  // Separate lines for values that are not on the axis: exact equality at the good end, missing values at the bad end.
  const good = what.log ? height - bottom - 22 : top + 6, bad = height - bottom - 4;
  const axisTop = what.log ? top : top + 22, axisBottom = what.log ? good - 16 : bad - 18;
  const x = place => left + (rows.length > 1 ? (width - left - right) * place / (rows.length - 1) : (width - left - right) / 2);
  const y = value => axisBottom - (axisBottom - axisTop) * (scale(value) - low) / (high - low);
  const picture = draw("svg", { width, height, role: "img",
    "aria-label": `${what.title}, ${cases(rows.length)} in order; the table below lists the same values` });
  const tick = (at, text) => picture.append(draw("line", { x1: left, x2: width - right, y1: at, y2: at, class: "grid" }),
    draw("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, text));
  if (rows.some(one => what.of(one) === what.best)) tick(good, what.bestWord);
  if (rows.some(one => what.of(one) === null)) tick(bad, "none");
  if (numbers.length) {
    for (const value of ticks(low, high, what.log ? 4 : 5, what.log)) {
      tick(y(what.log ? 10 ** value : value), what.log ? `1e${value}` : digits(value, 6));
    }
  }
  // Connect adjacent layers with a line if both are on the axis.
  const trace = rows.map((one, place) => (onAxis(what.of(one))
    ? `${place && onAxis(what.of(rows[place - 1])) ? "L" : "M"}${x(place)},${y(what.of(one))}` : ""));
  if (model) picture.append(draw("path", { class: "trace", d: trace.join("") }));
  const size = rows.length > 150 ? 2.5 : 4;
  if (rows.length > 150) picture.setAttribute("class", "dense");
  rows.forEach((one, place) => {
    const value = what.of(one);
    const none = value === null || Number.isNaN(value) || (!Number.isFinite(value) && value !== what.best);
    const cy = none ? bad : value === what.best ? good : y(value);
    const cx = x(place);
    const mark = none ? draw("path", { d: `M${cx - 4},${cy - 4}l8,8m0,-8l-8,8`, class: `cross ${kind(one.outcome)}` })
      : draw("circle", { cx, cy, r: kind(one.outcome) === "pass" ? size : size + 1, class: `edge ${kind(one.outcome)}` });
    const told = what.log ? digits(value) : decibels(value);
    mark.append(draw("title", {}, `${place + 1}. ${one.id}\n${one.outcome}${none ? "" : `, ${told}`}`));
    mark.addEventListener("click", () => showCase(one.id));
    picture.append(mark);
  });
  const axis = model ? "layer, in the model's order" : "case, in the suite's order";
  picture.append(draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, axis),
    draw("text", { x: left, y: height - 20, "text-anchor": "middle" }, "1"));
  if (rows.length > 1) picture.append(draw("text", { x: width - right, y: height - 20, "text-anchor": "end" }, rows.length));
  return $("error-plot").replaceChildren(picture);
}

function ticks(low, high, count, whole) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map(one => one * power).find(one => one >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(Number(at.toPrecision(6)));
  return found;
}

function drawDevice(shown) {
  // Cases with a single cold iteration are not ranked.
  const measured = shown.filter(one => one.p50 && !one.cold).sort((a, b) => b.p50 - a.p50);
  const unranked = shown.some(one => one.p50 && one.cold) && el("p", { class: "nothing" }, DATA.unranked);
  if (!measured.length) return $("device-plot").replaceChildren(unranked || el("p", { class: "nothing" }, "no device times"));
  const rows = measured.slice(0, 10);
  const width = $("device-plot").clientWidth || 380;
  const tall = 22, most = rows[0].p50;
  const letters = Math.floor((width - 80) / 6.9);
  const picture = draw("svg", { width, height: rows.length * tall, role: "img",
    "aria-label": `device time of the ${rows.length} slowest of ${cases(measured.length)}; the table below lists the same values` });
  rows.forEach((one, place) => {
    const at = place * tall;
    const name = one.id.length > letters ? `${one.id.slice(0, letters - 10)}…${one.id.slice(-9)}` : one.id;
    const row = draw("g", { onclick: () => showCase(one.id) }, draw("title", {}, `${one.id}\n${duration(one.p50 / 1e9)}, median of ${iterations(one)}`),
      draw("rect", { x: 0, y: at + 2, width: Math.max(1, width * one.p50 / most), height: tall - 4, rx: 3, class: `fill ${kind(one.outcome)}`, opacity: 0.34 }),
      draw("text", { x: 5, y: at + 15, class: "name" }, name),
      draw("text", { x: width - 4, y: at + 15, "text-anchor": "end" }, duration(one.p50 / 1e9)),
      draw("rect", { x: 0, y: at, width, height: tall, class: "hit" }));
    picture.append(row);
  });
  const several = [...new Set(measured.map(one => one.iterations))].sort((a, b) => a - b);
  const counts = several.length > 1 ? `${several[0]} to ${several.at(-1)} iterations` : iterations(measured[0]);
  const middle = measured[Math.floor(measured.length / 2)].p50;
  return $("device-plot").replaceChildren(picture,
    el("p", { class: "nothing" }, `${rows.length} of ${cases(measured.length)}, each is the median of ${counts}; overall median ${duration(middle / 1e9)}`),
    ...(unranked ? [unranked] : []));
}
