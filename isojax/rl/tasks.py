"""Tasks with rewards that can be verified: prompts, and what an answer is worth."""

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from isojax.errors import ConfigError

type Item = Mapping[str, Any]
type Reward = Callable[[str, Item], float]


@runtime_checkable
class Task(Protocol):
    """What a policy is trained on."""

    @property
    def items(self) -> Sequence[Item]:
        """Everything that can be asked, in an order that does not change."""
        ...

    def prompt(self, item: Item) -> str:
        """What the policy is asked."""
        ...

    def verify(self, text: str, item: Item) -> float:
        """The reward of an answer: finite, and the same each time."""
        ...


@dataclasses.dataclass(frozen=True)
class ReasoningGym:
    """A data set of `reasoning-gym`, generated from a seed, with its own verifier.

    Many of its verifiers give partial credit for wrong answers (0.01 to 0.25): only a full score
    is a reward here.

    Attributes:
        name: Its name there, e.g. `"chain_sum"`.
        size: Number of items.
        seed: Items of different seeds are different draws of one distribution, not disjoint.
        options: Passed to the generator.
        template: How a question becomes a prompt.
        exclude: Questions that are left out, so that training does not see held-out items.
    """

    name: str
    size: int = 1024
    seed: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template: str = "{question}"
    exclude: frozenset[str] = frozenset()

    @functools.cached_property
    def _dataset(self):
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self.name, size=self.size, seed=self.seed, **self.options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"reasoning-gym refuses {self.name} with {dict(self.options)}: {error}") from error

    @functools.cached_property
    def items(self) -> Sequence[Item]:
        return [item for item in self._dataset if item["question"] not in self.exclude]

    def prompt(self, item: Item) -> str:
        return self.template.format(question=item["question"])

    def verify(self, text: str, item: Item) -> float:
        return float(self._dataset.score_answer(text.strip(), dict(item)) >= 1.0)


@dataclasses.dataclass(frozen=True)
class Jsonl:
    """Items from a file of JSON lines, graded by a function of the user.

    Attributes:
        path: One object a line.
        reward: `"module:function"`, or the function itself: takes the text and the row, returns the reward.
        question: The key that holds the prompt.
    """

    path: Path
    reward: str | Reward
    question: str = "question"

    @functools.cached_property
    def items(self) -> Sequence[Item]:
        rows = []
        for number, line in enumerate(Path(self.path).read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{self.path}:{number} is not JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get(self.question), str):
                raise ConfigError(f"{self.path}:{number} has no text under {self.question!r}: name the key")
            rows.append(row)
        if not rows:
            raise ConfigError(f"{self.path} has no rows")
        return rows

    @functools.cached_property
    def _reward(self) -> Reward:
        return load_function(self.reward) if isinstance(self.reward, str) else self.reward

    def prompt(self, item: Item) -> str:
        return item[self.question]

    def verify(self, text: str, item: Item) -> float:
        return float(self._reward(text, item))


def load_function(name: str) -> Callable[..., Any]:
    """The function that `"module:function"` names; the working directory counts, as for `python -m`.

    Raises:
        ConfigError: If there is none.
    """
    import sys

    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} names no function: write module:function ({error})") from error
    if not callable(function):
        raise ConfigError(f"{name!r} is a {type(function).__name__}, not a function")
    return function
