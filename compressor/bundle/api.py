"""`Bundle`: a finished bundle in the hands of its user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from compressor.bundle import card, report, signing
from compressor.bundle.passport import FILE_NAME, Passport
from compressor.bundle.verify import verify
from compressor.errors import CompressError, UsageError, naming

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from compressor.decode.length import Length
    from compressor.decode.runner import Runner

REPORT, CARD = "report.html", "README.md"
WINDOW = ("prompt_lookup_min", "prompt_lookup_max")


class Bundle:
    """A bundle folder and its passport. Opening one checks neither signature nor tensors: that is `verify`."""

    def __init__(self, path: Path, passport: Passport):
        self.path = path
        self.passport = passport

    @classmethod
    def open(cls, path: str | os.PathLike) -> Self:
        """Raises CompressError naming the file for a folder without a readable passport."""
        return cls(Path(path), Passport.load(Path(path) / FILE_NAME))

    def verify(self, public_key: str | os.PathLike | None = None) -> None:
        """Check signature, file set and passport; see `compressor.bundle.verify.verify`.

        Args:
            public_key: PEM file; this user's own public key by default.
        """
        verify(self.path, public_key if public_key is not None else signing.own_public_key())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The bundle's tokenizer. Raises CompressError where transformers cannot make one from the files."""
        from compressor.checkpoint.tokenizer import load_tokenizer

        return load_tokenizer(self.path)

    def runner(
        self,
        proposer: str | None = "ngram",
        num_speculative_tokens: int | Length = 3,
        *,
        kernel: str = "auto",
        branching: Sequence[int] | None = None,
        rule: str = "exact",
    ) -> Runner:
        """The quantized target, loaded from its packed weights, behind the exact speculative runner.

        Args:
            proposer: `ngram` (with the passport's window), `suffix`, `mtp`,
                `draft:FOLDER`, `medusa:FOLDER`, `eagle3:FOLDER`, or `none`.
            num_speculative_tokens: tokens proposed a cycle, or a `compressor.decode.Adaptive` that decides.
            kernel: of target and draft model: `auto` takes the packed kernel where there is one; `cpu-int4` raises
                CompressError for a packed layer that it cannot run; `dequantized` makes plain matrices.
            branching: children a node, one number a level, for proposers that draft trees.
            rule: `exact`, or `typical` for Medusa's LOSSY acceptance.

        Raises UsageError, before anything is loaded, for an argument that is not one of these, a draft that is too
        large (`compressor.proposers.base.MAX_NODES`), or more levels than tokens a cycle.
        """
        from compressor.decode import engine
        from compressor.decode.runner import Runner
        from compressor.proposers import load

        choice = load.parse(proposer or "none", self.path, branching)
        check_settings(num_speculative_tokens, branching, rule, kernel)
        try:
            dtype = self.passport.target.torch_dtype()
        except CompressError as error:
            raise CompressError(f"{self.path / FILE_NAME}: {error}") from None
        decoder = engine.decoder(self.path, dtype=dtype, kernel=kernel)
        recorded = self.passport.proposer
        window = {key: recorded.settings[key] for key in WINDOW if isinstance(recorded.settings.get(key), int)}
        built = load.build(choice, decoder, self.path, window if recorded.kind == "ngram" else None, kernel=kernel)
        return Runner(decoder, built, num_speculative_tokens, rule)


def check_settings(
    num_speculative_tokens: int | Length, branching: Sequence[int] | None, rule: str, kernel: str
) -> None:
    """Refuse what `Bundle.runner` could not run, whichever bundle and proposer it is. Raises UsageError."""
    from compressor.decode.batch import check_rule
    from compressor.decode.length import Fixed
    from compressor.kernels.linear import check_kernel
    from compressor.proposers import load

    k = num_speculative_tokens
    if not isinstance(k, int) and not hasattr(k, "choose"):
        raise UsageError(
            f"num_speculative_tokens: {k!r} is neither an integer nor a length such as compressor.decode.Adaptive()"
        )
    load.check_size((Fixed(k) if isinstance(k, int) else k).limit, branching)
    check_rule(rule)
    check_kernel(kernel)


def finish(staging: str | os.PathLike, passport: Passport, private_key: str | os.PathLike) -> None:
    """Write passport.json, report.html and README.md into `staging`, then sign every file in it.

    The first three are the same bytes for the same passport and key; an ECDSA signature never is.
    Raises CompressError for a key that cannot sign, and for symbolic links in the folder.
    """
    staging = Path(staging)
    texts = {
        FILE_NAME: passport.to_json(),
        REPORT: report.render(passport),
        CARD: card.render(passport, key=signing.signer_fingerprint(private_key)),
    }
    for name, text in texts.items():
        with naming(staging / name):
            (staging / name).write_text(text, encoding="utf-8", newline="\n")
    signing.sign(staging, private_key)
