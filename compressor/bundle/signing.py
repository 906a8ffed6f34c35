"""Signing a bundle and checking the signature, with the OpenSSF `model-signing` library and an elliptic-curve key pair.

`model.sig` is a Sigstore bundle: a DSSE envelope (https://github.com/secure-systems-lab/dsse) around an in-toto
statement that lists the sha256 of every file in the folder. Only `model.sig` itself is outside the list; hidden files
and anything git-related are inside it.
"""

import base64
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from model_signing import hashing, manifest
from model_signing import signing as model_signing
from model_signing import verifying as model_verifying

from compressor.errors import CompressError, naming
from compressor.text import is_unicode

SIGNATURE = "model.sig"
PRIVATE_KEY, PUBLIC_KEY = "signing.key", "signing.pub"
CURVES = ("secp256r1", "secp384r1", "secp521r1")  # what model-signing accepts


def keys_folder() -> Path:
    """$COMPRESS_KEYS, or `compress` in the user's configuration folder."""
    if chosen := os.environ.get("COMPRESS_KEYS"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "compress"


def ensure_keypair(folder: Path | None = None) -> tuple[Path, Path]:
    """(private key, public key) files of this user, made on the first call: NIST P-256, PEM, unencrypted, mode 0600.

    Args:
        folder: where they live; `keys_folder()` by default.

    Raises CompressError for a private key that others can read, or a public key that is not its pair.
    """
    folder = Path(folder) if folder is not None else keys_folder()
    private, public = folder / PRIVATE_KEY, folder / PUBLIC_KEY
    published = public.exists()  # asked first: whoever makes a pair at this moment writes the private key first
    if not private.exists():
        if published:
            raise CompressError(
                f"{public}: its private key {PRIVATE_KEY} is gone; restore it or move {PUBLIC_KEY} away"
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _create_once(private, pem, 0o600)
    if os.name == "posix" and stat.S_IMODE(private.stat().st_mode) & 0o077:
        raise CompressError(f"{private}: other users can read the signing key; chmod 600 it, or make a new one")
    return private, _public_half(private, public)


def own_public_key() -> Path:
    """This user's public key. Raises CompressError when there is none yet."""
    public = keys_folder() / PUBLIC_KEY
    if not public.exists():
        raise CompressError(f"{public}: not found; give the public key of whoever signed the bundle")
    return public


def resolve_keys(private_key: str | os.PathLike | None) -> tuple[Path, Path]:
    """(private key, public key) files for a recipe's `bundle.private_key`; this user's own pair when it is None.

    The public half of a given key lies beside it under the same name ending in `.pub`, and is written when missing.
    Raises CompressError for a file that is not a usable key, or a `.pub` that is not its pair.
    """
    if private_key is None:
        return ensure_keypair()
    private = Path(private_key)
    return private, _public_half(private, private.with_suffix(".pub"))


def _public_half(private: Path, public: Path) -> Path:
    """`public`, written if it was not there, and checked to be the pair of `private`."""
    pem = _public_pem(_load_private(private).public_key())
    if private == public:
        raise CompressError(f"{private}: a private key may not be named .pub")
    if not public.exists():
        _create_once(public, pem, 0o644)
    if _public_pem(_load_public(public)) != pem:
        raise CompressError(f"{public}: not the public half of {private}; remove it and it is written again")
    return public


def _create_once(path: Path, data: bytes, mode: int) -> None:
    """Create `path` whole, or leave the one that is there: of two processes one wins and both use its file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600 from the start
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.link(name, path)  # unlike os.replace, fails if the name exists
    except FileExistsError:
        pass
    finally:
        os.unlink(name)


def _load_private(path: Path) -> ec.EllipticCurvePrivateKey:
    data = _read_key(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except TypeError:
        raise CompressError(f"{path}: the private key is encrypted; give an unencrypted one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise CompressError(f"{path}: not a PEM private key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in CURVES:
        raise CompressError(f"{path}: not an elliptic-curve key on {', '.join(CURVES)}")
    return key


def _load_public(path: Path) -> ec.EllipticCurvePublicKey:
    data = _read_key(path)
    if b"PRIVATE KEY" in data:
        raise CompressError(f"{path}: a private key; verification takes the public one ({PUBLIC_KEY})")
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise CompressError(f"{path}: not a PEM public key") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise CompressError(f"{path}: not an elliptic-curve key on {', '.join(CURVES)}")
    return key


def _read_key(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CompressError(f"{path}: key file not found") from None
    except IsADirectoryError:
        raise CompressError(f"{path}: a folder; give the key file in it") from None


def _public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(public_key: str | os.PathLike) -> str:
    """sha256 (hex) of the PEM text of a public key: how `model.sig` names it. Raises CompressError for another file."""
    return _fingerprint(_load_public(Path(public_key)))


def signer_fingerprint(private_key: str | os.PathLike) -> str:
    """`fingerprint` of the public half of a private key. Raises CompressError for a key that cannot sign."""
    return _fingerprint(_load_private(Path(private_key)).public_key())


def _fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    return hashlib.sha256(_public_pem(key)).hexdigest()


def files_of(folder: Path) -> list[str]:
    """Relative names of every file under `folder` except the signature, sorted.

    Raises CompressError for a symbolic link or anything else that is neither file nor folder: what it points to can
    change without the signature noticing.
    """
    names, refused = [], []
    if not Path(folder).is_dir():
        raise CompressError(f"{folder}: not a folder")
    for root, folders, files in os.walk(folder, onerror=_raise):
        for name in folders + files:
            path = Path(root, name)
            kind = path.lstat().st_mode
            relative = path.relative_to(folder).as_posix()
            if not is_unicode(relative):  # Linux allows any bytes, a signature does not
                refused.append(f"{shown(relative)}: a name that is not UTF-8")
            elif stat.S_ISREG(kind):
                names.append(relative)
            elif not stat.S_ISDIR(kind):
                refused.append(
                    f"{shown(relative)}: {'a symbolic link' if stat.S_ISLNK(kind) else 'not a regular file'}"
                )
    if refused:
        raise CompressError(f"{folder}: {listing(refused)}; a bundle holds plain files only")
    return sorted(name for name in names if name != SIGNATURE)


def _raise(error: OSError) -> None:
    raise error  # os.walk leaves out what it cannot read unless told


def shown(name: str) -> str:
    """A file name for a message: as it is, or quoted where it would break the line."""
    return name if name.isprintable() else ascii(name)


def listing(items: list[str], limit: int = 10) -> str:
    """Items in one line, the first `limit` of them and a count of the rest."""
    rest = f"; and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + rest


def _hash(folder: Path) -> manifest.Manifest:
    """sha256 of every file under `folder` but the signature."""
    config = hashing.Config().use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False)
    return config.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False).hash(folder)


class _Hashed(hashing.Config):
    """Hands the library a manifest that is already there, so that files are read once and ours is the file list.

    The library would skip whatever paths the signature itself says to ignore.
    """

    def __init__(self, found: manifest.Manifest):
        super().__init__()
        self.found = found

    def hash(self, model_path, *, files_to_hash=None) -> manifest.Manifest:
        return self.found


def sign(folder: str | os.PathLike, private_key: str | os.PathLike) -> Path:
    """Write `model.sig` over every file in `folder`; an older signature is replaced.

    Raises CompressError for a key that cannot sign, and for symbolic links in the folder.
    """
    folder, private_key = Path(folder), Path(private_key)
    _load_private(private_key)  # for its errors
    pending = folder / f"{SIGNATURE}.tmp"
    pending.unlink(missing_ok=True)
    files_of(folder)
    signer = model_signing.Config().use_elliptic_key_signer(private_key=private_key)
    signer.set_hashing_config(_Hashed(_hash(folder)))
    try:
        with naming(pending):
            signer.sign(folder, pending)
        os.replace(pending, folder / SIGNATURE)
    finally:
        pending.unlink(missing_ok=True)
    return folder / SIGNATURE


def verify_signature(folder: str | os.PathLike, public_key: str | os.PathLike) -> dict[str, str]:
    """Check that `model.sig` was made with the pair of `public_key` over exactly the files that are in `folder`.

    Returns sha256 (hex) of every file but the signature, by relative name.

    Raises CompressError: no signature, not a signature, another key, an altered signature, or the list of every file
    that is changed, added or missing.
    """
    folder, public_key = Path(folder), Path(public_key)
    ours = fingerprint(public_key)
    signature = folder / SIGNATURE
    names = files_of(folder)
    signed, signer = _read_signature(signature)
    if signer != ours:
        raise CompressError(
            f"{signature}: signed with key {shown(signer[:16])}…, not with {public_key} ({ours[:16]}…): wrong key"
        )
    found = _hash(folder)
    library = model_verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    try:
        library.set_hashing_config(_Hashed(found)).verify(folder, signature)
    except InvalidSignature:
        raise CompressError(f"{signature}: altered, its signature does not match its content") from None
    except (ValueError, KeyError) as error:
        actual = {item.identifier: item.digest.digest_hex for item in found.resource_descriptors()}
        differences = _differences(signed, actual) or [f"{SIGNATURE}: {' '.join(str(error).split())[:200]}"]
        raise CompressError(f"{folder}: not as it was signed: {listing(differences)}") from None
    if names != sorted(signed):  # the library compared a list made a moment later
        raise CompressError(f"{folder}: files changed while they were being verified")
    return signed


def _differences(signed: dict[str, str], actual: dict[str, str]) -> list[str]:
    changed = [f"{shown(n)}: changed" for n in sorted(signed.keys() & actual.keys()) if signed[n] != actual[n]]
    missing = [f"{shown(n)}: missing" for n in sorted(signed.keys() - actual.keys())]
    added = [f"{shown(n)}: added, not signed" for n in sorted(actual.keys() - signed.keys())]
    return changed + missing + added


def _read_signature(path: Path) -> tuple[dict[str, str], str]:
    """({file: sha256 hex} that the payload claims, fingerprint of the key that it names). Neither is verified yet.

    Only the exact text that the library writes is accepted: JSON and base64 leave room for bytes that no check reads,
    and a signature file with such bytes changed is not the one that was made.
    """
    if not path.is_file():
        raise CompressError(f"{path}: not found; the bundle is not signed")
    try:
        text = path.read_text(encoding="utf-8")
        envelope = json.loads(text)
        signer = envelope["verificationMaterial"]["publicKey"]["hint"]
        payload = base64.b64decode(envelope["dsseEnvelope"]["payload"], validate=True)
        resources = json.loads(payload)["predicate"]["resources"]
        signed = {str(item["name"]): str(item["digest"]) for item in resources}
        canonical = base64.b64encode(payload).decode() == envelope["dsseEnvelope"]["payload"]
        (entry,) = envelope["dsseEnvelope"]["signatures"]
        canonical &= base64.b64encode(base64.b64decode(entry["sig"], validate=True)).decode() == entry["sig"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CompressError(f"{path}: not a readable signature (truncated or altered)") from None
    if not canonical or not isinstance(signer, str) or json.dumps(envelope, separators=(",", ":")) != text:
        raise CompressError(f"{path}: altered, not the text that the signing library writes")
    return signed, signer
