"""Two torchruns on two machines, simulated by network namespaces if this user may create them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import COMMON, checkpoints
from tests.parallel.test_torchrun import ROOT, environment, finished, ranks_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
NODES = {"a": "10.99.0.1", "b": "10.99.0.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[None]:
    try:
        for node in NODES:
            ip("netns", "add", f"fdp-{node}")
            ip("-n", f"fdp-{node}", "link", "set", "lo", "up")
            names = Path(f"/etc/netns/fdp-{node}")
            names.mkdir(parents=True, exist_ok=True)
            known = "".join(f"{address} node-{other}\n" for other, address in NODES.items())
            (names / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        ip("link", "add", "fdp-a", "netns", "fdp-a", "type", "veth", "peer", "name", "fdp-b", "netns", "fdp-b")
        for node, address in NODES.items():
            ip("-n", f"fdp-{node}", "addr", "add", f"{address}/24", "dev", f"fdp-{node}")
            ip("-n", f"fdp-{node}", "link", "set", f"fdp-{node}", "up")
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"may not make network namespaces: {error}")
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", f"fdp-{node}"], capture_output=True, check=False)


def start(node: str, out: Path, *words: str) -> subprocess.Popen[str]:
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{NODES['a']}:29400",
            "--rdzv-id",
            "job",
            "--max-restarts",
            "3",
        ),
        *("--local-addr", NODES[node]),
    ]
    command = [*torchrun, "-m", "fdp", "train", *COMMON, "--mesh", "shard=2", *words, "--json", "--out", str(out)]
    named = ["ip", "netns", "exec", f"fdp-{node}", "unshare", "-u", "sh", "-c", f'hostname node-{node}; exec "$@"', "-"]
    variables = environment() | {"GLOO_SOCKET_IFNAME": f"fdp-{node}"}
    return subprocess.Popen(
        [*named, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, cwd=ROOT
    )


def wait_for_step(out: Path, step: int, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not checkpoints(out) or checkpoints(out)[-1].name < f"step-{step:08d}":
        assert time.monotonic() < deadline, "no checkpoint appeared"
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


def test_a_rank_killed_on_one_machine_brings_both_back_and_the_result_is_the_same(machines, tmp_path):
    words = ("--steps", "30", "--save-every", "2", "--timeout", "60")
    hashes = []
    for name in ("whole", "killed"):
        nodes = [start(node, tmp_path / name, *words) for node in NODES]
        if name == "killed":
            wait_for_step(tmp_path / name, 6, *nodes)
            os.kill(ranks_of(nodes[1])[0], signal.SIGKILL)
        ended = [finished(node, seconds=200) for node in nodes]
        assert [code for code, _ in ended] == [0, 0], ended
        hashes.append(json.loads((tmp_path / name / "summary.json").read_text())["parameter_sha256"])
    assert hashes[0] == hashes[1]


def test_a_rank_that_stops_answering_is_named_with_its_machine(machines, tmp_path):
    nodes = [start(node, tmp_path / "run", "--steps", "400", "--save-every", "2", "--timeout", "6") for node in NODES]
    wait_for_step(tmp_path / "run", 4, *nodes)
    stopped = ranks_of(nodes[1])[0]
    rank = 1 if b"RANK=1" in Path(f"/proc/{stopped}/environ").read_bytes().split(b"\0") else 0
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(25)
    for node in nodes:
        node.terminate()
    os.kill(stopped, signal.SIGKILL)
    text = " ".join(" ".join(finished(node, seconds=120)[1] for node in nodes).split())
    assert f"rank {rank} (process {stopped} on node-b) of 2 has stopped answering" in text
