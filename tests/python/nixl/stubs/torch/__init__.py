"""Stands for torch, which NIXL's Python imports before 1.5 and needs for tensors only; the tests pass addresses."""


class Tensor:
    """No object is one."""
