// Timeline of a report: selection of the step and ranks, details of an event, and its participants.
"use strict";

Object.assign(hpc3d, (() => {
  const FIELDS = [
    "rank", "name", "when", "took", "waited", "size", "rate", "share", "phase", "stage", "layer",
    "microbatch", "chunk", "operation", "bytes", "posted", "arrivals",
  ];
  const BRIEF = FIELDS.filter((field) => !["stage", "chunk", "posted", "arrivals"].includes(field));

  // Format a value with three significant digits and the best unit.
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

  // The highest FLOP/s of any box of a step, cached.
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

  // Format the share of the peak rate or, if it is unknown, of the highest rate in the step.
  function share(perSecond, events, about) {
    const part = (of) => `${((100 * perSecond) / of).toPrecision(3)} %`;
    if (about.peak) return `${part(about.peak)} of the peak, ${rate(about.peak)}`;
    return `${part(highest(events))} of the highest rate in the step (set report --peak for the share of the peak)`;
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

  // Format a rank and its coordinates on the axes with more than one rank.
  function withCoordinates(rank, axes) {
    const at = coordinates(rank, axes);
    const parts = axes.filter(([, size]) => size > 1).map(([axis]) => `${axis}=${at[axis]}`);
    return parts.length ? `${rank} (${parts.join(" ")})` : `${rank}`;
  }

  // Name the direction of a call, as hpc3d.comm.mesh does.
  function along(axis) {
    return axis === "world" ? "over all ranks" : `along ${axis}`;
  }

  // Return the text of a field of an event, "" if it has none.
  function text(events, about, index, field) {
    const value = (key) => events[key][index];
    const name = (key) => about.names[key][value(key)] ?? "";
    const known = (key) => (value(key) < 0 ? "" : `${value(key)}`);
    const wait = value("until") - value("start");
    const isCall = value("seq") >= 0; // other events along an axis are copies of blocks
    const action = name("axis") ? `${name("op")} ${along(name("axis"))}` : name("op");
    const shape = name("name").match(/m=(\d+) n=(\d+) k=(\d+)/);
    const perSecond = (1e3 * value("flops")) / (value("end") - value("until"));
    const format = {
      rank: () => withCoordinates(value("rank"), about.axes),
      name: () => name("name").split(" m=")[0],
      size: () => (shape ? `m ${shape[1]}, n ${shape[2]}, k ${shape[3]}` : ""),
      rate: () => (perSecond > 0 && perSecond < Infinity ? rate(perSecond) : ""),
      share: () => (perSecond > 0 && perSecond < Infinity ? share(perSecond, events, about) : ""),
      posted: () => (isCall ? when(value("posted")) : ""),
      when: () => when(value("start")),
      took: () => time(value("end") - value("start")),
      waited: () => (wait > 0 ? `${time(wait)} for rank ${value("by")}` : ""),
      phase: () => name("phase"),
      operation: () => (isCall ? `${action}, number ${value("seq")}` : action),
      bytes: () => (isCall ? size(value("bytes")) : ""),
      arrivals: () => arrivals(events, index),
    };
    return (format[field] ?? (() => known(field)))();
  }

  // Return the known fields of an event, one per line.
  function lines(events, about, index) {
    const fields = BRIEF.map((field) => [field, text(events, about, index, field)]);
    return fields.filter(([, word]) => word).map((pair) => pair.join(": ")).join("\n");
  }

  // Return the indices of all calls of the same call instance, in order of arrival.
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

  // Show the details of an event in the panel.
  function show(panel, events, about, index) {
    const list = document.createElement("dl");
    for (const field of FIELDS) {
      const value = text(events, about, index, field);
      if (!value) continue;
      for (const [tag, word] of [["dt", field], ["dd", value]]) {
        const line = document.createElement(tag);
        line.textContent = word;
        list.append(line);
      }
    }
    panel.replaceChildren(list);
  }

  // Select ranks: "0-7 12" by index, "p=0 x=1" by coordinates, all of which must match.
  function chosen(query, ranks, axes) {
    const parts = query.split(/[\s,;]+/).filter(Boolean);
    const wanted = parts.filter((part) => part.includes("=")).map((part) => part.split("="));
    const spans = parts.filter((part) => !part.includes("=")).map((part) => part.split("-"));
    const within = (rank) => spans.some(([first, last = first]) => +first <= rank && rank <= +last);
    const placed = (rank) =>
      wanted.every(([axis, number]) => coordinates(rank, axes)[axis] === +number);
    return ranks.filter((rank) => placed(rank) && (!spans.length || within(rank)));
  }

  // Assign a row to each selected rank, with a lane per stream, and hide the other ranks.
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

  // Select all calls of the clicked instance. Bokeh also calls this function asynchronously for the
  // selection that the function itself makes.
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

  // Select a box and the other calls of its instance.
  function select(plot, index) {
    plot.tags[1].selected.indices = [index];
  }

  // Return the next or previous box on the same rank, or the closest in time on another rank.
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

  // Scroll to keep the selected box visible.
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

  // Keys: arrows move between boxes, + and - zoom, 0 shows the entire step.
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

  // Controls of a timeline. Their state is stored in the URL.
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
        const { indices } = events.selected; // several if they belong to one call instance
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

    // Apply the state in the URL to the figure.
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
      if (this.drawn !== step) return; // another step was selected in the meantime
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
      line.textContent = "Click on a box to see its details.";
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

  // Bokeh creates its documents after the page has loaded.
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
