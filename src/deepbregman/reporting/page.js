"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = (value) => {
    try {
      if (value) localStorage.setItem("deepbregman-theme", value);
      return localStorage.getItem("deepbregman-theme");
    } catch {
      return null; // a browser that keeps nothing for pages from the file system
    }
  };
  const asked = new URLSearchParams(location.search).get("theme") || kept();
  if (asked === "light" || asked === "dark") root.dataset.theme = asked;
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    kept(root.dataset.theme);
  });

  const NARROW = 560;
  const LINE = 18; // height of a line of text
  // Names of rows stand beside them where there is room, and above them where there is none.
  const fitRows = (spec, width) => {
    spec.config.axis.labelLimit = 0.43 * width;
    const layers = (spec.layer || []).filter(({ encoding }) => encoding?.y?.type === "nominal");
    if (width >= NARROW || !layers.length) return;
    const scales = layers.map(({ encoding }) => encoding.y.scale);
    const count = scales.find((scale) => scale?.domain).domain.length; // headings are rows, too
    const step = spec.height / count + LINE;
    spec.height = step * count;
    for (const { encoding } of layers) {
      const { y, y2, yOffset } = encoding;
      y.scale = { ...y.scale, paddingInner: 0, paddingOuter: 0 };
      y.axis = {
        ...y.axis,
        labelAlign: "left",
        labelPadding: 0,
        labelOffset: LINE / 2 - step / 2,
        labelLimit: width,
        ticks: false,
        domain: false,
      };
      if (yOffset) yOffset.scale = { ...yOffset.scale, range: [LINE, step] };
      if (y2) y.bandPosition = LINE / step;
    }
  };

  const views = []; // {scope, view} of every chart that is drawn
  const chosen = {}; // scope -> the arm that is highlighted
  const draw = (figure) => {
    const plot = figure.querySelector(".plot");
    if (plot.dataset.drawn || figure.closest("details:not([open])")) return;
    plot.dataset.drawn = "yes";
    const spec = JSON.parse(figure.querySelector("script").textContent);
    fitRows(spec, plot.clientWidth);
    const options = {
      mode: "vega-lite",
      renderer: "svg",
      actions: false,
      ast: true, // expressions are interpreted, so that no policy has to allow eval
      defaultStyle: false,
      tooltip: { disableDefaultStyle: true },
    };
    const scope = figure.closest("[data-scope]").dataset.scope;
    vegaEmbed(plot, spec, options).then(({ view }) => {
      views.push({ scope, view });
      if (chosen[scope]) view.signal("highlight", chosen[scope]).runAsync();
    });
  };
  const drawAll = () => document.querySelectorAll("figure.chart").forEach(draw);
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", drawAll));
  drawAll();

  document.querySelectorAll(".legend button").forEach((button) => {
    button.addEventListener("click", () => {
      const { scope } = button.closest("[data-scope]").dataset;
      const arm = chosen[scope] === button.dataset.arm ? "" : button.dataset.arm;
      chosen[scope] = arm;
      document.querySelectorAll(`[data-scope="${scope}"] .legend button`).forEach((other) => {
        other.setAttribute("aria-pressed", String(other.dataset.arm === arm));
      });
      for (const entry of views) {
        if (entry.scope === scope) entry.view.signal("highlight", arm).runAsync();
      }
    });
  });
})();
