"""An invalid training request is reported in one line, and nothing is written."""

import shutil

import pytest
from command import config_file, main, same, saved_state

__all__ = ["config_file"]  # a fixture

CONTEXT = ["parallel.context=4", "parallel.data=1"]
ULYSSES = "parallel.context_attention=ulysses"
PIPE = ["parallel.pipe=4", "parallel.data=1", "model.num_layers=8"]
TOP_K = ["parallel.replica=2", "parallel.data=2", "parallel.compress=topk:0.1"]
APART = ["parallel.replica=2", "parallel.data=2", "parallel.sync_every=5"]
EXPERTS = ["model.d_ff=null", "model.experts={{num: 4, top_k: 2, d_ff: 16}}"]
BAD = [
    (["model.num_layer=3"], "unknown key model.num_layer; did you mean model.num_layers?"),
    (["train.lr=1"], "did you mean optimizer.lr?"),
    (["train.step=1"], "did you mean train.steps?"),
    (["data.source=text:"], "as a mapping; write text:WHERE, without a space"),
    (["data.source=text: a"], "as a mapping; write text:WHERE, without a space"),
    (["optimizer.lr=fast"], "optimizer.lr='fast': input should be a valid number"),
    (["model.family=bert"], "'llama', 'gpt2', 'mistral', 'qwen2', 'qwen3' or 'gemma3'"),
    (["train.steps"], "must be section.key=value"),
    (["logging.dir=runs/exp #1"], "YAML reads a comment after #; quote the value"),
    (["data.source=text:nowhere/*.txt"], "matches no file"),
    (
        ["logging.dir=gs://bucket/run"],
        "path 'gs://bucket/run' is remote; give a folder of this machine",
    ),
    (["data.source=text:s3://bucket/x.txt"], "path 's3://bucket/x.txt' is remote"),
    (["data.source=tokens:hdfs://bucket/x"], "path 'hdfs://bucket/x' is remote"),
    (["checkpoint.resume=hdfs://runs/a"], "path 'hdfs://runs/a' is remote"),
    (["data.source=tokens:nowhere"], "nanotrain_jax.prepare"),
    (["data.tokenizer=nowhere.json"], "nowhere.json"),
    (["data.seq_len=100000000"], "data.seq_len=100000000 needs at least 100000001"),
    (
        ["data.batch_size=9"],
        "data.batch_size=9 is not divisible by replica x data x microbatches = 1 x 4 x 1 = 4; use 8 or 12",
    ),
    (["parallel.microbatches=3"], "use 12"),
    (
        ["model.num_heads=4", "model.num_kv_heads=3"],
        "model.num_kv_heads=3 does not divide model.num_heads=4; use 2 or 4",
    ),
    (["model.loss_chunk=7"], "model.loss_chunk=7 does not divide the"),
    (["parallel.sync_every=5"], "parallel.sync_every=5 with parallel.replica=1: there is nothing to synchronize; use"),
    ([*APART, "memory.offload_optimizer=host"], "with memory.offload_optimizer=host: replicas keep their state on the"),
    (
        [*APART, "memory.offload_activations=host", "memory.remat=full"],
        "use memory.offload_activations=none, or leave parallel.sync_every",
    ),
    ([*APART, "parallel.grad_reduce=per_layer"], "it reduces over replicas within the backward; use parallel.grad_red"),
    (
        ["train.rollback={{}}", "checkpoint.every=0"],
        "train.rollback with checkpoint.every=0: it goes back to a checkpoint",
    ),
    (
        [*APART, "train.rollback={{}}"],
        "train.rollback with parallel.sync_every=5: each replica has a loss of its own; leave",
    ),
    (
        ["train.rollback={{}}", "data.exhausted=end"],
        "batches that are skipped leave too few for all steps; use data.exh",
    ),
    (
        ["runtime.verify_every=10", "checkpoint.every=0"],
        "runtime.verify_every=10 with checkpoint.every=0: it goes back to a checkpoint; use checkpoint.every=100, or",
    ),
    (
        ["runtime.verify_every=10", "runtime.simulate=0"],
        "with kernels that need not compute the same bits twice; use runtime.deterministic=true",
    ),
    (["train.rollback={{window: 2}}"], "train.rollback.window=2: input should be greater than or equal to 8"),
    (["parallel.compress=topk"], "parallel.compress='topk' must be none, float8, int8, topk:RATIO, randomk:RATIO (1"),
    (["parallel.compress=topk:0.0009"], "parallel.compress='topk:0.0009' must be none"),
    (["parallel.compress=randomk:1.5"], "parallel.compress='randomk:1.5' must be none"),
    (["parallel.compress=powersgd:0"], "parallel.compress='powersgd:0' must be none"),
    (["parallel.compress=int8"], "parallel.compress=int8 with parallel.replica=1: gradients are compressed between"),
    ([*TOP_K, "parallel.grad_reduce=per_layer"], "gradients would be summed within the backward; use parallel.grad_re"),
    (
        [*TOP_K, "memory.offload_optimizer=host"],
        "the residual, as large as the master weights, would stay on the device",
    ),
    ([*TOP_K, "precision.compute=float16", "precision.loss_scale=dynamic"], "the residual would have another scale"),
    ([*APART, "optimizer.outer_momentum=1"], "optimizer.outer_momentum=1"),
    (["parallel.data=16"], "needs 16 devices but there are 8"),
    (["parallel.data=3", "parallel.replica=-1"], "cannot be split into groups of 3"),
    (
        [*CONTEXT, "data.seq_len=60"],
        "data.seq_len=60 with parallel.context=4 and parallel.context_attention=ring: not a "
        "multiple of 8; use data.seq_len=56 or 64",
    ),
    ([*CONTEXT, "data.seq_len=3", ULYSSES], "not a multiple of 4; use data.seq_len=4"),
    (
        ["data.seq_len=31", "data.attend_across_documents=false", "precision.compute=bfloat16"],
        "data.attend_across_documents=false: flash attention cuts rows in two; use data.seq_len=32",
    ),
    (
        [*CONTEXT, ULYSSES],
        "must divide the 2 query heads, and divide the 2 key heads or be a multiple of them; use "
        "parallel.context=2, or parallel.context_attention=ring",
    ),
    (
        ["parallel.context=2", "parallel.data=2", "parallel.tensor=2", ULYSSES],
        "must divide the 1 query heads on a tensor-parallel device, and divide the 1 key heads or be a multiple of "
        "them; use parallel.context_attention=ring",
    ),
    (
        ["parallel.context=2", "parallel.data=1", "parallel.pipe=2", "model.num_layers=2"],
        "parallel.context_attention="
        "ring with parallel.pipe=2 and parallel.idle=skip: a ring needs all devices in a permute",
    ),
    (
        [
            "parallel.context=2",
            "parallel.data=1",
            "parallel.tensor=2",
            "data.seq_len=68",
            "model.max_seq_len=68",
            "parallel.context_attention=gather",
            "model.num_heads=4",
            "model.num_kv_heads=2",
            "parallel.tensor=4",
        ],
        "parallel.tensor=4 does not divide data.seq_len / parallel.context=34",
    ),
    (
        ["model.family=gemma3", "parallel.sync_every=2"],
        "model.global_layers=every:6 with parallel.sync_every=2: the outer optimizer holds all weights",
    ),
    (["model.experts={{num: 4, top_k: 5, d_ff: 8}}"], "model.experts.top_k=5 exceeds model.experts.num=4"),
    (["model.experts={{num: 4, top_k: 2}}"], "model.experts.d_ff={'num': 4, 'top_k': 2}: field required"),
    (["model.experts={{num: 4, top_k: 2, d_ff: 8, balance: even}}"], "should be 'loss', 'bias' or 'none'"),
    (
        ["model.experts={{num: 4, top_k: 2, d_ff: 8, capacity: 0.9}}"],
        "model.experts.capacity=0.9: input should be greater than",
    ),
    (["model.experts={{num: 4, top_k: 2, d_ff: 8, room: 2}}"], "unknown key model.experts.room"),
    ([*EXPERTS, "parallel={{data: 8, expert: 8}}"], "parallel.expert=8 does not divide model.experts.num=4: each"),
    ([*EXPERTS, "parallel={{data: 8, expert: 3}}"], "parallel.expert=3 does not divide parallel.data=8: it is a part"),
    ([*EXPERTS, "parallel={{expert: -1}}"], "parallel.expert=-1: must be at least 1"),
    (["parallel={{data: 8, expert: 2}}"], "parallel.expert=2 without model.experts: there are none to share; use 1"),
    ([*EXPERTS, "model.experts.num=6", "parallel={{data: 4, expert: 4}}"], "num=6: each device has as many; use 2"),
    ([*EXPERTS, "model.experts.d_ff=15", "parallel={{tensor: 2}}"], "=2 does not divide model.experts.d_ff=15; use 1"),
    (["model.experts={{num: 4, top_k: 2, d_ff: 8, balance: none, balance_weight: 1}}"], "=none: nothing balances; use"),
    ([*EXPERTS, "model.experts.bias_rate=0.01"], "model.experts.balance=loss: no bias moves; use balance=bias, or"),
    (["checkpoint.step=5"], "checkpoint.step=5 with checkpoint.resume=auto: it is a step of another run; use"),
    ([*EXPERTS, "model.d_ff=24"], "model.d_ff=24 with model.experts.d_ff=16: every MLP is a mixture of experts"),
    (
        [*EXPERTS, "model.experts.first_dense=2", "model.num_layers=2"],
        "first_dense=2 with model.num_layers=2: no layer",
    ),
    (
        [
            *EXPERTS,
            "model.experts.first_dense=1",
            "model.num_layers=4",
            "parallel={{data: 1, pipe: 2, vocab_over_pipe: true}}",
        ],
        "model.experts with parallel.vocab_over_pipe=true and first_dense: not supported",
    ),
    (
        [*EXPERTS, "model.experts.first_dense=1", "memory.remat=block:3", "model.num_layers=4"],
        "does not divide model.ex",
    ),
    ([*EXPERTS, "model.family=gpt2"], "model.experts with model.family=gpt2: experts are gated MLPs; use llama"),
    (["model.grouped_matmul=tokamax"], "model.grouped_matmul=tokamax without model.experts; leave it out"),
    ([*EXPERTS, "parallel.expert_exchange=ragged"], "with parallel.expert=1: nothing is exchanged; leave it out"),
    ([*EXPERTS, *APART, "model.experts.balance=bias"], "sync_every=5: not supported for a mixture of experts yet; use"),
    ([*EXPERTS, "train.lora={{rank: 2}}"], "use train.lora.targets=[q, k, v, out]"),
    (["parallel.tensor=4", "parallel.data=1"], "parallel.tensor=4 does not divide model.num_heads=2; use 1 or 2"),
    (["precision.matmul=float8"], "precision.matmul=float8 with precision.compute=float32; use bfloat16"),
    (
        ["precision.matmul=float8", "precision.compute=bfloat16", "model.d_ff=72"],
        "72, must be a multiple of 16; use 80",
    ),
    (
        [*EXPERTS, "precision.matmul=float8", "precision.compute=bfloat16", "model.experts.d_ff=24"],
        "model.experts.d_ff / parallel.tensor, 24, must be a multiple of 16; use 32",
    ),
    (["precision.gather=float8", "precision.compute=bfloat16"], "only zero=3 gathers layers"),
    (["precision.gather=int8"], "precision.gather=int8 with precision.compute=float32; use bfloat16"),
    (
        ["precision.gather=int8", "precision.compute=bfloat16", "parallel.zero=2"],
        "precision.gather=int8 with parallel.zero=2: only zero=3 gathers layers, from float32 weights on the device; "
        "use parallel.zero=3",
    ),
    (
        ["precision.grad_reduce=int4"],
        "precision.grad_reduce='int4': input should be 'float32', 'bfloat16', 'float8' or",
    ),
    (
        ["parallel.tensor=2", "parallel.data=1", "parallel.overlap_tensor=true", "parallel.sequence_parallel=false"],
        "an all-reduce has no hops; use parallel.sequence_parallel=true",
    ),
    (
        ["parallel.tensor=2", "parallel.data=1", "parallel.overlap_tensor=true", "parallel.pipe=2"],
        "a ring needs all devices in a permute, and idle stages skip it; use parallel.idle=mask",
    ),
    (
        ["parallel.tensor=2", "parallel.data=1", "model.d_ff=63"],
        "parallel.tensor=2 does not divide model.d_ff=63; use 1",
    ),
    (
        ["parallel.tensor=2", "parallel.data=1", "data.seq_len=31"],
        "does not divide data.seq_len=31; use 1, another data.seq_len, or parallel.sequence_parallel=false",
    ),
    (
        ["parallel.tensor=4", "parallel.data=1", "model.num_heads=12", "model.num_kv_heads=6", "model.d_model=48"],
        "parallel.tensor=4 neither divides model.num_kv_heads=6 nor is a multiple of it; use 1 or 2",
    ),
    (["parallel.zero=4"], "parallel.zero=4"),
    (["memory.remat=half"], "memory.remat='half' must be none, selective, full or block:N"),
    (["memory.remat=block:2"], "does not divide model.num_layers=1; use block:1"),
    (
        ["parallel.data=1", "parallel.pipe=-1"],
        "parallel.pipe=8 exceeds model.num_layers=1: each chunk needs a layer; use at most 1 stages x chunks",
    ),
    (
        ["parallel.pipe=4", "parallel.data=1", "model.num_layers=6", "memory.remat=block:2"],
        "memory.remat='block:2' with model.num_layers=6 on 4 stages x 1 chunks: stages have different numbers of",
    ),
    (
        [
            "parallel.pipe=2",
            "parallel.data=1",
            "model.num_layers=6",
            "parallel.schedule=interleaved",
            "parallel.chunks=4",
        ],
        "parallel.pipe x parallel.chunks = 2 x 4 = 8 exceeds model.num_layers=6: each chunk needs a layer",
    ),
    (["parallel.chunks=2"], "parallel.chunks=2 with parallel.pipe=1 has nothing to interleave; use 1"),
    ([*PIPE, "parallel.chunks=2"], "parallel.schedule=1f1b: 2 chunks per stage; use 1, or interleaved or zero_bubble"),
    (
        [*PIPE, "parallel.schedule=zb_h1", "parallel.microbatches=2"],
        "parallel.schedule=zb_h1: 2 microbatches are too few for 4 stages; use at least 4, or 1f1b",
    ),
    (
        [*PIPE, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.microbatches=2"],
        "parallel.schedule=interleaved: 2 microbatches are not a multiple of 4 stages; use 4",
    ),
    (
        [*PIPE, "parallel.grad_reduce=per_layer", "parallel.idle=mask"],
        "parallel.grad_reduce=per_layer with parallel.pipe=4 and parallel.idle=mask",
    ),
    (
        [*PIPE, "memory.remat=block:4"],
        "does not divide model.num_layers / (parallel.pipe x parallel.chunks)=2; use block:2",
    ),
    (["model.vocab_size=100"], "smaller than the tokenizer's 257"),
    (["model.max_seq_len=16"], "longer than model.max_seq_len=16"),
    (["logging.dir={tmp}/small.yaml/run"], "cannot be written to"),
    (['logging.dir=""'], "logging.dir=''"),
    (
        [*EXPERTS, "parallel.expert=2", "parallel.data=2", "parallel.expert_exchange=ragged"],
        "parallel.expert_exchange=ragged needs GPUs: XLA:CPU has no ragged all-to-all; use padded",
    ),
    (["model.attention=cudnn"], "model.attention=cudnn needs an NVIDIA GPU"),
    (["train.seed=4294967296"], "train.seed=4294967296"),
    (["checkpoint.resume={tmp}"], "holds no finished checkpoint"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[" ".join(o) for o, _ in BAD])
def test_an_invalid_request_is_reported_in_one_line_and_writes_nothing(
    overrides, message, config_file, tmp_path, capsys
):
    before = sorted(tmp_path.rglob("*"))
    overrides = [o.format(tmp=tmp_path) for o in overrides]
    assert main(config_file, f"logging.dir={tmp_path}/run", *overrides) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_or_broken_config_file_is_reported_in_one_line(tmp_path, capsys):
    assert main(tmp_path / "none.yaml") == 2
    assert "none.yaml" in capsys.readouterr().err
    (tmp_path / "broken.yaml").write_text("train: [1\n")
    assert main(tmp_path / "broken.yaml") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(scope="module")
def run_of_5_steps(tmp_path_factory):
    """-> a function that copies a run of 5 steps to a folder; trained on first use."""
    made = tmp_path_factory.mktemp("made") / "run"

    def copy(config_file, folder):
        if not made.exists():
            assert main(config_file, f"logging.dir={made}", "train.steps=5") == 0
        shutil.copytree(made, folder)

    return copy


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.d_model=64"], "model.d_model=64 but the checkpoint was trained with 32"),
        (["precision.compute=bfloat16"], "precision.compute=bfloat16 but the checkpoint was trained with float32"),
        (["data.tokenizer={bpe}"], "the data's tokenizer is sha256:"),
        (["checkpoint.resume=never"], "already holds step 5"),
    ],
)
def test_an_incompatible_resume_is_refused_and_keeps_the_checkpoint(
    overrides, message, config_file, run_of_5_steps, tmp_path, capsys
):
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(map(chr, range(33, 127)))}, []))
    model.save(str(tmp_path / "bpe.json"))
    run_of_5_steps(config_file, tmp_path / "run")
    before = saved_state(tmp_path / "run")
    overrides = [o.format(bpe=tmp_path / "bpe.json") for o in overrides]
    assert main(config_file, f"logging.dir={tmp_path}/run", *overrides) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    same(saved_state(tmp_path / "run"), before)


def test_changed_data_are_reported_on_resume(config_file, run_of_5_steps, tmp_path, capsys):
    run_of_5_steps(config_file, tmp_path / "run")
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=6", "data.source=stdlib") == 0
    assert "training data differ from the checkpoint's" in capsys.readouterr().out
