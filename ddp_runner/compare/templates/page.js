"use strict";
// Sorting, filtering, the theme and the readings of curves. Without it the page is whole, but still.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

for (const table of all("table.sortable")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  if (rows.length < 2) continue;
  all("thead th", table).forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent.trim();
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const isDown = head.getAttribute("aria-sort") === "ascending";
      const sign = isDown ? -1 : 1;
      for (const other of all("th[aria-sort]", table)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      rows.sort((a, b) => {
        const [x, y] = [a, b].map((row) => row.cells[column].dataset.v);
        // What is missing comes last, up or down.
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const numbers = Number(x) - Number(y);
        return sign * (Number.isNaN(numbers) ? x.localeCompare(y, undefined, { numeric: true }) : numbers);
      });
      body.append(...rows);
    });
  });
}

for (const table of all("#results")) {
  const rows = [...table.tBodies[0].rows];
  const apply = () => {
    const isWide = Boolean(document.querySelector("[data-all]")?.checked);
    const words = document.querySelector(".filters input")?.value ?? "";
    table.classList.toggle("wide", isWide);
    for (const row of rows) {
      // Only what a reader sees; no word has the line end that separates the cells.
      const cells = [...row.cells].filter((cell) => isWide || !cell.classList.contains("more"));
      const text = cells.map((cell) => cell.textContent).join("\n").toLowerCase();
      row.hidden = !words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
    }
    const shown = rows.filter((row) => !row.hidden);
    for (const count of all("[data-count]")) count.value = `${shown.length} of ${rows.length}`;
  };
  for (const control of all(".filters, .all")) {
    control.addEventListener("input", apply);
    control.hidden = false;
  }
  apply(); // a browser may restore the box of an earlier visit
}

const theme = document.getElementById("theme");
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
systemDark.addEventListener("change", nameTheme);
nameTheme();
theme.hidden = false;

const open = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName !== "DETAILS") return;
  target.open = true;
  target.scrollIntoView();
};
addEventListener("hashchange", open);
open();

for (const figure of all(".curve")) {
  const svg = figure.querySelector("svg");
  const reading = figure.querySelector("output");
  let points = null;
  const read = () => {
    const [first, last] = svg.dataset.x.split(",").map(Number);
    const [low, high] = svg.dataset.y.split(",").map(Number);
    const size = svg.viewBox.baseVal.width;
    const isLog = svg.hasAttribute("data-log");
    return svg.querySelector("path").getAttribute("d").split(/[M ]/).filter(Boolean).map((pair) => {
      const [x, y] = pair.split(",").map(Number);
      const up = 1 - y / size;
      const value = isLog ? low * (high / low) ** up : low + (high - low) * up;
      return { x: x / size, step: Math.round(first + (last - first) * x / size), value };
    });
  };
  svg.addEventListener("pointermove", (event) => {
    points ??= read();
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width;
    const nearest = points.reduce((a, b) => (Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a));
    reading.value = `step ${nearest.step}: ${Number(nearest.value.toPrecision(4))}`;
  });
  svg.addEventListener("pointerleave", () => { reading.value = ""; });
}
