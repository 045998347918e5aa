"""The parent's side of SubprocVecEnv's workers: start, command, wait, report, replace and end them.

Every wait here has a limit and notices a dead worker; every end of a worker has a reason in words.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, reduction, util
from typing import Any

from gymnasium import Env, logger
from gymnasium.vector.utils import CloudpickleWrapper, clear_mpi_env_vars

from envs._shared_memory import SharedBatch, map_tree
from envs._subproc_worker import (
    COMMAND,
    IDLE,
    MESSAGE,
    PARENTS_SIGNALS,
    PICKLED,
    REPLY,
    RUNNING,
    STEP,
    EnvError,
    Requests,
    Results,
    WorkerSetup,
    keep_blocking,
    poll,
    worker_main,
)

LIVENESS_SECONDS = 0.05  # how often a wait looks whether the worker still lives
STANDSTILL_SECONDS = 1.0  # between two looks: then this process itself did not run
TRACE_SECONDS = 0.5  # how long a hung worker is given to write down where it is
CLOSE_SECONDS = 2.0  # how long environments may take to close before their worker is killed
MAX_RESTARTS = 3  # of one worker, without a step finished in between


class WorkerError(RuntimeError):
    """A worker died or hung, or an environment in it raised; then it is of that exception's type as well.

    Attributes:
        worker: the worker that is gone, or None if an environment raised.
        errors: what the environments raised.
    """

    worker: Worker | None = None
    errors: Sequence[EnvError] = ()

    def __init__(self, message: str) -> None:
        self.args = (message,)  # without the mixed-in class's __init__, which may want other arguments

    def __str__(self) -> str:
        return str(self.args[0])  # with KeyError mixed in it would be the repr, on one line

    @classmethod
    def of_kind(cls, kind: Any, message: str) -> WorkerError:
        """Return a WorkerError that `except kind` also catches, if `kind` is an exception class and allows that."""
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(Exception):  # OSError, for one, lays out its instances in another way
                return type(kind.__name__, (cls, kind), {"__module__": kind.__module__})(message)
        return cls(message)


class Worker:
    """One worker as the parent sees it: its process, its pipes and semaphores, and what it still has to answer."""

    process: Any
    deadline = math.inf
    control: Any = None  # its row of SharedBatch.control, once that exists

    def __init__(self, index: int, env_indices: range) -> None:
        self.index = index
        self.env_indices = env_indices
        self.started = False
        self.pending = False
        self.reply: tuple[list[EnvError], Any] = ([], [])
        self.failures = 0  # since the last step it finished

    def start(self, context: Any, daemon: bool, others: Sequence[Worker], **options: Any) -> None:
        """Start the process. Its pipes are made just before, so that no worker inherits another one's ends."""
        self.go, self.done = context.Semaphore(0), context.Semaphore(0)
        self.pipe, worker_pipe = context.Pipe()
        self.crash_pipe, worker_crash_pipe = context.Pipe(duplex=False)
        self.pending, self.reply = False, ([], [])
        method = context.get_start_method()
        parents_ends = [pipe for worker in (self, *others) for pipe in (worker.pipe, worker.crash_pipe)]
        setup = WorkerSetup(
            index=self.index,
            env_indices=self.env_indices,
            pipe=worker_pipe,
            go=self.go,
            done=self.done,
            crash_pipe=worker_crash_pipe,
            inherited=parents_ends if method == "fork" else [],
            **options,
        )
        name = f"SubprocVecEnv-worker-{self.index}"
        self.process = context.Process(target=worker_main, args=(setup,), name=name, daemon=daemon)
        with hold_signals() if method == "fork" else contextlib.nullcontext():
            with clear_mpi_env_vars():
                self.process.start()
            worker_pipe.close()
            worker_crash_pipe.close()
            self.started = True

    def end(self) -> tuple[int | None, str]:
        """Kill the process if it still runs, and let go of it; return its exit code and its last words."""
        if not self.started:
            return None, ""
        self.started = False
        if self.process.is_alive():
            self.process.kill()
        self.process.join(CLOSE_SECONDS)
        exit_code, trace = self.process.exitcode, b""
        while self.crash_pipe.poll(0) and (chunk := os.read(self.crash_pipe.fileno(), 1 << 16)):
            trace += chunk
        self.pipe.close()
        self.crash_pipe.close()
        if exit_code is not None:
            self.process.close()
        return exit_code, trace.decode(errors="replace")


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Let Ctrl-C and the like wait a moment: in the middle of a fork Python would drop an exception that the parent's
    handler raises, and the child would die of a signal that it ignores once it is running.

    Masking them would not do, because other threads (of a BLAS, say) would then receive them. Only the main thread may
    set handlers; a fork in another thread is not protected.
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        known = [number for number in PARENTS_SIGNALS if signal.getsignal(number) is not None]  # None: one in C
        before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in known}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def limit_waits(pipe: connection.Connection, seconds: float) -> None:
    """Let a read or write at this end raise BlockingIOError after `seconds`: the other process may be stopped."""
    seconds = min(seconds, 2.0**31)  # as good as for ever
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)
    keep_blocking(pipe)


def end_all(workers: Sequence[Worker]) -> None:
    """Kill all workers that still run."""
    for worker in workers:
        worker.end()


class WorkerPool:
    """The workers of one SubprocVecEnv.

    Args:
        owner: when it is garbage-collected, or this process exits, the workers are killed.
        env_fns: functions that create the environments, dealt to the workers in equal consecutive shares.
        poll: whether parent and workers poll for a moment before they sleep; no use with more workers than cores.
        options: further fields of WorkerSetup.
    """

    shared: SharedBatch | None = None

    def __init__(
        self,
        owner: object,
        env_fns: Sequence[Callable[[], Env]],
        num_workers: int,
        context: str | None,
        daemon: bool,
        step_timeout: float | None,
        poll: bool,
        **options: Any,
    ) -> None:
        bounds = [w * len(env_fns) // num_workers for w in range(num_workers + 1)]
        self.workers = [Worker(w, range(bounds[w], bounds[w + 1])) for w in range(num_workers)]
        self.seeds: list[int | None] = [None] * len(env_fns)
        self.failure: str | None = None  # why nothing but closing is possible any more
        self.acted = False  # before the first step, shared memory holds no actions
        self.step_timeout = step_timeout
        self.process = os.getpid()  # the workers are not a forked child's to command or end
        self._env_fns = [CloudpickleWrapper(env_fn) for env_fn in env_fns]
        self._context = multiprocessing.get_context(context)
        self._daemon = daemon
        self._poll = poll
        self._options = {"poll": poll, **options}
        # Unlike weakref.finalize and atexit, it does nothing in a process forked from this one, and it runs before
        # multiprocessing's own exit function, which would wait for the workers.
        self._end_all = util.Finalize(owner, end_all, (self.workers,), exitpriority=10)

    def start(self) -> list[Any]:
        """Start all workers; return what each tells of its environments: (spaces, metadata, render mode)."""
        for worker in self.workers:
            self._start(worker)
        deadline = self._deadline()
        descriptions, waiting = dict[Worker, Any](), self.workers
        while waiting:  # first come, first served: an error of one must not wait for another that is slow, or hangs
            connection.wait([worker.pipe for worker in waiting], LIVENESS_SECONDS)
            late = time.monotonic() >= deadline
            ready = [worker for worker in waiting if late or worker.pipe.poll(0) or not worker.process.is_alive()]
            descriptions |= {worker: self._constructed(worker, deadline) for worker in ready}
            waiting = [worker for worker in waiting if worker not in ready]
        return [descriptions[worker] for worker in self.workers]

    def _start(self, worker: Worker) -> None:
        others = [other for other in self.workers if other.started and other is not worker]
        env_fns = [self._env_fns[i] for i in worker.env_indices]
        worker.start(self._context, self._daemon, others, env_fns=env_fns, **self._options)
        if self.step_timeout is not None:
            limit_waits(worker.pipe, self.step_timeout)

    def _constructed(self, worker: Worker, deadline: float) -> Any:
        errors, description = self._receive(worker, "construction", deadline)
        if errors:
            raise self._environment_error(errors, "construction")
        return description

    def attach(self, shared: SharedBatch) -> None:
        """Share `shared` with all workers."""
        self.shared = shared
        for worker in self.workers:
            self._attach(worker, shared)

    def _attach(self, worker: Worker, shared: SharedBatch) -> None:
        worker.control = shared.control[worker.index].data
        worker.control[RUNNING] = IDLE
        assert shared.descriptor is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _receive will report it in full
            worker.pipe.send(("attach", shared.arguments))
            reduction.send_handle(worker.pipe, shared.descriptor, worker.process.pid)
        keep_blocking(worker.pipe)
        self._receive(worker, "start", self._deadline())

    def replace(self, error: WorkerError, begin_anew: Callable[[Worker], None]) -> None:
        """Replace the worker whose loss `error` reports by a new one with new environments, and `begin_anew` with it.

        Raises:
            WorkerError: if the worker was lost more than MAX_RESTARTS times without finishing a step in between.
        """
        worker = error.worker
        assert worker is not None
        assert self.shared is not None
        while worker.failures <= MAX_RESTARTS:
            logger.warn("%s\nA new worker takes its place.", error)
            try:
                self._start(worker)
                self._constructed(worker, self._deadline())
                self._attach(worker, self.shared)
                begin_anew(worker)
                return
            except WorkerError as next_error:
                if next_error.worker is None:
                    raise
                error = next_error
        self.failure = f"Gave up after {MAX_RESTARTS} restarts without a finished step. {error}"
        raise WorkerError(self.failure) from error

    # ---- commands and replies ---------------------------------------------------------------------------------

    def request(self, name: str, requests: Requests | None = None, workers: Sequence[Worker] | None = None) -> None:
        """Let workers run the method `name` on their part of `requests`, or step with the shared actions if None."""
        workers = self.workers if workers is None else workers
        if requests is not None:  # pickled before any worker wakes: what cannot be pickled must change nothing
            by_index = dict(requests)
            parts = [[(i, by_index[i]) for i in worker.env_indices if i in by_index] for worker in workers]
            messages = [reduction.ForkingPickler.dumps((name, part)) for part in parts]
        deadline = self._deadline()
        for place, worker in enumerate(workers):
            worker.control[COMMAND] = STEP if requests is None else MESSAGE
            worker.pending, worker.deadline = True, deadline
            worker.go.release()
            if requests is not None:
                try:  # collect() will report what goes wrong in full
                    worker.pipe.send_bytes(messages[place])
                except (BrokenPipeError, ConnectionResetError):
                    pass
                except BlockingIOError:
                    worker.deadline, deadline = -math.inf, self._deadline()  # it hangs; the others' time begins now

    def collect(self, name: str, workers: Sequence[Worker], timeout: float | None = None) -> Results:
        """Wait for the workers' replies to `name`; return their results in the order of the environments.

        Raises:
            multiprocessing.TimeoutError: after `timeout` seconds; then wait again for the rest.
            WorkerError: if environments raised, or for the first worker found dead or hung; then collect the rest.
        """
        patience = math.inf if timeout is None else time.monotonic() + timeout
        for worker in workers:
            if worker.pending:
                self._wait(worker, name, patience, timeout)
                self._take_reply(worker, name)
        errors = [error for worker in workers for error in worker.reply[0]]
        if errors:
            raise self._environment_error(errors, name)
        return [result for worker in workers for result in worker.reply[1]]

    def environment_error(self, name: str, workers: Sequence[Worker]) -> WorkerError | None:
        """Return the report of what environments have raised so far, in workers not yet waited for too, or None."""
        for worker in workers:
            if worker.pending and worker.done.acquire(False):
                with contextlib.suppress(WorkerError):
                    self._take_reply(worker, name)
        # A worker that is still pending holds the reply to an earlier command.
        errors = [error for worker in workers if not worker.pending for error in worker.reply[0]]
        return self._environment_error(errors, name) if errors else None

    def _wait(self, worker: Worker, name: str, patience: float, timeout: float | None) -> None:
        if self._poll and poll(worker.done):
            return
        before = time.monotonic()
        while not worker.done.acquire(True, max(0.0, min(LIVENESS_SECONDS, patience - time.monotonic()))):
            alive = worker.process.is_alive()  # asked first: it may have finished just before it died
            if worker.done.acquire(False):
                return
            now = time.monotonic()
            if now - before > STANDSTILL_SECONDS:  # this process was stopped, by Ctrl-Z say: nobody's time ran
                for other in self.workers:
                    other.deadline += now - before
            before = now
            if not alive or now >= worker.deadline:
                raise self._lost(worker, name, hung=alive)
            if now >= patience:
                raise multiprocessing.TimeoutError(
                    f"The call to `{name}_wait` has timed out after {timeout} second(s)."
                )

    def _take_reply(self, worker: Worker, name: str) -> None:
        worker.pending, worker.reply = False, ([], [])
        if worker.control[REPLY] == PICKLED:
            try:
                message = worker.pipe.recv_bytes()
            except (EOFError, OSError) as error:  # the latter if it died in the middle of a message
                raise self._lost(worker, name, hung=isinstance(error, BlockingIOError)) from None
            try:
                worker.reply = pickle.loads(message)
            except Exception as error:
                first, last = worker.env_indices[0], worker.env_indices[-1]
                self.failure = (
                    f"What environments {first} to {last} returned from {name} cannot be unpickled: {error!r}"
                )
                raise WorkerError(self.failure) from error
        if name == "step":
            worker.failures = 0

    def _receive(self, worker: Worker, name: str, deadline: float) -> Any:
        """Return a message that a worker sends without saying so by its semaphore, as it does while it starts."""
        # Look at the process too: if its environments have forked, its death does not close the pipe.
        while not worker.pipe.poll(max(0.0, min(LIVENESS_SECONDS, deadline - time.monotonic()))):
            alive = worker.process.is_alive()  # asked first: it may have sent something just before it died
            if not worker.pipe.poll(0) and (not alive or time.monotonic() >= deadline):
                raise self._lost(worker, name, hung=alive)
        try:
            return worker.pipe.recv()
        except (EOFError, OSError) as error:  # the latter if it died in the middle of a message
            raise self._lost(worker, name, hung=isinstance(error, BlockingIOError)) from None

    def _deadline(self) -> float:
        return time.monotonic() + (math.inf if self.step_timeout is None else self.step_timeout)

    # ---- failures ---------------------------------------------------------------------------------------------

    def _environment_error(self, errors: list[EnvError], name: str) -> WorkerError:
        """Return the report of exceptions in environments."""
        message = "\n".join(
            f"{error.name} during {name} in {self._describe(error.env_index)}: {error.message}"
            # what many environments have in common is shown once
            + (f"\n\n{error.trace}" if all(error.trace != other.trace for other in errors[:i]) else "")
            for i, error in enumerate(errors)
        )
        if errors[-1].name == "NoState":
            message = f"Environment {errors[-1].env_index}: {errors[-1].message}"
        last = errors[-1]
        module = sys.modules.get(last.module)
        failure = WorkerError.of_kind(getattr(module, last.name, None), message)
        failure.errors = errors
        if name in ("step", "reset"):
            self.failure = message
        return failure

    def _lost(self, worker: Worker, name: str, hung: bool = False) -> WorkerError:
        """Put an end to a worker that died or hung; return the report."""
        pid = worker.process.pid
        running = IDLE if worker.control is None else worker.control[RUNNING]
        if hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # makes its faulthandler write down where it is
            worker.crash_pipe.poll(TRACE_SECONDS)
            time.sleep(LIVENESS_SECONDS)  # for the rest of the trace
        exit_code, trace = worker.end()
        if hung:
            cause = f"did not answer within step_timeout={self.step_timeout} s and was killed"
        elif exit_code is not None and exit_code < 0:
            named = -exit_code in {*signal.Signals}  # most real-time signals have no name
            cause = f"was killed by {signal.Signals(-exit_code).name if named else f'signal {-exit_code}'}"
            cause += " (as the system does when memory runs out)" if exit_code == -signal.SIGKILL else ""
        else:
            cause = f"exited with code {exit_code}"
        first, last = worker.env_indices[0], worker.env_indices[-1]
        where = f"none of its environments {first} to {last} running"
        if name == "construction":  # a worker that begins cannot say yet which; RUNNING may be of its predecessor
            where = f"of one of its environments {first} to {last}"
        elif running != IDLE:
            where = f"in {self._describe(running)}"
        self.failure = f"Worker {worker.index} (process {pid}) {cause} during {name}, {where}.\n{trace}".rstrip()
        error = WorkerError.of_kind(multiprocessing.TimeoutError if hung else None, self.failure)
        error.worker = worker
        worker.pending, worker.reply = False, ([], [])
        worker.failures += 1
        return error

    def _describe(self, env_index: int) -> str:
        text = f"environment {env_index} (seed {self.seeds[env_index]}"
        if self.shared is not None and self.acted:
            text += f", last action {map_tree(self.shared.actions, lambda array: array[env_index].tolist())}"
        return text + ")"

    # ---- the end ----------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End all workers: let environments close for `timeout` (default 2) seconds, or not at all; then kill.

        A worker at work is waited for; one that hangs does not keep the others' environments from closing. In a forked
        child, just let go of what it has inherited.
        """
        if self.shared is not None:
            self.shared.close()
        if os.getpid() != self.process:
            for worker in self.workers:
                if worker.started:
                    worker.pipe.close()
                    worker.crash_pipe.close()
            return
        deadline = time.monotonic() + (CLOSE_SECONDS if timeout is None else timeout)
        waiting = [] if terminate else [worker for worker in self.workers if worker.started]
        for worker in waiting:
            limit_waits(worker.pipe, max(LIVENESS_SECONDS, deadline - time.monotonic()))  # not step_timeout now
        closing: list[Worker] = []
        while waiting:
            for worker in waiting:
                worker.deadline = math.inf  # no longer that of its command
                with contextlib.suppress(WorkerError, multiprocessing.TimeoutError):
                    self.collect("close", [worker], min(LIVENESS_SECONDS, max(0.0, deadline - time.monotonic())))
                if worker.started and not worker.pending:
                    self._ask_to_close(worker)
                    closing.append(worker)
            waiting = [worker for worker in waiting if worker.started and worker.pending]
            if time.monotonic() >= deadline:
                break
        for worker in closing:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._end_all()

    def _ask_to_close(self, worker: Worker) -> None:
        if worker.control is not None:
            worker.control[COMMAND] = MESSAGE
        worker.go.release()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.pipe.send(("close", None))
