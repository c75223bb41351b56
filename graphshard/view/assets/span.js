// A span that the pointer has measured: how long it is, and what compute does meanwhile.

const span = { from: null, to: null };

function spanText() {
  const from = Math.min(span.from, span.to);
  const to = Math.max(span.from, span.to);
  if (!plan.timed) return `steps ${stepAt(from)} to ${stepAt(to)}`;
  const sums = {};
  for (const mark of rowsOf("lanes")[0].marks) {
    const time = Math.max(Math.min(mark.end, to) - Math.max(mark.start, from), 0);
    sums[mark.kind] = (sums[mark.kind] ?? 0) + time;
  }
  const works = ["forward", "backward"].reduce((sum, kind) => sum + (sums[kind] ?? 0), 0);
  const parts = [`compute ${timeText(works)}`, `waits ${timeText(sums.wait ?? 0)}`];
  return `${timeText(from)} to ${timeText(to)}: ${timeText(to - from)} (${parts.join(", ")}); z zooms to it`;
}

function measure(from, to) {
  Object.assign(span, { from: clamp(from, 0, plan.end), to: clamp(to, 0, plan.end) });
  placeBands();
  document.getElementById("readout").textContent = spanText();
}

function unmeasure() {
  Object.assign(span, { from: null, to: null });
  placeBands();
}

function placeBands() {
  const left = span.from === null ? 0 : x(Math.min(span.from, span.to));
  const wide = span.from === null ? 0 : x(Math.max(span.from, span.to)) - left;
  for (const { band } of Object.values(frames)) {
    band?.setAttribute("x", left.toFixed(1));
    band?.setAttribute("width", Math.max(wide, 0).toFixed(1));
  }
}

function zoomToSpan() {
  if (span.from === null) return;
  const [from, to] = [Math.min(span.from, span.to), Math.max(span.from, span.to)];
  unmeasure();
  show(from, to);
}
