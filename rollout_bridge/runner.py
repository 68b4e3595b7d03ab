"""Runs scheduler steps: keeps the request table, cuts steps into programs, hands results over late.

Nothing is read back from the device inside a step, so that the next step can be scheduled meanwhile; the sampled
tokens stay in the token buffer, where the next step finds them.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
import torch
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from isojax.errors import SamplingError, WeightsError
from isojax.layouts import CHUNK
from rollout_bridge import sampling
from rollout_bridge.batch import Buckets, Piece, Tables, pack, passes, piece
from rollout_bridge.programs import Programs, Scores, State
from rollout_bridge.requests import Request, RequestTable
from rollout_bridge.weights import Weights

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclasses.dataclass
class PromptScores:
    """Log-probabilities of a prompt's tokens, collected over its pieces."""

    parts: "list[tuple[Scores, int]]" = dataclasses.field(default_factory=list)

    def tensors(self, most_likely: int) -> LogprobsTensors:
        """Token ids, log-probabilities and ranks of the prompt's second to last token, the given token first.

        Raises:
            SamplingError: If one of them is NaN.
        """
        columns = zip(*(scores.on_host(count) for scores, count in self.parts), strict=True)
        tokens, values, ranks = (np.concatenate(column) for column in columns)
        if np.isnan(values).any():
            raise SamplingError("NaN log-probability in a prompt: check the weights; nothing was kept")
        width = most_likely + 1
        kept = tokens[:, :width], values[:, :width], ranks
        return LogprobsTensors(*(torch.from_numpy(np.ascontiguousarray(x)) for x in kept))


class Output(AsyncModelRunnerOutput):
    """One step's results, still on the device; `get_output` is the only copy to the host."""

    def __init__(
        self,
        names: list[str],
        samples: list[bool],
        sampled: Scores,
        width: int,
        prompts: dict[str, tuple[PromptScores, int]],
    ):
        self._names, self._samples, self._sampled = names, samples, sampled
        self._width, self._prompts = width, prompts

    def get_kv_connector_output(self) -> None:
        return None

    def get_output(self) -> ModelRunnerOutput:
        """The step's tokens and log-probabilities.

        Raises:
            SamplingError: If one of them is NaN, so that nothing is learned or served from it.
        """
        count = len(self._names)
        tokens, logprobs, ranks = self._sampled.on_host(count)
        kept = np.array(self._samples)
        if (broken := np.isnan(logprobs[:, 0]) & kept).any():
            names = [name for name, bad in zip(self._names, broken, strict=True) if bad]
            raise SamplingError(
                f"NaN log-probability in request {', '.join(names)}: check the weights; nothing was kept"
            )
        return ModelRunnerOutput(
            req_ids=self._names,
            req_id_to_index={name: i for i, name in enumerate(self._names)},
            sampled_token_ids=[[int(row[0])] if keep else [] for row, keep in zip(tokens, kept, strict=True)],
            logprobs=LogprobsLists(tokens[:, : self._width], logprobs[:, : self._width], ranks, None),
            prompt_logprobs_dict={name: scores.tensors(most) for name, (scores, most) in self._prompts.items()},
        )


class Runner:
    """One engine's model, cache and running requests."""

    def __init__(self, programs: Programs, weights: Weights, buckets: Buckets):
        self.programs, self.weights, self.layout, self.buckets = programs, weights, programs.layout, buckets
        self.num_slots = programs.num_slots
        self.table = RequestTable(self.num_slots, programs.blocks_per_request)
        self.device: State | None = programs.fresh_state()
        self._prompt_scores: dict[str, PromptScores] = {}
        self._step: tuple[list[Request], list[int], dict[str, tuple[PromptScores, int]]] | None = None

    def warm_up(self) -> None:
        """Compiles the programs of every bucket, so that no request waits for one."""
        params, state = self.weights.params, self._awake()
        for shape in self.buckets.shapes():
            inputs, _ = self.programs.idle(*shape)
            state, _ = self.programs.forward(params, state, inputs)
        for rows in self.buckets.decode:
            _, plain = self.programs.idle(rows, 0)
            for filtered in (False, True):
                state, _ = self.programs.sample(params, state, plain, None, filtered=filtered, most_likely=0)
        self.device = state

    def release(self) -> None:
        """Frees pages and slots; nothing runs until `restore`."""
        self.device = None

    def restore(self) -> None:
        """Allocates empty pages and slots."""
        if self.device is None:
            self.device = self.programs.fresh_state()

    def synchronize(self) -> None:
        """Waits until the device has nothing left to do."""
        jax.block_until_ready(self.device)

    def _awake(self) -> State:
        if self.device is None:
            raise WeightsError("the engine's pages sleep: call wake_up() first")
        return self.device

    def execute(self, step: "SchedulerOutput") -> ModelRunnerOutput | None:
        """Takes a step's news in and starts its forward; None when `sample` is owed next."""
        for name in step.finished_req_ids | (step.preempted_req_ids or set()):
            self._forget(name)
        for new in step.scheduled_new_reqs:
            self._forget(new.req_id)
            request, tokens = self.table.admit(new)
            self.device = self.programs.write_tokens(self.device, request.slot, tokens)
        cached = step.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self.table[name]
            request.computed = computed
            if blocks is not None:
                self.table.append_blocks(request, blocks)
        if step.new_block_ids_to_zero:
            self.device = self.programs.zero_blocks(self.device, step.new_block_ids_to_zero)
        if step.kv_cache_block_copies:
            self.device = self.programs.copy_blocks(self.device, step.kv_cache_block_copies)
        if not step.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._forward(step.num_scheduled_tokens)
        return None

    def sample(self) -> Output:
        """Draws a token for every request of the step that `execute` started."""
        assert self._step is not None, "sample follows an execute that returned None"
        (requests, counts, prompts), self._step = self._step, None
        size = next(size for size in self.buckets.decode if size >= len(requests))
        controls = sampling.controls(
            requests,
            counts,
            size,
            version=self.weights.version,
            num_slots=self.num_slots,
        )
        most = max(r.sampling.logprobs or 0 for r in requests)
        self.device, sampled = self.programs.sample(
            self.weights.params,
            self.device,
            controls,
            sampling.edits(requests, counts, size, self.programs.config.vocab_size),
            filtered=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in (r.sampling for r in requests)),
            most_likely=sampling.MOST_LIKELY if most else 0,
        )
        for request, count in zip(requests, counts, strict=True):
            request.fresh = False
            request.computed += count
        samples = controls.samples[: len(requests)].tolist()
        return Output([r.name for r in requests], samples, sampled, most + 1, prompts)

    def _forward(self, scheduled: dict[str, int]) -> None:
        requests = [self.table[name] for name in scheduled]
        counts = list(scheduled.values())
        pieces = [self._piece(r, count) for r, count in zip(requests, counts, strict=True)]
        tables = Tables(
            self.table.blocks[self.layout.attention_group],
            [self.table.blocks[group] for group in self.layout.state_groups],
            self.layout.num_blocks,
        )
        scored = {r.slot: r for r in requests if r.score_prompt}
        for rows, chunks in passes(pieces, self.buckets):
            inputs = pack(rows, chunks, tables, self.buckets)
            self.device, hidden = self.programs.forward(self.weights.params, self.device, inputs)
            if scored:
                self._score(scored, rows, chunks, hidden, len(inputs.valid))
        prompts = {}
        for request, count in zip(requests, counts, strict=True):
            if request.score_prompt and request.computed + count >= request.prompt_len:
                request.score_prompt = False
                if (scores := self._prompt_scores.pop(request.name, None)) is not None:
                    prompts[request.name] = scores, request.sampling.prompt_logprobs
        self._step = requests, counts, prompts

    def _piece(self, request: Request, count: int) -> Piece:
        return piece(
            slot=request.slot,
            start=request.computed,
            count=count,
            fresh=request.fresh,
            samples=request.computed + count >= request.prefill_len,
            state_block=self.layout.state_block,
        )

    def _score(
        self,
        scored: dict[int, Request],
        rows: Sequence[Piece],
        chunks: Sequence[Piece],
        hidden: jax.Array,
        num_rows: int,
    ) -> None:
        """Scores the prompt tokens that follow the rows of one program."""
        at = num_rows
        where = [(p, i) for i, p in enumerate(rows)]
        for p in chunks:
            where.append((p, at + p.start % CHUNK))
            at += p.num_chunks * CHUNK
        for p, first in where:
            request = scored.get(p.slot)
            if request is None:
                continue
            most = sampling.MOST_LIKELY if request.sampling.prompt_logprobs else 0
            # The prompt's last token has nothing after it.
            count = min(p.end, request.prompt_len - 1) - p.start
            for begin in range(0, count, CHUNK):
                scores = self._prompt_scores.setdefault(request.name, PromptScores())
                part = self.programs.score(
                    self.weights.params,
                    self.device,
                    hidden,
                    first + begin,
                    p.slot,
                    p.start + begin,
                    request.sampling.temperature or 1.0,
                    most_likely=most,
                )
                scores.parts.append((part, min(CHUNK, count - begin)))

    def _forget(self, name: str) -> None:
        self.table.drop(name)
        self._prompt_scores.pop(name, None)
