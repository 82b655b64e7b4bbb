"""Layouts in words."""

import pytest
from jax.sharding import PartitionSpec as P

from nanotrain_jax.sharding import layout


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", P()),
        ("D F", P(None, None)),
        ("D/data F/tensor", P("data", "tensor")),
        ("B/replica,data T/context D", P(("replica", "data"), "context", None)),
    ],
)
def test_a_layout_is_a_partition_spec(text, spec):
    assert layout(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("D/data F/data", "'data' is used twice"),
        ("B/data,data", "'data' is used twice"),
        ("D/", "'D/' is not of the form"),
        ("D//data", "is not of the form"),
        ("B/replica, data", "is not of the form"),
    ],
)
def test_a_layout_that_means_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        layout(text)
