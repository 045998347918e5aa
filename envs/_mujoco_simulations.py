"""Many MuJoCo simulations on MuJoCo's own thread pool: the C interface of its batch."""

import ctypes
import os
import weakref
from typing import Any

import mujoco
import mujoco._batch
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_INTEGRATION, _CTRL = int(mujoco.mjtState.mjSTATE_INTEGRATION), int(mujoco.mjtState.mjSTATE_CTRL)
_NO_STAGE, _ALL_STAGES = int(mujoco.mjtStage.mjSTAGE_NONE), int(mujoco.mjtStage.mjSTAGE_ACC)


class _BatchConfig(ctypes.Structure):
    _fields_ = [("num_threads", ctypes.c_int), ("persistent", ctypes.c_bool)]


def _load_mujoco() -> ctypes.CDLL:
    """MuJoCo's C library, through the Python bindings, which are linked with it: so it is the same copy."""
    lib = ctypes.CDLL(mujoco._batch.__file__)
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    signatures: list[tuple[str, Any, list[Any]]] = [
        ("mjb_makeBatch", pointer, [pointer, integer, ctypes.POINTER(_BatchConfig), text, integer]),
        ("mjb_deleteBatch", None, [pointer]),
        ("mjb_state", pointer, [pointer]),
        ("mjb_output", pointer, [pointer, text, pointer, pointer]),
        ("mjb_reset", integer, [pointer, pointer, integer, pointer, integer]),
        ("mjb_forward", integer, [pointer, pointer, integer, integer]),
        ("mjb_step", integer, [pointer, pointer, integer, integer, integer]),
        ("mjb_apply", integer, [pointer, pointer, integer, pointer, pointer, integer]),
        ("mjb_status", ctypes.POINTER(integer), [pointer]),
        ("mjb_error", text, [pointer, integer]),
    ]
    for name, result, arguments in signatures:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


_LIB = _load_mujoco()
_RNE_POST_CONSTRAINT = ctypes.cast(_LIB.mj_rnePostConstraint, ctypes.c_void_p)


def _delete_batch(batch: int, owner: int) -> None:
    # A forked child has the memory but not the threads: to join them there would be to wait for ever.
    if os.getpid() == owner:
        _LIB.mjb_deleteBatch(batch)


class Simulations:
    """`num` simulations of one model on a thread pool: MuJoCo's batch through its C interface.

    `mujoco.batch.Batch` wraps the same engine, but not `mjb_apply`, which Gymnasium's contact forces need.
    The batch is persistent (one MjData each): those forces are computed from what the last substep left.

    Attributes:
        state: (num, size of mjSTATE_INTEGRATION) float64, live: a write counts from the next call on.
        motion, qpos, qvel, ctrl: views of its columns; `motion` is qpos and qvel side by side.
    """

    def __init__(self, model: mujoco.MjModel, num: int, num_threads: int) -> None:
        reason = ctypes.create_string_buffer(1000)
        config = _BatchConfig(num_threads, True)
        self._batch = _LIB.mjb_makeBatch(model._address, num, config, reason, len(reason))
        if not self._batch:
            raise RuntimeError(f"MuJoCo could not make {num} simulations: {reason.value.decode()}")
        self.close = weakref.finalize(self, _delete_batch, self._batch, os.getpid())
        self.num = num
        self._template = mujoco.MjData(model)
        self.state = self._view(_LIB.mjb_state(self._batch), (mujoco.mj_stateSize(model, _INTEGRATION),))
        # The components lie in the order of their bits: time, qpos, qvel, act, ...
        ctrl = mujoco.mj_stateSize(model, _INTEGRATION & (_CTRL - 1))
        self.motion = self.state[:, 1 : 1 + model.nq + model.nv]
        self.qpos, self.qvel = self.motion[:, : model.nq], self.motion[:, model.nq :]
        self.ctrl = self.state[:, ctrl : ctrl + model.nu]

    def __reduce__(self) -> Any:
        raise TypeError(
            "Simulations live in C memory and cannot be copied or pickled: use get_state() and set_state()."
        )

    def _view(self, address: int, shape: tuple[int, ...]) -> Array:
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_double))
        return np.ctypeslib.as_array(pointer, (self.num, *shape))

    def field(self, name: str) -> Array:
        """(num, ...) live array of a derived MjData field, which every call copies out: only for reading."""
        address = _LIB.mjb_output(self._batch, name.encode(), None, None)
        return self._view(address, getattr(self._template, name).shape)

    def step(self, num_substeps: int, ids: Array | None = None) -> None:
        """`num_substeps` times mj_step for the simulations `ids` (sorted int32; None: all)."""
        self._check(_LIB.mjb_step(self._batch, *self._ids(ids), num_substeps, _NO_STAGE))

    def compute_contact_forces(self, ids: Array | None = None) -> None:
        """Fill `cfrc_ext` from the last substep with mj_rnePostConstraint, as Gymnasium does after each step.

        That function takes the first two of the four arguments mjb_apply gives. mjb_apply does not copy
        fields out; a forward pass of no stages does, and computes nothing.
        """
        self._check(_LIB.mjb_apply(self._batch, *self._ids(ids), _RNE_POST_CONSTRAINT, None, 0))
        self._check(_LIB.mjb_forward(self._batch, *self._ids(ids), _NO_STAGE))

    def reset(self, ids: Array) -> None:
        """mj_resetData, computing nothing."""
        self._check(_LIB.mjb_reset(self._batch, *self._ids(ids), None, _NO_STAGE))

    def forward(self, ids: Array) -> None:
        """mj_forward."""
        self._check(_LIB.mjb_forward(self._batch, *self._ids(ids), _ALL_STAGES))

    def _ids(self, ids: Array | None) -> tuple[int | None, int]:
        return (None, self.num) if ids is None else (ids.ctypes.data, len(ids))

    def _check(self, num_failed: int) -> None:
        if num_failed:
            status = _LIB.mjb_status(self._batch)
            first = next(i for i in range(self.num) if status[i])
            reason = " ".join(_LIB.mjb_error(self._batch, first).decode().split())
            raise RuntimeError(f"MuJoCo failed in {num_failed} of {self.num} simulations, at number {first}: {reason}")
