"""vLLM's worker: one process, one device, our model (docs/bridge.md)."""

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from isojax.errors import IsojaxError, WeightsError
from qwen35_moe import identity
from rollout_bridge import cache, memory, sampling, served
from rollout_bridge.batch import Buckets
from rollout_bridge.programs import Programs
from rollout_bridge.runner import Runner
from rollout_bridge.weights import Weights, digests

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

logger = init_logger("vllm.rollout_bridge")


class JaxWorker(WorkerBase):
    """Runs `qwen35_moe` for vLLM's engine."""

    model: served.Served
    weights: Weights
    runner: Runner | None = None

    def init_device(self) -> None:
        if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ and not memory.is_opened():
            # A process of its own may use what vLLM was told to; in the trainer's process JAX runs already.
            os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(self.cache_config.gpu_memory_utilization)
        self.device = torch.device("cpu")
        memory.free_bytes()  # Fails here, with JAX's message, when there is no device.

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model = served.of(self.vllm_config)
        self.weights = Weights(self.model.config, self.model.ops)
        self._weight_bytes = self.weights.load(self.model.params)
        # A trainer's parameters are not ours to keep alive.
        self.model = dataclasses.replace(self.model, params={})

    def get_model(self):
        raise IsojaxError("the model is no torch module: use collective_rpc on the worker's methods")

    def get_model_inspection(self) -> str:
        return f"{self.model.config}, {self.weights.digest[:12]} version {self.weights.version}"

    def identity(self) -> dict[str, Any]:
        """What this engine computes and how, for its trainer to compare (`isojax.contract.exchange`)."""
        return identity(self.model.config, self.model.ops).to_json()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    # The cache

    def get_kv_cache_spec(self) -> "dict[str, KVCacheSpec]":
        return cache.specs(self.model.config, self.vllm_config)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return [next(iter(KVCacheLayout)).name]

    def determine_available_memory(self) -> int:
        """Bytes for pages: the engine's share of the device, less its weights, slots and what programs need."""
        if (asked := self.cache_config.kv_cache_memory_bytes) is not None:
            return asked
        config, ops, page_tokens = self.model.config, self.model.ops, self.cache_config.block_size
        slots = cache.slot_bytes(config, ops, page_tokens, self.scheduler_config.max_num_seqs)
        # On the CPU workspace is the machine's memory, of which the share leaves most.
        workspace = 0
        if memory.is_gpu():
            programs = self._programs(cache.Layout.least(config, page_tokens))
            workspace = programs.workspace_bytes(self.weights.params, self._buckets)
        share = int(memory.total_bytes() * self.cache_config.gpu_memory_utilization)
        left = min(share - self._weight_bytes, memory.free_bytes()) - slots - workspace
        sizes = {"weights": self._weight_bytes, "slots": slots, "workspace": workspace, "pages": left}
        budget = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items())
        logger.info("memory, GiB: %.2f of the device: %s", share / 2**30, budget)
        if left <= 0:
            raise IsojaxError(
                f"no memory is left for pages; in GiB, {share / 2**30:.2f} of the device: {budget}:"
                " raise gpu_memory_utilization, or lower max_num_seqs or max_num_batched_tokens"
            )
        return left

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> None:
        programs = self._programs(cache.Layout.of(self.model.config, kv_cache_config))
        self.runner = Runner(programs, self.weights, self._buckets)

    def _programs(self, layout: cache.Layout) -> Programs:
        return Programs.shared(
            self.model.config,
            self.model.ops,
            layout,
            num_slots=self.scheduler_config.max_num_seqs,
            max_len=self.model_config.max_model_len,
            engine_seed=self.model_config.seed,
        )

    @property
    def _buckets(self) -> Buckets:
        # On the CPU compiling takes longer than padding.
        growth = 2 if memory.is_gpu() else 4
        return Buckets.of(self.scheduler_config.max_num_seqs, self.scheduler_config.max_num_batched_tokens, growth)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        start = time.perf_counter()
        self._running().warm_up()
        return CompilationTimes(language_model=time.perf_counter() - start, encoder=0.0)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    # Steps

    def execute_model(self, scheduler_output: "SchedulerOutput") -> "ModelRunnerOutput | None":
        for new in scheduler_output.scheduled_new_reqs:
            sampling.refuse_unsupported(new.sampling_params)
        return self._running().execute(scheduler_output)

    def sample_tokens(self, grammar_output: "GrammarOutput | None") -> "AsyncModelRunnerOutput | ModelRunnerOutput":
        if grammar_output is not None:
            raise IsojaxError("structured output reached the worker: it is refused when a request comes in")
        output = self._running().sample()
        return output if self.scheduler_config.async_scheduling else output.get_output()

    def execute_dummy_batch(self) -> None:
        pass

    def take_draft_token_ids(self) -> None:
        return None

    def synchronize_device(self) -> None:
        if self.runner is not None:
            self.runner.synchronize()

    def _running(self) -> Runner:
        if self.runner is None:
            raise WeightsError("the engine sleeps: call wake_up() first")
        return self.runner

    # Weights

    def sleep(self, level: int = 1) -> None:
        """Frees pages, and weights: level 1 keeps them on the host, level 2 drops them."""
        self._running().release()
        self.weights.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Brings back weights and pages; pages only once there are weights to fill them with."""
        if tags is None or "weights" in tags:
            self.weights.wake()
        if tags is None or "kv_cache" in tags:
            if not self.weights.awake:
                raise WeightsError(
                    "sleep(level=2) dropped the weights: call wake_up(tags=['weights']), update_weights with all of"
                    " them, then wake_up(tags=['kv_cache'])"
                )
            self._running().restore()

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            self._running().release()

    def replace_weights(self, params: Any, digests: dict[str, str] | None = None) -> int:
        """Exchanges all weights (in-process: arrays by reference); returns the new version."""
        return self.weights.update(params, digests)

    def replace_weights_from(self, path: str, digests: dict[str, str]) -> int:
        """Exchanges all weights with those of a file that `LLM.update_weights` wrote; returns the new version."""
        return self.weights.update(served.read_written(Path(path)), digests)

    def init_weight_transfer_engine(self, init_info: dict[str, Any] | None = None) -> None:
        pass  # Weights come by path or by reference: there is no channel to open.

    def shutdown_weight_transfer_engine(self) -> None:
        pass

    def start_weight_update(self) -> None:
        self.weights.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes tensors of an open update: `{"params": nested arrays}` in-process, or `{"path": checkpoint folder}`."""
        unknown = update_info.keys() - {"params", "path"}
        if unknown or len(update_info) != 1:
            raise WeightsError(f"update_info holds {sorted(update_info)}: give either 'params' or 'path'")
        params = update_info.get("params")
        self.weights.stage(served.read_checkpoint(update_info["path"], self.model.config) if params is None else params)

    def finish_weight_update(self) -> int:
        """Exchanges the weights when all tensors came; returns the new version."""
        return self.weights.finish()

    def weights_version(self) -> int:
        return self.weights.version

    def weights_digest(self) -> str:
        return self.weights.digest

    def weights_digests(self) -> dict[str, str]:
        return self.weights.digests

    def compute_weight_checksums(self) -> dict[str, str]:
        """Fingerprints of the weights as they lie on the device now, whatever their update said."""
        return digests(self.weights.params)

    # What vLLM may ask of any worker

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **_: Any) -> None:
        import jax

        if is_start:
            jax.profiler.start_trace(profile_prefix or "isojax_profile")
        else:
            jax.profiler.stop_trace()

    def add_lora(self, lora_request: Any) -> bool:
        return False

    def remove_lora(self, lora_id: int) -> bool:
        return False

    def pin_lora(self, lora_id: int) -> bool:
        return False

    def list_loras(self) -> set[int]:
        return set()

    def shutdown(self) -> None:
        self.runner = None
