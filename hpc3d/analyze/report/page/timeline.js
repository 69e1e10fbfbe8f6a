// The timeline of a report: what a box is, who took part in it, and which ranks are shown.
"use strict";

const hpc3d = (() => {
  const FIELDS = [
    "rank", "name", "when", "took", "waited", "phase", "stage", "layer", "microbatch", "chunk",
    "operation", "bytes", "posted", "arrivals",
  ];

  function time(ms) {
    return Math.abs(ms) < 1 ? `${(ms * 1e3).toFixed(1)} us` : `${ms.toFixed(3)} ms`;
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
    const say = {
      rank: () => place(value("rank"), about.axes),
      name: () => name("name"),
      posted: () => (name("axis") ? time(value("posted")) : ""),
      when: () => time(value("start")),
      took: () => time(value("end") - value("start")),
      waited: () => (wait > 0 ? `${time(wait)} for rank ${value("by")}` : ""),
      phase: () => name("phase"),
      operation: () =>
        name("axis") ? `${name("op")} ${along(name("axis"))}, number ${value("seq")}` : name("op"),
      bytes: () => (name("axis") ? value("bytes").toLocaleString("en") : ""),
      arrivals: () => arrivals(events, index),
    };
    return (say[field] ?? (() => known(field)))();
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

  // A box was clicked, or what belongs together with it was marked by this function.
  let marking = false;
  function clicked(plot) {
    const [about, events] = plot.tags;
    const [index] = events.selected.indices;
    if (marking || index === undefined) return;
    const panel = document.querySelector(`[data-model="${plot.name}"] .details`);
    marking = true;
    show(panel, events.data, about, index);
    events.selected.indices = meeting(events.data, index);
    marking = false;
  }

  // Let the field above a timeline choose its ranks.
  function connect(section, plot) {
    const [about, events, path] = plot.tags;
    const all = [...new Set(events.data.rank)].sort((a, b) => a - b);
    const field = section.querySelector("input");
    field.addEventListener("input", () => {
      const ranks = chosen(field.value, all, about.axes);
      field.classList.toggle("wrong", !ranks.length);
      if (ranks.length) arrange(plot, [events, path], ranks);
    });
  }

  // Bokeh makes its documents after the page has been read.
  function start() {
    const sections = [...document.querySelectorAll(".timeline")];
    const plots = sections.map((section) =>
      Bokeh.documents.map((each) => each.get_model_by_name(section.dataset.model)).find(Boolean));
    if (plots.every(Boolean)) sections.forEach((section, at) => connect(section, plots[at]));
    else setTimeout(start, 50);
  }

  return { text, clicked, start };
})();
