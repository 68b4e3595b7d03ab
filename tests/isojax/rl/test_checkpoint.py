import jax.numpy as jnp
import numpy as np
import pytest

from isojax.bits import assert_bit_equal
from isojax.errors import CheckpointError
from isojax.rl.checkpoint import Checkpoints, load_params


def state(seed=0):
    rng = np.random.default_rng(seed)
    params = {"layers": {"0": {"norm": jnp.asarray(rng.standard_normal(5), jnp.float32)}}}
    return {"params": params, "optimizer": {"step": jnp.uint32(7), "mu": jnp.array([-0.0, np.nan], jnp.float32)}}


def test_what_is_restored_has_the_bits_that_were_saved(tmp_path):
    saved = Checkpoints(tmp_path)
    for step in (5, 10):
        saved.save(step, state(step), {"weights_version": step})
    saved.close()
    again = Checkpoints(tmp_path)
    assert again.latest == 10
    for step, (restored, notes) in ((10, again.restore(state())), (5, again.restore(state(), 5))):
        assert_bit_equal(restored, state(step))
        assert notes == {"weights_version": step}
    params, notes = load_params(tmp_path / "step_10")
    assert_bit_equal(params, state(10)["params"])
    assert notes == {"weights_version": 10}


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        Checkpoints(tmp_path).restore(state())
    with pytest.raises(CheckpointError, match="RUN/step_N"):
        load_params(tmp_path / "step_1")


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    Checkpoints(tmp_path).save(1, state(), {})
    other = state() | {"params": {"norm": jnp.zeros(3)}}
    with pytest.raises(CheckpointError, match="not of this run"):
        Checkpoints(tmp_path).restore(other)
