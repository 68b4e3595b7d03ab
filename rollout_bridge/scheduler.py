"""vLLM's scheduler, which never reuses a cache that other weights filled.

vLLM keeps its prefix cache over a weight update unless the caller resets it. Scheduler and worker live in one
process here, so the scheduler sees for itself that weights changed: before the next step it forgets every cached prefix
and recomputes the running requests from their tokens. Engines that share a process count updates together: one
that forgets too often loses time, no bit.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rollout_bridge import weights


class BoundScheduler(Scheduler):
    _weights_seen: int | None = None

    def schedule(self, *args, **kwargs):
        now = weights.updates()
        if self._weights_seen is not None and now != self._weights_seen:
            self.reset_prefix_cache(reset_running_requests=True)
        self._weights_seen = now
        return super().schedule(*args, **kwargs)


class BoundAsyncScheduler(BoundScheduler, AsyncScheduler):
    pass
