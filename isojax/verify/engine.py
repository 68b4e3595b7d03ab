"""Rows of the engine: what vLLM returned, under every way it schedules, against the trainer's forward."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from isojax.models import from_pretrained
from isojax.rl.gradient import score
from isojax.rl.packing import pack
from isojax.samples import Request
from isojax.verify.direct import draw
from isojax.verify.report import Row
from qwen35_moe import Qwen35Moe, page_tokens
from rollout_bridge.rollouts import Rollouts

TOKENS = 24  # Drawn for each sample: prompts end just before chunk borders, so decoding crosses them.
REQUESTS = 33
PREFIX_PAGES = 4
NUM_BLOCKS = 120
"""Of all engines, so that they share programs. A long sequence takes about 16: 33 requests do not all fit."""


def rows(checkpoint: Path, numerics: str) -> Iterator[Row]:
    """The rows of one checkpoint, in bfloat16; engines are started one after another."""
    model = from_pretrained(checkpoint, numerics=numerics)
    page = page_tokens(model.config)
    with _Engine(model, page, disable_log_stats=False) as engine:
        for count in (1, 7):
            yield engine.row(f"{count} requests", engine.prompts(count))
        for pages in range(1, PREFIX_PAGES + 1):
            yield engine.prefix_row(pages)
        yield engine.preempted_row()
        yield engine.update_row()
    for budget in (page, page + page // 2, 4 * page):
        with _Engine(model, page, max_num_batched_tokens=budget) as engine:
            yield engine.row(f"token budget of {budget}", engine.prompts(9))
    with _Engine(model, page, async_scheduling=False) as engine:
        yield engine.row("synchronous scheduling", engine.prompts(9))
    with _Engine(model, page, sampling={"top_k": 100, "top_p": 0.9, "min_p": 0.01}) as engine:
        yield engine.row("truncated sampling", engine.prompts(9))


class _Engine:
    """An engine over random prompts, and rows that compare what it returns."""

    def __init__(self, model: Qwen35Moe, page: int, sampling: Mapping[str, Any] | None = None, **options: Any):
        self.model, self.page, self._seed = model, page, 0
        settings = {
            "max_model_len": (PREFIX_PAGES + 3) * page,
            "max_num_seqs": REQUESTS,
            "max_num_batched_tokens": 4 * page,
            "num_gpu_blocks_override": NUM_BLOCKS,
            "skip_tokenizer_init": True,
        }
        drawn = {"n": 2, "max_tokens": TOKENS, "temperature": 0.9, "ignore_eos": True, "detokenize": False}
        self._rollouts = Rollouts(model, settings | options, drawn | dict(sampling or {}))

    def __enter__(self) -> "_Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self._rollouts.close()

    def prompts(self, count: int) -> list[np.ndarray]:
        """Random prompts of one token up to over three pages; no two calls share a prefix."""
        self._seed += 1
        near = [self.page * k - TOKENS // 2 for k in (1, 2, 3)]
        lengths = [[1, *near, 63, 64, 65, 40][i % 8] for i in range(count)]
        return draw(self.model, lengths, seed=self._seed)

    def row(self, name: str, prompts: Sequence[np.ndarray]) -> Row:
        return self._compare(name, self._run(prompts))

    def prefix_row(self, pages: int) -> Row:
        """A prompt whose first pages are cached already."""
        first, other = draw(self.model, [pages * self.page + 9, 20], seed=1000 + pages)
        self._run([first])
        outputs = self._run([np.concatenate([first[: pages * self.page], other])])
        hit = outputs[0].num_cached_tokens or 0
        return self._compare(f"prefix hit of {pages} pages", outputs if hit == pages * self.page else [])

    def update_row(self) -> Row:
        """Other weights in the running engine; a prefix cached under the old ones is asked again."""
        prompts = self.prompts(5)
        self._run(prompts)
        graphdef, state = nnx.split(self.model)
        self.model = nnx.merge(graphdef, jax.tree.map(lambda x: x * np.float32(1.01), state))
        self._rollouts.update_weights(self.model)
        return self._compare("after update_weights", self._run(prompts))

    def preempted_row(self) -> Row:
        """More requests than pages, so that some lose theirs and start again."""
        outputs = self._run(self.prompts(REQUESTS))
        counters = {metric.name: getattr(metric, "value", 0) for metric in self._rollouts.llm.get_metrics()}
        preempted = counters.get("vllm:num_preemptions", 0)
        return self._compare(f"{REQUESTS} requests, some pre-empted", outputs if preempted else [])

    def _run(self, prompts: Sequence[np.ndarray]) -> Sequence[Request]:
        ids: Any = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        return self._rollouts.rollout(ids, range(len(prompts)))

    def _compare(self, name: str, outputs: Sequence[Request]) -> Row:
        """A row; of nothing, which fails, where the engine did not do what the row is about."""
        if not outputs:
            return Row(name, "engine", 0, 0, "the engine did not do this")
        batch = pack(outputs, np.zeros((len(outputs), 2), np.float32), 64 * self.page)
        want = score(self.model, batch).logprobs
        return Row.of(name, "engine", batch.rollout_logprobs[batch.mask], want[batch.mask])
