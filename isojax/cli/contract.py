"""What a contract promises, for a person to read."""

from typing import Any

from isojax.contract import load


def show(name: str) -> dict[str, Any]:
    """A contract as `document` (plain types), its `digest`, and `text`."""
    contract = load(name)
    document = contract.document.model_dump(mode="json")
    lines = [f"{contract.name} ({document['mode']}), document {contract.digest}", ""]
    for op, fields in document["ops"].items():
        lines.append(f"{op}: {fields['computes']}")
        lines.append(f"  runs in {', '.join(fields['phases'])}")
        if fields["numerics"]:
            lines.append("  " + ", ".join(f"{key}={value}" for key, value in fields["numerics"].items()))
        lines += [f"  {region}: {_said(rules)}" for region, rules in fields["regions"].items()]
    for claim in document["claims"]:
        over = "; ".join(f"{key} in {values}" for key, values in claim["over"].items())
        lines += ["", f"guarantee {claim['name']}: {over}", *(f"  proof: {proof}" for proof in claim["proofs"])]
    return {"name": contract.name, "digest": contract.digest, "document": document, "text": "\n".join(lines)}


def _said(rules: dict[str, Any]) -> str:
    """A region's rules in one line; what is not set is not said."""
    words = {
        "sums": f"adds {rules['sums']}",
        "order": "by " + ", then ".join(rules["order"]),
        "adds_in": f"in {rules['adds_in']}",
        "rounds_to": f"rounds to {rules['rounds_to']}",
        "backward": "backward only",
        "blocks": "blocks of " + ", ".join(f"{size} {axis}" for axis, size in rules["blocks"].items()),
    }
    return "; ".join(words[key] for key, value in rules.items() if value and value != "nothing")
