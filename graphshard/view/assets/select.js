// Which mark is looked at: focus, pin, card, keys, zoom; and the address that keeps it.

const card = document.getElementById("card");
const chosen = { pinned: null, focused: null };
let looked = null; // whose card is shown
let pending = 0;

// -- what is shown --------------------------------------------------------------------------------

function show(from, to) {
  const least = plan.end / 1e5;
  const span = clamp(to - from, least, plan.end);
  shown.from = clamp(from, 0, plan.end - span);
  shown.to = shown.from + span;
  if (pending) return;
  pending = requestAnimationFrame(settle);
}

// Draws at once what `show` has put off.
function settle() {
  cancelAnimationFrame(pending);
  pending = 0;
  place();
  if (looked) putCard(looked);
  keep();
}

// `at` stays where it is; factor < 1: closer.
function zoom(at, factor) {
  show(at - (at - shown.from) * factor, at + (shown.to - at) * factor);
}

const middle = () => (shown.from + shown.to) / 2;

function reveal(mark) {
  const span = shown.to - shown.from;
  if (mark.start >= shown.from && Math.min(mark.end, mark.start + span / 2) <= shown.to) return;
  show(mark.start - span / 3, mark.start + (span * 2) / 3);
  settle();
}

// -- the card -------------------------------------------------------------------------------------

function html(tag, text) {
  return Object.assign(document.createElement(tag), { textContent: text });
}

function putCard(mark) {
  const list = html("dl", "");
  for (const [key, value] of mark.card) {
    const prose = value.length > 40;
    list.append(html("dt", key), Object.assign(html("dd", value), { className: prose ? "prose" : "" }));
  }
  card.replaceChildren(html("strong", mark.title), list);
  card.hidden = false;
  card.classList.toggle("pinned", mark === chosen.pinned);
  const box = mark.element.getBoundingClientRect();
  const plot = frames[mark.lane.view].plot.firstChild.getBoundingClientRect();
  const seen = document.documentElement.clientWidth;
  const below = box.bottom + card.offsetHeight + 12 < window.innerHeight;
  const left = clamp(clamp(box.left, plot.left, plot.right), 8, Math.max(seen - card.offsetWidth - 8, 8));
  const y = below ? box.bottom + 8 : Math.max(box.top - card.offsetHeight - 8, 4);
  card.style.left = `${left + window.scrollX}px`;
  card.style.top = `${y + window.scrollY}px`;
}

// What is of the same groups belongs together.
function same(groups) {
  for (const mark of marks.values()) {
    mark.element?.classList.toggle("same", mark.groups.some((each) => groups.includes(each)));
  }
  for (const line of document.querySelectorAll("tr[data-group]")) {
    line.classList.toggle("same", groups.includes(Number(line.dataset.group)));
  }
}

function look(mark) {
  looked = mark;
  if (!mark) {
    card.hidden = true;
    same([]);
    return;
  }
  putCard(mark);
  same(mark.groups);
}

function press(mark, on) {
  mark.element.setAttribute("aria-pressed", String(on));
  chosen.pinned = on ? mark : null;
}

function release() {
  if (chosen.pinned) press(chosen.pinned, false);
  look(null);
  placeRings();
  keep();
}

function pin(mark) {
  const again = chosen.pinned === mark;
  release();
  if (!again) {
    press(mark, true);
    point(mark.start);
  }
  look(mark);
  placeRings();
  keep();
}

// -- the keyboard ---------------------------------------------------------------------------------

function focus(mark) {
  if (!mark) return;
  reveal(mark);
  mark.element.focus();
  mark.element.scrollIntoView({ block: "nearest" });
  look(mark);
}

function focused(mark) {
  chosen.focused = mark;
  if (mark) {
    stops[mark.lane.view]?.element.setAttribute("tabindex", -1);
    stops[mark.lane.view] = mark;
    mark.element.setAttribute("tabindex", 0);
    point(mark.start);
    look(mark);
  }
  placeRings();
}

function neighbour(mark, key) {
  const by = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1;
  const own = mark.lane.marks;
  if (key === "ArrowLeft" || key === "ArrowRight") return own[own.indexOf(mark) + by];
  const full = rows.filter((row) => row.marks.length);
  const next = full[full.indexOf(mark.lane) + by];
  const gap = (other) => Math.max(other.start - mark.start, mark.start - other.end, 0);
  return next?.marks.reduce((best, other) => (gap(other) <= gap(best) ? other : best));
}

function nextWait() {
  const waits = rowsOf("lanes")[0].marks.filter((mark) => mark.kind === "wait");
  const from = chosen.focused?.start ?? chosen.pinned?.start ?? -1;
  return waits.find((mark) => mark.start > from) ?? waits[0];
}

const KEYS = {
  e: () => focus(nextWait()),
  p: () => focus(rowsOf("memory")[0].marks[0]),
  0: () => show(0, plan.end),
  "+": () => zoom(chosen.focused?.start ?? middle(), 0.5),
  "-": () => zoom(chosen.focused?.start ?? middle(), 2),
  "/": () => document.getElementById("filter").focus(),
  Escape: () => release(),
};

// True if the key was ours.
function typed(key, mark) {
  if (mark && key.startsWith("Arrow")) focus(neighbour(mark, key));
  else if (mark && (key === "Enter" || key === " ")) pin(mark);
  else if (KEYS[key]) KEYS[key]();
  else return false;
  return true;
}

// -- the address ----------------------------------------------------------------------------------

const filter = document.getElementById("filter");

function keep() {
  const parts = new URLSearchParams();
  const whole = shown.from === 0 && shown.to === plan.end;
  if (!whole) parts.set("z", `${+shown.from.toPrecision(9)},${+shown.to.toPrecision(9)}`);
  if (chosen.pinned) parts.set("s", chosen.pinned.id);
  if (filter.value) parts.set("f", filter.value);
  const text = String(parts).replaceAll("%2C", ",");
  if (text !== location.hash.slice(1)) history.replaceState(null, "", `#${text}`);
}

function restore() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const [from, to] = (parts.get("z") ?? "").split(",").map(Number);
  const mark = marks.get(parts.get("s"));
  filter.value = parts.get("f") ?? "";
  filtered();
  show(...(to > from ? [from, to] : [0, plan.end]));
  settle();
  if (!mark) return;
  mark.element.scrollIntoView({ block: "center" });
  if (chosen.pinned !== mark) pin(mark);
}
