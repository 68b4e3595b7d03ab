from pallas_kernels.logprob.kernel import Numerics
from pallas_kernels.logprob.op import logprob, logprobs_all
from pallas_kernels.logprob.top import top_logprobs

__all__ = ["Numerics", "logprob", "logprobs_all", "top_logprobs"]
