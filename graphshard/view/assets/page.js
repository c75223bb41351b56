// The table, and what the pointer does. Starts everything.

const body = document.querySelector("tbody");
const lines = [...body.rows];
const heads = [...document.querySelectorAll("thead th")];

// -- the table ------------------------------------------------------------------------------------

function keyOf(line, column) {
  const cell = line.cells[column];
  const key = cell.dataset.key ?? cell.textContent;
  return Number.isNaN(Number(key)) ? key : Number(key);
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// Numbers from large to small first, names from A on; a second click turns it round.
function sortBy(column) {
  const head = heads[column];
  const number = typeof keyOf(lines[0], column) === "number";
  const before = head.getAttribute("aria-sort");
  const first = number ? "descending" : "ascending";
  const other = number ? "ascending" : "descending";
  const now = before === first ? other : first;
  heads.forEach((each) => each.setAttribute("aria-sort", each === head ? now : "none"));
  const sign = now === "ascending" ? 1 : -1;
  const sorted = lines.toSorted((a, b) => sign * compareKeys(keyOf(a, column), keyOf(b, column)));
  body.replaceChildren(...sorted);
}

function filtered() {
  const text = filter.value.toLowerCase();
  let found = 0;
  for (const line of lines) {
    line.hidden = !line.cells[0].textContent.toLowerCase().includes(text);
    found += !line.hidden;
  }
  for (const mark of marks.values()) {
    mark.element?.classList.toggle("out", !mark.title.toLowerCase().includes(text));
  }
  document.getElementById("found").textContent = text ? `${found} of ${lines.length}` : "";
}

// A group's name leads to its first bar.
function goTo(group) {
  const bars = rowsOf("residency").flatMap((row) => row.marks);
  const mark = bars.find((each) => each.groups.includes(group));
  if (!mark) return;
  release();
  focus(mark);
  pin(mark);
}

// -- the pointer ----------------------------------------------------------------------------------

const itemOf = (event) => markOf.get(event.target.closest?.(".mark"));
let drag = null;

// Where on the axis, or null beside the pictures.
function placeOf(event) {
  const plot = event.target.closest?.("svg.plot");
  if (!plot) return null;
  const box = plot.firstChild.getBoundingClientRect(); // its ground: the plot's own has more
  return placeAt(((event.clientX - box.left) / box.width) * room());
}

function onDown(event) {
  drag = null;
  const at = placeOf(event);
  if (at !== null && event.button === 0) drag = { x: event.clientX, at, moved: false };
}

function onMove(event) {
  if (drag && event.buttons) {
    const far = Math.abs(event.clientX - drag.x) > 4;
    if (far && !drag.moved) {
      drag.moved = true;
      document.body.classList.add("dragging");
    }
    if (drag.moved) {
      const at = shown.from + ((event.clientX - drag.x) / room()) * (shown.from - shown.to);
      drag.x = event.clientX;
      show(at, at + shown.to - shown.from);
    }
    return;
  }
  const at = placeOf(event);
  if (at !== null) point(clamp(at, 0, plan.end));
}

function onUp() {
  document.body.classList.remove("dragging");
}

function onClick(event) {
  const moved = drag?.moved;
  drag = null;
  if (moved || event.target.closest?.("#card, #ruler, .filter, details")) return;
  const button = event.target.closest?.("button");
  if (button && body.contains(button)) goTo(Number(button.closest("tr").dataset.group));
  else if (button) sortBy(heads.indexOf(button.closest("th")));
  else if (itemOf(event)) pin(itemOf(event));
  else if (chosen.pinned) release();
}

// At the whole step, a turn that would show more scrolls the page.
function onWheel(event) {
  const at = placeOf(event);
  if (at === null || event.ctrlKey) return;
  const whole = shown.to - shown.from >= plan.end;
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (whole && (sideways || event.deltaY > 0)) return;
  event.preventDefault();
  if (sideways) {
    const by = (event.deltaX / room()) * (shown.to - shown.from);
    show(shown.from + by, shown.to + by);
  } else {
    zoom(at, 1.0018 ** clamp(event.deltaY, -240, 240));
  }
}

function onOver(event) {
  if (chosen.pinned || drag?.moved) return;
  const mark = itemOf(event) ?? chosen.focused;
  if (mark || !card.hidden) look(mark);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === filter) {
    if (event.key !== "Escape") return;
    filter.value = "";
    filtered();
    filter.blur();
    keep();
  } else if (!typed(event.key, markOf.get(document.activeElement))) {
    return;
  }
  event.preventDefault();
}

document.addEventListener("pointerdown", onDown);
document.addEventListener("pointermove", onMove);
document.addEventListener("pointerup", onUp);
document.addEventListener("pointerover", onOver);
document.addEventListener("click", onClick);
document.addEventListener("keydown", onKey);
document.addEventListener("wheel", onWheel, { passive: false });
document.addEventListener("focusin", (event) => focused(itemOf(event) ?? null));
document.addEventListener("focusout", () => {
  focused(null);
  look(chosen.pinned);
});
document.querySelectorAll("[data-key]").forEach((button) => {
  button.addEventListener("click", () => KEYS[button.dataset.key]());
});
filter.addEventListener("input", () => {
  filtered();
  keep();
});

// -- start ----------------------------------------------------------------------------------------

const main = document.querySelector("main");

function redraw(pixels) {
  const mark = chosen.focused;
  drawAll(pixels);
  mark?.element.focus();
  filtered();
  look(chosen.focused ?? chosen.pinned);
}

redraw(main.clientWidth);
restore();
new ResizeObserver(() => redraw(main.clientWidth)).observe(main);
window.addEventListener("hashchange", restore);
window.addEventListener("beforeprint", () => redraw(PRINT_WIDTH));
window.addEventListener("afterprint", () => redraw(main.clientWidth));
