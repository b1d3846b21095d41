"""The same seed and thread count for every test, and a failure for every deprecation that transformers logs."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedModel
from transformers.utils.logging import warning_once

from hf_semspec.common import warn_once as notices
from tests.models import draft_of, tiny, tokenizer

# Examples derive from the test's own name: a run neither depends on the last one nor on the machine's speed.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)


class _Messages(logging.Handler):
    def __init__(self, part: str = "") -> None:
        super().__init__(logging.WARNING)
        self.part = part
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if self.part in message:
            self.messages.append(message)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """A test's draws and warnings do not depend on the tests before it."""
    torch.manual_seed(0)
    notices.forget()


@pytest.fixture(autouse=True)
def _no_deprecations(request: pytest.FixtureRequest) -> Iterator[None]:
    """transformers logs most deprecations, once a process, where no warning filter sees them."""
    logger = logging.getLogger("transformers")
    warning_once.cache_clear()
    handler = _Messages("deprecated")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if request.node.get_closest_marker("deprecated") is None:
        assert not handler.messages, handler.messages


@pytest.fixture(autouse=True)
def _no_late_warnings(request: pytest.FixtureRequest) -> Iterator[None]:
    """A warning that comes when there is work to lose is logged where it is an error, as in these tests."""
    logger, handler = logging.getLogger("hf_semspec"), _Messages()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if "caplog" not in request.fixturenames:
        # Whether a draft gains anything depends on the machine.
        messages = [message for message in handler.messages if "ended with drafting off" not in message]
        assert not messages, messages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target and a near draft with their tokenizer."""
    root = tmp_path_factory.mktemp("models")
    model = tiny(dtype=torch.float32)
    for name, one in (("target", model), ("draft", draft_of(model, "near"))):
        one.save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a near draft."""
    target = tiny("llama", 0)
    return target, draft_of(target, "near")
