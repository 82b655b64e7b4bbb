"""Closed forms of memory: what a device holds in each moment of a step, with sources. Takes resolved configs.

A step holds most in one of three moments, and its peak is the largest of their sums:

    loss      after the forward: all that layers keep, and the logits
    backward  at the first layer to go back: what layers keep, the gradients, and all that one layer makes on its way
    update    what layers kept is gone; gradients are whole, and the largest of them is on its way between devices

Bytes per device. Psi, N, t, P and M as in audit/cost.py.
"""

from __future__ import annotations

from functools import lru_cache

from nanotrain_jax.audit import offloaded
from nanotrain_jax.audit.cost import BYTES, kv_width, local, outline, sharded, tokens_per_device
from nanotrain_jax.config import Config, Model, Parallel, fits_flash, padded_vocab
from nanotrain_jax.fields import Remat
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import ENDS, LAYERS

Parts = dict[str, float]
NOTHING = Remat("none")


def state(config: Config) -> Parts:
    """Bytes that rest between steps, on the device or on its host.

    params, optimizer   2 + 12 per parameter with 16-bit weights, 4 + 8 in float32, over N where the stage shards them
                        (ZeRO, arXiv 1910.02054, section 3.1)
    """
    b, zero = BYTES[config.precision.compute], config.parallel.zero
    psi, shard = (sum(sizes.values()) for sizes in held(config))
    optimizer = offloaded.optimizer_bytes(config)
    return {"params": b * (shard if zero == 3 else psi), "optimizer": optimizer * (shard if zero else psi)}


def on_host(config: Config) -> Parts:
    """Bytes of host memory that a step needs for this device (audit/offloaded.py)."""
    return offloaded.rests(config, kept(config))


def copied(config: Config) -> list[dict]:
    """What moves between host and device in a step (audit/offloaded.py)."""
    p, b = config.parallel, BYTES[config.precision.compute]
    passed = config.model.num_layers / p.pipe * layer_activations(config, config.memory.rematerialization)
    return offloaded.copied(config, kept(config), b * tokens_per_device(config) / p.microbatches * passed)


def kept(config: Config) -> float:
    """Bytes that layers keep for their backward, at most at a time; without what waits between stages."""
    tokens = tokens_per_device(config) / config.parallel.microbatches
    return BYTES[config.precision.compute] * tokens * (activations(config) - waiting(config))


def moments(config: Config, capability: int = 9) -> dict[str, Parts]:
    """Moment -> part -> bytes. capability: major CUDA compute capability of the GPU.

    params, optimizer   see `state`
    gradients   float32 sums over microbatches, 4 Psi (from stage 2 over N), if there are several or stages; without
                stages what the microbatch at hand makes comes on top: 2 Psi_layers (from stage 2: 4 Psi_layers / N);
                of the head 2, or 4 where the loss makes it (chunks, tensor)
    activations of one microbatch, see `layer_activations`; with stages, of a chunk's layers in each slot, and what
                waits between stages (parallel/schedule.py, `buffers`)
    loss        float32 logits and their 16-bit gradient (from capability 10 on XLA keeps their float32 exponentials
                instead), of all tokens or of model.loss_chunk, over t; without chunks and tensor the gradient stays,
                because XLA makes that of the head last
    layer       what one layer makes on its way back: what `none` would keep of it, and four float32 copies of x (norms
                and the residual stream); block:n, of n layers
    buffers     what was gathered and what is on its way: weights of the head or of a layer at stage 3, float32
                gradients of a layer from stage 2, with stages a layer's gradients in 16 bit and (without W) float32,
                activations whole again under sequence parallelism (three), the
                largest stacked gradient in the wire's dtype where it travels once per step
    """
    m, p, remat = config.model, config.parallel, config.memory.rematerialization
    b, g, D = BYTES[config.precision.compute], BYTES[config.precision.grad_reduce], m.d_model
    psi, shard = held(config)
    layers, sharded_layers = psi[LAYERS], shard[LAYERS]
    tokens, L = tokens_per_device(config) / p.microbatches, m.num_layers / p.pipe
    V = padded_vocab(m.vocab_size, p.tensor) / p.tensor
    split_x = p.tensor if p.sequence_parallel else 1

    stay, block = b * tokens * activations(config), remat.block
    whole, inside = layer_parts(config.replace("parallel", zero=0), NOTHING, scores=False)
    one = b * tokens * ((whole + 8 * D) / split_x + inside / p.tensor) + tokens * _scores_on_the_way(config)
    if block > 1:
        one += (block - 1) * b * tokens * layer_activations(config, NOTHING)
    early = bool(m.loss_chunk) or p.tensor > 1  # the loss makes the head's gradient, in float32
    head = (4 if early else b) * V * D
    logits = (4 + (4 if capability >= 10 else b)) * (m.loss_chunk or tokens) * V
    late = 0.0 if early else b * tokens * V

    several, apart = p.microbatches > 1 or p.pipe > 1, p.zero == 3 and p.data > 1
    sums = 4 * sum((shard if p.zero > 1 else psi).values()) if several else 0.0
    made = 0.0 if p.pipe > 1 else 4 * sharded_layers if p.zero > 1 else b * layers
    once = p.zero < 2 and p.data * p.replica > 1
    largest = max(local(row, config) for row in table(m, p.tensor).values() if row.part == LAYERS)
    ends = b * psi[ENDS] if p.zero < 2 else 4 * shard[ENDS]
    sent = g * sum(psi.values()) if once and p.zero == 0 and not several else 0.0  # all of them, in the wire's dtype

    always = state(config)
    found: dict[str, Parts] = {
        "loss": {"gradients": sums + (head if p.pipe == 1 else 0.0), "activations": stay, "loss": logits}
        | {"layer": 2 * b * tokens * D, "buffers": b * V * D if apart else 0.0},
        "backward": {"gradients": sums + made + (head if early and p.pipe == 1 else 0.0), "activations": stay}
        | {"loss": 0.0 if p.pipe > 1 else late, "layer": one}
        | {"buffers": _gathered(config, layers / L, tokens)},
        "update": {"gradients": sums or (sent if sent else made + ends), "activations": 0.0}
        | {"loss": 0.0 if several else late, "layer": 0.0}
        | {"buffers": (4 if several else g) * largest if once and not sent else 0.0},
    }
    found = {moment: always | parts for moment, parts in found.items()}
    return _offloaded(config, found) if set(offloaded.modes(config)) != {"none"} else found


def _gathered(config: Config, layer: float, tokens: float) -> float:
    """Bytes of what is gathered, or on its way, in the backward. layer: elements of one; tokens: of a microbatch."""
    p, b = config.parallel, BYTES[config.precision.compute]
    found = 0.0
    if p.zero > 1 and p.data > 1:
        found += (4 + b * (p.zero == 3)) * layer
    if p.tensor > 1 and p.sequence_parallel:
        found += 3 * b * tokens * config.model.d_model
    if p.pipe > 1:  # a layer's gradients before they are added; made in B, XLA keeps a float32 copy of them as well
        found += (b if outline(config).weights else b + 4) * layer
    return found


def _offloaded(config: Config, found: dict[str, Parts]) -> dict[str, Parts]:
    """The same without what rests on the host, and with what is on its way:

    update      of the state four quarters of a layer: one to compute with, its results, the next, and a copy of that
                (XLA's); or, if it is more, embedding, head and the gradients of one of them before they are with the
                host (of both, where there were earlier ones)
    params      two layers (blocks), and in the backward the gradients of one, float32
    activations of two layers, in the backward

    From files (nvme) the update is a program of its own, after which comes the next step; it takes five pieces as large
    as a layer (at stages 1 and 2 as the embedding): one to compute with, its results, the next, and two on their way
    back.
    """
    m, p, memory = config.model, config.parallel, config.memory
    b, block = BYTES[config.precision.compute], memory.rematerialization.block
    far, rests = offloaded.large(config), on_host(config)
    streamed = any(x.far_gradient for x in far)
    layer = sum(x.size for x in far if x.in_layers) / (m.num_layers // p.pipe)
    passed = b * tokens_per_device(config) / p.microbatches * layer_activations(config, memory.rematerialization)
    early = bool(m.loss_chunk) or p.tensor > 1
    for moment, parts in found.items():
        parts["params"] -= rests.get("params", 0.0)
        parts["optimizer"] -= rests.get("optimizer", 0.0) + offloaded.in_files(config)
        if streamed:
            parts["gradients"] = 4 * _table_elements(config) if moment == "loss" and early else 0.0
            parts["loss"] = parts["loss"] if moment == "loss" else 0.0  # the head's gradient is made at once
        if memory.offload_activations == "host" and moment != "update":
            parts["activations"] -= rests["activations"] - (2 if moment == "backward" else 0) * passed
        if far and moment == "update":
            parts["buffers"] += _updated(config, far, layer)
        elif memory.offload_params == "host":
            parts["buffers"] += 2 * b * block * layer + (4 * block * layer if moment == "backward" else 0)
    return found


def _table_elements(config: Config) -> float:
    """Elements of the embedding, or of the head, on a tensor device."""
    m, t = config.model, config.parallel.tensor
    return m.d_model * padded_vocab(m.vocab_size, t) / t


def _updated(config: Config, far: list[offloaded.Large], layer: float) -> float:
    """Bytes that the update of what is on the host takes on the device (`_offloaded`). layer: elements of one."""
    p, of_state = config.parallel, offloaded.optimizer_bytes(config) * layer
    if config.memory.offload_optimizer == "nvme":
        whole = [x.size for x in far if not x.in_layers and p.zero in (1, 2) and p.data > 1]
        of_state = 5 * offloaded.optimizer_bytes(config) * max(layer, *whole, 0)
    if not any(x.far_gradient for x in far):
        return of_state
    of_ends = 2 * BYTES[config.precision.compute] + (8 if p.microbatches > 1 else 4)
    return max(of_state + 2 * layer, of_ends * _table_elements(config))


def peak(config: Config, capability: int = 9) -> tuple[str, Parts]:
    """The moment in which most is held, and its parts."""
    return max(moments(config, capability).items(), key=lambda item: sum(item[1].values()))


def held(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Elements of layers and ends on a device: where ZeRO shards nothing, and over data."""
    p = config.parallel
    psi, shard = _held(config.model, p.tensor, p.pipe, p.data, p.persist_below)
    return dict(psi), dict(shard)


@lru_cache(maxsize=4096)  # a search asks for the same again and again
def _held(
    model: Model, tensor: int, pipe: int, data: int, persist_below: int
) -> tuple[dict[str, float], dict[str, float]]:
    sizes = Parallel(tensor=tensor, pipe=pipe, data=data, persist_below=persist_below)
    config = Config(model=model, parallel=sizes)
    psi, shard = {LAYERS: 0.0, ENDS: 0.0}, {LAYERS: 0.0, ENDS: 0.0}
    for row in table(model, tensor).values():
        size = local(row, config)
        psi[row.part] += size
        shard[row.part] += size / (data if sharded(row, config) else 1)
    return psi, shard


def activations(config: Config) -> float:
    """Elements per token of a microbatch that a device keeps between the forward and the backward of its layers."""
    m, p, remat = config.model, config.parallel, config.memory.rematerialization
    kept = layer_activations(config, remat)
    if p.pipe == 1:
        return m.num_layers * kept
    spare = p.idle == "mask"
    slots, (late, handed) = outline(config).slots, layer_split(config, remat)
    one = (slots["backward"] + spare) * (kept - late)
    one += (slots["late"] + spare) * late + (slots["handed"] + spare) * handed
    return m.num_layers / (p.pipe * p.chunks) * one + waiting(config)


def waiting(config: Config) -> float:
    """Elements per token that wait between pipeline stages."""
    m, p = config.model, config.parallel
    if p.pipe == 1:
        return 0.0
    slots = outline(config).slots
    return (
        (slots["inputs"] + slots["gradients"] + 2 * (p.idle == "mask"))
        * m.d_model
        / (p.tensor if p.sequence_parallel else 1)
    )


def _scores_on_the_way(config: Config) -> float:
    """Bytes per token of the scores that the backward of a layer makes, where it is not flash attention."""
    m = config.model
    if fits_flash(m, config.precision.compute):
        return 0.0
    made = 4 if config.memory.rematerialization == NOTHING else 10  # the others make again what `none` keeps
    return made * config.data.seq_len * m.num_heads / config.parallel.tensor


def layer_activations(config: Config, remat: Remat) -> float:
    """Elements that one layer keeps per token for its backward (Korthikanti et al. 2022, arXiv 2205.05198, section 4,
    recounted: no dropout, flash attention). With d_ff = 4 d and as many heads for keys as for queries:

                gpt2            llama
    none        4 d + 12 d / t  4 d + 16 d / t   inputs of norms, of matmuls; of attention and of the activation
    none        2 d +  8 d / t  2 d + 12 d / t   at ZeRO-3: what matmuls and attention returned; the rest is computed
                                                 from it
    selective   2 d +  7 d / t  2 d + 11 d / t   what matmuls returned
    full          d               d              the layer's input (block:n: of each block's first)

    over t tensor-parallel devices; with sequence parallelism all of it over t (table 2 of the paper). `none` also keeps
    a float32 statistic per head of the softmax, or without flash attention the scores: in bytes (4 + b) T + 8 per head,
    4 T at ZeRO-3, (9 + b) T where a pipeline keeps them (b bytes of the compute dtype). Where heads share keys, XLA
    keeps about 4 T (8 T) more than the program asks for. At 2 bytes and t = 1 the first row is 32 d: the paper's 34 d
    without its two dropout masks.
    """
    whole, inside = layer_parts(config, remat)
    return (
        whole / (config.parallel.tensor if config.parallel.sequence_parallel else 1) + inside / config.parallel.tensor
    )


def layer_parts(config: Config, remat: Remat, scores: bool = True) -> tuple[float, float]:
    """Of `layer_activations`, before tensor: what is as wide as x, and what tensor splits; with or without scores."""
    m, p, b, t = config.model, config.parallel, BYTES[config.precision.compute], config.parallel.tensor
    entered = (1 + m.features.gated_mlp) * m.d_ff
    matmuls = m.d_model + 2 * kv_width(m) * max(1, t / m.num_kv_heads) + entered  # a head of keys at least
    T, per_head = config.data.seq_len, 4
    if scores and not fits_flash(m, config.precision.compute):
        per_head = 4 * T if p.zero == 3 else (9 + b) * T if p.pipe > 1 else (4 + b) * T + 8
        if m.num_kv_heads < m.num_heads:
            per_head += (8 if p.pipe > 1 else 4) * T
    attention = m.d_model + m.num_heads / b * per_head
    if remat.recomputes_layers:
        whole, inside = 1 / remat.block, 0
    elif remat.policy == "selective":
        whole, inside = 2, matmuls
    elif p.zero == 3:
        whole, inside = 2, matmuls + attention
    else:
        whole, inside = 4, matmuls + attention + m.d_ff
    return whole * m.d_model, inside


def layer_split(config: Config, remat: Remat) -> tuple[float, float]:
    """Elements per token that a layer keeps until W, where a schedule has it: from its forward, and from B.

    Of each matmul its input and the gradient of its output (arXiv 2401.10241, section 2.1); the former from the forward
    where the policy keeps it. Without W: 0, 0.
    """
    m, p = config.model, config.parallel
    if not outline(config).weights:
        return 0.0, 0.0
    t, D, K = p.tensor, m.d_model, kv_width(m) * max(1, p.tensor / m.num_kv_heads)
    entered = 2 * D / (t if p.sequence_parallel and remat.policy != "full" else 1)
    x = {"x": entered + m.d_ff / t, "y": D / t}  # of attention's and the MLP's first matmuls and down; of out
    grads = 2 * D + (D + 2 * K + (1 + m.features.gated_mlp) * m.d_ff) / t
    late = 0.0
    if remat == NOTHING:
        late = x["y"] if p.zero == 3 else x["x"] + x["y"]
    return late, x["x"] + x["y"] - late + grads
