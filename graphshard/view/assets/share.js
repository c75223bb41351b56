// The link to what is seen, and the pictures as a PNG. The page may load nothing, not even an image
// of its own, so what the SVGs show is painted on a canvas element by element.

function say(text) {
  document.getElementById("said").textContent = text;
  document.getElementById("readout").textContent = text;
}

async function copyLink() {
  keep();
  try {
    await navigator.clipboard.writeText(location.href);
    say("the link is copied: it shows what is seen now");
  } catch (error) {
    say(`the browser does not let a page copy (${error.name}): the address has the link`);
  }
}

const SCALE = 2; // pixels of the file for one of the page
const SOLID = /url\("?#hatch-(\w+)"?\)/;

// A hatch is painted as its base colour, that of waits (whose base is the paper) as its lines'.
function paint(text) {
  const hatch = text.match(SOLID);
  if (!hatch) return text === "none" ? null : text;
  const part = (name) => getComputedStyle(document.querySelector(`#hatch-${hatch[1]} .${name}`));
  return hatch[1] === "wait" ? part("line").stroke : part("base").fill;
}

function shapeOf(element) {
  const number = (name) => Number(element.getAttribute(name) ?? 0);
  const path = new Path2D(element.tagName === "path" ? element.getAttribute("d") ?? "" : undefined);
  if (element.tagName === "rect") path.rect(...["x", "y", "width", "height"].map(number));
  if (element.tagName === "circle") path.arc(number("cx"), number("cy"), number("r"), 0, 7);
  if (element.tagName === "line") {
    path.moveTo(number("x1"), number("y1"));
    path.lineTo(number("x2"), number("y2"));
  }
  return path;
}

function paintText(context, element, style) {
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.fill;
  const text = element.textContent;
  const wide = context.measureText(text).width;
  const by = { middle: wide / 2, end: wide }[style.textAnchor] ?? 0;
  context.fillText(text, Number(element.getAttribute("x")) - by, Number(element.getAttribute("y")));
}

function paintElement(context, element) {
  const style = getComputedStyle(element);
  if (style.display === "none" || style.visibility === "hidden") return;
  context.save();
  context.globalAlpha *= Number(style.opacity);
  if (element.tagName === "svg") {
    const [left, wide, high] = ["x", "width", "height"].map((name) => Number(element.getAttribute(name) ?? 0));
    context.translate(left, 0);
    context.beginPath();
    context.rect(0, 0, wide, high);
    context.clip();
  }
  if (element.tagName === "text") {
    paintText(context, element, style);
  } else if (element.tagName !== "svg" && element.tagName !== "g") {
    paintShape(context, shapeOf(element), style);
  }
  if (element.tagName !== "text") [...element.children].forEach((each) => paintElement(context, each));
  context.restore();
}

function paintShape(context, shape, style) {
  const fill = paint(style.fill);
  const stroke = paint(style.stroke);
  if (fill && Number(style.fillOpacity) > 0) {
    context.fillStyle = fill;
    context.fill(shape);
  }
  if (!stroke || Number(style.strokeOpacity) === 0) return;
  context.lineWidth = parseFloat(style.strokeWidth);
  context.strokeStyle = stroke;
  context.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(",").map(parseFloat));
  context.stroke(shape);
}

// Title, sentence, axis and pictures, one below the other.
function painted() {
  const parts = ["axis", ...Object.keys(frames).filter((view) => view !== "map")]
    .map((view) => document.getElementById(view));
  const heights = parts.map((svg) => svg.viewBox.baseVal.height + 18);
  const style = getComputedStyle(document.body);
  const top = 60;
  const canvas = document.createElement("canvas");
  canvas.width = SCALE * (width + 32);
  canvas.height = SCALE * (heights.reduce((sum, each) => sum + each, top) + 16);
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.translate(16, 0);
  context.fillStyle = style.color;
  context.font = `650 18px ${style.fontFamily}`;
  context.fillText(document.querySelector("h1").textContent.trim().replace(/\s+/g, " "), 0, 26, width);
  context.font = `14px ${style.fontFamily}`;
  context.fillText(document.querySelector("#answer strong")?.textContent ?? "", 0, 48, width);
  context.translate(0, top);
  parts.forEach((svg, i) => {
    [...svg.children].forEach((each) => paintElement(context, each));
    context.translate(0, heights[i]);
  });
  return canvas;
}

function savePicture() {
  painted().toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${document.title.replace(/[^\w.-]+/g, "-")}.png`;
    link.click();
    URL.revokeObjectURL(link.href);
    say(`saved ${link.download}`);
  });
}
