"""Shared fixtures. 8 simulated CPU devices, strict dtype promotion, rank promotion raises."""

import gc
import json
import os
import re
import tempfile
import zlib
from functools import lru_cache
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.compilation_cache import compilation_cache

from nanotrain_jax.audit import collective_order, topology
from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.models import decoder
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.step import build as steps

ROOT = Path(__file__).parents[1]

# Most of the time goes into compiling, and machine code need not be fast here. Subprocesses of tests inherit it.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # later ones abort where they meet this flag
    FAST_COMPILE += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILE}"
# Tracing makes many objects, few of them garbage: with Python's limits a tenth of the time goes into looking for it.
gc.set_threshold(50_000)
# Programs compiled twice in one session are compiled once.
CACHE = tempfile.TemporaryDirectory()
meshes.configure(simulate=8, compile_cache=CACHE.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--part", help="I/N: only every N-th of the selected tests, beginning with the I-th (from 0)")


def pytest_collection_modifyitems(config, items):
    """Select a part of the tests, by name: the same on every worker, and each test is in one of the N parts."""
    if config.getoption("--part"):
        part, parts = map(int, config.getoption("--part").split("/"))
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]


def _can_compile_for_cuda():
    try:
        return bool(topology.compile_only("h100", 1))
    except RuntimeError:
        return False


def needs_cuda_compiler(test):
    """Fixture of tests that compile for GPUs this machine does not have."""
    missing = "the CUDA compiler is not installed: pip install -e '.[cuda12]'"
    return pytest.mark.cuda_compiler(pytest.mark.skipif(not _can_compile_for_cuda(), reason=missing)(test))


# The layouts with which the golden numbers were made, whatever configs/ has: overrides, before those of a case.
LAYOUTS = {
    "llama3_8b": ["parallel.data=8", "parallel.zero=3", "parallel.microbatches=1", "memory.remat=full"],
    "llama3_70b": [
        "parallel.pipe=1", "parallel.schedule=1f1b", "parallel.chunks=1", "parallel.data=8", "parallel.tensor=8",
        "parallel.zero=2", "parallel.microbatches=2", "memory.remat=full",
    ],
}  # fmt: skip


def in_words(case):
    return case if isinstance(case, str) else "-".join(map(str, case))


def cover(first, rest, name=in_words):
    """Parameters for a test: first in the default run, rest in `pytest -m long`."""
    return [pytest.param(case, id=name(case)) for case in first] + [
        pytest.param(case, id=name(case), marks=pytest.mark.long) for case in rest
    ]


# The one place for tolerances. Parity is float32 against float32: sums in another order, nothing else. (The eps of Adam
# in `small` is far above the rounding noise of gradients, which m / sqrt(v) would blow up to the size of the learning
# rate.)
LOSS = {"rtol": 2e-6, "atol": 0}
GRADS = {"rtol": 1e-5, "atol": 1e-7}  # elements that cancel to almost nothing have only an absolute accuracy
STATE = {"rtol": 1e-5, "atol": 1e-6}


def small(family="llama", **changes):
    """A small config of a family as plain data; changes are section=dict.

    No value that the oracle knows is a default, so a key that the step ignores makes tests fail.
    """
    tree = {
        "model": {"family": family, "num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 64, "vocab_size": 61}
        | {"rope_theta": oracle.THETA, "norm_eps": oracle.NORM_EPS, "unroll": False},
        "precision": {"compute": "float32"},
        "data": {"source": "synthetic", "batch_size": 32, "seq_len": 16},
        "optimizer": {"lr": 1e-2, "schedule": "constant", "grad_clip": 0.0}
        | {"betas": [oracle.B1, oracle.B2], "eps": oracle.EPS, "weight_decay": oracle.DECAY},
        "train": {"seed": 3},
    }
    if family != "gpt2":
        tree["model"]["num_kv_heads"] = 2
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return tree


def resolved(tree, vocab=None):
    """Return (resolved config, mesh) of plain data."""
    config = load.parse(tree)
    mesh = meshes.make(**config.parallel.axes)
    return resolve(config, mesh.shape, vocab), mesh


def built(tree):
    """Return the step of a config (plain data). The last one is kept, so that two checks of it trace and compile it
    once."""
    return _built(json.dumps(tree))


@lru_cache(maxsize=1)
def _built(text):
    return steps.build(*resolved(json.loads(text)))


def compiled_text(step):
    """Return the HLO of the compiled training step."""
    return step.train.lower(step.state, step.batch).compile().as_text()


def random_tokens(config, seed=0, count=1):
    """Return count arrays int32 [B T+1]."""
    shape = count, config.data.batch_size, config.data.seq_len + 1
    return list(np.random.default_rng(seed).integers(config.model.vocab_size, size=shape, dtype=np.int32))


def document_starts(rows, tokens):
    """Where the documents of the oracle begin, for each token: int32 [rows tokens]."""
    starts = np.zeros((rows, tokens), np.int32)
    for i, cuts in enumerate(oracle.CUTS):
        for cut in cuts:
            starts[i :: len(oracle.CUTS), cut:] = cut
    return starts


def on_devices(tokens, step):
    """tokens[B T+1] -> the batch of a step, on its devices."""
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    starts = document_starts(*tokens.shape)
    if "starts" in step.batch:
        batch["targets"] = np.where(starts[:, 1:] == starts[:, :-1], batch["targets"], -1)
    if step.token_order is not None:
        batch = {name: rows[:, step.token_order] for name, rows in batch.items()}
    if "starts" in step.batch:
        batch["starts"] = starts[:, :-1]
    return jax.device_put(batch, jax.tree.map(lambda x: x.sharding, step.batch))


class Expected(dict):
    """Return the initial weights of a model and the oracle's result after 3 updates."""

    def __missing__(self, key):
        family, *numbers, parts, across = key
        model = dict(
            zip(("num_kv_heads", "num_heads", "num_layers", "tie_embeddings", "experts", "d_ff"), numbers, strict=True)
        )
        config, _ = resolved(small(family, model=model, parallel={"data": 1}))
        params = jax.device_get(decoder.init(config.model, config.train.seed))
        tokens = random_tokens(config, count=3)
        self[key] = params, oracle.train(params, tokens, lr=1e-2, documents=not across, parts=parts)
        return self[key]


def key_of(config):
    """What the oracle's result for a config depends on."""
    m, p = config.model, config.parallel
    parts = (p.replica * p.data, p.microbatches) if m.experts and m.experts.adds_loss else (1, 1)
    numbers = m.num_kv_heads, m.num_heads, m.num_layers, m.tie_embeddings, m.experts, m.d_ff
    return m.family, *numbers, parts, config.data.attend_across_documents


@pytest.fixture(scope="session")
def expected():
    return Expected()


def padded(tree, like):
    """Zero-pad the rows of the arrays of tree to those of like."""

    def grown(x, y):
        return np.pad(x, [(0, n - m) for m, n in zip(x.shape, y.shape, strict=True)]) if x.ndim else x

    return jax.tree.map(grown, tree, like)


def starting_from(step, params):
    """Return the state of a float32 step before its first update, of weights in layer order."""
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.state)
    state = state._replace(params=padded(params, step.state.params))
    return step.in_stage_order(jax.device_put(state, jax.tree.map(lambda x: x.sharding, step.state)))


def equals_the_oracle(tree, expected):
    """Compare 3 updates of a config (plain data, based on `small`) with the oracle: loss, gradients, state.

    Where the vocabulary is padded, all that belongs to the padding stays zero.
    """
    close = np.testing.assert_allclose
    step = built(tree)
    config = step.plan.config
    start, (params, m, v, log) = expected[key_of(config)]
    state = starting_from(step, start)
    for tokens, (loss, grads, norm) in zip(random_tokens(config, count=3), log, strict=True):
        first = int(state.step) == 0
        state, metrics, _ = step.train(state, on_devices(tokens, step))
        close(metrics["loss"], loss, **LOSS)
        close(metrics["grad_norm"], norm, **GRADS)
        if first:  # the first moment is (1 - beta1) times the first gradient
            first_moment = jax.device_get(step.in_layer_order(state).opt.moments[0].mu)
            first_moment = jax.tree.map(lambda m: m / (1 - oracle.B1), first_moment)
            chex.assert_trees_all_close(first_moment, padded(grads, first_moment), **GRADS)
    state = step.in_layer_order(state)
    adam = state.opt.moments[0]
    found = state.params, adam.mu, adam.nu
    chex.assert_trees_all_close(found, padded((params, m, v), found), **STATE)
    assert (int(state.step), int(state.skipped)) == (3, 0)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, step.state)


def relative_errors(found, exact):
    """Path of each leaf -> norm of the difference over the norm of exact. Without biases of keys: their true gradient
    is zero."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(found), strict=True)
    return {
        jax.tree_util.keystr(path): float(np.linalg.norm(y - x) / np.linalg.norm(x))
        for (path, x), y in pairs
        if path[-1].key != "bias_k_KH"
    }


def stays_near_the_oracle(tree, expected, loss_error):
    """Compare a 16-bit run (plain data, based on `small`) with the oracle: the losses of 3 updates, and the first
    moment of every parameter after the first of them, within 3%."""
    step = built(tree)
    config = step.plan.config
    assert config.parallel.microbatches > 1  # so that gradients are summed
    _, (*_, log) = expected[key_of(config)]
    state = step.init()
    for tokens, (loss, grads, _) in zip(random_tokens(config, count=3), log, strict=True):
        first = int(state.step) == 0
        state, metrics, _ = step.train(state, on_devices(tokens, step))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=loss_error)
        if first:
            first_moment = jax.device_get(step.in_layer_order(state).opt.moments[0].mu)
            gradients = jax.tree.map(lambda m: m / (1 - oracle.B1), first_moment)
            errors = relative_errors(gradients, padded(grads, gradients))
            assert max(errors.values()) < 0.03, errors
    state = step.in_layer_order(state)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype(config.precision.compute)}
    assert {x.dtype for x in jax.tree.leaves(state.opt.master)} == {np.dtype("float32")}
    jax.tree.map(lambda w, m: np.testing.assert_array_equal(w, m.astype(w.dtype)), state.params, state.opt.master)


def run(tree, updates=5):
    """Return the state after some updates of a config (plain data), and the metrics of each."""
    step = built(tree)
    state, log = step.init(), []
    for tokens in random_tokens(step.plan.config, count=updates):
        state, metrics, _ = step.train(state, on_devices(tokens, step))
        log.append(jax.device_get(metrics))
    return state, log


def evaluates_as_it_trains(tree):
    """The mean loss of an evaluation is that of a training step, and all targets count -> step, tokens, batch, sum."""
    config, mesh = resolved(tree)
    step = steps.build(config, mesh)
    (tokens,) = random_tokens(config)
    batch, state = on_devices(tokens, step), step.init()
    total, count = step.evaluate(state.params, batch)
    assert int(count) == config.data.batch_size * config.data.seq_len
    _, metrics, _ = step.train(state, batch)
    np.testing.assert_allclose(total / np.float32(count), metrics["loss"], rtol=2e-6)
    return step, tokens, batch, total


def with_embedding(state, row, value):
    """Return the state with one embedding row changed, in weights and master weights."""

    def changed(params):
        old = params["ends"]["embedding_VD"]
        new = np.array(old.astype(jnp.float32))
        new[row] = value
        new = jax.device_put(jnp.asarray(new).astype(old.dtype), old.sharding)
        return params | {"ends": params["ends"] | {"embedding_VD": new}}

    master = state.opt.master and changed(state.opt.master)
    return state._replace(params=changed(state.params), opt=state.opt._replace(master=master))


def skips_an_overflow(tree):
    """In float16 one embedding row is too large; one sequence looks it up: all devices skip the step, and agree."""
    config, mesh = resolved(tree)
    step = steps.build(config, mesh)
    good, bad = (np.where(t == 60, 0, t) for t in random_tokens(config, count=2))
    bad[5, 3] = 60
    state, _, _ = step.train(with_embedding(step.init(), 60, 7e4), on_devices(good, step))
    before = jax.device_get(state)
    state, metrics, _ = step.train(state, on_devices(bad, step))
    assert not np.isfinite(metrics["grad_norm"])
    assert (int(state.skipped), float(state.scale.value)) == (1, 2.0**15)
    jax.tree.map(np.testing.assert_array_equal, (before.params, before.opt), jax.device_get((state.params, state.opt)))
    for copies in (x.addressable_shards for x in jax.tree.leaves((state.skipped, state.scale))):
        assert {float(copy.data) for copy in copies} == {float(copies[0].data)}


def collectives(text):
    """Compiled HLO text -> (computation, opcode) of each collective; the entry computation is 'ENTRY'."""
    found, where = [], None
    for line in text.splitlines():
        if line and line[0] not in " }" and line.endswith("{"):
            where = line.split()[0]
        pattern = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
        found += [(where, operation) for operation in re.findall(pattern, line)]
    return found


def in_order(text):
    """No collective of a program for simulated devices is beside a loop or branch with others."""
    assert not list(map(str, collective_order.unordered(text)))


def records(folder):
    """Return the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(found):
    """Return records without what depends on the speed of this machine."""
    timed = "second", "goodput"
    return [{key: value for key, value in record.items() if not any(word in key for word in timed)} for record in found]


@pytest.fixture(scope="module")
def no_cache_of_programs():
    """XLA:CPU sometimes aborts in loops of programs read from a cache (jax 0.10.2, 0.12.0)."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def text_files(tmp_path):
    """Write 40 documents of real words; -> the glob that matches them."""
    import sysconfig
    from pathlib import Path

    folder = tmp_path / "text"
    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in (
        "abc",
        "ast",
        "bdb",
        "cmd",
        "code",
        "copy",
        "csv",
        "dis",
        "glob",
        "heapq",
        "hmac",
        "io",
        "keyword",
        "locale",
    ):
        text = (library / f"{name}.py").read_text()
        for part in range(3):
            (folder / f"{name}{part}.txt").write_text(text[part * 2000 : part * 2000 + 2000])
    return f"{folder}/*.txt"


def exit_code(main, arguments):
    """Return the exit code of a command, whether it returns it or exits as argparse does."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code
