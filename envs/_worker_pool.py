"""The parent's side of SubprocVecEnv's workers: start, command, wait, report and end them.

Every wait here has a limit and notices a dead worker; every end of a worker has a reason in words.
"""

from __future__ import annotations

import contextlib
import errno
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, util
from typing import Any

from gymnasium import Env, logger
from gymnasium.vector.utils import CloudpickleWrapper

from envs._shared_memory import InfoLayout, SharedBatch, map_tree
from envs._subproc_worker import COMMAND, MESSAGE, NONE, REPLY, RUNNING, STEP, EnvError, EnvWorker, Requests, poll

LIVENESS_SECONDS = 0.05  # how often a wait looks whether the worker still lives
CLOSE_SECONDS = 2.0  # how long environments may take to close before their worker is killed
ENDING = ("construction", "reset", "step", "restart")  # after an exception in one of these, only `close` is possible
NO_ROOM = {
    errno.ENOSPC: "/dev/shm is full, where each worker needs room for two semaphores: delete what is left over there",
    errno.EMFILE: "there are too few file descriptors for so many workers: raise `ulimit -n`",
}
SIGNALS = {-number: number.name for number in signal.Signals}  # by the exit code of a process that one killed


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
    """One worker as the parent sees it: its process, its pipe and semaphores, and what it still has to answer."""

    process: Any = None
    pipe: connection.Connection
    go: Any
    done: Any

    def __init__(self, index: int, env_indices: range, control: Any) -> None:
        self.index, self.env_indices, self.control = index, env_indices, control
        self.failures = 0  # since the last step it finished
        self.forget_reply()

    def forget_reply(self) -> None:
        self.pending = False
        self.waited = 0.0  # seconds; looks are counted, so that time in which the parent too was stopped is not
        self.errors: list[EnvError] = []
        self.results: list[tuple[int, bytes]] = []  # (environment index, pickled result)

    def end(self) -> int | None:
        """Kill the process and what its environments started if they still run; return its exit code."""
        process, self.process = self.process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # should it be too young to lead a group
        process.join(CLOSE_SECONDS)
        exit_code = process.exitcode
        self.pipe.close()
        if exit_code is not None:
            process.close()
        return exit_code


def end_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.end()


def shorten(text: str, num_lines: int) -> str:
    """Return the text without its middle if it has more lines than that."""
    lines = text.rstrip().splitlines()
    if len(lines) > num_lines:
        head = num_lines // 2
        lines[head : len(lines) - (num_lines - head - 1)] = ["  ..."]
    return "\n".join(lines)


class WorkerPool:
    """The workers of one SubprocVecEnv, `owner`; they are killed when it is garbage-collected or this process exits."""

    def __init__(
        self, owner: Any, env_fns: Sequence[Callable[[], Env]], context: str | None, step_timeout: float | None
    ) -> None:
        num_workers = owner.num_workers
        self._context: Any = multiprocessing.get_context(context)
        self._env_fns = [CloudpickleWrapper(env_fn) for env_fn in env_fns]
        self.step_timeout = math.inf if step_timeout is None else step_timeout
        self._poll = num_workers <= len(os.sched_getaffinity(0))  # before going to sleep; it needs a core for each
        # A Connection only because multiprocessing knows how to hand the descriptor of one to a process.
        memory = (connection.Connection(os.memfd_create("SubprocVecEnv")), len(env_fns), num_workers)
        self._settings = {"memory": memory, "poll": self._poll, "autoreset_mode": owner.autoreset_mode}
        self.shared = SharedBatch(*memory)
        self._spaces: tuple[Any, ...] = ()
        bounds = [w * len(env_fns) // num_workers for w in range(num_workers + 1)]
        controls = [row.data for row in self.shared.control]
        self.workers = [Worker(w, range(bounds[w], bounds[w + 1]), controls[w]) for w in range(num_workers)]
        self.failure: str | None = None  # why nothing but closing is possible any more
        self._process_id = os.getpid()
        # Unlike weakref.finalize and atexit, it does nothing in a process forked from this one, and it runs before
        # multiprocessing's own exit function, which would wait for the workers.
        self._end_all = util.Finalize(owner, end_all, (self.workers,), exitpriority=10)

    # ---- the beginning ----------------------------------------------------------------------------------------------

    def start(self, workers: Sequence[Worker]) -> list[Any]:
        """Start workers; return each environment's spaces, metadata and render mode."""
        for worker in workers:
            try:
                self._start_process(worker)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise OSError(error.errno, f"{NO_ROOM[error.errno]} ({len(self.workers)} workers)") from error
        requests = [(n, None) for worker in workers for n in worker.env_indices]
        return [description for _, description in self.run("construction", requests, workers)]

    def _start_process(self, worker: Worker) -> None:
        worker.control[RUNNING] = NONE
        worker.go, worker.done = self._context.Semaphore(0), self._context.Semaphore(0)
        worker.pipe, its_pipe = self._context.Pipe()
        env_fns: list[Any] = [self._env_fns[n] for n in worker.env_indices]
        channels = {"pipe": its_pipe, "go": worker.go, "done": worker.done}
        env_worker = EnvWorker(worker.index, worker.env_indices, env_fns, **channels, **self._settings)
        name = f"SubprocVecEnv-worker-{worker.index}"
        process = self._context.Process(target=env_worker.main, name=name, daemon=True)
        process.start()
        worker.process = process
        its_pipe.close()
        # A worker that is stopped must not hold up who writes more than the pipe holds, or has read half of a reply.
        limit = struct.pack("ll", math.ceil(min(self.step_timeout, 2**31)), 0)  # seconds, microseconds
        with socket.socket(fileno=os.dup(worker.pipe.fileno())) as pipe:
            pipe.setblocking(True)  # whatever socket.setdefaulttimeout says
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def attach(self, *spaces: Any) -> SharedBatch:
        """Share memory for elements of the observation and the action space with all workers."""
        self._spaces = spaces
        self.shared.add_spaces(*spaces)
        self._tell("attach", spaces, self.workers)
        return self.shared

    def use_info_layout(self, layout: InfoLayout) -> None:
        """Let infos of this layout travel in shared memory from now on."""
        self._tell("use_info_layout", layout, self.workers)
        self.shared.infos.use_layout(layout)

    def restart(self, worker: Worker) -> None:
        """Put a new process with new environments in the place of a lost one."""
        self.start([worker])
        self._tell("attach", self._spaces, [worker])
        self._tell("use_info_layout", self.shared.infos.layout, [worker])

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
        self.failure = f"`{name}` was interrupted."  # by Ctrl-C, say; overwritten if that does not happen
        for place, worker in enumerate(workers):
            worker.forget_reply()
            worker.pending = True
            worker.control[COMMAND] = MESSAGE if messages else STEP
            worker.go.release()
            if messages:
                with contextlib.suppress(OSError):  # it died, or hangs: collect() will report it in full
                    worker.pipe.send_bytes(messages[place])

    def collect(self, name: str, workers: Sequence[Worker], timeout: float | None = None) -> list[tuple[int, Any]]:
        """Wait for the workers' replies to `name`; return their results in the order of the environments. After a
        TimeoutError, or a WorkerError about a lost worker that has been replaced, call it again for the rest."""
        self.failure = f"`{name}` was interrupted."
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        for worker in workers:
            if worker.pending and self._poll and poll(worker.done):
                self._take_reply(worker, name)
        while pending := [worker for worker in workers if worker.pending]:
            if pending[0].done.acquire(True, LIVENESS_SECONDS):
                self._take_reply(pending[0], name)
                continue
            lost: Worker | None = None
            for worker in pending:
                alive = worker.process.is_alive()  # asked first: it may have finished just before it died
                worker.waited += LIVENESS_SECONDS
                if worker.done.acquire(False):
                    self._take_reply(worker, name)
                elif not alive or worker.waited >= self.step_timeout:
                    lost = lost or worker
            if name in ENDING and any(worker.errors for worker in workers):
                break  # what an environment raised tells more than that a worker is lost, and may be why
            if lost is not None:
                raise self._lost(lost, name)
            if time.monotonic() >= deadline:
                text = f"The call to `{name}_wait` has timed out after {timeout} second(s)."
                raise multiprocessing.TimeoutError(text)
        self._raise_errors(name, workers)
        self.failure = None
        return [(n, pickle.loads(result)) for worker in workers for n, result in worker.results]

    def _take_reply(self, worker: Worker, name: str) -> None:
        if worker.control[REPLY] == MESSAGE:
            try:
                worker.errors, worker.results = pickle.loads(worker.pipe.recv_bytes())
            except (EOFError, OSError):
                return  # it died or hangs in the middle of its reply, as further looks at it will tell
        worker.pending = False
        if name == "step":
            worker.failures = 0

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _raise_errors(self, name: str, workers: Sequence[Worker]) -> None:
        """Raise what environments have raised, if any have, in at most 25 lines, the reason first."""
        errors = [error for worker in workers for error in worker.errors]
        if not errors:
            return
        first = errors[0]
        message = first.message
        if first.name != "NoState":
            message = f"{first.name} during {name} in {self._describe(first.env_index, name)}: {shorten(message, 6)}"
            message += f"\n{len(errors) - 1} other environments raised as well." if len(errors) > 1 else ""
            message = f"{message}\n\n{shorten(first.trace, 16)}".rstrip()
        self.failure = message if name in ENDING else None
        if name in ("step", "reset"):  # in AsyncVectorEnv's words
            for error in errors:
                logger.error("Received the following error from Worker-%s - Shutting it down", error.env_index)
                logger.error("%s", error.trace or error.message)
            logger.error("Raising the last exception back to the main process.")
        raise WorkerError.of_kind(getattr(sys.modules.get(first.module), first.name, None), message)

    def _lost(self, worker: Worker, name: str) -> WorkerError:
        """Put an end to a worker that died or hung; return the report."""
        pid, running, hung = worker.process.pid, worker.control[RUNNING], worker.process.is_alive()
        exit_code = worker.end()
        if hung:
            cause = f"did not answer within step_timeout={self.step_timeout} s and was killed"
        elif exit_code in SIGNALS:
            cause = f"was killed by {SIGNALS[exit_code]}"
            cause += " (as the system does when memory runs out)" if exit_code == -signal.SIGKILL else ""
        else:
            cause = f"exited with code {exit_code}"
        where = "none of its environments running" if running == NONE else f"in {self._describe(running, name)}"
        self.failure = f"Worker {worker.index} (process {pid}) {cause} during {name}, {where}."
        error = WorkerError.of_kind(multiprocessing.TimeoutError if hung else None, self.failure)
        error.worker = worker
        worker.forget_reply()
        worker.failures += 1
        return error

    def _describe(self, env_index: int, name: str) -> str:
        if name != "step":
            return f"environment {env_index}"
        action = map_tree(self.shared.actions, lambda array: array[env_index].tolist())
        return f"environment {env_index} (last action {action})"

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End all workers: let environments finish and close for `timeout` seconds, or not at all; then kill."""
        if os.getpid() != self._process_id:
            return  # in a process forked from theirs, which goes on
        self.shared.file.close()
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
