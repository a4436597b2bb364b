"""`--rank-debugpy`: an IDE attaches to one rank, by the Debug Adapter Protocol; the other ranks wait."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from suites.selftest.project import Project

pytest.importorskip("debugpy", reason="of the extra `debug`")

TESTS = """
import torch
import torch.distributed as dist


@pytest.mark.ranks(2, timeout=1)
def test_stops(world):
    value = torch.ones(1)
    if world.rank == 1:
        breakpoint()
    dist.all_reduce(value)
    assert value.item() == 2


@pytest.mark.ranks(2, timeout=1)
def test_goes_on(world):
    assert world.gather(world.rank) == [0, 1]
"""


class Ide:
    """A client that attaches, waits for a stop and lets the rank go on."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._stream = self._socket.makefile("rwb")
        self._number = 0

    def send(self, command: str, **arguments: Any) -> None:
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._stream.flush()

    def receive(self, name: str) -> dict[str, Any]:
        """Return the next event, or answer to a command, of that name."""
        while True:
            length = 0
            while (line := self._stream.readline().strip()) or not length:
                assert line or length, "the debugger has closed the connection"
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            message: dict[str, Any] = json.loads(self._stream.read(length))
            if name in (message.get("event"), message.get("command")):
                return message

    def attach(self) -> None:
        self.send("initialize", adapterID="debugpy", clientID="test")
        self.receive("initialize")
        self.send("attach", justMyCode=False)
        self.receive("initialized")
        self.send("configurationDone")

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def test_an_ide_stops_one_rank_and_the_others_wait(project: Project) -> None:
    project.write(TESTS)
    process = project.start("--rank-debugpy=1", "-v")
    assert process.stdout is not None
    head = ""
    while not (found := re.search(r"rank 1 waits for a debugger on 127\.0\.0\.1:(\d+)", head)):
        line = process.stdout.readline()
        assert line, head
        head += line
    attach = f'"type": "debugpy", "request": "attach", "connect": {{"host": "127.0.0.1", "port": {found[1]}}}'
    assert attach in process.stdout.readline()
    ide = Ide(int(found[1]))
    ide.attach()
    thread = ide.receive("stopped")["body"]["threadId"]
    ide.send("stackTrace", threadId=thread)
    (frame, *_) = ide.receive("stackTrace")["body"]["stackFrames"]
    assert frame["name"] == "test_stops"
    assert Path(frame["source"]["path"]).name == "test_sample.py"
    time.sleep(2.5)  # longer than the deadline of the test, and than a hang takes to be found
    ide.send("continue", threadId=thread)
    ide.receive("continue")
    ide.close()
    output = process.communicate(timeout=180)[0]
    assert "2 passed" in output
    project.assert_nothing_is_left()


def test_each_world_waits_on_a_port_of_its_own(project: Project) -> None:
    project.write("@pytest.mark.ranks(2, 3)\ndef test_size(world):\n    assert world.size in (2, 3)\n")
    process = project.start("--rank-debugpy=1", "-v")
    assert process.stdout is not None
    head, ides = "", []
    while len(ides) < 2:
        line = process.stdout.readline()
        assert line, head
        head += line
        if found := re.search(r"rank 1 waits for a debugger on 127\.0\.0\.1:(\d+)", line):
            ides.append(Ide(int(found[1])))
            ides[-1].attach()
    output = process.communicate(timeout=180)[0]
    for ide in ides:
        ide.close()
    assert "2 passed" in output, head + output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rank-debugpy=x"], "--rank-debugpy x: write RANK or RANK:PORT, such as 1:5678"),
        (["--rank-debugpy=1:"], "--rank-debugpy 1:: write RANK or RANK:PORT, such as 1:5678"),
        (
            ["--rank-debugpy=1", "--rank-pdb=1"],
            "--rank-debugpy 1: one debugger at a time; leave out --rank-pdb",
        ),
        (
            ["--rank-debugpy=1", "-p", "xdist", "-n2"],
            "--rank-debugpy 1: each process of pytest -n would listen there; leave out -n",
        ),
        (
            ["--rank-debugpy=2"],
            "--rank-debugpy 2: there is no such rank: the largest world has the ranks 0 to 1",
        ),
    ],
)
def test_what_cannot_be_debugged_is_one_line(project: Project, args: list[str], message: str) -> None:
    project.write("def test_x(world): pass\n")
    assert f"ERROR: {message}" in project.run(*args).splitlines()


def test_a_port_in_use_is_one_line(project: Project) -> None:
    project.write("def test_x(world): pass\n")
    with socket.create_server(("127.0.0.1", 0)) as used:
        option = f"--rank-debugpy=1:{used.getsockname()[1]}"
        output = project.run(option)
    error = f"ERROR: {option.replace('=', ' ')}: Address already in use: write another port, or none"
    assert error in output.splitlines()
