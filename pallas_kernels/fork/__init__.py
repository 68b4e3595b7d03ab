from pallas_kernels.fork.op import fork, split

__all__ = ["fork", "split"]
