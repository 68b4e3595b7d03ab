"""python examples/grpo.py CHECKPOINT data.jsonl"""

import json

import numpy as np
import typer
from flax import nnx
from vllm import SamplingParams

import isojax
from isojax import rl
from rollout_bridge import LLM


def reward(text: str, answer: str) -> float:
    return float(text.split("####")[-1].strip() == answer)


def main(checkpoint: str, data: str, steps: int = 100, prompts: int = 32, max_tokens: int = 1024) -> None:
    with open(data) as file:
        rows = [json.loads(line) for line in file]
    model = isojax.from_pretrained(checkpoint)  # nnx.Module: float32 params, bfloat16 compute
    llm = LLM(model, max_model_len=2048, gpu_memory_utilization=0.35)  # a vllm.LLM in this process, no copy
    optimizer = nnx.Optimizer(model, isojax.optim.adamw(1e-6, max_grad_norm=1.0), wrt=nnx.Param)
    sampling = SamplingParams(n=8, temperature=1.0, max_tokens=max_tokens)
    for step, pick in enumerate(np.random.default_rng(0).integers(len(rows), size=(steps, prompts))):
        chats = [[{"role": "user", "content": rows[i]["question"]}] for i in pick]
        outputs = llm.chat(chats, sampling)  # vllm.RequestOutput, log-probabilities always attached
        rewards = np.array(
            [[reward(c.text, rows[i]["answer"]) for c in o.outputs] for o, i in zip(outputs, pick, strict=True)]
        )
        batch = rl.pack(outputs, rl.group_advantages(rewards), max_tokens=16_384)
        grads, out = rl.policy_gradient(model, batch, rl.grpo_loss)  # one forward: loss, logprobs, grads
        parity = rl.check_parity(batch, out.logprobs)  # raises isojax.MismatchError: nothing was updated yet
        optimizer.update(model, grads)
        llm.update_weights(model)  # all tensors or none; new version; prefix cache reset
        print(f"{step} reward {rewards.mean():.3f} loss {out.loss:.4f} {parity}")  # 98,304 compared, 0 different


if __name__ == "__main__":
    typer.run(main)
