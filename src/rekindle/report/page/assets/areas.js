/* Memory over time as areas on top of each other: of plans (steps.js) and of explanations. */

/* The outline of a layer between two rows of heights; each column lasts from `begin` to `end`. */
function layerPath(columns, lower, upper, x, y) {
  const top = columns.map((c, i) => `${i ? "L" : "M"}${x(c.begin)} ${y(upper[i])}L${x(c.end)} ${y(upper[i])}`);
  const bottom = columns.map((c, i) => `L${x(c.end)} ${y(lower[i])}L${x(c.begin)} ${y(lower[i])}`).reverse();
  return `${top.join("")}${bottom.join("")}Z`;
}

/*
 * Draw layers of bytes over columns of time, with the highest column marked, and a cursor that
 * pointer and keys move. `chart` has: columns [{begin, end}], layers [{name, title, values}],
 * peak (index), most (bytes), span (seconds or events), label, describe(index), bands, limits,
 * end {at, name}.
 */
function drawAreas(chart, width, height) {
  const margin = { left: 62, right: 14, top: 30, bottom: 26 };
  const x = scale([0, chart.span], [margin.left, width - margin.right]);
  const y = scale([0, chart.most * 1.04], [height - margin.bottom, margin.top]);
  const heights = chart.columns.map(() => 0);
  const areas = chart.layers.map((layer) => {
    const lower = [...heights];
    layer.values.forEach((value, i) => (heights[i] += Math.max(value, 0)));
    return draw("path", { class: `area ${layer.name}`, d: layerPath(chart.columns, lower, heights, x, y) });
  });
  const grid = axisTicks(chart.most, 4, 2).map((value) => [
    draw("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y(value), y2: y(value) }),
    draw("text", { class: "tick", x: margin.left - 8, y: y(value) + 4, "text-anchor": "end" }, formatBytes(value)),
  ]);
  const bands = chart.bands.map((band) => [
    draw("line", { class: "band", x1: x(band.begin), x2: x(band.begin), y1: margin.top - 8, y2: height - margin.bottom }),
    x(band.end) - x(band.begin) > band.name.length * 6.2
      ? draw("text", { class: "tick", x: (x(band.begin) + x(band.end)) / 2, y: height - 8, "text-anchor": "middle" }, band.name)
      : null,
  ]);
  const limits = chart.limits.map((limit) => [
    draw("line", { class: "limit", x1: margin.left, x2: width - margin.right, y1: y(limit.bytes), y2: y(limit.bytes) }),
    draw("text", { class: "mark", x: width - margin.right, y: y(limit.bytes) - 5, "text-anchor": "end" }, limit.name),
  ]);
  const ends = x(chart.end.at);
  const end = draw("text", { class: "tick", x: Math.min(ends, width - margin.right), y: height - 8, "text-anchor": "end" }, chart.end.name);
  const top = chart.columns[chart.peak];
  const peakX = (x(top.begin) + x(top.end)) / 2;
  const peakText = `peak ${formatBytes(heights[chart.peak])}`;
  const isRight = peakX + peakText.length * 7.2 + 14 > width;
  const peak = [
    draw("circle", { class: "peak", cx: peakX, cy: y(heights[chart.peak]), r: 5 }),
    draw("text", { class: "peak-text", x: peakX + (isRight ? -10 : 10), y: y(heights[chart.peak]) - 8, "text-anchor": isRight ? "end" : "start" }, peakText),
  ];
  const cursor = draw("line", { class: "cursor", y1: margin.top - 8, y2: height - margin.bottom });
  const svg = drawing(width, height, chart.label, grid.flat(), areas, bands.flat(), end, limits.flat(), cursor, peak);
  return { svg, heights, x, cursor, margin };
}

/* A chart of areas with a readout that says what is at the cursor. */
function areaChart(place, chart, onMove = () => {}) {
  const width = Math.max(place.clientWidth, 260);
  const { svg, heights, x, cursor, margin } = drawAreas(chart, width, width < 500 ? 220 : 280);
  const legend = chart.layers.map((layer) => {
    const value = el("b", {});
    const item = el("li", { class: "key" }, swatch(layer.name), layer.title, value);
    return { item, value, layer };
  });
  const where = el("p", { class: "where" });
  const last = chart.columns.length - 1;
  const handle = el("input", { class: "unseen", type: "range", min: "0", max: String(last), "aria-label": chart.cursorLabel });
  let at = chart.peak;
  function show(index) {
    at = index;
    const column = chart.columns[at];
    const middle = (x(column.begin) + x(column.end)) / 2;
    cursor.setAttribute("x1", middle);
    cursor.setAttribute("x2", middle);
    const total = `${formatBytes(heights[at])}${at === chart.peak ? ", the peak" : ""}`;
    where.replaceChildren(el("b", {}, total), ` in ${chart.describe(at)}`);
    for (const { value, layer } of legend) value.textContent = formatBytes(Math.max(layer.values[at], 0));
    handle.value = String(at);
    handle.setAttribute("aria-valuetext", `${total} in ${chart.describe(at)}`);
    onMove(at);
  }
  function under(event) {
    const left = event.clientX - svg.getBoundingClientRect().left;
    const found = chart.columns.findIndex((column) => x(column.end) >= Math.max(left, margin.left) && column.end > column.begin);
    return found < 0 ? last : found;
  }
  svg.addEventListener("pointermove", (event) => show(under(event)));
  svg.addEventListener("pointerdown", (event) => show(under(event)));
  svg.addEventListener("pointerleave", () => show(chart.peak));
  handle.addEventListener("input", () => show(Number(handle.value)));
  place.replaceChildren(el("div", { class: "chart" }, svg, handle), el("ul", { class: "keys" }, legend.map((each) => each.item)), where);
  show(chart.peak);
  return { show };
}
