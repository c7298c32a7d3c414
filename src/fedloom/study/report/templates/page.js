"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("report-data").textContent).figures;
  const drawn = new Map(); // whether it was drawn for a narrow window
  const LONG = 36; // characters of a name in a legend or on an axis
  const PAPER = "#ffffff"; // where there is nothing
  const SHEET = 660; // pixels across a sheet of paper
  let printing = false;

  // Exponential smoothing; gaps stay gaps.
  const smoothed = (values, weight) => {
    let last = null;
    return values.map((v) => {
      if (v === null) return null;
      last = last === null ? v : weight * last + (1 - weight) * v;
      return last;
    });
  };

  // Plotly reads some HTML in texts, so names are escaped in the data, and here once they are cut.
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const cut = (name, most = LONG) => escaped(name.slice(0, most - 1)) + "…";

  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "12px sans-serif";

  // A legend below the plot takes as many lines as its names need, and the figure grows by them.
  const legend = (traces, width) => {
    const shown = traces.filter((t) => t.type === "scatter" && t.showlegend !== false && t.name);
    if (traces.length < 2 || !shown.length) return { lines: 0, entry: 0 };
    const entry = Math.min(width - 60, Math.max(...shown.map((t) => pen.measureText(t.name).width)) * 1.15 + 8);
    const across = Math.max(1, Math.floor((width - 20) / (entry + 45)));
    return { lines: Math.ceil(shown.length / across), entry };
  };

  const chosen = (element, figure) => {
    const select = element.querySelector("select.view");
    const slider = element.querySelector("input.view");
    const views = figure.views.filter((v) => !slider || !select || v.set === select.value);
    if (!slider) return views[select ? Number(select.value) : 0];
    slider.max = views.length - 1;
    return views[Math.min(Number(slider.value), views.length - 1)];
  };

  const paint = (element) => {
    const figure = figures[element.dataset.figure];
    const canvas = element.querySelector(".canvas");
    const slider = element.querySelector(".smooth");
    const view = chosen(element, figure);
    const weight = slider ? Number(slider.value) : 0;
    const css = getComputedStyle(document.documentElement);
    const [ink, soft, rule, paper] = ["--ink", "--soft", "--rule", "--paper"].map((n) => css.getPropertyValue(n).trim());
    const touch = window.matchMedia("(hover: none)").matches;
    // a phone has no room for long names, nor for colours beside a matrix
    const sheet = canvas.closest(".pair")?.children.length > 1 ? SHEET / 2 : SHEET;
    const across = printing ? sheet : canvas.clientWidth;
    const narrow = across < 480;
    const onTop = narrow ? { orientation: "h", thickness: 10, y: 1, yanchor: "bottom", ticklabelposition: "outside top" } : {};
    const columns = Object.fromEntries(Object.entries(view.columns || {}).map(([to, at]) => [to, figure.columns[at]]));
    const traces = view.data.map((own, i) => {
      const trace = { ...(figure.shared[i] || {}), ...own, ...columns };
      const kind = trace.meta.kind;
      if (trace.type === "scatter" && trace.meta.name && trace.meta.name.length > LONG) trace.name = cut(trace.meta.name);
      if (kind === "mean") trace.line = { ...trace.line, color: ink };
      if (kind === "matrix") trace.colorbar = { thickness: 14, outlinewidth: 0, ...onTop, ...trace.colorbar };
      // nothing looks like the paper, so that plotly writes numbers in a colour that stands out from it
      if (kind === "matrix") trace.colorscale = trace.colorscale.map(([at, color]) => [at, color === PAPER ? paper : color]);
      if (narrow && kind === "matrix" && trace.meta.columns.length > 8) delete trace.texttemplate;
      if (weight > 0 && ["client", "mean", "line"].includes(kind)) trace.y = smoothed(trace.y, weight);
      return trace;
    });
    const axis = { gridcolor: rule, zerolinecolor: rule, linecolor: rule, automargin: true };
    const names = traces.flatMap((t) => (t.type === "heatmap" ? [...t.meta.rows, ...t.meta.columns] : []));
    const most = narrow ? LONG / 2 : LONG;
    const alias = Object.fromEntries(names.filter((n) => n.length > most).map((n) => [escaped(n), cut(n, most)]));
    const below = legend(traces, across);
    const titled = (text) => (text ? { title: { text } } : {});
    // squares are as large as the smaller side lets them be, and have their colours beside them
    const square = Boolean(figure.layout.yaxis.scaleanchor);
    // long names below them need more height than a figure allows for
    const extra = Math.max(0, ...names.map((n) => pen.measureText(n.slice(0, most)).width)) - 100;
    const tall = figure.layout.height + Math.max(0, extra);
    const height = square ? Math.min(narrow ? Infinity : tall, across + 40) : figure.layout.height;
    const layout = {
      ...figure.layout,
      height: height + 20 * below.lines,
      ...(square ? { width: Math.min(across, height + 140) } : printing ? { width: sheet } : { autosize: true }),
      xaxis: { ...axis, labelalias: alias, ...figure.layout.xaxis, ...titled(view.across) },
      yaxis: { ...axis, labelalias: alias, ...figure.layout.yaxis, ...titled(view.axis) },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink },
      // the tools have the strip above the plot to themselves
      margin: { l: 50, r: 10, t: touch ? 10 : 34, b: 50 + 20 * below.lines },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
      showlegend: below.lines > 0,
      legend: {
        orientation: "h", x: 0, xanchor: "left", y: 0, yref: "container", yanchor: "bottom",
        entrywidth: below.entry, entrywidthmode: "pixels",
      },
      dragmode: touch ? false : "zoom",
      hoverlabel: { namelength: -1 },
    };
    const output = element.querySelector("output");
    if (output) output.textContent = view.name;
    const options = {
      responsive: true,
      displaylogo: false,
      displayModeBar: touch ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    };
    // plotly does not turn a bar of colours that is there
    if (drawn.has(element) && drawn.get(element) !== narrow) Plotly.purge(canvas);
    drawn.set(element, narrow);
    return Plotly.react(canvas, traces, layout, options);
  };

  // Plotly's script is large: it is unpacked when the first figure comes near.
  const unpacked = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };
  let ready = null;

  // Plotly may take a while; a figure that should change meanwhile is drawn once more when it is done.
  const busy = new Set();
  const again = new Set();
  const draw = (element) => {
    if (busy.has(element)) {
      again.add(element);
      return;
    }
    busy.add(element);
    ready ??= unpacked();
    // at once where it can be, so that what is printed is what was asked for
    (window.Plotly ? paint(element) : ready.then(() => paint(element))).finally(() => {
      busy.delete(element);
      if (again.delete(element)) draw(element);
    });
  };

  const redraw = () => [...drawn.keys()].forEach(draw);

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
  // a narrower window needs more lines of legend
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) redraw();
    width = window.innerWidth;
  });
  window.addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("details").forEach((part) => (part.open = true));
    all.filter((element) => !element.closest("[hidden]")).forEach(draw);
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    redraw();
  });
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
  // what the page is held against: all that depends on it is there for each base
  const hold = (base) => {
    document.querySelectorAll("select.base").forEach((select) => (select.value = base));
    document.querySelectorAll(".held").forEach((part) => (part.hidden = part.dataset.base !== base));
  };
  document.addEventListener("input", ({ target }) => target.matches("select.base") && hold(target.value));
  window.addEventListener("hashchange", opened);
  opened();
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    window.matchMedia(query).addEventListener("change", redraw);
  }
})();
