"""Resolve a config: fill in what depends on mesh and data, and check the keys that depend on each other."""

from collections.abc import Mapping

from nanotrain_jax.config import update_checks
from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.execution import Execution, casts_at_use, execution, reduces_per_layer
from nanotrain_jax.config.experts_checks import check_experts
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.schema import EIGHT_BITS, Config, Parallel
from nanotrain_jax.config.training_stages import Span, of_phase, phases
from nanotrain_jax.config.values import SCHEDULE_CELLS, Remat, divisors, near_divisors, near_multiples
from nanotrain_jax.parallel.pipeline import schedule_text

# FLOPs of the head that parallel.vocab_over_pipe takes off the last stage, per microbatch and device, from which it is
# faster: about 0.2 ms on an H100, assumed (not measured) for the three branches and two collectives that a tick adds.
LEAST_HEAD_FLOPS = 1e11


def resolve(config: Config, axes: Mapping[str, int], tokenizer_vocab: int | None = None) -> Config:
    """Fill in what depends on mesh and data, and check it. Raises Misfit.

    axes: mesh axis -> number of devices. tokenizer_vocab: number of ids of the tokenizer (None: no tokenizer).
    In the returned config no model size is None.
    """
    if config.parallel.auto:
        raise Misfit(
            "parallel: auto is for `train` and `plan`, which choose a layout",
            "take the line of YAML that they print",
        )
    m, d = config.model, config.data
    vocab = m.vocab_size or tokenizer_vocab
    if vocab is None:
        raise Misfit(
            f"model.vocab_size is needed with data.source={d.origin!r}: no tokenizer is known", "set model.vocab_size"
        )
    if tokenizer_vocab and vocab < tokenizer_vocab:
        raise Misfit(
            f"model.vocab_size={vocab} is smaller than the tokenizer's {tokenizer_vocab}",
            f"use at least {tokenizer_vocab}, or remove model.vocab_size",
        )
    max_seq_len = m.max_seq_len or d.seq_len
    d_ff = m.experts.d_ff if m.experts and not m.dense_layers else m.d_ff or m.features.default_d_ff(m.d_model)
    if d.seq_len > max_seq_len:
        raise Misfit(
            f"data.seq_len={d.seq_len} is longer than model.max_seq_len={max_seq_len}",
            "use a shorter data.seq_len or a larger model.max_seq_len",
        )
    config = config.replace(
        "model",
        vocab_size=vocab,
        max_seq_len=max_seq_len,
        num_kv_heads=m.num_kv_heads or m.num_heads,
        d_ff=d_ff,
        tie_embeddings=m.features.tied_embeddings if m.tie_embeddings is None else m.tie_embeddings,
    )
    config = update_checks.with_adapters(config).replace("parallel", **Parallel.keys_of(axes))
    if config.memory.rematerialization == Remat("block", 1):
        config = config.replace("memory", remat=str(Remat("full")))
    config = config.replace("parallel", vocab_over_pipe=splits_vocab(config))
    check_context(config)
    if config.model.factory is None:
        check_tensor(config)
        check_ulysses(config)
        check_documents(config)
    check_float8(config)
    check_pipe(config)
    check_offload(config)
    update_checks.check(config)
    check_experts(config)
    config = config.replace("optimizer", decay_steps=config.optimizer.decay_steps or config.train.steps)
    check_optimizer(config)
    check_blocks(config)
    check_batch(config)
    check_phases(config, axes)
    return config


def splits_vocab(config: Config) -> bool:
    """Return parallel.vocab_over_pipe: as given; null: True if it shortens a step."""
    p, m, d = config.parallel, config.model, config.data
    if p.pipe == 1:
        return False
    if p.vocab_over_pipe is not None:
        return p.vocab_over_pipe
    tokens = d.batch_size * d.seq_len / (p.replica * p.data * p.context * p.microbatches)
    saved = 6 * m.vocab_size * m.d_model * tokens / p.tensor * (1 - 1 / p.pipe)
    return config.is_decoder and not m.dense_layers and saved >= LEAST_HEAD_FLOPS


def check_optimizer(config: Config) -> None:
    """Raise Misfit if min_lr exceeds lr, or the warm-up exceeds the decay."""
    o = config.optimizer
    if o.min_lr > o.lr:
        raise Misfit(f"optimizer.min_lr={o.min_lr} is above optimizer.lr={o.lr}", "use a smaller min_lr")
    # A short trial of a long run (train.steps=10) may end during warm-up.
    if o.warmup_steps > o.decay_steps != config.train.steps and o.schedule != "constant":
        raise Misfit(
            f"optimizer.warmup_steps={o.warmup_steps} exceeds optimizer.decay_steps={o.decay_steps}: "
            "the decay would end before it begins",
            f"use optimizer.warmup_steps of at most {o.decay_steps}, or more decay_steps",
        )


def check_blocks(config: Config) -> None:
    """Raise Misfit unless memory.remat=block:N divides the layers of a stage (of a chunk, if interleaved)."""
    p, size, L = config.parallel, config.memory.rematerialization.block, config.model.main_layers
    layers = -(-L // (p.pipe * p.chunks))
    if L % (p.pipe * p.chunks) and config.memory.rematerialization.policy == "block":
        raise Misfit(
            f"memory.remat={config.memory.remat!r} with {_layers(config)}={L} on {p.pipe} stages x {p.chunks} chunks: "
            "stages have different numbers of layers",
            "use none, selective or full, or stages and chunks that divide the layers",
        )
    if config.model.dense_layers % size:
        raise Misfit(
            f"memory.remat={config.memory.remat!r} does not divide model.experts.first_dense="
            f"{config.model.dense_layers}",
            "use none, selective or full",
        )
    if layers % size:
        name = _layers(config) if layers == L else f"{_layers(config)} / (parallel.pipe x parallel.chunks)"
        raise Misfit(
            f"memory.remat={config.memory.remat!r} does not divide {name}={layers}",
            f"use block:{near_divisors(layers, size).replace(' or ', ' or block:')}",
        )


def _layers(config: Config) -> str:
    """Return what the layers that stages share are called."""
    return "model.num_layers" + " - model.experts.first_dense" * bool(config.model.dense_layers)


def check_batch(config: Config) -> None:
    """Raise Misfit unless the batch is divisible by devices x microbatches, and a microbatch by model.loss_chunk."""
    p, batch, chunk = config.parallel, config.data.batch_size, config.model.loss_chunk
    shares = p.replica * p.data * p.microbatches
    if batch % shares:
        raise Misfit(
            f"data.batch_size={batch} is not divisible by replica x data x microbatches = {p.replica} x {p.data} x "
            f"{p.microbatches} = {shares}",
            f"use {near_multiples(batch, shares)}",
        )
    tokens = batch // shares * config.data.seq_len // p.context
    if chunk and tokens % chunk:
        raise Misfit(
            f"model.loss_chunk={chunk} does not divide the {tokens} tokens of a device's microbatch",
            f"use {near_divisors(tokens, chunk)}",
        )


def check_phases(config: Config, axes: Mapping[str, int]) -> None:
    """Raise Misfit unless a stage can have its phases: each smaller batch (train.batch_schedule, train.batch_growth) is
    of whole microbatches, and could be that of a run."""
    growth, whole, M = config.train.batch_growth, config.data.batch_size, config.parallel.microbatches
    key = "train.batch_growth" if growth else "train.batch_schedule"
    given, microbatch = [growth] if growth else config.train.batch_schedule, whole // M
    update_checks.check_files_of_phases(config)
    for size in (phase.batch_size for phase in given):
        if size not in range(microbatch, whole, microbatch):
            smaller = f"a multiple of {microbatch} below {whole}, or " if M > 1 else ""
            raise Misfit(
                f"{key}: batch_size={size} is not a part of data.batch_size={whole} in parallel.microbatches={M} of "
                f"{microbatch} sequences",
                f"use {smaller}more parallel.microbatches",
            )
    *smaller, _ = phases(config, Span("", 0, config.train.steps))
    for span in [span for span in smaller if span.batch_size]:
        try:
            resolve(of_phase(config, span), axes)
        except Misfit as error:
            raise Misfit(f"{key}: with a batch of {span.batch_size}: {error}", reason=error.reason) from None


def check_tensor(config: Config) -> None:
    """Raise Misfit unless parallel.tensor divides heads, d_ff and (with sequence parallelism) the sequence."""
    m, p, T = config.model, config.parallel, config.data.seq_len // config.parallel.context
    N, K = m.num_heads, m.num_kv_heads
    tokens = "data.seq_len" if p.context == 1 else "data.seq_len / parallel.context"

    def misfits(t: int) -> list[str]:
        sizes = {"model.num_heads": N, "model.d_ff": m.d_ff} | ({tokens: T} if p.sequence_parallel else {})
        sizes |= {"model.experts.d_ff": m.mlp_width} if m.dense_layers else {}
        problems = [f"does not divide {name}={size}" for name, size in sizes.items() if size % t]
        return problems + [f"neither divides model.num_kv_heads={K} nor is a multiple of it"] * bool(K % t and t % K)

    problems = misfits(p.tensor)
    if p.tensor > 1 and p.overlap_tensor:
        check_overlap(config)
    if problems:
        problem = " and ".join(problems)
        *smaller, largest = (str(t) for t in divisors(N) if not misfits(t))
        remedy = (", ".join(smaller) + " or " if smaller else "") + largest
        if p.sequence_parallel and T % p.tensor:
            remedy += ", another data.seq_len, or parallel.sequence_parallel=false"
        key = f"parallel.tensor={p.tensor}"
        raise Misfit(f"{key} {problem}", f"use {remedy}", f"{key} {problems[0]}")


def check_overlap(config: Config) -> None:
    """Raise Misfit unless activations can travel around the tensor axis in hops."""
    p = config.parallel
    if not p.sequence_parallel:
        raise Misfit(
            "parallel.overlap_tensor=true with parallel.sequence_parallel=false: an all-reduce has no hops",
            "use parallel.sequence_parallel=true",
        )
    if p.pipe > 1 and p.idle == "skip":
        raise Misfit(
            f"parallel.overlap_tensor=true with parallel.pipe={p.pipe} and parallel.idle=skip: a ring needs all "
            "devices in a permute, and idle stages skip it",
            "use parallel.idle=mask, or parallel.overlap_tensor=false",
        )


def check_context(config: Config) -> None:
    """Raise Misfit unless parallel.context divides the sequence, and all its devices take part in the attention."""
    p, T = config.parallel, config.data.seq_len
    if p.context == 1:
        return
    kind = f"parallel.context_attention={p.context_attention}"
    chunks = p.context * (2 if p.is_blockwise else 1)
    if T % chunks:
        raise Misfit(
            f"data.seq_len={T} with parallel.context={p.context} and {kind}: not a multiple of {chunks}",
            f"use data.seq_len={near_multiples(T, chunks)}",
        )
    if p.context_attention == "ring" and p.pipe > 1 and p.idle == "skip":
        raise Misfit(
            f"{kind} with parallel.pipe={p.pipe} and parallel.idle=skip: a ring needs all devices in a permute, and "
            "idle stages skip it",
            "use parallel.context_attention=gather or ulysses, or parallel.idle=mask",
        )


def check_ulysses(config: Config) -> None:
    """Raise Misfit unless ulysses can divide the heads of a tensor-parallel device over parallel.context."""
    m, p = config.model, config.parallel
    if p.context == 1 or p.context_attention != "ulysses":
        return
    N, K = m.num_heads // p.tensor, max(1, m.num_kv_heads // p.tensor)
    works = [c for c in divisors(N) if c > 1 and (K % c == 0 or c % K == 0)]
    if p.context in works:
        return
    per_device = " on a tensor-parallel device" if p.tensor > 1 else ""
    smaller = f"parallel.context={' or '.join(map(str, works))}, or " if works else ""
    raise Misfit(
        f"parallel.context={p.context} with parallel.context_attention=ulysses: must divide the {N} query heads"
        f"{per_device}, and divide the {K} key heads or be a multiple of them",
        f"use {smaller}parallel.context_attention=ring",
    )


def check_documents(config: Config) -> None:
    """Raise Misfit for conversations with pictures, and for rows of an odd number of tokens, which flash attention with
    a mask cannot cut in two."""
    if config.vision and config.data.is_chat:
        raise Misfit(f"data.source={config.data.source!r} with vision: its rows have no pictures", "use arrays:DIR")
    d, window = config.data, config.model.sliding_window if config.parallel.context > 1 else None
    is_masked = window or not d.attend_across_documents
    if d.seq_len % 2 and is_masked and fits_flash(config.model, config.precision.compute):
        key = f"model.sliding_window={window} over context" if window else "data.attend_across_documents=false"
        raise Misfit(
            f"data.seq_len={d.seq_len} with {key}: flash attention cuts rows in two",
            f"use data.seq_len={d.seq_len + 1}, or model.attention=xla",
        )


def check_float8(config: Config) -> None:
    """Raise Misfit unless the matmuls of layers can run in float8, and weights can be gathered in 8 bits."""
    m, p, precision = config.model, config.parallel, config.precision
    for key, value in (("matmul", precision.matmul), ("gather", precision.gather)):
        if value and precision.compute != "bfloat16":
            raise Misfit(f"precision.{key}={value} with precision.compute={precision.compute}", "use bfloat16")
    if precision.gather in EIGHT_BITS and not casts_at_use(config):
        raise Misfit(
            f"precision.gather={precision.gather} with parallel.zero={p.zero}: only zero=3 gathers layers, from "
            "float32 weights on the device",
            "use parallel.zero=3 without offload of weights and optimizer",
        )
    if precision.gather in EIGHT_BITS and p.prefetch and config.memory.rematerialization.policy == "block":
        raise Misfit(
            f"precision.gather={precision.gather} with parallel.prefetch=true and memory.remat={config.memory.remat}: "
            "blocks of layers are gathered at once",
            "use another memory.remat, or leave parallel.prefetch out",
        )
    if precision.matmul != "float8":
        return
    if m.factory:
        raise Misfit(
            "precision.matmul=float8 with model.factory: the model decides how it multiplies",
            "use parallel/tensor/float8.py in it, and leave precision.matmul out",
        )
    t, head = p.tensor, m.head_width
    tokens = config.data.batch_size * config.data.seq_len // (p.replica * p.data * p.context * p.microbatches)
    sizes = {
        "model.d_model": m.d_model,
        "model.d_ff / parallel.tensor": m.d_ff // t,
        "the width of a device's query heads": head * m.num_heads // t,
        "the width of a device's key heads": head * max(1, m.num_kv_heads // t),
        "the tokens of a matmul": tokens // (t if p.overlap_tensor else 1),
    }
    odd = next((what for what, size in sizes.items() if size % 16), None)
    if odd:
        raise Misfit(
            f"precision.matmul=float8: {odd}, {sizes[odd]}, must be a multiple of 16",
            f"use {-(-sizes[odd] // 16) * 16}",
        )


def check_pipe(config: Config) -> None:
    """Raise Misfit unless there is a layer for every stage and chunk, and the schedule supports them."""
    L, p = config.model.main_layers, config.parallel
    if p.pipe == 1:
        if p.chunks > 1:
            raise Misfit(f"parallel.chunks={p.chunks} with parallel.pipe=1 has nothing to interleave", "use 1")
        return
    parts = p.pipe * p.chunks
    if parts > L:
        asked = f" x parallel.chunks = {p.pipe} x {p.chunks} = {parts}" if p.chunks > 1 else f"={p.pipe}"
        raise Misfit(
            f"parallel.pipe{asked} exceeds {_layers(config)}={L}: each chunk needs a layer",
            f"use at most {L} stages x chunks",
        )
    if p.idle == "mask" and reduces_per_layer(config):
        raise Misfit(
            f"parallel.grad_reduce=per_layer with parallel.pipe={p.pipe} and parallel.idle=mask: idle stages would "
            "reduce as well",
            "use parallel.idle=skip",
        )
    cells = (p.microbatches * p.chunks + parts + p.pipe) * p.pipe
    if cells > SCHEDULE_CELLS:
        raise Misfit(
            f"a schedule of {cells} entries (ticks x stages) is more than {SCHEDULE_CELLS}",
            f"use less than parallel.microbatches={p.microbatches}, parallel.pipe={p.pipe} or "
            f"parallel.chunks={p.chunks}",
            f"more than {SCHEDULE_CELLS:,} entries (ticks x stages) in a schedule",
        )
    try:
        # Cached: a search repeats it.
        schedule_text.outline(p.schedule, p.pipe, p.microbatches, p.chunks, p.vocab_over_pipe)
    except ValueError as error:
        raise Misfit(
            f"parallel.schedule={error} (parallel.microbatches, parallel.pipe, parallel.chunks)",
            reason=f"parallel.schedule={p.schedule} does not support these microbatches, stages and chunks",
        ) from None


def check_offload(config: Config) -> None:
    """Raise Misfit unless the offload settings are consistent."""
    p, m = config.parallel, config.memory
    if m.offload_params == "host":
        if p.zero != 3:
            raise Misfit(
                f"memory.offload_params=host with parallel.zero={p.zero}: below stage 3 a step holds all weights at "
                "once",
                "use parallel.zero=3 (also on one device)",
            )
        if m.offload_optimizer == "none":
            raise Misfit(
                "memory.offload_params=host with memory.offload_optimizer=none: the optimizer state is several times "
                "larger and would stay on the device",
                "use memory.offload_optimizer=host as well",
            )
        if p.prefetch:
            raise Misfit(
                "parallel.prefetch=true with memory.offload_params=host: copies from the host are prefetched already, "
                "and a gather after them overlaps less",
                "leave parallel.prefetch out",
            )
    if p.prefetch and execution(config.replace("parallel", prefetch=False)) is Execution.OFFLOADED:
        raise Misfit(
            "parallel.prefetch=true with gradients or activations in host memory: the loop that copies them does not "
            "prefetch gathers",
            "leave parallel.prefetch out",
        )
    if m.offload_activations == "host" and m.rematerialization.policy == "none":
        raise Misfit(
            "memory.offload_activations=host with memory.remat=none: no policy selects what to offload",
            "use memory.remat=selective, full or block:N",
        )
