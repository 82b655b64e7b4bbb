"""Stages of training and frozen weights through the command: one run, resumed anywhere, thawed with fresh moments."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from command import config_file, main, same, saved_state
from conftest import cover, records

from nanotrain_jax import train
from nanotrain_jax.checkpoint import read
from nanotrain_jax.config import load
from nanotrain_jax.config.training_stages import Span, of_span, spans

__all__ = ["config_file"]  # a fixture
ENDS, LAYERS, ALL = (
    "{name: ends, steps: 4, freeze: [^layers/], lr: 2e-3}",
    "{name: layers, steps: 5, freeze: [^ends/]}",
    "{name: all, steps: 3}",
)
STAGES = f"train.stages=[{ENDS}, {LAYERS}, {ALL}]"
KEYS = (
    "train.eval_every=0",
    "checkpoint.every=3",
    "checkpoint.async=false",
    "optimizer.decay_steps=null",
    "optimizer.schedule=linear",
)
LAYOUTS = {
    "float32": ["parallel.zero=1"],
    "float32 shards": ["parallel.zero=3", "parallel.persist_below=64", "precision.compute=bfloat16"],
    "16 bit": ["parallel.zero=1", "precision.compute=bfloat16"],
    "host": ["parallel.zero=3", "memory.offload_optimizer=host", "memory.offload_params=host"],
}


def run(config_file, folder, *overrides):
    assert main(config_file, f"logging.dir={folder}", *KEYS, *overrides) == 0


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("layout", cover([], ["float32 shards", "float32", "16 bit", "host"]))
def test_a_run_of_stages_resumes_bitwise_at_any_step(config_file, tmp_path, layout, capsys):
    (tmp_path / "other.txt").write_text("".join(f"other text, line {i}\n" for i in range(900)))
    stages = STAGES.replace("^ends/]", f"^ends/], data: 'text:{tmp_path}/other.txt'")  # then back to the first data
    run(config_file, tmp_path / "whole", *LAYOUTS[layout], "train.steps=12", stages)
    each_stage_began_as_a_run_of_its_own(tmp_path / "whole", capsys.readouterr().out)
    for steps in (6, 9, 12):  # the middle and the end of a stage
        run(config_file, tmp_path / "cut", *LAYOUTS[layout], f"train.steps={steps}", stages)
    found, expected = (records(tmp_path / name) for name in ("cut", "whole"))
    assert [(r["step"], r["loss"], r["lr"]) for r in found] == [(r["step"], r["loss"], r["lr"]) for r in expected]
    same(saved_state(tmp_path / "cut"), saved_state(tmp_path / "whole"))
    meta = read.read_meta(tmp_path / "cut" / "checkpoints", 12)
    assert (meta.data.position, sorted(meta.data.read.values())) == ((4 + 3) * 8, [4 * 8, 5 * 8])


def test_a_run_says_at_its_start_what_is_remarkable_of_later_data_and_what_never_acts(config_file, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a line of text\n" * 400)
    (tmp_path / "other" / "b.bin").write_bytes(bytes(9))
    stages = f"train.stages=[{{name: a, steps: 1}}, {{name: b, steps: 1, data: 'text:{tmp_path}/other'}}]"
    batches = "train.batch_schedule=[{steps: 9, batch_size: 4}]", "parallel.data=2", "parallel.microbatches=2"
    keys = "data.val_fraction=0", "train.eval_every=2", *batches
    assert main(config_file, f"logging.dir={tmp_path}/run", stages, *keys) == 0
    out = capsys.readouterr().out
    assert f"text:{tmp_path}/other: warning: 1 files of the folder are no text and are left out" in out
    assert "warning: the run, or a stage of it, ends before train.batch_schedule comes to data.batch_size" in out
    assert "warning: nothing is held out, so train.eval_every has no effect; use data.val_fraction" in out


def each_stage_began_as_a_run_of_its_own(folder, printed):
    """Warm-up, steps and frozen weights of each stage of STAGES, in what a run wrote and printed."""
    rates = [record["lr"] for record in records(folder)]
    assert len(rates) == 12
    assert rates[0] < rates[1] < rates[2] == pytest.approx(2e-3)  # warm-up of 2 steps
    assert rates[4] < rates[5] < rates[6] == pytest.approx(1e-3)
    assert "stage layers: steps 5 to 9, trains " in printed
    assert "done at step 12 of 12" in printed

    again = load.load(folder / "config.yaml", [])
    stages = [of_span(again, span) for span in spans(again)]
    assert [stage.train.freeze for stage in stages] == [("^layers/",), ("^ends/",), ()]
    assert [(stage.optimizer.lr, stage.optimizer.decay_steps) for stage in stages] == [(2e-3, 4), (1e-3, 5), (1e-3, 3)]


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("layout", cover(["16 bit"], ["float32", "float32 shards", "host"]))
def test_thawed_weights_start_with_fresh_moments(config_file, tmp_path, layout):
    keys = [*LAYOUTS[layout], "checkpoint.keep=9"]
    folder = tmp_path / "run"
    run(config_file, folder, *keys, "train.steps=3", "train.freeze=[/mlp/]")
    _, (frozen, _) = saved_state(folder)
    run(config_file, folder, *keys, "train.steps=4", "train.freeze=[/attention/]", "optimizer.lr=1e-30")
    _, (thawed, _) = saved_state(folder)
    same(frozen["params"], thawed["params"])  # float32 weights of the thawed ones are those 16-bit ones
    moments = [state["opt"]["moments"][0]["mu"]["layers"] for state in (frozen, thawed)]
    assert frozen_and_kept(moments[0]) == ({"mlp"}, {"attention", "norm_attention", "norm_mlp"})
    assert frozen_and_kept(moments[1]) == ({"attention"}, {"mlp", "norm_attention", "norm_mlp"})
    assert np.abs(moments[1]["mlp"]["up_DF"]).max() > 0
    kept = moments[0]["norm_mlp"]["gain_D"], moments[1]["norm_mlp"]["gain_D"]
    assert not np.array_equal(*kept)


def frozen_and_kept(moments):
    """Return the keys of a tree of layers without arrays, and those with."""
    frozen = {key for key, part in moments.items() if not jax.tree.leaves(part)}
    return frozen, moments.keys() - frozen


def config_of(*overrides):
    return load.parse(load.nested(overrides))


def test_spans_are_cut_at_train_steps():
    assert spans(config_of("train.steps=7")) == [Span("", 0, 7)]
    assert spans(config_of(STAGES)) == [Span("ends", 0, 4), Span("layers", 4, 9), Span("all", 9, 12)]
    assert spans(config_of(STAGES, "train.steps=5")) == [Span("ends", 0, 4), Span("layers", 4, 5)]
    config = config_of(STAGES, "optimizer.lr=1e-2", "optimizer.min_lr=1e-3")
    first = of_span(config, spans(config)[0])
    assert (first.optimizer.lr, first.optimizer.decay_steps) == (2e-3, 4)
    assert first.optimizer.min_lr == pytest.approx(2e-4)
    assert (first.train.freeze, first.train.steps) == (("^layers/",), 12)
    assert of_span(first, spans(first)[0]) == first
    both = of_span(config_of(STAGES, "train.freeze=[/mlp/]"), spans(config)[0])
    assert both.train.freeze == ("/mlp/", "^layers/")


def test_stages_need_one_vocabulary():
    def phase(source, ids):
        data, model = SimpleNamespace(origin=source), SimpleNamespace(vocab_size=ids)
        return SimpleNamespace(dataset=SimpleNamespace(tokenizer=None), config=SimpleNamespace(data=data, model=model))

    with pytest.raises(
        ValueError, match=r"arrays:b has 1200 ids, that of arrays:a has 1000; set model.vocab_size=1200"
    ):
        train.check_data([phase("arrays:a", 1000), phase("arrays:b", 1200)])
    train.check_data([phase("arrays:a", 1200), phase("arrays:b", 1200)])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.freeze=[nowhere]"], "no weight has 'nowhere' in its path; use parts of these: ends, "),
        (["train.freeze=[.]"], "freezes all weights; leave something to train"),
        (["train.freeze=['(']"], "'(' is not a regular expression"),
        ([f"train.stages=[{ALL}, {ALL}]"], "train.stages has two stages 'all'; give them different names"),
        (["train.stages=[{name: a}]"], "train.stages.0.steps"),
        (["train.stages=[{name: a, steps: 1, freeze: [nowhere]}]"], "no weight has 'nowhere'"),
        ([STAGES, "memory.offload_optimizer=nvme", "memory.nvme_dir=x"], "the files hold the state of all weights"),
        (
            ["train.freeze=[/mlp/]", "parallel.replica=2", "parallel.data=2", "parallel.sync_every=2"],
            "the outer optimizer",
        ),
        (
            ["train.freeze=[/mlp/]", "parallel.replica=2", "parallel.data=2", "parallel.compress=topk:0.1"],
            "the residual",
        ),
        (["train.stages=[{name: a, steps: 1}, {name: b, steps: 1, data: 'text:/no/*'}]"], "/no/*"),
    ],
)
def test_an_invalid_request_is_refused_in_one_line(config_file, capsys, overrides, message):
    assert main(config_file, *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
