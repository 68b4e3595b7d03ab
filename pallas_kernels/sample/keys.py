"""Where randomness comes from: a hash of what is drawn, never of who is drawn beside it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_ENGINE, _USER = 0, 1  # Last counter word: keys of the engine and of users' seeds never meet.


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """64 random bits for each key and counter, arrays of uint32: Threefry-2x32, 20 rounds (Salmon et al. 2011)."""
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + words[0], counter[1] + words[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x, y = x + words[(group + 1) % 3], y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def sample_key(
    engine_seed: int,
    update: int | Integer[Array, ""],
    request: Integer[Array, " rows"],
    sample: Integer[Array, " rows"],
    position: Integer[Array, " rows"],
    *,
    user_seed: Integer[Array, " rows"] | None = None,
    has_user_seed: Bool[Array, " rows"] | None = None,
) -> UInt32[Array, "rows 2"]:
    """The key of the token that each row draws: `threefry(threefry((seed, update), (request, sample)), (position, 0))`.

    A row's key depends on that row alone: a request draws the same tokens in any batch, the samples of a
    request differ, and the next update draws anew. A request with a seed of its own has it in place of the engine's
    seed, the update and the request, `threefry(threefry((seed, 0), (0, sample)), (position, 1))`, so that it draws
    the same tokens from the same weights whenever it comes.

    Args:
        engine_seed: Of the run; the low 32 bits count.
        update: How many updates the weights have seen.
        request: A number of the request that no other request of the update has.
        sample: Which of the request's `n` samples the row is.
        position: Position of the drawn token in its sequence, prompt included.
        user_seed: Seeds of requests that bring one; read where `has_user_seed` says so; the low 32 bits count.
        has_user_seed: Which rows have one; none by default.
    """
    seeded = jnp.zeros(request.shape, bool) if has_user_seed is None else has_user_seed
    seed = jnp.zeros(request.shape, jnp.uint32) if user_seed is None else _word(user_seed)
    request, sample, position = _word(request), _word(sample), _word(position)
    outer = jnp.where(seeded, seed, _word(engine_seed)), jnp.where(seeded, 0, _word(update)).astype(jnp.uint32)
    inner = threefry(outer, (jnp.where(seeded, 0, request).astype(jnp.uint32), sample))
    domain = jnp.where(seeded, _USER, _ENGINE).astype(jnp.uint32)
    return jnp.stack(threefry(inner, (position, domain)), axis=1)


def _word(value) -> jax.Array:
    """The low 32 bits of an integer."""
    return jnp.uint32(value & 0xFFFFFFFF) if isinstance(value, int) else value.astype(jnp.uint32)
