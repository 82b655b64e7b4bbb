"""Gradients that nothing uses, in the backward of the first layer of a model whose embedding and norm before that layer
are frozen, as with adapters (train.lora): XLA leaves them out, with what communicates them. For resolved configs.

Of a layer that is alone, written out (`model.unroll`) or, with prefetch, the last of the backward, which gathers no
weights ahead and is apart: other loops over layers compute the same for each of them.
"""

from nanotrain_jax.config.execution import execution, writes_layers_out
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs.counts import rows
from nanotrain_jax.costs.mixture import first_layers
from nanotrain_jax.models.decoder_table import ATTENTION, MLP, NORM_ATTENTION, NORM_ATTENTION_OUT, NORM_MLP

MAKE_X = "first", "both", "encode", "encoder"  # uses of the rows that compute the input of the first layer
OF_HEADS = frozenset("qkv")
OF_ATTENTION = OF_HEADS | {"out"}


def trained(config: Config) -> frozenset[str] | None:
    """Return which matrices of a layer train, by their names in train.lora.targets, if the gradient of the input of the
    first layer is not used; else None, as for the layers after `first_layers`."""
    if execution(config).is_by_hand:
        is_block = config.memory.rematerialization.policy == "block"  # the last turn is a loop over layers
        is_apart = config.parallel.prefetch and config.parallel.pipe == 1 and not is_block
    else:
        is_apart = config.model.main_layers == 1 or writes_layers_out(config, "gpu")
    if config.model.dense_layers or not is_apart:
        return None
    train = {path: row for path, row in rows(config).items() if not row.is_frozen}
    if any(row.used in MAKE_X or path.startswith(f"{NORM_ATTENTION}/") for path, row in train.items()):
        return None
    names = {name for path in train if path.startswith((ATTENTION, MLP)) for name in path.rpartition("/")[2].split("_")}
    after = {"out"} if any(path.startswith((f"{NORM_ATTENTION_OUT}/", f"{NORM_MLP}/")) for path in train) else set()
    return frozenset(names | after) & (OF_ATTENTION | {"gate", "up", "down"})


def unused_passes(config: Config) -> tuple[int, int]:
    """Return the gathers and the scatters (all-reduces, without sequence parallelism) over tensor that the backward of
    the first layer leaves out: the sum of the gradient of its input, and where no matrix of its attention trains that
    of its MLP's input, and the gather of the gradient of what its attention returns."""
    names = trained(first_layers(config) or config)
    if names is None:
        return 0, 0
    is_attention_frozen = not names & OF_ATTENTION
    return int(is_attention_frozen), 1 + is_attention_frozen
