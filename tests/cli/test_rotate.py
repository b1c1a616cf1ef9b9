"""`shardkeep rotate`: keys change, data do not; and the words of codecs on other commands."""

import pytest
import torch

import shardkeep as sk
from tests.cli.conftest import state_of


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """A key file that the environment names, with one key in it."""
    file = tmp_path / "keys"
    file.write_text(sk.new_key() + "\n")
    monkeypatch.setenv("SHARDKEEP_KEY_FILE", str(file))
    return file


@pytest.fixture
def run_of_secrets(keys, tmp_path):
    root = tmp_path / "secrets"
    for step in (1, 2):
        sk.save(state_of(step), root / f"step-{step}", step=step, codecs=["float", "aes"])
    sk.save(state_of(3), root / "step-3", step=3)
    return root


def test_keys_are_rotated_and_data_are_not_touched(shardkeep, run_of_secrets, keys):
    """With a new key before the old one all is rotated; afterwards the new one alone opens it, and the old one does not."""
    old = keys.read_text()
    files = {path: path.read_bytes() for path in run_of_secrets.glob("*/*.skframes")}
    new = sk.new_key() + "\n"
    keys.write_text(new + old)
    answer = shardkeep("rotate", run_of_secrets)
    assert answer.code == 0
    assert "2 checkpoints rotated" in answer.out
    again = shardkeep("rotate", run_of_secrets, "--json").json["checkpoints"]
    assert [each["status"] for each in again] == ["plain", "current", "current"]
    assert {path: path.read_bytes() for path in files} == files
    keys.write_text(new)
    loaded = sk.open(run_of_secrets / "step-2")["model.embed.weight"][:]
    assert torch.equal(loaded, state_of(2)["model"]["embed.weight"])
    assert shardkeep("verify", run_of_secrets).code == 0
    keys.write_text(old)
    assert shardkeep("show", run_of_secrets / "step-2", "step").code == 2


def test_what_cannot_be_rotated_says_why(shardkeep, run_of_secrets, keys, monkeypatch):
    """A wrong key, no key and a checkpoint that is not encrypted are errors, and leave the record as it was."""
    record = (run_of_secrets / "step-1" / "shardkeep.json").read_bytes()
    answer = shardkeep("rotate", run_of_secrets / "step-3", run_of_secrets)
    assert answer.code == 2
    assert answer.err == f"{run_of_secrets / 'step-3'}: nothing was rotated: it is not encrypted\n"
    assert answer.out.count("current") == 2
    keys.write_text(sk.new_key())
    answer = shardkeep("rotate", run_of_secrets)
    assert answer.code == 2
    assert answer.err.count("is encrypted with the key") == 2
    monkeypatch.delenv("SHARDKEEP_KEY_FILE")
    with pytest.raises(sk.KeyMissing, match="SHARDKEEP_KEY_FILE"):
        sk.rotate_keys(run_of_secrets / "step-1")
    with pytest.raises(sk.StateError, match="step-3 is not encrypted: it has no keys to rotate"):
        sk.rotate_keys(run_of_secrets / "step-3")
    assert "1 checkpoint rotated" not in shardkeep("rotate", run_of_secrets).out
    assert (run_of_secrets / "step-1" / "shardkeep.json").read_bytes() == record


def test_a_run_that_is_not_encrypted_says_so(shardkeep, run_dir, tmp_path):
    """Without any key, too: nothing rotated is no success, and not a failure of each checkpoint."""
    answer = shardkeep("rotate", run_dir)
    assert answer.code == 2
    assert answer.err == f"{run_dir}: nothing was rotated: it is not encrypted\n"
    assert "failed" not in answer.out
    (tmp_path / "empty").mkdir()
    assert "there is no checkpoint in it" in shardkeep("rotate", tmp_path / "empty").err


def test_torchs_layout_is_told_apart(shardkeep, run_of_secrets, keys):
    """A checkpoint of torch's layout is never encrypted: it counts as plain, and the others are rotated."""
    sk.convert(run_of_secrets / "step-2", run_of_secrets / "step-4", "dcp")
    keys.write_text(sk.new_key() + "\n" + keys.read_text())
    answer = shardkeep("rotate", run_of_secrets, "--json")
    assert answer.code == 0
    found = {each["path"][-6:]: each["status"] for each in answer.json["checkpoints"]}
    assert found == {"step-1": "rotated", "step-2": "rotated", "step-3": "plain", "step-4": "plain"}


@pytest.mark.parametrize("words", [[], ["--quick"]])
def test_verify_tells_a_wrong_key_from_none(shardkeep, checkpoint, tmp_path, keys, monkeypatch, words):
    """Without a key the stored bytes are checked; a wrong key or a missing key file is a problem."""
    sk.convert(checkpoint, tmp_path / "out", "native", codecs=["aes"])
    assert shardkeep("verify", tmp_path / "out", *words).code == 0
    [old] = sk.KeyRing.from_file(keys).ids
    keys.write_text(sk.new_key())
    [new] = sk.KeyRing.from_file(keys).ids
    answer = shardkeep("verify", tmp_path / "out", *words)
    assert answer.code == 1
    text = " ".join(answer.out.split())
    assert "none of the given keys decrypts it" in text
    assert f"encrypted with the key {old}; the given keys are {new}" in text
    keys.unlink()
    answer = shardkeep("verify", tmp_path / "out", *words, "--json")
    assert answer.code == 1
    [problem] = answer.json["checkpoints"][0]["problems"]
    assert f"the key file {keys} cannot be read" in problem
    monkeypatch.delenv("SHARDKEEP_KEY_FILE")
    answer = shardkeep("verify", tmp_path / "out", *words)
    assert answer.code == 0
    assert "encrypted and no key was given" in answer.out
    for file in (tmp_path / "out").glob("*"):
        if file.suffix in {".skframes", ".distcp"}:
            file.write_bytes(file.read_bytes()[:-1])
    assert shardkeep("verify", tmp_path / "out", *words).code == 1


def test_an_edited_record_is_not_signed_anew(run_of_secrets, keys):
    from shardkeep.format.record import decode_record, encode_record

    path = run_of_secrets / "step-1" / "shardkeep.json"
    record = decode_record(path.read_bytes(), "here")
    record.files.reverse()
    path.write_bytes(encode_record(record))
    keys.write_text(sk.new_key() + "\n" + keys.read_text())
    with pytest.raises(sk.NotAuthentic):
        sk.rotate_keys(run_of_secrets / "step-1")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("convert", "--to", "native"), True),
        (("convert", "--to", "dcp"), False),
        (("convert", "--to", "safetensors"), False),
        (("export", "--format", "native"), True),
        (("export", "--format", "torch"), False),
    ],
)
def test_a_copy_that_is_not_encrypted_is_told(shardkeep, checkpoint, tmp_path, keys, words, hint):
    """Command and report warn about a plain copy of an encrypted checkpoint, and about no other copy."""
    sk.convert(checkpoint, tmp_path / "secret", "native", codecs=["aes"])
    command, *options = words
    warning = "the source is encrypted, this copy is not"
    answer = shardkeep(command, tmp_path / "secret", tmp_path / "a", *options)
    assert answer.code == 0
    assert warning in answer.err
    assert ("--codecs aes" in answer.err) == hint
    assert shardkeep(command, tmp_path / "secret", tmp_path / "b", *options, "--json").json["decrypted"] is True
    assert warning not in shardkeep(command, checkpoint, tmp_path / "c", *options).err
    if hint:
        answer = shardkeep(command, tmp_path / "secret", tmp_path / "d", *options, "--codecs", "float,aes")
        assert (answer.code, warning in answer.err) == (0, False)
        assert warning in shardkeep(command, tmp_path / "secret", tmp_path / "e", *options, "--codecs", "float").err


@pytest.mark.parametrize("words", [("convert", "--to", "native"), ("export", "--format", "native", "--prefix", "")])
def test_codecs_by_name(shardkeep, checkpoint, tmp_path, keys, words):
    command, *options = words
    answer = shardkeep(command, checkpoint, tmp_path / "out", *options, "--codecs", "float,aes")
    assert answer.code == 0, answer.err
    assert [each["name"] for each in sk.open(tmp_path / "out").record.chains[0]] == ["float", "aes"]
    assert torch.equal(sk.open(tmp_path / "out")["optim.exp_avg"][:], state_of(30)["optim"]["exp_avg"])
    keys.write_text(sk.new_key())
    with pytest.raises(sk.WrongKey):
        sk.open(tmp_path / "out")
    plain = [options[0], "safetensors" if command == "convert" else "hf"]
    assert shardkeep(command, checkpoint, tmp_path / "no", *plain, "--codecs", "aes").code == 2
