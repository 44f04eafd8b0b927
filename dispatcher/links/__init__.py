"""Links: read what other nodes have stamped for this one, and receive it."""
