"""Start kits: what `fedloom flower provision` writes is what a server and its sites need, and nothing more is said."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedloom.cli.app import app

pytest.importorskip("flwr")

from cryptography import x509

from fedloom.engines.flower.check import _superlink, findings
from fedloom.engines.flower.deployment import deployment, free_port, prepare
from fedloom.federation.recipes.loader import load
from fedloom.federation.runs.reader import Run


def told(*command: str) -> tuple[int, str]:
    """Return the exit code of a command, and what it says."""
    done = CliRunner().invoke(app, ["flower", *command])
    return done.exit_code, f"{done.output} {done.exception or ''}"


def sites_file(home: Path, **changes: Any) -> Path:
    """sites.yaml beside a recipe, for two of the demo's sites."""
    value = prepare(home, 1)
    del value["sites"]["office"]
    value["sites"]["lab"]["terms"] = {"rounds": 5}
    value |= {"address": "fl.clinic.example", "port": 9191, **changes}
    (home / "sites.yaml").write_text(yaml.safe_dump(value))
    return home / "sites.yaml"


def test_a_kit_has_keys_certificate_terms_and_one_command(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    code, said = told("provision", str(sites_file(tmp_path)), "--out", str(out))
    assert code == 0, said
    assert {path.name for path in out.iterdir()} == {"server", "clinic", "lab"}
    recipe = load(out / "server" / "app" / "app" / "recipe.yaml")
    assert recipe.runtime.flower.nodes == 2
    authority = x509.load_pem_x509_certificate((out / "server" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((out / "server" / "server.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fl.clinic.example" in names.get_values_for_type(x509.DNSName)
    for name, terms in {"clinic": {"code": "none", "changes": []}, "lab": {"rounds": 5}}.items():
        kit = out / name
        assert (kit / "auth.pub").read_bytes() == (out / "server" / "sites" / f"{name}.pub").read_bytes()
        assert (kit / "ca.crt").read_bytes() == (out / "server" / "ca.crt").read_bytes()
        node = yaml.safe_load((kit / "home" / "node.yaml").read_text())
        assert (node["client"], node["terms"]) == (name, terms)
        found = {what: (good, text) for what, good, text in findings(
            out / "server" / "app", None, None, kit / "auth", kit / "home")}  # fmt: skip
        assert all(good for good, _ in found.values()), found
        assert (kit / "recipe.yaml").read_bytes() == (out / "server" / "app" / "app" / "recipe.yaml").read_bytes()
        assert "check . --superlink fl.clinic.example:9191" in (kit / "check.sh").read_text()
        assert recipe.runtime.flower.keys[name] in found["node"][1]
        assert "--superlink fl.clinic.example:9191" in (kit / "start.sh").read_text()
        assert "PORT=9101 ./start.sh" in (kit / "start.sh").read_text()  # two sites on one machine
    wrong = next(text for what, _, text in findings(out / "server", None, None, None, None) if what == "app")
    assert wrong.endswith(f"the app is {out / 'server' / 'app'}")
    secret = [path for path in out.rglob("*") if path.suffix == ".key" or path.name in ("auth", "key")]
    assert len(secret) == 7
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)
    assert all(os.access(script, os.X_OK) for script in out.rglob("*.sh"))
    code, said = told("provision", str(tmp_path / "sites.yaml"), "--out", str(out))
    assert (code != 0, "is not empty" in said) == (True, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"address": "fl.example:9092"},
            "address: 'fl.example:9092' found, expected a host name or IPv4 address, without",
        ),
        ({"address": "::1"}, "address: '::1' found, expected a host name or IPv4 address, without a port"),
        ({"address": "a b; rm -rf /"}, "address: 'a b; rm -rf /' found, expected a host name or IPv4 address"),
        ({"recipe": "digits-tasks"}, "data: digits found, expected data: nodes, for site 'clinic' has data"),
        ({"sites": {"../up": {}}}, "sites"),
        ({"sites": {"server": {}}}, "the name 'server' is reserved"),
        ({"sites": {"Server": {}}}, "the name 'Server' is reserved"),
        ({"sites": {"lab": {}, "Lab": {}}}, "'Lab' and 'lab' differ in case only"),
        ({"sites": {"a": {"terms": {"rounds": 0}}}}, "rounds"),
        ({"sites": {"a": {"client": "b"}}}, "site 'a': client: 'b' found, expected none"),
        ({"recipe": "no-such-recipe"}, "no-such-recipe"),
    ],
)
def test_what_is_wrong_with_sites_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    code, text = told("provision", str(sites_file(tmp_path, **changes)), "--out", str(tmp_path / "kits"))
    assert code != 0
    assert said in text
    assert not (tmp_path / "kits").exists()


def test_a_site_checks_its_data_with_its_kit_alone(tmp_path: Path) -> None:
    told("provision", str(sites_file(tmp_path)), "--out", str(tmp_path / "kits"))
    (tmp_path / "kits" / "clinic").rename(tmp_path / "clinic")
    code, said = told("check", str(tmp_path / "clinic"))
    assert (code, "client 'clinic', tasks digit" in said, "of a start kit" in said) == (0, True, True), said
    assert "ok    sends: after each training, how training changed" in said
    assert "the node of clinic" in (tmp_path / "clinic" / "READ-ME-FIRST.txt").read_text()
    node = tmp_path / "clinic" / "home" / "node.yaml"
    pinned = {"recipes": [sha256((tmp_path / "clinic" / "recipe.yaml").read_bytes()).hexdigest()]}
    node.write_text(yaml.safe_dump({**yaml.safe_load(node.read_text()), "terms": pinned}))
    assert ("may bring another recipe" in said, "another recipe" in told("check", str(node.parents[1]))[1]) == (
        True,
        False,
    )
    (tmp_path / "data" / "clinic.npz").unlink()
    code, said = told("check", str(tmp_path / "clinic"))
    assert (code, "WRONG node: " in said) == (1, True), said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"terms": {"methods": ["fedprox"]}}, "this site's terms: methods: fedavg found, expected only fedprox"),
        ({"terms": {"privacy": {"epsilon": 8, "delta": 1e-3}}}, "this site's terms: privacy: none found"),
        ({"terms": {"withhold": ["examples"]}}, "this site's terms: withhold: examples, but fedavg needs them"),
        (
            {"terms": {"leaves": ["encoder.*"]}},
            "WRONG refuses: each training and evaluation of this run: this site's terms: leaves: heads.",
        ),
        ({"terms": {"clients": 3}}, "evaluation of this run: this site's terms: clients: 2 expected in a round"),
        ({"client": "lab"}, "found, but the recipe lists it for clinic"),
        ({"client": "Clinic"}, "found, but the recipe lists it for clinic"),
        ({"data": None}, "node.yaml: data: expected a section data, for the recipe has data: nodes"),
    ],
)
def test_a_check_says_what_the_server_would_refuse(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """A site that edits its kit learns of it at the site, before a run begins without it."""
    told("provision", str(sites_file(tmp_path)), "--out", str(tmp_path / "kits"))
    kit = tmp_path / "kits" / "clinic"
    node = yaml.safe_load((kit / "home" / "node.yaml").read_text()) | change
    (kit / "home" / "node.yaml").write_text(yaml.safe_dump(node))
    code, text = told("check", str(kit))
    assert (code, said in text) == (1, True), text


def test_terms_that_only_a_run_can_violate_are_named(kits: Path) -> None:
    node = kits / "clinic" / "home" / "node.yaml"
    terms = {"leaves": ["encoder.*", "heads.*"], "clients": 2}
    node.write_text(yaml.safe_dump(yaml.safe_load(node.read_text()) | {"terms": terms}))
    code, said = told("check", str(kits / "clinic"))
    assert (code, "terms.leaves and terms.clients are tried again at each message" in said) == (0, True), said


def test_a_share_of_the_recipes_data_is_checked_against_the_terms(tmp_path: Path) -> None:
    told("new", "digits-tasks", "--out", str(tmp_path / "app"))
    for terms, good in (({"leaves": ["encoder.*"]}, False), ({"clients": 5}, True), ({"clients": 6}, False)):
        (tmp_path / "node.yaml").write_text(yaml.safe_dump({"client": "client-0", "terms": terms}))
        code, said = told("check", str(tmp_path / "app"), "--home", str(tmp_path))
        assert (code == 0, f"terms: {next(iter(terms))}: " in said) == (good, not good), said


def test_a_key_that_is_lost_is_no_key_of_the_recipe(tmp_path: Path) -> None:
    told("provision", str(sites_file(tmp_path)), "--out", str(tmp_path / "kits"))
    (tmp_path / "kits" / "clinic" / "home" / "key").unlink()
    code, text = told("check", str(tmp_path / "kits" / "clinic"))
    assert (code, "the recipe lists another key for this client" in text) == (1, True), text


def test_a_recipe_of_init_becomes_that_of_each_site(tmp_path: Path) -> None:
    """Each site states where its file is, and takes the rest of the section that was written for all sites' rows."""
    names = ("hospital", "age", "ill")
    rows = [(site, 40 + i % 30, int(i % 30 > 4 + i % 20)) for site in ("Ulm", "Bonn") for i in range(60)]
    for file, some in {"all": rows, "Ulm": rows[:60], "Bonn": rows[60:]}.items():
        lines = [",".join(map(str, row)) for row in (names, *some)]
        (tmp_path / f"{file}.csv").write_text("\n".join(lines))
    written = tmp_path / "recipe.yaml"
    options = ["--labels", "ill", "--clients", "hospital", "--method", "fedavg", "--rounds", "1", "--out", str(written)]
    assert CliRunner().invoke(app, ["init", str(tmp_path / "all.csv"), *options]).exit_code == 0
    sites: dict[str, Any] = {site: {"data": {"path": str(tmp_path / f"{site}.csv")}} for site in ("Ulm", "Bonn")}
    file = tmp_path / "sites.yaml"
    file.write_text(yaml.safe_dump({"recipe": "recipe.yaml", "address": "fl.example", "sites": sites}))
    code, said = told("provision", str(file), "--out", str(tmp_path / "kits"))
    assert code == 0, said
    recipe = load(tmp_path / "kits" / "server" / "app" / "app" / "recipe.yaml")
    assert (recipe.data.name, recipe.partition.name) == ("nodes", "nodes")
    code, said = told("check", str(tmp_path / "kits" / "Bonn"))
    assert (code, "client 'Bonn', tasks ill" in said) == (0, True), said
    sites["Ulm"]["data"] = {}
    file.write_text(yaml.safe_dump({"recipe": "recipe.yaml", "address": "fl.example", "sites": sites}))
    code, said = told("provision", str(file), "--out", str(tmp_path / "more"))
    assert (code != 0, "site 'Ulm': data.path: missing" in said) == (True, True), said


def test_a_kit_from_somebody_else_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of a kit, and kits for a list of sites that somebody sent, read the text first."""
    (tmp_path / "evil_kit.py").write_text("import pathlib\npathlib.Path('ran').write_text('')\ndef load(): ...\n")
    monkeypatch.chdir(tmp_path)
    told("provision", str(sites_file(tmp_path)), "--out", str(tmp_path / "kits"))
    (tmp_path / "kits" / "clinic" / "home" / "node.yaml").write_text("{client: clinic, data: {name: 'evil_kit:load'}}")
    code, said = told("check", str(tmp_path / "kits" / "clinic"))
    assert (code, "node.yaml names code that would be imported" in said) == (1, True), said
    file = sites_file(tmp_path, sites={"clinic": {"data": {"name": "evil_kit:load"}}})
    code, said = told("provision", str(file), "--out", str(tmp_path / "more"))
    assert (code != 0, "sites.yaml names code that would be imported" in said) == (True, True), said
    assert not (tmp_path / "ran").exists()


def test_a_certificate_of_another_deployment_is_named(tmp_path: Path) -> None:
    for kits in ("old", "new"):
        told("provision", str(sites_file(tmp_path, address="127.0.0.1")), "--out", str(tmp_path / kits))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*(tmp_path / "new" / "server" / f"server.{end}" for end in ("pem", "key")))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError), context.wrap_socket(listening.accept()[0], server_side=True):
                pass

        for kits, good in (("old", False), ("new", True)):
            threading.Thread(target=answer, daemon=True).start()
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            found = _superlink(address, tmp_path / kits / "clinic" / "ca.crt")
            what, is_good, said = next(found)
            assert (what, is_good) == ("tls", good), said
            if not good:
                assert "are this machine's files those of the newest deployment?" in said
                assert [*found] == []  # nothing more to learn from this server


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    told("provision", str(sites_file(tmp_path, address="localhost")), "--out", str(tmp_path / "kits"))
    return tmp_path / "kits"


def test_a_recipe_that_a_site_changed_is_told(kits: Path) -> None:
    """The server brings a run's recipe: a change of the kit's has no effect."""
    file = kits / "clinic" / "recipe.yaml"
    file.write_text(file.read_text().replace("epochs: 5", "epochs: 1"))
    code, said = told("check", str(kits / "clinic"))
    assert (code, "WRONG files: " in said, "a change of this file has no effect" in said) == (1, True, True), said


def test_certificates_that_have_ended_are_named(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own processes would fail with a traceback, and the node wait."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=366)

    monkeypatch.setattr("fedloom.engines.flower.check.datetime", Later)
    code, said = told("check", str(kits / "clinic"))
    assert (code, "ca.crt: a certificate from 20" in said, "ask for a new kit" in said) == (1, True, True), said
    code, said = told("check", str(kits / "server" / "app"))
    assert (code, "WRONG certificates: " in said, "server/ca.crt: a certificate" in said) == (1, True, True), said


def test_a_kit_on_a_medium_that_cannot_be_written(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode, **_: mode != os.W_OK)
    code, said = told("check", str(kits / "clinic"))
    assert (code, "clinic: cannot be written, expected a folder" in said) == (1, True), said


def test_a_check_takes_the_way_of_the_nodes_connection(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is used and named, without its password."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*(kits / "server" / f"server.{end}" for end in ("pem", "key")))
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def answer() -> None:
            for status in (b"200 OK", b"403 Forbidden"):
                link = proxy.accept()[0]
                asked.append(link.recv(4096))
                link.sendall(b"HTTP/1.1 " + status + b"\r\n\r\n")
                with contextlib.suppress(OSError), context.wrap_socket(link, server_side=True):
                    pass

        threading.Thread(target=answer, daemon=True).start()
        at = f"127.0.0.1:{proxy.getsockname()[1]}"
        for name in ("http_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("https_proxy", f"http://user:se%20cret@{at}")
        for good in (True, False):
            what, is_good, said = next(_superlink("localhost:9191", kits / "clinic" / "ca.crt"))
            assert (what, is_good, f", through the proxy {at} that" in said) == ("tls", good, True), said
            assert "secret" not in said.replace(" ", "")
    assert asked[0].startswith(b"CONNECT localhost:9191 ")
    assert b"Basic dXNlcjpzZSBjcmV0" in asked[0]
    assert "403 Forbidden; add the server's address to NO_PROXY" in said
    monkeypatch.setenv("no_proxy", "localhost")
    *_, said = next(_superlink("localhost:1", kits / "clinic" / "ca.crt"))
    assert (said.startswith("localhost:1 cannot be reached: "), "is the server started?" in said) == (True, True), said


def test_an_ipv6_address_is_read_in_brackets(kits: Path) -> None:
    said = next(_superlink("[::1]:1", kits / "clinic" / "ca.crt"))[2]
    assert said.startswith("::1:1 cannot be reached"), said


def run_script(kit: Path, script: str, **commands: str) -> tuple[int, str]:
    """Run a script of a kit with these shell scripts in the place of commands; return its exit code and its words."""
    for name, text in {"sleep": "", **commands}.items():
        (kit.parent / "bin").mkdir(exist_ok=True)
        (file := kit.parent / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    env = {**os.environ, "PATH": f"{kit.parent / 'bin'}:{os.environ['PATH']}", "NO_PROXY": "x.example"}
    env.pop("no_proxy", None)
    done = subprocess.run([kit / script], env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_server_that_never_answers_itself_says_why(kits: Path) -> None:
    """A firewall, for example; and a proxy does not lead to the server itself."""
    fedloom = 'case "$*" in *superlink*) echo "WRONG $*"; exit 1;; esac'
    superlink = {"flower-superlink": 'echo "direct $no_proxy"; exec /bin/sleep 50'}
    code, said = run_script(kits / "server", "start.sh", fedloom=fedloom, flwr="exit 1", **superlink)
    wrong = "WRONG flower check app --superlink 127.0.0.1:9191 --root-certificates ca.crt"
    assert (code, wrong in said) == (1, True), said
    assert "direct 127.0.0.1,x.example" in said


def test_a_key_that_the_server_refuses_and_its_end_are_told(kits: Path) -> None:
    refuses = (
        'case "$*" in *lab.pub*) echo "Public key already in use"; exit 1;; *register*) echo "no key"; exit 1;; esac'
    )
    code, said = run_script(
        kits / "server", "start.sh", flwr=refuses, fedloom="", **{"flower-superlink": "/bin/sleep 1; exit 7"}
    )
    assert (code, "sites/clinic.pub: no key" in said, "in use\n" in said) == (7, True, False), said
    assert "The server ended, and the lines above say why" in said
    code, said = run_script(kits / "server", "start.sh", flwr="exit 1", fedloom="", **{"flower-superlink": "exit 1"})
    assert (code, "port 9191 is\ntaken, perhaps by a server that runs already" in said) == (1, True), said


def test_a_node_that_ends_is_checked_and_tried_again(kits: Path) -> None:
    """Also where Flower ends it with code 0, as with a clock that is an hour off."""
    fedloom = 'case "$*" in *superlink*) echo "WRONG clock"; exit 1;; esac'
    code, said = run_script(kits / "clinic", "start.sh", fedloom=fedloom, **{"flower-supernode": "echo started"})
    assert (code, said.count("started"), said.count("WRONG clock")) == (1, 5, 6), said
    assert said.count("The node of clinic ended") == 5
    assert "port 9100 is taken, so press\nCtrl-C, then: PORT=9101 ./start.sh" in said
    code, said = run_script(kits / "clinic", "start.sh", fedloom="echo WRONG data; exit 1")
    assert (code, "started" in said) == (1, False), said


def test_a_run_that_has_not_ended_is_no_success(kits: Path) -> None:
    """`flwr run --stream` ends with code 0 also where the run failed."""
    code, said = run_script(kits / "server", "run.sh", flwr="echo $*")
    assert (code, "The run has not ended" in said, f'folder="{kits}/server/runs/sites"' in said) == (1, True, True), (
        said
    )
    (run := kits / "server" / "runs" / "sites").mkdir(parents=True)
    for status, expected in {"running": 1, "finished": 0}.items():
        (run / "run.json").write_text(f'{{"status": "{status}"}}')
        assert run_script(kits / "server", "run.sh", flwr="echo $*")[0] == expected


@pytest.mark.slow
def test_the_kits_run_and_nothing_outlives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server and the sites start with their one command each; a third runs the recipe."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    told("provision", str(sites_file(tmp_path, address="127.0.0.1", port=free_port())), "--out", str(tmp_path / "kits"))
    with deployment(tmp_path) as here:
        for name in ("clinic", "lab"):
            here.start(name)
        run = Run.read(here.run(280))
    assert run.final().values.keys() == {"digit", "parity"}
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left


@pytest.mark.slow
def test_the_demo_prints_a_table_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code, said = told("demo", "--rounds", "1")
    assert code == 0, said
    assert "digit" in said
    assert "parity" in said
    assert not list(tmp_path.glob("fedloom-flower-*"))


def test_a_list_of_sites_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, text = told("provision", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "kits"))
    assert code
    assert "none.yaml: not found, expected a YAML file" in " ".join(text.split())


def test_a_check_names_the_address_that_does_not_answer(tmp_path: Path) -> None:
    port = free_port()
    checks = findings(tmp_path, f"127.0.0.1:{port}", None, None, None)
    assert f"127.0.0.1:{port}: " in {what: text for what, _, text in checks}["superlink"]
