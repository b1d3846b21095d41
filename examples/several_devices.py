"""A target over several processes: sharded within its layers for the same prompts, or its weights sharded while each
process has prompts of its own.

torchrun --nproc-per-node 2 examples/several_devices.py --shard tensor
torchrun --nproc-per-node 2 examples/several_devices.py --shard full
torchrun --nproc-per-node 8 examples/several_devices.py --shard tensor --device cuda --model ... --draft ...
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_semspec import SemSpecConfig, load_draft

LAB = Path(__file__).parent / "arithmetic_lab"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=str(LAB / "target"))
parser.add_argument("--draft", default=str(LAB / "draft"))
parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
parser.add_argument("--shard", default="tensor", choices=["tensor", "full"])
parser.add_argument("--scheme", default="lossless")
parser.add_argument("--prompt", action="append")
arguments = parser.parse_args()

rank, local, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
device = torch.device(arguments.device, local if arguments.device == "cuda" else None)
if arguments.device == "cuda":
    torch.cuda.set_device(device)
distributed.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
prompts = arguments.prompt or ["91-52-08+33-76-97=<|answer|>", "03+00-74*06*03=<|answer|>"]
if arguments.shard == "full" and len(prompts) < size:
    parser.error(f"--shard full needs a --prompt for each of the {size} processes")
tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")

if arguments.shard == "tensor":
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, tp_plan="auto")
else:
    prompts = prompts[rank::size]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
draft = load_draft(arguments.draft, dtype=dtype, device=device)  # whole on every process

config = SemSpecConfig(arguments.scheme, max_new_tokens=48, do_sample=False)
inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(device)
call = {"assistant_model": draft, "generation_config": config, "synced_gpus": arguments.shard == "full"}
for text in tokenizer.batch_decode(model.generate(**inputs, **call), skip_special_tokens=True):
    print(f"process {rank}: {text}", flush=True)
distributed.destroy_process_group()
