"""Relevance of candidate patches, and a budget of tokens for the relevant ones. Nothing here communicates.

Three scorers, each a small MLP or match, see a candidate:

    informative   by itself
    salient       by its contrast to its surroundings
    coupled       by its match with the tokens of the question

A balancer weighs them, by a softmax over three numbers from the mean of the picture and of the question. The softmax
over candidates of the weighed score is the relevance: of a picture the fewest patches are kept that hold `coverage` of
it, between min_tokens and max_tokens. Shapes are static: max_tokens places, with the kept patches in the last ones, in
the order of the candidates, and padding before them.

Kept embeddings are multiplied by a gate that grows with relevance: through it the scorers learn. Names: B batch, C
candidates, E width, S scorer_width, Q tokens of a row's text, D width of the language model, K max_tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nanotrain_jax.config.vision import Vision
from nanotrain_jax.models.ops import gelu

Weights = dict[str, jax.Array]
SCORERS = "informative", "salient", "coupled"


class Question(NamedTuple):
    """Embeddings of the text of a row [B Q D], and which tokens belong to the question [B Q]."""

    x_BQD: jax.Array
    is_asked_BQ: jax.Array


class Budget(NamedTuple):
    """The kept candidates of a picture."""

    candidate_BK: jax.Array  # int32, index of a candidate; any in places of padding
    is_kept_BK: jax.Array  # False: padding


def init(config: Vision, d_model: int, key: jax.Array) -> Weights:
    """Initialize: normal, std one over the root of the inputs; zero what makes all candidates equally relevant."""
    E, S, keys = config.width, config.scorer_width, jax.random.split(key, 3)

    def normal(i: int, *shape: int) -> jax.Array:
        return jax.random.normal(keys[i], shape) / np.sqrt(shape[0])

    return {
        "informative_ES": normal(0, E, S),
        "informative_S": jnp.zeros(S),
        "salient_ES": normal(1, E, S),
        "salient_S": jnp.zeros(S),
        "candidate_ES": jnp.zeros((E, S)),
        "question_DS": normal(2, d_model, S),
        "balance_Es": jnp.zeros((E, len(SCORERS))),
        "balance_Ss": jnp.zeros((S, len(SCORERS))),
    }


def relevance(weights: Weights, x_BCE: jax.Array, question: Question, surroundings_CC: np.ndarray) -> jax.Array:
    """candidates x[B C E] -> log of the relevance of each, float32 [B C]"""
    x_BCE = unit(x_BCE)
    around_BCE = jnp.einsum("cC,BCE->BcE", surroundings_CC.astype(x_BCE.dtype), x_BCE)
    asked_BQS = unit(question.x_BQD) @ weights["question_DS"]
    scores = [
        gelu(x_BCE @ weights["informative_ES"]) @ weights["informative_S"],
        gelu(jnp.abs(x_BCE - around_BCE) @ weights["salient_ES"]) @ weights["salient_S"],
        match(x_BCE @ weights["candidate_ES"], asked_BQS, question.is_asked_BQ),
    ]
    count_B = jnp.maximum(question.is_asked_BQ.sum(1), 1)
    asked_BS = jnp.where(question.is_asked_BQ[..., None], asked_BQS, 0).sum(1) / count_B[:, None].astype(x_BCE.dtype)
    balance_Bs = jax.nn.softmax(
        (x_BCE.mean(1) @ weights["balance_Es"] + asked_BS @ weights["balance_Ss"]).astype(jnp.float32)
    )
    scores_BCs = jnp.stack([score.astype(jnp.float32) for score in scores], -1)
    return jax.nn.log_softmax(jnp.einsum("BCs,Bs->BC", scores_BCs, balance_Bs))


def unit(x: jax.Array) -> jax.Array:
    """x[... E] -> x[... E] with root mean square 1 over E"""
    in_float32 = x.astype(jnp.float32)
    square = jnp.square(in_float32).mean(-1, keepdims=True)
    return (in_float32 * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)


def match(x_BCS: jax.Array, asked_BQS: jax.Array, is_asked_BQ: jax.Array) -> jax.Array:
    """candidates x[B C S], tokens asked[B Q S] -> how well each candidate matches any token of the question [B C]

    The log of the sum over tokens of exp(x asked / sqrt(S)): a smooth maximum.
    """
    products_BCQ = jnp.einsum("BCS,BQS->BCQ", x_BCS, asked_BQS, preferred_element_type=jnp.float32)
    products_BCQ = products_BCQ / np.sqrt(x_BCS.shape[-1])
    return jax.nn.logsumexp(jnp.where(is_asked_BQ[:, None], products_BCQ, -1e9), -1)


def allocate(relevance_BC: jax.Array, config: Vision) -> Budget:
    """log of relevance [B C] -> the candidates kept of each picture [B K]"""
    largest_BK, candidate_BK = jax.lax.top_k(jax.lax.stop_gradient(relevance_BC), config.max_tokens)
    mass_BK = jnp.exp(largest_BK)
    before_BK = jnp.cumsum(mass_BK, 1) - mass_BK
    is_kept_BK = (before_BK < config.coverage) | (jnp.arange(config.max_tokens) < config.min_tokens)[None]
    place_BK = jnp.sort(jnp.where(is_kept_BK, candidate_BK, -1), 1)
    return Budget(jnp.maximum(place_BK, 0), place_BK >= 0)


def kept(x_BCE: jax.Array, relevance_BC: jax.Array, budget: Budget) -> jax.Array:
    """candidates x[B C E] -> the kept ones, gated [B K E]

    The gate is 2 r / (r + 1), with r the relevance relative to an even one: 1 if even, at most 2. Zero in padding.
    """
    x_BKE = jnp.take_along_axis(x_BCE, budget.candidate_BK[..., None], 1)
    relative_BK = jnp.take_along_axis(relevance_BC, budget.candidate_BK, 1) + np.log(relevance_BC.shape[1])
    gate_BK = jnp.where(budget.is_kept_BK, 2 * jax.nn.sigmoid(relative_BK), 0.0)
    return x_BKE * gate_BK[..., None].astype(x_BKE.dtype)
