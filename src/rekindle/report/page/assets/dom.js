/* Elements of the page and of its drawings. */

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/* A drawing with a text for those who do not see it. It is drawn in pixels of its own width. */
function drawing(width, height, label, ...children) {
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  return draw("svg", { ...size, role: "img", "aria-label": label }, ...children);
}

function table(caption, heads, rows) {
  const head = el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)));
  const body = rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell))));
  return el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body));
}

/* The numbers of a drawing, made when they are asked for. */
function asTable(caption, heads, makeRows) {
  const details = el("details", { class: "numbers" }, el("summary", { "aria-label": `${caption}, as a table` }, "As a table"));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) {
      details.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table(caption, heads, makeRows())));
    }
  });
  return details;
}

function swatch(name) {
  return el("span", { class: `swatch ${name}`, "aria-hidden": "true" });
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "offscreen", readonly: "" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function copyButton(text, label) {
  const button = el("button", { type: "button", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    await copyText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/* Keys that move along a row of `count` places; null for other keys. */
function movedBy(key, at, count) {
  const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10 };
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  if (!(key in steps)) return null;
  return Math.min(Math.max(at + steps[key], 0), count - 1);
}
