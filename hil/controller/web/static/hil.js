"use strict";
// Functions of all pages: fetching data, keyboard navigation, copying a command, and updating parts of the page after
// server events.

// Scripts of pages fetch data only with these functions. A page that was saved as a single file contains the data of
// its `data-src` attributes.
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
    // Return the parsed JSON at a URL.
    async data(url) {
      const copy = kept(url);
      return copy ? JSON.parse(copy.textContent) : (await answer(url)).json();
    },
    // Return the bytes at a URL as an ArrayBuffer.
    async bytes(url) {
      const copy = kept(url);
      if (!copy) return (await answer(url)).arrayBuffer();
      return Uint8Array.from(atob(copy.textContent), (letter) => letter.charCodeAt(0)).buffer;
    },
    // Return a value for the `src` of an image, or "" if a saved page does not contain the image.
    picture(url) {
      const copy = kept(url);
      if (copy) return `data:${copy.dataset.type};base64,${copy.textContent}`;
      return saved ? "" : url;
    },
    // Format a time in seconds since the epoch in UTC, to the minute.
    time(seconds) {
      return new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
    },
    // uPlot places the ticks of a time axis with these dates: at midnights in UTC, not of the browser's time zone.
    utc: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    // Return the labels of a time axis. A step of less than a day needs times, and the date at the first tick and at each
    // new day.
    timeTicks(_, ticks, axis, space, step) {
      let day = "";
      return ticks.map((tick) => {
        const text = new Date(tick * 1000).toISOString(), date = text.slice(0, 10);
        if (step >= 86400) return date;
        const time = text.slice(11, step < 60 ? 19 : 16), known = date === day;
        day = date;
        return known ? time : `${time}\n${date}`;
      });
    },
    // Replace the URL of the page, like history.replaceState. Saved pages keep their URL.
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

// Move the focus to the first link of the next or previous row with the arrow keys, also from the last row of a table
// to the next table.
function moveInTable(event) {
  const rows = [...document.querySelectorAll("table[data-keys] > tbody > tr")];
  const links = rows.map((row) => row.querySelector("a")).filter((link) => link?.getClientRects().length);
  const now = links.findIndex((link) => link.closest("tr").contains(event.target));
  // If the focus is on the region around a table, start with this table.
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
    // Over plain HTTP from another machine, browsers do not give scripts access to the clipboard.
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl-C";
  }
});

// Save the page in the current state. Its URL may have changed since the page was loaded.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a.save");
  if (link) link.href = `/share?${new URLSearchParams({ page: location.pathname + location.search })}`;
});

// After a change, fetch a part with data-live again from the URL in this attribute. Wait while the user types, selects
// or presses something in the part. The focus and the scroll position do not change.
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

// Return true if the user types, selects or presses something in a part, or has checked a box in it. If an element is
// replaced between press and release, it receives no click.
function isAtWork(part) {
  if (part.matches(":active")) return true;
  const selected = getSelection();
  const field = inField(document.activeElement) && part.contains(document.activeElement);
  return field || part.querySelector("input:checked:not(.table-menu input)") || (selected && !selected.isCollapsed && part.contains(selected.anchorNode));
}

// Fetch a part again and replace it, unless the user works in the part when the response arrives. Return true if the
// part was replaced. The focus, the scroll positions and open details do not change.
async function drawAnew(part, url) {
  const focus = part.contains(document.activeElement) ? document.activeElement : null;
  const place = focus && placeOf(part, focus);
  const scrolled = [...part.querySelectorAll(".scroll")].map((region) => region.scrollLeft);
  const open = [...part.querySelectorAll("details")].map((one) => one.open);
  let busy = false;
  const keepIfBusy = (event) => {
    // Ignore replacements of the part by other requests of the user.
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

// Call a function after each event that may end the user's work in a part.
function afterWork(call) {
  for (const name of ["focusout", "selectionchange", "pointerup", "pointercancel", "dragend", "keyup"]) {
    document.addEventListener(name, () => setTimeout(call));
  }
}

// Identify an element, so that it can be found after its part was replaced: by URL, label, or index among elements with
// the same tag.
function placeOf(part, element) {
  const alike = [...part.querySelectorAll(element.tagName)];
  const [href, label] = ["href", "aria-label"].map((name) => element.getAttribute(name));
  return { tag: element.tagName, href, label, number: alike.indexOf(element) };
}

function elementAt(part, place) {
  const alike = [...part.querySelectorAll(place.tag)];
  const same = (name, value) => value && alike.find((one) => one.getAttribute(name) === value);
  // Do not select a button by its index: if the button no longer exists, the next key would press a different button.
  return same("href", place.href) || same("aria-label", place.label) || (place.tag === "BUTTON" ? null : alike[place.number]);
}

afterWork(() => { if (late.size) refresh(); });

// Reasons why the page is out of date: no connection to the server, or a deleted session. The messages disappear when
// the reason does.
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

// Listen to server events while the page is visible, and reconnect after an error. Hidden pages close the connection,
// because browsers limit the connections to a server over all tabs.
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

// Return true if the sessions in the page's URL still exist.
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
    return true;  // the server is unreachable: no information
  }
}

// Pages of a farm listen to the farm's events instead.
if (!hil.saved && !document.getElementById("farm")) {
  listen("/events", {
    async changed(event) {
      // Compare the generations: the page may be older than the first event, and a lost connection may have missed
      // events.
      if (event.data === document.body.dataset.generation) return;
      document.body.dataset.generation = event.data;
      if (await areThere()) refresh();
    },
  });
}
