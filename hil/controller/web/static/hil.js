"use strict";
// What every page does: fetching data, keys, copying a command, and updating in place when the server tells of a change.

// Pages' scripts fetch with these alone: a page that was saved as one file holds what its `data-src` attributes name.
const hil = (() => {
  const saved = document.documentElement.dataset.saved !== undefined;
  const kept = (url) => [...document.querySelectorAll("script[data-url]")].find((one) => one.dataset.url === url);

  async function answer(url) {
    if (saved) throw new Error("This saved page does not include the data: open it in hil web.");
    const response = await fetch(url, { headers: { accept: "application/json, */*" } });
    if (!response.ok) throw new Error((await response.text()).slice(0, 500) || response.statusText);
    return response;
  }

  return {
    saved,
    // Parsed JSON.
    async data(url) {
      const copy = kept(url);
      return copy ? JSON.parse(copy.textContent) : (await answer(url)).json();
    },
    // An ArrayBuffer.
    async bytes(url) {
      const copy = kept(url);
      if (!copy) return (await answer(url)).arrayBuffer();
      return Uint8Array.from(atob(copy.textContent), (letter) => letter.charCodeAt(0)).buffer;
    },
    // What the `src` of an image may be set to; "" where the page does not hold it.
    picture(url) {
      const copy = kept(url);
      if (copy) return `data:${copy.dataset.type};base64,${copy.textContent}`;
      return saved ? "" : url;
    },
    // Show a view's state in the page's address, as history.replaceState does.
    address(url) {
      if (!saved) history.replaceState(null, "", url);
    },
  };
})();

const inField = (element) => element instanceof HTMLElement && element.matches("input, select, textarea, [contenteditable]");

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !inField(event.target)) {
    event.preventDefault();
    document.getElementById("search").focus();
  }
  if ((event.key === "ArrowDown" || event.key === "ArrowUp") && !inField(event.target)) moveInTable(event);
});

// Up and down go from row to row, over the first link of each, and from the last of a table to the first of the next.
function moveInTable(event) {
  const rows = [...document.querySelectorAll("table[data-keys] > tbody > tr")];
  const links = rows.map((row) => row.querySelector("a")).filter((link) => link?.getClientRects().length);
  const now = links.findIndex((link) => link.closest("tr").contains(event.target));
  // Whoever is in a table's region begins with that table.
  const first = links.find((link) => event.target !== document.body && event.target.contains(link)) ?? links[0];
  const next = now < 0 ? first : links[now + (event.key === "ArrowDown" ? 1 : -1)];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button.copy");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    // Over plain HTTP from another machine browsers give scripts no clipboard.
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl-C";
  }
});

// What is saved is the view as it is now: its address may have changed since the page came.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a.save");
  if (link) link.href = `/share?${new URLSearchParams({ page: location.pathname + location.search })}`;
});

// A part with data-live is fetched again from there after a change. This waits while the reader writes, selects or
// presses something in it. The focus and the scroll position stay.
const late = new Set();
let refreshing = false, again = false;

async function refresh() {
  again = refreshing;
  if (refreshing) return;
  refreshing = true;
  try {
    await refreshParts();
  } finally {
    refreshing = false;
  }
  if (again) refresh();
}

async function refreshParts() {
  for (const part of document.querySelectorAll("[data-live]")) {
    if (isAtWork(part)) {
      late.add(part.id);
      continue;
    }
    late.delete(part.id);
    if (!(await drawAnew(part, part.dataset.live))) late.add(part.id);
  }
}

// Whether the reader writes, selects, presses or has ticked something in a part. A click on an element that is replaced
// between press and release does not reach it.
function isAtWork(part) {
  if (part.matches(":active")) return true;
  const selected = getSelection();
  const field = inField(document.activeElement) && part.contains(document.activeElement);
  return field || part.querySelector("input:checked") || (selected && !selected.isCollapsed && part.contains(selected.anchorNode));
}

// Fetch a part again and replace it, unless the reader is at work in it when the answer arrives. Return whether the part
// was replaced. The focus, the scroll positions and the opened details stay.
async function drawAnew(part, url) {
  const focus = part.contains(document.activeElement) ? document.activeElement : null;
  const place = focus && placeOf(part, focus);
  const scrolled = [...part.querySelectorAll(".scroll")].map((region) => region.scrollLeft);
  const open = [...part.querySelectorAll("details")].map((one) => one.open);
  let busy = false;
  const keepIfBusy = (event) => {
    // The reader's own requests may also replace the part.
    if (event.detail.pathInfo.finalRequestPath !== url) return;
    busy = isAtWork(part);
    if (busy) event.detail.shouldSwap = false;
  };
  part.addEventListener("htmx:beforeSwap", keepIfBusy);
  try {
    await htmx.ajax("GET", url, { target: part, swap: "outerHTML" });
  } finally {
    part.removeEventListener("htmx:beforeSwap", keepIfBusy);
  }
  if (busy) return false;
  const now = document.getElementById(part.id);
  if (!now) return true;
  now.querySelectorAll(".scroll").forEach((region, number) => { region.scrollLeft = scrolled[number] ?? 0; });
  now.querySelectorAll("details").forEach((one, number) => { one.open = open[number] ?? one.open; });
  if (place) elementAt(now, place)?.focus({ preventScroll: true });
  return true;
}

// Call a function after each event that may end the reader's work in a part.
function afterWork(call) {
  for (const name of ["focusout", "selectionchange", "pointerup", "pointercancel", "dragend", "keyup"]) {
    document.addEventListener(name, () => setTimeout(call));
  }
}

// What tells an element from others after its part was drawn anew: where it leads, what it is called, or its number
// among its like.
function placeOf(part, element) {
  const alike = [...part.querySelectorAll(element.tagName)];
  const [href, label] = ["href", "aria-label"].map((name) => element.getAttribute(name));
  return { tag: element.tagName, href, label, number: alike.indexOf(element) };
}

function elementAt(part, place) {
  const alike = [...part.querySelectorAll(place.tag)];
  const same = (name, value) => value && alike.find((one) => one.getAttribute(name) === value);
  // A button that is gone is not another one: the next key would press it.
  return same("href", place.href) || same("aria-label", place.label) || (place.tag === "BUTTON" ? null : alike[place.number]);
}

afterWork(() => { if (late.size) refresh(); });

// What is shown and is no more so is said, and taken back when it is so again.
const away = { server: "", session: "" };

function tellAway(what, text) {
  const place = document.getElementById("away");
  if (!place || away[what] === text) return;
  away[what] = text;
  place.replaceChildren();
  const shown = away.server || away.session;
  if (!shown) return;
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = shown;
  place.append(note);
}

// Events of the server, each with who hears it, for as long as the page is seen: a browser has few connections to one
// server, all tabs together. Where a connection is lost it is made again.
function listen(url, heard) {
  let events = null, timer = 0;
  const stop = () => {
    clearTimeout(timer);
    events?.close();
    events = null;
  };
  const start = () => {
    stop();
    events = new EventSource(url);
    for (const [name, hear] of Object.entries(heard)) events.addEventListener(name, hear);
    events.addEventListener("open", () => tellAway("server", ""));
    events.addEventListener("error", () => {
      tellAway("server", "hil web is not responding. This page shows the last known state, and updates when hil web is available.");
      document.body.dataset.generation = "";
      if (events?.readyState === EventSource.CLOSED) timer = setTimeout(start, 3000);
    });
  };
  document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else start(); });
  addEventListener("pagehide", stop);
  if (!document.hidden) start();
}

// Whether the sessions that the page's address names are there still.
async function areThere() {
  const given = new URLSearchParams(location.search), asked = new URLSearchParams();
  for (const name of ["id", "root"]) if (given.get(name)) asked.set(name, given.get(name));
  if (location.pathname === "/compare") for (const name of ["a", "b", "s"]) given.getAll(name).forEach((one) => asked.append("s", one));
  if (!asked.has("id") && !asked.has("s")) return true;
  try {
    const { gone } = await hil.data(`/api/there?${asked}`);
    tellAway("session", gone && `Not available: ${gone}. This page shows the last known state.`);
    return !gone;
  } catch {
    return true;  // who cannot be asked tells nothing
  }
}

// A farm's pages listen to the farm.
if (!hil.saved && !document.getElementById("farm")) {
  listen("/events", {
    async changed(event) {
      // The page may be older than the first event, and a connection that was lost may have missed some.
      if (event.data === document.body.dataset.generation) return;
      document.body.dataset.generation = event.data;
      if (await areThere()) refresh();
    },
  });
}
