// The pictures, each drawn once for a width.

const MEMORY_HEIGHT = 146;
const FOLDED_HEIGHT = 60; // of a bunch of alike groups, at most
const BUNDLE = 8; // pixels
const FOLDED_LINE = 2; // of one of them, at least: they may overlap

// -- lanes ----------------------------------------------------------------------------------------

const HEADING = 19;

function laneHeight(lane, isOwn) {
  const own = [26, 17, 13][lane.depth - 1] ?? (lane.depth < 20 ? 8 : 3);
  return isOwn ? own : lane.name.includes(" + ") ? 23 : 15;
}

function drawLanes() {
  const lanes = rowsOf("lanes");
  const heads = lanes.map((lane, i) => (lane.course && lane.course !== lanes[i - 1]?.course ? HEADING : 0));
  const heights = lanes.map((lane) => laneHeight(lane, lane.course === lanes[0].course));
  const total = lanes.reduce((sum, lane, i) => sum + heads[i] + lane.depth * heights[i] + 5, 2);
  const made = frame("lanes", total);
  let y = 1;
  lanes.forEach((lane, i) => {
    if (heads[i]) drawHeading(made, lane, y);
    y += heads[i];
    drawRow(made, lane, y, heights[i]);
    const names = lane.name.split(" + ");
    const middle = y + Math.max((lane.depth * heights[i]) / 2 + 4, 10);
    const lines = heights[i] * lane.depth < 20 ? [names.join(" + ")] : names;
    lines.forEach((name, line) => {
      add(made.svg, "text", { x: 0, y: middle + 13 * (line - (lines.length - 1) / 2) }, tail(name, gutter - 4));
    });
    y += lane.depth * heights[i] + 5;
    if (lane.course === lanes[0].course) made.own = y;
  });
  finish(made, "lanes");
  made.divider.setAttribute("y2", made.own); // the others begin backward elsewhere
}

function drawHeading(made, lane, y) {
  const text = add(made.svg, "text", { class: "course", x: 0, y: y + 14 });
  const name = Object.assign(document.createElementNS(SVG, "tspan"), { textContent: `${lane.course}: ` });
  name.setAttribute("class", "strong");
  text.append(name, lane.note);
}

// -- residency ------------------------------------------------------------------------------------

// Runs of rows: of one group, or of a bunch of alike ones.
function bunches() {
  const found = [];
  for (const row of rowsOf("residency")) {
    const last = found.at(-1);
    if (last && row.bunch >= 0 && last[0].bunch === row.bunch) last.push(row);
    else found.push([row]);
  }
  return found;
}

function drawResidency() {
  const parts = bunches();
  const count = parts.reduce((sum, part) => sum + (isFolded(part) ? 1 : part.length), 0);
  const single = count <= 24 ? 16 : count <= 60 ? 9 : 5;
  const heights = parts.map((part) => (isFolded(part) ? foldedHeight(part) : part.length * single));
  const heads = parts.map((part) => (part[0].bunch >= 0 && !isFolded(part) ? 16 : 0));
  const made = frame("residency", heights.reduce((sum, h, i) => sum + h + heads[i], 8));
  let y = 4;
  parts.forEach((part, i) => {
    if (part[0].bunch >= 0) drawToggle(made, part, y, heads[i] || heights[i]);
    y += heads[i];
    if (isFolded(part)) drawFolded(made, part, y, heights[i]);
    else drawUnfolded(made, part, y, single);
    y += heights[i];
  });
  finish(made, "residency");
}

const isFolded = (part) => part[0].bunch >= 0 && !unfolded.has(part[0].bunch);
function foldedHeight({ length }) {
  const each = Math.max(Math.round(FOLDED_HEIGHT / length), 1);
  return clamp(length * Math.min(each, 6), 30, FOLDED_HEIGHT + 6);
}

// Each group a line of whole pixels, so that its bars stay even.
function drawFolded(made, part, y, height) {
  const each = Math.max(Math.floor(height / part.length), FOLDED_LINE);
  part.forEach((row, i) => drawRow(made, row, y + Math.floor((i * height) / part.length), each, 0));
}

function drawUnfolded(made, part, y, height) {
  const every = Math.ceil(13 / height); // names stay 12px high: where rows are thin, not all of them
  part.forEach((row, i) => {
    drawRow(made, row, y + i * height, height);
    if (i % every) return;
    const at = { class: "fqn", x: 0, y: Math.max(y + i * height + height / 2 + 4, 12) };
    add(made.svg, "text", at, tail(row.name, gutter - 8));
  });
}

function drawToggle(made, part, y, height) {
  const open = !isFolded(part);
  const at = {
    class: "toggle", role: "button", tabindex: 0, "aria-expanded": open, "data-bunch": part[0].bunch,
    "aria-label": `${part[0].course}: ${open ? "show as one" : "show each"}`,
  };
  const button = add(made.svg, "g", at);
  add(button, "rect", { x: 0, y, width: gutter - 4, height: Math.max(height, 16) });
  const [first, ...rest] = part[0].course.split(" to ");
  const text = { class: "fqn", x: 2, y: y + Math.min(height / 2 + (open ? 4 : -3), 30) };
  add(button, "text", text, `${open ? "\u25be" : "\u25b8"} ${tail(first, gutter - 22)}`);
  if (rest.length && !open) {
    const last = rest.join(" to ");
    const ends = [`to ${last}`, `to ${last.split(".").at(-1)}`];
    const fitting = ends.find((each) => each.length * 7.4 < gutter - 18) ?? tail(ends[1], gutter - 18);
    add(button, "text", { ...text, x: 16, y: text.y + 14 }, fitting);
  }
}

// -- memory ---------------------------------------------------------------------------------------

// The picture's pieces from left to right, as [pixel, first step, last step]: steps that are narrower
// than BUNDLE pixels are one piece together. One that takes no time is no more than a spike.
function bundled(places) {
  const found = [];
  for (let i = 0; i + 1 < places.length; i += 1) {
    const [left, right] = [x(places[i]), x(places[i + 1])];
    if (right < 0 || left > room()) continue;
    const last = found.at(-1);
    if (right <= left && last) continue;
    if (last && right - last[0] <= BUNDLE) last[2] = i;
    else found.push([left, i, i]);
  }
  return found;
}

function outline(pieces, until, heightOf) {
  let path = "";
  let before = null;
  for (const [left, ...steps] of pieces) {
    const top = memoryY(heightOf(...steps));
    if (path === "") path = `M${Math.max(left, -2).toFixed(1)} ${top}`;
    else if (top !== before) path += `H${left.toFixed(1)}V${top}`;
    before = top;
  }
  return path && `${path}H${Math.min(until, room() + 2).toFixed(1)}`;
}

const mostOf = (sizes) => (first, last) => Math.max(...sizes.slice(first, last + 1));

// Over time.
function meanOf(sizes) {
  return (first, last) => {
    let [sum, time] = [0, 0];
    for (let i = first; i <= last; i += 1) {
      const us = plan.reached[i + 1] - plan.reached[i];
      sum += us * sizes[i];
      time += us;
    }
    return time ? sum / time : sizes[first];
  };
}

function columnOf(layer) {
  const column = new Float64Array(numSteps);
  layer.changes.forEach(([step, bytes], i) => {
    column.fill(bytes, step, layer.changes[i + 1]?.[0] ?? numSteps);
  });
  return column;
}

const topOf = () => plan.memory.ticks.at(-1)[0];
const memoryY = (bytes) => (MEMORY_HEIGHT - 1 - (bytes / topOf()) * (MEMORY_HEIGHT - 24)).toFixed(1);

// Bytes up to each layer, from the ground up, for each step.
function stacked() {
  const sum = new Float64Array(numSteps);
  return plan.memory.layers.map((layer) => {
    columnOf(layer).forEach((bytes, step) => { sum[step] += bytes; });
    return sum.slice();
  });
}

function drawMemory() {
  const { ticks, budget_bytes: budget, peak_bytes: peak } = plan.memory;
  const made = frame("memory", MEMORY_HEIGHT);
  const y = memoryY;
  for (const [bytes, text] of ticks) {
    add(made.plot, "line", { class: "rule", x1: 0, x2: room(), y1: y(bytes), y2: y(bytes) });
    const at = { class: "quiet end", x: gutter - 8, y: clamp(+y(bytes) + 4, 11, MEMORY_HEIGHT - 1) };
    add(made.svg, "text", at, text);
  }
  made.stack = add(made.plot, "g", {});
  if (budget !== null) {
    add(made.plot, "line", { class: "budget", x1: 0, x2: room(), y1: y(budget), y2: y(budget) });
  }
  rowsOf("memory").forEach((row) => drawRow(made, row, +y(peak) - 6, 13));
  finish(made, "memory");
}

const sums = stacked();

// Areas are means of their pieces, the line above them is the most: of a piece of one step the same.
function placeMemory() {
  const { stack } = frames.memory;
  const { layers, rival } = plan.memory;
  stack.replaceChildren();
  if (!sums.length) return;
  const pieces = bundled(plan.reached);
  const base = memoryY(0);
  for (let k = layers.length - 1; k >= 0; k -= 1) {
    const line = outline(pieces, x(end), meanOf(sums[k]));
    const from = line.slice(1).split(" ")[0];
    if (line) add(stack, "path", { class: `area ${layers[k].kind}`, d: `${line}V${base}H${from}Z` });
  }
  add(stack, "path", { class: "outline", d: outline(pieces, x(end), mostOf(sums.at(-1))) });
  if (!rival.length) return;
  const places = rival.map(([place]) => place);
  const most = mostOf(rival.map(([, bytes]) => bytes));
  const theirs = outline(bundled([...places, places.at(-1)]), x(places.at(-1)), most);
  add(stack, "path", { class: "rival", d: theirs });
}

function drawAll(pixels) {
  if (pixels < 1) return;
  width = pixels;
  gutter = clamp(Math.round(width * 0.22), 108, 180);
  document.getElementById("axis").setAttribute("viewBox", `0 0 ${width} 34`);
  drawLanes();
  drawResidency();
  drawMemory();
  drawMap();
  place();
}
