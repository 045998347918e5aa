# `make train` trains a robot, `make test` runs the tests; both build .venv first if it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup train play test slow lint format nes_py fceumm atari peers bench clean

BENCHMARKS := stepping loop learning scaling cage2_workflows

$(VENV)/.ready: requirements.txt
	$(if $(word 2,$(CURDIR)),$(error torch.compile cannot work in $(CURDIR), whose path has a space: move the folder))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

setup: $(VENV)/.ready   ## what all others do first

train: $(VENV)/.ready   ## HalfCheetah learns to run: two to four minutes
	$(BIN)/python ppo_continuous_mujoco.py --configs halfcheetah $(ARGS)

play: fceumm            ## films of a trained robot and of a trained Mario in zoo/gifs/, in a minute
	$(BIN)/python ppo_continuous_mujoco.py play --checkpoint zoo/HalfCheetah-v5.pt --seed 1 --save-gif --gif-frames 150 $(ARGS)
	$(BIN)/python ppo_atari_mario.py play --checkpoint zoo/Mario-1-1.pt --seed 1 --save-gif $(ARGS)

test: $(VENV)/.ready    ## the default suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

slow: $(VENV)/.ready    ## the learning tests
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.ready    ## style, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Compiled twice from its own source: first to count which branches a game takes, then to fit them. The frames stay the
# same, bit for bit. What pip installed is replaced at the very end.
NES_PY := $(abspath $(VENV))/nes_py
nes_py_flags = -O3 -fwrapv -DNDEBUG -flto=auto -fno-semantic-interposition -frecord-gcc-switches -fprofile-$(1)
compile_nes_py = CFLAGS="$(nes_py_flags)" CXXFLAGS="$(nes_py_flags)" LDFLAGS="$(nes_py_flags)" \
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "$(NES_PY)"
nes_py: $(VENV)/.ready  ## nes-py 8 (Python 3.11, 3.12; GCC) optimised for Mario, nearly twice as fast as the one that pip builds
	@$(BIN)/python -c "import sys; sys.version_info < (3, 13) or sys.exit('nes-py 9, for Python 3.13 and later, comes compiled')"
	rm -rf "$(NES_PY)" && mkdir "$(NES_PY)"
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary nes-py --dest "$(NES_PY)" nes-py==8.2.1
	tar -xzf "$(NES_PY)"/*.tar.gz --strip-components=1 -C "$(NES_PY)"
	$(call compile_nes_py,generate) --target "$(NES_PY)/profiled"
	PYTHONPATH="$(NES_PY)/profiled" $(BIN)/python -c "from envs.nes_core import make_core; core = make_core('nes_py'); core.power_on(); \
	[core.step(8 * (i % 20 < 5) if i < 120 else 129 - (i % 40 < 9)) for i in range(2000)]"
	find "$(NES_PY)/build" -name '*.o' -delete && rm -rf "$(NES_PY)"/build/lib*
	$(call compile_nes_py,use) --force-reinstall
	rm -rf "$(NES_PY)"

fceumm: $(VENV)/.ready  ## the faster Mario emulator; --no-deps because its pyglet differs from nes-py's, and neither is used
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps stable-retro==1.0.1

atari: $(VENV)/.ready   ## Atari games
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.txt ale-py==0.12.1 opencv-python-headless==5.0.0.93

$(VENV)/.bench: pyproject.toml $(VENV)/.ready  ## the extra `bench`, without the project itself; torch and NumPy stay
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.txt $$($(BIN)/python -c \
	"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['bench'])")
	touch $@

peers: $(VENV)/.bench fceumm   ## what the benchmarks compare with, and the faster emulator

bench: peers   ## quick forms of all benchmarks but speed, into runs/bench; the long ones write results/
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --quick || exit 1; done
