"""What tests share: servers and nodes, drivers, proxies, and how to wait."""
