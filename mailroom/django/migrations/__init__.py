"""The schema of a node, a migration for each release that changes it."""
