"""Optimisers whose update has the same bits for every layout of parameters and batch."""

from isojax.optim.adamw import AdamW, AdamWState, adamw
from pallas_kernels.global_norm import global_norm

__all__ = ["AdamW", "AdamWState", "adamw", "global_norm"]
