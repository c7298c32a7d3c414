"""Failures on purpose, in a deployment with TLS and node keys: what happens, and whether the run survives.

python trials.py [OUT]: a stranger's key; payloads with nan, far too large, of another model; a failure that passes; a
node killed with -9 in the middle of a round, another that takes its name, and the first one started again; a node that
is slower than the deadline; a node that runs only signed apps; the server app killed with -9; the SuperLink and the
server app killed with -9, and the SuperLink started again: a loop in the shell, as in a systemd unit, starts the run
again. One node has terms for the recipe and its changes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from fedloom.core.settings.yaml import to_yaml
from fedloom.engines.flower.deployment import Deployment, deployment, prepare, provision
from fedloom.federation.runs.track import FILE as AUDIT
from fedloom.federation.runs.track import verified

ROUNDS, DEADLINE = 14, 240
LOOP = """\
#!/bin/sh
until flwr run '{app}' tls --stream --run-config '{settings}'; test -f '{run}/run.json' &&
    ! grep -q 'status.: .running' '{run}/run.json'
do sleep 10; done
"""
# What the app of the site "lab" does to its answers in rounds 1 to 3; in round 10 it fails once; where its home has a
# file `slow`, it answers a minute after the deadline.
ROGUE = f"""
import time

import torch
from fedloom.engines.flower.node import Node

honest = Node.train


def train(self, head, tree):
    failed = self.home / "failed"
    if self.client == "lab" and head["round"] == 10 and not failed.exists():
        failed.touch()
        raise OSError("the share is not mounted")
    if (self.home / "slow").exists():
        (self.home / "slow").unlink()
        time.sleep({DEADLINE + 60})
    payload, numbers = honest(self, head, tree)
    if self.client == "lab":
        values = payload["packed"]["values"]
        if head["round"] == 1:
            payload["packed"] = {{"values": values * float("nan")}}
        if head["round"] == 2:
            payload["packed"] = {{"values": torch.zeros(5_000_000)}}
        if head["round"] == 3:
            payload["packed"] = {{"values": values[:-1]}}
    return payload, numbers


Node.train = train
"""


TERMS = {"code": "none", "changes": ["training.rounds", "evaluation.every", "runtime.flower"]}


def trusted(out: Path) -> Path:
    """A file of one entity that may sign apps, whose private key nobody has."""
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    (out / "trusted.yaml").write_text(f"fpk_nobody: {text}\n")
    return out / "trusted.yaml"


def lines(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    return [json.loads(text) for text in file.read_text().splitlines()] if file.is_file() else []


def rounds_of(out: Path) -> int:
    """Return the number of the last recorded round; -1 before the first."""
    return len(lines(out)) - 1


def kill_inside(pid: int, word: str) -> int:
    """Kill, with -9, the descendants of a process whose command has this word. Returns their number."""
    killed, above = 0, [pid]
    while above:
        listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", ",".join(map(str, above))], capture_output=True)
        below = dict(line.split(None, 1) for line in listed.stdout.decode(errors="replace").splitlines())
        for number in (int(pid) for pid, command in below.items() if word in command):
            os.kill(number, signal.SIGKILL)
            killed += 1
        above = [int(pid) for pid in below]
    return killed


def kill(here: Deployment, name: str) -> None:
    """Kill a process and all that it started."""
    os.killpg(here.processes[name].pid, signal.SIGKILL)
    here.stop(name)


def wait(here: Deployment, out: Path, rounds: int, seconds: float = 1200) -> None:
    end = time.monotonic() + seconds
    while rounds_of(out) < rounds:
        if rounds_of(out) < 0 and here.processes["loop"].poll() is not None:
            raise RuntimeError(f"the run did not begin: see {here.logs / 'loop.log'}")
        if time.monotonic() > end:
            raise TimeoutError(f"round {rounds} has not come: see {here.logs}")
        time.sleep(0.5)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(out: Path) -> None:
    value = prepare(out, ROUNDS)
    value["sites"] |= {name: {} for name in ("careful", "stranger", "impostor")}
    for name, site in value["sites"].items():
        site["terms"] = TERMS if name == "clinic" else None
    (out / "sites.yaml").write_text(to_yaml(value))
    kits = out / "kits"
    provision(out / "sites.yaml", kits)
    (kits / "server" / "sites" / "stranger.pub").unlink()
    (kits / "impostor" / "home" / "node.yaml").write_text((kits / "office" / "home" / "node.yaml").read_text())
    client = kits / "server" / "app" / "app" / "client_app.py"
    client.write_text(client.read_text() + ROGUE)
    run = out / "runs" / "trials"
    waits = f"runtime.flower={{nodes: 3, min_clients: 1, deadline: {DEADLINE}, wait: 300}}"
    changes = f"training.rounds={ROUNDS}; evaluation.every={ROUNDS}; {waits}"
    (out / "run.toml").write_text(f"folder = '{run}'\nchanges = '{changes}'\n")
    (kits / "loop").mkdir()
    (kits / "loop" / "start.sh").write_text(
        LOOP.format(app=kits / "server" / "app", settings=out / "run.toml", run=run)
    )
    (kits / "loop" / "start.sh").chmod(0o755)
    with deployment(out) as here:
        for site in ("clinic", "lab", "office"):
            here.start(site)
        here.start("careful", "--trusted-entities", trusted(out))
        stranger = here.start("stranger")
        here.start("loop")
        say(f"a node with a key that is not registered: exit code {stranger.wait(timeout=300)}")
        here.processes.pop("stranger")
        wait(here, run, 3)
        say("three rounds with a node that sends nan, too much, and too little")
        time.sleep(5)
        kill(here, "office")
        say("node 'office' killed in round 4")
        wait(here, run, 4)
        say("round 4 is over; a node with another key, which is registered, says that it is 'office'")
        here.start("impostor")
        while not any("first showed" in event.get("why", "") for line in lines(run) for event in line["events"]):
            wait(here, run, rounds_of(run) + 1)
        here.stop("impostor")
        here.start("office")
        say("'office' is started again; 'lab' will answer a minute after the deadline")
        (kits / "lab" / "home" / "slow").touch()
        wait(here, run, rounds_of(run) + 3)
        killed = kill_inside(here.processes["server"].pid, "flwr-serverapp")
        say(f"server app killed ({killed} process) in round {rounds_of(run) + 1}")
        wait(here, run, max(rounds_of(run) + 1, ROUNDS - 1))
        say(f"server app and SuperLink killed in round {rounds_of(run) + 1}")
        kill(here, "server")
        here.start_server()
        code = here.processes["loop"].wait(timeout=1200)
        here.processes.pop("loop")
        about = json.loads((run / "run.json").read_text())
        say(f"the loop ended with code {code}: {about['status']} after {about['rounds']} rounds")
        noted = [line["what"] for line in verified(kits / "clinic" / "home" / AUDIT)]
        say(f"audit of 'clinic': {', '.join(f'{count} {what}' for what, count in sorted(Counter(noted).items()))}")
    for line in lines(run)[1:]:
        trained = sorted({each["client"] for each in line["train"]})
        say(f"round {line['round']}: trained {', '.join(trained)}")
        for event in line["events"]:
            say("    " + ", ".join(f"{key} {str(value).splitlines()[-1][:160]}" for key, value in event.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="fedloom-trials-")).resolve())
