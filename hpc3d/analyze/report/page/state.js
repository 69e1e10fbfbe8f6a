// State of the page in its URL: #section&step=3&ranks=p%3D0&path=off&theme=dark.
"use strict";

const hpc3d = {};

hpc3d.state = (() => {
  const listeners = [];
  let { anchor, values } = read();

  function read() {
    const parts = location.hash.slice(1).split("&").filter(Boolean);
    const values = new URLSearchParams(parts.filter((part) => part.includes("=")).join("&"));
    return { anchor: parts.find((part) => !part.includes("=")) ?? "", values };
  }

  function write() {
    const hash = [anchor, values.toString()].filter(Boolean).join("&");
    history.replaceState(null, "", `#${hash}`);
  }

  // Show a section, and unfold its parents.
  function go() {
    const place = anchor && document.getElementById(anchor);
    if (!place) return;
    for (let each = place; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
    place.querySelector(":scope > details.run")?.setAttribute("open", "");
    place.scrollIntoView();
  }

  // A link only contains a section, so the other values are preserved.
  function changed() {
    const found = read();
    anchor = found.anchor;
    if (found.values.size) {
      values = found.values;
      listeners.forEach((each) => each());
    }
    write();
    go();
  }

  addEventListener("hashchange", changed);
  return {
    go,
    get: (key) => values.get(key),
    onchange: (listener) => listeners.push(listener),
    // Null resets a key to its default and removes it from the URL.
    set: (key, value) => {
      if (value === null) values.delete(key);
      else values.set(key, value);
      write();
    },
  };
})();

// Light or dark theme: from the URL, else the system setting.
hpc3d.theme = (() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const dark = () => !printing && (hpc3d.state.get("theme") ?? (system.matches ? "dark" : "light")) === "dark";
  const palettes = new Map(); // {color mapper: its palette for a light page, which starts with the lightest color}
  const heights = new Map(); // {plot with a horizontal legend: its height with a legend of one line}

  // Properties of Bokeh models that use the text color or line color of the page.
  const TEXT = ["axis_label_text_color", "major_label_text_color", "label_text_color", "title_text_color"];
  const LINES = ["axis_line_color", "major_tick_line_color", "grid_line_color"];

  function paint(model, text, lines, ground) {
    const colors = {};
    for (const key of TEXT) if (key in model.properties) colors[key] = text;
    for (const key of LINES) if (key in model.properties) colors[key] = lines;
    if (["Label", "Title"].includes(model.type)) colors.text_color = text;
    if ("border_fill_color" in model.properties)
      Object.assign(colors, { border_fill_color: ground, background_fill_color: ground });
    if ("inactive_fill_color" in model.properties) colors.inactive_fill_color = ground;
    if (model.type === "LinearColorMapper") {
      if (!palettes.has(model)) palettes.set(model, [...model.palette]);
      colors.palette = dark() ? [...palettes.get(model)].reverse() : palettes.get(model);
    }
    if (Object.keys(colors).length) model.setv(colors);
  }

  // Resolve a color variable of the style sheet for Bokeh.
  function resolved(name) {
    const probe = document.body.appendChild(document.createElement("span"));
    probe.style.color = `var(${name})`;
    const color = getComputedStyle(probe).color;
    probe.remove();
    return color;
  }

  function apply() {
    document.documentElement.dataset.theme = dark() ? "dark" : "light";
    const button = document.getElementById("theme");
    button?.setAttribute("aria-pressed", `${dark()}`);
    if (!window.Bokeh) return;
    wrap();
    const colors = ["--ink", "--line", "--ground"].map(resolved);
    for (const page of Bokeh.documents)
      for (const root of page.roots())
        for (const model of root.references()) paint(model, ...colors);
  }

  // Fit the number of legend columns to the width of the plot, now and after each layout.
  function fit(plot) {
    const legend = plot.above.find((each) => each.orientation === "horizontal");
    if (!legend) return;
    const names = legend.items.length;
    const columns = Math.max(2, Math.floor((plot.inner_width || innerWidth) / 105));
    legend.ncols = columns < names ? columns : "auto";
    plot.height = heights.get(plot) + 26 * (Math.ceil(names / columns) - 1);
  }

  function wrap() {
    for (const page of Bokeh.documents)
      for (const root of page.roots())
        for (const plot of [...root.references()].filter((model) => model.above)) {
          if (!heights.has(plot)) {
            heights.set(plot, plot.height);
            plot.properties.inner_width.change.connect(() => fit(plot));
          }
          fit(plot);
        }
  }

  function toggle() {
    const wanted = dark() ? "light" : "dark";
    hpc3d.state.set("theme", wanted === (system.matches ? "dark" : "light") ? null : wanted);
    apply();
  }

  system.addEventListener("change", apply);
  for (const [name, value] of [["beforeprint", true], ["afterprint", false]])
    addEventListener(name, () => { printing = value; apply(); });
  addEventListener("resize", () => window.Bokeh && wrap());
  hpc3d.state.onchange(apply);
  return { apply, toggle };
})();
