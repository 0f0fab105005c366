"""Weights in Hugging Face layout, in one file or in shards; every error is reported before any weight is read."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxalign.errors import UserError
from jaxalign.models.checkpoints.safetensors import open_weights, weight_files

_A = np.arange(6, dtype=np.float32).reshape(2, 3)
_B = np.array([0.5, -1.5], np.float16)


def _shards(folder, weight_map):
    save_file({"a": _A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": _B}, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


_MAP = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def test_a_single_file_and_shards_give_the_same_tensors(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file({"a": _A, "b": _B}, tmp_path / "one" / "model.safetensors")
    for folder in (tmp_path / "one", _shards(tmp_path / "two", _MAP)):
        with open_weights(folder) as weights:
            assert weights.names == {"a", "b"}
            assert weights.shape("a") == (2, 3)
            np.testing.assert_array_equal(weights.read("a"), _A)
            np.testing.assert_array_equal(weights.read("b"), np.array([0.5, -1.5], np.float32))


def test_every_file_with_weights_is_listed(tmp_path):
    """The manifest hashes these files: a changed shard makes the stages that read it out of date."""
    assert weight_files(tmp_path) == ("model.safetensors",)
    names = weight_files(_shards(tmp_path, _MAP))
    assert names == ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_floating_type_is_read_as_float32(tmp_path, dtype):
    save_file({"a": np.array([1.5, -2.0], dtype)}, tmp_path / "model.safetensors")  # exact in all four
    with open_weights(tmp_path) as weights:
        weights.check({"a": (2,)})
        value = weights.read("a")
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, np.array([1.5, -2.0], np.float32))


def test_all_errors_are_reported_together(tmp_path):
    tensors = {"a": _A, "extra": _A, "old.inv_freq": _A, "ints": np.arange(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights, pytest.raises(UserError) as caught:
        weights.check({"a": (3, 2), "ints": (2,), "lost": (1,)}, ignored=lambda name: name.endswith("inv_freq"))
    message = str(caught.value)
    assert "weights are missing: lost;" in message
    assert "the model does not have the weights extra;" in message
    assert "a is [2, 3], [3, 2] expected" in message
    assert "ints is I64" in message


def test_a_long_list_of_names_is_shortened_to_a_count(tmp_path):
    save_file({"a": _A}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights, pytest.raises(UserError, match="w0, w1, .*w7 and 2 more"):
        weights.check({"a": (2, 3)} | {f"w{i}": (1,) for i in range(10)})


@pytest.mark.parametrize("length", [0, 4, 40, -1])
def test_a_truncated_file_is_reported_in_one_sentence(tmp_path, length):
    path = tmp_path / "model.safetensors"
    save_file({"a": _A}, path)
    path.write_bytes(path.read_bytes()[:length])
    with (
        pytest.raises(UserError, match=r"model\.safetensors is truncated or not a safetensors file"),
        open_weights(tmp_path),
    ):
        pass


def _file(header: bytes, data: bytes = bytes(24)) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


_ENTRY = '{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}%s}'


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 not a safetensors file at all, of some length",
        (1 << 60).to_bytes(8, "little") + b"{}",
        _file(b"{not json}"),
        _file((_ENTRY % "").encode(), bytes(20)),
        _file((_ENTRY % "").encode(), bytes(28)),
        _file((_ENTRY % "").replace("[2,3]", "[2,4]").encode()),
        _file((_ENTRY % "").replace("F32", "X32").encode()),
        _file((_ENTRY % ',"b":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}').encode()),
    ],
    ids=["no header", "endless header", "no json", "too short", "too long", "shape", "dtype", "overlap"],
)
def test_an_inconsistent_file_is_reported_in_one_sentence(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"truncated or not a safetensors file \("), open_weights(tmp_path):
        pass


def test_a_block_is_read_without_the_data_before_it(tmp_path):
    tensors = {"a": np.arange(60, dtype=np.float32).reshape(6, 10), "b": np.arange(3, dtype=np.float16)}
    tensors["c"] = np.arange(5, dtype=ml_dtypes.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        np.testing.assert_array_equal(weights.read("a", (slice(2, 4), slice(1, 9))), tensors["a"][2:4, 1:9])
        np.testing.assert_array_equal(weights.read("c", (slice(1, 3),)), [1.0, 2.0])
        assert weights.read("a", (slice(0, 1),), "bfloat16").dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_non_finite_numbers_are_refused_by_name(tmp_path, dtype, bad):
    save_file({"a": np.array([1.0, bad], dtype)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        assert weights.read("a", (slice(0, 1),)) == 1.0
        with pytest.raises(UserError, match=r"a in .* contains non-finite numbers; download or copy the weights again"):
            weights.read("a")


def test_missing_folders_and_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"folder .*none does not exist; give a folder with config\.json"):
        with open_weights(tmp_path / "none"):
            pass
    with pytest.raises(UserError, match=r"model\.safetensors does not exist"), open_weights(tmp_path):
        pass
    _shards(tmp_path, _MAP | {"c": "model-00003-of-00003.safetensors"})
    with pytest.raises(UserError, match=r"00003-of-00003\.safetensors does not exist"), open_weights(tmp_path):
        pass


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (_MAP | {"c": "model-00001-of-00002.safetensors"}, "lists weights that its files do not contain: c"),
        ({"a": _MAP["b"], "b": _MAP["a"]}, "lists weights that its files do not contain: a, b"),
        (_MAP | {"a": ".."}, "must map every weight to a file in the same folder"),
        (_MAP | {"a": "/etc/passwd"}, "must map every weight to a file in the same folder"),
        (_MAP | {"a": "x" * 300}, "x{200,}.* does not exist"),
        ({"a": "../model.safetensors"}, "must map every weight to a file in the same folder"),
        ({}, "must map every weight to a file in the same folder"),
        ([1], "is not an index of safetensors files"),
    ],
)
def test_a_wrong_index_is_reported(tmp_path, weight_map, message):
    with pytest.raises(UserError, match=message), open_weights(_shards(tmp_path, weight_map)):
        pass


def test_weights_missing_from_the_index_are_reported(tmp_path):
    _shards(tmp_path, _MAP)
    save_file({"a": _A, "b": _B}, tmp_path / _MAP["a"])  # Now "b" is in both files.
    with pytest.raises(UserError, match=r"does not list weights that its files contain: b in model-00001-of-00002\.safe"):
        with open_weights(tmp_path):
            pass


def test_a_broken_index_is_reported(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json is not an index"), open_weights(tmp_path):
        pass
