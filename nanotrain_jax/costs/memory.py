"""Peak memory of a device in closed form, with sources. For resolved configs.

A step reaches its peak in one of four moments; the peak is the largest of their sums:

    loss      after the forward: the activations of all layers, and the logits
    backward  at the first layer to go back: activations, gradients, and the working set of one layer
    embedding activations are freed; the full gradient of the embedding is being scattered (stages 2 and 3)
    update    gradients are complete, and the largest of them, or of the updated weights, is being communicated

and with vision in a fifth, in the backward of its encoder (costs/vision_memory.py).

Bytes per device. Symbols as in costs/counts.py; x is the residual stream, B T D.
"""

from __future__ import annotations

from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.execution import execution, writes_layers_out
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import compression, gradient_memory, muon, offload, vision_memory
from nanotrain_jax.costs.activations import activations, block_by_hand, layer_activations, stage_buffers, working_set
from nanotrain_jax.costs.counts import (
    BYTES,
    attention_parts,
    gradient_bytes,
    is_sharded,
    local_elements,
    local_kv_width,
    logit_bytes,
    masks_attention,
    message_bytes,
    outline,
    rows,
    stage_layers,
    tokens_per_device,
    zero_devices,
    zero_devices_of,
)
from nanotrain_jax.costs.mixture import expert_buffers, first_layers, wide_rows
from nanotrain_jax.costs.stored_parameters import (
    frozen_elements,
    local_parameters,
    trained_parameters,
    vocab_elements,
    vocab_rows,
)
from nanotrain_jax.kernels.limits import MAX_ELEMENTS
from nanotrain_jax.models.parameters import LAYERS

Parts = dict[str, float]


def state(config: Config) -> Parts:
    """Return the bytes of training state between steps, on the device or its host.

    params, optimizer   2 + 12 per parameter with 16-bit weights, 4 + 8 in float32 and at ZeRO 3 (`casts_at_use`); over
                        N where the ZeRO stage shards them (ZeRO, arXiv 1910.02054, section 3.1); frozen: 2 + 0;
                        optimizer.name=muon: 4 less of matrices (costs/muon.py)
    outer               with parallel.sync_every 8 more, laid out as optimizer: theta and momentum
    residuals           with parallel.compress 4 more of large arrays, laid out so too (costs/compression.py)
    """
    b, zero = offload.weight_bytes(config), config.parallel.zero
    psi, shard = (sum(sizes.values()) for sizes in trained_parameters(config))
    updated = shard if zero else psi
    weights = b * (shard if zero == 3 else psi) + BYTES[config.precision.compute] * frozen_elements(config)
    parts = {"params": weights, "optimizer": offload.optimizer_bytes(config) * updated - muon.spared_bytes(config)}
    if config.parallel.sync_every:
        parts["outer"] = 8 * updated
    if config.parallel.compression.has_residual:
        parts["residuals"] = 4 * sum(compression.state_elements(config))
    return parts


def on_host(config: Config) -> Parts:
    """Return the bytes of host memory that a step needs for this device (costs/offload.py)."""
    return offload.host_memory(config, residual_bytes(config))


def host_copies(config: Config) -> list[dict]:
    """Return the copies between host and device in a step (costs/offload.py)."""
    p, b = config.parallel, BYTES[config.precision.compute]
    per_token = stage_layers(config) * layer_activations(config, config.memory.rematerialization)
    microbatch_bytes = b * tokens_per_device(config) / p.microbatches * per_token
    return offload.host_copies(config, residual_bytes(config), microbatch_bytes)


def residual_bytes(config: Config) -> float:
    """Return the peak bytes of activations that layers keep for their backward, without stage buffers."""
    tokens = tokens_per_device(config) / config.parallel.microbatches
    return BYTES[config.precision.compute] * tokens * (activations(config) - stage_buffers(config))


def peak(config: Config) -> tuple[str, Parts]:
    """Return the moment of peak memory, and its parts."""
    return max(moments(config).items(), key=lambda item: sum(item[1].values()))


def moments(config: Config) -> dict[str, Parts]:
    """Return moment -> part -> bytes.

    params, optimizer   see `state`
    gradients   float32 sums over microbatches, 4 Psi (from stage 2 over N), with several microbatches or stages;
                without stages plus those of the current microbatch: 2 Psi_layers (from stage 2: 4 Psi_layers / N); of
                the head 4, as the loss computes it
    activations of one microbatch, see costs/activations.py; with stages, those of a chunk's layers in each slot, and
                stage buffers (parallel/pipeline/slots.py, `buffers`)
    loss        logits and their gradient, of all tokens or of model.loss_chunk, over t, by our kernel in one place;
                else without chunks the gradient of the head takes the place of the logits
    layer       of one layer's backward: `working_set`; written out, also what the backward of a last LayerNorm keeps;
                with prefetch, in the loss, what the last layer stores, before it is in the stack of all
    buffers     gathered and in flight: weights of the head or of a layer (with prefetch both) at stage 3, float32
                gradients of a layer from stage 2 (`expert_buffers`), with stages a layer's gradients in 16 bit and
                (without W) float32, three full activations under sequence parallelism, with gather attention keys and
                values of all tokens and their float32 gradients, the largest stacked gradient as on the wire where it
                is reduced once per step, or, of layers written out, before it is stacked; below stage 3 the slices
                of weights of layers written out that compute their forward again
    """
    residuals = BYTES[config.precision.compute] * _microbatch_tokens(config) * activations(config)
    found = {
        "loss": {"activations": residuals} | _of_loss(config, residuals),
        "backward": {"activations": residuals, "loss": 0.0} | _of_backward(config, residuals),
        "embedding": _of_embedding(config),
        "update": _of_update(config),
    }
    nothing = dict.fromkeys(("gradients", "activations", "loss", "layer", "buffers"), 0.0)
    found = {moment: nothing | parts for moment, parts in found.items()}
    if config.vision:
        found = vision_memory.added(config, found)
    kept = state(config)
    found = {moment: kept | parts for moment, parts in found.items()}
    return _with_offload(config, found) if set(offload.modes(config)) != {"none"} else found


def _of_loss(config: Config, residuals: float) -> Parts:
    m, p, b = config.model, config.parallel, BYTES[config.precision.compute]
    tokens, D, V = _microbatch_tokens(config), m.d_model, vocab_rows(config)
    is_in_place = gradient_over_logits(config, V)
    logits = (b if is_in_place else logit_bytes(config) + b) * (m.loss_chunk or tokens) * V
    freed = logit_bytes(config) * tokens * V if not (m.loss_chunk or is_in_place) else 0.0  # logits
    head = max(0.0, gradient_memory.of_head(config) - freed) if p.pipe == 1 else 0.0
    gradients, layer = gradient_memory.earlier(config) + head, 2 * b * tokens * D
    buffers = _transposed_bytes(config) + _weight_copies(config)
    if p.zero == 3 and zero_devices(config) > 1:
        buffers += b * V * D
        if p.prefetch and p.pipe == 1:  # the backward of the last layer begins
            buffers += b * local_parameters(config)[0][LAYERS] / m.num_layers
            layer += residuals / m.num_layers
    return {"gradients": gradients, "loss": logits, "layer": layer, "buffers": buffers}


def gradient_over_logits(config: Config, rows: float) -> bool:
    """True if the gradient of logits is written over them, by our kernel. rows: of the head that a device has."""
    m, tokens = config.model, config.model.loss_chunk or _microbatch_tokens(config)
    is_same_dtype = logit_bytes(config) == BYTES[config.precision.compute]
    return m.kernels != "xla" and is_same_dtype and tokens * rows <= MAX_ELEMENTS


def _of_backward(config: Config, residuals: float) -> Parts:
    made, of_last_norm, copies = gradient_memory.current(config), 0.0, _weight_copies(config)
    if writes_layers_out(config, "gpu"):  # gradients are made as activations are freed; XLA puts off those of LayerNorm
        made = max(0.0, made - residuals - copies)
        if config.model.features.centered_norms:
            of_last_norm = 3 * BYTES[config.precision.compute] * _microbatch_tokens(config) * config.model.d_model
    layer = local_parameters(config)[0][LAYERS] / stage_layers(config)
    buffers = copies + _backward_buffers(config, layer, _microbatch_tokens(config))
    working = max(working_set(config), _of_first(config))
    return {"gradients": _of_first_backward(config) + made, "layer": working + of_last_norm, "buffers": buffers}


def _weight_copies(config: Config) -> float:
    """Return the bytes of the slices of stacked weights that XLA keeps for layers that compute their forward again."""
    recomputes = config.memory.rematerialization.policy in ("selective", "full")  # blocks slice again
    if config.parallel.zero == 3 or not (recomputes and writes_layers_out(config, "gpu")):
        return 0.0
    return BYTES[config.precision.compute] * local_parameters(config)[0][LAYERS]


def _of_first_backward(config: Config) -> float:
    """Return the bytes of gradients beside those of layers just made: sums and the head's. With prefetch the sums of
    the only microbatch are not needed yet, if the backward recomputes nothing before."""
    p, (sums, _) = config.parallel, gradient_memory.sums(config)
    if p.pipe > 1:
        return sums
    head = gradient_memory.of_head(config)
    if not p.prefetch or config.memory.rematerialization.recomputes_layers:
        return sums + head
    return max(sums, gradient_memory.earlier(config) + head)


def _of_first(config: Config) -> float:
    """Return `working_set` of the first, dense layers of a mixture; written by hand, with all that they keep."""
    first = first_layers(config)
    if first is None:
        return 0.0
    kept = activations(first) if execution(config).is_by_hand else 0.0
    return working_set(first) + BYTES[config.precision.compute] * _microbatch_tokens(config) * kept


def _of_embedding(config: Config) -> Parts:
    sums, _ = gradient_memory.sums(config)
    complete = sums + gradient_memory.current(config) + gradient_memory.of_ends(config)
    return {"gradients": complete, "buffers": _embedding_buffers(config)}


def _of_update(config: Config) -> Parts:
    p, several = config.parallel, gradient_memory.sums_gradients(config)
    psi, _ = trained_parameters(config)
    message = message_bytes(config, 4 if several else gradient_bytes(config))
    once = p.zero < 2 and zero_devices(config) * (1 if p.sync_every else p.replica) > 1
    largest, gathered = _largest(config)
    if once and p.zero == 0 and not several:  # all, in the dtype on the wire
        return {"gradients": message * sum(psi.values()), "buffers": muon.buffers(config)}
    _, reduced = gradient_memory.sums(config)
    gradients = reduced or gradient_memory.current(config) + gradient_memory.of_ends(config)
    buffers = message * largest if once else max(gathered, gradient_memory.stacked(config, largest))
    return {"gradients": gradients, "buffers": buffers + muon.buffers(config)}


def _microbatch_tokens(config: Config) -> float:
    return tokens_per_device(config) / config.parallel.microbatches


def _backward_buffers(config: Config, layer: float, tokens: float) -> float:
    """Return the bytes gathered or in flight in the backward. layer: its elements; tokens: of a microbatch.

    With block:n in a loop written by hand, the weights that a block's backward stacks; with prefetch also its gathered
    ones, and those of the next.
    """
    p, b = config.parallel, BYTES[config.precision.compute]
    block = block_by_hand(config)
    fetches_block = p.prefetch and block > 0
    size = _transposed_bytes(config) + (3 if fetches_block else 1) * b * block * layer  # weights of a block
    if p.zero > 1 and zero_devices(config) > 1 and not fetches_block:
        experts, of_experts = expert_buffers(config)
        size += (4 + b * (p.zero == 3)) * (layer - experts) + of_experts
    else:
        size += wide_rows(config)
    if p.tensor > 1 and p.sequence_parallel:
        size += 3 * b * tokens * config.model.d_model
    if p.context > 1 and p.context_attention == "gather":  # keys and values of all tokens, and their gradients
        size += (b + 4) * 2 * p.context * tokens * local_kv_width(config)
    size += _mask_bytes(config, tokens)
    if p.pipe > 1 or fetches_block:  # gradients before accumulation; of those that B computes a float32 copy too
        made = max(block, 1) if p.zero < 2 or fetches_block else 1  # layers
        size += (b if outline(config).weights else b + 4) * made * layer
    return size


def _largest(config: Config) -> tuple[float, float]:
    """Return the elements of the largest stacked weight of a device, and the bytes of two of these, which the update
    gathers at stage 2 (layer by layer, if the optimizer is offloaded)."""
    p = config.parallel
    stacked = [row for row in rows(config).values() if row.is_stacked and not row.is_frozen]
    elements = max((local_elements(row, config) for row in stacked), default=0.0)
    gathers = p.zero == 2 and zero_devices(config) > 1 and config.memory.offload_optimizer == "none"
    return elements, 2 * BYTES[config.precision.compute] * elements if gathers else 0.0


def _embedding_buffers(config: Config) -> float:
    """Return the bytes of the embedding's float32 gradient, and of the copy that ZeRO scatters, or 8-bit messages."""
    p, copy = config.parallel, 2 * message_bytes(config, 2)
    return (4 + copy) * vocab_elements(config) if p.zero > 1 and p.pipe == 1 and zero_devices(config) > 1 else 0.0


def _transposed_bytes(config: Config) -> float:
    """Return the bytes of weights that XLA transposes to gather them at ZeRO 3: those that ZeRO shards along another
    dim than the first, because tensor or expert splits that; the ends only before a loop over microbatches."""
    p = config.parallel
    if p.zero < 3 or p.tensor == p.expert == 1:
        return 0.0
    taken = {True: p.expert > 1, False: p.tensor > 1}  # by whether the first dim is that of experts
    found = [row for row in rows(config).values() if taken[row.has_experts] and is_sharded(row, config)]
    transposed = [row for row in found if row.has_experts or row.split_dim == 0]
    if p.microbatches == 1:
        transposed = [row for row in transposed if row.is_stacked]
    sizes = [(row, local_elements(row, config) / zero_devices_of(row, config)) for row in transposed]
    shards = sum(n / (stage_layers(config) if row.has_experts else 1) for row, n in sizes)  # experts layer by layer
    return offload.weight_bytes(config) * shards


def _mask_bytes(config: Config, tokens: float) -> float:
    """Return the bytes of masks in a layer's backward, of flash attention that takes them. tokens: of a microbatch.

    A boolean and a 16-bit bias of each block: those of a part's own keys, and of a hop, half as many.
    """
    if not (masks_attention(config) and fits_flash(config.model, config.precision.compute)):
        return 0.0
    p = config.parallel
    rows = tokens if p.is_blockwise else tokens * p.context  # ulysses: of whole rows
    return 4.5 * rows * config.data.seq_len / attention_parts(config)


def _with_offload(config: Config, found: dict[str, Parts]) -> dict[str, Parts]:
    """Return the moments without what is in host memory, and with the device buffers of its copies:

    update      four quarters of a layer of state: the current one, its results, the next, and a copy of that (XLA's);
                or, if larger, embedding, head and the gradient of one of them before it is in host memory (of both,
                with gradients of earlier microbatches)
    params      two layers (blocks), and in the backward the float32 gradients of one; in the loss one, and the head
    activations of two layers, in the backward; beside a gradient over logits of one, in the part `layer`

    With memory.offload_optimizer=nvme the update is a separate program before the next step; it holds five chunks as
    large as a layer (at stages 1 and 2 as the embedding): the current one, its results, the next, and two being
    written back.
    """
    m, p, memory = config.model, config.parallel, config.memory
    b, block = BYTES[config.precision.compute], memory.rematerialization.block
    parameters, in_host = offload.offloaded(config), on_host(config)
    has_host_gradients = any(x.has_host_gradient for x in parameters)
    layer = sum(x.size for x in parameters if x.in_layers) / stage_layers(config)
    per_layer = b * tokens_per_device(config) / p.microbatches * layer_activations(config, memory.rematerialization)
    is_in_place = gradient_over_logits(config, vocab_rows(config))
    early = bool(m.loss_chunk) or p.vocab_shards > 1 or is_in_place
    gathers_ends = p.zero == 3 and zero_devices(config) > 1
    for moment, parts in found.items():
        parts["params"] -= in_host.get("params", 0.0)
        parts["optimizer"] -= in_host.get("optimizer", 0.0) + offload.nvme_bytes(config)
        if has_host_gradients:
            parts["gradients"] = 4 * vocab_elements(config) if moment == "loss" and early else 0.0
            parts["loss"] = parts["loss"] if moment == "loss" else 0.0  # the head's gradient is computed at once
        if memory.offload_activations == "host" and moment in ("loss", "backward"):
            parts["activations"] -= in_host["activations"] - (2 if moment == "backward" else 0) * per_layer
            parts["layer"] += per_layer if is_in_place and moment == "loss" else 0.0
        if parameters and moment == "update":
            parts["buffers"] += _update_buffers(config, parameters, layer)
        elif memory.offload_params == "host" and moment == "loss":
            parts["buffers"] += b * (block * layer + (0 if gathers_ends else vocab_elements(config)))
        elif memory.offload_params == "host":
            parts["buffers"] += 2 * b * block * layer + (4 * block * layer if moment == "backward" else 0)
    return found


def _update_buffers(config: Config, parameters: list[offload.Offloaded], layer: float) -> float:
    """Return the device bytes of an update with offloaded state (`_with_offload`). layer: elements of one."""
    p, of_state = config.parallel, offload.optimizer_bytes(config) * layer
    if config.memory.offload_optimizer == "nvme":
        ends = [x.size for x in parameters if not x.in_layers and p.zero in (1, 2) and zero_devices(config) > 1]
        of_state = 5 * offload.optimizer_bytes(config) * max(layer, *ends, 0)
    if not any(x.has_host_gradient for x in parameters):
        return of_state
    of_ends = 2 * BYTES[config.precision.compute] + (8 if p.microbatches > 1 else 4)
    return max(of_state + 2 * layer, of_ends * vocab_elements(config))
