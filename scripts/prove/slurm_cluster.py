"""Start a Slurm cluster of two nodes on this machine, in a temporary folder, and run a command with it.

python scripts/prove/slurm_cluster.py bash
python scripts/prove/slurm_cluster.py srun --nodes=2 hostname

Needs Slurm and munge, but no configuration, no service and no root: `apt-get install slurm-wlm munge`. Nodes are called
127.0.0.1 and 127.0.0.2, addresses of this machine, and have 8 GPUs in name. The cluster ends with the command.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NODES = ("127.0.0.1", "127.0.0.2")
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch")
PLACES = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
NODE_TIMEOUT = 10  # seconds until a node that does not answer is down
LIMIT = 30  # seconds for a daemon to begin or end
# Short times instead of minutes: a node that is down, signals before SIGKILL, the pause before a requeued job begins.
# A node has no devices but in name, and as many cores as it says: both nodes are this machine.
CONF = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdTimeout={timeout}
SlurmdParameters=config_overrides
KillWait=5
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
JobRequeue=1
SchedulerParameters=sched_interval=2
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:8
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=2 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with the cluster; -> its exit code, or 2 where Slurm is not installed."""
    command = sys.argv[1:] if argv is None else list(argv)
    if not command or command[0].startswith("-"):
        print(__doc__)
        return 2 * (not command)
    if missing():
        print(f"error: {', '.join(missing())} not installed; apt-get install slurm-wlm munge", file=sys.stderr)
        return 2
    with Cluster() as cluster:
        return subprocess.run(command, env=os.environ | cluster.env, check=False).returncode


def missing() -> list[str]:
    """Return the programs of Slurm and munge that this machine lacks."""
    return [program for program in PROGRAMS if not shutil.which(program, path=PLACES)]


class Cluster:
    """A cluster for the duration of a `with` statement. Raises RuntimeError if a daemon does not begin."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.daemons: dict[str, subprocess.Popen] = {}
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        (self.folder / "state").mkdir()
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        host = socket.gethostname().partition(".")[0]
        conf = CONF.format(host=host, user=user, folder=self.folder, ports=free_ports(3), timeout=NODE_TIMEOUT)
        Path(self.env["SLURM_CONF"]).write_text(conf)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        for gpu in range(8):
            (self.folder / f"gpu{gpu}").touch()
        try:
            key = self.folder / "munge.key"
            subprocess.run([found("mungekey"), "--create", f"--keyfile={key}"], check=True)
            files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
            socket_file = self.folder / "munge.socket"
            self.start("munged", "--foreground", "--force", *files, f"--socket={socket_file}")
            self.wait(socket_file.exists, "munged")
            self.start("slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            for node in NODES:
                self.wait_for_state(node, "IDLE")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, program: str, *arguments: str, name: str | None = None) -> None:
        """Start a daemon, which writes to a file of its name in the folder."""
        name = name or program
        with (self.folder / f"{name}.out").open("ab") as out:
            command = [found(program), *arguments]
            self.daemons[name] = subprocess.Popen(command, env=os.environ | self.env, stdout=out, stderr=out)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node, the first time or again."""
        self.start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """End a node as a loss of power does: SIGKILL to its daemon and to all processes of jobs on it."""
        self.daemons.pop(node).kill()
        while pids := processes_of(node, self.env["SLURM_CONF"]):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def state(self, node: str) -> str:
        """Return the state of a node, e.g. IDLE, ALLOCATED, DOWN+NOT_RESPONDING."""
        shown = subprocess.run(
            ["scontrol", "show", "node", node, "--oneliner"],
            env=os.environ | self.env,
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("State=")), "")

    def wait_for_state(self, node: str, state: str, limit: float = LIMIT) -> None:
        """Wait until the state of a node begins with the given word."""
        self.wait(lambda: self.state(node).startswith(state), f"{node} is not {state}: slurmctld", limit)

    def wait(self, until: Callable[[], bool], name: str, limit: float = LIMIT) -> None:
        """Wait until a condition holds. Raises RuntimeError with the end of the logs after the limit, in seconds."""
        deadline = time.monotonic() + limit
        while not until():
            if time.monotonic() > deadline:
                logs = [f"{file.name}: {file.read_text()[-2000:]}" for file in sorted(self.folder.glob("*.out"))]
                raise RuntimeError(f"{name} after {limit} s\n" + "\n".join(logs))
            time.sleep(0.2)

    def stop(self) -> None:
        """End all jobs and daemons, and remove the folder."""
        for node in set(NODES) & self.daemons.keys():
            self.kill_node(node)
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(LIMIT)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def found(program: str) -> str:
    """Return the path of a program. Raises FileNotFoundError."""
    path = shutil.which(program, path=PLACES)
    if path is None:
        raise FileNotFoundError(f"{program} is not installed; apt-get install slurm-wlm munge")
    return path


def free_ports(count: int) -> list[int]:
    """Return TCP ports that nothing listens on."""
    servers = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def processes_of(node: str, conf: str) -> list[int]:
    """Return the process ids of jobs on a node of this cluster: tasks, their children, and Slurm's own around them."""
    environments: dict[int, Mapping[str, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (folder / "environ").read_bytes().decode(errors="replace")
            environments[int(folder.name)] = dict(part.split("=", 1) for part in text.split("\0") if "=" in part)
    pids = set()
    for pid, env in environments.items():
        if env.get("SLURMD_NODENAME") == node and env.get("SLURM_CONF") == conf:
            pids |= {pid, *parent_step(pid)}
    return sorted(pids)


def parent_step(pid: int) -> list[int]:
    """Return the id of the slurmstepd that is the parent of a process, if one is."""
    with suppress(OSError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
            return [parent]
    return []


if __name__ == "__main__":
    sys.exit(main())
