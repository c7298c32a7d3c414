"""A newcomer in a fresh clone types what the first pages say, and is done in a quarter of an hour."""

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
ROWS = ("Local", "FedAvg", "FedHCA2", "centralised", "separate", "simple", "constant")


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
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout can be cloned")
@pytest.mark.timeout(3600)
def test_the_first_pages_as_they_stand(tmp_path: Path) -> None:
    """Type the blocks of the pages, character by character, in a clone of the last commit.

    Two variables stand for what is not on the pages. PYTHON is a Python 3.11 or later, which the newcomer has under the
    name python3. PYTEST_ADDOPTS lets the pytest of `make test` import every test of the suite, as the package was
    installed, but run only those of README.md: the whole suite would run itself again, ten minutes long.
    """
    clone = tmp_path / "fedloom"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PYTHON": sys.executable, "PYTEST_ADDOPTS": "-k test_readme"}
    began = time.monotonic()
    said = {}
    for page in PAGES:
        activate = "" if ". .venv/bin/activate" in script(page) else ". .venv/bin/activate\n"
        done = subprocess.run(
            ["bash", "-exc", activate + script(page)],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{page}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        said[page] = done.stdout
    assert re.search(r"= \d+ passed\b", said["README.md"])
    crowd = max(1, os.getloadavg()[2] / (os.cpu_count() or 1))  # others' work on this machine is no newcomer's time
    assert time.monotonic() - began < 15 * 60 * crowd
    printed, shown = (of_a_table(text) for text in (said["README.md"], (ROOT / "README.md").read_text("utf-8")))
    printed = printed[: len(ROWS)]
    assert [name for name, _ in printed] == [name for name, _ in shown] == [*ROWS]
    for (_, here), (_, there) in zip(printed, shown, strict=True):
        for mine, theirs in zip(here, there, strict=True):  # processors differ in last bits, which training magnifies
            assert mine == pytest.approx(theirs, abs=0.03 if abs(theirs) < 1 else 3)
