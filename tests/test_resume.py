"""What a run may change when it resumes, which checkpoint it takes, and what it says about both."""

import random

import jax
import numpy as np
import pytest
import yaml
from test_train import config_file, flip, main, same, saved_state

import nanotrain_jax

__all__ = ["config_file"]  # a fixture


@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
def test_the_weights_of_a_run_are_loaded_as_host_arrays_without_a_mesh(config_file, tmp_path):
    split = "parallel.tensor=2", "parallel.zero=3", "parallel.persist_below=64", "train.steps=10"
    assert main(config_file, f"logging.dir={tmp_path}/run", "precision.compute=bfloat16", *split) == 0
    params, config = nanotrain_jax.load_params(tmp_path / "run")
    number, (state, _) = saved_state(tmp_path / "run")
    assert number == 10
    assert all(isinstance(x, np.ndarray) and x.dtype == jax.numpy.bfloat16 for x in jax.tree.leaves(params))
    same(params, state["params"])
    assert params["ends"]["embedding_VD"].shape == (384, 32)  # padded from 257
    assert config.to_dict() == yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())

    earlier, _ = nanotrain_jax.load_params(tmp_path / "run" / "checkpoints", step=5)
    assert not np.array_equal(earlier["ends"]["embedding_VD"], params["ends"]["embedding_VD"])
    with pytest.raises(ValueError, match="holds no checkpoint of step 7; use 5 or 10"):
        nanotrain_jax.load_params(tmp_path / "run", step=7)
    with pytest.raises(ValueError, match="holds no finished checkpoint; give the folder of a run"):
        nanotrain_jax.load_params(tmp_path / "nowhere")
    flip(tmp_path / "run" / "checkpoints" / "10", random.Random(0))
    same(nanotrain_jax.load_params(tmp_path / "run")[0], earlier)
    with pytest.raises(ValueError, match=r"checkpoint 10 in .* is damaged"):
        nanotrain_jax.load_params(tmp_path / "run", step=10)
