"""Keys that a run resumes with in another value: those of the model that do not change the result, or from before they
existed; each that may change a bit of the result is named."""

import pytest
from conftest import small

from nanotrain_jax.checkpoint import compatibility
from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve

OTHER = {"attention": "xla", "kernels": "xla", "grouped_matmul": "tokamax", "loss_chunk": 32, "unroll": True}


def saved(config, **model):
    """The metadata of a checkpoint of this config, with other values of model keys; None: the key is not saved."""
    plain = config.to_dict()
    plain["model"] = {key: value for key, value in (plain["model"] | model).items() if model.get(key, 0) is not None}
    data = compatibility.Position(position=0, fingerprint="")
    return compatibility.Meta(config=plain, tokenizer=None, data=data)


@pytest.fixture
def config():
    parsed = load.parse(small())
    return resolve(parsed, parsed.parallel.axes)


@pytest.mark.parametrize("key", OTHER)
def test_a_key_that_does_not_change_the_result_may_change(key, config):
    assert config.to_dict()["model"][key] != OTHER[key]
    for value in (OTHER[key], None):
        compatibility.check(saved(config, **{key: value}), config, config, None)


def test_all_such_keys_are_here():
    assert OTHER.keys() == compatibility.SAME_RESULT


def test_a_key_that_changes_the_result_may_not(config):
    with pytest.raises(ValueError, match=r"model.d_model=.* but the checkpoint was trained with 7"):
        compatibility.check(saved(config, d_model=7), config, config, None)


def test_what_balances_experts_may_change_and_their_sizes_may_not(config):
    def mixture(**keys):
        model = {"d_ff": None, "experts": {"num": 4, "top_k": 2, "d_ff": 32} | keys}
        parsed = load.parse(small(model=model))
        return resolve(parsed, parsed.parallel.axes)

    before, now = mixture(), mixture(capacity=2.0, balance="none", z_loss=0.1)
    weights = {how: mixture(balance=how, balance_weight=0.01).model.experts.weight for how in ("loss", "bias", "none")}
    assert weights == {"loss": 0.01, "bias": 0.01, "none": 0.0}  # none: as older versions saved it
    assert [mixture(balance=how).model.experts.weight for how in ("loss", "bias", "none")] == [0.01, 0.0, 0.0]
    compatibility.check(saved(before), now, now, None)
    expected = ["balance loss -> none", "capacity 1.25 -> 2.0", "z_loss 0.0 -> 0.1"]
    assert [*compatibility.changes(saved(before), now)] == [f"model.experts.{line}" for line in expected]
    older = saved(before)
    for key in "capacity", "first_dense", "gate_scale":  # of versions that had no such key
        del older.config["model"]["experts"][key]
    compatibility.check(older, now, now, None)
    for key, value, was in ("top_k", 3, 2), ("gate_scale", 2.5, 1.0), ("balance", "bias", "loss or none"):
        other = mixture(**{key: value})
        with pytest.raises(ValueError, match=rf"model.experts.{key}={value} but the checkpoint was trained with {was}"):
            compatibility.check(saved(before), other, other, None)
    with pytest.raises(ValueError, match="but the checkpoint was trained with"):
        compatibility.check(saved(before), config, config, None)


CHANGED = {  # section -> keys that resume with another value
    "model": {"loss_chunk": 32, "unroll": True},
    "parallel": {"microbatches": 2, "bucket_mb": 1.0},
    "precision": {"grad_reduce": "bfloat16"},
    "memory": {"remat": "full"},
    "data": {"seed": 5, "attend_across_documents": False},
    "optimizer": {"lr": 3e-2, "betas": [0.5, 0.6]},
    "train": {"seed": 4, "freeze": ["^ends/"]},
    "runtime": {"deterministic": True},
}


def test_each_changed_key_is_named():
    before = load.parse(small())
    for section, keys in CHANGED.items():
        for key, value in keys.items():
            now = load.parse(small(**{section: {key: value}}))
            (line,) = compatibility.changes(saved(before), now)
            assert line == f"{section}.{key} {before.to_dict()[section][key]} -> {value}"
    assert not [*compatibility.changes(saved(before), before)]


def test_checkpoints_of_older_versions_lack_keys_and_sections(config):
    plain = config.to_dict()
    del plain["memory"], plain["runtime"], plain["parallel"]["bucket_mb"]
    data = compatibility.Position(position=0, fingerprint="")
    meta = compatibility.Meta(config=plain, tokenizer=None, data=data)
    assert not [*compatibility.changes(meta, config)]
