// Where everything lies at present: at each change of what is shown, and at each move of the cursor.

// -- marks and labels ------------------------------------------------------------------------------

// Out of sight still lies next to the picture: the keyboard reaches it.
function placeMark(mark) {
  const most = room() + 20;
  const left = clamp(x(mark.start), -20, most);
  const right = clamp(x(mark.end), -20, most);
  const key = `${left} ${right}`;
  if (mark.drawn === key) return;
  Object.assign(mark, { drawn: key, left, right: Math.max(right, left + 2) });
  if (mark.kind === "peak") {
    placePeak(mark);
    return;
  }
  const gap = right - left > NARROW ? 0.8 : 0;
  const thin = right - left < 6;
  if (mark.thin !== thin) mark.element.classList.toggle("thin", thin);
  mark.thin = thin;
  mark.element.setAttribute("x", left.toFixed(2));
  mark.element.setAttribute("width", Math.max(right - left - gap, 1.5).toFixed(2));
}

// Whole on the side where it fits; where it fits on neither, on two lines.
function placePeak(mark) {
  const { element, left, y } = mark;
  element.replaceChildren();
  add(element, "line", { class: "stem", x1: left, x2: left, y1: y + 6, y2: MEMORY_HEIGHT });
  add(element, "circle", { cx: left, cy: y + 6, r: 5 });
  if (!writePeak(mark, [mark.label])) writePeak(mark, mark.label.split(", "));
  Object.assign(mark, { left: left - 6, right: left + 6 });
}

// Whether the lines fit beside the mark. Of several, they are moved to where they do.
function writePeak({ element, left, y }, lines) {
  const texts = lines.map((line, i) => (
    add(element, "text", { y: y + 4 - 13 * (lines.length - 1 - i) }, line)));
  const wide = 12 + Math.max(...texts.map((text) => text.getComputedTextLength()));
  const end = left + wide > room() && left > room() / 2;
  const fits = wide <= (end ? left : room() - left);
  if (!fits && lines.length === 1) {
    texts[0].remove();
    return false;
  }
  for (const text of texts) {
    text.setAttribute("class", end ? "end" : "start");
    text.setAttribute("x", end ? Math.max(left, wide) - 10 : Math.min(left, room() - wide) + 10);
  }
  return true;
}

// Where a whole name does not fit, what tells it from its neighbours may: "13" of "layers.13".
function placeLabels(view) {
  const { labels } = frames[view];
  labels.replaceChildren();
  for (const mark of rowsOf(view).flatMap((row) => row.marks)) {
    const left = Math.max(mark.left, 0);
    const right = Math.min(mark.right, room());
    const texts = [mark.label, mark.label.split(/[.+ ]/).at(-1)];
    if (mark.crowded || right - left < NARROW) continue;
    const text = texts.find((each) => each && each.length * 6.8 + 8 < right - left);
    if (!text || mark.height < 12) continue;
    const at = { class: `label on-${mark.kind}`, x: (left + right) / 2, y: mark.y + mark.height / 2 + 4.5 };
    add(labels, "text", at, text);
  }
}

function placeRing(ring, mark) {
  const here = mark && mark.element.isConnected;
  ring.classList.toggle("on", Boolean(here));
  if (!here) return;
  const box = { x: mark.left - 2, y: mark.y - 2, width: mark.right - mark.left + 3, height: mark.height + 4 };
  for (const [key, value] of Object.entries(box)) ring.setAttribute(key, value);
}

function placeRings() {
  for (const [view, { rings }] of Object.entries(frames)) {
    if (!rings) continue;
    for (const [role, ring] of Object.entries(rings)) {
      placeRing(ring, chosen[role]?.lane.view === view ? chosen[role] : null);
    }
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
}

// Pairs of place and text.
function axisTicks() {
  const most = Math.max(room() / 96, 2);
  const span = shown.to - shown.from;
  if (!plan.timed) return stepTicks(most);
  const step = niceStep(span / most);
  const [scale, name] = UNITS.find(([size]) => shown.to >= 2 * size) ?? UNITS.at(-1);
  const digits = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9));
  const first = Math.ceil(shown.from / step);
  const count = Math.floor(shown.to / step) - first + 1;
  return Array.from({ length: count }, (_, i) => {
    const at = (first + i) * step;
    return [at, `${(at / scale).toFixed(digits)} ${name}`];
  });
}

function stepTicks(most) {
  const first = stepAt(shown.from);
  const every = niceStep(Math.max((stepAt(shown.to) - first + 1) / most, 1));
  const found = [];
  for (let step = Math.ceil(first / every) * every; step <= numSteps; step += every) {
    if (plan.reached[step] > shown.to) break;
    if (!found.length || x(plan.reached[step]) - x(found.at(-1)[0]) > 40) {
      found.push([plan.reached[step], String(step)]);
    }
  }
  return found;
}

function placeAxis(ticks) {
  const axis = document.getElementById("axis");
  axis.replaceChildren();
  const plot = add(axis, "svg", { x: gutter, width: room() + RIGHT, height: 34, class: "plot" });
  add(axis, "text", { class: "quiet", x: 0, y: 29 }, plan.timed ? "time" : "step, in order");
  const names = [["forward", 0, plan.divider ?? end], ["backward", plan.divider, end]];
  for (const [name, from, to] of names) {
    if (from === null) continue;
    const left = Math.max(x(from), 0);
    const right = Math.min(x(to), room());
    if (right - left > 64) add(plot, "text", { class: "quiet", x: left + 2, y: 12 }, name);
  }
  add(plot, "line", { class: "edge", x1: 0, x2: room(), y1: 17, y2: 17 });
  for (const [at, text] of ticks) {
    add(plot, "line", { class: "edge", x1: x(at), x2: x(at), y1: 17, y2: 21 });
    const side = x(at) < 20 ? "start" : x(at) > room() - 22 ? "end" : "middle";
    add(plot, "text", { class: side, x: x(at), y: 32 }, text);
  }
}

function place() {
  const ticks = axisTicks();
  placeAxis(ticks);
  for (const mark of marks.values()) if (mark.element) placeMark(mark);
  for (const made of Object.values(frames)) {
    made.grid?.setAttribute("d", ticks.map(([at]) => `M${x(at)} 0V${made.height}`).join(""));
    if (made.divider) moveLine(made.divider, plan.divider === null ? -9 : x(plan.divider));
  }
  placeMemory();
  placeCells("lanes");
  placeLabels("lanes");
  placeRings();
  placeBands();
  placeMap();
}

function moveLine(line, pixel) {
  line.setAttribute("x1", pixel);
  line.setAttribute("x2", pixel);
}

// -- the cursor -----------------------------------------------------------------------------------

function digitsOf(value) {
  return value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
}

function timeText(us) {
  if (us < 0.0005) return "0 us";
  const [scale, name] = UNITS.find(([size]) => us >= size * 0.9995) ?? UNITS.at(-1);
  return `${(us / scale).toFixed(digitsOf(us / scale))} ${name}`;
}

function bytesText(bytes) {
  const power = bytes < 1024 ? 0 : Math.min(Math.floor(Math.log2(bytes) / 10), 4);
  const digits = power ? 1 : 0;
  return `${(bytes / 1024 ** power).toFixed(digits)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// The last step that is reached at `place`.
function stepAt(place) {
  let low = 0;
  let high = Math.max(numSteps - 1, 0);
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (plan.reached[middle] <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

function sizeAt(layer, step) {
  return layer.changes.findLast(([from]) => from <= step)?.[1] ?? 0;
}

function point(at) {
  for (const { cursor } of Object.values(frames)) if (cursor) moveLine(cursor, x(at));
  const step = stepAt(at);
  const sizes = plan.memory.layers.map((layer) => [sizeAt(layer, step), layer.name]);
  const total = sizes.reduce((sum, [bytes]) => sum + bytes, 0);
  const largest = sizes.filter(([bytes]) => bytes).sort((a, b) => b[0] - a[0]).slice(0, 3);
  const where = plan.timed ? timeText(at) : `step ${step}`;
  const parts = largest.map(([bytes, name]) => `${name} ${bytesText(bytes)}`).join(", ");
  const over = plan.timed && at > end;
  document.getElementById("readout").textContent =
    over ? `${where}: backward is over` : `${where}: ${bytesText(total)}${parts && ` (${parts})`}`;
}
