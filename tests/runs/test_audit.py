"""An audit file shows where it was changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.errors import StateError
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.track import START, Audit, verified


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for what in ("join", "refuse", "checkpoint", "export"):
        Audit(tmp_path / "audit.jsonl").note(what, client="ann", why="Ä\n")
    return tmp_path / "audit.jsonl"


def test_lines_follow_each_other(file: Path) -> None:
    lines = verified(file)
    assert [line["what"] for line in lines] == ["join", "refuse", "checkpoint", "export"]
    assert [line["before"] for line in lines] == [START, *(line["hash"] for line in lines[:-1])]


@pytest.mark.parametrize("number", range(4))
def test_a_changed_line_is_found(file: Path, number: int) -> None:
    lines = file.read_text().splitlines()
    lines[number] = lines[number].replace("ann", "bob")
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(StateError, match=f"line {number + 1}: the content does not match its hash"):
        verified(file)


def test_a_line_that_says_something_else_first_is_found(file: Path) -> None:
    """Of a key that occurs twice, a reader sees the first value and Python the last."""
    lines = file.read_text().splitlines()
    lines[1] = '{"client": "bob", ' + lines[1][1:]
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(StateError, match="line 2: the content does not match its hash"):
        verified(file)


@pytest.mark.parametrize("order", [[1, 2, 3], [0, 2, 3], [0, 2, 1, 3], [0, 1, 1, 2, 3]])
def test_lines_that_were_removed_moved_or_added_are_found(file: Path, order: list[int]) -> None:
    lines = file.read_text().splitlines()
    file.write_text("".join(f"{lines[i]}\n" for i in order))
    with pytest.raises(StateError, match="does not follow the one before it"):
        verified(file)


def test_a_cut_end_is_found_and_what_a_crash_cut_short_is_taken_away(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(StateError, match="line 4"):
        verified(file)
    Audit(file).note("leave", client="ann")
    assert [line["what"] for line in verified(file)] == ["join", "refuse", "checkpoint", "leave"]


@pytest.mark.parametrize("left", [0, 2])
def test_lines_cut_off_at_the_end_show_beside_a_hash_that_was_kept(file: Path, left: int) -> None:
    lines = file.read_text().splitlines()
    kept = json.loads(lines[-1])["hash"]
    Audit(file).note("leave")
    assert len(verified(file, kept)) == 5
    file.write_text("".join(f"{line}\n" for line in lines[:left]))
    assert len(verified(file)) == left
    with pytest.raises(
        StateError, match=f"none of its {left} lines has the hash {kept}: lines at the end were removed"
    ):
        verified(file, kept)


@pytest.mark.parametrize(
    "text", ["[]\n", "{}\n", '{"hash": 1}\n', "\xff\n", '{"number": 0, "hash": ""}\n', "[" * 9999 + "\n"]
)
def test_nothing_is_added_to_what_is_no_audit_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "audit.jsonl"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(StateError, match="the content does not match its hash"):
        Audit(file).note("join")
    with pytest.raises(StateError, match="the content does not match its hash"):
        verified(file)


def test_a_line_without_a_time_is_none_of_ours(tmp_path: Path) -> None:
    line = {"number": 0, "what": "join", "before": START}
    digest = hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()
    (tmp_path / "audit.jsonl").write_text(json.dumps({**line, "hash": digest}) + "\n")
    with pytest.raises(StateError, match="the content does not match its hash"):
        verified(tmp_path / "audit.jsonl")


def test_a_terminal_obeys_nothing_that_a_file_says(tmp_path: Path) -> None:
    Audit(tmp_path / "audit.jsonl").note("join", client="\x1b[2Jann", why="[bold]Ä[/nope]")
    said = CliRunner().invoke(app, ["flower", "audit", str(tmp_path / "audit.jsonl")]).output
    assert "\x1b[2J" not in said
    assert "client \\x1b[2Jann, why [bold]Ä[/nope]" in said


def test_a_text_of_many_lines_is_one_cell_that_says_how_to_read_it(tmp_path: Path) -> None:
    Audit(tmp_path / "audit.jsonl").note("recipe", sha256="3f0c", text="name: sites\nmodel: mlp\n")
    said = CliRunner().invoke(app, ["flower", "audit", str(tmp_path / "audit.jsonl")]).output
    assert "model: mlp" not in said
    assert "sha256 3f0c, text 2 lines (--json prints them)" in said
    whole = CliRunner().invoke(app, ["flower", "audit", str(tmp_path / "audit.jsonl"), "--json"]).output
    assert json.loads(whole)["lines"][0]["text"] == "name: sites\nmodel: mlp\n"


def test_a_long_line_is_followed(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.note("policy", terms="x" * 100_000)
    audit.note("join")
    assert json.loads(audit.file.read_text().splitlines()[1])["number"] == 1


def test_what_a_peer_dropped_is_in_the_log_and_in_the_audit_file(tmp_path: Path) -> None:
    dropped = {"event": "message dropped", "peer": "ann", "what": "late", "sender": "bob"}
    with RunFolder(tmp_path) as folder:
        folder.audit = Audit(tmp_path / "audit.jsonl")
        folder.write_round({"round": 1, "events": [dropped]}, {})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["events"] == [dropped]
    (line,) = verified(tmp_path / "audit.jsonl")
    assert (line["what"], line["peer"], line["sender"]) == ("message dropped: late", "ann", "bob")
