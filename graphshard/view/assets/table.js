// The table of groups: sorted, searched, and alike groups below one line.

const body = document.querySelector("#groups tbody");
const lines = [...body.rows];
const members = lines.filter((line) => line.dataset.group !== undefined);
const heads = [...document.querySelectorAll("#groups thead th")];
const filter = document.getElementById("filter");

function keyOf(line, column) {
  const cell = line.cells[column];
  const key = cell.dataset.key ?? cell.textContent;
  return Number.isNaN(Number(key)) ? key : Number(key);
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// Numbers from large to small first, names from A on; a second click turns it round. What is below a
// line stays below it.
function sortBy(column) {
  const head = heads[column];
  const number = typeof keyOf(lines[0], column) === "number";
  const before = head.getAttribute("aria-sort");
  const first = number ? "descending" : "ascending";
  const other = number ? "ascending" : "descending";
  const now = before === first ? other : first;
  heads.forEach((each) => each.setAttribute("aria-sort", each === head ? now : "none"));
  const sign = now === "ascending" ? 1 : -1;
  const by = (a, b) => sign * compareKeys(keyOf(a, column), keyOf(b, column));
  const top = lines.filter((line) => line.dataset.of === undefined).toSorted(by);
  const sorted = top.flatMap((line) => [line, ...below(line).toSorted(by)]);
  body.replaceChildren(...sorted);
}

function below(line) {
  const { bunch } = line.dataset;
  return bunch === undefined ? [] : members.filter((each) => each.dataset.of === bunch);
}

// Shown are the lines that match, or without a search those that are not folded.
function showLines() {
  const text = filter.value.toLowerCase();
  const matches = (line) => line.cells[0].textContent.toLowerCase().includes(text);
  for (const line of lines) {
    const { bunch, of } = line.dataset;
    if (bunch !== undefined) line.hidden = Boolean(text);
    else line.hidden = text ? !matches(line) : of !== undefined && !unfolded.has(Number(of));
    line.querySelector("[aria-expanded]")?.setAttribute("aria-expanded", unfolded.has(Number(bunch)));
  }
  return members.filter((line) => !line.hidden).length;
}

function filtered() {
  const text = filter.value.toLowerCase();
  const found = showLines();
  for (const mark of marks.values()) mark.element?.classList.toggle("out", !isFound(mark, text));
  document.getElementById("found").textContent = text ? `${found} of ${members.length}` : "";
}

// By name of its groups: a range's own name says only its first and last.
function isFound(mark, text) {
  if (!text || mark.title.toLowerCase().includes(text)) return true;
  return mark.groups.some((group) => nameOf.get(group)?.includes(text));
}

const nameOf = new Map(members.map((line) => [
  Number(line.dataset.group), line.cells[0].textContent.toLowerCase(),
]));

// A group's name leads to its first bar.
function goTo(group) {
  const bars = rowsOf("residency").flatMap((row) => row.marks);
  const mark = bars.find((each) => each.groups.includes(group));
  if (!mark) return;
  release();
  focus(mark);
  pin(mark);
}

// The table and the residency picture unfold together.
function fold(bunch) {
  if (!unfolded.delete(bunch)) unfolded.add(bunch);
  redraw(width);
  keep();
  document.querySelector(`.toggle[data-bunch="${bunch}"]`)?.focus();
}
