"""Optimizer state on NVMe: parity with state on the device, resume in either mode, damaged or dirty files."""

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT, STATE, cover, needs_cuda_compiler, on_devices, random_tokens, records, resolved, run, small

from nanotrain_jax import train
from nanotrain_jax.config import load
from nanotrain_jax.costs import counts
from nanotrain_jax.distributed import watchdog
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme import store as nvme
from nanotrain_jax.planner.compiled import compile_step, ratios
from nanotrain_jax.planner.estimate import estimate, on_gpus
from nanotrain_jax.step import build as steps
from nanotrain_jax.step.state import State

pytestmark = pytest.mark.usefixtures("no_cache_of_programs")


def tree(parallel, folder=None, family="llama", memory=None, **changes):
    memory = (memory or {}) | ({"offload_optimizer": "nvme", "nvme_dir": str(folder)} if folder else {})
    return small(family, parallel={"persist_below": 0} | parallel, memory=memory, **changes)


def files_and_step(asked):
    config, mesh = resolved(asked)
    step = steps.build(config, mesh)
    Path(config.memory.nvme_dir).mkdir(exist_ok=True)
    return checkpointing.store(config, step), step, config


def test_files_for_no_array_are_refused(tmp_path):
    with pytest.raises(ValueError, match="all arrays are smaller and stay on the device"):
        files_and_step(tree({"data": 2, "persist_below": 10**6}, tmp_path))


def full_state(files, step, config, state):
    """Return the state in layer order, including the arrays in the files."""
    state = step.in_layer_order(state)
    for stored in checkpointing.arrays(files, step):
        state = jax.tree.map(lambda x, y: y if x is None else x, state, stored, is_leaf=lambda x: x is None)
    return State(*jax.device_get(tuple(state)))


def run_with_nvme(asked, updates=3):
    """-> the full state after `updates` steps, and the metrics of each."""
    files, step, config = files_and_step(asked)
    with nvme.opened(files):
        assert checkpointing.restore(files, step, None, []) == "initialized"
        update = checkpointing.train(files, step, step.train.lower(step.state, step.batch).compile())
        state, log = step.init(), []
        for tokens in random_tokens(config, count=updates):
            state, metrics, _ = update(state, on_devices(tokens, step))
            log.append(jax.device_get(metrics))
        return full_state(files, step, config, state), log


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, jax.device_get(b))


COVER = [
    (
        {"data": 2, "zero": 3, "pipe": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2},
        {"model": {"num_layers": 4}},
    ),
]
MORE = [
    ({"data": 4, "zero": 3, "microbatches": 2}, {"memory": {"offload_params": "host", "remat": "full"}}),
    ({"data": 2, "zero": 2, "tensor": 2, "persist_below": 1000}, {}),
    ({"data": 4, "zero": 0}, {}),
    ({"data": 2, "zero": 1, "replica": 2, "microbatches": 2}, {"family": "gpt2"}),
    ({"data": 4, "zero": 1}, {}),
    ({"data": 4, "zero": 2}, {"family": "gpt2"}),
    ({"data": 1, "zero": 3}, {}),
    ({"data": 1, "zero": 0}, {}),
    ({"data": 2, "zero": 1, "pipe": 2, "microbatches": 2}, {"family": "gpt2"}),
    ({"data": 2, "zero": 2, "pipe": 2, "tensor": 2, "microbatches": 2}, {}),
]


def case_name(case):
    return "-".join(f"{key}={value}" for key, value in case[0].items())


@pytest.mark.parametrize("case", cover(COVER, MORE, case_name))
def test_state_on_nvme_equals_state_on_the_device(case, tmp_path):
    parallel, changes = case
    (state, log) = run_with_nvme(tree(parallel, tmp_path / "disk", **changes))
    on_device = changes | {"memory": {"remat": changes.get("memory", {}).get("remat", "none")}}
    plain, plain_log = run(tree(parallel, **on_device), 3)
    config, mesh = resolved(tree(parallel, **on_device))
    plain = steps.build(config, mesh).in_layer_order(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), state, State(*jax.device_get(tuple(plain))))
    for key in "loss", "grad_norm":
        np.testing.assert_allclose([m[key] for m in log], [m[key] for m in plain_log], rtol=2e-6)


def test_files_hold_a_shard_of_a_layer_and_small_arrays_stay_on_the_device(tmp_path):
    asked = tree({"data": 4, "zero": 3, "persist_below": 1000}, tmp_path / "disk")
    files, step, _ = files_and_step(asked)
    files.allocate()
    layers = {path.name for path in (tmp_path / "disk").glob("layers-*")}
    assert layers == {f"layers-{layer:05d}.{device:05d}" for layer in range(2) for device in range(4)}
    on_device = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(step.state.opt)}
    assert any("gain_D" in path for path in on_device)
    assert not any("_DF" in path or "_VD" in path for path in on_device)
    # Master weights (none in float32) and moments of every large array, once.
    large = [x.size for x in jax.tree.leaves(step.state.params) if x.size // (x.shape[0] if x.ndim > 2 else 1) >= 1000]
    assert 8 * sum(large) <= files.nbytes < 8 * sum(large) + 4096 * 3 * 8 * len(files.files)


def overwrite_a_byte(folder):
    with open(folder / "layers-00000.00000", "r+b") as file:
        file.seek(100)
        file.write(b"x")


def truncate(folder):
    with open(folder / "layers-00000.00000", "r+b") as file:
        file.truncate(64)


def replace_the_digest(folder):
    manifest = folder / "manifest.json"
    decoded = nvme.decode(manifest.read_bytes())
    manifest.write_bytes(decoded.model_copy(update={"digest": "0" * 64}).encode())


def remove_the_manifest(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [overwrite_a_byte, truncate, replace_the_digest, remove_the_manifest])
def test_only_files_with_matching_checksums_are_reused(damage, tmp_path):
    files, step, _ = files_and_step(tree({"data": 2, "zero": 3}, tmp_path / "disk"))
    with nvme.opened(files):
        checkpointing.restore(files, step, None, [])
        digest = files.seal()
    again, *_ = files_and_step(tree({"data": 2, "zero": 3}, tmp_path / "disk"))
    assert again.matches([digest])
    assert not again.matches([])
    damage(tmp_path / "disk")
    assert not again.matches([digest])


def test_files_of_another_layer_order_are_not_reused(tmp_path):
    stages = {"pipe": 2, "microbatches": 2}
    four = {"num_layers": 4}
    files, step, _ = files_and_step(tree(stages, tmp_path / "disk", model=four))
    with nvme.opened(files):
        checkpointing.restore(files, step, None, [])
        digest = files.seal()
    chunks = stages | {"schedule": "interleaved", "chunks": 2}
    other, *_ = files_and_step(tree(chunks, tmp_path / "disk", model=four))
    assert other.files == files.files
    assert not other.matches([digest])


def test_files_of_another_number_of_layers_on_each_stage_are_not_reused(tmp_path, monkeypatch):
    asked = tree({"pipe": 2, "microbatches": 2}, tmp_path / "disk", model={"num_layers": 5})
    files, step, _ = files_and_step(asked)
    with nvme.opened(files):
        checkpointing.restore(files, step, None, [])
        digests = checkpointing.seal(files)
    assert files_and_step(asked)[0].matches(digests)
    monkeypatch.setattr(counts, "loads_of_ends", lambda config: (0.0, 9.0))
    other, *_ = files_and_step(asked)
    assert other.files == files.files
    assert not other.matches(digests)


MANIFEST = nvme.Manifest(
    model={"family": "llama", "d_model": 32, "norm_eps": 1e-05},
    layout={"parallel": {"zero": 3}, "precision": {"compute": "bfloat16"}},
    files=["layers-00000.00000", "head_VD-00000.00000"],
    digest="0f" * 32,
    checksums={"layers-00000.00000": 4123456789, "head_VD-00000.00000": 7},
)


def test_a_manifest_round_trips_and_any_flipped_bit_invalidates_it():
    content = MANIFEST.encode()
    assert nvme.decode(content) == MANIFEST
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            assert nvme.decode(bytes(flipped)) is None, (place, bit)
        assert nvme.decode(content[:place]) is None


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b"null", b"7", b"\xff\xfe", b"{", b'{"model": {}}',
        MANIFEST.model_dump_json().replace("4123456789", '"4123456789"').encode(),
        MANIFEST.model_dump_json().replace('"files":[', '"files":[3,').encode(),
        MANIFEST.model_dump_json().replace('"digest"', '"digits"').encode(),
    ],
)  # fmt: skip
def test_invalid_fields_with_a_valid_checksum_are_no_manifest(body):
    assert nvme.decode(body) is None
    assert nvme.decode(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n") is None


def test_files_are_reused_if_only_keys_without_weights_change(tmp_path):
    files, step, _ = files_and_step(tree({"data": 2, "zero": 3}, tmp_path / "disk"))
    with nvme.opened(files):
        checkpointing.restore(files, step, None, [])
        digest = files.seal()
    changes = {"loss_chunk": 16, "max_seq_len": 100, "rope_theta": 5.0}
    again, *_ = files_and_step(tree({"data": 2, "zero": 3}, tmp_path / "disk", model=changes))
    assert again.matches([digest])


def test_files_are_dirty_once_an_update_begins(tmp_path):
    files, step, _ = files_and_step(tree({"data": 2, "zero": 3}, tmp_path / "disk"))
    with nvme.opened(files):
        checkpointing.restore(files, step, None, [])
        digest = files.seal()

        def killed(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            files.update(dict.fromkeys(files.groups, killed), None)
    again, *_ = files_and_step(tree({"data": 2, "zero": 3}, tmp_path / "disk"))
    assert not again.matches([digest])  # although no byte has changed


@pytest.mark.long
def test_a_step_with_nonfinite_gradients_does_not_change_the_files(tmp_path):
    files, step, config = files_and_step(tree({"data": 2, "zero": 3}, tmp_path / "disk"))
    with nvme.opened(files):
        checkpointing.restore(files, step, None, [])
        update = checkpointing.train(files, step, step.train.lower(step.state, step.batch).compile())
        good, bad = (np.where(t == 60, 0, t) for t in random_tokens(config, count=2))
        bad[5, 3] = 60
        state, _, _ = update(step.init(), on_devices(good, step))
        table = state.params["ends"]["embedding_VD"]
        ends = {"embedding_VD": jax.device_put(np.asarray(table).copy(), table.sharding).at[60].set(np.nan)}
        state = state._replace(params=state.params | {"ends": state.params["ends"] | ends})
        before, digest = full_state(files, step, config, state), files.seal()
        state, metrics, _ = update(state, on_devices(bad, step))
        assert not np.isfinite(metrics["grad_norm"])
        after = full_state(files, step, config, state)
        equal((before.params, before.opt), (after.params, after.opt))
        assert files.seal() == digest


BASE = [
    "--config", str(ROOT / "configs" / "quickstart.yaml"), "train.eval_every=0", "data.source=synthetic",
    "model.vocab_size=64", "model.num_layers=4", "model.d_model=32", "model.num_heads=2", "data.seq_len=32",
    "data.batch_size=8", "precision.compute=float32", "runtime.simulate=8", "parallel.data=2", "parallel.zero=3",
    "logging.progress=none", "parallel.persist_below=0", "logging.tensorboard=false", "checkpoint.every=3",
    "optimizer.schedule=constant", "train.log_every=1",
]  # fmt: skip
PIPED = "parallel.pipe=2", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.microbatches=2"


@pytest.mark.long
def test_checkpoints_resume_in_either_mode_and_files_are_reused_only_if_they_match(tmp_path, capsys, monkeypatch):
    at, phases = watchdog.Watchdog.at, []
    monkeypatch.setattr(watchdog.Watchdog, "at", lambda self, *phase: (phases.append(phase), at(self, *phase)))
    disk = "memory.offload_optimizer=nvme", f"memory.nvme_dir={tmp_path}/disk"

    def train_to(folder, steps, *options):
        assert train.main([*BASE, f"logging.dir={tmp_path / folder}", f"train.steps={steps}", *options]) == 0
        return re.findall(r"master weights and moments: .* in .*, (.*)", capsys.readouterr().out)

    assert train_to("run", 3, *disk) == ["initialized"]
    saved = list((tmp_path / "run" / "checkpoints" / "arrays" / "3").iterdir())
    assert phases.count(("checkpoint", 3)) == 1 + len(saved) > 10  # each counts for the hang timeout
    assert train_to("run", 6, *disk) == ["reused (checksums match the checkpoint)"]
    assert train_to("run", 9, *PIPED) == []
    manifest = tmp_path / "disk" / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:50] + bytes([content[50] ^ 128]) + content[51:])
    assert train_to("run", 12, *disk, *PIPED) == ["rebuilt from the checkpoint (manifest.json is invalid)"]
    assert train_to("plain", 12) == []
    resumed, plain = ([r["loss"] for r in records(tmp_path / folder)] for folder in ("run", "plain"))
    np.testing.assert_allclose(resumed, plain, rtol=2e-6)
    steps_kept = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    with_files = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints" / "arrays").glob("*"))
    assert with_files == [6, 12]  # step 9 had no files; those of step 3 were deleted with its checkpoint
    assert steps_kept == [6, 9, 12]


ON_GPUS = [  # GPUs, ZeRO stage, memory.offload_params
    (1, 3, "host"),
    (1, 0, "none"),
    (1, 3, "none"),
    (8, 2, "none"),
]


@needs_cuda_compiler
@pytest.mark.parametrize("case", cover(ON_GPUS[:1], ON_GPUS[1:]))
def test_programs_compiled_for_h100s_match_the_estimate(case):
    gpus, zero, params = case
    overrides = [f"memory.offload_params={params}", f"parallel.zero={zero}", f"data.batch_size={8 * gpus}"]
    overrides += ["parallel.microbatches=8"]
    overrides += ["memory.offload_optimizer=nvme", "memory.nvme_dir=/nvme", "memory.remat=full"]
    config = load.load(ROOT / "configs" / "llama3_8b_1gpu.yaml", [*overrides, f"parallel.data={gpus}"])
    e = estimate(on_gpus(config, gpus, "h100"), "h100")
    found = ratios(e, compile_step(e.config, "h100"))
    assert e.nvme_bytes == pytest.approx(12 * 8.03e9 / gpus, rel=1e-3)
    assert found["peak_bytes"] == pytest.approx(1, abs=0.1)
    assert found.get("host_bytes", 1) == pytest.approx(1, abs=0.03)
    assert found["flops"] == pytest.approx(1, abs=0.01)


def error_of(arguments, capsys):
    """Return the stderr of a wrong request."""
    assert train.main([*BASE, "checkpoint.every=0", "train.steps=1", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.long
def test_an_unusable_folder_is_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    ours, nvme_on = tmp_path / "disk", "memory.offload_optimizer=nvme"
    here = [nvme_on, f"memory.nvme_dir={ours}", f"logging.dir={tmp_path}/run"]
    assert "needs a folder; set memory.nvme_dir" in error_of([nvme_on], capsys)
    assert "has no effect with memory.offload_optimizer='none'" in error_of([here[1]], capsys)
    assert "cannot be written to (Not a directory)" in error_of([*here, f"memory.nvme_dir={tmp_path}/file/x"], capsys)
    assert train.main([*BASE, "checkpoint.every=0", "train.steps=1", *here]) == 0
    assert "state of another model (different num_layers); choose" in error_of([*here, "model.num_layers=2"], capsys)
    with train.lock.alone("memory.nvme_dir", ours):
        assert "in use by another run; stop it, or choose another memory.nvme_dir" in error_of(here, capsys)
    usage = nvme.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(nvme.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    elsewhere = f"memory.nvme_dir={tmp_path}/other"
    assert re.search(r"needs [\d,]+ bytes, but only 1,000 are free; make room", error_of([*here, elsewhere], capsys))
    assert not (tmp_path / "other").exists()


@pytest.mark.long
def test_a_full_disk_is_an_error_before_the_first_step(tmp_path):
    command = [sys.executable, "-m", "nanotrain_jax.train", *BASE, f"logging.dir={tmp_path}/run", "checkpoint.every=0"]
    command += ["train.steps=1", "memory.offload_optimizer=nvme", f"memory.nvme_dir={tmp_path}/disk"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    full = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (8192, 8192))  # larger writes fail as on a full disk
    _, err = full.communicate(timeout=120)
    assert full.returncode == 2, err
    assert re.search("error: memory.nvme_dir=.*: File too large; make room and start again", err)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_state_of_five_times_the_memory_limit_trains_only_on_nvme(tmp_path):
    script = ROOT / "scripts" / "prove" / "beyond_memory.py"
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    plain, within, nvme_within = json.loads(found.stdout.splitlines()[-1])
    assert plain["memory"] > plain["state"]
    assert within["ended"] == "out of memory"
    assert nvme_within["steps"] == plain["steps"] == 20
    assert nvme_within["limit"] == within["limit"] < plain["memory"]
    assert nvme_within["resident"] < nvme_within["on_device"] + nvme_within["state"] / 5
    assert np.isclose(nvme_within["loss"], plain["loss"], rtol=1e-3)  # rounding, over 20 steps of Adam
