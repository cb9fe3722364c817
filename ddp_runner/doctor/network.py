"""What is to be said of this machine's network: its interfaces, its name, what gloo and NCCL take.

Torch-free.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from ddp_runner.doctor.finding import Finding, ok, problem, warning
from ddp_runner.host.network import Interface

MOST_SHOWN = 6


def show(found: Sequence[Interface]) -> Iterator[Finding]:
    """Yield the interfaces that have an address."""
    useful = [one for one in found if one.address is not None and not one.is_loopback]
    for one in useful[:MOST_SHOWN]:
        parts = [f"{one.name} {one.address}", f"MTU {one.mtu}"]
        if one.speed_mbit_s:
            parts.append(f"{one.speed_mbit_s / 1000:g} Gbit/s")
        if one.is_up:
            yield ok("interface", ", ".join(parts))
        else:
            advice = f"bring it up: ip link set {one.name} up"
            yield warning("interface", ", ".join([*parts, "down"]), advice)
    if len(useful) > MOST_SHOWN:
        yield ok("interface", f"and {len(useful) - MOST_SHOWN} more")
    if found and not useful:
        yield ok("interface", "loopback only: this machine can work alone")


def own_name(name: str, address: str | None, found: Sequence[Interface]) -> Iterator[Finding]:
    """Yield whether other machines could reach this one by the address of its own name.

    gloo listens at that address, unless GLOO_SOCKET_IFNAME names an interface.
    """
    outer = [one.name for one in found if one.address and not one.is_loopback and one.is_up]
    fix = f"export GLOO_SOCKET_IFNAME={outer[0]}" if outer else "connect it to a network"
    known = {one.address: one.name for one in found}
    if address is None:
        yield warning(
            "host name",
            f"{name} does not resolve, so gloo takes loopback and no other machine can join",
            f"add it to /etc/hosts, or {fix}",
        )
    elif ipaddress.ip_address(address).is_loopback:
        yield warning(
            "host name",
            f"{name} is {address}, which other machines cannot reach",
            f"correct /etc/hosts (Debian writes 127.0.1.1), or {fix}",
        )
    elif found and address not in known:
        yield warning(
            "host name",
            f"{name} is {address}, which no interface here has",
            f"correct it, or {fix}",
        )
    else:
        yield ok("host name", f"{name} is {address}" + (f" ({known[address]})" if known else ""))


def chosen(
    environ: Mapping[str, str], address: str | None, found: Sequence[Interface], *, has_gpus: bool
) -> Iterator[Finding]:
    """Yield which interface each backend takes between machines; NCCL's only if there are GPUs.

    NCCL's rule: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    by_name = {one.name: one for one in found}
    if asked := environ.get("GLOO_SOCKET_IFNAME"):
        bad = [
            name
            for name in asked.split(",")
            if found and (name not in by_name or by_name[name].address is None)
        ]
        if bad:
            yield _unusable("gloo", "GLOO_SOCKET_IFNAME", bad[0], found)
        else:
            yield ok("gloo takes", f"{asked}, by GLOO_SOCKET_IFNAME")
    else:
        names = [one.name for one in found if one.address == address]
        yield ok("gloo takes", f"{names[0] if names else 'loopback'}, by the host name")
    if not has_gpus:
        return
    candidates = [one for one in found if one.address is not None and one.is_up]
    if asked := environ.get("NCCL_SOCKET_IFNAME"):
        candidates = [one for one in candidates if _is_asked(one.name, asked)]
        if found and not candidates:
            yield _unusable("NCCL", "NCCL_SOCKET_IFNAME", asked, found)
            return
    else:
        outer = [one for one in candidates if not one.name.startswith(("lo", "docker"))]
        candidates = [one for one in outer if one.name.startswith("ib")] or outer
    if candidates:
        yield ok("NCCL takes", ", ".join(one.name for one in candidates))


def _unusable(library: str, variable: str, name: str, found: Sequence[Interface]) -> Finding:
    names = ", ".join(one.name for one in found if one.address is not None)
    return problem(
        f"{library} takes",
        f"{variable} names {name}, which has no address here",
        f"set it to one of {names}, or unset it",
    )


def _is_asked(name: str, asked: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME means an interface: prefixes; = is exact, ^ excludes."""
    is_excluding, words = asked.startswith("^"), asked.lstrip("^")
    is_exact, words = words.startswith("="), words.lstrip("=")
    fits = any(name == one if is_exact else name.startswith(one) for one in words.split(","))
    return fits != is_excluding
