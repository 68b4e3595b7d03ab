"""A training run as a TOML file: every key known, every violation told at once."""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isojax.errors import ConfigError
from isojax.rl.packing import GRADIENT_GROUP
from isojax.rl.tasks import Jsonl, ReasoningGym, Task
from isojax.sampling import Sampling


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Policy(_Section):
    """The model that learns."""

    checkpoint: Path
    numerics: Literal["exact", "native"] = "exact"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class TaskSource(_Section):
    """What it learns: a reasoning-gym data set, or a file with a reward function."""

    reasoning_gym: str | None = None
    options: dict[str, Any] = {}
    size: int = Field(4096, ge=1)
    seed: int = 0
    jsonl: Path | None = None
    reward: str | None = None
    question: str = "question"
    template: str = "{question}"
    chat: bool = False
    held_out: int = Field(200, ge=1)
    held_out_seed: int = 1_000_003

    def build(self) -> Task:
        """The task to train on; held-out questions are not among its items."""
        if self.jsonl is not None:
            return Jsonl(self.jsonl, self.reward or "", self.question)
        excluded = frozenset(item["question"] for item in self.build_held_out().items)
        return self._gym(self.size, self.seed, excluded)

    def build_held_out(self) -> Task:
        """The fixed items that a policy is measured on. Only a generator can make them."""
        if self.reasoning_gym is None:
            raise ConfigError("task.jsonl has no held-out items: measure on a second file")
        return self._gym(self.held_out, self.held_out_seed, frozenset())

    def _gym(self, size: int, seed: int, exclude: frozenset[str]) -> ReasoningGym:
        return ReasoningGym(self.reasoning_gym or "", size, seed, self.options, self.template, exclude)


class Sampler(_Section):
    """How completions are drawn."""

    n: int = Field(8, ge=2)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, lt=1)
    max_tokens: int = Field(ge=1)
    stop: list[str] = []

    @property
    def truncated(self) -> bool:
        """Whether words can be left out."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p).truncated


class Engine(_Section):
    """The vLLM engine."""

    max_model_len: int = Field(2048, ge=2)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = Field(0.35, gt=0, le=1)
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    enable_prefix_caching: bool = True
    seed: int = 0


class Loss(_Section):
    """GRPO's coefficients."""

    clip: float = Field(0.2, gt=0)
    clip_high: float | None = Field(None, gt=0)
    kl: float = Field(0.0, ge=0)
    entropy_bonus: float = 0.0
    scale_advantages: bool = True


class Optimizer(_Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    b1: float = Field(0.9, ge=0, lt=1)
    b2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0)


class Schedule(_Section):
    """How long and in what portions. `max_tokens`, `sequences` and `remat` change no bit."""

    steps: int = Field(100, ge=1)
    prompts: int = Field(32, ge=1)
    max_tokens: int = Field(16_384, ge=64)
    sequences: int | None = Field(None, ge=1)
    gradient_group: int = Field(GRADIENT_GROUP, ge=1)
    remat: bool = False
    seed: int = 0


class Output(_Section):
    """What a run leaves."""

    directory: Path = Path("runs/train")
    checkpoint_every: int = Field(100, ge=1)
    contrast: bool = False


class Config(_Section):
    """Everything that decides a run."""

    policy: Policy
    task: TaskSource
    sampling: Sampler
    engine: Engine = Engine()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    train: Schedule = Schedule()
    run: Output = Output()


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file, with dotted overrides such as `optimizer.lr=2e-6` on top.

    Relative paths are those of the working directory, as in any other command.

    Raises:
        ConfigError: With every violation at once: unknown keys and their nearest known name,
            wrong types, values out of range, and settings that do not go together.
    """
    try:
        tree = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    problems = [p for override in overrides if (p := _override(tree, override))]
    config = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_violation(e) for e in error.errors()]
    problems += _conflicts(config) if config else []
    if problems or config is None:
        raise ConfigError("\n  ".join([f"{path}: {len(problems)} violation{'s' * (len(problems) > 1)}", *problems]))
    return config


def _override(tree: dict[str, Any], override: str) -> str | None:
    """Sets one dotted key; returns what is wrong with it, if anything."""
    key, equals, text = override.partition("=")
    if not equals:
        return f"{override}: write section.key=value"
    *sections, last = key.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            return f"{key}: {section} is a value, not a section"
    tree[last] = parse_value(text)
    return None


def parse_value(text: str) -> Any:
    """The TOML value that `text` writes, or `text` itself where quotes were left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _violation(error: Any) -> str:
    *path, last = (str(part) for part in error["loc"])
    where = ".".join([*path, last])
    if error["type"] == "missing":
        return f"{where}: required"
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"
    section: Any = Config
    for part in path:
        section = section.model_fields[part].annotation
    near = difflib.get_close_matches(last, section.model_fields, n=1)
    return f"{where}: unknown key" + (f", did you mean {near[0]}?" if near else "")


def _conflicts(config: Config) -> list[str]:
    """Settings that are each fine and do not go together; and files that are not there."""
    task, train, problems = config.task, config.train, []
    if (task.reasoning_gym is None) == (task.jsonl is None):
        problems.append("task: name either reasoning_gym or jsonl")
    if task.jsonl is not None and task.reward is None:
        problems.append("task.reward: required with task.jsonl, as module:function")
    if task.jsonl is not None and not task.jsonl.is_file():
        problems.append(f"task.jsonl: no file {task.jsonl}")
    if not (config.policy.checkpoint / "config.json").is_file():
        problems.append(f"policy.checkpoint: no config.json in {config.policy.checkpoint}")
    for name, value in (("gradient_group", train.gradient_group), ("sequences", train.sequences)):
        if value is not None and value & (value - 1):
            problems.append(f"train.{name}: {value} is no power of two")
    if train.sequences is not None and train.sequences > train.gradient_group:
        problems.append(f"train.sequences: {train.sequences} is more than the gradient group, {train.gradient_group}")
    if config.loss.kl and config.sampling.truncated:
        problems.append(
            "loss.kl: a reference policy leaves out other words than the policy, and the divergence is infinite: set"
            " loss.kl=0, or sampling.top_k=0, sampling.top_p=1 and sampling.min_p=0"
        )
    if config.sampling.max_tokens >= config.engine.max_model_len:
        problems.append(
            f"sampling.max_tokens: {config.sampling.max_tokens} leaves no room for a prompt in"
            f" engine.max_model_len={config.engine.max_model_len}"
        )
    return problems
