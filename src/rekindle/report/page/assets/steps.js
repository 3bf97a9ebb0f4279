/* The memory of a step by a plan: its moments, the highest by cause, and the link. */

const CAUSES = {
  static: "parameters, gradients, optimizer",
  outside: "made outside the blocks",
  held: "kept for the backward",
  cached: "casts of weights",
  moving: "on its way over the link",
  own: "in use by what runs",
};

function stepChart(page, stop) {
  const { plans } = page;
  const { step } = stop;
  const column = (index) => plans.columns[index];
  const begins = column(step.begin);
  const ends = column(step.end);
  const span = Math.max(...plans.stops.map((each) => each.step.seconds));
  const sliver = span / 400;
  const columns = begins.map((begin, i) => ({ begin, end: Math.max(ends[i], begin), isSliver: ends[i] <= begin }));
  for (const each of columns) {
    if (each.isSliver && each.begin > 0) each.end = each.begin + sliver;
  }
  const named = plans.causes.map((name, i) => ({ name, title: CAUSES[name], values: column(step.memory[i]) }));
  const layers = [{ name: "static", title: CAUSES.static, values: begins.map(() => plans.static) }, ...named];
  const phases = ["forward", "loss", "backward"].map((phase) => {
    const of = plans.moments.flatMap((moment, i) => (moment.phase === phase ? [i] : []));
    const name = phase === "loss" ? "head and loss" : phase;
    return { name, begin: begins[of[0]], end: ends[of.at(-1)] };
  });
  return {
    columns,
    layers: layers.filter((layer) => layer.values.some((value) => value > 0)),
    peak: step.peak_moment,
    most: Math.max(...plans.stops.map((each) => each.step.peak), 1),
    span: span + sliver,
    label: `Memory over a step by this plan: it peaks at ${formatBytes(step.peak)} in ${momentText(page, stop, step.peak_moment)}.`,
    cursorLabel: "Moment of the step",
    describe: (index) => momentText(page, stop, index),
    end: { at: step.seconds, name: formatSeconds(step.seconds) },
    bands: phases,
    limits: deviceLimit(page, Math.max(...plans.stops.map((each) => each.step.peak))),
  };
}

/* The line of the device's memory, where it is not far above what is drawn. */
function deviceLimit(page, most) {
  if (!page.device_bytes || page.device_bytes > 1.05 * most) return [];
  return [{ bytes: page.device_bytes, name: `${page.device}: ${formatBytes(page.device_bytes)}` }];
}

function momentText(page, stop, index) {
  const moment = page.plans.moments[index];
  if (moment.place === null || moment.phase !== "backward") return moment.at;
  const words = page.plans.candidates[stop.choice[moment.place]].words;
  return words.includes("recompute") ? moment.at.replace("the backward of", "the replay and backward of") : moment.at;
}

function linkRow(page, stop, width) {
  const { plans } = page;
  const { step } = stop;
  if (!step.copies.length) return null;
  const span = Math.max(...plans.stops.map((each) => each.step.seconds)) * 1.0025;
  const x = scale([0, span], [62, width - 14]);
  const bars = step.copies.map(([place, isOut, begin, end]) => {
    const bar = draw("rect", { class: "copy", x: x(begin), y: isOut ? 2 : 14, width: Math.max(x(end) - x(begin) - 0.5, 0.8), height: 9, rx: 1.5 });
    bar.append(draw("title", {}, `${plans.paths[place]}: ${isOut ? "out" : "back"}`));
    return bar;
  });
  const names = [draw("text", { class: "tick", x: 54, y: 10, "text-anchor": "end" }, "out"), draw("text", { class: "tick", x: 54, y: 23, "text-anchor": "end" }, "back")];
  const share = formatShare(step.link_seconds / step.seconds);
  return drawing(width, 26, `The link copies ${formatBytes(stop.moved)} out and back; it is busy for ${share} of the step.`, names, bars);
}

function stepNumbers(page, stop) {
  const { plans } = page;
  const heads = ["moment", "begins", "total", ...stepChart(page, stop).layers.map((layer) => layer.title)];
  return asTable("Memory at each moment of the step", heads, () => {
    const { layers } = stepChart(page, stop);
    return plans.moments.map((moment, i) => {
      const values = layers.map((layer) => layer.values[i]);
      const total = values.reduce((sum, value) => sum + value, 0);
      return [momentText(page, stop, i), formatSeconds(plans.columns[stop.step.begin][i]), formatBytes(total), ...values.map(formatBytes)];
    });
  });
}
