"""What trainer and engine promise each other: documents, program digests, the exchange of identities."""

from isojax.contract.contract import Contract, Probe
from isojax.contract.deployment import deployment_facts
from isojax.contract.document import Claim, Document, Op, Region
from isojax.contract.documents import load, names
from isojax.contract.flags import refuse_rounding_flags
from isojax.contract.identity import Identity, exchange
from isojax.contract.programs import gradient_digest, program, program_digest

__all__ = [
    "Claim",
    "Contract",
    "Document",
    "Identity",
    "Op",
    "Probe",
    "Region",
    "deployment_facts",
    "exchange",
    "gradient_digest",
    "load",
    "names",
    "program",
    "program_digest",
    "refuse_rounding_flags",
]
