from pallas_kernels.sample.edits import edit_logits
from pallas_kernels.sample.keys import sample_key
from pallas_kernels.sample.op import GREEDY, reported, sample
from pallas_kernels.sample.truncation import truncation_mask

__all__ = ["GREEDY", "edit_logits", "reported", "sample", "sample_key", "truncation_mask"]
