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

// On a narrow screen the card is a sheet at the bottom, and what it explains moves out from below it.
const isNarrow = () => document.documentElement.clientWidth <= 700;

function placeSheet(mark) {
  card.style.left = card.style.top = "";
  card.tabIndex = 0; // it may have to be scrolled
  const box = mark.element.getBoundingClientRect();
  const top = window.innerHeight - card.offsetHeight;
  const ceiling = document.getElementById("ruler").offsetHeight;
  document.body.style.paddingBottom = `${card.offsetHeight + 8}px`;
  if (box.bottom > top - 8 || box.top < ceiling) window.scrollBy(0, box.top - (ceiling + top) / 2);
}

function hideCard() {
  card.hidden = true;
  document.body.style.paddingBottom = "";
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
  if (isNarrow()) {
    placeSheet(mark);
    return;
  }
  card.removeAttribute("tabindex");
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
  for (const line of members) {
    line.classList.toggle("same", groups.includes(Number(line.dataset.group)));
  }
}

function look(mark) {
  looked = mark;
  if (!mark) {
    hideCard();
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

// The mark fills a third of the picture.
function zoomTo(mark) {
  const least = Math.max(mark.end - mark.start, plan.end / 200);
  show(mark.start - least, mark.start + 2 * least);
  settle();
}

function pan(share) {
  const by = share * (shown.to - shown.from);
  show(shown.from + by, shown.to + by);
}

// A pinned one is let go first, so that it is pinned again.
function leadTo(id) {
  const mark = marks.get(id);
  release();
  zoomTo(mark);
  mark.element.focus({ preventScroll: true });
  document.getElementById("h-lanes").scrollIntoView({ block: "start" });
  pin(mark);
}

const KEYS = {
  c: () => copyLink(),
  s: () => savePicture(),
  z: () => zoomToSpan(),
  "<": () => pan(-0.25),
  ">": () => pan(0.25),
  e: () => focus(nextWait()),
  p: () => focus(rowsOf("memory")[0].marks[0]),
  0: () => show(0, plan.end),
  "+": () => zoom(chosen.focused?.start ?? middle(), 0.5),
  "-": () => zoom(chosen.focused?.start ?? middle(), 2),
  "/": () => document.getElementById("filter").focus(),
  Escape: () => {
    unmeasure();
    release();
  },
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

function keep() {
  const parts = new URLSearchParams();
  const whole = shown.from === 0 && shown.to === plan.end;
  if (!whole) parts.set("z", `${+shown.from.toPrecision(9)},${+shown.to.toPrecision(9)}`);
  if (chosen.pinned) parts.set("s", chosen.pinned.id);
  if (filter.value) parts.set("f", filter.value);
  if (unfolded.size) parts.set("o", [...unfolded].join(","));
  const text = String(parts).replaceAll("%2C", ",");
  if (text !== location.hash.slice(1)) history.replaceState(null, "", `#${text}`);
}

function restore() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const [from, to] = (parts.get("z") ?? "").split(",").map(Number);
  const mark = marks.get(parts.get("s"));
  filter.value = parts.get("f") ?? "";
  unfolded.clear();
  for (const bunch of (parts.get("o") ?? "").split(",")) if (bunch) unfolded.add(Number(bunch));
  redraw(width);
  show(...(to > from ? [from, to] : [0, plan.end]));
  settle();
  if (!mark) return;
  mark.element.scrollIntoView({ block: "center" });
  if (chosen.pinned !== mark) pin(mark);
}
