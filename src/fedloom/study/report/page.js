"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("report-data").textContent).figures;
  const drawn = new Set();

  // Exponential smoothing; gaps stay gaps.
  const smoothed = (values, weight) => {
    let last = null;
    return values.map((v) => {
      if (v === null) return null;
      last = last === null ? v : weight * last + (1 - weight) * v;
      return last;
    });
  };

  const draw = (element) => {
    const figure = figures[element.dataset.figure];
    const control = element.querySelector(".view");
    const slider = element.querySelector(".smooth");
    const view = figure.views[control ? Number(control.value) : 0];
    const weight = slider ? Number(slider.value) : 0;
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue("--ink").trim();
    const rule = css.getPropertyValue("--rule").trim();
    const traces = view.data.map((own, i) => {
      const trace = { ...(figure.shared[i] || {}), ...own };
      const kind = trace.meta.kind;
      if (kind === "mean") trace.line = { ...trace.line, color: ink };
      if (weight > 0 && ["client", "mean", "line"].includes(kind)) trace.y = smoothed(trace.y, weight);
      return trace;
    });
    const axis = { gridcolor: rule, zerolinecolor: rule, linecolor: rule, automargin: true };
    const layout = {
      ...figure.layout,
      xaxis: { ...axis, ...figure.layout.xaxis },
      yaxis: { ...axis, ...figure.layout.yaxis },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink },
      margin: { l: 50, r: 10, t: 10, b: 40 },
      legend: { orientation: "h", y: -0.2 },
      hoverlabel: { namelength: -1 },
    };
    const output = element.querySelector("output");
    if (output) output.textContent = view.name;
    const options = { responsive: true, displaylogo: false };
    Plotly.react(element.querySelector(".canvas"), traces, layout, options);
    drawn.add(element);
  };

  const all = [...document.querySelectorAll("figure.plot")];
  for (const element of all) {
    for (const input of element.querySelectorAll("select, input")) {
      input.addEventListener("input", () => draw(element));
    }
  }
  // A page may have many figures: each is drawn when it comes near.
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
      }
    },
    { rootMargin: "400px" },
  );
  all.forEach((element) => watcher.observe(element));
  window.addEventListener("beforeprint", () => all.forEach(draw));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    window.matchMedia(query).addEventListener("change", () => drawn.forEach(draw));
  }
})();
