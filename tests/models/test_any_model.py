"""User models trained by the command with model.factory: Flax NNX, Flax Linen, plain functions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
import yaml
from command import main
from conftest import cover, on_devices, random_tokens, records
from planning import ROOT

from nanotrain_jax import Rules, build, generate, load_params, plan
from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.parallel import mesh

pytestmark = pytest.mark.usefixtures("no_cache_of_programs")
TREE = {
    "model": {"num_layers": 4, "d_model": 32, "num_heads": 4},
    "precision": {"compute": "float32"},
    "data": {"batch_size": 16, "seq_len": 16, "val_fraction": 0.02},
    "optimizer": {"lr": 1e-2, "eps": 1e-4, "schedule": "constant", "weight_decay": 0.2},
    "train": {"steps": 4, "eval_every": 4},
    "checkpoint": {"every": 0},
    "logging": {"tensorboard": False, "progress": "lines"},
    "runtime": {"simulate": 8, "compile_cache": False},
}
EVERY_AXIS = ["parallel.data=2", "parallel.tensor=2", "parallel.pipe=2", "parallel.microbatches=4", "memory.remat=full"]
EVERY_AXIS += ["parallel.zero=3", "parallel.persist_below=100"]
HOST = [f"memory.offload_{what}=host" for what in ("optimizer", "params", "activations")]
LAYOUTS = {
    "every axis": EVERY_AXIS,
    "host": [*EVERY_AXIS, "parallel.pipe=1", "parallel.data=4", *HOST],
    "per layer": ["parallel.data=8", "parallel.zero=1", "parallel.grad_reduce=per_layer", "parallel.microbatches=2"],
    "interleaved": [*EVERY_AXIS, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.zero=2"],
    "files": [*EVERY_AXIS, "parallel.pipe=1", "memory.offload_optimizer=nvme", "memory.nvme_dir=NVME"],
    "zero bubble": [*EVERY_AXIS, "parallel.schedule=zero_bubble", "parallel.idle=mask", "memory.remat=none"],
}
FACTORIES = {"NNX": "scripts.examples.your_model:build", "Linen": "linen_model:build", "plain": "plain_model:build"}


@pytest.fixture
def config_file(tmp_path, monkeypatch, text_files):
    monkeypatch.syspath_prepend(ROOT)
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump({**TREE, "data": TREE["data"] | {"source": f"text:{text_files}"}}))
    return path


@pytest.fixture(scope="module")
def on_one_device():
    """Factory -> records of its run on one device, computed by the first test that needs them."""
    return {}


def layout_in(folder, name):
    return [key.replace("NVME", str(folder / "nvme")) for key in LAYOUTS[name]]


def run(config_file, kind, name, *overrides):
    folder = config_file.parent / name
    assert main(config_file, f"model.factory={FACTORIES[kind]}", f"logging.dir={folder}", *overrides) == 0
    return records(folder)


@pytest.mark.parametrize(
    "case",
    cover(
        [("NNX", "every axis")],
        [(kind, layout) for kind in FACTORIES for layout in ("interleaved", "zero bubble")]
        + [
            ("Linen", "host"),
            ("Linen", "every axis"),
            ("Linen", "per layer"),
            ("Linen", "files"),
            ("plain", "every axis"),
            ("plain", "host"),
        ],
    ),
)
def test_a_user_model_equals_one_device(config_file, on_one_device, case):
    kind, layout = case
    if kind not in on_one_device:
        on_one_device[kind] = run(config_file, kind, "one", "parallel.data=1")
    records_of_many = run(config_file, kind, "many", *layout_in(config_file.parent, layout))
    for one, many in zip(on_one_device[kind], records_of_many, strict=True):
        for key in {"loss", "grad_norm", "val_loss"} & one.keys():  # held-out sequences do not fill the last batch
            np.testing.assert_allclose(many[key], one[key], rtol=1e-5)
    assert one["loss"] < on_one_device[kind][0]["loss"]
    assert one["mfu"] is None
    assert one["val_loss"] < on_one_device[kind][0]["loss"]


@pytest.mark.long
def test_checkpoints_of_a_user_model_resume_on_another_layout(config_file, on_one_device):
    keys = "checkpoint.every=2", "checkpoint.async=false"
    whole = run(config_file, "Linen", "whole", "parallel.data=2", *keys)
    run(config_file, "Linen", "cut", "parallel.data=2", "train.steps=2", "optimizer.decay_steps=4", *keys)
    resumed = run(config_file, "Linen", "cut", *EVERY_AXIS, *keys)
    np.testing.assert_allclose([r["loss"] for r in resumed], [r["loss"] for r in whole], rtol=1e-5)


@pytest.mark.parametrize(
    ("factory", "overrides", "message"),
    [
        ("nowhere.at_all:build", [], "No module named 'nowhere'; install its package"),
        ("plain_model:builds", [], "plain_model has no builds"),
        ("plain_model", [], "must be package.module:function"),
        ("plain_model:build", ["model.num_layers=2", "parallel.pipe=3"], "parallel.pipe=3 exceeds model.num_layers=2"),
        (
            "plain_model:build",
            ["parallel.pipe=2", "parallel.vocab_over_pipe=true"],
            "has splits_vocab=False; make them",
        ),
        ("test_any_model:three_layers", [], "it has 3 layers, model.num_layers=4; make them agree"),
        ("test_any_model:no_model", [], "returned NoneType; return a nanotrain_jax.Model"),
        ("test_any_model:over_data", [], "only tensor and expert may be used"),
        ("test_any_model:in_bfloat16", [], "the weight ends/embed_VD is bfloat16; use float32"),
        ("test_any_model:unused", [], "neither used_by_first nor used_by_last selects ends/head_VD"),
        ("test_any_model:without_order", [], "init ignores order"),
        ("test_any_model:without_put", [], "init ignores put"),
        ("test_any_model:one_layer_apart", [], "the arrays of layers have no common leading dim"),
        ("test_any_model:in_lists", [], "the weight ends/0 is not in nested dicts"),
    ],
)
def test_an_invalid_factory_raises_in_one_line(config_file, capsys, factory, overrides, message):
    assert main(config_file, f"model.factory={factory}", "parallel.data=1", *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(config_file.parent.glob("runs"))


def three_layers(config, mesh):
    return plain_model.build(config.replace("model", num_layers=3), mesh)


def no_model(config, mesh):
    return None


def changed(config, mesh, **changes):
    return dataclasses.replace(plain_model.build(config, mesh), **changes)


def over_data(config, mesh):
    return changed(config, mesh, rules=[("ends/.*", "V/data D"), (".*_D", "L D"), (".*", "L D F")])


def unused(config, mesh):
    return changed(config, mesh, used_by_last=lambda ends: {})


def with_init(make):
    """Return a factory of plain_model whose weights are make(init, keywords of init)."""

    def build(config, mesh):
        init = plain_model.build(config, mesh).init
        return changed(config, mesh, init=lambda seed, **keywords: make(init, keywords))

    return build


def one_apart(weights):
    first = next(iter(weights["layers"]))
    return weights | {"layers": weights["layers"] | {first: weights["layers"][first][1:]}}


in_bfloat16 = with_init(lambda init, keywords: jax.tree.map(lambda w: w.astype(jnp.bfloat16), init(0, **keywords)))
without_order = with_init(lambda init, keywords: init(0, put=keywords.get("put")))
without_put = with_init(lambda init, keywords: init(0, order=keywords.get("order")))
one_layer_apart = with_init(lambda init, keywords: one_apart(init(0, **keywords)))
in_lists = with_init(lambda init, keywords: (w := init(0, **keywords)) | {"ends": list(w["ends"].values())})


def test_commands_that_need_our_decoder_say_so(config_file, capsys):
    assert plan.main(["--config", str(config_file), "model.factory=plain_model:build"]) == 2
    assert "the planner supports only the built-in models" in capsys.readouterr().err
    run(config_file, "plain", "run", "parallel.data=1", "checkpoint.every=1")
    assert generate.main(["--run", str(config_file.parent / "run"), "--prompt", "a"]) == 2
    assert "gives a model without decode" in capsys.readouterr().err


@pytest.mark.long
def test_a_model_with_decode_generates_what_it_computes_without_a_cache(config_file, capsys):
    keys = (
        "model.factory=plain_model:with_decode",
        "parallel.data=1",
        "checkpoint.every=20",
        "optimizer.lr=0.1",
        "train.steps=20",
    )
    run(config_file, "plain", "run", *keys)
    capsys.readouterr()
    how = ["--run", str(config_file.parent / "run"), "--prompt", "de", "--tokens", "12", "--temperature", "0"]
    assert generate.main(how) == 0
    params, config = load_params(config_file.parent / "run")
    model = plain_model.build(config, mesh.make(data=1))
    text = list(b"de")
    for _ in range(12):
        x_1TD = model.first(params, {"inputs": np.asarray([text])}, None)
        for i in range(config.model.num_layers):
            x_1TD = model.layer(jax.tree.map(lambda w: w[i], params["layers"]), x_1TD, {})  # noqa: B023
        text.append(int((x_1TD[0, -1] @ params["ends"]["head_VD"].T).argmax()))
    assert capsys.readouterr().out == bytes(text).decode() + "\n"
    assert len(set(text[2:])) > 1


def plain(config_file, *overrides, **changes):
    """Return a config of the plain model on devices, its mesh, and the model with other functions."""
    config = load.load(config_file, ["model.factory=plain_model:build", "parallel.data=2", *overrides])
    devices = mesh.make(**config.parallel.axes, devices=jax.devices()[: math.prod(config.parallel.axes.values())])
    config = resolve(config, devices.shape, 257)
    model = plain_model.build(config, devices)
    return config, devices, dataclasses.replace(model, **{key: change(model) for key, change in changes.items()})


def with_count(model):
    """Return `first` that also gives x a count, which is the same on all devices."""
    return lambda w, batch, run: {"x": model.first(w, batch, run), "count": jnp.zeros(())}


def counting(model):
    return lambda w, x, batch: {"x": model.layer(w, x["x"], batch), "count": x["count"] + 1.0}


@pytest.mark.parametrize("keys", [[], ["parallel.zero=3", *HOST, "memory.remat=full", "parallel.persist_below=0"]])
def test_x_may_be_a_tree_with_a_constant(keys, config_file):
    changes = {"first": with_count, "layer": counting, "last": lambda model: lambda w, x, b: model.last(w, x["x"], b)}
    config, devices, model = plain(config_file, *keys, **changes)
    step, plainly = (build(config, devices, model=one) for one in (model, plain_model.build(config, devices)))
    batch = on_devices(random_tokens(config, count=1)[0], step)
    (_, found, _), (_, expected, _) = (one.train(one.init(), batch) for one in (step, plainly))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=1e-6)


def other(function):
    """Return a change of `layer` to function(what it returns)."""
    return lambda model: lambda w, x, batch: function(model.layer(w, x, batch))


WRONG = {
    "a pair": ({"layer": other(lambda x: (x, x))}, [], "the model's layer returned .* for x of float32"),
    "a dtype": (
        {"layer": other(lambda x: x.astype(jnp.bfloat16))},
        [],
        r"returned bfloat16\[8, 16, 32\] for x of float32",
    ),
    "a shape": (
        {"layer": other(lambda x: x[:, :-1])},
        [],
        r"returned float32\[8, 15, 32\] for x of float32\[8, 16, 32\]",
    ),
    "partial sums": (
        {"layer": other(lambda x: jax.lax.pcast(x, ("tensor",), to="varying"))},
        ["parallel.tensor=2"],
        "x that differs along tensor, of x that does not; end with leave or row",
    ),
    "integers": (
        {
            "first": lambda model: lambda w, batch, run: (model.first(w, batch, run), batch["inputs"]),
            "layer": lambda model: lambda w, x, batch: (model.layer(w, x[0], batch), x[1]),
        },
        [],
        r"x\[1\] is int32: layers take floats",
    ),
    "a loss alone": (
        {"last": lambda model: lambda w, x, b: model.last(w, x, b)[0]},
        [],
        "return the sum of losses and",
    ),
    "a third": ({"last": lambda model: lambda w, x, b: (*model.last(w, x, b), 0)}, [], "return the sum of losses and"),
    "no rule": (
        {"rules": lambda _: Rules([("in_DF", "L D F"), ("out_FD", "L F D"), ("gain_D", "L D"), (".*_VD", "V D")])},
        ["parallel.tensor=2"],
        r"parallel\.tensor=2, but plain_model:build shards no weight over tensor; write /tensor",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_functions_that_do_not_fit_are_refused_by_name(wrong, config_file):
    changes, keys, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        step = build(*plain(config_file, *keys, **changes)[:2], model=plain(config_file, *keys, **changes)[2])
        step.train.lower(step.state, step.batch)


def test_a_model_that_is_given_has_the_objective_too(config_file, tmp_path):
    (tmp_path / "pairs.jsonl").write_text("")
    keys = f"data.source=pairs:{tmp_path}/pairs.jsonl", "train.objective={kind: dpo}"
    with pytest.raises(ValueError, match="does not give the losses of tokens; set token_losses"):
        build(*plain(config_file, *keys)[:2], model=plain(config_file, *keys)[2])
    losses = {"splits_documents": lambda _: True, "token_losses": lambda _: lambda w, x, batch: x.sum(-1)}
    config, devices, model = plain(config_file, *keys, **losses)
    assert "reference" in build(config, devices, model=model).batch
