"""Text layouts, and sharding rules for the parameters of a model."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from nanotrain_jax import FLAX, Rules, describe, layout, report, shard, specs, zero_specs
from nanotrain_jax.parallel import mesh as meshes

D, F = 32, 64


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
def test_an_invalid_layout_raises(text, message):
    with pytest.raises(ValueError, match=message):
        layout(text)


MODEL = {
    "attention": {"query": jax.ShapeDtypeStruct((D, 3, 8), jnp.float32)},
    "mlp": {"up": jax.ShapeDtypeStruct((D, F), jnp.float32), "down": jax.ShapeDtypeStruct((F, D), jnp.float32)},
    "scale": jax.ShapeDtypeStruct((), jnp.float32),  # needs no rule
}
ATTENTION = ("query", "D N H")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([ATTENTION, ("up", "D F/tensor")], r"mlp/down \(64, 32\): no rule matches; add one, with 'D D'"),
        ([ATTENTION, ("up|down", "D F"), ("gate", "D F")], "rule 'gate' matches no parameter; paths are like"),
        (
            [ATTENTION, ("mlp/.*", "D F"), ("up", "D F/tensor")],
            "rule 'up' matches no parameter",
        ),  # an earlier rule matches first
        (
            [ATTENTION, ("wn", "D F"), ("up|down", "D F")],
            "rule 'wn' matches no parameter",
        ),  # matches only a part of a key
        (
            [("query", "D F"), ("up|down", "D F")],
            r"attention/query \(32, 3, 8\): rule 'query' says 'D F', 2 dims; name",
        ),
        ([ATTENTION, ("up|down", "D/data F/data")], "mesh axis 'data' is used twice"),
        ([ATTENTION, ("up|down", "D F/model")], "the mesh has no axis 'model'; it has pipe, replica, data"),
        (
            [("query", "D N/tensor H"), ("up|down", "D F")],
            "tensor=2 does not divide dim 1 of 3; pad it, or replicate it",
        ),
        ([ATTENTION, ("up|down", "D F"), ("(", "D")], "is not a regular expression"),
    ],
)
def test_rules_that_do_not_fit_raise_in_one_line(pairs, message):
    mesh = meshes.make(data=4, tensor=2)
    with pytest.raises(ValueError, match=message) as caught:
        specs(Rules(pairs), MODEL, mesh)
    assert "\n" not in str(caught.value)


def test_report_lists_every_problem():
    mesh, rules = meshes.make(data=4, tensor=2), Rules([("query", "D N/tensor H"), ("gate", "D F")])
    lines = report(rules, MODEL, mesh)
    assert [line.split()[0] for line in lines] == ["attention/query", "mlp/down", "mlp/up", "rule"]
    assert len(report(rules, MODEL)) == 3  # without a mesh axes are not checked
    with pytest.raises(ValueError, match=r"and 3 more"):
        specs(rules, MODEL, mesh)
    assert report(Rules([ATTENTION, ("mlp/.*", "D F")]), MODEL, mesh) == []
    assert report(Rules([ATTENTION, ("mlp/.*", "D F"), ("scale", "D")]), MODEL, mesh) == []  # a scalar needs no rule


def test_shard_raises_if_arrays_do_not_fit_the_mesh():
    mesh = meshes.make(data=4, tensor=2)
    with pytest.raises(ValueError, match=r"head/w \(5, 4\): tensor=2 does not divide dim 0 of 5"):
        shard({"head": {"w": jnp.ones((5, 4))}}, mesh, {"head": {"w": P("tensor")}})
    with pytest.raises(ValueError, match=r"w \(4,\): .* has 2 dims; give it at most 1"):
        shard({"w": jnp.ones(4)}, mesh, {"w": P(None, "tensor")})


def test_zero_specs_add_their_axis_to_other_axes_only():
    mesh, params = meshes.make(data=4, tensor=2), {"w": jnp.ones((8, 8)), "v": jnp.ones((8,))}
    weights, _ = zero_specs(params, mesh, 3, persist_below=1, specs={"w": P(None, "tensor"), "v": P("tensor")})
    assert weights == {"w": P("data", "tensor"), "v": P("tensor")}
    with pytest.raises(ValueError, match="is already sharded over data"):
        zero_specs(params, mesh, 3, persist_below=1, specs={"w": P("data", None), "v": P()})


def fsdp_tp():
    return jax.make_mesh((4, 2), ("fsdp", "tp"))


def test_zero_shards_over_an_axis_with_any_name():
    params = {"up": {"kernel": jnp.ones((64, 256))}, "down": {"kernel": jnp.ones((256, 64))}}
    by_rules = specs(FLAX.renamed(tensor="tp"), params, fsdp_tp())
    assert by_rules == {"up": {"kernel": P(None, "tp")}, "down": {"kernel": P("tp")}}
    weights, moments = zero_specs(params, fsdp_tp(), 3, specs=by_rules, axis="fsdp")
    assert weights == moments == {"up": {"kernel": P("fsdp", "tp")}, "down": {"kernel": P("tp", "fsdp")}}
    with pytest.raises(ValueError, match=r"^the mesh has no axis 'data'; it has fsdp, tp: pass axis= one of them$"):
        zero_specs(params, fsdp_tp(), 3)
    with pytest.raises(ValueError, match="is already sharded over fsdp"):
        zero_specs(params, fsdp_tp(), 3, specs=weights, axis="fsdp")


@pytest.mark.parametrize(
    "rules",
    [
        [("query", "D N H"), ("up|down", "D F/tp")],
        [("query", P()), ("up", P(None, "tp")), ("down", P(None, "tp"))],
        Rules([("query", "D N H"), ("up|down", "D F/tensor")]).renamed(tensor="tp"),
        Rules([("query", P(None, None)), ("up|down", P(None, ("tensor",)))]).renamed(tensor="tp"),
    ],
)
def test_layouts_in_rules_are_text_or_partition_specs(rules):
    found = specs(rules, MODEL, fsdp_tp())
    assert found == {"attention": {"query": P()}, "mlp": dict.fromkeys(("up", "down"), P(None, "tp")), "scale": P()}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([ATTENTION, "up"], r"rule 'up': must be a pair \(pattern, layout\); write e\.g\. \('up/kernel', 'D F/te"),
        ({"query": "D N H"}, "rule 'query': must be a pair"),
        ([ATTENTION, ("up", ("D", "F"))], "must be a pair"),
        (None, "rules None: must be a list, each rule a pair"),
        ([ATTENTION, ("up|down", P("tp", "tp"))], r"mlp/down \(64, 32\): rule .* but mesh axis 'tp' is used twice"),
        ([("query", P("tp")), ("up|down", P(None, None, "tp"))], r"mlp/down \(64, 32\): rule .*, 3 dims; name all 2"),
    ],
)
def test_an_invalid_rule_raises_in_one_line(rules, message):
    with pytest.raises(ValueError, match=message) as caught:
        specs(rules, MODEL, fsdp_tp())
    assert "\n" not in str(caught.value)


def test_numbers_among_the_parameters_are_replicated():
    mesh, params = fsdp_tp(), {"w": jnp.ones((8, 8)), "scale": 0.5, "steps": 3, "on": True, "none": None}
    by_rules = specs([("w", "D F/tp")], params, mesh)
    weights, moments = zero_specs(params, mesh, 3, persist_below=1, specs=by_rules, axis="fsdp")
    assert by_rules == {"w": P(None, "tp"), "scale": P(), "steps": P(), "on": P(), "none": None}
    assert weights == moments == by_rules | {"w": P("fsdp", "tp")}
    placed = shard(params, mesh, weights)
    assert (float(placed["scale"]), placed["scale"].sharding.spec) == (0.5, P())
    for function in (
        lambda params: specs([], params),
        lambda params: zero_specs(params, mesh, 3, axis="fsdp"),
        lambda params: shard(params, mesh, {"act": P()}),
    ):
        with pytest.raises(ValueError, match=r"^act: 'gelu' is a str, not an array or a number; leave it out"):
            function({"act": "gelu"})


def layers_of(number, **more):
    return {"layers": [{"up": jnp.ones((8, 16)), "norms": [jnp.ones(8), jnp.ones(8)]} for _ in range(number)], **more}


def test_a_report_merges_equal_layers():
    params = layers_of(12, head=jnp.ones((8, 6)))
    params["layers"][5]["up"] = jnp.ones((8, 3))
    assert report([("up|head", "D F/tp")], params, fsdp_tp()) == [
        "layers/{0..11}/norms/{0..1} (8,): no rule matches; add one, with 'D' to replicate it",
        "layers/5/up (8, 3): rule 'up|head' says 'D F/tp', but tp=2 does not divide dim 1 of 3; "
        "pad it, or replicate it",
    ]
    three = layers_of(4)
    del three["layers"][2]["norms"]
    assert report([("up", "D F")], three) == [
        "layers/{0,1,3}/norms/{0..1} (8,): no rule matches; add one, with 'D' to replicate it"
    ]


def test_a_report_shows_layouts_and_bytes_per_device():
    mesh, params = fsdp_tp(), layers_of(4, head=jnp.ones((8, 6), jnp.bfloat16), scale=2.0)
    rules = Rules([("up", "D F/tp"), ("norms/.*", "D"), ("head", P(("fsdp", "tp"), None))])
    lines = [line.split() for line in report(rules, params, mesh, layouts=True)]
    assert lines == [
        ["head", "bfloat16[8/fsdp,tp,", "6]", "12", "bytes"],
        ["layers/{0..3}/norms/{0..1}", "float32[8]", "8", "x", "32", "bytes"],
        ["layers/{0..3}/up", "float32[8,", "16/tp]", "4", "x", "256", "bytes"],
        ["scale", "float32[]", "4", "bytes"],
        ["one", "device", "holds", "1,296", "of", "2,404", "bytes"],
    ]
    weights, _ = zero_specs(params, mesh, 3, persist_below=100, axis="fsdp")
    assert describe(params, mesh, weights)[2].split()[1:] == ["float32[8/fsdp,", "16]", "4", "x", "128", "bytes"]
    assert report([], params, mesh, layouts=True) == report([], params, mesh)  # problems take precedence
    with pytest.raises(ValueError, match=r"^layouts=True: needs a mesh"):
        report(rules, params, layouts=True)
