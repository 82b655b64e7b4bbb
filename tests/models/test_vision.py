"""The parts of vision: texture against plain NumPy, patches, relevance and the budget of tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanotrain_jax.config.vision import Vision
from nanotrain_jax.models import vision_language
from nanotrain_jax.models.vision import patches, relevance, texture

CONFIG = Vision(image_size=24, patch_size=4, scales=(2, 1), width=16, min_tokens=5, max_tokens=20, coverage=0.8)


def pictures(count=2, size=24, seed=0):
    return np.random.default_rng(seed).integers(256, size=(count, size, size, 3), dtype=np.uint8)


def lab_of(red, green, blue):
    """CIE L*a*b* of one sRGB colour, 0 to 1, written from the standard."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    white = [sum(row) for row in matrix]
    ratios = [sum(m * c for m, c in zip(row, linear, strict=True)) / w for row, w in zip(matrix, white, strict=True)]
    f = [t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29 for t in ratios]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def sobel_of(luma):
    """Sobel over x and y at each pixel of luma [H W], pixel by pixel."""
    kernel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    padded = np.pad(luma, 1, mode="edge")
    H, W = luma.shape
    windows = {(y, x): padded[y : y + 3, x : x + 3] for y in range(H) for x in range(W)}
    over_x, over_y = (np.zeros((H, W)), np.zeros((H, W)))
    for place, window in windows.items():
        over_x[place], over_y[place] = (window * kernel).sum(), (window * kernel.T).sum()
    return over_x, over_y


def test_texture_equals_plain_numpy():
    image = pictures(1, 8)
    found = np.asarray(texture.texture(image))[0]
    rgb = image[0] / 255.0
    close = partial(np.testing.assert_allclose, atol=2e-5)
    close(found[..., :3], rgb)
    close(found[..., 3:6] * [100, 128, 128], [[lab_of(*pixel) for pixel in row] for row in rgb], atol=2e-3)
    over_x, over_y = sobel_of(rgb @ [0.299, 0.587, 0.114])
    close(found[..., 6], over_x)
    close(found[..., 7], over_y)
    close(found[..., 8], np.hypot(over_x, over_y))
    close(found[..., 9], np.arctan2(over_y, over_x) / np.pi, atol=1e-3)
    centres = np.array([-7, -5, -3, -1, 1, 3, 5, 7]) / 8
    y, x = np.meshgrid(centres, centres, indexing="ij")
    close(found[..., 10:12], np.stack([y, x], -1))
    close(found[..., 12], np.hypot(y, x) / np.sqrt(2))
    assert found.shape[-1] == texture.CHANNELS


def test_white_is_white_and_grey_has_no_colour():
    grey = np.repeat(np.arange(0, 256, 15, dtype=np.uint8)[None, :, None, None], 3, -1)
    lab = np.asarray(texture.lab(grey.astype(np.float32) / 255))
    np.testing.assert_allclose(lab[0, -1, 0], [1, 0, 0], atol=1e-5)
    np.testing.assert_allclose(lab[..., 1:], 0, atol=1e-5)
    assert (np.diff(lab[0, :, 0, 0]) > 0).all()
    red = np.asarray(texture.lab(np.array([[[[1, 0, 0]]]], np.float32)))[0, 0, 0]
    np.testing.assert_allclose(red * [100, 128, 128], [53.2, 80.1, 67.2], atol=0.2)


def test_the_backward_keeps_the_picture_and_no_texture():
    weights = patches.init(CONFIG, jax.random.key(0))
    image = jnp.asarray(pictures(4))
    _, pull = jax.vjp(lambda weights: patches.embed(CONFIG, weights, image), weights)
    stored = [x for x in jax.tree.leaves(pull) if x.size > weights["embed_PE"].size or x.dtype == jnp.uint8]
    assert [(x.shape, x.dtype) for x in stored] == [(image.shape, jnp.uint8)]


def test_a_group_of_channels_keeps_only_its_input():
    rgb = jnp.asarray(pictures(1), jnp.float32) / 255

    def stored(function):
        return sum(x.size for x in jax.tree.leaves(jax.vjp(function, rgb)[1]) if x.ndim > 2)  # but for constants

    assert stored(texture.texture) <= 4 * rgb.size  # its input, for each group
    assert stored(texture.lab) > 3 * rgb.size


def test_candidates_tile_the_picture_at_each_scale():
    image = np.arange(24 * 24, dtype=np.float32).reshape(1, 24, 24, 1)
    found = np.asarray(patches.candidates(image, 4, (2, 1)))
    assert found.shape == (1, 9 + 36, 16)
    np.testing.assert_array_equal(found[0, 9 + 7].reshape(4, 4), image[0, 4:8, 4:8, 0])
    coarse = image[0, 8:16, 16:24, 0].reshape(4, 2, 4, 2).mean((1, 3))
    np.testing.assert_allclose(found[0, 5].reshape(4, 4), coarse)
    place = patches.places(CONFIG)
    np.testing.assert_allclose(place[5], [0, 2 / 3, 2], atol=1e-12)
    np.testing.assert_allclose(place[9 + 7], [-0.5, -0.5, 1], atol=1e-12)
    assert len(place) == CONFIG.num_candidates == len(patches.position_features(CONFIG))


def test_surroundings_are_the_neighbours_of_the_same_scale():
    around = patches.surroundings(CONFIG)
    np.testing.assert_allclose(around.sum(1), 1, rtol=1e-6)
    assert (around > 0).sum(1).tolist() == [3, 5, 3, 5, 8, 5, 3, 5, 3] + [
        (2 + (0 < y < 5)) * (2 + (0 < x < 5)) - 1 for y in range(6) for x in range(6)
    ]
    assert not around[:9, 9:].any() and not np.diag(around).any()


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0, 30.0])
def test_the_budget_is_the_fewest_patches_that_hold_the_coverage(sharpness):
    log_relevance = jax.nn.log_softmax(sharpness * jax.random.normal(jax.random.key(1), (8, CONFIG.num_candidates)))
    candidate, is_kept = map(np.asarray, relevance.allocate(log_relevance, CONFIG))
    mass = np.sort(np.exp(log_relevance), 1)[:, ::-1]
    wanted = np.clip((np.cumsum(mass, 1) < CONFIG.coverage).sum(1) + 1, CONFIG.min_tokens, CONFIG.max_tokens)
    np.testing.assert_array_equal(is_kept.sum(1), wanted)
    for row in range(8):
        chosen = candidate[row, is_kept[row]]
        assert (np.diff(chosen) > 0).all()  # in the order of candidates, each once
        assert not is_kept[row, : CONFIG.max_tokens - wanted[row]].any()  # padding comes first
        held = np.exp(log_relevance[row, chosen]).sum()
        np.testing.assert_allclose(held, mass[row, : wanted[row]].sum(), rtol=1e-5)


def test_the_gate_is_one_for_even_relevance_and_zero_in_padding():
    even = jnp.full((1, CONFIG.num_candidates), -np.log(CONFIG.num_candidates), jnp.float32)
    x = jnp.ones((1, CONFIG.num_candidates, 16))
    budget = relevance.Budget(jnp.zeros((1, 20), jnp.int32), jnp.arange(20)[None] >= 4)
    found = relevance.kept(x, even, budget)
    np.testing.assert_allclose(found[0, 4:], 1, rtol=1e-6)
    assert not found[0, :4].any()


def question_of(is_asked, seed=0):
    x = jax.random.normal(jax.random.key(seed), (*is_asked.shape, 8))
    return relevance.Question(x, jnp.asarray(is_asked))


def test_relevance_reads_the_question_and_every_scorer_learns():
    weights = relevance.init(CONFIG, 8, jax.random.key(0))
    weights = jax.tree.map(lambda w: w + 0.5 * jax.random.normal(jax.random.key(w.size), w.shape), weights)
    x = jax.random.normal(jax.random.key(1), (2, CONFIG.num_candidates, 16))
    around = patches.surroundings(CONFIG)
    asked = np.array([[True, True, False], [True, False, False]])
    find = jax.jit(partial(relevance.relevance, weights, x, surroundings_CC=around))
    found = find(question_of(asked))
    np.testing.assert_allclose(jnp.exp(found).sum(1), 1, rtol=1e-5)
    assert (np.abs(found - find(question_of(asked, seed=1))) > 1e-3).any(1).all()
    other = question_of(asked)
    other = other._replace(x_BQD=other.x_BQD.at[:, 2].add(1.0))  # a token that is not asked
    np.testing.assert_array_equal(found, find(other))

    def objective(weights):
        kept = relevance.relevance(weights, x, question_of(asked), around)
        return relevance.kept(x, kept, relevance.allocate(kept, CONFIG)).sum()

    for name, gradient in jax.jit(jax.grad(objective))(weights).items():
        assert np.abs(gradient).max() > 1e-6, name


def test_what_is_asked_is_not_predicted():
    targets = jnp.array([[-1, -1, 7, -1, 8], [3, 4, -1, -1, -1], [-1] * 5])
    found = vision_language.not_predicted(targets)
    assert found.astype(int).tolist() == [[1, 1, 1, 0, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]


def test_starts_hide_padding():
    budget = relevance.Budget(jnp.zeros((2, 3), jnp.int32), jnp.array([[False, False, True], [True, True, True]]))
    assert vision_language.starts(budget, 5).tolist() == [[0, 0, 2, 2, 2], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 50}, "use an image_size that is a multiple of 16"),
        ({"num_heads": 5}, "vision.num_heads=5 does not divide vision.width=96; use 4 or 6"),
        ({"max_tokens": 46}, "at most the 45 candidates"),
        ({"min_tokens": 40}, "must be in order"),
        ({"scales": ()}, "leaves no patches"),
    ],
)
def test_bad_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Vision(**changes)
