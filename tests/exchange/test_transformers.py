"""A model of transformers, trained over ranks, saved, exported, and opened by `from_pretrained`: the same logits."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch.distributed.fsdp import fully_shard

import shardkeep as sk
from shardkeep.cli.main import main
from tests.engine.samples import bits
from tests.toolkit.samples import mesh_of

pytest.importorskip("transformers", reason="pip install transformers: shows that exports open there")

with_model = "model.{}".format
TOKENS = torch.arange(24).reshape(2, 12) % 60


def llama(*, tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def sharded(model):
    mesh = mesh_of(dist.get_world_size())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def answers(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits.numpy().tobytes()


def train_and_save(where, tied):
    """On a rank: shard the model over all ranks, change its weights in a step, save it; return the logits."""
    model = llama(tied=tied)
    if dist.get_rank() == 0:
        model.config.save_pretrained(f"{where}/config")
    sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    sk.save({"model": model, "optimizer": optimizer, "step": 1}, f"{where}/ck")
    return answers(model)


def load_export(where, tied):
    """On a rank: load what was exported into a sharded model of other weights; return the logits."""
    model = llama(tied=tied)
    torch.nn.init.ones_(model.model.embed_tokens.weight)
    sk.load({"model": sharded(model)}, f"{where}/hf", rename=with_model)
    return answers(model)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", [5e9, 8000], ids=["one file", "several files"])
def test_an_export_gives_equal_logits(rank_pool, tmp_path, tied, shard):
    """`from_pretrained` opens an export of two ranks, tied or not, in any number of files, with identical answers."""
    from transformers import AutoModelForCausalLM

    logits = rank_pool.run(2, train_and_save, str(tmp_path), tied)
    report = sk.export(tmp_path / "ck", tmp_path / "hf", max_shard_bytes=shard, config=tmp_path / "config")
    assert report.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert (len(report.files) > 1) == (shard < 1e9)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert answers(model) == logits[0] == logits[1]
    assert set(rank_pool.run(3, load_export, str(tmp_path), tied)) == {logits[0]}


def written(model, where, writer):
    """The files of a model, by one of the libraries that store tied weights once."""
    if writer == "save_model":
        save_model(model, where / "model.safetensors")
        return where / "model.safetensors"
    if writer == "transformers":
        model.save_pretrained(where / "hf")
    else:
        sk.save({"model": model, "step": 3}, where / "ck")
        sk.export(where / "ck", where / "hf", max_shard_bytes=8000)
    return where / "hf"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("writer", ["export", "transformers", "save_model"])
def test_weights_that_were_stored_once_are_loaded_under_both_names(tmp_path, writer, device):
    """Tied models load from either name of a weight; untied ones only if the files say what the other name is."""
    model = llama(tied=True)
    where = written(model, tmp_path, writer)
    tied, apart = (llama(tied=each).to(device) for each in (True, False))
    tied.tie_weights()
    torch.nn.init.ones_(tied.model.embed_tokens.weight)
    sk.load({"model": tied}, where, rename=with_model)
    assert bits(tied.state_dict()) == bits(model.state_dict())
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    if writer == "transformers":
        with pytest.raises(sk.StateMismatch, match=r"model\.lm_head\.weight"):
            sk.load({"model": apart}, where, rename=with_model)
    else:
        sk.load({"model": apart}, where, rename=with_model)
        assert bits(apart.state_dict()) == bits(model.state_dict())


def test_an_export_shows_no_difference(tmp_path, capsys):
    """`diff` finds all names of a checkpoint in its export; `open` lists and reads both names of tied weights."""
    where = written(llama(tied=True), tmp_path, "export")
    assert main(["diff", str(tmp_path / "ck"), str(where), "--strip-prefix", "model."]) == 0
    assert "no difference: 21 keys" in capsys.readouterr().out
    one, other = (sk.open(where)[name] for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert torch.equal(one[3:5], other[3:5])
    held = sk.open(where).to_dict()
    assert held["lm_head.weight"] is held["model.embed_tokens.weight"]
    # The name that is not stored is not missed by a state without it.
    state = {name: torch.empty_like(tensor) for name, tensor in held.items() if name != "lm_head.weight"}
    assert sk.load(state, where).unexpected == []
