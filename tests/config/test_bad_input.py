"""Bad input to every command: one line on stderr and exit code 2, at once; never a traceback, a hang or an abort.

Requests go through the commands' own functions in this process, up to where a run would start: the model is built, but
nothing is compiled, no process started. Each has LIMIT seconds of this process's CPU time, whatever else runs.
"""

import contextlib
import gzip
import json
import shutil
import signal
from types import SimpleNamespace

import pytest
from conftest import cover
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanotrain_jax import launch, plan, prepare, train
from nanotrain_jax.checkpoint import starting_point
from nanotrain_jax.config.schema import Config
from nanotrain_jax.parallel.pipeline.schedule import SCHEDULES

LIMIT = 20
BASE = """\
model: {family: gpt2, num_layers: 2, d_model: 32, num_heads: 4, vocab_size: 61}
parallel: {data: 1}
precision: {compute: float32}
data: {source: synthetic, batch_size: 8, seq_len: 16}
train: {steps: 20}
"""


class Accepted(Exception):
    """Raised where a command would start the run."""


def accept(*arguments, **keys):
    raise Accepted


@contextlib.contextmanager
def limited():
    def ring(number, frame):
        raise AssertionError(f"no answer in {LIMIT} s of CPU time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """A folder with files of all kinds; commands run in it stop where they would start a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "mesh.yaml").write_text(BASE.replace("parallel: {data: 1}", ""))
    files = {"empty.yaml": b"", "latin.yaml": b"train: {steps: \xe9}", "nul.yaml": b"a\0b", "text.txt": b"text " * 99}
    files |= {"broken.jsonl": b'{"text": "fine"}\n{"text"\n', "deep.jsonl": b"[" * 100_000}
    files["cut.jsonl.gz"] = gzip.compress(b'{"text": "fine"}\n' * 99)[:-20]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "folder.yaml" / "kept.bin").write_bytes(b"of somebody")
    monkeypatch.setattr(train.meshes, "configure", lambda *settings: [])
    monkeypatch.setattr(train.processes, "initialize", lambda *settings: None)
    monkeypatch.setattr(starting_point, "agree", accept)
    monkeypatch.setattr(launch, "Coordinator", accept)
    monkeypatch.setattr(launch, "Agent", accept)
    mains = {"train": train.main, "plan": plan.main, "launch": launch.main, "prepare": prepare.main}

    def ask(command, *arguments):
        """-> exit code, what stderr says; "accepted" where the run would start."""
        capsys.readouterr()
        with limited():
            try:
                code = mains[command](list(arguments))
            except Accepted:
                code = "accepted"
            except SystemExit as error:
                code = error.code
        return code, capsys.readouterr().err

    return SimpleNamespace(ask=ask, folder=tmp_path)


def hold(code, told):
    """Checks of every reply."""
    if code == 2:
        assert told.startswith("error: ")
        assert told.endswith("\n")
        assert told[:-1].isprintable(), told
        assert "Traceback" not in told
        assert len(told) < 3000
    else:
        assert code in ("accepted", 0, 1, 3)  # 1, 3: `plan`, it does not or may not fit
        assert not told


HUGE = ("10" + "0" * 29, str(2**62), str(10**18), "1" + "0" * 5000, "0x" + "f" * 6000, "-" + "9" * 30)
FIELDS = {
    f"{section}.{key.alias or name}": str(key.annotation)
    for section, keys in Config.sections().items()
    for name, key in keys.model_fields.items()
}
SIZES = [key for key, kind in FIELDS.items() if "int" in kind and key.startswith(("model.", "parallel.", "data."))]
OF_RUN = ("--config", "base.yaml")
NO_YAML = (
    "!!int foo", "!!float x", "!!timestamp x", "!!bool x", "!!binary é", "!!set [1]", "!!omap [1]", "!!map",
    "2001-99-99", "!!python/object:os.system x", "!!python/object/apply:os.system [ls]", "!!python/none", "!nothing 5",
    "*unknown", "[" * 3000, "{" * 3000, "[" * 3000 + "]" * 3000, "- " * 3000, "{[1]: 2}", "%", "@", "`",
    "{a: 1, a: 2}", "'", '"', "\t", "{<<: 5}", "{<<: [1]}",
)  # fmt: skip
NO_NUMBER = (
    "&a [*a]", "&a {x: *a}", '"\\0"', '"\\e[31m"', "~", "[]", "{}", "[[]]", "{a: {b: {c: 1}}}", "0b", "0x", "1e999999",
    "true", "1" * 99_999 + "z", "a" * 99_999, "\ud800", "\x1b[31m", "a\nb", "a\rb", "a\u2028b", "? 5", "~nosuchuser",
    "~nosuchuser/x", ".nan", "-.inf", "1.0", "0o8", "null", "!!null x", "!!set {a}", "2001-01-01",
)  # fmt: skip
NO_CONFIG = (
    "nope.yaml", "folder.yaml", "latin.yaml", "nul.yaml", "base.yaml/x", "~nosuchuser/x.yaml", "a\0b", "", ".", "/",
    "x" * 9999, "/dev/zero", "quickstart.yml", "\udcff.yaml", "a\nb.yaml", "\x1b[31m.yaml",
)  # fmt: skip
NO_OVERRIDE = (
    "a.b.c.d=1", "=1", "model=5", "model=[]", ".=1", "..=1", "model.=1", ".model=1", "model.d_model.x=1",
    "model..d_model=1", "train", "train.steps", "a=1", "x" * 5000 + "=1", ".".join("a" * 5000) + "=1", "model={1: 2}",
    "model={null: 1}", "train.steps=1\n2", "train={steps: {}}", "train={steps: 0, seed: -1}", "\x1b[31m=1", "--nope",
    "-x", "--nope\nx",
)  # fmt: skip
NO_TOKENIZER = ("gpt2", "folder.yaml", "latin.yaml", "base.yaml", "nowhere/tokenizer.json", "~nosuchuser/x")
NO_SOURCE = ("text:~nosuchuser/*", "tokens:~nosuchuser", "tokens:nowhere", "text:nowhere/*", "text:", "tokens:", "web")
NO_FILES = ("nope.txt", "folder.yaml", "text.pdf", "a\0b.txt", "broken.jsonl", "deep.jsonl", "cut.jsonl.gz")


def wrong_values():
    """Requests with an invalid value, key or YAML in an override."""
    for key in SIZES:
        for size in HUGE:
            yield "train", *OF_RUN, f"{key}={size}"
    for key in "model.num_layers", "model.d_model", "data.batch_size", "parallel.microbatches", "parallel.data":
        for more in (), ("--choose", "--gpus", "8"):
            yield "plan", *OF_RUN, *more, f"{key}={HUGE[0]}"
    for key in "parallel.zero", "train.steps", "optimizer.lr", "optimizer.betas", "precision.loss_scale", "data.source":
        yield "train", *OF_RUN, f"{key}=true"
    for text in NO_YAML:
        yield "train", *OF_RUN, f"train={text}"
    for text in NO_YAML + NO_NUMBER:
        yield "train", *OF_RUN, f"train.steps={text}"
    for override in NO_OVERRIDE:
        yield "train", *OF_RUN, override


def wrong_paths():
    """Requests with paths of missing or wrong files."""
    for config in NO_CONFIG:
        yield "train", "--config", config
        yield "plan", "--config", config
        yield "launch", "--", "--config", config
    for key in "memory.nvme_dir", "data.tokenizer", "checkpoint.dir", "checkpoint.resume", "logging.dir":
        for path in "~nosuchuser/x", '"a\\0b"', '""', "x" * 5000:
            yield "train", *OF_RUN, f"{key}={path}", "memory.offload_optimizer=nvme"
    for source in (*NO_SOURCE, '"text:\\0"'):
        yield "train", *OF_RUN, f"data.source={source}"
    for tokenizer in NO_TOKENIZER:
        yield "train", *OF_RUN, "data.source=text:*.txt", f"data.tokenizer={tokenizer}"
        yield "plan", *OF_RUN, "data.source=text:*.txt", f"data.tokenizer={tokenizer}"
        yield "prepare", "text.txt", "--out", "out", "--tokenizer", tokenizer
    for option in "--write", "--report", "--json":
        yield "plan", *OF_RUN, option, "~nosuchuser/x"
        yield "plan", *OF_RUN, option, "base.yaml/x"
    for file in NO_FILES:
        yield "prepare", file, "--out", "out"
    for out in "~nosuchuser/out", "text.txt/out", "\0", "folder.yaml":
        yield "prepare", "text.txt", "--out", out


def wrong_options():
    """Requests with invalid command-line arguments."""
    for count in "0", "-1", "x", "", HUGE[0], HUGE[3], "1e3", "\u00b2", "9\n9":
        yield "plan", *OF_RUN, "--gpus", count
        yield "launch", "--processes", count, "--", *OF_RUN
        yield "prepare", "text.txt", "--out", "out", "--tokenizer", f"train-bpe:{count}"
    for option in "--max-restarts", "--join-timeout", "--hosts", "--host":
        yield "launch", option, HUGE[0], "--", *OF_RUN
    for fraction in "nan", "inf", "-1", "0", "2", "x", "1e999":
        yield "plan", *OF_RUN, "--memory-fraction", fraction
    yield "prepare", "--out", "out"
    yield "prepare", "text.txt"


@pytest.mark.parametrize("every", cover([4], [1], str))
def test_hundreds_of_bad_requests_are_each_reported_in_one_line(every, here):
    requests, wrong = [*wrong_values(), *wrong_paths(), *wrong_options()], []
    for command, *arguments in requests[::every]:
        try:
            code, told = here.ask(command, *arguments)
            hold(code, told)
            assert code == 2, f"{code} {told}"
        except Exception as error:
            wrong.append(f"{command} {ascii(arguments)[-200:]}: {type(error).__name__} {str(error)[:300]}")
    assert not wrong, f"{len(wrong)} of {len(requests)}:\n" + "\n".join(wrong)
    assert len(requests) > 350


# Requests that may be in order: every one is answered, with a start, a figure or one line.
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**n for n in range(0, 35)] + [10**n for n in range(0, 31, 2)]),
    st.integers(1, 2**31).map(lambda n: n if n % 3 else n // 3),
)
VALUES = st.one_of(
    NUMBERS.map(str),
    st.floats(width=64).map(repr),
    st.sampled_from(
        [
            *NO_YAML,
            *NO_NUMBER,
            *HUGE,
            "bytes",
            "gpt2",
            "llama",
            "block:2",
            "block:999999",
            "zb_h2",
            "interleaved",
            "full",
            "dynamic",
        ]
    ),
    st.text(max_size=20),
)
KEYS = st.sampled_from(list(FIELDS))
OVERRIDE = st.one_of(
    st.tuples(st.sampled_from(SIZES), NUMBERS).map(lambda pair: f"{pair[0]}={pair[1]}"),
    st.tuples(KEYS, VALUES).map("=".join),
    st.tuples(st.sampled_from(["model", "data", "train", "x", ""]), VALUES).map("=".join),
    st.text(max_size=20),
)
POWERS = {
    "model.num_layers": 19, "model.d_model": 24, "model.num_heads": 10, "model.num_kv_heads": 6, "model.d_ff": 24,
    "model.vocab_size": 27, "model.loss_chunk": 20, "data.batch_size": 18, "data.seq_len": 30, "parallel.data": 20,
    "parallel.microbatches": 18, "parallel.replica": 6, "parallel.tensor": 6, "parallel.pipe": 10, "parallel.chunks": 6,
}  # fmt: skip
POWER = st.sampled_from(list(POWERS)).flatmap(
    lambda key: st.integers(0, POWERS[key]).map(lambda power: f"{key}={2**power}")
)
WORD = st.sampled_from(
    [f"parallel.schedule={name}" for name in SCHEDULES]
    + [f"parallel.zero={stage}" for stage in range(4)]
    + [f"memory.remat={policy}" for policy in ("none", "selective", "full", "block:2")]
    + ["model.family=llama", "precision.compute=bfloat16"]
    + ["memory.offload_optimizer=host", "memory.offload_params=host"]
)
LARGE = st.lists(POWER, max_size=5, unique_by=lambda override: override.split("=")[0])
LAYOUT = st.tuples(LARGE, st.lists(WORD, max_size=3)).map(lambda parts: [*parts[0], *parts[1]])
CONFIG = st.sampled_from(["base.yaml"] * 8 + ["mesh.yaml"] * 4 + ["empty.yaml", "nul.yaml", "folder.yaml", "nope.yaml"])
OVERRIDES = st.lists(OVERRIDE, max_size=4)
COUNT = st.one_of(st.integers(-2, 70).map(str), NUMBERS.map(str), VALUES)
FUZZ = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def answers(here, *request):
    code, told = here.ask(*request)
    hold(code, told)


@pytest.mark.long
@FUZZ
@given(CONFIG, OVERRIDES)
def test_random_train_requests(here, config, overrides):
    answers(here, "train", "--config", config, *overrides)


@pytest.mark.long
@FUZZ
@given(CONFIG, OVERRIDES, st.booleans(), COUNT)
def test_random_plan_requests(here, config, overrides, choose, gpus):
    answers(here, "plan", "--config", config, "--gpus", gpus, *["--choose"] * choose, *overrides)


@pytest.mark.long
@FUZZ
@given(CONFIG, OVERRIDES, COUNT, st.sampled_from(["processes", "max-restarts", "hosts", "host", "join-timeout"]))
def test_random_launch_requests(here, config, overrides, count, option):
    answers(here, "launch", f"--{option}", count, "--", "--config", config, *overrides)


@pytest.mark.long
@FUZZ
@given(LAYOUT)
def test_train_requests_of_any_size(here, layout):
    answers(here, "train", *OF_RUN, *layout)


@pytest.mark.long
@FUZZ
@given(st.sampled_from(["base.yaml", "mesh.yaml"]), LAYOUT, st.integers(0, 16), st.booleans())
def test_plan_requests_of_any_size(here, config, layout, power, choose):
    answers(here, "plan", "--config", config, "--gpus", str(2**power), *["--choose"] * choose, *layout)


@pytest.mark.long
@FUZZ
@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_configs_of_random_characters(here, content):
    (here.folder / "random.yaml").write_bytes(content)
    answers(here, "train", "--config", "random.yaml")


@pytest.mark.long
@FUZZ
@given(st.lists(st.binary(max_size=40) | VALUES.map(json.dumps).map(str.encode), max_size=5), COUNT, st.booleans())
def test_prepare_with_random_bytes(here, lines, size, skip):
    (here.folder / "random.jsonl").write_bytes(b"".join(b'{"text": %b}\n' % line for line in lines))
    shutil.rmtree(here.folder / "out", ignore_errors=True)
    more = ["--skip-bad"] if skip else []
    answers(here, "prepare", "random.jsonl", "--out", "out", "--tokenizer", f"train-bpe:{size}", *more)
