"""What drafts for a call of a token-level scheme: its draft model, the text so far, or both."""

from collections.abc import Sequence
from typing import Any

from ..engine.call import CallState
from ..engine.costs import CostTable
from ..engine.draft import Drafter
from ..engine.gamma import LONGEST, ChosenLength, FixedLength
from ..engine.mapped_model import MappedModel
from ..engine.processors import Processors
from ..engine.ranks import share_value
from ..engine.timing import costs_of
from .chain import ChainGenerator
from .forced import ForcedFirst
from .heads import is_head
from .ngram import NGramFirst, NGramGenerator
from .other_tokenizer import ForeignGenerator
from .vocabulary import first_clash


def asks_for_model(scheme: Any) -> bool:
    """Whether the scheme's config wants a draft model; n-grams alone are drafted without one."""
    return getattr(scheme, "draft", "model") != "ngram"


def drafter(
    call: CallState,
    config: Any,
    with_laws: bool = False,
    rows: Sequence[int] | None = None,
    decoder: MappedModel | None = None,
) -> Drafter:
    """Drafts for `call`, as the token-level scheme `config` wants them.

    Args:
        rows: the rows to draft for, indices into the caller's batch; all by default.
        decoder: the draft model with what its cache holds already; made anew by default.
    """
    with_laws = with_laws or call.sampling or call.trace is not None
    found = _drafter(call, config, with_laws, rows, decoder)
    processors = Processors(call.request.processors)
    if found.chains > 1 or not processors.wants_text:
        return found
    return ForcedFirst(found, processors.copies(), call.vocabulary, with_laws, call.device)


def _drafter(
    call: CallState, config: Any, with_laws: bool, rows: Sequence[int] | None, decoder: MappedModel | None
) -> Drafter:
    kind = getattr(config, "draft", "model")
    if kind == "model":
        return chain_generator(call, config, with_laws, decoder, rows)
    rows = call.rows if rows is None else rows
    most = LONGEST if config.num_draft_tokens == "auto" else config.num_draft_tokens
    ngrams = NGramGenerator(
        call.vocabulary,
        most,
        dict(zip(rows, call.canvas.texts(rows), strict=True)),
        max_length=call.longest,
        with_laws=with_laws,
        device=call.device,
        max_ngram=config.max_ngram,
    )
    return ngrams if kind == "ngram" else NGramFirst(ngrams, chain_generator(call, config, with_laws, decoder, rows))


def chain_generator(
    call: CallState,
    config: Any,
    with_laws: bool = False,
    decoder: MappedModel | None = None,
    rows: Sequence[int] | None = None,
) -> ChainGenerator:
    """Drafts of the request's draft model for `call`, as the token-level scheme `config` wants them."""
    request = call.request
    common: Any = {
        "processors": Processors(request.processors).copies(),
        "randomness": call.randomness if call.sampling else None,
        "length": draft_length(call, config),
        "chains": getattr(config, "num_chains", 1),
        "max_length": call.longest,
        "with_laws": with_laws or call.sampling or call.trace is not None,
        "device": call.device,
        "static": config.compile_draft,
    }
    tokenizers = request.tokenizer, request.assistant_tokenizer
    if first_clash(*tokenizers) is None:
        source = None if decoder is not None else call.sources.of_draft()
        common |= {"batch": call.batch, "decoder": decoder, "source": source}
        if is_head(request.draft):
            from .heads.generator import HeadGenerator  # imports a model of transformers

            common = {key: value for key, value in common.items() if key not in ("decoder", "source", "static")}
            return HeadGenerator(request.draft, call.vocabulary, **common)
        chains = ChainGenerator(request.draft, call.vocabulary, **common)
        _show_images(call, chains)
        return chains
    if call.sources.beside_text:
        raise ValueError(
            "a draft with another tokenizer (assistant_tokenizer) reads text alone, and this prompt has more: pass a "
            "draft of the target's family"
        )
    rows = call.rows if rows is None else rows
    texts = dict(zip(rows, call.canvas.texts(rows), strict=True))
    return ForeignGenerator(request.draft, tokenizers, texts, call.vocabulary, **common)


def draft_length(call: CallState, config: Any) -> FixedLength:
    """γ as `config` wants it: a number, or chosen by what rounds cost, from its profile or measured."""
    if config.num_draft_tokens != "auto":
        return FixedLength(config.num_draft_tokens)
    request = call.request
    if config.cost_profile is not None:
        costs = CostTable.from_dict(config.cost_profile)
    else:
        costs = costs_of(request.model, request.draft, config.compile_draft, call.sampling)
    return ChosenLength(costs, share_value)


def _show_images(call: CallState, drafter: ChainGenerator) -> None:
    """Let the draft read the prompts with their images, before any row can end and leave it with too many."""
    sources, canvas = call.sources, call.canvas
    if not sources.images:
        return
    rows, lengths = call.rows, canvas.lengths(call.rows)
    prompts = canvas.read(rows, max(lengths), 0)[:: drafter.chains * sources.repeats]
    drafter.read_prompts(prompts, lengths, [row // sources.repeats for row in rows for _ in range(drafter.chains)])
