"use strict";
// View of each table: visible columns, groups of rows, and saved views of the page.
//
// The URL contains the state, so that a link shows the same view: `columns=TABLE~COLUMN~...` and `group=TABLE~COLUMN` per
// table, and `view=NAME` for the name. Pages with an own parameter `columns` use `table.columns`. Tables and columns have names made from their labels. The browser stores the saved
// views in localStorage. A saved page starts with the state of the page at that time.

(() => {
  const PARAMETERS = { columns: document.body.dataset.columns, group: "group", view: "view" };
  // Parameters that select what a page shows. A view applies to other sessions, cases and boards too.
  const SUBJECT = ["id", "root", "case", "name", "profile", "a", "b", "s", "page", "file", "key", "output"];
  const KEY = "hil.views";
  const PAGER = ".pager [rel=next], .pager [rel=prev]";
  const BAD = ".outcome.fail, .outcome.error, .outcome.board, .verdict.worse";
  const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "column";

  const state = read(new URLSearchParams(hil.saved ? document.body.dataset.view ?? "" : location.search));
  const views = new Map();  // table -> its parts, menu and original order
  const closed = new Map();  // name of a table -> its closed groups

  function read(given) {
    const split = (name) => new Map(given.getAll(PARAMETERS[name]).map((one) => one.split("~")).map(([table, ...rest]) => [table, rest]));
    return { columns: split("columns"), group: split("group"), view: given.get("view") ?? "" };
  }

  // Return the parameters of the state, in addition to other parameters.
  function put(others) {
    const made = new URLSearchParams(others);
    Object.values(PARAMETERS).forEach((name) => made.delete(name));
    for (const name of ["columns", "group"]) for (const [table, columns] of state[name]) made.append(PARAMETERS[name], [table, ...columns].join("~"));
    if (state.view) made.set("view", state.view);
    return made;
  }

  function unique(names) {
    const seen = new Map();
    return names.map((name) => {
      const count = (seen.get(name) ?? 0) + 1;
      seen.set(name, count);
      return count > 1 ? `${name}-${count}` : name;
    });
  }

  // Each table has a head with one row, in a region with a label.
  function describe(table, name) {
    const heads = [...table.tHead.rows[0].cells];
    const titles = heads.map((head, at) => head.innerText.trim() || head.textContent.trim() || `column ${at + 1}`);
    const columns = unique(titles.map(slug));
    const bodies = [...table.tBodies];
    return { table, name, heads, titles, columns, bodies, rows: bodies.flatMap((body) => [...body.rows]), region: table.closest(".scroll") ?? table };
  }

  const isRow = (one, row) => row.cells.length === one.heads.length;

  function shownColumns(one) {
    const wanted = state.columns.get(one.name)?.filter((column) => one.columns.includes(column)) ?? [];
    return new Set(wanted.length ? wanted : one.columns);
  }

  function apply(one) {
    const shown = shownColumns(one);
    const setHidden = (row) => [...row.cells].forEach((cell, at) => { cell.hidden = !shown.has(one.columns[at]); });
    setHidden(one.table.tHead.rows[0]);
    one.rows.filter((row) => isRow(one, row)).forEach(setHidden);
    group(one, shown.size);
    tell(one);
  }

  // Put the rows in groups by the text of a column. Groups with the most failing rows are first, and failing rows are
  // first in each group.
  function group(one, width) {
    const column = one.columns.indexOf(state.group.get(one.name)?.[0]);
    const rows = one.rows.filter((row) => isRow(one, row));
    if (column < 0 || !rows.length) {
      if (!one.grouped) return;
      one.grouped = false;
      one.table.querySelectorAll("tbody.group").forEach((body) => body.remove());
      one.bodies.forEach((body) => one.table.append(body));
      one.rows.forEach((row) => one.bodies[0].append(row));
      return;
    }
    const groups = new Map();
    for (const row of rows) {
      const name = groupName(row.cells[column]);
      if (!groups.has(name)) groups.set(name, { good: [], bad: [] });
      groups.get(name)[row.querySelector(BAD) ? "bad" : "good"].push(row);
    }
    one.table.querySelectorAll("tbody").forEach((body) => body.remove());
    one.grouped = true;
    if (!closed.has(one.name)) closed.set(one.name, new Set());
    for (const [name, { good, bad }] of [...groups].sort(([, a], [, b]) => b.bad.length - a.bad.length)) {
      one.table.append(groupBody(name, [...bad, ...good], bad.length, width, closed.get(one.name)));
    }
  }

  // The day of a time, or the text of the cell.
  function groupName(cell) {
    const text = (cell.innerText || cell.textContent).trim().replace(/\s+/g, " ");
    return (cell.classList.contains("time") ? text.slice(0, 10) : text.slice(0, 120)) || "none";
  }

  function groupBody(name, rows, bad, width, closed) {
    const body = document.createElement("tbody"), head = body.insertRow(), cell = document.createElement("th");
    body.className = "group";
    cell.colSpan = width;
    cell.scope = "rowgroup";
    const button = element("button", { type: "button", className: "group" }, name);
    const set = (open) => {
      button.setAttribute("aria-expanded", open);
      rows.forEach((row) => { row.hidden = !open; });
      if (open) closed.delete(name); else closed.add(name);
    };
    button.addEventListener("click", () => set(button.getAttribute("aria-expanded") !== "true"));
    cell.append(button, " ", element("span", { className: "quiet" }, `${rows.length} ${rows.length === 1 ? "row" : "rows"}`));
    if (bad) cell.append(" ", element("span", { className: "outcome fail" }, `${bad} failing`));
    head.append(cell);
    rows.forEach((row) => body.append(row));
    set(!closed.has(name));
    return body;
  }

  // Report names in the URL that the table does not have, so that a wrong link does not silently show another view, and
  // groups that lack the rows of other pages.
  function tell(one) {
    const asked = [...(state.columns.get(one.name) ?? []), ...(state.group.get(one.name) ?? [])];
    const unknown = [...new Set(asked)].filter((column) => !one.columns.includes(column));
    one.note ??= one.region.parentElement.insertBefore(element("p", { className: "hint", role: "status" }), one.region);
    const texts = unknown.length ? [`This table has no column ${unknown.join(", ")}. Its columns: ${one.columns.join(", ")}.`] : [];
    const isCut = one.grouped && one.region.parentElement.querySelector(PAGER);
    if (isCut) texts.push("The groups contain only the rows of this page.");
    one.note.hidden = !texts.length;
    one.note.textContent = texts.join(" ");
  }

  function element(tag, values = {}, text = "") {
    const made = document.createElement(tag);
    Object.assign(made, values);
    if (text) made.textContent = text;
    return made;
  }

  // Apply a change of the user: update the table, the URL, and the links to other pages of the table.
  function change(one) {
    apply(one);
    keepInLinks();
    const query = String(put(location.search));
    hil.address(`${location.pathname}${query && `?${query}`}${location.hash}`);
  }

  // A link to another order or page of a table, and a form of the page, keep the view.
  function keepInLinks() {
    const params = put("");
    const extend = (url) => {
      const made = new URL(url, location.href);
      made.search = put(made.search);
      return made.pathname + made.search;
    };
    if (hil.saved) return;
    for (const link of document.querySelectorAll("thead a[href], .pager a[href], .tabs a[href]")) {
      if (new URL(link.href).pathname === location.pathname) link.href = extend(link.href);
    }
    for (const name of ["live", "farm"]) {
      for (const part of document.querySelectorAll(`[data-${name}]`)) {
        if (part.dataset[name].startsWith("/")) part.dataset[name] = extend(part.dataset[name]);
      }
    }
    for (const form of document.querySelectorAll("form.filter")) {
      if (form.method !== "get" || new URL(form.action).pathname !== location.pathname) continue;
      form.querySelectorAll("input.view").forEach((one) => one.remove());
      for (const [name, value] of params) form.append(element("input", { type: "hidden", className: "view", name, value }));
    }
  }

  function storedViews() {
    try {
      const found = JSON.parse(localStorage.getItem(KEY) ?? "{}")[location.pathname];
      return Object.entries(found ?? {}).filter(([, query]) => typeof query === "string");
    } catch {
      return [];  // no access to localStorage, or a damaged value
    }
  }

  function storeView(name, query) {
    try {
      const all = JSON.parse(localStorage.getItem(KEY) ?? "{}"), here = { ...all[location.pathname] };
      if (query === null) delete here[name]; else here[name] = query;
      localStorage.setItem(KEY, JSON.stringify({ ...all, [location.pathname]: here }));
      return true;
    } catch {
      return false;
    }
  }

  // The parameters of the page that a view stores: filters, order, columns and groups.
  function viewQuery(name) {
    state.view = name;
    const made = put(location.search);
    SUBJECT.forEach((one) => made.delete(one));
    return String(made);
  }

  function viewUrl(query) {
    const made = new URLSearchParams();
    const now = new URLSearchParams(location.search);
    for (const name of SUBJECT) if (name !== "page") now.getAll(name).forEach((value) => made.append(name, value));
    for (const [name, value] of new URLSearchParams(query)) made.append(name, value);
    return `${location.pathname}?${made}`;
  }

  function fillMenu(one) {
    const { menu } = one;
    menu.replaceChildren(menu.firstElementChild, columnsPart(one), groupPart(one), viewsPart(one));
  }

  function columnsPart(one) {
    const part = element("fieldset"), shown = shownColumns(one);
    part.append(element("legend", {}, "Columns"));
    one.columns.forEach((column, at) => {
      const label = element("label", { className: "check" }), box = element("input", { type: "checkbox", checked: shown.has(column), name: "" });
      box.addEventListener("change", () => {
        const now = shownColumns(one);
        if (box.checked) now.add(column); else now.delete(column);
        if (!now.size) { box.checked = true; return; }
        if (now.size === one.columns.length) state.columns.delete(one.name);
        else state.columns.set(one.name, one.columns.filter((name) => now.has(name)));
        change(one);
      });
      label.append(box, ` ${one.titles[at]}`);
      part.append(label);
    });
    return part;
  }

  function groupPart(one) {
    const label = element("label", {}, "Group by "), choice = element("select");
    choice.append(element("option", { value: "" }, "nothing"));
    one.columns.forEach((column, at) => {
      if (!one.heads[at].classList.contains("number")) choice.append(element("option", { value: column }, one.titles[at]));
    });
    choice.value = state.group.get(one.name)?.[0] ?? "";
    choice.addEventListener("change", () => {
      if (choice.value) state.group.set(one.name, [choice.value]); else state.group.delete(one.name);
      change(one);
      // A table with several pages has to be loaded with all its rows.
      if (!hil.saved && choice.value && document.querySelector(PAGER)) {
        const all = put(location.search);
        all.delete("page");
        location.search = all;
      }
    });
    label.append(choice);
    return label;
  }

  function viewsPart(one) {
    const part = element("fieldset"), list = element("ul", { className: "views" }), status = element("span", { className: "quiet", role: "status" });
    part.append(element("legend", {}, "Views of this page"), list);
    for (const [name, query] of storedViews()) {
      const item = element("li"), open = element("a", { href: viewUrl(query) }, name);
      if (name === state.view) open.setAttribute("aria-current", "true");
      const remove = element("button", { type: "button" }, "Delete");
      remove.setAttribute("aria-label", `Delete the view ${name}`);
      remove.addEventListener("click", () => { storeView(name, null); fillMenu(one); });
      item.append(open, " ", remove);
      list.append(item);
    }
    if (hil.saved) {
      part.append(element("p", { className: "hint" }, "Open the page in hil web to save views."));
      return part;
    }
    const label = element("label", {}, "Name "), field = element("input", { maxLength: 60, value: state.view, autocomplete: "off" });
    const save = element("button", { type: "button" }, "Save view"), copy = element("button", { type: "button" }, "Copy link");
    save.addEventListener("click", () => {
      const name = field.value.trim();
      if (!name) { status.textContent = "Enter a name."; field.focus(); return; }
      if (!storeView(name, viewQuery(name))) { status.textContent = "This browser does not store data for this site: copy the link."; return; }
      change(one);
      fillMenu(one);
      one.menu.querySelector(".views [aria-current]")?.focus();
    });
    field.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); save.click(); } });
    copy.addEventListener("click", async () => {
      const url = new URL(`${location.pathname}?${put(location.search)}`, location.href).href;
      try {
        await navigator.clipboard.writeText(url);
        status.textContent = "Copied.";
      } catch {
        // Over plain HTTP from another machine, browsers do not give scripts access to the clipboard.
        status.textContent = url;
      }
    });
    label.append(field);
    part.append(label, " ", save, " ", copy, " ", status);
    return part;
  }

  function makeMenu(one) {
    const menu = element("details", { className: "table-menu" }), summary = element("summary", {}, "Columns, groups, views");
    summary.setAttribute("aria-label", `Columns, groups, views: ${one.label}`);
    menu.append(summary);
    menu.addEventListener("toggle", () => { if (menu.open) fillMenu(one); else menu.replaceChildren(summary); });
    one.region.parentElement.insertBefore(menu, one.region);
    return menu;
  }

  // Find the new tables of the page, and apply the state to them.
  function setUp() {
    const found = [...document.querySelectorAll("table")].filter((table) => table.tHead?.rows.length === 1 && table.tHead.rows[0].cells.length > 1);
    // Names depend on all tables of the page, and an empty table has nothing to choose.
    const labels = found.map((table) => table.closest("[role=region]")?.getAttribute("aria-label") ?? "Table");
    const names = unique(labels.map(slug));
    found.forEach((table, at) => {
      if (views.has(table)) return;
      const one = { ...describe(table, names[at]), label: labels[at] };
      if (!one.rows.some((row) => isRow(one, row))) return;
      views.set(table, one);
      one.menu = makeMenu(one);
      apply(one);
    });
    for (const table of views.keys()) if (!table.isConnected) views.delete(table);
    keepInLinks();
  }

  // A link with only the name of a view shows the view that this browser stores.
  function openNamedView() {
    if (hil.saved || !state.view || state.columns.size || state.group.size) return "";
    const query = storedViews().find(([name]) => name === state.view)?.[1];
    if (query === undefined) return `This browser has no view ${state.view} of this page.`;
    const wanted = [...new URLSearchParams(query)].filter(([name]) => name !== "view"), now = new URLSearchParams(location.search);
    if (wanted.some(([name, value]) => !now.getAll(name).includes(value))) location.replace(viewUrl(query));
    return "";
  }

  const missing = openNamedView();
  setUp();
  if (missing) document.getElementById("main").prepend(element("p", { className: "hint", role: "status" }, missing));
  // Parts of a page are replaced after changes on the server, and by filters.
  document.addEventListener("htmx:afterSwap", setUp);
})();
