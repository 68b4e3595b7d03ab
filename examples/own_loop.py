"""python examples/own_loop.py CHECKPOINT

My own loop: `logprobs`, the bridge, and any loss and optimiser.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from vllm import SamplingParams

import isojax
from isojax.rl import ReasoningGym, whiten
from rollout_bridge import LLM, tokens_and_logprobs


def main(checkpoint: str, steps: int = 100, batch_size: int = 64, samples: int = 16, max_tokens: int = 4096) -> None:
    graphdef, params = nnx.split(isojax.from_pretrained(checkpoint))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))  # any optax: forward parity still holds
    opt_state = tx.init(params)
    llm = LLM(checkpoint, enable_sleep_mode=True, seed=0)
    llm.update_weights(nnx.merge(graphdef, params))

    def loss_fn(params, batch):  # tokens [B, T]; logps[b, t] scores tokens[b, t], float32
        logps, entropy = isojax.logprobs(
            nnx.merge(graphdef, params),
            batch["tokens"],
            lengths=batch["lengths"],
            temperature=0.8,
            return_entropy=True,
        )
        ratio = jnp.exp(logps - batch["rollout_logprobs"])  # no old-log-prob pass, no correction, no masks
        gain = jnp.minimum(ratio * batch["adv"], jnp.clip(ratio, 0.8, 1.28) * batch["adv"])
        return -jnp.sum(batch["mask"] * (gain + 1e-3 * entropy)) / batch["num_tokens"], logps

    grad_fn = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    task = ReasoningGym("chain_sum", size=steps * batch_size)
    sampling = SamplingParams(n=samples, temperature=0.8, max_tokens=max_tokens)
    for step in range(steps):
        items = task.items[step * batch_size : (step + 1) * batch_size]
        outputs = llm.generate([task.prompt(item) for item in items], sampling)
        batch = tokens_and_logprobs(outputs)  # tokens, lengths, mask, rollout_logprobs, weights_version
        rewards = [task.verify(c.text, item) for item, o in zip(items, outputs, strict=True) for c in o.outputs]
        batch |= {"adv": whiten(np.array(rewards))[:, None], "num_tokens": np.float32(batch["mask"].sum())}
        llm.sleep(level=1)
        for i, mini in enumerate(np.split(np.arange(len(batch["tokens"])), 4)):
            rows = {k: v[mini] if np.ndim(v) else v for k, v in batch.items()}
            (loss, logps), grads = grad_fn(params, rows)
            if i == 0:  # later minibatches are off-policy on purpose
                same = isojax.compare_bits(np.asarray(logps), rows["rollout_logprobs"], where=rows["mask"])
                same.raise_if_different()
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        llm.wake_up()
        llm.update_weights(nnx.merge(graphdef, params))  # casts, digests
        print(f"{step} reward {np.mean(rewards):.3f} loss {loss:.4f} {same}")


if __name__ == "__main__":
    main(*sys.argv[1:])
