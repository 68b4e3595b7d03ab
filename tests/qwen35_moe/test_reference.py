"""The model against the reference numbers of transformers and of the float64 oracle (docs/model.md)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.layouts import CHUNK
from pallas_kernels.binding import bind
from pallas_kernels.router import load_balancing_loss, router_load
from qwen35_moe import Step, forward, logits, tie, whole_sequences
from tests.qwen35_moe.tiny import config, params, tokens

LENGTH = 72
BLOCKS = -(-LENGTH // CHUNK)


def packed(sequences):
    """Sequences of one length as the blocks of a step."""
    rows = np.zeros((len(sequences), BLOCKS * CHUNK), np.int32)
    rows[:, : sequences.shape[1]] = sequences
    return Step(jnp.asarray(rows.reshape(-1)), None, whole_sequences([sequences.shape[1]] * len(sequences)))


@functools.cache
def scored():
    cfg, ops = config("float32"), bind("exact")

    @jax.jit
    def run(params, step):
        hidden, _, routed = forward(params, step, cfg, ops, max_positions=128)
        return logits(params, hidden, cfg, ops), routed

    scores, routed = run(params(), packed(tokens()))
    return np.asarray(scores).reshape(2, BLOCKS * CHUNK, -1)[:, :LENGTH], routed


def test_logits_are_those_of_the_float64_oracle():
    scores, _ = scored()
    np.testing.assert_allclose(scores[0, 0, :4], [0.4136776076, 0.1969598667, 0.3994475824, -1.2527405518], atol=1e-4)
    np.testing.assert_allclose(scores[1, 71, :4], [-0.6172196033, 0.1840443748, 0.6833498184, -0.2903127483], atol=1e-4)
    wide = scores.astype(np.float64)
    np.testing.assert_allclose([wide.std(), np.abs(wide).sum()], [1.0109573140, 59472.04910188], rtol=1e-5)
    np.testing.assert_allclose(wide.sum(), 198.96367461, atol=0.1)
    want = [246, 222, 370, 416, 115, 195, 47, 161, 298, 41, 467, 116, 263, 463, 160, 401]
    assert scores[0, :16].argmax(-1).tolist() == want


def loss(params, step, targets, counts, cfg, ops):
    """Mean cross-entropy of the next token and the auxiliary loss of the reference."""
    params = tie(params, cfg, ops)
    hidden, _, routed = forward(params, step, cfg, ops, max_positions=128, remat=True)
    scores = logits(params, hidden, cfg, ops, segments=step.segments)
    logprob, _ = ops.logprob(scores, jnp.maximum(targets, 0), temperature=1.0)
    count = (targets >= 0).sum()
    cross_entropy = ops.sum_tokens(jnp.where(targets >= 0, -logprob, 0.0), segments=step.segments) / count
    aux = 0.0
    for router_logits, _ in routed:
        for period in range(cfg.periods):
            terms = load_balancing_loss(router_logits[period], step.valid, counts, top_k=cfg.num_experts_per_tok)
            aux += ops.sum_tokens(terms, segments=step.segments)
    return cross_entropy + 0.001 * aux, (cross_entropy, aux)


def expert_counts(step, routed, cfg):
    return sum(
        router_load(experts[period], step.valid, cfg.num_experts)
        for _, experts in routed
        for period in range(cfg.periods)
    )


def test_losses_and_gradients_are_those_of_transformers():
    cfg, ops = config("float32"), bind("exact")
    step = packed(tokens())
    targets = np.full((2, BLOCKS * CHUNK), -1, np.int32)
    targets[:, : LENGTH - 1] = tokens()[:, 1:]
    counts = expert_counts(step, scored()[1], cfg)
    assert counts.tolist() == [255, 285, 301, 298, 290, 276, 302, 297]
    grad = jax.jit(
        jax.value_and_grad(functools.partial(loss, cfg=cfg, ops=ops), has_aux=True), static_argnames=("cfg", "ops")
    )
    (total, (cross_entropy, aux)), grads = grad(params(), step, jnp.asarray(targets.reshape(-1)), counts)
    np.testing.assert_allclose(cross_entropy, 6.687563086969, atol=1e-5)
    np.testing.assert_allclose(aux, 2.0023133, atol=1e-5)
    np.testing.assert_allclose(total, 6.6895657, atol=1e-5)

    first, attention, last = grads["layers"]["0"], grads["layers"]["3"], grads["layers"]["3"]
    norms = {
        "embed_tokens": (grads["embed_tokens"], 6.75704e-1),
        "A_log": (first["mixer"]["A_log"][0], 1.00793e-1),
        "dt_bias": (first["mixer"]["dt_bias"][0], 8.73063e-2),
        "conv": (first["mixer"]["conv"][0], 1.12571),
        "in_proj_qkv": (first["mixer"]["in_proj_qkv"][0], 6.13207),
        "in_proj_b": (first["mixer"]["in_proj_b"][0], 6.48094e-1),
        "in_proj_a": (first["mixer"]["in_proj_a"][0], 7.29316e-1),
        "norm": (first["mixer"]["norm"][0], 1.54490e-1),
        "router": (first["mlp"]["router"][0], 8.15859e-1),
        "gate_up": (first["mlp"]["gate_up"][0], 1.97172),
        "down": (first["mlp"]["down"][0], 9.47545e-1),
        "shared_gate": (first["mlp"]["shared_gate"][0], 3.32457e-1),
        "q_proj": (attention["mixer"]["q_proj"][0], 1.99493e-1),
        "k_norm": (attention["mixer"]["k_norm"][0], 1.58473e-2),
        "input_norm": (last["input_norm"][1], 1.18510e-2),
        "lm_head": (grads["lm_head"], 9.64086e-1),
    }
    got = {name: float(np.linalg.norm(np.asarray(grad, np.float64))) for name, (grad, _) in norms.items()}
    for name, (_, want) in norms.items():
        assert got[name] == pytest.approx(want, rel=1e-4), name


def test_greedy_tokens_are_those_of_transformers():
    cfg, ops = config("float32"), bind("exact")

    @jax.jit
    def best(params, step, last):
        hidden, _, _ = forward(params, step, cfg, ops, max_positions=128)
        return logits(params, hidden[last][None], cfg, ops).argmax(-1)[0]

    sequence = tokens()[0, :8].tolist()
    for _ in range(16):
        row = np.zeros(CHUNK, np.int32)
        row[: len(sequence)] = sequence
        step = Step(jnp.asarray(row), None, whole_sequences([len(sequence)]))
        sequence.append(int(best(params(), step, len(sequence) - 1)))
    assert sequence[8:] == [161, 199, 117, 250, 429, 413, 152, 71, 230, 203, 9, 164, 101, 147, 239, 370]
