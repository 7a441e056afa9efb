"""Plug-ins of vLLM that the demo brings along without installing a package.

vLLM finds plug-ins by entry point in every process that it starts, Ray's actors included. So the metadata of a small
distribution is written into a folder that is on the servers' PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

_NAME = "kvferry-demo-plugins"


def write_plugins(folder: Path, entry_points: dict[str, str]) -> Path:
    """Makes `folder` a place on PYTHONPATH where vLLM finds one function per group of entry points.

    Args:
        folder: Holds these plug-ins and nothing else.
        entry_points: `module:function` by group.
    """
    info = folder / f"{_NAME.replace('-', '_')}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n")
    groups = (
        f"[{group}]\nkvferry_demo_{target.rsplit('.', 1)[-1].replace(':', '_')} = {target}\n"
        for group, target in sorted(entry_points.items())
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    return folder
