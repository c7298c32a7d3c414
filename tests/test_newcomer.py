"""A newcomer in a fresh environment types what the first pages say, and is done in a quarter of an hour."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/first-run.md", "docs/bring-your-data.md")
NUMBER = r"[-+]?\d+\.\d+"
ROWS = ("Local", "FedAvg", "FedHCA2", "joint", "trivial")


def script(page: str) -> str:
    """The blocks of a page in their order: commands as they are, Python as one would start it."""
    found = re.findall(r"^```(console|python)\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found
    python = "python - <<'END_OF_BLOCK'\n{}END_OF_BLOCK"
    return "\n".join(block if language == "console" else python.format(block) for language, block in found)


def of_a_table(text: str) -> list[tuple[str, list[float]]]:
    """(name, means) of each line of the demo's table in a text."""
    rows = re.findall(rf"^ *(\w+) +({NUMBER} ±.*)$", text, re.MULTILINE)
    return [(name, [float(mean) for mean in re.findall(rf"({NUMBER}) ±", rest)]) for name, rest in rows]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the pages are for a POSIX shell")
@pytest.mark.timeout(3600)
def test_the_first_pages_as_they_stand(tmp_path: Path) -> None:
    builders = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = builders.WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "wheels"), versions=["standard"])
    version = Path(wheel).name.split("-")[1]
    # where pip finds this version, and torch for the CPU; a newcomer has an index
    pins = (ROOT / "constraints" / "ci.txt").read_text("utf-8") + f"\nfedloom=={version}\n"
    (tmp_path / "constraints.txt").write_text(pins, "utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    links = f"{environment.get('PIP_FIND_LINKS', '')} {tmp_path / 'wheels'}".strip()
    environment |= {"PIP_FIND_LINKS": links, "PIP_CONSTRAINT": str(tmp_path / "constraints.txt")}
    environment["OMP_NUM_THREADS"] = "1"
    (tmp_path / "mine").mkdir()
    activate = f"'{sys.executable}' -m venv .venv\n. .venv/bin/activate\n"  # what README leaves to the reader
    began = time.monotonic()
    said = {}
    for page in PAGES:
        text = script(page) if page == "docs/first-run.md" else activate + script(page)
        done = subprocess.run(
            ["bash", "-exc", text], cwd=tmp_path / "mine", env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        said[page] = done.stdout
    crowd = max(1, os.getloadavg()[2] / (os.cpu_count() or 1))  # others' work on this machine is no newcomer's time
    assert time.monotonic() - began < 15 * 60 * crowd
    printed, shown = (of_a_table(text) for text in (said["README.md"], (ROOT / "README.md").read_text("utf-8")))
    printed = printed[: len(ROWS)]
    assert [name for name, _ in printed] == [name for name, _ in shown] == [*ROWS]
    for (_, here), (_, there) in zip(printed, shown, strict=True):
        for mine, theirs in zip(here, there, strict=True):  # processors differ in last bits, which training magnifies
            assert mine == pytest.approx(theirs, abs=0.03 if abs(theirs) < 1 else 3)
