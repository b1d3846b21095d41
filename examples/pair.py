"""The pair that the examples run on: the arithmetic lab's by default, any other by --model and --draft."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_semspec import load_draft

LAB = Path(__file__).parent / "arithmetic_lab"
# How the lab's target is asked for its verdict, for the scheme parse.
LAB_JUDGE = {"judge_prompt": "?", "full_judge_prompt": "?", "labels": ("Y", "N")}


def parser(about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--model", default=str(LAB / "target"), help="the target: a Hub id or a folder")
    made.add_argument("--draft", default=str(LAB / "draft"), help="the draft: a Hub id or a folder")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--dtype", help="float32, bfloat16, ... (default: float32 on a CPU, else as stored)")
    made.add_argument("--prompt", action="append", help="what to ask; may be repeated")
    return made


def load(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The target, its draft and the tokenizer."""
    dtype = getattr(torch, arguments.dtype or ("float32" if arguments.device == "cpu" else "auto"), "auto")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    draft_dtype = None if dtype == "auto" else dtype
    return model, load_draft(arguments.draft, device=arguments.device, dtype=draft_dtype), tokenizer


def questions(arguments: argparse.Namespace, count: int = 1) -> list[str]:
    """What was asked for, else `count` problems of the lab, or for another model a question."""
    if arguments.prompt:
        return list(arguments.prompt)
    if not is_lab(arguments):
        return ["Why is the sky blue? Answer in one sentence.", "Name three rivers of Europe."][:count]
    lines = (LAB / "calibration.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


def is_lab(arguments: argparse.Namespace) -> bool:
    return Path(arguments.model) == LAB / "target"


def encode(tokenizer: Any, texts: list[str], device: Any) -> Any:
    """The questions as a padded batch, each as a user's turn where the tokenizer knows turns."""
    if tokenizer.chat_template is None:
        return tokenizer(texts, return_tensors="pt", padding=True).to(device)
    return encode_chats(tokenizer, [[{"role": "user", "content": text}] for text in texts], device)


def encode_chats(tokenizer: Any, chats: list[Any], device: Any) -> Any:
    """The chats as a padded batch, each up to where the next turn of the model begins."""
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return tokenizer(rendered, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
