"""Two models and one changed line: plain decoding, then the same text with a draft.

python examples/quickstart.py
python examples/quickstart.py --model HuggingFaceTB/SmolLM2-1.7B-Instruct --draft HuggingFaceTB/SmolLM2-135M-Instruct \
    --device cuda --prompt "The tides are caused by"
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_semspec import SemSpecConfig, load_draft

LAB = Path(__file__).parent / "arithmetic_lab"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=str(LAB / "target"))
parser.add_argument("--draft", default=str(LAB / "draft"))
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--prompt", default="91-52-08+33-76-97=<|answer|>")
arguments = parser.parse_args()

dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(arguments.device)
draft = load_draft(arguments.draft, dtype=dtype, device=arguments.device)
inputs = tokenizer(arguments.prompt, return_tensors="pt", return_token_type_ids=False).to(arguments.device)

plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)

config = SemSpecConfig("lossless", max_new_tokens=64, do_sample=False, return_dict_in_generate=True)
out = model.generate(**inputs, assistant_model=draft, generation_config=config)

print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
print(f"{out.stats.emitted} tokens by {out.stats.target_forwards} target forwards, ", end="")
print(f"{out.stats.acceptance_rate:.0%} of the drafted tokens accepted")
print("the same text as plain decoding:", torch.equal(out.sequences, plain))
