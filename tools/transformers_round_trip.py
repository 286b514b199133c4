"""Weights to transformers and back, on two ranks: `python tools/transformers_round_trip.py`. It needs transformers.

A small Llama with random weights, its embeddings tied and not: `save_pretrained`, `rg.load_pretrained` into a model
that was sharded on the meta device, `rg.export`, `from_pretrained`. Weights and logits are compared bit for bit.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import retrograde as rg

WORLD = 2
SIZE = "200KB"  # of a file, so that there are several


def _config(tied: bool) -> LlamaConfig:
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)


def _same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    wanted, found = one.state_dict(), other.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(one(ids).logits, other(ids).logits)


def _rank(rank: int, port: int, folder: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for tied in (False, True):
        config = _config(tied)
        torch.manual_seed(0)
        theirs = LlamaForCausalLM(config)
        if rank == 0:
            theirs.save_pretrained(f"{folder}/theirs-{tied}", max_shard_size=SIZE)
        dist.barrier()
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        rg.shard(model, 3, init=model._init_weights)
        rg.load_pretrained(model, f"{folder}/theirs-{tied}")
        _same(theirs, model)
        rg.export(f"{folder}/ours-{tied}", model, file_size=SIZE)
        if rank == 0:
            config.save_pretrained(f"{folder}/ours-{tied}")
        dist.barrier()
        _same(theirs, AutoModelForCausalLM.from_pretrained(f"{folder}/ours-{tied}"))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (store.port, folder), nprocs=WORLD)
    print("weights and logits are the same, tied and not")
    return 0


if __name__ == "__main__":
    sys.exit(main())
