"""Mailroom as an app of Django: `"mailroom.django"` in INSTALLED_APPS.

It brings migrations that make the schema, operations for migrations of your own, checks, and the command
`manage.py mailroom`, which is `mailroom` on a database of Django's settings. The setting `MAILROOM` says which database
and schema: `{"DATABASE": "default", "SCHEMA": "mailroom"}`, each of which may be left out.
"""
