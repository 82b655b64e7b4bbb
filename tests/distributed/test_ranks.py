"""Process bootstrap: rank and world size from flags or environment, GPUs of a process, meshes across processes."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from launching import ROOT

from nanotrain_jax import launch, train
from nanotrain_jax.config import load
from nanotrain_jax.distributed import exit_codes, processes, ranks
from nanotrain_jax.distributed.ranks import Process
from nanotrain_jax.parallel import mesh as meshes

GIVEN = dict.fromkeys(["runtime.coordinator", "runtime.processes", "runtime.process"])
SLURM = {"SLURM_PROCID": "9", "SLURM_NTASKS": "12", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
OPEN_MPI = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "3"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{key}": value for key, value in OPEN_MPI.items()}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("alone", 0, 1, None, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "n0", "MASTER_PORT": "1"}, ("RANK", 3, 8, "n0:1", 0, 1)),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "n0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            ("RANK", 3, 8, "n0:29500", 1, 2),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("RANK", 0, 1, None, 0, 1)),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),2(x2)", "SLURM_NODEID": "2"},
            ("slurm", 9, 12, None, 1, 2),
        ),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "n1:7"}, ("slurm", 9, 12, "n1:7", 1, 1)),
        # a single process, started by hand in an allocation for 12
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("slurm", 0, 1, None, 1, 1)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, ("ompi", 0, 1, None, 1, 3)),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://n1:7"}, ("ompi", 5, 8, None, 1, 3)),
        (OPEN_MPI | SLURM | {"JAX_COORDINATOR_ADDRESS": "n1:7"}, ("ompi", 5, 8, "n1:7", 1, 3)),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "n0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("RANK", 3, 8, "n0:29501", 0, 1),
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "n0", "NANOTRAIN_LAUNCHER": "77"},
            ("launcher", 3, 8, "n0:29500", 0, 1),
        ),
        (
            {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "run-0-0.run"},
            ("JOB_COMPLETION_INDEX", 2, 4, "run-0-0.run:29500", 0, 1),
        ),
        (SLURM | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, ("RANK", 1, 2, "n1:29500", 0, 1)),
    ],
)
def test_rank_is_detected_from_the_environment(env, expected):
    assert ranks.detect(GIVEN, env) == Process(*expected)


def test_given_rank_overrides_the_environment():
    given = dict(zip(GIVEN, ("n0:5", 4, 3), strict=True))
    assert ranks.detect(given, SLURM) == Process("runtime.process", 3, 4, "n0:5")


@pytest.mark.parametrize(
    ("given", "env", "message"),
    [
        (("n0:5", None, 3), {}, "runtime.processes not set; set all of"),
        (("n0", 4, 3), {}, "coordinator='n0': must be host:port"),
        (("n0:5", 4, 4), {}, "process index=4: must be in [0, 4); indices start at 0"),
        ((None,) * 3, {"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' in the environment: must be a number"),
        ((None,) * 3, {"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set without MASTER_ADDR"),
        ((None,) * 3, {"JOB_COMPLETION_INDEX": "0"}, "WORLD_SIZE=None in the environment: must be a number"),
        (("n0:65536", 4, 3), {}, "must be host:port"),
        ((None,) * 3, OPEN_MPI, "set JAX_COORDINATOR_ADDRESS to its host:port"),
    ],
)
def test_an_incomplete_or_invalid_rank_is_an_error(given, env, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ranks.detect(dict(zip(GIVEN, given, strict=True)), env)


def test_visible_gpus_are_those_of_cuda_visible_devices():
    assert ranks.visible_gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-5f"}) == ["2", "GPU-5f"]
    assert ranks.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert ranks.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert ranks.visible_gpus({"CUDA_VISIBLE_DEVICES": "0, 1,-1,2"}) == ["0", "1"]


@pytest.mark.parametrize(
    ("visible", "local", "env", "expected"),
    [
        (8, (0, 1), {}, []),  # all
        (8, (1, 2), {}, [4, 5, 6, 7]),
        (8, (3, 8), {}, [3]),
        (1, (3, 8), {}, []),  # already divided: each process sees one
        (4, (1, 2), {"SLURM_GPUS_ON_NODE": "8"}, []),
        (8, (1, 2), {"SLURM_GPUS_ON_NODE": "8"}, [4, 5, 6, 7]),
        (4, (1, 2), {"SLURM_GPUS_PER_TASK": "a100:4"}, []),
        (8, (1, 2), {"SLURM_GPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "8"}, [4, 5, 6, 7]),  # --gpu-bind=none
        (6, (1, 3), {"SLURM_GPUS_ON_NODE": "8", "NANOTRAIN_LAUNCHER": "77"}, [2, 3]),  # two are lost
        (8, (1, 3), {}, "3 processes per host: must divide the 8 GPUs of the host"),
    ],
)
def test_gpus_of_a_host_are_divided_among_its_processes_once(visible, local, env, expected):
    env = env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(visible)))}
    process = Process("", 0, 16, None, *local)
    if isinstance(expected, list):
        assert ranks.local_gpus(process, env) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            ranks.local_gpus(process, env)


class Device:
    def __init__(self, process_index):
        self.process_index = process_index


class Mesh:
    """A stand-in for `meshes.cross_host_warning`: 8 devices of 4 processes."""

    def __init__(self, **shape):
        self.shape = {axis: shape.get(axis, 1) for axis in meshes.AXES}
        self.devices = np.array([Device(i // 2) for i in range(8)]).reshape(*self.shape.values())


def test_a_tensor_axis_across_hosts_gives_a_warning_with_a_remedy():
    hosts = ["a", "a", "b", "b"]
    assert not meshes.cross_host_warning(Mesh(data=2, tensor=4), hosts)
    assert not meshes.cross_host_warning(Mesh(tensor=8), ["a"] * 4)
    text = meshes.cross_host_warning(Mesh(tensor=8), hosts)
    assert text.startswith("parallel.tensor=8 spans 2 hosts")
    assert "use a divisor of 4," in text
    assert "use a divisor of 2," in meshes.cross_host_warning(Mesh(tensor=8), ["a", "a", "a", "b"])


def test_processes_that_read_other_data_are_an_error(monkeypatch):
    phase = SimpleNamespace(
        dataset=SimpleNamespace(fingerprint="a", of_further=""), config=SimpleNamespace(data=load.parse({}).data)
    )
    train.check_same_data([phase])
    monkeypatch.setattr(processes, "all_gather_text", lambda text: [text, text, "other"])
    with pytest.raises(ValueError, match="process 2 reads other data than process 0 from stdlib; give all hosts the"):
        train.check_same_data([phase])


def test_ranks_are_left_to_the_launcher(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("runtime: {processes: 2}")
    assert launch.main(["--", "--config", str(tmp_path / "x.yaml")]) == 2
    assert "runtime.processes=2 with the launcher, which sets it for each process" in capsys.readouterr().err


def test_a_mesh_that_leaves_a_process_without_devices_is_an_error():
    devices = [Device(i // 2) for i in range(8)]
    with pytest.raises(ValueError, match="takes 4 of 8 devices, and leaves none to process 2"):
        meshes.make(data=4, devices=devices)


def test_the_jobset_gives_host_indices_and_runs_the_launcher():
    spec = yaml.safe_load((ROOT / "scripts" / "k8s_jobset.yaml").read_text())
    (workers,) = spec["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert [entry["name"] for entry in container["env"] if "valueFrom" in entry] == [launch.TOKEN]
    for pod in range(job["completions"]):
        process = ranks.detect(GIVEN, env | {"JOB_COMPLETION_INDEX": str(pod)})
        # JobSet pods are named <set>-<job>-<replica>-<pod>, in the domain <set>.
        assert process == Process(
            "JOB_COMPLETION_INDEX", pod, 8, f"{spec['metadata']['name']}-workers-0-0.nanotrain:29500"
        )
    assert container["ports"] == [{"containerPort": ranks.PORT}]
    assert job["parallelism"] == job["completions"]
    by_action = {}
    for rule in job["podFailurePolicy"]["rules"]:  # in their order
        on = rule.get("onExitCodes", {"containerName": container["name"], "operator": "In", "values": []})
        assert (on["containerName"], on["operator"]) == (container["name"], "In")
        by_action.setdefault(rule["action"], []).extend(on["values"])
    assert by_action == {"FailJob": sorted(exit_codes.FINAL), "Ignore": [exit_codes.STOPPED]}
    (rule,) = spec["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert (job["template"]["spec"]["restartPolicy"], job["backoffLimit"]) == ("Never", 0)  # as the policies need
    assert container["command"][:3] == ["python", "-m", "nanotrain_jax.launch"]
    options, run = launch.parse(container["command"][3:] + container["args"])
    assert options.processes == container["resources"]["limits"]["nvidia.com/gpu"]
    sizes = load.load(ROOT / run.config).parallel.axes.values()
    assert math.prod(sizes) == job["completions"] * options.processes
    script = (ROOT / "scripts" / "slurm.sbatch").read_text()
    assert f"#SBATCH --nodes={job['completions']}\n" in script  # of the same config
    assert run.config in script
