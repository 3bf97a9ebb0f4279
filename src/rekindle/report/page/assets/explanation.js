/* An explanation: the recorded step by kind, module, op and line, and what would make it less. */

const ROWS = 12;

function setUpExplanation(page) {
  byId("explained").hidden = false;
  const show = () => showExplanation(page);
  show();
  sharesCard(page.explanation, page);
  changesCard(page.explanation);
  savedCard(page.explanation);
  return show;
}

function showExplanation(page) {
  const found = page.explanation;
  const fit = found.fits === null ? "" : `, ${found.fits ? "which fits" : "which does not fit"} the ${formatBytes(page.device_bytes)} of the ${page.device}`;
  if (page.first === "explanation") byId("explained-title").replaceChildren(`${page.model} takes `, el("em", {}, formatBytes(found.peak)), fit);
  byId("explained-lead").textContent = `The step without a plan peaks at ${formatBytes(found.peak)} in ${found.peak_at}.`;
  const place = byId("explained-timeline");
  const chart = el("div", {});
  place.replaceChildren(el("h3", {}, "Memory over the plain step, by kind"), chart, timelineNumbers(found));
  areaChart(chart, timelineChart(found, page));
}

function timelineChart(found, page) {
  const isTimed = found.timeline.every((point) => point[1] !== null);
  const at = (point) => (isTimed ? point[1] : point[0]);
  const columns = found.timeline.map((point, i) => ({ begin: i ? at(found.timeline[i - 1]) : 0, end: at(point) }));
  const dense = found.timeline.map((point) => {
    const row = found.kinds.map(() => 0);
    for (const [kind, bytes] of point[5]) row[kind] = bytes;
    return row;
  });
  const layers = found.kinds.map((name, kind) => ({ name: `kind-${name}`, title: name, values: dense.map((row) => row[kind]) }));
  const totals = dense.map((row) => row.reduce((sum, value) => sum + value, 0));
  const peak = totals.indexOf(Math.max(...totals));
  const turn = found.timeline.findIndex((point) => found.names[point[2]] !== "forward");
  const span = columns.at(-1).end;
  const middle = turn < 0 ? span : columns[turn].begin;
  return {
    columns,
    layers: layers.filter((layer) => layer.values.some((value) => value > 0)),
    peak,
    most: totals[peak],
    span,
    label: `Memory over the plain step by kind: it peaks at ${formatBytes(totals[peak])} in ${found.peak_at}.`,
    cursorLabel: "Moment of the plain step",
    describe: (index) => pointText(found, found.timeline[index]),
    bands: [{ name: "forward", begin: 0, end: middle }, { name: "backward", begin: middle, end: span }],
    end: { at: span, name: isTimed ? formatSeconds(span) : `${span} events` },
    limits: deviceLimit(page, totals[peak]),
  };
}

function pointText(found, point) {
  const [phase, module, op] = [2, 3, 4].map((i) => found.names[point[i]]);
  return `the ${phase} of ${module || "the model"}: ${op}`;
}

function timelineNumbers(found) {
  return asTable("Memory over the plain step", ["moment", "total", ...found.kinds], () =>
    found.timeline.map((point) => {
      const row = found.kinds.map(() => 0);
      for (const [kind, bytes] of point[5]) row[kind] = bytes;
      return [pointText(found, point), formatBytes(row.reduce((sum, value) => sum + value, 0)), ...row.map(formatBytes)];
    }),
  );
}

function sharesCard(found, page) {
  const titles = { group: "module", line: "line of code", op: "op", kind: "kind", module: "every module" };
  const body = el("div", {});
  const fieldset = el("fieldset", { class: "tabs" }, el("legend", {}, "At the peak, by"));
  for (const [by, title] of Object.entries(titles)) {
    const input = el("input", { type: "radio", name: "share", id: `share-${by}`, value: by });
    input.checked = by === "group";
    input.addEventListener("change", () => body.replaceChildren(...shareRows(found, page, by, ROWS)));
    fieldset.append(input, el("label", { for: `share-${by}` }, title));
  }
  body.replaceChildren(...shareRows(found, page, "group", ROWS));
  byId("explained-shares").replaceChildren(el("h3", {}, "What holds the memory"), fieldset, body);
}

function shareRows(found, page, by, most) {
  const rows = found.shares[by].filter((row) => row[2] > 0).sort((a, b) => b[2] - a[2]);
  const highest = Math.max(...rows.map((row) => row[2]), 1);
  const shown = rows.slice(0, most).map(([name, about, bytes, , kinds]) => {
    const parts = kinds.map(([kind, each]) => {
      const part = el("span", { class: `part kind-${found.kinds[kind]}`, style: `width:${((100 * each) / highest).toFixed(2)}%` });
      part.title = `${found.kinds[kind]} ${formatBytes(each)}`;
      return part;
    });
    const title = found.names[name] || page.model;
    const text = found.names[about];
    return el("li", {}, el("div", { class: "share-name" }, el("code", {}, title), text ? el("span", { class: "soft" }, ` ${text}`) : null, el("b", {}, formatBytes(bytes))), el("div", { class: "share-bar", role: "img", "aria-label": kinds.map(([kind, each]) => `${found.kinds[kind]} ${formatBytes(each)}`).join(", ") }, parts));
  });
  const list = el("ol", { class: "shares" }, shown);
  if (rows.length <= most) return [list];
  const button = el("button", { type: "button", class: "more" }, `All ${rows.length}`);
  button.addEventListener("click", () => button.parentElement.replaceChildren(...shareRows(found, page, by, rows.length)));
  return [list, button];
}

function changeItem(found, change) {
  const effect = [`−${formatBytes(change.saved)}`, `peak ${formatBytes(change.peak)}`];
  if (change.seconds !== null) effect.splice(1, 0, `${formatChange(0, change.seconds / found.seconds - 1, (value) => formatShare(value))} time`);
  if (change.fits !== null && !found.fits) effect.push(change.fits ? "fits" : "does not fit");
  const width = `width:${Math.min(Math.max((100 * change.saved) / found.peak, 0), 100).toFixed(1)}%`;
  return el(
    "li",
    {},
    el("div", { class: "share-name" }, el("b", { class: "change-name" }, change.name)),
    el("div", { class: "effect" }, effect.join(" · ")),
    el("div", { class: "share-bar", "aria-hidden": "true" }, el("span", { class: "part saved", style: width })),
    change.note ? el("p", { class: "soft" }, change.note) : null,
    howItem(change),
  );
}

/* The code that makes a change, to be copied; or the words for it. */
function howItem(change) {
  if (!change.how) return null;
  if (!/[(=]/.test(change.how)) return el("p", { class: "soft" }, `By ${change.how}.`);
  return el("div", { class: "line" }, el("code", {}, change.how), copyButton(change.how, `Copy the code of: ${change.name}`));
}

function changesCard(found) {
  const parts = [el("h3", {}, "What would make it less"), el("ol", { class: "changes" }, found.changes.map((change) => changeItem(found, change)))];
  if (found.others.length) {
    parts.push(el("details", {}, el("summary", {}, `${found.others.length} that help less, or cost more`), el("ol", { class: "changes" }, found.others.map((change) => changeItem(found, change)))));
  }
  if (found.unhelpful.length) {
    parts.push(el("details", {}, el("summary", {}, `${found.unhelpful.length} that do not help`), el("ul", { class: "plain" }, found.unhelpful.map((change) => el("li", {}, el("b", {}, change.name), `: ${change.note}`)))));
  }
  byId("explained-changes").replaceChildren(...parts);
}

function savedCard(found) {
  const heads = ["bytes", "tensors", "made by", "in", "at", "needed by"];
  const rows = found.saved.slice(0, 25).map((saved) => [
    el("b", {}, formatBytes(saved.bytes)),
    el("code", {}, `${saved.modules.length > 1 ? `${saved.modules.length} × ` : ""}${saved.dtype}[${saved.shape.join(", ")}]`),
    saved.op,
    el("code", {}, namedPaths(saved.modules.map((index) => found.names[index] || "the model"))),
    saved.line ? el("span", {}, el("code", {}, saved.line), saved.source ? el("small", {}, saved.source) : null) : "",
    saved.needed_by.slice(0, 3).map((index) => found.names[index]).join(", ") + (saved.needed_by.length > 3 ? ", …" : ""),
  ]);
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": "The largest saved tensors" };
  byId("explained-saved").replaceChildren(el("h3", {}, "The largest saved tensors"), el("div", region, table("What autograd saves for the backward, the largest first", heads, rows)));
}
