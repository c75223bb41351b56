// Draws the plan in #plan: four pictures on one axis. The other scripts share this scope.
//
// A mark is a list: kind, start, end, row within its lane, groups, label, title, then
// keys and values of its card; all texts are numbers of plan.words. plan.reached[i] is where step i
// is reached, plan.memory.layers[k].changes are pairs of step and bytes. All words come from Python.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const PRINT_WIDTH = 1060; // A4 landscape less the margins, in CSS pixels
const RIGHT = 14;
const MEMORY_HEIGHT = 200;
const UNITS = [[1e6, "s"], [1e3, "ms"], [1, "us"]];
const plan = JSON.parse(document.getElementById("plan").textContent);
const numSteps = plan.reached.length - 1;

// Top to bottom, as the arrow keys walk them.
const rows = ["lanes", "residency", "memory", "compare"].flatMap((view) => plan.rows[view].map((row, index) => {
  const lane = { ...row, view, marks: [] };
  lane.marks = row.marks.map(([kind, start, end, line, groups, label, title, ...card], i) => ({
    id: `${view}.${index}.${i}`, lane, start, end, line, kind: plan.words[kind],
    groups: plan.words[groups].split(" ").filter(Boolean).map(Number),
    label: plan.words[label], title: plan.words[title],
    card: card.flatMap((n, at) => (at % 2 ? [] : [[plan.words[n], plan.words[card[at + 1]]]])),
  }));
  return lane;
}));
const marks = new Map(rows.flatMap((row) => row.marks.map((mark) => [mark.id, mark])));
const markOf = new WeakMap(); // element -> mark
const stops = {}; // view -> the mark that Tab reaches
const frames = {}; // view -> its svg, and what moves in it

const shown = { from: 0, to: plan.end };
let width = 0;
let gutter = 0;

const room = () => width - gutter - RIGHT;
const x = (place) => ((place - shown.from) / (shown.to - shown.from)) * room();
const placeAt = (pixel) => shown.from + (pixel / room()) * (shown.to - shown.from);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function add(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// The end of an FQN tells more than its beginning.
function tail(text, pixels) {
  const most = Math.floor(pixels / 7.4);
  return text.length <= most ? text : `...${text.slice(3 - most).replace(/^\.+/, "")}`;
}

// -- building, once per width ---------------------------------------------------------------------

// An empty picture of `height` pixels; one unit of it is one CSS pixel, so text keeps its size.
function frame(view, height) {
  const svg = document.getElementById(view);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const plot = add(svg, "svg", { class: "plot", x: gutter, width: room(), height });
  add(plot, "rect", { class: "ground", width: room(), height });
  const made = { svg, plot, height, grid: add(plot, "path", { class: "rule" }) };
  frames[view] = made;
  return made;
}

// What lies above the marks: labels, where backward begins, the cursor and the two rings.
function finish({ plot, height }, view) {
  const line = (name) => add(plot, "line", { class: name, y1: 0, y2: height, x1: -9, x2: -9 });
  Object.assign(frames[view], {
    labels: add(plot, "g", { class: "labels", "aria-hidden": "true" }),
    divider: line("divider"), cursor: line("cursor"),
    rings: { pinned: add(plot, "rect", { class: "ring pinned" }),
      focused: add(plot, "rect", { class: "ring" }) },
  });
}

function drawMark(parent, mark, y, height) {
  const said = mark.card.map(([key, value]) => `, ${key} ${value}`).join("");
  const common = {
    class: `mark ${mark.kind}`, role: "button", "aria-label": mark.title + said,
    "aria-pressed": "false", tabindex: stops[mark.lane.view] === mark ? 0 : -1,
  };
  Object.assign(mark, { y, height, drawn: null });
  mark.element = mark.kind === "peak"
    ? add(parent, "g", common) : add(parent, "rect", { ...common, y, height });
  markOf.set(mark.element, mark);
}

function drawRow(made, row, y, height) {
  const group = add(made.plot, "g", row.name ? { role: "group", "aria-label": row.name } : {});
  stops[row.view] ??= row.marks[0];
  for (const mark of row.marks) drawMark(group, mark, y + mark.line * height, height - 1);
}

const rowsOf = (view) => rows.filter((row) => row.view === view);

function drawLanes() {
  const lanes = rowsOf("lanes");
  const heights = lanes.map(({ depth }) => [26, 17, 13][depth - 1] ?? (depth < 20 ? 8 : 3));
  const total = lanes.reduce((sum, lane, i) => sum + lane.depth * heights[i] + 8, 4);
  const made = frame("lanes", total);
  let y = 4;
  lanes.forEach((lane, i) => {
    drawRow(made, lane, y, heights[i]);
    lane.name.split(" + ").forEach((name, line, all) => {
      const middle = y + Math.max((lane.depth * heights[i]) / 2 + 4, 12);
      add(made.svg, "text", { x: 0, y: middle + 13 * (line - (all.length - 1) / 2) }, name);
    });
    y += lane.depth * heights[i] + 8;
  });
  finish(made, "lanes");
}

function drawResidency() {
  const groups = rowsOf("residency");
  const height = groups.length <= 24 ? 16 : groups.length <= 60 ? 9 : 5;
  const every = Math.ceil(13 / height); // names stay 12px high: where rows are thin, not all of them
  const made = frame("residency", groups.length * height + 8);
  groups.forEach((group, i) => {
    const y = 4 + i * height;
    drawRow(made, group, y, height);
    if (i % every) return;
    const at = { class: "fqn", x: 0, y: Math.max(y + height / 2 + 4, 12) };
    add(made.svg, "text", at, tail(group.name, gutter - 8));
  });
  finish(made, "residency");
}

// Paths of the stacked layers in units of the axis; a zoom only changes their transform.
function stackPaths(y) {
  const columns = plan.memory.layers.map(columnOf);
  const lasting = lastingSteps();
  const heights = new Float64Array(numSteps);
  return columns.map((column) => {
    column.forEach((bytes, step) => { heights[step] += bytes; });
    let path = `M${unit(0)} ${y(0)}`;
    let before = null;
    for (const step of lasting) {
      if (heights[step] !== before) path += `H${unit(plan.reached[step])}V${y(heights[step])}`;
      before = heights[step];
    }
    return `${path}H${unit(plan.reached[numSteps])}`;
  });
}

// A step that takes no time is no more than a spike: only that of the peak says something.
function lastingSteps() {
  const steps = Array.from({ length: numSteps }, (_, step) => step);
  const { peak_step: peak } = plan.memory;
  return steps.filter((i) => i === peak || plan.reached[i + 1] > plan.reached[i]);
}

const unit = (place) => ((place / plan.end) * 1e4).toFixed(2);

function columnOf(layer) {
  const column = new Float64Array(numSteps);
  layer.changes.forEach(([step, bytes], i) => {
    column.fill(bytes, step, layer.changes[i + 1]?.[0] ?? numSteps);
  });
  return column;
}

function drawMemory() {
  const { layers, ticks, rival, budget_bytes: budget, peak_bytes: peak } = plan.memory;
  const made = frame("memory", MEMORY_HEIGHT);
  const top = ticks.at(-1)[0];
  const y = (bytes) => (MEMORY_HEIGHT - 1 - (bytes / top) * (MEMORY_HEIGHT - 24)).toFixed(1);
  for (const [bytes, text] of ticks) {
    add(made.plot, "line", { class: "rule", x1: 0, x2: room(), y1: y(bytes), y2: y(bytes) });
    const at = { class: "quiet end", x: gutter - 8, y: clamp(+y(bytes) + 4, 11, MEMORY_HEIGHT - 1) };
    add(made.svg, "text", at, text);
  }
  made.stack = add(made.plot, "g", {});
  const paths = stackPaths(y);
  for (let k = layers.length - 1; k >= 0; k -= 1) {
    const path = `${paths[k]}V${y(0)}Z`;
    add(made.stack, "path", { class: `area ${layers[k].kind}`, d: path });
  }
  if (paths.length) add(made.stack, "path", { class: "outline", d: paths.at(-1) });
  if (rival.length) {
    const path = rival.map(([place, bytes]) => `H${unit(place)}V${y(bytes)}`).join("");
    add(made.stack, "path", { class: "rival", d: `M0 ${y(0)}${path}` });
  }
  if (budget !== null) {
    add(made.plot, "line", { class: "budget", x1: 0, x2: room(), y1: y(budget), y2: y(budget) });
  }
  rowsOf("memory").forEach((row) => drawRow(made, row, +y(peak) - 6, 13));
  finish(made, "memory");
}

function drawCompare() {
  if (!document.getElementById("compare")) return;
  const strips = rowsOf("compare");
  const made = frame("compare", strips.length * 48);
  strips.forEach((strip, i) => {
    const text = add(made.svg, "text", { x: 0, y: i * 48 + 15 });
    text.append(`${strip.name}: `, Object.assign(document.createElementNS(SVG, "tspan"),
      { textContent: strip.note }));
    text.lastChild.setAttribute("class", "strong");
    drawRow(made, strip, i * 48 + 21, 23);
  });
  finish(made, "compare");
}

function drawAll(pixels) {
  if (pixels === width || pixels < 1) return;
  width = pixels;
  gutter = clamp(Math.round(width * 0.22), 96, 180);
  const axis = document.getElementById("axis");
  axis.setAttribute("viewBox", `0 0 ${width} 34`);
  drawLanes();
  drawResidency();
  drawMemory();
  drawCompare();
  place();
}
