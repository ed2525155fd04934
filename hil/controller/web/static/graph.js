"use strict";
// Draw graphs on canvases. Only the visible part is drawn, and all panes move together. The server computes the
// positions of the nodes. For a small graph, dagre computes the positions in a worker.
(() => {
  const place = document.getElementById("graph");
  const status = document.getElementById("graph-status");
  const find = document.getElementById("find-node");
  const [W, H] = [150, 40];
  // Maximum number of nodes for dagre. It needs less than a second for this number, and ten seconds for thousands.
  const DAGRE_UP_TO = 300;
  const DAGRE_MS = 1500;
  let panes = [];
  let chosen = "";
  let searched = ""; // text of the last search
  let opened = ""; // parameter for the open scopes; "" as long as the user opens and closes none
  let scale = 1; // pixels per unit of the graphs, the same in all panes

  class Pane {
    constructor(canvas, data) {
      Object.assign(this, { canvas, data, layout: data.layout, x: 0, y: 0 }); // x, y: canvas center in graph units
      this.places = new Map();
      data.match.forEach((names, at) => names.forEach((name) => { if (!this.places.has(name)) this.places.set(name, at); }));
      data.names.forEach((name, at) => this.places.set(name, at));
      this.index();
    }

    // Index the edges by the horizontal bands that they cross, so that drawing only examines a few edges.
    index() {
      const { x, y, bends } = this.layout;
      this.bands = new Map();
      this.lines = this.data.edges.map(([first, last], number) => {
        const points = [x[first], y[first] + H / 2, ...(bends[number] ?? []), x[last], y[last] - H / 2];
        // Draw a long edge beside the nodes between its ends, not across them.
        if (!(bends[number] ?? []).length && y[last] - y[first] > 3 * H && Math.abs(x[first] - x[last]) < W) {
          const side = Math.max(x[first], x[last]) + W * 0.62;
          points.splice(2, 0, side, y[first] + 1.6 * H, side, y[last] - 1.6 * H);
        }
        return points;
      });
      const put = (kind, number, top, bottom) => {
        for (let band = Math.floor(top / BAND); band <= Math.floor(bottom / BAND); band++) {
          if (!this.bands.has(band)) this.bands.set(band, { nodes: [], edges: [] });
          this.bands.get(band)[kind].push(number);
        }
      };
      x.forEach((_, at) => put("nodes", at, y[at] - H / 2, y[at] + H / 2));
      this.lines.forEach((points, number) => {
        let [top, bottom] = [Infinity, -Infinity];
        for (let at = 1; at < points.length; at += 2) [top, bottom] = [Math.min(top, points[at]), Math.max(bottom, points[at])];
        put("edges", number, top, bottom);
      });
    }

    seen() {
      const [w, h] = [this.canvas.clientWidth / scale / 2, this.canvas.clientHeight / scale / 2];
      return { left: this.x - w, right: this.x + w, top: this.y - h, bottom: this.y + h };
    }

    // Return the nodes or edges in the visible bands, without duplicates.
    within(kind) {
      const { top, bottom } = this.seen();
      const found = new Set();
      const [first, last] = [Math.floor(top / BAND), Math.floor(bottom / BAND)];
      const keys = last - first > this.bands.size ? [...this.bands.keys()].filter((key) => key >= first && key <= last) : Array.from({ length: last - first + 1 }, (_, at) => first + at);
      for (const key of keys) for (const number of this.bands.get(key)?.[kind] ?? []) found.add(number);
      return found;
    }

    draw() {
      const { canvas, data, layout } = this;
      const ratio = devicePixelRatio || 1;
      const [width, height] = [canvas.clientWidth, canvas.clientHeight];
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(name).trim();
      const [ground, text, quiet, line, link] = ["--ground", "--text", "--quiet", "--line", "--link"].map(colour);
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.fillStyle = ground;
      pen.fillRect(0, 0, width, height);
      pen.setTransform(ratio * scale, 0, 0, ratio * scale, ratio * (width / 2 - this.x * scale), ratio * (height / 2 - this.y * scale));
      const seen = this.seen();
      pen.strokeStyle = quiet;
      pen.lineWidth = Math.max(1, 0.6 / scale);
      pen.beginPath();
      for (const number of this.within("edges")) {
        const points = this.lines[number];
        pen.moveTo(points[0], points[1]);
        for (let at = 2; at < points.length; at += 2) {
          const [x, y, px, py] = [points[at], points[at + 1], points[at - 2], points[at - 1]];
          pen.bezierCurveTo(px, (py + y) / 2, x, (py + y) / 2, x, y);
        }
      }
      pen.stroke();
      const readable = scale > 0.35;
      const wanted = find.value.trim().toLowerCase();
      const mine = this.placeOf(chosen);
      for (const at of this.within("nodes")) {
        const [x, y] = [layout.x[at], layout.y[at]];
        if (x + W / 2 < seen.left || x - W / 2 > seen.right) continue;
        const fill = data.colours[at];
        pen.globalAlpha = wanted && !this.fits(at, wanted) ? 0.25 : 1;
        pen.fillStyle = fill || ground;
        pen.strokeStyle = at === mine ? link : fill ? quiet : line;
        pen.lineWidth = at === mine ? Math.max(4, 3 / scale) : Math.max(1, 0.6 / scale);
        pen.beginPath();
        if (data.kinds[at] === "group") for (const by of [4, 0]) pen.rect(x - W / 2 + by, y - H / 2 - by, W, H);
        else if (data.kinds[at] === "node") pen.rect(x - W / 2, y - H / 2, W, H);
        else pen.roundRect(x - W / 2, y - H / 2, W, H, H / 2);
        pen.fill();
        pen.stroke();
        if (readable) {
          pen.fillStyle = data.inks[at] || text;
          pen.textAlign = "center";
          pen.font = "600 12px system-ui, sans-serif";
          pen.fillText(cut(pen, data.kinds[at] === "node" || data.kinds[at] === "group" ? data.shorts[at] : data.labels[at].replace(/^\w+ /, ""), W - 12), x, y - 4);
          pen.font = "11px system-ui, sans-serif";
          pen.fillText(cut(pen, `${data.ops[at]}  ${data.texts[at]}`, W - 12), x, y + 12);
        }
      }
      pen.globalAlpha = 1;
    }

    fits(at, wanted) {
      const { labels, ops, kinds, match } = this.data;
      return labels[at].toLowerCase().includes(wanted) || ops[at].toLowerCase().includes(wanted)
        || (kinds[at] === "group" && match[at].some((name) => name.toLowerCase().includes(wanted)));
    }

    // Whether the name is a visible node or scope, not a node in a closed scope.
    has(name) {
      return this.data.names[this.places.get(name) ?? -1] === name;
    }

    placeOf(name) {
      if (!name) return undefined;
      if (this.places.has(name)) return this.places.get(name);
      const [first] = panes;
      const at = first.places.get(name);
      const known = at === undefined ? undefined : first.data.match[at].find((one) => this.places.has(one));
      return known === undefined ? undefined : this.places.get(known);
    }

    at(x, y) {
      const [gx, gy] = [this.x + (x - this.canvas.clientWidth / 2) / scale, this.y + (y - this.canvas.clientHeight / 2) / scale];
      for (const at of this.bands.get(Math.floor(gy / BAND))?.nodes ?? []) {
        if (Math.abs(this.layout.x[at] - gx) <= W / 2 && Math.abs(this.layout.y[at] - gy) <= H / 2) return at;
      }
      return undefined;
    }

    // Return the node closest to the center that both panes contain, as the indices in both panes.
    anchor(other) {
      const [mine, theirs] = [this.placeOf(chosen), other.placeOf(chosen)];
      const { top, bottom } = this.seen();
      if (mine !== undefined && theirs !== undefined && this.layout.y[mine] >= top && this.layout.y[mine] <= bottom) return [mine, theirs];
      let [best, distance] = [null, Infinity];
      for (const at of this.within("nodes")) {
        const twin = this.data.match[at].map((name) => other.places.get(name)).find((one) => one !== undefined);
        const far = Math.hypot(this.layout.x[at] - this.x, this.layout.y[at] - this.y);
        if (twin !== undefined && far < distance) [best, distance] = [[at, twin], far];
      }
      return best;
    }

    // Scroll so that a common node is at the same height in both panes.
    follow(other) {
      const pair = other.anchor(this);
      if (!pair) return;
      this.x = this.layout.x[pair[1]] + other.x - other.layout.x[pair[0]];
      this.y = this.layout.y[pair[1]] + other.y - other.layout.y[pair[0]];
    }
  }

  const BAND = 400;
  const widths = new Map();

  function cut(pen, text, room) {
    const key = pen.font + text;
    if (!widths.has(key)) {
      let short = text;
      while (short.length > 4 && pen.measureText(short).width > room) short = `${short.slice(0, Math.ceil(short.length * 0.85) - 2)}…`;
      widths.set(key, short);
    }
    return widths.get(key);
  }

  let asked = false;
  function show(leader) {
    if (leader) for (const pane of panes) if (pane !== leader) pane.follow(leader);
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      panes.forEach((pane) => pane.draw());
      place.dataset.drawn = "yes";
    });
  }

  function zoom(pane, factor, x, y) {
    const [w, h] = [pane.canvas.clientWidth / 2, pane.canvas.clientHeight / 2];
    const before = scale;
    scale = Math.min(4, Math.max(0.002, scale * factor));
    pane.x += (x - w) * (1 / before - 1 / scale);
    pane.y += (y - h) * (1 / before - 1 / scale);
    show(pane);
  }

  function whole() {
    const [first] = panes;
    const { width, height } = first.layout;
    scale = Math.min(1, (first.canvas.clientWidth - 20) / width, (first.canvas.clientHeight - 20) / height);
    for (const pane of panes) [pane.x, pane.y] = [pane.layout.width / 2, pane.layout.height / 2];
    show();
  }

  // Show the beginning of the graph at a readable size.
  function start() {
    const [first] = panes;
    const { width, height } = first.layout;
    const fit = Math.min((first.canvas.clientWidth - 20) / width, (first.canvas.clientHeight - 20) / height);
    if (fit > 0.35) return whole();
    scale = Math.min(1, Math.max(0.4, (first.canvas.clientWidth - 20) / width));
    for (const pane of panes) {
      pane.x = pane.layout.x[0] ?? 0;
      pane.y = (pane.canvas.clientHeight / 2 - 10) / scale;
    }
    show(first);
  }

  function select(name, { centre = true, fetched = true, addressed = true } = {}) {
    chosen = name;
    const leader = panes.find((pane) => pane.placeOf(name) !== undefined);
    if (!leader) return;
    const at = leader.placeOf(name);
    if (centre) {
      if (scale < 0.4) scale = 0.8;
      [leader.x, leader.y] = [leader.layout.x[at], leader.layout.y[at]];
    }
    status.textContent = `${leader.data.labels[at]}: ${leader.data.ops[at]} ${leader.data.texts[at]}`;
    show(leader);
    const address = addressOf(place.dataset.page, { node: name });
    if (addressed) hil.address(address);
    if (fetched && !hil.saved) htmx.ajax("GET", address, { target: "#node", swap: "outerHTML" });
  }

  // Return an address of this page with other parameters, and with the open scopes.
  function addressOf(base, parameters) {
    const url = new URL(base, location.href);
    for (const [name, value] of Object.entries({ ...(opened && { open: opened }), ...parameters })) url.searchParams.set(name, value);
    return url.pathname + url.search;
  }

  // Request the graph with other open scopes. Select a node or scope, which the server makes visible, or the node or scope
  // at this place in the model.
  async function reopen(scopes, name, order) {
    if (hil.saved) {
      status.textContent = "This file shows all nodes.";
      return;
    }
    const data = await hil.data(addressOf(place.dataset.src, { open: scopes, node: name ?? "" }));
    await rebuild(data);
    opened = panes[0].data.open;
    name ||= panes[0].data.names[panes[0].data.order.indexOf(order)];
    if (name && panes.some((pane) => pane.placeOf(name) !== undefined)) select(name);
    else {
      chosen = "";
      hil.address(addressOf(place.dataset.page, {}));
      start();
    }
  }

  const listOpen = () => panes[0].data.opened;
  const join = (numbers) => (numbers.length ? numbers.join(",") : "none");

  // Open a closed scope and select its first node or scope, or close the scope around a node.
  function toggle() {
    const [first] = panes, at = first.placeOf(chosen);
    if (at === undefined) return;
    const { scopes, inside, kinds, order, groups } = first.data;
    if (kinds[at] === "group") reopen(join([...listOpen(), scopes[at]]), "", order[at]);
    else if (inside[at] >= 0) reopen(join(listOpen().filter((one) => one !== inside[at])), groups[inside[at]]);
    else status.textContent = "This node is in no name scope.";
  }

  // Select the next or previous failing node. A node in a closed scope becomes visible.
  function stepFailing(direction) {
    const [first] = panes, { wrong, order } = first.data;
    if (!wrong.length) {
      status.textContent = "No failing nodes.";
      return;
    }
    const own = wrong.find(([, name]) => name === chosen);
    if (own && !first.has(chosen)) return reopen(join(listOpen()), chosen);
    const now = own ? own[0] : order[first.placeOf(chosen)] ?? (direction > 0 ? -1 : Infinity);
    const ordered = direction > 0 ? wrong : [...wrong].reverse();
    const [, name] = ordered.find(([at]) => (direction > 0 ? at > now : at < now)) ?? ordered[0];
    if (first.has(name)) select(name);
    else reopen(join(listOpen()), name);
  }

  // Select the next or previous node that matches the text. A new text starts at the first match. A match in a closed
  // scope becomes visible.
  function stepMatching(direction) {
    const [first] = panes, { names, labels, kinds, match } = first.data;
    const wanted = find.value.trim().toLowerCase(), places = matching();
    if (!places.length) {
      status.textContent = "No matching nodes.";
      return;
    }
    const from = wanted === searched ? first.placeOf(chosen) : undefined;
    searched = wanted;
    const now = from ?? (direction > 0 ? -1 : names.length);
    const ordered = direction > 0 ? places : [...places].reverse();
    const next = ordered.find((at) => (at - now) * direction > 0) ?? ordered[0];
    if (kinds[next] !== "group" || labels[next].toLowerCase().includes(wanted)) return select(names[next]);
    reopen(join(listOpen()), match[next].slice(1).find((name) => name.toLowerCase().includes(wanted)));
  }

  const matching = () => {
    const wanted = find.value.trim().toLowerCase();
    return panes[0].data.names.map((_, at) => at).filter((at) => wanted && panes[0].fits(at, wanted));
  };

  const actions = {
    in: () => zoom(panes[0], 1.4, panes[0].canvas.clientWidth / 2, panes[0].canvas.clientHeight / 2),
    out: () => zoom(panes[0], 1 / 1.4, panes[0].canvas.clientWidth / 2, panes[0].canvas.clientHeight / 2),
    fit: whole,
    next: () => stepFailing(1),
    previous: () => stepFailing(-1),
    fold: toggle,
    all: () => reopen("all", chosen),
    none: () => reopen("none", ""),
  };
  const keys = { n: "next", p: "previous", x: "fold", "+": "in", "-": "out", 0: "fit" };

  // Move from the selected node along an edge, or to an adjacent node.
  function walk(pane, key) {
    const at = pane.placeOf(chosen);
    if (at === undefined) return select(pane.data.names[0]);
    const { x, y } = pane.layout;
    let near = [];
    if (key === "ArrowDown") near = pane.data.edges.filter(([first]) => first === at).map(([, last]) => last);
    else if (key === "ArrowUp") near = pane.data.edges.filter(([, last]) => last === at).map(([first]) => first);
    else near = [...pane.within("nodes")].filter((one) => Math.abs(y[one] - y[at]) < H && (key === "ArrowRight" ? x[one] > x[at] : x[one] < x[at]));
    near.sort((a, b) => Math.abs(x[a] - x[at]) - Math.abs(x[b] - x[at]));
    if (near.length) select(pane.data.names[near[0]]);
  }

  function listen(canvas, number) {
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) return;
      const [dx, dy] = [event.clientX - held.x, event.clientY - held.y];
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      Object.assign(held, { x: event.clientX, y: event.clientY, moved: true });
      const pane = panes[number];
      pane.x -= dx / scale;
      pane.y -= dy / scale;
      show(pane);
    });
    canvas.addEventListener("pointerup", (event) => {
      const clicked = held && !held.moved;
      held = null;
      if (!clicked) return;
      const pane = panes[number], box = canvas.getBoundingClientRect();
      const at = pane.at(event.clientX - box.left, event.clientY - box.top);
      if (at === undefined) return;
      const again = pane.data.names[at] === chosen && pane.data.kinds[at] === "group";
      if (again) toggle();
      else select(pane.data.names[at], { centre: false });
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoom(panes[number], Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && chosen) {
        event.preventDefault();
        toggle();
        return;
      }
      if (!event.key.startsWith("Arrow")) return;
      event.preventDefault();
      event.stopPropagation();
      walk(panes[number], event.key);
    });
  }

  function colourSwatches(part) {
    for (const one of part.querySelectorAll(".swatch[data-colour]")) one.style.backgroundColor = one.dataset.colour;
  }

  // Return dagre's layout, or null if the graph is too large or dagre takes too long.
  function dagreLayout(data) {
    if (hil.saved || data.names.length > DAGRE_UP_TO || !data.edges.length) return Promise.resolve(null);
    return new Promise((resolve) => {
      const worker = new Worker("/static/graph-worker.js");
      const end = (layout) => { worker.terminate(); resolve(layout); };
      setTimeout(end, DAGRE_MS, null);
      worker.onmessage = (event) => end(event.data);
      worker.onerror = (event) => { event.preventDefault(); end(null); };
      worker.postMessage({ count: data.names.length, edges: data.edges });
    });
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || inField(event.target) || !panes.length) return;
    if (keys[event.key]) actions[keys[event.key]]();
  });
  document.querySelector(".graph-tools").addEventListener("click", (event) => {
    const wanted = event.target.closest("[data-do]")?.dataset.do;
    if (wanted && panes.length) actions[wanted]();
  });
  find.addEventListener("input", () => { if (panes.length) { status.textContent = `${matching().length} found`; show(); } });
  find.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && panes.length) stepMatching(event.shiftKey ? -1 : 1);
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("#nodes a.node");
    if (!link || event.ctrlKey || event.metaKey || !panes.length) return;
    event.preventDefault();
    const { name } = link.closest("tr").dataset;
    if (panes.some((pane) => pane.has(name))) select(name);
    else reopen(join(listOpen()), name);
  });
  document.addEventListener("htmx:afterSwap", (event) => colourSwatches(document));
  colourSwatches(document);

  // Show other data in the canvases.
  async function rebuild(data) {
    const made = data.panes.map((one, number) => new Pane(canvases[number], one));
    const layouts = await Promise.all(made.map((pane) => dagreLayout(pane.data)));
    made.forEach((pane, number) => {
      if (!layouts[number]) return;
      pane.layout = layouts[number];
      pane.index();
    });
    panes = made;
  }

  const canvases = [...place.querySelectorAll("canvas")];

  async function begin() {
    await rebuild(await hil.data(place.dataset.src));
    canvases.forEach((canvas, number) => listen(canvas, number));
    new ResizeObserver(() => show()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
    start();
    if (place.dataset.node) select(place.dataset.node, { fetched: false, addressed: !("first" in place.dataset) });
    // Return the position of a node on the screen, for tests and scripts.
    place.nodeAt = (number, name) => {
      const pane = panes[number];
      const at = pane.placeOf(name);
      return at === undefined ? null : [
        (pane.layout.x[at] - pane.x) * scale + pane.canvas.clientWidth / 2,
        (pane.layout.y[at] - pane.y) * scale + pane.canvas.clientHeight / 2,
        scale,
      ];
    };
  }

  begin().catch((error) => { status.textContent = `Cannot draw the graph: ${error.message}`; });
})();
