"""Resolve a config: fill in what depends on mesh and data, and check the keys that depend on each other."""

from collections.abc import Mapping

from nanotrain_jax.config import layout_checks, update_checks
from nanotrain_jax.config.execution import Execution, casts_at_use, execution
from nanotrain_jax.config.experts_checks import check_experts
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.schema import EIGHT_BITS, Config, Parallel
from nanotrain_jax.config.training_stages import Span, of_phase, phases
from nanotrain_jax.config.values import Remat, near_divisors, near_multiples

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
    layout_checks.check_tokens_and_widths(config)
    check_float8(config)
    layout_checks.check_pipe(config)
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
    layers, name = -(-L // (p.pipe * p.chunks)), layout_checks.name_of_layers(config)
    if L % (p.pipe * p.chunks) and config.memory.rematerialization.policy == "block":
        raise Misfit(
            f"memory.remat={config.memory.remat!r} with {name}={L} on {p.pipe} stages x {p.chunks} chunks: "
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
        share = name if layers == L else f"{name} / (parallel.pipe x parallel.chunks)"
        raise Misfit(
            f"memory.remat={config.memory.remat!r} does not divide {share}={layers}",
            f"use block:{near_divisors(layers, size).replace(' or ', ' or block:')}",
        )


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
                f"{key}: its batches are not of whole microbatches",
            )
    *smaller, _ = phases(config, Span("", 0, config.train.steps))
    for span in [span for span in smaller if span.batch_size]:
        try:
            resolve(of_phase(config, span), axes)
        except Misfit as error:
            raise Misfit(f"{key}: with a batch of {span.batch_size}: {error}", reason=error.reason) from None


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
        "model.d_ff / parallel.tensor": m.d_ff // t if m.dense_layers or not m.experts else 0,
        "model.experts.d_ff / parallel.tensor": (m.experts.d_ff if m.experts else 0) // t,
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
