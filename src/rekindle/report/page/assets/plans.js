/* The slider over budgets, and the panels of the plans that it chooses. */

function setUpPlans(page) {
  const { plans } = page;
  const state = { at: plans.chosen, pinned: null };
  const slider = byId("budget");
  slider.max = String(plans.stops.length - 1);
  byId("stops").append(...plans.stops.map((_, i) => el("option", { value: String(i) })));
  byId("least").textContent = formatBytes(plans.stops[0].peak);
  byId("most").textContent = formatBytes(plans.stops.at(-1).peak);

  function choose(index) {
    state.at = index;
    showPlans(page, state, choose);
  }
  slider.addEventListener("input", () => choose(Number(slider.value)));
  byId("pin").addEventListener("click", () => {
    state.pinned = state.pinned === null ? state.at : null;
    choose(state.at);
  });
  byId("copy").addEventListener("click", async () => {
    await copyText(plans.stops[state.at].code);
    byId("said").textContent = "Copied.";
    setTimeout(() => (byId("said").textContent = ""), 2000);
  });
  byId("plans").hidden = false;
  if (plans.stops.length === 1) byId("plans").classList.add("single");
  showPlans(page, state, choose);
  return () => showPlans(page, state, choose);
}

function showPlans(page, state, choose) {
  const { plans } = page;
  const now = plans.stops[state.at];
  const slider = byId("budget");
  const plain = plainStop(plans);
  slider.value = String(state.at);
  slider.setAttribute("aria-valuetext", `${formatBytes(now.budget)}: ${formatSeconds(now.seconds)} a step, ${formatRatio(now.seconds / plain.seconds)} the time without a plan`);
  slider.style.setProperty("--share", `${(100 * state.at) / Math.max(plans.stops.length - 1, 1)}%`);
  byId("budget-value").textContent = formatBytes(now.budget);
  byId("code").textContent = now.code;
  byId("stop-note").textContent = stopNote(page, now);
  byId("pin").textContent = state.pinned === null ? "Pin to compare" : "Unpin";
  byId("pin").setAttribute("aria-pressed", String(state.pinned !== null));
  headline(page, now, plain);
  if (plans.stops.length > 1) drawCurve(byId("curve"), page, state, choose);
  const panels = state.pinned === null ? [[now, "The step by this plan"]] : [[plans.stops[state.pinned], `Pinned: ${formatBytes(plans.stops[state.pinned].budget)}`], [now, `Now: ${formatBytes(now.budget)}`]];
  const place = byId("panels");
  place.classList.toggle("two", panels.length === 2);
  while (place.children.length > panels.length) place.lastElementChild.remove();
  while (place.children.length < panels.length) place.append(el("article", { class: "card panel" }));
  panels.forEach(([stop, title], i) => fillPanel(place.children[i], page, stop, title, i ? panels[0][0] : null));
}

function stopNote(page, stop) {
  const notes = [...stop.labels];
  if (stop.measured) notes.push(`measured: ${formatBytes(stop.measured.peak)}, ${formatSeconds(stop.measured.seconds)}`);
  return notes.join(" · ");
}

function headline(page, now, plain) {
  const ratio = now.seconds / plain.seconds;
  const parts = [];
  if (page.device_bytes) parts.push(now.peak <= page.device_bytes ? `fits the ${page.device}` : `does not fit the ${page.device}`);
  if (now !== plain) parts.push(ratio < 1.005 ? "at no cost in time" : `for ${formatShare(ratio - 1)} more time`);
  const amount = el("em", {}, formatBytes(now.peak));
  byId("headline").replaceChildren(`${page.model} in `, amount, parts.length ? `: ${parts.join(", ")}` : "");
  const without = `Without a plan a step peaks at ${formatBytes(plain.peak)} and takes ${formatSeconds(plain.seconds)}.`;
  byId("lead").textContent = page.plans.stops.length > 1 ? `${without} Move the slider: every stop is a plan that rekindle solved for.` : "";
}

function fact(name, value, note) {
  return el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, note) : null));
}

function facts(page, stop, other) {
  const plain = plainStop(page.plans);
  const change = (name, format) => (other ? `${formatChange(other[name], stop[name], format)} against the pinned` : "\u00a0");
  const link = stop.step && stop.step.copies.length ? `the link is busy ${formatShare(stop.step.link_seconds / stop.step.seconds)} of the step` : null;
  return el(
    "dl",
    { class: "facts" },
    fact("predicted peak", formatBytes(stop.peak), change("peak", formatBytes)),
    fact("time of a step", formatSeconds(stop.seconds), change("seconds", formatSeconds)),
    page.plans.stops.length > 1 ? fact("against no plan", formatRatio(stop.seconds / plain.seconds), `${formatBytes(plain.peak - stop.peak)} less memory`) : null,
    fact("moved out and back", formatBytes(stop.moved), link),
    stop.heads.length ? fact("head and loss", stop.heads.join(", ")) : null,
  );
}

function fillPanel(panel, page, stop, title, other) {
  const chart = el("div", {});
  const link = el("div", { class: "link" });
  let steps = null;
  const strip = blockStrip(page, stop, (place) => {
    const moment = page.plans.moments.findIndex((each) => each.place === place && each.phase === "backward");
    if (steps) steps.show(moment);
  });
  const follow = (index) => {
    const { place } = page.plans.moments[index];
    if (place !== null) strip.show(place);
  };
  panel.replaceChildren(
    el("h2", {}, title),
    facts(page, stop, other),
    ...(stop.step ? [el("h3", {}, "Memory over the step"), chart, link, stepNumbers(page, stop)] : [el("p", { class: "notice" }, "This plan was loaded from a file, which has no profile. With plan.report(path, profile=rekindle.Profile.load(…)) the page has a slider over budgets and the memory of each moment.")]),
    el("h3", {}, "What each block does"),
    stripLegend(page, stop),
    ...strip.parts,
    ...strategyList(page, stop),
    stripNumbers(page, stop),
  );
  if (stop.step) {
    steps = areaChart(chart, stepChart(page, stop), follow);
    const row = linkRow(page, stop, Math.max(link.clientWidth, 260));
    if (row) link.replaceChildren(row);
  }
}
