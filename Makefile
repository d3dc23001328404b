# SPDX-License-Identifier: Apache-2.0
# `make` alone explains itself.

# With a sourced ROS 2 its packages are used, without one the wheels from PyPI.
READY := .venv/ready-$(or $(ROS_DISTRO),wheels)
PYTHON := .venv/bin/python

.PHONY: help env demo test lint bench bench-compare clean

help:
	@echo 'make env      create .venv (the others do it, too): some minutes, 2.3 GB, more with CUDA'
	@echo 'make demo     a simulated street through the node: a table, a picture, a 3-D page'
	@echo 'make demo BAG=path          the same with a bag or KITTI folder of yours'
	@echo 'make test     the tests'
	@echo 'make lint     ruff check, ruff format --check'
	@echo 'make bench    speed and memory; make bench-compare A=old.json B=new.json compares'
	@echo 'make clean    remove .venv and everything that was built'
	@echo
	@echo 'Then: . .venv/bin/activate, and apusmog --help'

env: $(READY)
	@echo 'ready; enter it with: . .venv/bin/activate'

test: $(READY)
	$(PYTHON) -m pytest -q

demo: $(READY)
	$(PYTHON) -m apusmog_ros.demo $(if $(BAG),--bag "$(BAG)")

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

bench: $(READY)
	$(PYTHON) -m tools.bench

bench-compare: $(READY)
	@$(PYTHON) -m tools.bench --compare "$(A)" "$(B)"

clean:
	rm -rf .venv build install log demo .pytest_cache .ruff_cache *.egg-info
	find apusmog_core apusmog_ros tools test examples launch -name __pycache__ -prune -exec rm -rf {} +

# --- the environment: made once, again when what it is made from changes --------------------------

LIBRARIES := libusb-1.0-0 libgl1 libegl1 libx11-6 libgomp1 # Open3D and PyTorch load these
SUPPORTED := import sys; assert (3, 10) <= sys.version_info[:2] <= (3, 12)
ROS_LOADS := $(if $(ROS_DISTRO),; import rclpy)

$(READY): setup.py constraints.txt
	@$(system_packages)
	@test -e $@ || { $(find_python); $$python -m venv --clear $(if $(ROS_DISTRO),--system-site-packages) .venv; }
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install -c constraints.txt $(torch_builds) -e '.[dev$(if $(ROS_DISTRO),,,ros)]'
	$(PYTHON) -m apusmog_core warm-up
	@touch $@

# Where there is no NVIDIA GPU, the CPU build of PyTorch, without gigabytes of CUDA: its version has
# a local part (+cpu), so that pip prefers it. A pip that is configured to look elsewhere stays so.
CPU_BUILDS := https://download.pytorch.org/whl/cpu
define torch_builds
$$(nvidia-smi -L 2>/dev/null | grep -q GPU || $(PYTHON) -m pip config list | grep -qE 'index|find-links' \
	|| echo --extra-index-url $(CPU_BUILDS))
endef

# A name on the PATH may have no interpreter behind it (pyenv), and a ROS is built for one Python.
define find_python
for python in python3.12 python3.11 python3.10 python3 none; do \
	$$python -c "$(SUPPORTED)$(ROS_LOADS)" 2>/dev/null && break; \
done; \
if [ $$python = none ]; then \
	echo "Python 3.10, 3.11 or 3.12$(if $(ROS_DISTRO), that loads ROS $(ROS_DISTRO)) is needed" >&2; exit 1; \
fi; \
echo "creating .venv with $$($$python --version)"
endef

# Debian and Ubuntu: install what is missing as root, else say how. No browser only skips its test.
define system_packages
if command -v dpkg >/dev/null; then \
	missing=; browser=; \
	for package in $(LIBRARIES); do dpkg -s $$package >/dev/null 2>&1 || missing="$$missing $$package"; done; \
	python3 -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	which chromium chromium-browser google-chrome 2>/dev/null | grep -q . || browser=chromium; \
	if [ "$$(id -u)" = 0 ] && [ -n "$$missing$$browser" ]; then \
		export DEBIAN_FRONTEND=noninteractive; apt-get update -q; \
		[ -z "$$missing" ] || apt-get install -yq --no-install-recommends $$missing || exit 1; \
		[ -z "$$browser" ] || apt-get install -yq --no-install-recommends $$browser \
			|| echo "no chromium: the test of the page will be skipped"; \
	elif [ -n "$$missing" ]; then \
		echo "system packages are missing; run: sudo apt-get install$$missing $$browser" >&2; exit 1; \
	elif [ -n "$$browser" ]; then \
		echo "to test the page too, run: sudo apt-get install $$browser"; \
	fi; \
fi
endef
