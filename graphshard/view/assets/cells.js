// What is narrower than a few pixels is drawn together: in each cell of a lane every kind is as high
// as its share of the time there. So nothing flickers between neighbouring pixels, and a lane that is
// busy half of the time looks half full. The marks themselves stay, unseen, to point at.

const NARROW = 12; // pixels; wider marks are drawn as they are
const PAUSE = 8; // a longer one ends a run of narrow marks
const LEAST_RUN = 3;
const MEAN = 4; // pixels of a mark of a run, below which the run is drawn in cells
const CELL = 14; // pixels, at least

// The runs of narrow marks of a row.
function* runsOf(row) {
  let run = [];
  for (const mark of row.marks) {
    const narrow = mark.right - mark.left < NARROW && mark.right > 0 && mark.left < room();
    if (run.length && (!narrow || mark.left - run.at(-1).right > PAUSE)) {
      yield run;
      run = [];
    }
    if (narrow) run.push(mark);
  }
  if (run.length) yield run;
}

function isCrowded(run) {
  const wide = run.reduce((sum, mark) => sum + x(mark.end) - x(mark.start), 0);
  return run.length >= LEAST_RUN && wide < MEAN * run.length;
}

// Marks of a run, in cells that begin with a mark; the pause after a mark belongs to its cell.
function cellsOf(run) {
  const cells = [];
  for (const mark of run) {
    if (!cells.length || x(mark.start) - x(cells.at(-1)[0].start) >= CELL) cells.push([]);
    cells.at(-1).push(mark);
  }
  const last = cells.at(-1);
  if (cells.length > 1 && x(last.at(-1).end) - x(last[0].start) < CELL) cells.at(-2).push(...cells.pop());
  return cells;
}

// From the bottom, where they can be compared: waits first, always in one order.
const ORDER = ["wait", "gather", "reduce", "all-reduce", "forward", "backward"];
const rank = (kind) => (ORDER.includes(kind) ? ORDER.indexOf(kind) : ORDER.length);

function shares(cell, span) {
  const found = new Map();
  for (const mark of cell) found.set(mark.kind, (found.get(mark.kind) ?? 0) + mark.end - mark.start);
  return [...found].sort(([a], [b]) => rank(a) - rank(b)).map(([kind, time]) => [kind, Math.min(time / span, 1)]);
}

function drawCells(row, run, paths) {
  const { y, height } = row.marks[0];
  const cells = cellsOf(run);
  cells.forEach((cell, i) => {
    const from = cell[0].start;
    const to = cells[i + 1]?.[0].start ?? cell.at(-1).end;
    const left = x(from).toFixed(1);
    const right = x(to).toFixed(1);
    let bottom = y + height;
    for (const [kind, share] of shares(cell, to - from)) {
      const top = bottom - share * height;
      paths[kind] = `${paths[kind] ?? ""}M${left} ${bottom.toFixed(1)}H${right}V${top.toFixed(1)}H${left}Z`;
      bottom = top;
    }
  });
}

function placeCells(view) {
  for (const row of rowsOf(view)) {
    if (row.depth > 1 || !row.cells) continue;
    const paths = {};
    const crowded = new Set();
    for (const run of runsOf(row)) {
      if (!isCrowded(run)) continue;
      run.forEach((mark) => crowded.add(mark));
      drawCells(row, run, paths);
    }
    row.cells.replaceChildren();
    for (const [kind, d] of Object.entries(paths)) add(row.cells, "path", { class: kind, d });
    for (const mark of row.marks) {
      if (Boolean(mark.crowded) === crowded.has(mark)) continue;
      mark.crowded = crowded.has(mark);
      mark.element.classList.toggle("crowded", mark.crowded);
    }
  }
}
