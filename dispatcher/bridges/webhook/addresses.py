"""Which addresses are the internet's: a table of our own, since Python's has other aims, and is as old as Python is.

An address is public only if nothing below says otherwise. So IPv6 begins with what is given out to the world, and where
an address stands for an IPv4 address, that one decides, or none of its kind is public: a receiver needs none of them.
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# Of https://www.iana.org/assignments/iana-ipv4-special-registry all, also what is reachable but is no host: relays.
SPECIAL_IPV4 = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
)  # fmt: skip
# Addresses that look like the internet's, and which a cloud answers within each customer's network.
CLOUDS = (
    # Azure: metadata, names and health. https://learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16
    "168.63.129.16/32",
    # Google: its services from within, private and restricted.googleapis.com (two ranges /30 of the first) and direct
    # connectivity. https://cloud.google.com/vpc/docs/configure-private-google-access
    "199.36.153.0/24", "34.126.0.0/18",
    # IBM: its services, and endpoints of services, from within; a VPC reserves both. https://cloud.ibm.com/apidocs/vpc
    "161.26.0.0/16", "166.8.0.0/14",
)  # fmt: skip
GLOBAL_IPV6 = IPv6Network("2000::/3")
# Of https://www.iana.org/assignments/iana-ipv6-special-registry what lies within that.
SPECIAL_IPV6 = (
    "2001::/23",  # protocols: Teredo, which stands for IPv4, benchmarks, ORCHID
    "2001:db8::/32", "3fff::/20",  # documentation
    "2002::/16",  # 6to4, which stands for IPv4
    "2620:4f:8000::/48",
    # Google: its services from within, as above.
    "2600:2d00:2:1000::/56", "2600:2d00:2:2000::/56", "2001:4860:8040::/42",
)  # fmt: skip
# What a network without IPv4 resolves public names to (RFC 6052), and how programs write IPv4: those four bytes decide.
AS_IPV4 = (IPv6Network("64:ff9b::/96"), IPv6Network("::ffff:0:0/96"))
# An interface of ISATAP: in any network, its last four bytes are a machine beside it.
ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")

NOT_PUBLIC_IPV4 = tuple(map(IPv4Network, SPECIAL_IPV4 + CLOUDS))
NOT_PUBLIC_IPV6 = tuple(map(IPv6Network, SPECIAL_IPV6))


def is_public(text: str) -> bool:
    """Return whether an address is one of the internet's."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if any(address in network for network in AS_IPV4):
            address = IPv4Address(address.packed[12:])
        else:
            is_special = any(address in network for network in NOT_PUBLIC_IPV6) or address.packed[8:12] in ISATAP
            return address in GLOBAL_IPV6 and not is_special
    return not any(address in network for network in NOT_PUBLIC_IPV4)
