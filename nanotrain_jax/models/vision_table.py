"""The parameter table of vision, one line per array: all that a vision-language model has beside its decoder.

Dims: P values of a patch, E width of the encoder, F features of a position, S width of the scorers, s scorers, D width
of the language model; in a layer N heads, H head dim, F ffn.
"""

import re
from functools import lru_cache, partial

from nanotrain_jax.config.vision import Vision
from nanotrain_jax.models.parameters import ENCODER, TENSOR, VISION, Parameter, Table
from nanotrain_jax.models.vision.patches import num_features
from nanotrain_jax.models.vision.relevance import SCORERS
from nanotrain_jax.models.vision.texture import CHANNELS

PATCHES, RELEVANCE, ADAPTER = f"{VISION}/patches", f"{VISION}/relevance", f"{VISION}/adapter"

_once = partial(Parameter, used="encode")
_layer = partial(Parameter, used="encoder")

INVENTORY: Table = {
    f"{PATCHES}/embed_PE": _once("P E"),
    f"{PATCHES}/bias_E": _once("E", decay=False),
    f"{PATCHES}/position_FE": _once("F E"),
    f"{RELEVANCE}/informative_ES": _once("E S"),
    f"{RELEVANCE}/informative_S": _once("S"),
    f"{RELEVANCE}/salient_ES": _once("E S"),
    f"{RELEVANCE}/salient_S": _once("S"),
    f"{RELEVANCE}/candidate_ES": _once("E S"),
    f"{RELEVANCE}/question_DS": _once("D S"),
    f"{RELEVANCE}/balance_Es": _once("E s"),
    f"{RELEVANCE}/balance_Ss": _once("S s"),
    f"{ADAPTER}/gain_E": _once("E", decay=False),
    f"{ADAPTER}/gate_E": _once("E"),
    f"{ADAPTER}/up_ED": _once("E D"),
    f"{ADAPTER}/down_DD": _once("D D"),
    f"{ENCODER}/q_ENH": _layer("E N/tensor H"),
    f"{ENCODER}/k_ENH": _layer("E N/tensor H"),
    f"{ENCODER}/v_ENH": _layer("E N/tensor H"),
    f"{ENCODER}/out_NHE": _layer("N/tensor H E"),
    f"{ENCODER}/up_EF": _layer("E F/tensor"),
    f"{ENCODER}/down_FE": _layer("F/tensor E"),
    f"{ENCODER}/gain_attention_E": _layer("E", decay=False),
    f"{ENCODER}/gain_mlp_E": _layer("E", decay=False),
}


@lru_cache
def table(vision: Vision, d_model: int, tensor: int = 1, freeze: tuple[str, ...] = ()) -> Table:
    """Return every parameter of vision, with sizes; those that patterns of train.freeze freeze are marked. Do not
    mutate. tensor: size of the tensor axis."""
    E, N = vision.width, vision.num_heads
    sizes = {"P": CHANNELS * vision.patch_size**2, "S": vision.scorer_width, "s": len(SCORERS), "D": d_model}
    sizes |= {"E": E, "N": N, "H": E // N}
    features = {VISION: num_features(vision), ENCODER: 4 * E}  # both are named F

    def sized(path: str, row: Parameter) -> Parameter:
        dims = sizes | {"F": features[row.part]}
        return row._replace(
            layout=row.layout.replace(TENSOR, "") if tensor == 1 else row.layout,
            shape=tuple(dims[word.partition("/")[0]] for word in row.layout.split()),
            is_frozen=any(re.search(pattern, path) for pattern in freeze),
        )

    return {path: sized(path, row) for path, row in INVENTORY.items()}


def rules() -> list[tuple[str, str]]:
    """Return the layout of every array, with the dim of layers, for `sharding.Rules`."""
    lead = {VISION: "", ENCODER: "L "}
    return [(path, lead[row.part] + row.layout) for path, row in INVENTORY.items()]
