"use strict";
(() => {
  // a picture opens in a box of its own, over another one of the same example and task: a slider wipes between them
  const box = document.getElementById("enlarged");
  const enlarge = (button) => {
    const cell = button.closest("th, td");
    const table = cell.closest("table");
    const titles = [...table.querySelectorAll("thead th[scope=col]")];
    const column = cell.matches("td") ? cell.cellIndex : 1;
    const choices = [{ name: "input", image: table.querySelector("tr[data-row] th img") }];
    for (const row of table.querySelectorAll("tr[data-row]")) {
      const [answer, off] = row.cells[column]?.querySelectorAll("img") ?? [];
      if (answer) choices.push({ name: row.dataset.row, image: answer });
      if (off) choices.push({ name: `${row.dataset.row}, wrong`, image: off });
    }
    const there = choices.filter((one) => one.image);
    const clicked = there.findIndex((one) => one.image === button.querySelector("img"));
    const [left, right, slide] = ["select.left", "select.right", "input"].map((found) => box.querySelector(found));
    for (const select of [left, right]) select.replaceChildren(...there.map((one, i) => new Option(one.name, i)));
    left.value = clicked === 1 || there.length < 2 ? 0 : 1;
    right.value = Math.max(0, clicked);
    const title = table.closest("figure").querySelector("figcaption").textContent;
    box.querySelector("b").textContent = `${titles[column - 1]?.textContent ?? ""}, ${title}`;
    const show = () => {
      for (const [select, part] of [[left, ".under"], [right, ".over"]]) {
        const { image } = there[Number(select.value)];
        Object.assign(box.querySelector(part), { src: image.src, alt: image.alt });
      }
      box.querySelector(".over").style.clipPath = `inset(0 0 0 ${slide.value}%)`;
    };
    for (const input of [left, right, slide]) input.oninput = show;
    slide.value = clicked > 1 ? 0 : 50;
    show();
    box.showModal();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.picture");
    if (button) enlarge(button);
    if (event.target === box) box.close();
  });
})();
