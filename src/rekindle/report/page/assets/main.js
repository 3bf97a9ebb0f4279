/* Reads the document that is in the page, and shows it. */

function setUpTheme() {
  const root = document.documentElement;
  const button = byId("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const name = () => button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  prefersDark.addEventListener("change", name);
  name();
}

/* The first section has the page's heading. */
function orderSections(page) {
  const [section, title] = page.first === "explanation" ? ["explained", "explained-title"] : ["plans", "headline"];
  byId("main").prepend(byId(section));
  const heading = byId(title);
  heading.replaceWith(el("h1", { id: title }, ...heading.childNodes));
}

function setUp() {
  const page = JSON.parse(byId("document").textContent);
  byId("about").textContent = [page.model, page.device, page.batch].filter(Boolean).join(" · ");
  setUpTheme();
  orderSections(page);
  const redraw = [];
  if (page.plans) redraw.push(setUpPlans(page));
  if (page.explanation) redraw.push(setUpExplanation(page));
  const main = byId("main");
  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth === width) return;
    width = main.clientWidth;
    redraw.forEach((each) => each());
  }).observe(main);
  document.documentElement.dataset.ready = "yes";
}

setUp();
