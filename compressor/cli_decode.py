"""The commands that run a bundle: `compress generate` and `compress serve`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from compressor.cli_output import Json, Output
from compressor.errors import UsageError

BundleFolder = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.", show_default=False)]
Proposer = Annotated[
    str,
    typer.Option(
        help="ngram, suffix, mtp, draft:FOLDER, medusa:FOLDER, eagle3:FOLDER (no folder: the bundle's own), or none."
    ),
]
Length = Annotated[str, typer.Option("--k", metavar="N|auto", help="Tokens drafted a cycle; auto finds what pays.")]
Branching = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…", help="Draft a tree: children a node, level by level; at most k levels.", show_default="a chain"
    ),
]
Rule = Annotated[str, typer.Option(help="exact, or typical: Medusa's acceptance, which CHANGES the law of the output.")]
Kernel = Annotated[str, typer.Option(help="auto, cpu-int4, or dequantized; also of a draft model.")]


def generate(
    bundle: BundleFolder,
    prompt: Annotated[str, typer.Option(help="What to continue or answer.", show_default=False)],
    proposer: Proposer = "ngram",
    k: Length = "3",
    branching: Branching = None,
    rule: Rule = "exact",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Top-k sampling.", show_default="off")] = None,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling, in (0, 1].")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest; 0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repetition; 1 is off.")] = 1.0,
    json_schema: Annotated[
        Path | None, typer.Option(help="JSON Schema file the answer must satisfy.", show_default=False)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression the answer must match.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
    kernel: Kernel = "auto",
    json_file: Json = None,
) -> None:
    """Generate text from a bundle's packed weights, speculatively; the text goes to stdout as it is written."""
    from compressor import generation

    output = Output(json_file)
    settings = generation.settings(proposer, k, branching, rule, kernel)
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    if json_schema is not None and regex is not None:
        raise UsageError("--json-schema and --regex: an answer obeys one grammar; leave one out")
    stream = sys.stderr if json_file == "-" else sys.stdout
    answer = generation.generate(
        bundle,
        prompt,
        settings,
        sampling,
        max_new_tokens=max_new_tokens,
        json_schema=json_schema,
        regex=regex,
        seed=seed,
        raw=raw,
        write=lambda text: print(text, end="", file=stream, flush=True),
    )
    print(file=stream)
    output.result(answer)
    print(generation.statistics(answer), file=sys.stderr)
    if answer["stop"] == "length" and (json_schema is not None or regex is not None):
        print(f"warning: cut at {max_new_tokens} tokens, before the grammar was complete", file=sys.stderr)


def serve(
    bundle: BundleFolder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    proposer: Proposer = "ngram",
    k: Length = "3",
    branching: Branching = None,
    rule: Rule = "exact",
    max_batch: Annotated[int, typer.Option(min=1, help="Requests generated side by side; the others wait.")] = 16,
    model_name: Annotated[
        str | None, typer.Option(help="What requests call the model.  [default: the folder's name]", show_default=False)
    ] = None,
    kernel: Kernel = "auto",
) -> None:
    """Serve a bundle to OpenAI clients: completions and chat, streaming or not, until interrupted."""
    from compressor import generation
    from compressor.serve import run

    settings = generation.settings(proposer, k, branching, rule, kernel)
    run.serve(bundle, settings, host=host, port=port, max_batch=max_batch, model_name=model_name)
