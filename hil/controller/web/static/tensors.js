"use strict";
// Maps of a tensor's page: details of a cell, close-up of a cell, and sliders for the tolerance.

(() => {
  let asked = "";
  let pointed = null;
  let looked = "";  // id of the figure of a requested close-up, up to its display

  const at = (plot) => [Number(plot.dataset.row ?? 0), Number(plot.dataset.column ?? 0)];

  function tell(plot, row, column) {
    row = Math.max(0, Math.min(Number(plot.dataset.rows) - 1, row));
    column = Math.max(0, Math.min(Number(plot.dataset.columns) - 1, column));
    for (const one of document.querySelectorAll("#view .map .plot")) {
      const cursor = one.querySelector(".cursor");
      const same = one.dataset.rows === plot.dataset.rows && one.dataset.columns === plot.dataset.columns;
      cursor.setAttribute("visibility", same ? "visible" : "hidden");
      if (!same) continue;
      [one.dataset.row, one.dataset.column] = [row, column];
      cursor.setAttribute("x", column * Number(cursor.getAttribute("width")));
      cursor.setAttribute("y", row * Number(cursor.getAttribute("height")));
    }
    fetchCell(plot, row, column);
  }

  // Send only one request at a time. If the pointer moves fast, only the last cell is requested.
  async function fetchCell(plot, row, column) {
    const url = `/api/tensors/cell?${plot.dataset.query}&row=${row}&column=${column}`;
    pointed = url;
    if (asked) return;
    while (pointed !== asked) {
      asked = pointed;
      let found;
      try {
        found = await hil.data(asked);
      } catch (error) {
        found = { text: error.message, near: "" };
      }
      const told = document.getElementById("cell");
      if (told && pointed === asked) {
        told.textContent = found.text;
        told.dataset.near = found.near;
        told.dataset.of = asked;
      }
    }
    asked = "";
  }

  async function closer(plot) {
    if (hil.saved) return;
    const [row, column] = at(plot);
    let found;
    try {
      found = await hil.data(`/api/tensors/cell?${plot.dataset.query}&row=${row}&column=${column}`);
    } catch {
      return;  // fetchCell shows the reason
    }
    if (!found.near || !plot.isConnected) return;
    looked = plot.closest("figure").id;
    htmx.ajax("GET", found.near, { source: plot, target: "#view", swap: "outerHTML" });
  }

  // After a close-up, focus the same map at the marked element. Maps of large tensors arrive later than the others.
  function goOn() {
    const plot = looked && document.querySelector(`#${looked} .plot`);
    if (!plot) return;
    looked = "";
    if (document.activeElement !== document.body) return;
    const mark = plot.querySelector(".mark"), cell = plot.querySelector(".cursor");
    if (mark) {
      for (const [place, centre, size] of [["row", "cy", "height"], ["column", "cx", "width"]])
        plot.dataset[place] = Math.floor(Number(mark.getAttribute(centre)) / Number(cell.getAttribute(size)));
    }
    plot.focus();
  }

  function cellUnder(plot, event) {
    const box = plot.querySelector("img").getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * Number(plot.dataset.rows));
    const column = Math.floor(((event.clientX - box.left) / box.width) * Number(plot.dataset.columns));
    return [row, column];
  }

  const plotOf = (event) => event.target.closest?.(".map .plot");

  document.addEventListener("pointermove", (event) => {
    const plot = plotOf(event);
    if (!plot) return;
    const [row, column] = cellUnder(plot, event);
    if (String(row) !== plot.dataset.row || String(column) !== plot.dataset.column) tell(plot, row, column);
  });

  document.addEventListener("click", (event) => {
    const plot = plotOf(event);
    if (!plot) return;
    tell(plot, ...cellUnder(plot, event));
    closer(plot);
  });

  document.addEventListener("focusin", (event) => {
    const plot = plotOf(event);
    if (plot && event.target === plot && plot.matches(":focus-visible")) tell(plot, ...at(plot));
  });

  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  // Handle keys here before the tables, which also use the arrow keys.
  document.addEventListener("keydown", (event) => {
    const plot = plotOf(event);
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter") closer(plot);
    else if (steps[event.key]) {
      const [row, column] = at(plot);
      const by = event.shiftKey ? 10 : 1;
      tell(plot, row + by * steps[event.key][0], column + by * steps[event.key][1]);
    } else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }, true);

  // n and p open the next and the previous failing output.
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || inField(event.target)) return;
    const rel = { n: "next", p: "prev" }[event.key];
    if (rel && !hil.saved) document.querySelector(`.failing a[rel=${rel}]`)?.click();
  });

  // A slider has a logarithmic scale. The adjacent field shows the number, and only the field is submitted.
  function ready() {
    const form = document.getElementById("slice");
    if (!form || form.classList.contains("scripted") || hil.saved) return;
    form.classList.add("scripted");
    for (const slider of form.querySelectorAll("[data-for]")) {
      const field = form.elements[slider.dataset.for];
      const given = field.value || document.querySelector(`#tolerance [data-${field.name}]`)?.dataset[field.name];
      if (Number(given) > 0) slider.value = Math.log10(Number(given));
    }
  }

  // For another slice, reset the window before the form is submitted.
  document.addEventListener("change", (event) => {
    if (!event.target.matches?.("#slice #rows, #slice #columns")) return;
    for (const name of ["top", "left", "height", "width", "layout"]) event.target.form.elements[name].value = "";
  }, true);
  document.addEventListener("htmx:configRequest", (event) => {
    const given = event.detail.parameters;
    for (const name of Object.keys(given)) if (given[name] === "") delete given[name];
  });

  document.addEventListener("input", (event) => {
    const slider = event.target.closest?.("#slice [data-for]");
    if (slider) slider.form.elements[slider.dataset.for].value = Number((10 ** Number(slider.value)).toPrecision(3));
  });

  // Draw the SVG file of a map as PNG, because the PNG file of the server has no texts.
  async function drawPng(link) {
    const image = new Image();
    image.src = link.href.replace("/map.png?", "/map.svg?");
    await image.decode();
    const canvas = document.createElement("canvas"), ratio = 2;
    [canvas.width, canvas.height] = [image.naturalWidth * ratio, image.naturalHeight * ratio];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }

  document.addEventListener("click", async (event) => {
    const link = event.target.closest?.("a[data-png]");
    if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    let url = link.href;
    try {
      url = URL.createObjectURL(await drawPng(link));
    } catch {
      // The browser cannot draw the SVG: download the file of the server.
    }
    const saved = document.createElement("a");
    [saved.href, saved.download] = [url, link.download];
    saved.click();
    if (url !== link.href) setTimeout(() => URL.revokeObjectURL(url), 60_000);
  });

  ready();
  document.addEventListener("htmx:afterSettle", () => {
    ready();
    goOn();
  });
  // After an error, open the page of the failed request, which shows the reason.
  document.addEventListener("htmx:responseError", (event) => location.assign(event.detail.pathInfo.finalRequestPath));
})();
