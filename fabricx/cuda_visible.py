"""Which GPUs this process sees as cuda:0, cuda:1, ...: the driver's order, NVML and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .sysfs import Gpu, Reader, number_gpus, pci_address


@dataclass(frozen=True, slots=True)
class Visible:
    """One CUDA device of this process: its GPU, or None with the `text` that named it if that GPU cannot be told."""

    gpu: Gpu | None
    text: str = ""


def add_nvml(nvml: Any, gpus: list[Gpu], r: Reader) -> list[Gpu]:
    """The GPUs with what NVML knows: numbers, UUIDs, names, MIG devices. NVML that fails changes nothing, and is noted.

    Parameters
    ----------
    nvml : the pynvml module or a stand-in with its functions.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        r.note(f"NVML does not start: {e}")
        return gpus
    try:
        told = [_ask(nvml, i, r) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as e:
        r.note(f"NVML: {e}")
        return gpus
    finally:
        nvml.nvmlShutdown()
    found = {g.pci: g for g in gpus}
    known = [t for t in told if t is not None]
    for t in known:
        old = found.get(t.pci, Gpu(t.pci))
        found[t.pci] = replace(t, path=old.path, numa=old.numa)
    return number_gpus(found, [t.pci for t in known])


def _ask(nvml: Any, index: int, r: Reader) -> Gpu | None:
    """What NVML says of one GPU; None, and a note, if it fails: a GPU that fell off the bus hides no other."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as e:
        r.note(f"NVML, GPU {index}: {e}")
        return None
    return Gpu(pci, uuid=uuid, name=name, migs=_migs(nvml, handle))


def _migs(nvml: Any, handle: Any) -> tuple[str, ...]:
    """UUIDs of a GPU's MIG devices; none where MIG is off or not known."""
    found = []
    try:
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return ()
    for i in range(count):
        try:
            found.append(_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))))
        except nvml.NVMLError:  # slots are not filled in order
            continue
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible(gpus: list[Gpu], environ: Mapping[str, str], r: Reader) -> tuple[Visible, ...]:
    """The GPUs of this process in CUDA's order.

    As CUDA reads CUDA_VISIBLE_DEVICES: numbers, UUIDs or unambiguous beginnings of them, or MIG UUIDs; the first entry
    that names nothing ends the list; an empty value hides all.
    """
    ordered = sorted((g for g in gpus if g.index >= 0), key=lambda g: g.index)
    if len({g.name for g in ordered}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        r.note("GPUs of several models: CUDA numbers the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID to be sure")
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return tuple(Visible(g) for g in ordered)
    found: list[Visible] = []
    for entry in (e.strip() for e in text.split(",")):
        one = _named(entry, ordered)
        if one is None or one in found:
            if text.strip() and entry != "-1":
                why = "is named twice" if one else "is no GPU here"
                r.note(f"CUDA_VISIBLE_DEVICES={text}: {entry!r} {why}; the list ends before it")
            break
        if one.gpu is None:
            r.note(f"CUDA_VISIBLE_DEVICES={text}: NVML is needed to tell which GPU has {entry}")
        found.append(one)
    return tuple(found)


def _named(entry: str, gpus: list[Gpu]) -> Visible | None:
    """The device an entry names. A MIG device's GPU is unknown without NVML, unless there is but one."""
    if entry.isascii() and entry.isdecimal():
        return Visible(gpus[int(entry)]) if int(entry) < len(gpus) else None
    if entry.startswith("MIG-GPU-"):  # MIG-GPU-<uuid>/<gpu instance>/<compute instance>, of drivers before 470
        parent = [g for g in gpus if g.uuid == entry[4:].partition("/")[0]]
        return Visible(parent[0], entry) if parent else Visible(None, entry) if _blind(gpus) else None
    if entry.startswith("MIG-"):
        parent = [g for g in gpus if any(m.startswith(entry) for m in g.migs)]
        if len(parent) == 1:
            return Visible(parent[0], entry)
        if not gpus or parent or any(g.migs for g in gpus):
            return None
        return Visible(gpus[0] if len(gpus) == 1 else None, entry)
    if entry.startswith("GPU-"):
        match = [g for g in gpus if g.uuid.startswith(entry)]
        if len(match) == 1:
            return Visible(match[0])
        return Visible(gpus[0] if len(gpus) == 1 else None, entry) if _blind(gpus) else None
    return None


def _blind(gpus: list[Gpu]) -> bool:
    """Whether there are GPUs and the UUID of none is known."""
    return bool(gpus) and not any(g.uuid for g in gpus)
