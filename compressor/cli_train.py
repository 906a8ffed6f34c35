"""The commands about proposer heads: `compress train`, `heal`, `lower-head` and `check-head`."""

from pathlib import Path
from typing import Annotated

import typer

from compressor.cli_output import Json, Output
from compressor.errors import UsageError
from compressor.recipe_training import LOWER

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key, as in quantization.format=nvfp4."),
]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="Bundle or checkpoint folder.", show_default=False)]
Head = Annotated[Path, typer.Argument(metavar="HEAD", help="The EAGLE-3 head's folder.", show_default=False)]
Work = Annotated[
    Path | None, typer.Option(help="Folder of the job's state.  [default: <out>.work]", show_default=False)
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the job in --work.")]


def train(
    recipe: RecipeFile,
    out: Annotated[
        Path | None, typer.Option(help="The head's folder.  [default: head-<recipe name>]", show_default=False)
    ] = None,
    work: Work = None,
    overrides: Overrides = None,
    resume: Resume = False,
    offline: Annotated[bool, typer.Option("--offline", help="Use only what is on this machine.")] = False,
    json_file: Json = None,
) -> None:
    """Train the proposer of a recipe on what its target writes, and export it; quantizes nothing. Started by
    torchrun or accelerate, processes share the training."""
    from compressor.recipe import Recipe
    from compressor.train import curve, processes, run
    from compressor.ui import NullUI, RichUI

    output = Output(json_file)
    job = Recipe.load(recipe, overrides or ())
    place = out if out is not None else Path(f"head-{job.name}")
    ui = RichUI() if processes.is_first() else NullUI()
    passport = run.train(job, place, work or _work(place), ui, resume=resume, offline=offline)
    if passport is None:
        return
    output.result({"head": str(place), "passport": passport.model_dump(mode="json")})
    output.line(_summary(place, passport.check.conditional, passport.check.tau))
    gain = curve.last_doubling(passport.training["history"])  # type: ignore[arg-type]
    if gain is not None:
        output.line(f"{place}: the last doubling of tokens was worth {gain:+.2f} tokens a cycle on held-out documents")


def heal(
    target: Target,
    head: Head,
    out: Annotated[Path, typer.Option(help="The healed head's folder.", show_default=False)],
    work: Work = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of the optimizer, a fifth of them of warm-up at most.", show_default="200"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-9, max=1.0, help="Largest learning rate.", show_default="0.0002")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=40_000,
            help="Prompts that the target answers; an eighth, at most 128, are held out.",
            show_default="2000",
        ),
    ] = None,
    self_written: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the prompts that the target, a chat model, writes.  [default: as in the head's training]",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    resume: Resume = False,
    json_file: Json = None,
) -> None:
    """Fine-tune an EAGLE-3 head on a quantized target's own answers, states and distribution."""
    from compressor.recipe import Heal
    from compressor.train import run
    from compressor.train.passport import HeadPassport
    from compressor.ui import RichUI

    output = Output(json_file)
    spec = Heal()
    optimization = {key: value for key, value in (("steps", steps), ("rate", rate)) if value is not None}
    if steps is not None:
        optimization["warmup"] = min(spec.optimization.warmup, steps // 5)
    if self_written is None:
        described = HeadPassport.load(head)
        self_written = 0.0 if described is None else described.self_written
    answers: dict[str, float] = {"self_written": self_written}
    if count is not None:
        answers |= {"count": count, "held_out": min(spec.answers.held_out, max(1, count // 8))}
    spec = Heal(
        answers=spec.answers.model_copy(update=answers), optimization=spec.optimization.model_copy(update=optimization)
    )
    passport = run.heal(target, head, out, work or _work(out), spec, RichUI(), seed=seed, resume=resume)
    output.result({"head": str(out), "passport": passport.model_dump(mode="json")})
    output.line(_summary(out, passport.check.conditional, passport.check.tau))


def lower_head(
    target: Target,
    head: Head,
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(LOWER)}.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the head in that precision.", show_default=False)],
    max_loss: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.99,
            help="Share of accepted tokens it may lose.",
            show_default="0.05; 4 bits need a stated one",
        ),
    ] = None,
    json_file: Json = None,
) -> None:
    """Round an EAGLE-3 head's linears to fewer bits and measure on a target what that costs; exits 1 where it costs
    more than --max-loss."""
    from compressor.train import run
    from compressor.ui import RichUI

    output = Output(json_file)
    found = run.lower(target, head, out, precision, max_loss, RichUI())
    output.result({"head": str(out), **found})
    for place, key in ((head, "before"), (out, "after")):
        output.line(_summary(place, found[key]["conditional"], found[key]["tau"]))


def check_head(target: Target, head: Head, json_file: Json = None) -> None:
    """Measure a head's acceptance for a target and compare it with its passport; of an EAGLE-3 head see too whether the
    states one layer off suit it better. Exits 1 on a fault. A folder without a passport is taken for an EAGLE-3
    head."""
    from compressor.checkpoint.tokenizer import load_tokenizer
    from compressor.decode import engine
    from compressor.train import check
    from compressor.train.passport import HeadPassport, refuse_changed
    from compressor.ui import RichUI

    output = Output(json_file)
    if not head.is_dir():
        raise UsageError(f"{head}: no such folder; give the one that holds the head's config.json and weights")
    passport = HeadPassport.load(head)
    if passport is not None:
        refuse_changed(head, passport)
    recorded = None if passport is None else passport.check.tau
    kind = "eagle3" if passport is None else passport.kind
    ui, tokenizer, decoder = RichUI(), load_tokenizer(target), engine.decoder(target)
    finding = check.check(
        *(kind, head, decoder, target, check.usual_prompts(tokenizer)),
        recorded=recorded,
        recorded_expected=None if passport is None else passport.expected_acceptance,
        texts=check.texts_of(decoder, tokenizer, ui) if kind == "eagle3" else (),
        ui=ui,
    )
    found = {"head": str(head), "measured": finding.measured, "recorded_tau": recorded, "fault": finding.fault}
    output.result(found | ({} if finding.examined is None else {"examined": finding.examined.summary()}))
    check.refuse(head, finding)
    against = "" if recorded is None else f"; {recorded:.2f} recorded"
    output.line(_summary(head, finding.measured["conditional"], finding.measured["tau"]) + against)
    if finding.examined is not None:
        output.line(f"{head}: {finding.examined}")


def _work(out: Path) -> Path:
    return out.with_name(out.name + ".work")


def _summary(head: Path, conditional: list[float | None], tau: float) -> str:
    rates = " ".join("–" if rate is None else f"{rate:.3f}" for rate in conditional)
    return f"{head}: acceptance {rates}, {tau:.2f} tokens a cycle on the check's prompts"
