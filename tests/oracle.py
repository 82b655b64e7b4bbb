"""The oracle: a decoder and AdamW on one device, in plain JAX and float32, written from the papers.

It imports nothing from the package; every layout is compared with it.

Parameters have the package's names (a nested dict, `layers` and `dense` stacked along a leading dim).
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp

# The numbers of `conftest.small`; none is a default of the config.
THETA = 500.0
NORM_EPS = 1e-3
B1, B2, EPS, DECAY = 0.8, 0.9, 1e-4, 0.2
# Where documents begin in the 17 tokens of even and of odd rows, after the first; one has a single token.
CUTS = [5, 9, 10], [1, 14]


SCALE = 3.0  # of adapters, alpha / rank
BALANCE, Z = 0.5, 0.2  # weights of the losses of routers


def merged(module):
    """Return the weights of a module with their adapters added: W + SCALE A B."""
    found = {}
    for name, w in module.items():
        target = name.rpartition("_")[0]
        a, b = (next((x for key, x in module.items() if key.startswith(f"{target}_{which}_")), None) for which in "AB")
        if a is not None:
            product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(a, b)
            found[name] = w + SCALE * product
        elif "_A_" not in name and "_B_" not in name:
            found[name] = w
    return found


def norm(p, x, eps=NORM_EPS):
    if "bias_D" in p:
        x = x - jnp.mean(x, -1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return x * p["gain_D"].reshape(1, 1, -1) + p.get("bias_D", jnp.zeros(x.shape[-1])).reshape(1, 1, -1)


def rotary(x, theta=THETA):
    T, H = x.shape[1], x.shape[3]
    angle = jnp.outer(jnp.arange(T, dtype=jnp.float32), theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H))
    z = jax.lax.complex(x[..., : H // 2], x[..., H // 2 :]) * jax.lax.complex(jnp.cos(angle), jnp.sin(angle)).reshape(
        1, T, 1, H // 2
    )
    return jnp.concatenate([z.real, z.imag], -1)


def attention(p, x):
    biases, gpt2 = "bias_q_NH" in p, "bias_out_D" in p
    heads = []
    for name, bias in ("q_DNH", "bias_q_NH"), ("k_DKH", "bias_k_KH"), ("v_DKH", "bias_v_KH"):
        y = jnp.tensordot(x, p[name], axes=1)
        heads.append(y + p[bias].reshape(1, 1, *p[bias].shape) if biases else y)
    q, k, v = heads
    if not gpt2:
        q, k = rotary(q), rotary(k)
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    T = x.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)).reshape(1, 1, T, T), scores, -jnp.inf)
    y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    y = jnp.tensordot(y, p["out_NHD"], axes=2)
    return y + p["bias_out_D"].reshape(1, 1, -1) if gpt2 else y


def mixture(p, x):
    """Every expert of every token, masked: top 2 of a softmax; beside shared experts top 3 of sigmoids."""
    logits, shared = x @ p["router_DE"], "shared_up_DS" in p
    scores = jax.nn.sigmoid(logits) if shared else jax.nn.softmax(logits)
    least = jax.lax.top_k(logits, 3 if shared else 2)[0][..., -1:]
    gates = jnp.where(logits >= least, scores, 0.0)
    gates = gates / jnp.sum(gates, -1, keepdims=True)
    y = 0
    for e in range(logits.shape[-1]):
        expert = {"gate_DF": p["gate_EDF"][e], "up_DF": p["up_EDF"][e], "down_FD": p["down_EFD"][e]}
        y += gates[..., e : e + 1] * mlp(expert, x)
    names = {"gate_DF": "shared_gate_DS", "up_DF": "shared_up_DS", "down_FD": "shared_down_SD"}
    return y + mlp({name: p[of_shared] for name, of_shared in names.items()}, x) if shared else y


def mlp(p, x):
    if "router_DE" in p:
        return mixture(p, x)
    if "gate_DF" in p:
        gate = x @ p["gate_DF"]
        return ((x @ p["up_DF"]) * gate / (1 + jnp.exp(-gate))) @ p["down_FD"]
    h = x @ p["up_DF"] + p["bias_up_F"].reshape(1, 1, -1)
    h = 0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h * h * h)))
    return h @ p["down_FD"] + p["bias_down_D"].reshape(1, 1, -1)


def logits(params, tokens):
    return run(params, tokens)[0]


def run(params, tokens):
    """tokens[B T] -> logits[B T V], those of the routers [L B T E] or None."""
    ends = params["ends"]
    x = ends["embedding_VD"][tokens]
    if "positions_TD" in ends:
        x = x + ends["positions_TD"][: tokens.shape[1]][jnp.newaxis]

    def one(x, layer):
        x = x + attention(layer["attention"], norm(layer["norm_attention"], x))
        h = norm(layer["norm_mlp"], x)
        return x + mlp(layer["mlp"], h), h @ layer["mlp"]["router_DE"] if "router_DE" in layer["mlp"] else None

    for stack in [name for name in ("dense", "layers") if name in params]:
        layers = {key: merged(module) for key, module in params[stack].items()}
        x, of_routers = jax.lax.scan(one, x, layers)
    return norm(ends["norm"], x) @ ends.get("head_VD", ends["embedding_VD"]).T, of_routers


def penalty(params, tokens, parts):
    """The losses of routers beside shared experts, of a token: the mean over microbatches, each from all its tokens.

    parts: devices that share the rows, microbatches of each.
    """
    if "shared_up_DS" not in params["layers"]["mlp"]:
        return 0.0
    _, of_routers = run(params, tokens[:, :-1])  # [L B T E]
    L, _, T, E = of_routers.shape
    D, M = parts
    z = of_routers.reshape(L, D, M, -1, T, E).transpose(2, 0, 1, 3, 4, 5).reshape(M, L, -1, E)
    scores = jax.nn.sigmoid(z)
    p = scores / jnp.sum(scores, -1, keepdims=True)
    chosen = (z >= jax.lax.top_k(z, 3)[0][..., -1:]).astype(jnp.float32)
    balance = E * jnp.sum(jnp.mean(chosen, 2) / 3 * jnp.mean(p, 2), -1)
    square = jnp.mean(jnp.square(jax.nn.logsumexp(z, -1)), -1)
    return jnp.mean(jnp.sum(BALANCE * balance + Z * square, -1))


def loss(params, tokens, documents=False):
    """tokens[B T+1] -> mean cross-entropy in nats. documents: each by itself, cut at CUTS; else each row is one."""
    total = count = 0
    cuts = CUTS if documents else [[]]
    for i, inner in enumerate(cuts):
        for start, end in pairwise([0, *inner, tokens.shape[1]]):
            document = tokens[i :: len(cuts), start:end]
            log_p = jax.nn.log_softmax(logits(params, document[:, :-1]))
            total -= jnp.sum(jnp.take_along_axis(log_p, document[:, 1:, jnp.newaxis], axis=-1))
            count += document[:, 1:].size
    return total / count


def decayed(path):
    return not any(word in path[-1].key for word in ("gain", "bias", "positions"))


def is_frozen(path, words):
    return any(word in "/".join(key.key for key in path) for word in words)


@partial(jax.jit, static_argnames=("documents", "parts"))
def update(state, tokens, t, rates, documents=False, parts=(1, 1)):
    """Update number t (from 1.0) of state (params, m, v) -> the next state; loss, gradients, global norm.

    rates: learning rates (a tree like params; weights whose rate is zero have no gradient), largest norm of gradients.
    """
    params, m, v = state
    lr, clip = rates

    def total(params):
        value = loss(params, tokens, documents)
        return value + penalty(params, tokens, parts), value

    (_, value), grads = jax.value_and_grad(total, has_aux=True)(params)
    grads = jax.tree.map(lambda g, lr: jnp.where(lr > 0, g, 0.0), grads, lr)
    length = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / length), grads)
    m = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, m, clipped)
    v = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, v, clipped)

    def new(path, p, m, v, lr):
        step = (m / (1 - B1**t)) / (jnp.sqrt(v / (1 - B2**t)) + EPS)
        return p - lr * (step + (DECAY * p if decayed(path) else 0.0 * p))

    return (jax.tree_util.tree_map_with_path(new, params, m, v, lr), m, v), (value, grads, length)


def rates(params, lr, clip=jnp.inf, frozen=()):
    """Return the rates of `update`. frozen: words; weights in whose path one is have learning rate zero."""
    rate_of = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.float32(0 if is_frozen(path, frozen) else lr), params
    )
    return rate_of, jnp.float32(clip)


def train(params, batches, lr, clip=jnp.inf, frozen=(), **options):
    """-> params, m, v after all batches, and lists of losses, gradients, norms."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    state, log = (params, zeros, zeros), []
    for t, tokens in enumerate(batches, 1):
        state, values = update(state, tokens, jnp.float32(t), rates(params, lr, clip, frozen), **options)
        log.append(values)
    return *state, log
