"""The evaluator: quality beside speed, of every scheme and its rivals, on a task of yours."""

from .contenders import Contender
from .evaluate import evaluate, sweep
from .report import Report
from .tasks import Example, Task, gsm8k, jsonl

__all__ = ["Contender", "Example", "Report", "Task", "evaluate", "gsm8k", "jsonl", "sweep"]
