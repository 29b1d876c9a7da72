"""The device that a model works on."""

import torch

from hf_vit.errors import UserError


def pick_device(device: str | None = None) -> torch.device:
    """The asked device if torch can use it here; by default CUDA where there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place).item()  # which the device "meta" cannot
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device {device!r} cannot be used here ({reason}); try --device cpu") from error
    return place
