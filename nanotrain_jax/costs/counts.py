"""Counts that the closed forms of costs/ share: parameters, elements per device, tokens, devices. For resolved configs.

Symbols used throughout costs/:

    Psi   parameters on a device before ZeRO shards them: layers / (P t) + ends / t, with P pipeline stages and t
          tensor-parallel devices; arrays that tensor parallelism does not split are not divided by t. Ends are the
          parameters used before and after the layers; with the vocabulary over pipe, embedding and head are over P t
    N     devices on data and context: the ZeRO group    R   devices on the replica axis
    M     microbatches                                   C   layer chunks per pipeline stage
    c     devices on the context axis
    L     layers on a device                             B T D   sequences, tokens of a sequence, model width
    w, g  bytes per element of precision.compute (weights) and precision.grad_reduce (gradients on the wire)

Where pipeline stages differ, the formulas describe a stage that holds both ends and most layers: an upper bound. Arrays
that ZeRO does not shard (smaller than parallel.persist_below, or without a dim that N divides) are stored by every
device and all-reduced.
"""

from __future__ import annotations

from math import prod

import numpy as np

from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.execution import Execution, execution, writes_layers_out
from nanotrain_jax.config.schema import EIGHT_BITS, Config, Model
from nanotrain_jax.models import decoder_table, vision_table
from nanotrain_jax.models.decoder_table import frozen_table, table
from nanotrain_jax.models.parameters import DENSE, ENCODER, ENDS, LAYERS, Parameter, Table
from nanotrain_jax.parallel.context.packed_attention import num_parts
from nanotrain_jax.parallel.gradients import quantization
from nanotrain_jax.parallel.pipeline import schedule, schedule_text

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def logit_bytes(config: Config) -> int:
    """Return the bytes of a logit in the loss."""
    return BYTES[config.precision.logits or config.precision.compute]


def gradient_bytes(config: Config) -> int:
    """Return g: the bytes per element of reduced gradients, and on the wire of those that do not travel in 8 bits."""
    reduce = config.precision.grad_reduce
    return BYTES["float32" if reduce in EIGHT_BITS else reduce]


def message_bytes(config: Config, plain: float) -> float:
    """Return the bytes per element of a copy of gradients that a reduction sends: in 8 bits with scales, else plain."""
    return quantization.BYTES if config.precision.grad_reduce in EIGHT_BITS else plain


def parameters(model: Model) -> int:
    """Return the number of parameters: tied embeddings once, without padding."""
    return sum(row.size * decoder_table.layers_of(model, row) for row in table(model).values())


def all_parameters(config: Config) -> int:
    """Return `parameters`, and those of vision."""
    return parameters(config.model) + sum(row.size * layers_of(row, config) for row in _vision_rows(config).values())


def matmul_parameters(model: Model) -> int:
    """Return the number of parameters that multiply a token: with the head, without look-ups, biases and norms; of
    experts those that it goes to."""
    matmuls = [row for row in table(model).values() if row.is_matmul]
    return sum(int(row.size * row.share) * decoder_table.layers_of(model, row) for row in matmuls)


def frozen_matmul_parameters(config: Config) -> int:
    """Return how many of `matmul_parameters` train.freeze freezes."""
    marked = frozen_table(config.model, 1, 1, config.train.freeze).values()
    frozen = [row for row in marked if row.is_matmul and row.is_frozen]
    return sum(int(row.size * row.share) * decoder_table.layers_of(config.model, row) for row in frozen)


def frozen_parameters(config: Config) -> int:
    """Return how many of `all_parameters` train.freeze freezes."""
    marked = frozen_table(config.model, 1, 1, config.train.freeze).values()
    of_vision = [row.size * layers_of(row, config) for row in _vision_rows(config).values() if row.is_frozen]
    of_decoder = [row.size * decoder_table.layers_of(config.model, row) for row in marked if row.is_frozen]
    return sum(of_decoder) + sum(of_vision)


def query_width(model: Model) -> int:
    """Return N H, the width of all query heads."""
    return model.head_width * model.num_heads


def kv_width(model: Model) -> int:
    """Return K H, the width of all key (or value) heads."""
    return model.head_width * model.num_kv_heads


def rows(config: Config) -> Table:
    """Return the parameter table of a config: sizes with padding, frozen rows marked."""
    p = config.parallel
    decoder = frozen_table(config.model, p.tensor, p.vocab_shards, config.train.freeze)
    return decoder | _vision_rows(config) if config.vision else decoder


def adapted(config: Config) -> tuple[int, int]:
    """Return how many matrices of a layer have an adapter (train.lora): column-parallel and row-parallel ones."""
    of_inputs = [row for row in rows(config).values() if row.init == "adapter" and row.part == LAYERS]
    columns = sum(row.layout.startswith("D ") for row in of_inputs)
    return columns, len(of_inputs) - columns


def trained_matrices(config: Config) -> frozenset[str]:
    """Return the matrices of layers that train, or whose adapters do, by their names in train.lora.targets; a mixture's
    also "router" and "shared"."""
    trained = [path for path, row in rows(config).items() if row.part == LAYERS and row.is_matmul and not row.is_frozen]
    return frozenset(name for path in trained for name in path.rpartition("/")[2].split("_")[:-1])


def _vision_rows(config: Config) -> Table:
    vision, tensor = config.vision, config.parallel.tensor
    return vision_table.table(vision, config.model.d_model, tensor, config.train.freeze) if vision else {}


def local_elements(parameter: Parameter, config: Config) -> float:
    """Return the elements of this row on a device, all its layers, before ZeRO shards them: its share of Psi."""
    p = config.parallel
    split = 1 if parameter.split_dim is None else p.vocab_shards if parameter.is_padded else p.tensor
    return parameter.size * layers_of(parameter, config) / (split * (p.expert if parameter.has_experts else 1))


def layers_of(parameter: Parameter, config: Config) -> int:
    """Return the number of layers in a device's stack of a row; 1 if it is not stacked."""
    if parameter.part == ENCODER:
        return config.vision.num_layers
    return stage_layers(config) if parameter.part == LAYERS else decoder_table.layers_of(config.model, parameter)


def stage_layers(config: Config) -> int:
    """Return L, the layers that a pipeline stage stores: of the stage that has most; the others pad. Without those of
    `first_layers`, which every stage stores."""
    p = config.parallel
    return p.chunks * -(-config.model.main_layers // (p.pipe * p.chunks))


def layers_of_chunks(config: Config) -> np.ndarray:
    """Return the number of layers of each chunk of each stage, [C P]."""
    p = config.parallel
    return schedule.layers_of_chunks(p.pipe, p.chunks, config.model.main_layers, *loads_of_ends(config))


def loads_of_ends(config: Config) -> tuple[float, float]:
    """Return the times in layers of the loss, on the last stage, and of the first, dense layers of a mixture, on the
    first: these stages then have fewer layers, where they are uneven. By parameters that multiply a token.

    Dense layers may run one forward more (`runs_first_again`): 4 passes for the 3 of a layer, or 5 for 4 if its
    backward recomputes it. 0 where ends are split over all stages, and for models without a parameter table.
    """
    m = config.model
    if config.parallel.vocab_over_pipe or not config.is_decoder:
        return 0.0, 0.0
    matmuls = [row for row in table(m).values() if row.is_matmul]

    def used(part: str) -> float:
        return sum(row.size * row.share for row in matmuls if row.part == part)

    passes = 3 + config.memory.rematerialization.recomputes_layers
    first = m.dense_layers * used(DENSE) * (passes + runs_first_again(config)) / passes
    return used(ENDS) / used(LAYERS), first / used(LAYERS)


def runs_first_again(config: Config) -> bool:
    """True if a backward written by hand, which starts from the input of the first, dense layers of a mixture, runs
    their forward once more: of a single layer that remat recomputes anyway nothing uses it."""
    return config.model.dense_layers > 1 or not config.memory.rematerialization.recomputes_layers


def is_sharded(parameter: Parameter, config: Config) -> bool:
    """True if ZeRO 1 and up shards the row, along a dim that N divides, and neither tensor nor expert splits."""
    N, p = zero_devices_of(parameter, config), config.parallel
    return N > 1 and parameter.size >= p.persist_below and any(dim % N == 0 for dim in parameter.free(p.expert))


def local_rows(parameter: Parameter, config: Config) -> int:
    """Return the size on a device of the first dim (in a stack of layers the second), as ZeRO shards it."""
    p, N, first = config.parallel, zero_devices_of(parameter, config), parameter.shape[0]
    if parameter.has_experts and p.expert > 1:
        return first // p.expert
    if parameter.split_dim == 0:
        return first // (p.vocab_shards if parameter.is_padded else p.tensor)
    is_first_sharded = p.zero and is_sharded(parameter, config) and first % N == 0
    return first // N if is_first_sharded else first


def devices(config: Config) -> int:
    """Return the number of devices of the mesh."""
    return prod(config.parallel.axes.values())


def zero_devices(config: Config) -> int:
    """Return N, the number of devices over which ZeRO shards."""
    return config.parallel.data * config.parallel.context


def zero_devices_of(parameter: Parameter, config: Config) -> int:
    """Return N of a row: experts that are shared over the axis expert are sharded over the rest."""
    return zero_devices(config) // (config.parallel.expert if parameter.has_experts else 1)


def tokens_per_device(config: Config) -> float:
    """Return the tokens that a device processes per step, over all microbatches."""
    return config.data.batch_size * config.data.seq_len / (config.parallel.replica * zero_devices(config))


def rows_per_device(config: Config) -> float:
    """Return the rows that a device processes per step, over all microbatches; with context, its share of them."""
    return tokens_per_device(config) / config.data.seq_len


def encodes(config: Config) -> int:
    """Return how many microbatches a device encodes per step (step/encoded.py): ceil(M / P)."""
    return -(-config.parallel.microbatches // config.parallel.pipe)


def keeps_documents_apart(config: Config) -> bool:
    """True if attention stays within documents, or after the padding before a picture."""
    return config.vision is not None or not config.data.attend_across_documents


def window(config: Config) -> int:
    """Return how many tokens a token attends to at most, in layers that are not global: T, or model.sliding_window."""
    T = config.data.seq_len
    return min(config.model.sliding_window or T, T)


def windows(config: Config) -> list[int]:
    """Return the same of each layer."""
    features, T, W = config.model.features, config.data.seq_len, window(config)
    return [W if features.is_local(layer) else T for layer in range(config.model.num_layers)]


def masks_attention(config: Config) -> bool:
    """True if attention takes a mask: of documents or, over context or where layers differ, of a window."""
    is_split = config.parallel.context > 1 or config.model.features.has_local_layers
    return (is_split and window(config) < config.data.seq_len) or keeps_documents_apart(config)


def computes_logits_again(config: Config) -> bool:
    """True if the backward computes logits again: an objective needs the losses of all tokens before their gradients,
    and with model.loss_chunk no chunk's logits are kept until then."""
    return config.train.objective is not None and config.model.loss_chunk > 0


def computed_keys(config: Config) -> int:
    """Return for how many keys attention computes a score of each query, as if nothing hid later ones: T, or the window
    where flash attention leaves out what is before it."""
    is_flash = fits_flash(config.model, config.precision.compute)
    return window(config) if is_flash and not masks_attention(config) else config.data.seq_len


def local_kv_width(config: Config) -> float:
    """Return K H on a tensor-parallel device: the width of its key (or value) heads, at least one."""
    m, t = config.model, config.parallel.tensor
    return kv_width(m) * max(1, t / m.num_kv_heads) / t


def batch_bytes(config: Config) -> int:
    """Return the bytes of a device's batch: inputs and targets; of documents that are kept apart, where they start; and
    pictures."""
    starts = 0 if config.data.attend_across_documents else 4 * config.parallel.context  # of whole rows
    pictures = 3 * config.vision.image_size**2 * rows_per_device(config) if config.vision else 0
    return (8 + starts) * tokens_per_device(config) + pictures


def attention_parts(config: Config) -> int:
    """Return the parts of a row between which attention is computed block by block: 1 if a kernel takes whole rows.

    Devices along context, with ring and gather; else, with flash attention that takes a mask, those of
    parallel/context/packed_attention.py.
    """
    if config.parallel.is_blockwise:
        return config.parallel.context
    is_flash = fits_flash(config.model, config.precision.compute)
    return num_parts(config.data.seq_len) if is_flash and masks_attention(config) else 1


def last_matmuls_spared(config: Config, of: str = LAYERS) -> float:
    """Return the share of a stack's layers whose last matmul block:N does not recompute: where the layers of a block
    are written out (parallel/remat.py), that of each block's last layer, else none. A norm after it needs it."""
    p, remat = config.parallel, config.memory.rematerialization
    in_stages = of == LAYERS and p.pipe > 1
    written_out = p.schedule in schedule.SPLIT if in_stages else writes_layers_out(config, "gpu")
    is_needed = of == LAYERS and config.model.features.norms_after
    return 1 / remat.block if remat.policy == "block" and written_out and not is_needed else 0.0


def repeats_communication(config: Config) -> bool:
    """True if the backward recomputes what attention over context communicates (`parallel.remat`)."""
    policy = config.memory.rematerialization.policy
    return policy == "block" or (policy == "full" and not config.parallel.is_blockwise)


def outline(config: Config) -> schedule_text.Outline:
    """Return ticks, slots and work per tick of the config's pipeline schedule."""
    p = config.parallel
    name = p.schedule if p.pipe > 1 else "1f1b"
    return schedule_text.outline(name, p.pipe, p.microbatches, p.chunks, bool(p.vocab_over_pipe))


def runs(config: Config, part: str) -> float:
    """Return how often a device runs its layers, or other parts of the model, in a step: once for each microbatch.

    With parallel.idle=mask in every tick, of the layers one chunk.
    """
    p = config.parallel
    if p.idle == "skip" or execution(config) is not Execution.PIPELINE:
        return p.microbatches
    ticks = outline(config).ticks
    return ticks / p.chunks if part == LAYERS else ticks
