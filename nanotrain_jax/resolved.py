"""From what was asked for to what will run: fill in what only the mesh and the data know, and check it all together."""

from __future__ import annotations

from collections.abc import Mapping

from nanotrain_jax.config import Config, divisors, near_divisors
from nanotrain_jax.execution import Execution, execution
from nanotrain_jax.fields import SCHEDULE_CELLS, Remat
from nanotrain_jax.parallel import chart


class Misfit(ValueError):
    """A config that cannot run: "problem; remedy". reason: the problem in few words, to count similar ones together."""

    def __init__(self, problem: str, remedy: str = "", reason: str = ""):
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.reason = reason or problem


def resolve(config: Config, axes: Mapping[str, int], tokenizer_vocab: int | None = None) -> Config:
    """Fill in what only mesh and data know, and check what depends on it.

    axes: mesh axis -> number of devices. tokenizer_vocab: ids the tokenizer can produce (None: it has no say).
    Returns a config in which no model size is None. Raises Misfit.
    """
    m, d = config.model, config.data
    vocab = m.vocab_size or tokenizer_vocab
    if vocab is None:
        raise Misfit(f"model.vocab_size is needed with data.source={d.source!r}, which has no tokenizer", "set it")
    if tokenizer_vocab and vocab < tokenizer_vocab:
        raise Misfit(
            f"model.vocab_size={vocab} is smaller than the tokenizer's {tokenizer_vocab}",
            f"use at least {tokenizer_vocab}, or leave it out",
        )
    max_seq_len = m.max_seq_len or d.seq_len
    if d.seq_len > max_seq_len:
        raise Misfit(
            f"data.seq_len={d.seq_len} is longer than model.max_seq_len={max_seq_len}", "shorten it or raise the latter"
        )
    config = config.replace(
        "model",
        vocab_size=vocab,
        max_seq_len=max_seq_len,
        num_kv_heads=m.num_kv_heads or m.num_heads,
        d_ff=m.d_ff or m.features.default_d_ff(m.d_model),
        tie_embeddings=m.features.tied_embeddings if m.tie_embeddings is None else m.tie_embeddings,
    )
    config = config.replace("parallel", **axes)
    if config.memory.rematerialization == Remat("block", 1):
        config = config.replace("memory", remat=str(Remat("full")))
    if config.model.factory is None:
        check_tensor(config)
    check_pipe(config)
    check_offload(config)
    config = config.replace("optimizer", decay_steps=config.optimizer.decay_steps or config.train.steps)
    check_optimizer(config)
    check_blocks(config)
    check_batch(config)
    return config


def check_optimizer(config: Config) -> None:
    """Raise Misfit unless the learning rates and their steps are in order."""
    o = config.optimizer
    if o.min_lr > o.lr:
        raise Misfit(f"optimizer.min_lr={o.min_lr} is above optimizer.lr={o.lr}", "lower it")
    # A short trial of a long run (train.steps=10) ends in its warm-up, and is no mistake.
    if o.warmup_steps > o.decay_steps != config.train.steps and o.schedule != "constant":
        raise Misfit(
            f"optimizer.warmup_steps={o.warmup_steps} is more than optimizer.decay_steps={o.decay_steps}: "
            "the decay would end before it begins",
            f"use at most {o.decay_steps} steps of warm-up, or more of decay",
        )


def check_blocks(config: Config) -> None:
    """Raise Misfit unless the blocks of memory.remat=block:N come out even on each stage."""
    p, size, L = config.parallel, config.memory.rematerialization.block, config.model.num_layers
    layers = L // (p.pipe * p.chunks)
    if layers % size:
        what = "model.num_layers" if layers == L else "model.num_layers / (parallel.pipe x parallel.chunks)"
        raise Misfit(
            f"memory.remat={config.memory.remat!r} does not divide {what}={layers}",
            f"use block:{near_divisors(layers, size).replace(' or ', ' or block:')}",
        )


def check_batch(config: Config) -> None:
    """Raise Misfit unless devices and microbatches get equal shares of the batch, in whole chunks of the loss."""
    p, batch, chunk = config.parallel, config.data.batch_size, config.model.loss_chunk
    shares = p.replica * p.data * p.microbatches
    if batch % shares:
        below = batch // shares * shares
        raise Misfit(
            f"data.batch_size={batch} is not divisible by replica x data x microbatches = {p.replica} x {p.data} x "
            f"{p.microbatches} = {shares}",
            "use " + (f"{below} or " if below else "") + str(below + shares),
        )
    tokens = batch // shares * config.data.seq_len
    if chunk and tokens % chunk:
        raise Misfit(
            f"model.loss_chunk={chunk} does not divide the {tokens} tokens of a device's microbatch",
            f"use {near_divisors(tokens, chunk)}",
        )


def check_tensor(config: Config) -> None:
    """Raise Misfit unless heads, d_ff and (under sequence parallelism) the sequence can be split over tensor."""
    m, p, T = config.model, config.parallel, config.data.seq_len // config.parallel.context
    N, K = m.num_heads, m.num_kv_heads

    def misfits(t: int) -> list[str]:
        sizes = {"model.num_heads": N, "model.d_ff": m.d_ff} | ({"data.seq_len": T} if p.sequence_parallel else {})
        found = [f"does not divide {name}={size}" for name, size in sizes.items() if size % t]
        return found + [f"neither divides model.num_kv_heads={K} nor is a multiple of it"] * bool(K % t and t % K)

    problems = misfits(p.tensor)
    if problems:
        found = " and ".join(problems)
        *fitting, largest = (str(t) for t in divisors(N) if not misfits(t))
        remedy = (", ".join(fitting) + " or " if fitting else "") + largest
        hint = ", another data.seq_len, or parallel.sequence_parallel=false" if "seq_len" in found else ""
        raise Misfit(
            f"parallel.tensor={p.tensor} {found}", f"use {remedy}{hint}", f"parallel.tensor={p.tensor} {problems[0]}"
        )


def check_pipe(config: Config) -> None:
    """Raise Misfit unless the layers can be split evenly over stages and chunks, and there is such a schedule."""
    L, p = config.model.num_layers, config.parallel
    if p.pipe == 1:
        if p.chunks > 1:
            raise Misfit(f"parallel.chunks={p.chunks} with parallel.pipe=1 has nothing to interleave", "use 1")
        return
    pieces = p.pipe * p.chunks
    if L % pieces:
        asked = f" x parallel.chunks = {p.pipe} x {p.chunks} = {pieces}" if p.chunks > 1 else f"={p.pipe}"
        stages = " or ".join(str(n) for n in divisors(L) if L % (n * p.chunks) == 0 and (n > 1 or p.chunks == 1))
        layers = " or ".join(str(n) for n in (L // pieces * pieces, L // pieces * pieces + pieces) if n)
        remedy = f"parallel.pipe={stages}, or {layers} layers" if stages else f"{layers} layers"
        raise Misfit(f"parallel.pipe{asked} does not divide model.num_layers={L}", f"use {remedy}")
    if p.grad_reduce == "per_layer":
        raise Misfit(
            f"parallel.grad_reduce=per_layer with parallel.pipe={p.pipe}: one loop runs all microbatches of a stage",
            "leave it out, or use parallel.pipe=1",
        )
    if config.memory.rematerialization.policy == "block" and p.schedule in ("zero_bubble", "zb_h1", "zb_h2"):
        raise Misfit(
            f"memory.remat={config.memory.remat!r} with parallel.schedule={p.schedule}: the backward of a block of "
            "layers is a loop, which cannot be cut in two",
            "use none, selective or full, or another schedule",
        )
    cells = (p.microbatches * p.chunks + pieces + p.pipe) * p.pipe
    if cells > SCHEDULE_CELLS:
        raise Misfit(
            f"a schedule of {cells} entries (ticks x stages) is more than {SCHEDULE_CELLS}",
            f"use less than parallel.microbatches={p.microbatches}, parallel.pipe={p.pipe} or "
            f"parallel.chunks={p.chunks}",
            f"more than {SCHEDULE_CELLS:,} entries (ticks x stages) in a schedule",
        )
    try:
        chart.outline(p.schedule, p.pipe, p.microbatches, p.chunks)  # kept: a search asks again and again
    except ValueError as error:
        raise Misfit(
            f"parallel.schedule={error} (parallel.microbatches, parallel.pipe, parallel.chunks)",
            reason=f"parallel.schedule={p.schedule} cannot have these microbatches, stages and chunks",
        ) from None


def check_offload(config: Config) -> None:
    """Raise Misfit unless what is to rest on the host makes sense together."""
    p, m = config.parallel, config.memory
    if m.offload_params == "host":
        if p.zero != 3:
            raise Misfit(
                f"memory.offload_params=host with parallel.zero={p.zero}: below stage 3 a step holds all weights at a "
                "time",
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
                "parallel.prefetch=true with memory.offload_params=host: weights come from the host one layer ahead "
                "anyway",
                "leave parallel.prefetch out",
            )
    if p.prefetch and execution(config.replace("parallel", prefetch=False)) is Execution.OFFLOADED:
        raise Misfit(
            "parallel.prefetch=true with gradients or activations in host memory: the loop that copies them does not "
            "gather ahead",
            "leave parallel.prefetch out",
        )
    if m.offload_activations == "host" and m.rematerialization.policy == "none":
        raise Misfit(
            "memory.offload_activations=host with memory.remat=none does not say which activations",
            "use memory.remat=selective, full or block:N, whose saved ones go to the host",
        )
