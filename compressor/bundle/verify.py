"""Verifying a bundle as a stranger would: the signature, then the file set, then the passport against the tensors."""

import os
from pathlib import Path

from compressor.bundle import contents
from compressor.bundle.passport import Passport
from compressor.bundle.signing import listing, verify_signature
from compressor.errors import CompressError


def verify(folder: str | os.PathLike, public_key: str | os.PathLike) -> None:
    """Return if the bundle in `folder` is signed by the pair of `public_key`, whole, and what its passport says it is.

    Raises CompressError, in one line, naming what differs: the key; an altered signature; every file that is changed,
    missing or added; every way in which passport, config.json, shard index and tensors disagree.
    """
    folder = Path(folder)
    digests = verify_signature(folder, public_key)
    problems = contents.differences(folder, Passport.load(folder), digests)
    if problems:
        raise CompressError(f"{folder}: the passport does not describe these files: {listing(problems)}")
