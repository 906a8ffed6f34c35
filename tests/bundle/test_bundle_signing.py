"""Keys are made once and kept private; signatures are the OpenSSF library's own."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from model_signing import hashing, verifying
from model_signing import signing as library

from compressor.bundle import signing
from compressor.errors import CompressError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model" / "sub").mkdir(parents=True)
    for name in ("a", ".hidden", ".gitignore", "sub/b"):
        (tmp_path / "model" / name).write_text(name)
    return tmp_path / "model"


def private_pem(key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestKeypair:
    def test_the_private_key_is_readable_by_its_owner_alone(self, tmp_path):
        private, public = signing.ensure_keypair(tmp_path / "keys")
        assert (mode(private), mode(public)) == (0o600, 0o644)
        assert mode(tmp_path / "keys") == 0o700
        assert sorted(p.name for p in private.parent.iterdir()) == ["signing.key", "signing.pub"]

    def test_it_is_made_once(self, tmp_path):
        first = [path.read_bytes() for path in signing.ensure_keypair(tmp_path)]
        assert [path.read_bytes() for path in signing.ensure_keypair(tmp_path)] == first

    def test_two_folders_have_two_keys(self, tmp_path):
        pairs = [signing.ensure_keypair(tmp_path / name) for name in "ab"]
        assert signing.fingerprint(pairs[0][1]) != signing.fingerprint(pairs[1][1])

    def test_processes_that_race_agree_on_one(self, tmp_path):
        with ThreadPoolExecutor(8) as pool:
            pairs = list(pool.map(lambda _: signing.ensure_keypair(tmp_path), range(8)))
        assert len({signing.fingerprint(public) for _, public in pairs}) == 1

    def test_a_pair_that_another_process_makes_meanwhile_is_not_taken_for_a_lost_key(self, tmp_path, monkeypatch):
        exists, other = Path.exists, []

        def late(path):
            found = exists(path)
            if path.name == "signing.key" and not other:  # looked for, and made right after
                other.append(None)
                other[:] = [signing.ensure_keypair(tmp_path)]
            return found

        monkeypatch.setattr(Path, "exists", late)
        assert signing.ensure_keypair(tmp_path) == other[0]

    def test_the_folder_is_compress_keys_else_the_configuration_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
        monkeypatch.delenv("COMPRESS_KEYS", raising=False)
        assert signing.keys_folder() == tmp_path / "xdg" / "compress"
        monkeypatch.setenv("COMPRESS_KEYS", str(tmp_path / "mine"))
        assert signing.ensure_keypair()[0].parent == tmp_path / "mine"
        assert signing.own_public_key() == tmp_path / "mine" / "signing.pub"

    def test_without_a_pair_there_is_no_own_public_key(self, tmp_path, monkeypatch):
        monkeypatch.setenv("COMPRESS_KEYS", str(tmp_path))
        with pytest.raises(CompressError, match=r"signing\.pub: not found"):
            signing.own_public_key()

    def test_a_lost_public_key_is_written_again(self, tmp_path):
        _, public = signing.ensure_keypair(tmp_path)
        before = public.read_bytes()
        public.unlink()
        assert signing.ensure_keypair(tmp_path)[1].read_bytes() == before

    def test_a_lost_private_key_is_not_replaced_silently(self, tmp_path):
        signing.ensure_keypair(tmp_path)[0].unlink()
        with pytest.raises(CompressError, match=r"its private key signing\.key is gone"):
            signing.ensure_keypair(tmp_path)

    def test_a_private_key_that_others_can_read_is_refused(self, tmp_path):
        os.chmod(signing.ensure_keypair(tmp_path)[0], 0o644)
        with pytest.raises(CompressError, match="other users can read"):
            signing.ensure_keypair(tmp_path)

    def test_halves_of_two_pairs_are_refused(self, tmp_path):
        _, public = signing.ensure_keypair(tmp_path / "a")
        signing.ensure_keypair(tmp_path / "b")[1].write_bytes(public.read_bytes())
        with pytest.raises(CompressError, match="not the public half"):
            signing.ensure_keypair(tmp_path / "b")


class TestRecipeKey:
    def test_its_public_half_is_written_beside_it(self, tmp_path, folder):
        path = tmp_path / "release.pem"
        path.write_bytes(private_pem(ec.generate_private_key(ec.SECP384R1())))
        private, public = signing.resolve_keys(path)
        assert (private, public) == (path, tmp_path / "release.pub")
        signing.sign(folder, private)
        signing.verify_signature(folder, public)

    def test_none_is_the_users_own(self, tmp_path, monkeypatch):
        monkeypatch.setenv("COMPRESS_KEYS", str(tmp_path))
        assert signing.resolve_keys(None) == signing.ensure_keypair(tmp_path)

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"not a key", "not a PEM private key"),
            (private_pem(rsa.generate_private_key(65537, 2048)), "not an elliptic-curve key"),
            (private_pem(ec.generate_private_key(ec.SECP256K1())), "not an elliptic-curve key"),
        ],
    )
    def test_what_cannot_sign_is_refused(self, tmp_path, folder, content, expected):
        (tmp_path / "key").write_bytes(content)
        for use in (lambda: signing.resolve_keys(tmp_path / "key"), lambda: signing.sign(folder, tmp_path / "key")):
            with pytest.raises(CompressError, match=expected):
                use()
        assert not (folder / "model.sig").exists()

    def test_an_encrypted_key_is_refused(self, tmp_path, folder):
        key = ec.generate_private_key(ec.SECP256R1())
        (tmp_path / "key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
        )
        with pytest.raises(CompressError, match="encrypted"):
            signing.sign(folder, tmp_path / "key")


class TestSignature:
    def test_it_covers_every_file_and_says_what_each_is(self, folder, keys):
        signing.sign(folder, keys[0])
        digests = signing.verify_signature(folder, keys[1])
        assert sorted(digests) == [".gitignore", ".hidden", "a", "sub/b"]

    def test_signing_again_replaces_it(self, folder, keys):
        signing.sign(folder, keys[0])
        (folder / "c").touch()
        signing.sign(folder, keys[0])
        assert "c" in signing.verify_signature(folder, keys[1])

    def test_an_interrupted_signing_leaves_nothing_that_is_signed_later(self, folder, keys):
        (folder / "model.sig.tmp").write_text("half")
        signing.sign(folder, keys[0])
        assert "model.sig.tmp" not in signing.verify_signature(folder, keys[1])

    def test_a_symbolic_link_is_not_signed(self, folder, keys):
        (folder / "link").symlink_to("a")
        with pytest.raises(CompressError, match="link: a symbolic link"):
            signing.sign(folder, keys[0])

    def test_the_library_itself_accepts_ours(self, folder, keys):
        signing.sign(folder, keys[0])
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=keys[1])
        verifier.set_hashing_config(hashing.Config().set_ignored_paths(paths=["model.sig"], ignore_git_paths=False))
        verifier.verify(folder, folder / "model.sig")
        (folder / "a").write_text("changed")
        with pytest.raises(ValueError, match="mismatch"):
            verifier.verify(folder, folder / "model.sig")

    def test_we_accept_the_librarys(self, folder, keys):
        config = hashing.Config().set_ignored_paths(paths=["model.sig"], ignore_git_paths=False)
        signer = library.Config().use_elliptic_key_signer(private_key=keys[0]).set_hashing_config(config)
        signer.sign(folder, folder / "model.sig")
        assert len(signing.verify_signature(folder, keys[1])) == 4

    def test_files_that_the_library_was_told_to_ignore_are_not_signed(self, folder, keys):
        config = hashing.Config().set_ignored_paths(paths=["model.sig", "a"])
        signer = library.Config().use_elliptic_key_signer(private_key=keys[0]).set_hashing_config(config)
        signer.sign(folder, folder / "model.sig")
        with pytest.raises(CompressError, match=r"\.gitignore: added, not signed; a: added, not signed"):
            signing.verify_signature(folder, keys[1])
