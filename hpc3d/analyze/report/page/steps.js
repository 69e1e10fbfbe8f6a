// Decoder of the step data that hpc3d.analyze.report.packed_steps encodes.
"use strict";

hpc3d.steps = (() => {
  const ARRAYS = {
    i1: Int8Array, u1: Uint8Array, b1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array,
    u4: Uint32Array, f4: Float32Array, f8: Float64Array,
  };

  async function inflated(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // Unshuffle an array: the first byte of all values, then the second byte, and so on.
  async function array([type, text]) {
    const planes = await inflated(text);
    const kind = ARRAYS[type];
    const width = kind.BYTES_PER_ELEMENT;
    const count = planes.length / width;
    const bytes = new Uint8Array(planes.length);
    for (let byte = 0; byte < width; byte++)
      for (let at = 0; at < count; at++) bytes[at * width + byte] = planes[byte * count + at];
    return new kind(bytes.buffer);
  }

  async function columns(pool, places) {
    const keys = Object.keys(places);
    const arrays = await Promise.all(keys.map((key) => array(pool[places[key]])));
    return Object.fromEntries(keys.map((key, at) => [key, arrays[at]]));
  }

  const times = (ticks, tick) => Float32Array.from(ticks, (value) => value * tick);
  const sums = (values) => {
    let sum = 0;
    return Int32Array.from(values, (value) => (sum += value));
  };

  // Return the columns of the boxes of a step, with times in ms.
  function events({ after, took, wait, early, seq, ...others }, tick) {
    const begun = sums(after);
    const moved = (by, sign) => begun.map((value, at) => value + sign * by[at]);
    return {
      ...others,
      seq: sums(seq),
      start: times(begun, tick),
      until: times(moved(wait, 1), tick),
      end: times(moved(took, 1), tick),
      posted: times(moved(early, -1), tick),
      waited: Uint8Array.from(wait, (value) => value > 0),
    };
  }

  // Decode a step of {pool, steps}: its boxes, its critical path and the extent of each row.
  async function unpacked(packed, name) {
    const { tick, end, ranks, ...parts } = packed.steps[name];
    const [boxes, path, rest] = await Promise.all(
      [parts.columns, parts.path, parts.rest].map((each) => columns(packed.pool, each)));
    path.time = times(path.time, tick);
    for (const key of ["start", "end"]) rest[key] = times(rest[key], tick);
    return { end, ranks, events: events(boxes, tick), path, rest };
  }

  return { unpacked };
})();
