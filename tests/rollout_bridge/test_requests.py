"""The request table: slots, block tables, what comes back after a pre-emption."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams

from isojax.errors import IsojaxError
from rollout_bridge.requests import RequestTable


def news(name="a", prompt=(1, 2, 3), known=None, blocks=((1, 2), (5,)), computed=0, **sampling):
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=list(prompt),
        prefill_token_ids=list(known or prompt),
        sampling_params=SamplingParams(**sampling),
        block_ids=blocks,
        num_computed_tokens=computed,
    )


def test_blocks_are_appended_and_forgotten_with_the_request():
    table = RequestTable(2, [4, 4])
    request, tokens = table.admit(news())
    assert tokens.tolist() == [1, 2, 3]
    table.append_blocks(request, ((7,), ()))
    assert table.blocks[0][request.slot].tolist() == [1, 2, 7, 0]
    assert table.blocks[1][request.slot].tolist() == [5, 0, 0, 0]
    table.drop("a")
    assert all((blocks == 0).all() for blocks in table.blocks)
    assert len(table) == 0


def test_a_request_that_comes_again_replaces_itself():
    table = RequestTable(1, [4])
    table.admit(news(blocks=((1, 2),)))
    request, tokens = table.admit(news(known=(1, 2, 3, 9), blocks=((3,),), computed=2))
    assert (request.prefill_len, request.prompt_len, request.computed, request.fresh) == (4, 3, 2, True)
    assert table.blocks[0][request.slot].tolist() == [3, 0, 0, 0]
    assert tokens.dtype == np.int32


def test_prompt_scores_are_owed_once():
    table = RequestTable(1, [4])
    request, _ = table.admit(news(blocks=((1,),), prompt_logprobs=0))
    assert request.score_prompt
    # Pre-empted after it generated: the scores were handed over with its first token.
    request, _ = table.admit(news(known=(1, 2, 3, 9), blocks=((1,),), prompt_logprobs=0))
    assert not request.score_prompt


def test_more_requests_than_slots_are_refused():
    table = RequestTable(1, [4])
    table.admit(news("a", blocks=((1,),)))
    with pytest.raises(IsojaxError, match="max_num_seqs"):
        table.admit(news("b", blocks=((2,),)))


def test_dropping_an_unknown_request_changes_nothing():
    table = RequestTable(2, [4])
    table.admit(news(blocks=((1,),)))
    table.drop("nobody")
    assert len(table) == 1
