from pallas_kernels.tree_sum.kernel import Schedule, fold_axis
from pallas_kernels.tree_sum.op import add_gradients, sum_tokens, tree_sum

__all__ = ["Schedule", "add_gradients", "fold_axis", "sum_tokens", "tree_sum"]
