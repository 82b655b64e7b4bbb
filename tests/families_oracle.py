"""Logits of the families in float64 and NumPy, written from the papers and from the definitions of Hugging Face.

It imports nothing from the package. Parameters have the package's names, as in oracle.py.
"""

import math

import numpy as np


def rms_norm(model, x, gain):
    gain = 1 + gain if model.family == "gemma3" else gain
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_eps) * gain


def layer_norm(x, gain, bias, eps):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain + bias


def norm(model, p, x):
    if "bias_D" in p:
        return layer_norm(x, p["gain_D"], p["bias_D"], model.norm_eps)
    return rms_norm(model, x, p["gain_D"])


def activation(name, x):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":  # exact
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def scaled(frequency, theta, scaling):
    """Frequencies, and the factor of cosines and sines, as modeling_rope_utils of Hugging Face defines them."""
    if scaling is None:
        return frequency, 1.0
    result, length, factor = frequency.copy(), scaling.original_max_seq_len, scaling.factor
    dims = 2 * len(frequency)

    def dim_of(turns):
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    for i, f in enumerate(frequency):
        if scaling.type == "linear":
            result[i] = f / factor
        elif scaling.type == "llama3":
            wavelength = 2 * math.pi / f
            if wavelength > length / scaling.low_freq_factor:
                result[i] = f / factor
            elif wavelength >= length / scaling.high_freq_factor:
                smooth = (length / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                result[i] = (1 - smooth) * f / factor + smooth * f
        else:
            low, high = (
                max(math.floor(dim_of(scaling.beta_fast)), 0),
                min(math.ceil(dim_of(scaling.beta_slow)), dims - 1),
            )
            ramp = min(max((i - low) / (high - low), 0), 1)
            result[i] = f / factor * ramp + f * (1 - ramp)
    if scaling.type != "yarn":
        return result, 1.0
    return result, scaling.attention_factor or 0.1 * math.log(factor) + 1


def rotary(x, theta, scaling):
    """x[B T N H], rotated by its positions: dims h and h + H/2 are a pair (arXiv 2104.09864)."""
    T, H = x.shape[1], x.shape[3]
    frequency, factor = scaled(1 / theta ** (np.arange(0, H, 2) / H), theta, scaling)
    x = x * factor
    angle = np.outer(np.arange(T), frequency)[:, None]
    a, b = x[..., : H // 2], x[..., H // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attention(model, p, x, is_global):
    q, k, v = (np.tensordot(x, p[name], 1) for name in ("q_DNH", "k_DKH", "v_DKH"))
    if "bias_q_NH" in p:
        q, k, v = q + p["bias_q_NH"], k + p["bias_k_KH"], v + p["bias_v_KH"]
    if "gain_q_H" in p:
        q, k = rms_norm(model, q, p["gain_q_H"]), rms_norm(model, k, p["gain_k_H"])
    if model.family != "gpt2":
        rope = model.rope_theta, model.rope_scaling
        if model.family == "gemma3" and not is_global:
            rope = model.rope_local_theta or 10000, None
        q, k = (rotary(x, *rope) for x in (q, k))
    group, T = q.shape[2] // k.shape[2], x.shape[1]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[3])
    query, key = np.arange(T)[:, None], np.arange(T)[None]
    is_near = key > query - (T if is_global else model.sliding_window or T)
    scores = np.where((key <= query) & is_near, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = np.tensordot(np.einsum("bnts,bsnh->btnh", weights, v), p["out_NHD"], 2)
    return y + p.get("bias_out_D", 0)


def is_global(model, layer):
    """Gemma 3: every sixth layer (sliding_window_pattern); Qwen2: the first ones (max_window_layers)."""
    every = model.global_layers or ("every:6" if model.family == "gemma3" else "first:0")
    kind, number = every.split(":")
    return (layer + 1) % int(number) == 0 if kind == "every" else layer < int(number)


def mixture(model, p, x):
    """Token by token, each of its experts by itself (Mixtral, arXiv 2401.04088; DeepSeek-V3, arXiv 2412.19437)."""
    e = model.experts
    logits = x @ p["router_DE"]
    if e.router == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    y = np.zeros_like(x)
    for at in np.ndindex(x.shape[:2]):
        chosen = np.argsort(-logits[at])[: e.top_k]
        total = scores[at][chosen].sum() if e.normalize else 1
        for i in chosen:
            weights = {"gate_DF": p["gate_EDF"][i], "up_DF": p["up_EDF"][i], "down_FD": p["down_EFD"][i]}
            y[at] += e.gate_scale * scores[at][i] / total * mlp(model, weights, x[at])
    if e.shared:
        y += mlp(model, {"gate_DF": p["shared_gate_DS"], "up_DF": p["shared_up_DS"], "down_FD": p["shared_down_SD"]}, x)
    return y


def mlp(model, p, x):
    if "router_DE" in p:
        return mixture(model, p, x)
    up = x @ p["up_DF"] + p.get("bias_up_F", 0)
    kind = model.activation or {"gpt2": "gelu_tanh", "gemma3": "gelu_tanh"}.get(model.family, "silu")
    h = activation(kind, x @ p["gate_DF"]) * up if "gate_DF" in p else activation(kind, up)
    return h @ p["down_FD"] + p.get("bias_down_D", 0)


def logits(model, params, tokens):
    """A config.Model, its parameters (host arrays), tokens[B T] -> logits[B T V]."""
    ends, stacks = in_float64(params["ends"]), [in_float64(params[x]) for x in ("dense", "layers") if x in params]
    layers = [row_of(stack, i) for stack in stacks for i in range(len(stack["norm_mlp"]["gain_D"]))]
    x = ends["embedding_VD"][tokens] * (math.sqrt(model.d_model) if model.family == "gemma3" else 1)
    if "positions_TD" in ends:
        x = x + ends["positions_TD"][: tokens.shape[1]]
    for i, layer in enumerate(layers):
        y = attention(model, layer["attention"], norm(model, layer["norm_attention"], x), is_global(model, i))
        x = x + (norm(model, layer["norm_attention_out"], y) if model.family == "gemma3" else y)
        y = mlp(model, layer["mlp"], norm(model, layer["norm_mlp"], x))
        x = x + (norm(model, layer["norm_mlp_out"], y) if model.family == "gemma3" else y)
    return norm(model, ends["norm"], x) @ ends.get("head_VD", ends["embedding_VD"]).T


def row_of(stack, i):
    return {module: {name: w[i] for name, w in rows.items()} for module, rows in stack.items()}


def in_float64(tree):
    return {k: in_float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}
