"""`verify` accepts an intact bundle and names whatever is wrong with any other."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.bundle import signing, verify

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("int4-g32", False),
        ("int4-g32-asym", False),
        ("nvfp4", False),
        ("nvfp4", True),
        ("mxfp4", False),
        ("mxfp4", True),
        ("int8", False),
        ("int8", True),
        ("fp8", False),
        ("fp8", True),
    ],
)
def test_an_intact_bundle_passes(built, keys, name, activations):
    assert verify.verify(built(name, activations=activations), keys[1]) is None  # it raises otherwise


def test_it_still_passes_after_being_copied_elsewhere(bundle, keys, tmp_path):
    assert verify.verify(shutil.copytree(bundle, tmp_path / "renamed"), keys[1]) is None


class TestFiles:
    def test_a_flipped_byte_in_any_file_names_that_file(self, bundle, refusal, keys):
        names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
        assert {*SHARDS, "config.json", "passport.json", "report.html", "README.md", "model.sig"} < set(names)
        for name in names:
            data = (bundle / name).read_bytes()
            for position in {0, len(data) // 2, len(data) - 1}:
                changed = bytearray(data)
                changed[position] ^= 1
                (bundle / name).write_bytes(changed)
                assert name in refusal(bundle), f"byte {position}"
            (bundle / name).write_bytes(data)
        verify.verify(bundle, keys[1])  # nothing else was wrong

    def test_no_byte_of_the_signature_can_change_unnoticed(self, bundle, refusal):
        path = bundle / "model.sig"
        data = path.read_bytes()
        for position in range(0, len(data), 29):
            changed = bytearray(data)
            changed[position] ^= 1
            path.write_bytes(changed)
            assert "model.sig" in refusal(bundle), f"byte {position}"

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"dsseEnvelope": 3}', b"[" * 100_000])
    def test_a_garbage_signature_is_one_line(self, bundle, refusal, content):
        (bundle / "model.sig").write_bytes(content)
        assert "model.sig: not a readable signature" in refusal(bundle)

    def test_a_truncated_signature_is_one_line(self, bundle, refusal):
        path = bundle / "model.sig"
        path.write_bytes(path.read_bytes()[:-100])
        assert "model.sig: not a readable signature" in refusal(bundle)

    def test_spaces_that_json_allows_are_refused_too(self, bundle, refusal):
        path = bundle / "model.sig"
        path.write_text(json.dumps(json.loads(path.read_text())))
        assert "model.sig: altered" in refusal(bundle)

    @pytest.mark.parametrize("name", ["extra.bin", ".hidden", ".git/config", "proposer/model.sig"])
    def test_an_added_file_is_named(self, bundle, refusal, name):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_text("x")
        assert f"{name}: added" in refusal(bundle)

    @pytest.mark.parametrize("name", ["config.json", ".gitattributes", SHARDS[1]])
    def test_a_missing_file_is_named(self, bundle, refusal, name):
        (bundle / name).unlink()
        assert f"{name}: missing" in refusal(bundle)

    def test_a_missing_signature_is_named(self, bundle, refusal):
        (bundle / "model.sig").unlink()
        assert "model.sig: not found" in refusal(bundle)

    def test_swapped_shards_are_both_named(self, bundle, refusal):
        first, second = (bundle / name for name in SHARDS)
        first.rename(bundle / "swap")
        second.rename(first)
        (bundle / "swap").rename(second)
        message = refusal(bundle)
        assert all(f"{name}: changed" in message for name in SHARDS)

    def test_every_difference_is_listed(self, bundle, refusal):
        (bundle / "README.md").write_text("mine now")
        (bundle / "tokenizer.json").unlink()
        (bundle / "new").touch()
        assert refusal(bundle).endswith("README.md: changed; tokenizer.json: missing; new: added, not signed")

    def test_a_long_list_is_cut_at_ten_with_a_count(self, bundle, refusal):
        for number in range(25):
            (bundle / f"new-{number:02}").touch()
        message = refusal(bundle)
        assert message.count("added") == 10
        assert message.endswith("; and 15 more")

    def test_a_name_with_a_line_break_does_not_break_the_line(self, bundle, refusal):
        (bundle / "two\nlines").touch()
        assert r"two\nlines" in refusal(bundle)

    @pytest.mark.parametrize("target", ["/etc/hostname", "README.md", "nowhere", "."])
    def test_a_symbolic_link_is_refused(self, bundle, refusal, target):
        (bundle / "link").symlink_to(target)
        assert "link: a symbolic link" in refusal(bundle)

    def test_a_file_replaced_by_a_link_to_its_own_content_is_refused(self, bundle, refusal, tmp_path):
        shutil.move(bundle / "README.md", tmp_path / "outside")
        (bundle / "README.md").symlink_to(tmp_path / "outside")
        assert "README.md: a symbolic link" in refusal(bundle)

    def test_a_name_that_is_not_unicode_is_refused(self, bundle, refusal):
        (bundle / os.fsdecode(b"\xff")).touch()
        assert r"'\udcff': a name that is not UTF-8" in refusal(bundle)

    def test_a_named_pipe_is_refused(self, bundle, refusal):
        os.mkfifo(bundle / "pipe")
        assert "pipe: not a regular file" in refusal(bundle)

    def test_a_folder_that_is_not_there_is_named(self, tmp_path, refusal):
        assert "nowhere: not a folder" in refusal(tmp_path / "nowhere")


class TestKeys:
    def test_another_key_is_named(self, bundle, refusal, tmp_path):
        _, other = signing.ensure_keypair(tmp_path / "other")
        message = refusal(bundle, other)
        assert str(other) in message
        assert "wrong key" in message

    def test_a_signature_by_another_key_is_refused(self, bundle, refusal, tmp_path):
        signing.sign(bundle, signing.ensure_keypair(tmp_path / "other")[0])
        assert "wrong key" in refusal(bundle)

    def test_renaming_the_key_inside_a_foreign_signature_does_not_help(self, bundle, refusal, keys, tmp_path):
        private, public = signing.ensure_keypair(tmp_path / "other")
        signing.sign(bundle, private)
        path = bundle / "model.sig"
        path.write_text(path.read_text().replace(signing.fingerprint(public), signing.fingerprint(keys[1])))
        assert "its signature does not match its content" in refusal(bundle)

    def test_the_private_key_is_not_taken_for_the_public_one(self, bundle, refusal, keys):
        assert "a private key" in refusal(bundle, keys[0])

    def test_a_file_that_is_no_key_is_named(self, bundle, refusal):
        assert "config.json: not a PEM public key" in refusal(bundle, bundle / "config.json")

    def test_a_missing_key_is_named(self, bundle, refusal, tmp_path):
        assert "none.pub: key file not found" in refusal(bundle, tmp_path / "none.pub")


def _layer(fields: dict, name: str = Q_PROJ) -> dict:
    return next(layer for layer in fields["quantization"]["layers"] if layer["name"] == name)


def _all_layers_in(fields: dict, name: str) -> None:
    fields["quantization"]["format"] = name
    for layer in fields["quantization"]["layers"]:
        layer["format"] = name


def _ignore_a_quantized_layer(fields: dict) -> None:
    quantization = fields["quantization"]
    quantization["layers"] = [layer for layer in quantization["layers"] if layer["name"] != Q_PROJ]
    quantization["ignored"].append(Q_PROJ)


LIES = {
    "another format": (lambda f: _all_layers_in(f, "nvfp4"), "quantization.format: the passport says nvfp4"),
    "another format's tensors": (lambda f: _all_layers_in(f, "nvfp4"), f"{Q_PROJ}.weight_packed: int32 [64, 8]"),
    "an unknown format": (lambda f: _all_layers_in(f, "int5"), "format int5 is unknown"),
    "one layer of another format": (lambda f: _layer(f).update(format="mxfp4"), f"{Q_PROJ}: format mxfp4"),
    "a symmetric format called asymmetric": (
        lambda f: _all_layers_in(f, "int4-g32-asym"),
        f"{Q_PROJ}.weight_zero_point: missing",
    ),
    "another layout": (
        lambda f: f["quantization"].update(compression_format="nvfp4-pack-quantized"),
        "quantization.compression_format",
    ),
    "another group": (
        lambda f: f["quantization"].update(group_size=64),
        "quantization.group_size: the passport says 64",
    ),
    "another group's tensors": (lambda f: _all_layers_in(f, "int4-g64"), f"{Q_PROJ}.weight_scale: bfloat16 [64, 2]"),
    "other bits": (lambda f: f["quantization"].update(bits=3), "quantization.bits: the passport says 3"),
    "other bits per weight": (lambda f: f["quantization"].update(bits_per_weight=4.0), "quantization.bits_per_weight"),
    "4-bit activations": (lambda f: f["quantization"].update(activations="4bit"), "quantization.activations"),
    "a layer ignored that is quantized": (_ignore_a_quantized_layer, f"{Q_PROJ}: in quantization.ignored, but"),
    "an ignored layer left out": (
        lambda f: f["quantization"]["ignored"].remove("model.layers.1.self_attn.o_proj"),
        "config.json ignore: model.layers.1.self_attn.o_proj is not in quantization.ignored",
    ),
    "a layer left out": (
        lambda f: f["quantization"]["layers"].remove(_layer(f)),
        f"{Q_PROJ}: quantized, but not in quantization.layers",
    ),
    "a layer that is not there": (
        lambda f: f["quantization"]["layers"].append(_layer(f) | {"name": "model.layers.7.mlp.up_proj"}),
        "model.layers.7.mlp.up_proj.weight_packed: missing",
    ),
    "an unquantized layer called quantized": (
        lambda f: f["quantization"]["layers"].append(_layer(f) | {"name": "model.layers.1.self_attn.o_proj"}),
        "model.layers.1.self_attn.o_proj.weight: not a tensor of int4-g32",
    ),
    "a layer twice": (lambda f: f["quantization"]["layers"].append(_layer(f)), f"{Q_PROJ}: listed twice"),
    "another shape": (lambda f: _layer(f).update(shape=[32, 128]), f"{Q_PROJ}.weight_shape"),
    "a shape that does not divide": (lambda f: _layer(f).update(shape=[64, 65]), f"{Q_PROJ}: in_features 65"),
    "other bytes of a layer": (
        lambda f: _layer(f).update(packed_bytes=1),
        f"{Q_PROJ} packed_bytes: the passport says 1,",
    ),
    "fewer bundle bytes": (
        lambda f: f["ledger"].update(bundle_bytes=1000),
        "ledger.bundle_bytes: the passport says 1000",
    ),
    "fewer scale bytes": (lambda f: f["ledger"].update(scales_bytes=0), "ledger.scales_bytes: the passport says 0"),
    "more parameters": (lambda f: f["ledger"].update(parameters=10**9), "ledger.parameters"),
    "fewer bits": (lambda f: f["ledger"].update(bits_per_weight_model=4.0), "ledger.bits_per_weight_model"),
    "two original sizes": (lambda f: f["ledger"].update(original_bytes=10**9), "ledger.original_bytes"),
    "a shard with another digest": (
        lambda f: f["ledger"]["files"].update({SHARDS[0]: "0" * 64}),
        f"{SHARDS[0]}: not the file of ledger.files",
    ),
    "a shard left out": (lambda f: f["ledger"]["files"].pop(SHARDS[0]), f"{SHARDS[0]}: not in ledger.files"),
    "a shard too many": (
        lambda f: f["ledger"]["files"].update({"model-3.safetensors": "0" * 64}),
        "model-3.safetensors: in ledger.files, but missing",
    ),
    "another architecture": (lambda f: f["target"].update(architecture="MistralForCausalLM"), "target.architecture"),
    "another vocabulary": (lambda f: f["target"].update(vocab_size=7), "target.vocab_size"),
    "another dtype": (lambda f: f["target"].update(dtype="float16"), f"{Q_PROJ}.weight_scale: bfloat16"),
    "no dtype": (lambda f: f["target"].update(dtype="brain"), "target.dtype: brain is not a torch dtype"),
    "another tokenizer": (lambda f: f["target"].update(tokenizer_sha256="0" * 64), "tokenizer.json: not the file"),
}


@pytest.mark.parametrize("lie_name", LIES)
def test_a_lying_passport_is_caught_although_it_is_signed(bundle, lie, refusal, lie_name):
    edit, expected = LIES[lie_name]
    lie(bundle, edit)
    assert expected in refusal(bundle)


def test_signing_an_unchanged_passport_again_is_no_lie(bundle, lie, keys):
    lie(bundle, lambda fields: None)
    assert verify.verify(bundle, keys[1]) is None


def test_a_w4a4_bundle_called_weight_only_is_caught(built, lie, refusal, tmp_path):
    folder = shutil.copytree(built("nvfp4", activations=True), tmp_path / "bundle")
    lie(folder, lambda fields: fields["quantization"].update(activations="16bit"))
    message = refusal(folder)
    assert "quantization.activations: the passport says 16bit" in message
    assert (
        f"{Q_PROJ}.input_global_scale: not a tensor of nvfp4".replace("0.self_attn.q_proj", "0.mlp.down_proj")
        in message
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": "1.0"}', "null"])
def test_a_garbage_passport_is_one_line_although_it_is_signed(bundle, keys, refusal, content):
    (bundle / "passport.json").write_text(content)
    signing.sign(bundle, keys[0])
    assert "passport.json: " in refusal(bundle)


class TestSignedFilesThatDisagree:
    """The signer's key is right, so only the comparison of the passport with the tensors can object."""

    @staticmethod
    def edit_tensor(folder, name: str, change) -> None:
        for shard in sorted(folder.glob("*.safetensors")):
            tensors = load_file(shard)
            if name in tensors:
                tensors[name] = change(tensors[name])
                save_file({k: v for k, v in tensors.items() if v is not None}, shard, {"format": "pt"})

    @pytest.mark.parametrize(
        ("format_name", "value"),
        [
            *(("int4-g32", value) for value in (0.0, float("nan"), float("inf"))),
            *(("int4-g32-asym", value) for value in (0.0, -1.0)),
            ("int8", -1.0),
            *(("nvfp4", value) for value in (0.0, -1.0, float("nan"))),  # E4M3 has no infinity
            *(("fp8", value) for value in (0.0, float("inf"))),
        ],
    )
    def test_a_scale_that_cannot_be_used(self, built, keys, refusal, tmp_path, value, format_name):
        folder = shutil.copytree(built(format_name), tmp_path / "bundle")

        def spoil(scale):
            wide = scale.float()
            wide[3, -1] = value
            return wide.to(scale.dtype)

        self.edit_tensor(folder, f"{Q_PROJ}.weight_scale", spoil)
        signing.sign(folder, keys[0])
        assert f"{Q_PROJ}.weight_scale: 1 of " in refusal(folder)

    def test_a_negative_scale_of_symmetric_int4_is_sound(self, built, keys, refusal, tmp_path):
        folder = shutil.copytree(built("int4-g32"), tmp_path / "bundle")
        self.edit_tensor(folder, f"{Q_PROJ}.weight_scale", torch.neg)
        signing.sign(folder, keys[0])
        assert "scales are" not in refusal(folder)  # what remains is the altered file

    def test_a_global_scale_of_zero(self, built, keys, refusal, tmp_path):
        folder = shutil.copytree(built("nvfp4"), tmp_path / "bundle")
        self.edit_tensor(folder, f"{Q_PROJ}.weight_global_scale", torch.zeros_like)
        signing.sign(folder, keys[0])
        assert f"{Q_PROJ}.weight_global_scale: 1 of 1 scales" in refusal(folder)

    def test_the_nan_of_e8m0(self, built, keys, refusal, tmp_path):
        folder = shutil.copytree(built("mxfp4"), tmp_path / "bundle")
        self.edit_tensor(folder, f"{Q_PROJ}.weight_scale", lambda scale: torch.full_like(scale, 255))
        signing.sign(folder, keys[0])
        assert f"{Q_PROJ}.weight_scale: 128 of 128 scales" in refusal(folder)

    def test_the_nan_of_e4m3(self, built, keys, refusal, tmp_path):
        folder = shutil.copytree(built("fp8"), tmp_path / "bundle")
        spoilt = torch.full((64, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.edit_tensor(folder, f"{Q_PROJ}.weight", lambda weight: spoilt)
        signing.sign(folder, keys[0])
        assert f"{Q_PROJ}.weight: 4096 of 4096 weights are NaN" in refusal(folder)

    def test_a_nan_in_what_is_not_quantized(self, bundle, keys, refusal):
        self.edit_tensor(bundle, "model.norm.weight", lambda weight: weight * float("nan"))
        signing.sign(bundle, keys[0])
        assert "'model.norm.weight' holds 64 NaN" in refusal(bundle)

    def test_a_tensor_that_is_gone(self, bundle, keys, refusal):
        self.edit_tensor(bundle, "model.norm.weight", lambda weight: None)
        signing.sign(bundle, keys[0])
        assert "tensor 'model.norm.weight' should be in" in refusal(bundle)

    def test_swapped_shards(self, bundle, keys, refusal):
        first, second = (bundle / name for name in SHARDS)
        first.rename(bundle / "swap")
        second.rename(first)
        (bundle / "swap").rename(second)
        signing.sign(bundle, keys[0])
        assert SHARDS[0] in refusal(bundle)

    def test_a_shard_of_another_model(self, built, bundle, keys, refusal):
        shutil.copyfile(built(seed=1) / SHARDS[0], bundle / SHARDS[0])
        signing.sign(bundle, keys[0])
        assert refusal(bundle).endswith(f"{SHARDS[0]}: not the file of ledger.files (other sha256)")

    def test_a_truncated_shard(self, bundle, keys, refusal):
        path = bundle / SHARDS[0]
        path.write_bytes(path.read_bytes()[:-10])
        signing.sign(bundle, keys[0])
        assert f"{SHARDS[0]}: truncated" in refusal(bundle)

    def test_a_wrong_total_size(self, bundle, keys, refusal):
        path = bundle / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["metadata"]["total_size"] += 1
        path.write_text(json.dumps(index))
        signing.sign(bundle, keys[0])
        assert "model.safetensors.index.json: total_size" in refusal(bundle)

    def test_a_shard_that_the_index_does_not_know(self, bundle, keys, refusal):
        save_file({"extra": torch.zeros(2)}, bundle / "model-00003-of-00003.safetensors")
        signing.sign(bundle, keys[0])
        assert "model-00003-of-00003.safetensors: not in model.safetensors.index.json" in refusal(bundle)

    @pytest.mark.parametrize(
        ("edit", "expected"),
        [
            (lambda c: c.pop("quantization_config"), "config.json: "),
            (lambda c: c["quantization_config"].update(format="dense"), "quantization_config.format"),
            (
                lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=64),
                "group_size",
            ),
            (
                lambda c: c["quantization_config"]["ignore"].remove("model.layers.1.self_attn.o_proj"),
                "model.layers.1.self_attn.o_proj: not quantized, and not in config.json's ignore",
            ),
            (
                lambda c: c["quantization_config"]["ignore"].append("model.embed_tokens"),
                "config.json ignore: model.embed_tokens is not in quantization.ignored",
            ),
            (lambda c: c.update(num_hidden_layers=1), "num_hidden_layers 1"),
        ],
    )
    def test_a_config_that_engines_would_read_differently(self, bundle, keys, refusal, edit, expected):
        path = bundle / "config.json"
        config = json.loads(path.read_text())
        edit(config)
        path.write_text(json.dumps(config))
        signing.sign(bundle, keys[0])
        assert expected in refusal(bundle)

    def test_a_config_that_is_not_json(self, bundle, keys, refusal):
        (bundle / "config.json").write_text("{")
        signing.sign(bundle, keys[0])
        assert "config.json: not JSON" in refusal(bundle)
