// Draws the plan in #plan into three SVGs that share one axis, and moves focus among the marks.
//
// plan.edges[i] to plan.edges[i + 1] is the place of step i, from 0 to 1. A mark is a segment, a
// bar or the peak: first and last step (inclusive), kind (a CSS class), row within its lane, card
// (what is shown), aria (what is said), group (an id or null), split (the step from which a bar
// is only kept, or null). All words come ready from html.py.
"use strict";

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PRINT_WIDTH = 1030; // A4 landscape less the margins, in CSS pixels
  const RIGHT = 14;
  const AXIS = 36;
  const plan = JSON.parse(document.getElementById("plan").textContent);
  const card = document.getElementById("card");
  const readout = document.getElementById("readout");
  const lastStep = plan.edges.length - 2;

  let width = 0;
  let gutter = 0;
  let rows = []; // rows of drawn marks, top to bottom: what the arrow keys walk
  let cursors = [];
  let items = new WeakMap(); // element -> { mark, element, row, stop }
  let pinned = null;

  function add(parent, tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  const x = (edge) => gutter + plan.edges[edge] * (width - gutter - RIGHT);

  // The end of an FQN tells more than its beginning.
  function tail(text, room) {
    const most = Math.floor(room / 7.4);
    return text.length <= most ? text : `...${text.slice(3 - most).replace(/^\.+/, "")}`;
  }

  // An empty picture of `height` pixels; one unit of it is one CSS pixel, so text keeps its size.
  function clear(id, height) {
    const svg = document.getElementById(id);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    return svg;
  }

  function vertical(svg, name, at, bottom) {
    return add(svg, "line", { class: name, x1: at, x2: at, y1: 0, y2: bottom });
  }

  // Step numbers at the bottom, the divider across everything, and the cursor.
  function axis(svg, bottom) {
    const most = (width - gutter) / 70;
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => lastStep / n < most);
    let free = 0;
    for (let step = 0; step <= lastStep; step += every ?? 5000) {
      if (x(step) < free || x(step) > width - 30) continue;
      add(svg, "line", { class: "rule", x1: x(step), x2: x(step), y1: bottom, y2: bottom + 5 });
      add(svg, "text", { class: "quiet middle", x: x(step), y: bottom + 17 }, String(step));
      free = x(step) + 44;
    }
    add(svg, "line", { class: "rule", x1: gutter, x2: width - RIGHT, y1: bottom, y2: bottom });
    const right = { class: "quiet end", x: width - RIGHT, y: bottom + 32 };
    add(svg, "text", right, "step, in program order (not time)");
    if (plan.divider !== null) vertical(svg, "divider", x(plan.divider), bottom);
    cursors.push(vertical(svg, "cursor", -9, bottom));
  }

  function rect(parent, kind, left, right, y, height) {
    const box = { x: left, y, width: Math.max(right - left - 0.8, 2), height };
    add(parent, "rect", { class: `fill ${kind}`, ...box });
    add(parent, "rect", { class: `hatch ${kind}`, ...box });
  }

  // One focusable mark. `stop` is shared by the marks of which one is reached with Tab.
  function draw(svg, mark, y, height, row, stop) {
    const left = x(mark.first);
    const right = x(mark.last + 1);
    const thin = Math.min(height, 2 * (right - left)) < 12 ? " thin" : "";
    const element = add(svg, "g", {
      class: `mark ${mark.kind}${thin}`, "data-group": mark.group ?? "",
      tabindex: stop.item ? -1 : 0, role: "button", "aria-pressed": "false", "aria-label": mark.aria,
    });
    const item = { mark, element, row, stop };
    stop.item ??= item;
    items.set(element, item);
    row.push(item);
    if (mark.kind === "peak") {
      const end = left > width - 160;
      add(element, "circle", { class: "fill peak", cx: left, cy: y, r: 4.5 });
      const at = { class: end ? "end" : "start", x: left + (end ? -9 : 9), y: y - 5 };
      add(element, "text", at, mark.label);
      return;
    }
    const middle = mark.split === null ? right : x(mark.split);
    if (middle > left) rect(element, mark.kind, left, middle, y, height);
    if (middle < right) rect(element, "kept", middle, right, y, height);
    if (height >= 14 && mark.label && mark.label.length * 7 + 6 < right - left) {
      add(element, "text", { x: (left + right) / 2, y: y + height / 2 + 4 }, mark.label);
    }
  }

  function drawLanes() {
    const heights = plan.lanes.map(({ depth }) => [24, 17, 13][depth - 1] ?? (depth < 20 ? 8 : 3));
    const total = plan.lanes.reduce((sum, lane, i) => sum + lane.depth * heights[i] + 9, 22);
    const svg = clear("lanes", total + AXIS);
    add(svg, "text", { class: "quiet", x: x(0), y: 12 }, "forward");
    if (plan.divider !== null) {
      add(svg, "text", { class: "quiet", x: x(plan.divider) + 6, y: 12 }, "backward");
    }
    let y = 20;
    plan.lanes.forEach((lane, i) => {
      const row = [];
      add(svg, "text", { x: 0, y: y + Math.max(heights[i] / 2 + 4, 12) }, lane.name);
      const stop = {};
      for (const mark of lane.marks) {
        draw(svg, mark, y + mark.row * heights[i], heights[i] - 1, row, stop);
      }
      y += lane.depth * heights[i] + 9;
      const line = { class: "rule", x1: 0, x2: width - RIGHT, y1: y - 5, y2: y - 5 };
      if (i < plan.lanes.length - 1) add(svg, "line", line);
      rows.push(row);
    });
    axis(svg, total);
  }

  function drawResidency() {
    const count = plan.residency.length;
    const height = count <= 40 ? 16 : 8;
    const every = height < 14 ? 2 : 1; // names stay 12px high: where rows are thin, every other one
    const svg = clear("residency", count * height + 8 + AXIS);
    const stop = {};
    plan.residency.forEach((group, i) => {
      const row = [];
      const y = 4 + i * height;
      if (i % every === 0) {
        const at = { class: "fqn", x: 0, y: y + height / 2 + 4 };
        add(svg, "text", at, tail(group.name, gutter - 8));
      }
      for (const mark of group.marks) draw(svg, mark, y + 1, height - 2, row, stop);
      rows.push(row);
    });
    axis(svg, count * height + 8);
  }

  function drawCurve() {
    const height = 150;
    const svg = clear("curve", height + AXIS);
    const top = plan.ticks.at(-1)[0];
    const y = (bytes) => height - (bytes / top) * (height - 26);
    for (const [bytes, text] of plan.ticks) {
      add(svg, "line", { class: "rule", x1: gutter, x2: width - RIGHT, y1: y(bytes), y2: y(bytes) });
      add(svg, "text", { class: "quiet end", x: gutter - 8, y: y(bytes) + 4 }, text);
    }
    const path = plan.bytes.map((bytes, i) => `V${y(bytes)}H${x(i + 1)}`).join("");
    add(svg, "path", { class: "area", d: `M${x(0)} ${height}${path}V${height}Z` });
    axis(svg, height);
    const row = [];
    if (plan.peak) draw(svg, plan.peak, y(plan.bytes[plan.peak.first]), 12, row, {});
    rows.push(row);
  }

  function drawAll(room) {
    if (room === width || room < 1) return;
    const focused = items.get(document.activeElement)?.mark;
    width = room;
    gutter = Math.min(190, Math.max(100, Math.round(width * 0.24)));
    rows = [];
    cursors = [];
    items = new WeakMap();
    release();
    drawLanes();
    drawResidency();
    drawCurve();
    if (focused) rows.flat().find((item) => item.mark === focused)?.element.focus();
  }

  function point(step, at) {
    for (const line of cursors) {
      line.setAttribute("x1", at);
      line.setAttribute("x2", at);
    }
    readout.textContent = plan.steps[step] ?? "\u00a0";
  }

  function same(group) {
    for (const element of document.querySelectorAll("[data-group]")) {
      element.classList.toggle("same", element.dataset.group === String(group));
    }
  }

  function show(item) {
    const { mark, element } = item;
    const html = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const list = html("dl", "");
    for (const [key, value] of mark.card) list.append(html("dt", key), html("dd", value));
    card.replaceChildren(html("strong", mark.title), list);
    card.hidden = false;
    const box = element.getBoundingClientRect();
    const below = box.bottom + card.offsetHeight + 12 < window.innerHeight;
    const left = Math.min(box.left, document.documentElement.clientWidth - card.offsetWidth - 8);
    const y = below ? box.bottom + 8 : Math.max(box.top - card.offsetHeight - 8, 4);
    card.style.left = `${Math.max(left, 8) + window.scrollX}px`;
    card.style.top = `${y + window.scrollY}px`;
    same(mark.group);
  }

  function press(item, on) {
    item.element.classList.toggle("pinned", on);
    item.element.setAttribute("aria-pressed", String(on));
    card.classList.toggle("pinned", on);
    pinned = on ? item : null;
  }

  function release() {
    if (pinned) press(pinned, false);
    card.hidden = true;
    same(null);
  }

  function pin(item) {
    const again = pinned === item;
    release();
    show(item);
    press(item, !again);
  }

  function focus(item) {
    item?.element.focus();
    item?.element.scrollIntoView({ block: "nearest" });
  }

  function move(item, key) {
    const by = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1;
    if (key === "ArrowLeft" || key === "ArrowRight") return item.row[item.row.indexOf(item) + by];
    const full = rows.filter((row) => row.length);
    const next = full[full.indexOf(item.row) + by];
    const gap = (other) => Math.abs(other.mark.first - item.mark.first);
    return next?.reduce((best, other) => (gap(other) < gap(best) ? other : best));
  }

  const itemOf = (event) => items.get(event.target.closest?.(".mark"));

  document.addEventListener("focusin", (event) => {
    const item = itemOf(event);
    if (!item) return;
    item.stop.item.element.setAttribute("tabindex", -1);
    item.stop.item = item;
    item.element.setAttribute("tabindex", 0);
    point(item.mark.first, x(item.mark.first));
    if (!pinned) show(item);
  });
  document.addEventListener("focusout", () => pinned || release());
  document.addEventListener("pointerover", (event) => {
    if (pinned) return;
    const item = itemOf(event) ?? items.get(document.activeElement);
    if (item) show(item);
    else release();
  });
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest?.("svg");
    if (!svg) return;
    const at = event.clientX - svg.getBoundingClientRect().left;
    const step = plan.edges.findLastIndex((_, i) => x(i) <= at);
    if (at >= gutter && step <= lastStep) point(step, at);
  });
  document.addEventListener("click", (event) => {
    itemOf(event) ? pin(itemOf(event)) : release();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const item = items.get(document.activeElement);
    if (event.key === "Escape") release();
    else if (event.key === "p" && plan.peak) focus(rows.at(-1)[0]);
    else if (item && event.key.startsWith("Arrow")) focus(move(item, event.key));
    else if (item && (event.key === "Enter" || event.key === " ")) pin(item);
    else return;
    event.preventDefault();
  });

  const main = document.querySelector("main");
  new ResizeObserver(() => drawAll(main.clientWidth)).observe(main);
  window.addEventListener("beforeprint", () => drawAll(PRINT_WIDTH));
  window.addEventListener("afterprint", () => drawAll(main.clientWidth));
  drawAll(main.clientWidth);
})();
