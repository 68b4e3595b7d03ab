"""What peers compare before a token is used."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from isojax.contract.canonical import sha256
from isojax.errors import ContractError

_GROUPS = ("semantic", "numerical_policy", "deployment")
_REPLACED = "replaced ops"


@dataclasses.dataclass(frozen=True)
class Identity:
    """Fingerprint of a contract in a process, kept in parts so that a difference has a name.

    Attributes:
        contract: Name of the contract.
        semantic_parts: What is computed: model, dtype, the function of each op.
        policy_parts: In which order and precision: the document's words and the digests of each op's programs.
        deployment_parts: Device, versions and flags.
    """

    contract: str
    semantic_parts: Mapping[str, str]
    policy_parts: Mapping[str, str]
    deployment_parts: Mapping[str, str]

    @property
    def semantic(self) -> str:
        """SHA-256 of what is computed."""
        return sha256(dict(self.semantic_parts))

    @property
    def numerical_policy(self) -> str:
        """SHA-256 of in which order and precision."""
        return sha256(dict(self.policy_parts))

    @property
    def deployment(self) -> str:
        """SHA-256 of on what."""
        return sha256(dict(self.deployment_parts))

    @property
    def digest(self) -> str:
        """SHA-256 of all three."""
        return sha256([self.semantic, self.numerical_policy, self.deployment])

    def with_replaced(self, ops: Sequence[str]) -> "Identity":
        """This identity, of a process that runs other `ops` than the contract's; with any, `exchange` refuses it.

        It goes to the peer like any other, so that both sides can tell which ops these are.
        """
        return dataclasses.replace(self, policy_parts={**self.policy_parts, _REPLACED: ", ".join(ops)}) if ops else self

    def parts(self) -> dict[str, Mapping[str, str]]:
        """The parts under the names of the three digests."""
        return dict(zip(_GROUPS, (self.semantic_parts, self.policy_parts, self.deployment_parts), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Plain types, to be sent to a peer; `from_json` reads them."""
        return {
            "contract": self.contract,
            "digest": self.digest,
            **{group: dict(parts) for group, parts in self.parts().items()},
        }

    @classmethod
    def from_json(cls, plain: Any) -> "Identity":
        """The identity that a peer sent.

        Raises:
            ContractError: If something is absent, or the parts do not have the digest that came with them.
        """
        wanted = {"contract", "digest", *_GROUPS}
        if not isinstance(plain, Mapping) or set(plain) != wanted:
            came = ", ".join(sorted(map(str, plain))) if isinstance(plain, Mapping) else type(plain).__name__
            raise ContractError(f"an identity has {', '.join(sorted(wanted))}; the peer sent {came}")
        groups = [plain[group] for group in _GROUPS]
        if not all(isinstance(g, Mapping) and g and all(isinstance(v, str) for v in g.values()) for g in groups):
            raise ContractError("an identity has parts in words; the peer sent empty or other ones")
        identity = cls(str(plain["contract"]), *groups)
        if identity.digest != plain["digest"]:
            raise ContractError(
                f"the peer's identity has the digest {identity.digest[:12]}, it says {str(plain['digest'])[:12]}:"
                " it was cut or changed on the way"
            )
        return identity


def exchange(mine: Identity, theirs: Any, *, sides: tuple[str, str] = ("trainer", "engine")) -> str:
    """Compares two identities and refuses all but equal ones.

    Args:
        mine: This process's.
        theirs: The peer's, as an `Identity` or as its JSON; None is refused like any other difference.
        sides: What the two are called.

    Returns:
        The digest that both have.

    Raises:
        ContractError: Names the first part that differs, with both values, or the ops that a side replaced.
    """
    if theirs is None:
        raise ContractError(f"{sides[1]} sent no identity: it runs without a contract, which {sides[0]} refuses")
    theirs = theirs if isinstance(theirs, Identity) else Identity.from_json(theirs)
    for side, identity in zip(sides, (mine, theirs), strict=True):
        if ops := identity.policy_parts.get(_REPLACED):
            raise ContractError(
                f"{side} does not run the ops of contract {identity.contract}: {ops} replaced; bind the contract and"
                " leave its ops as they are"
            )
    other = theirs.parts()
    for group, parts in mine.parts().items():
        for name in [*parts, *(n for n in other[group] if n not in parts)]:
            values = [side.get(name, "absent") for side in (parts, other[group])]
            if values[0] != values[1]:
                shown = ", ".join(f"{side} {_short(v)}" for side, v in zip(sides, values, strict=True))
                raise ContractError(
                    f"{sides[0]} and {sides[1]} do not keep one contract: {group} differs at {name}: {shown}"
                    f" (contracts {mine.contract} and {theirs.contract}): {_ADVICE[group]}"
                )
    return mine.digest


_ADVICE = {
    "semantic": "load one checkpoint and one contract on both sides",
    "numerical_policy": "install one version of isojax and bind one contract on both sides, on one kind of device",
    "deployment": "use one kind of device, one set of versions and one set of flags on both sides",
}


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value
