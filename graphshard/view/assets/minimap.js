// The strip above the axis: the whole step in small, and which part of it the pictures show.

const MAP_HEIGHT = 16;
const map = document.getElementById("map");
let held = null; // while the pointer moves the window: what it holds

const mapX = (place) => (place / plan.end) * room();

function drawMap() {
  map.replaceChildren();
  map.setAttribute("viewBox", `0 0 ${width} ${MAP_HEIGHT + 4}`);
  const plot = add(map, "svg", { class: "strip", x: gutter, width: room(), height: MAP_HEIGHT + 4 });
  add(plot, "rect", { class: "ground", width: room(), height: MAP_HEIGHT });
  const found = binned(rowsOf("lanes")[0].marks);
  const floor = new Float64Array(numBins());
  for (const kind of Object.keys(found).sort((a, b) => rank(a) - rank(b))) {
    let d = "";
    found[kind].forEach((share, bin) => {
      if (!share) return;
      const bottom = MAP_HEIGHT * (1 - floor[bin]);
      d += `M${bin * BIN} ${bottom.toFixed(1)}h${BIN}V${(bottom - MAP_HEIGHT * share).toFixed(1)}h-${BIN}Z`;
      floor[bin] += share;
    });
    add(plot, "path", { class: kind, d });
  }
  frames.map = { window: add(plot, "rect", { class: "window", y: 0.5, height: MAP_HEIGHT - 1 }) };
}

const BIN = 4; // pixels
const numBins = () => Math.max(Math.ceil(room() / BIN), 1);

// Kind -> its share of each bin of the whole step.
function binned(all) {
  const found = {};
  for (const { kind, start, end: stop } of all) {
    const bins = (found[kind] ??= new Float64Array(numBins()));
    const [from, to] = [mapX(start) / BIN, mapX(stop) / BIN];
    for (let bin = Math.floor(from); bin < to && bin < bins.length; bin += 1) {
      bins[bin] += Math.min(bin + 1, to) - Math.max(bin, from);
    }
  }
  return found;
}

function placeMap() {
  const left = mapX(shown.from);
  frames.map.window.setAttribute("x", left.toFixed(1));
  frames.map.window.setAttribute("width", Math.max(mapX(shown.to) - left, 3).toFixed(1));
  map.classList.toggle("whole", shown.from === 0 && shown.to === plan.end);
}

// -- the pointer: inside the window it moves it, beside it draws a new one ------------------------

function mapPlace(event) {
  const box = map.getBoundingClientRect();
  const pixel = ((event.clientX - box.left) / box.width) * width - gutter;
  return clamp((pixel / room()) * plan.end, 0, plan.end);
}

map.addEventListener("pointerdown", (event) => {
  const at = mapPlace(event);
  const inside = at >= shown.from && at <= shown.to && shown.to - shown.from < plan.end;
  held = inside ? { by: at - shown.from } : { from: at };
  map.setPointerCapture(event.pointerId);
  event.preventDefault();
});
map.addEventListener("pointermove", (event) => {
  if (!held) return;
  const at = mapPlace(event);
  if (held.from === undefined) show(at - held.by, at - held.by + shown.to - shown.from);
  else if (Math.abs(mapX(at) - mapX(held.from)) > 3) show(Math.min(at, held.from), Math.max(at, held.from));
});
map.addEventListener("pointerup", () => { held = null; });
