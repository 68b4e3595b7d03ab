"""`vllm.LLM` over our worker: the same methods, log-probabilities always attached, weights exchanged whole."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rollout_bridge import platform

platform.use()

import vllm  # noqa: E402  The platform is chosen before.
import vllm.envs  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from vllm import RequestOutput, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from isojax.contract import Identity, exchange  # noqa: E402
from isojax.errors import ConfigError, IsojaxError, SamplingError, WeightsError  # noqa: E402
from qwen35_moe import identity  # noqa: E402
from rollout_bridge import memory, sampling, served  # noqa: E402

_COLOCATED, _ALONE = 0.35, 0.9
_CPU_SEQS, _CPU_TOKENS = 32, 1024  # vLLM's 256 and 8,192 compile twice as many programs as a CPU has use for.


class LLM(vllm.LLM):
    """The rollout engine: `vllm.LLM` whose tokens have the trainer's log-probabilities, bit for bit.

    Every output carries the log-probability of each sampled token, the version of the weights that sampled it, and as
    `output.sampling_params` the distribution it was drawn from. A token depends on (engine seed, weights version,
    request, sample, position) alone, or on (request seed, sample, position), never on its company.

    Args:
        model: A `Qwen35Moe` of this process, whose arrays the engine shares (the engine runs in this process then),
            or the path of a checkpoint.
        tokenizer: Where the tokenizer is; by default the checkpoint's, none if it has none.
        gpu_memory_utilization: The engine's share of the device's memory; by default 0.35 beside a trainer, else 0.9.
        seed: Engine seed.
        numerics: "exact" or "native": the contract that a checkpoint is served with.
        **options: As `vllm.LLM` takes them. Defaults on a CPU: `max_num_seqs` 32, `max_num_batched_tokens` 1,024.

    Raises:
        ConfigError, ShardingError: If the engine cannot do what is asked, before weights load.
        WeightsError: If a checkpoint is incomplete or of another model.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: str | None = None,
        gpu_memory_utilization: float | None = None,
        seed: int = 0,
        numerics: str = "exact",
        **options: Any,
    ):
        self._sampling: dict[str, SamplingParams] = {}
        self._asleep = False
        colocated = not isinstance(model, str | os.PathLike)
        extra = dict(options.pop("additional_config", None) or {})
        vllm.envs.disable_envs_cache()  # An engine of this process may have frozen what vLLM reads of it.
        with contextlib.ExitStack() as stack:
            if colocated:
                folder, tokenizer = _folder(model, tokenizer, stack)
                extra["isojax_model"] = served.offer(model)
                options.setdefault("dtype", model.config.compute_dtype)
                stack.enter_context(_environment("VLLM_ENABLE_V1_MULTIPROCESSING", "0"))
            else:
                folder = Path(model)
                extra["numerics"] = numerics
            if not memory.is_gpu():
                seqs = options.setdefault("max_num_seqs", _CPU_SEQS)
                options.setdefault("max_num_batched_tokens", max(_CPU_TOKENS, seqs))
            options.setdefault("skip_tokenizer_init", not _has_tokenizer(Path(tokenizer or folder)))
            settings = {
                "model": str(folder),
                "tokenizer": tokenizer,
                "gpu_memory_utilization": gpu_memory_utilization or (_COLOCATED if colocated else _ALONE),
                "seed": seed,
                "additional_config": extra,
                "generation_config": "vllm",
                "logprobs_mode": "processed_logprobs",
                "enable_prefix_caching": True,
                "enable_sleep_mode": True,
            }
            try:
                super().__init__(**(settings | options))
            except ValidationError as error:
                raise _refusal(error) from None
        self.llm_engine.set_weight_version("0")
        self._agreed = False
        if colocated:
            self.agree(model)

    @property
    def identity(self) -> Identity:
        """What the engine computes, in which order and precision, and on what."""
        return Identity.from_json(self._ask("identity"))

    def agree(self, model: Any) -> str:
        """Compares the trainer's identity with the engine's, before a token is used.

        Called with the model that an engine starts with, and with the first that it is updated to.

        Args:
            model: The trainer's `Qwen35Moe`.

        Returns:
            The digest that both have.

        Raises:
            ContractError: If they differ; names the first part that does.
        """
        digest = exchange(identity(model.config, model.ops), self.identity)
        self._agreed = True
        return digest

    @property
    def weights_version(self) -> int:
        """Number of weight updates so far."""
        return self._ask("weights_version")

    @property
    def weights_digest(self) -> str:
        """SHA-256 over the fingerprints of all rollout weights (`rollout_bridge.weights`)."""
        return self._ask("weights_digest")

    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every weight as it lies on the device now, by name (`rollout_bridge.weights.digests`)."""
        return self._ask("compute_weight_checksums")

    def get_default_sampling_params(self) -> SamplingParams:
        raise SamplingError("sampling_params is required: pass SamplingParams(max_tokens=…, temperature=…)")

    def beam_search(self, *args: Any, **kwargs: Any):
        raise SamplingError("beam search is not served: sample with n, or use temperature=0")

    def update_weights(self, model: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Exchanges all weights, or none; cached prefixes of the old ones are never used again.

        Args:
            model: A module or its nested parameters, float32; or vLLM's request `{"update_info": …}`, which takes
                part in an update that `start_weight_update` opened.

        Returns:
            The engine's weights version.

        Raises:
            WeightsError: If a tensor is missing, unknown or of another shape; weights and version stay what they were.
            ContractError: If `model` is the first module that comes and its contract is not the engine's.
        """
        request = model.get("update_info") if isinstance(model, Mapping) else getattr(model, "update_info", None)
        if request is not None:
            super().update_weights({"update_info": request})
            return self.weights_version
        if not isinstance(model, Mapping) and not self._agreed:
            self.agree(model)
        params = model if isinstance(model, Mapping) else model.params()
        if self._in_process:
            version = self._ask("replace_weights", params)
        else:
            with served.written(params) as (path, digests):
                version = self._ask("replace_weights_from", str(path), digests)
        self.llm_engine.set_weight_version(str(version))
        return version

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Closes an update in parts: all tensors came, or the update is refused and nothing changes."""
        version = self._ask("finish_weight_update")
        self.llm_engine.set_weight_version(weight_version or str(version))

    def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        """As `vllm.LLM.sleep`: level 0 pauses, 1 moves weights to the host, 2 drops them; 1 and 2 free all pages."""
        super().sleep(level, mode)
        self._asleep = True

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """As `vllm.LLM.wake_up`.

        Raises:
            WeightsError: If pages are asked back while weights that level 2 dropped are not: the engine sleeps on.
        """
        self._asleep = not super().wake_up(tags)
        return not self._asleep

    def close(self) -> None:
        """Frees the engine's memory; it cannot be used afterwards."""
        self.llm_engine.engine_core.shutdown()

    @property
    def _in_process(self) -> bool:
        return hasattr(self.llm_engine.engine_core, "engine_core")

    def _ask(self, method: str, *args: Any) -> Any:
        return self.collective_rpc(method, args=args)[0]

    # vLLM's generate, chat and enqueue all add requests and run the engine through these two.

    def _add_request(self, prompt: Any, params: Any, lora_request: Any = None, priority: int = 0) -> str:
        if lora_request is not None:
            raise SamplingError("LoRA is not served: merge the adapter into the weights")
        sampling.refuse_unsupported(params)
        params = cast(SamplingParams, params).clone()
        if params.max_tokens is None:
            raise SamplingError("max_tokens is required: without it a sample may end where memory does")
        if params.logprobs is None:
            params.logprobs = 0
            params.flat_logprobs = params.prompt_logprobs is None
        params.output_kind = RequestOutputKind.FINAL_ONLY
        request_id = str(next(self.request_counter))
        internal = self.llm_engine.add_request(request_id, prompt, params, priority=priority)
        self._sampling[request_id] = params
        return internal

    def _run_engine(self, *args: Any, **kwargs: Any) -> list[Any]:
        try:
            if self._asleep:
                raise WeightsError("the engine sleeps: call wake_up() first")
            outputs = super()._run_engine(*args, **kwargs)
        except BaseException:
            self._abort_all()  # What is left would run with the next call's requests.
            raise
        for output in outputs:
            if isinstance(output, RequestOutput):
                cast(Any, output).sampling_params = self._sampling.pop(output.request_id)
        return outputs

    def _abort_all(self) -> None:
        """Forgets every request, and steps of them that are still under way."""
        self._sampling.clear()
        self.llm_engine.abort_request(list(self.llm_engine.output_processor.request_states), internal=True)
        steps = cast(Any, self.llm_engine.engine_core).engine_core.batch_queue if self._in_process else None
        while steps:
            with contextlib.suppress(IsojaxError):
                self.llm_engine.step()


def _folder(model: Any, tokenizer: str | None, stack: contextlib.ExitStack) -> tuple[Path, str | None]:
    """A folder with the model's `config.json` for vLLM to read, and where the tokenizer is."""
    import json

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isojax_")))
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))
    source = getattr(model, "folder", None)
    return folder, tokenizer or (str(source) if source is not None and _has_tokenizer(Path(source)) else None)


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return not folder.is_dir() or any((folder / name).exists() for name in names)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _refusal(error: ValidationError) -> IsojaxError:
    """Our refusal that pydantic wrapped, or vLLM's as one of ours."""
    causes = [(found.get("ctx") or {}).get("error") for found in error.errors()]
    ours = [cause for cause in causes if isinstance(cause, IsojaxError)]
    return ours[0] if ours else ConfigError("; ".join(found["msg"] for found in error.errors()))
