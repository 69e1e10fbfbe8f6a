// Table controls: click on a heading to sort, a search field, and a button that copies visible rows.
"use strict";

hpc3d.tables = (() => {
  const PREFIXES = { k: 1e3, M: 1e6, G: 1e9, T: 1e12 };

  // Return the sort key of a cell: its number with its prefix, its text, or null for a dash.
  function value(cell, isText) {
    const text = cell.textContent.trim();
    if (text === "-") return null;
    if (isText) return text.toLowerCase();
    const [, number, prefix] = text.replaceAll(",", "").match(/^(-?[\d.eE+-]+)[ %]*([kMGT]?)/) ?? [];
    return number === undefined ? text.toLowerCase() : parseFloat(number) * (PREFIXES[prefix] ?? 1);
  }

  function compare(a, b) {
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1;
  }

  function sort(table, head, column) {
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const each of table.tHead.rows[0].cells) each.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = table.tBodies[0];
    const isText = head.classList.contains("text");
    const rows = [...body.rows].map((row) => [value(row.cells[column], isText), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // unknown values last
      return descending ? compare(b, a) : compare(a, b);
    });
    body.append(...rows.map(([, row]) => row));
  }

  const counted = (number) => `${number} row${number === 1 ? "" : "s"}`;

  function search(table, words, status) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
    }
    status.textContent = wanted.length ? `${rows.filter((row) => !row.hidden).length} of ${counted(rows.length)}` : "";
  }

  async function copy(table, status) {
    const rows = [...table.rows].filter((row) => !row.hidden);
    const text = rows.map((row) => [...row.cells].map((cell) => cell.textContent.trim()).join("\t")).join("\n");
    status.textContent = (await write(text)) ? `${counted(rows.length - 1)} copied` : "the browser blocked the clipboard";
  }

  // Some browsers deny clipboard access to a local file.
  async function write(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  }

  function element(tag, values) {
    return Object.assign(document.createElement(tag), values);
  }

  function equip(box) {
    const table = box.querySelector("table");
    const title = box.dataset.title;
    const bar = element("div", { className: "tools" });
    const field = element("input", { type: "search", placeholder: "search", ariaLabel: `search ${title}` });
    const button = element("button", { type: "button", textContent: "copy", ariaLabel: `copy ${title}` });
    const status = element("span", { role: "status" });
    field.addEventListener("input", () => search(table, field.value, status));
    button.addEventListener("click", () => copy(table, status));
    bar.append(...(table.tBodies[0].rows.length > 1 ? [field] : []), button, status);
    box.querySelector(".scroll").before(bar);
    if (table.tBodies[0].rows.length < 2) return;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const name = element("button", { type: "button", textContent: head.textContent });
      name.addEventListener("click", () => sort(table, head, column));
      head.setAttribute("aria-sort", "none");
      head.replaceChildren(name);
    });
  }

  return { start: () => document.querySelectorAll("details.table").forEach(equip) };
})();
