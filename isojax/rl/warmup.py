"""The small policy of the demo: made from a seed, taught the form of its task, written as a Hugging Face folder.

`python -m isojax.rl.warmup OUT` writes the same bytes each time.
"""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from flax import nnx

from isojax import optim
from isojax.rl.config import TaskSource
from isojax.rl.gradient import policy_gradient
from isojax.rl.losses import supervised_loss
from isojax.rl.packing import Batch, pack_samples
from isojax.rl.tasks import Item, Task
from isojax.rl.tokenizer import PADDED_VOCAB, byte_tokenizer
from isojax.samples import Sample
from isojax.sampling import Sampling
from pallas_kernels.binding import bind
from qwen35_moe import Config, Qwen35Moe, init_params
from qwen35_moe.checkpoint import export

CONFIG = Config(
    vocab_size=PADDED_VOCAB,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    rope_theta=10_000.0,
    partial_rotary_factor=0.5,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)

TASK = TaskSource(
    reasoning_gym="chain_sum",
    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    size=20_000,
)

BARE = "{{ messages[-1]['content'] }}"
"""Its chat template: it was taught questions without turns around them."""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Supervised updates on the task's answers.

    Attributes:
        steps: Number of updates.
        lr: Peak learning rate.
        wrong: Share of demonstrations that show the answer of another item.
        rise: Steps of a linear rise, before a linear fall to a tenth; without, the rate is constant.
        seed: Of the data.
        batch: Items of an update.
    """

    steps: int
    lr: float
    wrong: float = 0.0
    rise: int = 0
    seed: int = 0
    batch: int = 64

    @property
    def rates(self) -> np.ndarray:
        """The learning rate of every step."""
        if not self.rise:
            return np.full(self.steps, self.lr, np.float32)
        steps = range(self.steps)
        return np.array(
            [self.lr * min(1.0, (s + 1) / self.rise) * (1.0 - 0.9 * s / self.steps) for s in steps], np.float32
        )

    def batches(self, task: Task) -> Iterator[Batch]:
        """The items of every step, as the batch that imitates their answers."""
        rng = np.random.default_rng(self.seed)
        for _ in range(self.steps):
            items = [task.items[i] for i in rng.integers(len(task.items), size=self.batch)]
            if self.wrong:
                others = rng.integers(len(task.items), size=self.batch)
                exchanged = rng.random(self.batch) < self.wrong
                items = [
                    {**item, "answer": task.items[other]["answer"]} if swap else item
                    for item, other, swap in zip(items, others, exchanged, strict=True)
                ]
            yield imitate(task, items)


LESSONS = (Lesson(400, 2e-3, rise=40), Lesson(100, 5e-4, wrong=0.5, seed=1))
"""How to add; then from demonstrations of which half are wrong, so that it knows more than it says."""


def warm_up(
    lessons: Sequence[Lesson] = LESSONS, progress: Callable[[int, float], None] = lambda step, loss: None
) -> Qwen35Moe:
    """The small policy after its supervised updates."""
    model, task, done = Qwen35Moe(CONFIG, init_params(CONFIG, seed=0), bind("exact")), TASK.build(), 0
    for lesson in lessons:
        optimizer = nnx.Optimizer(model, optim.adamw(_Table(lesson.rates), b2=0.95, max_grad_norm=1.0), wrt=nnx.Param)
        for batch in lesson.batches(task):
            grads, scores = policy_gradient(model, batch, supervised_loss)
            optimizer.update(model, grads)
            done += 1
            progress(done, scores.loss)
    return model


def imitate(task: Task, items: Sequence[Item]) -> Batch:
    """A batch whose sampled tokens are the answers of `items` and the end of turn, with advantage 1."""
    tokenizer = byte_tokenizer()
    samples = []
    for number, item in enumerate(items):
        prompt = np.array(tokenizer.encode(task.prompt(item)), np.int32)
        answer = np.array([*tokenizer.encode(item["answer"]), tokenizer.eos_token_id], np.int32)
        nothing = np.zeros(len(answer), np.float32)
        samples.append(Sample(number, 0, prompt, answer, nothing, nothing.astype(np.int32)))
    return pack_samples(tuple(samples), np.ones((len(items), 1), np.float32), 1 << 30, Sampling())


@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    """A learning rate looked up by step."""

    rates: np.ndarray

    def __call__(self, count):
        import jax.numpy as jnp

        return jnp.asarray(self.rates)[count]


def main(out: str) -> None:
    """Writes the warmed-up policy to `out`, replacing what is there."""
    steps = sum(lesson.steps for lesson in LESSONS)
    model = warm_up(progress=lambda step, loss: print(f"{step}/{steps} loss {loss:.4f}", file=sys.stderr))
    folder, tokenizer = Path(out), byte_tokenizer()
    tokenizer.chat_template = BARE
    shutil.rmtree(folder, ignore_errors=True)
    export(folder, model.params(), model.config, tokenizer=tokenizer, dtype="float32")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main(sys.argv[1])
