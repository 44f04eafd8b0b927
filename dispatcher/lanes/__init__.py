"""What every lane of a daemon needs: its sessions, its lease, and what wakes it."""
