"""Traffic between devices: the bytes that each collective sends, and the bandwidth of each mesh axis on a cluster.

Every figure is for one device. Collectives are modelled as bandwidth-limited rings: to gather V bytes over n devices, each
device receives V (n-1)/n. Source: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapters on TPUs and on sharded
matrices.
"""

from __future__ import annotations

import itertools
import math

from jaxalign.planner.hardware import Cluster

INNER_TO_OUTER = ("tensor", "context", "fsdp", "data", "pipeline")
"""Mesh axes in the order in which they are assigned axes of the network: nearest neighbours first."""


def gathered(size: float, n: int) -> float:
    """Bytes that each of n devices receives in an all-gather of an array of `size` bytes; a reduce-scatter sends as many."""
    return size * (n - 1) / n


def reduced(size: float, n: int) -> float:
    """Bytes that each device sends in an all-reduce of `size` bytes: a reduce-scatter, then an all-gather."""
    return 2 * gathered(size, n)


def bandwidths(cluster: Cluster, mesh: dict[str, int], slices: int = 1) -> dict[str, float]:
    """Bytes/s that one device receives in a ring over each mesh axis larger than 1; "slices": over the network between slices.

    On a torus, a mesh axis is assigned whole network axes if their sizes multiply to its own. Each gives two links if it wraps
    around, else one. Any other mesh axis has one link. On GPUs, a mesh axis within the devices that NVLink or
    PCIe connects (`Chip.linked`) uses the GPU's own link; a larger axis uses the device's share of the host's network.

    Args:
      cluster: the devices.
      mesh: sizes by axis; the size of data includes the slices.
      slices: the number of slices.
    """
    # (size, links) of each axis of the torus larger than 1. Two chips have one link, whether or not the axis wraps around.
    free = [(size, 2 if closed and size > 2 else 1) for size, closed in zip(cluster.shape, cluster.closed, strict=True)
            if size > 1]
    speeds, inner = {}, 1
    for axis in INNER_TO_OUTER:
        size = mesh[axis] // (slices if axis == "data" else 1)
        if size > 1:
            if cluster.chip.kind == "gpu":
                speeds[axis] = cluster.chip.link if inner * size <= cluster.chip.linked else cluster.far
            else:
                links, free = _take(free, size)
                speeds[axis] = links * cluster.chip.link
            inner *= size
    if slices > 1:
        speeds["slices"] = cluster.far
    return speeds


def _take(free: list[tuple[int, int]], size: int) -> tuple[int, list[tuple[int, int]]]:
    """(links of a mesh axis of this size, the remaining network axes)."""
    for count in range(1, len(free) + 1):
        for some in itertools.combinations(range(len(free)), count):
            if math.prod(free[i][0] for i in some) == size:
                return sum(free[i][1] for i in some), [axis for i, axis in enumerate(free) if i not in some]
    rest, left = size, []
    for length, links in free:  # A part of an axis does not wrap around.
        part = math.gcd(length, rest)
        rest //= part
        if part == 1:
            left.append((length, links))
        elif length > part:
            left.append((length // part, 1))
    return 1, left
