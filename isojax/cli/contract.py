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
        for region, rules in fields["regions"].items():
            rules = {key: value for key, value in rules.items() if value not in (None, "", [], {})}
            lines.append(f"  {region}: " + "; ".join(f"{key} {value}" for key, value in rules.items()))
    for claim in document["claims"]:
        over = "; ".join(f"{key} in {values}" for key, values in claim["over"].items())
        lines += ["", f"guarantee {claim['name']}: {over}", *(f"  proof: {proof}" for proof in claim["proofs"])]
    return {"name": contract.name, "digest": contract.digest, "document": document, "text": "\n".join(lines)}
