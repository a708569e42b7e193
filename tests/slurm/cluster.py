"""A real SLURM on one machine, by hand: munged, slurmctld and a slurmd for each node, on loopback, without systemd.

All state lies in one temporary folder, the daemons are children of this process, and each is ended by its own pid. As root only: slurmd
starts jobs for their users.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
NODES = 2
# More than there are, so that scripts which ask for many are accepted, and elements of an array run side by side on two cores.
CPUS_A_NODE = 32
# There are none: links to /dev/null stand for them.
GPUS_A_NODE = 2

# Long, since a busy machine may be slow; each wait ends as soon as what it waits for has come.
WITHIN_S = 120.0
_LOOK_EVERY_S = 0.1

# Every state of a job that has ended and does not come back by itself.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

_CONFIGURATION = """
ClusterName=harvest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/spool-%n
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/slurmd-%n.log
MailProg=/bin/true
# Neither cgroups nor accounting: a container has the rights for the one seldom, and the other is a daemon and a database more.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerType=sched/backfill
# Look at the queue each second: the defaults of half a minute and more are for clusters of thousands.
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=3600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

Found = TypeVar("Found")


def why_not() -> str | None:
    """Why no SLURM can be started here; None where one can."""
    missing = [name for name in (*DAEMONS, *COMMANDS) if _program(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install --no-install-recommends slurm-wlm munge)"
    if os.geteuid() != 0:
        return "slurmd needs root, so as to start jobs for their users"
    return None


def wait_for(look: Callable[[], Found | None], what: str, within_s: float = WITHIN_S) -> Found:
    """Look again and again until what is found is true, and answer it; an AssertionError that says what was waited for when time is up."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {within_s:.0f} s in vain: {what}"
        time.sleep(_LOOK_EVERY_S)
    return found


class Cluster:
    """A running SLURM, as a context: two nodes with two would-be GPUs each, both of them this machine."""

    def __init__(self) -> None:
        # Not pytest's folder: the path of a socket has at most 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.environment = {**_without_slurm(os.environ), "SLURM_CONF": str(self.root / "slurm.conf")}
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def run(self, *command: str | Path, **environment: str) -> str:
        """What a command of SLURM prints on stdout; an AssertionError with its stderr where it fails."""
        done = self.call(*command, **environment)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}: {done.stderr}"
        return done.stdout

    def call(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command with this cluster's configuration, run to its end."""
        words = [str(word) for word in command]
        return subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, env={**self.environment, **environment})

    def submit(self, script: str | Path, *options: str, cwd: Path, **environment: str) -> int:
        """Hand a script, by its path or as its text, to sbatch, from the folder `cwd`, and answer the job's id."""
        name = self._write(script) if isinstance(script, str) else script
        return int(self.run("sbatch", "--parsable", f"--chdir={cwd}", *options, name, **environment).split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """The fields of a job as scontrol shows them, such as JobState, ExitCode, Restarts; of an element as `7_2`."""
        words = self.run("scontrol", "show", "job", "--oneliner", str(job_id)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job_id: int | str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of the states, by default one that has ended, and answer its fields."""
        wanted = states or ENDED

        def look() -> dict[str, str] | None:
            job = self.job(job_id)
            return job if job["JobState"] in wanted else None

        return wait_for(look, f"job {job_id} in {' or '.join(wanted)}")

    def begin_now(self, job_id: int) -> None:
        """Let a requeued job start in a moment: SLURM holds it back for two minutes.

        Not at once: slurmd would take it for the earlier start, whose credential was revoked within the same second.
        """
        self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+3")

    def _start(self) -> None:
        (self.root / "state").mkdir()
        ports = free_ports(1 + NODES)
        names = [f"n{number}" for number in range(NODES)]
        host = socket.gethostname().split(".")[0]
        nodes = []
        devices = []
        for name, port in zip(names, ports[1:], strict=True):
            (self.root / f"spool-{name}").mkdir()
            nodes.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_A_NODE} Gres=gpu:{GPUS_A_NODE}")
            for number in range(GPUS_A_NODE):
                (self.root / f"{name}-gpu{number}").symlink_to("/dev/null")
            devices.append(f"NodeName={name} Name=gpu File={self.root}/{name}-gpu[0-{GPUS_A_NODE - 1}]")
        text = _CONFIGURATION.format(root=self.root, host=host, ctld_port=ports[0], nodes="\n".join(nodes))
        (self.root / "slurm.conf").write_text(text)
        (self.root / "gres.conf").write_text("\n".join(devices) + "\n")

        key, munge = self.root / "munge.key", self.root / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge_files = [f"--{name}-file={self.root}/munge.{name}" for name in ("pid", "log", "seed")]
        # --force: folders above may be open to others, which munge else refuses, and this key is for one test.
        self._spawn("munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={key}", *munge_files)
        self._wait_for_daemons(munge.exists, "munged's socket")
        self._spawn("slurmctld", "-D")
        for name in names:
            self._spawn("slurmd", "-D", "-N", name)
        self._wait_for_daemons(lambda: self._idle_nodes() == NODES, f"{NODES} idle nodes")

    def _idle_nodes(self) -> int:
        return self.call("sinfo", "--noheader", "--Node", "--format=%t").stdout.split().count("idle")

    def _wait_for_daemons(self, look: Callable[[], bool], what: str) -> None:
        def look_at_all() -> bool:
            for name, process in self._daemons:
                assert process.poll() is None, f"{name} ended with {process.returncode}:\n{self._logs()}"
            return look()

        try:
            wait_for(look_at_all, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._logs()}") from None

    def _logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(self.root.glob("*.log")))

    def _spawn(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        output = (self.root / f"{name}-{len(self._daemons)}.out").open("wb")
        with output:
            process = subprocess.Popen(
                [program, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.root, env=self.environment
            )
        self._daemons.append((name, process))

    def _write(self, script: str) -> Path:
        handle, path = tempfile.mkstemp(suffix=".sbatch", dir=self.root)
        with os.fdopen(handle, "w") as file:
            file.write(script)
        return Path(path)

    def _stop(self) -> None:
        """End all jobs, then the daemons, the last started first; what does not end on SIGTERM is killed."""
        try:
            if len(self._daemons) == len(DAEMONS) - 1 + NODES:
                self.call("scancel", "--user=root")
                wait_for(lambda: not self.call("squeue", "--noheader").stdout.strip(), "an empty queue")
        finally:
            for _, process in reversed(self._daemons):
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._daemons = []
            shutil.rmtree(self.root)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _program(name: str) -> str | None:
    # Daemons lie in sbin, which not every PATH has.
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a SLURM job that this test may itself run in has set."""
    return {name: value for name, value in environment.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
