"""A delivery: from the outbox, by the floor and the route, into inboxes."""
