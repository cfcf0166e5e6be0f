// Draws the figures in the colours of the moment, and again when those change: dark, light, paper.
(() => {
  "use strict";
  const holder = document.getElementById("figures");
  const specs = holder ? JSON.parse(holder.textContent) : [];
  const plots = [...document.querySelectorAll(".plot")];
  const config = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };

  // `var(--ink)` -> what the style sheet says it is now.
  const resolved = (value, style) => {
    if (typeof value === "string") {
      const name = /^var\((--[\w-]+)\)$/.exec(value);
      return name ? style.getPropertyValue(name[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => resolved(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, style)]));
    }
    return value;
  };

  const draw = (element) => {
    if (!element.clientWidth) return; // inside closed details: drawn when they open
    const spec = specs[element.dataset.figure][element.dataset.panel];
    const { data, layout } = resolved(spec, getComputedStyle(document.documentElement));
    Plotly.react(element, data, { ...layout, autosize: true }, config);
  };
  const drawAll = () => plots.forEach(draw);

  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", drawAll);

  const details = [...document.querySelectorAll("details")];
  details.forEach((element) =>
    element.addEventListener("toggle", () => element.querySelectorAll(".plot").forEach(draw)));

  // On paper nothing can be opened.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = details.filter((element) => !element.open);
    closed.forEach((element) => { element.open = true; });
    drawAll();
  });
  addEventListener("afterprint", () => {
    closed.forEach((element) => { element.open = false; });
    drawAll();
  });
})();
