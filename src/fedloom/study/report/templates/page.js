"use strict";
(() => {
  const { figures, config } = JSON.parse(document.getElementById("report-data").textContent);
  const widths = new Map(); // figure -> the width for which it was drawn

  // Charts name the colours of the page, which are others by night and on paper.
  const inked = (made, css) => {
    if (typeof made === "string") return /^var\(--\w+\)$/.test(made) ? css.getPropertyValue(made.slice(4, -1)).trim() : made;
    if (Array.isArray(made)) return made.map((part) => inked(part, css));
    if (made === null || typeof made !== "object") return made;
    return Object.fromEntries(Object.entries(made).map(([key, of]) => [key, key === "values" ? of : inked(of, css)]));
  };

  const chosen = (element) => {
    const [group, view] = ["select.group", ".view"].map((found) => element.querySelector(found));
    const all = figures[element.dataset.figure];
    const views = all.filter((one) => !one.group || one.group === (group ? group.value : all[0].group));
    if (view && view.type === "range") view.max = views.length - 1;
    return views[view ? Math.min(Number(view.value), views.length - 1) : views.length - 1];
  };

  const draw = (element, across) => {
    const { name, chart } = chosen(element);
    const output = element.querySelector("output");
    if (output) output.textContent = name;
    widths.set(element, across);
    const width = Math.min(across, chart.usermeta?.widest ?? Infinity);
    const look = inked({ ...chart, config }, getComputedStyle(document.documentElement));
    for (const { encoding } of element.closest(".keyed") ? [look, ...look.layer] : []) {
      for (const channel of ["color", "strokeDash", "strokeWidth"]) if (encoding[channel]) encoding[channel].legend = null;
    }
    const legend = look.encoding?.color?.legend;
    if (legend) {
      legend.columns = Math.max(1, Math.floor((width * legend.columns) / 360));
      legend.labelLimit = Math.min(230, width / legend.columns - 60);
    }
    const autosize = { type: "fit-x", contains: "padding" };
    // the interpreter of expressions needs no right to evaluate code
    const renderer = chart.data && chart.data.values.length > 2000 ? "canvas" : "svg";
    const options = { ast: true, renderer, actions: false, logLevel: 1 };
    return vegaEmbed(element.querySelector(".canvas"), { ...look, width, autosize }, options);
  };
  const redraw = () => widths.forEach((across, element) => draw(element, across));

  // A figure is drawn when it is first seen, and again when there is more or less room for it.
  const watcher = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const element = target.closest("figure");
      const across = Math.round(contentRect.width);
      if (across && across !== widths.get(element)) draw(element, across);
    }
  });
  document.querySelectorAll("figure.plot .canvas").forEach((canvas) => watcher.observe(canvas));
  document.addEventListener("input", ({ target }) => {
    const element = target.closest("figure.plot");
    if (element) draw(element, widths.get(element));
  });
  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    window.matchMedia(query).addEventListener("change", redraw);
  }
  // what is folded is drawn once there is time, so that it can be printed
  const spare = () => {
    const [element] = [...document.querySelectorAll("figure.plot")].filter((one) => !widths.has(one));
    if (element) draw(element, 600).finally(() => setTimeout(spare, 50));
  };
  setTimeout(spare, 2000);

  // the contents say where one is
  const links = [...document.querySelector("nav").getElementsByTagName("a")];
  const parts = links.map((link) => document.getElementById(link.hash.slice(1)));
  const follow = () => {
    const at = parts.findLastIndex((part) => part.getBoundingClientRect().top < 80);
    links.forEach((link, i) => link.classList.toggle("here", i === at));
  };
  window.addEventListener("scroll", follow, { passive: true });
  // what a link of the contents leads to is opened
  const opened = () => {
    const part = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (part && part.querySelector("details")) part.querySelector("details").open = true;
    if (part) part.scrollIntoView();
  };
  // the baseline: every part that depends on it is there once per base
  const compare = (base) => {
    document.querySelectorAll("select.base").forEach((select) => (select.value = base));
    document.querySelectorAll(".compared").forEach((part) => (part.hidden = part.dataset.base !== base));
    named();
  };
  // what a baseline leaves empty is not named in the contents
  const named = () => links.forEach((link, i) => (link.parentNode.hidden = !parts[i].getClientRects().length));
  named();
  document.addEventListener("input", ({ target }) => target.matches("select.base") && compare(target.value));
  window.addEventListener("hashchange", opened);
  opened();
})();
