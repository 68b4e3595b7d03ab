"""What one types. Each command imports what it needs when it runs, so that `--help` is quick."""

import time
from pathlib import Path
from typing import Annotated

import typer

from isojax.cli.output import closing, note, write_json
from isojax.errors import ConfigError, IsojaxError

app = typer.Typer(
    help="Rollouts and training that compute one floating-point function.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
contracts = typer.Typer(help="The documents that say which bits are promised.", no_args_is_help=True)
app.add_typer(contracts, name="contract")

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the result as JSON.")]
Numerics = Annotated[str, typer.Option(metavar="exact|native", help="native is the off switch: nothing is promised.")]
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command()
def doctor(json: JsonOption = None) -> None:
    """Device, versions, XLA flags, the vLLM build and the state of its plugin."""
    from isojax.cli.doctor import examine

    report = examine()
    for section, facts in report["facts"].items():
        for name, value in facts.items():
            typer.echo(f"{section:10} {name:26} {value}", err=True)
    write_json(json, report)
    if report["problems"]:
        raise IsojaxError("\n  ".join([f"{len(report['problems'])} problems:", *report["problems"]]))
    closing("doctor: everything that isojax needs is here")


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face folder.")],
    train: Annotated[str, typer.Option(metavar="AXIS=N,…", help="Parallelism of the trainer.")] = "tensor=1",
    rollout: Annotated[str, typer.Option(metavar="AXIS=N,…", help="Parallelism of the engine.")] = "tensor=1",
    numerics: Numerics = "exact",
    direct: Annotated[
        bool, typer.Option("--direct", help="Leave the engine out: only the model's own phases.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Compares trainer and engine bit for bit, on a user's checkpoint, over every way to run it."""
    from isojax.verify import verify as run

    start = time.perf_counter()
    report = run(
        checkpoint,
        numerics=numerics,
        train=parallelism(train),
        rollout=parallelism(rollout),
        engine=not direct,
        on_row=lambda row: note(f"{time.perf_counter() - start:5.0f} s  {row}"),
    )
    write_json(json, report.to_json())
    closing(str(report))
    report.raise_if_different()


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="e.g. optimizer.lr=2e-6")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, train nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")] = False,
    json: JsonOption = None,
) -> None:
    """Trains a policy on verifiable rewards with GRPO, every log-probability compared before each update."""
    from isojax.cli.train import train as run

    run(config, overrides or [], dry_run=dry_run, resume=resume, json=json)


@app.command(hidden=True)
def demo(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…")] = None, json: JsonOption = None
) -> None:
    """Trains the small policy in this repository; `runs/demo/report.html` shows it."""
    from isojax.cli.train import demo as run

    run(overrides or [], json=json)


@app.command(context_settings=PASS_THROUGH)
def serve(context: typer.Context, checkpoint: Annotated[str, typer.Argument(help="A Hugging Face folder.")]) -> None:
    """Serves a checkpoint over vLLM's OpenAI API; every flag of `vllm serve` passes through."""
    from rollout_bridge.serve import serve as run

    run(checkpoint, context.args)


@app.command()
def audit(
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="e.g. my_pkg.train:loss_fn")],
    json: JsonOption = None,
) -> None:
    """Traces a program, given what FUNCTION_args() beside it returns; names every float computed outside an op."""
    import sys

    from isojax.audit import audit as run
    from isojax.audit import load_target

    sys.path.insert(0, str(Path.cwd()))
    fn, args = load_target(target)
    report = run(fn, *args)
    write_json(json, report.to_json())
    closing(str(report))
    report.raise_if_findings()


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="FILE|RUN_A", help="A mismatch file, or a run's directory.")],
    second: Annotated[Path | None, typer.Argument(metavar="RUN_B")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Weights for a FILE; by default those of its run.")] = None,
    json: JsonOption = None,
) -> None:
    """The first differing op, layer and token: of a mismatch file, or between two runs."""
    from isojax.cli.diff import diff_file, diff_runs

    if second is None:
        report = diff_file(first, checkpoint)
    elif checkpoint is not None:
        raise ConfigError("--checkpoint goes with a mismatch file: two runs have their own")
    else:
        report = diff_runs(first, second)
    write_json(json, report.to_json())
    closing(str(report))
    if report.differs:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="RUN/step_N")],
    out: Annotated[Path, typer.Argument(help="The Hugging Face folder to make.")],
    dtype: Annotated[str, typer.Option(metavar="file|bfloat16|float32", help="file keeps the source's.")] = "file",
    json: JsonOption = None,
) -> None:
    """Writes a checkpoint of a run as a Hugging Face folder."""
    from isojax.cli.export import export as run

    if dtype not in ("file", "bfloat16", "float32"):
        raise ConfigError(f"--dtype is {dtype!r}: use file, bfloat16 or float32")
    report = run(checkpoint, out, dtype)
    write_json(json, report)
    bits = "every bit" if report["exported_digest"] == report["weights_digest"] else "rounded to the files' dtypes"
    closing(f"exported {report['parameters']:,} parameters of step {report['step']} to {out}: {bits}")


@contracts.command()
def show(
    name: Annotated[str, typer.Argument(help="exact, native, or the path of a .toml file")], json: JsonOption = None
) -> None:
    """Prints what a contract promises, op by op."""
    from isojax.cli.contract import show as run

    report = run(name)
    write_json(json, report)
    typer.echo(report["text"])


def parallelism(text: str) -> dict[str, int]:
    """`tensor=2,data=1` as a dict.

    Raises:
        ConfigError: If it is written in another way.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, degree = part.strip().partition("=")
        if axis not in ("data", "expert", "tensor") or not degree.isdigit() or not int(degree):
            raise ConfigError(f"parallelism {text!r}: write data=N, expert=N or tensor=N, separated by commas")
        axes[axis] = int(degree)
    return axes
