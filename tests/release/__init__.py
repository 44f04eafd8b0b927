"""What `make release-check` does: all of a release but the upload."""
