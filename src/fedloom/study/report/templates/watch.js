"use strict";
(() => {
  const body = document.querySelector("tbody");
  if (!body) return void setTimeout(() => location.reload(), 5000);
  const heads = [...document.querySelectorAll("thead th")];
  const [filter, compare] = ["input[type=search]", "#compare"].map((found) => document.querySelector(found));
  const open = new Set(); // grids whose runs are shown
  let picked = [], column = heads.findIndex((head) => head.textContent === "changed"), sign = -1;

  const value = (row) => {
    const cell = row.cells[row.cells.length - heads.length + column] || row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  // what has no value comes last, whatever the order
  const before = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const texts = [x, y].some((one) => typeof one === "string");
    return sign * (texts ? String(x).localeCompare(String(y), undefined, { numeric: true }) : x - y);
  };
  const show = () => {
    const rows = [...body.rows].sort(before);
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => words.every((word) => row.textContent.toLowerCase().includes(word));
    for (const top of rows.filter((row) => !row.dataset.home)) {
      const below = rows.filter((row) => row.dataset.home === top.dataset.name);
      const wide = open.has(top.dataset.name) || (words.length > 0 && !fits(top));
      for (const row of below) row.hidden = !wide || !(fits(row) || fits(top));
      top.hidden = !fits(top) && below.every((row) => row.hidden);
      top.querySelector("button")?.setAttribute("aria-expanded", wide);
      body.append(top, ...below);
    }
    heads.forEach((head, i) => (head.ariaSort = i !== column ? null : sign > 0 ? "ascending" : "descending"));
    body.querySelectorAll("input").forEach((box) => (box.checked = picked.includes(box.closest("tr").dataset.name)));
    const [run, base] = picked;
    compare.textContent = base ? `Compare ${run} with ${base}` : run ? "Tick one more run" : "Tick two runs to compare them";
    if (base) compare.href = `/run?${new URLSearchParams({ at: run, base })}&token=${compare.dataset.token}`;
    else compare.removeAttribute("href");
  };
  heads.forEach((head, i) =>
    head.querySelector("button").addEventListener("click", () => {
      sign = i === column ? -sign : /↑|changed/.test(head.textContent) ? -1 : 1;
      column = i;
      show();
    }),
  );
  filter.addEventListener("input", show);
  body.addEventListener("click", ({ target }) => {
    const name = target.closest("tr")?.dataset.name;
    if (target.matches("button")) open.delete(name) || open.add(name);
    else if (target.matches("input")) {
      picked = picked.filter((one) => one !== name);
      if (target.checked) picked = [...picked, name].slice(-2);
    } else return;
    show();
  });
  // runs go on: what changed is fetched, and order, filter and ticks stay
  let last = body.innerHTML;
  const renew = async () => {
    const answer = await fetch(location.href).catch(() => null);
    const made = answer?.ok && new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = made && made.querySelector("tbody");
    if (fresh && made.querySelectorAll("thead th").length !== heads.length) location.reload();
    else if (fresh && fresh.innerHTML !== last) {
      const [name, tag] = [document.activeElement.closest("tbody tr")?.dataset.name, document.activeElement.tagName];
      last = fresh.innerHTML;
      body.replaceChildren(...fresh.rows);
      show();
      [...body.rows].find((row) => row.dataset.name === name)?.querySelector(tag)?.focus();
    }
    setTimeout(renew, 5000);
  };
  setTimeout(renew, 5000);
  show();
})();
