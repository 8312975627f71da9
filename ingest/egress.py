"""Where this machine may connect on a user's word: the operator's list of hosts, and which addresses they may have.

Sources and webhook targets are addresses that users give. Without the list none is reached. A host is looked up once, and
what is connected to is the address that was checked, so that a second look-up can lead nowhere else.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import httpx

from storage.errors import UserError

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Sequence[str]]
PORTS = {"http": 80, "https": 443}
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
_NUMERIC = re.compile(r"(?:.*\.)?(?:\d+|0x[0-9a-f]*)")  # what inet_aton takes for an address: 2130706433, 0177.1, 0x7f.1
# Wrappers of an IPv4 address, by where its four bytes begin. Mapped ones are unwrapped before.
_WRAPPED = tuple(
    (ip_network(network), start)
    for network, start in (("2002::/16", 2), ("64:ff9b::/96", 12), ("64:ff9b:1::/48", 12), ("::/96", 12))
)
_TEREDO = ip_network("2001::/32")
_METADATA = frozenset(map(ip_address, ("169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254")))


class HostRefused(UserError):
    """The operator does not allow this address."""

    code = "host_not_allowed"


@dataclass(frozen=True)
class Place:
    """A URL that may be connected to. `addresses` are checked, in the resolver's order."""

    url: httpx.URL
    host: str
    port: int
    addresses: tuple[str, ...] = ()

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.url.scheme, self.host, self.port


def system_addresses(host: str, port: int) -> Sequence[str]:
    """What the system's resolver says. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True)
class AllowedHosts:
    """The operator's list, parsed.

    An entry is a host (`github.com`), all hosts below a domain (`*.corp.example`), an address or a network, each with or
    without `:port`. Without a port only https on 443 is meant; with one, http too. An address that is not public is
    reached only if an entry is that address, or, for private ones, a network that holds it."""

    names: tuple[tuple[str, int | None], ...] = ()
    networks: tuple[tuple[IPv4Network | IPv6Network, int | None], ...] = ()
    resolve: Resolve = system_addresses

    @classmethod
    def parse(cls, text: str, resolve: Resolve = system_addresses) -> AllowedHosts:
        """From entries split by commas. Raises UserError for one that is none of the above."""
        names, networks = [], []
        for entry in filter(None, (each.strip().lower() for each in text.split(","))):
            host, port = _split(entry)
            try:
                networks.append((ip_network(host), port))
            except ValueError:
                if not _NAME.fullmatch(host) or _NUMERIC.fullmatch(host):
                    raise UserError(
                        f"{entry!r} is no allowed host: write a name, *.domain, an address or a network, and :port if need be"
                    ) from None
                names.append((host, port))
        return cls(tuple(names), tuple(networks), resolve)

    def check(self, text: str) -> Place:
        """The place that a URL names, not looked up yet. Raises HostRefused, or UserError for what is no http(s) URL."""
        url = _parsed(text)
        host = url.raw_host.decode("ascii").removesuffix(".")
        port = PORTS[url.scheme] if url.port is None else url.port
        if not any(_fits(url.scheme, port, allowed) for allowed in self._ports_of(host)):
            asked = f"{url.scheme}://{host}:{port}"
            raise HostRefused(f"this server may not connect to {asked}: its operator lists in PREREAD_ALLOWED_HOSTS where it may")
        return Place(url, host, port)

    def locate(self, text: str) -> Place:
        """The place with its addresses, all of which may be connected to. Raises HostRefused, OSError."""
        place = self.check(text)
        found = [_unmapped(ip_address(each.partition("%")[0])) for each in self.resolve(place.host, place.port)]
        if not found:
            raise OSError(f"{place.host} has no address")
        for address in found:
            if not self._may(address, place.port):
                raise HostRefused(f"{place.host} has an address that this server may not connect to")
        return Place(place.url, place.host, place.port, tuple(map(str, found)))

    def _ports_of(self, host: str) -> list[int | None]:
        """The ports of all entries that name the host; None: the usual one."""
        try:
            address = _unmapped(ip_address(host))
        except ValueError:
            return [port for name, port in self.names if _NAME.fullmatch(host) and _matches(name, host)]
        return [port for network, port in self.networks if address in network]

    def _may(self, address: Address, port: int) -> bool:
        if address.is_multicast or address.is_unspecified:
            return False
        named = [network for network, own in self.networks if address in network and own in (None, port)]
        if any(network.num_addresses == 1 for network in named):
            return True
        inner = _inner(address)
        if _is_public(address) and (inner is None or _is_public(inner)):
            return True
        odd = address.is_loopback or address.is_link_local or address in _METADATA or inner is not None
        return bool(named) and not odd


def _split(entry: str) -> tuple[str, int | None]:
    host, port = entry, ""
    if entry.startswith("["):
        host, _, port = entry[1:].partition("]")
        port = port.removeprefix(":")
    elif entry.count(":") == 1:
        host, _, port = entry.partition(":")
    if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"{entry!r} has no port between 1 and 65535")
    return host, int(port) if port else None


def _parsed(text: str) -> httpx.URL:
    """The URL, read as strictly as can be: what two readers could take for two hosts is none."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, TypeError):
        raise UserError("this is no URL") from None
    if url.scheme not in PORTS or not url.raw_host or "\\" in text or any(c.isspace() for c in text):
        raise UserError("a URL here begins with https:// and a host")
    if url.userinfo or "@" in text.split("://", 1)[1].split("/", 1)[0]:
        raise UserError("a URL here holds no user and no password; name a credential instead")
    return url


def _fits(scheme: str, port: int, allowed: int | None) -> bool:
    return (scheme, port) == ("https", 443) if allowed is None else port == allowed


def _matches(name: str, host: str) -> bool:
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _unmapped(address: Address) -> Address:
    return getattr(address, "ipv4_mapped", None) or address


def _is_public(address: Address) -> bool:
    return address.is_global and not address.is_reserved and address not in _METADATA


def _inner(address: Address) -> IPv4Address | None:
    """The IPv4 address that a transition mechanism would lead to."""
    if isinstance(address, IPv4Address):
        return None
    if address in _TEREDO:
        return IPv4Address(bytes(byte ^ 0xFF for byte in address.packed[12:]))
    return next((IPv4Address(address.packed[at : at + 4]) for network, at in _WRAPPED if address in network), None)
