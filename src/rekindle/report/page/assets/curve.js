/* The frontier: time against memory, one point for each plan. */

function drawCurve(place, page, state, choose) {
  const { plans } = page;
  const width = Math.max(place.clientWidth, 260);
  const height = width < 500 ? 240 : 300;
  const margin = { left: 52, right: 18, top: 22, bottom: 44 };
  const points = [...plans.stops, ...plans.others];
  const peaks = points.map((point) => point.peak);
  const times = points.map((point) => point.seconds);
  const plain = plainStop(plans).seconds;
  const low = Math.min(...peaks);
  const high = Math.max(...peaks);
  const pad = Math.max((high - low) * 0.08, high * 0.01);
  const slowest = Math.max(...times) / plain;
  const fastest = Math.min(...times) / plain;
  const room = Math.max((slowest - fastest) * 0.15, 0.02);
  const x = scale([low - pad, high + pad], [margin.left, width - margin.right]);
  const y = scale([fastest - room, slowest + room], [height - margin.bottom, margin.top]);

  const gridY = niceTicks(fastest - room, slowest + room, 5).map((ratio) => [
    draw("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y(ratio), y2: y(ratio) }),
    draw("text", { class: "tick", x: margin.left - 8, y: y(ratio) + 4, "text-anchor": "end" }, formatRatio(ratio)),
  ]);
  const unit = unitOf(high);
  const gridX = niceTicks((low - pad) / unit, (high + pad) / unit, Math.floor(width / 110)).map((value) =>
    draw("text", { class: "tick", x: x(value * unit), y: height - margin.bottom + 18, "text-anchor": "middle" }, formatBytes(value * unit)),
  );
  const titles = [
    draw("text", { class: "axis", x: width - margin.right, y: height - 8, "text-anchor": "end" }, "peak memory of a step"),
    draw("text", { class: "axis", x: 4, y: 12 }, "time of a step"),
  ];

  const device = page.device_bytes;
  const limit = [];
  if (device && device > low - pad && device < high + pad) {
    limit.push(
      draw("rect", { class: "beyond", x: x(device), y: margin.top, width: width - margin.right - x(device), height: height - margin.top - margin.bottom }),
      draw("line", { class: "limit", x1: x(device), x2: x(device), y1: margin.top, y2: height - margin.bottom }),
      draw("text", { class: "mark", x: x(device) - 6, y: height - margin.bottom - 8, "text-anchor": "end" }, `${page.device}: ${formatBytes(device)}`),
    );
  }

  const path = plans.stops.map((stop, i) => `${i ? "L" : "M"}${x(stop.peak)} ${y(stop.seconds / plain)}`).join("");
  const line = draw("path", { class: "frontier", d: path });
  const dots = plans.stops.map((stop, i) => {
    const dot = draw("circle", {
      class: i === state.at ? "dot now" : i === state.pinned ? "dot pinned" : "dot",
      cx: x(stop.peak),
      cy: y(stop.seconds / plain),
      r: i === state.at ? 8 : i === state.pinned ? 7 : 4.5,
    });
    const target = draw("circle", { class: "target", cx: x(stop.peak), cy: y(stop.seconds / plain), r: 16 });
    target.append(draw("title", {}, `${formatBytes(stop.peak)}, ${formatSeconds(stop.seconds)}`));
    target.addEventListener("click", () => choose(i));
    return [i, dot, target];
  });
  dots.sort((a, b) => (a[0] === state.at) - (b[0] === state.at));
  const others = plans.others.map((other) => [
    draw("path", { class: "other", d: diamond(x(other.peak), y(other.seconds / plain), 6) }),
    sideText(other.name, x(other.peak), y(other.seconds / plain), width, margin),
  ]);
  const now = plans.stops[state.at];
  const guide = draw("line", { class: "guide", x1: x(now.peak), x2: x(now.peak), y1: y(now.seconds / plain), y2: height - margin.bottom });
  const label = `Time against memory of ${plans.stops.length} plans: from ${formatBytes(plans.stops[0].peak)} in ${formatSeconds(plans.stops[0].seconds)} to ${formatBytes(high)} in ${formatSeconds(plain)}. Chosen: ${formatBytes(now.peak)} in ${formatSeconds(now.seconds)}.`;
  const svg = drawing(width, height, label, limit, gridY.flat(), gridX, titles, guide, line, others.flat(), dots.map((each) => each[1]), dots.map((each) => each[2]));
  place.replaceChildren(svg, curveNumbers(plans, plain));
}

/* The step without a plan; without it, the one that takes most memory. */
function plainStop(plans) {
  return plans.stops[plans.plain === null ? plans.stops.length - 1 : plans.plain];
}

function curveNumbers(plans, plain) {
  const heads = ["plan", "peak", "time of a step", "against no plan"];
  return asTable("Time against memory", heads, () =>
    [...plans.stops, ...plans.others].map((each) => [
      each.name || each.labels.join(", ") || `plan for ${formatBytes(each.budget)}`,
      formatBytes(each.peak),
      formatSeconds(each.seconds),
      formatRatio(each.seconds / plain),
    ]),
  );
}

function scale([from, to], [begin, end]) {
  const size = to - from || 1;
  return (value) => begin + ((value - from) / size) * (end - begin);
}

function unitOf(nbytes) {
  return [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10].find((unit) => nbytes >= unit) || 1;
}

/* Round numbers between two values. */
function niceTicks(from, to, count) {
  const rough = (to - from) / Math.max(count, 2);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  const ticks = [];
  for (let at = Math.ceil(from / step - 1e-9) * step; at <= to; at += step) ticks.push(Number(at.toPrecision(10)));
  return ticks;
}

function diamond(x, y, size) {
  return `M${x} ${y - size}l${size} ${size}l${-size} ${size}l${-size} ${-size}z`;
}

/* A text beside a point, on the side where there is room. */
function sideText(text, x, y, width, margin) {
  const isLeft = x > (width - margin.right) * 0.6;
  return draw("text", { class: "mark", x: x + (isLeft ? -11 : 11), y: y + 4, "text-anchor": isLeft ? "end" : "start" }, text);
}
