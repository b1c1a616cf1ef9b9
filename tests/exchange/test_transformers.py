"""A model of transformers, trained over ranks, saved, exported, and opened by `from_pretrained`: the same logits."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shardkeep as sk
from tests.toolkit.samples import mesh_of

pytest.importorskip("transformers", reason="pip install transformers: shows that exports open there")

TOKENS = torch.arange(24).reshape(2, 12) % 60


def llama(*, tied):
    """A small model with random weights; nothing is downloaded."""
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


def train_and_save(where, tied):
    """On a rank: shard the model over all ranks, change its weights in a step, save it; return the logits."""
    model = llama(tied=tied)
    if dist.get_rank() == 0:
        model.config.save_pretrained(f"{where}/config")
    mesh = mesh_of(dist.get_world_size())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    sk.save({"model": model, "optimizer": optimizer, "step": 1}, f"{where}/ck")
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.numpy().tobytes()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", [5e9, 8000], ids=["one file", "several files"])
def test_an_export_gives_equal_logits(rank_pool, tmp_path, tied, shard):
    """
    `from_pretrained` opens what was exported from two ranks, with tied weights or not, in one file or several, and the
    model's answers are bit for bit those of the model that was trained.
    """
    from transformers import AutoModelForCausalLM

    logits = rank_pool.run(2, train_and_save, str(tmp_path), tied)
    report = sk.export(tmp_path / "ck", tmp_path / "hf", max_shard_bytes=shard, config=tmp_path / "config")
    assert report.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert (len(report.files) > 1) == (shard < 1e9)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        found = model.eval()(input_ids=TOKENS).logits.numpy().tobytes()
    assert found == logits[0] == logits[1]
