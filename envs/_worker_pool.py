"""The parent's side of SubprocVecEnv's workers: start, command, wait, report, replace and end them.

Every wait here has a limit and notices a dead worker; every end of a worker has a reason in words.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
from multiprocessing import connection, util
from typing import Any

from gymnasium import Env, logger
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import CloudpickleWrapper, clear_mpi_env_vars

from envs import _subproc_worker as protocol
from envs._shared_memory import InfoLayout, SharedBatch, anonymous_file, map_control, map_tree
from envs._subproc_worker import COMMAND, MESSAGE, NONE, REPLY, RUNNING, STEP, EnvError, EnvWorker, Requests, poll

LIVENESS_SECONDS = 0.05  # how often a wait looks whether the worker still lives
STANDSTILL_SECONDS = 1.0  # between two looks: then this process itself did not run
TRACE_SECONDS = 0.5  # how long a hung worker is given to write down where it is
ERROR_SECONDS = 1.0  # how long other workers are waited for once an environment has raised
CLOSE_SECONDS = 2.0  # how long environments may take to close before their worker is killed
MAX_RESTARTS = 3  # of one worker, without a step finished in between
ENDING = ("construction", "reset", "step")  # after an exception in one of these, only `close` is possible
NO_ROOM = {
    errno.ENOSPC: "/dev/shm is full, where each worker needs room for two semaphores: delete what is left over there",
    errno.EMFILE: "there are too few file descriptors for so many workers: raise `ulimit -n`",
}


class WorkerError(RuntimeError):
    """A worker died or hung, or an environment in it raised; then it is of that exception's type as well."""

    worker: Worker | None = None  # that is gone

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

    def __init__(self, index: int, env_indices: range, control: Any) -> None:
        self.index, self.env_indices, self.control = index, env_indices, control
        self.process: Any = None
        self.failures = 0  # since the last step it finished
        self.deadline = math.inf
        self.forget_reply()

    def forget_reply(self) -> None:
        self.pending = False
        self.errors: list[EnvError] = []
        self.results: protocol.Results = []

    def start(self, context: Any, daemon: bool, step_timeout: float | None, **settings: Any) -> None:
        self.forget_reply()
        self.control[RUNNING] = NONE
        self.go, self.done = context.Semaphore(0), context.Semaphore(0)
        self.pipe, its_pipe = context.Pipe()
        self.crash_pipe, its_crash_pipe = context.Pipe(duplex=False)
        channels = {"pipe": its_pipe, "go": self.go, "done": self.done, "crash_pipe": its_crash_pipe}
        env_worker = EnvWorker(self.index, self.env_indices, **channels, **settings)
        process = context.Process(target=env_worker.main, name=f"SubprocVecEnv-worker-{self.index}", daemon=daemon)
        with hold_signals(), clear_mpi_env_vars():
            process.start()
            self.process = process
        its_pipe.close()
        its_crash_pipe.close()
        if step_timeout is not None:
            limit_waits(self.pipe, step_timeout)

    def end(self) -> tuple[int | None, str]:
        """Kill the process if it still runs, and let go of it; return its exit code and its last words."""
        process, self.process = self.process, None
        if process is None:
            return None, ""
        process.kill()
        process.join(CLOSE_SECONDS)
        exit_code, trace = process.exitcode, b""
        while self.crash_pipe.poll(0) and (chunk := os.read(self.crash_pipe.fileno(), 1 << 16)):
            trace += chunk
        self.pipe.close()
        self.crash_pipe.close()
        if exit_code is not None:
            process.close()
        return exit_code, trace.decode(errors="replace")


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Let Ctrl-C and the like wait a moment: in the middle of a fork Python would drop an exception that the parent's
    handler raises, and the child would die of a signal that it ignores once it is running."""
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in protocol.PARENTS_SIGNALS:
            before[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for received_number in received:
            signal.raise_signal(received_number)


def limit_waits(pipe: connection.Connection, seconds: float) -> None:
    """Let a read or write at this end raise BlockingIOError after `seconds`: the other process may be stopped."""
    seconds = min(seconds, 2.0**31)  # as good as for ever
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        # Not through a socket object, which would make the pipe impatient if the program has a default timeout.
        ctypes.CDLL(None).setsockopt(pipe.fileno(), socket.SOL_SOCKET, option, limit, len(limit))


def shorten(text: str, num_lines: int) -> str:
    """Return the text without its middle if it has more lines than that."""
    lines = text.rstrip().splitlines()
    if len(lines) > num_lines:
        head = num_lines // 2
        lines[head : len(lines) - (num_lines - head - 1)] = ["  ..."]
    return "\n".join(lines)


def end_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.end()


class WorkerPool:
    """The workers of one SubprocVecEnv, `owner`; they are killed when it is garbage-collected or this process exits."""

    def __init__(
        self,
        owner: object,
        env_fns: Sequence[Callable[[], Env]],
        num_workers: int,
        autoreset_mode: AutoresetMode,
        context: str | None,
        daemon: bool,
        step_timeout: float | None,
    ) -> None:
        self._context = multiprocessing.get_context(context)
        self._env_fns = [CloudpickleWrapper(env_fn) for env_fn in env_fns]
        self._daemon, self.step_timeout = daemon, step_timeout
        self._poll = num_workers <= len(os.sched_getaffinity(0))  # before going to sleep; it needs a core for each
        self.memory = anonymous_file()
        self._settings = {
            "num_workers": num_workers, "memory": self.memory, "poll": self._poll, "autoreset_mode": autoreset_mode
        }  # fmt: skip
        control = map_control(self.memory, num_workers)
        bounds = [w * len(env_fns) // num_workers for w in range(num_workers + 1)]
        self.workers = [Worker(w, range(bounds[w], bounds[w + 1]), control[w].data) for w in range(num_workers)]
        self.shared: SharedBatch | None = None
        self._spaces: tuple[Any, ...] = ()
        self.seeds: list[int | None] = [None] * len(env_fns)
        self.failure: str | None = None  # why nothing but closing is possible any more
        self.acted = False  # before the first step, shared memory holds no actions
        self.process = os.getpid()  # the workers are not a forked child's to command or end
        # Unlike weakref.finalize and atexit, it does nothing in a process forked from this one, and it runs before
        # multiprocessing's own exit function, which would wait for the workers.
        self._end_all = util.Finalize(owner, end_all, (self.workers,), exitpriority=10)

    # ---- the beginning ----------------------------------------------------------------------------------------------

    def start(self, workers: Sequence[Worker]) -> list[Any]:
        """Start workers; return each environment's spaces, metadata and render mode."""
        for worker in workers:
            env_fns = [self._env_fns[n] for n in worker.env_indices]
            try:
                worker.start(self._context, self._daemon, self.step_timeout, env_fns=env_fns, **self._settings)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise OSError(error.errno, f"{NO_ROOM[error.errno]} ({len(self.workers)} workers)") from error
        requests = [(n, None) for worker in workers for n in worker.env_indices]
        return [description for _, description in self.run("construction", requests, workers)]

    def attach(self, *spaces: Any) -> SharedBatch:
        """Share memory for elements of the observation and the action space with all workers."""
        self._spaces = (*spaces, len(self._env_fns), len(self.workers))
        self.shared = SharedBatch(self.memory, *self._spaces)
        self._tell("attach", self._spaces, self.workers)
        return self.shared

    def use_info_layout(self, layout: InfoLayout) -> None:
        """Let infos of this layout travel in shared memory from now on."""
        assert self.shared is not None
        self._tell("use_info_layout", layout, self.workers)
        self.shared.infos.use_layout(layout)

    def replace(self, error: WorkerError, begin_anew: Callable[[Worker], None]) -> None:
        """Put a new worker with new environments in place of the one whose loss `error` reports, and `begin_anew` with
        it. Give up if it was lost more than MAX_RESTARTS times without finishing a step in between."""
        worker = error.worker
        assert worker is not None
        assert self.shared is not None
        while worker.failures <= MAX_RESTARTS:
            logger.warn("%s\nA new worker takes its place.", error)
            try:
                self.start([worker])
                self._tell("attach", self._spaces, [worker])
                self._tell("use_info_layout", self.shared.infos.layout, [worker])
                begin_anew(worker)
                self.failure = None
                return
            except WorkerError as next_error:
                if next_error.worker is None:
                    raise
                error = next_error
        self.failure = f"Gave up after {MAX_RESTARTS} restarts without a finished step. {error}"
        raise WorkerError(self.failure) from error

    # ---- commands and replies ---------------------------------------------------------------------------------------

    def run(self, name: str, requests: Requests, workers: Sequence[Worker]) -> list[tuple[int, Any]]:
        self.request(name, requests, workers)
        return self.collect(name, workers)

    def _tell(self, name: str, arguments: Any, workers: Sequence[Worker]) -> None:
        self.run(name, [(worker.env_indices[0], arguments) for worker in workers], workers)

    def request(self, name: str, requests: Requests | None, workers: Sequence[Worker]) -> None:
        """Let workers run the method `name` on their part of `requests`, or step with the shared actions if None."""
        messages: list[bytes] = []
        if requests is not None:  # pickled before any worker wakes: what cannot be pickled must change nothing
            by_index = dict(requests)
            parts = [[(n, by_index[n]) for n in worker.env_indices if n in by_index] for worker in workers]
            messages = [pickle.dumps((name, part)) for part in parts]
        deadline = self._deadline()
        try:
            for place, worker in enumerate(workers):
                worker.forget_reply()
                worker.control[COMMAND] = MESSAGE if messages else STEP
                worker.pending, worker.deadline = True, deadline
                worker.go.release()
                if messages:
                    try:
                        worker.pipe.send_bytes(messages[place])
                    except (BrokenPipeError, ConnectionResetError):
                        pass  # collect() will report it in full
                    except BlockingIOError:
                        worker.deadline, deadline = -math.inf, self._deadline()  # it hangs; others' time begins now
        except BaseException as error:
            self._interrupted(name, error)
            raise

    def collect(self, name: str, workers: Sequence[Worker], timeout: float | None = None) -> list[tuple[int, Any]]:
        """Wait for the workers' replies to `name`; return their results in the order of the environments.

        After a TimeoutError, which comes after `timeout` seconds, and after a WorkerError about a lost worker that has
        been replaced, call it again for the rest.
        """
        try:
            for worker in workers:
                if worker.pending and self._poll and poll(worker.done):
                    self._take_reply(worker, name)
            if any(worker.pending for worker in workers):
                self._wait_for_the_rest(name, workers, timeout)
            self._raise_errors(name, workers)
            return [(n, pickle.loads(result)) for worker in workers for n, result in worker.results]
        except (WorkerError, multiprocessing.TimeoutError):
            raise
        except BaseException as error:
            self._interrupted(name, error)
            raise

    def _interrupted(self, name: str, error: BaseException) -> None:
        """After Ctrl-C, say, nobody knows which workers have begun, or answered: so only `close` is possible."""
        self.failure = f"`{name}` was interrupted by {error!r}."

    def _wait_for_the_rest(self, name: str, workers: Sequence[Worker], timeout: float | None) -> None:
        start = last_look = time.monotonic()
        error_seen = math.inf
        for worker in workers:
            while worker.pending and time.monotonic() < error_seen + ERROR_SECONDS:
                if worker.done.acquire(True, LIVENESS_SECONDS):
                    self._take_reply(worker, name)
                    continue
                now = time.monotonic()
                if now - last_look > STANDSTILL_SECONDS:  # by Ctrl-Z, say: nobody's time ran
                    for other in workers:
                        other.deadline += now - last_look
                last_look = now
                self._look_around(name, workers, now)
                if name in ENDING and any(other.errors for other in workers):
                    error_seen = min(error_seen, now)
                elif timeout is not None and now >= start + timeout:
                    text = f"The call to `{name}_wait` has timed out after {timeout} second(s)."
                    raise multiprocessing.TimeoutError(text)

    def _look_around(self, name: str, workers: Sequence[Worker], now: float) -> None:
        """Take the replies that are there. Raise if a worker is found dead or hung; what an environment has raised
        tells more, and may be why."""
        for worker in workers:
            if not worker.pending:
                continue
            alive = worker.process.is_alive()  # asked first: it may have finished just before it died
            if worker.done.acquire(False):
                self._take_reply(worker, name)
            elif not alive or now >= worker.deadline:
                lost = self._lost(worker, name, hung=alive)
                for other in workers:
                    if other.pending and other.done.acquire(False):
                        self._take_reply(other, name)
                self._raise_errors(name, workers, lost)
                raise lost

    def _take_reply(self, worker: Worker, name: str) -> None:
        worker.pending = False
        if worker.control[REPLY] == MESSAGE:
            try:
                worker.errors, worker.results = pickle.loads(worker.pipe.recv_bytes())
            except (EOFError, OSError) as error:  # the latter if it died in the middle of a message
                raise self._lost(worker, name, hung=isinstance(error, BlockingIOError)) from None
        if name == "step":
            worker.failures = 0

    def _deadline(self) -> float:
        return time.monotonic() + (math.inf if self.step_timeout is None else self.step_timeout)

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _raise_errors(self, name: str, workers: Sequence[Worker], cause: WorkerError | None = None) -> None:
        """Raise what environments have raised, if any have, in at most 25 lines, the reason first."""
        errors = [error for worker in workers for error in worker.errors]
        if not errors:
            return
        first = errors[0]
        if first.name == "NoState":
            message = first.message
        else:
            reasons = [
                f"{e.name} during {name} in {self._describe(e.env_index)}: {shorten(e.message, 4)}" for e in errors
            ]
            message = "\n\n".join([shorten("\n".join(reasons), 8), shorten(first.trace, 16)]).rstrip()
        if name in ENDING:
            self.failure = message
        if name in ("step", "reset"):  # as AsyncVectorEnv does; the workers concerned have closed their environments
            for error in errors:
                logger.error("Received the following error from Worker-%s - Shutting it down", error.env_index)
                logger.error("%s", error.trace or error.message)
            logger.error("Raising the last exception back to the main process.")
        raise WorkerError.of_kind(getattr(sys.modules.get(first.module), first.name, None), message) from cause

    def _lost(self, worker: Worker, name: str, hung: bool = False) -> WorkerError:
        """Put an end to a worker that died or hung; return the report."""
        pid, running = worker.process.pid, worker.control[RUNNING]
        if hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # makes its faulthandler write down where it is
            worker.crash_pipe.poll(TRACE_SECONDS)
            time.sleep(LIVENESS_SECONDS)  # for the rest of the trace
        exit_code, trace = worker.end()
        trace = trace.partition(f'  File "{protocol.__file__}"')[0]  # the environment's frames come first, then ours
        if hung:
            cause = f"did not answer within step_timeout={self.step_timeout} s and was killed"
        elif exit_code is not None and exit_code < 0:
            named = -exit_code in {*signal.Signals}  # most real-time signals have no name
            cause = f"was killed by {signal.Signals(-exit_code).name if named else f'signal {-exit_code}'}"
            cause += " (as the system does when memory runs out)" if exit_code == -signal.SIGKILL else ""
        else:
            cause = f"exited with code {exit_code}"
        where = f"none of its environments {worker.env_indices[0]} to {worker.env_indices[-1]} running"
        if running != NONE:
            where = f"in {self._describe(running)}"
        message = f"Worker {worker.index} (process {pid}) {cause} during {name}, {where}.\n{shorten(trace, 20)}"
        self.failure = message.rstrip()
        error = WorkerError.of_kind(multiprocessing.TimeoutError if hung else None, self.failure)
        error.worker = worker
        worker.forget_reply()
        worker.failures += 1
        return error

    def _describe(self, env_index: int) -> str:
        text = f"environment {env_index} (seed {self.seeds[env_index]}"
        if self.shared is not None and self.acted:
            text += f", last action {map_tree(self.shared.actions, lambda array: array[env_index].tolist())}"
        return text + ")"

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End all workers: let environments finish and close for `timeout` seconds, or not at all; then kill."""
        self.memory.close()
        if os.getpid() != self.process:
            return
        deadline = time.monotonic() + (CLOSE_SECONDS if timeout is None else timeout)
        running = [] if terminate else [worker for worker in self.workers if worker.process is not None]
        for worker in running:
            os.set_blocking(worker.pipe.fileno(), False)  # a request that was interrupted may still fill the pipe
            with contextlib.suppress(OSError):
                worker.pipe.send(("close", None))
            worker.control[COMMAND] = MESSAGE
            worker.go.release()
        for worker in running:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._end_all()
