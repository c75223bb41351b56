// What the pointer and the keyboard do. Starts everything.

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
  if (at !== null && event.button === 0) drag = { x: event.clientX, at, moved: false, pans: event.shiftKey };
}

function onMove(event) {
  if (drag && event.buttons) {
    const far = Math.abs(event.clientX - drag.x) > 4;
    if (far && !drag.moved) {
      drag.moved = true;
      document.body.classList.add(drag.pans ? "dragging" : "measuring");
    }
    if (drag.moved && !drag.pans) {
      measure(drag.at, drag.at + ((event.clientX - drag.x) / room()) * (shown.to - shown.from));
    } else if (drag.moved) {
      const at = shown.from + ((event.clientX - drag.x) / room()) * (shown.from - shown.to);
      drag.x = event.clientX;
      show(at, at + shown.to - shown.from);
    }
    return;
  }
  const at = placeOf(event);
  if (at !== null && span.from === null) point(clamp(at, 0, plan.end));
}

function onUp() {
  document.body.classList.remove("dragging", "measuring");
}

function onClick(event) {
  const moved = drag?.moved;
  drag = null;
  if (moved || event.target.closest?.("#card, #ruler, details, .term")) return;
  unmeasure();
  const button = event.target.closest?.("button, .toggle");
  if (button) pressed(button);
  else if (itemOf(event)) pin(itemOf(event));
  else if (chosen.pinned) release();
}

function pressed(button) {
  const { bunch, group } = button.closest("tr")?.dataset ?? button.dataset;
  if (button.dataset.mark) leadTo(button.dataset.mark);
  else if (bunch !== undefined) fold(Number(bunch));
  else if (group !== undefined) goTo(Number(group));
  else sortBy(heads.indexOf(button.closest("th")));
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
    const text = filter.value.toLowerCase();
    if (event.key === "Enter") focus([...marks.values()].find((mark) => isFound(mark, text)));
    if (event.key !== "Escape") return;
    filter.value = "";
    filtered();
    filter.blur();
    keep();
  } else if (event.target.closest?.(".toggle") && (event.key === "Enter" || event.key === " ")) {
    fold(Number(event.target.closest(".toggle").dataset.bunch));
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

function resized() {
  if (main.clientWidth !== width) redraw(main.clientWidth);
}

width = main.clientWidth;
restore();
new ResizeObserver(resized).observe(main);
window.addEventListener("hashchange", restore);
window.addEventListener("beforeprint", () => redraw(PRINT_WIDTH));
window.addEventListener("afterprint", () => redraw(main.clientWidth));
