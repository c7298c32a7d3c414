"""The page in a real browser: every figure is drawn without an error, its controls work, and nothing is clipped.

Needs Chromium and its driver (Debian: chromium and chromium-driver) and `pip install selenium`. Screenshots are
written to the folder that FEDLOOM_SCREENSHOTS names, for a person to look at.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.experiments.papers.relatedness import METRICS, Relatedness
from fedloom.federation.recipes import load
from fedloom.federation.runs.reader import Run
from fedloom.study.grid import Cell
from fedloom.study.report import write
from grid_support import DEA, FEDAVG, paper_grid, write_grid, write_run
from report_support import NASTY
from tests_support import load_recipe

webdriver = pytest.importorskip("selenium.webdriver")
pytest.importorskip("plotly")
CHROMIUM = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PHONE, DESKTOP, WALL = (390, 844), (1400, 900), (2000, 1100)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Peers with dense tasks, domains with learned weights, these domains alone and by a mean: small, but real."""
    home = tmp_path_factory.mktemp("runs")
    before = os.environ.get("FEDLOOM_CACHE")
    os.environ["FEDLOOM_CACHE"] = str(home / "cache")
    small = ("data.count=36", "data.test_count=4", "training.rounds=3", "training.epochs=1", "early_stopping=null")
    try:
        fedloom.run(load("dfmtl-scenes", (*small, "training.schedule.warmup=0")), home / "peers")
        domains = ("method=fedhca2", "training.rounds=3")
        fedloom.run(load_recipe(*domains, recipe="digits-domains"), home / "domains")
        alone = ("method=local", "training.rounds=3")
        fedloom.run(load_recipe(*alone, recipe="digits-domains"), home / "local")
        fedloom.run(load_recipe("training.rounds=3", recipe="digits-domains"), home / "mean")
    finally:
        os.environ.pop("FEDLOOM_CACHE") if before is None else os.environ.update(FEDLOOM_CACHE=before)
    return {name: home / name for name in ("peers", "domains", "local")}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


def show(browser: Any, page: Path, size: tuple[int, int], dark: bool = False) -> None:
    """Open a page in a window of a size and draw all its figures. Fails where the console has anything to say."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get(page.as_uri())
    # draws what is not in view yet too
    browser.execute_script("for (const name of ['beforeprint', 'afterprint']) window.dispatchEvent(new Event(name))")
    # a figure that is being drawn already may take a while; what is not drawn in time fails the test that looks at it
    browser.execute_async_script(
        """const done = arguments[0], end = performance.now() + 10000, drawn = () =>
             [...document.querySelectorAll('figure.plot:not([hidden] *) .canvas')]
               .every((c) => c.querySelector('svg.main-svg'));
           const look = () => (drawn() || performance.now() > end ? done() : setTimeout(look, 50));
           look();"""
    )
    quiet(browser)


def quiet(browser: Any) -> None:
    said = [entry["message"] for entry in browser.get_log("browser")]
    assert not said, said


def shot(browser: Any, name: str) -> None:
    """Write a picture of the whole page, where somebody wants it."""
    folder = os.environ.get("FEDLOOM_SCREENSHOTS")
    if folder:
        import base64

        Path(folder).mkdir(parents=True, exist_ok=True)
        size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        asked = {"captureBeyondViewport": True, "clip": clip}
        data = browser.execute_cdp_cmd("Page.captureScreenshot", asked)["data"]
        (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(data))


def figures(browser: Any) -> list[dict[str, Any]]:
    """What the browser drew: each figure's name, how many traces, and whether it lies inside the window."""
    return browser.execute_script(
        """return [...document.querySelectorAll('figure.plot:not([hidden] *)')].map((f) => {
          const canvas = f.querySelector('.canvas'), box = canvas.getBoundingClientRect();
          const svg = canvas.querySelector('svg.main-svg');
          const inside = [...canvas.querySelectorAll('.legendtext, .xtick text, .ytick text, .colorbar text, .ytitle')]
            .every((t) => { const b = t.getBoundingClientRect();
                            return !b.width || (b.left >= box.left - 1 && b.right <= box.right + 1
                                                && b.top >= box.top - 1 && b.bottom <= box.bottom + 1); });
          const room = canvas._fullLayout ? canvas._fullLayout._size : {w: 0, h: 0};
          return {name: f.dataset.figure, drawn: svg !== null, traces: (canvas.data || []).length,
                  plotted: Math.min(room.w, room.h),
                  inside, right: box.right, views: f.querySelectorAll('.view').length}; });"""
    )


@pytest.mark.parametrize("which", ["peers", "domains"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP, WALL], ids=["phone", "desktop", "wall"])
def test_every_figure_is_drawn_and_nothing_is_clipped(
    browser: Any, runs: dict[str, Path], which: str, size: tuple[int, int]
) -> None:
    show(browser, write(runs[which], base=runs["local"] if which == "domains" else None), size)
    shot(browser, f"{which}-{size[0]}")
    drawn = figures(browser)
    assert {"peers": "neighbours-graph", "domains": "hurt"}[which] in [f["name"] for f in drawn]
    assert all(f["drawn"] and f["traces"] for f in drawn), drawn
    assert not [f for f in drawn if f["plotted"] < 120], "too little room is left for the curves"
    assert not [f["name"] for f in drawn if not f["inside"]], "texts are cut off"
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= size[0], "the page must not scroll sideways"
    boxes = browser.execute_script(
        """return [...document.querySelectorAll('.flow .step, .flow .box')].map((e) => {
          const b = e.getBoundingClientRect();
          return {text: e.textContent, width: b.width, right: b.right, over: e.scrollWidth - e.clientWidth}; });"""
    )
    assert len(boxes) > 6
    assert not [b for b in boxes if b["right"] > size[0] or b["over"] > 0 or b["width"] < 60]
    first = browser.execute_script("return document.querySelector('.tiles').getBoundingClientRect().bottom")
    assert first < size[1] * (2 if size == PHONE else 1), "what came out stands on the first screen"
    text = browser.find_element("tag name", "body").text
    assert all(task in text for task in Run.read(runs[which]).info["tasks"])


def test_pictures_of_predictions_are_shown(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["peers"]), PHONE)
    widths = browser.execute_script("return [...document.querySelectorAll('.answers img')].map((i) => i.naturalWidth)")
    tasks = len(Run.read(runs["peers"]).info["tasks"])
    # the input, and of each task truth, answer and where it is wrong; and once more with the answers of three rounds
    assert widths == [64] * 4 * (1 + 3 * tasks + 1 + 4 * tasks)


def test_print_shows_which_view_is_drawn(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["peers"]), DESKTOP)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        shown = browser.execute_script(
            """const seen = (e) => e.getClientRects().length > 0, all = (q) => [...document.querySelectorAll(q)];
            return [all('select.view').every(seen), all('input').some(seen), all('nav').some(seen)];"""
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert shown == [True, False, False]


CONTRAST = """
    const line = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => .2126 * line(r) + .7152 * line(g) + .0722 * line(b);
    const color = (text) => text.match(/[\\d.]+/g).map(Number);
    const behind = (e) => {
      for (let c; e; e = e.parentElement) if ((c = color(getComputedStyle(e).backgroundColor))[3] !== 0) return c;
      return [255, 255, 255];
    };
    const found = [];
    for (const e of document.querySelectorAll('body *')) {
      const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
      if (!own || !e.getClientRects().length || e.closest('.canvas, script, style, option')) continue;
      const style = getComputedStyle(e), ink = color(e.namespaceURI.endsWith('svg') ? style.fill : style.color);
      const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x);
      if ((a + .05) / (b + .05) < 4.5) found.push([e.tagName, e.className.baseVal ?? e.className, ink.join()]);
    }
    return found;"""


KINDS = ["peers", "domains", "grid", "relatedness"]


def page_of(kind: str, runs: dict[str, Path], folder: Path) -> Path:
    """A page of each kind: runs, one of them beside a base, a grid, and a relatedness study."""
    if kind == "grid":
        grid = write_grid(folder / "grid", paper_grid(), {})
        write_run(grid, Cell("NYUD", "FedAvg", "-", 0), FEDAVG, history={1: DEA, 2: FEDAVG})
        return write(grid)
    if kind == "relatedness":
        scores = {m: np.random.default_rng(0).normal(size=(3, 3)) for m in METRICS}
        study = Relatedness("r, matu, seed 0", ("a", "b", "c"), scores)
        (folder / "relatedness.json").write_text(study.to_json(), "utf-8")
        return write(folder)
    return write(runs[kind], base=runs["local"] if kind == "domains" else None)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_letters_stand_out_as_wcag_aa_asks(
    browser: Any, runs: dict[str, Path], tmp_path: Path, kind: str, dark: bool
) -> None:
    show(browser, page_of(kind, runs, tmp_path), DESKTOP, dark=dark)
    assert browser.execute_script(CONTRAST) == []


def test_the_first_screen_needs_no_scrolling_and_agrees_with_the_files(browser: Any, runs: dict[str, Path]) -> None:
    """What came out, for whom it was worth it, who is in whose way, and whether it still gets better."""
    show(browser, write(runs["domains"], base=runs["local"]), DESKTOP)
    browser.execute_script("document.querySelectorAll('section > details').forEach((d) => (d.open = false))")
    spots = "['.words', '.tiles', '#gains', '#conflict'].map((q) => document.querySelector(q).getBoundingClientRect())"
    boxes = browser.execute_script(f"return {spots}")
    assert all(box["top"] >= 0 and box["width"] > 100 for box in boxes)
    assert max(box["top"] for box in boxes) + 150 < DESKTOP[1]
    mine, alone = (last_test_numbers(runs[name]) for name in ("domains", "local"))
    tiles = [float(e.text) for e in browser.find_elements("css selector", ".held:not([hidden]) .tile .value")]
    tasks = list(Run.read(runs["domains"]).info["tasks"])
    assert tiles == pytest.approx([np.mean([v for (_, t), v in mine.items() if t == task]) for task in tasks], abs=5e-5)
    each: dict[str, list[float]] = {}
    for (client, task), value in mine.items():
        each.setdefault(client, []).append(100 * (value / alone[client, task] - 1))
    changes = {client: float(np.mean(of)) for client, of in each.items()}
    said = browser.find_element("css selector", ".words").text
    gained = sum(v > 1e-9 for v in changes.values())
    who = "every client is" if gained == len(changes) else f"{gained} of {len(changes)} clients are"
    assert (f"{who} ahead of local" if gained else "no client is ahead of local") in said
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#gains .held:not([hidden]) .marks g title')].map((t) => t.textContent)"
    )
    shown = [changes[row.split(":")[0]] for row in rows]
    assert shown == pytest.approx(sorted(changes.values(), reverse=True))
    losses = losses_of(runs["domains"])
    falls = np.polyfit(range(len(losses)), losses, 1)[0] / np.mean(losses) < -0.0005
    assert ("still falls" in said) == falls
    shares = shares_in_conflict(runs["domains"])
    worst = max(shares, key=lambda layers: shares[layers])
    assert worst.removeprefix("encoder.") in said
    assert f"{100 * shares[worst]:.0f} % of the pairs of updates pull against each other" in said.replace("\u00a0", " ")
    show(browser, write(runs["domains"], base=runs["local"]), PHONE)
    words = browser.find_element("css selector", ".held:not([hidden]) .words")
    assert words.rect["y"] + words.rect["height"] < PHONE[1], "a phone's first screen has all four answers in words"


def losses_of(folder: Path) -> list[float]:
    """The mean training loss of each of the last ten rounds, over the clients of the only task."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [float(np.mean([e["loss"] for e in line["train"]])) for line in lines if line.get("train")][-10:]


def shares_in_conflict(folder: Path) -> dict[str, float]:
    """Layers of the encoder or a decoder -> the share of pairs of updates with a cosine below 0, mean over rounds."""
    found: dict[str, list[float]] = {}
    for line in (folder / "diagnostics.jsonl").read_text("utf-8").splitlines():
        for group in (group for look in json.loads(line)["diagnostics"] for group in look["groups"]):
            known = [v for v in group["cosine"] if v is not None]
            if known:
                of = group["layers"] or group["part"]
                found.setdefault(of, []).append(float(np.mean([v < 0 for v in known])))
    return {layers: float(np.mean(of)) for layers, of in found.items()}


def test_a_base_is_chosen_by_keyboard_and_all_that_depends_on_it_changes(browser: Any, runs: dict[str, Path]) -> None:
    from selenium.webdriver.common.keys import Keys

    def said() -> list[str]:
        places = [
            ".words",
            ".tile .change",
            "#gains .note",
            "#final th:nth-child(4)",
            "#base td",
            "#hurt-table",
            "#hurt-table-1",
        ]
        return [
            next((e.text for e in browser.find_elements("css selector", place) if e.is_displayed()), "")
            for place in places
        ]

    show(browser, write(runs["domains"]), DESKTOP)
    browser.execute_script("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    first = said()
    chooser = browser.find_element("css selector", "select.base")
    assert [option.text for option in chooser.find_elements("css selector", "option")] == ["local", "fedavg"]
    browser.execute_script("arguments[0].focus()", chooser)
    chooser.send_keys(Keys.ARROW_DOWN)
    second = said()
    assert ("of local" in first[0], "of fedavg" in second[0], first[3], second[3]) == (
        *(True, True, "base: local", "base: fedavg"),
    )
    assert all(one != other for one, other in zip(first, second, strict=True))
    chooser.send_keys(Keys.ARROW_UP)
    assert said() == first
    quiet(browser)


def last_test_numbers(folder: Path) -> dict[tuple[str, str], float]:
    """(client, task) -> its number on test data in the last line of metrics.jsonl that has some."""
    primary = {task: about["primary"] for task, about in json.loads((folder / "run.json").read_text())["tasks"].items()}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    found = [
        {(m["client"], m["task"]): m["value"] for m in line.get("metrics", ())
         if m["split"] == "test" and m["metric"] == primary[m["task"]]}
        for line in lines
    ]  # fmt: skip
    return next(each for each in reversed(found) if each)


def test_a_picture_opens_beside_the_others_by_keyboard_alone(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["peers"]), DESKTOP)
    from selenium.webdriver.common.keys import Keys

    button = browser.find_elements("css selector", ".answers tbody td button.picture")[0]
    browser.execute_script("arguments[0].focus()", button)
    button.send_keys(Keys.ENTER)
    box = browser.find_element("id", "enlarged")
    assert box.is_displayed()
    names = [option.text for option in box.find_elements("css selector", "select.right option")]
    assert names == ["input", "truth", "prediction", "where it is wrong"]
    over = "return document.querySelector('#enlarged .over').style.clipPath"
    slider = box.find_element("css selector", "input[type=range]")
    before = browser.execute_script(over)
    slider.send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script(over) != before
    slider.send_keys(Keys.ESCAPE)
    assert not box.is_displayed()
    quiet(browser)


@pytest.mark.parametrize("kind", KINDS)
def test_every_control_is_reached_by_the_tab_key_and_has_a_name(
    browser: Any, runs: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    show(browser, page_of(kind, runs, tmp_path), DESKTOP)
    nameless, unreached = browser.execute_script(
        """const all = [...document.querySelectorAll('a[href], button, select, input, summary')]
             .filter((e) => e.getClientRects().length && !e.closest('.canvas'));
           const name = (e) => e.textContent.trim() || e.ariaLabel || (e.labels && e.labels.length
             && e.labels[0].textContent.trim()) || (e.querySelector('img') || {}).alt;
           return [all.filter((e) => !name(e)).map((e) => e.outerHTML), all.filter((e) => e.tabIndex < 0).length];"""
    )
    assert nameless == []
    assert unreached == 0
    silent = """return [...document.querySelectorAll('svg, img')]
        .filter((e) => !e.closest('.canvas, dialog, #js-plotly-tester') && !e.alt && !e.closest('[aria-label]'))
        .map((e) => e.outerHTML.slice(0, 200))"""
    assert browser.execute_script(silent) == [], "a picture without words"


def test_a_printed_page_cuts_nothing_off(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["peers"]), DESKTOP)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    sheet = 718  # pixels across a sheet of A4 within its margins
    metrics = {"width": sheet, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        wide = browser.execute_script(
            """return [...document.querySelectorAll('svg, img, table, pre, figure')]
                 .filter((e) => e.getClientRects().length && e.getBoundingClientRect().right > arguments[0] + 1)
                 .map((e) => [e.tagName, e.id, String(e.className.baseVal ?? e.className)])""",
            sheet,
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert wide == []


def test_dark_mode_is_readable(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["domains"]), DESKTOP, dark=True)
    shot(browser, "domains-dark")
    colors = browser.execute_script(
        """const style = (e, what) => getComputedStyle(e)[what];
        const tick = document.querySelector('.xtick text'), legend = document.querySelector('.legendtext');
        return [style(document.body, 'backgroundColor'), style(document.body, 'color'),
                style(tick, 'fill'), style(legend, 'fill')];"""
    )
    paper, *inks = [sum(map(int, color[4:-1].split(",")[:3])) / 3 for color in colors]
    assert paper < 60
    assert min(inks) > 150


def test_sliders_selects_and_legends_work(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["peers"]), DESKTOP)
    slide = """const f = document.getElementById(arguments[0]), input = f.querySelector(arguments[1]);
        input.value = arguments[2]; input.dispatchEvent(new Event('input', {bubbles: true}));
        const canvas = f.querySelector('.canvas'), shown = f.querySelector('output');
        return {z: canvas.data[0].z || null, y: canvas.data.map((t) => t.y),
                name: shown ? shown.textContent : '', last: input.max};"""
    first = browser.execute_script(slide, "plot-neighbours", "input.view", 0)
    last = browser.execute_script(slide, "plot-neighbours", "input.view", first["last"])
    assert (first["name"], last["name"]) == ("1", "3")
    assert first["z"] != last["z"]
    before, after = (browser.execute_script(slide, "plot-neighbours-graph", "input.view", at) for at in (0, 2))
    assert (before["name"], after["name"]) == ("1", "3")
    assert before["y"] != after["y"]
    arrows = """return [...document.querySelectorAll('#plot-neighbours-graph .scatterlayer .js-line')]
        .map((line) => line.getAttribute('d')).join('').split('M').length - 1"""
    ends = [y for trace in after["y"][:4] for y in trace if y is not None]
    assert browser.execute_script(arrows) == len(ends) // 2 > 5
    plain = browser.execute_script(slide, "plot-curves-0", "input.smooth", 0)
    smooth = browser.execute_script(slide, "plot-curves-0", "input.smooth", 0.9)
    assert plain["y"] != smooth["y"]
    other = browser.execute_script(slide, "plot-curves-0", "select.view", 1)
    assert other["y"] != smooth["y"]
    toggled = browser.execute_async_script(
        """const done = arguments[0], canvas = document.querySelector('#plot-bytes .canvas');
        const item = canvas.querySelector('.legendtoggle');
        canvas.once('plotly_restyle', () => done(canvas.data[0].visible));
        for (const kind of ['mousedown', 'mouseup'])
          item.dispatchEvent(new MouseEvent(kind, {bubbles: true, view: window}));"""
    )
    assert toggled == "legendonly"
    quiet(browser)


def test_a_thousand_clients_open_quickly(browser: Any, tmp_path: Path) -> None:
    """Seconds of the page's own work, so that a busy machine does not count, until what is in view is drawn."""
    clients = [f"c{i:03}" for i in range(1000)]
    rows = clients[:: 1000 // 32][:32]
    pairs = [((i * 7919) % 2000 - 1000) / 1000 for i in range(32 * 31 // 2)]
    group = {
        "part": "encoder",
        "task": None,
        "size": 9,
        "looked": 9,
        "cosine": pairs,
        "sign": pairs,
        "kept": [1.0] * 32,
    }
    groups = [{**group, "layers": f"layer{i}"} for i in range(4)]
    about = {"rows": [[r, None] for r in rows], "out": [["*", None]], "shown": list(range(32)), "groups": groups}
    recipe = {"name": "big", "seed": 0, "data": {"name": "toy"}, "training": {"rounds": 300}}
    recipe |= {"method": {"name": "fedavg"}}
    tasks = {"t": {"kind": "classification", "primary": "accuracy", "metrics": {"accuracy": "max"}}}
    held = {c: {"tasks": {"t": 1.0}, "domain": None, "train": 30, "val": 3} for c in clients}
    info = {"method": "fedavg", "tasks": tasks, "clients": held, "status": "finished", "final_round": 300}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (tmp_path / "run.json").write_text(json.dumps(info))
    with (tmp_path / "metrics.jsonl").open("w") as file, (tmp_path / "diagnostics.jsonl").open("w") as looks:
        for r in range(1, 301):
            where = {"task": "t", "metric": "accuracy", "model": "global", "split": "test", "data": "d"}
            metrics = [{"client": c, "value": (r + i % 97) / 400, **where} for i, c in enumerate(clients)]
            file.write(json.dumps({"round": r, "cohort": [], "metrics": metrics}) + "\n")
            looks.write(json.dumps({"round": r, "diagnostics": [about]}) + "\n")
    page = write(tmp_path)
    browser.get("about:blank")
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    before = work(browser)
    browser.get(page.as_uri())
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()));")
    assert work(browser) - before < 3
    quiet(browser)


def work(browser: Any) -> float:
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return {m["name"]: m["value"] for m in metrics}["TaskDuration"]


def test_a_grid_and_a_run_cut_off_are_drawn(browser: Any, runs: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(runs["domains"], cut)
    lines = (cut / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    info = json.loads((cut / "run.json").read_text("utf-8"))
    info = {key: of for key, of in info.items() if key not in ("files", "check", "final_round")}
    (cut / "run.json").write_text(json.dumps(info | {"status": "running"}))
    show(browser, write(cut), PHONE)
    assert all(f["drawn"] for f in figures(browser))
    show(browser, page_of("grid", runs, tmp_path), DESKTOP)
    shot(browser, "grid")
    assert figures(browser)
    assert all(f["drawn"] and f["inside"] for f in figures(browser))


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_relatedness_study_is_drawn_and_many_tasks_open_quickly(
    browser: Any, tmp_path: Path, size: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    for T, names in (
        (100, [f"task-{i:03}" for i in range(100)]),
        (4, [NASTY, "a name of a task that is " * 3, "b", "c"]),
    ):
        near = rng.normal(size=(T, 4))
        scores = {m: near @ near.T + rng.normal(size=(T, T)) for m in METRICS}
        scores["sign"][1] = np.nan
        folder = tmp_path / str(T)
        folder.mkdir()
        (folder / "relatedness.json").write_text(
            Relatedness("r, matu, seed 0", tuple(names), scores).to_json(), "utf-8"
        )
        page = write(folder)
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        browser.get("about:blank")
        before = work(browser)
        browser.get(page.as_uri())
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()));")
        assert work(browser) - before < 3
        show(browser, page, size)
        shot(browser, f"relatedness-{T}-{size[0]}")
        drawn = figures(browser)
        assert [f["name"] for f in drawn] == [*(f"heat-{i}" for i in range(6)), "agreement", "pairs"]
        assert all(f["drawn"] and f["inside"] and f["plotted"] > 120 for f in drawn), drawn
        assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    change = """const f = document.getElementById(arguments[0]), input = f.querySelector('select.view');
        input.value = arguments[1]; input.dispatchEvent(new Event('input', {bubbles: true}));
        const canvas = f.querySelector('.canvas'), [trace] = canvas.data;
        return {x: trace.x, y: trace.y, z: trace.z, axes: ['xtitle', 'ytitle'].map(
          (name) => (canvas.querySelector('.' + name) || {}).textContent)};"""
    points = browser.execute_script(change, "plot-pairs", 14)
    assert points["axes"][0].startswith("fim; r ")
    assert points["axes"][1] == "wte (a distance)"
    above = np.triu_indices(4, 1)
    for drawn_as, metric in (("x", "fim"), ("y", "wte")):
        assert points[drawn_as] == ((scores[metric] + scores[metric].T) / 2)[above].tolist()
    assert browser.execute_script(change, "plot-heat-2", 1)["z"] == scores["logme"].tolist()
    for width, height in (DESKTOP, PHONE, size):  # a phone is turned
        turned = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", turned)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()));")
        drawn = figures(browser)
        assert all(f["inside"] and f["plotted"] > 120 for f in drawn), drawn
    quiet(browser)
