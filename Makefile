# `make train` and `make test` do everything on a machine with git, make and any Python 3; `make help` lists the rest.
#
# .uv/     uv, put there by whichever Python 3 is on PATH     .releases/VERSION/   one megatron-core wheel, for test-releases
# .venv/   the environment: Python as .python-version says (found by uv, pyenv's included, or fetched), requirements.txt
#
# Each ends in a stamp file written last, so nothing is installed twice, and a half-made folder is made anew.

UV_VERSION = 0.13.9
RELEASES = 0.16.1 0.17.1 0.18.2 0.19.2
RELEASE_TESTS = $(wildcard tests/test_mtp_loss.py tests/test_mtp_mask.py tests/test_mtp_recompute.py \
	tests/test_ref_disable.py tests/test_drafter_sync.py)
VERL = 0.9.1
VERL_PINS = verl==$(VERL) ray==2.60.0 tensordict==0.10.0 omegaconf==2.4.0 msgpack==1.2.4 \
	orjson==3.13.0 codetiming==1.4.0 pyvers==0.2.3
JOBS = 2
ARGS =

UV = .uv/bin/uv
UV_READY = .uv/ready-$(UV_VERSION)
PYTHON = .venv/bin/python
VENV_READY = .venv/ready

# The caller's environment must not leak in. Without bytecode files each process would compile torch, Megatron and vLLM
# again (10 s), so they are always written.
unexport VIRTUAL_ENV CONDA_PREFIX PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV UV_PYTHON UV_SYSTEM_PYTHON UV_TARGET UV_PREFIX
STOP = { echo "make: $(1)" >&2; exit 1; }

.PHONY: help train test test-releases test-verl test-drafters check figures lock clean force $(RELEASES:%=release-%)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile
	@echo 'ARGS="..." is passed on: make train ARGS="--steps 5 --seed 1", make test ARGS="-k mask -x"'

train: $(VENV_READY) ## install what is missing, then run train_mimo.py (ARGS="--help" explains its arguments)
	$(PYTHON) train_mimo.py $(ARGS)

test: $(VENV_READY) ## every test but the slow ones
	$(PYTHON) -m pytest -m "not slow and not verl and not drafters" $(ARGS)

test-drafters: $(VENV_READY) ## fix 5 on the MTP drafters of other architectures (5 minutes)
	$(PYTHON) -m pytest tests/test_drafters.py $(ARGS)

test-releases: $(VENV_READY) ## the Megatron tests on megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2, JOBS=2 at a time
	@$(MAKE) --no-print-directory --keep-going --output-sync=target --jobs=$(JOBS) $(RELEASES:%=release-%)

test-verl: .verl/$(VERL)/ready ## the fixes inside verl 0.9.1's own code
	PYTHONPATH=$(CURDIR)/$(<D) $(PYTHON) -m pytest -p no:cacheprovider -m verl \
		tests/test_verl.py $(ARGS)

check: $(VENV_READY) ## ruff: lint and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

figures: $(VENV_READY) ## draw the README's figures
	$(PYTHON) figures/make_figures.py $(ARGS)
	$(PYTHON) figures/compare_drafts.py --draw

lock: $(UV_READY) ## recompile requirements.txt from its head (ARGS="--upgrade" takes newer releases)
	@for key in in override exclude; do sed -n "s/^#$$key  *//p" requirements.txt | tr ' ' '\n' > .uv/$$key; done
	@grep -v '^#' requirements.txt > .uv/pins
	$(UV) pip compile --quiet --python-version "$$(cat .python-version)" --python-platform x86_64-manylinux_2_28 \
		--no-header --no-annotate --no-emit-index-url --overrides .uv/override --excludes .uv/exclude $(ARGS) \
		--output-file .uv/pins .uv/in
	@{ grep '^#' requirements.txt; cat .uv/pins; } > .uv/lock
	@cmp -s .uv/lock requirements.txt && echo "requirements.txt is as it was" || cp .uv/lock requirements.txt

clean: ## remove what make installed, and caches (runs/ stays)
	rm -rf .venv .uv .releases .verl .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first Python on PATH that can make a virtual environment, or else has pip, installs uv. A pyenv shim without the
# version that .python-version names fails like a missing one. pip's own words go to a file.
$(UV_READY): $(shell test -x $(UV) || echo force)
	@echo "Installing uv $(UV_VERSION) into .uv/"
	@rm -rf .uv; seen=; IFS=:; \
	for folder in $$PATH; do for python in "$$folder/python3" "$$folder/python"; do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2> /dev/null || continue; \
		seen=1; rm -rf .uv; mkdir .uv; \
		if "$$python" -m venv .uv > .uv/log 2>&1; then \
			.uv/bin/python -m pip install uv==$(UV_VERSION) > .uv/log 2>&1 && touch $@; break 2; \
		elif "$$python" -m pip --version > /dev/null 2>&1; then \
			"$$python" -m pip install --target .uv uv==$(UV_VERSION) > .uv/log 2>&1 && touch $@; break 2; \
		else seen=bare; fi; \
	done; done; \
	test -f $@ || case "$$seen" in \
		"") $(call STOP,no Python 3.8 or newer is on PATH: install one (Debian: apt-get install python3-venv) and run make again);; \
		bare) $(call STOP,python3 has neither venv nor pip: install one (Debian: apt-get install python3-venv) and run make again);; \
		*) $(call STOP,pip could not install uv $(UV_VERSION): .uv/log says why);; esac

$(VENV_READY): requirements.txt .python-version $(shell test -x $(PYTHON) || echo force) | $(UV_READY)
	@echo "Installing requirements.txt into .venv/"
	@rm -rf .venv
	@version="$$(cat .python-version)"; $(UV) venv --python "$$version" .venv > .uv/log 2>&1 || \
		$(call STOP,Python $$version is not on this machine and uv could not fetch it (.uv/log says why): install it (pyenv install $$version) and run make again)
	@$(UV) pip install --python $(PYTHON) --no-deps -r requirements.txt || \
		$(call STOP,some package of requirements.txt could not be installed; uv says above which)
	@touch $@

# One release before the environment's own: `megatron` is a namespace package, so the first folder on the path wins.
$(RELEASES:%=release-%): release-%: .releases/%/ready
	@echo; echo "===== megatron-core $* ====="
	@NO_VCS_VERSION=1 PYTHONPATH=$(CURDIR)/.releases/$* $(PYTHON) -W ignore -c "import megatron.core, torch; \
		print('imported: megatron.core', megatron.core.__version__, 'torch', torch.__version__, flush=True); \
		assert megatron.core.__version__ == '$*', 'wanted $*'"
	@PYTHONPATH=$(CURDIR)/.releases/$* $(PYTHON) -m pytest -p no:cacheprovider -m "not engine and not slow and not cuda" \
		$(RELEASE_TESTS) $(ARGS)

$(RELEASES:%=.releases/%/ready): .releases/%/ready: $(VENV_READY)
	@rm -rf $(@D)
	@$(UV) pip install --quiet --python $(PYTHON) --no-deps --target $(@D) megatron-core==$* || \
		$(call STOP,megatron-core $* could not be installed; uv says above why)
	@touch $@

# What verl's modules import on their way (Ray is most of the 220 MB); all else is .venv's.
.verl/$(VERL)/ready: $(VENV_READY)
	@echo "Installing verl $(VERL) into $(@D)/"
	@rm -rf $(@D)
	@$(UV) pip install --quiet --python $(PYTHON) --no-deps --target $(@D) $(VERL_PINS) || \
		$(call STOP,verl $(VERL) could not be installed; uv says above why)
	@touch $@
