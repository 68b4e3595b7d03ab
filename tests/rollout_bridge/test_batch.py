"""Scheduler steps become programs: every row once, in order, whatever the shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.batch import Buckets, Piece, Tables, pack, passes, piece

CHUNK = 64


def some_piece(slot: int, start: int, count: int, fresh: bool = False) -> Piece:
    return piece(slot=slot, start=start, count=count, fresh=fresh, samples=True, state_block=128)


def tables(num_slots: int = 8, pages: int = 16) -> Tables:
    page = np.arange(num_slots * pages, dtype=np.int32).reshape(num_slots, pages) + 1
    return Tables(page, [page + 1000, page + 2000], num_blocks=9999)


def rows_of(inputs, pieces_rows, pieces_chunks):
    """(slot, position, page of its token) of every row that is there."""
    found = []
    for i in np.flatnonzero(inputs.valid):
        found.append((int(inputs.rows.slot[i]), int(inputs.rows.start[i])))
    for sequence, index, begin, end in inputs.blocks.T:
        slot = int(inputs.sequences.slot[sequence])
        found += [(slot, int(index) * CHUNK + r) for r in range(begin, end)]
    return found


steps = st.lists(st.tuples(st.integers(0, 700), st.integers(1, 300), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_every_scheduled_token_is_one_row_of_one_program(step):
    pieces = [some_piece(slot, start, count, fresh) for slot, (start, count, fresh) in enumerate(step)]
    buckets = Buckets.of(max_num_seqs=8, max_num_batched_tokens=256)
    found = []
    for rows, chunks in passes(pieces, buckets):
        inputs = pack(rows, chunks, tables(), buckets)
        assert (len(inputs.valid), inputs.blocks.shape[1]) in buckets.shapes()
        found += rows_of(inputs, rows, chunks)
    wanted = [(p.slot, position) for p in pieces for position in range(p.start, p.end)]
    assert sorted(found) == sorted(wanted)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_the_parts_of_a_cut_piece_hand_the_state_on(step):
    pieces = [some_piece(slot, start, count, fresh) for slot, (start, count, fresh) in enumerate(step)]
    buckets = Buckets.of(max_num_seqs=8, max_num_batched_tokens=128)
    parts: dict[int, list[Piece]] = {}
    for rows, chunks in passes(pieces, buckets):
        for p in (*rows, *chunks):
            parts.setdefault(p.slot, []).append(p)
    for whole in pieces:
        first, *rest = parts[whole.slot]
        assert first.state_in == whole.state_in
        assert first.fresh == whole.fresh
        for before, after in zip([first, *rest], rest, strict=False):
            assert after.start == before.end
            assert after.start % CHUNK == 0
            assert not after.fresh
            assert after.state_in == before.state_out == whole.state_out
        assert [p.samples for p in (first, *rest)] == [False] * len(rest) + [True]


def test_a_single_token_of_a_fresh_request_runs_as_a_chunk():
    # Only the chunk path rebuilds the slot, which still holds another request's open chunk.
    [(rows, chunks)] = passes([some_piece(0, 64, 1, fresh=True), some_piece(1, 70, 1)], Buckets.of(8, 256))
    assert [p.slot for p in rows] == [1]
    assert [p.slot for p in chunks] == [0]


def test_a_row_sampled_from_goes_to_its_slot_and_others_nowhere():
    pieces = [some_piece(3, 10, 1), piece(slot=5, start=0, count=70, fresh=True, samples=False, state_block=128)]
    buckets = Buckets.of(8, 256)
    [(rows, chunks)] = passes(pieces, buckets)
    inputs = pack(rows, chunks, tables(), buckets)
    assert inputs.rows.to.tolist() == [3] + [8] * 7
    assert inputs.sequences.to.tolist() == [8] * inputs.blocks.shape[1]
    assert inputs.last[0] == CHUNK + 5  # Row of position 69.


def test_state_is_read_where_the_token_before_lies_and_written_where_the_last_lies():
    p = some_piece(2, 128, 129)
    homes = tables().homes([p], 4)
    page = tables().states[0][2]
    assert homes.state_in[0, 0] == page[0]  # Token 127.
    assert homes.state_out[0, 0] == page[2]  # Token 256.


def test_padding_is_written_nowhere():
    homes = tables().homes([some_piece(1, 5, 1)], 8)
    assert homes.slot[1:].tolist() == [8] * 7
    assert (homes.state_out[:, 1:] == 9999).all()
    assert (homes.to[1:] == 8).all()


@pytest.mark.parametrize("growth", [2, 4])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 64), (8, 128), (33, 1000), (256, 8192)])
def test_buckets_hold_every_request_and_few_shapes(seqs, tokens, growth):
    buckets = Buckets.of(seqs, tokens, growth)
    assert buckets.decode[-1] >= seqs
    assert buckets.chunks[-1] * CHUNK >= tokens
    assert len(buckets.shapes()) <= 2 + (np.log2(seqs) + np.log2(tokens)) / np.log2(growth)
