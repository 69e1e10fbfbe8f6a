// The timeline of a report: which step and ranks are shown, what a box is, and who took part in it.
"use strict";

Object.assign(hpc3d, (() => {
  const FIELDS = [
    "rank", "name", "when", "took", "waited", "size", "rate", "share", "phase", "stage", "layer",
    "microbatch", "chunk", "operation", "bytes", "posted", "arrivals",
  ];
  const BRIEF = FIELDS.filter((field) => !["stage", "chunk", "posted", "arrivals"].includes(field));

  // Three digits and a unit that fits.
  function measured(value, units) {
    const [unit, size] = units.find(([, each]) => Math.abs(value) >= each) ?? units.at(-1);
    const digits = { minimumSignificantDigits: 3, maximumSignificantDigits: 3 };
    return `${(value / size).toLocaleString("en", digits)} ${unit}`;
  }

  const time = (ms) => (ms ? measured(ms, [["s", 1e3], ["ms", 1], ["us", 1e-3]]) : "0 us");
  const when = (ms) => `${ms.toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 })} ms`;
  const size = (bytes) =>
    bytes < 1e3 ? `${bytes} B` : measured(bytes, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]);
  const rate = (perSecond) =>
    measured(perSecond, [["TFLOP/s", 1e12], ["GFLOP/s", 1e9], ["MFLOP/s", 1e6], ["kFLOP/s", 1e3]]);

  // The highest rate of any box of a step, FLOP/s, found once.
  const fastest = new WeakMap();
  function highest(events) {
    if (!fastest.has(events.flops)) {
      let most = 0;
      events.flops.forEach((flops, at) => {
        if (flops) most = Math.max(most, (flops / (events.end[at] - events.until[at])) * 1e3 || 0);
      });
      fastest.set(events.flops, most);
    }
    return fastest.get(events.flops);
  }

  // Of what the machine could do, or where that is not known of what was done best.
  function share(perSecond, events, about) {
    const part = (of) => `${((100 * perSecond) / of).toPrecision(3)} %`;
    if (about.peak) return `${part(about.peak)} of the peak, ${rate(about.peak)}`;
    return `${part(highest(events))} of the step's fastest; report --peak gives the share of the peak`;
  }

  // The coordinates of a rank on the mesh, whose last axis varies fastest.
  function coordinates(rank, axes) {
    const found = {};
    for (const [axis, size] of [...axes].reverse()) {
      found[axis] = rank % size;
      rank = Math.floor(rank / size);
    }
    return found;
  }

  // A rank and its place on the axes that have more than one.
  function place(rank, axes) {
    const at = coordinates(rank, axes);
    const words = axes.filter(([, size]) => size > 1).map(([axis]) => `${axis}=${at[axis]}`);
    return words.length ? `${rank} (${words.join(" ")})` : `${rank}`;
  }

  // Where a call goes, as hpc3d.comm.mesh says it.
  function along(axis) {
    return axis === "world" ? "over all ranks" : `along ${axis}`;
  }

  // What an event says under the name of a field, "" for nothing.
  function text(events, about, index, field) {
    const value = (key) => events[key][index];
    const name = (key) => about.names[key][value(key)] ?? "";
    const known = (key) => (value(key) < 0 ? "" : `${value(key)}`);
    const wait = value("until") - value("start");
    const shape = name("name").match(/m=(\d+) n=(\d+) k=(\d+)/);
    const perSecond = (1e3 * value("flops")) / (value("end") - value("until"));
    const say = {
      rank: () => place(value("rank"), about.axes),
      name: () => name("name").split(" m=")[0],
      size: () => (shape ? `m ${shape[1]}, n ${shape[2]}, k ${shape[3]}` : ""),
      rate: () => (perSecond > 0 && perSecond < Infinity ? rate(perSecond) : ""),
      share: () => (perSecond > 0 && perSecond < Infinity ? share(perSecond, events, about) : ""),
      posted: () => (name("axis") ? when(value("posted")) : ""),
      when: () => when(value("start")),
      took: () => time(value("end") - value("start")),
      waited: () => (wait > 0 ? `${time(wait)} for rank ${value("by")}` : ""),
      phase: () => name("phase"),
      operation: () =>
        name("axis") ? `${name("op")} ${along(name("axis"))}, number ${value("seq")}` : name("op"),
      bytes: () => (name("axis") ? size(value("bytes")) : ""),
      arrivals: () => arrivals(events, index),
    };
    return (say[field] ?? (() => known(field)))();
  }

  // What is known of an event, a line each.
  function lines(events, about, index) {
    const said = BRIEF.map((field) => [field, text(events, about, index, field)]);
    return said.filter(([, word]) => word).map((pair) => pair.join(": ")).join("\n");
  }

  // The indices of the calls that belong together with one, in the order of their arrivals.
  function meeting(events, index) {
    const number = events.meeting[index];
    if (number < 0) return [index];
    const found = [];
    events.meeting.forEach((other, at) => other === number && found.push(at));
    return found.sort((a, b) => events.posted[a] - events.posted[b]);
  }

  function arrivals(events, index) {
    const all = meeting(events, index);
    if (all.length === 1) return "";
    const first = events.posted[all[0]];
    const line = (at) => `rank ${events.rank[at]} after ${time(events.posted[at] - first)}`;
    return all.map(line).join(", ");
  }

  // Show an event in the panel, and with it those that belong together with it.
  function show(panel, events, about, index) {
    const list = document.createElement("dl");
    for (const field of FIELDS) {
      const said = text(events, about, index, field);
      if (!said) continue;
      for (const [tag, word] of [["dt", field], ["dd", said]]) {
        const line = document.createElement(tag);
        line.textContent = word;
        list.append(line);
      }
    }
    panel.replaceChildren(list);
  }

  // Which ranks are meant: "0-7 12" are these, "p=0 x=1" those with all of these coordinates.
  function chosen(words, ranks, axes) {
    const parts = words.split(/[\s,;]+/).filter(Boolean);
    const wanted = parts.filter((part) => part.includes("=")).map((part) => part.split("="));
    const spans = parts.filter((part) => !part.includes("=")).map((part) => part.split("-"));
    const within = (rank) => spans.some(([first, last = first]) => +first <= rank && rank <= +last);
    const placed = (rank) =>
      wanted.every(([axis, number]) => coordinates(rank, axes)[axis] === +number);
    return ranks.filter((rank) => placed(rank) && (!spans.length || within(rank)));
  }

  // Give the chosen ranks a row each, in which a stream has its lane, and the others none.
  function arrange(plot, sources, ranks) {
    const row = new Map(ranks.map((rank, place) => [rank, place]));
    for (const source of sources) {
      const { rank, lane } = source.data;
      const place = (each, at) => (row.get(each) ?? NaN) + (lane?.[at] ?? 0);
      source.data.row = Float32Array.from(rank, place);
      source.change.emit();
    }
    const every = 1 + Math.floor((ranks.length - 1) / 32);
    const places = ranks.map((_, place) => place).filter((place) => place % every === 0);
    const axis = plot.left.find((each) => each.ticker);
    axis.major_label_overrides = new Map(places.map((place) => [place, `${ranks[place]}`]));
    axis.ticker.ticks = places;
    plot.y_range.start = ranks.length - 0.5;
    plot.y_range.end = -0.5;
  }

  // A box was clicked, or what belongs together with it was marked by this function: Bokeh calls
  // it for both, in its own time.
  const marked = new WeakMap();
  function clicked(plot) {
    const [about, events] = plot.tags;
    const { indices } = events.selected;
    if (!indices.length || `${indices}` === marked.get(plot)) return;
    const all = meeting(events.data, indices[0]);
    show(document.querySelector(`[data-model="${plot.name}"] .details`), events.data, about, indices[0]);
    marked.set(plot, `${all}`);
    events.selected.indices = all;
  }

  // Mark a box and with it those that belong together with it.
  function select(plot, index) {
    plot.tags[1].selected.indices = [index];
  }

  // The box after or before the marked one on its rank, or the one at its time on another rank.
  function beside(events, ranks, index, key) {
    const rank = events.rank[index];
    const near = { ArrowUp: -1, ArrowDown: 1 }[key];
    const wanted = near ? ranks[ranks.indexOf(rank) + near] : rank;
    const all = [];
    events.rank.forEach((each, at) => each === wanted && all.push(at));
    if (!all.length) return index;
    if (near) {
      const gap = (at) => Math.abs(events.start[at] - events.start[index]);
      return all.reduce((best, at) => (gap(at) < gap(best) ? at : best));
    }
    all.sort((a, b) => events.start[a] - events.start[b]);
    return all[all.indexOf(index) + (key === "ArrowRight" ? 1 : -1)] ?? index;
  }

  // Keep what is marked in sight.
  function follow(plot, start, end) {
    const range = plot.x_range;
    const width = range.end - range.start;
    if (end - start > width || (start >= range.start && end <= range.end)) return;
    const from = (start + end - width) / 2;
    range.setv({ start: from, end: from + width });
  }

  function zoom(plot, factor) {
    const range = plot.x_range;
    const middle = (range.start + range.end) / 2;
    const half = ((range.end - range.start) / 2) * factor;
    range.setv({ start: middle - half, end: middle + half });
  }

  // Arrows go from box to box, + and - zoom, 0 shows the whole step.
  function pressed(event, shown, plot) {
    const events = plot.tags[1];
    if (event.key.startsWith("Arrow")) {
      const index = shown.index ?? events.data.rank.indexOf(shown.ranks[0]);
      const next = shown.index === undefined ? index : beside(events.data, shown.ranks, index, event.key);
      shown.index = next;
      select(plot, next);
      follow(plot, events.data.start[next], events.data.end[next]);
    } else if ("+=".includes(event.key)) zoom(plot, 0.5);
    else if (event.key === "-") zoom(plot, 2);
    else if (event.key === "0") plot.x_range.setv({ start: 0, end: shown.end });
    else return;
    event.preventDefault();
  }

  // What the controls of a timeline do; each is a part of the page's address.
  class Controls {
    constructor(section, plot) {
      const [about, events, path, rest] = plot.tags;
      Object.assign(this, { section, plot, about, events, path, rest });
      this.packed = JSON.parse(section.querySelector("script.steps").textContent);
      this.step = section.querySelector("select");
      this.field = section.querySelector("input");
      this.button = section.querySelector("button.path");
      this.line = plot.renderers.find((each) => each.name === "path");
      this.step.addEventListener("change", () => this.keep("step", this.step.value, this.packed.first));
      this.field.addEventListener("input", () => this.keep("ranks", this.field.value.trim(), ""));
      this.button.addEventListener("click", () => this.keep("path", this.line.visible ? "off" : "on", "on"));
      const canvas = section.querySelector(".screen.plot");
      canvas.addEventListener("keydown", (event) => pressed(event, this, plot));
      events.selected.change.connect(() => {
        const { indices } = events.selected; // several: those that belong together with one
        if (indices.length === 1) [this.index] = indices;
      });
      hpc3d.state.onchange(() => this.show());
    }

    keep(key, value, usual) {
      hpc3d.state.set(key + this.section.dataset.end, value === usual ? null : value);
      this.show();
    }

    get(key) {
      return hpc3d.state.get(key + this.section.dataset.end);
    }

    // Make the figure what the address says.
    async show() {
      const step = this.get("step") in this.packed.steps ? this.get("step") : this.packed.first;
      this.line.visible = this.get("path") !== "off";
      this.button.setAttribute("aria-pressed", `${this.line.visible}`);
      this.step.value = step;
      const words = this.get("ranks") ?? "";
      if (this.field.value.trim() !== words) this.field.value = words;
      if (this.drawn !== step) await this.draw(step);
      this.arrange();
      this.section.dataset.step = step;
    }

    async draw(step) {
      this.drawn = step;
      const { end, ranks, events, path, rest } = await hpc3d.steps.unpacked(this.packed, step);
      if (this.drawn !== step) return; // another one was chosen meanwhile
      const none = (like) => new Float32Array(like.length).fill(NaN);
      marked.delete(this.plot);
      this.events.selected.indices = [];
      this.index = undefined;
      this.all = ranks;
      this.end = end;
      this.rest.data = { ...rest, row: none(rest.rank) };
      this.events.data = { ...events, row: none(events.rank) };
      this.path.data = { ...path, row: none(path.rank) };
      this.plot.x_range.setv({ start: 0, end });
      this.section.querySelector(".details").replaceChildren(this.hint());
    }

    hint() {
      const line = document.createElement("p");
      line.textContent = "Click on a box.";
      return line;
    }

    arrange() {
      const ranks = chosen(this.field.value, this.all, this.about.axes);
      this.field.classList.toggle("wrong", !ranks.length);
      this.field.setAttribute("aria-invalid", `${!ranks.length}`);
      this.ranks = ranks.length ? ranks : this.all;
      arrange(this.plot, [this.events, this.path, this.rest], this.ranks);
    }
  }

  // Bokeh makes its documents after the page has been read.
  function start() {
    const sections = [...document.querySelectorAll(".timeline")];
    const plots = sections.map((section) =>
      Bokeh.documents.map((each) => each.get_model_by_name(section.dataset.model)).find(Boolean));
    if (!plots.every(Boolean)) return void setTimeout(start, 50);
    hpc3d.theme.apply();
    Promise.all(sections.map((section, at) => new Controls(section, plots[at]).show())).then(hpc3d.state.go);
  }

  return { text, lines, clicked, start };
})());
