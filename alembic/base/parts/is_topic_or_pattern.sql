-- The same patterns as in mailroom/values/names.py. Of a word that is empty, LIKE thinks as of any other.
        octet_length(topic) <= 200 AND (topic ~ '^([A-Za-z][A-Za-z0-9_-]*|[*])([.]([A-Za-z0-9_-]*|[*]))*$'
                                        OR topic ~ '^([A-Za-z][A-Za-z0-9_.-]*[.])?#$')
