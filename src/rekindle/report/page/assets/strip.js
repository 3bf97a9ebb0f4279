/* The blocks of a plan as a strip: a column for each, with what it keeps, moves and recomputes. */

function movedClass(candidate) {
  return candidate.words.includes("spill") ? "spill" : "offload";
}

function blockParts(candidate) {
  return [
    { name: "keep", title: "kept", bytes: candidate.held },
    { name: movedClass(candidate), title: candidate.words.includes("spill") ? "spilled to disk" : "offloaded", bytes: candidate.moved },
    { name: "recompute", title: "recomputed", bytes: candidate.remade },
  ];
}

function blockTitle(page, stop, place) {
  const { plans } = page;
  const candidate = plans.candidates[stop.choice[place]];
  return `${plans.paths[place] || page.model}: ${candidate.text}`;
}

function blockDetails(page, stop, place) {
  const { plans } = page;
  const candidate = plans.candidates[stop.choice[place]];
  const parts = blockParts(candidate).filter((part) => part.bytes > 0).map((part) => `${formatBytes(part.bytes)} ${part.title}`);
  const time = `forward ${formatSeconds(candidate.forward)}, backward ${formatSeconds(candidate.backward)}`;
  const saved = savedInside(page.explanation, plans.paths[place], 2).map(formatSavedTensor);
  return [
    el("b", {}, plans.paths[place] || page.model),
    ` ${plans.names[plans.kinds[place]]}: ${candidate.text}. `,
    `${parts.join(", ")}; ${time}.`,
    saved.length ? ` Largest saved without a plan: ${saved.join("; ")}.` : "",
  ];
}

function blockStrip(page, stop, onPick = () => {}) {
  const { plans } = page;
  const chosen = stop.choice.map((index) => plans.candidates[index]);
  const most = Math.max(...plans.candidates.map((each) => each.held + each.moved + each.remade), 1);
  const details = el("p", { class: "where", "aria-live": "polite" });
  const buttons = chosen.map((candidate, place) => {
    const bars = blockParts(candidate).filter((part) => part.bytes > 0).map((part) =>
      el("span", { class: `bar ${part.name}`, style: `height:${((100 * part.bytes) / most).toFixed(2)}%` }),
    );
    const isTiled = candidate.words.includes("tile");
    const label = blockTitle(page, stop, place);
    return el("button", { type: "button", class: isTiled ? "block tile" : "block", tabindex: place ? "-1" : "0", "aria-label": label }, bars.reverse());
  });
  let at = 0;
  function show(place) {
    buttons[at].classList.remove("on");
    at = place;
    buttons[at].classList.add("on");
    details.replaceChildren(...blockDetails(page, stop, place));
  }
  buttons.forEach((button, place) => {
    const pick = () => {
      show(place);
      onPick(place);
    };
    button.addEventListener("pointerenter", pick);
    button.addEventListener("click", pick);
    button.addEventListener("focus", pick);
    button.addEventListener("keydown", (event) => {
      const next = movedBy(event.key, at, buttons.length);
      if (next === null) return;
      event.preventDefault();
      buttons[at].tabIndex = -1;
      buttons[next].tabIndex = 0;
      buttons[next].focus();
    });
  });
  const group = el("div", { class: "strip", role: "group", "aria-label": "Blocks, in the order of the forward" }, buttons);
  show(0);
  return { parts: [group, el("div", { class: "strip-ends", "aria-hidden": "true" }, el("span", {}, plans.paths[0]), el("span", {}, plans.paths.at(-1))), details], show };
}

function stripLegend(page, stop) {
  const { plans } = page;
  const sums = new Map();
  for (const index of stop.choice) {
    for (const part of blockParts(plans.candidates[index])) {
      const known = sums.get(part.name) || { title: part.title, bytes: 0 };
      sums.set(part.name, { title: part.title, bytes: known.bytes + part.bytes });
    }
  }
  const items = [...sums].filter(([, each]) => each.bytes > 0).map(([name, each]) =>
    el("li", { class: "key" }, swatch(name), each.title, el("b", {}, formatBytes(each.bytes))),
  );
  const tiled = stop.choice.filter((index) => plans.candidates[index].words.includes("tile")).length;
  if (tiled) items.push(el("li", { class: "key" }, swatch("tile"), "in tiles", el("b", {}, `${tiled} blocks`)));
  return el("ul", { class: "keys" }, items);
}

const MOST_STRATEGIES = 4;

/* The strategies of a plan, each with the number of blocks that have it. */
function strategyList(page, stop) {
  const { plans } = page;
  const groups = new Map();
  stop.choice.forEach((index, place) => {
    const text = `${plans.names[plans.kinds[place]]}: ${plans.candidates[index].text}`;
    groups.set(text, [...(groups.get(text) || []), plans.paths[place] || page.model]);
  });
  const items = [...groups].sort((a, b) => b[1].length - a[1].length).map(([text, paths]) =>
    el("li", {}, el("b", {}, `${paths.length} × `), text, el("span", { class: "soft" }, ` ${namedPaths(paths)}`)),
  );
  const shown = el("ul", { class: "strategies" }, items.slice(0, MOST_STRATEGIES));
  const others = items.slice(MOST_STRATEGIES);
  if (!others.length) return [shown];
  const summary = el("summary", {}, `${others.length} more strategies`);
  return [shown, el("details", {}, summary, el("ul", { class: "strategies" }, others))];
}

function namedPaths(paths) {
  return paths.length <= 4 ? paths.join(", ") : `${paths.slice(0, 3).join(", ")}, … ${paths.at(-1)}`;
}

function stripNumbers(page, stop) {
  const { plans } = page;
  const heads = ["block", "kind", "strategy", "kept", "moved", "recomputed", "forward", "backward"];
  return asTable("Strategy of each block", heads, () =>
    stop.choice.map((index, place) => {
      const each = plans.candidates[index];
      const bytes = [each.held, each.moved, each.remade].map(formatBytes);
      return [plans.paths[place] || page.model, plans.names[plans.kinds[place]], each.text, ...bytes, formatSeconds(each.forward), formatSeconds(each.backward)];
    }),
  );
}
