"""TRL's AsyncGRPO on a Headgate fleet: implements TRL's `WeightTransferProtocol`.

    trainer = AsyncGRPOTrainer(
        model=folder,
        reward_funcs=reward,
        train_dataset=prompts,
        args=AsyncGRPOConfig(vllm_server_base_url=url),
        weight_transfer=HeadgateWeightTransfer(url),
    )

Each update is all or nothing: every engine verifies names, shapes and dtypes before the first byte is written, and a
refused update raises in the trainer. Needs nothing of TRL or vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from headgate.client import TIMEOUT_S, Fleet
from headgate.protocol.command import Backend, BroadcastSource
from headgate.weights import publish, send_weights, share

Tensors = Mapping[str, torch.Tensor]


class HeadgateWeightTransfer:
    """Pauses the fleet, sends weights, resumes it. Requests in flight are kept and continue with the new weights.

    Without `init_method`, the engines are on the trainer's host: weights on a GPU are shared by handle, others travel
    through shared memory. With `init_method`, for example `tcp://10.0.0.1:29500`, they are broadcast over a process
    group in which the trainer is rank 0.
    """

    def __init__(
        self,
        url: str,
        admin_key: str | None = None,
        *,
        init_method: str | None = None,
        backend: Backend = "gloo",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._fleet = Fleet(url, admin_key)
        self._init_method, self._backend, self._timeout_s = init_method, backend, timeout_s

    @property
    def version(self) -> int:
        """The version of the weights that the fleet serves; it grows by one with each update."""
        return self._fleet.state().weight_version

    def init_weight_transfer(self) -> None:
        """Checks that the fleet can be reached and controlled with this key."""
        self._fleet.state()

    def pause(self) -> None:
        self._fleet.pause("freeze", new_requests="queue")

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in iterator}
        if self._init_method is not None:
            self._broadcast(tensors, self._init_method)
        elif all(tensor.is_cuda for tensor in tensors.values()):
            self._share(tensors)
        else:
            self._publish({name: tensor.cpu() for name, tensor in tensors.items()})

    def resume(self) -> None:
        self._fleet.resume()

    def destroy(self) -> None:
        """Nothing to release: every update releases what it has taken."""

    def _publish(self, tensors: Tensors) -> None:
        with publish(tensors) as files:
            self._fleet.update_weights(files, timeout_s=self._timeout_s)

    def _share(self, tensors: Tensors) -> None:
        with share(tensors) as shared:
            self._fleet.update_weights(shared, timeout_s=self._timeout_s)

    def _broadcast(self, tensors: Tensors, init_method: str) -> None:
        world_size = 1 + len(self._fleet.state().engines)
        source = BroadcastSource(init_method, world_size, timeout_s=self._timeout_s, backend=self._backend)
        with ThreadPoolExecutor(1) as pool:
            update = pool.submit(self._fleet.update_weights, source, timeout_s=self._timeout_s)
            try:
                send_weights(tensors, init_method, world_size, timeout_s=self._timeout_s, backend=self._backend)
            finally:
                update.result()  # its refusal says more than the broken group
