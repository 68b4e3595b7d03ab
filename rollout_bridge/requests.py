"""What the worker remembers of running requests: tokens known, blocks owned, the slot of the open chunk.

vLLM sends a request once and then only what is new of it; sampled tokens are never sent back. One row of
this table is one *slot*: the same index in block tables, in the token buffer and in the model's cache.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from isojax.errors import IsojaxError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData


@dataclasses.dataclass(slots=True)
class Request:
    """One running request.

    Attributes:
        name: vLLM's internal request id.
        slot: Row of the table.
        sampling: Sampling parameters, checked by `sampling.refuse_unsupported`.
        prompt_len: Tokens of the prompt.
        prefill_len: Tokens known on admission: the prompt, and after a pre-emption what was generated.
        computed: Tokens whose rows are in the cache before the step at hand.
        fresh: No step ran since admission: the slot holds another request's open chunk.
        score_prompt: Prompt log-probabilities were asked for and not yet handed over.
    """

    name: str
    slot: int
    sampling: "SamplingParams"
    prompt_len: int
    prefill_len: int
    computed: int
    fresh: bool = True
    score_prompt: bool = False


class RequestTable:
    """Running requests and their block tables, `[slots, blocks]` int32 for every KV-cache group.

    Entries past a request's last block are 0, vLLM's null block.
    """

    def __init__(self, num_slots: int, blocks_per_request: Sequence[int]):
        self.requests: dict[str, Request] = {}
        self.blocks = [np.zeros((num_slots, most), np.int32) for most in blocks_per_request]
        self._num_blocks = np.zeros((len(blocks_per_request), num_slots), np.int32)
        self._free = list(range(num_slots - 1, -1, -1))

    def __getitem__(self, name: str) -> Request:
        return self.requests[name]

    def __len__(self) -> int:
        return len(self.requests)

    def admit(self, new: "NewRequestData") -> tuple[Request, np.ndarray]:
        """Takes a new or resumed request in; an id already known is replaced.

        Returns:
            The request, and every token known of it.
        """
        self.drop(new.req_id)
        if new.sampling_params is None or new.prompt_token_ids is None:
            raise IsojaxError(
                f"request {new.req_id} has no token ids or sampling parameters: only generation is served"
            )
        if not self._free:
            raise IsojaxError(f"no slot is free for request {new.req_id}: vLLM runs more requests than max_num_seqs")
        tokens = np.asarray(new.prefill_token_ids or new.prompt_token_ids, np.int32)
        request = Request(
            name=new.req_id,
            slot=self._free.pop(),
            sampling=new.sampling_params,
            prompt_len=len(new.prompt_token_ids),
            prefill_len=len(tokens),
            computed=new.num_computed_tokens,
            # A request that comes back with generated tokens has handed its prompt's scores over before.
            score_prompt=new.sampling_params.prompt_logprobs is not None and len(tokens) == len(new.prompt_token_ids),
        )
        self.requests[request.name] = request
        self.append_blocks(request, new.block_ids)
        return request, tokens

    def append_blocks(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Appends newly owned blocks, one list for every group."""
        for group, ids in enumerate(block_ids):
            have = self._num_blocks[group, request.slot]
            self.blocks[group][request.slot, have : have + len(ids)] = ids
            self._num_blocks[group, request.slot] = have + len(ids)

    def drop(self, name: str) -> None:
        """Forgets a finished, pre-empted or replaced request; unknown names are allowed."""
        request = self.requests.pop(name, None)
        if request is None:
            return
        for group, blocks in enumerate(self.blocks):
            blocks[request.slot] = 0
            self._num_blocks[group, request.slot] = 0
        self._free.append(request.slot)
