"""The `compress` command: each subcommand parses its options, calls one function of the package, and prints.

Exit codes: 0 success, 1 the work failed or a check did not hold, 2 bad usage or recipe, 130 interrupted.
"""

import difflib
import errno
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from compressor import cli_decode, cli_train
from compressor.cli_decode import BundleFolder
from compressor.cli_output import Json, Output, write
from compressor.cli_train import Overrides, RecipeFile
from compressor.errors import CompressError, UsageError

DEFAULT_COMMAND = "run"
RESUMABLE = (DEFAULT_COMMAND, "train", "heal")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class Commands(TyperGroup):
    """Runs recipes without a command name, and turns the errors a user can cause into one line and an exit code.

    Anything else (a programming error) keeps its traceback.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A first argument that is neither a command nor one of our options begins a recipe's command line."""
        own_options = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and args[0] not in self.commands and args[0] not in own_options:
            first = args[0]
            if not first.startswith("-") and not first.endswith((".yaml", ".yml")) and not Path(first).exists():
                ctx.fail(self._unknown(first))
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def _unknown(self, word: str) -> str:
        near = difflib.get_close_matches(word, list(self.commands), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"commands: {', '.join(self.commands)}"
        return f"'{word}' is neither a command nor a recipe file; {hint}"

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except CompressError as error:
            _stop(" ".join(str(error).split()), error.exit_code)
        except KeyboardInterrupt:
            resumable = ctx.invoked_subcommand in RESUMABLE
            _stop("interrupted; continue with --resume" if resumable else "interrupted", 130)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read our output has seen enough: typer ends quietly
            _stop(_os_error(error), 1)
        return result


def _stop(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _os_error(error: OSError) -> str:
    """One line for an error of the operating system; a full disk names its remedy."""
    if error.errno in _FULL_DISK:
        writing = f" while writing {error.filename}" if error.filename else ""
        return f"no space left on device{writing}: free space or choose another place"
    if error.errno is None or error.strerror is None:
        return " ".join(str(error).split()) or type(error).__name__
    place = f"{error.filename}: " if error.filename else ""
    return place + error.strerror[:1].lower() + error.strerror[1:]


app = typer.Typer(
    cls=Commands,
    help="Quantize a language model, re-measure its speculative acceptance, and ship a signed bundle.\n\n"
    "compress RECIPE.yaml runs a recipe; the commands below do the rest.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    subcommand_metavar="RECIPE.yaml | COMMAND [ARGS]...",
)


def _version(asked: bool) -> None:
    if asked:
        import compressor

        print(f"compress {compressor.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    recipe: RecipeFile,
    work: Annotated[
        Path | None, typer.Option(help="Folder of the job's state.  [default: <out>.work]", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The bundle's folder.  [default: bundle-<recipe name>]", show_default=False)
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the job in --work.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Use only what is on this machine.")] = False,
    json_file: Json = None,
) -> None:
    """Run a recipe from source to signed bundle; the word run may be left out."""
    import compressor
    from compressor import tables
    from compressor.recipe import Recipe
    from compressor.ui import RichUI

    output = Output(json_file)
    job = Recipe.load(recipe, overrides or ())
    bundle = compressor.compress(job, out, work=work, resume=resume, ui=RichUI(), offline=offline)
    output.result({"bundle": str(bundle.path), "passport": bundle.passport.model_dump(mode="json")})
    tables.outcome(output.console(), bundle)


@app.command()
def plan(recipe: RecipeFile, overrides: Overrides = None, json_file: Json = None) -> None:
    """Say what a recipe would do: tensors, bytes, memory, time. Downloads and changes nothing."""
    from compressor import plan as planning
    from compressor import tables
    from compressor.recipe import Recipe

    output = Output(json_file)
    made = planning.make(Recipe.load(recipe, overrides or ()))
    output.result(made.to_dict())
    tables.plan(output.console(), made)


@app.command()
def schema(json_file: Json = None) -> None:
    """Print the JSON Schema of recipes."""
    from compressor.recipe import shipped_schema

    text = shipped_schema()
    if json_file in (None, "-"):
        sys.stdout.write(text)
    else:
        Output(json_file).result(json.loads(text))


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Checkpoint folder, bundle or .gguf file.", show_default=False)],
    json_file: Json = None,
) -> None:
    """Show a checkpoint's tensors, bytes, MTP modules and number format."""
    from compressor import inspection, tables

    output = Output(json_file)
    found = inspection.inspect(path)
    output.result(found)
    tables.inspection(output.console(), found)


app.command()(cli_decode.generate)
app.command()(cli_decode.serve)
app.command()(cli_train.train)
app.command()(cli_train.heal)
app.command("check-head")(cli_train.check_head)
app.command("lower-head")(cli_train.lower_head)


@app.command()
def verify(
    bundle: BundleFolder,
    public_key: Annotated[
        Path | None, typer.Option(help="PEM file of the signer.  [default: your own key]", show_default=False)
    ] = None,
    json_file: Json = None,
) -> None:
    """Check a bundle's signature, files and passport; exits 1 naming every difference."""
    from compressor.bundle import Bundle

    output = Output(json_file)
    opened = Bundle.open(bundle)
    try:
        opened.verify(public_key)
    except CompressError as error:
        output.result({"bundle": str(bundle), "verified": False, "error": str(error)})
        raise
    output.result({"bundle": str(bundle), "verified": True, "error": None})
    output.line(f"{bundle}: verified: signature, files and passport agree")


@app.command()
def sign(
    bundle: BundleFolder,
    private_key: Annotated[
        Path | None, typer.Option(help="PEM file.  [default: your own key, made if missing]", show_default=False)
    ] = None,
    json_file: Json = None,
) -> None:
    """Sign a bundle anew, replacing its signature."""
    from compressor.bundle import Bundle, signing

    output = Output(json_file)
    Bundle.open(bundle)  # refuses a folder that is no bundle
    private, public = signing.resolve_keys(private_key)
    signature = signing.sign(bundle, private)
    output.result({"bundle": str(bundle), "signature": str(signature), "public_key": str(public)})
    output.line(f"{signature}: signed; verify with --public-key {public}")


@app.command()
def report(
    bundle: BundleFolder,
    out: Annotated[
        Path | None, typer.Option(help="File to write.  [default: report-<bundle's folder>.html]", show_default=False)
    ] = None,
    json_file: Json = None,
) -> None:
    """Render a bundle's passport as one self-contained HTML page, outside the bundle."""
    from compressor.bundle import Bundle
    from compressor.bundle import report as reports

    output = Output(json_file)
    passport = Bundle.open(bundle).passport
    page = out if out is not None else Path(f"report-{bundle.resolve().name}.html")
    if bundle.resolve() in page.resolve().parents:
        raise UsageError(f"--out {page}: lies in the bundle, whose signature it would break; choose another place")
    write(page, reports.render(passport))
    output.result({"bundle": str(bundle), "report": str(page), "outcomes": passport.outcomes.model_dump(mode="json")})
    output.line(f"report: {page}")


@app.command()
def doctor(json_file: Json = None) -> None:
    """Show this machine's devices, kernels and keys, and what would run natively."""
    from compressor import doctor as examination

    output = Output(json_file)
    found = examination.examine()
    output.result(found)
    for text in examination.lines(found):
        output.line(text)


def main() -> None:
    """Console entry point."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without × still gets its table
    try:
        app(prog_name="compress")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
