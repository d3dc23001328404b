# SPDX-License-Identifier: Apache-2.0
"""The network that runs, and others on their way: loaded beside it, and swapped between scans."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from apusmog_core.compute import cache_complaint
from apusmog_core.config import NodeConfig, PipelineConfig
from apusmog_core.interim import InterimPipeline
from apusmog_core.settings import with_values

if TYPE_CHECKING:
    from apusmog_core.pipeline import ScanPipeline

SETTINGS = ("weights", "device", "precision")  # a change of these loads a network


class Networks:
    """Gives the pipeline for the next scan; until the first is ready, one that interpolates.

    `say` logs; `fail` is called with what could not be loaded, why, and what runs instead.
    """

    def __init__(
        self,
        config: NodeConfig,
        say: Callable[[str], None],
        fail: Callable[[dict, Exception, dict | None], None],
    ):
        self._say, self._fail = say, fail
        self._turn = threading.Lock()  # one loads at a time: a burst of changes is not to take all
        self._lock = threading.Lock()  # of all below
        self._config = config
        self._pipeline: ScanPipeline | InterimPipeline = InterimPipeline(config)
        self._running: dict[str, str] | None = None
        self.state = "getting ready"
        self._loading: dict[str, str] | None = chosen(config)
        self._start(config)

    def pipeline(self) -> ScanPipeline | InterimPipeline:
        with self._lock:
            return self._pipeline

    def configure(self, config: NodeConfig) -> None:
        """Use settings from the next scan on; another network when it is loaded."""
        wished = chosen(config)
        with self._lock:
            running, loading = wished == self._running, wished == self._loading
            if not (running or loading):
                from apusmog_core import weights

                weights.find(config.weights)
            self._use(self._pipeline, config, self._running)  # what is refused changes nothing
            if running:
                self._loading = None
            elif not loading:
                self._loading = wished
                self._start(config)

    def restart(self) -> None:
        """Forget what was learned of the scans before: others follow."""
        with self._lock:
            self._pipeline = self._pipeline.restarted()

    def _start(self, config: NodeConfig) -> None:
        threading.Thread(target=self._load_in_turn, args=(config,), daemon=True).start()

    def _use(
        self,
        pipeline: ScanPipeline | InterimPipeline,
        config: NodeConfig,
        running: dict[str, str] | None,
    ) -> None:
        """Run this network, which is `running`, with these settings; the caller holds the lock."""
        self._pipeline = pipeline.configured(with_values(config, running or {}))
        self._config, self._running = config, running

    def _load_in_turn(self, config: NodeConfig) -> None:
        with self._turn:
            if self._loading == chosen(config):  # else the user has changed their mind
                self._load(config)

    def _load(self, config: NodeConfig) -> None:
        wished = chosen(config)
        try:
            from apusmog_core.pipeline import ScanPipeline

            with self._compiling():
                pipeline = ScanPipeline(config)  # loads PyTorch, which takes seconds
                pipeline.warm_up()
            with self._lock:
                if self._loading != wished:
                    return
                if isinstance(self._pipeline, ScanPipeline):
                    pipeline = self._pipeline.with_upsampler(pipeline.upsampler)
                self._use(pipeline, self._config, wished)
                self._loading, self.state = None, "ready"
        except Exception as error:
            with self._lock:
                if self._loading != wished:
                    return
                self._loading, running = None, self._running
            self._fail(wished, error, running)
            return
        self._say(f"upsampling with {config.weights} on {pipeline.device}")

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Say that the compiler runs, when it does, and where its work cannot be kept."""
        from numba.core import event

        heard: list[str] = []

        class Compiler(event.Listener):
            def on_start(self, _) -> None:
                if not heard:
                    heard.append("compiling")
                    compiling()

            def on_end(self, _) -> None:
                pass

        def compiling() -> None:
            if self.state != "ready":
                self.state = "compiling"
            self._say(
                "compiling, which takes a minute the first time; objects are interpolated "
                "meanwhile (`apusmog warm-up` compiles in advance)"
            )

        listener = Compiler()
        event.register("numba:compile", listener)
        try:
            yield
        finally:
            event.unregister("numba:compile", listener)
        if heard and (complaint := cache_complaint()):
            warnings.warn(complaint, stacklevel=2)  # the node logs it


def chosen(config: PipelineConfig) -> dict[str, str]:
    return {name: getattr(config, name) for name in SETTINGS}
