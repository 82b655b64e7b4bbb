"""Resume: which keys may change, which checkpoint is chosen, and what is reported."""

import json
import random
import re
import shutil

import jax
import numpy as np
import pytest
from command import arrays_of, config_file, flip, main, same, saved_state
from conftest import on_devices, random_tokens, records, resolved, small
from launching import finished, launched

import nanotrain_jax
from nanotrain_jax import train
from nanotrain_jax.checkpoint import directory, write
from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.config import load
from nanotrain_jax.config import schema as configs
from nanotrain_jax.step import build as steps
from nanotrain_jax.step import optimizer

__all__ = ["config_file"]  # a fixture
# What orbax leaves behind of a restore that failed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def resumes(capsys, *arguments):
    """Run successfully -> the lines printed about the resume."""
    capsys.readouterr()
    assert main(*arguments) == 0
    return capsys.readouterr().out.split("compiled in")[0]


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
def test_the_weights_of_a_run_are_loaded_as_host_arrays_without_a_mesh(config_file, tmp_path):
    split = "parallel.tensor=2", "parallel.zero=3", "parallel.persist_below=64", "train.steps=10", "train.eval_every=0"
    stages = "parallel.pipe=2", "model.num_layers=3", "parallel.vocab_over_pipe=true", "parallel.data=2"
    assert main(config_file, f"logging.dir={tmp_path}/run", "precision.compute=bfloat16", *split, *stages) == 0
    params, config = nanotrain_jax.load_params(tmp_path / "run")
    number, (state, _) = saved_state(tmp_path / "run")
    assert number == 10
    assert all(isinstance(x, np.ndarray) and x.dtype == jax.numpy.bfloat16 for x in jax.tree.leaves(params))
    stored = state["params"] | {"layers": jax.tree.map(lambda x: x[:3], state["params"]["layers"])}
    same(params, stored)
    assert {len(x) for x in jax.tree.leaves(state["params"]["layers"])} == {4}  # 3 layers on 2 stages
    assert params["ends"]["embedding_VD"].shape == (384, 32)  # padded from 257
    assert config.to_dict() == load.load(tmp_path / "run" / "config.yaml").to_dict()

    earlier, _ = nanotrain_jax.load_params(tmp_path / "run" / "checkpoints", step=5)
    assert not np.array_equal(earlier["ends"]["embedding_VD"], params["ends"]["embedding_VD"])
    with pytest.raises(ValueError, match="holds no checkpoint of step 7; use 5 or 10"):
        nanotrain_jax.load_params(tmp_path / "run", step=7)
    with pytest.raises(ValueError, match="holds no finished checkpoint; give the folder of a run"):
        nanotrain_jax.load_params(tmp_path / "nowhere")
    flip(tmp_path / "run" / "checkpoints" / "10", random.Random(0))
    same(nanotrain_jax.load_params(tmp_path / "run")[0], earlier)
    with pytest.raises(ValueError, match=r"checkpoint 10 in .* is damaged"):
        nanotrain_jax.load_params(tmp_path / "run", step=10)


@pytest.mark.long
def test_the_config_of_a_run_gives_another_run_its_own_folder_and_schedule(config_file, tmp_path):
    keys = "optimizer.decay_steps=null", "train.eval_every=0"
    assert main(config_file, f"logging.dir={tmp_path}/a", "train.steps=6", "checkpoint.every=2", *keys) == 0
    before = sorted((tmp_path / "a").rglob("*"))
    again = tmp_path / "a" / "config.yaml"
    assert main(again, f"logging.dir={tmp_path}/b", "train.steps=12", "checkpoint.keep=1") == 0
    assert sorted((tmp_path / "a").rglob("*")) == before
    assert [r["step"] for r in records(tmp_path / "b")] == list(range(1, 13))
    assert main(config_file, f"logging.dir={tmp_path}/c", "train.steps=12", *keys) == 0
    assert [r["lr"] for r in records(tmp_path / "b")] == [r["lr"] for r in records(tmp_path / "c")]


@pytest.mark.long
def test_the_loss_scale_may_change_in_every_direction(config_file, tmp_path, capsys, monkeypatch):
    run = config_file, f"logging.dir={tmp_path}/run", "train.eval_every=0", "checkpoint.every=1", "checkpoint.keep=9"

    def go_to(step, scale):
        return resumes(capsys, *run, f"train.steps={step}", f"precision.loss_scale={scale}")

    go_to(1, "none")
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "FIRST_SCALE", 2.0**10)
        assert "precision.loss_scale none -> dynamic" in go_to(2, "dynamic")
    assert "precision.loss_scale" not in go_to(3, "dynamic")  # which keeps its value
    assert "precision.loss_scale dynamic -> 512.0" in go_to(4, "512.0")
    assert "precision.loss_scale 512.0 -> 256.0" in go_to(5, "256.0")
    assert "precision.loss_scale 256.0 -> none" in go_to(6, "none")
    assert [r.get("loss_scale") for r in records(tmp_path / "run")] == [None, 1024, 1024, 512, 256, None]
    go_to(7, "128.0")
    go_to(8, "dynamic")
    assert records(tmp_path / "run")[-1]["loss_scale"] == 65536
    assert directory.latest_step(tmp_path / "run" / "checkpoints") == 8
    assert not (tmp_path / "run" / "checkpoints" / "damaged").exists()


def test_a_checkpoint_with_other_arrays_is_reported_and_kept(tmp_path):
    saved = {"a": np.ones((3, 2), np.float32), "b": {"c": np.ones(4, np.float32)}, "scale": None}
    with write.writing(configs.Checkpoint(dir=str(tmp_path))) as save:
        save(1, jax.tree.map(jax.numpy.asarray, saved), {})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def read(**shapes):
        tree = arrays_of(shapes, device)
        return restore.read_state(tmp_path, 1, tree, lambda path: False)

    same(read(a=(3, 2), b={"c": (4,)}, scale=None), saved)
    same(read(a=None, b={"c": (4,)}, scale=None), saved | {"a": None})
    same(read(a=(3, 2), b=None, scale=None), saved | {"b": None})
    for other, text in [
        ({"a": (3, 2), "b": {"c": (4,)}, "scale": {"value": ()}}, "missing scale/value"),
        ({"a": (3, 2), "b": {}, "scale": None}, "extra b/c"),
        ({"a": (2, 2), "b": {"d": (4,)}}, "missing b/d; extra b/c; of another shape a [3, 2], not [2, 2]"),
        ({"a": (3, 2), "b": {letter: (1,) for letter in "cdefgh"}}, "missing b/d, b/e, b/f and 2 more; of another"),
    ]:
        told = re.escape(f"checkpoint 1 in {tmp_path} has other arrays: {text}")
        with pytest.raises(ValueError, match=told) as error:
            read(**other)
        assert not isinstance(error.value, restore.Unreadable)
        assert "remove" not in str(error.value)
        assert "\n" not in str(error.value)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.long
def test_16_bit_runs_resume_where_weights_are_stored_in_another_dtype(tmp_path):
    built = {}
    for zero in (1, 3):
        parallel = {"data": 4, "zero": zero, "persist_below": 64}
        built[zero] = steps.build(*resolved(small(parallel=parallel, precision={"compute": "bfloat16"})))
    for zero, other in ((1, 3), (3, 1)):
        step, resumed = built[zero], built[other]
        state, *_ = step.train(step.init(), on_devices(random_tokens(step.plan.config, 1)[0], step))
        state = step.in_layer_order(state)
        assert {x.dtype for x in jax.tree.leaves(resumed.saved.params)} <= {np.dtype("bfloat16")}
        (tmp_path / str(zero)).mkdir()
        with write.writing(configs.Checkpoint(dir=str(tmp_path / str(zero)))) as save:
            save(1, state, {})
        read = resumed.in_stage_order(restore.read_state(tmp_path / str(zero), 1, resumed.saved, lambda path: False))
        assert jax.tree.map(lambda x: x.sharding, read) == jax.tree.map(lambda x: x.sharding, resumed.state)
        same(resumed.in_layer_order(read), state)


@pytest.mark.long
def test_keys_that_do_not_change_weights_may_change_on_resume(config_file, tmp_path, capsys):
    run = config_file, f"logging.dir={tmp_path}/run", "train.eval_every=0"
    resumes(capsys, *run, "train.steps=2", "model.loss_chunk=64", "parallel.data=2", "parallel.zero=0")
    out = resumes(capsys, *run, "train.steps=3", "model.max_seq_len=100", "parallel.data=4", "train.noise_scale=true")
    assert "resumed from step 2" in out
    resumes(capsys, *run, "train.steps=4")
    assert ["noise_scale" in record for record in records(tmp_path / "run")] == [False, False, True, False]


@pytest.mark.long
def test_a_llama_resumes_with_longer_sequences_and_reports_it(config_file, tmp_path, capsys):
    run = config_file, f"logging.dir={tmp_path}/run", "train.eval_every=0"
    resumes(capsys, *run, "train.steps=5")
    longer = "data.seq_len=64", "data.batch_size=4", "model.rope_theta=50000.0"
    out = resumes(capsys, *run, "train.steps=7", *longer)
    assert "sequences may repeat" in out
    changed = "model.rope_theta 10000.0 -> 50000.0, data.batch_size 8 -> 4, data.seq_len 32 -> 64, train.steps 5 -> 7"
    assert f"changed since the checkpoint: {changed}\n" in out
    assert [r["tokens"] for r in records(tmp_path / "run")] == [256, 512, 768, 1024, 1280, 1536, 1792]
    meta = restore.read_meta(tmp_path / "run" / "checkpoints", 7)
    assert meta.data.position == 5 * 8 * 32 // 64 + 2 * 4  # sequences of 64 tokens: as many tokens as were seen
    assert main(*run, "train.steps=8", *longer, "model.rope_theta=1000.0") == 2
    told = "model.rope_theta=1000.0 but the checkpoint was trained with 50000.0; resume with the same model (rope_theta"
    assert told in capsys.readouterr().err


@pytest.mark.long
def test_learned_positions_fix_the_sequence_length_and_the_error_names_the_key_set(config_file, tmp_path, capsys):
    run = config_file, f"logging.dir={tmp_path}/run", "model.family=gpt2", "train.eval_every=0"
    resumes(capsys, *run, "train.steps=1")

    def refused(*changes):
        assert main(*run, "train.steps=2", *changes) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    learned = "but the checkpoint has learned positions for 32 tokens (model.family=gpt2); use data.seq_len=32"
    assert f"error: data.seq_len=64 {learned}, or start again in another logging.dir" in refused("data.seq_len=64")
    assert f"data.seq_len=16 {learned}, with model.max_seq_len=32 any shorter one" in refused("data.seq_len=16")
    assert "model.max_seq_len=64 but the checkpoint was trained with 32" in refused("model.max_seq_len=64")
    resumes(capsys, *run, "train.steps=2", "data.seq_len=16", "model.max_seq_len=32", "model.rope_theta=5.0")


def test_changed_keys_and_a_learning_rate_jump_are_reported(config_file, tmp_path, capsys):
    run = config_file, f"logging.dir={tmp_path}/run", "train.eval_every=0", "optimizer.decay_steps=null"
    assert f"starts at step 0: no checkpoint in {tmp_path}/run/ch" in resumes(capsys, *run, "train.steps=10")
    out = resumes(capsys, *run, "train.steps=12", "optimizer.weight_decay=0.2", "data.batch_size=16")
    changed = "data.batch_size 8 -> 16, optimizer.weight_decay 0.1 -> 0.2, train.steps 10 -> 12"
    assert f"changed since the checkpoint: {changed}\n" in out
    lines = records(tmp_path / "run")
    jump = f"the learning rate of step 11 jumps from 0 to {lines[10]['lr']:.3g} (its decay ends at step 12, not 10)"
    assert jump in out
    assert lines[9]["tokens"] == 10 * 8 * 32
    assert lines[11]["tokens"] == lines[9]["tokens"] + 2 * 16 * 32
    out = resumes(capsys, *run, "train.steps=12", "optimizer.weight_decay=0.2", "data.batch_size=16")
    assert "changed since" not in out
    assert "jumps from" not in out


def rewrite_meta(change):
    """Return a damage function: replace the metadata file of a checkpoint by change(its bytes)."""

    def damage(folder):
        file = folder / "meta" / "metadata"
        file.write_bytes(change(file.read_bytes()))

    return damage


def without(*keys):
    """Return a damage function: remove a key, or a nested key, from the metadata."""

    def remove(content):
        tree = inner = json.loads(content)
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return json.dumps(tree).encode()

    return rewrite_meta(remove)


def cut_largest(folder):
    largest = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])


UNREADABLE = {
    "meta {}": rewrite_meta(lambda _: b"{}"),
    "meta []": rewrite_meta(lambda _: b"[]"),
    "meta cut": rewrite_meta(lambda content: content[:200]),
    "meta empty": rewrite_meta(lambda _: b""),
    "meta of NULs": rewrite_meta(lambda content: bytes(len(content))),
    "no meta": lambda folder: shutil.rmtree(folder / "meta"),
    "no config": without("config"),
    "no sections": without("config", "optimizer"),
    "no seq_len": without("config", "data", "seq_len"),
    "no position": without("data", "position"),
    "no array metadata": lambda folder: (folder / "state" / "_METADATA").unlink(),
    "array metadata cut": lambda folder: (folder / "state" / "_METADATA").write_text("{"),
    "no state": lambda folder: shutil.rmtree(folder / "state"),
    "array cut": cut_largest,
}


@pytest.mark.long
def test_resume_falls_back_from_an_unreadable_checkpoint_without_checksums(config_file, tmp_path, capsys):
    overrides = [f"logging.dir={tmp_path}/run", "train.eval_every=0"]
    assert main(config_file, *overrides, "train.steps=10") == 0
    folder, good = tmp_path / "run" / "checkpoints", tmp_path / "good"
    shutil.rmtree(folder / "checksums" / "10")
    folder.rename(good)
    for name, damage in UNREADABLE.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        damage(folder / "10")
        run = train.prepare(load.load(config_file, [*overrides, f"checkpoint.dir={folder}"]))
        assert run.start == (folder, 5), name
        assert [*run.damaged] == [10], name
        (warning,) = (note for note in run.notes if note.startswith("warning: skipped checkpoint 10"))
        assert f"in {folder}: it cannot be read (" in warning
        assert "remove" not in warning
    assert main(config_file, *overrides, "train.steps=12") == 0  # whose last one is the cut array
    assert (folder / "damaged" / "10" / "10").is_dir()
    assert "Traceback" not in capsys.readouterr().err
    assert [r["step"] for r in records(tmp_path / "run")] == [*range(1, 11), *range(6, 13)]


def test_no_readable_checkpoint_is_reported_in_one_line_and_moves_nothing(config_file, tmp_path, capsys):
    run = config_file, f"logging.dir={tmp_path}/run", "train.eval_every=0"
    assert main(*run, "train.steps=10") == 0
    folder = tmp_path / "run" / "checkpoints"
    shutil.rmtree(folder / "checksums")
    for step in "5", "10":
        UNREADABLE["meta {}"](folder / step)
    capsys.readouterr()
    assert main(*run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: no checkpoint in {folder} is intact: checkpoint 10: it cannot be read (")
    assert "remove" not in line
    assert sorted(path.name for path in folder.glob("[0-9]*")) == ["10", "5"]


@pytest.mark.long
def test_tokens_of_an_older_checkpoint_follow_from_its_position(config_file, tmp_path, capsys):
    run = config_file, f"logging.dir={tmp_path}/run", "train.eval_every=0"
    resumes(capsys, *run, "train.steps=5")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checksums")
    without("tokens")(tmp_path / "run" / "checkpoints" / "5")
    resumes(capsys, *run, "train.steps=6", "data.batch_size=16")
    assert records(tmp_path / "run")[-1]["tokens"] == 5 * 8 * 32 + 16 * 32


def test_a_damaged_separately_written_array_makes_a_checkpoint_unreadable(tmp_path):
    values = np.random.default_rng(0).random(1000, np.float32)
    with write.writing(configs.Checkpoint(dir=str(tmp_path))) as save:
        for step in 1, 2:
            tree = {"a": jax.numpy.arange(3), "b": None}
            save(step, tree, {}, [{"a": None, "b": jax.numpy.asarray(values)}], values.nbytes)
    shutil.rmtree(tmp_path / "checksums")
    assert restore.newest(tmp_path, True, str) == (2, "2", {})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {"a": None, "b": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=device)}
    same(restore.read_state(tmp_path, 2, wanted, lambda path: False)["b"], values)
    cut_largest(tmp_path / "arrays" / "2")
    number, _, damaged = restore.newest(tmp_path, True, str)
    assert (number, [*damaged]) == (1, [2])


@pytest.mark.long
def test_several_processes_agree_that_a_checkpoint_cannot_be_read(config_file, tmp_path):
    keys = f"logging.dir={tmp_path}/run", "parallel.data=8", "train.eval_every=0"
    finished(launched(2, config_file, *keys, "train.steps=10"))
    folder = tmp_path / "run" / "checkpoints"
    shutil.rmtree(folder / "checksums" / "10")
    cut_largest(folder / "10")
    out, _ = finished(launched(2, config_file, *keys, "train.steps=11", "precision.loss_scale=dynamic"))
    assert f"warning: skipped checkpoint 10 in {folder}: it cannot be read (" in out
    assert f"resumed from step 5 in {folder}" in out
    assert records(tmp_path / "run")[-1]["loss_scale"] == 65536
