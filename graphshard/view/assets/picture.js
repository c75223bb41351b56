// Draws the plan in #plan: three pictures on one axis. The other scripts share this scope.
//
// A mark is a list: kind, start, end, row within its lane, groups, label, title, then
// keys and values of its card; all texts are numbers of plan.words. plan.reached[i] is where step i
// is reached, plan.memory.layers[k].changes are pairs of step and bytes. All words come from Python.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const PRINT_WIDTH = 1060; // A4 landscape less the margins, in CSS pixels
const RIGHT = 14;
const UNITS = [[1e6, "s"], [1e3, "ms"], [1, "us"]];
const plan = JSON.parse(document.getElementById("plan").textContent);
const numSteps = plan.reached.length - 1;
const end = plan.reached[numSteps]; // of backward; the axis may go on

// Top to bottom, as the arrow keys walk them.
const rows = ["lanes", "residency", "memory"].flatMap((view) => plan.rows[view].map((row, index) => {
  const lane = { ...row, view, marks: [] };
  lane.marks = row.marks.map(([kind, start, stop, line, groups, label, title, ...card], i) => ({
    id: `${view}.${index}.${i}`, lane, start, end: stop, line, kind: plan.words[kind],
    groups: plan.words[groups].split(" ").filter(Boolean).map(Number),
    label: plan.words[label], title: plan.words[title],
    card: card.flatMap((n, at) => (at % 2 ? [] : [[plan.words[n], plan.words[card[at + 1]]]])),
  }));
  return lane;
}));
const rowsOf = (view) => rows.filter((row) => row.view === view);
const marks = new Map(rows.flatMap((row) => row.marks.map((mark) => [mark.id, mark])));
const markOf = new WeakMap(); // element -> mark
const stops = {}; // view -> the mark that Tab reaches
const frames = {}; // view -> its svg, and what moves in it
const unfolded = new Set(); // bunches of groups of which each has a row of its own

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

// An empty picture of `height` pixels; one unit of it is one CSS pixel, so text keeps its size.
function frame(view, height) {
  const svg = document.getElementById(view);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const plot = add(svg, "svg", { class: "plot", x: gutter, width: room(), height });
  add(plot, "rect", { class: "ground", width: room(), height });
  const made = { svg, plot, height, grid: add(plot, "path", { class: "rule" }) };
  made.band = add(plot, "rect", { class: "band", height, width: 0 });
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
    "aria-pressed": String(chosen.pinned === mark), tabindex: stops[mark.lane.view] === mark ? 0 : -1,
  };
  Object.assign(mark, { y, height, drawn: null, thin: null, crowded: false });
  mark.element = mark.kind === "peak"
    ? add(parent, "g", common) : add(parent, "rect", { ...common, y, height });
  if (height < 6) mark.element.classList.add("low");
  markOf.set(mark.element, mark);
}

// gap: between the lines of a lane, and between rows.
function drawRow(made, row, y, height, gap = 1) {
  const name = row.course && row.view === "lanes" ? `${row.course}: ${row.name}` : row.name;
  const group = add(made.plot, "g", name ? { role: "group", "aria-label": name } : {});
  row.cells = add(group, "g", { class: "cells", "aria-hidden": "true" });
  stops[row.view] ??= row.marks[0];
  for (const mark of row.marks) drawMark(group, mark, y + mark.line * height, height - gap);
}
