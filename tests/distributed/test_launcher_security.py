"""The launcher's port: who may speak, what is refused, what others can see, and a side that is silent."""

import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import CONFIG, Launched, finished

from nanotrain_jax import launch
from nanotrain_jax.distributed import coordinator, protocol
from nanotrain_jax.distributed.protocol import AGENT, NONCE, PROOF, Connection, Refused, admit, join

TOKEN, OTHER = b"0123456789abcdef", b"fedcba9876543210"


class Recorded(socket.socket):
    """A socket that keeps what it sends."""

    def sendall(self, data):
        self.kept = getattr(self, "kept", b"") + data
        super().sendall(data)


def pair():
    """Return both ends of a TCP connection; the second keeps what it sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        return listener.accept()[0], Recorded(fileno=other.detach())


def joined(token=TOKEN):
    """Return both ends of a connection, and the agent's socket."""
    of_coordinator, of_agent = pair()
    ends = []
    thread = threading.Thread(target=lambda: ends.append(admit(of_coordinator, TOKEN)))
    thread.start()
    agent = join(of_agent, token)
    thread.join()
    return ends[0], agent, of_agent


def received(connection, data):
    """Return what a connection accepts of these bytes."""
    sender, receiver = socket.socketpair()
    connection.lines = receiver.makefile("rb")
    sender.sendall(data)
    sender.close()
    return list(connection.receive())


def test_messages_arrive_in_both_directions():
    leader, agent, _ = joined()
    agent.send(host=1)
    agent.send(host=2)
    leader.send(code=0)
    agent.socket.shutdown(socket.SHUT_WR)
    leader.socket.shutdown(socket.SHUT_WR)
    assert (list(leader.receive()), list(agent.receive())) == ([{"host": 1}, {"host": 2}], [{"code": 0}])


@pytest.mark.skipif(sys.platform != "linux", reason="needs a socket filter")
def test_a_side_that_acknowledges_nothing_is_lost(monkeypatch):
    assert protocol.LOSS["TCP_USER_TIMEOUT"] == 60_000
    monkeypatch.setitem(protocol.LOSS, "TCP_USER_TIMEOUT", 500)
    leader, _, of_agent = joined()
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of each packet
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    of_agent.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER: as if its host had lost power
    heard = []
    thread = threading.Thread(target=lambda: heard.extend([*leader.receive(), "lost"]), daemon=True)
    thread.start()
    leader.send(code=0)
    thread.join(20)  # keepalive alone ends no connection with data on its way
    assert heard == ["lost"]


def test_another_token_is_refused_on_both_sides():
    of_coordinator, of_agent = pair()
    refused = []

    def lead():
        with pytest.raises(Refused):
            admit(of_coordinator, TOKEN)
        refused.append(True)

    thread = threading.Thread(target=lead)
    thread.start()
    with pytest.raises(Refused, match="the launcher of host 0 has another token; give all hosts the same"):
        join(of_agent, OTHER)
    thread.join()
    assert refused


def test_a_recorded_conversation_is_refused_on_another_connection():
    _, agent, of_agent = joined()
    agent.send(host=1)
    sock, stranger = pair()
    stranger.sendall(of_agent.kept)
    with pytest.raises(Refused):
        admit(sock, TOKEN)


@pytest.mark.parametrize(
    "change",
    [
        lambda first, second: first + first,  # again
        lambda first, second: first + second.replace(b"2", b"3"),  # altered
        lambda first, second: first + b"x" * (protocol.MAX_LINE + 1),  # longer than a line may be
        lambda first, second: first + b"\xff\x00 {}\n",
        lambda first, second: first + b'{"host": 2}\n',
    ],
)
def test_lines_that_are_replayed_altered_too_long_or_random_end_the_connection(change):
    leader, agent, of_agent = joined()
    start = len(of_agent.kept)
    agent.send(host=1)
    middle = len(of_agent.kept)
    agent.send(host=2)
    first, second = of_agent.kept[start:middle], of_agent.kept[middle:]
    key = leader.key
    assert received(Connection(leader.socket, key, leader.own), first + second) == [{"host": 1}, {"host": 2}]
    assert received(Connection(leader.socket, key, leader.own), change(first, second)) == [{"host": 1}]
    assert received(Connection(leader.socket, key, leader.own), second) == []  # out of order
    assert received(Connection(leader.socket, key, AGENT), first) == []  # back to its sender


def test_a_run_is_undisturbed_by_strangers_at_its_port_which_only_the_given_interface_has(tmp_path):
    run = Launched(tmp_path, dict.fromkeys([(0, 0), (0, 1)], "time.sleep(2)"), hosts=2)
    run.wait_for_starts(2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", run.port))
    for data in b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(NONCE + PROOF), bytes(1 << 16):
        with socket.create_connection(("127.0.0.1", run.port)) as sock:
            sock.sendall(data)
            sock.settimeout(3)
            assert len(sock.recv(NONCE)) == NONCE
    codes, _, err = run.wait_for_exit()
    assert codes == [0, 0]
    assert set(err.splitlines()) == {"launcher: refused a connection from 127.0.0.1: it has another token"}


def test_a_host_with_another_token_is_told_and_nobody_prints_it(tmp_path):
    run = Launched(tmp_path, {}, "--join-timeout", "3", hosts=2)
    run.launchers[1].kill()
    run.launchers[1].communicate()
    command = ["--hosts", "2", "--host", "1", "--leader", f"127.0.0.1:{run.port}", "--config", "x"]
    command.insert(6, "--")
    command[-1] = str(tmp_path / "x.yaml")
    env = os.environ | {launch.TOKEN: OTHER.decode()}
    other = subprocess.Popen(
        [sys.executable, "-m", "nanotrain_jax.launch", *command], stderr=subprocess.PIPE, text=True, env=env
    )
    _, err = finished(other, 2)
    assert err == "error: the launcher of host 0 has another token; give all hosts the same\n"
    _, err = run.launchers[0].communicate(timeout=30)
    assert "launcher: refused a connection from 127.0.0.1: it has another token" in err
    assert TOKEN.decode() not in err
    assert OTHER.decode() not in err


def test_workers_and_command_lines_do_not_have_the_token(tmp_path):
    check = f"sys.exit({launch.TOKEN!r} in os.environ)"
    run = Launched(tmp_path, {(0, 0): check, (0, 1): check}, hosts=2)
    shown = [Path(f"/proc/{launcher.pid}/cmdline").read_text() for launcher in run.launchers]
    assert run.wait_for_exit()[0] == [0, 0]
    assert not any(TOKEN.decode() in line for line in shown)


def test_connections_that_prove_nothing_are_bounded_and_leave_the_port_usable(monkeypatch):
    monkeypatch.setattr(coordinator, "MAX_STRANGERS", 2)
    monkeypatch.setattr(protocol, "HANDSHAKE_TIMEOUT", 1)
    listener = launch.listen("127.0.0.1", 0)
    place = listener.getsockname()
    policy = coordinator.RestartPolicy(1, 0, False, 60)
    leader = coordinator.Coordinator(listener, "127.0.0.1", TOKEN, policy, lambda *left: (1, []))
    threading.Thread(target=leader._accept, daemon=True).start()
    waiting = [socket.create_connection(place) for _ in range(2)]
    assert [len(sock.recv(NONCE)) for sock in waiting] == [NONCE, NONCE]
    with socket.create_connection(place) as third:
        assert third.recv(NONCE) == b""
    assert [sock.recv(1) for sock in waiting] == [b"", b""]  # closed after the timeout
    time.sleep(0.1)
    agent = join(socket.create_connection(place), TOKEN)
    agent.send(**{"is": "ready"}, host=0, processes=1, devices=1, stopping=True)
    until = time.monotonic() + 10
    while 0 not in leader.ready:
        assert time.monotonic() < until
        time.sleep(0.01)


def request(tmp_path, *options):
    (tmp_path / "x.yaml").write_text(CONFIG)
    return launch.main([*options, "--", "--config", str(tmp_path / "x.yaml")])


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"0123456789abcdef", 0o644, "can be read by others than its owner; chmod 600"),
        (b"short-one\n", 0o600, "has 9 bytes: must be 16 to 4096; openssl rand -hex 32"),
        (b"x" * 5000, 0o600, "must be 16 to 4096"),
        (None, 0, "No such file"),
    ],
)
def test_a_token_file_that_is_open_short_long_or_missing_is_refused(content, mode, message, tmp_path, capsys):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    assert request(tmp_path, "--token-file", str(file)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert content is None or content.decode().strip() not in err


def test_several_hosts_need_a_token_and_one_makes_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(launch.TOKEN, raising=False)
    hosts = ["--hosts", "2", "--host", "0", "--leader", "127.0.0.1:0"]
    assert request(tmp_path, *hosts) == 2
    assert "2 hosts without a token; set NANOTRAIN_TOKEN to the same secret on all" in capsys.readouterr().err
    assert launch.read_token(None, 1) != launch.read_token(None, 1)
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o600)
    assert launch.read_token(str(file), 2) == TOKEN


def test_an_interface_that_is_not_local_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(launch.TOKEN, TOKEN.decode())
    hosts = ["--hosts", "2", "--host", "0", "--leader", "192.0.2.1:29500"]
    assert request(tmp_path, *hosts) == 2
    assert "cannot listen at 192.0.2.1:29500" in capsys.readouterr().err
    assert (launch.interface("192.0.2.1"), launch.interface("node0")) == ("192.0.2.1", "")
