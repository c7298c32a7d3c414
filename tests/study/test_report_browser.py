"""The page in a real browser: every figure is drawn without an error, its controls work, and nothing is clipped.

Needs Chromium and its driver (Debian: chromium and chromium-driver) and `pip install selenium`. Screenshots are
written to the folder that FEDLOOM_SCREENSHOTS names, for a person to look at.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
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
from fedloom.study.watch import Server
from grid_support import DEA, FEDAVG, paper_grid, write_grid, write_run
from report_support import NASTY, write_files
from tests_support import load_recipe

webdriver = pytest.importorskip("selenium.webdriver")
pytest.importorskip("vl_convert")
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
    small = ("data.count=36", "data.test_count=4", "training.rounds=3", "training.epochs=1", "early_stopping=null")
    fedloom.run(load("dfmtl-scenes", (*small, "training.schedule.warmup=0")), home / "peers")
    for name, method in (("domains", "fedhca2"), ("local", "local"), ("mean", "fedavg")):
        recipe = load_recipe(f"method={method}", "training.rounds=3", recipe="digits-domains")
        fedloom.run(recipe, home / name)
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


def show(browser: Any, page: Path | str, size: tuple[int, int], dark: bool = False) -> None:
    """Open a page in a window of a size and draw all its figures. Fails where the console has anything to say."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get(page if isinstance(page, str) else page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    # a figure that is being drawn may take a while; what is not drawn in time fails the test that looks at it
    browser.execute_async_script(
        """const done = arguments[0], end = performance.now() + 20000, drawn = () =>
             [...document.querySelectorAll('figure.plot:not([hidden] *) .canvas')]
               .every((c) => c.querySelector('svg, canvas'));
           const look = () => (drawn() || performance.now() > end ? setTimeout(done, 300) : setTimeout(look, 50));
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
    """Return what the browser drew: each figure's name, how many marks, and whether its texts lie inside its place."""
    return browser.execute_script(
        """return [...document.querySelectorAll('figure.plot:not([hidden] *)')].map((f) => {
          const canvas = f.querySelector('.canvas'), box = canvas.getBoundingClientRect();
          const inside = [...canvas.querySelectorAll('svg text')].every((t) => { const b = t.getBoundingClientRect();
            return !b.width || (b.left >= box.left - 1 && b.right <= box.right + 1); });
          return {name: f.dataset.figure, drawn: canvas.querySelector('svg, canvas') !== null,
                  marks: canvas.querySelectorAll('svg .mark-group path').length, inside}; });"""
    )


@pytest.mark.parametrize("which", ["peers", "domains"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP, WALL], ids=["phone", "desktop", "wall"])
def test_every_figure_is_drawn_and_nothing_is_clipped(
    browser: Any, runs: dict[str, Path], which: str, size: tuple[int, int]
) -> None:
    show(browser, write(runs[which], base=runs["local"] if which == "domains" else None), size)
    shot(browser, f"{which}-{size[0]}")
    drawn = figures(browser)
    assert {"peers": "neighbours-graph", "domains": "worse"}[which] in [f["name"] for f in drawn]
    assert all(f["drawn"] and f["marks"] for f in drawn), drawn
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


def test_the_first_screen_needs_no_scrolling(browser: Any, runs: dict[str, Path]) -> None:
    """What came out, for whom it was worth it, who is in whose way, and whether it still gets better."""
    show(browser, write(runs["domains"], base=runs["local"]), DESKTOP)
    browser.execute_script("document.querySelectorAll('section > details').forEach((d) => (d.open = false))")
    spots = "['.words', '.tiles', '#gains', '#conflict'].map((q) => document.querySelector(q).getBoundingClientRect())"
    boxes = browser.execute_script(f"return {spots}")
    assert all(box["top"] >= 0 and box["width"] > 100 for box in boxes)
    assert max(box["top"] for box in boxes) + 150 < DESKTOP[1]
    show(browser, write(runs["domains"], base=runs["local"]), PHONE)
    words = browser.find_element("css selector", ".compared:not([hidden]) .words")
    assert words.rect["y"] + words.rect["height"] < PHONE[1], "a phone's first screen has all four answers in words"


def test_a_base_is_chosen_by_keyboard_and_all_that_depends_on_it_changes(browser: Any, runs: dict[str, Path]) -> None:
    from selenium.webdriver.common.keys import Keys

    def said() -> list[str]:
        places = [
            ".words",
            ".tile .change",
            "#gains .note",
            "#final th:nth-child(4)",
            "#base td",
            "#worse-table",
            "#worse-table-1",
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
    assert ("with local" in first[0], "with fedavg" in second[0], first[3], second[3]) == (
        *(True, True, "base: local", "base: fedavg"),
    )
    assert all(one != other for one, other in zip(first, second, strict=True))
    chooser.send_keys(Keys.ARROW_UP)
    assert said() == first
    quiet(browser)


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
        .filter((e) => !e.closest('.canvas, dialog') && !e.alt && !e.closest('[aria-label]'))
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
        shown = browser.execute_script(
            """const seen = (e) => e.getClientRects().length > 0, all = (q) => [...document.querySelectorAll(q)];
            return [all('select.view').every(seen), all('.controls input').some(seen), all('nav').some(seen)];"""
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert wide == []
    assert shown == [True, False, False], "which view is drawn is said, and there is nothing to turn"


def test_dark_mode_is_readable(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["domains"]), DESKTOP, dark=True)
    shot(browser, "domains-dark")
    colors = browser.execute_script(
        """const style = (e, what) => getComputedStyle(e)[what];
        const [tick, legend] = ['axis', 'legend'].map((of) => document.querySelector(`.role-${of}-label text`));
        return [style(document.body, 'backgroundColor'), style(document.body, 'color'),
                style(tick, 'fill'), style(legend, 'fill')];"""
    )
    paper, *inks = [sum(map(int, color[4:-1].split(",")[:3])) / 3 for color in colors]
    assert paper < 60
    assert min(inks) > 150


CHANGE = """const f = document.getElementById(arguments[0]), input = f.querySelector(arguments[1]), done = arguments[3];
    input.value = arguments[2]; input.dispatchEvent(new Event('input', {bubbles: true}));
    setTimeout(() => done({svg: f.querySelector('svg').outerHTML, last: input.max,
                           name: (f.querySelector('output') || {}).textContent,
                           texts: [...f.querySelectorAll('svg text')].map((t) => t.textContent)}), 1000);"""


def test_sliders_and_selects_work(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["peers"]), DESKTOP)

    def change(*given: Any) -> dict[str, Any]:
        return browser.execute_async_script(CHANGE, *given)

    for name in ("plot-neighbours", "plot-neighbours-graph"):
        first = change(name, ".view", 0)
        last = change(name, ".view", first["last"])
        assert (first["name"], last["name"]) == ("1", "3")
        assert first["svg"] != last["svg"]
    assert change("plot-curves-0", "select.view", 0)["svg"] != change("plot-curves-0", "select.view", 1)["svg"]
    groups = browser.find_elements("css selector", "#plot-cosine select.group option")
    assert len(groups) > 1
    first, other = (change("plot-cosine", "select.group", group.get_attribute("value")) for group in groups[:2])
    assert first["svg"] != other["svg"]
    quiet(browser)


def test_a_point_says_its_numbers_when_it_is_pointed_at(browser: Any, runs: dict[str, Path]) -> None:
    show(browser, write(runs["domains"], base=runs["local"]), DESKTOP)
    from selenium.webdriver.common.action_chains import ActionChains

    point = browser.find_elements("css selector", "#plot-gains .mark-symbol path")[0]
    ActionChains(browser).move_to_element(point).perform()
    browser.execute_async_script("setTimeout(arguments[0], 500)")
    said = browser.find_element("id", "vg-tooltip-element").text
    assert "value" in said
    assert "low" in said
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
    tasks = {"t": {"kind": "classification", "primary": "accuracy", "metrics": {"accuracy": "max"}}}
    held = {c: {"tasks": {"t": 1.0}, "domain": None, "train": 30, "val": 3} for c in clients}
    info = {"method": "fedavg", "tasks": tasks, "clients": held, "status": "finished", "final_round": 300}
    where = {"task": "t", "metric": "accuracy", "model": "global", "split": "test", "data": "d"}
    lines = (
        {
            "round": r,
            "cohort": [],
            "metrics": [{"client": c, "value": (r + i % 97) / 400, **where} for i, c in enumerate(clients)],
        }
        for r in range(1, 301)
    )
    write_files(tmp_path, info, lines, name="big", training={"rounds": 300})
    looks = (json.dumps({"round": r, "diagnostics": [about]}) + "\n" for r in range(1, 301))
    (tmp_path / "diagnostics.jsonl").write_text("".join(looks))
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
        assert all(f["drawn"] and f["inside"] for f in drawn), drawn
        assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    points = browser.execute_async_script(CHANGE, "plot-pairs", "select.view", 14)["texts"]
    assert any(text.startswith("fim; r ") for text in points)
    assert "wte (a distance)" in points
    for width, height in (DESKTOP, PHONE, size):  # a phone is turned
        turned = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", turned)
        browser.execute_async_script("setTimeout(arguments[0], 3000)")
        drawn = figures(browser)
        assert all(f["inside"] for f in drawn), drawn
    quiet(browser)


@pytest.fixture(scope="module")
def table(runs: dict[str, Path]) -> Iterator[str]:
    """The address of the table of all runs and of a grid."""
    home = runs["local"].parent
    grid = write_grid(home / "grid", paper_grid(), {})
    for seed in (0, 1):
        write_run(grid, Cell("NYUD", "FedAvg", "-", seed), FEDAVG)
    with Server(home, 0) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield serving.url
        serving.shutdown()


def lines(browser: Any) -> list[str]:
    """The names of the lines that are shown, in order."""
    return browser.execute_script(
        "return [...document.querySelectorAll('tbody tr:not([hidden]) th')].map((e) => e.innerText.trim())"
    )


def test_the_table_of_runs_is_sorted_filtered_and_unfolded_and_two_runs_are_compared(browser: Any, table: str) -> None:
    show(browser, table, DESKTOP)
    shot(browser, "ui-1400")
    assert sorted(lines(browser)) == ["domains", "grid", "local", "mean", "peers"]
    assert browser.execute_script(CONTRAST) == []

    def sort(name: str) -> list[str]:
        heads = browser.find_elements("css selector", "thead button")
        next(head for head in heads if head.text.startswith(name)).click()
        cells = "return [...document.querySelectorAll('tbody tr:not([hidden])')].map((r) => r.cells[arguments[0]]"
        (at,) = [i for i, head in enumerate(heads) if head.text.startswith(name)]
        return browser.execute_script(f"{cells}.innerText)", at)

    ranked = [value for value in sort("digit") if value]
    assert len(ranked) == 3
    assert ranked == sorted(ranked, reverse=True), "the best one first"
    assert sort("digit")[:3] == ranked[::-1], "what has no number stays last"
    browser.find_element("css selector", "tbody button").click()
    assert [name for name in lines(browser) if name.endswith(("s0", "s1"))]
    box = browser.find_element("css selector", "input[type=search]")
    box.send_keys("fedhca2 finished")
    assert lines(browser) == ["domains"]
    box.clear()
    box.send_keys(" ")
    for name in ("mean", "local", "domains"):  # the first one is no longer of the two
        browser.find_element("css selector", f"input[aria-label='compare {name}']").click()
    link = browser.find_element("id", "compare")
    assert link.text == "Compare local with domains"
    link.click()
    assert browser.find_element("css selector", "select.base option").text == "fedhca2"
    quiet(browser)


def test_the_table_of_runs_keeps_its_state_while_it_is_renewed(browser: Any, table: str, runs: dict[str, Path]) -> None:
    show(browser, table, PHONE)
    shot(browser, "ui-390")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    browser.find_element("css selector", "input[aria-label='compare local']").click()
    box = browser.find_element("css selector", "input[type=search]")
    box.send_keys("later local")
    assert lines(browser) == []
    shutil.copytree(runs["local"], runs["local"].parent / "later")
    browser.execute_async_script("setTimeout(arguments[0], 7000)")
    assert lines(browser) == ["later"], "a new run comes by itself, and the filter stays"
    box.clear()
    box.send_keys(" ")
    ticked = [e.get_attribute("aria-label") for e in browser.find_elements("css selector", "tbody input:checked")]
    assert ticked == ["compare local"]
    quiet(browser)
