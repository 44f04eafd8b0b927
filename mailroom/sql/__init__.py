"""Operations, the runners that execute them on any connection, and the meaning of database errors."""
